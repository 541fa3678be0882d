"""
Where the metrics go.

    python track.py sync out/my       bring a run that was tracked offline, or in part, up to W&B, complete and in order
    python track.py -- CMD ...        run any program and track what it prints (--pattern='regex' before -- adds to it)

Every run writes `log.jsonl` in its out folder, one row per logged step, whatever else happens; with wandb_log=True the
same rows, texts and models go to Weights & Biases: online where a key is found and the server answers, offline
otherwise; with tensorboard_log, swanlab_log or trackio_log=True to those. W&B's, SwanLab's and trackio's clients work in
processes of their own, TensorBoard in a thread: whatever happens to a server, a service process or a disk, training neither
stops nor waits. What fails costs one warning.

A row is {"iter", "tokens", metric: number, ...}; its lists are rows of a table (see TABLES), its dicts histograms,
{"counts": N ints, "edges": N + 1 floats}.
"""
import atexit
import collections
import configparser
import contextlib
import errno
import importlib.util
import json
import math
import netrc
import os
import queue
import re
import secrets
import shlex
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
import unicodedata
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

from configurator import BOOLS, fail  # first: it answers for packages that are missing

from tqdm import tqdm

from engine.tracking.console import Parser
from engine.files import read_json, replacing, sha256, why, write_atomic
from engine.untrusted import open_untrusted, parse_json
from engine.tracking.follow import Tee, follow
from engine.tracking.redact import redact
from engine.streams import outlast, tell, unread

TABLES = {
    "documents": ["split", "text", "tokens", "length", "unknown", "byte fallback"],
    "data": ["", "train", "val"],
    "pieces": ["piece", "times", "share"],  # the most frequent
    "samples": ["prompt", "how", "text"],
    "settings": ["setting", "before", "now"],  # of a resumed run
    "notes": ["metric", "value", "what it means"],  # of what has left its usual range
    "predictions": ["split", "input", "target", "p(target)", "1st", "p(1st)", "2nd", "p(2nd)", "3rd", "p(3rd)"],
}
START_SECONDS = 4      # the training waits for a tracker to start; after that the tracker goes on alone
INIT_SECONDS = 15      # W&B waits for its server
FINISH_SECONDS = 60    # at the end an upload is given up when nothing has moved for so long ...
SLOWEST = 125_000      # ... and in any case after the time that a line of 1 Mbit/s needs, in bytes per second
COUNT_SECONDS = 5      # a server counts the rows that it has taken
STIR = 1 << 16         # bytes that count as moved: more than a client writes that only waits
PROJECT = "llamac"     # where neither a flag nor W&B's own settings name a project
PROGRAM = "out/program"  # the folder of a program that is tracked, unless one is named
WAITING = 10_000       # rows that may wait for a slow tracker before it is given up


# ---- destinations -----------------------------------------------------------------------------------------------

def parse_row(line):
    """A line of a log.jsonl as a dict; None: it is no row, as where it was cut short when the writer was killed."""
    try:
        row = parse_json(line)
        return row if isinstance(row, dict) and isinstance(row.get("iter"), (int, float)) else None
    except ValueError:
        return None


def read_rows(path):
    """The whole rows of a log.jsonl."""
    with open_untrusted(path) as file:
        return [row for line in file.read().split(b"\n") if (row := parse_row(line)) is not None]


def tables_of(row):
    """The names of the tables in a row; another program may call a number so: data, samples, notes."""
    return [name for name in TABLES if isinstance(row.get(name), list)]


def reason(error):
    """
    Return an exception as one line. Settings that the W&B client refuses are named with their
    values and where they came from.
    """
    if type(error).__name__ == "ValidationError" and hasattr(error, "errors"):  # pydantic's
        return "; ".join(map(wrong_setting, error.errors()))
    if type(error).__name__ == "UsageError":
        text = str(error).splitlines()[0]
        named = "project" if "project" in text else "run_id" if "Run ID" in text else ""
        value = wandb_said(named) if named else None
        return f"{text} ({named}={value!r}, {wandb_origin(named, value)})" if value else text
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no reason given'}"


def wrong_setting(error):
    """A line about one of pydantic's errors: {"loc", "input", "msg"}."""
    name = str(error["loc"][0]) if error["loc"] else "a setting"
    value = error["input"]
    value = ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
    shown = value if len(value) <= 80 else f"{value[:77]}..."
    message = error["msg"].removeprefix("Value error, ")
    return f"W&B refuses {name}={shown!r}, {wandb_origin(name, value)}: {message}"


class Jsonl:
    """
    out_dir/log.jsonl: {"iter": ..., "tokens": ..., "loss/train": ..., "time": Unix seconds} a line, written row by row;
    out_dir/config.json: the resolved configuration. While the disk fails, rows wait. Files that somebody deletes meanwhile
    are written again.
    """

    def __init__(self, out_dir, config, step):
        """Continue a file after iteration `step`: later rows, written before a crash, are dropped."""
        self.path = path = Path(out_dir, "log.jsonl")
        self.config = json.dumps(config, indent=1)
        write_atomic(Path(out_dir, "config.json"), self.config)
        self.kept = {} if step else {"tokens": -1}  # the last row that stays
        if step and path.exists():
            rows = [row for row in read_rows(path) if row["iter"] <= step]
            write_atomic(path, "".join(json.dumps(row) + "\n" for row in rows))
            self.kept = rows[-1] if rows else {}
        self.file, self.waiting, self.warned = open(path, "ab+" if step else "wb+", buffering=0), b"", False

    def restore(self):
        """
        Where the file was deleted, write all its rows again: the system keeps them as long as it is open here. Where another
        file has taken its place, as an editor does it, go on at the end of that one.
        """
        here = os.fstat(self.file.fileno())
        try:
            if os.path.samestat(here, os.stat(self.path)) or here.st_nlink:
                return
        except FileNotFoundError:
            if read_json(self.path.with_name("trainer.json")).get("pid", os.getpid()) != os.getpid():
                raise OSError(errno.EBUSY, "another process trains there") from None
            self.file.seek(0)
            with replacing(self.path) as f:
                shutil.copyfileobj(self.file, f)
            write_atomic(self.path.with_name("config.json"), self.config)
            tell(f"warning: {self.path} was deleted or moved; it is written again, with all its rows", sys.stderr)
        self.file.close()
        self.file = open(self.path, "ab+", buffering=0)

    def write(self):
        try:
            self.restore()
            while self.waiting:
                self.waiting = self.waiting[self.file.write(self.waiting):]
        except OSError as e:
            if not self.warned:
                self.warned = True
                tell(f"warning: log.jsonl cannot be written ({e.strerror}); its rows wait until it can", sys.stderr)

    def log(self, row):
        finite = {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
        self.waiting += (json.dumps(finite | {"time": round(time.time(), 3)}) + "\n").encode()
        self.write()

    def alert(self, title, text):
        pass

    def model(self, path, metrics, aliases):
        pass

    def finish(self):
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)  # a deleted one that no checkpoint has made anew
        self.write()
        if self.waiting:
            tell(f"warning: {self.path} lacks its last {len(self.waiting.splitlines())} rows", sys.stderr)
        self.file.close()


def wandb_files():
    """The W&B client's files of settings; the last one counts most. WANDB_DIR does not move it."""
    user = Path(os.environ.get("WANDB_CONFIG_DIR") or "~/.config/wandb", "settings").expanduser()
    return [user, Path(".wandb" if Path(".wandb").exists() else "wandb", "settings")]


def settings_of(files):
    """{name: text} of the W&B client's files of settings; empty where they cannot be read."""
    found = configparser.ConfigParser(interpolation=None)
    try:
        found.read(files)
        return dict(found["default"]) if "default" in found else {}
    except (OSError, ValueError, configparser.Error):
        return {}


def wandb_settings():
    """What the W&B client's files of settings say, ./wandb/settings before the user's own: {name: text}."""
    return settings_of(wandb_files())


# entry of a run: the client's setting of it
RUN_SETTINGS = {"id": "run_id", "project": "project", "entity": "entity", "name": "run_name",
                "group": "run_group", "tags": "run_tags", "notes": "run_notes",
                "job_type": "run_job_type"}
# setting of the client: its variable, where that is not WANDB_ and its name; our flag for it
VARIABLES = {"run_name": "WANDB_NAME", "run_tags": "WANDB_TAGS", "run_notes": "WANDB_NOTES",
             "run_job_type": "WANDB_JOB_TYPE"}
FLAGS = {"project": "--wandb_project", "run_name": "--wandb_run_name",
         "run_group": "--wandb_group", "run_tags": "--wandb_tags", "run_notes": "--wandb_notes",
         "run_job_type": "--wandb_job_type"}
# entry of a run: SwanLab's variable
SWANLAB_VARIABLES = {"project": "SWANLAB_PROJ_NAME", "name": "SWANLAB_EXP_NAME",
                     "group": "SWANLAB_GROUP", "tags": "SWANLAB_TAGS",
                     "notes": "SWANLAB_DESCRIPTION", "job_type": "SWANLAB_JOB_TYPE"}


def wandb_variable(setting):
    """The environment variable of one of the client's settings."""
    private = f"WANDB__{setting.removeprefix('x_').upper()}"
    return private if setting.startswith("x_") else VARIABLES.get(setting, f"WANDB_{setting.upper()}")


def wandb_said(setting):
    """Return what the user tells the client about one of its settings, by environment or file, or None."""
    return os.environ.get(wandb_variable(setting)) or wandb_settings().get(setting)


def wandb_origin(setting, value):
    """Where the client has this value of a setting from, in words."""
    if os.environ.get(wandb_variable(setting)) == value:
        return f"from the variable {wandb_variable(setting)}"
    if wandb_settings().get(setting) == value:
        path = next(path for path in reversed(wandb_files()) if setting in settings_of([path]))
        return f"from {path}"
    return f"from {FLAGS[setting]}" if setting in FLAGS else "set by llamac"


def resolve_run(run, given, said, noted=()):
    """
    Return the entries of a run: one that was `given` on the command line, else what the user `said`
    to the client, else what the run had before it was resumed (`noted`), else that of `run`.
    """
    kept = {name: noted[name] for name in RUN_SETTINGS if name in noted}
    said = {name: value for name, value in said.items() if value}
    if "tags" in said:
        said["tags"] = said["tags"].split(",")
    return run | kept | said | {name: run[name] for name in ("id", *given) if name in run}


def wandb_run(run, given, noted=()):
    """resolve_run for W&B: WANDB_PROJECT, WANDB_NAME and their like, then the files of settings."""
    said = {name: wandb_said(setting) for name, setting in RUN_SETTINGS.items()}
    return resolve_run(run, given, said, noted)


def wandb_server():
    """The address of the server that the W&B client goes to."""
    found = os.environ.get("WANDB_BASE_URL") or wandb_settings().get("base_url")
    if not found:
        import wandb
        found = wandb.Settings().base_url
    return found.rstrip("/")


def wandb_key():
    """Whether a W&B key is at hand where its client looks: WANDB_API_KEY, its settings, or netrc, by host and port."""
    if os.environ.get("WANDB_API_KEY") or wandb_settings().get("api_key"):
        return True
    place = urlsplit(wandb_server()).netloc
    files = [os.environ["NETRC"]] if os.environ.get("NETRC") else ["~/.netrc", "~/_netrc"]
    file = next((path for path in map(os.path.expanduser, files) if os.path.exists(path)), None)
    try:
        known = netrc.netrc(file).authenticators if file else lambda place: None
        return bool(known(place) or place == "api.forge.coreweave.com" and known("api.wandb.ai"))  # its name before
    except (OSError, ValueError, netrc.NetrcParseError):  # ValueError: bytes that are not UTF-8
        return False


def proxy_of(url):
    """The proxy that clients take to the url, as the environment says; "" for none."""
    parts = urlsplit(url)
    if parts.hostname in ("localhost", "127.0.0.1", "::1") or urllib.request.proxy_bypass_environment(parts.netloc):
        return ""
    found = urllib.request.getproxies_environment().get(parts.scheme, "")
    return found if "://" in found or not found else f"http://{found}"


def answers(url, seconds=3):
    """Whether something accepts connections at the url, or at the proxy on the way to it."""
    try:
        parts = urlsplit(proxy_of(url) or url)
        port = parts.port or {"https": 443, "socks5": 1080}.get(parts.scheme, 80)
        socket.create_connection((parts.hostname, port), seconds).close()
        return True
    except (OSError, ValueError):  # ValueError: no address
        return False


def wandb_mode():
    """(mode, why): what WANDB_MODE or `wandb offline` says; else online when there is a key and the server answers."""
    if os.environ.get("WANDB_MODE"):
        return os.environ["WANDB_MODE"], "WANDB_MODE"
    if (mode := wandb_settings().get("mode", "online")) != "online":
        return mode, "W&B's settings"
    if not wandb_key():
        return "offline", "no API key"
    if not answers(wandb_server()):
        return "offline", f"{wandb_server()} does not answer"
    return "online", "API key found"


def read_wandb(folder):
    """The records of a W&B run's folder, as dicts: what `wandb leet inspect --json` prints of its .wandb file."""
    tool = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(folder)]
    done = subprocess.run(tool, capture_output=True, text=True, encoding="utf-8", stdin=subprocess.DEVNULL)
    if done.returncode:
        raise OSError(f"not readable as a W&B run: {(done.stderr.strip() or 'no reason given').splitlines()[-1]}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def client_records(folder, kind):
    """The records of a kind in a folder of the W&B client's, in order; none where it can't be read."""
    try:
        return [record[kind] for record in read_wandb(folder) if record["type"] == kind]
    except (OSError, ValueError):
        return []


def client_rows(folder):
    return [record["item"] for record in client_records(folder, "history")]


def recorded(folders):
    """The last iteration that the W&B logs in these folders hold; -1: none."""
    return max((row.get("iter", -1) for folder in folders for row in client_rows(folder)), default=-1)


def about(out_dir):
    """What out_dir/wandb.json says of a run: {"id", "project", "name", ..., "folders": [of the W&B client's logs]}."""
    return read_json(Path(out_dir, "wandb.json"))


class Wandb:
    """
    A Weights & Biases run. Charts have `tokens` as x axis, with `iter` beside it as the step; tables stand in a section of
    their own, `tables/`, behind the charts.
    """

    def __init__(self, out_dir, config, run, x="tokens", mode=None, before=0, tables=True, **settings):
        """
        run: {"id", "project", "name", and where set "group", "tags", "notes", "job_type"}; out_dir: of the log.jsonl
        that goes with it, if there is one, whose rows up to iteration `before` are to be in the run; tables:
        whether they are sent; settings: of the client's besides. `said` is what the user should read.
        """
        self.out_dir, self.tells = out_dir, mode is None  # `sync`, which sets the mode, counts by itself
        mode, why = mode or wandb_mode()
        # artifacts wait for their upload inside the run's folder, not somewhere in the home folder
        os.environ.setdefault("WANDB_DATA_DIR", os.path.join(os.environ.get("WANDB_DIR", "."), "wandb"))
        os.makedirs(os.environ["WANDB_DATA_DIR"], exist_ok=True)
        import wandb
        self.wandb, self.tables = wandb, {} if tables else None
        sys.argv[1:] = redact(sys.argv[1:])  # W&B records it
        self.run, mode, why = self.start(run, config, mode, why, settings)
        self.online, self.models = mode == "online", []
        self.define(x)
        if out_dir:
            if not (self.run.settings.disable_git or self.run.settings.disable_code):
                self.keep(Path(out_dir, "diff.patch"))
            self.fill(out_dir, mode, before)
        where = self.run.url if mode == "online" else os.path.relpath(self.run.settings.sync_dir)
        upload = ["python", "track.py", "sync", str(out_dir)] if out_dir else ["wandb", "sync", where]
        later = f"; upload it later with: {shlex.join(upload)}"
        self.said = f"tracking: W&B {mode} ({why}): {where}{'' if mode == 'online' else later}" * (mode != "disabled")
        for line in self.ignored_files():
            self.say(line)

    def start(self, run, config, mode, why, given):
        """(run, mode, why) of wandb.init, which falls back to offline where the server accepts but doesn't serve."""
        usual = {"init_timeout": INIT_SECONDS, "login_timeout": INIT_SECONDS, "finish_timeout": FINISH_SECONDS,
                 "silent": True, "console": "off", "x_transaction_log_flush_interval": 1,
                 "git_root": str(Path(__file__).resolve().parent), "git_remote_url": git_remote()}
        ours = usual | given
        chosen = {name: value for name, value in ours.items() if wandb_said(name) is None}
        chosen["git_remote_url"] = redact(wandb_said("git_remote_url") or usual["git_remote_url"])
        settings = self.wandb.Settings(**chosen)
        try:
            resume = "allow" if mode == "online" and wandb_said("resume") is None else None
            run = self.wandb.init(mode=mode, resume=resume, config=config, settings=settings, **run)
            return run, mode, why
        except self.wandb.errors.CommError as e:
            if mode != "online":
                raise
            self.wandb.teardown()  # else the id counts as in use
            why = f"{wandb_server()} does not serve: {str(e).splitlines()[0][:80]}"
            return self.wandb.init(mode="offline", config=config, settings=settings, **run), "offline", why

    def say(self, line):
        """Add a line to what the user should read."""
        self.said += "\n" * bool(self.said) + line

    def ignored_files(self):
        """Name a file of settings that the client ignores in silence, for one setting that it refuses."""
        found = wandb_settings()
        own = ("ignore_globs", "anonymous", "settings_system", "root_dir")  # read in other ways
        try:
            self.wandb.Settings(**{name: value for name, value in found.items() if name not in own})
        except ValueError as e:  # pydantic's is one
            return [f"warning: {reason(e)}; W&B ignores all settings of that file"]
        return []

    def define(self, x):
        for name in ("iter", "tokens"):
            self.run.define_metric(name, summary="last")
        for name in TABLES:  # the client counts the columns of a table as if they were a metric
            self.run.define_metric(f"tables/{name}.*", hidden=True)
        self.run.define_metric("*", step_metric=x)
        self.run.define_metric("loss/val", step_metric=x, summary="min,last")

    def keep(self, path):
        """A small file that belongs to the run, if it exists."""
        if path.exists():
            copy = shutil.copy(path, os.path.abspath(self.run.dir))
            self.run.save(copy, base_path=os.path.dirname(copy), policy="now")

    def fill(self, out_dir, mode, before):
        """Note where the client writes, and log the rows that its logs lack: those of a session whose tracking failed."""
        if mode == "disabled":
            return
        noted = about(out_dir)
        folders = [f for f in noted.get("folders", []) if Path(f).exists()]
        here = str(Path(self.run.settings.sync_dir).resolve())
        last = self.run.starting_step - 1 if mode == "online" else recorded(folders)
        found = noted | {"folders": [*folders, here]} | ({"url": self.run.url} if mode == "online" else {})
        write_atomic(Path(out_dir, "wandb.json"), json.dumps(found, indent=1))
        for row in read_rows(Path(out_dir, "log.jsonl")):
            if last < row["iter"] <= before:
                self.log(row)

    def log(self, row):
        row = dict(row)
        for name in tables_of(row):
            lines = row.pop(name)
            if self.tables is not None:
                row[f"tables/{name}"] = self.table(name, [[row["iter"], row["tokens"], *line] for line in lines])
        for name, value in row.items():
            if isinstance(value, dict):
                row[name] = self.wandb.Histogram(np_histogram=(value["counts"], value["edges"]))
        self.run.log(row, step=row["iter"])

    def table(self, name, lines):
        """The table of this name, which has grown by these lines."""
        if name not in self.tables:
            self.tables[name] = self.wandb.Table(columns=["iter", "tokens", *TABLES[name]], log_mode="INCREMENTAL")
        for line in lines:
            self.tables[name].add_data(*line)
        return self.tables[name]

    def alert(self, title, text):
        self.run.alert(title, text, level="WARN")

    def console(self, stream, text):
        """What the program printed: printed here, where the client takes it up."""
        getattr(sys, stream).write(text)

    def model(self, path, metrics, aliases):
        """The file and the vocabulary beside it, with what it reached and its checksum as metadata."""
        try:
            artifact = self.wandb.Artifact(f"model-{self.run.id}", type="model", metadata=metrics)
            artifact.add_file(path, skip_cache=True)  # no copy of it stays behind
            if metrics.get("tokenizer"):
                artifact.add_file(metrics["tokenizer"], skip_cache=True)
                artifact.metadata["tokenizer"] = Path(metrics["tokenizer"]).name
            self.run.log_artifact(artifact, aliases=aliases)
            self.models.append((artifact, path))
        except Exception as e:  # the run goes on without it
            self.say(f"warning: {path} is not in W&B ({redact(reason(e))})")

    def models_of(self, folder, after):
        """The models of later than iteration `after` that another session has left in the client's folder, if they are there."""
        for record in client_records(folder, "artifact"):
            files = {file["path"]: file["local_path"] for file in record["manifest"]["contents"] if "local_path" in file}
            known = json.loads(record.get("metadata") or "{}")
            there = files and all(map(os.path.exists, files.values()))
            if record["type"] == "model" and there and known.get("iter", math.inf) > after:
                artifact = self.wandb.Artifact(f"model-{self.run.id}", type="model", metadata=known)
                for name, path in files.items():
                    artifact.add_file(path, name=name, skip_cache=True)
                self.run.log_artifact(artifact, aliases=record["aliases"])

    def finish(self, code=0, wanted=None):
        """wanted: how many rows the run should have; None: those of log.jsonl."""
        self.run.finish(code)
        if self.online and self.tells:
            self.check_models()
            self.count(len(rising_rows(self.out_dir)) if wanted is None else wanted)
        self.wandb.teardown()  # only now is an offline run whole on disk

    def check_models(self):
        """Say which models the client could not upload."""
        for artifact, path in self.models:
            try:
                artifact.wait(timeout=COUNT_SECONDS)
            except Exception as e:
                if type(e) is ValueError:  # the upload failed; other errors come from reading it back
                    name = f"--name={self.run.project}/{artifact.name}"
                    put = shlex.join(["wandb", "artifact", "put", "--type=model", name, str(path)])
                    self.say(f"warning: {path} is not in W&B ({redact(reason(e))}); send it with: "
                             f"{put}")

    def count(self, wanted):
        """Say so where the server has fewer rows than wanted: the client gives up in silence."""
        command = shlex.join(["python", "track.py", "sync", str(self.out_dir)])
        remedy = f"; send what is missing with: {command}" if self.out_dir else ""
        here = {"entity": self.run.entity, "project": self.run.project, "id": self.run.id}
        try:
            have = counted(here, wanted)
        except Exception as e:  # whatever a broken server answers
            self.say(f"warning: it is not known which of the run's {wanted} rows W&B has "
                     f"({redact(reason(e))}){remedy}")
            return
        if have < wanted:
            self.say(f"warning: W&B has {have} of the run's {wanted} rows{remedy}")


def services(pid):
    """What process `pid` has started, W&B's service. Only Linux says."""
    found = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    return found


def kill(pids):
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def written(pids):
    """The bytes that these processes have written so far, to files and servers. Only Linux says."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            total += int(re.search(r"wchar: (\d+)", Path(f"/proc/{pid}/io").read_text())[1])
    return total


class SwanLab:
    """
    A SwanLab run: online where SWANLAB_API_KEY or its login is found and the server answers, otherwise in out_dir/swanlab, for
    `swanlab sync`. Numbers over iter, and tables; it has no histograms.
    """

    def __init__(self, out_dir, config, run):
        import swanlab
        self.swanlab, host = swanlab, os.environ.get("SWANLAB_API_HOST", "https://api.swanlab.cn")
        known = os.environ.get("SWANLAB_API_KEY") or Path("~/.swanlab/.netrc").expanduser().exists()
        mode = os.environ.get("SWANLAB_MODE") or ("online" if known and answers(host) else "offline")
        elsewhere = os.environ.get("SWANLAB_LOGDIR")
        place = {} if elsewhere else {"log_dir": str(Path(out_dir, "swanlab"))}
        for folder in place.values():
            os.makedirs(folder, exist_ok=True)
        self.run = swanlab.init(mode=mode, **place, config=config, project=run["project"], name=run["name"],
                                description=run.get("notes"), resume="allow" if mode == "online" else None,
                                **{k: run[k] for k in ("id", "group", "tags", "job_type") if k in run})
        where = f": {self.run.url}" if mode == "online" else f"; upload it later with: swanlab sync {self.run.dir}"
        self.said = f"tracking: SwanLab {mode}{where}" * (mode != "disabled")

    def log(self, row):
        numbers = {name: value for name, value in row.items() if isinstance(value, (int, float))}
        for name in tables_of(row):
            numbers[f"tables/{name}"] = self.swanlab.echarts.Table()
            numbers[f"tables/{name}"].add(TABLES[name], row[name])
        self.swanlab.log(numbers, step=row["iter"])

    def alert(self, title, text):
        pass

    def finish(self, code=0):
        self.swanlab.finish("crashed" if code else "success")


class Trackio:
    """A trackio run in trackio's own folder, for `trackio show`; numbers, tables and histograms over iter."""

    def __init__(self, out_dir, config, run):
        import trackio
        self.trackio = trackio
        started = trackio.init(run["project"], run["id"], group=run.get("group"), config=config, resume="allow", embed=False,
                               auto_log_cpu=False, auto_log_gpu=False)
        following = getattr(started, "_next_step", 0)  # of a resumed run: behind its last row
        self.first = following if isinstance(following, int) else 0
        self.said = f"tracking: trackio: trackio show --project {shlex.quote(run['project'])}"

    def log(self, row):
        """Log a row that trackio does not have yet: it appends whatever it gets."""
        if row["iter"] < self.first:
            return
        row = dict(row)
        for name in tables_of(row):
            row[f"tables/{name}"] = self.trackio.Table(columns=TABLES[name], data=row.pop(name))
        for name, value in row.items():
            if isinstance(value, dict):
                row[name] = self.trackio.Histogram(np_histogram=(value["counts"], value["edges"]))
        self.trackio.log(row, step=row["iter"])

    def alert(self, title, text):
        self.trackio.alert(title, text, level=self.trackio.AlertLevel.WARN)

    def finish(self, code=0):
        self.trackio.finish()


CLIENTS = {"W&B": Wandb, "SwanLab": SwanLab, "trackio": Trackio}


def encodable(what):
    """The same without halves of surrogate pairs, of which Python makes bytes of a file's name that are no UTF-8."""
    return json.loads(json.dumps(what, ensure_ascii=False).encode("utf-8", "replace"))


class ClientProcess:
    """
    A client of CLIENTS in a process of its own, which can be killed whatever it waits for. It runs `serve`, whose stdin takes
    the client's name and arguments and then calls, [name, *arguments], a JSON line each, and whose stdout answers
    ["ready", text] or ["error", text].
    """

    def __init__(self, name, **arguments):
        """Arguments as the client takes them."""
        self.name, self.arguments, self.child = name, arguments, None

    def start(self):
        """Returns itself when the run has begun."""
        environment = {k: v for k, v in os.environ.items() if k != "WANDB_SERVICE"}  # a service that is not ours to kill
        self.child = subprocess.Popen([sys.executable, str(Path(__file__).resolve()), "serve"], stdin=subprocess.PIPE,
                                      stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, encoding="utf-8",
                                      env=environment, start_new_session=True)
        self.send(self.arguments | {"client": self.name, "argv": redact(sys.argv), "pid": os.getpid()})
        self.hear()
        return self

    def send(self, what):
        try:
            print(json.dumps(encodable(what)), file=self.child.stdin, flush=True)
        except BrokenPipeError:
            self.hear()  # why
            raise

    def hear(self):
        """Print what the child answers; RuntimeError: it has failed."""
        kind, text = json.loads(self.child.stdout.readline() or '["error", "its process has ended"]')
        if kind == "error":
            raise RuntimeError(text)
        for line in text.splitlines():
            tell(line, sys.stderr if line.startswith("warning: ") else sys.stdout)

    def log(self, row):
        self.send(["log", row])

    def alert(self, title, text):
        self.send(["alert", title, text])

    def console(self, stream, text):
        self.send(["console", stream, text])

    def model(self, path, metrics, aliases):
        try:
            self.send(["model", str(path), metrics | {"sha256": sha256(path)}, aliases])
        except FileNotFoundError:
            tell(f"warning: {path} is gone; it is not in W&B", sys.stderr)

    def finish(self):
        self.send(["finish"])
        self.hear()
        self.child.wait()

    def family(self):
        return [self.child.pid, *services(self.child.pid)] if self.child else []


def outlive(pid, end):
    """Call end() some time after the program `pid` has ended, whatever its client waits for."""
    while os.getppid() == pid:
        time.sleep(1)
    time.sleep(FINISH_SECONDS)
    end()


def serve():
    """The other side of ClientProcess. Where the program ends without a word, it finishes the run, as failed."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is printed here is for the client alone

    def answer(kind, text):
        with contextlib.suppress(OSError):
            print(json.dumps([kind, text]), file=answers, flush=True)

    def end():  # the client's own would wait for its service
        kill(services(os.getpid()))
        os._exit(0)

    try:
        arguments = json.loads(sys.stdin.readline())
        sys.argv[:], pid, client = arguments.pop("argv"), arguments.pop("pid"), CLIENTS[arguments.pop("client")]
        threading.Thread(target=outlive, args=(pid, end), daemon=True).start()
        if client is Wandb:  # stop_fn: the stop button of the run's page
            arguments |= {"console": "wrap", "finish_timeout": 0, "program": sys.argv[0], "x_stats_pid": pid,
                          "stop_fn": lambda: os.kill(pid, signal.SIGINT)}
        run = client(**arguments)
        answer("ready", run.said)
        run.said = ""
        for line in filter(lambda line: line.endswith("\n"), sys.stdin):  # else cut short when the program was killed
            name, *args = json.loads(line)
            getattr(run, name)(*args)
            if name == "finish":
                answer("ready", run.said)
                break
        else:
            threading.Timer(FINISH_SECONDS, end).start()
            run.finish(1)
    except Exception as e:
        answer("error", reason(e))
    end()


class TensorBoard:
    """out_dir/tensorboard: event files with the same scalars, texts and histograms over tokens."""

    def __init__(self, out_dir, kept):
        """
        kept: the last row of earlier sessions that stays in log.jsonl. TensorBoard drops every
        point behind it: a killed session wrote these, and the resumed run writes them again.
        Without "tokens" in `kept` TensorBoard drops nothing.
        """
        from torch.utils.tensorboard import SummaryWriter
        self.tokens = kept.get("tokens")
        first = self.tokens + 1 if isinstance(self.tokens, int) else None
        folder = os.path.join(out_dir, "tensorboard")
        self.writer = SummaryWriter(folder, purge_step=first, flush_secs=10)

    def log(self, row):
        self.tokens = at = row["tokens"]
        for name, value in row.items():
            if isinstance(value, dict):
                counts, edges = value["counts"], value["edges"]
                centers = [(a + b) / 2 for a, b in zip(edges, edges[1:])]
                squares = sum(n * c * c for n, c in zip(counts, centers))
                self.writer.add_histogram_raw(name, min=edges[0], max=edges[-1], num=sum(counts), global_step=at,
                                              sum=sum(n * c for n, c in zip(counts, centers)), sum_squares=squares,
                                              bucket_limits=edges[1:], bucket_counts=counts)
            elif isinstance(value, list):
                lines = [TABLES[name], ["---"] * len(TABLES[name]), *value]
                markdown = "\n".join("|".join(str(cell).replace("\n", " ").replace("|", "¦") for cell in line)
                                     for line in lines)
                self.writer.add_text(name, markdown, at)
            else:
                self.writer.add_scalar(name, float(value), at)

    def alert(self, title, text):
        self.writer.add_text("alerts", f"{title}: {text}", self.tokens)

    def model(self, path, metrics, aliases):
        pass

    def finish(self):
        self.writer.close()


class Background:
    """A destination in a thread of its own: no call waits for it, and what it raises ends it with one warning."""

    def __init__(self, name, make, remedy="", process=None, models=True):
        """
        process: a ClientProcess, which is killed when it is given up; W&B's gets what the program prints, too, others may go
        on by themselves when the program ends; models: whether they are passed on.
        """
        self.name, self.remedy, self.process, self.models, self.size = name, remedy, process, models, 0
        self.calls, self.ended, self.ready = queue.SimpleQueue(), False, threading.Event()
        self.goes_on = bool(process) and process.name != "W&B"
        if process and not self.goes_on:
            sys.stdout = Tee(sys.stdout, lambda text: self.call("console", "stdout", text))
            sys.stderr = Tee(sys.stderr, lambda text: self.call("console", "stderr", text))
        self.thread = threading.Thread(target=self.work, args=(make,), daemon=True)
        self.thread.start()
        atexit.register(self.last_words)

    def started(self, until):
        """Wait for it, at most until this time.monotonic()."""
        if not self.ready.wait(max(0, until - time.monotonic())):
            tell(f"tracking: {self.name} is still starting; training goes on without waiting")

    def work(self, make):
        try:
            destination = make()
            self.ready.set()
            for call, args in iter(self.calls.get, None):
                getattr(destination, call)(*args)
                if call == "finish":
                    break
        except Exception as e:  # a tracker's failure is never the training's
            self.give_up(reason(e))
        self.ended = True
        self.ready.set()

    def give_up(self, why):
        if not self.ended:
            self.ended = True
            kill(self.process.family() if self.process else ())
            tell(f"warning: tracking with {self.name} stopped ({redact(why)}); log.jsonl goes on{self.remedy}",
                 sys.stderr)

    def call(self, name, *args):
        if not self.ended and self.calls.qsize() > WAITING:
            self.give_up(f"it has not taken {WAITING} rows")
        if not self.ended:
            self.calls.put((name, args))

    def last_words(self):
        """What still waits when the program ends without finish(): it has died, and this says of what."""
        if not self.ended:
            self.calls.put(None)
            self.thread.join(3)

    def log(self, row):
        self.call("log", row)

    def alert(self, title, text):
        self.call("alert", title, text)

    def model(self, path, metrics, aliases):
        if self.models:
            self.size += os.path.getsize(path)
            self.call("model", path, metrics, aliases)

    def finish(self):
        if self.process and not self.goes_on and isinstance(sys.stdout, Tee):
            sys.stdout, sys.stderr = sys.stdout.end(), sys.stderr.end()
        self.call("finish")
        self.thread.join(0 if self.ended else 2 if self.goes_on else 3)
        if self.goes_on and self.thread.is_alive() and not self.ended:
            self.ended = True
            tell(f"tracking: {self.name} goes on by itself with what is left, for {FINISH_SECONDS} s at most")
        elif self.thread.is_alive() and not self.ended:
            tell(f"tracking: {self.name} is uploading what is left; given up when nothing moves for {FINISH_SECONDS} s")
            self.wait()

    def wait(self):
        """Until the thread ends, as long as something moves and the whole time is not too long."""
        process, size = self.process, self.size if self.process else 0
        begin, since, seen, first = time.monotonic(), time.monotonic(), 0, None
        with tqdm(total=size, desc="upload", unit="B", unit_scale=True, dynamic_ncols=True, disable=not size, miniters=1,
                  mininterval=0.1 if sys.stderr.isatty() else 30) as bar:
            while self.thread.is_alive() and not self.ended:
                family, now = process.family() if process else [], time.monotonic()
                sent, moved = written(family[1:]), written(family)
                first = sent if first is None else first
                bar.update(max(0, min(sent - first, size) - bar.n))
                if moved - seen > STIR or not sys.platform.startswith("linux"):  # elsewhere nobody says
                    seen, since = moved, now
                if now - since > FINISH_SECONDS:
                    self.give_up(f"nothing has moved for {FINISH_SECONDS} s")
                elif now - begin > FINISH_SECONDS + size / SLOWEST:
                    self.give_up(f"it has not finished after {now - begin:.0f} s")
                self.thread.join(0.5)
            if process and process.child and process.child.returncode == 0:
                bar.update(size - bar.n)


class Alerts:
    """
    What a row says that somebody should hear now: no number, a value far above the last ones, a speed far below. This only
    tells; optim.SpikeDetector judges each step before it is taken, by a running mean that a checkpoint keeps.
    """

    WATCHED = ("loss/train", "loss/val", "grad/norm", "perf/tokens_per_sec")

    def __init__(self, z=6, memory=50, least=10):
        self.z, self.least = z, least
        self.past = collections.defaultdict(lambda: collections.deque(maxlen=memory))

    def check(self, row):
        """[(title, text)]"""
        found = []
        for name in self.WATCHED:
            value, past = row.get(name), self.past[name]
            if value is None:
                continue
            if not math.isfinite(value):
                found.append((f"{name} is {value}", f"at iter {row['iter']}"))
                continue
            if len(past) >= self.least:
                mean, spread = statistics.fmean(past), statistics.pstdev(past)
                far = (value - mean) / (spread + 0.02 * abs(mean) + 1e-12)
                if name.startswith("perf/") and value < statistics.median(past) / 3:
                    found.append(("the speed has collapsed", f"{value:,.0f} tokens/s at iter {row['iter']}, usual "
                                                             f"{statistics.median(past):,.0f}"))
                elif not name.startswith("perf/") and far > self.z:
                    found.append((f"{name} jumps", f"{value:.4g} at iter {row['iter']}, {far:.0f} deviations above "
                                                   f"the usual {mean:.4g}"))
            past.append(value)
        return found


def redact_row(row):
    """
    Return a row without secrets in what comes from settings: the prompts of its samples and its
    changed settings. What a model or the data wrote stays as it is.
    """
    tables, found = tables_of(row), dict(row)
    if "samples" in tables:
        found["samples"] = [[redact(prompt), *rest] for prompt, *rest in row["samples"]]
    if "settings" in tables:
        found["settings"] = []
        for name, *values in row["settings"]:
            found["settings"].append([name, *(redact({name: value})[name] for value in values)])
    return found


class Tracker:
    """Sends everything to each of its destinations; without any it is the null object of the other processes."""

    def __init__(self, destinations=()):
        self.destinations, self.alerts = list(destinations), Alerts()

    def each(self, call, *args):
        for destination in self.destinations:
            getattr(destination, call)(*args)

    def log(self, row):
        """A row. Its iter is not smaller than the last; a second row of an iter has other metrics."""
        row = redact_row(row) if self.destinations else row
        self.each("log", row)
        lines = row["notes"] if "notes" in tables_of(row) else ()
        notes = [(f"{name} is {value:.3g}", text) for name, value, text in lines]
        for title, text in notes + self.alerts.check(row) if self.destinations else ():
            tell(f"warning: {title}: {text}", sys.stderr)
            self.each("alert", title, text)

    def model(self, path, metrics, aliases):
        """An exported model file, with the metrics it reached and its aliases, "best" or "latest"."""
        if os.path.exists(path):
            self.each("model", path, metrics, aliases)
        elif self.destinations:
            tell(f"warning: {path} does not exist; no model is recorded", sys.stderr)

    def is_logged(self):
        """Return whether log.jsonl holds all rows."""
        return not any(destination.waiting for destination in self.destinations if isinstance(destination, Jsonl))

    def finish(self):
        self.each("finish")


def new_run_id(name):
    """A short, readable run id that no other run has; under `wandb agent` the one it has given."""
    letters = re.sub(r"[\u0300-\u036f]", "", unicodedata.normalize("NFKD", name))  # é is e
    words = re.sub(r"[^A-Za-z0-9]+", "-", letters)[:40].strip("-").lower() or "run"
    return os.environ.get("WANDB_RUN_ID") or f"{words}-{secrets.token_hex(2)}"


def git(*words):
    """Return what git prints about this program's own folder, as bytes: names and contents may have any encoding."""
    return subprocess.run(["git", "-C", str(Path(__file__).parent), *words], capture_output=True, timeout=5,
                          check=True).stdout


def git_remote():
    """The address of this program's repository without a token in it; None where git knows none."""
    try:
        return redact(git("remote", "get-url", "origin").decode(errors="replace").strip())
    except (OSError, subprocess.SubprocessError):
        return None


def source_version():
    """{"git_commit", "git_changed": whether files differ from it} of this program; empty where git knows nothing."""
    try:
        return {"git_commit": git("rev-parse", "HEAD").decode().strip(), "git_changed": bool(git("diff", "--stat", "HEAD"))}
    except (OSError, subprocess.SubprocessError):
        return {}


def keep_diff(out_dir, config):
    """
    Write out_dir/diff.patch: how this program's files differ from the commit that the configuration names. Every byte that
    is no secret stays as it is, so `git apply` takes the file, whatever the user's settings of git are.
    """
    if config.get("git_changed"):
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            text = git("diff", "--no-color", "--no-ext-diff", "--no-textconv", "HEAD").decode(errors="surrogateescape")
            with replacing(Path(out_dir, "diff.patch")) as f:
                f.write(redact(text).encode(errors="surrogateescape"))


def presentable(run):
    """The entries of a run that are set, without secrets."""
    return redact({name: value for name, value in run.items() if value})


def make_tracker(out_dir, config, step, run, wandb_log=False, tensorboard_log=False, x="tokens", tables=True, models=True,
                 others=(), given=None):
    """
    The tracker of the master process: JSONL always, the rest when asked for. run, tables, models: see Wandb; others: names
    of CLIENTS besides; given: the entries of `run` that the user gave, which count more than what the environment or files
    tell a client; None: all of them.
    """
    given = run.keys() if given is None else given
    keep_diff(out_dir, config)
    log = Jsonl(out_dir, config, step)
    destinations = [log]
    if tensorboard_log:
        needed = "; needed: pip install tensorboard"
        destinations.append(Background("TensorBoard", lambda: TensorBoard(out_dir, log.kept), needed))
    if wandb_log:
        noted = about(out_dir)
        same = noted if noted.get("id") == run["id"] else {}
        own = presentable(wandb_run(run, given, same))
        write_atomic(Path(out_dir, "wandb.json"), json.dumps(same | own, indent=1))
        process = ClientProcess("W&B", out_dir=str(out_dir), config=config, run=own, x=x, before=step or -1, tables=tables)
        remedy = f"; upload the run later with: python track.py sync {shlex.quote(str(out_dir))}"
        destinations.append(Background("W&B", process.start, remedy, process, models))
    for name in others:
        variables = SWANLAB_VARIABLES if name == "SwanLab" else {}
        said = {key: os.environ.get(variable) for key, variable in variables.items()}
        own = presentable(resolve_run(run, given, said))
        process = ClientProcess(name, out_dir=str(out_dir), config=config, run=own)
        needed = "" if importlib.util.find_spec(name.lower()) else f"; needed: pip install {name.lower()}"
        destinations.append(Background(name, process.start, needed, process, models=False))
    until = time.monotonic() + START_SECONDS
    for destination in destinations[1:]:
        destination.started(until)
    return Tracker(destinations)


def start_tracking(s, config, state):
    """The tracker of train.py's settings `s`."""
    flags = {"project": s.wandb_project, "name": s.wandb_run_name, "group": s.wandb_group, "notes": s.wandb_notes,
             "tags": [tag.strip() for tag in s.wandb_tags.split(",") if tag.strip()], "job_type": s.wandb_job_type}
    given = {k: v for k, v in flags.items() if v and v != "auto"}
    usual = {"project": PROJECT, "name": f"{Path(s.data).stem}-{s.dim}x{s.n_layers}", "job_type": "train"}
    name = given.get("name") or (s.wandb_log and wandb_said("run_name")) or usual["name"]
    state["run_id"] = state["run_id"] or new_run_id(name)
    run = {"id": state["run_id"]} | usual | given
    try:
        last = state["step"] - (0.5 if state.get("row") else 0)  # this step's own row comes again
        return make_tracker(s.out_dir, redact(config), last, run, s.wandb_log, s.tensorboard_log,
                            tables=s.wandb_tables, models=s.wandb_log_model,
                            others=["SwanLab"] * s.swanlab_log + ["trackio"] * s.trackio_log, given=given)
    except OSError as e:
        fail(f"--out_dir={s.out_dir}: cannot be written ({why(e)}); make room or choose another folder")


def at_server(run):
    """(rows, step of the last one, -1 for none) that the W&B server has of a run; None: it does not know it."""
    import wandb
    from wandb.apis.public.runs import RunNotFoundError
    try:
        path = "/".join(run[key] for key in ("entity", "project", "id") if key in run)
        found = wandb.Api().run(path).load()
    except wandb.errors.CommError as e:
        if isinstance(e.exc, RunNotFoundError):
            return None
        raise OSError(f"{wandb_server()} does not serve: {str(e).splitlines()[0]}") from e
    return found["historyLineCount"] or 0, (found["historyKeys"] or {}).get("lastStep", -1)


def rising_rows(out_dir):
    """
    The rows of a run's log.jsonl as W&B keeps them: each of a later iteration than the one before,
    rows of one iteration merged.
    """
    rows = []
    for row in read_rows(Path(out_dir, "log.jsonl")):
        if not rows or row["iter"] > rows[-1]["iter"]:
            rows.append(row)
        elif row["iter"] == rows[-1]["iter"]:
            rows[-1] = rows[-1] | row
    return rows


def counted(noted, wanted):
    """How many of the wanted rows of a run the server has, when it has had time to count them."""
    until = time.monotonic() + COUNT_SECONDS
    while True:
        have, _ = at_server(noted) or (0, -1)
        if have >= wanted or time.monotonic() > until:
            return have
        time.sleep(1)


def continuing(folders, rows, new):
    """
    Of the client's folders, as they were begun, those that hold these rows of the log.jsonl, each the next of them, and
    nothing else; how many rows that makes. new: the server does not know the run, and takes folders without rows, too.
    """
    found, n = [], 0
    for folder in folders:
        items = client_rows(folder)
        pairs = list(zip(items, rows[n:]))
        same = all(item.get(k) == v for item, row in pairs for k, v in row.items() if type(v) in (int, float) and k != "time")
        if same and (pairs or new and not items):
            found, n = [*found, folder], n + len(pairs)
    return found, n


def upload(noted, folders):
    tool = [sys.executable, "-m", "wandb", "sync", "--include-online", "--include-synced", "--id", noted["id"],
            "--project", noted["project"], *folders]
    if "entity" in noted:
        tool += ["--entity", noted["entity"]]
    if subprocess.run(tool, stdin=subprocess.DEVNULL).returncode:
        fail(f"wandb sync failed for {', '.join(folders)}; nothing is lost, try again")


def sync(out_dir):
    """
    Upload what the client wrote, folder by folder, as far as it is what the server lacks, then the other rows from log.jsonl.
    The server appends whatever it is sent: a row that it has would be there twice.
    """
    noted = about(out_dir)
    if "id" not in noted:
        fail(f"{out_dir}: holds no run tracked with --wandb_log=True (no wandb.json)")
    if not Path(out_dir, "log.jsonl").exists():
        fail(f"{out_dir}: its log.jsonl is gone; upload what the client wrote with: wandb sync "
             + " ".join(noted.get("folders", [])))
    if not wandb_key():
        fail("no W&B key; log in first with: wandb login")
    if not answers(wandb_server()):
        fail(f"{wandb_server()} does not answer; try again later")
    rows = rising_rows(out_dir)
    known = at_server(noted)
    have, last = known or (0, -1)
    left = [row for row in rows if row["iter"] > last]
    folders, whole, sent = [f for f in noted.get("folders", []) if Path(f).exists()], [], 0
    if (left or not known) and have + len(left) == len(rows):  # else only the client knows the place to go on at
        whole, sent = continuing(folders, left, not known)
    if whole:
        upload(noted, whole)
    if sent < len(left):
        run = {k: v for k, v in noted.items() if k not in ("folders", "url")}
        config = json.loads(Path(out_dir, "config.json").read_text(encoding="utf-8"))
        rest = Wandb(out_dir, config, run, "tokens" if "tokens" in rows[0] else "iter", ("online", "sync"), math.inf,
                     config.get("wandb_tables", True))
        print(rest.said)
        for folder in folders:
            if folder not in whole:
                rest.models_of(folder, last)  # an earlier one would take the names of a later one
        rest.finish()
    if whole or left:
        have = counted(noted, len(rows))
    if have < len(rows):
        fail(f"{out_dir}: W&B has {have} of the run's {len(rows)} rows; sync again, and where that does not help, since it takes "
             f"none from before its last, give the run another \"id\" in {out_dir}/wandb.json first")
    print(f"{out_dir}: run {noted['id']} is complete up to iter {rows[-1]['iter'] if rows else 0}")


# ---- other programs ---------------------------------------------------------------------------------------------

def program_folder(named):
    """The folder named, refused where it holds a run; for that of the usual name a new one: out/program, out/program2, ..."""
    path, number = Path(named), 1
    while True:
        try:
            path.mkdir(parents=True, exist_ok=named != PROGRAM)
            break
        except OSError as e:
            if named != PROGRAM or not isinstance(e, FileExistsError):
                fail(f"--out_dir={path}: cannot be written ({why(e)}); choose another folder")
        number += 1  # made, so that of two programs begun together each has its own
        path = Path(f"{named}{number}")
    for name in ("trainer.json", "log.jsonl", "config.json", "wandb.json", "diff.patch"):
        if (path / name).exists():
            fail(f"--out_dir={path}: holds {name}, of another run; choose another folder")
    if number > 1:
        tell(f"tracking: {path}", sys.stderr)
    return str(path)


def track_program(words):
    split = words.index("--")
    options, command = words[:split], words[split + 1:]
    given = {"out_dir": PROGRAM, "name": "auto", "project": "auto", "wandb_log": "True"}
    patterns = []
    for word in options:
        key, equals, value = word.removeprefix("--").partition("=")
        if key == "pattern" and equals:
            patterns.append(value)
        elif key in given and equals:
            given[key] = value
        else:
            fail(f"{word}: expected --pattern=REGEX, " + ", ".join(f"--{k}={v}" for k, v in given.items()))
    if not command:
        fail("no program; expected: python track.py -- CMD ...")
    if given["wandb_log"].lower() not in BOOLS:
        fail(f"--wandb_log={given['wandb_log']}: expected True or False")
    if shutil.which(command[0]) is None:
        fail(f"{command[0]}: not a program that can be started; check its path and permissions")
    try:
        parser = Parser(patterns)
    except (re.error, OverflowError, RecursionError) as e:
        fail(f"--pattern: not a regular expression ({e})")
    for pattern in parser.patterns:
        if not pattern.groupindex:
            fail(f"--pattern={pattern.pattern}: expected a named group, such as (?P<bleu>[0-9.]+)")
    flags = {key: given[key] for key in ("name", "project") if given[key] != "auto"}
    name = flags.get("name") or wandb_said("run_name") or Path(command[0]).name
    outlast("stdout")  # the followed program does not depend on it
    given["out_dir"] = program_folder(given["out_dir"])
    run = {"id": new_run_id(name), "project": PROJECT, "name": name} | flags
    wandb_log, config = BOOLS[given["wandb_log"].lower()], redact({"command": command})
    try:
        tracker = make_tracker(given["out_dir"], config, 0, run, wandb_log, x="iter", given=flags)
    except OSError as e:
        fail(f"--out_dir={given['out_dir']}: cannot be written ({why(e)}); make room or choose another")
    code = follow(command, tracker, parser)
    tracker.finish()
    with unread():
        sys.stdout.flush()
    if code < 0:  # a signal ended the program: end the same way
        end_by_signal(-code)
    sys.exit(code)


def end_by_signal(number):
    """End this process by a signal, without a second core dump; else exit with 128 + number."""
    with contextlib.suppress(OSError, ValueError):
        import resource  # which Windows lacks, of which configurator.py tells
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    with contextlib.suppress(OSError, ValueError):  # SIGKILL takes no handler
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    sys.exit(128 + number)  # as process 1 of a container, which ignores default actions


if __name__ == "__main__":
    if "--" in sys.argv:
        track_program(sys.argv[1:])
    elif sys.argv[1:] == ["serve"]:  # started by ClientProcess
        serve()
    elif len(sys.argv) == 3 and sys.argv[1] == "sync":
        try:
            sync(sys.argv[2])
        except Exception as e:
            fail(f"{sys.argv[2]} cannot be synced now ({redact(reason(e))}); nothing is lost, try again")
    else:
        print(__doc__.strip())
        sys.exit(0 if "--help" in sys.argv else 2)
