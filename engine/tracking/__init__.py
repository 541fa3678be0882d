"""
Tracking: the log of a run, the trackers that it is sent to, and the metrics of other programs.

    log             log.jsonl: its rows, and the class that writes them
    runs            Run: reads the log and the settings of a run
    tracker         Tracker: sends a row to log.jsonl and to all trackers
    anomalies       metrics that deserve a warning
    destination     the class that all trackers derive from
    trackers/       the trackers, one file each
    background      runs a tracker in a thread; process: runs it in its own process
    wandb_client    settings, files and server of the W&B client; sync: upload what W&B lacks
    follow          run another program; console: find the metrics in its output
    redact, source, network    secrets; git commit and diff; whether a server can be reached

May import configurator and these modules of engine: files, ops, spans, streams, system, untrusted,
advice.
"""
