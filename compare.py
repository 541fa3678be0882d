"""
Compare several runs without a server.

    python compare.py                                 every run in out: settings and results
    python compare.py out/a out/b --plot=runs.html    and their losses over tokens and time
    python compare.py out/a out/b --plot=runs.svg     the chart alone
    python compare.py wandb --sort=learning_rate      every run that the W&B client logged there
    python compare.py --plot=seeds.svg --group=dim    one mean curve with a band for each dim

A run is an out folder with log.jsonl and config.json, or a folder of the W&B client
(offline-run-..., run-...); any other folder stands for the runs in it. All columns "last ..." are
of the last evaluation, all columns "best ..." of the one with the smallest validation loss.
"""
import html
import itertools
import math
import os
import re
import sys
from array import array
from pathlib import Path
from string import Template

import numpy as np

from configurator import configure, fail
from engine.advice import renamed
from engine.files import stamp
from engine.streams import one_line, pad, width
from engine.untrusted import open_untrusted, read_json, reason
from track import parse_row, read_wandb

runs = "out"       # folders of runs, separated by commas; or without --runs=, separated by spaces
sort = "loss/val"  # setting or metric to sort the table by; loss/val takes each run's smallest
plot = ""          # .html or .svg file to draw the curves to
group = ""         # a setting: draw the mean, min and max of the runs that have the same value

X = ("iter", "tokens", "time")
LOSSES = ("loss/train", "loss/val", "bpb/val")
RESULTS = ("iter", "tokens", *(f"last {name}" for name in LOSSES), "last at iter",
           *(f"best {name}" for name in LOSSES[1:]), "best at iter", "perf/tokens_per_sec",
           "minutes")
NOT_SETTINGS = ("out_dir", "wandb_run_name", "wandb_notes", "peak_flops", "n_params",
                "flops_per_token", "git_changed")
# Distinguishable for color-blind readers: https://jfly.uni-koeln.de/color/
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
PAGE = Path(__file__).with_name("page") / "saved.html"  # template of --plot=runs.html

# Limits, because anyone may have written a log.
MAX_METRICS = 1000    # of a run
MAX_LINE = 1 << 23    # bytes of a line of a log; longer ones are skipped
MAX_FILLED = 1 << 26  # NaNs of a run, which fill the gaps before and between a metric's values
MAX_NAME = 200        # characters of a metric's name
MAX_ITEMS, MAX_TEXT, MAX_DEPTH = 1000, 10_000, 8  # of settings: items, characters, nesting
MAX_SETTINGS = 100    # columns of settings; those that most runs have are kept
MAX_CELL = 100        # characters of a cell of the table
CHUNK = 1 << 20       # bytes to read at once
TAIL = 48             # last bytes read, to notice that the log has been rewritten


def encodable(text):
    """Return a text with lone surrogates escaped, which JSON and folder names may contain."""
    return text.encode("utf-8", "backslashreplace").decode()


def tame(value, depth=MAX_DEPTH):
    """Return a JSON value from anyone, cut where it is too long, too large or too deep to show."""
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


class Run:
    """
    A run, as far as its log has been read. Its numbers are kept in columns. Its tables, the
    values that are lists, stay in the log: only the positions of their lines are kept.

    config: {setting: value}; names from earlier versions of the program are replaced by today's.
    count: number of rows.
    columns: {metric: array with a number for each row up to the last one that has the metric, NaN
        for a row without it}.
    tables: [(offset, size in bytes)] of the log's lines that contain tables.
    metrics: {name: last value}.
    evaluations: [{"iter" or loss: value}], one for each evaluation.
    problem: what could not be read, in words; "" if all was.
    version: number that increases when settings change or the log has been rewritten.
    """

    def __init__(self, folder, name=""):
        self.name, self.folder, self.version, self.config = name or str(folder), Path(folder), 0, {}
        # Joined once: the page looks at these files of 200 runs twice a second.
        self.log_path = os.path.join(folder, "log.jsonl")
        self.config_path = os.path.join(folder, "config.json")
        self.config_stamp, self.problem = (), ""
        self.minutes_at, self.minutes = (), 0.0
        self.reset()

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
        a validation loss, the last value of any other.
        """
        metrics, evaluations = self.metrics, self.evaluations
        finite = [row for row in evaluations if is_finite(row["loss/val"])]
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
    """Return whether a value is an int or float that float64 can hold, without NaN."""
    return type(value) in (int, float) and -1e300 < value < 1e300


def canonical(value):
    """Return a setting for comparisons: W&B writes 0.0 as 0, which is the same setting."""
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
            run.results()  # fails here if at all, so that other runs can still be compared
    except ImportError:
        raise
    except Exception as e:  # the folder may hold anything
        raise ValueError(f"{folder}: not a run ({reason(e)}); expected an out folder with "
                         "config.json and log.jsonl, or one of W&B's") from e
    if not run.count:
        raise ValueError(f"{folder}: its log has no rows yet")
    return run


def read_runs(folders):
    """Return the runs in folders; skip other folders with a line each, and exit if none is left."""
    found, skipped = [], []
    for folder in folders:
        try:
            found.append(read_run(folder))
        except ValueError as e:
            skipped.append(one_line(" ".join(str(e).split())))
    if not found:
        missing = "no runs; expected their folders, as in: python compare.py out/a out/b"
        fail(skipped[0] if skipped else missing)
    for line in skipped:
        print(f"skipped {line}", file=sys.stderr)
    for run in found:
        if run.problem:
            print(f"note: {one_line(f'{run.name}: {run.problem}')}", file=sys.stderr)
    return found


def read_wandb_run(folder):
    """Return the Run of a folder that the W&B client wrote, online or offline."""
    run, name = Run(folder), folder.name
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
    """Return the folders of runs in each named folder, each once; if it has none, the folder."""
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


def differences(found):
    """Return the names of the settings in which the runs differ, at most MAX_SETTINGS."""
    names = {}  # as keys, in the order of the runs' settings
    for run in found:
        names |= {name: None for name, value in run.config.items()
                  if name not in NOT_SETTINGS and not isinstance(value, dict)}
    differ = [name for name in names
              if len({repr(canonical(run.config.get(name))) for run in found}) > 1]
    if len(differ) > MAX_SETTINGS:
        by_runs = sorted(differ, key=lambda name: -sum(name in run.config for run in found))
        kept = set(by_runs[:MAX_SETTINGS])
        differ = [name for name in differ if name in kept]
    return differ


def text(value):
    """Return a value as a cell of the table shows it."""
    if isinstance(value, float):
        return f"{value:.4f}" if 1e-3 <= abs(value) < 100 else f"{value:.4g}"
    if isinstance(value, str) and re.fullmatch("[0-9a-f]{40,}", value):  # a commit or checksum
        return value[:10]
    shown = f"{value:,}" if type(value) is int else one_line("" if value is None else value)
    return shown if len(shown) <= MAX_CELL else f"{shown[:MAX_CELL]}..."


def sort_key(value):
    """Return a key that sorts numbers first, then words, then missing values and NaN."""
    if value is None or value != value:
        return True, False, 0
    is_number = isinstance(value, (int, float))
    return False, not is_number, value if is_number else str(value)


def table_of(found, sort="loss/val"):
    """
    Return the comparison as rows of values, the names of the columns first. sort: setting or metric
    to sort by. Raises ValueError if no run has it.
    """
    settings, results = differences(found), [run.results() for run in found]
    values = [run.config | {"run": run.name} | result for run, result in zip(found, results)]
    metrics = [name for name in RESULTS if any(name in result for result in results)]
    if not any(sort in row for row in values):
        raise ValueError(f"--sort={sort}: no such setting or metric; expected one of "
                         f"{', '.join([*settings, *metrics])}")
    values.sort(key=lambda row: sort_key(row.get(sort)))
    columns = ["run", *settings, *metrics]
    # A column "best loss/val" already shows what loss/val sorts by.
    if sort not in columns and f"best {sort}" not in metrics:
        columns.insert(1 + len(settings), sort)
    return [columns] + [[row.get(name) for name in columns] for row in values]


def unify(rows):
    """Return the rows of a table, with the ints of a column as floats if it has a float."""
    columns = []
    for column in zip(*rows):
        if any(type(value) is float for value in column):
            column = [float(v) if type(v) is int and abs(v) < 1e300 else v for v in column]
        columns.append(column)
    return zip(*columns)


def lines_of(table):
    """Return the lines of a table for a terminal."""
    shown = [[text(value) for value in row] for row in unify(table)]
    widths = [max(map(width, column)) for column in zip(*shown)]
    return ["  ".join(pad(cell, w, right=i > 0) for i, (cell, w) in enumerate(zip(row, widths)))
            .rstrip() for row in shown]


# ---- the chart -----------------------------------------------------------------------------------

def ticks(low, high):
    """Return about five round numbers from low to high."""
    step = 10 ** math.floor(math.log10((high - low) / 4))
    step *= next(k for k in (1, 2, 5, 10) if (high - low) / (k * step) <= 6)
    return [n * step for n in range(math.ceil(low / step), math.floor(high / step) + 1)]


def log_ticks(low, high):
    """Return round numbers from low to high for a logarithmic axis."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)))
    candidates = [n * 10.0 ** k for k in powers for n in (1, 1.5, 2, 3, 5, 7)]
    return [y for y in candidates if low <= y <= high]


def thin(x, y, buckets=300):
    """
    Return fewer points of a long line: the min and the max of each bucket of neighbors, and the
    line's first and last point.
    """
    if len(y) <= 2 * buckets:
        return x, y
    size = math.ceil(len(y) / buckets)
    padding = np.repeat(y[-1], -len(y) % size)  # fills the last bucket
    whole = np.append(y, padding).reshape(-1, size)  # (buckets, size)
    first = np.arange(len(whole)) * size  # index of each bucket's first point
    keep = np.concatenate((first + whole.argmin(1), first + whole.argmax(1), [0, len(y) - 1]))
    keep = np.unique(np.minimum(keep, len(y) - 1))
    return x[keep], y[keep]


def band(lines, points=200):
    """
    Return (x, mean, min, max) of several lines [(x, y)]: four arrays. x covers only the range that
    all lines share, since the mean would jump where one of them begins or ends. To keep this range
    long, lines that end before half of the longest are left out.
    """
    lines = [line for line in lines if len(line[0])]
    end = max((x[-1] for x, _ in lines), default=0)
    lines = [(x, y) for x, y in lines if x[-1] >= end / 2]
    low, high = max((x[0] for x, _ in lines), default=0), min((x[-1] for x, _ in lines), default=-1)
    x = np.linspace(low, high, points if low <= high else 0)
    ys = np.array([np.interp(x, *line) for line in lines] or [x])
    return x, ys.mean(0), ys.min(0), ys.max(0)


def panel(curves, left, label, low, high):
    """
    Return one chart as SVG, 400 x 300 pixels from x = left on. Its axis of losses, from low to
    high, is logarithmic, because runs differ at the end, where losses are small.

    curves: [(color, training, validation)], each (x, y) or a band's (x, mean, min, max). Training
    is drawn pale, validation thicker, and with dots if it has no band.
    """
    width, height = 400, 300
    ends = [line[0].max(initial=0) for curve in curves for line in curve[1:]]
    right = max(ends, default=0) or 1

    def pixel_x(x):
        return f"{left + width * x / right:.1f}"

    def pixel_y(y, shift=0):
        share = math.log(high / min(max(y, low), high)) / math.log(high / low)
        return f"{20 + height * share + shift:.1f}"

    def points(x, y):
        return " ".join(f"{pixel_x(a)},{pixel_y(b)}" for a, b in zip(x, y))

    parts = [f'<rect x="{left}" y="20" width="{width}" height="{height}" fill="none" '
             'stroke="#999"/>']
    for x in ticks(0, right):
        parts.append(f'<text x="{pixel_x(x)}" y="{height + 36}" text-anchor="middle">{x:g}</text>'
                     f'<path d="M{pixel_x(x)} 20v{height}" stroke="#eee"/>')
    for y in log_ticks(low, high):
        parts.append(f'<text x="{left - 6}" y="{pixel_y(y, 4)}" text-anchor="end">{y:g}</text>'
                     f'<path d="M{left} {pixel_y(y)}h{width}" stroke="#eee"/>')
    parts.append(f'<text x="{left + width / 2}" y="{height + 54}" text-anchor="middle">{label}'
                 '</text>')
    for color, *both in curves:  # both: training, then validation
        for (x, y, *edges), style in zip(both, ('opacity="0.4"', 'stroke-width="1.8"')):
            if edges:
                around = points(np.append(x, x[::-1]), np.append(edges[0], edges[1][::-1]))
                parts.append(f'<polygon points="{around}" fill="{color}" opacity="0.15"/>')
            parts.append(f'<polyline points="{points(x, y)}" fill="none" stroke="{color}" '
                         f'{style}/>')
        # x, y and edges are still those of validation, the last of both.
        if not edges:
            parts += [f'<circle cx="{pixel_x(a)}" cy="{pixel_y(b)}" r="2.5" fill="{color}"/>'
                      for a, b in zip(x, y)]
    return "".join(parts)


def groups_of(found, group):
    """Return {name of a curve: its runs}: one run each, or all that have the same `group`."""
    if not group:
        return {run.name: [run] for run in found}
    if not any(group in run.config for run in found):
        raise ValueError(f"--group={group}: no such setting; expected one of "
                         f"{', '.join(differences(found))}")
    groups = {}
    for run in found:
        groups.setdefault(str(canonical(run.config.get(group))), []).append(run)
    return {f"{group}={value} ({len(members)})": members for value, members in groups.items()}


def chart(found, group=""):
    """
    Return the losses of all runs as SVG, over tokens on the left and over time on the right. Raises
    ValueError if there are none.
    """
    values = np.concatenate([run.line(metric, "iter")[1] for run in found for metric in LOSSES[:2]])
    values = values[values > 0]
    if not len(values):
        raise ValueError("--plot: none of these runs has a loss/train or loss/val")
    low, high, groups = 0.97 * values.min(), 1.03 * values.max(), groups_of(found, group)
    height = 396 + 18 * len(groups)
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 940 {height}" width="940" '
             'font-size="12" font-family="sans-serif"><rect width="100%" height="100%" '
             'fill="white"/><text x="50" y="14">loss, nats per token; with dots: validation</text>']
    for label, axis, scale, left in (("tokens (millions)", "tokens", 1e6, 50),
                                     ("minutes", "seconds", 60, 510)):
        curves = []
        for n, members in enumerate(groups.values()):
            both = []
            for metric in LOSSES[:2]:
                lines = [run.line(metric, axis) for run in members]
                lines = [(x / scale, y) for x, y in lines]
                both.append(band(lines) if group else thin(*lines[0]))
            curves.append((COLORS[n % len(COLORS)], *both))
        parts.append(panel(curves, left, label, low, high))
    for n, name in enumerate(groups):
        y, color = 384 + 18 * n, COLORS[n % len(COLORS)]
        parts.append(f'<path d="M50 {y - 4}h24" stroke="{color}" stroke-width="2"/>'
                     f'<text x="82" y="{y}">{html.escape(text(name))}</text>')
    return "".join(parts) + "</svg>\n"


def page(found, group="", sort="loss/val"):
    """Return table and chart as one HTML file that needs no other."""
    head, *rows = table_of(found, sort)
    parts = ["<tr>", *(f"<th>{html.escape(text(name))}</th>" for name in head), "</tr>"]
    for row in unify(rows):
        cells = [f'<td data-value="{html.escape(one_line(value))}">{html.escape(text(value))}</td>'
                 for value in row]
        parts += ["<tr>", *cells, "</tr>"]
    template = Template(PAGE.read_text(encoding="utf-8"))
    return template.substitute(table="".join(parts), chart=chart(found, group))


def main(folders):
    if plot and not plot.endswith((".html", ".svg")):
        fail(f"--plot={plot}: expected a name that ends in .html or .svg")
    found = read_runs(run_folders(folders))
    try:
        table, drawn = lines_of(table_of(found, sort)), ""
        if plot:
            is_page = plot.endswith(".html")
            drawn = page(found, group, sort) if is_page else chart(found, group)
    except ValueError as e:
        fail(e)
    print("\n".join(table))
    if plot:
        try:
            Path(plot).write_text(drawn, encoding="utf-8")
        except OSError as e:
            fail(f"--plot={plot}: cannot be written ({e.strerror})")
        print(f"wrote {plot}")


if __name__ == "__main__":
    folders = []
    given = configure(globals(), positional=folders).given
    if "runs" in given or not folders:
        folders += [name for name in runs.split(",") if name]
    main(folders)
