"""
The results for a sequence are bit-identical for every composition and order of its batch and for
every division of its tokens into calls: tests/batches.c checks it on every instruction set and in
every format.
"""
import subprocess

import pytest

from .conftest import LIBRARY, SANITIZE, compile_c
from .test_run import FORMS, ISAS, Model

LONG = 720  # positions, so that attention has more than one range of them
SHAPES = {"GQA": dict(heads=8, kv=2, tied=False, seq=LONG),
          "heads of 6": dict(dim=36, hidden=77, heads=6, kv=6, seq=LONG)}


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    return compile_c(
        tmp_path_factory.mktemp("batches") / "batches", "-O3", "tests/batches.c", *LIBRARY)


def check(program, model, isa, threads=2, kv_bits=0, seed=1, rounds=1, *flags):
    command = [program, model, isa, threads, kv_bits, seed, rounds, *flags]
    found = subprocess.run([*map(str, command)], capture_output=True, text=True)
    assert found.stdout == "the same\n", found.stderr[-2000:]


@pytest.mark.parametrize("form", FORMS)
def test_every_format(program, tmp_path, form):
    (model, *_), _ = Model(layers=1, **SHAPES["GQA"]).write(tmp_path, form)
    for isa in ISAS:
        check(program, model, isa)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_cache_number_of_threads_and_layout(program, tmp_path, shape):
    Model(**SHAPES[shape]).write_gguf(tmp_path / "m.gguf")
    for isa in ISAS:
        # With 7 threads, the ranges of positions are split among the threads.
        for kv_bits, threads in (16, 1), (8, 3), (32, 7):
            check(program, tmp_path / "m.gguf", isa, threads, kv_bits, seed=threads)
        check(program, tmp_path / "m.gguf", isa, 2, 0, 4, 1, "no_copy")


def test_sliding_windows(program, tmp_path):
    for window in 7, 150, 600:
        Model(layers=1, **SHAPES["GQA"]).write_gguf(
            tmp_path / "m.gguf", **{"llama.attention.sliding_window": window})
        for isa in ISAS:
            check(program, tmp_path / "m.gguf", isa, seed=window)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_two_hundred_batches_under_sanitizers(tmp_path, form):
    program = compile_c(tmp_path / "batches", *SANITIZE, "tests/batches.c", *LIBRARY)
    (model, *_), _ = Model(layers=1, **SHAPES["heads of 6"]).write(tmp_path, form)
    for isa in ISAS:
        check(program, model, isa, threads=3, seed=7, rounds=10)
