"""The C program, compiled once for all tests: as users have it, and under sanitizers."""
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def compile_run(folder, *flags):
    path = folder / "run"
    subprocess.run([os.environ.get("CC", "cc"), "-std=c11", "-Wall", "-Wextra", "-Werror", *flags, "-o", path,
                    ROOT / "run.c", ROOT / "kernels_cpu.c", "-lm", "-pthread"], check=True)
    return str(path)


@pytest.fixture(scope="session")
def run_bin(tmp_path_factory):
    return compile_run(tmp_path_factory.mktemp("bin"), "-O3")


@pytest.fixture(scope="session")
def run_debug_bin(tmp_path_factory):
    return compile_run(tmp_path_factory.mktemp("debug"), "-O1", "-g", "-fsanitize=address,undefined",
                       "-fno-sanitize-recover=all")
