"""
The runs in a folder, read once and then on as they grow: numbers in columns of float32, texts where they stand in the file.

A client never sends a path: it names a run of the list. Log and configuration are data that anyone may have written.
"""
import base64
import json
import math
import os
import re
import socket
import threading
import time
from array import array
from itertools import repeat
from pathlib import Path

import numpy as np

import compare
from engine.files import write_atomic
from page.server import Response, as_file
from track import TABLES, Alerts, about, parse_row

X = ("iter", "tokens", "time")
MOST_METRICS = 1000  # of a run
PIECE = 1 << 20      # bytes read at once
MOST_LINE = 1 << 26
BUSY = 0.25          # seconds of reading before the reader answers
NEW_ROWS = 200       # that a client is told of one by one
CHECK = 48           # bytes before the place where reading goes on, which show whether the file was written anew


class Run:
    """log.jsonl and config.json of a folder, as far as they were read."""

    def __init__(self, name, folder):
        self.name, self.folder, self.version, self.config = name, Path(folder), 0, {}
        self.forget()

    def forget(self):
        self.version, self.offset, self.end, self.stat, self.piece = self.version + 1, 0, b"", None, PIECE
        self.count, self.columns, self.texts = 0, {}, []  # texts: (offset, length) of rows with tables
        self.metrics, self.evaluations = {}, []

    def read(self):
        """Read one piece more; whether there may be another."""
        try:
            stat = os.stat(self.folder / "log.jsonl")
            if self.stat == (stat.st_ino, stat.st_size, stat.st_mtime_ns):
                return False
            with open(self.folder / "log.jsonl", "rb") as f:
                f.seek(self.offset - len(self.end))
                if f.read(len(self.end)) != self.end:
                    self.forget()
                    f.seek(0)
                data = f.read(self.piece)
        except OSError:
            return False
        if not self.offset:
            self.config = read_json(self.folder / "config.json")
        whole = data.rfind(b"\n") + 1
        for line in data[:whole].splitlines(keepends=True):
            self.take(line)
            self.offset += len(line)
        self.end = (self.end + data[:whole])[-CHECK:]
        if len(data) == self.piece and (whole or self.piece < MOST_LINE):
            self.piece = PIECE if whole else 2 * self.piece  # a line that is longer than a piece
            return True
        self.stat = stat.st_ino, stat.st_size, stat.st_mtime_ns
        return False

    def take(self, line):
        row = parse_row(line)
        if row is None or not isinstance(row["iter"], (int, float)):
            return
        texts = False
        for name, value in row.items():
            kind = type(value)
            if kind is float or kind is int:
                column = self.columns.get(name)
                if column is None:
                    if len(self.columns) >= MOST_METRICS:
                        continue
                    column = self.columns[name] = array("d" if name in X else "f")
                if len(column) < self.count:
                    column.extend(repeat(math.nan, self.count - len(column)))
                column.append(value if -1e300 < value < 1e300 else math.nan)
            elif kind is list:
                texts = True
        self.count += 1
        compare.fold(row, self.metrics, self.evaluations)
        if texts:
            self.texts.append((self.offset, len(line)))

    def column(self, name, start=0):
        """A metric's values from row `start` on, NaN where a row has none: (rows,)."""
        found = np.full(self.count - start, np.nan)
        values = np.array(self.columns.get(name, ())[start:], dtype=float)
        found[:len(values)] = values
        return found

    def x(self, axis, start=0):
        """Where the rows from `start` on stand on an axis: iter, tokens, or seconds without the pauses."""
        if axis == "seconds":
            return np.array(compare.seconds(np.nan_to_num(self.column("time")))[start:])
        return self.column(axis if axis in self.columns else "iter", start)

    def results(self):
        """What compare.py's table has of the run."""
        return compare.summary(self.metrics, self.evaluations, self.x("seconds")[-1] / 60) if self.count else {}

    def tables(self, most=40):
        """[{"iter", "samples": [[...]], ...}] of the last rows with tables."""
        found = []
        try:
            with open(self.folder / "log.jsonl", "rb") as f:
                for offset, length in self.texts[-most:]:
                    f.seek(offset)
                    row = parse_row(f.read(length)) or {}
                    found.append({"iter": row.get("iter")} | {k: row[k] for k in TABLES if isinstance(row.get(k), list)})
        except OSError:
            pass
        return found

    def trainer(self, locked):
        """The process that trains here now, None: nobody. locked: see locks()."""
        try:
            path = self.folder / "trainer.json"
            found, inode = json.loads(path.read_text(encoding="utf-8")), path.stat().st_ino
            pid = int(found["pid"])
            if found["host"] != socket.gethostname()[:64] or pid <= 1:
                return None
            if locked is None:
                os.kill(pid, 0)
            return pid if locked is None or (pid, inode) in locked else None
        except (OSError, ValueError, KeyError, TypeError, OverflowError):
            return None


def locks():
    """{(process, inode)} of the locks on files that this system's processes hold; None where nobody says."""
    try:
        words = [line.split() for line in Path("/proc/locks").read_text(encoding="utf-8").splitlines()]
        return {(int(w[4]), int(w[5].split(":")[2])) for w in words if w[1] == "FLOCK"}
    except (OSError, ValueError, IndexError):
        return None


def read_json(path):
    """The object in a file; {} where there is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return found if isinstance(found, dict) else {}
    except (OSError, ValueError, RecursionError):
        return {}


def thin(x, y, buckets):
    """At most two points for each bucket of neighbours, the least and the greatest, so that no peak is lost."""
    there = np.isfinite(y) & np.isfinite(x)
    x, y = x[there], y[there]
    if len(y) <= 2 * buckets:
        return x, y
    size = math.ceil(len(y) / buckets)
    whole = np.append(y, np.repeat(y[-1], -len(y) % size)).reshape(-1, size)
    first = np.arange(len(whole)) * size
    keep = np.concatenate((first + whole.argmin(1), first + whole.argmax(1), [0, len(y) - 1]))
    keep = np.unique(np.minimum(keep, len(y) - 1))
    return x[keep], y[keep]


def clean(value):
    """What JSON has: no NaN."""
    if isinstance(value, dict):
        return {k: clean(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, np.ndarray)):
        return [clean(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Runs:
    """All runs below a folder. `extra()` gives what live() tells besides."""

    def __init__(self, root, extra=dict):
        self.root, self.extra, self.runs, self.lock = Path(root), extra, {}, threading.RLock()
        self.looked, self.read_at, self.locked = -math.inf, -math.inf, set()

    def look(self):
        """Find new runs and lose those that are gone."""
        found = {}
        for folder, inside, names in os.walk(self.root):
            inside[:] = sorted(d for d in inside if d not in ("checkpoints", "tensorboard") and not d.startswith("."))
            if Path(folder).relative_to(self.root).parts[3:]:
                inside.clear()
            if "log.jsonl" in names and "config.json" in names:
                found[folder] = self.runs.get(folder) or Run(folder, folder)
        self.runs = found

    def refresh(self):
        """Read what is new, for a moment; whether there is more. The files are asked twice a second, whoever watches."""
        with self.lock:
            now = time.monotonic()
            if now - self.looked > 3:
                self.looked = now
                self.look()
            if now - self.read_at < 0.4:
                return False
            busy = False
            self.locked = locks()
            for run in list(self.runs.values()):
                while run.read():
                    if time.monotonic() - now > BUSY:
                        busy = True
                        break
                if busy or time.monotonic() - now > BUSY:
                    break
            else:
                self.read_at = time.monotonic()
                return False
            return True

    def run(self, name):
        """The run of this name. ValueError: there is none."""
        self.refresh()
        if not isinstance(name, str) or name not in self.runs:
            raise ValueError(f"there is no run {str(name)[:200]!r}")
        return self.runs[name]

    def folder(self, name):
        return self.run(name).folder

    def notes(self):
        return read_json(self.root / ".page" / "notes.json")

    # ---- routes: page.js and compare.js ask these

    def routes(self):
        return {"GET /api/runs": self.table, "GET /api/curves": self.curves, "GET /api/csv": self.csv,
                "GET /api/live": self.live, "GET /api/run": self.details, "POST /api/notes": self.note}

    def entry(self, run):
        """A run's line in the table."""
        numbers = {k: v for k, v in run.results().items() if k in compare.RESULTS or "/" in k}
        return {"name": run.name, "rows": run.count, "max_iters": run.config.get("max_iters"), "results": clean(numbers),
                "training": run.trainer(self.locked) is not None}

    def table(self, request):
        """What differs between the runs, what each reached, and the names of all metrics."""
        self.refresh()
        with self.lock:
            found, notes = list(self.runs.values()), self.notes()
            settings = compare.differences([{"config": run.config} for run in found])
            metrics = dict.fromkeys(name for run in found for name in run.columns if name not in X)
            entries = [self.entry(run) | {"settings": clean({k: run.config.get(k) for k in settings})}
                       | notes.get(run.name, {}) for run in found]
            return {"settings": settings, "metrics": list(metrics), "runs": entries,
                    "columns": [k for k in compare.RESULTS if any(k in entry["results"] for entry in entries)]}

    def curves(self, request):
        """A metric of all runs, or of `run`: {"runs": [[name, points, rows read, version]], "x", "y": float32, base64}."""
        metric, axis, only = (request.query.get(name, "") for name in ("metric", "x", "run"))
        buckets = max(100, min(300, 30000 // max(1, 1 if only else len(self.runs))))
        low, high = (float(request.query.get(name, default)) for name, default in (("from", -math.inf), ("to", math.inf)))
        self.refresh()
        names, xs, ys = [], [], []
        with self.lock:
            for run in [self.run(only)] if only else self.runs.values():
                if metric in run.columns:
                    x, y = run.x(axis), run.column(metric)
                    x, y = x[np.isfinite(y)], y[np.isfinite(y)]
                    inside = np.flatnonzero((x >= low) & (x <= high))
                    around = slice(max(0, inside.min(initial=len(x)) - 1), inside.max(initial=-1) + 2)  # lines go to the edge
                    x, y = thin(x[around], y[around], buckets)
                    names.append([run.name, len(x), run.count, run.version])
                    xs.append(x.astype("<f4"))
                    ys.append(y.astype("<f4"))
        packed = [base64.b64encode(np.concatenate(part or [np.zeros(0, "<f4")]).tobytes()).decode() for part in (xs, ys)]
        return {"runs": names, "x": packed[0], "y": packed[1]}

    def csv(self, request):
        """All values of a metric, a line each."""
        metric, lines = request.query.get("metric", ""), ["run,iter,tokens,seconds,value"]
        with self.lock:
            for run in self.runs.values():
                x = [run.x(axis) for axis in ("iter", "tokens", "seconds")]
                name = '"' + run.name.replace('"', '""') + '"'
                lines += [f"{name},{i:.0f},{t:.0f},{s:.3f},{v:.7g}" for i, t, s, v in zip(*x, run.column(metric)) if v == v]
        return Response("\n".join(lines) + "\n", kind="text/csv", headers=as_file("curves.csv"))

    def live(self, request):
        """Events: rows as they are written, {"run", "from": row, "rows": {metric: [values]}}, and what extra() gives."""
        self.refresh()
        seen, told, said = {run.name: (run.version, run.count) for run in self.runs.values()}, {}, 0.0
        yield {"hello": True}
        while True:
            busy = self.refresh()
            with self.lock:
                events = [self.news(run, *seen.get(run.name, (0, 0))) for run in self.runs.values()
                          if seen.get(run.name) != (run.version, run.count)]
                seen = {run.name: (run.version, run.count) for run in self.runs.values()}
            for name, value in self.extra().items():
                if told.get(name) != value:
                    told[name] = value
                    events.append({name: value})
            if events or time.monotonic() - said > 5:
                said = time.monotonic()
                yield from events or [None]
            time.sleep(0.02 if busy else 0.5)

    def news(self, run, version, start):
        if version != run.version or run.count - start > NEW_ROWS:
            return {"run": self.entry(run), "again": True}
        rows = {name: clean(run.column(name, start)) for name in run.columns}
        rows = {name: values for name, values in rows.items() if any(v is not None for v in values)}
        return {"run": self.entry(run), "from": start, "rows": rows | {"seconds": clean(run.x("seconds", start))}}

    def details(self, request):
        """What the page of one run shows besides its curves."""
        run = self.run(request.query.get("run"))
        with self.lock:
            alerts, check = [], Alerts()
            watched = [name for name in ("iter", *Alerts.WATCHED) if name in run.columns]
            for row in zip(*(run.column(name).tolist() for name in watched)):
                alerts += check.check({k: v for k, v in zip(watched, row) if v == v})
            found = about(run.folder)
            files = {path.name: path.stat().st_size for path in sorted(run.folder.glob("*.gguf"))}
            steps = sorted(path.name for path in (run.folder / "checkpoints").glob("step_*") if path.is_dir())
            return self.entry(run) | {
                "config": clean(run.config), "tables": clean(run.tables()), "alerts": alerts[-50:], "files": files,
                "checkpoints": steps, "evaluation": clean(read_json(run.folder / "evaluation.json")),
                "wandb": found.get("url", ""), **self.notes().get(run.name, {})}

    def note(self, request):
        """Keep notes, tags and colour of a run, in a file of the page's own."""
        given = request.json()
        run = self.run(given.get("run"))
        with self.lock:
            notes = self.notes()
            said = {k: str(given[k])[:5000] for k in ("notes", "tags", "color") if k in given}
            if not re.fullmatch("#[0-9a-f]{6}", said.get("color", "#000000")):
                raise ValueError("a colour is #rrggbb")
            notes[run.name] = notes.get(run.name, {}) | said
            write_atomic(self.root / ".page" / "notes.json", json.dumps(notes, indent=1))
        return {}
