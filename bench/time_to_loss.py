"""
Measure the time from start to a loss, over seeds, and compare it with a baseline.

    python bench/time_to_loss.py config/shakespeare.py --data=input.txt --goal=1.8857 \\
        --json_file=ours.json
    python bench/time_to_loss.py --nanogpt=PATH --json_file=nanogpt.json     nanoGPT's CPU recipe
    python bench/time_to_loss.py config/shakespeare.py --data=input.txt --baseline=nanogpt.json \\
        --png=curve.png

The clock starts before Python does and is read when an evaluation is printed, so imports,
preparation and evaluations count. nanoGPT's losses are samples of 20 batches, ours are of the whole
split; for both, the smallest so far counts.
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
data = ""         # text to train on
options = ""      # further settings of train.py, separated by spaces
seeds = "1"       # separated by commas, one run each
goal = 1.8857     # loss to reach
baseline = ""     # JSON files of this program to compare with, separated by commas
nanogpt = ""      # folder of nanoGPT with prepared data/shakespeare_char, to measure instead
json_file = ""    # file for the curves
png = ""          # file for their picture (needs: pip install matplotlib)

NANOGPT = ("config/train_shakespeare_char.py --device=cpu --compile=False --eval_iters=20 --log_interval=1 --block_size=64 "
           "--batch_size=12 --n_layer=4 --n_head=4 --n_embd=128 --max_iters=2000 --lr_decay_iters=2000 --dropout=0.0")
SAID = re.compile(r"(?:val loss) ([\d.]+)")  # both programs print this


def run(seed, out):
    """Return [(seconds since the start, validation loss)] of one run."""
    if nanogpt:
        command, folder = f"train.py {NANOGPT} --out_dir={out}", nanogpt
    else:
        command = f"{ROOT}/train.py {ROOT / recipe} --data={Path(data).resolve()} --seed={seed} --out_dir={out} {options}"
        folder = out
    curve, start = [], time.perf_counter()
    with subprocess.Popen([sys.executable, "-u", *command.split()], cwd=folder, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if found := SAID.search(line):
                curve.append((time.perf_counter() - start, float(found[1])))
    if process.returncode or not curve:
        fail(f"{command.split()[0]}: ended with code {process.returncode} and {len(curve)} evaluations")
    return curve


def reached(curve, loss):
    """Return the seconds until a loss; None if it was never reached."""
    return next((seconds for seconds, value in curve if value <= loss), None)


def best(curve, seconds):
    """Return the smallest loss up to a time."""
    return min((value for at, value in curve if at <= seconds), default=None)


def middle(values):
    """Return the median; None if a run has no value."""
    return statistics.median(values) if values and None not in values else None


def summary(curves):
    took = middle([reached(c, goal) for c in curves])
    return {"goal": goal, "seconds_to_goal": took, "seconds": middle([c[-1][0] for c in curves]),
            "loss": middle([best(c, c[-1][0]) for c in curves]), "losses": [best(c, c[-1][0]) for c in curves]}


def draw(named):
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for (name, curves), color in zip(named.items(), ("C0", "C1", "C2")):
        for n, curve in enumerate(curves):
            axes.plot(*zip(*curve), ".-", color=color, alpha=0.8, label=name if not n else None)
    axes.axhline(goal, color="gray", lw=0.8)
    axes.set(xlabel="seconds, start included", ylabel="validation loss, nats per character", ylim=(None, 2.6))
    axes.legend()
    figure.savefig(png, dpi=110, bbox_inches="tight")


def main():
    if not nanogpt and not Path(data).is_file():
        fail(f"--data={data}: not a file, expected the text to train on")
    curves = []
    for seed in seeds.split(","):
        with tempfile.TemporaryDirectory() as out:
            curves.append(run(seed, out))
            print(f"seed {seed}: " + ", ".join(f"{loss:.4f} at {at:.0f} s" for at, loss in curves[-1]), flush=True)
    named = {"nanoGPT" if nanogpt else Path(recipe).name: curves}
    print(json.dumps(summary(curves)))
    if json_file:
        Path(json_file).write_text(json.dumps({"summary": summary(curves), "curves": curves}) + "\n")
    ours = middle([reached(c, goal) for c in curves])
    for file in filter(None, baseline.split(",")):
        other = named[Path(file).stem] = json.loads(Path(file).read_text())["curves"]
        theirs, end = middle([reached(c, goal) for c in other]), middle([c[-1][0] for c in other])
        print(f"{goal} after {ours and round(ours, 1)} s, {file} {theirs and round(theirs, 1)} s; when that ends, after "
              f"{end:.0f} s, ours is at {middle([best(c, end) for c in curves])}")
    if png:
        draw(named)


if __name__ == "__main__":
    configure(globals(), argv=[f"--recipe={w}" if w.endswith(".py") else w for w in sys.argv[1:]])
    main()
