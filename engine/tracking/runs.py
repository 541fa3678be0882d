"""
Read the runs in folders: those of train.py and track.py, and those that the W&B client wrote.

A run is an out folder with log.jsonl and config.json, or a folder of the W&B client
(offline-run-..., run-...); any other folder is searched for runs.
"""
import hashlib
import itertools
import math
import os
import re
from array import array
from pathlib import Path

import numpy as np

from engine.advice import renamed
from engine.files import stamp
from engine.tracking.log import parse_row
from engine.tracking.wandb_client import read_wandb
from engine.untrusted import open_untrusted, read_json, read_untrusted, reason

X = ("iter", "tokens", "time")
LOSSES = ("loss/train", "loss/val", "bpb/val")
SEEDS = ("seed", "random_seed", "data_seed")  # names of a seed among settings

# Limits, because logs are untrusted.
MAX_METRICS = 1000    # metrics of a run
MAX_LINE = 1 << 23    # bytes of a line of a log; longer ones are skipped
MAX_FILLED = 1 << 26  # NaNs of a run, which fill the gaps before and between its metrics' values
MAX_NAME = 200        # characters of a metric's name
MAX_ITEMS, MAX_TEXT, MAX_DEPTH = 1000, 10_000, 8  # items, characters and nesting of settings
MAX_DIFF = 1 << 24    # bytes of a diff.patch
# Matches a file's part of a diff.patch if no training reads that file.
NO_TRAINING = re.compile(rb"$|diff --git a/((tests|doc|bench|page|examples)/|\S*\.md )")
CHUNK = 1 << 20       # bytes to read at once
TAIL = 48             # number of last bytes kept, to notice that the log has been rewritten


def first_prompt(config):
    """Return the first prompt of a run's samples, or "" if its settings have no prompt."""
    prompts = config.get("sample_prompt")
    return prompts.split("|")[0] if isinstance(prompts, str) and prompts != "auto" else ""


def encodable(text):
    """Return a text with lone surrogates escaped, which JSON and folder names may contain."""
    return text.encode("utf-8", "backslashreplace").decode()


def tame(value, depth=MAX_DEPTH):
    """Return an untrusted JSON value, cut where it is too long, too large or too deep to show."""
    if isinstance(value, str):
        return encodable(value if len(value) <= MAX_TEXT else f"{value[:MAX_TEXT]}...")
    if isinstance(value, (dict, list)) and not depth:
        return "..."
    if isinstance(value, dict):
        items = itertools.islice(value.items(), MAX_ITEMS)
        return {encodable(str(name)[:MAX_NAME]): tame(item, depth - 1) for name, item in items}
    if isinstance(value, list):
        return [tame(item, depth - 1) for item in value[:MAX_ITEMS]]
    return value


def with_own_names(settings):
    """
    Return the settings of a run under the names of this version, if train.py wrote them: it always
    writes vocab_source. Another program's `patience` is not our early_stop, and keeps its name.
    """
    return renamed(settings) if "vocab_source" in settings else settings


def derived(config, folder):
    """
    Return settings that config.json does not have in a comparable form: {"text_bytes": bytes of
    text, "diff": checksum of the uncommitted change to the program}, if a run of train.py has them.
    """
    found, meta = {}, config.get("dataset")
    if isinstance(meta, dict):
        sizes = meta.get("train_bytes"), meta.get("val_bytes")
        if all(type(size) is int for size in sizes):
            found["text_bytes"] = sum(sizes)
    if config.get("git_changed") is True:
        try:
            patch = read_untrusted(os.path.join(folder, "diff.patch"), MAX_DIFF)
            parts = [part for part in re.split(rb"(?m)^(?=diff --git )", patch)
                     if not NO_TRAINING.match(part)]
            if parts:
                found["diff"] = hashlib.sha256(b"".join(parts)).hexdigest()[:10]
        except (OSError, ValueError):
            found["diff"] = "unknown"
    return found


class Run:
    """
    A run, as far as its log has been read. Its numbers are kept in columns. Its tables, the
    values that are lists, stay in the log: only the positions of their lines are kept.

    config: {setting: value}; names from earlier versions of the program are replaced by current
        ones.
    count: number of rows.
    columns: {metric: array with a number for each row up to the last one that has the metric, NaN
        for a row without it}.
    tables: [(offset, size in bytes)] of the log's lines that contain tables.
    metrics: {name: last value}.
    evaluations: [{"iter" or loss: value}], one for each evaluation.
    problem: what could not be read, in words; "" if everything was read.
    is_foreign: whether the W&B client or another program than train.py wrote it.
    version: number that increases when settings change or the log has been rewritten.
    """

    def __init__(self, folder, name=""):
        self.name, self.folder, self.version, self.config = name or str(folder), Path(folder), 0, {}
        # Joined once: the page looks at these files of 200 runs twice a second.
        self.log_path = os.path.join(folder, "log.jsonl")
        self.config_path = os.path.join(folder, "config.json")
        self.config_stamp, self.problem, self.from_wandb = (), "", False
        self.minutes_at, self.minutes = (), 0.0
        self.reset()

    @property
    def is_foreign(self):
        return self.from_wandb or "vocab_source" not in self.config

    @property
    def seed(self):
        """The seed of the run, or None if its settings have no seed."""
        found = (self.config[name] for name in SEEDS if name in self.config)
        return next((seed for seed in found if isinstance(seed, (int, float, str))), None)

    def reset(self):
        """Forget all rows, to read the log from the beginning."""
        self.version += 1
        self.offset, self.tail, self.stamp, self.chunk = 0, b"", (), CHUNK
        self.count, self.columns, self.tables = 0, {}, []
        self.fillable = MAX_FILLED
        self.in_long_line = False  # reading continues inside a line that is skipped
        self.metrics, self.evaluations = {}, []

    def read(self):
        """
        Read the next chunk of the log, from the beginning if the log has been rewritten. Return
        whether there may be another chunk. Raises OSError.
        """
        self.read_config()
        now = stamp(self.log_path)
        if self.stamp == now:
            return False
        with open_untrusted(self.log_path) as f:
            f.seek(self.offset - len(self.tail))
            if f.read(len(self.tail)) != self.tail:
                self.reset()
                f.seek(0)
            data = f.read(self.chunk)
        whole = data.rfind(b"\n") + 1  # bytes of whole lines; the rest is read again later
        if not whole and len(data) >= MAX_LINE:  # the line is too long: skip this part of it
            whole, self.in_long_line = len(data), True
            self.problem = f"log.jsonl: lines of more than {MAX_LINE:,} bytes are left out"
        for line in data[:whole].splitlines(keepends=True):
            row = None if self.in_long_line else parse_row(line)
            self.in_long_line = self.in_long_line and not line.endswith(b"\n")
            if row is not None and self.add_row(row):
                self.tables.append((self.offset, len(line)))
            self.offset += len(line)
        self.tail = (self.tail + data[:whole])[-TAIL:]
        if len(data) == self.chunk:
            # If no line ends in this chunk, the next call reads twice as much from its beginning.
            self.chunk = CHUNK if whole else 2 * self.chunk
            return True
        self.stamp = now
        return False

    def read_config(self):
        """Read config.json if it has changed, as it does when a run is resumed."""
        try:
            now = stamp(self.config_path)
        except OSError:
            now = None
        if now == self.config_stamp:
            return
        before, self.config, self.problem, self.config_stamp = self.config, {}, "", now
        if os.path.lexists(self.config_path):
            try:
                self.config = tame(with_own_names(read_json(self.config_path)))
                self.config |= derived(self.config, self.folder)
            except (OSError, ValueError, MemoryError) as e:
                self.problem = f"config.json: {reason(e)}"
        if self.count and self.config != before:
            self.version += 1

    def add_row(self, row):
        """Add a row's values to the columns. Return whether the row has tables."""
        if not isinstance(row["iter"], (int, float)):
            return False
        has_tables, metrics, columns, count = False, self.metrics, self.columns, self.count
        for name, value in row.items():
            kind = type(value)
            full = len(metrics) >= MAX_METRICS and name not in metrics and name not in X
            if kind is list or kind is dict or full:
                has_tables |= kind is list
                continue
            if name not in metrics and (len(name) > MAX_NAME or name != encodable(name)):
                continue
            if kind is int and name in LOSSES and is_finite(value):
                value = float(value)  # W&B writes a loss of 2.0 as 2
            metrics[name] = tame(value) if kind is str else value
            if kind is float or kind is int:
                column = columns.get(name)
                if column is None:
                    column = columns[name] = array("d" if name in X else "f")
                missing = count - len(column)
                if missing:  # NaN for the rows since the metric's last number
                    self.fillable -= missing
                    if self.fillable < 0:
                        continue
                    column.extend(array(column.typecode, [math.nan]) * missing)
                column.append(value if -1e300 < value < 1e300 else math.nan)
        self.count += 1
        # The loop above leaves out a loss/val that is a list, a dict or beyond MAX_METRICS.
        if "loss/val" in row and "loss/val" in metrics:
            self.evaluations.append({k: metrics[k] for k in ("iter", *LOSSES) if k in metrics})
        return has_tables

    def column(self, name, start=0):
        """Return a metric's values from row `start` on, NaN in rows without it: (rows,)."""
        found = np.full(self.count - start, np.nan)
        values = np.array(self.columns.get(name, ())[start:], dtype=float)
        found[:len(values)] = values
        return found

    def x(self, axis, start=0):
        """Return the rows' positions from `start` on: iter, tokens, or seconds without pauses."""
        if axis == "seconds":
            return np.array(seconds(np.nan_to_num(self.column("time")))[start:])
        return self.column(axis if axis in self.columns else "iter", start)

    def line(self, metric, axis):
        """Return (x, y) of the rows that have the metric: two arrays."""
        x, y = self.x(axis), self.column(metric)
        finite = np.isfinite(x) & np.isfinite(y)
        return x[finite], y[finite]

    def results(self):
        """
        Return {column of the table: value}, and each metric under its own name: the best value of
        a validation loss, the last value of any other. The evaluation before the first step is
        never the best if there are others: no model of it is kept.
        """
        metrics, evaluations = self.metrics, self.evaluations
        finite = [row for row in evaluations if is_finite(row["loss/val"])]
        finite = [row for row in finite if row["iter"]] or finite
        last = evaluations[-1] if evaluations else metrics
        best = min(finite, key=lambda row: row["loss/val"], default={})
        best_losses = {k: best[k] for k in LOSSES[1:] if k in best}
        found = metrics | best_losses
        found |= {f"last {k}": last[k] for k in LOSSES if k in last}
        found |= {f"best {k}": value for k, value in best_losses.items()}
        if last["iter"] != metrics["iter"]:
            found["last at iter"] = last["iter"]
        if best:
            found["best at iter"] = best["iter"]
        if self.minutes_at != (self.version, self.count):  # computed once for each new row
            self.minutes_at = self.version, self.count
            self.minutes = float(self.x("seconds")[-1]) / 60
        return found | {"minutes": self.minutes}


def is_finite(value):
    """Return whether a value is an int or float between -1e300 and 1e300, so not NaN either."""
    return type(value) in (int, float) and -1e300 < value < 1e300


def canonical(value):
    """Convert a whole float to an int for comparisons, because W&B writes 0.0 as 0."""
    return int(value) if type(value) is float and value.is_integer() else value


def read_run(folder):
    """Return the Run of a folder, read to its end. Raises ValueError if it is not one."""
    folder = Path(folder)
    try:
        if logs := list(folder.glob("*.wandb")):
            for path in logs:
                open_untrusted(path).close()  # raises if it is a pipe or a device
            run = read_wandb_run(folder)
        else:
            run = Run(folder)
            while run.read():
                pass
            if not run.config and (run.problem or run.config_stamp is None):
                raise ValueError(run.problem or "there is no config.json")
        if run.count:
            run.results()  # if it fails, fail here: other runs can still be compared
    except ImportError:
        raise
    except Exception as e:  # the folder may hold anything
        raise ValueError(f"{folder}: not a run ({reason(e)}); expected an out folder with "
                         "config.json and log.jsonl, or one of W&B's") from e
    if not run.count:
        raise ValueError(f"{folder}: its log has no rows yet")
    return run


def read_wandb_run(folder):
    """Return the Run of a folder that the W&B client wrote, online or offline."""
    run, name = Run(folder), folder.name
    run.from_wandb = True
    for record in read_wandb(folder):
        if record["type"] == "run":
            name = record["run"].get("display_name", name)
            update = record["run"]["config"]["update"]
            settings = {k: v for k, v in update.items() if k != "_wandb"}
            run.config = tame(with_own_names(run.config | settings))
        elif record["type"] == "history":
            item = record["history"]["item"]
            step = item.get("iter", item["_step"])
            run.add_row(item | {"iter": step, "time": item["_timestamp"]})
    run.name = f"{name} ({folder.name})"
    return run


def run_folders(names):
    """Return the run folders in each named folder, each once; keep a named folder without runs."""
    found = {}
    for name in map(Path, names):
        logs = itertools.chain(name.rglob("log.jsonl"), name.rglob("*.wandb"))
        inside = sorted({path.parent for path in logs})
        found |= {folder.resolve(): folder for folder in (inside or [name])}
    return list(found.values())


def seconds(times):
    """
    Return the seconds since the first of these times, without pauses between a stop and its
    continuation: a gap far above the median counts as the median.
    """
    gaps = np.maximum(0.0, np.diff(times))
    # The lower median: if there are two gaps, one of them may be a pause.
    usual = np.sort(gaps)[(len(gaps) - 1) // 2] if len(gaps) else 0.0
    return [0.0, *np.cumsum(np.where(gaps < 20 * usual + 10, gaps, usual)).tolist()]
