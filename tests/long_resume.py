"""Long tests that stopped, killed and moved runs lose no step (make test-long).

doc/lab/reliability.md shows the line that each test prints. The environment variables STOPS, KILLS,
RANK_KILLS and SAVES make the tests shorter or longer.
"""
import collections
import os
import random
import signal
import statistics
import subprocess
import time

import pytest
import torch

from engine.training import checkpoint
from tests.test_train import (  # noqa: F401 (a fixture)
    ROOT, command, environment, folder, kill_processes, losses, rows, run, same_losses, start,
    weights)

STOPS = int(os.environ.get("STOPS", 50))            # stops of a run with each optimizer
KILLS = int(os.environ.get("KILLS", 100))           # kills of a process that saves at every step
RANK_KILLS = int(os.environ.get("RANK_KILLS", 20))  # kills of one of two processes
SAVES = int(os.environ.get("SAVES", 2000))


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return a == b


def last_iter(folder, out):  # noqa: F811
    """Return the iteration of the log's last complete row, or -1 if there is none."""
    log = folder / out / "log.jsonl"
    if not log.exists():
        return -1
    with open(log, "rb") as f:
        f.seek(max(0, log.stat().st_size - 20_000))
        found = [line for line in f.read().split(b"\n")[:-1] if line.startswith(b'{"iter": ')]
    return int(found[-1][9:].split(b",")[0]) if found else -1


def reach(folder, out, step, process):  # noqa: F811
    while last_iter(folder, out) < step:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.005)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_stopped_at_random_steps_it_is_the_same_run(folder, optimizer):  # noqa: F811
    """Stop real processes by real signals.

    A run ends at the step that is in progress when the signal arrives.
    """
    rng, steps, out, whole = (random.Random(optimizer), 40 * STOPS, f"cut_{optimizer}",
                              f"whole_{optimizer}")
    args = ["--data=my.txt", f"--max_iters={steps}", "--dropout=0.2",
            "--gradient_accumulation_steps=2", "--dim=16", "--n_heads=1",
            f"--optimizer={optimizer}", "--log_interval=1", "--eval_interval=500", "--batch_size=2"]
    done = run(folder, *args, f"--out_dir={whole}")
    assert done.returncode == 0, done.stderr
    points = []
    for aim in sorted(rng.sample(range(1, steps - 30), STOPS)):
        process = start(folder, *args, f"--out_dir={out}")
        reach(folder, out, max(aim, points[-1] + 1 if points else 0), process)
        process.send_signal(rng.choice([signal.SIGTERM, signal.SIGINT]))
        process.communicate()
        points.append(checkpoint.load(checkpoint.newest(folder / out), "train")["state"]["step"])
        if points[-1] == steps:
            break
    assert run(folder, *args, f"--out_dir={out}").returncode == 0
    assert same_losses(folder, out, whole)
    assert [row["iter"] for row in rows(folder, out)] == list(range(steps + 1))
    a, b = (checkpoint.newest(folder / name) for name in (out, whole))
    assert same(checkpoint.load(a)["model"], checkpoint.load(b)["model"])
    assert same(checkpoint.load(a, "train")["optimizer"], checkpoint.load(b, "train")["optimizer"])
    print(f"\n{optimizer}: stopped {len(set(points))} times within {steps} steps "
          f"({points[:3]} ... {points[-2:]}), by SIGTERM or SIGINT: {steps + 1} losses, "
          f"all weights and optimizer state equal, bit for bit")
    assert len(set(points)) >= 0.9 * STOPS


def test_killed_at_random_moments_nothing_is_lost(folder):  # noqa: F811
    """The model is so large that a run spends most of its time in saves, one after every step."""
    rng, inside, lost = random.Random(1), 0, []
    args = ["--data=my.txt", "--max_iters=1000000", "--dim=256", "--n_heads=4", "--n_layers=2",
            "--eval_interval=1", "--eval_iters=1", "--log_interval=1", "--batch_size=1",
            "--out_dir=killed"]
    checkpoints = folder / "killed/checkpoints"
    for number in range(KILLS):
        before = checkpoint.newest(folder / "killed")
        process = start(folder, *args)
        while process.poll() is None and checkpoint.newest(folder / "killed") == before:
            time.sleep(0.02)
        assert process.poll() is None, process.communicate()[0]
        leftovers = [p for p in [*checkpoints.glob(".tmp_*")]
                     if int(p.name[5:]) <= int(before.name[5:] if before else 0)]
        assert not leftovers  # of the process killed in the previous round
        while number % 4 and not any(checkpoints.glob(".tmp_*")):  # aim 3 of 4 kills at a save
            time.sleep(0.0005)
        time.sleep(rng.random() * (0.01 if number % 4 else 0.5))
        process.kill()
        process.communicate()
        inside += any(checkpoints.glob(".tmp_*"))
        newest = checkpoint.newest(folder / "killed")
        step = checkpoint.load(newest, "train")["state"]["step"]
        checkpoint.load(newest)
        lost.append(rows(folder, "killed")[-1]["iter"] - step)
    print(f"\nkill -9: {KILLS} times, {inside} of them inside a save (one every step): steps lost "
          f"{dict(sorted(collections.Counter(lost).items()))}, nothing unloadable, "
          f"nothing left behind")
    assert inside >= KILLS / 2
    assert max(lost) <= 2  # the step in progress, and the one whose save is in progress


@pytest.mark.parametrize("sharded", [False, True])
def test_one_of_two_processes_is_killed(folder, sharded):  # noqa: F811
    rng, kills = random.Random(2), max(1, RANK_KILLS // 2)
    kind, steps = "FSDP2" if sharded else "DDP", 20 * kills
    args = ["--data=my.txt", "--batch_size=8", f"--max_iters={steps}", "--dropout=0.2",
            f"--fsdp={sharded}"]
    done = run(folder, *args, f"--out_dir=unkilled_{kind}", "--log_interval=1", torchrun=2)
    assert done.returncode == 0, done.stderr
    seconds = kill_processes(folder, f"killed_{kind}",
                             sorted(rng.sample(range(5, steps - 5), kills)), *args)
    assert losses(folder, f"killed_{kind}") == losses(folder, f"unkilled_{kind}")
    assert same(*(dict(weights(folder, f"{name}_{kind}")) for name in ("killed", "unkilled")))
    print(f"\n{kind}: one of two processes killed {kills} times; torchrun restarted them "
          f"{len(seconds)} times, the next step came after {statistics.median(seconds):.1f} s "
          f"(median), {max(seconds):.1f} s at most; losses and weights equal to the unkilled "
          f"run's, bit for bit")


def run_in_float64(folder, *args, torchrun=0):  # noqa: F811
    words = command(*args, torchrun=torchrun)
    words[words.index(str(ROOT / "train.py"))] = str(ROOT / "tests/float64_train.py")
    return subprocess.run(words, cwd=folder, env=environment(), capture_output=True, text=True)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_any_number_of_processes_gives_the_same_curve(folder, optimizer):  # noqa: F811
    """
    In float64, because rounding has no useful bound in float32: when the residual stream of a
    position passes near zero, as that of BOS does here, the norms amplify the rounding of that step
    a thousandfold (doc/lab/reliability.md).

    The batch of 8 sequences and the width of 32 can't be divided evenly among three processes.
    """
    args = ["--data=my.txt", "--batch_size=8", "--max_iters=50", "--log_interval=1",
            "--eval_interval=25", f"--optimizer={optimizer}", "--schedule=constant"]
    one = f"one_{optimizer}"
    done = run_in_float64(folder, *args, f"--out_dir={one}")
    assert done.returncode == 0, done.stderr

    def worst(out):
        """
        Return the max relative difference between a run and that of one process, over the losses of
        the steps, the losses of both splits and the gradient norms.
        """
        assert losses(folder, one).keys() == losses(folder, out).keys() == set(range(51))
        differences = []
        for step, expected in losses(folder, one).items():
            for x, y in zip(expected, losses(folder, out)[step]):
                # A moved run has more evaluations: each of its sessions ends with one.
                assert (x is None) == (y is None) or out.startswith("moved")
                if x is not None and y is not None:
                    differences.append(abs(x - y) / x)
        # losses and norms of 50 steps, losses of 3 evaluations
        assert len(differences) == 2 * 50 + 2 * 3
        return max(differences)

    found = {}
    for count in (2, 3, 4):
        for sharded in (False, True):
            kind = f"{count} {'FSDP2' if sharded else 'DDP'}"
            out = f"{optimizer}_{count}_{sharded}"
            more = [f"--fsdp={sharded}", f"--out_dir={out}"]
            done = run_in_float64(folder, *args, *more, torchrun=count)
            assert done.returncode == 0, done.stderr
            found[kind] = worst(out)
    for count, steps in ((4, 20), (1, 35), (2, 50)):
        more = [f"--max_iters={steps}", "--fsdp=True", f"--out_dir=moved_{optimizer}"]
        done = run_in_float64(folder, *args, *more, torchrun=count)
        assert done.returncode == 0, done.stderr
    found["4 -> 1 -> 2"] = worst(f"moved_{optimizer}")
    print(f"\n{optimizer}, 50 steps in float64, max relative difference from one process: "
          + ", ".join(f"{kind} {value:.1e}" for kind, value in found.items()))
    assert max(found.values()) <= 1e-10


def test_memory_does_not_grow_with_saves(folder):  # noqa: F811
    args = ["--data=my.txt", f"--max_iters={SAVES + 10}", "--eval_interval=1", "--eval_iters=1",
            "--dim=16", "--n_heads=1", "--max_seq_len=8", "--sample_prompt=T", "--out_dir=saves"]
    process, resident = start(folder, *args, stdout=subprocess.DEVNULL), []
    for step in (SAVES // 4, SAVES):
        reach(folder, "saves", step, process)
        with open(f"/proc/{process.pid}/statm") as f:
            resident.append(int(f.read().split()[1]) * 4096)
    process.communicate()
    growth = resident[1] / resident[0] - 1
    print(f"\n{SAVES} steps with a save each: resident memory {resident[0] / 1e6:.1f} MB after "
          f"{SAVES // 4}, {resident[1] / 1e6:.1f} MB after {SAVES} ({100 * growth:+.2f} %)")
    assert growth < 0.01
