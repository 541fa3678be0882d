"""first_seq_len: a training that begins with a short context."""
import json
import random
import shutil

import pytest
import torch

import data
from engine.debug.instruments import Stopwatch
from engine.training import checkpoint, costs, progress
from model import ModelArgs
from tests.mutated_files import fitting_manifest
from tests.test_model import twin
from tests.test_train import losses, ranks, run, weights
from tests.trainer_config import trainer_config

GROWING = ["--data=my.txt", "--first_seq_len=8", "--log_interval=1", "--schedule=constant"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a working directory with a text of 40 kB: words drawn at random."""
    folder = tmp_path_factory.mktemp("work")
    words = "the a cat dog sat ran on under mat tree and then it was happy .".split()
    (folder / "my.txt").write_text(" ".join(random.Random(1).choices(words, k=10_000)))
    return folder


@pytest.mark.parametrize("first, last, expected", [
    (0, 256, {0: 256, 0.5: 256, 1: 256}),
    (256, 256, {0: 256, 0.5: 256, 1: 256}),
    (128, 256, {0: 128, 0.89: 128, 0.9: 256, 1: 256}),
    (64, 256, {0: 64, 0.44: 64, 0.46: 128, 0.89: 128, 0.91: 256, 1: 256}),
    (1, 16, {0: 1, 0.23: 2, 0.46: 4, 0.68: 8, 0.91: 16, 1.5: 16})])
def test_the_context_doubles_until_nine_tenths(first, last, expected):
    config = trainer_config(first_seq_len=first, max_seq_len=last)
    assert {done: progress.context_at(config, done) for done in expected} == expected


def test_a_step_has_the_loss_of_short_sequences_in_transformers(folder):
    """The second of two steps, after half of the run, has a context of 16 tokens."""
    for steps in 1, 2:
        done = run(folder, *GROWING, f"--max_iters={steps}", "--dtype=float32",
                   f"--out_dir=step{steps}")
        assert done.returncode == 0, done.stderr
    args = json.loads((folder / "step1/config.json").read_text())["model_args"]
    model = ModelArgs(**args).build()
    model.load_state_dict(weights(folder, "step1"), strict=False)  # output is the embedding
    prepared = data.load(next((folder / "cache").glob("my-*")))
    x, y = data.Dataset(prepared, 32, 4, 4, seed=1337).make_batch(1)
    with torch.no_grad():
        logits = twin(model)(x.view(8, 16)).logits.flatten(0, 1)
        whole = twin(model)(x).logits.flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(logits, y.flatten()).item()
    assert losses(folder, "step2")[2][0] == pytest.approx(expected, abs=1e-5)
    of_whole_sequences = torch.nn.functional.cross_entropy(whole, y.flatten()).item()
    assert abs(of_whole_sequences - expected) > 1e-4


def test_accumulation_processes_and_a_resumed_run_take_the_same_steps(folder):
    args = [*GROWING, "--max_iters=10", "--eval_interval=5", "--dtype=float32",
            "--always_save_checkpoint=True"]
    assert run(folder, *args, "--out_dir=one").returncode == 0
    accumulated = ["--batch_size=2", "--gradient_accumulation_steps=2", "--out_dir=accumulated"]
    assert run(folder, *args, *accumulated).returncode == 0
    for done in ranks(folder, 2, *args, *accumulated[:2], "--out_dir=two"):
        assert done.returncode == 0, done.stderr
    one = losses(folder, "one")
    for other in "accumulated", "two":
        found = losses(folder, other)
        assert [*found] == [*one]
        for step in list(one)[1:]:  # step 0 has no training loss
            assert found[step][0] == pytest.approx(one[step][0], abs=1e-4)
    # A run whose later checkpoints are lost is resumed from the one before, of a shorter context.
    shutil.copytree(folder / "one", folder / "cut")
    shutil.rmtree(checkpoint.steps(folder / "cut")[-1])
    done = run(folder, *args, "--out_dir=cut")
    assert "resuming cut at iteration 5" in done.stdout and losses(folder, "cut") == one
    for name, weight in weights(folder, "one").items():
        assert torch.equal(weight, weights(folder, "cut")[name]), name


def test_the_checks_before_a_training_pass(folder):
    done = run(folder, *GROWING, "--max_iters=2", "--checks=all", "--out_dir=checked")
    assert done.returncode == 0 and "could not run" not in done.stdout, done.stderr + done.stdout


def test_an_older_run_keeps_its_context_unless_the_change_is_asked_for(folder):
    args = ["--data=my.txt", "--max_iters=4", "--schedule=constant"]
    assert run(folder, *args, "--out_dir=older").returncode == 0
    step = checkpoint.newest(folder / "older")
    stored = json.loads((step / "config.json").read_text())
    del stored["first_seq_len"]
    (step / "config.json").write_text(json.dumps(stored))
    fitting_manifest(folder / "older")
    done = run(folder, "--out_dir=older", "--max_iters=6", "--first_seq_len=8")
    assert done.returncode == 0 and "first_seq_len: 0 -> 8" in done.stdout


def test_the_full_context_from_the_start_changes_nothing(folder):
    args = ["--data=my.txt", "--max_iters=5"]
    assert run(folder, *args, "--out_dir=without").returncode == 0
    assert run(folder, *args, "--first_seq_len=32", "--out_dir=with").returncode == 0
    for name, weight in weights(folder, "without").items():
        assert torch.equal(weight, weights(folder, "with")[name]), name


def test_n_grams_teach_short_sequences(folder):
    done = run(folder, *GROWING, "--teacher=ngrams", "--max_iters=6", "--out_dir=taught")
    assert done.returncode == 0, done.stderr
    assert losses(folder, "taught")[6][0] < losses(folder, "taught")[1][0]


@pytest.mark.parametrize("words, message", [
    (["--first_seq_len=12"], "first_seq_len is 12, expected max_seq_len=32 divided by"),
    (["--first_seq_len=64"], "first_seq_len is 64, expected max_seq_len=32 divided by"),
    (["--first_seq_len=-1"], "first_seq_len is -1, expected 0 or more"),
    (["--first_seq_len=8", "--compile=True"], "expected --first_seq_len=0")])
def test_what_cannot_be_cut_is_refused(folder, words, message):
    done = run(folder, "--data=my.txt", "--out_dir=refused", *words)
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr


def test_conversations_are_not_cut(folder):
    chat = [{"messages": [{"role": "user", "content": f"What is {i}?"},
                          {"role": "assistant", "content": f"A number, {i}."}]} for i in range(90)]
    (folder / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chat))
    done = run(folder, "--data=chat.jsonl", "--max_seq_len=64", "--first_seq_len=8",
               "--out_dir=chat")
    assert done.returncode == 2 and "would cut conversations apart" in done.stderr


def test_mfu_counts_the_attention_of_the_context_that_steps_had():
    model = ModelArgs(dim=32, n_layers=2, n_heads=2, vocab_size=300, max_seq_len=64)
    half = ModelArgs(dim=32, n_layers=2, n_heads=2, vocab_size=300, max_seq_len=32)
    record = {"model_args": {"max_seq_len": 64}, "tokens_per_iter": 256, "peak_flops": 1e15,
              "flops_per_token": costs.flops_per_token(model),
              "attention_flops_per_token": costs.attention_flops_per_token(model)}
    stopwatch = Stopwatch(torch.device("cpu"))
    stopwatch.steps, stopwatch.context_sum = 3, 3 * 32
    found = stopwatch.read(record)
    expected = found["perf/tokens_per_sec"] * costs.flops_per_token(half) / 1e15
    assert found["mfu"] == pytest.approx(100 * expected)
