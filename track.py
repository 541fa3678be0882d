"""
Where the metrics go. Every run writes `log.jsonl` in its out folder, one row per logged step, whatever else happens;
with wandb_log=True the same rows, sample texts and models go to Weights & Biases: online where a key is found
and the server answers, offline otherwise. A destination that fails is given up with one warning; training goes on.
"""
import json
import math
import netrc
import os
import re
import secrets
import socket
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit


class Jsonl:
    """
    out_dir/log.jsonl: {"iter": ..., "tokens": ..., "loss/train": ..., "time": Unix seconds} a line, flushed row by row;
    out_dir/config.json: the resolved configuration.
    """

    def __init__(self, out_dir, config, step):
        """Continue a file after iteration `step`: later rows, written before a crash, are dropped."""
        path, kept = Path(out_dir, "log.jsonl"), []
        Path(out_dir, "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
        if step and path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                try:
                    if json.loads(line)["iter"] <= step:
                        kept.append(line + "\n")
                except (ValueError, KeyError, TypeError):
                    continue  # a row cut short when the writer was killed
        self.file = open(path, "w", encoding="utf-8")
        self.file.writelines(kept)
        self.file.flush()

    def log(self, row):
        finite = {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
        self.file.write(json.dumps(finite | {"time": round(time.time(), 3)}) + "\n")
        self.file.flush()

    def model(self, path, metrics, aliases):
        pass

    def finish(self):
        self.file.close()


def wandb_key():
    """Whether a W&B key is at hand, in WANDB_API_KEY or netrc, the two places its own client reads."""
    host = urlsplit(wandb_server()).hostname
    try:
        return bool(os.environ.get("WANDB_API_KEY") or netrc.netrc().authenticators(host))
    except (OSError, netrc.NetrcParseError):
        return False


def wandb_server():
    return os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")


def answers(url, seconds=3):
    """Whether something accepts connections at the url."""
    parts = urlsplit(url)
    try:
        socket.create_connection((parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)), seconds).close()
        return True
    except OSError:
        return False


def wandb_mode():
    """(mode, why): what WANDB_MODE says; else online when there is a key and the server answers, else offline."""
    if os.environ.get("WANDB_MODE"):
        return os.environ["WANDB_MODE"], "WANDB_MODE"
    if not wandb_key():
        return "offline", "no API key"
    if not answers(wandb_server()):
        return "offline", f"{wandb_server()} does not answer"
    return "online", "API key found"


class Wandb:
    """A Weights & Biases run. Charts have `tokens` as x axis, with `iter` beside it as the step."""

    def __init__(self, config, project, name, run_id):
        mode, why = wandb_mode()
        # artifacts wait for their upload inside the run's folder, not somewhere in the home folder
        os.environ.setdefault("WANDB_DATA_DIR", os.path.join(os.environ.get("WANDB_DIR", "."), "wandb"))
        os.makedirs(os.environ["WANDB_DATA_DIR"], exist_ok=True)
        import wandb
        self.wandb = wandb
        settings = wandb.Settings(init_timeout=10, silent=True, x_transaction_log_flush_interval=1)
        self.run = wandb.init(project=project, name=name, id=run_id, resume="allow" if mode == "online" else None,
                              mode=mode, config=config, settings=settings)
        self.run.define_metric("iter", summary="last")
        self.run.define_metric("tokens", summary="last")
        self.run.define_metric("*", step_metric="tokens")
        self.run.define_metric("loss/val", step_metric="tokens", summary="min,last")
        self.table = wandb.Table(columns=["iter", "tokens", "prompt", "text"], log_mode="INCREMENTAL")
        where = self.run.url if mode == "online" else self.run.settings.sync_dir
        later = "" if mode == "online" else f"; upload it later with: wandb sync {os.path.relpath(where)}"
        print(f"tracking: W&B {mode} ({why}): {where if mode == 'online' else os.path.relpath(where)}{later}")

    def log(self, row):
        row = dict(row)
        for prompt, text in row.pop("samples", []):
            self.table.add_data(row["iter"], row["tokens"], prompt, text)
            row["samples"] = self.table
        self.run.log(row, step=row["iter"])

    def model(self, path, metrics, aliases):
        artifact = self.wandb.Artifact(f"model-{self.run.id}", type="model", metadata=metrics)
        artifact.add_file(str(path))
        self.run.log_artifact(artifact, aliases=aliases)

    def finish(self):
        self.run.finish()
        self.wandb.teardown()  # only now is an offline run whole on disk


class Tracker:
    """Sends everything to each of its destinations; without any it is the null object of the other processes."""

    def __init__(self, destinations=()):
        self.destinations = list(destinations)

    def each(self, call, *args):
        for destination in list(self.destinations):
            try:
                getattr(destination, call)(*args)
            except Exception as e:  # a tracker's failure is never the training's
                self.destinations.remove(destination)
                warn(destination, e)

    def log(self, row):
        """row: {"iter", "tokens", metric: number, "samples": [(prompt, text)]}; iter grows from call to call."""
        self.each("log", row)

    def model(self, path, metrics, aliases):
        """An exported model file, with the metrics it reached and its aliases, "best" or "latest"."""
        self.each("model", path, metrics, aliases)

    def finish(self):
        self.each("finish")


def warn(destination, e):
    print(f"warning: tracking with {type(destination).__name__} stopped ({type(e).__name__}: {e})", file=sys.stderr)


def new_run_id(name):
    """A short, readable run id that no other run has."""
    return re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-").lower()[:40] + "-" + secrets.token_hex(2)


def make_tracker(out_dir, config, step, run_id, wandb_log, project, name):
    """The tracker of the master process: JSONL always, W&B when asked for."""
    destinations = [Jsonl(out_dir, config, step)]
    if wandb_log:
        try:
            destinations.append(Wandb(config, project, name, run_id))
        except Exception as e:
            warn(Wandb.__new__(Wandb), e)
    return Tracker(destinations)
