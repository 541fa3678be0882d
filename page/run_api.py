"""Routes about runs: the table, curves, live events, a run's details, notes, CSV and HTML files."""
import base64
import bisect
import contextlib
import math
import os
import time

import numpy as np

import compare
from compare import Run, tame
from engine.tracking.log import tables_of
from engine.untrusted import open_untrusted, read_json
from page.server import Response, as_download
from page.state import COLOR, MAX_LENGTHS, read_notes, write_notes
from track import AnomalyDetector, parse_row

BUSY = 0.15          # max seconds for which live events read logs before other requests get a turn
MAX_JSON = 1 << 24   # max bytes of a JSON file other than config.json
MAX_NEW_ROWS = 200   # max rows in a live event; for more, the client loads the curves again
MAX_ALERTS = 50      # max alerts of each kind in a run's details
PACE_ROWS = 50       # max rows at the end of the log from which the training speed is computed
MAX_TABLES = 40      # max rows with tables in a run's details
MAX_FILES = 100      # max model files in a run's details


def json_of(path):
    """Return the dict in a JSON file, cut by tame(), or {} if it can't be read."""
    try:
        return tame(read_json(path, MAX_JSON))
    except (OSError, ValueError, MemoryError):
        return {}


def clean(value):
    """
    Return a value that JSON and JavaScript can represent: infinities and NaN become None, and an
    integer of more than 64 bits becomes a text.
    """
    if isinstance(value, dict):
        return {k: clean(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, np.ndarray)):
        return [clean(v) for v in value]
    if isinstance(value, int) and abs(value) >= 1 << 64:
        return compare.text(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value


def cell(value):
    """Return a setting as the table shows it: a number or a text."""
    is_number = value is None or isinstance(value, (int, float))
    return clean(value) if is_number else compare.text(value)


def numbers_of(results):
    """Return the items of {column: value} that the table or a chart may show."""
    return {k: cell(v) for k, v in results.items() if k in compare.RESULTS or "/" in k}


def tables(run):
    """Return [{"iter": step, table: its rows}] for the latest rows of a log that have tables."""
    found = []
    with contextlib.suppress(OSError), open_untrusted(run.folder / "log.jsonl") as f:
        for offset, length in run.tables[-MAX_TABLES:]:
            f.seek(offset)
            row = parse_row(f.read(length)) or {}
            lists = {name: tame(row[name]) for name in tables_of(row)}
            found.append({"iter": row.get("iter")} | lists)
    return found


def alerts(names, columns):
    """
    Return the alerts of a run: for each kind [title, number of alerts, latest alerts], where an
    alert is [text, {name: value in title and text}]. names: those of the columns.
    """
    found, detector = {}, AnomalyDetector()
    for values in zip(*(column.tolist() for column in columns)):
        row = {name: value for name, value in zip(names, values) if not math.isnan(value)}
        for alert in detector.alerts(row):
            # "loss/val jumps" and "loss/train jumps" are two kinds.
            kind = found.setdefault(alert.words()[0], [alert.title, []])
            kind[1].append([alert.text, alert.values])
    return [[title, len(latest), latest[-MAX_ALERTS:]] for title, latest in found.values()]


def ended_by(run):
    """
    Return what ended a run's training, as named in result.json; "" if that is unknown. After a
    crash, result.json is from an earlier session: its step differs from the log's last step.
    """
    found = json_of(run.folder / "result.json")
    is_last = found.get("iter") == run.metrics.get("iter")
    return str(found.get("ended_by", "")) if is_last else ""


def time_left(run):
    """
    Estimate when a training ends. Return {"left": seconds, "share": fraction that is done, "clock":
    "minutes" or "max_minutes" if this setting will end it, "" if the number of steps will}; None if
    no estimate is possible yet.
    """
    times, steps = run.columns.get("time", ()), run.columns.get("iter", ())
    try:
        begun = os.stat(run.folder / "trainer.json").st_mtime  # start of this session
    except OSError:
        return None
    if not times or len(times) != len(steps):
        return None
    now, config = time.time(), run.config
    first = bisect.bisect_left(times, begun - 1)  # the first row of this session
    found = []
    minutes, max_minutes, max_iters = (
        value if compare.is_finite(value := config.get(name)) and value > 0 else 0
        for name in ("minutes", "max_minutes", "max_iters"))
    if minutes:  # time budget of all sessions, from the start of the program
        used = now - begun
        if first:  # there were earlier sessions
            used = 60 * run.minutes + now - times[-1]
        found.append((60 * minutes - used, used / (60 * minutes), "minutes"))
    elif max_minutes:  # time limit of this session
        used = now - times[first] if first < len(times) else 0.0
        found.append((60 * max_minutes - used, used / (60 * max_minutes), "max_minutes"))
    # Use only rows of this session: a pause between sessions would distort the pace.
    first = max(first, len(times) - PACE_ROWS)
    if max_iters and first < len(times) and steps[-1] > steps[first]:
        pace = (times[-1] - times[first]) / (steps[-1] - steps[first])
        left = pace * (max_iters - steps[-1]) - (now - times[-1])
        found.append((left, steps[-1] / max_iters, ""))
    if not found:
        return None
    left, share, clock = min(found)
    if not (math.isfinite(left) and math.isfinite(share)):
        return None
    return {"left": max(0.0, left), "share": min(max(share, 0.0), 1.0), "clock": clock}


def normal(run):
    """
    Return sentences that judge whether a run's loss is normal (see engine/text/yardsticks.py), as
    [[part of a sentence, {name: value in it}]]; [] if the run has no yardsticks.
    """
    from engine.text import yardsticks  # imported here because it loads sentencepiece
    row = {name: value for name, value in run.metrics.items() if compare.is_finite(value)}
    found = {name.partition("/")[2]: value for name, value in row.items()
             if name.startswith("yardstick/")}
    loss = run.results().get("best bpb/val") if run.count else None
    if not compare.is_finite(loss) or not yardsticks.WORDS.keys() <= found.keys():
        return []
    meta = run.config.get("dataset")
    meta = meta if isinstance(meta, dict) else {}
    return [list(part) for part in yardsticks.parts_of_answer(loss, found, row, meta)]


def evaluations(folder):
    """
    Return the results of evaluate.py in a run's folder, except those with wrong types: anyone may
    have written the file. An earlier version stored a single result, without the name of its kind.
    """
    found = json_of(folder / "evaluation.json")
    results = [found] if "accuracy" in found else list(found.values())
    return [result for each in results if (result := evaluation(each))]


def evaluation(found):
    """Return one result of evaluate.py, {} if its types are wrong."""
    if not isinstance(found, dict):
        return {}
    lists = "names", "columns", "rows", "matrix", "groups", "scores", "score_columns"
    found = {name: [] for name in lists} | clean(found)
    if not all(isinstance(found[name], list) for name in lists):
        return {}
    if not (found["matrix"] or found["groups"]):
        return {}
    rows = [*found["rows"], *found["matrix"], *found["groups"], *found["scores"]]
    if not all(isinstance(row, list) for row in rows):
        return {}
    if not all(isinstance(n, (int, float)) for row in found["matrix"] for n in row):
        return {}
    texts = "names", "columns", "score_columns"
    return found | {name: [str(word) for word in found[name]] for name in texts}


class RunApi:
    """The routes. extra: a function that returns {name: value}; live events report these too."""

    def __init__(self, runs, extra=dict):
        self.runs, self.extra = runs, extra

    def routes(self):
        return {"GET /api/runs": self.table, "GET /api/run": self.details,
                "GET /api/curves": self.curves, "GET /api/csv": self.csv,
                "GET /api/live": self.live, "POST /api/bands": self.bands,
                "POST /api/notes": self.note, "POST /api/save": self.save}

    def notes(self):
        """Return the notes of all runs. Earlier versions kept them in the folder of runs."""
        old = read_notes(self.runs.root / ".page" / "notes.json")
        return old | read_notes(self.runs.state / "notes.json")

    def entry(self, run):
        """
        Return a run's row of the table. "odd": a message about what could not be read, or "";
        "foreign": whether a program other than train.py wrote the run; "ended_by" and "time_left":
        the results of the functions with these names.
        """
        results = self.runs.attempt(run, Run.results, {}) if run.count else {}
        training = self.runs.trainers.get(run.name) is not None
        return {"name": run.name, "rows": run.count, "results": numbers_of(results),
                "training": training, "max_iters": clean(run.config.get("max_iters")),
                "foreign": run.is_foreign,
                "ended_by": "" if training else ended_by(run),
                "time_left": self.runs.attempt(run, time_left, None) if training else None,
                "odd": self.runs.errors.get(run.name, run.problem)}

    def groups(self, read, settings, metric):
        """
        Return an entry for each group of runs that differ only in the seed: {"name", "runs": their
        names, "n", "mean" and "sd" of `metric` as compare.py computes them, "results": means,
        "settings": without those in which the runs of a group may differ}. read: the runs that have
        rows; settings: names of the settings to show.
        """
        found = []
        sound = [run for run in read if self.runs.attempt(run, compare.group_key, None)]
        for group in compare.groups_of(sound):
            if len(group.runs) > 1:
                ignored = compare.incidental(group.runs)
                cells = {compare.column_of(name): cell(group.setting(name)) for name in settings
                         if name not in ignored}
                found.append({"name": group.name, "runs": [run.name for run in group.runs],
                              "results": numbers_of(group.results()),
                              "settings": cells} | group.summary(metric))
        return clean(found)

    def table(self, request):
        """
        Return {"runs": entries of runs, "groups": entries of groups, "settings": those in which the
        runs differ, "metrics": all names, "columns": those of the results, "more": whether logs
        have rows that are still unread, "metric": the metric by which runs are compared, "sort":
        its column, "descending": whether large values of it are good, "vocabularies_differ":
        whether losses per token are not comparable}.
        """
        self.runs.refresh()
        with self.runs.lock:
            shown, notes = self.runs.shown(), self.notes()
            settings = compare.differences(sorted(shown, key=lambda run: run.is_foreign))
            names = [name for run in shown for name in run.columns if name not in compare.X]
            entries = []
            for run in shown:
                cells = {compare.column_of(name): cell(compare.setting_of(run, name))
                         for name in settings}
                entries.append(notes.get(run.name, {}) | self.entry(run) | {"settings": cells})
            columns = [name for name in compare.RESULTS
                       if any(name in entry["results"] for entry in entries)]
            read = [run for run in shown if run.count]
            metric = compare.default_metric(read) if read else "loss/val"
            sort = f"best {metric}" if f"best {metric}" in columns else metric
            if read and sort not in columns:
                columns.insert(0, sort)
            return {"more": bool(self.runs.unread),
                    "settings": [compare.column_of(name) for name in settings],
                    "metrics": list(dict.fromkeys(names)), "runs": entries, "columns": columns,
                    "groups": self.groups(read, settings, metric),
                    "metric": metric, "sort": sort,
                    "descending": compare.is_small_good(metric) is False,
                    "vocabularies_differ": compare.vocabularies_differ(read)}

    def line(self, run, query):
        """
        Return (x, y) of a run's metric. query: {"metric", "x"}, and "from" and "to" for a range.

        One point beyond each end of the range is included, so that the line reaches the edges.
        """
        x, y = run.line(query.get("metric"), query.get("x"))
        low, high = float(query.get("from", -math.inf)), float(query.get("to", math.inf))
        inside = np.flatnonzero((x >= low) & (x <= high))
        # `initial` is the result if no point is inside.
        first, last = inside.min(initial=len(x)), inside.max(initial=-1)
        kept = slice(max(0, first - 1), last + 2)
        return x[kept], y[kept]

    def curves(self, request):
        """
        Return a metric of all runs, or of the run in the query, thinned for drawing: {"runs":
        [[name, number of points, rows read, version]], "x", "y"}, where x and y have the points of
        all runs one after another, as base64 of float32.
        """
        name, metric = request.query.get("run", ""), request.query.get("metric")
        # Each bucket has two points. Many runs get fewer buckets, to limit the response's size.
        buckets = 300 if name else max(100, min(300, 30000 // max(1, len(self.runs.runs))))
        self.runs.refresh()
        found, xs, ys = [], [], []
        with self.runs.lock:
            for run in [self.runs.run(name)] if name else self.runs.shown():
                if metric not in run.columns:
                    continue
                x, y = compare.thin(*self.line(run, request.query), buckets)
                with np.errstate(over="ignore"):
                    x, y = x.astype("<f4"), y.astype("<f4")
                finite = np.isfinite(x) & np.isfinite(y)
                found.append([run.name, int(finite.sum()), run.count, run.version])
                xs.append(x[finite])
                ys.append(y[finite])
        return {"runs": found, "x": packed(xs), "y": packed(ys)}

    def bands(self, request):
        """
        Return [[x, mean, min, max], ...], one for each group of the request {"groups": [[name of a
        run, ...], ...], "metric", "x"}: see compare.band(). Raises ValueError.
        """
        body = request.json()
        groups = body.get("groups")
        if not isinstance(groups, list) or not all(isinstance(names, list) for names in groups):
            raise ValueError("expected groups: lists of runs")
        query = {name: str(value) for name, value in body.items()}
        with self.runs.lock:
            lines = [[self.line(run, query) for run in self.runs.shown() if run.name in names]
                     for names in groups]
        return [[part.tolist() for part in compare.band(group)] for group in lines]

    def csv(self, request):
        """Return a CSV file of the rows that have a metric, of all runs or the run in the query."""
        metric, only = request.query.get("metric", ""), request.query.get("run", "")
        lines = ["run,iter,tokens,seconds,value"]
        found = self.runs.whole([only] if only else list(self.runs.runs))
        with self.runs.lock:
            for run in found:
                name = '"' + run.name.replace('"', '""') + '"'
                columns = [run.x(axis) for axis in ("iter", "tokens", "seconds")]
                for i, tokens, seconds, value in zip(*columns, run.column(metric)):
                    if not math.isnan(value):
                        lines.append(f"{name},{i:.0f},{tokens:.0f},{seconds:.3f},{value:.7g}")
        content = "\n".join(lines) + "\n"
        return Response(content, kind="text/csv", headers=as_download("curves.csv"))

    def save(self, request):
        """Return the HTML file of compare.py --plot for the request {"runs": names, "group"}."""
        body = request.json()
        names = body.get("runs")
        found = [run for run in self.runs.whole(names if isinstance(names, list) else [])
                 if run.count and self.runs.attempt(run, Run.results, None)]
        if not found:
            raise ValueError("none of these runs has rows to save")
        with self.runs.lock:
            content = compare.page(found, str(body.get("group") or ""))
        return Response(content, kind="text/html", headers=as_download("runs.html"))

    def live(self, request):
        """
        Yield {"run": entry, "from": first new row, "rows": {metric: values}} for each run that has
        new rows or whose training begins or ends, and {name: value} for each value of extra() that
        has changed. The first event is {"hello": True}: the client may have missed earlier events.

        After 5 seconds without events, yield None: sending it fails if the client has left.
        """
        self.runs.refresh()
        seen, sent, sent_at = self.versions(), {}, 0.0
        yield {"hello": True}
        while True:
            more = self.runs.refresh(BUSY)
            with self.runs.lock:
                now = self.versions()
                events = [self.news(run, *seen.get(run.name, (0, 0))[:2])
                          for run in self.runs.shown() if seen.get(run.name) != now[run.name]]
                seen = now
            for name, value in self.extra().items():
                if sent.get(name) != value:
                    sent[name] = value
                    events.append({name: value})
            if events or time.monotonic() - sent_at > 5:
                sent_at = time.monotonic()
                yield from events or [None]
            time.sleep(0.02 if more else 0.5)

    def versions(self):
        """Return {run: (version, rows, process id of its trainer)}; a change causes an event."""
        return {run.name: (run.version, run.count, self.runs.trainers.get(run.name))
                for run in self.runs.shown()}

    def news(self, run, version, start):
        """
        Return the event with a run's rows from `start` on. If there are too many, or if earlier
        rows have changed (`version` is not the run's), it asks the client to load all rows again.
        """
        if version != run.version or run.count - start > MAX_NEW_ROWS:
            return {"run": self.entry(run), "again": True}
        rows = {}
        for name in run.columns:
            values = clean(run.column(name, start))
            if any(v is not None for v in values):
                rows[name] = values
        rows["seconds"] = clean(run.x("seconds", start))
        return {"run": self.entry(run), "from": start, "rows": rows}

    def details(self, request):
        """Return all that the view of one run shows besides its curves."""
        run = self.runs.run(request.query.get("run"))
        with self.runs.lock:
            found = self.notes().get(run.name, {}) | self.entry(run)
            watched = [name for name in ("iter", *AnomalyDetector.WATCHED) if name in run.columns]
            columns = [run.column(name) for name in watched]
        files = {}  # read without the lock, so that other requests don't wait
        for path in sorted(run.folder.glob("*.gguf"))[:MAX_FILES]:
            with contextlib.suppress(OSError):
                files[path.name] = path.stat().st_size
        steps = [path.name for path in (run.folder / "checkpoints").glob("step_*") if path.is_dir()]
        return found | {
            "config": clean(run.config), "tables": clean(tables(run)),
            "alerts": alerts(watched, columns), "files": files, "checkpoints": sorted(steps),
            "normal": self.runs.attempt(run, normal, []),
            "evaluations": evaluations(run.folder),
            "wandb": str(json_of(run.folder / "wandb.json").get("url", ""))}

    def note(self, request):
        """Store a run's notes, tags and colour, as far as given. Raises ValueError or OSError."""
        body = request.json()
        run = self.runs.run(body.get("run"))
        given = {name: str(body[name]) for name in MAX_LENGTHS if name in body}
        for name, text in given.items():
            if len(text) > MAX_LENGTHS[name]:
                raise ValueError(f"{name}: {len(text):,} characters, expected at most "
                                 f"{MAX_LENGTHS[name]:,}")
        if not COLOR.fullmatch(given.get("color", "#000000")):
            raise ValueError("expected a colour as #rrggbb")
        with self.runs.lock:
            notes = self.notes()
            notes[run.name] = notes.get(run.name, {}) | given
            write_notes(self.runs.state, notes)
        return {}


def packed(arrays):
    """Return the concatenated bytes of arrays as base64."""
    return base64.b64encode(b"".join(array.tobytes() for array in arrays)).decode()
