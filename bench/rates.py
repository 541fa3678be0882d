"""
Test whether the range that --lr_find suggests contains the best learning rate: a grid of eight
rates, each trained to the end of its schedule, compared by validation loss; with Muon and AdamW.

    python bench/rates.py [--texts=stories:3000,input.txt] [--steps=400] [--out=out/rates]

Runs that exist are not repeated.
"""
import contextlib
import json
import multiprocessing
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import train
from configurator import configure

texts = "stories:3000"   # data of train.py, separated by commas
optimizers = "muon,adamw"
steps = 400              # of a training
out = "out/rates"        # folder of the runs
more = "--dim=64 --n_layers=2 --n_heads=2 --max_seq_len=64 --batch_size=12"  # of every run
GRID = [5e-4 * 2 ** n for n in range(8)]


def run(words, printed):
    """Run train.py in a forked process, which imports nothing; write what it prints to a file."""
    def child():
        with open(printed, "w") as f, contextlib.redirect_stdout(f):
            train.start(configure(vars(train), positional="data", argv=words))

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join()
    if process.exitcode:
        sys.exit(f"{' '.join(words)}: exit code {process.exitcode}")


def words_of(folder, name, *words):
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    return [*more.split(), "--peak_tflops=0.1", f"--max_iters={steps}", f"--eval_interval={steps}", "--eval_iters=30",
            "--warmup_iters=20", f"--out_dir={folder / name}", *words]


def grid(common, folder):
    """Return {rate: validation loss at the end}; inf if the training failed."""
    losses = {}
    for rate in GRID:
        log = folder / f"{rate:g}" / "log.jsonl"
        if not log.exists() or f'"iter": {steps},' not in log.read_text():
            run(words_of(folder, f"{rate:g}", *common, f"--learning_rate={rate}"), folder / f"{rate:g}.txt")
        losses[rate] = json.loads(log.read_text().splitlines()[-1]).get("loss/val", float("inf"))
    return losses


def suggested(common, folder):
    """Return (low, middle, high) of --lr_find."""
    told = folder / "lr_find.txt"
    if not told.exists() or "to copy" not in told.read_text():
        run(words_of(folder, "run", *common, "--lr_find=True"), told)
    low, high, middle = re.search(r"between (\S+) and (\S+); to copy: --learning_rate=(\S+)", told.read_text()).groups()
    return float(low), float(middle), float(high)


if __name__ == "__main__":
    configure(globals())
    print("| text | optimizer | suggested | to copy | best of the grid | losses of " + ", ".join(f"{rate:g}" for rate in GRID) + " |")
    print("| --- | --- | --- | --- | --- | --- |")
    for text in texts.split(","):
        for kind in optimizers.split(","):
            folder = Path(out, Path(text.replace(":", "")).stem, kind)
            common = [f"--data={text}", f"--optimizer={kind}"]
            low, middle, high = suggested(common, folder)
            losses = grid(common, folder)
            best = min(losses, key=losses.get)
            print(f"| {Path(text).name} | {kind} | {low:g} to {high:g} | {middle:g} | {best:g}"
                  f"{'' if low <= best <= high else ' (outside)'} | {' '.join(f'{loss:.3f}' for loss in losses.values())} |", flush=True)
