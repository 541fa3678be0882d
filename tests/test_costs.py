"""Tests of the costs of a training: the table of estimates and the largest batch that fits."""
import ast
import json
import os
import re
import runpy
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import train
from engine.debug import instruments
from engine.streams import format_seconds
from engine.training import costs, distributed, fit_batch, hardware, plan
from export import export_model
from model import ModelArgs, Transformer
from tests import forked
from tests.trainer_config import trainer_config
from tests.test_export import build
from tokenizer import Characters

ROOT = Path(__file__).resolve().parents[1]
CPU = torch.device("cpu")
SETUP = costs.TrialSetup(train.BUILD, CPU, torch.float32)


def knobs(**values):
    return trainer_config(**values)


def command(folder, *words):
    return forked.run(words, folder, os.environ | {"OMP_NUM_THREADS": "1"})


@pytest.mark.parametrize(
    "shape", [{}, {"tied": False, "n_kv_heads": 1}, {"dim": 48, "n_heads": 3, "n_layers": 3}])
def test_files_have_the_size_that_was_foretold(shape, tmp_path):
    model = build(**shape)
    foretold = costs.file_sizes(model.args)
    for name, size in foretold.items():
        format, _, dtype = name.partition(" ")
        path = tmp_path / name.replace(" ", "-")
        export_model(model.state_dict(), model.args,
                     None if dtype == "" else words(model.args.vocab_size), path, format,
                     dtype or "f32")
        found = path.stat().st_size
        assert found == size if not dtype else abs(found - size) < 0.03 * size + 8192, name


def number(text):
    return int(text.replace(",", ""))


def words(size):
    from bench.models import vocabulary
    return vocabulary(size)


def test_an_evaluation_is_shared_out_and_its_samples_are_not(monkeypatch):
    s, meta = (knobs(eval_iters=10, max_seq_len=64, sample_prompt="a|b"),
               {"val_tokens": 50_100, "val_documents": 100})
    samples = 96 * 0.5  # all prompts together
    assert costs.evaluation_seconds(s, meta, 1.0, 0.5) == 10_240 + 8192 + 8 * 64 + samples
    s = s.changed(eval_iters=0)
    assert costs.evaluation_seconds(s, meta, 1.0, 0.5) == 1.25 * 50_000 + 8 * 64 + samples
    monkeypatch.setattr(distributed, "world", 4)
    assert costs.evaluation_seconds(s, meta, 1.0, 0.5) == 1.25 * 50_000 / 4 + 8 * 64 + samples


def test_samples_are_as_long_as_their_time_is_reckoned_for():
    """The model predicts letters alone, so that no text ends early."""
    s, letters = knobs(sample_prompt="a|b"), Characters("abcdefgh")
    model = Transformer(ModelArgs(dim=8, n_layers=1, n_heads=1, vocab_size=letters.vocab_size,
                                  max_seq_len=16, tied=False))
    model.tok_embeddings.weight.data[:] = model.output.weight.data[3:] = 1
    model.output.weight.data[:3] = -1
    with torch.no_grad():
        kept = model.norm.weight.clone()
        model.norm.weight.fill_(float("nan"))
    broken = instruments.write_samples(model, letters, CPU, ["a"], seed=1)
    assert "not finite" in broken[1][2]
    model.norm.weight.data.copy_(kept)
    written = instruments.write_samples(model, letters, CPU, s.sample_prompt.split("|"), seed=1)
    seconds = costs.evaluation_seconds(s, {"val_tokens": 9, "val_documents": 1}, 0.0, 1.0)
    assert [len(text) for *_, text in written] == [seconds] * 4


def test_the_samples_of_an_evaluation_are_one_batch_and_each_is_the_text_made_alone():
    letters = Characters("abcdefgh")
    model = build(vocab_size=letters.vocab_size, max_seq_len=32)
    prompts, steps = ["a", "hgfe", "", "abcdefgh" * 6], []
    hook = model.register_forward_pre_hook(lambda module, args: steps.append(len(args[0])))
    written = instruments.write_samples(model, letters, CPU, prompts, seed=1)
    hook.remove()
    assert steps.count(1) <= 4 + 96 and max(steps) == 8 and len(steps) <= 4 + 4 * 2 + 96 + 8 * 6
    assert [row[:2] for row in written] == [
        [p, how] for p in prompts for how in ("greedy", "sampled")]
    assert written == [row for p in prompts
                       for row in instruments.write_samples(model, letters, CPU, [p], seed=1)]


def test_the_table_of_a_preset_needs_no_data(tmp_path):
    done = command(tmp_path, ROOT / "model.py", ROOT / "config/stories260K.py", "--max_iters=10",
                   "--batch_size=2")
    assert done.returncode == 0, done.stderr
    for part in ("parameters  260,032 ", "attention ", "FLOPs ",
                 "Python, torch and temporary buffers",
                 "tokens/s, measured", "gguf q8_0", "v2 "):
        assert part in done.stdout, part
    flops, total, step_tokens = re.search(
        r"FLOPs +([\d,]+) a token.*; (\S+) in 10 steps of ([\d,]+) tokens", done.stdout).groups()
    assert float(total) == pytest.approx(10 * number(flops) * number(step_tokens), rel=0.01)
    for size, speed in re.findall(r"^ +(?:gguf|v\d)\b.*?([\d,]+) +([\d,]+)$", done.stdout, re.M):
        assert 1e8 < number(size) * number(speed) < 1e13, done.stdout  # bytes per second
    assert not list(tmp_path.iterdir())
    done = command(tmp_path, ROOT / "model.py", "--dim=63")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "dim=63" in done.stderr


@pytest.mark.parametrize("word, said", [
    ("--multiple_of=0", "multiple_of is 0"), ("--depth=-1", "depth is -1"),
    ("--batch_size=0", "give a number here"),
    ("--gradient_accumulation_steps=0", "gradient_accumulation_steps is 0"),
    ("--max_seq_len=0", "max_seq_len is 0")])
def test_the_table_refuses_what_a_training_does(word, said, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["model.py", word])
    with pytest.raises(SystemExit):
        plan.show_costs(train.BUILD)
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_expected_is_more_than_the_least(optimizer, dtype):
    for frugal in (False, True):
        for accumulation in (1, 3):
            s = knobs(optimizer=optimizer, batch_size=4, gradient_accumulation_steps=accumulation,
                      max_seq_len=128, activation_checkpointing=frugal)
            args = ModelArgs(dim=128, n_layers=4, n_heads=4, vocab_size=900, max_seq_len=128)
            least = costs.min_memory(
                args, optimizer,
                costs.Pass(4 * 128, dtype != torch.float32, frugal, accumulation > 1))
            expected = costs.expected_memory(s, args, CPU, dtype)
            assert all(expected[kind] >= 0.99 * size for kind, size in least.items()), (
                least, expected)
            assert sum(least.values()) < sum(expected.values()) < 4 * sum(least.values())


def test_the_table_of_cards_is_what_is_expected():
    """
    doc/gpu.md lists the largest batch that fits, up to the preset's, among the sizes that keep the
    number of sequences per step.
    """
    text, last, values = (ROOT / "doc/gpu.md").read_text(), [], {}
    rows = re.findall(r"^\| (.*?) \| ([ \d]*) ?\| ([ \d]*) \| ([ \d]*) \| ([ \d]*) \|$",
                      text[text.index("### On a card"):], re.M)
    assert len(rows) == 7
    for words, *batches in rows:
        last = (last if words.startswith("the same") else []) + re.findall(r"--(\w+)=(\w+)", words)
        preset = re.search(r"config/\w+\.py", words)
        values = runpy.run_path(str(ROOT / preset[0])) if preset else values
        s = knobs(**{name: value for name, value in values.items() if not name.startswith("_")})
        s = s.changed(**{name: ast.literal_eval(value) for name, value in last})
        args, sequences = (train.BUILD.model_args(s, 32000),
                           s.batch_size * s.gradient_accumulation_steps)
        for gib, batch in zip((8, 12, 16, 24), batches):
            fits = [0]
            for size in (2 ** n for n in range(8)):
                part = s.changed(batch_size=size, gradient_accumulation_steps=sequences // size)
                memory = costs.expected_memory(part, args, torch.device("cuda"), torch.bfloat16)
                if (size <= s.batch_size
                        and sum(memory.values()) <= plan.GPU_MEMORY * (gib - 1 << 30)):
                    fits.append(size)
            assert int(batch or 0) == max(fits), (words, gib)


def test_what_blocks_keep_is_what_is_expected():
    """
    The memory is that of the tensors that autograd saves, masks included, in float32 and bfloat16.
    """
    args = ModelArgs(dim=64, n_layers=3, n_heads=4, n_kv_heads=2, vocab_size=99, max_seq_len=64)
    for dtype in (torch.float32, torch.bfloat16):
        model, kept = Transformer(args), {}
        model.bos_id = 1
        x = torch.randint(99, (4, 64))

        def keep(t):
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage()
            return t

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
                model(x, x)
        weights = {t.untyped_storage().data_ptr() for t in (*model.parameters(), model.rope)}
        found = sum(storage.nbytes() for place, storage in kept.items() if place not in weights)
        s = knobs(batch_size=4, max_seq_len=64)
        expected = costs.expected_memory(s, args, CPU, dtype)["activations"]
        assert abs(found - expected) < 0.08 * expected, dtype


def test_a_step_is_measured_as_it_is_trained():
    """
    The step has masks, clipping and recomputation. A large batch is measured by a part of it.
    """
    seen = []

    class Watched(costs.TrialTraining):
        def forward_backward(self, rows):
            seen.append((rows, self.model.bos_id, self.model.recompute))
            return super().forward_backward(rows)

    s = knobs(batch_size=2048, max_seq_len=32, activation_checkpointing=True, max_iters=1000)
    original, costs.TrialTraining = costs.TrialTraining, Watched
    try:
        times = costs.measure(s, ModelArgs.of(s, 99), SETUP, seconds=0.2)
    finally:
        costs.TrialTraining = original
    assert {bos for _, bos, _ in seen} == {1} and all(recompute for *_, recompute in seen)
    assert max(rows for rows, *_ in seen) < 2048
    assert times["step"] > 20 * times["forward"] > 0 < times["sample"]


def test_a_run_with_one_step_left_has_an_estimate_and_one_that_has_ended_has_none():
    s = knobs(max_iters=10, max_seq_len=32, batch_size=2, dim=32, n_layers=1, n_heads=1)
    meta = {"train_tokens": 10 ** 5, "val_tokens": 10 ** 4, "val_documents": 10}
    left, ended = (costs.estimate_run(s, ModelArgs.of(s, 99), SETUP, meta, begun)
                   for begun in (9, 10))
    assert left["seconds"] > 0 < left["tokens_per_sec"]
    assert ended["seconds"] is None is ended["tokens_per_sec"]


def test_the_line_of_time():
    s = knobs(max_minutes=0.0)
    assert "about 3.2 min, until " in costs.time_line(s, {"seconds": 192, "tokens_per_sec": 1234.0})
    assert "1,234 tokens/s" in costs.time_line(s, {"seconds": 192, "tokens_per_sec": 1234.0})
    assert "the limit" in costs.time_line(knobs(max_minutes=1.0),
                                          {"seconds": 192, "tokens_per_sec": 1.0})
    assert [format_seconds(n) for n in (3.4, 45, 600, 840, 7200, 9000, 86400 * 12)] == [
        "3.4 s", "45 s", "10 min", "14 min", "2 h", "2.5 h", "12 days"]
    assert [costs.format_bytes(n) for n in (12 << 20, 1 << 30, 3.4 * 2 ** 30)] == [
        "12 MiB", "1.0 GiB", "3.4 GiB"]


# ---- --batch_size=0


def test_batches_that_divide_a_step():
    assert fit_batch.batches(512, 512) == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
    assert fit_batch.batches(7, 7) == [1, 7]
    assert fit_batch.batches(36, 18) == [1, 2, 3, 6, 9, 18]
    assert fit_batch.batches(6, 6) == [1, 2, 3, 6]


@pytest.mark.parametrize("speeds, chosen", [
    ([100, 150], 2), ([100, 150, 151], 2), ([100, 150, 200], 4), ([100, 90, 200], 4),
    ([100, 99, 98], 1), ([100], 1)])
def test_the_batch_is_the_smallest_that_is_about_as_fast_as_the_fastest(
        speeds, chosen, monkeypatch):
    tried = [fit_batch.Fit(2 ** n, 1 << 20, speed) for n, speed in enumerate(speeds)]
    monkeypatch.setattr(fit_batch, "run_child", lambda search: (tried, "all have been tried"))
    found = fit_batch.largest_batch(knobs(batch_size=8, gradient_accumulation_steps=1),
                                    ModelArgs.of(knobs(), 259), SETUP)
    assert found == {"batch_size": chosen, "gradient_accumulation_steps": 8 // chosen}


def wide(**values):
    s = knobs(dim=256, n_layers=2, n_heads=2, batch_size=64, gradient_accumulation_steps=4,
              max_seq_len=256, **values)
    return s, ModelArgs.of(s, 2000)


@pytest.mark.slow
def test_a_batch_that_does_not_fit_is_refused_and_the_step_stays(monkeypatch, capsys):
    s, args = wide()
    monkeypatch.setattr(hardware, "free_memory", lambda device: 480 << 20)
    found = fit_batch.largest_batch(s, args, SETUP, gain=0.0)
    assert 1 <= found["batch_size"] < 16
    assert found["batch_size"] * found["gradient_accumulation_steps"] == 256
    assert "did not fit" in (text := capsys.readouterr().out) or "is available" in text
    monkeypatch.setattr(hardware, "free_memory", lambda device: 100 << 20)
    with pytest.raises(SystemExit):
        fit_batch.largest_batch(s, args, SETUP)
    assert "not even a batch of 1 fits into 90 MiB" in capsys.readouterr().err  # a tenth stays free


@pytest.mark.slow
def test_a_killed_trial_is_a_no(capsys):
    s, args = wide()
    stop = threading.Event()

    def kill():  # as the system does when memory runs out
        while not stop.is_set():
            for child in Path(
                    f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split():
                status = (Path(f"/proc/{child}/status").read_text()
                          if Path(f"/proc/{child}").exists() else "")
                words = Path(f"/proc/{child}/cmdline").read_bytes() if status else b""
                if (b"spawn_main" in words and "VmRSS" in status
                        and int(status.split("VmRSS:")[1].split()[0]) > 450_000):
                    os.kill(int(child), 9)
                    return
            time.sleep(0.01)

    thread = threading.Thread(target=kill)
    thread.start()
    found = fit_batch.largest_batch(s, args, SETUP, gain=0.0)
    stop.set()
    thread.join()
    assert found["batch_size"] * found["gradient_accumulation_steps"] == 256
    assert found["batch_size"] < 64
    assert "did not fit" in capsys.readouterr().out


def test_a_run_finds_its_batch_and_keeps_it(tmp_path):
    (tmp_path / "my.txt").write_bytes((ROOT / "README.md").read_bytes()[:9000])
    (tmp_path / "preset.py").write_text(
        "batch_size = 4\ngradient_accumulation_steps = 3\nmax_seq_len = 32\ndim = 32\n"
        "n_heads = 1\n")
    words = [
        ROOT / "train.py", "preset.py", "--data=my.txt", "--vocab_source=byte", "--batch_size=0",
        "--device=cpu", "--eval_interval=2", "--eval_iters=1", "--peak_tflops=0.1", "--out_dir=run",
        "--sample_prompt=a"]
    done = command(tmp_path, *words, "--max_iters=2")
    assert done.returncode == 0, done.stderr
    assert "make the 12 sequences per step of the settings" in done.stdout
    assert "\nmemory: about " in done.stdout and "\ntime:  about " in done.stdout
    stored = json.loads((tmp_path / "run/config.json").read_text())
    assert stored["batch_size"] * stored["gradient_accumulation_steps"] == 12
    assert stored["estimate"]["memory"] > 50 << 20 and stored["estimate"]["seconds"] > 0
    done = command(tmp_path, *words, "--max_iters=4")
    assert done.returncode == 0, done.stderr
    assert "make the 12 sequences" not in done.stdout
    assert "resuming run at iteration 2 of 4" in done.stdout
