"""
Several runs side by side, without a server.

    python compare.py out/a out/b out/c                  what differs between them, and how they ended, as a table
    python compare.py out/a out/b --plot=curves.png      and their losses over tokens and over time (needs matplotlib)

A run is an out folder with its log.jsonl and config.json.
"""
import json
import math
import sys
from pathlib import Path

from configurator import configure, fail

runs = ""             # the runs' folders, separated by commas, or given as words
sort = "loss/val"     # the metric or setting the table is sorted by
plot = ""             # a .png or .svg file for the curves

FINAL = ("iter", "tokens", "loss/val", "bpb/val", "loss/train", "perf/tokens_per_sec", "minutes")
NOT_SETTINGS = ("out_dir", "wandb_run_name", "peak_flops", "n_params", "flops_per_token")  # differ, but decide nothing


def read_run(folder):
    """{"name", "config": {key: value}, "rows": [row of log.jsonl]} of an out folder."""
    try:
        config = json.loads(Path(folder, "config.json").read_text(encoding="utf-8"))
        lines = Path(folder, "log.jsonl").read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines if line.endswith("}")]
    except (OSError, ValueError) as e:
        fail(f"{folder}: not a run ({e}); expected an out folder with config.json and log.jsonl")
    if not rows:
        fail(f"{folder}: its log.jsonl has no rows yet")
    return {"name": str(folder), "config": config, "rows": rows}


def seconds(rows):
    """The time of each row since the first, without the pauses between a stop and its continuation."""
    gaps = [max(0.0, b["time"] - a["time"]) for a, b in zip(rows, rows[1:])]
    usual = sorted(gaps)[len(gaps) // 2] if gaps else 0
    total, out = 0.0, [0.0]
    for gap in gaps:
        total += gap if gap < 20 * usual + 10 else usual
        out.append(total)
    return out


def results(run):
    """The final metrics of a run: of losses on the validation split the best, of all else the last."""
    found = {"minutes": seconds(run["rows"])[-1] / 60}
    for row in run["rows"]:
        found |= {k: v for k, v in row.items() if k in FINAL}
    for name in ("loss/val", "bpb/val"):
        values = [row[name] for row in run["rows"] if isinstance(row.get(name), float)]
        found |= {name: min(values)} if values else {}
    return found


def differences(found):
    """The names of the settings that are not the same in all runs."""
    keys = dict.fromkeys(k for run in found for k, v in run["config"].items() if not isinstance(v, dict))
    return [k for k in keys if k not in NOT_SETTINGS and len({repr(run["config"].get(k)) for run in found}) > 1]


def text(value):
    if isinstance(value, float):
        return f"{value:.4f}" if 1e-3 <= abs(value) < 100 else f"{value:.4g}"
    return f"{value:,}" if type(value) is int else str("" if value is None else value)


def table(found):
    """The lines of the comparison."""
    settings = differences(found)
    metrics = [name for name in FINAL if any(name in results(run) for run in found)]
    cells = [["run", *settings, *metrics]]
    values = [(run, {**run["config"], **results(run)}) for run in found]
    known = [v for _, v in values if sort in v]
    if not known:
        fail(f"--sort={sort}: no such setting or metric; expected one of {', '.join([*settings, *metrics])}")
    values.sort(key=lambda pair: (sort not in pair[1], pair[1].get(sort, math.inf)))
    cells += [[run["name"], *(text(value.get(k)) for k in settings + metrics)] for run, value in values]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    return ["  ".join(cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths)))
            for row in cells]


def draw(found, path):
    """Training loss thin, validation loss with dots, over tokens on the left and over time on the right."""
    try:
        import matplotlib
        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        fail("--plot needs matplotlib: pip install matplotlib")
    figure, axes = plt.subplots(1, 2, figsize=(11, 4), sharey=True)
    for number, run in enumerate(found):
        rows, color = run["rows"], f"C{number}"
        times = [t / 60 for t in seconds(rows)]
        for axis, x in ((axes[0], [row["tokens"] / 1e6 for row in rows]), (axes[1], times)):
            for metric, style in (("loss/train", {"alpha": 0.35, "lw": 1}), ("loss/val", {"marker": "o", "ms": 3})):
                points = [(a, row[metric]) for a, row in zip(x, rows) if isinstance(row.get(metric), float)]
                axis.plot(*zip(*points), color=color, label=run["name"] if metric == "loss/val" else None, **style)
    axes[0].set(xlabel="tokens (millions)", ylabel="loss (nats per token; dots: validation)")
    axes[1].set(xlabel="time (minutes)")
    lowest = min(results(run)["loss/val"] for run in found)
    highest = max(row["loss/val"] for run in found for row in run["rows"] if "loss/val" in row)
    axes[0].set_ylim(lowest - 0.05 * (highest - lowest), highest)
    axes[0].legend()
    for axis in axes:
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main():
    folders = runs.split(",") if runs else []
    folders += [word for word in words]
    if not folders:
        fail("no runs; expected their out folders, as in: python compare.py out/a out/b")
    found = [read_run(folder) for folder in folders]
    print("\n".join(table(found)))
    if plot:
        draw(found, plot)
        print(f"wrote {plot}")


if __name__ == "__main__":
    words = [word for word in sys.argv[1:] if not word.startswith("-")]
    configure(globals(), argv=[word for word in sys.argv[1:] if word.startswith("-")])
    main()
