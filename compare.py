"""
Several runs side by side, without a server.

    python compare.py                                    every run in out: what differs, and how they ended, as a table
    python compare.py out/a out/b --plot=runs.html       and their losses over tokens and over time; .svg: the chart alone
    python compare.py wandb --sort=learning_rate         every run that the W&B client has logged there
    python compare.py --plot=seeds.svg --group=dim       those with the same dim as one curve with a band

A run is an out folder with its log.jsonl and config.json, or a folder of the W&B client's (offline-run-..., run-...);
any other folder stands for the runs in it. The columns "last" are of one moment, the last evaluation; so are those
called "best", of the evaluation with the least validation loss.
"""
import html
import itertools
import math
import os
import re
import sys
import unicodedata
from array import array
from pathlib import Path
from string import Template

import numpy as np

from configurator import configure, fail
from engine.files import stamp
from engine.streams import one_line
from engine.untrusted import open_untrusted, read_json, reason
from track import parse_row, read_wandb

runs = "out"          # folders of runs, separated by commas, or given as words
sort = "loss/val"     # the metric (of validation losses the best) or setting the table is sorted by
plot = ""             # an .html or .svg file for the curves
group = ""            # a setting: runs in which it is the same are drawn as their mean, in a band from least to greatest

X = ("iter", "tokens", "time")
MOST_METRICS = 1000  # of a run
PIECE = 1 << 20      # bytes read at once
MOST_LINE = 1 << 23  # a longer one is left out
MOST_CELLS = 1 << 26 # of all columns of a run, numbers that rows without a metric take
MOST_NAME = 200      # characters of a metric's name
MAX_ITEMS, MAX_TEXT, MAX_DEPTH = 1000, 10_000, 8  # of settings: items of a list or object, characters, lists in lists
MAX_SETTINGS = 100   # columns of settings; of more, those that most runs have
MAX_CELL = 100       # characters of a cell of the table
CHECK = 48           # bytes before the place where reading goes on, which show whether the file was written anew
LOSSES = ("loss/train", "loss/val", "bpb/val")
RESULTS = ("iter", "tokens", *(f"last {name}" for name in LOSSES), "last at iter", *(f"best {name}" for name in LOSSES[1:]),
           "best at iter", "perf/tokens_per_sec", "minutes")
NOT_SETTINGS = ("out_dir", "wandb_run_name", "wandb_notes", "peak_flops", "n_params", "flops_per_token", "git_changed")
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")  # told apart by everyone
PAGE = Path(__file__).with_name("page") / "saved.html"  # where table and chart go


def encodable(text):
    """Return a text with half surrogate pairs spelled out: JSON may hold them, and names of folders; no encoding does."""
    return text.encode("utf-8", "backslashreplace").decode()


def tame(value, depth=MAX_DEPTH):
    """Return a value of JSON that anyone may have written, cut where it is too long, too large or too deep to be shown."""
    if isinstance(value, str):
        value = value if len(value) <= MAX_TEXT else f"{value[:MAX_TEXT]}..."
        return encodable(value)
    if isinstance(value, (dict, list)) and not depth:
        return "..."
    if isinstance(value, dict):
        items = itertools.islice(value.items(), MAX_ITEMS)
        return {encodable(str(name)[:MOST_NAME]): tame(item, depth - 1) for name, item in items}
    if isinstance(value, list):
        return [tame(item, depth - 1) for item in value[:MAX_ITEMS]]
    return value


class Run:
    """
    A run as far as its folder was read: its numbers in columns, with NaN where a row has none, and where its tables stand.
    config: dict; count: rows; metrics: {name: last value}; evaluations: [{"iter", loss: value}] of each moment with one;
    odd: what could not be read of it, in words.
    """

    def __init__(self, folder, name=""):
        self.name, self.folder, self.version, self.config = name or str(folder), Path(folder), 0, {}
        self.config_stamp, self.odd, self.timed, self.minutes = (), "", (), 0.0
        self.forget()

    def forget(self):
        self.version, self.offset, self.end, self.stamp, self.piece = self.version + 1, 0, b"", (), PIECE
        self.count, self.columns, self.tables = 0, {}, []  # tables: (offset, length) of the lines that have some
        self.spare, self.too_long = MOST_CELLS, False  # too_long: reading goes on within a line that is left out
        self.metrics, self.evaluations = {}, []

    def read(self):
        """
        Read one piece more, from the beginning where the file was written anew; whether there may be another. Raises
        OSError.
        """
        self.read_config()
        now = stamp(self.folder / "log.jsonl")
        if self.stamp == now:
            return False
        with open_untrusted(self.folder / "log.jsonl") as f:
            f.seek(self.offset - len(self.end))
            if f.read(len(self.end)) != self.end:
                self.forget()
                f.seek(0)
            data = f.read(self.piece)
        whole = data.rfind(b"\n") + 1
        if not whole and len(data) >= MOST_LINE:
            whole, self.too_long = len(data), True
            self.odd = f"log.jsonl: lines of more than {MOST_LINE:,} bytes are left out"
        for line in data[:whole].splitlines(keepends=True):
            row = None if self.too_long else parse_row(line)
            self.too_long = self.too_long and not line.endswith(b"\n")
            if row is not None and self.take(row):
                self.tables.append((self.offset, len(line)))
            self.offset += len(line)
        self.end = (self.end + data[:whole])[-CHECK:]
        if len(data) == self.piece:
            self.piece = PIECE if whole else 2 * self.piece  # a line that is longer than a piece
            return True
        self.stamp = now
        return False

    def read_config(self):
        """Read config.json where it is new; a run that is resumed gets other settings, and with them another version."""
        path = self.folder / "config.json"
        try:
            now = stamp(path)
        except OSError:
            now = None
        if now != self.config_stamp:
            before, self.config, self.odd = self.config, {}, ""
            if os.path.lexists(path):
                try:
                    self.config = tame(read_json(path))
                except (OSError, ValueError, MemoryError) as e:
                    self.odd = f"config.json: {reason(e)}"
            self.version += bool(self.count) and self.config != before
            self.config_stamp = now

    def take(self, row):
        """Note a row; whether it has tables."""
        if not isinstance(row["iter"], (int, float)):
            return False
        tables, columns, metrics, count = False, self.columns, self.metrics, self.count
        for name, value in row.items():
            kind = type(value)
            if kind is list or kind is dict or len(metrics) >= MOST_METRICS and name not in metrics and name not in X:
                tables |= kind is list
                continue
            if name not in metrics and (len(name) > MOST_NAME or name != encodable(name)):
                continue
            if kind is int and name in LOSSES and is_finite(value):
                value = float(value)  # W&B writes a loss of 2.0 as 2
            metrics[name] = tame(value) if kind is str else value
            if kind is float or kind is int:
                column = columns.get(name)
                if column is None:
                    column = columns[name] = array("d" if name in X else "f")
                if len(column) < count:
                    self.spare -= count - len(column)
                    if self.spare < 0:
                        continue
                    column.extend(array(column.typecode, [math.nan]) * (count - len(column)))
                column.append(value if -1e300 < value < 1e300 else math.nan)
        self.count += 1
        if "loss/val" in row and "loss/val" in metrics:
            self.evaluations.append({k: metrics[k] for k in ("iter", *LOSSES) if k in metrics})
        return tables

    def column(self, name, start=0):
        """A metric's values from row `start` on, NaN where a row has none: (rows,)."""
        found = np.full(self.count - start, np.nan)
        values = np.array(self.columns.get(name, ())[start:], dtype=float)
        found[:len(values)] = values
        return found

    def x(self, axis, start=0):
        """Where the rows from `start` on stand on an axis: iter, tokens, or seconds without the pauses."""
        if axis == "seconds":
            return np.array(seconds(np.nan_to_num(self.column("time")))[start:])
        return self.column(axis if axis in self.columns else "iter", start)

    def line(self, metric, axis):
        """(x, y) of the rows that have the metric: two arrays."""
        x, y = self.x(axis), self.column(metric)
        there = np.isfinite(x) & np.isfinite(y)
        return x[there], y[there]

    def results(self):
        """{column: value} of its end, its last evaluation and its best; beside them each metric under its own name."""
        metrics, evaluations = self.metrics, self.evaluations
        finite = [row for row in evaluations if is_finite(row["loss/val"])]
        last, best = evaluations[-1] if evaluations else metrics, min(finite, key=lambda row: row["loss/val"], default={})
        found = metrics | {k: best[k] for k in LOSSES[1:] if k in best}
        found |= {f"last {k}": last[k] for k in LOSSES if k in last}
        found |= {f"best {k}": best[k] for k in LOSSES[1:] if k in best}
        if last["iter"] != metrics["iter"]:
            found["last at iter"] = last["iter"]
        if self.timed != (self.version, self.count):  # a long log is not added up anew for each who asks
            self.timed, self.minutes = (self.version, self.count), float(self.x("seconds")[-1]) / 60
        return found | ({"best at iter": best["iter"]} if best else {}) | {"minutes": self.minutes}


def is_finite(value):
    """Whether a value is a finite number of either type."""
    return type(value) in (int, float) and -1e300 < value < 1e300


def canonical(value):
    """A setting as it is compared: W&B writes 0.0 as 0, which is the same setting."""
    return int(value) if type(value) is float and value.is_integer() else value


def read_run(folder):
    """The Run of a folder, all of it. ValueError: it is none."""
    folder = Path(folder)
    try:
        if logs := list(folder.glob("*.wandb")):
            for path in logs:
                open_untrusted(path).close()
            run = read_wandb_run(folder)
        else:
            run = Run(folder)
            while run.read():
                pass
            if not run.config and (run.odd or not run.config_stamp):
                raise ValueError(run.odd or "there is no config.json")
        run.count and run.results()  # what fails on this run fails here, so that the others are shown
    except ImportError:
        raise
    except Exception as e:  # whatever a stranger's folder may hold
        raise ValueError(f"{folder}: not a run ({reason(e)}); expected an out folder with config.json and log.jsonl, or one of "
                         f"W&B's") from e
    if not run.count:
        raise ValueError(f"{folder}: its log has no rows yet")
    return run


def read_runs(folders):
    """The runs in these folders; what is none costs a line, and the program only where there is no other."""
    found, wrong = [], []
    for folder in folders:
        try:
            found.append(read_run(folder))
        except ValueError as e:
            wrong.append(one_line(" ".join(str(e).split())))
    if not found:
        fail(wrong[0] if wrong else "no runs; expected their folders, as in: python compare.py out/a out/b")
    for line in wrong + [one_line(f"{run.name}: {run.odd}") for run in found if run.odd]:
        print(f"{'skipped' if line in wrong else 'note:'} {line}", file=sys.stderr)
    return found


def read_wandb_run(folder):
    """The same from what the W&B client wrote, whether or not it was ever online."""
    run, name = Run(folder), folder.name
    for record in read_wandb(folder):
        if record["type"] == "run":
            name = record["run"].get("display_name", name)
            run.config |= tame({k: v for k, v in record["run"]["config"]["update"].items() if k != "_wandb"})
        elif record["type"] == "history":
            item = record["history"]["item"]
            run.take(item | {"iter": item.get("iter", item["_step"]), "time": item["_timestamp"]})
    run.name = f"{name} ({folder.name})"
    return run


def run_folders(names):
    """The folders meant, each once: those of all runs in the named ones, or, where there are none, the named one."""
    found = {}
    for name in map(Path, names):
        inside = sorted({path.parent for what in ("log.jsonl", "*.wandb") for path in name.rglob(what)})
        found |= {folder.resolve(): folder for folder in inside or [name]}
    return list(found.values())


def seconds(times):
    """The seconds at each of these times since the first, without the pauses between a stop and its continuation."""
    gaps = np.maximum(0.0, np.diff(times))
    usual = np.sort(gaps)[(len(gaps) - 1) // 2] if len(gaps) else 0.0
    return [0.0, *np.cumsum(np.where(gaps < 20 * usual + 10, gaps, usual)).tolist()]


def differences(found):
    """The names of the settings that are not the same in all runs, at most MAX_SETTINGS."""
    keys = dict.fromkeys(k for run in found for k, v in run.config.items() if not isinstance(v, dict))
    values = {k: {repr(canonical(run.config.get(k))) for run in found} for k in keys}
    differ = [k for k in keys if k not in NOT_SETTINGS and len(values[k]) > 1]
    if len(differ) > MAX_SETTINGS:  # one odd run with thousands of settings makes the table no wider than this
        kept = set(sorted(differ, key=lambda k: -sum(k in run.config for run in found))[:MAX_SETTINGS])
        differ = [k for k in differ if k in kept]
    return differ


def text(value):
    """Return a value as a cell of the table shows it."""
    if isinstance(value, float):
        return f"{value:.4f}" if 1e-3 <= abs(value) < 100 else f"{value:.4g}"
    if isinstance(value, str) and re.fullmatch("[0-9a-f]{40,}", value):  # a commit or a checksum
        return value[:10]
    shown = f"{value:,}" if type(value) is int else one_line("" if value is None else value)
    return shown if len(shown) <= MAX_CELL else f"{shown[:MAX_CELL]}..."


def rank(value):
    """Sorts numbers before words, and what is missing or NaN behind both."""
    if value is None or value != value:
        return True, False, 0
    number = isinstance(value, (int, float))
    return False, not number, value if number else str(value)


def cells(found):
    """The comparison as rows of values, the first of them the columns' names. ValueError: nothing has what sorts it."""
    settings, ends = differences(found), [run.results() for run in found]
    values = [{**run.config, "run": run.name, **end} for run, end in zip(found, ends)]
    metrics = [name for name in RESULTS if any(name in end for end in ends)]
    if not any(sort in v for v in values):
        raise ValueError(f"--sort={sort}: no such setting or metric; expected one of {', '.join([*settings, *metrics])}")
    values.sort(key=lambda v: rank(v.get(sort)))
    shown = sort in settings or sort in metrics or f"best {sort}" in metrics
    columns = ["run", *settings, *([] if shown else [sort]), *metrics]
    return [columns] + [[v.get(name) for name in columns] for v in values]


def alike(column):
    """Return the values of a column, its ints as floats where one of its numbers is a float."""
    fractions = any(type(value) is float for value in column)
    return [float(v) if fractions and type(v) is int and abs(v) < 1e300 else v for v in column]


def width(text):
    """Columns of a terminal that a text takes: two for a Chinese character, none for an accent by itself."""
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def pad(text, columns, right=False):
    """The text with spaces behind it, or before it, to so many columns of a terminal."""
    space = " " * (columns - width(text))
    return space + text if right else text + space


def lines(table):
    """The table for a terminal."""
    shown = [[text(value) for value in row] for row in zip(*map(alike, zip(*table)))]
    widths = [max(map(width, column)) for column in zip(*shown)]
    return ["  ".join(pad(cell, w, right=i > 0) for i, (cell, w) in enumerate(zip(row, widths))).rstrip() for row in shown]


def ticks(low, high):
    """About five round numbers from low to high."""
    step = 10 ** math.floor(math.log10((high - low) / 4))
    step *= next(k for k in (1, 2, 5, 10) if (high - low) / (k * step) <= 6)
    return [n * step for n in range(math.ceil(low / step), math.floor(high / step) + 1)]


def log_ticks(low, high):
    """The round numbers from low to high that are read off a logarithmic axis."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)))
    return [y for k in powers for n in (1, 1.5, 2, 3, 5, 7) if low <= (y := n * 10.0 ** k) <= high]


def thin(x, y, buckets=300):
    """Of a line's points at most two for each bucket of neighbours, the least and the greatest, so that no peak is lost."""
    if len(y) <= 2 * buckets:
        return x, y
    size = math.ceil(len(y) / buckets)
    whole = np.append(y, np.repeat(y[-1], -len(y) % size)).reshape(-1, size)
    first = np.arange(len(whole)) * size
    keep = np.concatenate((first + whole.argmin(1), first + whole.argmax(1), [0, len(y) - 1]))
    keep = np.unique(np.minimum(keep, len(y) - 1))
    return x[keep], y[keep]


def band(lines, points=200):
    """
    The mean of lines [(x, y)], their least and their greatest: (x, mean, low, high), four arrays. It stands where all have
    values that came at least halfway, since a mean of whoever is left jumps where one of them ends.
    """
    lines = [line for line in lines if len(line[0])]
    end = max((x[-1] for x, _ in lines), default=0)
    lines = [(x, y) for x, y in lines if x[-1] >= end / 2]
    low, high = max((x[0] for x, _ in lines), default=0), min((x[-1] for x, _ in lines), default=-1)
    x = np.linspace(low, high, points if low <= high else 0)
    ys = np.array([np.interp(x, *line) for line in lines] or [x])
    return x, ys.mean(0), ys.min(0), ys.max(0)


def panel(curves, left, label, low, high, width=400, height=300):
    """
    One chart as SVG. curves: [(color, training, validation)], each (x, y) or a band's (x, y, low, high); training thin,
    validation with dots. The losses' axis is logarithmic, because runs differ in the end, where the losses are small.
    """
    right = max((line[0].max(initial=0) for _, *both in curves for line in both), default=0) or 1
    across = lambda x: left + width * x / right
    down = lambda y: 20 + height * math.log(high / min(max(y, low), high)) / math.log(high / low)
    path = lambda x, y: " ".join(f"{across(a):.1f},{down(b):.1f}" for a, b in zip(x, y))
    parts = [f'<rect x="{left}" y="20" width="{width}" height="{height}" fill="none" stroke="#999"/>']
    for x in ticks(0, right):
        parts.append(f'<text x="{across(x):.1f}" y="{height + 36}" text-anchor="middle">{x:g}</text>'
                     f'<path d="M{across(x):.1f} 20v{height}" stroke="#eee"/>')
    for y in log_ticks(low, high):
        parts.append(f'<text x="{left - 6}" y="{down(y) + 4:.1f}" text-anchor="end">{y:g}</text>'
                     f'<path d="M{left} {down(y):.1f}h{width}" stroke="#eee"/>')
    parts.append(f'<text x="{left + width / 2}" y="{height + 54}" text-anchor="middle">{label}</text>')
    for color, *both in curves:
        for (x, y, *edges), style in zip(both, ('opacity="0.4"', 'stroke-width="1.8"')):
            if edges:
                around = path(np.append(x, x[::-1]), np.append(edges[0], edges[1][::-1]))
                parts.append(f'<polygon points="{around}" fill="{color}" opacity="0.15"/>')
            parts.append(f'<polyline points="{path(x, y)}" fill="none" stroke="{color}" {style}/>')
        if not edges:
            parts += [f'<circle cx="{across(a):.1f}" cy="{down(b):.1f}" r="2.5" fill="{color}"/>' for a, b in zip(x, y)]
    return "".join(parts)


def groups_of(found, group):
    """{name: runs} of the curves: each run by itself, or all in which the setting `group` is the same."""
    if not group:
        return {run.name: [run] for run in found}
    if not any(group in run.config for run in found):
        raise ValueError(f"--group={group}: no such setting; expected one of {', '.join(differences(found))}")
    groups = {}
    for run in found:
        groups.setdefault(str(canonical(run.config.get(group))), []).append(run)
    return {f"{group}={value} ({len(members)})": members for value, members in groups.items()}


def chart(found, group=""):
    """The losses of all runs as SVG, over tokens on the left and over time on the right. ValueError: there are none."""
    values = np.concatenate([run.line(metric, "iter")[1] for run in found for metric in LOSSES[:2]])
    values = values[values > 0]
    if not len(values):
        raise ValueError("--plot: none of these runs has a loss/train or loss/val")
    low, high, groups = 0.97 * values.min(), 1.03 * values.max(), groups_of(found, group)
    bottom = 96 + 18 * len(groups)
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 940 {300 + bottom}" width="940" font-size="12" '
             f'font-family="sans-serif"><rect width="100%" height="100%" fill="white"/>']
    for label, axis, scale, left in (("tokens (millions)", "tokens", 1e6, 50), ("minutes", "seconds", 60, 510)):
        curves = []
        for n, members in enumerate(groups.values()):
            both = [[np.divide(run.line(metric, axis), [[scale], [1]]) for run in members] for metric in LOSSES[:2]]
            curves.append((COLORS[n % len(COLORS)], *(band(lines) if group else thin(*lines[0]) for lines in both)))
        parts.append(panel(curves, left, label, low, high))
    parts.append('<text x="50" y="14">loss, nats per token; with dots: validation</text>')
    for n, name in enumerate(groups):
        y = 384 + 18 * n
        parts.append(f'<path d="M50 {y - 4}h24" stroke="{COLORS[n % len(COLORS)]}" stroke-width="2"/>'
                     f'<text x="82" y="{y}">{html.escape(text(name))}</text>')
    return "".join(parts) + "</svg>\n"


def page(found, group=""):
    """Table and chart in one HTML file that needs nothing else."""
    table = cells(found)
    rows = list(zip(*map(alike, zip(*table[1:]))))
    head = "".join(f"<th>{html.escape(text(name))}</th>" for name in table[0])
    body = "".join("<tr>" + "".join(f'<td data-value="{html.escape(one_line(v))}">{html.escape(text(v))}</td>' for v in row)
                   + "</tr>" for row in rows)
    return Template(PAGE.read_text(encoding="utf-8")).substitute(table=f"<tr>{head}</tr>{body}", chart=chart(found, group))


def main(folders):
    found = read_runs(run_folders(folders))
    if plot and not plot.endswith((".html", ".svg")):
        fail(f"--plot={plot}: expected a name that ends in .html or .svg")
    try:
        table, drawn = lines(cells(found)), plot and (page if plot.endswith(".html") else chart)(found, group)
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
    words = []
    given = configure(globals(), positional=words).given
    main(words + ([name for name in runs.split(",") if name] if "runs" in given or not words else []))
