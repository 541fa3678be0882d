"""
Measure the cost of tracking at the shape of config/stories15M.py, as a fraction of the time of
log_interval steps. There are two costs: the seconds that a logged step waits for instruments and
tracker, and the CPU seconds of the tracker's threads and W&B's service. Evaluations and the tables
that they log are left out: train.py does not count them as steps either.

    python bench/track.py --batch_size=8
"""
import contextlib
import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ |= {"WANDB_MODE": "offline", "OMP_WAIT_POLICY": "PASSIVE"}
import torch

import track
from configurator import configure
from engine.debug.instruments import UpdateNorms
from model import ModelArgs, Transformer
from optim import OptimizerConfig, make_optimizer

batch_size = 8         # sequences of 256 tokens per step; the preset has 512
log_interval = 20      # steps between two logged rows, as in train.py
rows = 20              # number of rows to measure
out_dir = "cache"      # parent of the temporary folder for the logs


def processor_seconds():
    """Return the CPU seconds of this process and of its descendants, such as W&B's service."""
    total, tick = 0.0, os.sysconf("SC_CLK_TCK")
    family = {os.getpid()}
    stats = {}  # process id: fields of /proc/PID/stat after the name, beginning with the state
    for path in Path("/proc").glob("[0-9]*/stat"):
        stats[int(path.parent.name)] = path.read_text().rpartition(")")[2].split()
    while more := {pid for pid, stat in stats.items() if int(stat[1]) in family} - family:
        family |= more
    for pid in family:
        total += (int(stats[pid][11]) + int(stats[pid][12])) / tick
    return total


def main():
    configure(globals())
    os.makedirs(out_dir, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out_dir, prefix="bench_track") as folder:
        measure(folder)


def measure(folder):
    """Print the cost of a W&B tracker in offline mode that logs to `folder`."""
    os.environ["WANDB_DIR"] = folder
    args = ModelArgs(dim=288, n_layers=6, n_heads=6, vocab_size=32000, max_seq_len=256)
    model = Transformer(args)
    opt = make_optimizer(model, OptimizerConfig("adamw", 5e-4))
    norms, x = UpdateNorms(model), torch.randint(3, 32000, (batch_size, 256))
    run = {"id": track.new_run_id("cost"), "project": "llamac", "name": "cost"}
    tracker = track.make_tracker(track.Session(folder, {}, run), ["wandb"])

    def step():
        """Take a step without instruments; return its seconds."""
        start = time.perf_counter()
        model(x, x)[1].backward()
        opt.step()
        opt.zero_grad()
        return time.perf_counter() - start

    def logged(i):
        """
        Take a logged step, with row number i; return the seconds that the training waits for
        instruments and tracker.
        """
        model(x[:1], x[:1])[1].backward()
        norms.wanted = True
        inside = []  # seconds of the updates, which every step takes

        @contextlib.contextmanager
        def timed(params):
            with norms(params):
                since = time.perf_counter()
                yield
                inside.append(time.perf_counter() - since)

        start = time.perf_counter()
        opt.step(timed)
        row = {"iter": i, "tokens": i, "loss/train": 1.0, "grad/norm": 1.0, "lr": 1e-3, "mfu": 1.0,
               "perf/tokens_per_sec": 1.0, "perf/iter_ms": 1.0}
        tracker.log(row | norms.take())
        opt.zero_grad()
        return time.perf_counter() - start - sum(inside)

    step()
    logged(0)
    steps = sorted(step() for _ in range(5))
    waited = sorted(logged(i) for i in range(1, rows + 1))
    time.sleep(3)  # wait for background work to finish
    idle, since = processor_seconds(), time.perf_counter()
    # Log as many rows again without training, so that all CPU time is that of the tracker.
    for i in range(rows + 1, 2 * rows + 1):
        tracker.log({"iter": i, "tokens": i} | {f"norm/{n}": 1.0 for n in range(32)})
        time.sleep(0.1)
    time.sleep(3)
    besides = (processor_seconds() - idle) / rows
    seconds = time.perf_counter() - since
    tracker.finish()
    a_step, a_row = steps[len(steps) // 2], waited[rows // 2]  # medians, in seconds
    a_row_with_threads = a_row + besides / torch.get_num_threads()
    interval = a_step * log_interval  # seconds between two rows
    print(f"a step of {batch_size} x 256 tokens takes {1e3 * a_step:.0f} ms; for each row the "
          f"training waits {1e3 * a_row:.1f} ms, and other threads and W&B's service use "
          f"{1e3 * besides:.1f} ms of CPU time (which includes W&B's system metrics over "
          f"{seconds:.0f} s)")
    print(f"a row every {log_interval} steps costs {100 * a_row / interval:.2f} % of the step "
          f"time, {100 * a_row_with_threads / interval:.2f} % with the other threads' share")


if __name__ == "__main__":
    main()
