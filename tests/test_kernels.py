"""
The CPU's vector kernels are compared with the scalar ones by tests/kernels.c, also as other
processors, systems and compilers make them. Tests of free memory and of the memory of the weights.
"""
import os
import platform
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from .conftest import ISAS as SETS, KERNELS, LIBRARY, PROGRAM, ROOT, SANITIZE, compile_c
from .test_run import FORMS, ISAS, LAYER, TEXT, Model, assert_close, ids_of, logits, run

ARM = ["aarch64-linux-gnu-gcc", "qemu-aarch64"]
needs_arm = pytest.mark.skipif(not all(map(shutil.which, ARM)), reason=f"needs {' and '.join(ARM)}")
QEMU = ["qemu-aarch64", "-L", "/usr/aarch64-linux-gnu", "-cpu"]
ARM_CPUS = {  # neondot has the dot product, neoni8mm that of matrices
    "cortex-a53": ["scalar", "neon"], "neoverse-n1": ["scalar", "neon", "neondot"],
    "max": ["scalar", "neon", "neondot", "neoni8mm"]
}


@pytest.mark.parametrize("flags", [
    pytest.param(SANITIZE, marks=pytest.mark.slow, id="sanitizers"),
    pytest.param(["-O3"], id="optimised")])
def test_every_instruction_set_computes_what_plain_c_does(flags, tmp_path):
    program = compile_c(tmp_path / "kernels", *flags, "tests/kernels.c", *KERNELS)
    for seed in range(3):
        found = subprocess.run([program, str(seed), "40"], capture_output=True, text=True)
        assert found.returncode == 0, found.stdout + found.stderr
        assert set(found.stdout.split()) == {*ISAS, "agree"}


ON_AVX2 = ["-O1", "-Wno-psabi", "-Itests/x86_on_avx2"]  # its headers emulate other processors
has_avx2 = platform.machine() == "x86_64" and "avx2" in ISAS and shutil.which("gcc")


@pytest.mark.slow  # a minute of compiling
@pytest.mark.skipif(not has_avx2, reason="needs a processor with AVX2, and gcc")
def test_kernels_for_other_x86_processors_compute_what_plain_c_does(tmp_path):
    """The kernels for AVX-VNNI and AVX-512 are emulated, whatever this machine has."""
    program = compile_c(tmp_path / "kernels", *ON_AVX2, "tests/kernels.c", *KERNELS, compiler="gcc")
    found = subprocess.run([program, "1", "6"], capture_output=True, text=True)
    names = ["avx512bf16", "avx512", "avx512bw", "avxvnni", "avx2", "scalar", "agree"]
    assert found.stdout.split() == names, found.stdout + found.stderr


@pytest.mark.slow  # its figures are times
def test_four_tokens_take_less_time_than_more(tmp_path):
    """
    A kernel with too few independent sums waits for each addition. The best of six tries counts.
    """
    program = compile_c(tmp_path / "kernels", "-O3", "tests/kernels.c", *KERNELS)
    best = {}
    for _ in range(6):
        for line in subprocess.check_output([program, "panels"], text=True).splitlines():
            isa, larger, *ratios = line.split()
            for kind, ratio in zip(("F32", "BF16"), ratios):
                excess = float(ratio) - 4 / int(larger)
                best[isa, kind] = min(excess, best.get((isa, kind), 1))
        if max(best.values()) < 0.2:
            break
    assert {isa for isa, _ in best} == set(ISAS) - {"scalar"} and max(best.values()) < 0.2, best


@pytest.mark.parametrize("programs_each", ["3", pytest.param("25", marks=pytest.mark.slow)])
def test_ops_in_any_order_give_what_plain_c_gives(tmp_path, programs_each):
    """
    Random programs of the backend's ops run on models of mixed types, with each instruction set and
    with 1 to 3 threads.
    """
    program = compile_c(tmp_path / "programs", *SANITIZE, "tests/programs.c", *KERNELS)
    found = subprocess.run([program, "3", programs_each], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr


# ---- ARM, by an emulator

@needs_arm
def test_arm_kernels_compute_what_plain_c_does(tmp_path):
    """
    The kernels are compiled without flags for a processor, so the compiler may use only
    instructions that all 64-bit ARM processors have.
    """
    program = compile_c(tmp_path / "kernels", "-O3", "tests/kernels.c", *KERNELS, compiler=ARM[0])
    for cpu, isas in ARM_CPUS.items():
        found = subprocess.run([*QEMU, cpu, program, "1", "10"], capture_output=True, text=True)
        # The program prints the best instruction set first.
        assert found.stdout.split() == [*reversed(isas), "agree"], found.stdout + found.stderr


@pytest.fixture(scope="module")
def arm_runs(tmp_path_factory):
    """
    Compile run for ARM as `make run` does. Return {processor: a program that emulates the processor
    and executes run}.
    """
    folder = tmp_path_factory.mktemp("arm")
    told = subprocess.run(["make", "-nB", "run", f"CC={ARM[0]}"], cwd=ROOT, capture_output=True,
                          text=True, check=True).stdout
    assert f"{ARM[0]} -std=c11 -Wall -Wextra -O3 -o run run.c " in told
    compile_c(folder / "run", "-O3", *PROGRAM, compiler=ARM[0])
    for cpu in ARM_CPUS:
        (folder / cpu).write_text(f'#!/bin/sh\nexec {" ".join(QEMU)} {cpu} {folder}/run "$@"\n')
        (folder / cpu).chmod(0o755)
    return {cpu: folder / cpu for cpu in ARM_CPUS}


@needs_arm
@pytest.mark.parametrize("form", [form for form in FORMS if form not in ("v1:", "v2:24", "v2:7")])
def test_logits_on_arm_equal_transformers(arm_runs, tmp_path, form):
    model = Model(heads=8, kv=2, tied=False)
    args, held = model.write(tmp_path, form)
    expected = model.logits(ids_of(TEXT, form[0] == "v"), held, form)
    for cpu, isas in ARM_CPUS.items():
        for isa in isas:
            assert_close(logits(arm_runs[cpu], args, TEXT, model.vocab, isa), expected, form)
        texts = {run(arm_runs[cpu], *args, "-t", 0, "-n", 60, "-j", j, isa=isas[-1])
                 for j in (1, 2)}
        # The best instruction set is the default; 60 tokens are enough for tiles.
        assert texts == {run(arm_runs[cpu], *args, "-t", 0, "-n", 60)}
    assert "LLAMAC_ISA" in run(arm_runs["cortex-a53"], *args, status=1, isa="neondot")


# ---- other systems and compilers

def write_names_away(path, headers, macros, names):
    """
    Write a file to include before a source. Afterwards the macros of these headers are undefined,
    and any use of the names is an error.
    """
    lines = ["#define _GNU_SOURCE 1", *(f"#include <{header}>" for header in headers.split()),
             "#undef _DEFAULT_SOURCE", *(f"#undef {macro}" for macro in macros.split()),
             f"#pragma GCC poison {names}"]
    path.write_text("\n".join(lines) + "\n")


LINUX_MACROS = (
    "MADV_HUGEPAGE CPU_COUNT CPU_ISSET AT_HWCAP HWCAP_ASIMDDP AT_HWCAP2 HWCAP2_I8MM MAP_POPULATE "
    "MAP_HUGETLB")
LINUX_NAMES = (
    "cpu_set_t sched_getaffinity sched_setaffinity pthread_setaffinity_np getauxval mremap "
    "memfd_create get_nprocs")
HEADERS = (
    "errno.h fcntl.h limits.h math.h pthread.h sched.h signal.h stdatomic.h stdio.h stdlib.h "
    "string.h sys/auxv.h sys/mman.h sys/resource.h sys/stat.h time.h unistd.h")


@pytest.mark.parametrize("compiler", ["cc", pytest.param(ARM[0], marks=needs_arm)])
@pytest.mark.slow
def test_run_compiles_where_linux_names_are_unknown(tmp_path, compiler):
    """A stand-in for macOS and the BSDs: any use of a name that only Linux has is an error."""
    write_names_away(tmp_path / "other.h", HEADERS, LINUX_MACROS, LINUX_NAMES)
    other, objects = ["-O0", "-U__linux__", "-U__linux", "-include", tmp_path / "other.h"], []
    for source in SETS:  # the same instructions everywhere: it is enough that they compile
        subprocess.run([compiler, "-std=c11", *other, "-fsyntax-only", source], check=True,
                       cwd=ROOT)
        objects.append(compile_c(tmp_path / f"{Path(source).stem}.o", "-O3", "-c", source,
                                 compiler=compiler))
    compile_c(tmp_path / "run", *other, *(source for source in PROGRAM if source not in SETS),
              *objects, compiler=compiler)
    if compiler == "cc":
        Model().write_gguf(tmp_path / "m.gguf")
        assert run(tmp_path / "run", tmp_path / "m.gguf", "-t", 0, "-n", 40, "-j", 2)


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="of the x86 kernels")
def test_run_compiles_where_the_compiler_has_no_bf16(tmp_path):
    """A stand-in for GCC 9, which lacks these intrinsics and the names of processor features."""
    write_names_away(tmp_path / "gcc9.h", "immintrin.h", "_mm256_dpbusd_avx_epi32",
                     "_mm512_dpbf16_ps _mm512_cvtneps_pbh __m512bh _mm256_dpbusd_avx_epi32")
    older, objects = ["-O0", "-U__GNUC__", "-D__GNUC__=9", "-include", tmp_path / "gcc9.h"], []
    whole = [source for source in PROGRAM
             if source not in SETS or Path(source).stem in ("avx512", "avxvnni")]
    for source in set(SETS) - set(whole):  # as in the test above
        subprocess.run(["gcc", "-std=c11", *older, "-fsyntax-only", source], check=True, cwd=ROOT)
        objects.append(compile_c(tmp_path / f"{Path(source).stem}.o", "-O3", "-c", source))
    compile_c(tmp_path / "run", *older, *whole, *objects, compiler="gcc")
    Model().write_gguf(tmp_path / "m.gguf")
    for isa in "avx512bf16", "avxvnni":
        assert "LLAMAC_ISA" in run(tmp_path / "run", tmp_path / "m.gguf", status=1, isa=isa)


@pytest.mark.parametrize("flags", ["-Ofast", "-O3 -ffast-math", "-O3 -ffinite-math-only"])
def test_arithmetic_that_hides_nan_is_refused(tmp_path, flags):
    for compiler in {"cc", *filter(shutil.which, ["gcc", "clang"])}:
        for source in LIBRARY:
            done = subprocess.run(
                [compiler, "-std=c11", *flags.split(), "-E", source, "-o", tmp_path / "x.i"],
                cwd=ROOT, capture_output=True, text=True)
            assert done.returncode
            assert "compile with -O3 instead" in done.stderr
            assert done.stderr.count("error:") == 1


@pytest.mark.skipif(platform.machine() != "x86_64", reason="of -m32")
def test_systems_of_32_bits_are_refused(tmp_path):
    (tmp_path / "gnu").mkdir()
    (tmp_path / "gnu" / "stubs-32.h").write_text("")  # the only header that is usually missing
    done = subprocess.run(
        ["cc", "-m32", "-std=c11", "-fsyntax-only", "-I", tmp_path, "-I",
         "/usr/include/x86_64-linux-gnu", "runtime/model.c"],
        cwd=ROOT, capture_output=True, text=True)
    assert done.returncode and "32-bit systems" in done.stderr


# ---- memory

MIB = 2**20
NO_LIMIT = {1: "9223372036854771712", 2: "max"}


def group(folder, version, limit=None, used=0, files=0, high="max"):
    """Write the files of a control group. Sizes are in MiB, but `high` is in bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    own, prefix = ("", "") if version == 2 else ("inactive_file 1\nactive_file 2\n", "total_")
    limit = NO_LIMIT[version] if limit is None else limit * MIB
    for name, text in (
            ("memory.max" if version == 2 else "memory.limit_in_bytes", limit),
            ("memory.high", high),
            ("memory.current" if version == 2 else "memory.usage_in_bytes", used * MIB),
            ("memory.stat", f"anon 5\n{own}{prefix}inactive_file {files * MIB // 4}\n"
                            f"{prefix}active_file {files * MIB * 3 // 4}\n")):
        if version == 2 or name != "memory.high":
            (folder / name).write_text(f"{text}\n")


def test_memory_that_is_free(tmp_path):
    """Free memory is what the system and the control groups leave, in files as Linux has them."""
    program = compile_c(tmp_path / "memory", *SANITIZE, "tests/memory.c", "runtime/os.c")
    cgroup, groups = tmp_path / "proc/self/cgroup", tmp_path / "sys/fs/cgroup"
    cgroup.parent.mkdir(parents=True)

    def free():
        return int(subprocess.run([program, tmp_path], capture_output=True, text=True,
                                  check=True).stdout) / MIB

    whole = free()  # all physical memory, as the files are missing
    assert whole == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGESIZE") / MIB
    (tmp_path / "proc/meminfo").write_text(
        "MemTotal:  9999999 kB\nMemFree:  1 kB\nMemAvailable:    2048000 kB\nBuffers: 3 kB\n")
    assert free() == 2000
    for text in ("", "\n", "0", "0:", "::\n", "0::/\n", "0::/a/b\n", "4:memory:/\n", "x" * 9000,
                 "0::/" + "y" * 5000, "0::/../..\n"):
        cgroup.write_text(text)
        assert free() == 2000, text
    cgroup.write_text("0::/user.slice/job\n")
    group(groups / "user.slice/job", 2, used=50)
    assert free() == 2000
    group(groups / "user.slice/job", 2, limit=500, used=300, files=200)
    assert free() == 400
    # The group around it leaves less.
    group(groups / "user.slice", 2, limit=600, used=500, files=100)
    assert free() == 200
    group(groups / "user.slice", 2, limit=600, used=900)
    assert free() == 0
    group(groups / "user.slice", 2, limit=600, used=100, high=300 * MIB)
    assert free() == 200
    cgroup.write_text("0::/\n")  # in a container: its own group looks like the root group
    group(groups, 2, limit=64, used=4)
    assert free() == 60
    shutil.rmtree(groups)
    # version 1 as the container's host sees it
    cgroup.write_text("5:cpu,cpuacct:/docker/1f\n4:memory:/docker/1f\n0::/\n")
    group(groups / "memory", 1, limit=100, used=80, files=60)
    assert free() == 80
    group(groups / "memory", 1)
    group(groups / "memory/docker/1f", 1, limit=30, used=10)
    assert free() == 20


def memory_of(program, path, workers, *flags, isa=""):
    """
    Return for each of some workers, while all decode, the MiB that it has for itself and those of
    its share of the file's pages.
    """
    command = [program, path, "-t", "0", "-n", "0", "-j", "1", *flags]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                                env=dict(os.environ, LLAMAC_ISA=isa)) for _ in range(workers)]
    for p in started:
        p.stdout.read(80)  # letters, one or two a token: by then the weights are in order
        os.kill(p.pid, signal.SIGSTOP)
    found = []
    for p in started:
        maps = Path(f"/proc/{p.pid}/smaps").read_text()
        own = sum(int(kib) for kib in re.findall(r"^Anonymous: +(\d+)", maps, re.M))
        of_file = re.split(r"^[0-9a-f]+-[0-9a-f]+ ", maps.split(path.name, 1)[1], maxsplit=1,
                           flags=re.M)[0]
        found.append((own / 1024, int(re.search(r"^Pss: +(\d+)", of_file, re.M)[1]) / 1024))
    for p in started:
        p.kill()
        p.communicate()
    return found


def test_workers_share_the_file_where_nothing_is_copied(run_bin, tmp_path):
    """
    Nothing is copied with --no-copy, nor where no vector instructions are known: these alone gain
    by another order of the weights.
    """
    model = Model(dim=512, hidden=1376, heads=8, kv=8, vocab=300, seq=4000, tied=False)
    model.w["output"][:259] = 0  # the model writes only letters
    # the order of export.py
    model.names = lambda order: [
        "tok", *((name, i) for i in range(2) for name in LAYER), "norm", "output"]
    model.write_gguf(tmp_path / "m.gguf")
    size = (tmp_path / "m.gguf").stat().st_size / MIB
    expected = run(run_bin, tmp_path / "m.gguf", "-t", 0, "-n", 40, "-j", 1)
    best = ISAS[-1]
    for isa, flags, copied in (("scalar", [], False), (best, ["--no-copy"], False),
                               *([(best, [], True)] * (best != "scalar"))):
        # A context of 4000 has 16 MiB, of which 1 % is in use.
        own, of_file = memory_of(run_bin, tmp_path / "m.gguf", 1, *flags, isa=isa)[0]
        assert own > 0.9 * size if copied else own < 0.2 * size, (isa, flags, own, size)
        # The pages that have been copied are given back.
        assert not copied or of_file < 0.3 * size, (of_file, size)
        assert run(run_bin, tmp_path / "m.gguf", "-t", 0, "-n", 40, "-j", 1, *flags,
                   isa=isa) == expected
    shared = memory_of(run_bin, tmp_path / "m.gguf", 3, "--no-copy")
    assert sum(of_file for _, of_file in shared) < 1.05 * size
    assert all(own < 0.2 * size for own, _ in shared)
