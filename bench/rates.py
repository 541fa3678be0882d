"""
Test whether the range that --lr_find suggests contains the best learning rate, for Muon and for
AdamW. Runs with eight learning rates are trained to the end of their schedules, and their final
validation losses are compared.

    python bench/rates.py [--texts=stories:3000,input.txt] [--steps=400] [--out=out/rates]

Existing runs are not repeated.
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

texts = "stories:3000"   # --data of train.py for each text, separated by commas
optimizers = "muon,adamw"
steps = 400              # training steps per run
out = "out/rates"        # folder of the runs
more = "--dim=64 --n_layers=2 --n_heads=2 --max_seq_len=64 --batch_size=12"  # options of every run

GRID = [5e-4 * 2 ** n for n in range(8)]  # learning rates
SUGGESTION = re.compile(r"between (\S+) and (\S+); to copy: --learning_rate=(\S+)")


def run(words, printed):
    """Run train.py in a fork, which skips the imports; write its stdout to the file `printed`."""
    def child():
        with open(printed, "w") as f, contextlib.redirect_stdout(f):
            train.start(configure(vars(train), positional="data", argv=words))

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join()
    if process.exitcode:
        sys.exit(f"{' '.join(words)}: exit code {process.exitcode}")


def train_options(folder, name, *words):
    """Return the options of train.py for the run `name` in `folder`, and make the folder."""
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    return [*more.split(), "--peak_tflops=0.1", f"--max_iters={steps}", f"--eval_interval={steps}",
            "--eval_iters=30", "--warmup_iters=20", f"--out_dir={folder / name}", *words]


def grid(common, folder):
    """Return {learning rate: final validation loss}; the loss is inf if the log has none."""
    losses = {}
    for rate in GRID:
        log = folder / f"{rate:g}" / "log.jsonl"
        if not log.exists() or f'"iter": {steps},' not in log.read_text():
            words = train_options(folder, f"{rate:g}", *common, f"--learning_rate={rate}")
            run(words, folder / f"{rate:g}.txt")
        last = json.loads(log.read_text().splitlines()[-1])
        losses[rate] = last.get("loss/val", float("inf"))
    return losses


def suggested(common, folder):
    """Return (low, middle, high), the learning rates that --lr_find suggests."""
    printed = folder / "lr_find.txt"
    if not printed.exists() or "to copy" not in printed.read_text():
        run(train_options(folder, "run", *common, "--lr_find=True"), printed)
    low, high, middle = SUGGESTION.search(printed.read_text()).groups()
    return float(low), float(middle), float(high)


def main():
    print("| text | optimizer | suggested | to copy | best of the grid | losses of "
          + ", ".join(f"{rate:g}" for rate in GRID) + " |")
    print("| --- | --- | --- | --- | --- | --- |")
    for text in texts.split(","):
        for optimizer in optimizers.split(","):
            folder = Path(out, Path(text.replace(":", "")).stem, optimizer)
            common = [f"--data={text}", f"--optimizer={optimizer}"]
            low, middle, high = suggested(common, folder)
            losses = grid(common, folder)
            best = min(losses, key=losses.get)
            outside = "" if low <= best <= high else " (outside)"
            final_losses = " ".join(f"{loss:.3f}" for loss in losses.values())
            print(f"| {Path(text).name} | {optimizer} | {low:g} to {high:g} | {middle:g} | "
                  f"{best:g}{outside} | {final_losses} |", flush=True)


if __name__ == "__main__":
    configure(globals())
    main()
