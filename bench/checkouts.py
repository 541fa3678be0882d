"""
Compare this checkout of llamac with an earlier one by the bits per byte that they reach within a
time budget. Both train on the same text side by side, on one CPU core each. The next pair of runs
has the cores swapped. Needs two cores and taskset (util-linux).

    python bench/checkouts.py my.txt other.txt --before=FOLDER --minutes=5 --seeds=1,2,3

FOLDER is a clone at the earlier commit. The result of a run is the bits per byte of its best
checkpoint on the whole validation text, as its own checkout computes it. The table also has the
change from before to after.
"""
import concurrent.futures
import itertools
import math
import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import compare
import own_text
from configurator import configure, fail

before = ""                 # folder of the earlier checkout
minutes = 1.0               # time budget of every run
seeds = "1"                 # random seeds, separated by commas; a pair of runs for each
out_dir = "out/checkouts"   # folder of the runs, which must be new

ROOT = Path(__file__).resolve().parents[1]
EVAL_TOKENS = 1024          # tokens that eval_iters counts as one


def train(checkout, text, folder, seed, core):
    """Train in `folder` with a checkout's train.py on one core."""
    command = ["taskset", "-c", str(core), sys.executable, f"{checkout}/train.py",
               f"--data={text}", f"--minutes={minutes}", f"--seed={seed}",
               f"--out_dir={folder}", f"--cache={folder}/cache"]
    done = subprocess.run(command, env=own_text.environment(), capture_output=True, text=True)
    if done.returncode:
        last_line = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
        fail(f"{checkout}: {last_line}")


def bits_per_byte(checkout, text, folder):
    """Return the bits per byte of a run's best checkpoint on the whole validation text."""
    val_tokens = compare.read_runs([folder])[0].config["dataset"]["val_tokens"]
    command = [sys.executable, f"{checkout}/train.py", f"--data={text}", f"--cache={folder}/cache"]
    return own_text.evaluate(command, folder, "best", math.ceil(val_tokens / EVAL_TOKENS))


def measure_pair(text, seed, cores):
    """Train with both checkouts at the same time; return the bits per byte before and after."""
    checkouts = [Path(before).resolve(), ROOT]
    folders = [Path(out_dir, f"{Path(text).stem}-{minutes:g}-{seed}", name).resolve()
               for name in ("before", "after")]
    for folder in folders:
        if folder.exists():
            fail(f"{folder}: exists, expected a new folder; choose another --out_dir")
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        list(pool.map(train, checkouts, [text] * 2, folders, [seed] * 2, cores))
        return list(pool.map(bits_per_byte, checkouts, [text] * 2, folders))


def main(texts):
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        fail("one CPU core is available, expected two")
    changes = []
    print("| text | seed | before | after | change |\n| --- | ---: | ---: | ---: | ---: |")
    for text, seed in itertools.product(texts, seeds.split(",")):
        old, new = measure_pair(str(Path(text).resolve()), seed, cores)
        changes.append(new / old - 1)
        print(f"| {Path(text).name} | {seed} | {old:.4f} | {new:.4f} | {changes[-1]:+.1%} |",
              flush=True)
        cores.reverse()
    print(f"| mean | | | | {sum(changes) / len(changes):+.1%} |")


if __name__ == "__main__":
    texts = []
    configure(globals(), positional=texts)
    if not texts or not before:
        fail("no text or no --before; expected both, as in: "
             "python bench/checkouts.py my.txt --before=../old --minutes=5")
    main(texts)
