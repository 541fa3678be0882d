"""
The runs in a folder, read once and then on as they grow; compare.py has the reader.

A client never sends a path: it names a run of the list. Log and configuration are data that anyone may have written.
"""
import base64
import contextlib
import fcntl
import json
import math
import os
import re
import socket
import threading
import time
from pathlib import Path

import numpy as np

import compare
from compare import Run
from engine.files import read_json, write_atomic
from page.server import Response, as_file
from track import TABLES, Alerts, about, parse_row

BUSY = 0.15     # seconds that a long log is read before others have their turn
NEW_ROWS = 200  # that a client is told of one by one


def glance(run, places=24, window=1 << 15):
    """A Run of a few rows from all over a log, to be shown while the log is read; None of a short one."""
    found = Run(run.folder)
    found.version, found.config = 0, read_json(run.folder / "config.json")
    with contextlib.suppress(OSError), open(run.folder / "log.jsonl", "rb") as f:
        size = f.seek(0, os.SEEK_END)
        window = min(window, size // places)
        if window < 1 << 13:
            return None
        for n in range(places):
            f.seek(n * size // places if n + 1 < places else size - window)
            lines = f.read(window).split(b"\n")[1:-1]
            rows = lines[:1] + [line for line in lines[1:] if b'"loss/val"' in line][:1] + lines[-1:] * (n == places - 1)
            for row in filter(None, map(parse_row, rows)):
                found.take(row)
    return found if found.count else None


def tables(run, most=40):
    """[{"iter", "samples": [[...]], ...}] of a run's last rows with tables."""
    found = []
    with contextlib.suppress(OSError), open(run.folder / "log.jsonl", "rb") as f:
        for offset, length in run.tables[-most:]:
            f.seek(offset)
            row = parse_row(f.read(length)) or {}
            found.append({"iter": row.get("iter")} | {k: row[k] for k in TABLES if isinstance(row.get(k), list)})
    return found


def trainer(folder, locked):
    """The process that trains in a folder now, None: nobody. locked: see locks()."""
    try:
        path = folder / "trainer.json"
        holders = is_held(path) if locked is None else locked.get(path.stat().st_ino)
        if not holders:
            return None
        found = json.loads(path.read_text(encoding="utf-8"))
        pid = int(found["pid"])
        if found["host"] != socket.gethostname()[:64] or pid <= 1:
            return None
        return pid if locked is None or pid in holders else None
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None


def locks():
    """{inode: [process]} of the locks on files that this system's processes hold; None where nobody says."""
    try:
        found, words = {}, [line.split() for line in Path("/proc/locks").read_text(encoding="utf-8").splitlines()]
        for w in words:
            if w[1] == "FLOCK":
                found.setdefault(int(w[5].split(":")[2]), []).append(int(w[4]))
        return found
    except (OSError, ValueError, IndexError):
        return None


def is_held(path):
    """Whether a process holds the lock on a file."""
    try:
        with open(path, "rb") as f:
            fcntl.flock(f, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    except OSError:
        return False


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
        self.root, self.extra, self.runs, self.glances, self.lock = Path(root), extra, {}, {}, threading.RLock()
        self.looked, self.read_at, self.locked = -math.inf, -math.inf, {}

    def look(self):
        """Find new runs and lose those that are gone."""
        self.looked, found = time.monotonic(), {}
        for folder, inside, names in os.walk(self.root):
            inside[:] = sorted(d for d in inside if d not in ("checkpoints", "tensorboard") and not d.startswith("."))
            if Path(folder).relative_to(self.root).parts[3:]:
                inside.clear()
            if "log.jsonl" in names and "config.json" in names:
                found[folder] = self.runs.get(folder) or Run(folder)
                if folder not in self.runs and (first := glance(found[folder])):
                    self.glances[folder] = first
        self.runs = found

    def refresh(self, most=0.05):
        """Read what is new, for `most` seconds; whether there is more. Files are asked twice a second, whoever watches."""
        with self.lock:
            now = time.monotonic()
            if now - self.looked > 3:
                self.look()
            if now - self.read_at < 0.4:
                return False
            self.locked, end = locks(), time.monotonic() + most
            for name, run in list(self.runs.items()):
                more = True
                while more and time.monotonic() < end:
                    more = False
                    with contextlib.suppress(OSError):
                        more = run.read()
                if more:
                    return True
                self.glances.pop(name, None)
            self.read_at = time.monotonic()
            return False

    def shown(self):
        """The runs as far as they were read; a few rows of each that is being read for the first time."""
        return [self.glances.get(name, run) for name, run in self.runs.items()]

    def run(self, name):
        """The run of this name. ValueError: there is none."""
        self.refresh()
        if not isinstance(name, str) or name not in self.runs:
            raise ValueError(f"there is no run {str(name)[:200]!r}")
        return self.runs[name]

    def whole(self, names):
        """The runs of these names, read to their ends."""
        found = [self.run(name) for name in names]
        while self.refresh():
            pass
        return found

    def folder(self, name):
        return self.run(name).folder

    def notes(self):
        return read_json(self.root / ".page" / "notes.json")

    # ---- routes: the modules of the page ask these

    def routes(self):
        return {"GET /api/runs": self.table, "GET /api/curves": self.curves, "GET /api/csv": self.csv,
                "GET /api/live": self.live, "GET /api/run": self.details, "POST /api/bands": self.bands,
                "POST /api/notes": self.note, "POST /api/save": self.save}

    def entry(self, run):
        """A run's line in the table."""
        numbers = {k: v for k, v in run.results().items() if k in compare.RESULTS or "/" in k} if run.count else {}
        return {"name": run.name, "rows": run.count, "max_iters": clean(run.config.get("max_iters")), "results": clean(numbers),
                "training": trainer(run.folder, self.locked) is not None}

    def table(self, request):
        """What differs between the runs, what each reached, and the names of all metrics."""
        self.refresh()
        with self.lock:
            found, notes = self.shown(), self.notes()
            settings = compare.differences(found)
            metrics = dict.fromkeys(name for run in found for name in run.columns if name not in compare.X)
            entries = [self.entry(run) | {"settings": clean({k: run.config.get(k) for k in settings})}
                       | notes.get(run.name, {}) for run in found]
            return {"settings": settings, "metrics": list(metrics), "runs": entries,
                    "columns": [k for k in compare.RESULTS if any(k in entry["results"] for entry in entries)]}

    def line(self, run, asked):
        """What is asked for of a run, {"metric", "x", "from", "to"}: (x, y), with a point more beyond both ends."""
        x, y = run.line(asked.get("metric"), asked.get("x"))
        low, high = float(asked.get("from", -math.inf)), float(asked.get("to", math.inf))
        inside = np.flatnonzero((x >= low) & (x <= high))
        around = slice(max(0, inside.min(initial=len(x)) - 1), inside.max(initial=-1) + 2)
        return x[around], y[around]

    def curves(self, request):
        """A metric of all runs, or of `run`: {"runs": [[name, points, rows read, version]], "x", "y": float32, base64}."""
        only = request.query.get("run", "")
        buckets = max(100, min(300, 30000 // max(1, 1 if only else len(self.runs))))
        self.refresh()
        names, xs, ys = [], [], []
        with self.lock:
            for run in [self.run(only)] if only else self.shown():
                if request.query.get("metric") in run.columns:
                    x, y = compare.thin(*self.line(run, request.query), buckets)
                    names.append([run.name, len(x), run.count, run.version])
                    xs.append(x.astype("<f4"))
                    ys.append(y.astype("<f4"))
        packed = [base64.b64encode(np.concatenate(part or [np.zeros(0, "<f4")]).tobytes()).decode() for part in (xs, ys)]
        return {"runs": names, "x": packed[0], "y": packed[1]}

    def bands(self, request):
        """For a metric and {"groups": [[run, ...], ...]}, each group's [x, mean, low, high] by compare.band."""
        asked, groups = {name: str(value) for name, value in request.json().items()}, request.json().get("groups")
        if not isinstance(groups, list) or not all(isinstance(members, list) for members in groups):
            raise ValueError("expected groups: lists of runs")
        with self.lock:
            lines = [[self.line(run, asked) for run in self.shown() if run.name in members] for members in groups]
        return [[part.tolist() for part in compare.band(group)] for group in lines]

    def csv(self, request):
        """All rows with a metric, of all runs."""
        metric, only = request.query.get("metric", ""), request.query.get("run", "")
        lines = ["run,iter,tokens,seconds,value"]
        found = self.whole([only] if only else list(self.runs))
        with self.lock:
            for run in found:
                x = [run.x(axis) for axis in ("iter", "tokens", "seconds")]
                name = '"' + run.name.replace('"', '""') + '"'
                lines += [f"{name},{i:.0f},{t:.0f},{s:.3f},{v:.7g}" for i, t, s, v in zip(*x, run.column(metric)) if v == v]
        return Response("\n".join(lines) + "\n", kind="text/csv", headers=as_file("curves.csv"))

    def save(self, request):
        """The chosen runs as one HTML file: what compare.py --plot=x.html writes."""
        asked, names = request.json(), request.json().get("runs")
        found = [run for run in self.whole(names if isinstance(names, list) else []) if run.count]
        if not found:
            raise ValueError("no runs to save")
        with self.lock:
            content = compare.page(found, str(asked.get("group") or ""))
        return Response(content, kind="text/html", headers=as_file("runs.html"))

    def live(self, request):
        """
        Events: rows as they are written and trainings that begin or end, {"run", "from": row, "rows": {metric: [values]}},
        and what extra() gives.
        """
        self.refresh()
        seen, told, said = self.now(), {}, 0.0
        yield {"hello": True}
        while True:
            busy = self.refresh(BUSY)
            with self.lock:
                now = self.now()
                events = [self.news(run, *seen.get(run.name, (0, 0))[:2]) for run in self.shown()
                          if seen.get(run.name) != now[run.name]]
                seen = now
            for name, value in self.extra().items():
                if told.get(name) != value:
                    told[name] = value
                    events.append({name: value})
            if events or time.monotonic() - said > 5:
                said = time.monotonic()
                yield from events or [None]
            time.sleep(0.02 if busy else 0.5)

    def now(self):
        """{run: (version, rows, the process that trains it)} of all that are shown."""
        return {run.name: (run.version, run.count, trainer(run.folder, self.locked)) for run in self.shown()}

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
                "config": clean(run.config), "tables": clean(tables(run)), "alerts": alerts[-50:], "files": files,
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
