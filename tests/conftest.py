"""The C program, compiled once for all tests: as users have it, under sanitizers, and with calls that fail."""
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FUZZ = ROOT / "tests" / "fuzz"
SANITIZE = ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
COVERAGE = os.environ.get("COVERAGE")  # `make coverage`: a folder for what gcov needs


def compile_c(target, *what, standard="c11", compiler=os.environ.get("CC", "cc")):
    if COVERAGE:  # without optimisation and sanitizers, which would change the branches
        target = Path(COVERAGE, target.name)
        what = ("--coverage", *(w for w in what if not str(w).startswith(("-O", "-fsanitize", "-fno-sanitize"))))
    subprocess.run([compiler, f"-std={standard}", "-Wall", "-Wextra", "-Werror", *what, "-o", target, "-lm", "-pthread"],
                   check=True, cwd=ROOT)
    return str(target)


@pytest.fixture(scope="session")
def run_bin(tmp_path_factory):
    return compile_c(tmp_path_factory.mktemp("bin") / "run", "-O3", "run.c", "kernels_cpu.c")


@pytest.fixture(scope="session")
def run_debug_bin(tmp_path_factory):
    return compile_c(tmp_path_factory.mktemp("debug") / "debug", *SANITIZE, "run.c", "kernels_cpu.c")


@pytest.fixture(scope="session")
def faults_bin(tmp_path_factory):
    """run under sanitizers, inside a program that fails each call to the system in turn (fuzz/faults.c)."""
    folder = tmp_path_factory.mktemp("faults")
    for source in ("run.c", "kernels_cpu.c"):
        compile_c(folder / f"{source}.o", *SANITIZE, "-include", FUZZ / "faults.h", "-c", source, standard="gnu11")
    objects = [Path(COVERAGE or folder, f"{source}.o") for source in ("run.c", "kernels_cpu.c")]
    return compile_c(folder / "faults", *SANITIZE, FUZZ / "faults.c", *objects, standard="gnu11")


@pytest.fixture(scope="session")
def mutate_bin(tmp_path_factory):
    """The fuzz targets driven by fuzz/mutate.c."""
    return compile_c(tmp_path_factory.mktemp("mutate") / "mutate", *SANITIZE, FUZZ / "fuzz.c", FUZZ / "mutate.c",
                     "kernels_cpu.c", standard="gnu11")


@pytest.fixture(scope="session")
def libfuzzer_bin(tmp_path_factory):
    """The same driven by clang's libFuzzer. With all three sanitizers clang 14 takes minutes to optimise the kernels."""
    folder = tmp_path_factory.mktemp("libfuzzer")
    flags = ["-g", "-fsanitize=fuzzer,address,undefined", "-fno-sanitize-recover=all", "-Qunused-arguments"]
    compile_c(folder / "kernels.o", "-O0", *flags, "-c", "kernels_cpu.c", standard="gnu11", compiler="clang")
    return compile_c(folder / "fuzz", "-O1", *flags, FUZZ / "fuzz.c", folder / "kernels.o", standard="gnu11", compiler="clang")
