"""
The runs in a folder, read once and then on as they grow; compare.py has the reader.

A client never sends a path: it names a run of the list. Log and configuration are data that anyone may have written.
"""
import base64
import contextlib
import errno
import fcntl
import hashlib
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
from compare import Run, encodable, tame
from engine.files import write_atomic
from engine.untrusted import open_untrusted, read_json_file, reason
from page.server import Response, as_file
from track import TABLES, Alerts, parse_row

BUSY = 0.15     # seconds that a long log is read before others have their turn
NOTES = {"notes": 5000, "tags": 5000, "color": 7}  # what a person notes of a run, and how many characters at most
MAX_OTHER = 1 << 24  # bytes of a JSON file other than config.json
MAX_NOTES = 1 << 26  # bytes of a person's notes
NEW_ROWS = 200  # that a client is told of one by one


def own_path(root):
    """The user's folder for the queue and the notes of a folder of runs, outside of that folder, which may be anyone's."""
    state = os.environ.get("XDG_STATE_HOME", "")
    home = Path(state) if os.path.isabs(state) else Path(os.path.expanduser("~")) / ".local/state"
    return home / "llamac/page" / hashlib.sha256(os.fsencode(os.path.realpath(root))).hexdigest()[:16]


def make_own(folder):
    """Create the user's folder where there is none. Raises OSError, also where it belongs to somebody else."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, "it belongs to another user", str(folder))


def json_of(path):
    """The object in a JSON file that anyone may have written, cut to what can be shown; {} where there is none."""
    try:
        return tame(read_json_file(path, MAX_OTHER))
    except (OSError, ValueError, MemoryError):
        return {}


def notes_of(path):
    """{run: {"notes", "tags", "color": text}} of a notes.json."""
    found, kept = {}, {}
    with contextlib.suppress(OSError, ValueError, MemoryError):
        kept = read_json_file(path, MAX_NOTES)
    for name, said in kept.items():
        if isinstance(said, dict):
            found[name] = {k: said[k][:most] for k, most in NOTES.items() if isinstance(said.get(k), str)}
            if not re.fullmatch("#[0-9a-f]{6}", found[name].get("color", "#000000")):
                del found[name]["color"]
    return found


def glance(run, places=24, window=1 << 15):
    """A Run of a few rows from all over a log, to be shown while the log is read; None of a short one."""
    found = Run(run.folder, run.name)
    found.read_config()
    found.version = 0
    with contextlib.suppress(OSError), open_untrusted(run.folder / "log.jsonl") as f:
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
    with contextlib.suppress(OSError), open_untrusted(run.folder / "log.jsonl") as f:
        for offset, length in run.tables[-most:]:
            f.seek(offset)
            row = parse_row(f.read(length)) or {}
            found.append({"iter": row.get("iter")} | {k: tame(row[k]) for k in TABLES if isinstance(row.get(k), list)})
    return found


def trainer(folder, locked):
    """The process that trains in a folder now, None: nobody. locked: see locks()."""
    try:
        path = folder / "trainer.json"
        if path.is_symlink():  # to that of another run, which a stop would end
            return None
        holders = is_held(path) if locked is None else locked.get(path.stat().st_ino)
        if not holders:
            return None
        found = read_json_file(path)
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
        with open_untrusted(path) as f:
            fcntl.flock(f, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    except OSError:
        return False


def clean(value):
    """What JSON and JavaScript have: no NaN, and no number that only Python can write out."""
    if isinstance(value, dict):
        return {k: clean(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, np.ndarray)):
        return [clean(v) for v in value]
    if isinstance(value, int) and abs(value) >= 1 << 64:
        return compare.text(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value


def cell(value):
    """A setting as the table shows it: a number, or words."""
    return clean(value) if isinstance(value, (int, float, type(None))) else compare.text(value)


def alerts_of(names, columns):
    """The last alerts of a run with these columns."""
    found, check = [], Alerts()
    for row in zip(*(column.tolist() for column in columns)):
        found += check.check({k: v for k, v in zip(names, row) if v == v})
    return found[-50:]


def evaluation_of(folder):
    """What evaluate.py has left in a run, as far as it can be drawn; {} where it can't."""
    found = {"names": [], "columns": [], "rows": [], "matrix": None} | clean(json_of(folder / "evaluation.json"))
    if not all(isinstance(found[name], list) for name in ("names", "columns", "rows", "matrix")):
        return {}
    if not all(isinstance(row, list) for row in found["matrix"] + found["rows"]):
        return {}
    if not all(isinstance(n, (int, float)) for row in found["matrix"] for n in row):
        return {}
    return found | {name: [str(word) for word in found[name]] for name in ("names", "columns")}


class Runs:
    """All runs below a folder. `extra()` gives what live() tells besides."""

    def __init__(self, root, extra=dict):
        self.root, self.extra, self.runs, self.glances, self.lock = Path(root), extra, {}, {}, threading.RLock()
        self.own, self.waiting = own_path(root), {}  # waiting: runs of which there is more to read
        self.trouble = {}  # {run: what failed at the last try, in words}
        self.looked, self.read_at, self.locked = -math.inf, -math.inf, {}

    def look(self):
        """Find new runs and lose those that are gone."""
        self.looked, found = time.monotonic(), {}
        for folder, inside, names in os.walk(self.root):
            inside[:] = sorted(d for d in inside if d not in ("checkpoints", "tensorboard") and not d.startswith("."))
            if Path(folder).relative_to(self.root).parts[3:]:
                inside.clear()
            if "log.jsonl" in names and "config.json" in names:
                name = encodable(folder)
                found[name] = self.runs.get(name) or Run(folder, name)
                if name not in self.runs and (first := self.each(found[name], glance, None)):
                    self.glances[name] = first
        self.runs = found

    def each(self, run, do, otherwise):
        """What do(run) returns. Whatever fails on one run keeps nobody from seeing the others: it is noted with the run."""
        try:
            return do(run)
        except Exception as e:
            name = os.path.basename(str(getattr(e, "filename", None) or "this run"))
            self.trouble[run.name] = f"{name}: {reason(e)}"
        return otherwise

    def refresh(self, most=0.05):
        """Read what is new, for `most` seconds; whether there is more. Files are asked twice a second, whoever watches."""
        with self.lock:
            now = time.monotonic()
            if now - self.looked > 3:
                self.look()
            if now - self.read_at >= 0.4:
                self.read_at, self.locked = now, locks()
                self.waiting = {name: run for name, run in self.runs.items() if name not in self.waiting} | {
                    name: run for name, run in self.waiting.items() if name in self.runs}  # long logs behind all others
            end = time.monotonic() + most
            while self.waiting and time.monotonic() < end:
                name, run = next(iter(self.waiting.items()))
                del self.waiting[name]
                self.trouble.pop(name, None)
                if self.each(run, Run.read, False):
                    self.waiting[name] = run  # a piece of each in turns
                else:
                    self.glances.pop(name, None)
            return bool(self.waiting)

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
        while self.refresh() and any(name in self.waiting for name in names):
            pass
        return found

    def folder(self, name):
        return self.run(name).folder

    def notes(self):
        """What was noted of the runs; earlier versions kept it among the runs."""
        return notes_of(self.root / ".page" / "notes.json") | notes_of(self.own / "notes.json")

    # ---- routes: the modules of the page ask these

    def routes(self):
        return {"GET /api/runs": self.table, "GET /api/curves": self.curves, "GET /api/csv": self.csv,
                "GET /api/live": self.live, "GET /api/run": self.details, "POST /api/bands": self.bands,
                "POST /api/notes": self.note, "POST /api/save": self.save}

    def entry(self, run):
        """A run's line in the table."""
        results = self.each(run, Run.results, {}) if run.count else {}
        numbers = {k: cell(v) for k, v in results.items() if k in compare.RESULTS or "/" in k}
        return {"name": run.name, "rows": run.count, "max_iters": clean(run.config.get("max_iters")), "results": numbers,
                "odd": self.trouble.get(run.name, run.odd), "training": trainer(run.folder, self.locked) is not None}

    def table(self, request):
        """What differs between the runs, what each reached, and the names of all metrics."""
        self.refresh()
        with self.lock:
            found, notes = self.shown(), self.notes()
            settings = compare.differences(found)
            metrics = dict.fromkeys(name for run in found for name in run.columns if name not in compare.X)
            entries = [notes.get(run.name, {}) | self.entry(run) | {"settings": {k: cell(run.config.get(k)) for k in settings}}
                       for run in found]
            return {"more": bool(self.waiting), "settings": settings, "metrics": list(metrics), "runs": entries,
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
                    with np.errstate(over="ignore"):
                        x, y = x.astype("<f4"), y.astype("<f4")
                    there = np.isfinite(x) & np.isfinite(y)
                    names.append([run.name, int(there.sum()), run.count, run.version])
                    xs.append(x[there])
                    ys.append(y[there])
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
        found = self.whole(names if isinstance(names, list) else [])
        found = [run for run in found if run.count and self.each(run, Run.results, None)]
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
            entry, notes = self.entry(run), self.notes().get(run.name, {})
            watched = [name for name in ("iter", *Alerts.WATCHED) if name in run.columns]
            columns = [run.column(name) for name in watched]
        files = {}  # without the lock: others have their turn meanwhile
        for path in sorted(run.folder.glob("*.gguf"))[:100]:
            with contextlib.suppress(OSError):
                files[path.name] = path.stat().st_size
        steps = sorted(path.name for path in (run.folder / "checkpoints").glob("step_*") if path.is_dir())
        return notes | entry | {
            "config": clean(run.config), "tables": clean(tables(run)), "alerts": alerts_of(watched, columns), "files": files,
            "checkpoints": steps, "evaluation": evaluation_of(run.folder),
            "wandb": str(json_of(run.folder / "wandb.json").get("url", ""))}

    def note(self, request):
        """Keep notes, tags and colour of a run, in a file of the page's own."""
        given = request.json()
        run = self.run(given.get("run"))
        with self.lock:
            notes = self.notes()
            said = {k: str(given[k])[:most] for k, most in NOTES.items() if k in given}
            if not re.fullmatch("#[0-9a-f]{6}", said.get("color", "#000000")):
                raise ValueError("a colour is #rrggbb")
            notes[run.name] = notes.get(run.name, {}) | said
            make_own(self.own)
            write_atomic(self.own / "notes.json", json.dumps(notes, indent=1))
        return {}
