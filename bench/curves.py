"""
Plot a metric of several runs: its course over training, or its final value against a setting. Runs
with the same values of the --by settings, such as runs that differ in the seed, share a color.

    python bench/curves.py out/a out/b --by=optimizer --png=curves.png           loss over tokens
    python bench/curves.py out/d* --over=flops --by=depth --png=depth.png        over training FLOPs
    python bench/curves.py out/v* --over=vocab_size --metric=bpb/val --png=v.png  final values

compare.py defines what a run is. Training FLOPs are those of the forward and backward passes: the
model's flops_per_token times the number of tokens.
"""
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import compare
from configurator import configure, fail

metric = "loss/val"  # loss/val, bpb/val or any other metric in the log
over = "tokens"      # x axis: tokens, flops, iter; or a setting, to plot final values against it
by = ""              # settings or model arguments, joined by +; equal values share a color
least = 0.0          # bottom of the y axis, such as the data's entropy; 0: auto
most = 0.0           # top of the y axis; 0: auto
log = False          # logarithmic y axis
title = ""           # title of the picture
png = "curves.png"   # file of the picture (needs: pip install matplotlib)

TRAINING_AXES = ("tokens", "flops", "iter")  # with any other --over, final values are plotted


def value(run, name):
    """Return a run's setting, or an argument of its model."""
    found = run.config | run.config["model_args"]
    if name not in found:
        fail(f"{run.name}: has no setting {name!r}; its config.json lists the settings")
    # For a setting of 0 or "", train.py derives a value and stores it in model_args.
    return run.config.get(name) or found[name]


def group(run):
    """Return the label of the run's group: its values of the --by settings, or its name."""
    return ", ".join(f"{name}={value(run, name)}" for name in by.split("+") if name) or run.name


def curve(run):
    """Return [(x, metric)] over training, without the point at x = 0."""
    scale = {"tokens": 1, "flops": run.config["flops_per_token"], "iter": 1}[over]
    xs, ys = run.line(metric, "iter" if over == "iter" else "tokens")
    return [(x * scale, y) for x, y in zip(xs, ys) if x > 0]


def last_value(run):
    """Return the last value of the metric."""
    return run.line(metric, "iter")[1][-1]


def draw_curves(axes, groups):
    """Draw a curve for every run, in the color of its group."""
    for n, (name, runs) in enumerate(groups.items()):
        for i, run in enumerate(runs):
            label = name if i == 0 else None  # one entry per group in the legend
            axes.plot(*zip(*curve(run)), ".-", ms=3, lw=1, color=f"C{n}", label=label)


def draw_ends(axes, groups):
    """Draw a dot for every run's last value, and a line through the medians."""
    for n, (name, runs) in enumerate(groups.items()):
        ends = {}  # {x: the runs' last values}
        for run in runs:
            ends.setdefault(value(run, over), []).append(last_value(run))
        medians = sorted((x, statistics.median(ys)) for x, ys in ends.items())
        dots = [(x, y) for x, ys in ends.items() for y in ys]
        axes.plot(*zip(*medians), "-", color=f"C{n}", label=name)
        axes.plot(*zip(*dots), "o", ms=4, color=f"C{n}")


def main(folders):
    runs = compare.read_runs(compare.run_folders(folders))
    others = [run.name for run in runs if "model_args" not in run.config]
    if others:
        print(f"left out, since train.py did not make them: {', '.join(others)}", file=sys.stderr)
    runs = [run for run in runs if run.name not in others]
    if not runs:
        fail("no runs; expected their folders, as in: python bench/curves.py out/a out/b")
    over_training = over in TRAINING_AXES
    groups = {}
    for run in runs:
        label = group(run) if by or over_training else metric
        groups.setdefault(label, []).append(run)
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    figure, axes = pyplot.subplots(figsize=(6, 4))
    draw = draw_curves if over_training else draw_ends
    draw(axes, groups)
    unit = "bits per byte" if metric == "bpb/val" else "nats per token"
    axes.set(xlabel=over, ylabel=f"{metric}, {unit}", title=title)
    axes.set(xscale="linear" if over in ("tokens", "iter") else "log")
    axes.set(yscale="log" if log else "linear")
    axes.set_ylim(least or None, most or None)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(png, dpi=90, bbox_inches="tight")
    print(f"wrote {png}")


if __name__ == "__main__":
    words = []
    configure(globals(), positional=words)
    main(words)
