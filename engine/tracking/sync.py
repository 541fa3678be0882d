"""python track.py sync out/my: upload what W&B lacks of a run, each row once."""
import math
import subprocess
import sys
from pathlib import Path

from configurator import fail
from engine.advice import renamed
from engine.tracking.destination import Session
from engine.tracking.log import rising_rows
from engine.tracking.network import is_reachable
from engine.tracking.trackers.wandb import Wandb
from engine.tracking.wandb_client import (
    about, at_server, client_rows, count_rows, existing_folders, has_wandb_key, wandb_server)
from engine.untrusted import read_json


def sync(out_dir):
    """
    Upload the client's folders that hold exactly what the server lacks, then the other rows from
    log.jsonl. The server appends all rows that it receives, and would duplicate a row that it has
    already.
    """
    run = about(out_dir)
    if "id" not in run:
        fail(f"{out_dir}: holds no run tracked with --wandb_log=True (no wandb.json)")
    if not Path(out_dir, "log.jsonl").exists():
        fail(f"{out_dir}: its log.jsonl is gone; upload what the client wrote with: wandb sync "
             + " ".join(run.get("folders", [])))
    if not has_wandb_key():
        fail("no W&B key; log in first with: wandb login")
    if not is_reachable(wandb_server()):
        fail(f"{wandb_server()} does not answer; try again later")
    rows = rising_rows(out_dir)
    known = at_server(run)
    count, last = known or (0, -1)
    missing = [row for row in rows if row["iter"] > last]
    folders, sent = [], 0
    # If the sum is smaller, the server lacks rows from before its last one, and a folder may hold
    # rows that the server has already.
    if (missing or not known) and count + len(missing) == len(rows):
        folders, sent = matching_folders(existing_folders(run), missing, is_new=not known)
    if folders:
        upload(run, folders)
    if sent < len(missing):
        send_rows(out_dir, run, rows, last, uploaded=folders)
    if folders or missing:
        count = count_rows(run, len(rows))
    if count < len(rows):
        fail(f"{out_dir}: W&B has {count} of the run's {len(rows)} rows; sync again. W&B takes no "
             "rows older than its last one: if such rows are missing, give the run another \"id\" "
             f"in {out_dir}/wandb.json first")
    end = rows[-1]["iter"] if rows else 0
    print(f"{out_dir}: run {run['id']} is complete up to iter {end}")


def matching_folders(folders, rows, is_new):
    """
    Return (folders, number of rows in them). A folder is chosen if its rows are the next of `rows`,
    after those of the folders chosen before it. is_new: the server does not know the run, so
    folders without rows are chosen too.
    """
    found, count = [], 0
    for folder in folders:
        recorded = client_rows(folder)
        pairs = list(zip(recorded, rows[count:]))
        same = all(item.get(name) == value for item, row in pairs
                   for name, value in row.items() if type(value) in (int, float) and name != "time")
        if same and (pairs or (is_new and not recorded)):
            found.append(folder)
            count += len(pairs)
    return found, count


def upload(run, folders):
    """Upload folders of the client to a run."""
    tool = [sys.executable, "-m", "wandb", "sync", "--include-online", "--include-synced",
            "--id", run["id"], "--project", run["project"], *folders]
    if "entity" in run:
        tool += ["--entity", run["entity"]]
    if subprocess.run(tool, stdin=subprocess.DEVNULL).returncode:
        fail(f"wandb sync failed for {', '.join(folders)}; nothing is lost, try again")


def send_rows(out_dir, run, rows, last, uploaded):
    """
    Send the rows that the server still lacks, and the models of the folders that are not in
    `uploaded`. last: step of the server's last row before the uploads, or -1 if it had no rows.
    """
    config = read_json(Path(out_dir, "config.json"))
    session = Session(
        out_dir, config, {name: v for name, v in run.items() if name not in ("folders", "url")},
        step=math.inf,  # all rows of log.jsonl count as rows of earlier sessions
        x="tokens" if "tokens" in rows[0] else "iter",
        # Logs of other programs have no log_extras.
        tables="tables" in renamed(config).get("log_extras", "tables"))
    tracker = Wandb(session, mode=("online", "sync"))  # logs the rows that the run lacks
    print(*tracker.take_messages(), sep="\n")
    for folder in existing_folders(run):
        if folder not in uploaded:
            # Skip models up to `last`: "latest" and "best" would move to an older model.
            tracker.log_models_of(folder, last)
    tracker.finish()
