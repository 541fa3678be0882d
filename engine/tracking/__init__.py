"""
Tracking: the log of a run, the trackers that it is sent to, and the metrics of other programs.

    log             log.jsonl: its rows, and the class that writes them
    runs            Run: the log and the settings of a run, as they are read
    tracker         Tracker: sends a row to log.jsonl and to all trackers
    anomalies       metrics that deserve a warning
    destination     the class that all trackers derive from
    trackers/       the trackers, a file each
    background      a tracker in a thread; process: in a process of its own
    wandb_client    settings, files and server of the W&B client; sync: upload what W&B lacks
    follow          run another program; console: the metrics in what it prints
    redact, source, network    secrets; git commit and diff; whether a server can be reached

May import configurator and what lies beside this folder: engine.files, engine.ops, engine.spans,
engine.streams, engine.untrusted, engine.advice.
"""
