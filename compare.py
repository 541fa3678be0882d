"""
Several runs side by side, without a server.

    python compare.py                                    every run in out: what differs, and how they ended, as a table
    python compare.py out/a out/b --plot=runs.html       and their losses over tokens and over time; .svg: the chart alone
    python compare.py wandb --sort=learning_rate         every run that the W&B client has logged there

A run is an out folder with its log.jsonl and config.json, or a folder of the W&B client's (offline-run-..., run-...);
any other folder stands for the runs in it. The columns "last" are of one moment, the last evaluation; so are those
called "best", of the evaluation with the least validation loss.
"""
import html
import json
import math
import re
import sys
import unicodedata
from pathlib import Path
from string import Template

import numpy as np

from configurator import configure, fail
from track import read_rows, read_wandb

runs = "out"          # folders of runs, separated by commas, or given as words
sort = "loss/val"     # the metric (of validation losses the best) or setting the table is sorted by
plot = ""             # an .html or .svg file for the curves

LOSSES = ("loss/train", "loss/val", "bpb/val")
RESULTS = ("iter", "tokens", *(f"last {name}" for name in LOSSES), "last at iter", *(f"best {name}" for name in LOSSES[1:]),
           "best at iter", "perf/tokens_per_sec", "minutes")
NOT_SETTINGS = ("out_dir", "wandb_run_name", "wandb_notes", "peak_flops", "n_params", "flops_per_token", "git_changed")
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")  # told apart by everyone
PAGE = Path(__file__).with_name("page") / "saved.html"  # where table and chart go


def read_run(folder):
    """
    {"name", "config": {key: value}, "rows": [{"iter", "tokens", "time", metric: value}]} of a run's folder. ValueError:
    it is none.
    """
    folder = Path(folder)
    try:
        if list(folder.glob("*.wandb")):
            run = read_wandb_run(folder)
        else:
            config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            run = {"name": str(folder), "config": config, "rows": read_rows(folder / "log.jsonl")}
    except (OSError, ValueError) as e:
        raise ValueError(f"{folder}: not a run ({e}); expected an out folder with config.json and log.jsonl, or one of "
                         f"W&B's") from e
    if not isinstance(run["config"], dict):
        raise ValueError(f"{folder}: not a run (its config.json is not {{key: value}})")
    if not run["rows"]:
        raise ValueError(f"{folder}: its log has no rows yet")
    return run


def read_runs(folders):
    """The runs in these folders; what is none costs a line, and the program only where there is no other."""
    found, wrong = [], []
    for folder in folders:
        try:
            found.append(read_run(folder))
        except ValueError as e:
            wrong.append(" ".join(str(e).split()))
    if not found:
        fail(wrong[0] if wrong else "no runs; expected their folders, as in: python compare.py out/a out/b")
    for line in wrong:
        print(f"skipped {line}", file=sys.stderr)
    return found


def read_wandb_run(folder):
    """The same from what the W&B client wrote, whether or not it was ever online."""
    name, config, rows = folder.name, {}, []
    for record in read_wandb(folder):
        if record["type"] == "run":
            name = record["run"].get("display_name", name)
            config |= {k: v for k, v in record["run"]["config"]["update"].items() if k != "_wandb"}
        elif record["type"] == "history":
            item = record["history"]["item"]
            rows.append(item | {"iter": item.get("iter", item["_step"]), "time": item["_timestamp"]})
    return {"name": f"{name} ({folder.name})", "config": config, "rows": rows}


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


def times(run):
    return [row.get("time", 0.0) for row in run["rows"]]


def fold(row, metrics, evaluations):
    """Note a row: the last value of each metric; of each evaluation the losses at that moment."""
    metrics.update((k, v) for k, v in row.items() if not isinstance(v, (list, dict)))
    if "loss/val" in row:
        evaluations.append({k: metrics[k] for k in ("iter", *LOSSES) if k in metrics})


def summary(metrics, evaluations, minutes):
    """{column: value} of a run's end, its last evaluation and its best; beside them each metric under its own name."""
    finite = [row for row in evaluations if isinstance(row["loss/val"], float)]
    last, best = evaluations[-1] if evaluations else metrics, min(finite, key=lambda row: row["loss/val"], default={})
    found = metrics | {k: best[k] for k in LOSSES[1:] if k in best}
    found |= {f"last {k}": last[k] for k in LOSSES if k in last} | {f"best {k}": best[k] for k in LOSSES[1:] if k in best}
    if last["iter"] != metrics["iter"]:
        found["last at iter"] = last["iter"]
    return found | ({"best at iter": best["iter"]} if best else {}) | {"minutes": minutes}


def results(run):
    metrics, evaluations = {}, []
    for row in run["rows"]:
        fold(row, metrics, evaluations)
    return summary(metrics, evaluations, seconds(times(run))[-1] / 60)


def differences(found):
    """The names of the settings that are not the same in all runs."""
    keys = dict.fromkeys(k for run in found for k, v in run["config"].items() if not isinstance(v, dict))
    return [k for k in keys if k not in NOT_SETTINGS and len({repr(run["config"].get(k)) for run in found}) > 1]


def text(value):
    if isinstance(value, float):
        return f"{value:.4f}" if 1e-3 <= abs(value) < 100 else f"{value:.4g}"
    if re.fullmatch("[0-9a-f]{40,}", str(value)):  # a commit or a checksum
        return value[:10]
    return f"{value:,}" if type(value) is int else str("" if value is None else value)


def rank(value):
    """Sorts numbers before words, and what is missing behind both."""
    return (value is None, isinstance(value, str), value if value is not None else 0)


def cells(found):
    """The comparison as rows of values, the first of them the columns' names."""
    settings, ends = differences(found), [results(run) for run in found]
    values = [{"run": run["name"], **run["config"], **end} for run, end in zip(found, ends)]
    metrics = [name for name in RESULTS if any(name in end for end in ends)]
    if not any(sort in v for v in values):
        fail(f"--sort={sort}: no such setting or metric; expected one of {', '.join([*settings, *metrics])}")
    values.sort(key=lambda v: rank(v.get(sort)))
    shown = sort in settings or sort in metrics or f"best {sort}" in metrics
    columns = ["run", *settings, *([] if shown else [sort]), *metrics]
    return [columns] + [[v.get(name) for name in columns] for v in values]


def width(text):
    """Columns of a terminal that a text takes: two for a Chinese character, none for an accent by itself."""
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def pad(text, columns, right=False):
    """The text with spaces behind it, or before it, to so many columns of a terminal."""
    space = " " * (columns - width(text))
    return space + text if right else text + space


def lines(table):
    """The table for a terminal."""
    shown = [[text(value) for value in row] for row in table]
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


def panel(curves, left, label, low, high, width=400, height=300):
    """
    One chart as SVG. curves: [(color, [(x, training loss)], [(x, validation loss)])]; training thin, validation with
    dots. The losses' axis is logarithmic, because runs differ in the end, where the losses are small.
    """
    right = max((x for _, *both in curves for points in both for x, _ in points), default=0) or 1
    across = lambda x: left + width * x / right
    down = lambda y: 20 + height * math.log(high / min(max(y, low), high)) / math.log(high / low)
    parts = [f'<rect x="{left}" y="20" width="{width}" height="{height}" fill="none" stroke="#999"/>']
    for x in ticks(0, right):
        parts.append(f'<text x="{across(x):.1f}" y="{height + 36}" text-anchor="middle">{x:g}</text>'
                     f'<path d="M{across(x):.1f} 20v{height}" stroke="#eee"/>')
    for y in log_ticks(low, high):
        parts.append(f'<text x="{left - 6}" y="{down(y) + 4:.1f}" text-anchor="end">{y:g}</text>'
                     f'<path d="M{left} {down(y):.1f}h{width}" stroke="#eee"/>')
    parts.append(f'<text x="{left + width / 2}" y="{height + 54}" text-anchor="middle">{label}</text>')
    for color, *both in curves:
        for points, style in zip(both, ('opacity="0.4"', 'stroke-width="1.8"')):
            path = " ".join(f"{across(x):.1f},{down(y):.1f}" for x, y in points)
            parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" {style}/>')
        parts += [f'<circle cx="{across(x):.1f}" cy="{down(y):.1f}" r="2.5" fill="{color}"/>' for x, y in both[1]]
    return "".join(parts)


def chart(found):
    """The losses of all runs as SVG, over tokens on the left and over time on the right."""
    values = [row[k] for run in found for row in run["rows"] for k in ("loss/train", "loss/val")
              if isinstance(row.get(k), float) and 0 < row[k] < math.inf]
    if not values:
        fail("--plot: none of these runs has a loss/train or loss/val")
    low, high = 0.97 * min(values), 1.03 * max(values)
    over = {"tokens (millions)": lambda run: [row.get("tokens", row["iter"]) / 1e6 for row in run["rows"]],
            "minutes": lambda run: [t / 60 for t in seconds(times(run))]}
    bottom = 96 + 18 * len(found)
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 940 {300 + bottom}" width="940" font-size="12" '
             f'font-family="sans-serif"><rect width="100%" height="100%" fill="white"/>']
    for (label, axis), left in zip(over.items(), (50, 510)):
        curves = [(COLORS[n % len(COLORS)], *([(x, row[k]) for x, row in zip(axis(run), run["rows"])
                                              if isinstance(row.get(k), float)] for k in ("loss/train", "loss/val")))
                  for n, run in enumerate(found)]
        parts.append(panel(curves, left, label, low, high))
    parts.append('<text x="50" y="14">loss, nats per token; with dots: validation</text>')
    for n, run in enumerate(found):
        y = 384 + 18 * n
        parts.append(f'<path d="M50 {y - 4}h24" stroke="{COLORS[n % len(COLORS)]}" stroke-width="2"/>'
                     f'<text x="82" y="{y}">{html.escape(run["name"])}</text>')
    return "".join(parts) + "</svg>\n"


def page(found, table):
    """Table and chart in one HTML file that needs nothing else."""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in table[0])
    body = "".join("<tr>" + "".join(f'<td data-value="{html.escape(str(v))}">{html.escape(text(v))}</td>' for v in row)
                   + "</tr>" for row in table[1:])
    return Template(PAGE.read_text(encoding="utf-8")).substitute(table=f"<tr>{head}</tr>{body}", chart=chart(found))


def main(folders):
    found = read_runs(run_folders(folders))
    if plot and not plot.endswith((".html", ".svg")):
        fail(f"--plot={plot}: expected a name that ends in .html or .svg")
    table = cells(found)
    print("\n".join(lines(table)))
    if plot:
        try:
            Path(plot).write_text(page(found, table) if plot.endswith(".html") else chart(found), encoding="utf-8")
        except OSError as e:
            fail(f"--plot={plot}: cannot be written ({e.strerror})")
        print(f"wrote {plot}")


if __name__ == "__main__":
    words = []
    given = configure(globals(), positional=words)
    main(words + ([name for name in runs.split(",") if name] if "runs" in given or not words else []))
