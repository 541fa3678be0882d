"""The CPU's vector kernels against the scalar ones, by tests/kernels.c."""
import subprocess

import pytest

from .conftest import SANITIZE, compile_c
from .test_run import ISAS


@pytest.mark.parametrize("flags", [SANITIZE, ["-O3"]], ids=["sanitizers", "optimised"])
def test_every_instruction_set_computes_what_plain_c_does(flags, tmp_path):
    program = compile_c(tmp_path / "kernels", *flags, "tests/kernels.c")
    for seed in range(3):
        found = subprocess.run([program, str(seed), "40"], capture_output=True, text=True)
        assert found.returncode == 0, found.stdout + found.stderr
        assert set(found.stdout.split()) == {*ISAS, "agree"}
