"""
Does the range that --lr_find suggests hold the best rate? Beside it a grid of eight rates, each a training of its own to the
end of its schedule, compared by the validation loss: on three texts, with Muon and AdamW.

    python bench/rates.py [--texts=stories:3000,input.txt] [--steps=400] [--out=out/rates]

Every training is a process of train.py. What is there already is not trained again.
"""
import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from configurator import configure

texts = "stories:3000"   # data of train.py, separated by commas
optimizers = "muon,adamw"
steps = 400              # of a training
out = "out/rates"        # runs go here
more = "--dim=64 --n_layers=2 --n_heads=2 --max_seq_len=64 --batch_size=12"  # flags of all of them
GRID = [5e-4 * 2 ** n for n in range(8)]


def train(*words):
    done = subprocess.run([sys.executable, ROOT / "train.py", *more.split(), "--peak_tflops=0.1", f"--max_iters={steps}",
                           f"--eval_interval={steps}", "--eval_iters=30", "--warmup_iters=20", *words], capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return done.stdout


def grid(common, folder):
    """{rate: validation loss at the end}; inf where the training has failed."""
    losses = {}
    for rate in GRID:
        log = folder / f"{rate:g}" / "log.jsonl"
        if not log.exists():
            train(*common, f"--learning_rate={rate}", f"--out_dir={log.parent}")
        losses[rate] = json.loads(log.read_text().splitlines()[-1]).get("loss/val", float("inf"))
    return losses


def suggested(common, folder):
    """(low, middle, high) of --lr_find, and what it printed."""
    told = folder / "lr_find.txt"
    if not told.exists():
        told.parent.mkdir(parents=True, exist_ok=True)
        told.write_text(train(*common, "--lr_find=True", f"--out_dir={folder / 'run'}"))
    text = told.read_text()
    low, high, middle = re.search(r"between (\S+) and (\S+); to copy: --learning_rate=(\S+)", text).groups()
    return float(low), float(middle), float(high), text


if __name__ == "__main__":
    configure(globals())
    print("| text | optimizer | suggested | to copy | best of the grid | losses of " + ", ".join(f"{rate:g}" for rate in GRID) + " |")
    print("| --- | --- | --- | --- | --- | --- |")
    for text in texts.split(","):
        for kind in optimizers.split(","):
            folder = Path(out, Path(text.replace(":", "")).stem, kind)
            common = [f"--data={text}", f"--optimizer={kind}"]
            low, middle, high, _ = suggested(common, folder)
            losses = grid(common, folder)
            best = min(losses, key=losses.get)
            print(f"| {Path(text).name} | {kind} | {low:g} to {high:g} | {middle:g} | {best:g}"
                  f"{'' if low <= best <= high else ' (outside)'} | {' '.join(f'{loss:.3f}' for loss in losses.values())} |", flush=True)
