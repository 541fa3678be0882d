"""The C program, compiled once for all tests: as users have it, under sanitizers, and with calls that fail."""
import fcntl
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FUZZ = ROOT / "tests" / "fuzz"
SANITIZE = ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
LIBRARY = sorted(str(f.relative_to(ROOT)) for f in ROOT.glob("runtime/**/*.c"))
PROGRAM = ["run.c", *LIBRARY]
FUZZED = [FUZZ / "fuzz.c", FUZZ / "printer.c", *(f for f in LIBRARY if Path(f).parent.name == "cpu")]  # fuzz.c has the others
KERNELS = [f for f in LIBRARY if Path(f).parent.name == "cpu" and Path(f).name != "cpu.c"]  # of tests that include cpu.c
COVERAGE = os.environ.get("COVERAGE")  # `make coverage`: a folder for what gcov needs


def compile_c(target, *what, standard="c11", compiler=os.environ.get("CC", "cc")):
    if COVERAGE:  # without optimisation and sanitizers, which would change the branches
        target = Path(COVERAGE, target.name)
        what = ("--coverage", *(w for w in what if not str(w).startswith(("-O", "-fsanitize", "-fno-sanitize"))))
    subprocess.run([compiler, f"-std={standard}", "-Wall", "-Wextra", "-Werror", *what, "-o", target, "-lm", "-pthread"],
                   check=True, cwd=ROOT)
    return str(target)


def compile_once(tmp_path_factory, name, *what):
    """The program, compiled by the first of pytest's workers that asks for it."""
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    with open(folder / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = folder / f"{name}.done"
        program = done.read_text() if done.exists() else compile_c(folder / name, *what)
        done.write_text(program)
    return program


@pytest.fixture(scope="session")
def run_bin(tmp_path_factory):
    return compile_once(tmp_path_factory, "run", "-O3", *PROGRAM)


@pytest.fixture(scope="session")
def run_debug_bin(tmp_path_factory):
    return compile_once(tmp_path_factory, "debug", *SANITIZE, *PROGRAM)


@pytest.fixture(scope="session")
def faults_bin(tmp_path_factory):
    """run under sanitizers, inside a program that fails each call to the system in turn (fuzz/faults.c)."""
    folder = tmp_path_factory.mktemp("faults")
    names = [f"{Path(source).stem}.o" for source in PROGRAM]
    for source, name in zip(PROGRAM, names):
        compile_c(folder / name, *SANITIZE, "-include", FUZZ / "faults.h", "-c", source, standard="gnu11")
    return compile_c(folder / "faults", *SANITIZE, FUZZ / "faults.c", *(Path(COVERAGE or folder, name) for name in names),
                     standard="gnu11")


@pytest.fixture(scope="session")
def mutate_bin(tmp_path_factory):
    """The fuzz targets driven by fuzz/mutate.c."""
    return compile_c(tmp_path_factory.mktemp("mutate") / "mutate", *SANITIZE, *FUZZED, FUZZ / "mutate.c",
                     standard="gnu11")


@pytest.fixture(scope="session")
def libfuzzer_bin(tmp_path_factory):
    """The same driven by clang's libFuzzer. With all three sanitizers clang 14 takes minutes to optimise the kernels."""
    folder = tmp_path_factory.mktemp("libfuzzer")
    flags = ["-g", "-fsanitize=fuzzer,address,undefined", "-fno-sanitize-recover=all", "-Qunused-arguments"]
    objects = [folder / f"{Path(source).stem}.o" for source in FUZZED[1:]]
    for source, name in zip(FUZZED[1:], objects):
        compile_c(name, "-O0", *flags, "-c", source, standard="gnu11", compiler="clang")
    return compile_c(folder / "fuzz", "-O1", *flags, FUZZED[0], *objects, standard="gnu11", compiler="clang")
