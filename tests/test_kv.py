"""
The KV cache in 32, 16 and 8 bits: compare run --kv with transformers, and fill 32,768 tokens.

tests/kernels.c compares the attention over each type with double precision, on every instruction
set.
"""
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

import llamac
from .test_run import ISAS, TEXT, Model, ids_of, logits, run

ERRORS = {"f32": 1e-4, "f16": 1e-3, "q8": 2e-2}  # max error of logits, relative to the largest


SHAPES = {"GQA": dict(heads=8, kv=2, tied=False),
          "heads of 6": dict(dim=36, hidden=77, heads=6, kv=6)}


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_of_each_type_are_transformers_but_for_rounding(run_bin, tmp_path, shape):
    model = Model(**SHAPES[shape])
    model.write_gguf(tmp_path / "m.gguf")
    expected = model.logits(ids_of(TEXT))
    for isa in ISAS:
        found = {kv: logits(run_bin, [tmp_path / "m.gguf", "--kv", kv], TEXT, model.vocab, isa)
                 for kv in ERRORS}
        errors = {kv: np.abs(x - expected).max() / np.abs(expected).max()
                  for kv, x in found.items()}
        assert all(errors[kv] <= most for kv, most in ERRORS.items()), (isa, errors)
        # Each name selects another precision; f32 is the default.
        assert errors["f32"] < errors["f16"] < errors["q8"], (isa, errors)
        assert (found["f32"]
                == logits(run_bin, [tmp_path / "m.gguf"], TEXT, model.vocab, isa)).all()


def test_the_default_of_quantised_weights_is_half_precision(run_bin, tmp_path):
    Model().write_gguf(tmp_path / "m.gguf", "q8_0")
    written = {kv: run(run_bin, tmp_path / "m.gguf", *flags, "--logits", "-i", TEXT)
               for kv, flags in (("", []), *((kv, [f"--kv={kv}"]) for kv in ERRORS))}
    assert written[""] == written["f16"] and len(set(written.values())) == 3


def test_greedy_texts_differ_only_at_near_ties(run_bin, tmp_path):
    """
    The text of each type follows transformers up to the first near tie.

    There, the logits of the two likeliest tokens differ by less than twice the error.
    """
    model = Model(heads=8, kv=2, tied=False, seed=1)
    model.w["output"][:3] = 0  # <unk>, BOS and EOS are never drawn
    model.write_gguf(tmp_path / "m.gguf")
    ids = ids_of("Hello there")
    written = model.oracle().generate(torch.tensor([ids]), do_sample=False, max_new_tokens=88,
                                      output_logits=True, return_dict_in_generate=True)
    shown = [bytes([i - 3]) if i < 259 else model.pieces[i][0]
             for i in written.sequences[0][1:].tolist()]
    best = [x.topk(2).values[0] / x.abs().max() for x in written.logits]
    for kv, least in (("f32", 88), ("f16", 88), ("q8", 10)):
        sure = next((i for i, (first, second) in enumerate(best)
                     if first - second < 2 * ERRORS[kv]), len(best))
        assert sure >= least, kv
        text = run(run_bin, tmp_path / "m.gguf", "-t", 0, "-n", 99, "-i", "Hello there", "--raw",
                   f"--kv={kv}")
        assert text.startswith(b"".join(shown[:len(ids) - 1 + sure])), kv


def test_broken_keys_and_values_are_found(run_bin, tmp_path):
    for name in "wk", "wv":
        model = Model(layers=1)
        model.w[name, 0][5, 5] = np.inf
        model.write_gguf(tmp_path / "m.gguf")
        for isa in ISAS:
            for kv in ERRORS:
                assert "not finite" in run(run_bin, tmp_path / "m.gguf", f"--kv={kv}", "-i", "abc",
                                           status=1, isa=isa)


@pytest.mark.parametrize("flags, said", [
    (["--kv=q9"], "unknown KV cache type 'q9', expected f32, f16 or q8"),
    (["--kv="], "unknown KV cache type ''"), (["--kv", "F16"], "unknown KV cache type 'F16'"),
    (["--kv=" + "8" * 5000], "unknown KV cache type"), (["--kv"], "value is missing")])
def test_other_names_are_refused(run_bin, tmp_path, flags, said):
    assert said in run(run_bin, tmp_path / "m.gguf", *flags, status=1)


def test_bits_in_the_library(library, tmp_path):
    Model().write_gguf(tmp_path / "m.gguf")
    model = llamac.Model(tmp_path / "m.gguf")
    tokens, found = model.encode(TEXT), {}
    for bits in (0, 32, 16, 8):
        sequence = llamac.Sequence(llamac.Engine(model, kv_bits=bits))
        sequence.forward(tokens, 0)
        found[bits] = sequence.logits
    assert (found[0] == found[32]).all()
    assert all((found[32] != found[bits]).any() for bits in (16, 8))
    for bits in (-8, 1, 7, 64):
        with pytest.raises(llamac.Error, match=f"a KV cache of {bits} bits, expected 32, 16 or 8"):
            llamac.Engine(model, kv_bits=bits)


def logits_and_peak(binary, args, text, vocab, folder):
    """Return the logits (tokens, vocab) and the peak memory of the program in bytes."""
    (folder / "text").write_text(text)
    child = subprocess.Popen([binary, *args, "--logits", "-f", folder / "text"],
                             stdout=subprocess.PIPE)
    wanted = 4 * vocab * len(ids_of(text))
    # The rest is larger than a pipe's buffer, so the program waits and its peak can be read.
    found = child.stdout.read(wanted - 100000)
    peak = 1024 * int(re.search(r"VmHWM:\s+(\d+) kB",
                                Path(f"/proc/{child.pid}/status").read_text())[1])
    found += child.communicate()[0]
    assert child.returncode == 0 and len(found) == wanted
    return np.frombuffer(found, np.float32).reshape(-1, vocab), peak


def test_a_context_of_32768_tokens(run_bin, tmp_path):
    """
    The last tokens of a long text have the same logits as in a short text.

    Each token of this model attends to a window of 40, and RoPE depends only on distances. The
    cache takes as many bytes as doc/models.md predicts.
    """
    positions, layers, kv_dim, peaks = 32768, 2, 64, {}
    model = Model(dim=128, hidden=96, layers=layers, heads=4, kv=2, vocab=260, seq=positions)
    model.write_gguf(tmp_path / "m.gguf", **{"llama.attention.sliding_window": 40})
    text = (TEXT * 400)[:positions]
    text = text[:len(text.encode()[:positions - 1].decode(errors="ignore"))]
    for kv in ERRORS:
        args = [tmp_path / "m.gguf", f"--kv={kv}"]
        found, peaks[kv] = logits_and_peak(run_bin, args, text, model.vocab, tmp_path)
        assert positions - 3 <= len(found) <= positions
        expected = logits(run_bin, args, text[-200:], model.vocab)
        assert np.abs(found[-20:] - expected[-20:]).max() <= ERRORS[kv] * np.abs(expected).max(), kv
    numbers, scales = 2 * layers * kv_dim * positions, 2 * layers * 2 * positions
    assert peaks["f32"] - peaks["f16"] == pytest.approx(2 * numbers, abs=2e6)
    assert peaks["f32"] - peaks["q8"] == pytest.approx(3 * numbers - 4 * scales, abs=2e6)
