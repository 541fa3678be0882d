"""Sizes derived from the text, the machine and the time budget."""
import json
import math
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import train
from engine.training import checkpoint, costs, fit_batch, hardware, plan, progress
from model import ModelArgs
from tests import forked
from tests.trainer_config import trainer_config
from tokenizer import Tokenizer, train_tokenizer

ROOT = Path(__file__).resolve().parents[1]
CPU = torch.device("cpu")
SETUP = costs.TrialSetup(train.BUILD, CPU, torch.float32)
VAL = {"val_tokens": 40_000, "val_documents": 0}  # the validation split's keys in meta.json
SIZES = [2_000, 10_000, 100_000, 1_000_000, 10_000_000, 1_000_000_000]


def knobs(**values):
    return trainer_config(**{"data": "my.txt"} | values)


def planned(monkeypatch, size, minutes=5.0, flops=5e10, given=(), **values):
    """Return the config planned for a machine with a step time of 2 ms plus its FLOPs / flops."""
    def seconds(s, vocab, *_):
        assert vocab > 0
        blocks = 12 * s.n_layers * s.dim ** 2
        return 0.002 + 6 * (blocks + vocab * s.dim) * costs.tokens_per_step(s) / flops

    monkeypatch.setattr(plan, "step_seconds", seconds)
    monkeypatch.setattr(plan.hardware, "free_memory", lambda device: 1 << 40)
    s = knobs(minutes=minutes, **values)
    found = plan.plan_shape(s, {*given, "minutes", *values}, size, SETUP)
    return s.changed(**plan.values(found))


def test_when_the_sizes_follow_from_the_time():
    assert plan.derives_from_time(knobs(), set())
    assert plan.derives_from_time(knobs(), {"dim", "learning_rate", "data"})
    assert not plan.derives_from_time(knobs(data="stories:2000"), set())
    assert not plan.derives_from_time(knobs(data="stories"), {"data"})
    assert plan.derives_from_time(knobs(data="stories", minutes=1.0), {"minutes"})
    assert all(plan.derives_from_time(knobs(init_from=word), {"init_from"})
               for word in ("auto", "force", "scratch"))
    assert not any(plan.derives_from_time(knobs(), {name})
                   for name in ("max_iters", "depth", "max_minutes"))
    assert not plan.derives_from_time(knobs(init_from="out/demo"), {"init_from"})


def test_a_small_text_of_characters_of_many_bytes_is_read_by_characters(tmp_path):
    """
    This holds for every encoding and kind of file, but not for a large text, one of characters of
    few bytes, or one whose vocabulary is given.
    """
    chinese, mixed = ("列位看官：你道此书从何而来？说起根由，虽近荒唐，细按则深有趣味。\n" * 20,
                      "训练 loss 的单位是 nats，比特除以 ln 2。\n" * 30)
    (tmp_path / "zh.txt").write_text(chinese)
    (tmp_path / "mixed.txt").write_text(mixed)
    (tmp_path / "gb.txt").write_bytes(chinese.encode("gb18030"))
    (tmp_path / "utf16.txt").write_text(chinese, encoding="utf-16")
    (tmp_path / "zh.jsonl").write_text(json.dumps({"text": chinese}) * 2)
    (tmp_path / "en.txt").write_text("Ça va, naïve café? Once upon a time there was. " * 30)
    (tmp_path / "few").mkdir()
    (tmp_path / "few/a.md").write_text(chinese)
    for name, has_characters in {"zh.txt": 1, "mixed.txt": 1, "gb.txt": 1, "utf16.txt": 1,
                                 "zh.jsonl": 1, "few": 1, "en.txt": 0}.items():
        config = knobs(data=str(tmp_path / name), cache=str(tmp_path / "cache"))
        assert ([*plan.plan_characters(config, {"data"}, 10_000)]
                == ["vocab_source"] * has_characters), name
    assert not plan.plan_characters(config, {"data", "vocab_size"}, 10_000)
    config = config.changed(data=str(tmp_path / "zh.txt"))
    assert not plan.plan_characters(config, set(), 10 ** 6)
    assert not plan.plan_characters(config, {"vocab_source"}, 1)
    assert not plan.plan_characters(config.changed(data="stories"), set(), 1)


@pytest.mark.parametrize("size", SIZES)
def test_a_vocabulary_has_at_most_a_third_of_the_parameters_or_three_quarters_with_ample_text(size):
    for dim in plan.WIDTHS:
        for layers in (1, 2, 3, 8):
            pieces = plan.max_vocab_size(dim, layers, size)
            tables, share = (2, 3 / 4) if plan.has_ample_text(dim, layers, size) else (1, 1 / 3)
            assert tables * pieces * dim <= (12 * layers * dim ** 2 + tables * pieces * dim) * share
            assert pieces * 192 <= size


def test_sizes_that_are_all_given_leave_nothing_to_plan(monkeypatch):
    sizes = {"dim": 64, "n_layers": 2, "n_heads": 2, "tie_embeddings": True, "max_seq_len": 64,
             "batch_size": 4}
    found = planned(monkeypatch, 1_000_000, vocab_source="byte", **sizes)
    assert {name: getattr(found, name) for name in sizes} == sizes


def test_more_time_more_text_or_a_faster_machine_never_make_a_smaller_model(monkeypatch):
    by_time = [planned(monkeypatch, 10_000_000, minutes).dim
               for minutes in (0.1, 1, 5, 20, 100, 1000)]
    by_text = [planned(monkeypatch, size, 100.0).dim for size in SIZES]
    by_speed = [planned(monkeypatch, 1_000_000_000, 20.0, flops).dim
                for flops in (1e10, 1e11, 1e12, 1e13, 3e14)]
    for widths in (by_time, by_text, by_speed):
        assert widths == sorted(widths) and widths[0] < widths[-1], widths
    assert by_speed[-1] >= 512  # 20 minutes of a good GPU can train more than a toy model


@pytest.mark.parametrize("size", SIZES)
def test_every_plan_can_train(monkeypatch, size):
    for minutes in (0.1, 5.0, 100.0):
        s = planned(monkeypatch, size, minutes)
        vocab = s.max_vocab_size or 259
        assert (s.vocab_source == "byte") != bool(s.max_vocab_size)
        assert ModelArgs.of(s, vocab).problem() is None
        assert 12 * s.n_layers * s.dim ** 2 <= max(plan.max_block_params(size), 12 * 2 * 32 ** 2)
        # The held-out text has two contexts, even if a token is a byte.
        assert s.max_seq_len * 2 <= size / 10
        meta = {"train_tokens": size // 3, "train_bytes": 9 * size // 10, "vocab_size": vocab,
                **VAL}
        seconds, more = plan.plan_length(s, set(), meta, SETUP)
        values = plan.values(more)
        assert 30 * minutes <= seconds <= 60 * minutes
        assert values["max_iters"] >= 20
        epochs = values["max_iters"] * costs.tokens_per_step(s) / meta["train_tokens"]
        assert (epochs <= plan.max_epochs(size) * 1.1
                + 20 * costs.tokens_per_step(s) / meta["train_tokens"]
                or "more than the time allows" in more["max_iters"][1])
        assert 0 <= values["dropout"] < 0.5
        assert 0 < values["learning_rate"] < 0.02


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("size, minutes, times", [
    (10 ** 9, 1.0, 16), (10 ** 7, 0.5, 8), (10_000, 5.0, 1)])
def test_a_gpu_that_waits_for_launches_reads_more_in_a_step_where_there_is_more_to_read(
        monkeypatch, device, size, minutes, times):
    """
    A step takes 5 ms for any batch of up to 0.625 * times the usual tokens. The plan doubles the
    batch until a step takes much longer or the text is read often enough.
    """
    s = planned(monkeypatch, size, minutes, given={"dim"}, dim=64)
    meta = {"train_tokens": size // 3, "train_bytes": 9 * size // 10, "vocab_size": 500, **VAL}
    usual = costs.tokens_per_step(s)
    monkeypatch.setattr(plan, "step_seconds", lambda s, *_: max(
        0.005, 0.004 * costs.tokens_per_step(s) / usual / (times / 2)))

    def found(given):
        _, length = plan.plan_length(s, given, meta, costs.TrialSetup(
            train.BUILD, torch.device(device), torch.float32))
        return plan.values(length)

    monkeypatch.setattr(plan.hardware, "free_memory", lambda device: 1 << 40)
    many = found(set()).get("batch_size", 0) / s.batch_size
    # 0: the plan leaves the batch as it is.
    assert many == 0 if device == "cpu" or times == 1 else times / 2 <= many <= times
    assert "batch_size" not in found({"batch_size"})


def test_dropout_grows_with_how_often_a_text_is_read():
    """
    Dropout is 0 for up to four epochs, and a tenth at six, which would otherwise memorize the text:
    doc/lab/own_text.md.
    """
    found = [plan.dropout_for(epochs) for epochs in (0.01, 1, 4, 6, 40, 60)]
    assert found == sorted(found)
    assert found[0] == found[2] == 0 < found[3] == found[4] < found[5] < 0.5


def test_weights_are_averaged_where_a_text_is_read_often(monkeypatch):
    def average(minutes, *given):
        meta = {"train_tokens": 33_000, "train_bytes": 90_000, "vocab_size": 512, **VAL}
        s = planned(monkeypatch, 100_000, minutes)
        return plan.values(plan.plan_length(s, set(given), meta, SETUP)[1]).get("weight_average")

    assert average(0.01) == 0 < average(5.0) < 1 and average(5.0, "weight_average") is None


def test_ngrams_teach_where_a_text_is_read_often(monkeypatch):
    def teacher(minutes, *given, size=90_000, **meta):
        meta = {"train_tokens": 33_000, "train_bytes": size, "vocab_size": 512, **VAL} | meta
        s = planned(monkeypatch, size, minutes)
        found = plan.values(plan.plan_length(s, set(given), meta, SETUP)[1])
        return found.get("teacher"), "early_stop" in found

    assert teacher(0.01) == (None, True) and teacher(5.0) == ("ngrams", True)
    # The n-grams write text of their own here, and early stop is left out.
    assert teacher(5.0, size=60_000) == ("ngrams", False)
    assert teacher(5.0, "teacher")[0] is None
    assert teacher(20.0, size=300_000)[0] is None
    assert teacher(5.0, vocab_size=32_000)[0] is None
    assert teacher(5.0, chat_template="chatml")[0] is None


def test_the_decay_grows_with_how_often_a_text_is_read_until_weights_forget_it(monkeypatch):
    """
    Decays are near the best ones in doc/lab/own_text.md: 0.4 for width 160 and 2 layers with 1 MB,
    1 for 100 kB that are read often, less for 7 epochs.
    """
    def decay(size, epochs):
        s = planned(monkeypatch, size, 10.0)
        return plan.decay_for(epochs, 3 * costs.tokens_per_step(s) / size, plan.rate_for(s.dim))

    often = [decay(size, 25) for size in SIZES]
    assert often == sorted(often, reverse=True) and often[0] == 1 and often[-1] == 0.1
    assert [decay(1_000_000, 16), decay(100_000, 7), decay(100_000, 22)] == [0.4, 0.4, 1.0]
    # width 192 and 3 layers with 1 MB
    assert plan.decay_for(10, 1536 / 346_000, plan.rate_for(192)) >= 0.6
    assert {decay(size, epochs) for size in SIZES for epochs in (0.01, 1, 2)} == {0.1}


@pytest.mark.parametrize("possible", [100.4, 100.6])
def test_where_the_time_is_the_limit_it_is_told_whatever_is_rounded(monkeypatch, possible):
    s, meta = (planned(monkeypatch, 1_000_000),
               {"train_tokens": 300_000, "train_bytes": 900_000, "vocab_size": 512, **VAL})
    monkeypatch.setattr(plan, "training_seconds", lambda minutes: 60.0)
    monkeypatch.setattr(plan, "step_seconds", lambda *_: 60 / possible)
    steps, why = plan.plan_length(s, set(), meta, SETUP)[1]["max_iters"]
    assert steps == 10 * round(possible) and "more than the time allows" in why


def test_every_width_that_is_tried_makes_a_model():
    for dim in plan.WIDTHS:
        s = knobs().changed(**plan.values(plan.shape_of_width(knobs(), set(), dim, 10 ** 9)))
        assert not train.BUILD.model_args(s, 500).problem(), dim


def test_the_context_grows_with_the_width():
    size = 10 ** 9
    found = [plan.values(plan.shape_of_width(knobs(), set(), dim, size))["max_seq_len"]
             for dim in (32, 64, 128, 512, 1024, 4096)]
    assert found == [64, 64, 128, 512, 1024, 1024]


def test_runs_of_a_text_compare_however_fast_the_machine_is(monkeypatch):
    """
    Evaluations read the same tokens on every machine; a slower machine evaluates less often. An
    evaluation computes only the forward pass, a third of a step.
    """
    s, meta = (planned(monkeypatch, 1_000_000),
               {"train_tokens": 300_000, "train_bytes": 900_000, "vocab_size": 512, **VAL})
    monkeypatch.setattr(plan, "training_seconds", lambda minutes: 60.0)
    tokens = sum(costs.eval_limits(s.eval_iters, meta).values())
    assert tokens == 40_000 + 10_000
    shares = {}
    for steps in 50, 2000, 3000, 6000:
        monkeypatch.setattr(plan, "step_seconds", lambda *_: 60.0 / steps)
        length = plan.values(plan.plan_length(s, set(), meta, SETUP)[1])
        assert "eval_iters" not in length
        count = steps // length["eval_interval"]
        shares[count] = count * tokens / 3 / (steps * costs.tokens_per_step(s))
    assert min(shares) == 3 and max(shares) == 12 and len(shares) > 2
    assert all(0.04 < share < 0.09 for count, share in shares.items() if 3 < count < 12)


def test_the_decay_goes_with_a_rate_that_is_given(monkeypatch):
    # The budget is so long that the time since the program started changes nothing.
    s = planned(monkeypatch, 1_000_000, 10.0).changed(minutes=1000.0)
    meta = {"train_tokens": 330_000, "train_bytes": 900_000, "vocab_size": 1920, **VAL}

    def decay(rate, *given):
        config = s.changed(learning_rate=rate)
        return plan.values(plan.plan_length(config, set(given), meta, SETUP)[1]).get("weight_decay")

    assert decay(1.0) == decay(1e-4) == decay(plan.rate_for(s.dim), "learning_rate") > 0.1
    assert decay(1e-4, "learning_rate") > 0.5
    assert decay(0.1, "learning_rate") == 0.1
    assert decay(1e-4, "weight_decay") is None


def test_of_a_large_text_as_much_is_prepared_as_there_is_time_for(monkeypatch, tmp_path):
    found = [planned(monkeypatch, 10 ** 11, minutes).max_text_bytes
             for minutes in (1.0, 5.0, 20.0, 100.0)]
    assert found == sorted(set(found))
    assert found[0] >= plan.LARGE_TEXT // 4
    assert all(most & (most - 1) == 0 for most in found)
    s = planned(monkeypatch, 10 ** 11)
    readable = 3e2 / (0.002 + 6 * (12 * s.n_layers * s.dim ** 2 + s.max_vocab_size * s.dim)
                      * costs.tokens_per_step(s) / 5e10)
    # A token has about four bytes.
    assert 3 < s.max_text_bytes / (4 * readable * costs.tokens_per_step(s)) < 9
    assert not planned(monkeypatch, 10_000_000).max_text_bytes
    assert not planned(monkeypatch, 10 ** 11, flops=1e16).max_text_bytes
    assert planned(monkeypatch, 10 ** 11, max_text_bytes=5).max_text_bytes == 5
    assert not planned(monkeypatch, 10 ** 11, data="stories").max_text_bytes
    monkeypatch.setattr(plan, "read_meta", lambda folder: {"vocab_size": 500})
    (tmp_path / "meta.json").touch()
    (tmp_path / "train.bin").touch()
    assert not planned(monkeypatch, 10 ** 11, data=str(tmp_path)).max_text_bytes
    meta = {"train_tokens": 10 ** 6, "train_bytes": 4 * 10 ** 6, "whole_bytes": 4 * 10 ** 8}
    row = {"epoch": 0.5, "tokens": 500_000}
    assert "(0.5 % of it was read)" in plan.limiting_factor(
        s, {"last": None, "step": 50}, row, meta)
    assert "4 MB of the text that were prepared (read 2 times)" in plan.limiting_factor(
        s, {"last": None, "step": 50}, row | {"epoch": 2.0}, meta)


def test_where_there_is_time_a_text_has_what_was_best_for_its_size(monkeypatch):
    """
    The best sizes in doc/lab/own_text.md: width 192, 3 layers and a context of 256 for 1 MB; width
    112 and 2 layers for 100 kB.
    """
    large, small = (planned(monkeypatch, size, 60.0) for size in (1_100_000, 100_000))
    assert (large.dim, large.n_layers, large.max_seq_len, large.tie_embeddings) == (
        192, 3, 256, False)
    assert 1800 < large.max_vocab_size < 2000
    assert (small.dim, small.n_layers, small.max_vocab_size) == (112, 2, 512)


def test_a_text_of_half_a_megabyte_and_more_has_two_tables_that_begin_with_counts_of_pairs(
        monkeypatch):
    """Two tables that begin at random need twice the learning rate."""
    meta = {"train_tokens": 10 ** 6, "train_bytes": 4 * 10 ** 6, "vocab_size": 1000, **VAL}

    def found(s, *given):
        length = plan.values(plan.plan_length(s, set(given), meta, SETUP)[1])
        return s.tie_embeddings, length.get("bigram_start", False), length["embedding_lr_scale"]

    short, long = planned(monkeypatch, 400_000, 20.0), planned(monkeypatch, 600_000, 20.0)
    assert found(short) == (True, False, 2.0) and found(long) == (False, True, 2.0)
    assert found(planned(monkeypatch, 10_000_000, 1.0)) == (False, True, 2.0)
    assert found(planned(monkeypatch, 10_000_000, 1.0, tie_embeddings=True)) == (True, False, 2.0)
    assert found(long, "bigram_start") == (False, False, 4.0)
    assert not planned(monkeypatch, 10_000, 1.0, bigram_start=True).tie_embeddings
    assert planned(monkeypatch, 600_000, 20.0, vocab_source="char").tie_embeddings
    assert planned(monkeypatch, 600_000, 20.0, bigram_start=False).tie_embeddings
    meta["vocab_size"] = 100
    assert found(long) == (False, False, 4.0)
    meta["vocab_size"] = 1000
    assert found(long.changed(init_from="my.gguf")) == (False, False, 4.0)
    with pytest.raises(KeyError):
        found(long.changed(optimizer="adamw"))


def test_squared_gradients_are_averaged_for_longer_where_most_tokens_are_rare(monkeypatch):
    """
    This applies only with Muon, which leaves the tables to AdamW. Bytes, characters and the pieces
    of the stories are all frequent.
    """
    def beta2(size, *given, source="custom", vocab_size=1000, **values):
        config = planned(monkeypatch, size, 20.0).changed(**values)
        meta = {"train_tokens": size // 4, "train_bytes": size, "vocab_size": vocab_size,
                "vocab_source": source, **VAL}
        return plan.values(plan.plan_length(config, set(given), meta, SETUP)[1]).get("beta2")

    assert beta2(600_000) > knobs().beta2
    assert beta2(600_000) == beta2(100_000) == beta2(100_000, vocab_size=512)
    assert beta2(10_000, source="byte", vocab_size=259) is None
    assert beta2(66_000, source="char") is beta2(600_000, vocab_size=128) is None
    assert beta2(10 ** 7, data="stories") is beta2(10 ** 7, data="stories:90000") is None
    assert beta2(600_000, init_from="my.gguf") is beta2(600_000, "beta2") is None
    assert beta2(600_000, optimizer="adamw") is beta2(600_000, optimizer="nadam") is None


def test_conversations_have_a_context_in_which_nearly_all_fit():
    """Of 100 conversations, 96 have 100 tokens."""
    lengths = np.array([100] * 96 + [900] * 4)
    marks = np.zeros(lengths.sum(), "u1")
    marks[np.append(0, lengths.cumsum()[:-1])] = plan.FIRST
    prepared = SimpleNamespace(train=marks, masks={"train": marks})

    def context(given=(), masks=prepared.masks, **values):
        prepared.masks = masks
        return plan.values(plan.plan_context(knobs(**values), given, prepared))

    assert context(max_seq_len=64, batch_size=8) == {"max_seq_len": 128, "batch_size": 4}
    assert context(max_seq_len=32, batch_size=2) == {"max_seq_len": 128, "batch_size": 1}
    assert context({"batch_size"}, max_seq_len=64, batch_size=8) == {"max_seq_len": 128}
    assert context(max_seq_len=128) == context(max_seq_len=512) == {}
    assert context({"max_seq_len"}, max_seq_len=64) == context(masks={}, max_seq_len=64) == {}


def test_a_step_that_seems_slow_is_measured_again(monkeypatch):
    usual = planned(monkeypatch, 10_000_000, 5.0).dim
    measured = []

    def found(every):
        measure = plan.step_seconds
        monkeypatch.setattr(plan, "step_seconds", lambda *args: measured.append(1) or (
            measure(*args) * (100 if len(measured) % every == 0 else 1)))
        return plan.plan_shape(knobs(minutes=5.0), set(), 10_000_000, SETUP)["dim"][0]

    assert found(every=2) == usual and found(every=1) < usual


def test_what_is_given_stays(monkeypatch):
    s = planned(monkeypatch, 1_000_000, dim=48, n_layers=5, vocab_size=600, batch_size=3)
    assert (s.dim, s.n_layers, s.vocab_size, s.max_vocab_size, s.batch_size) == (48, 5, 600, 0, 3)
    meta = {"train_tokens": 10_000, "train_bytes": 30_000, "vocab_size": 600, **VAL}
    _, more = plan.plan_length(s, {"dropout", "max_iters"}, meta, SETUP)
    assert not {"dropout", "max_iters"} & more.keys()
    assert planned(monkeypatch, 1_000_000, vocab_source="char").max_vocab_size == 0
    assert planned(monkeypatch, 1_000_000, dim=100).n_heads == 2
    assert planned(monkeypatch, 1_000_000, n_heads=5).dim % 10 == 0
    assert planned(monkeypatch, 1_000_000, max_seq_len=512).batch_size * 512 < 2500


@pytest.mark.parametrize("size, values", [
    (1_000_000, {"n_kv_heads": 2}), (1_000_000, {"n_kv_heads": 7}), (10 ** 9, {"n_kv_heads": 8}),
    (1_000_000, {"n_heads": 3}), (1_000_000, {"n_heads": 4, "n_kv_heads": 2}),
    (2_000, {"vocab_source": "custom"}), (1_000_000, {"max_vocab_size": 0})])
def test_a_plan_fits_the_sizes_that_are_given(monkeypatch, size, values):
    s = planned(monkeypatch, size, **values)
    assert ModelArgs.of(s, 259).problem() is None
    assert {name: getattr(s, name) for name in values} == values


@pytest.mark.parametrize("values, words", [
    ({"n_heads": 3, "dim": 64}, "dim=64 over n_heads=3"),
    ({"n_heads": 0}, "n_heads is 0"),
    ({"n_heads": 11}, "over n_heads=11"),
    ({"n_heads": 4, "n_kv_heads": 3}, "not a multiple of n_kv_heads=3"),
    ({"dropout": 2.0}, "dropout is 2.0"),
    ({"n_layers": -1}, "n_layers is -1"),
])
def test_sizes_that_no_plan_can_have_are_one_line(monkeypatch, capsys, values, words):
    with pytest.raises(SystemExit):
        planned(monkeypatch, 1_000_000, **values)
    assert words in (told := capsys.readouterr().err) and told.count("\n") == 1


def test_memory_bounds_the_model(monkeypatch):
    monkeypatch.setattr(plan, "step_seconds", lambda *_: 1e-9)
    widths = []
    for free in (1 << 25, 1 << 28, 1 << 31):
        monkeypatch.setattr(plan.hardware, "free_memory", lambda device, free=free: free)
        found = plan.plan_shape(knobs(), set(), 1 << 40, SETUP)
        widths.append(found["dim"][0])
        assert found["dim"][1] == "the widest that fits into memory"
    assert widths == sorted(set(widths))


CARD = costs.TrialSetup(train.BUILD, torch.device("cuda"), torch.bfloat16)


def test_memory_of_a_gpu_bounds_the_model_by_its_own_parameters(monkeypatch):
    """The expected peak of parameters, activations and logits leaves a tenth of it free."""
    monkeypatch.setattr(plan, "step_seconds", lambda *_: 1e-9)
    widths = []
    for gib in (1, 3, 8):
        monkeypatch.setattr(plan.hardware, "free_memory", lambda device, gib=gib: gib << 30)
        found = plan.plan_shape(knobs(), set(), 1 << 40, CARD)
        assert found["dim"][1] == "the widest that fits into memory"
        s = knobs(**plan.values(found))
        args = train.BUILD.model_args(s, plan.expected_vocab_size(s, 1 << 40))
        assert sum(costs.expected_memory(
            s, args, CARD.device, CARD.amp_dtype).values()) < 0.9 * (gib << 30)
        widths.append(s.dim)
    assert widths == sorted(set(widths))


def test_a_larger_batch_fits_into_the_gpu(monkeypatch):
    """The batch grows up to the expected memory, or until a step runs out of memory."""
    meta = {"train_tokens": 10 ** 11, "train_bytes": 3 * 10 ** 11, "vocab_size": 500}
    s = planned(monkeypatch, 10 ** 9, given={"dim"}, dim=256)
    monkeypatch.setattr(plan, "step_seconds", lambda *_: 0.005)

    def doublings(free):
        monkeypatch.setattr(plan.hardware, "free_memory", lambda device: free)
        return plan.fill_gpu(s, set(), meta, CARD)[0].batch_size // s.batch_size

    args = train.BUILD.model_args(s, 500)
    of_four = sum(
        costs.expected_memory(s, args, CARD.device, CARD.amp_dtype, 4 * s.batch_size).values())
    assert doublings(1 << 40) == 16 and doublings(of_four / 0.8) == 4 and doublings(1 << 20) == 1

    def step_seconds(s2, *_):
        if s2.batch_size > 2 * s.batch_size:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return 0.005

    monkeypatch.setattr(plan, "step_seconds", step_seconds)
    assert doublings(1 << 40) == 2


def test_what_a_gpu_keeps_without_a_tensor_is_free(monkeypatch):
    """
    PyTorch keeps a trial's memory reserved after it. Another process can have it once it is
    released, as it is before batch sizes are tried.
    """
    for name, found in (("mem_get_info", (2 << 30, 8 << 30)), ("memory_reserved", 5 << 30),
                        ("memory_allocated", 1 << 30)):
        monkeypatch.setattr(torch.cuda, name, lambda device, found=found: found)
    assert hardware.free_memory(torch.device("cuda")) == 6 << 30

    calls = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("released"))
    monkeypatch.setattr(fit_batch, "run_child", lambda search: (
        calls.append("tried") or ([fit_batch.Fit(1, 1, 1.0)], "")))
    fit_batch.largest_batch(knobs(batch_size=2), SimpleNamespace(vocab_size=9), CARD)
    assert calls == ["released", "tried"]


def test_a_small_part_held_out_holds_a_context(monkeypatch):
    assert (planned(monkeypatch, 1_000_000, val_fraction=0.001).max_seq_len * 4 <= 1000
            < planned(monkeypatch, 1_000_000).max_seq_len * 10)
    for fraction in 0.0001, 0.9999:  # 100 bytes are held out, or left to train on
        assert 4 <= planned(monkeypatch, 1_000_000, val_fraction=fraction).max_seq_len <= 25


def test_the_limit_that_is_told():
    meta = {"train_tokens": 1000, "train_bytes": 3000}
    s, row = (knobs(dim=96, n_layers=2, minutes=5.0, max_iters=100),
              {"epoch": 0.4, "tokens": 100_000})
    usual = {"last": None, "step": 50, "clock": {"seconds": 100.0}}
    told = lambda state, **more: plan.limiting_factor(s, usual | state, row | more, meta)
    assert "by the time (40 % of it was read): --minutes=20" in told({})
    assert "the model has memorized (read 30 times)" in told({"last": 50}, epoch=30.0)
    assert "by the text (read 150 times)" in told({"step": 100}, epoch=150.0)
    assert told({"last": 50}, epoch=30.0).endswith(
        "unless teachers use it: --teacher=auto --minutes=9")  # 5 x 100 seconds
    s = s.changed(teacher="ngrams")
    # The n-grams have written text, so models would add nothing.
    assert told({"last": 50}, epoch=30.0).endswith("more time hardly does")
    meta["train_bytes"] = 90_000
    assert told({"last": 50}, epoch=30.0).endswith("--teacher=auto --minutes=9")
    usual_settings, s = s, s.changed(teacher="out/other")
    assert told({"last": 50}, epoch=30.0).endswith("more time hardly does")
    s = knobs(dim=96, n_layers=2, minutes=5.0, max_iters=100, teacher="")  # a teacher's settings
    assert told({"last": 50}, epoch=30.0).endswith("more time hardly does")
    s = usual_settings
    meta["train_bytes"] = 3000
    losses = {"loss/val": 6.0, "loss/train_eval": 2.0}  # the text is memorized
    assert "by the text (read 9 times)" in told({}, epoch=9.0, **losses)
    assert "by the time" in told({}, **losses)
    assert "by --max_iters=100, as given (40 % of it was read)" in told({"step": 100})
    assert "a larger --dim (now 96)" in told({}, tokens=10 ** 9)


def test_the_rarest_characters_of_a_small_vocabulary_are_bytes(tmp_path):
    text = ("".join(chr(0x4E00 + i) * (2000 // (i + 1) + 1) for i in range(2000))
            + "\n天地玄黃宇宙洪荒\n")
    assert train_tokenizer([text], 400, tmp_path / "raised.model", exact=False).vocab_size > 2000
    small = train_tokenizer([text], 400, tmp_path / "small.model", exact=False, is_maximum=True)
    assert 300 < small.vocab_size <= 400
    assert small.decode(small.encode(text[-200:])) == text[-200:]
    assert Tokenizer.load(tmp_path / "small.model").encode(chr(0x4E00)) == small.encode(chr(0x4E00))
    assert len(small.encode(chr(0x4E00) * 2)) <= 3 < len(small.encode(chr(0x4E00 + 1999)))


def run(folder, *words):
    done = forked.run([ROOT / "train.py", *words], folder, os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    return done.stdout


def rows(folder):
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def test_a_text_and_a_time_are_enough(tmp_path):
    words = (ROOT / "README.md").read_text(encoding="utf-8").encode()[:9000]
    (tmp_path / "my.txt").write_bytes(words)
    # Whether n-grams teach depends on how often this machine can read the text.
    args = ["--data=my.txt", "--device=cpu", "--peak_tflops=0.1", "--teacher="]
    text = run(tmp_path, *args, "--minutes=0.05")
    assert "minutes            0.05" in text
    assert "as given" in text
    assert "tie_embeddings     True" in text
    assert "\nlimited by the " in text
    assert "finished: best validation loss" in text and "./run out/my/model.gguf" in text
    stored = json.loads((tmp_path / "out/my/config.json").read_text())
    stored = stored.get("config", stored)
    assert stored["minutes"] == 0.05
    assert stored["vocab_source"] == "byte"
    assert stored["early_stop"] == 3
    last = rows(tmp_path / "out/my")[-1]
    assert math.isclose(last["epoch"], last["tokens"] / stored["dataset"]["train_tokens"])
    assert json.loads((tmp_path / "out/my/result.json").read_text())["ended_by"] in (
        "minutes", "max_iters")
    assert "this run is finished" in run(tmp_path, *args)
    assert "raise --minutes" in run(tmp_path, *args, "--minutes=0.05")
    text = run(tmp_path, *args, "--minutes=0.09")
    assert "minutes: 0.05 -> 0.09" in text and "finished: best" in text
    assert rows(tmp_path / "out/my")[-1]["iter"] > last["iter"]


def test_an_evaluation_prepares_as_much_of_a_text_as_its_model_was_trained_on(tmp_path):
    (tmp_path / "my.txt").write_bytes((ROOT / "README.md").read_bytes()[:9000])
    args = ["--data=my.txt", "--device=cpu", "--peak_tflops=0.1", "--vocab_source=byte", "--dim=32",
            "--max_seq_len=32", "--checks=none"]
    run(tmp_path, *args, "--max_text_bytes=2000", "--max_iters=2", "--eval_iters=1")
    text = run(tmp_path, "--data=my.txt", "--device=cpu", "--init_from=out/my", "--eval_only=True",
               "--out_dir=other")
    assert "; max_text_bytes=2000" in text and "validation loss" in text


def test_a_run_that_learns_by_heart_goes_back_to_its_best_and_ends(tmp_path):
    words = (ROOT / "README.md").read_text(encoding="utf-8").encode()[:3000]
    (tmp_path / "my.txt").write_bytes(words)
    args = ["--data=my.txt", "--vocab_source=byte", "--dim=64", "--n_layers=2", "--n_heads=2",
            "--max_seq_len=64", "--batch_size=8", "--warmup_iters=5", "--eval_interval=20",
            "--eval_iters=1", "--max_iters=100000", "--learning_rate=1e-2", "--device=cpu",
            "--peak_tflops=0.1", "--out_dir=run", "--sample_prompt=a", "--early_stop=2"]
    text = run(tmp_path, *args)
    found = {row["iter"]: row["loss/val"] for row in rows(tmp_path / "run") if "loss/val" in row}
    told = [line for line in text.splitlines()
            if line.startswith("no better validation loss since iter ")]
    assert len(told) == 1 and "finished: best validation loss" in text
    best = int(told[0].split("iter ")[1].split(":")[0])
    turn = best + 40
    assert found[turn] > found[best] == min(loss for step, loss in found.items() if step <= turn)
    assert json.loads((tmp_path / "run/result.json").read_text())["ended_by"] == "early_stop"
    assert max(found) == turn + max(1, best // 5)
    assert list(found.values())[-1] <= 1.02 * min(found.values())
    assert (checkpoint.load(checkpoint.newest(tmp_path / "run"), "train")["state"]["last"]
            == max(found))
    done = run(tmp_path, *args)
    assert "this run is finished" in done and "raise" not in done  # raising it would not help
    refused = forked.run([ROOT / "train.py", *args, "--minutes=1"], tmp_path, os.environ)
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1, refused.stderr
    assert ("run holds a run whose sizes were not derived from --minutes, so it can't be resumed "
            "with --minutes; --max_minutes limits") in refused.stderr


def test_a_run_whose_best_could_not_be_saved_goes_on_from_where_it_is(tmp_path, capsys):
    s, state = (SimpleNamespace(out_dir=str(tmp_path), max_iters=100),
                {"step": 60, "best_due": [1.0, 30]})
    writer = SimpleNamespace(wait=lambda: None)
    # Neither the best nor the newest checkpoint could be saved, as on a full disk.
    assert progress.end_soon(s, 100, None, None, state, writer) == 66
    assert "since iter 30: iter 66 is the last" in capsys.readouterr().out
