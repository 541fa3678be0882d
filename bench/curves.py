"""
Draw runs: a metric over training, or final values over a setting, with one color for all seeds.

    python bench/curves.py out/a out/b --by=optimizer --png=curves.png           loss over tokens
    python bench/curves.py out/d* --over=flops --by=depth --png=depth.png        over training FLOPs
    python bench/curves.py out/v* --over=vocab_size --metric=bpb/val --png=v.png  final values

compare.py describes what a run is. FLOPs are of forward and backward: flops_per_token of the model,
for every token.
"""
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import compare
from configurator import configure, fail

metric = "loss/val"  # loss/val, bpb/val or any other of the log
over = "tokens"      # x axis: tokens, flops, iter; or a setting, to draw final values over
by = ""              # settings or model arguments, joined by +: same values, same color
least = 0.0          # bottom of the y axis, such as an entropy; 0: auto
most = 0.0           # top of the y axis; 0: auto
log = False          # logarithmic y axis
title = ""           # above the picture
png = "curves.png"   # the picture (needs: pip install matplotlib)


def value(run, name):
    """Return a run's setting, or an argument of its model."""
    found = run.config | run.config["model_args"]
    if name not in found:
        fail(f"{run.name}: has no setting {name!r}; its config.json lists what there is")
    return run.config.get(name) or found[name]  # settings of 0 and "" are derived: see model_args


def group(run):
    """Return the label that the run shares with others of its color."""
    return ", ".join(f"{name}={value(run, name)}" for name in by.split("+") if name) or run.name


def curve(run):
    """Return [(x, metric)] over training."""
    scale = {"tokens": 1, "flops": run.config["flops_per_token"], "iter": 1}[over]
    return [(x * scale, y) for x, y in zip(*run.line(metric, "iter" if over == "iter" else "tokens")) if x > 0]


def end(run):
    """Return the last value of the metric."""
    return run.line(metric, "iter")[1][-1]


def draw_curves(axes, groups):
    for n, (name, found) in enumerate(groups.items()):
        for i, run in enumerate(found):
            axes.plot(*zip(*curve(run)), ".-", ms=3, lw=1, color=f"C{n}", label=name if not i else None)


def draw_ends(axes, groups):
    """Draw a dot for every run and a line through the medians."""
    for n, (name, found) in enumerate(groups.items()):
        ends = {}
        for run in found:
            ends.setdefault(value(run, over), []).append(end(run))
        axes.plot(*zip(*sorted((x, statistics.median(ys)) for x, ys in ends.items())), "-", color=f"C{n}", label=name)
        axes.plot(*zip(*((x, y) for x, ys in ends.items() for y in ys)), "o", ms=4, color=f"C{n}")


def main(folders):
    found = compare.read_runs(compare.run_folders(folders))
    others = [run.name for run in found if "model_args" not in run.config]
    if others:
        print(f"left out, since train.py did not make them: {', '.join(others)}", file=sys.stderr)
    found = [run for run in found if run.name not in others]
    if not found:
        fail("no runs; expected their folders, as in: python bench/curves.py out/a out/b")
    groups = {}
    for run in found:
        groups.setdefault(group(run) if by or over in ("tokens", "flops", "iter") else metric, []).append(run)
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    figure, axes = pyplot.subplots(figsize=(6, 4))
    (draw_curves if over in ("tokens", "flops", "iter") else draw_ends)(axes, groups)
    axes.set(xlabel=over, ylabel=f"{metric}, {'bits per byte' if metric == 'bpb/val' else 'nats per token'}", title=title,
             xscale="linear" if over in ("tokens", "iter") else "log", yscale="log" if log else "linear")
    axes.set_ylim(least or None, most or None)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(png, dpi=90, bbox_inches="tight")
    print(f"wrote {png}")


if __name__ == "__main__":
    words = []
    configure(globals(), positional=words)
    main(words)
