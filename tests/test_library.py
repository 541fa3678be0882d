"""The C library from outside: two models in one process, opens and closes, what it exports, the example."""
import re
import shutil
import subprocess

import pytest

from tests.conftest import LIBRARY, ROOT, SANITIZE, compile_c
from tests.test_run import Model, run, two_models


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    return compile_c(tmp_path_factory.mktemp("library") / "library", *SANITIZE, "tests/library.c", *LIBRARY)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return two_models(tmp_path_factory.mktemp("models"))


def call(*command):
    done = subprocess.run([*map(str, command)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_two_models_used_by_threads_write_their_own_texts(program, models):
    call(program, "twice", *models)


def test_a_thousand_opens_and_closes_leak_nothing(program, models):
    call(program, "often", models[0], 1000)


def test_mistakes_are_answered_in_one_line(program, models):
    said = call(program, "wrong", models[0]).splitlines()
    assert len(said) == 54 and all(re.fullmatch("[ -~]{5,}", line) for line in said), said
    assert "room for" in said[1] and "outside the vocabulary" in said[4] and "no such file" in said[9]
    assert "temperature is nan" in said[13] and "temperature is -1" in said[14] and "top-p is nan" in said[15] and "is longer" in said[16]


def test_logits_and_errors_stay_what_they_were(program, models):
    """Sampling reads the logits, a mistake changes nothing, and a success writes no error."""
    call(program, "again", models[0])


def test_errors_name_the_file(program, models, tmp_path):
    said = call(program, "wrong", models[0])
    assert said.count("no such file: no such file\n") == 2 and f"{models[0]}: it carries no checksum" in said
    assert f"{models[0]}: the first token" not in said and f"{models[0]}: flags are" in said


def test_only_the_interface_is_exported(libraries):
    declared = set(re.findall(r"LLAMAC_API [^;(]*?\b(llamac_\w+)\(", (ROOT / "runtime/llamac.h").read_text()))
    for file, flags in ("libllamac.so", ["-D"]), ("libllamac.a", ["-g"]):
        listed = call("nm", *flags, "--defined-only", libraries / file).splitlines()
        assert {line.split()[2] for line in listed if len(line.split()) == 3} == declared


def test_clean_removes_what_was_built(tmp_path):
    """And nothing else: runs, caches and sources stay."""
    built = ["run", "run-debug", "runcuda", "libllamac.a", "libllamac.so", "cache/lib/llamac.o", "cache/cuda/run.o"]
    kept = ["run.c", "my.o", "runs", "out/my/model.gguf", "cache/stories/train.bin", ".venv/bin/python"]
    for name in built + kept:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    shutil.copy(ROOT / "Makefile", tmp_path)
    call("make", "-s", "-C", tmp_path, "clean")
    assert {str(f.relative_to(tmp_path)) for f in tmp_path.rglob("*") if f.is_file()} == {"Makefile", *kept}


def test_there_is_no_static_state(libraries):
    """Nothing that is written to stands in the library: models and sessions have all of it."""
    sections = dict(re.findall(r"^(\.(?:bss|data|tbss|tdata))\s+(\d+)", call("size", "-A", libraries / "libllamac.a"), re.M))
    assert sections and set(sections.values()) == {"0"}, call("objdump", "-t", libraries / "libllamac.a")


def test_the_example_writes_what_run_writes(libraries, models, run_bin):
    call("cc", "-O1", f"-I{ROOT}/runtime", ROOT / "examples/embed.c", libraries / "libllamac.a", "-lm", "-pthread",
         "-o", libraries / "embed")
    unmarked, model = models[0].with_name("no_bos.gguf"), Model(heads=8, kv=2, tied=False)
    model.pieces[-1] = ("x" * 100, model.pieces[-1][1])
    model.write_gguf(unmarked, **{"tokenizer.ggml.add_bos_token": False})
    for path in models[0], unmarked:
        text = subprocess.run([libraries / "embed", path, "One"], capture_output=True).stdout.removesuffix(b"\n")
        written = run(run_bin, path, "-t", 0, "-n", 0, "--raw", "-i", "One").removesuffix(b"\n")
        assert (b"One" + text).startswith(written) and len(written) > 50  # without BOS, run stops at the last position
    refused = subprocess.run([libraries / "embed", "none.gguf", "One"], capture_output=True, text=True)
    assert refused.returncode == 1 and refused.stderr == "embed MODEL TEXT: none.gguf: no such file\n"


def test_make_lib_works_in_a_folder_with_a_space(libraries):
    assert " " in libraries.name and (libraries / "libllamac.so").exists() and (libraries / "libllamac.a").exists()
