"""
Measure the time from the start of training to a given loss, for several seeds, and compare it with
a baseline.

    python bench/time_to_loss.py config/shakespeare.py --data=input.txt --goal=1.8857 \\
        --json_file=ours.json
    python bench/time_to_loss.py --nanogpt=PATH --json_file=nanogpt.json     nanoGPT's CPU recipe
    python bench/time_to_loss.py config/shakespeare.py --data=input.txt --baseline=nanogpt.json \\
        --png=curve.png

The clock starts before the training's Python process and is read when an evaluation is printed, so
imports, preparation and evaluations count. nanoGPT estimates its loss on 20 batches; ours is of the
whole split. For both, the loss at a given time is the smallest one so far.
"""
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from configurator import configure, fail

recipe = "config/shakespeare.py"  # our preset
data = ""         # text file to train on
options = ""      # further settings of train.py, separated by spaces
seeds = "1"       # random seeds, separated by commas; a run for each
goal = 1.8857     # loss to reach, in nats per character
baseline = ""     # JSON files of this program to compare with, separated by commas
nanogpt = ""      # folder of nanoGPT with prepared data/shakespeare_char; measures nanoGPT instead
json_file = ""    # file for the curves
png = ""          # file for a plot of the curves (needs: pip install matplotlib)

NANOGPT = (
    "config/train_shakespeare_char.py --device=cpu --compile=False --eval_iters=20 "
    "--log_interval=1 --block_size=64 --batch_size=12 --n_layer=4 --n_head=4 --n_embd=128 "
    "--max_iters=2000 --lr_decay_iters=2000 --dropout=0.0")
SAID = re.compile(r"(?:val loss) ([\d.]+)")  # both programs print evaluations in this format


def run(seed, out):
    """
    Train once, with `out` as the output folder. Return the curve of the run: a list of (seconds
    since the start, validation loss).
    """
    if nanogpt:
        command = f"train.py {NANOGPT} --out_dir={out}"
        folder = nanogpt
    else:
        command = (f"{ROOT}/train.py {ROOT / recipe} --data={Path(data).resolve()} --seed={seed} "
                   f"--out_dir={out} {options}")
        folder = out
    words = [sys.executable, "-u", *command.split()]
    curve = []
    start = time.perf_counter()
    with subprocess.Popen(words, cwd=folder, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if found := SAID.search(line):
                curve.append((time.perf_counter() - start, float(found[1])))
    if process.returncode or not curve:
        fail(f"{command.split()[0]}: ended with code {process.returncode} and "
             f"{len(curve)} evaluations; expected code 0 and at least one evaluation")
    return curve


def reached(curve, loss):
    """Return the seconds until a loss; None if it was never reached."""
    return next((seconds for seconds, value in curve if value <= loss), None)


def best(curve, seconds):
    """Return the smallest loss up to a time; None if there was no evaluation yet."""
    return min((value for at, value in curve if at <= seconds), default=None)


def median(values):
    """Return the median; None if the list is empty or one of its values is None."""
    return statistics.median(values) if values and None not in values else None


def summary(curves):
    """Return the goal, the medians over the runs and the best loss of each run."""
    ends = [curve[-1][0] for curve in curves]
    losses = [best(curve, end) for curve, end in zip(curves, ends)]
    return {
        "goal": goal,
        "seconds_to_goal": median([reached(curve, goal) for curve in curves]),
        "seconds": median(ends),
        "loss": median(losses),
        "losses": losses,
    }


def goal_text(seconds):
    """Return the seconds to the goal in words; None means that at least one run missed it."""
    return "not reached in every run" if seconds is None else f"after {round(seconds, 1)} s"


def draw(named):
    """Write the curves of {name: curves} to the file `png`, with one color for each name."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for (name, curves), color in zip(named.items(), ("C0", "C1", "C2")):
        for n, curve in enumerate(curves):
            label = name if n == 0 else None  # one entry of the legend for all runs
            axes.plot(*zip(*curve), ".-", color=color, alpha=0.8, label=label)
    axes.axhline(goal, color="gray", lw=0.8)
    axes.set(xlabel="seconds, start included", ylabel="validation loss, nats per character",
             ylim=(None, 2.6))
    axes.legend()
    figure.savefig(png, dpi=110, bbox_inches="tight")


def command_line():
    """Return this program's arguments, with a preset NAME.py rewritten as --recipe=NAME.py."""
    return [f"--recipe={word}" if word.endswith(".py") else word for word in sys.argv[1:]]


def main():
    if not nanogpt and not Path(data).is_file():
        fail(f"--data={data}: not a file, expected the text to train on")
    curves = []
    for seed in seeds.split(","):
        with tempfile.TemporaryDirectory() as out:
            curve = run(seed, out)
        curves.append(curve)
        evaluations = ", ".join(f"{loss:.4f} at {at:.0f} s" for at, loss in curve)
        print(f"seed {seed}: {evaluations}", flush=True)
    named = {"nanoGPT" if nanogpt else Path(recipe).name: curves}
    result = summary(curves)
    print(json.dumps(result))
    if json_file:
        Path(json_file).write_text(json.dumps({"summary": result, "curves": curves}) + "\n")
    for file in filter(None, baseline.split(",")):
        other = json.loads(Path(file).read_text())["curves"]
        named[Path(file).stem] = other
        theirs = median([reached(curve, goal) for curve in other])
        end = median([curve[-1][0] for curve in other])
        best_by_end = median([best(curve, end) for curve in curves])
        print(f"loss {goal}: ours {goal_text(result['seconds_to_goal'])}, "
              f"{file} {goal_text(theirs)}; "
              f"when {file} ends, after {end:.0f} s, our best loss is {best_by_end}")
    if png:
        draw(named)


if __name__ == "__main__":
    configure(globals(), argv=command_line())
    main()
