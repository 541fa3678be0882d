"""
Whole tokens in one kernel, emulated, on as many multiprocessors as real GPUs have: models from tiny to wide in every format,
each beside the ops and the CPU (make test-long; a quarter of an hour on one core).
"""
import pytest

from tests.test_cuda import UNSANITIZED, build, run


@pytest.fixture(scope="module")
def ops_bin(tmp_path_factory):
    return build(tmp_path_factory.mktemp("ops"), "tests/cuda_ops.cpp", emulated=UNSANITIZED)


@pytest.mark.parametrize("multiprocessors", [1, 12, 36, 84, 108, 132, 148])
def test_whole_tokens(ops_bin, multiprocessors):
    print(run(ops_bin, 5, limit=1200, CUDA_ON_CPU_MULTIPROCESSORS=str(multiprocessors)).stdout.decode())
