"""
The long proofs that no step is lost (make test-long): runs stopped at random steps, and runs killed at random moments.
Prints the figures that doc/resume.md quotes.
"""
import random
import signal
import time

import pytest
import torch

import checkpoint
from tests.test_train import command, folder, losses, rows, run, start, wait_for_row  # noqa: F401 (folder is a fixture)

STOPS = 50    # of each optimizer
KILLS = 100


def optimizer_state(folder, out):
    return checkpoint.load(checkpoint.newest(folder / out), "train")["optimizer"]


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return len(a) == len(b) and all(map(same, a, b)) if isinstance(a, list) else a == b


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_stopped_at_random_steps_it_is_the_same_run(folder, optimizer):  # noqa: F811
    rng, steps = random.Random(optimizer), 3000
    args = ["--data=my.txt", f"--max_iters={steps}", "--dropout=0.2", "--gradient_accumulation_steps=2", "--dim=16",
            "--n_heads=1", f"--optimizer={optimizer}", "--log_interval=1", "--eval_interval=500", "--batch_size=2"]
    whole = run(folder, *args, f"--out_dir=whole_{optimizer}")
    assert whole.returncode == 0, whole.stderr
    out, points = f"cut_{optimizer}", []
    for aim in sorted(rng.sample(range(10, steps - 60), STOPS)):
        if points and aim <= points[-1]:
            continue
        process = start(folder, *args, f"--out_dir={out}")
        wait_for_row(folder, out, aim, process)
        process.send_signal(rng.choice([signal.SIGTERM, signal.SIGINT]))
        process.communicate()
        points.append(checkpoint.load(checkpoint.newest(folder / out), "train")["state"]["step"])
    assert run(folder, *args, f"--out_dir={out}").returncode == 0
    print(f"\n{optimizer}: {len(points)} stops at steps {points[:5]} ... {points[-3:]}")
    assert losses(folder, out) == losses(folder, f"whole_{optimizer}")
    assert [row["iter"] for row in rows(folder, out)] == list(range(steps + 1))
    a, b = (checkpoint.load(checkpoint.newest(folder / name))["model"] for name in (out, f"whole_{optimizer}"))
    assert same(a, b) and same(optimizer_state(folder, out), optimizer_state(folder, f"whole_{optimizer}"))


def test_killed_at_random_moments_nothing_is_lost(folder):  # noqa: F811
    """A model large enough that most of the time is spent inside a save, one every step."""
    rng, inside, lost = random.Random(1), 0, []
    args = ["--data=my.txt", "--max_iters=1000000", "--dim=256", "--n_heads=4", "--n_layers=2", "--eval_interval=1",
            "--eval_iters=1", "--log_interval=1", "--batch_size=1", "--out_dir=killed"]
    checkpoints = folder / "killed/checkpoints"
    for number in range(KILLS):
        before = checkpoint.newest(folder / "killed")
        process = start(folder, *args)
        while process.poll() is None and checkpoint.newest(folder / "killed") == before:
            time.sleep(0.02)
        assert process.poll() is None, process.communicate()[0]
        leftovers = [p for p in [*checkpoints.glob(".tmp_*")] if int(p.name[5:]) <= int(before.name[5:] if before else 0)]
        assert not leftovers  # of the writer killed before
        while number % 4 and not any(checkpoints.glob(".tmp_*")):  # three of four aim at a save
            time.sleep(0.0005)
        time.sleep(rng.random() * (0.01 if number % 4 else 0.5))
        process.kill()
        process.communicate()
        inside += any(checkpoints.glob(".tmp_*"))
        newest = checkpoint.newest(folder / "killed")
        step = checkpoint.load(newest, "train")["state"]["step"]
        checkpoint.load(newest)
        lost.append(rows(folder, "killed")[-1]["iter"] - step)
    print(f"\n{KILLS} kills, {inside} of them inside a save; steps lost at most {max(lost)}")
    assert inside >= KILLS / 2 and max(lost) <= 2  # the step under way, and the one whose save is under way
