"""
Measure the cost of tracking at the shape of config/stories15M.py, relative to the time of
log_interval steps: the seconds that a logged step waits for instruments and tracker, and the CPU
time of the tracker's threads and W&B's service. Evaluations, with their tables, do not count as
steps, as in train.py.

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

batch_size = 8         # sequences of 256 tokens a step; the preset has 512
log_interval = 20      # steps between rows, as in train.py
rows = 20              # rows to measure
out_dir = "cache"      # folder in which a folder for the logs is made, and removed at the end


def processor_seconds():
    """Return the CPU seconds of this process and those it started (W&B's service)."""
    total, tick = 0.0, os.sysconf("SC_CLK_TCK")
    family = {os.getpid()}
    stats = {int(p.parent.name): p.read_text().rpartition(")")[2].split() for p in Path("/proc").glob("[0-9]*/stat")}
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
    """Print the cost of a tracker that logs to this folder."""
    os.environ["WANDB_DIR"] = folder
    model = Transformer(ModelArgs(dim=288, n_layers=6, n_heads=6, vocab_size=32000, max_seq_len=256))
    opt = make_optimizer(model, OptimizerConfig("adamw", 5e-4))
    norms, x = UpdateNorms(model), torch.randint(3, 32000, (batch_size, 256))
    run = {"id": track.new_run_id("cost"), "project": "llamac", "name": "cost"}
    tracker = track.make_tracker(track.Session(folder, {}, run), ["wandb"])

    def step():
        """Return the seconds of a step without instruments."""
        start = time.perf_counter()
        model(x, x)[1].backward()
        opt.step()
        opt.zero_grad()
        return time.perf_counter() - start

    def logged(i):
        """Return the seconds that the training waits because a step is logged."""
        model(x[:1], x[:1])[1].backward()
        norms.wanted = True
        inside = []  # seconds of the updates themselves

        @contextlib.contextmanager
        def timed(params):
            with norms(params):
                since = time.perf_counter()
                yield
                inside.append(time.perf_counter() - since)

        start = time.perf_counter()
        opt.step(timed)
        tracker.log({"iter": i, "tokens": i, "loss/train": 1.0, "grad/norm": 1.0, "lr": 1e-3, "mfu": 1.0,
                     "perf/tokens_per_sec": 1.0, "perf/iter_ms": 1.0} | norms.take())
        opt.zero_grad()
        return time.perf_counter() - start - sum(inside)

    step()
    logged(0)
    steps = sorted(step() for _ in range(5))
    waited = sorted(logged(i) for i in range(1, rows + 1))
    time.sleep(3)  # let background work finish
    idle, since = processor_seconds(), time.perf_counter()
    for i in range(rows + 1, 2 * rows + 1):  # rows again, with no other computation
        tracker.log({"iter": i, "tokens": i} | {f"norm/{n}": 1.0 for n in range(32)})
        time.sleep(0.1)
    time.sleep(3)
    besides = (processor_seconds() - idle) / rows
    seconds = time.perf_counter() - since
    tracker.finish()
    a_step, a_row = steps[len(steps) // 2], waited[rows // 2]
    print(f"a step of {batch_size} x 256 tokens: {1e3 * a_step:.0f} ms; a row: the training waits {1e3 * a_row:.1f} ms, "
          f"other threads and W&B's service take {1e3 * besides:.1f} ms (system metrics of {seconds:.0f} s included)")
    print(f"a row every {log_interval} steps costs {100 * a_row / a_step / log_interval:.2f} % of the step time, "
          f"{100 * (a_row + besides / torch.get_num_threads()) / a_step / log_interval:.2f} % with the other threads' share")


if __name__ == "__main__":
    main()
