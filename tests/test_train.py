"""The trainer as a user runs it: real processes, tiny models."""
import collections
import contextlib
import ctypes
import errno
import fcntl
import functools
import hashlib
import json
import math
import os
import pty
import random
import re
import resource
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import termios
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import export
import optim
import track
import train
from engine import ops
from engine.debug import instruments
from engine.text import prepare
from engine.training import (checkpoint, costs, distill, distributed, hardware, plan, progress,
                             resume, run_folder, validate)
from engine.files import sha256
from model import ModelArgs
from tests import forked
from tests.trainer_config import trainer_config
from tests.conftest import compile_c

ROOT = Path(__file__).resolve().parents[1]
TINY = [
    "--vocab_source=byte", "--dim=32", "--n_layers=2", "--n_heads=2", "--max_seq_len=32",
    "--batch_size=4", "--warmup_iters=2", "--log_interval=5", "--eval_iters=1",
    "--eval_interval=10", "--device=cpu", "--sample_prompt=The", "--learning_rate=3e-3",
    "--checks=none", "--peak_tflops=0.1"
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """
    Return a working directory with a text of 40 kB: words drawn with a fixed seed, so there is
    something to learn.
    """
    folder = tmp_path_factory.mktemp("work")
    rng = random.Random(1)
    words = "the a cat dog sat ran on under mat tree and then it was happy .".split()
    (folder / "my.txt").write_text(" ".join(rng.choice(words) for _ in range(10_000)))
    (folder / "empty.txt").write_text("")
    (folder / "short.txt").write_text("too short")
    return folder


def command(*args, torchrun=0, max_restarts=0):
    start = [sys.executable]
    if torchrun:
        start += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={torchrun}",
                  f"--max-restarts={max_restarts}"]
    return [*start, str(ROOT / "train.py"), *TINY, *args]


def environment(**more):
    return ({k: v for k, v in os.environ.items() if not k.startswith("WANDB")}
            | {"OMP_NUM_THREADS": "1"} | more)


def run(folder, *args, torchrun=0, **more):
    env = environment()
    if not torchrun and not more:
        return forked.run(command(*args)[1:], folder, env)
    return subprocess.run(command(*args, torchrun=torchrun), cwd=folder, env=env,
                          capture_output=True, text=True, **more)


def ranks(folder, processes, *args):
    """
    Run several processes that train together. Return the CompletedProcess of each. They get the
    environment variables that mpirun or srun would set, without torchrun's launcher and imports.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = environment(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, WORLD_SIZE=processes)
    with ThreadPoolExecutor(processes) as pool:
        return [*pool.map(
            lambda rank: forked.run(command(*args)[1:], folder,
                                    env | {"RANK": rank, "LOCAL_RANK": rank}),
            range(processes))]


def rows(folder, out):
    return [json.loads(line) for line in (folder / out / "log.jsonl").read_text().splitlines()]


def losses(folder, out):
    names = "loss/train", "loss/val", "loss/train_eval", "grad/norm"
    return {row["iter"]: tuple(row.get(name) for name in names) for row in rows(folder, out)}


def same_losses(folder, out, reference):
    """
    Return whether a run has the losses of the reference run. Evaluations at stops are ignored, as
    the reference run has none.
    """
    found, expected = losses(folder, out), losses(folder, reference)
    for step in [step for step, row in found.items() if row != expected.get(step)]:
        train_loss, val, train_eval, norm = found[step]
        assert val and train_eval
        found[step] = train_loss, None, None, norm
    return {step: row for step, row in found.items() if step in expected} == expected


def weights(folder, out):
    return checkpoint.load(checkpoint.newest(folder / out))["model"]


@pytest.fixture(scope="module")
def reference(folder):
    """An uninterrupted run of 40 iterations with dropout and accumulation."""
    args = ["--data=my.txt", "--max_iters=40", "--dropout=0.2", "--gradient_accumulation_steps=2"]
    done = run(folder, *args, "--out_dir=whole")
    assert done.returncode == 0, done.stderr
    return args, done


def test_learns_and_records(folder, reference):
    args, done = reference
    log = rows(folder, "whole")
    assert [row["iter"] for row in log] == list(range(0, 41, 5))
    assert [row["tokens"] for row in log] == [row["iter"] * 4 * 2 * 32 for row in log]
    for row in log[1:]:
        assert {
            "iter", "tokens", "loss/train", "lr", "mfu", "grad/norm", "perf/tokens_per_sec",
            "perf/iter_ms", "perf/peak_mib"
        } <= set(row)
        assert 0 < row["mfu"] < 200
        assert row["perf/tokens_per_sec"] > 0
        assert 100 < row["perf/peak_mib"] < 10_000
    evaluated = [row for row in log if "loss/val" in row]
    assert [row["iter"] for row in evaluated] == [0, 10, 20, 30, 40]
    assert abs(evaluated[0]["loss/val"] - 5.56) < 0.15  # ln 259 before the first step
    assert evaluated[-1]["loss/val"] < 3.5
    # The words are drawn at random: no split is easier than the other.
    assert all(abs(row["loss/train_eval"] - row["loss/val"]) < 0.2 for row in evaluated)
    assert all("bpb/val" in row and row["samples"][0][0] == "The" for row in evaluated)
    assert (folder / "whole/model.gguf").read_bytes()[:4] == b"GGUF"
    there = {path.name for path in (folder / "whole").iterdir()}
    assert there - {"diff.patch"} == {
        "best", "checkpoints", "config.json", "latest", "log.jsonl", "model.gguf", "result.json",
        "trainer.json"
    }
    kept = {path.name for path in (folder / "whole/checkpoints").iterdir()}
    assert kept == {  # the newest and the best
        "step_00000040", f"step_{min(evaluated[1:], key=lambda row: row['loss/val'])['iter']:08d}"
    }
    assert "finished: best validation loss" in done.stdout


def result_of(folder, out):
    """Return result.json, read as strict JSON: Python's own reader accepts NaN."""
    return json.loads((folder / out / "result.json").read_text(),
                      parse_constant=lambda name: pytest.fail(name))


def test_the_result_of_a_run_is_data(folder, reference):
    found, log = result_of(folder, "whole"), rows(folder, "whole")
    best = min((row for row in log if row["iter"] and "loss/val" in row),
               key=lambda row: row["loss/val"])
    assert (found["status"], found["ended_by"], found["iter"], found["tokens"]) == (
        "finished", "max_iters", 40, 40 * 4 * 2 * 32)
    assert found["last"] == {
        name: log[-1][name] for name in ("loss/train", "loss/val", "loss/train_eval", "bpb/val")
    }
    assert found["best"] == {
        name: pytest.approx(best[name]) for name in ("iter", "loss/val", "bpb/val")
    }
    assert found["n_params"] == sum(weight.numel() for weight in weights(folder, "whole").values())
    assert 0 < found["seconds"] <= log[-1]["time"] - log[0]["time"] + 5
    assert 100 < found["peak_mib"] < 10_000
    assert found["seed"] == 1337
    assert found["out_dir"] == "whole"
    assert (folder / found["model"]).read_bytes()[:4] == b"GGUF"
    assert found["command"].startswith("python ")
    assert found["command"].endswith(
        "train.py " + " ".join([*TINY, *reference[0], "--out_dir=whole"]))
    assert found["git_commit"] == (
        json.loads((folder / "whole/config.json").read_text())["git_commit"])


def test_a_finished_run_says_so(folder, reference):
    before = (folder / "whole/log.jsonl").read_text()
    done = run(folder, *reference[0], "--out_dir=whole", "--json=True")
    assert done.returncode == 0 and "this run is finished, at iter 40" in done.stdout
    assert (folder / "whole/log.jsonl").read_text() == before
    assert json.loads(done.stdout.splitlines()[-1]) == result_of(folder, "whole")


def wait_for_row(folder, out, step, process):
    log, end = folder / out / "log.jsonl", time.time() + 240
    while True:
        # The log is missing before the first row and while an older run is set aside.
        with contextlib.suppress(FileNotFoundError):
            if f'"iter": {step},' in log.read_text():
                return
        assert process.poll() is None and time.time() < end
        time.sleep(0.01)


@pytest.mark.parametrize(
    "signum", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGKILL])
def test_interrupted_and_continued_is_the_same_run(folder, reference, signum):
    args, out = reference[0], f"cut{signum}"
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command(*args, f"--out_dir={out}"), cwd=folder, env=env,
                               stdout=subprocess.PIPE, text=True)
    wait_for_row(folder, out, 15, process)
    process.send_signal(signum)
    text = process.communicate()[0]
    if signum != signal.SIGKILL:
        assert process.returncode == 0
        assert "the same command continues from here; write with it: ./run" in text
        assert checkpoint.load(checkpoint.newest(folder / out), "train")["state"]["step"] < 40
        found = result_of(folder, out)
        assert (found["status"], found["ended_by"]) == ("stopped", "signal")
        assert None not in found["last"].values()
    assert (folder / out / "result.json").exists() == (signum != signal.SIGKILL)
    done = run(folder, *args, f"--out_dir={out}")
    assert done.returncode == 0, done.stderr
    assert (same_losses(folder, out, "whole") if signum != signal.SIGKILL
            else losses(folder, out) == losses(folder, "whole"))
    assert len(rows(folder, out)) == len(losses(folder, out))
    for name, weight in weights(folder, "whole").items():
        assert torch.equal(weight, weights(folder, out)[name]), name


@pytest.fixture(scope="module")
def averaged(folder):
    """
    Return the arguments of a run of ten steps and the average of its weights, computed here from
    the checkpoint of each step.
    """
    args = [
        "--data=my.txt", "--max_iters=10", "--eval_interval=1", "--log_interval=1",
        "--always_save_checkpoint=True"
    ]
    done = run(folder, *args, "--out_dir=not_averaged")
    assert done.returncode == 0, done.stderr
    average = None
    for step, path in enumerate(checkpoint.steps(folder / "not_averaged")):
        now = checkpoint.load(path)["model"]
        average = average or now
        average = {name: w + (now[name] - w) / (1 + 0.3 * step) for name, w in average.items()}
    return args, average


def test_the_average_of_the_weights_is_evaluated_saved_and_exported(folder, averaged):
    """
    Averaging does not change the training losses. A run that is cut and resumed ends with the same
    losses and averages.
    """
    args = [*averaged[0], "--weight_average=0.3", "--out_dir=average"]
    done = run(folder, *args)
    assert done.returncode == 0, done.stderr
    found = weights(folder, "average")
    assert all(torch.allclose(found[name], w, atol=1e-6) for name, w in averaged[1].items())
    assert not torch.allclose(found["norm.weight"],
                              weights(folder, "not_averaged")["norm.weight"], atol=1e-6)
    train_losses = [[row[0] for row in losses(folder, out).values()]
                    for out in ("average", "not_averaged")]
    assert train_losses[0] == train_losses[1]
    told = run(folder, "--out_dir=average", "--eval_only=True").stdout
    assert f"validation loss {losses(folder, 'average')[10][1]:.4f}" in told
    shutil.copytree(folder / "average", folder / "average_cut")
    for path in checkpoint.steps(folder / "average_cut")[4:]:
        shutil.rmtree(path)
    again = run(folder, *args, "--out_dir=average_cut")
    assert "resuming average_cut at iteration 4" in again.stdout
    assert losses(folder, "average_cut") == losses(folder, "average")
    assert all(torch.equal(w, weights(folder, "average_cut")[name]) for name, w in found.items())
    assert (folder / "average_cut/model.gguf").read_bytes() == (
        folder / "average/model.gguf").read_bytes()
    told = run(folder, *args, "--weight_average=0", "--max_iters=11", "--init_from=force").stderr
    assert "holds a run with weight_average=0.3, now it is 0" in told


def test_a_terminal_that_closes_stops_a_run_as_sigterm_does(folder, reference):
    """A terminal that closes sends SIGHUP, and nothing can be printed to it any more."""
    args, (terminal, there) = [*reference[0], "--out_dir=terminal"], pty.openpty()
    process = subprocess.Popen(command(*args), cwd=folder, env=environment(), stdin=there,
                               stdout=there, stderr=there, start_new_session=True,
                               preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0))
    os.close(there)
    log, end = folder / "terminal/log.jsonl", time.time() + 240
    while not (log.exists() and '"iter": 15,' in log.read_text()):
        assert process.poll() is None and time.time() < end
        if select.select([terminal], [], [], 0.01)[0]:
            os.read(terminal, 10_000)
    os.close(terminal)
    assert process.wait() == 0 and (folder / "terminal/model.gguf").exists()
    assert checkpoint.load(checkpoint.newest(folder / "terminal"), "train")["state"]["step"] < 40
    done = run(folder, *args)
    assert done.returncode == 0 and same_losses(folder, "terminal", "whole"), done.stderr


def test_each_signal_that_asks_to_stop_is_heard_but_for_those_that_are_ignored():
    program = ("import os, signal, sys; from engine.training.signals import Signals\n"
               "if len(sys.argv) > 1: signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
               "for number in signal.SIGTERM, signal.SIGINT, signal.SIGXCPU, signal.SIGHUP:\n"
               "    signals = Signals(0, float('inf'))\n"
               "    os.kill(os.getpid(), number)\n"
               "    print(signals.read()[0])\n")
    for words, hung_up in ([], "True"), (["ignored"], "False"):
        done = subprocess.run([sys.executable, "-c", program, *words], cwd=ROOT,
                              capture_output=True, text=True)
        assert done.stdout.split() == ["True"] * 3 + [hung_up], done.stderr


def test_a_request_to_save_that_arrives_while_the_processes_agree_is_kept():
    program = (
        "import os, signal; from engine.training import distributed; "
        "from engine.training.signals import Signals\n"
        "signals, plain = Signals(0, float('inf')), distributed.start_max\n"
        "distributed.start_max = lambda values: "
        "os.kill(os.getpid(), signal.SIGUSR1) or plain(values)\n"
        "print(signals.read()[1])\n"
        "distributed.start_max = plain\n"
        "print(signals.read()[1], signals.read()[1])\n")
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.split() == ["False", "True", "False"], done.stderr


def test_a_mode_that_sighup_ends_removes_its_folder(folder):
    process = subprocess.Popen(
        command("--data=my.txt", "--overfit=4", "--learning_rate=1e-9", "--out_dir=mode/hup"),
        cwd=folder, env=environment(), stdout=subprocess.PIPE, text=True)
    assert any(line.startswith("step") for line in process.stdout)
    process.send_signal(signal.SIGHUP)
    assert process.wait() == 128 + signal.SIGHUP and not (folder / "mode").exists()


@pytest.mark.parametrize("which", ["stdout", pytest.param("stderr", marks=pytest.mark.slow)])
def test_a_full_disk_under_the_console_costs_what_is_printed_and_a_note(folder, reference, which):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command(*reference[0], f"--out_dir=console_{which}"), cwd=folder, env=environment(),
            text=True, **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | {which: full})
    assert done.returncode == 0
    assert losses(folder, f"console_{which}") == losses(folder, "whole")
    assert (folder / f"console_{which}/model.gguf").read_bytes() == (
        folder / "whole/model.gguf").read_bytes()
    noted = [note for row in rows(folder, f"console_{which}") for note in row.get("notes", [])
             if note[0].startswith("console")]
    # Nothing was printed to stderr, so only stdout can fail.
    assert [name for name, *_ in noted] == ["console/stdout"] * (which == "stdout")
    assert (which == "stderr" or done.stderr.count(
        "could not be written to stdout (No space left on device)") == 1)


def test_a_run_that_is_killed_after_its_turn_ends_early_as_it_would_have(folder):
    """
    After the kill, the last checkpoint is that of the evaluation at which the run turned back to
    its best weights.
    """
    args = [
        "--data=my.txt", "--max_iters=60", "--eval_interval=5", "--early_stop=1",
        "--learning_rate=0.6", "--schedule=constant", "--always_save_checkpoint=True", "--dim=16",
        "--n_heads=1", "--n_layers=1", "--optimizer=adamw", "--seed=2"
    ]
    told = run(folder, *args, "--out_dir=early").stdout
    best, last = map(int, re.search(
        r"since iter (\d+): back to its weights; iter (\d+) is the last", told).groups())
    shutil.copytree(folder / "early", folder / "early_killed")
    for path in checkpoint.steps(folder / "early_killed"):
        if int(path.name[5:]) > best + 5:
            shutil.rmtree(path)
    again = run(folder, *args, "--out_dir=early_killed").stdout
    assert f"resuming early_killed at iteration {best + 5}" in again
    assert f"back to its weights; iter {last} is the last" in again
    assert losses(folder, "early_killed") == losses(folder, "early")
    assert all(map(torch.equal, weights(folder, "early_killed").values(),
                   weights(folder, "early").values()))


def test_an_evaluation_at_a_stop_changes_no_early_end(folder, tmp_path):
    """
    The lowest validation loss is found at a stop between evaluations. A run that goes on without
    stops does not see it.
    """
    script = tmp_path / "stopped.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "import os, signal, train\n"
        "from configurator import configure\n"
        "batch, stop, step, losses = train.Dataset.batch, int(sys.argv.pop(1)), 0, "
        "{0: 5.0, 5: 3.0, 10: 2.0, 12: 1.0}\n"
        "def counting(dataset, number):\n"
        "    global step\n"
        "    step = number + 1\n"
        "    if step == stop:\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "    return batch(dataset, number)\n"
        "train.Dataset.batch, train.assess = counting, lambda *_: {\n"
        "    'loss/val': losses.get(step, 2.5), 'loss/train_eval': 2.5, 'bpb/val': 2.5, "
        "'samples': []}\n"
        "from engine.tracking.tracker import Tracker\n"
        "Tracker.model = lambda self, path, metrics, aliases: "
        "print(*aliases, metrics['iter'], metrics['loss/val'])\n"
        "sys.exit(train.start(configure(vars(train))))\n")
    args = [*TINY, "--data=my.txt", "--max_iters=60", "--eval_interval=5", "--early_stop=1"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled"}
    for stop, out in ((0, "unstopped"), (12, "stopped"), (0, "stopped")):
        done = forked.run([script, stop, *args, f"--out_dir={out}"], folder, env)
        assert done.returncode == 0, done.stderr
        assert ("since iter 10: back to its weights; iter 17 is the last"
                in done.stdout) == (not stop), done.stdout
    assert same_losses(folder, "stopped", "unstopped")
    assert all(map(torch.equal, weights(folder, "stopped").values(),
                   weights(folder, "unstopped").values()))
    assert export.exported_step(folder / "stopped/model.gguf") == 12  # the best of all
    # Each model is recorded with its own step and loss.
    assert "\nlatest 17 2.5\nbest 12 1.0\n" in done.stdout


@pytest.mark.slow
def test_the_wandb_run_is_one_across_offline_resumes(folder):
    """
    A run that is stopped, resumed, killed and resumed keeps one run id. Its logs together hold each
    row, and hold twice only the steps that were taken twice.
    """
    args = ["--data=my.txt", "--max_iters=40", "--wandb_log=True", "--out_dir=offline"]
    clean = {k: v for k, v in os.environ.items() if not k.startswith("WANDB")}
    env = clean | {"OMP_NUM_THREADS": "1", "HOME": str(folder)}  # a home without an API key
    for step, signum in [(15, signal.SIGTERM), (25, signal.SIGKILL), (40, None)]:
        process = subprocess.Popen(command(*args), cwd=folder, env=env, stdout=subprocess.PIPE,
                                   text=True)
        if signum:
            wait_for_row(folder, "offline", step, process)
            process.send_signal(signum)
        process.communicate()
        if signum == signal.SIGKILL:
            saved = checkpoint.load(checkpoint.newest(folder / "offline"), "train")["state"]["step"]
    noted, logged, ids = track.about(folder / "offline"), [], set()
    assert len(noted["folders"]) == 3
    for log in noted["folders"]:
        records = track.read_wandb(log)
        ids |= {record["run"]["run_id"] for record in records if record["type"] == "run"}
        logged.append({r["history"]["item"]["iter"]: r["history"]["item"]
                       for r in records if r["type"] == "history"})
    assert ids == {noted["id"]}
    expected = {row["iter"]: row for row in rows(folder, "offline")}
    assert set().union(*logged) == set(expected) > set(range(0, 41, 5))
    assert len(expected) <= 10  # the nine regular rows and that of the stop
    assert not logged[0].keys() & logged[1].keys() and not logged[0].keys() & logged[2].keys()
    assert all(step > saved for step in logged[1].keys() & logged[2].keys())
    for step, item in [pair for log in logged for pair in log.items()]:
        assert all(item[name] == expected[step][name]
                   for name in ("loss/train", "loss/val", "grad/norm") if name in item)


def test_a_changed_setting_is_not_continued(folder, reference):
    for change, words in [
            ("--batch_size=8", "batch_size=4, now it is 8"), ("--dim=64", "dim=32"),
            ("--vocab_source=char", "holds a run with vocab_source=byte, now it is char")]:
        done = run(folder, *reference[0], "--out_dir=whole", "--max_iters=50", change)
        assert done.returncode == 2 and words in done.stderr and done.stderr.count("error:") == 1
        assert "encoding:" in done.stderr or done.stderr.count("\n") == 1


def bare(folder, *args):
    """Run train.py without the settings of TINY."""
    return forked.run([ROOT / "train.py", *args], folder, environment())


def test_a_resumed_run_takes_its_settings_and_says_what_is_new(folder):
    (folder / "texts").mkdir()
    for name in ("a.txt", "b.txt"):
        (folder / "texts" / name).write_text((folder / "my.txt").read_text())
    chosen = ["--dropout=0.1", "--schedule=cosine", "--warmup_iters=3", "--beta1=0.8",
              "--data=texts"]
    assert run(folder, *chosen, "--max_iters=5", "--out_dir=kept").returncode == 0
    before = json.loads((folder / "kept/config.json").read_text())
    done = bare(folder, "--out_dir=kept", "--max_iters=10", "--learning_rate=0.001",
                "--dropout=0.3")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "resuming kept at iteration 5 of 10"
    assert sorted(lines[1:4]) == sorted(
        ["max_iters: 5 -> 10", "dropout: 0.1 -> 0.3", "learning_rate: 0.003 -> 0.001"])
    after = json.loads((folder / "kept/config.json").read_text())
    told = {"learning_rate": 0.001, "dropout": 0.3, "max_iters": 10}
    same = {k for k in trainer_config().defaults
            if k not in resume.OF_SESSION and not k.startswith("wandb_")}
    assert {k: after[k] for k in same} == {k: before[k] for k in same} | told
    assert rows(folder, "kept")[-1]["settings"] == [
        re.split(": | -> ", line) for line in lines[1:4]]
    (folder / "texts/b.txt").write_text("other " * 5000)
    done = bare(folder, "--out_dir=kept", "--max_iters=15")
    assert done.returncode == 2 and done.stderr.splitlines()[-1].count("b.txt changed since") == 1
    assert "fingerprint" not in done.stderr and len(done.stderr.splitlines()[-1]) < 400
    done = bare(folder, "--out_dir=kept", "--max_iters=15", "--data=my.txt")
    assert done.returncode == 2 and "holds a run with data=texts, now it is my.txt" in done.stderr


@pytest.fixture(scope="module")
def alone(folder):
    """
    Return the arguments of a run of one process, whose losses many processes reproduce. A step has
    6 sequences, of which the fourth of four processes gets none.
    """
    args = [
        "--data=my.txt", "--max_iters=20", "--batch_size=3", "--gradient_accumulation_steps=2",
        "--warmup_iters=10", "--dtype=float32"
    ]
    done = run(folder, *args, "--log_extras=noise_scale", "--out_dir=one")
    assert done.returncode == 0, done.stderr
    return args


@pytest.mark.parametrize("processes, more", [
    (4, []), pytest.param(3, ["--fsdp=True", "--log_extras=noise_scale"], marks=pytest.mark.slow)])
def test_many_processes_give_the_same_losses(folder, alone, processes, more):
    out = f"many{processes}"
    for done in ranks(folder, processes, *alone, *more, "--checks=all", f"--out_dir={out}"):
        assert done.returncode == 0, done.stderr
    assert losses(folder, "one").keys() == losses(folder, out).keys()
    for (step, first), second in zip(losses(folder, "one").items(), losses(folder, out).values()):
        for a, b in zip(first, second):
            assert a is b is None or abs(a - b) <= 1e-5 * a, step
    if more:  # a small batch is now one sequence of each of the three processes: its tokens add up
        first, second = (rows(folder, name)[0]["grad/noise_scale"] for name in ("one", out))
        assert second == pytest.approx(first, rel=0.5)


@pytest.mark.slow
def test_processes_wait_for_the_data_and_say_that_the_cache_is_to_be_shared(tmp_path):
    """
    Preparing takes longer than a message may. The second process works in another folder, as on
    another machine, and does not find the prepared data.
    """
    (tmp_path / "one").mkdir(), (tmp_path / "two").mkdir()
    (tmp_path / "one/my.txt").write_text("words of a text " * 200)
    script = tmp_path / "apart.py"
    script.write_text(
        f"import os, sys, time; sys.path.insert(0, {str(ROOT)!r})\n"
        "from datetime import timedelta\n"
        "from pathlib import Path\n"
        "import train\n"
        "from configurator import configure\n"
        "prepare = train.prepare\n"
        "train.prepare = lambda *a, **k: (time.sleep(4), prepare(*a, **k))[1]\n"
        "train.distributed.TIMEOUT = timedelta(seconds=3)\n"
        "os.chdir(['one', 'two'][train.distributed.rank])\n"
        "Path('ready').touch()\n"
        "while not (Path('../one/ready').exists() and Path('../two/ready').exists()): "
        "time.sleep(0.01)\n"
        "sys.exit(train.start(configure(vars(train))))\n")
    words = [w if w != str(ROOT / "train.py") else str(script)
             for w in command("--data=my.txt", "--max_iters=1", torchrun=2)]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True,
                          env=os.environ | {"OMP_NUM_THREADS": "1"})
    line, = [line for line in done.stderr.splitlines() if "error: " in line and "cache" in line]
    assert done.returncode
    assert "process 1 does not see it; give a --cache that all machines share" in line


@pytest.mark.slow
def test_ranks_that_split_matrices_update_them_as_one_does(tmp_path):
    """Two processes split three matrices of one shape; MIN_SPLIT = 0 allows so small a split."""
    script = tmp_path / "shares.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "import torch\n"
        "from engine.training import distributed\n"
        "from optim import Muon\n"
        "if distributed.world > 1: distributed.setup('cpu')\n"
        "distributed.MIN_SPLIT = 0\n"
        "torch.manual_seed(1)\n"
        "params = [torch.nn.Parameter(torch.randn(*shape)) "
        "for shape in [(64, 32)] * 3 + [(32, 32)]]\n"
        "for p in params: p.grad = torch.randn_like(p)\n"
        "muon = Muon(params, 0.01, 0.1)\n"
        "muon.step(), muon.step()\n"
        "torch.save([p.detach() for p in params], f'{distributed.world}.{distributed.rank}')\n"
        "if distributed.world > 1: distributed.close()\n")
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    for words in (command(), command(torchrun=2)):
        subprocess.run([w if w != str(ROOT / "train.py") else str(script) for w in words],
                       cwd=tmp_path, check=True, env=env)
    alone, *shared = [torch.load(tmp_path / name) for name in ("1.0", "2.0", "2.1")]
    assert all(torch.equal(a, b) for others in shared for a, b in zip(alone, others, strict=True))


@pytest.mark.parametrize("optimizer", ["muon", pytest.param("adamw", marks=pytest.mark.slow)])
def test_sharded_gives_the_same_losses_and_any_number_of_processes_continues(folder, optimizer):
    args = [
        "--data=my.txt", "--batch_size=8", f"--optimizer={optimizer}", "--schedule=constant",
        "--eval_iters=0", "--warmup_iters=10", "--weight_average=0.2", "--dtype=float32"
    ]
    whole, parts = f"whole_{optimizer}", f"parts_{optimizer}"
    assert run(folder, *args, "--max_iters=20", f"--out_dir={whole}").returncode == 0
    for done in ranks(folder, 2, *args, "--max_iters=10", f"--out_dir={parts}", "--fsdp=True",
                      "--checks=all"):
        assert done.returncode == 0, done.stderr
    saved = checkpoint.newest(folder / parts)
    assert len(list(saved.glob("shard-*"))) == 2
    assert (saved / "model.pt").stat().st_size < 4000  # no process held the whole model
    sample = forked.run([ROOT / "sample.py", f"--out_dir={parts}", "--prompt=the cat",
                         "--device=cpu"], folder, os.environ)
    assert sample.returncode == 0 and "the cat" in sample.stdout, sample.stderr
    then = run(folder, *args, "--max_iters=15", f"--out_dir={parts}")
    assert then.returncode == 0, then.stderr
    for done in ranks(folder, 2, *args, "--max_iters=20", f"--out_dir={parts}", "--fsdp=True"):
        assert done.returncode == 0, done.stderr
    assert losses(folder, whole).keys() == losses(folder, parts).keys()
    for step, found in losses(folder, parts).items():
        for a, b in zip(losses(folder, whole)[step], found):
            assert a is None or b is None or abs(a - b) <= 1e-5 * a, step
    for name, weight in weights(folder, whole).items():
        assert torch.allclose(weight, weights(folder, parts)[name], atol=1e-5), name


def test_accumulation_gives_the_same_losses_and_a_row_their_mean(folder):
    args = ["--data=my.txt", "--max_iters=10"]
    whole = run(folder, *args, "--out_dir=big", "--batch_size=8")
    parts = run(folder, *args, "--out_dir=parts", "--batch_size=2",
                "--gradient_accumulation_steps=4", "--log_interval=1")
    assert whole.returncode == 0 and parts.returncode == 0
    each = [row["loss/train"] for row in rows(folder, "parts")[1:]]
    for end, row in zip((5, 10), rows(folder, "big")[1:]):
        assert row["iter"] == end and abs(row["loss/train"] - sum(each[end - 5:end]) / 5) < 2e-4


@pytest.mark.parametrize("name", ["one_long_text", "stories"])
def test_an_evaluation_is_the_same_whatever_the_batch(name, folder, tmp_path, monkeypatch):
    """
    An evaluation reads as many tokens of both splits while they are few, then fewer of the training
    split. BOS is never a target. The loss is the same for every batch_size.
    """
    source = folder / "my.txt" if name == "one_long_text" else "stories:300"
    prepared = prepare.load(train.prepare(source, "byte", cache=tmp_path, workers=1))
    for key, value in dict(max_seq_len=64, eval_iters=2, device="cpu").items():
        monkeypatch.setattr(train, key, value)
    torch.manual_seed(1)
    model = ModelArgs(dim=16, n_layers=1, n_heads=2, vocab_size=259, max_seq_len=64).build()
    read, found = [], []
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda x, y: (read.append((x, y)), forward(x, y))[1])
    for size in (1, 6, 50):
        dataset = train.Dataset(prepared, 64, size, size, seed=1)
        read.clear()
        t = SimpleNamespace(model=model, dataset=dataset, device=torch.device("cpu"),
                            amp=contextlib.nullcontext())
        found.append(train.evaluate(t))
        targets = torch.cat([y.flatten() for _, y in read])
        assert (targets >= 0).sum() == 2 * 2048 and not (targets == dataset.tokenizer.bos_id).any()
        if name == "one_long_text":
            assert all((x[:, 0] == dataset.tokenizer.bos_id).all() for x, _ in read)
    for losses in found[1:]:
        assert losses == {split: pytest.approx(loss, abs=1e-6) for split, loss in found[0].items()}
    assert found[0]["train"] != found[0]["val"]
    monkeypatch.setattr(train, "eval_iters", 0)
    read.clear()
    train.evaluate(t)
    whole = dataset.meta["val_tokens"] - dataset.meta["val_documents"]
    assert sum((y >= 0).sum().item() for _, y in read) == whole + min(whole, 8192)


def test_fine_tuning_takes_architecture_and_vocabulary_from_the_checkpoint(folder, reference):
    done = run(folder, "--data=my.txt", "--init_from=whole", "--out_dir=tuned", "--max_iters=10")
    assert done.returncode == 0, done.stderr
    log = rows(folder, "tuned")
    best = min(row["loss/val"] for row in rows(folder, "whole") if "loss/val" in row)
    assert abs(log[0]["loss/val"] - best) < 1e-3
    assert checkpoint.load(checkpoint.newest(folder / "tuned"))["args"]["dim"] == 32
    for change, words in [("--dim=64", "--dim=64: fine-tuning keeps"),
                          ("--vocab_source=char", "where vocab_source is byte")]:
        done = run(folder, "--data=my.txt", "--init_from=whole", "--out_dir=tuned_otherwise",
                   change)
        assert done.returncode == 2 and done.stderr.count("\n") == 1 and words in done.stderr
    done = run(folder, "--data=my.txt", "--init_from=whole", "--out_dir=tuned_other_origin",
               "--max_iters=1")
    done = run(folder, "--data=my.txt", "--init_from=tuned", "--out_dir=tuned_other_origin",
               "--max_iters=2")
    assert done.returncode == 2
    assert "began from whole, not from tuned" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_run_that_never_improves_ends_with_a_trained_model_that_is_there(folder, reference):
    """The learning rate is so high that fine-tuning ends with a higher loss than it began with."""
    done = run(folder, "--data=my.txt", "--init_from=whole", "--out_dir=harmed", "--max_iters=20",
               "--learning_rate=0.9", "--spike_z=0", "--wandb_log=True", "--warmup_iters=0")
    warned = [
        line for line in done.stderr.splitlines() if "warning" in line and "layers." not in line
    ]
    assert done.returncode == 0 and "could not" not in done.stderr and not warned, done.stderr
    losses = {row["iter"]: row["loss/val"] for row in rows(folder, "harmed") if "loss/val" in row}
    assert losses[0] < min(losses[10], losses[20])
    best = min((10, 20), key=losses.get)
    assert (f"best validation loss {losses[best]:.4f}; write with it: ./run harmed/model.gguf"
            in done.stdout)
    assert export.exported_step(folder / "harmed/model.gguf") == best
    assert checkpoint.locate(folder / "harmed").name == f"step_{best:08d}"


@pytest.fixture(scope="module")
def prepared(folder):
    """Return a folder that data.py prepared, with bytes as tokens."""
    return str(train.prepare(folder / "my.txt", "byte", cache=folder / "cache"))


def test_a_run_on_prepared_data_records_how_they_were_prepared(folder, prepared):
    words = [word for word in command(f"--data={prepared}", "--max_iters=1", "--out_dir=ready")[1:]
             if "vocab_source" not in word]
    done = forked.run(words, folder, os.environ | {"WANDB_MODE": "disabled"})
    config = json.loads((folder / "ready/config.json").read_text())
    assert done.returncode == 0 and config["vocab_source"] == "byte", done.stderr
    done = run(folder, f"--data={prepared}", "--max_iters=2", "--out_dir=ready",
               "--vocab_source=char")  # given again
    assert done.returncode == 2 and "is prepared already, with vocab_source=byte" in done.stderr


@pytest.mark.parametrize("name, value, fits", [
    ("vocab_source", "byte", True), ("vocab_source", "custom", False),
    ("vocab_source", "tokenizer.json", True), ("vocab_size", 259, True), ("vocab_size", 0, True),
    ("vocab_size", 260, False), ("max_vocab_size", 300, True), ("max_vocab_size", 200, False),
    ("val_fraction", 0.0, True), ("val_fraction", 0.2, False), ("max_text_bytes", 1000, False),
    ("column", "story", False), ("column", "text", True)])
def test_what_data_are_prepared_with_is_refused_where_it_is_given_otherwise(
        prepared, capsys, name, value, fits):
    meta = json.loads(Path(prepared, "meta.json").read_text())
    value = f"{prepared}/{value}" if str(value).endswith(".json") else value
    s = trainer_config(data=prepared, **{name: value})
    with contextlib.nullcontext() if fits else pytest.raises(SystemExit):
        prepare.as_prepared(s, {"data", name}, meta)
    told = capsys.readouterr().err
    assert told.count("\n") == (not fits)
    assert fits or f"error: --{name}={value}: " in told
    # A value that was not given, such as one of an older run, gives way to that of the data.
    assert (name in prepare.as_prepared(s, {"data"}, meta)) == (not fits)
    assert prepare.as_prepared(s.changed(data="my.txt"), {"data", name}, meta) == {}


def test_of_equal_losses_the_first_is_the_best(folder):
    done = run(folder, "--data=my.txt", "--max_iters=20", "--learning_rate=1e-30",
               "--out_dir=equal")  # no weight moves
    assert len({row["loss/val"] for row in rows(folder, "equal") if "loss/val" in row}) == 1
    assert "could not" not in done.stdout
    assert export.exported_step(folder / "equal/model.gguf") == 10
    assert export.exported_step(folder / "equal/last.gguf") == 20
    assert checkpoint.locate(folder / "equal").name == "step_00000010"


def test_the_last_model_of_an_earlier_end_goes_when_the_best_is_the_last(folder):
    args, model, last = (["--data=my.txt", "--schedule=constant", "--out_dir=ends"],
                         folder / "ends/model.gguf", folder / "ends/last.gguf")
    assert run(folder, *args, "--max_iters=10").returncode == 0
    shutil.copy(model, last)  # as if an earlier model had been the best
    assert run(folder, *args, "--max_iters=20").returncode == 0
    assert export.exported_step(model) == 20 and not last.exists()
    last.write_text("mine")
    assert run(folder, *args, "--max_iters=30").returncode == 0
    assert export.exported_step(model) == 30 and last.read_text() == "mine"


def test_fine_tuning_is_resumed_by_the_same_command(folder, reference):
    args = ["--data=my.txt", "--init_from=whole", "--schedule=constant"]
    assert run(folder, *args, "--out_dir=tuned_whole", "--max_iters=10").returncode == 0
    for steps in (5, 10):
        done = run(folder, *args, "--out_dir=tuned_parts", f"--max_iters={steps}")
        assert done.returncode == 0, done.stderr
    assert [row["iter"] for row in rows(folder, "tuned_parts")] == [0, 5, 10]
    for name, weight in weights(folder, "tuned_whole").items():
        assert torch.equal(weight, weights(folder, "tuned_parts")[name]), name


def test_a_run_is_not_fine_tuned_into_itself(folder, reference):
    before = (folder / "whole/log.jsonl").read_text()
    for origin in ("whole", "whole/checkpoints/step_00000040"):
        done = run(folder, *reference[0], f"--init_from={origin}", "--out_dir=whole")
        assert done.returncode == 2
        assert "is the run in out_dir itself" in done.stderr
        assert done.stderr.count("\n") == 1
    assert (folder / "whole/log.jsonl").read_text() == before


@pytest.mark.parametrize("data, name", [("stories:2000", "stories"), ("tinystories", "tinystories"),
                                        ("a/my.txt", "my"), ("中文 故事.txt", "中文-故事"),
                                        ("a/texts.v2/", "texts.v2"), ("../..", "run")])
def test_a_run_is_named_after_its_data(tmp_path, monkeypatch, data, name):
    for file in ("a/my.txt", "中文 故事.txt", "a/texts.v2/b.txt"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("")
    monkeypatch.chdir(tmp_path)
    named = []
    monkeypatch.setattr(train, "main", lambda config: (named.append(config.out_dir), (None, 0))[1])
    assert train.start(trainer_config(data=data, out_dir="auto")) == 0
    assert named == [f"out/{name}"] or data == "../.." and Path(named[0]).parent == Path("out")


def test_the_commands_of_a_first_evening(folder):
    """
    Train, fine-tune into a folder of its own, evaluate, sample and export, without naming any
    folder but the origin.
    """
    (folder / "tales.txt").write_text((folder / "my.txt").read_text()[:20_000])
    assert run(folder, "--data=my.txt", "--max_iters=5").returncode == 0
    done = run(folder, "--data=tales.txt", "--init_from=out/my", "--max_iters=5")
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("./run out/tales/model.gguf -i The\n"), done.stderr
    said = run(folder, "--data=tales.txt", "--eval_only=True").stdout
    assert "validation loss" in said and "evaluating out/tales at iteration" in said
    assert "validation loss" in run(folder, "--data=tales.txt", "--eval_only=True",
                                    "--init_from=out/my").stdout
    for program, words in (("sample.py", "the"), ("export.py", "wrote out/tales/model.gguf")):
        more = (["--prompt=the", "--device=cpu", "--max_new_tokens=2"]
                if program == "sample.py" else [])
        done = forked.run([ROOT / program, *more], folder, environment())
        assert done.returncode == 0
        assert words in done.stdout
        assert "out/tales: the newest run in out" in done.stderr


def test_scratch_sets_the_old_run_aside(folder):
    for _ in range(2):
        done = run(folder, "--data=my.txt", "--max_iters=2", "--init_from=scratch",
                   "--out_dir=fresh")
        assert done.returncode == 0, done.stderr
    assert "was moved to fresh.old1" in done.stdout
    assert checkpoint.newest(folder / "fresh.old1") and checkpoint.newest(folder / "fresh")


def test_an_old_run_behind_a_link_is_set_aside_on_its_own_disk(folder):
    """/dev/shm is another file system, as a disk for runs may be."""
    disk = Path(tempfile.mkdtemp(dir="/dev/shm"))
    try:
        assert disk.stat().st_dev != folder.stat().st_dev
        (disk / "runs").mkdir()
        (folder / "linked").symlink_to(disk / "runs")
        for _ in range(2):
            done = run(folder, "--data=my.txt", "--max_iters=2", "--init_from=scratch",
                       "--out_dir=linked")
            assert done.returncode == 0, done.stderr
        assert f"was moved to {disk}/runs.old1" in done.stdout
        assert checkpoint.newest(disk / "runs.old1") and checkpoint.newest(disk / "runs")
        assert not (folder / "linked.old1").exists()
    finally:
        shutil.rmtree(disk)


def test_a_run_that_fills_a_disk_of_its_own_is_copied_aside(tmp_path, monkeypatch):
    """Its folder may be the root of a disk, as in a container: no rename leaves it."""
    def rename(source, target):
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
    (tmp_path / "run").mkdir()
    (tmp_path / "run/log.jsonl").write_text('{"iter": 7}\n')
    (tmp_path / "run/notes.txt").write_text("the user's")
    monkeypatch.setattr(os, "rename", rename)
    assert run_folder.set_aside(tmp_path / "run") == tmp_path / "run.old1"
    assert (tmp_path / "run.old1/log.jsonl").read_text() == '{"iter": 7}\n'
    assert os.listdir(tmp_path / "run") == ["notes.txt"]


def test_a_run_without_checkpoints_is_set_aside(folder):
    """For example, because the user has deleted its checkpoints to free disk space."""
    args = ["--data=my.txt", "--max_iters=2", "--out_dir=bare"]
    assert run(folder, *args).returncode == 0
    kept = {name: (folder / "bare" / name).read_bytes()
            for name in ("model.gguf", "log.jsonl", "result.json")}
    shutil.rmtree(folder / "bare/checkpoints")
    done = run(folder, *args)
    assert done.returncode == 0, done.stderr
    assert "bare has no checkpoint to resume; it was moved to bare.old1" in done.stdout
    assert {name: (folder / "bare.old1" / name).read_bytes() for name in kept} == kept


def test_a_run_goes_on_at_a_rate_above_the_last_one_once_its_time_limit_is_gone(folder):
    args = ["--data=my.txt", "--out_dir=unlimited", "--warmup_iters=0", "--log_interval=1"]
    done = run(folder, *args, "--max_iters=100000", "--max_minutes=0.02")
    assert done.returncode == 0, done.stderr
    before = rows(folder, "unlimited")[-1]
    peak = max(row.get("lr", 0) for row in rows(folder, "unlimited"))
    assert before["lr"] < peak  # it has decayed with the time, how far depends on the last step's
    done = run(folder, *args, f"--max_iters={10 * before['iter']}",
               f"--eval_interval={20 * before['iter']}")
    assert done.returncode == 0, done.stderr
    rates = [row["lr"] for row in rows(folder, "unlimited") if row["iter"] > before["iter"] + 1]
    assert rates[0] == peak and rates == sorted(rates, reverse=True) and rates[-1] < peak / 4


def test_a_stop_after_scratch_is_continued_without_it(folder):
    args = ["--data=my.txt", "--max_iters=100000", "--out_dir=anew"]
    done = run(folder, *args, "--init_from=scratch", "--max_minutes=0.01")
    assert "the same command without --init_from=scratch continues from" in done.stdout


def test_another_vocabulary_of_the_same_size_is_refused(folder):
    """A forced resume on a changed text would use the embedding of the vocabulary before."""
    (folder / "grown.txt").write_text((folder / "my.txt").read_text())
    args = ["--data=grown.txt", "--out_dir=grown", "--vocab_source=custom", "--vocab_size=300"]
    assert run(folder, *args, "--max_iters=2").returncode == 0
    with open(folder / "grown.txt", "a") as f:
        f.write("Completely different words: zyx wvu tsr qpo nml kji hgf edc. " * 300)
    done = run(folder, *args, "--max_iters=4", "--init_from=force")
    assert done.returncode == 2
    message = done.stderr.splitlines()[-1]
    assert "grown.txt changed since" in message and "--init_from=force" not in message
    assert "--init_from=grown with another --out_dir" in message
    done = run(folder, *args, "--max_iters=4", "--init_from=grown", "--out_dir=grown_tuned")
    assert done.returncode == 0, done.stderr


def test_depth_derives_the_rest(folder):
    done = run(folder, "--data=my.txt", "--depth=1", "--dim=32", "--n_heads=2", "--max_iters=1",
               "--out_dir=depth")
    assert done.returncode == 0, done.stderr
    line = next(line for line in done.stdout.splitlines() if line.startswith("depth 1:"))
    for key in ("dim=32", "n_layers=2", "n_heads=2", "batch_size=4", "learning_rate=",
                "max_iters=1"):
        assert key in line  # given settings stay, the rest is derived


def derived(monkeypatch, depth, vocab, given=(), world=1):
    """Return the settings derived from a depth, with all others at their defaults."""
    monkeypatch.setattr(distributed, "world", world)
    s = trainer_config(depth=depth)
    return s.as_dict() | plan.derive_from_depth(s, set(given), vocab)


@pytest.mark.parametrize("depth", [1, 2, 3, 4, 6, 8, 12, 32])
def test_depth_gives_a_model_and_a_run_that_fit(monkeypatch, depth):
    alone = derived(monkeypatch, depth, 1536)
    for world in (1, 3, 8):
        found = derived(monkeypatch, depth, 1536, world=world)
        assert found == alone  # the same for any number of processes
        args = ModelArgs(**{k: v for k, v in found.items() if k in ModelArgs.__dataclass_fields__}
                         | {"vocab_size": 1536})
        assert args.problem() is None and args.head_dim == 32
        sequences = found["batch_size"] * found["gradient_accumulation_steps"]
        assert sequences and found["batch_size"] <= 32


def test_depth_gives_the_sizes_of_the_table(monkeypatch):
    """
    The table is in doc/training.md. Batch size and learning rate follow from the compute, the
    iterations from the parameters.
    """
    for depth, batch, pieces, rate, iters in (
            (2, 2, 1, 5.6e-3, 1536), (4, 4, 1, 4e-3, 3072), (8, 12, 1, 2.6e-3, 6144)):
        found = derived(monkeypatch, depth, 1536)
        assert (found["dim"], found["n_layers"], found["n_heads"]) == (
            16 * depth, depth, depth // 2)
        assert (found["batch_size"], found["gradient_accumulation_steps"],
                found["learning_rate"]) == (batch, pieces, rate)
        assert (found["max_iters"], found["warmup_iters"]) == (iters, iters // 50)


def test_depth_counts_the_true_vocabulary(monkeypatch):
    tokens = []
    for vocab in (96, 32000):
        found = derived(monkeypatch, 4, vocab, {"batch_size", "gradient_accumulation_steps"})
        tokens.append(found["max_iters"] * found["batch_size"] * found["max_seq_len"])
    assert abs(tokens[1] - tokens[0] - 8 * 64 * (32000 - 96)) <= 2 * 6 * 192


def test_depth_does_not_change_a_model_that_is_tuned(folder, reference):
    done = run(folder, "--data=my.txt", "--init_from=whole", "--out_dir=tuned_depth", "--depth=4",
               "--max_iters=1")
    assert done.returncode == 0, done.stderr
    assert checkpoint.load(checkpoint.newest(folder / "tuned_depth"))["args"]["n_layers"] == 2


def test_a_full_disk_costs_a_warning(folder):
    def limit():
        # The limit is less than a checkpoint takes and more than the log takes.
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))
    assert run(folder, "--data=my.txt", "--max_iters=1", "--out_dir=prepare").returncode == 0
    done = run(folder, "--data=my.txt", "--max_iters=20", "--out_dir=full", preexec_fn=limit)
    assert done.returncode == 2 and "Traceback" not in done.stderr  # the model is missing
    assert done.stdout.count("warning: a checkpoint could not be saved") == 2
    assert rows(folder, "full")[-1]["iter"] == 20
    assert done.stdout.splitlines()[-1].startswith("finished: best")
    assert "./run" not in done.stdout.splitlines()[-1]
    assert list((folder / "full/checkpoints").iterdir()) == []


@pytest.fixture(scope="session")
def failing_disk(tmp_path_factory):
    """Compile tests/faults/disk.c, a library to preload."""
    return compile_c(tmp_path_factory.mktemp("disk") / "disk.so", "-shared", "-fPIC",
                     "tests/faults/disk.c", "-ldl", standard="gnu11")


LOOKING = f"""
import json, sys
sys.path.insert(0, {str(ROOT)!r})
import train
from engine.training import checkpoint, progress
from configurator import configure
warn_of = progress.warn_of
def look(error):  # called when no save is under way
    warn_of(error)
    if error:
        folder = checkpoint.newest(train.out_dir)
        checkpoint.load(folder), checkpoint.load(folder, "train")
        print("still there:", folder.name)
progress.warn_of = look
train.start(configure(vars(train)))
"""


@pytest.mark.slow
def test_a_disk_that_fails_now_and_then_costs_warnings(folder, failing_disk, tmp_path):
    """
    The run saves at every step, and in every second save a call fails. The run is the same, and its
    last checkpoint is there.
    """
    steps = 49
    args = [
        *TINY, "--data=my.txt", f"--max_iters={steps}", "--eval_interval=1", "--eval_iters=1",
        "--dim=16", "--n_heads=1", "--max_seq_len=8", "--sample_prompt=T"
    ]
    (tmp_path / "looking.py").write_text(LOOKING)
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    sound = forked.run([tmp_path / "looking.py", *args, "--out_dir=sound"], folder, env)
    assert sound.returncode == 0, sound.stderr
    done = subprocess.run([sys.executable, tmp_path / "looking.py", *args, "--out_dir=faulty"],
                          cwd=folder, capture_output=True, text=True,
                          env=env | {"LD_PRELOAD": failing_disk, "DISK_LOG": tmp_path / "disk.log"})
    assert done.returncode == 0, done.stderr
    faults = [line.split(maxsplit=2) for line in (tmp_path / "disk.log").read_text().splitlines()]
    warned = done.stdout.count("warning: a checkpoint could not be saved")
    print(f"\n{len(faults)} faults, {warned} warnings: "
          f"{collections.Counter(what for _, _, what in faults)}, "
          f"{collections.Counter(call for _, call, _ in faults)}")
    assert len(faults) == 24
    # A short write is no error, and a copy that fails is made in another way.
    assert 18 <= warned <= 24
    assert {"ENOSPC", "EIO", "EACCES", "short", "short, then ENOSPC"} == {
        what for _, _, what in faults}
    assert done.stdout.count("still there: step_") == warned
    assert losses(folder, "faulty") == losses(folder, "sound")
    assert [p.name for p in checkpoint.steps(folder / "faulty")][-1] == f"step_{steps:08d}"
    assert not list((folder / "faulty").rglob("*tmp*"))
    for name, weight in weights(folder, "sound").items():
        assert torch.equal(weight, weights(folder, "faulty")[name]), name


def test_a_disk_that_is_full_at_the_start_is_one_line(folder):
    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
    done = run(folder, "--data=my.txt", "--max_iters=2", "--out_dir=none_left", preexec_fn=limit)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "--out_dir=none_left: cannot be written" in done.stderr


def test_a_full_disk_is_named_and_the_last_line_is_true(folder, failing_disk):
    """The disk is sound for the checkpoint and model of iteration 10, and full from then on."""
    # Two saves: the first one makes its folder twice.
    env = os.environ | {"OMP_NUM_THREADS": "1", "LD_PRELOAD": failing_disk, "DISK_FULL_AFTER": "2"}
    done = subprocess.run(command("--data=my.txt", "--max_iters=30", "--out_dir=filling"),
                          cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert done.stdout.count("could not be saved (the disk is full)") == 2, done.stderr
    last = done.stdout.splitlines()[-1]
    assert "filling/model.gguf holds the model of iter 10" in last
    assert "the model of iter 30 could not be written" in last
    assert export.exported_step(folder / "filling/model.gguf") == 10
    assert checkpoint.newest(folder / "filling").name == "step_00000010"


def test_a_second_trainer_is_refused_until_the_first_is_dead(folder):
    args = ["--data=my.txt", "--max_iters=100000", "--out_dir=taken"]
    process = start(folder, *args)
    wait_for_row(folder, "taken", 5, process)
    done = run(folder, *args)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert f"process {process.pid} on " in done.stderr
    process.kill()
    process.communicate()
    done = run(folder, *args, "--max_minutes=0.01")
    assert done.returncode == 0, done.stderr


def test_a_damaged_checkpoint_does_not_start_the_run_anew(folder):
    """
    A damaged checkpoint that is the only one ends in one error line, again at the next try. If an
    older one is intact, the run resumes from it.
    """
    args = ["--data=my.txt", "--out_dir=sick", "--always_save_checkpoint=True"]
    assert run(folder, *args, "--max_iters=20").returncode == 0
    steps = folder / "sick/checkpoints"
    os.truncate(steps / "step_00000020/train.pt", 1000)
    done = run(folder, *args, "--max_iters=20")
    assert done.returncode == 0
    assert "step_00000020.damaged; resuming from the earlier step_00000010" in done.stdout
    (steps / "step_00000020/train.pt").unlink()
    os.truncate(steps / "step_00000010/train.pt", 1000)
    for _ in range(2):
        done = run(folder, *args, "--max_iters=20")
        assert done.returncode == 2
        assert done.stderr.count("\n") == 1
        assert "step_00000010.damaged" in done.stderr
        assert "--init_from=scratch" in done.stderr
    assert sorted(os.listdir(steps)) == [
        "step_00000010.damaged", "step_00000020.damaged", "step_00000020.damaged1"
    ]
    assert all((folder / path / "model.pt").exists() for path in steps.iterdir())
    assert rows(folder, "sick")[-1]["iter"] == 20


def test_what_is_the_users_stays_in_a_runs_folder(folder):
    mine = [folder / "shared" / name
            for name in ("notes.tmp", "checkpoints/step_mine/model.bin",
                         "checkpoints/step_1000/model.pt", "other/log.jsonl")]
    for path in mine:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    args = ["--data=my.txt", "--max_iters=10", "--eval_interval=5", "--out_dir=shared"]
    for more in ([], ["--init_from=scratch"]):
        assert run(folder, *args, *more).returncode == 0
        assert all(path.read_text() == "mine" for path in mine)
    assert sorted(os.listdir(folder / "shared.old1")) == sorted(
        set(os.listdir(folder / "shared")) - {"notes.tmp", "other"})
    (folder / "theirs").mkdir()
    (folder / "theirs/model.gguf").write_text("mine")
    done = run(folder, "--data=my.txt", "--max_iters=1", "--out_dir=theirs")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "holds model.gguf" in done.stderr
    assert os.listdir(folder / "theirs") == ["model.gguf"]


def test_a_changed_setting_continues_when_forced(folder):
    args = ["--data=my.txt", "--out_dir=forced", "--schedule=constant"]
    assert run(folder, *args, "--max_iters=5").returncode == 0
    done = run(folder, *args, "--max_iters=10", "--batch_size=8", "--init_from=force")
    assert done.returncode == 0 and [row["iter"] for row in rows(folder, "forced")] == [0, 5, 10]
    # The run has these settings now.
    assert run(folder, *args, "--max_iters=15", "--batch_size=8").returncode == 0
    assert run(folder, *args, "--max_iters=20", "--batch_size=2",
               "--init_from=force").returncode == 0
    assert [row["tokens"] // 32 for row in rows(folder, "forced")] == [0, 20, 60, 100, 110]


def test_the_best_loss_on_another_text_is_not_that_of_this_one(folder):
    """Forced to go on with a harder text, a run has its best checkpoint there, not before."""
    rng = random.Random(2)
    (folder / "easy.txt").write_text("abcd " * 8000)
    (folder / "hard.txt").write_text("".join(rng.choice("abcd ") for _ in range(40_000)))
    args = ["--out_dir=moved", "--schedule=constant", "--early_stop=3"]
    done = run(folder, *args, "--data=easy.txt", "--max_iters=40", "--eval_interval=10")
    assert done.returncode == 0, done.stderr
    easy = checkpoint.pointer(folder / "moved", "best")
    done = run(folder, *args, "--data=hard.txt", "--max_iters=80", "--eval_interval=10",
               "--init_from=force")
    assert done.returncode == 0, done.stderr
    best = json.loads((folder / "moved/result.json").read_text())["best"]
    values = {row["iter"]: row["loss/val"] for row in rows(folder, "moved")
              if row["iter"] > 40 and "loss/val" in row}
    assert len(values) >= 3 and (best["iter"], best["loss/val"]) == min(
        values.items(), key=lambda pair: pair[1])
    assert checkpoint.pointer(folder / "moved", "best").name == f"step_{best['iter']:08d}"
    assert easy.exists()  # the best one on the other text is kept


def test_a_run_that_goes_on_with_another_batch_reads_on(folder, tmp_path):
    """
    It reads each window of an epoch once, whatever its batch sizes. Other data are read from their
    beginning.
    """
    script = tmp_path / "reading.py"
    script.write_text(f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
                      "import train\n"
                      "from configurator import configure\n"
                      "step = train.train_step\n"
                      "def noted(t, number, *args):\n"
                      "    print('read', *t.dataset.windows(number)[0], flush=True)\n"
                      "    return step(t, number, *args)\n"
                      "train.train_step = noted\n"
                      "sys.exit(train.start(configure(vars(train))))\n")
    (folder / "few.txt").write_text((folder / "my.txt").read_text()[:2800])
    (folder / "other.txt").write_text((folder / "my.txt").read_text()[3000:5800])

    def windows(*args):
        done = forked.run(
            [script, *TINY, "--schedule=constant", "--init_from=force", "--out_dir=reading", *args],
            folder, environment())
        assert done.returncode == 0, done.stderr
        return [int(start) for line in done.stdout.splitlines() if line.startswith("read")
                for start in line.split()[1:]]

    n = prepare.load(train.prepare(
        folder / "few.txt", "byte", cache=folder / "cache")).meta["train_tokens"] // 32
    found = []
    for steps, batch in (3, 4), (5, 8), (9, 2), (100, 6):
        steps = min(steps, 9 + -(-(2 * n - len(found)) // 6))
        found += windows("--data=few.txt", f"--max_iters={steps}", f"--batch_size={batch}")
    assert len(set(found[:n])) == len(set(found[n:2 * n])) == n and 2 * n <= len(found) < 2 * n + 6
    assert rows(folder, "reading")[-1]["epoch"] == pytest.approx(len(found) / n, rel=0.02)
    other = windows("--data=other.txt", f"--max_iters={steps + 2}", "--batch_size=3")
    assert other == windows("--data=other.txt", "--max_iters=2", "--batch_size=3",
                            "--out_dir=reading_other")
    assert rows(folder, "reading")[-1]["tokens"] == 32 * (len(found) + 6)


def test_an_older_checkpoint_without_counters_goes_on_where_it_was():
    before = {"batch_size": 4, "gradient_accumulation_steps": 2, "max_seq_len": 32}
    assert resume.with_counters({"step": 5, "fixed": before}) == {
        "step": 5, "tokens": 1280, "sequences": 40, "fixed": before}
    assert resume.with_counters(
        {"step": 5, "tokens": 7, "sequences": 3, "fixed": before})["tokens"] == 7


def test_what_cannot_be_exported_is_refused_before_the_first_step(folder):
    fault = ("import functools, train\n"
             "like = train.ModelArgs(rope_factors=(1, 1, 2, 2, 4, 4, 8, 8), rope_attention=1.1)\n"
             "args = functools.partial(train.ModelArgs.of, imported=like)\n"
             "train.BUILD = train.BUILD._replace(model_args=args)\n")
    done = faulty(folder, folder, fault, "--data=my.txt", "--out_dir=unexportable")
    assert done.returncode == 2 and "GGUF can't store how llama scales" in done.stderr, done.stderr
    for words, told in (
            (["--rope_theta=1e39"], "--rope_theta=1e39: rope_theta is '1e39', expected"),
            (["--max_iters=1e10"], "max_iters=1e+10")):
        done = run(folder, "--data=my.txt", "--out_dir=unexportable", "--max_iters=2", *words)
        assert done.returncode == 2, done.stderr
        assert told in done.stderr, done.stderr
        assert done.stderr.count("error: ") == 1, done.stderr
        assert "Traceback" not in done.stderr
        assert "iter " not in done.stdout
        assert not (folder / "unexportable").exists()


def faulty(folder, tmp_path, fault, *args):
    """Train 20 steps in a process that executes the lines of `fault` first."""
    script = tmp_path / "faulty.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "import os, resource, shutil, train\n"
        "from pathlib import Path\n"
        "from configurator import configure, fail\n"
        "step, export, load = train.train_step, train.export_model, train.checkpoint.load\n"
        f"{fault}\n"
        "sys.exit(train.start(configure(vars(train))))\n")
    return forked.run([script, *TINY, "--data=my.txt", "--max_iters=20", *args], folder,
                      environment())


def test_what_fails_in_a_writer_ends_the_run_or_its_exit_code_tells_of_it(folder, tmp_path):
    fault = "def failing(*args, **named): {}\ntrain.export_model = failing"
    done = faulty(folder, tmp_path, fault.format("fail('no such model')"), "--out_dir=writer_fails")
    assert done.returncode == 2
    assert done.stderr == "error: no such model\n"
    assert "finished" not in done.stdout
    assert checkpoint.newest(folder / "writer_fails").name == "step_00000010"
    done = faulty(folder, tmp_path, fault.format("raise KeyError('a fault')"),
                  "--out_dir=writer_raises")
    assert done.returncode == 1
    assert "KeyError: 'a fault'" in done.stderr
    assert "finished" not in done.stdout
    done = faulty(folder, tmp_path, fault.format("raise MemoryError"), "--out_dir=no_memory")
    assert done.returncode == 2
    assert "could not be saved (there is not enough memory)" in done.stdout
    assert not done.stderr
    assert ("the model of iter 20 could not be written: free disk space"
            in done.stdout.splitlines()[-1])
    done = run(folder, "--data=my.txt", "--max_iters=20", "--out_dir=no_memory")
    assert done.returncode == 2
    assert "model.gguf is missing, write it with: python export.py no_memory" in done.stdout


def test_saves_for_which_there_is_no_memory_cost_warnings_and_the_exit_code(folder, tmp_path):
    """From step 12 on the process may take another 64 MiB of memory, and a save asks for 1 GiB."""
    fault = (
        "def limited(t, number, *args):\n"
        "    if number == 12:\n"
        "        used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "        resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20),) * 2)\n"
        "    return step(t, number, *args)\n"
        "def hungry(*args): bytearray(1 << 30)\n"
        "train.train_step, train.checkpoint.write_files = limited, "
        "lambda *a, write=train.checkpoint.write_files: "
        "(a[2].step > 12 and hungry(), write(*a))\n")
    done = faulty(folder, tmp_path, fault, "--out_dir=limited")
    assert done.returncode == 2, done.stderr
    assert done.stdout.count("could not be saved (there is not enough memory)") == 1, done.stderr
    assert ("the checkpoint of iter 20 could not be saved" in done.stdout
            or "or saved" in done.stdout.splitlines()[-1])
    assert os.listdir(folder / "limited/checkpoints") == ["step_00000010"]
    assert "Traceback" not in done.stderr


def test_a_folder_that_is_deleted_while_a_run_trains_in_it_is_made_anew(folder, tmp_path):
    fault = ("def deleting(t, number, *args):\n"
             "    if number == 12: shutil.rmtree('deleted')\n"
             "    return step(t, number, *args)\n"
             "train.train_step = deleting\n")
    done = faulty(folder, tmp_path, fault, "--out_dir=deleted")
    assert "deleted was deleted or moved while this process trains in it" in done.stdout, (
        done.stdout + done.stderr)
    assert [row["iter"] for row in rows(folder, "deleted")] == [0, 5, 10, 15, 20]
    there = {path.name for path in (folder / "deleted").iterdir()} - {"best", "last.gguf"}
    assert there == {
        "checkpoints", "config.json", "latest", "log.jsonl", "model.gguf", "result.json",
        "trainer.json"
    }
    assert done.returncode == (
        0 if export.exported_step(folder / "deleted/model.gguf") == 20 else 2)


def test_sizes_are_never_changed_by_force(folder, reference):
    for change, words in [("--dim=64", "dim=32, now it is 64"), ("--n_heads=4", "n_heads=2, now"),
                          ("--optimizer=adamw", "optimizer=muon, now")]:
        done = run(folder, *reference[0], "--out_dir=whole", "--max_iters=50", "--init_from=force",
                   change)
        assert done.returncode == 2 and words in done.stderr and done.stderr.count("\n") == 1
        assert "--init_from=force" not in done.stderr


def test_foreign_weights_are_one_line(capsys):
    model = torch.nn.Linear(2, 3, bias=False)
    for weights in ({"other": torch.zeros(3, 2)}, {"weight": torch.zeros(2, 3)}):
        with pytest.raises(SystemExit) as end:
            distributed.load_weights(model, weights)
        err = capsys.readouterr().err
        assert end.value.code == 2 and "parameter" in err and err.count("\n") == 1


def start(folder, *args, stdout=subprocess.PIPE):
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command(*args), cwd=folder, env=env, stdout=stdout,
                            stderr=subprocess.STDOUT, text=True)


def test_sigusr1_saves_and_goes_on(folder):
    process = start(folder, "--data=my.txt", "--max_iters=200", "--eval_interval=1000",
                    "--out_dir=usr1")
    wait_for_row(folder, "usr1", 10, process)
    assert not (folder / "usr1/latest").exists()
    process.send_signal(signal.SIGUSR1)
    end = time.time() + 30
    while not (folder / "usr1/latest").exists():
        assert process.poll() is None and time.time() < end
        time.sleep(0.01)
    assert process.wait() == 0 and rows(folder, "usr1")[-1]["iter"] == 200


def test_a_time_limit_saves_and_ends(folder, tmp_path):
    """
    The total of the progress bar, which only a terminal shows, is the number of steps that there is
    time for.
    """
    script = tmp_path / "terminal.py"
    script.write_text(f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
                      "import train\n"
                      "sys.stderr.isatty = lambda: True\n"
                      "from configurator import configure\n"
                      "sys.exit(train.start(configure(vars(train))))\n")
    args = [
        "--data=my.txt", "--max_iters=100000", "--out_dir=limit", "--eval_interval=100000",
        "--log_interval=1"
    ]
    done = forked.run([script, *TINY, *args, "--max_minutes=0.04", "--json"], folder, environment())
    assert done.returncode == 0, done.stderr
    assert "the same command continues from here" in done.stdout, done.stderr
    *said, last = done.stdout.splitlines()
    assert json.loads(last) == result_of(folder, "limit")
    assert '"json"' not in (folder / "limit/config.json").read_text()
    assert result_of(folder, "limit")["ended_by"] == "max_minutes"
    assert 2.4 <= result_of(folder, "limit")["seconds"] < 10
    step = checkpoint.load(checkpoint.newest(folder / "limit"), "train")["state"]["step"]
    assert 0 < step < 100000
    assert step / 10 < int(re.findall(r"\| \d+/(\d+) \[", done.stderr)[-1]) < 10 * step
    assert said[-1].endswith("write with it: ./run limit/model.gguf -i The")
    assert (export.exported_step(folder / "limit/model.gguf") == step
            == rows(folder, "limit")[-1]["iter"])
    assert rows(folder, "limit")[-1]["loss/val"] < rows(folder, "limit")[0]["loss/val"]
    rates = [row["lr"] for row in rows(folder, "limit") if "lr" in row]
    assert rates[-1] < 0.3 * max(rates)  # the schedule follows the clock


def test_a_second_ctrl_c_leaves_out_the_evaluation_but_not_the_model(folder, tmp_path):
    """The first Ctrl-C comes during the first step, the second in the evaluation at the stop."""
    program = (f"import os, signal, sys; sys.path.insert(0, {str(ROOT)!r})\n"
               "import train\n"
               "from configurator import configure\n"
               "assess, step = train.assess, train.train_step\n"
               "def interrupted(*args):\n"
               "    os.kill(os.getpid(), signal.SIGINT)\n"
               "    return assess(*args)\n"
               "def last(*args):\n"
               "    train.assess = interrupted\n"
               "    os.kill(os.getpid(), signal.SIGINT)\n"
               "    return step(*args)\n"
               "train.train_step = last\n"
               "sys.exit(train.start(configure(vars(train))))\n")
    (tmp_path / "hurried.py").write_text(program)
    done = subprocess.run(
        [sys.executable, tmp_path / "hurried.py", *TINY, "--data=my.txt", "--out_dir=hurried"],
        cwd=folder, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert "interrupted again: the model is not evaluated" in done.stdout, done.stderr
    assert done.stdout.splitlines()[-1].endswith(
        "continues from here; write with it: ./run hurried/model.gguf -i The")
    assert export.exported_step(folder / "hurried/model.gguf") == 1
    assert checkpoint.newest(folder / "hurried").name[-1] == "1"


def test_a_time_limit_that_was_cut_short_goes_on_and_one_that_was_reached_begins_anew():
    fresh = progress.session_clock({"seconds": 0.0, "limit": 0.0, "end": float("inf")}, 1.0)
    assert fresh == {"seconds": 0.0, "limit": 60.0, "end": 60.0}
    assert progress.session_clock(fresh | {"seconds": 20.0}, 1.0)["end"] == 60
    assert progress.session_clock(fresh | {"seconds": 60.0}, 1.0)["end"] == 120
    assert progress.session_clock(fresh | {"seconds": 61.0}, 1.0)["end"] == 121
    assert progress.session_clock(fresh | {"seconds": 20.0}, 2.0)["end"] == 140
    assert progress.session_clock(fresh, 0.0)["end"] == float("inf")


@pytest.mark.slow
def test_a_supervised_run_survives_kills(folder, reference):
    args = [*reference[0], "--out_dir=supervised"]
    run_folder.claim(folder / "supervised")
    run_folder.release()
    (folder / "supervised/log.jsonl").write_text('{"iter": 7}\n')
    process = start(folder, *args, "--supervise=True", "--init_from=scratch")
    for step in (15, 25):
        wait_for_row(folder, "supervised", step, process)
        os.kill(child_of(process), signal.SIGKILL)
    out = process.communicate()[0]
    assert process.returncode == 0 and out.count("supervise: the training ended with code -9") == 2
    assert losses(folder, "supervised") == losses(folder, "whole")
    # The old log is set aside once, not at each restart.
    assert (folder / "supervised.old1/log.jsonl").read_text() == '{"iter": 7}\n'
    assert not (folder / "supervised.old2").exists()


def child_of(process):
    """Return the process id of the trainer under a supervisor, once there is one."""
    end = time.time() + 60
    while not (found := subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True,
                                       text=True).stdout.split()):
        assert process.poll() is None and time.time() < end
        time.sleep(0.01)
    return int(found[0])


@pytest.fixture
def supervised(tmp_path):
    """
    A supervisor in a session of its own. Each child prints its arguments and each Ctrl-C, and ends
    with code 3.
    """
    script = tmp_path / "program.py"
    script.write_text(
        "import signal, sys, time\n"
        "if '--supervise=False' in sys.argv:\n"
        "    signal.signal(signal.SIGINT, lambda *_: print('interrupted', flush=True))\n"
        "    print('child', *sys.argv[1:], flush=True)\n"
        "    time.sleep(0.5)\n"
        "    sys.exit(3)\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "from engine.training import supervisor\n"
        "supervisor.supervise('--more')\n")
    process = subprocess.Popen([sys.executable, script, "--supervise=True"], stdout=subprocess.PIPE,
                               text=True, start_new_session=True)
    yield process
    process.kill()


def lines_until(process, words):
    lines = [process.stdout.readline()]
    while lines[-1] and words not in lines[-1]:
        lines.append(process.stdout.readline())
    return lines


@pytest.mark.slow
def test_a_supervisor_ends_at_once_when_told_to(supervised):
    lines = lines_until(supervised, "restart 4 of 10 in 8 s")
    since = time.time()
    supervised.terminate()
    assert supervised.wait() == 3
    assert time.time() - since < 7  # s: a process with torch in it may take 3 to end
    assert [line.split() for line in lines[::2]] == [
        ["child", "--supervise=True", "--supervise=False", "--more"]] * 4


def test_ctrl_c_at_a_terminal_reaches_a_supervised_program_once(supervised):
    lines_until(supervised, "child")
    os.killpg(supervised.pid, signal.SIGINT)  # as a terminal does: to all foreground processes
    assert supervised.communicate()[0].split() == ["interrupted"] and supervised.returncode == 3


def test_a_supervisor_whose_program_is_always_killed_ends_with_1(tmp_path):
    """Exit code 2 would mean that the settings are wrong."""
    script = tmp_path / "program.py"
    script.write_text("import os, signal, sys\n"
                      "if '--supervise=False' in sys.argv:\n"
                      "    os.kill(os.getpid(), signal.SIGKILL)\n"
                      f"sys.path.insert(0, {str(ROOT)!r})\n"
                      "from engine.training import supervisor\n"
                      "supervisor.MAX_RESTARTS = 1\n"
                      "supervisor.supervise()\n")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout.count("ended with code -9; restart 1 of 1 in 1 s") == 1, (
        done.stdout + done.stderr)


def kill_processes(folder, out, steps, *args):
    """
    Train with two processes under torchrun and kill one of them, by turns, after each step of
    `steps`. Return the seconds from each kill to the next step taken.
    """
    words = command(*args, f"--out_dir={out}", "--log_interval=1", torchrun=2,
                    max_restarts=len(steps))
    # A file, because torch writes more at each restart than a pipe holds.
    complaints = folder / f"{out}.err"
    with open(complaints, "w") as f:
        process = subprocess.Popen(words, cwd=folder, env=os.environ | {"OMP_NUM_THREADS": "1"},
                                   stdout=subprocess.PIPE, stderr=f, text=True)
    pids, seconds, started, killed = [], [], False, None
    for line in process.stdout:
        started |= line.startswith("train:")
        if not (started and line.startswith("iter")):
            continue
        if killed:
            seconds.append(time.time() - killed)
            killed = None
        if len(seconds) < len(steps) and int(line.split()[1]) >= steps[len(seconds)]:
            found = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True,
                                   text=True).stdout.split()
            pids += [int(pid) for pid in found if int(pid) not in pids]
            os.kill(pids[-1 - len(seconds) % 2], signal.SIGKILL)
            started, killed = False, time.time()
    assert process.wait() == 0, complaints.read_text()
    assert len(seconds) == len(steps) and len(pids) == 2 * len(steps)
    return seconds


@pytest.mark.slow
def test_torchrun_goes_on_after_one_of_its_processes_is_killed(folder):
    args = ["--data=my.txt", "--batch_size=8", "--max_iters=30", "--dropout=0.2", "--fsdp=True"]
    for done in ranks(folder, 2, *args, "--out_dir=unkilled", "--log_interval=1"):
        assert done.returncode == 0, done.stderr
    kill_processes(folder, "killed", [17], *args)
    assert losses(folder, "killed") == losses(folder, "unkilled")
    a, b = weights(folder, "killed"), weights(folder, "unkilled")
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("kind, able, expected", [
    ("auto", (8, 0), torch.bfloat16), ("auto", (7, 5), torch.float16),
    ("auto", (6, 1), torch.float32), ("float32", (9, 0), torch.float32),
    ("bfloat16", (7, 5), torch.bfloat16), ("float16", (9, 0), torch.float16)])
def test_half_precision_where_the_gpu_computes_in_it(monkeypatch, kind, able, expected):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: able)
    config = SimpleNamespace(dtype=kind, compile=False)
    assert train.hardware.use_dtype(config, torch.device("cuda"), 64) == expected


@pytest.mark.parametrize("kind, compiles, has_amx, expected", [
    ("auto", False, True, "bf32"), ("auto", False, False, "float32"),
    ("auto", True, True, "float32"), ("bf32", False, False, "bf32"),
    ("float32", False, True, "float32"), ("bfloat16", False, True, "bfloat16")])
def test_products_of_a_cpu(monkeypatch, kind, compiles, has_amx, expected):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has_amx)
    cpu, config = torch.device("cpu"), SimpleNamespace(dtype=kind, compile=compiles)
    amp_dtype = train.hardware.use_dtype(config, cpu, 128)
    assert amp_dtype == (torch.bfloat16 if expected == "bfloat16" else torch.float32)
    assert train.hardware.dtype_name(amp_dtype, cpu) == expected
    assert torch.get_float32_matmul_precision() == ("medium" if expected == "bf32" else "highest")


@pytest.mark.parametrize("kind, compiles, device", [
    ("bf32", True, "cpu"), ("bf32", False, "cuda"), ("bf16", False, "cpu")])
def test_products_that_a_device_lacks(capsys, kind, compiles, device):
    with pytest.raises(SystemExit):
        train.hardware.use_dtype(SimpleNamespace(dtype=kind, compile=compiles),
                                 torch.device(device), 64)
    assert f"--dtype={kind}" in capsys.readouterr().err


def test_threads_share_no_products_of_bf32_in_a_narrow_model(monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    for threads, dim, expected in (1, 64, "bf32"), (2, 64, "float32"), (2, 128, "bf32"):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert train.hardware.default_dtype(torch.device("cpu"), dim, False) == expected


def test_one_process_alone_computes_the_largest_stacks():
    stack = torch.ones(2, distributed.MIN_SPLIT)
    assert torch.equal(distributed.split_across_ranks(lambda part: 2 * part, stack), 2 * stack)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_orthogonalised_matrices_have_singular_values_near_one(dtype):
    torch.manual_seed(0)
    for shape in ((3, 32, 96), (2, 96, 32), (1, 48, 48)):
        g = torch.randn(shape)
        u, exact = optim.orthogonalize(g, dtype), torch.linalg.svd(g, full_matrices=False)
        assert torch.linalg.svdvals(u).max() < 1.3
        nearest = exact.U @ exact.Vh
        assert (u * nearest).sum() > 0.95 * u.norm() * nearest.norm()


def test_float16_learns_and_each_overflow_costs_a_step_and_halves_the_factor(folder):
    """On a CPU, where float16 is slow. A resumed run continues with the saved scale factor."""
    args = [
        "--data=my.txt", "--log_interval=1", "--spike_z=0", "--dtype=float16", "--out_dir=float16",
        "--eval_interval=20", "--sample_prompt=T", "--peak_tflops=0.1"
    ]
    assert run(folder, *args, "--max_iters=20").returncode == 0
    found = [row["loss/val"] for row in rows(folder, "float16") if "loss/val" in row]
    scale = checkpoint.load(checkpoint.newest(folder / "float16"), "train")["state"]["scale"]
    skipped = rows(folder, "float16")[-1]["grad/skipped"]
    assert found[-1] < found[0] - 0.7
    assert scale["factor"] == 2.0 ** (16 - skipped) and 0 < scale["steps"] <= 20 - skipped
    assert run(folder, *args, "--max_iters=21").returncode == 0
    assert rows(folder, "float16")[-1]["grad/skipped"] == skipped
    assert rows(folder, "float16")[-1]["iter"] == 21


def test_without_a_limit_for_spikes_only_what_is_no_number_is_refused():
    detector = optim.SpikeDetector(0.0)
    assert not any(detector.refuses(1.0, 1.0) for _ in range(150))
    assert not detector.refuses(9.0, 1e6)
    assert detector.refuses(math.nan, 1.0) and detector.refuses(1.0, math.inf)


def test_the_loss_scale_halves_and_doubles():
    scale = optim.LossScale(True)
    scale.update(math.inf), scale.update(math.nan)
    assert scale.factor == 2.0 ** 14
    for _ in range(scale.GROWTH_INTERVAL):
        scale.update(1.0)
    assert scale.factor == 2.0 ** 15
    weight = torch.nn.Parameter(torch.ones(2, 2))
    weight.grad = torch.full((2, 2), 2.0 ** 15)
    scale.divide([weight.grad])
    assert (weight.grad == 1).all()
    off = optim.LossScale(False, saved=scale.state)
    off.update(math.inf)
    assert off.factor == 1


def test_supervision_does_not_repeat_a_mistake(folder):
    done = run(folder, "--data=missing.txt", "--supervise=True")
    assert done.returncode == 2 and "restart" not in done.stdout


def test_a_tied_matrix_is_saved_once_and_old_checkpoints_load(folder, reference, tmp_path):
    saved = checkpoint.load(checkpoint.newest(folder / "whole"))
    kept = sum(w.numel() * w.element_size() for w in saved["model"].values())
    model = ModelArgs(**saved["args"]).build()
    size = (checkpoint.newest(folder / "whole") / "model.pt").stat().st_size
    assert model.args.tied and kept == 4 * costs.num_params(model.args) and size < kept + 20_000
    old = model.state_dict()
    assert "output.weight" in old
    other = model.args.build()
    for weights in (old, saved["model"]):
        distributed.load_weights(other, weights)
        assert all(torch.equal(w, weights.get(name, weights["tok_embeddings.weight"]))
                   for name, w in other.state_dict().items())


def test_activation_checkpointing_gives_the_same_losses(folder, reference):
    args, _ = reference
    done = run(folder, *args, "--out_dir=again", "--activation_checkpointing=True")
    assert done.returncode == 0, done.stderr
    assert losses(folder, "again") == losses(folder, "whole")


def test_attention_across_documents_is_another_run(folder):
    args = ["--data=stories:200", "--vocab_source=byte", "--max_iters=10"]
    for out, across in (("apart", []), ("across", ["--document_mask=False"])):
        done = run(folder, *args, *across, f"--out_dir={out}")
        assert done.returncode == 0, done.stderr
        assert rows(folder, out)[-1]["loss/val"] < 5.5
    assert losses(folder, "apart") != losses(folder, "across")
    done = run(folder, *args, "--out_dir=across", "--max_iters=12", "--document_mask=True")
    assert done.returncode == 2 and "document_mask=False" in done.stderr


def test_adamw_is_that_of_pytorch():
    torch.manual_seed(0)
    ours, theirs = ([torch.nn.Parameter(torch.ones(*shape)) for shape in ((5, 7), (3,), (2,))]
                    for _ in range(2))
    adamw, reference = ([{"params": p[:1], "weight_decay": 0.1},
                         {"params": p[1:], "weight_decay": 0.0}] for p in (ours, theirs))
    adamw, reference = (optim.AdamW(adamw, 1e-2, (0.9, 0.95)),
                        torch.optim.AdamW(reference, 1e-2, (0.9, 0.95)))
    for _ in range(5):
        for a, b in zip(ours[:2], theirs[:2]):  # the third has no gradient
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        adamw.step()
        reference.step()
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(ours, theirs))


def test_one_process_imports_neither_the_compiler_nor_sharding():
    """Importing the compiler and sharding takes 1.5 seconds and 120 MB."""
    code = (
        "import sys, torch, train; from model import ModelArgs; "
        "from engine.training import costs; from optim import OptimizerConfig, make_optimizer; "
        "model = ModelArgs().build(); costs.num_params(model.args); "
        "opt = make_optimizer(model, OptimizerConfig('muon', 1e-3)); "
        "tokens = torch.zeros(1, 4, dtype=torch.long); "
        "model(tokens, tokens)[1].backward(); opt.step(); opt.zero_grad(); "
        "print([name for name in ('torch._dynamo', 'torch.distributed.fsdp') "
        "if name in sys.modules])")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"), reason="not glibc")
def test_memory_once_used_is_not_asked_for_again():
    # The last of 30 tries counts: small allocations find their place first.
    code = ("import resource, torch; from engine.training import hardware; hardware.keep_memory(); "
            "pages = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt; "
            "print([-pages() + (torch.ones(2 ** 24), pages())[1] for _ in range(30)][-1])")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert int(done.stdout) < 1000, done.stderr  # 64 MiB are 16,384 pages


def experts():
    """
    Return a model whose blocks also have a stack of matrices (E, R, C) and the kernel (D, 1, 3) of
    a convolution.
    """
    from model import Transformer
    model = Transformer(ModelArgs(dim=8, n_layers=2, n_heads=2, vocab_size=11, max_seq_len=8))
    for layer in model.layers:
        layer.experts = torch.nn.Parameter(torch.randn(3, 4, 8))
        layer.mixing = torch.nn.Conv1d(8, 8, 3, groups=8)
    return model


def test_muon_takes_matrices_and_adamw_what_has_more_dimensions_by_name(capsys):
    optim.say_once.cache_clear()
    model = experts()
    opt = optim.make_optimizer(model, optim.OptimizerConfig("muon", 0.01))
    # The checks make another optimizer; the lines are printed once.
    optim.make_optimizer(model, optim.OptimizerConfig("muon", 0.01))
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 4
    assert said[0].startswith("optimizer: AdamW updates layers.0.experts, ")
    assert "(3, 4, 8)" in said[0]
    assert "layers.0.mixing.weight" in said[1] and "(8, 1, 3)" in said[1]
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    opt.step()
    assert all(not torch.equal(p, before[name]) for name, p in model.named_parameters())
    muon = {p for group in opt.optimizers[0].param_groups for p in group["params"]}
    assert muon == {p for name, p in model.named_parameters()
                    if name.startswith("layers.") and p.dim() == 2}
    again = optim.make_optimizer(model, optim.OptimizerConfig("muon", 0.01))
    again.load_state_dict(opt.state_dict())
    assert again.state_dict().keys() == opt.state_dict().keys()
    optim.make_optimizer(model, optim.OptimizerConfig("adamw", 0.01))
    assert not capsys.readouterr().out


class Lion(torch.optim.Optimizer):
    """
    Lion (https://arxiv.org/abs/2302.06675) that counts its steps in plain numbers: in the state of
    each parameter and in its group.
    """

    def __init__(self, params, lr, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params,
                         {"lr": lr, "betas": betas, "weight_decay": weight_decay, "updates": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["updates"] += 1
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["step"], state["exp_avg"] = 0, torch.zeros_like(p)
                state["step"] += 1
                update = state["exp_avg"].lerp(p.grad, 1 - group["betas"][0]).sign()
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(update, alpha=-group["lr"] / (state["step"] + group["updates"]))
                state["exp_avg"].lerp_(p.grad, 1 - group["betas"][1])


OTHERS = {"lion": Lion, "nadam": functools.partial(torch.optim.NAdam, decoupled_weight_decay=True),
          "sgd": functools.partial(torch.optim.SGD, momentum=0.9, nesterov=True)}


@pytest.mark.parametrize("name", OTHERS)
def test_an_optimizer_of_somebody_else_is_a_row_and_its_state_is_resumed(
        monkeypatch, tmp_path, name):
    monkeypatch.setitem(optim.OPTIMIZERS, name, OTHERS[name])
    args = ModelArgs(dim=16, n_layers=1, n_heads=2, vocab_size=10, max_seq_len=8)
    config = optim.OptimizerConfig(name, 0.01, embedding_lr_scale=2.0)
    tokens = torch.arange(9)[None]

    def take_steps(model, opt, steps):
        losses = []
        for step in steps:
            losses.append(model(tokens[:, :-1], tokens[:, 1:])[1])
            losses[-1].backward()
            opt.set_rate(0.01 / (1 + step))
            opt.step()
            opt.zero_grad()
        return [loss.item() for loss in losses]

    torch.manual_seed(0)
    model = args.build()
    opt, norms = optim.make_optimizer(model, config), instruments.UpdateNorms(model)
    assert [group["weight_decay"] for group in opt.param_groups] == [0.1, 0.0, 0.1]
    take_steps(model, opt, range(3))
    torch.save({"model": model.state_dict(), "optimizer": opt.state_dict()}, tmp_path / "saved")
    saved = torch.load(tmp_path / "saved", weights_only=True)
    assert all(isinstance(value, torch.Tensor) for value in saved["optimizer"].values())
    losses = take_steps(model, opt, range(3, 8))
    assert losses[-1] < losses[0] - 0.01
    again = args.build()
    again.load_state_dict(saved["model"])
    opt_again = optim.make_optimizer(again, config)
    opt_again.load_state_dict(saved["optimizer"])
    assert take_steps(again, opt_again, range(3, 8)) == losses
    assert all(torch.equal(a, b)
               for a, b in zip(model.parameters(), again.parameters(), strict=True))
    for a, b in zip(opt.param_groups, opt_again.param_groups, strict=True):
        assert a.keys() == b.keys() and all(a[key] == b[key] for key in a if key != "params")
    norms.wanted = True
    model(tokens[:, :-1], tokens[:, 1:])[1].backward()
    opt.step(norms)
    assert norms.take()["norm/update/layers.0"] > 0


def test_a_state_that_no_checkpoint_can_hold_is_refused_by_name():
    with pytest.raises(TypeError, match="keeps a list as 'history' of layers.0.weight"):
        optim.flatten("layers.0.weight", {"history": []})


def test_a_saved_state_of_a_parameter_that_no_optimizer_has_is_refused():
    model = ModelArgs(dim=16, n_layers=1, n_heads=2, vocab_size=10, max_seq_len=8).build()
    opt = optim.CombinedOptimizer(model, torch.optim.SGD([model.norm.weight], 0.1, momentum=0.9))
    with pytest.raises(ValueError, match="no optimizer updates tok_embeddings.weight"):
        opt.load_state_dict({"tok_embeddings.weight.momentum_buffer": torch.ones(10, 16)})


def test_an_optimizer_without_a_row_is_refused_before_the_data_are_prepared(folder):
    done = run(folder, "--data=missing.txt", "--optimizer=lion")
    assert done.returncode == 2 and "optimizer is 'lion', expected muon or adamw" in done.stderr


@pytest.mark.slow
def test_an_optimizer_of_somebody_else_trains_and_resumes_alone_and_sharded(folder, tmp_path):
    """One run is trained alone; two sharded processes begin another one, which one continues."""
    script = tmp_path / "nadam.py"
    script.write_text(f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
                      "import torch, optim, train\n"
                      "from configurator import configure\n"
                      "from engine.training import distributed\n"
                      "optim.OPTIMIZERS['nadam'] = torch.optim.NAdam\n"
                      "distributed.close(train.start(configure(vars(train))))\n")
    args = [
        *TINY, "--data=my.txt", "--batch_size=8", "--optimizer=nadam", "--schedule=constant",
        "--eval_iters=0", "--dtype=float32"
    ]

    def train_nadam(out, steps, *more, torchrun=0):
        words = command(torchrun=torchrun)
        words = [*words[:words.index(str(ROOT / "train.py"))], script, *args, f"--out_dir={out}",
                 f"--max_iters={steps}", *more]
        done = subprocess.run(words, cwd=folder, env=environment(), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    train_nadam("nadam", 10)
    train_nadam("nadam_cut", 5)
    train_nadam("nadam_cut", 10)
    train_nadam("nadam_sharded", 5, "--fsdp=True", torchrun=2)
    train_nadam("nadam_sharded", 10)
    for name, weight in weights(folder, "nadam").items():
        assert torch.equal(weight, weights(folder, "nadam_cut")[name]), name
        assert torch.allclose(weight, weights(folder, "nadam_sharded")[name], atol=1e-5), name


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True])
def test_a_dry_run_of_two_processes_resumes_in_the_first_ones_folder(folder, sharded):
    words = [*TINY, "--data=my.txt", "--batch_size=4", "--gradient_accumulation_steps=2",
             "--dry_run=True", f"--fsdp={sharded}", "--out_dir=dry"]
    done = run(folder, *words, torchrun=2)
    assert done.returncode == 0 and "dry run passed: two steps " in done.stdout, done.stderr
    assert not list(folder.glob("dry*"))


GATED = {
    "        self.w3 = nn.Linear(args.dim, args.hidden_dim, bias=False)\n":
        "        self.w3 = nn.Linear(args.dim, args.hidden_dim, bias=False)\n"
        "        self.gate = nn.Linear(args.dim, args.dim, bias=False)\n",
    "        return self.w2(ops.swiglu(self.w1(x), self.w3(x)))\n":
        "        return torch.sigmoid(self.gate(x)) * "
        "self.w2(ops.swiglu(self.w1(x), self.w3(x)))\n"
}


@pytest.mark.slow
def test_a_block_with_one_more_matrix_trains_and_no_model_file_loses_it(folder, tmp_path):
    """Only model.py changes. All else counts, checks, trains, saves and resumes that model."""
    tree = tmp_path / "tree"
    for name in subprocess.check_output(["git", "ls-files", "*.py", "engine"], cwd=ROOT,
                                        text=True).splitlines():
        if not name.startswith(("tests/", "bench/")):
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tree / name)
    text = (tree / "model.py").read_text()
    for before, after in GATED.items():
        assert text.count(before) == 1
        text = text.replace(before, after)
    (tree / "model.py").write_text(text)

    def call(script, *words):
        return subprocess.run([sys.executable, tree / script, *words], cwd=folder,
                              env=environment(), capture_output=True, text=True)

    sizes = [word for word in TINY if not word.startswith("--checks")]
    counts = []
    for where in tree, ROOT:
        shown = subprocess.run([sys.executable, where / "model.py", *sizes], cwd=folder,
                               env=environment(), capture_output=True, text=True)
        counts.append(int(re.match(r"parameters +([\d,]+) ", shown.stdout)[1].replace(",", "")))
    assert counts[0] - counts[1] == 2 * 32 * 32
    refused = call("train.py", *sizes, "--data=my.txt", "--max_iters=6", "--out_dir=refused")
    assert refused.returncode == 2
    assert "layers.0.feed_forward.gate.weight and 1 more would be lost" in refused.stderr
    assert "--checks=-export" in refused.stderr and not list((folder / "refused").rglob("*.pt"))
    train_gated = ["train.py", *sizes, "--data=my.txt", "--checks=-export"]
    whole = call(*train_gated, "--max_iters=10", "--out_dir=gated")
    assert whole.returncode == 0, whole.stderr
    assert ("warning: model files have no name for layers.0.feed_forward.gate.weight"
            in whole.stdout + whole.stderr)
    assert re.search(r"checks: 1\d passed", whole.stdout), whole.stdout
    assert whole.stdout.splitlines()[-1].startswith("finished: best validation loss")
    assert "./run" not in whole.stdout.splitlines()[-1]
    assert not list((folder / "gated").glob("*.gguf"))
    begun = call(*train_gated, "--max_iters=4", "--out_dir=gated_cut")
    # The resumed run keeps --checks=-export.
    resumed = call("train.py", *sizes, "--data=my.txt", "--max_iters=10", "--out_dir=gated_cut")
    assert begun.returncode == resumed.returncode == 0, resumed.stderr
    before, after = weights(folder, "gated"), weights(folder, "gated_cut")
    assert "layers.1.feed_forward.gate.weight" in before
    assert before["layers.1.feed_forward.gate.weight"].std() > 0
    again = call("train.py", *sizes, "--data=my.txt", "--max_iters=10", "--out_dir=gated")
    assert again.returncode == 0 and "this run is finished" in again.stdout + again.stderr
    exported = call("export.py", "gated", "--path=gated.gguf")
    assert exported.returncode == 2
    assert "layers.0.feed_forward.gate.weight and 1 more would be lost" in exported.stderr
    assert not (folder / "gated.gguf").exists() and before.keys() == after.keys()


@pytest.mark.parametrize("shape", [(3, 4, 8), (8,), (), (2, 3, 4, 5)])
def test_muon_refuses_other_parameters_than_matrices(shape):
    with pytest.raises(ValueError,
                       match="Muon takes parameters of two dimensions, found the shape"):
        optim.Muon(
            [torch.nn.Parameter(torch.ones(4, 4)), torch.nn.Parameter(torch.ones(shape))], 0.1, 0.1)


def test_a_model_without_blocks_of_these_names_is_trained_by_adamw(capsys):
    optim.say_once.cache_clear()
    opt = optim.make_optimizer(torch.nn.Linear(4, 4), optim.OptimizerConfig("muon", 0.01))
    assert [type(one) for one in opt.optimizers] == [optim.AdamW]
    assert "there are none" in capsys.readouterr().out


def test_muon_allocates_its_momentum_once(monkeypatch):
    weight = torch.nn.Parameter(torch.randn(4, 6))
    muon, made = optim.Muon([weight], 0.1, 0.0), []
    zeros_like = torch.zeros_like
    monkeypatch.setattr(torch, "zeros_like", lambda t: made.append(t) or zeros_like(t))
    for _ in range(3):
        weight.grad = torch.randn(4, 6)
        muon.step()
    assert len(made) == 1 and muon.state[weight]["momentum"].abs().sum() > 0


@pytest.mark.parametrize("shape", [(16, 64), (64, 16), (200, 300)])
def test_muon_moves_each_weight_by_a_fifth_of_the_rate(shape):
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(shape))
    muon, grads = optim.Muon([weight], 0.1, 0.5), torch.randn(2, *shape)
    for step, grad in enumerate(grads):
        before, weight.grad = weight.detach().clone(), grad.clone()
        muon.step()
        moved = weight.detach() - before * (1 - 0.1 * 0.5)  # the decay, then the update
        assert 0.85 < moved.square().mean().sqrt() / (0.1 * 0.2) < 1.15
        assert (moved * grad).sum() < 0  # down the gradient
    assert torch.allclose(muon.state[weight]["momentum"], 0.95 * 0.05 * grads[0] + 0.05 * grads[1],
                          atol=1e-6)


@pytest.mark.parametrize("name, bfloat16, float32", [
    ("NVIDIA H100 80GB HBM3", 989, 494), ("NVIDIA H100 PCIe", 756, 378),
    ("NVIDIA A100-SXM4-40GB", 312, 156), ("NVIDIA GH200 480GB", 989, 494),
    ("NVIDIA B200", 2250, 1125), ("NVIDIA L4", 121, 60), ("NVIDIA L40", 181, 90.5),
    ("NVIDIA A10", 125, 62.5), ("NVIDIA A10G", 70, 35), ("NVIDIA RTX A1000", None, None),
    ("Tesla T4", None, 8.1), ("Tesla V100-SXM2-16GB", None, 15.7),
    ("NVIDIA GeForce RTX 3080", 59.6, 29.8), ("AMD Instinct MI300X", 1307, 163),
    ("NVIDIA GeForce RTX 3080 Ti", 68.2, 34.1), ("NVIDIA GeForce RTX 4070 Ti SUPER", 88.2, 44.1),
    ("NVIDIA GeForce RTX 4090 Laptop GPU", None, None), ("NVIDIA GeForce RTX 4090 D", 147, 73.5),
    ("Apple M1 Max", 12.35, 12.35), ("Apple M2 Max", 13.68, 13.68), ("Apple M4 Pro", None, None),
    ("NVIDIA T400", None, None), ("NVIDIA H200 NVL", 835, 417), ("NVIDIA H200", 989, 494),
    ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None, None)])
def test_the_peak_is_that_of_the_very_device(name, bfloat16, float32):
    for dtype, peak in [(torch.bfloat16, bfloat16), (torch.float32, float32)]:
        found, _ = hardware.published_flops(name, dtype, cores=38)
        assert found is peak is None or abs(found / peak / 1e12 - 1) < 1e-9, dtype


def test_the_peak_can_be_given():
    assert hardware.peak_flops(torch.device("cpu"), torch.float32, 2.5) == (
        2.5e12, "given by --peak_tflops")
    flops, basis = hardware.peak_flops(torch.device("cpu"), torch.float32)
    assert 1e8 < flops < 1e14 and basis == "matmul measured on this cpu"


def test_deterministic_algorithms_on_request():
    try:
        for asked in (False, True):
            distributed.setup("cpu", asked)
            assert torch.are_deterministic_algorithms_enabled() == asked
    finally:
        torch.use_deterministic_algorithms(False)


def test_muon_moves_matrices_the_same_by_ones_and_together(monkeypatch):
    moved = []
    for max_chunk in (2 ** 28, 1, 50):
        monkeypatch.setattr(optim.Muon, "MAX_CHUNK", max_chunk)
        torch.manual_seed(0)
        weights = [torch.nn.Parameter(torch.randn(4, 6)) for _ in range(5)]
        muon = optim.Muon(weights, 0.1, 0.1)
        for _ in range(3):
            for weight in weights:
                weight.grad = torch.randn(4, 6)
            muon.step()
        moved.append(torch.stack([weight.detach() for weight in weights]))
    assert torch.allclose(moved[0], moved[1], atol=1e-6)
    assert torch.allclose(moved[0], moved[2], atol=1e-6)


def test_adamw_moves_parameters_the_same_observed_or_not(monkeypatch):
    """The weights are equal bit by bit, though an observed step updates them in chunks."""
    monkeypatch.setattr(optim.AdamW, "MAX_CHUNK", 50)
    moved, seen = [], []

    @contextlib.contextmanager
    def observe(params):
        seen.append(len(params))
        yield

    for context in (contextlib.nullcontext, observe):
        torch.manual_seed(0)
        weights = [torch.nn.Parameter(torch.randn(4, 6)) for _ in range(5)]
        adamw = optim.AdamW(weights, 0.1, weight_decay=0.1)
        for _ in range(3):
            for weight in weights:
                weight.grad = torch.randn(4, 6)
            adamw.step_observed(context)
        moved.append(torch.stack([weight.detach() for weight in weights]))
    assert torch.equal(*moved) and seen == [2, 2, 1] * 3


def quiet_detector():
    detector, rng = optim.SpikeDetector(6.0), random.Random(0)
    assert not any(detector.refuses(3.0 + rng.gauss(0, 0.1), 1.0 + rng.random())
                   for _ in range(300))
    return detector


@pytest.mark.parametrize("loss, norm", [
    (float("nan"), 1.0), (3.0, float("nan")), (float("inf"), 1.0), (5.0, 1.0), (3.0, 1e4)])
def test_the_spike_detector_refuses_nonsense_and_spikes(loss, norm):
    detector = quiet_detector()
    before = dict(detector.state, mean=list(detector.state["mean"]))
    assert detector.refuses(loss, norm) and detector.refuses(loss, norm)
    assert detector.state["skipped"] == detector.state["in_a_row"] == 2
    assert detector.state["mean"] == before["mean"]
    assert not detector.refuses(3.0, 1.2) and detector.state["in_a_row"] == 0


def test_the_spike_detector_forgives_what_is_small_and_believes_no_mean_at_first():
    for steps, loss, refused in (
            (99, 9.0, False), (100, 9.0, True), (300, 3.05, False), (300, 3.07, True)):
        detector = optim.SpikeDetector(6.0)
        assert not any(detector.refuses(3.0, 1.0) for _ in range(steps))
        # Losses without any spread count as a standard deviation of 0.01.
        assert detector.refuses(loss, 1.0) == refused


@pytest.mark.parametrize("usual", [1e-3, 1.0, 1e3])
def test_the_spike_detector_sees_a_gradient_that_is_large_beside_the_usual_one(usual):
    detector, rng = optim.SpikeDetector(6.0), random.Random(0)
    assert not any(detector.refuses(3.0, usual * (1 + rng.random())) for _ in range(300))
    assert detector.refuses(3.0, 100 * usual) and not detector.refuses(3.0, usual)


def test_the_spike_detector_takes_up_a_new_level_but_no_ruin():
    """
    A gradient norm that rises to stay is refused a few times. A run that diverges is refused until
    its weights go back.
    """
    for loss, norm, refused in ((3.0, 15.0, range(1, 8)), (9.0, 1.0, range(10, 11)),
                                (float("nan"), 1.0, range(10, 11))):
        detector = quiet_detector()
        count = 0
        while count < 10 and detector.refuses(loss, norm):
            count += 1
        assert count in refused
        assert count == 10 or not any(detector.refuses(3.0, 1.0 + i % 15) for i in range(100))


def test_refused_steps_are_skipped_and_the_weights_go_back(folder, tmp_path):
    """
    A run skips and counts the steps whose loss is not a number. After three in a row it goes back
    to old weights, and counts anew.
    """
    script = tmp_path / "poisoned.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "import torch, train\n"
        "from configurator import configure\n"
        "batch, bad = train.Dataset.batch, {int(x) for x in sys.argv.pop(1).split(',')}\n"
        "import model\n"
        "class Poisoned(model.Transformer):\n"
        "    step = -1\n"
        "    def forward(self, *args, **more):\n"
        "        logits, loss = super().forward(*args, **more)\n"
        "        return logits, "
        "loss * float('nan') if self.training and Poisoned.step in bad else loss\n"
        "def marked(dataset, step):\n"
        "    Poisoned.step = step\n"
        "    return batch(dataset, step)\n"
        "model.Transformer, train.Dataset.batch, train.progress.MAX_SKIPS = Poisoned, marked, 3\n"
        "sys.exit(train.start(configure(vars(train))))\n")
    args = [*TINY, "--data=my.txt", "--max_iters=40", "--log_interval=1", "--out_dir=poisoned"]
    done = subprocess.run([sys.executable, script, "4,22,23,24,25,26", *args], cwd=folder,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    log = {row["iter"]: row for row in rows(folder, "poisoned")}
    assert log[4]["grad/skipped"] == 0
    assert log[5]["grad/skipped"] == 1
    assert log[40]["grad/skipped"] == 6
    assert log[5]["loss/train"] == "nan" and done.stdout.count("3 steps in a row were skipped") == 1
    assert "step_00000020" in done.stdout
    assert log[40]["loss/val"] < log[0]["loss/val"]


def test_the_step_that_compiles_counts_in_no_speed(folder, tmp_path):
    script = tmp_path / "compiled.py"
    script.write_text(f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
                      "import torch, train\n"
                      "from configurator import configure\n"
                      "torch.compile = lambda model, mode: model  # which costs nothing\n"
                      "sys.exit(train.start(configure(vars(train))))\n")
    done = forked.run([
        script, *TINY, "--data=my.txt", "--max_iters=3", "--log_interval=1", "--compile=True",
        "--out_dir=compiled"
    ], folder, os.environ | {"WANDB_MODE": "disabled", "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0 and "compile: the first step took " in done.stdout, done.stderr
    assert [row["iter"] for row in rows(folder, "compiled")
            if "perf/tokens_per_sec" in row] == [2, 3]
    # The slow first step would otherwise raise the peak for the whole session.
    assert "mfu: training reaches" not in done.stdout


@pytest.mark.parametrize("args, words", [
    (["--dropuot=0.1"], ["unknown key 'dropuot'", "did you mean 'dropout'"]),
    (["--learning_rate=1"], ["learning_rate is 1.0", "expected above 0 and below 1"]),
    (["--data=missing.txt"], ["missing.txt"]),
    (["--data=empty.txt"], ["empty.txt", "empty"]),
    (["--data=short.txt"], ["short.txt"]),
    (["--data=my.txt", "--vocab_source=custom", "--vocab_size=10"],
     ["--vocab_size=10", "expected at least"]),
    (["--data=my.txt", "--max_seq_len=100000"], ["less than one context"]),
    (["--data=my.txt", "--max_seq_len=0"], ["max_seq_len is 0", "expected at least 1"]),
    (["--data=my.txt", "--multiple_of=0"], ["multiple_of is 0"]),
    (["--data=my.txt", "--depth=2", "--dim=0"], ["dim is 0, expected at least 1"]),
    (["--data=my.txt", "--decay_fraction=-1"], ["decay_fraction is -1"]),
    (["--data=my.txt", "--log_extras=all"],
     ["log_extras is 'all', expected some of tables, model, gradients, parameters, noise_scale"]),
    (["--data=my.txt", "--supervise=True", "--eval_only=True"],
     ["--eval_only and --supervise: expected one of them"]),
    (["--data=my.txt", "--cuda_graphs=True"],
     ["cuda_graphs is True without compile", "--compile=True"]),
    (["--data=my.txt", "--cuda_graphs=True", "--compile=True", "--device=cpu"],
     ["a device without them, cpu", "--device=cuda"]),
    (["--data=my.txt", "--seed=-1"], ["seed is -1"]),
    (["--data=my.txt", "--seed=1e20"], ["--seed=1e20: seed is '1e20', expected int below 2^53"]),
    (["--data=my.txt", "--vocab_source=bpe", "--vocab_size=1e12"],
     ["--vocab_size=1000000000000: expected at most 1048576"]),
    (["--data=my.txt", "--n_heads=3"], ["n_heads=3"]),
    (["--data=my.txt", "--n_kv_heads=7"], ["n_kv_heads"]),
    (["--data=my.txt", "--batch_size=-1"], ["batch_size is -1"]),
    (["--data=my.txt", "--n_layers=10000000"],
     ["needs at least", "GiB", "smaller --dim (now 32), --n_layers (now 10000000)"]),
    (["--data=my.txt", "--batch_size=100000000"],
     ["needs at least", "activations", "lower --batch_size (now 100000000)"]),
    (["--data=my.txt", "--depth=300", "--dim=100000"], ["needs at least", "smaller --dim"]),
    (["--data=my.txt", "--momentum=1"], ["momentum is 1.0, expected 0 <= momentum < 1"]),
    (["--data=my.txt", "--schedule=sine"], ["'sine'"]),
    (["--data=my.txt", "--dtype=float8"], ["float8", "expected auto"]),
    (["--data=my.txt", "--device=gpu"], ["--device=gpu"]),
    (["--data=my.txt", "--device=cuda:9"], ["--device=cuda:9", "expected auto, cpu, cuda or mps"]),
    (["--data=my.txt", "--device=meta"], ["--device=meta", "expected auto, cpu, cuda or mps"]),
    (["--data=my.txt", "--out_dir=my.txt"], ["--out_dir=my.txt"]),
    (["--data=my.txt", "--init_from=resume", "--out_dir=nothing"],
     ["nothing holds no complete checkpoint"]),
    (["--data=my.txt", "--init_from=nowhere"], ["nowhere"]),
    (["--data=my.txt", "--eval_only=True", "--out_dir=nothing"],
     ["nothing holds no checkpoint to evaluate"]),
    (["--data=my.txt", "--eval_only=True", "--init_from=scratch"],
     ["holds no checkpoint to evaluate"]),
])
def test_mistakes_are_one_line(folder, args, words):
    done = run(folder, "--max_iters=1",
               *(["--out_dir=mistake"] if not any("out_dir" in a for a in args) else []), *args)
    lines = [line for line in done.stderr.splitlines()
             if line.strip() and "encoding:" not in line and "it/s" not in line]
    assert done.returncode == 2, done.stdout + done.stderr
    assert len(lines) == 1 and lines[0].startswith("error: ")
    for word in words:
        assert word in lines[0]
    assert not (folder / "mistake").exists()
    assert not (folder / "nothing").exists()  # a refused run leaves no folder


def test_a_refused_run_leaves_folders_that_were_there(folder):
    for name in ("empty", "full"):
        (folder / "before" / name).mkdir(parents=True)
    (folder / "before/full/notes.txt").write_text("mine")
    for name in ("empty", "full", "full/made"):
        assert run(folder, "--max_iters=1", "--data=missing.txt",
                   f"--out_dir=before/{name}").returncode == 2
    assert (folder / "before/empty").is_dir()
    assert (folder / "before/full/notes.txt").read_text() == "mine"
    assert not (folder / "before/full/made").exists()


def test_help_names_every_knob(folder):
    done = run(folder, "--help")
    assert done.returncode == 0 and "--gradient_accumulation_steps=1" in done.stdout
    knobs = [line for line in done.stdout.splitlines() if line.startswith("  --")]
    assert len({line.split("=")[0] for line in knobs}) == len(trainer_config().defaults)
    for line in knobs:
        assert len(line.split()) > 2, f"a knob without a comment: {line}"


def test_schedules(monkeypatch):
    for key, value in dict(learning_rate=1.0, warmup_iters=10, max_iters=110, min_lr=0.1).items():
        monkeypatch.setattr(train, key, value)
    def rate(*args):
        return optim.learning_rate_at(trainer_config(), args[0], train.max_iters, *args[1:])

    monkeypatch.setattr(train, "schedule", "cosine")
    assert rate(0) == 0.1 and rate(9) == 1.0 and rate(10) == 1.0
    assert abs(rate(60) - 0.55) < 1e-9 and abs(rate(110) - 0.1) < 1e-9
    assert all(rate(s) >= rate(s + 1) for s in range(10, 110))
    monkeypatch.setattr(train, "schedule", "linear")
    monkeypatch.setattr(train, "decay_fraction", 0.5)
    assert rate(20) == rate(55) == 1.0 and abs(rate(110) - 0.1) < 1e-9
    # The clock is ahead of the steps; warm-up follows the steps alone.
    assert rate(20, 0.75) == rate(82.5)
    assert rate(20, 1.0) == rate(110)
    assert rate(5, 1.0) == 0.6
    monkeypatch.setattr(train, "schedule", "constant")
    assert rate(109) == 1.0


def test_gradients_are_made_out_of_autocast():
    """Within autocast, hand-written gradients would be summed in bfloat16."""
    args, seen = ModelArgs(dim=16, n_layers=1, n_heads=2, vocab_size=10, max_seq_len=8), []
    model = args.build()
    model.norm.weight.register_hook(lambda grad: seen.append(torch.is_autocast_enabled("cpu")))
    opt = optim.make_optimizer(model, optim.OptimizerConfig("adamw", 1e-3))
    x, y = torch.zeros(2, 6, 8, dtype=torch.long)
    t = SimpleNamespace(args=args, model=model, network=model, opt=opt, device=torch.device("cpu"),
                        dataset=None, amp=torch.autocast("cpu", torch.bfloat16), teachers=())
    train.train_step(t, 0, x, y, optim.SpikeDetector(6.0), instruments.UpdateNorms(model))
    assert seen == [False]


class CopiesToTheDevice(TorchDispatchMode):
    """A count of copies from the CPU's memory to tensors on meta, without those of to_device."""
    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **kwargs or {})
        # Find the index of the argument that is copied.
        source = {torch.ops.aten.copy_.default: 1, torch.ops.aten._to_copy.default: 0}.get(function)
        if source is not None and args[source].device.type == "cpu" and found.device.type == "meta":
            self.count += 1
        return found


@pytest.mark.parametrize("kind", ["muon", "adamw"])
@pytest.mark.parametrize("case", ["mask", "packed", "ngrams"])
def test_a_usual_step_waits_for_the_device_once(monkeypatch, case, kind):
    """
    On the meta device every read of a number, every shape that depends on numbers and every copy to
    the CPU raises. The step reads two numbers at once, if spikes are skipped, and copies tokens and
    targets of each micro-batch by to_device.
    """
    args = ModelArgs(dim=16, n_layers=1, n_heads=2, vocab_size=10, max_seq_len=8, dropout=0.1)
    model, device, reads, moved = args.build("meta"), torch.device("meta"), [], []
    opt = optim.make_optimizer(model, optim.OptimizerConfig(kind, 1e-3))
    opt.averaging, model.bos_id = 0.1, 1
    x, y = torch.ones(2, 6, 8, dtype=torch.long)
    dataset = SimpleNamespace(separator=1, places=lambda step: np.arange(48).reshape(6, 8))
    ngrams = SimpleNamespace(tokens=np.ones(48, np.int64), V=10, counted=40,
                             probabilities=lambda at: np.ones((len(at), 10), np.float32))
    teachers = distill.Teachers([], ngrams) if case == "ngrams" else None
    t = SimpleNamespace(args=args, model=model, network=model, opt=opt, device=device,
                        dataset=dataset, amp=contextlib.nullcontext(), teachers=teachers)

    def read_async(tensor):
        reads.append(tensor.shape)
        return lambda: reads.append("waited") or [1.0, 1.0]

    def to_device(device, *tensors):
        moved.append(len(tensors))
        return [torch.empty_like(z, device=device) for z in tensors]

    monkeypatch.setattr(ops, "compute_dtype", lambda x: x.dtype)  # autocast does not know meta
    monkeypatch.setattr(ops, "has_packed_attention", lambda *_: case == "packed")
    monkeypatch.setattr(distributed, "read_async", read_async)
    monkeypatch.setattr(distributed, "to_device", to_device)
    monkeypatch.setattr(train, "batch_size", 3)
    norms = instruments.UpdateNorms(model)
    for spike_z, wanted, float16 in ((0.0, False, False), (6.0, True, False), (0.0, False, True)):
        monkeypatch.setattr(train, "spike_z", spike_z)
        norms.wanted, opt.scale = wanted, optim.LossScale(float16)
        reads.clear(), moved.clear()
        with CopiesToTheDevice() as copies:
            train.train_step(t, 0, x, y, optim.SpikeDetector(spike_z), norms)
        waits = 2 if float16 else bool(spike_z)  # the second wait finds the numbers read
        assert reads == [(2,)] + ["waited"] * waits
        assert moved == ([2, 2, 1] if teachers else [2]) * 2
        assert copies.count == 2 * (case == "packed")  # places of documents, from pinned memory


def test_replays_that_overwrite_their_gradients_are_added_up(monkeypatch):
    """
    Imitate on a CPU how PyTorch replays a CUDA graph: each backward pass leaves its gradients in
    the memory of the one before, which autograd takes over without a copy.
    """
    args, gradients = ModelArgs(dim=16, n_layers=1, n_heads=2, vocab_size=10, max_seq_len=8), []
    model, held = args.build(), {}

    class Replayed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, y, *params):
            with torch.enable_grad():
                loss = model(x, y)[1]
            ctx.found = torch.autograd.grad(loss, params)
            return loss.detach()

        @staticmethod
        def backward(ctx, grad):
            for i, found in enumerate(ctx.found):
                if i not in held:
                    held[i] = torch.empty_like(found)
                    torch._C._add_cached_tensor(held[i])
                held[i].copy_(found * grad)
            return None, None, *held.values()

    def replayed(x, y, documents=None):
        return None, Replayed.apply(x, y, *model.parameters())

    class Recorder:
        scale = optim.LossScale()

        def step(self):
            gradients.append([p.grad.clone() for p in model.parameters()])

        def zero_grad(self):
            for p in model.parameters():
                p.grad = None

    monkeypatch.setattr(train, "batch_size", 2)
    x, y = torch.randint(10, (2, 6, 8))
    torch._C._set_cached_tensors_enabled(True)
    try:
        for network, cuda_graphs in ((model, False), (replayed, True), (replayed, True),
                                     (replayed, False)):
            monkeypatch.setattr(train, "cuda_graphs", cuda_graphs)
            t = SimpleNamespace(args=args, model=model, network=network, opt=Recorder(),
                                device=torch.device("cpu"), dataset=None,
                                amp=contextlib.nullcontext(), teachers=None)
            train.train_step(t, 0, x, y, optim.SpikeDetector(6.0), instruments.UpdateNorms(model))
    finally:
        for tensor in held.values():
            torch._C._remove_cached_tensor(tensor)
        torch._C._set_cached_tensors_enabled(False)
    expected, *same, wrong = gradients
    for found in same:
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(expected, found))
    # Without the copy the gradients are wrong, so the memory is indeed shared here.
    assert not any(torch.allclose(a, b, atol=1e-6) for a, b in zip(expected, wrong))


def test_compiled_muon_is_muon(monkeypatch):
    """Muon's iterations are one graph for each shape, which a CPU runs by PyTorch's operations."""
    moved, calls, compile = [], [], torch.compile

    def compile_and_count(function, **options):
        compiled = compile(function, backend="aot_eager", fullgraph=True, **options)
        return lambda *args: calls.append(args[0].shape) or compiled(*args)

    monkeypatch.setattr(torch, "compile", compile_and_count)
    for is_compiled in (False, True):
        torch.manual_seed(0)
        model = ModelArgs(dim=16, n_layers=2, n_heads=2, n_kv_heads=1, vocab_size=10,
                          max_seq_len=8).build()
        opt = optim.make_optimizer(model, optim.OptimizerConfig("muon", 0.1))
        if is_compiled:
            opt.compile()
        for _ in range(2):
            for p in model.parameters():
                p.grad = torch.randn_like(p)
            opt.step()
        moved.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.allclose(*moved, atol=1e-5)
    assert calls == 2 * [(4, 16, 16), (4, 8, 16), (4, 64, 16), (2, 16, 64)]


@pytest.mark.parametrize("kind", ["muon", "adamw"])
def test_embedding_and_classifier_have_a_rate_of_their_own(kind):
    def moved(embedding_lr_scale):
        torch.manual_seed(0)
        model, x = ModelArgs(dim=16, n_layers=1, n_heads=2, vocab_size=10, max_seq_len=8,
                             tied=False).build(), torch.arange(8)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        model(x[None], x[None])[1].backward()
        opt = optim.make_optimizer(
            model, optim.OptimizerConfig(kind, 0.1, 0.0, 0.9, 0.95, embedding_lr_scale))
        opt.set_rate(1e-3)
        opt.step()
        return {name: p.detach() - before[name] for name, p in model.named_parameters()}

    one, three = moved(1.0), moved(3.0)
    for name in one:
        times = 3 if name in ("tok_embeddings.weight", "output.weight") else 1
        assert one[name].abs().max() > 0, name
        assert torch.allclose(three[name], times * one[name], rtol=1e-3, atol=1e-8), name


def test_momentum_is_how_much_of_the_old_gradients_muon_keeps():
    model = ModelArgs(dim=16, n_layers=1, n_heads=2, vocab_size=10, max_seq_len=8).build()
    opt = optim.make_optimizer(model,
                               optim.OptimizerConfig("muon", 1e-3, 0.1, 0.9, 0.95, momentum=0.8))
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    opt.step()
    kept = {name: value for name, value in opt.state_dict().items() if name.endswith(".momentum")}
    assert len(kept) == 7
    assert all(torch.allclose(value, torch.tensor(0.2)) for value in kept.values())
    opt.step()
    assert all(torch.allclose(value, torch.tensor(0.2 + 0.8 * 0.2)) for value in kept.values())


def test_a_loss_that_is_no_number_ends_the_run(capsys):
    class Log:
        rows = []
        log, finish = rows.append, lambda self: None
    with pytest.raises(SystemExit) as end:
        validate.refuse_nonsense(trainer_config(), {"iter": 7, "loss/val": float("nan")}, Log())
    err = capsys.readouterr().err
    assert end.value.code == 2
    assert "loss/val is nan at iter 7" in err
    assert err.count("\n") == 1
    assert Log.rows


def test_what_sharding_needs_is_said_before_anything_is_computed(monkeypatch, capsys):
    monkeypatch.setattr(train.distributed, "world", 2)
    monkeypatch.setattr(train, "fsdp", True)
    validate.check_settings(trainer_config())
    monkeypatch.setattr(validate.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        validate.check_settings(trainer_config())
    assert "pip install safetensors" in capsys.readouterr().err


def test_too_large_a_batch_ends_in_one_line(folder):
    """
    The process may take 2 GiB more address space than importing PyTorch takes, which differs
    between builds. A training with a small batch takes nearly 1 GiB more.
    """
    program = ("import resource, runpy, sys, torch\n"
               "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
               "resource.setrlimit(resource.RLIMIT_AS, (used + (2 << 30),) * 2)\n"
               "sys.argv = sys.argv[1:]\n"
               "runpy.run_path(sys.argv[0], run_name='__main__')\n")
    words = command("--data=my.txt", "--out_dir=large", "--batch_size=30000", "--max_iters=2")
    done = subprocess.run([words[0], "-c", program, *words[1:]], cwd=folder, capture_output=True,
                          text=True,
                          env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)})
    assert done.returncode == 2
    assert "lower --batch_size (now 30000)" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("error, short", [
    (MemoryError(), True), (RuntimeError("can't start new thread"), True),
    (RuntimeError("CUDA out of memory. Tried"), True),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), True),
    (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
    (ValueError("out of memory"), False)])
def test_what_runs_out_of_memory_is_told_from_other_errors(error, short):
    assert hardware.is_out_of_memory(error) == short


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
@pytest.mark.parametrize("frugal, accumulating", [(False, False), (True, True)])
def test_the_least_memory_is_less_than_what_a_step_takes(optimizer, frugal, accumulating):
    """
    The peak of the tensors' memory, as PyTorch's profiler counts it, is above the estimate; and not
    far above, as temporaries are few.
    """
    torch.manual_seed(0)
    args = ModelArgs(dim=96, n_layers=8, n_heads=4, n_kv_heads=2, vocab_size=500, max_seq_len=64)
    model, x = args.build(), torch.randint(500, (2, 8, 64))
    model.recompute = frugal
    opt = optim.make_optimizer(model, optim.OptimizerConfig(optimizer, 1e-3))

    def step():
        for piece in x[:2 if accumulating else 1]:
            model(piece, piece)[1].backward()
        opt.step()
        opt.zero_grad()

    step()
    before = sum(t.numel() * t.element_size()
                 for t in (*model.parameters(), *opt.state_dict().values()))
    with torch.profiler.profile(profile_memory=True) as watched:
        step()
    held, most = 0, 0
    for event in watched.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    need = costs.min_memory(args, optimizer, costs.Pass(8 * 64, False, frugal, accumulating))
    assert need["weights"] == 4 * costs.num_params(model.args)
    assert need["weights"] + need["optimizer"] <= before
    assert sum(need.values()) <= before + most <= (4 if frugal else 2) * sum(need.values())


def test_what_does_not_fit_into_memory_is_refused_by_what_a_step_holds(monkeypatch, capsys):
    args = ModelArgs(dim=64, n_layers=2, n_heads=2, vocab_size=500, max_seq_len=64)
    s, cpu = trainer_config(batch_size=8, max_seq_len=64), torch.device("cpu")
    # Logits are computed a piece at a time.
    assert costs.min_memory(args, "muon", costs.Pass(10 ** 9))["logits"] == 32 << 20
    # Gradients persist only over several passes.
    for pieces, at_once in (1, {}), (2, {"accumulating": True}):
        s = s.changed(gradient_accumulation_steps=pieces)
        need = sum(costs.min_memory(args, s.optimizer, costs.Pass(8 * 64, **at_once)).values())
        monkeypatch.setattr(hardware, "free_memory", lambda device: need)
        costs.refuse_too_large(s, args, costs.TrialSetup(train.BUILD, cpu, torch.float32))
        monkeypatch.setattr(hardware, "free_memory", lambda device: need - 1)
        with pytest.raises(SystemExit):
            costs.refuse_too_large(s, args, costs.TrialSetup(train.BUILD, cpu, torch.float32))
        assert "lower --batch_size (now 8)" in capsys.readouterr().err
    # The minimum is that of one sequence at a time.
    least = sum(costs.min_memory(args, s.optimizer, costs.Pass(64, accumulating=True)).values())
    for free, advice in ((least, "lower --batch_size"),
                         (least - 1, "choose a smaller --dim (now 64)")):
        monkeypatch.setattr(hardware, "free_memory", lambda device: free)
        with pytest.raises(SystemExit):
            costs.refuse_too_large(s, args, costs.TrialSetup(train.BUILD, cpu, torch.float32))
        said = capsys.readouterr().err
        assert advice in said
        whole, parts, there = re.search(
            r"at least ([\d.]+) GiB of memory \((.*)\) and ([\d.]+) are free;", said).groups()
        assert sum(float(part.split()[-1]) for part in parts.split(", ")) == pytest.approx(
            float(whole), abs=0.3)
        assert float(there) < 1


def test_a_peak_that_is_passed_is_measured_again(capsys):
    config = {"peak_flops": 1e3, "compute_dtype": "float32",
              "mfu_basis": "matmul measured on this cpu"}
    instruments.check_peak(config, 900.0, torch.device("cpu"))
    assert config["peak_flops"] == 1e3 and not capsys.readouterr().out
    instruments.check_peak(config, 2e3, torch.device("cpu"))
    found = config["peak_flops"]
    assert found > 1e8 and "measured again" in capsys.readouterr().out
    instruments.check_peak(config, 1e30, torch.device("cpu"))
    # The peak is never below what was reached. It is measured once, as that may take seconds.
    assert config["peak_flops"] == 1e30
    assert not capsys.readouterr().out
    assert config["mfu_basis"].endswith(", measured again")


@pytest.fixture
def system(monkeypatch):
    """Replace the machine's files of /proc and /sys by those of a dict {path: text}; return it."""
    files = {}

    class Fake(type(Path())):
        def read_text(self):
            if str(self) not in files:
                raise FileNotFoundError
            return files[str(self)]

    monkeypatch.setattr(hardware, "Path", Fake)
    return files


def free_memory():
    return hardware.free_memory(torch.device("cpu"))


def test_free_memory_is_that_of_the_machine_within_its_limits(system):
    system |= {"/proc/meminfo": "MemTotal: 90 kB\nMemAvailable: 80 kB\nSwapFree: 1 kB\n",
               "/proc/self/cgroup": "0::/a/b\n"}
    assert free_memory() == 81 * 1024
    system["/sys/fs/cgroup/a/b/memory.max"], system["/sys/fs/cgroup/a/memory.max"] = (
        "max\n", "20480\n")
    assert free_memory() == 21 * 1024
    system["/proc/self/cgroup"], system["/sys/fs/cgroup/memory/memory.limit_in_bytes"] = (
        "4:memory:/x\n0::/\n", "10240\n")
    assert free_memory() == 11 * 1024
    del system["/proc/meminfo"]
    assert free_memory() is None


def test_free_memory_is_what_a_container_has_left(system):
    """
    Memory that a container's processes hold counts as used; cached files do not. Swap adds what its
    own limit leaves.
    """
    system |= {
        "/proc/meminfo": "MemAvailable: 800 kB\nSwapFree: 900 kB\n", "/proc/self/cgroup": "0::/\n",
        "/sys/fs/cgroup/memory.max": "102400\n", "/sys/fs/cgroup/memory.current": "51200\n"
    }
    assert free_memory() == 50 * 1024 + 900 * 1024
    system["/sys/fs/cgroup/memory.stat"] = (
        "anon 20480\nfile 30720\ninactive_file 10240\nactive_file 5120\n")
    assert free_memory() == 65 * 1024 + 900 * 1024
    system["/sys/fs/cgroup/memory.swap.max"], system["/sys/fs/cgroup/memory.swap.current"] = (
        "10240\n", "1024\n")
    assert free_memory() == 65 * 1024 + 9 * 1024
    system["/sys/fs/cgroup/memory.swap.max"] = "0\n"
    assert free_memory() == 65 * 1024
    system["/sys/fs/cgroup/memory.current"] = "204800\n"  # its limit was lowered
    assert free_memory() == 0


def test_free_memory_in_a_container_by_version_1_of_control_groups(system):
    """
    In version 1, the limit of memory and swap together may be the lower one. The values of
    memory.stat are those of the group, and those with the prefix total_ include its subgroups.
    """
    at = "/sys/fs/cgroup/memory/x/memory."
    system |= {
        "/proc/meminfo": "MemAvailable: 800 kB\nSwapFree: 900 kB\n",
        "/proc/self/cgroup": "4:memory:/x\n0::/\n", f"{at}limit_in_bytes": "102400\n",
        f"{at}usage_in_bytes": "51200\n", f"{at}memsw.limit_in_bytes": f"{1 << 62}\n",
        f"{at}stat": "inactive_file 1\nactive_file 1\n"
                     "total_inactive_file 10240\ntotal_active_file 0\n"
    }
    assert free_memory() == 60 * 1024 + 900 * 1024
    system[f"{at}memsw.limit_in_bytes"], system[f"{at}memsw.usage_in_bytes"] = "153600\n", "61440\n"
    assert free_memory() == 100 * 1024


def test_weights_that_are_no_number_end_in_one_line(folder, reference):
    """The run ends at its first evaluation, before any instrument reads such a model."""
    broken = folder / "broken"
    shutil.copytree(folder / "whole", broken)
    step = checkpoint.newest(broken)
    content = torch.load(step / "model.pt")
    content["model"]["norm.weight"].fill_(math.nan)
    torch.save(content, step / "model.pt")
    manifest = json.loads((step / "checkpoint.json").read_text())
    manifest["files"]["model.pt"] = [(step / "model.pt").stat().st_size, sha256(step / "model.pt")]
    (step / "checkpoint.json").write_text(json.dumps(manifest))
    done = run(folder, "--data=my.txt", "--max_iters=2", f"--init_from={step}",
               "--out_dir=from_broken")
    assert done.returncode == 2, done.stderr
    assert "loss/val is nan at iter 0" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    assert rows(folder, "from_broken")[0]["loss/val"] == "nan"


@pytest.mark.parametrize("after_row", [False, True])
def test_a_stop_that_is_killed_loses_no_row_and_doubles_none(folder, tmp_path, after_row):
    """
    SIGTERM comes at a step that has a row, SIGKILL in the evaluation that follows or between its
    row and the last save.
    """
    script = tmp_path / "killed.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "import os, signal, track, train\n"
        "from configurator import configure\n"
        "step, die, log = train.train_step, "
        "lambda *_: os.kill(os.getpid(), signal.SIGKILL), track.Tracker.log\n"
        "def last(t, number, *args):\n"
        "    if number == 9:\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        f"        if {after_row}: track.Tracker.log = lambda *a: (log(*a), die())\n"
        "        else: train.assess = lambda *a: (writer_done(), die())\n"
        "    return step(t, number, *args)\n"
        "def writer_done():\n"
        "    for w in writers: w.wait()\n"
        "writers, start = [], train.checkpoint.Writer.start\n"
        "train.checkpoint.Writer.start = lambda w, work: (writers.append(w), start(w, work))[1]\n"
        "train.train_step = last\n"
        "sys.exit(train.start(configure(vars(train))))\n")
    args, out = ["--data=my.txt", "--max_iters=20"], f"--out_dir=cut_short{after_row}"
    assert run(folder, *args, "--out_dir=uncut").returncode == 0
    done = forked.run([script, *TINY, *args, out], folder, environment())
    assert done.returncode == -signal.SIGKILL, done.stdout + done.stderr
    assert run(folder, *args, out).returncode == 0
    name = f"cut_short{after_row}"
    assert [row["iter"] for row in rows(folder, name)] == [0, 5, 10, 15, 20]
    assert losses(folder, name) == losses(folder, "uncut")


def test_a_run_whose_data_has_a_secret_in_its_address_is_resumed_and_logs_none(folder):
    """
    The checkpoint holds the address. A checkpoint of an earlier version, which hid the address,
    makes the run ask for it.
    """
    (folder / "password=Abc123xyz.txt").write_text((folder / "my.txt").read_text())
    assert run(folder, "--data=password=Abc123xyz.txt", "--max_iters=2",
               "--out_dir=hidden").returncode == 0
    done = run(folder, "--max_iters=3", "--out_dir=hidden")
    assert done.returncode == 0 and "resuming hidden at iteration 2" in done.stdout, done.stderr
    assert not any("Abc123xyz" in (folder / "hidden" / name).read_text()
                   for name in ("config.json", "log.jsonl", "result.json"))
    newest = folder / "hidden/checkpoints" / (folder / "hidden/latest").read_text().strip()
    manifest, config = json.loads((newest / "checkpoint.json").read_text()), newest / "config.json"
    config.write_text(config.read_text().replace("Abc123xyz.txt", "***"))
    manifest["files"]["config.json"] = [config.stat().st_size,
                                        hashlib.sha256(config.read_bytes()).hexdigest()]
    (newest / "checkpoint.json").write_text(json.dumps(manifest))
    done = run(folder, "--max_iters=4", "--out_dir=hidden")
    assert done.returncode == 2, done.stderr
    assert "--data was password=***" in done.stderr, done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    done = run(folder, "--data=password=Abc123xyz.txt", "--max_iters=4", "--out_dir=hidden")
    assert done.returncode == 0
    assert "resuming hidden at iteration 3" in done.stdout
    assert " -> password" not in done.stdout


def test_a_rank_alone_is_no_process_of_many():
    for env in {"RANK": "3"}, {"WORLD_SIZE": "2"}, {"RANK": "3", "WORLD_SIZE": ""}:
        done = subprocess.run(
            [sys.executable, "-c", "from engine.training import distributed; "
             "print(distributed.rank, distributed.world)"],
            cwd=ROOT, env=environment(**env), capture_output=True, text=True)
        assert done.stdout == "0 1\n", done.stderr
