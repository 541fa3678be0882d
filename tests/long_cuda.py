"""
Longer tests of the emulated GPU kernels than test_cuda.py (make test-long; an hour and a half or
more on one core). The kernel for whole tokens runs on as many multiprocessors as real GPUs have,
with models from tiny to wide in every format, each compared with the ops and the CPU. The same
holds for the kernel's variants. ThreadSanitizer looks for races.
"""
import itertools
import subprocess

import pytest

from tests.conftest import SANITIZE
from tests.test_cuda import CARRIED, CXX, UNSANITIZED, build, build_products, run


@pytest.fixture(scope="module")
def ops_bin(tmp_path_factory):
    return build(tmp_path_factory.mktemp("ops"), "tests/cuda_ops.cpp", emulated=UNSANITIZED)


@pytest.mark.parametrize("multiprocessors", [1, 12, 36, 84, 108, 132, 148])
def test_whole_tokens(ops_bin, multiprocessors):
    """Run shapes of Llama, Qwen2 and Qwen3 in the five types that the kernel supports."""
    lines = run(
        ops_bin, 9, limit=1200, CUDA_ON_CPU_MULTIPROCESSORS=str(multiprocessors)).stdout.decode()
    print(lines)
    assert lines.endswith(f"tokens of {9 * 5} models in one kernel\n")


@pytest.fixture(scope="module", params=[CARRIED[:1], CARRIED],
                ids=["carried", "carried, many splits"])
def variant_bin(tmp_path_factory, request):
    return build(tmp_path_factory.mktemp("variant"), "tests/cuda_ops.cpp", emulated=UNSANITIZED,
                 kernels=request.param)


@pytest.mark.parametrize("multiprocessors, order",
                         [*itertools.product([1, 2, 7, 12], [1, 2, 3]), (36, 3), (84, 2), (132, 3)])
def test_barriers_that_carry_their_data(variant_bin, multiprocessors, order):
    """Run the same shapes. On many multiprocessors, some blocks get no rows of some products."""
    lines = run(variant_bin, 9, limit=1200, CUDA_ON_CPU_MULTIPROCESSORS=str(multiprocessors),
                CUDA_ON_CPU_ORDER=str(order))
    assert lines.stdout.endswith(b"tokens of 45 models in one kernel\n")


def test_more_blocks_for_each_head(tmp_path):
    """
    Run random models at up to 600 positions. Up to 16 blocks share a head, and some blocks get none
    of its positions.
    """
    binary = build(tmp_path, "tests/cuda_ops.cpp", emulated=UNSANITIZED,
                   kernels=["-DSPLIT_POSITIONS=32"])
    for multiprocessors in "12", "132":
        run(binary, 1, 2, limit=1200, CUDA_ON_CPU_MULTIPROCESSORS=multiprocessors,
            CUDA_ON_CPU_ORDER="2")


@pytest.fixture(scope="module")
def races_bin(tmp_path_factory):
    if "Free Software Foundation" not in subprocess.run(
            [CXX, "--version"], capture_output=True, text=True).stdout:
        pytest.skip("only GCC tells ThreadSanitizer which reads are volatile")

    folder = tmp_path_factory.mktemp("races")

    def make(source, kernels=()):
        binary = build(folder, source, emulated=[*UNSANITIZED, "-DRACES"],
                       watched=("tests/cuda_races.cpp", "runtime/cuda/cuda.cu"), kernels=kernels)
        if b"unexpected memory mapping" in subprocess.run(
                [binary, "0", "0"], capture_output=True).stderr:
            pytest.skip("this compiler's ThreadSanitizer does not run on this kernel")
        return binary
    return make


def test_races_are_found(races_bin):
    """
    A race is reported if one barrier, fence or wait is missing, so that a GPU may reorder accesses.
    Without a missing one, no race is reported.
    """
    binary = races_bin("tests/cuda_races.cpp")
    for order in "012":
        assert not run(binary, 0, CUDA_ON_CPU_ORDER=order).stderr
        for missing in range(1, 10):
            assert b"data race" in run(
                binary, missing, CUDA_ON_CPU_ORDER=order, status=66).stderr, missing


@pytest.mark.parametrize("words", [(1, 1), (9,)], ids=["ops", "whole tokens"])
def test_kernels_have_no_races(races_bin, words):
    run(races_bin("tests/cuda_ops.cpp"), *words, limit=1200, CUDA_ON_CPU_ORDER="2",
        CUDA_ON_CPU_MULTIPROCESSORS="2")


# ---- variants of prompt products, selected by options of nvcc


@pytest.mark.parametrize("variant", [
    "-DRAW_STAGES=2", "-DRAW_STAGES=3", "-DRAW_STAGES=4", "-DRAW_STAGES=5", "-DSTORES_FIRST=1"])
def test_variants_of_prompt_products(tmp_path, variant):
    """
    The results are bit-identical to those of the default, under sanitizers, with as much shared
    memory as Turing, Ada, Ampere and Hopper have. With few multiprocessors the tiles are large;
    with many, blocks share tiles.
    """
    binaries = build_products(tmp_path), build_products(tmp_path, variant, SANITIZE)
    for multiprocessors, kib in (1, 227), (1, 99), (2, 163), (12, 99), (36, 64), (132, 227):
        environment = {"CUDA_ON_CPU_ORDER": "2", "CUDA_ON_CPU_SHARED": str(kib << 10),
                       "CUDA_ON_CPU_MULTIPROCESSORS": str(multiprocessors)}
        default, found = (
            run(binary, multiprocessors, 2, **environment).stdout for binary in binaries)
        assert found == default
        assert run(binaries[1], multiprocessors, 1, CUDA_ON_CPU_EARLY_COPIES="1",
                   **environment).returncode == 0


@pytest.mark.parametrize("variant", ["-DRAW_STAGES=3", "-DRAW_STAGES=4", "-DSTORES_FIRST=1"])
def test_variants_of_prompt_products_have_no_races(races_bin, tmp_path, variant):
    binary = build_products(tmp_path, variant, races=True)
    for multiprocessors in "3", "36":
        run(binary, 5, 1, CUDA_ON_CPU_ORDER="2", CUDA_ON_CPU_MULTIPROCESSORS=multiprocessors)


@pytest.mark.parametrize("variant", [CARRIED[:1], CARRIED], ids=["carried", "carried, many splits"])
def test_barriers_that_carry_their_data_have_no_races(races_bin, variant):
    """A carried word orders no other memory accesses: see cuda_on_cpu/fibers.cpp."""
    binary = races_bin("tests/cuda_ops.cpp", variant)
    for multiprocessors in "1", "2", "7":
        run(binary, 9, limit=1200, CUDA_ON_CPU_ORDER="2",
            CUDA_ON_CPU_MULTIPROCESSORS=multiprocessors)
