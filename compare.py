"""
Compare runs without a server, and decide whether a difference is more than the noise of the seeds.

    python compare.py                                every run in out: results and settings
    python compare.py out/a out/b --verdict          is b better than a? and what differs
    python compare.py out/a out/b --plot=runs.html   the table, and curves over tokens and time
    python compare.py out/a out/b --plot=runs.png    the curves alone; also .pdf and .svg
    python compare.py wandb --sort=learning_rate     every run that the W&B client logged there
    python compare.py --plot=dims.svg --group=dim    one mean curve with a band for each dim

A run is an out folder with log.jsonl and config.json, or a folder of the W&B client
(offline-run-..., run-...); of any other folder, all runs in it are read. Runs that differ only in
the seed are a group: one row with their mean and standard deviation, one curve with a band. For a
validation loss a run's value is its best one, for any other metric the last one. Columns "last ..."
are of the last evaluation, columns "best ..." of the one with the smallest validation loss.
"""
import html
import math
import os
import re
import shlex
import sys
from csv import writer
from json import dumps
from pathlib import Path
from string import Template
from typing import NamedTuple

import numpy as np

from configurator import configure, fail
from engine import charts
from engine.charts import band, thin
from engine.streams import one_line, pad, width
from engine.tracking.runs import (LOSSES, SEEDS, X, Run, canonical, encodable, is_finite, read_run,
                                  run_folders, tame)
from engine.untrusted import MAX_SETTINGS, read_json
from engine.verdict import judge, sentence

__all__ = ["LOSSES", "RESULTS", "Run", "X", "band", "chart", "differences", "encodable", "page",
           "read_run", "read_runs", "run_folders", "table_of", "tame", "text", "thin"]

runs = "out"      # folders of runs, separated by commas; or without --runs=, separated by spaces
verdict = False   # decide whether the second of two folders or groups is better than the first
metric = ""       # metric to compare by; empty: bpb/val for a verdict and if vocabularies differ,
                  # otherwise loss/val
sort = ""         # setting or metric to sort by, from small to large; empty: the metric, best first
group = ""        # a setting: group runs with the same value of it, even if other settings differ
single = False    # show each run by itself instead of groups
difference = 0.0  # verdict: size of a difference that is worth showing; 0: the difference found,
                  # but at least 1 % of the result
json = False      # print the comparison as JSON
csv = False       # print the table as CSV
plot = ""         # file to draw the curves to: .svg; .png or .pdf (needs matplotlib); .html with
                  # the table
title = ""        # title of the plot; empty: the name of the metric

RESULTS = ("iter", "tokens", *(f"last {name}" for name in LOSSES), "last at iter",
           *(f"best {name}" for name in LOSSES[1:]), "best at iter", "perf/tokens_per_sec",
           "minutes")
# Settings and figures that do not influence a result.
NOT_SETTINGS = ("out_dir", "wandb_log", "wandb_project", "wandb_run_name", "wandb_notes",
                "tensorboard_log", "swanlab_log", "trackio_log", "log_extras", "log_interval",
                "sample_prompt", "checks", "always_save_checkpoint", "supervise", "cache", "device",
                "seeds", "parallel", "json", "data_files", "peak_tflops", "peak_flops", "mfu_basis",
                "n_params", "n_trained", "flops_per_token", "git_changed")
VERSION = ("git_commit", "diff")  # version of the program
# Settings that a time budget derives from the measured speed, unless the command gives them.
FROM_SPEED = ("max_iters", "warmup_iters", "eval_interval", "dropout", "weight_decay")
NAMES = {  # {metric: (name, unit)}
    "loss/val": ("validation loss", "nats per token"),
    "loss/train": ("training loss", "nats per token"),
    "bpb/val": ("validation loss", "bits per byte"),
    "perf/tokens_per_sec": ("speed", "tokens per second"),
    "perf/iter_ms": ("time of a step", "ms"), "perf/peak_mib": ("peak memory", "MiB"),
    "minutes": ("duration", "minutes"), "mfu": ("model FLOPs utilization", "%")}
# Words in the names of metrics for which smaller is better, and for which larger is better.
SMALL_IS_GOOD = re.compile(r"loss|bpb|perplexity|ppl|nll|error|rmse|minutes|iter_ms|peak_mib"
                           r"|(?<![a-z])(mae|mse|wer|cer)(?![a-z])")
LARGE_IS_GOOD = re.compile("acc|f1|precision|recall|bleu|rouge|reward|auc|per_sec|mfu|eval/pairs")
PAGE = Path(__file__).with_name("page") / "saved.html"  # template of --plot=runs.html
PLOTS = (".html", ".svg", ".png", ".pdf")
MAX_COLUMNS = 100   # max columns of settings; those that most runs have are kept
MAX_CELL = 100      # max characters of a cell of the table


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


# ---- settings and metrics ------------------------------------------------------------------------

def setting_of(run, name):
    """Return a setting of a run in canonical form, None if the run lacks it."""
    value = run.config.get(name)
    if name == "init_from" and value in ("scratch", "resume", "force"):
        return "auto"  # each of these starts from new weights
    return canonical(value)


def settings_of(run):
    """Return {setting: value} of a run, without those that do not influence its result."""
    ignored = NOT_SETTINGS if run.is_foreign else (*NOT_SETTINGS, "command")
    return {name: setting_of(run, name) for name, value in run.config.items()
            if name not in ignored and not isinstance(value, dict)}


def differences(found):
    """
    Return the names of the settings that differ among runs of train.py or among runs of other
    programs, at most MAX_COLUMNS. Other programs need not have the same settings, so a missing one
    counts as a difference only for train.py.
    """
    names, own, foreign = {}, [], []  # names as keys, in the order of the runs' settings
    for run in found:
        settings = settings_of(run)
        names |= dict.fromkeys(settings)
        (foreign if run.is_foreign else own).append(settings)

    def differ(name):
        values = {repr(settings.get(name)) for settings in own}
        others = {repr(settings[name]) for settings in foreign if name in settings}
        return max(len(values), len(others)) > 1

    differing = [name for name in names if differ(name)]
    if len(differing) > MAX_COLUMNS:
        by_runs = sorted(differing, key=lambda name: -sum(name in run.config for run in found))
        kept = set(by_runs[:MAX_COLUMNS])
        differing = [name for name in differing if name in kept]
    return differing


def from_speed(run):
    """Return the names of the settings that a run's time budget derived from the measured speed."""
    if run.is_foreign or not run.config.get("minutes"):
        return set()
    words = command_words(run.folder)
    files = [word for word in words or () if word.endswith((".py", ".yaml", ".json"))
             and not word.endswith("train.py") and not word.startswith("-")]
    # A repetition, `train.py RUN/config.json`, also has the settings that RUN's command gave.
    for file in files:
        if Path(file).name == "config.json":
            words = [*words, *(command_words(Path(file).parent) or ())]
    if words is None or any(Path(file).name != "config.json" for file in files):
        return set()
    given = {word.removeprefix("--").partition("=")[0] for word in words}
    return {*FROM_SPEED} - given


def command_words(folder):
    """Return the words of the command of the run in a folder, None if they are unknown."""
    try:
        return shlex.split(read_json(folder / "result.json", MAX_SETTINGS, {})["command"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def incidental(found):
    """Return the names of settings in which runs of the same experiment may differ."""
    return {*SEEDS} | set.intersection(*map(from_speed, found))


def vocabulary(run):
    """Return what identifies a run's vocabulary, None if that is unknown."""
    meta = run.config.get("dataset")
    if isinstance(meta, dict) and "tokenizer_sha256" in meta:
        return repr(meta["tokenizer_sha256"])
    names = "vocab_source", "vocab_size", "data"
    return None if run.is_foreign else repr([run.config.get(name) for name in names])


def vocabularies_differ(found):
    """Return whether runs have different vocabularies, as far as they are known."""
    return len({vocabulary(run) for run in found} - {None}) > 1


def default_metric(found):
    """
    Return the metric to compare runs by: bits per byte if vocabularies differ, because losses per
    token are comparable only with the same vocabulary.
    """
    have = {name: None for run in found for name in run.columns}
    if len({vocabulary(run) for run in found if "bpb/val" in run.columns}) > 1:
        return "bpb/val"
    others = [name for name in have if name not in X]
    return next(name for name in ("loss/val", "bpb/val", "loss/train", *others, "iter")
                if name in have)


def is_small_good(name):
    """Return whether smaller values of a metric are better; None if its name does not show it."""
    if SMALL_IS_GOOD.search(name.lower()):
        return True
    return False if LARGE_IS_GOOD.search(name.lower()) else None


def value_of(run, name):
    """Return the value of a metric in a run, or None if it has no finite one."""
    value = run.results().get(name)
    return value if is_finite(value) else None


# ---- groups --------------------------------------------------------------------------------------

class Group(NamedTuple):
    """Runs that differ only in the seed, or a single run."""
    name: str
    runs: list

    def results(self):
        """Return {column: value}; for several runs the mean, rounded to an integer for counts."""
        results = [run.results() for run in self.runs]
        if len(results) == 1:
            return results[0]
        found = {}
        for name in set().union(*results):
            values = [result[name] for result in results if is_finite(result.get(name))]
            if values:
                is_count = all(type(value) is int for value in values)
                found[name] = round(np.mean(values)) if is_count else float(np.mean(values))
        return found

    def summary(self, metric):
        """
        Return {"n", "mean", "sd", "best"} of a metric in the runs that have it. "sd" is None for
        fewer than two runs; "mean" and "best" are None for no runs.
        """
        values = [value for run in self.runs if (value := value_of(run, metric)) is not None]
        choose = max if is_small_good(metric) is False else min
        return {"n": len(values), "mean": float(np.mean(values)) if values else None,
                "sd": float(np.std(values, ddof=1)) if len(values) > 1 else None,
                "best": choose(values, default=None)}

    def values(self, metric):
        """
        Return the values of a metric as engine.verdict.judge takes them: {seed: value} if each run
        has a seed, otherwise a list. Runs with the same seed are one value, their mean: their
        differences are not noise of the seeds.
        """
        by_seed, listed = {}, []
        for run in self.runs:
            value = value_of(run, metric)
            if value is not None:
                by_seed.setdefault(run.seed, []).append(value)
                listed.append(value)
        if None in by_seed:
            return listed
        return {seed: float(np.mean(values)) for seed, values in by_seed.items()}

    def setting(self, name):
        """Return the value of a setting, or a text with all values if the runs differ in it."""
        values = {repr(value): value for run in self.runs
                  if (value := setting_of(run, name)) is not None}
        if len(values) > 1:
            return ", ".join(map(text, values.values()))
        return next(iter(values.values()), None)


def group_key(run):
    """Return what the runs of a group have in common: all settings but the seed."""
    if run.is_foreign and run.seed is None:
        return str(run.folder)
    settings, ignored = settings_of(run), incidental([run])
    if run.is_foreign:
        settings |= {name: value for name, value in run.config.items() if isinstance(value, dict)}
    items = frozenset((name, repr(value)) for name, value in settings.items()
                      if name not in ignored)
    return run.is_foreign, items


def group_name(members, others):
    """
    Return the name of a group: the common prefix of its runs' names, unless a name in `others`
    begins with it too; otherwise the first run's name and the number of the rest.
    """
    names = [run.name for run in members]
    stem = re.sub(r"[-_. =/]*(seed|run)?[-_. =/]*\d*$", "", os.path.commonprefix(names))
    is_taken = any(run.name.startswith(stem) and not run.name[len(stem):len(stem) + 1].isalpha()
                   for run in others)
    if stem and not is_taken:
        return stem
    return names[0] + f" and {len(names) - 1} more" * (len(names) > 1)


def groups_of(found, group="", single=False):
    """
    Return the Groups of runs: those that differ only in the seed, those with the same value of the
    setting `group`, or single runs. Runs of another program are a group only if all have different
    seeds: if nothing differs, something has changed that their logs do not show. Raises ValueError
    if no run has the setting `group`.
    """
    if single:
        return [Group(run.name, [run]) for run in found]
    if group and not any(group in run.config for run in found):
        raise ValueError(f"--group={group}: no such setting; expected one of "
                         f"{', '.join(differences(found))}")
    members = {}
    for run in found:
        key = str(canonical(run.config.get(group))) if group else group_key(run)
        members.setdefault(key, []).append(run)
    if group:
        return [Group(f"{group}={value} ({len(some)})", some) for value, some in members.items()]
    named = []
    for some in members.values():
        is_repeated = len({run.seed for run in some}) < len(some)
        if len(some) == 1 or some[0].is_foreign and is_repeated:
            named += [Group(run.name, [run]) for run in some]
        else:
            others = [run for run in found if run not in some]
            named.append(Group(group_name(some, others), some))
    return named


class Comparison(NamedTuple):
    """Groups in the order of the table, the metric to compare, and the column to sort by."""
    groups: list
    metric: str
    sort: str

    @property
    def runs(self):
        return [run for one in self.groups for run in one.runs]

    @property
    def has_groups(self):
        return any(len(one.runs) > 1 for one in self.groups)


def arranged(groups, metric="", sort=""):
    """
    Return the Comparison of groups: those of train.py first, then those of other programs. Raises
    ValueError if no run has the metric, or the setting or metric to sort by.
    """
    found = [run for one in groups for run in one.runs]
    for flag, name in (("metric", metric), ("sort", sort)):
        if name and not any(name in run.config or name in run.results() for run in found):
            have = set().union(*(run.results() for run in found))
            expected = [*(name for name in RESULTS if name in have), *differences(found)]
            raise ValueError(f"--{flag}={name}: no such setting or metric; expected one of "
                             f"{', '.join(expected)}")
    metric = metric or default_metric(found)

    def key(one):
        if sort:
            value = one.results().get(sort, one.runs[0].config.get(sort))
        else:
            value = one.summary(metric)["mean"]
            value = -value if value is not None and is_small_good(metric) is False else value
        return all(run.is_foreign for run in one.runs), sort_key(value)

    return Comparison(sorted(groups, key=key), metric, sort)


# ---- the table -----------------------------------------------------------------------------------

def text(value):
    """Return a value as text for a table cell, a float with 4 decimals or significant digits."""
    if isinstance(value, float):
        if 1e3 <= abs(value) < 1e15:
            return f"{value if value.is_integer() else float(f'{value:.4g}'):,.0f}"
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


def setting_columns(comparison):
    """Return the names of the settings in which the groups differ."""
    names = differences(comparison.runs)
    if not comparison.has_groups:
        return names
    ignored = incidental(comparison.runs)
    return [name for name in names if name not in ignored
            and len({repr(one.setting(name)) for one in comparison.groups}) > 1]


def column_of(setting):
    """Return the name of a setting's column, prefixed if a result has that name, as minutes."""
    return f"setting {setting}" if setting in RESULTS else setting


def table_rows(comparison):
    """Return the comparison as rows of values, the names of the columns first."""
    metric, settings = comparison.metric, setting_columns(comparison)
    rows = []
    for one in comparison.groups:
        row = {column_of(name): one.setting(name) for name in settings} | one.results()
        row["run"] = one.name
        if comparison.has_groups:
            summary = one.summary(metric)
            row |= {"n": summary["n"], f"mean {metric}": summary["mean"], "sd": summary["sd"],
                    f"best {metric}": summary["best"]}
        rows.append({comparison.sort: one.setting(comparison.sort)} | row)
    results = [name for name in RESULTS if any(name in row for row in rows)]
    columns = ["run"]
    if comparison.has_groups:
        columns += ["n", f"mean {metric}", "sd", f"best {metric}"]
        results = [name for name in results if not name.endswith("at iter")]
    # The columns that compare and sort the groups. A column "best loss/val" already shows loss/val.
    for name in (comparison.sort, metric):
        if name and not {name, f"best {name}"} & {*columns, *results, *settings}:
            columns.append(name)
    columns = list(dict.fromkeys([*columns, *results, *map(column_of, settings)]))
    return [columns] + [[row.get(name) for name in columns] for row in rows]


def table_of(found, sort=""):
    """Return a table of single runs as rows of values. Raises ValueError if no run has `sort`."""
    return table_rows(arranged(groups_of(found, single=True), sort=sort))


def unify(rows):
    """Return the rows of a table; if a column has a float, its ints become floats."""
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


def as_csv(table):
    """Print a table as CSV."""
    rows = writer(sys.stdout, lineterminator="\n")
    for row in table:
        rows.writerow(one_line(value) if isinstance(value, str) else value for value in row)


def as_dict(comparison):
    """Return the comparison for JSON: values that are not finite are None."""
    metric, settings = comparison.metric, setting_columns(comparison)
    entries = []
    for one in comparison.groups:
        runs = []
        for run in one.runs:
            results = {k: v for k, v in run.results().items() if is_finite(v)}
            runs.append({"run": run.name, "folder": str(run.folder), "seed": run.seed,
                         "value": value_of(run, metric), "results": results})
        entries.append({"group": one.name, **one.summary(metric),
                        "settings": {name: one.setting(name) for name in settings}, "runs": runs})
    return {"metric": metric, "unit": NAMES.get(metric, ("", ""))[1], "groups": entries}


# ---- the chart -----------------------------------------------------------------------------------

def scales(found):
    """
    Return [(axis of Run.x, label, {run's name: divisor})] of the two charts. A run that is not in a
    dict is not drawn there. If vocabularies differ, tokens are not comparable, so the first axis is
    the amount of text that was read.
    """
    duration = "seconds", "minutes", {run.name: 60 for run in found}
    counted = [run for run in found if "tokens" in run.columns]
    if not counted:
        return [("iter", "steps", {run.name: 1 for run in found}), duration]
    tokens_per_byte = {}
    for run in counted:
        meta = run.config.get("dataset")
        sizes = [meta.get(f"train_{unit}") if isinstance(meta, dict) else None
                 for unit in ("tokens", "bytes")]
        if all(is_finite(size) and size > 0 for size in sizes):
            tokens_per_byte[run.name] = sizes[0] / sizes[1]
    if vocabularies_differ(found) and len(tokens_per_byte) == len(counted):
        divisors = {name: 1e6 * ratio for name, ratio in tokens_per_byte.items()}
        return [("tokens", "text (MB)", divisors), duration]
    return [("tokens", "tokens (millions)", {run.name: 1e6 for run in counted}), duration]


def figure_of(comparison, title=""):
    """Return the curves of a comparison as a charts.Figure. Raises ValueError if there are none."""
    metric, axes = comparison.metric, scales(comparison.runs)
    name, unit = NAMES.get(metric, (metric, ""))

    def curve(one, metric):
        drawn = []
        for axis, _, divisors in axes:
            lines = [(np.zeros(0), np.zeros(0))]
            if members := [run for run in one.runs if run.name in divisors]:
                lines = [run.line(metric, axis) for run in members]
                lines = [(x / divisors[run.name], y) for run, (x, y) in zip(members, lines)]
            drawn.append(thin(*lines[0]) if len(one.runs) == 1 else band(lines))
        return drawn if any(len(line[0]) for line in drawn) else []

    curves, has_pale = [], False
    for one in comparison.groups:
        main = curve(one, metric)
        pale = curve(one, "loss/train") if metric == "loss/val" else []
        has_pale = has_pale or bool(pale)
        if main or pale:
            curves.append(charts.Curve(text(one.name), main, pale))
    notes = ["pale: training loss"] * has_pale
    if comparison.has_groups:
        notes.append("bands: minimum to maximum of a group's runs")
    is_log = bool(re.search("loss|bpb|perplexity|ppl", metric))
    labels = tuple(label for _, label, _ in axes)
    figure = charts.Figure(title or name[:1].upper() + name[1:], name + f" ({unit})" * bool(unit),
                           "; ".join(notes), is_log, labels, curves)
    try:
        charts.limits(figure)
    except ValueError:
        raise ValueError(f"--plot: none of these runs has a {metric} to draw") from None
    return figure


def chart(found, group=""):
    """Return the curves of runs as SVG. Raises ValueError if there are none."""
    return charts.svg(figure_of(arranged(groups_of(found, group))))


def html_table(table):
    """Return a table as HTML."""
    head, *rows = table
    parts = ["<table><tr>", *(f"<th>{html.escape(text(name))}</th>" for name in head), "</tr>"]
    for row in unify(rows):
        cells = [f'<td data-value="{html.escape(one_line(value))}">{html.escape(text(value))}</td>'
                 for value in row]
        parts += ["<tr>", *cells, "</tr>"]
    return "".join([*parts, "</table>"])


def page_of(comparison, title=""):
    """Return tables and chart of a comparison as one self-contained HTML file."""
    tables = html_table(table_rows(comparison))
    if comparison.has_groups:
        single = [Group(run.name, [run]) for run in comparison.runs]
        tables += html_table(table_rows(comparison._replace(groups=single)))
    figure, count = figure_of(comparison, title), len(comparison.runs)
    heading = title or f"{figure.title} of {count} run{'s' * (count > 1)}"
    template = Template(PAGE.read_text(encoding="utf-8"))
    return template.substitute(title=html.escape(heading), tables=tables, chart=charts.svg(figure))


def page(found, group=""):
    """Return the page of these runs. Raises ValueError."""
    return page_of(arranged(groups_of(found, group)))


def write_plot(comparison):
    """Write the file that --plot names; exit if that fails. Raises ValueError without curves."""
    figure = figure_of(comparison, title)
    try:
        if plot.endswith(".html"):
            Path(plot).write_text(page_of(comparison, title), encoding="utf-8")
        elif plot.endswith(".svg"):
            Path(plot).write_text(charts.svg(figure), encoding="utf-8")
        elif not charts.save_picture(figure, plot):
            print("note: this machine has no font for some names; a browser shows those in a .svg",
                  file=sys.stderr)
    except OSError as e:
        fail(f"--plot={plot}: cannot be written ({e.strerror})")
    except ModuleNotFoundError as e:
        if e.name != "matplotlib":
            raise
        fail(f"--plot={plot}: needs matplotlib (pip install matplotlib); names that end in .svg or "
             ".html need no package")


# ---- the verdict ---------------------------------------------------------------------------------

def side(name):
    """
    Return the Group that a word of the command names: all runs in a folder, or a group of its
    parent folder by the group's name in the table. Exit if it is neither.
    """
    if Path(name).exists():
        return Group(name, read_runs(run_folders([name])))
    around = Path(name).parent
    folders = run_folders([around]) if around.is_dir() else []
    if any(str(folder).startswith(name.partition(" and ")[0]) for folder in folders):
        for one in groups_of(read_runs(folders)):
            if one.name == name:
                return one
    fail(f"{name}: expected a folder of runs, or the name of a group in the table of "
         f"`python compare.py {around}`")


def check_side(one):
    """
    Exit if the runs of a side of the verdict differ in more than the seed. notes_on() mentions
    other versions of the program: a commit need not change the training.
    """
    ignored = incidental(one.runs) | {*VERSION}
    if others := [name for name in differences(one.runs) if name not in ignored]:
        fail(f"{one.name}: its runs differ in {', '.join(others[:5])}; expected runs that differ "
             "only in the seed; name a folder or a group of such runs")


def verdict_sides(folders):
    """Return the two Groups that --verdict compares; exit if there are not two."""
    if len(folders) == 2 and not group:
        sides = [side(name) for name in folders]
        for one in sides:
            check_side(one)
        return sides
    groups = groups_of(read_runs(run_folders(folders)), group)
    if len(groups) != 2:
        names = ", ".join(one.name for one in groups[:10])
        fail(f"--verdict: expected two folders or groups, as in: python compare.py out/a out/b "
             f"--verdict; found {len(groups)}: {names}")
    return groups


def changed_settings(a, b):
    """Return {setting: [value in a, value in b]} of the settings in which two Groups differ."""
    found = [*a.runs, *b.runs]
    names = [name for name in differences(found) if name not in incidental(found)]
    values = {name: [a.setting(name), b.setting(name)] for name in names}
    return {name: both for name, both in values.items() if repr(both[0]) != repr(both[1])}


def verdict_metric(groups):
    """Return "bpb/val" for a verdict if all runs have it, otherwise ""."""
    have = verdict and all("bpb/val" in run.columns for one in groups for run in one.runs)
    return "bpb/val" * have


def decide(a, b, metric):
    """
    Return the verdict on two Groups: the entries of engine.verdict.Verdict, "a" and "b", their
    names, "sentence", and "differs": the settings in which they differ. Raises ValueError if one of
    them has no value of the metric.
    """
    for one in (a, b):
        if not one.summary(metric)["n"]:
            raise ValueError(f"{one.name}: no run has a finite {metric}; choose another --metric")
    found = judge(a.values(metric), b.values(metric), difference or None)
    words = sentence(found, a.name, b.name, NAMES.get(metric, ("", ""))[1], is_small_good(metric))
    return {"a": a.name, "b": b.name, "sentence": words} | found._asdict() | {
        "differs": changed_settings(a, b)}


def notes_on(comparison):
    """Return the caveats of a comparison, as lines."""
    notes, metric, found = [], comparison.metric, comparison.runs
    if metric in ("loss/val", "loss/train") and vocabularies_differ(found):
        notes.append("vocabularies differ, so losses per token are not comparable; "
                     "use --metric=bpb/val")
    for one in comparison.groups:
        missing = len(one.runs) - one.summary(metric)["n"]
        if len(one.runs) > 1 and missing:
            notes.append(f"{one.name}: {missing} of {len(one.runs)} runs have no finite {metric} "
                         "and are left out")
        if {*VERSION} & {*differences(one.runs)}:
            notes.append(f"{one.name}: its runs are of different versions of the program")
        steps = [run.metrics["iter"] for run in one.runs if is_finite(run.metrics["iter"])]
        if steps and min(steps) < 0.8 * max(steps):
            notes.append(f"{one.name}: some runs ended at step {min(steps):,}, others at "
                         f"{max(steps):,}")
    return notes


def validation_notes(a, b):
    """Return [a note] if two Groups were validated on different texts, else []."""
    sizes = {repr(meta.get("val_bytes")) for run in (*a.runs, *b.runs)
             if isinstance(meta := run.config.get("dataset"), dict)}
    if len(sizes) > 1:
        return ["their validation texts differ, so a difference may come from the texts"]
    return []


# ---- the command ---------------------------------------------------------------------------------

def finite(value):
    """Return a value for JSON, with None for NaN and infinity."""
    if isinstance(value, dict):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, list):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def main(folders):
    check_options()
    try:
        sides = verdict_sides(folders) if verdict else []
        groups = sides or groups_of(read_runs(run_folders(folders)), group, single)
        comparison = arranged(groups, metric or verdict_metric(groups), sort)
        notes, decided = notes_on(comparison), {}
        if verdict:
            decided = decide(*sides, comparison.metric)
            notes += validation_notes(*sides)
        if plot:
            write_plot(comparison)
    except ValueError as e:
        fail(e)
    for note in notes:
        print(f"note: {one_line(note)}", file=sys.stderr)
    show(comparison, decided)
    if plot:
        print(f"wrote {plot}", file=sys.stderr if json or csv else sys.stdout)


def check_options():
    """Exit if an option is invalid or conflicts with another."""
    if plot and not plot.endswith(PLOTS):
        fail(f"--plot={plot}: expected a name that ends in {', '.join(PLOTS)}")
    if json and csv:
        fail("--json and --csv: expected one of them")
    if difference < 0:
        fail(f"--difference={difference:g}: expected a positive number, or 0")


def show(comparison, decided):
    """Print a comparison, and what `decide` returned, as a table, JSON or CSV."""
    if json:
        found = as_dict(comparison) | ({"verdict": decided} if decided else {})
        print(dumps(finite(found), indent=1))
        return
    if csv:
        as_csv(table_rows(comparison))
    else:
        print("\n".join(lines_of(table_rows(comparison))))
    if decided:
        says = sys.stderr if csv else sys.stdout
        print(one_line(decided["sentence"]), file=says)
        print(differing_words(decided["differs"]), file=says)


def differing_words(differs):
    """Return {setting: [value in a, value in b]} as a line."""
    if not differs:
        return "no setting differs"
    pairs = [f"{name} {text(a) or 'none'} -> {text(b) or 'none'}" for name, (a, b) in
             differs.items()]
    return one_line(f"differing: {', '.join(pairs)}")


if __name__ == "__main__":
    folders = []
    given = configure(globals(), positional=folders).given
    if "runs" in given or not folders:
        folders += [name for name in runs.split(",") if name]
    main(folders)
