"""
log.jsonl: the rows of a run, one JSON object a line.

A row is {"iter": step, "tokens": tokens so far, metric: number, ...}. A list in it holds rows of
one of the TABLES; a dict is a histogram, {"counts": N ints, "edges": N + 1 floats}.
"""
import contextlib
import errno
import json
import math
import os
import shutil
import sys
import time
from pathlib import Path

from engine.files import replacing, write_atomic
from engine.streams import tell
from engine.tracking.redact import redact
from engine.untrusted import open_untrusted, parse_json, read_json

TABLES = {  # {name: columns}
    "documents": ["split", "text", "tokens", "length", "unknown", "byte fallback"],
    "data": ["", "train", "val"],
    "pieces": ["piece", "times", "share"],  # the most frequent in the data
    "samples": ["prompt", "how", "text"],
    "settings": ["setting", "before", "now"],  # settings that changed when the run was resumed
    "notes": ["metric", "value", "what it means"],  # metrics outside their usual range
    "predictions": ["split", "input", "target", "p(target)",
                    "1st", "p(1st)", "2nd", "p(2nd)", "3rd", "p(3rd)"],
}


def parse_row(line):
    """Return a line of a log.jsonl as a dict; None if it is not a row, such as a truncated line."""
    try:
        row = parse_json(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("iter"), (int, float)) else None


def read_rows(path):
    """Return the rows of a log.jsonl; skip lines that are not rows."""
    with open_untrusted(path) as file:
        rows = map(parse_row, file.read().split(b"\n"))
        return [row for row in rows if row is not None]


def rising_rows(out_dir):
    """
    Return the rows of a run's log.jsonl as W&B stores them, with increasing iterations: merge rows
    of the same iteration, and leave out a row whose iteration is lower than that of the row before.
    """
    rows = []
    for row in read_rows(Path(out_dir, "log.jsonl")):
        if not rows or row["iter"] > rows[-1]["iter"]:
            rows.append(row)
        elif row["iter"] == rows[-1]["iter"]:
            rows[-1] = rows[-1] | row
    return rows


def tables_of(row):
    """Return the names of the tables in a row; a metric of another program may have such a name."""
    return [name for name in TABLES if isinstance(row.get(name), list)]


def convert_row(row, table, histogram):
    """
    Return a row as a tracker logs it. Replace each table by table(name, lines), renamed to
    tables/NAME, and each histogram by histogram((counts, edges)).
    """
    found = {}
    for name, value in row.items():
        if isinstance(value, list):
            found[f"tables/{name}"] = table(name, value)
        elif isinstance(value, dict):
            found[name] = histogram((value["counts"], value["edges"]))
        else:
            found[name] = value
    return found


def redact_row(row):
    """
    Return a row with secrets redacted in the text that the user may have written: the prompts of
    its samples and its changed settings. Text of the model or of the data is not changed.
    """
    tables, found = tables_of(row), dict(row)
    if "samples" in tables:
        found["samples"] = [[redact(prompt), *rest] for prompt, *rest in row["samples"]]
    if "settings" in tables:
        found["settings"] = []
        for name, *values in row["settings"]:
            values = [redact({name: value})[name] for value in values]
            found["settings"].append([name, *values])
    return found


class Jsonl:
    """
    The writer of out_dir/log.jsonl and out_dir/config.json, the resolved settings. Each row gets
    its "time" in Unix seconds and is written at once. While writing fails, rows wait in memory. If
    log.jsonl is deleted or moved during the run, both files are written again.
    """

    def __init__(self, out_dir, config, step):
        """Continue a log after iteration `step`: drop later rows, which a crashed session wrote."""
        self.path = Path(out_dir, "log.jsonl")
        self.config = json.dumps(config, indent=1)
        write_atomic(self.path.with_name("config.json"), self.config)
        # The last row of earlier sessions. A new run has none, not even one at 0 tokens: hence -1.
        self.last_row = {} if step else {"tokens": -1}
        if step and self.path.exists():
            rows = [row for row in read_rows(self.path) if row["iter"] <= step]
            write_atomic(self.path, "".join(json.dumps(row) + "\n" for row in rows))
            self.last_row = rows[-1] if rows else {}
        self.file = open(self.path, "ab+" if step else "wb+", buffering=0)
        self.waiting = b""  # lines that are not written yet
        self.warned = False

    def restore(self):
        """
        Write all rows again if the file was deleted or moved: its open descriptor still reads them.
        If another file has replaced a deleted one, as editors do when they save, append to that.
        """
        opened = os.fstat(self.file.fileno())
        try:
            if os.path.samestat(opened, os.stat(self.path)) or opened.st_nlink:
                return
        except FileNotFoundError:
            trainer = read_json(self.path.with_name("trainer.json"), default={})
            if trainer.get("pid", os.getpid()) != os.getpid():
                raise OSError(errno.EBUSY, "another process trains there") from None
            self.file.seek(0)
            with replacing(self.path) as f:
                shutil.copyfileobj(self.file, f)
            write_atomic(self.path.with_name("config.json"), self.config)
            tell(f"warning: {self.path} was deleted or moved; it is written again, with all its "
                 "rows", sys.stderr)
        self.file.close()
        self.file = open(self.path, "ab+", buffering=0)

    def write(self):
        """Write the waiting rows; warn once if that fails."""
        try:
            self.restore()
            while self.waiting:
                self.waiting = self.waiting[self.file.write(self.waiting):]
        except OSError as e:
            if not self.warned:
                self.warned = True
                tell(f"warning: log.jsonl cannot be written ({e.strerror}); rows stay in memory "
                     "until it can", sys.stderr)

    def log(self, row):
        line = row | {"time": round(time.time(), 3)}
        for name, value in row.items():
            if isinstance(value, float) and not math.isfinite(value):
                line[name] = str(value)  # JSON has neither NaN nor infinity
        self.waiting += (json.dumps(line) + "\n").encode()
        self.write()

    def alert(self, title, text):
        """Ignore an alert: it can be computed from the rows."""

    def model(self, path, metrics, aliases):
        """Ignore a model: it is in the same folder."""

    def finish(self):
        """Write the waiting rows, even if the folder was deleted; warn of rows that are lost."""
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
        self.write()
        if self.waiting:
            rows = len(self.waiting.splitlines())
            tell(f"warning: {self.path} lacks its last {rows} rows", sys.stderr)
        self.file.close()
