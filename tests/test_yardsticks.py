"""Yardsticks for a loss, compared with gzip and xz themselves and with counted frequencies."""
import collections
import json
import math
import os
import shutil
import subprocess

import pytest

import data
from engine.text import yardsticks
from tests import forked
from tests.test_train import ROOT, folder  # noqa: F401


def dataset_of(folder, source, **options):  # noqa: F811
    prepared = data.load(data.prepare(str(source), cache=folder / "cache", workers=1, **options))
    return data.Dataset.of(prepared, 64, 2, 2, seed=1)


@pytest.mark.parametrize("vocabulary", ["char", "byte", "custom"])
def test_yardsticks_are_what_they_are_named_after(folder, vocabulary):  # noqa: F811
    dataset = dataset_of(folder, folder / "my.txt", vocab_source=vocabulary)
    found = yardsticks.measure(dataset)
    val, train = dataset.val.tolist(), dataset.train.tolist()
    text = dataset.tokenizer.decode(val).encode()
    assert len(text) == dataset.meta["val_bytes"]
    for program in "gzip", "xz":
        if shutil.which(program):
            size = len(subprocess.run([program, "-9", "-c"], input=text, capture_output=True,
                                      check=True).stdout)
            assert found[program] == pytest.approx(8 * size / len(text), rel=0.01)
    size = dataset.meta["vocab_size"]
    assert found["chance"] == pytest.approx(math.log2(size) * (len(val) - 1) / len(text))
    times = collections.Counter(train[1:])  # all but BOS
    total = sum(times.values()) + size
    nats = -sum(math.log((1 + times[token]) / total) for token in val[1:]) / len(val[1:])
    assert found["unigram"] == pytest.approx(dataset.bits_per_byte(nats))
    assert found["unigram"] < found["chance"]
    assert "floor" not in found


def test_of_conversations_the_answers_count(tmp_path):
    dataset = dataset_of(tmp_path, ROOT / "examples/chats.jsonl")
    answers = dataset.tokenizer.decode(
        yardsticks.predicted(dataset, "val", len(dataset.val)).tolist())
    assert len(answers.encode()) == dataset.meta["val_answer_bytes"]
    found = yardsticks.measure(dataset)
    assert 0 < found["unigram"] < found["chance"]


@pytest.mark.parametrize("loss, words", [
    (8.0, "not normal: 8.0000 bits per byte is no better than chance (8)"),
    (5.0, "not normal yet: 5.0000 bits per byte is more than token frequencies alone need "
          "(xz 2.5, gzip 3, token frequencies 4, chance 8)"),
    (2.8, "normal for a short training: 2.8000 bits per byte"),
    (2.0, "normal: 2.0000 bits per byte is less than a compressor needs ("),
    (0.99, "not normal: 0.9900 bits per byte is less than 1.010, the entropy of these stories"),
])
def test_whether_a_loss_is_normal_is_a_sentence(loss, words):
    found = {"chance": 8.0, "unigram": 4.0, "gzip": 3.0, "xz": 2.5, "floor": 1.01}
    assert yardsticks.assess(loss, found, {}, {}).startswith(words)
    assert "no model can beat 1.010" in yardsticks.assess(2.0, found, {}, {})


@pytest.mark.parametrize("train, val, epoch, meta, gap", [
    (3.0, 4.6, 2.0, {}, 53),
    (3.1, 4.5, 3.3, {}, 0),
    (0.3, 7.4, 36.0, {}, 2367),
    (3.7, 4.7, 2.0, {}, 0),
    (4.0, 4.0, 20.0, {}, 0),
    (3.0, 4.6, 0.9, {}, 0),  # less than one epoch: the gap is that between the two splits
    (0.3, 7.4, 36.0, {"chat_template": ""}, 0),
    (None, 4.0, 9.0, {}, 0),
    (0.0, 4.0, 9.0, {}, 0),
])
def test_a_text_known_by_heart_is_named(train, val, epoch, meta, gap):
    row = {"loss/train_eval": train, "loss/val": val, "epoch": epoch}
    found = {"chance": 8.0, "unigram": 4.0, "gzip": 3.0, "xz": 2.5}
    said = yardsticks.assess(2.0, found, row, meta)
    assert ("memorizes the text" in said) == bool(gap) and said.startswith("normal: 2.0000")
    assert "; train longer" in yardsticks.assess(5.0, found, {}, {})
    assert ("; train longer" in yardsticks.assess(5.0, found, row, meta)) == (not gap)
    assert not gap or f"the validation loss is {gap:,} % above the training loss" in said


def test_a_training_shows_its_yardsticks_and_logs_them_once(folder):  # noqa: F811
    words = ["--data=my.txt", "--vocab_source=char", "--dim=32", "--n_layers=1", "--max_seq_len=32",
             "--max_iters=2", "--eval_iters=1", "--checks=none", "--peak_tflops=0.1",
             "--out_dir=measured"]
    done = forked.run([ROOT / "train.py", *words], folder, os.environ | {"OMP_NUM_THREADS": "1"})
    assert "scale: bits per byte of the validation text: chance " in done.stdout, done.stderr
    assert "\nnot normal" in done.stdout or "\nnormal" in done.stdout
    rows = [json.loads(line) for line in (folder / "measured/log.jsonl").read_text().splitlines()]
    stored = json.loads((folder / "measured/config.json").read_text())["yardsticks"]
    assert {name: rows[0][f"yardstick/{name}"] for name in yardsticks.WORDS} == stored
    assert not any(name.startswith("yardstick/") for row in rows[1:] for name in row)
