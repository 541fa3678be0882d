"""
Tests of the GPU kernels. On the CPU, an emulation runs the same code, thread by thread, under
sanitizers (cuda_on_cpu/). With nvcc the kernels are compiled for a GPU, and with a GPU they run
there. Each op is compared with the CPU's, and whole models with the CPU's program.
"""
import json
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from .conftest import LIBRARY, ROOT, SANITIZE, WARN, compile_object, preprocessed
from .test_architectures import random_model, write_gguf
from .test_run import K_FORMS, TEXT, Model, ids_of

CC, CXX = os.environ.get("CC", "cc"), os.environ.get("CXX", "c++")
EMULATED = [CXX, "-std=c++17", "-x", "c++", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas",
            "-Itests/cuda_on_cpu"]

UNSANITIZED = ["-O1", "-fno-strict-aliasing"]
# -O2: GCC then hides structs passed by value from ThreadSanitizer.
WATCH = ["-O2", "-fsanitize=thread", "--param=tsan-distinguish-volatile=1"]

def gpu_problem():
    """Return the reason why this machine can't run anything on a GPU, or None."""
    if not shutil.which("nvcc"):
        return "no nvcc here"
    found = (subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
             if shutil.which("nvidia-smi") else None)
    return None if found and "GPU" in found.stdout else "no GPU here"


# Variants of the kernel of whole tokens, and words that are zeroed before each token.
CARRIED = ["-DCARRIED=1", "-DSPLIT_POSITIONS=32", "-DLAST_EPOCH=5"]


def build(folder, *sources, gpu=False, emulated=SANITIZE, watched=(), kernels=()):
    """
    Build the program of `sources` and the kernels and return its path. It runs on the GPU of this
    machine or, under sanitizers, with the emulation. The library's objects are shared with the
    programs of other tests.

    watched: sources of which ThreadSanitizer sees all accesses. kernels: more compiler options for
    the kernels.
    """
    objects = []
    for source in (*sources, *LIBRARY, "runtime/cuda/cuda.cu",
                   *["tests/cuda_on_cpu/fibers.cpp"] * (not gpu)):
        if source.endswith(".c"):
            command = [CC, "-std=c11", *WARN, *(["-O2"] if gpu else emulated)]
            # -DCUDA only where it changes something: other objects are shared with other tests.
            with_cuda = [*command, "-DCUDA"]
            command = (with_cuda if preprocessed(source, with_cuda) != preprocessed(source, command)
                       else command)
        elif gpu:
            objects.append(folder / f"{source.replace('/', '-')}.o")
            if not objects[-1].exists():
                subprocess.run(
                    ["nvcc", "-std=c++17", "-arch=native", "-O2", "-c", source, "-o", objects[-1]],
                    check=True, cwd=ROOT)
            continue
        elif source.endswith("fibers.cpp"):
            command = [*EMULATED, "-O2", *(flag for flag in emulated if flag.startswith("-D"))]
        else:
            # -g0: debug information would take a quarter of the time.
            command = [*EMULATED, *emulated, "-g0", *(WATCH if source in watched else ())]
            command += kernels if source.endswith(".cu") else []
        objects.append(compile_object(source, command))
    link = (["nvcc", "-arch=native"] if gpu
            else [CXX, *emulated, *["-fsanitize=thread"] * bool(watched)])
    program = folder / f"{Path(sources[0]).stem}"
    subprocess.run([*link, "-o", program, *objects, "-lm", "-lpthread"], check=True)
    return program


def build_products(folder, variant="-DRAW_STAGES=0", emulated=UNSANITIZED, races=False):
    """Build cuda_products with a variant of the kernels; with `races` under ThreadSanitizer."""
    races_flag = ["-DRACES"] * races
    command = [*EMULATED, *emulated, "-g0", variant, *races_flag, *WATCH * races]
    objects = [compile_object("tests/cuda_products.cpp", command),
               compile_object("tests/cuda_on_cpu/fibers.cpp", [*EMULATED, "-O2", *races_flag])]
    program = folder / f"cuda_products{variant}"
    subprocess.run([CXX, *emulated, *["-fsanitize=thread"] * races, "-o", program, *objects],
                   check=True)
    return program


def run(binary, *args, status=0, limit=300, **environment):
    environment.setdefault("ASAN_OPTIONS", "detect_stack_use_after_return=0")
    environment.setdefault("TSAN_OPTIONS", "atexit_sleep_ms=0:halt_on_error=1")
    done = subprocess.run([binary, *map(str, args)], capture_output=True,
                          env=os.environ | environment, timeout=limit)
    assert done.returncode == status, done.stderr.decode()
    return done


def test_the_kernels_are_valid_beside_their_emulation():
    """This test finds compile errors; make test-long runs the kernels."""
    subprocess.run([*EMULATED, "-fsyntax-only", "runtime/cuda/cuda.cu"], check=True, cwd=ROOT)


@pytest.mark.slow
def test_variants_of_prompt_products_have_the_same_bits(tmp_path):
    """
    Weights of each type are copied in their stored format, or stored before others are loaded.
    cuda_products also compares each product with sums in double precision. The emulation first does
    copies as late as CUDA allows, and then at once.
    """
    environment = {"CUDA_ON_CPU_ORDER": "2", "CUDA_ON_CPU_MULTIPROCESSORS": "3"}
    variants = "-DRAW_STAGES=0", "-DRAW_STAGES=4", "-DSTORES_FIRST=1"
    default, raw, stores = (build_products(tmp_path, variant) for variant in variants)
    expected = run(default, 5, 2, **environment).stdout
    assert expected.count(b"\n") == 20
    assert (run(raw, 5, 2, **environment).stdout == run(stores, 5, 2, **environment).stdout
            == expected)
    assert run(raw, 5, 2, CUDA_ON_CPU_EARLY_COPIES="1", **environment).stdout == expected


@pytest.fixture(scope="module", params=[pytest.param("emulated", marks=pytest.mark.slow), "gpu"])
def where(request):
    if request.param == "gpu" and gpu_problem():
        pytest.skip(gpu_problem())
    return request.param == "gpu"


@pytest.fixture(scope="module")
def objects(tmp_path_factory, where):
    return tmp_path_factory.mktemp("gpu" if where else "emulated")


@pytest.fixture(scope="module")
def ops_bin(objects, where):
    return build(objects, "tests/cuda_ops.cpp", gpu=where)


@pytest.fixture(scope="module")
def runcuda_bin(objects, where):
    return build(objects, "run.c", gpu=where)


@pytest.mark.slow
def test_ops_equal_the_cpus(ops_bin, where):
    """
    The shapes are random. In the emulation, the threads of a block take turns in random order. With
    few multiprocessors, the tiles of prompt products are large.
    """
    for seed, few in ((1, "12"),) if where else ((1, "12"), (12, "1")):
        done = run(ops_bin, seed, 20 if where else 1 + (few == "12"), CUDA_ON_CPU_ORDER="2",
                   CUDA_ON_CPU_MULTIPROCESSORS=few)
        print(done.stdout.decode())


@pytest.mark.slow
def test_barriers_that_carry_their_data(tmp_path):
    """
    The variants of the kernel compute whole tokens of two shapes, while one block after another is
    much slower than the others. A block that waits for a value that was overwritten would wait
    forever.
    """
    unsanitized = [*UNSANITIZED, "-fno-sanitize=all"]
    binary = build(tmp_path, "tests/cuda_ops.cpp", kernels=[*unsanitized, *CARRIED])
    done = run(binary, 2, limit=60, CUDA_ON_CPU_MULTIPROCESSORS="12", CUDA_ON_CPU_ORDER="3")
    assert done.stdout.endswith(b"tokens of 10 models in one kernel\n")


def logits(binary, args, vocab, **environment):
    out = run(binary, *args, "--logits", "-i", TEXT[:20], **environment).stdout
    return np.frombuffer(out, np.float32).reshape(-1, vocab)


# Types that allow rows of less than 256 numbers, with their max relative error.
NARROW = {"v1:": 1e-3, "v2:32": 1e-2, "f32": 1e-3, "bf16": 1e-2, "q4_0": 1e-2}


@pytest.mark.parametrize("form", [*NARROW, "q4_1", "q5_0", "q5_1", *K_FORMS])
def test_logits_equal_transformers(runcuda_bin, tmp_path, form):
    """
    Transformers computes in float32 with the weights that the file holds. For most types, the CPU
    rounds the operand that the weights multiply to 8 bits. The GPU rounds it to 16 bits, and keys
    and values too.
    """
    dim, hidden = (64, 96) if form in NARROW else (256, 256)
    model = Model(dim=dim, hidden=hidden, layers=2, heads=4, kv=2, tied=form == "f32")
    args, held = model.write(tmp_path, form)
    expected = model.logits(ids_of(TEXT[:20], dummy_prefix=form[0] == "v"), held)
    ours = logits(runcuda_bin, [*args, "--device=cuda"], model.vocab)
    assert ours.shape == expected.shape
    assert np.abs(ours - expected).max() <= NARROW.get(form, 2e-2) * np.abs(expected).max()


@pytest.mark.parametrize("case",
                         ["llama, biases", "qwen2, tied, GQA", "qwen3, tied, GQA, narrow heads"])
def test_architectures_equal_the_cpus(runcuda_bin, tmp_path, case):
    """Compare the logits of a prompt, and a text generated token by token."""
    write_gguf(tmp_path / "m.gguf", *random_model(case))
    ours, cpus = (logits(runcuda_bin, [tmp_path / "m.gguf", f"--device={d}"], 300)
                  for d in ("cuda", "cpu"))
    assert np.abs(ours - cpus).max() <= 1e-3 * np.abs(cpus).max()
    args = [tmp_path / "m.gguf", "-t", 0, "-n", 8, "-i", "Hi", "--raw"]
    assert run(runcuda_bin, *args).stdout == run(runcuda_bin, *args, "--device=cpu").stdout


@pytest.mark.parametrize("hidden", [64, 60], ids=["one kernel", "recorded ops"])
@pytest.mark.parametrize("form", ["f32", "bf16"])
def test_sliding_windows_equal_the_cpus(runcuda_bin, tmp_path, form, hidden):
    """
    Compare the logits of a prompt whose last tokens don't see its first ones, and a text generated
    token by token.
    """
    model = Model(dim=32, hidden=hidden, layers=2, heads=2, kv=1, seq=64, seed=3)
    model.write_gguf(tmp_path / "m.gguf", form, **{"llama.attention.sliding_window": 7})
    args = [tmp_path / "m.gguf", "-t", 0, "-n", 30, "-i", "Hello", "--raw"]
    assert run(runcuda_bin, *args).stdout == run(runcuda_bin, *args, "--device=cpu").stdout
    ours, cpus = (logits(runcuda_bin, [tmp_path / "m.gguf", f"--device={d}"], model.vocab)
                  for d in ("cuda", "cpu"))
    assert np.abs(ours - cpus).max() <= (1e-3 if form == "f32" else 1e-2) * np.abs(cpus).max()
    model.write_gguf(tmp_path / "m.gguf", form)
    assert (np.abs(logits(runcuda_bin, [tmp_path / "m.gguf"], model.vocab) - cpus).max()
            > 0.1 * np.abs(cpus).max())


@pytest.mark.parametrize("hidden", [64, 60], ids=["one kernel", "recorded ops"])
def test_text_equals_the_cpus(runcuda_bin, tmp_path, hidden):
    """
    The prompt has several tokens. The first token is computed op by op, the others in one kernel or
    by a recording. One text is greedy, the others are sampled.
    """
    model = Model(dim=32, hidden=hidden, layers=2, heads=2, kv=1, seq=64, tied=False, seed=3)
    model.w["output"][:3] = 0
    model.write_gguf(tmp_path / "m.gguf")
    for flags in (["-t", 0], ["-t", 0.8, "-s", 5], ["-t", 1, "-p", 1, "-s", 6],
                  ["-t", 3, "-p", 0.99, "-s", 7], ["-t", 1e-3, "-s", 8]):
        args = [tmp_path / "m.gguf", *flags, "-n", 14, "-i", "Hello", "--raw"]
        assert run(runcuda_bin, *args).stdout == run(runcuda_bin, *args, "--device", "cpu").stdout


def test_perplexity_equals_the_cpus(runcuda_bin, tmp_path):
    """The last piece of a window is shorter, and each length occurs several times."""
    model = Model(dim=32, hidden=64, layers=1, heads=2, kv=1, seq=8)
    model.write_gguf(tmp_path / "m.gguf")
    (tmp_path / "text").write_bytes(TEXT[:35].encode())
    ours, cpus = (run(runcuda_bin, tmp_path / "m.gguf", "--perplexity", tmp_path / "text",
                      "--device", d).stdout.split()[1] for d in ("cuda", "cpu"))
    assert float(ours) == pytest.approx(float(cpus), rel=1e-3)


def test_not_finite_logits_are_an_error(runcuda_bin, tmp_path):
    for value, flags in ((np.nan, ["-t", 0]), (np.inf, ["-t", 0]), (np.nan, ["-t", 1])):
        model = Model(dim=32, hidden=32, layers=1, heads=1, kv=1)
        model.w["w1", 0][5, 5] = value
        model.write_gguf(tmp_path / "m.gguf")
        assert b"not finite" in run(runcuda_bin, tmp_path / "m.gguf", "-i", "a", *flags,
                                    status=1).stderr


def one_line(stderr):
    assert stderr.startswith(b"run: cuda: ") and stderr.count(b"\n") == 1, stderr
    return stderr.decode()


def test_what_a_gpu_cannot_do(runcuda_bin, tmp_path, where):
    """
    No GPU, too little memory or a head too wide: the program ends with one line and exit code 1,
    or uses the CPU where that is allowed.
    """
    if where:
        pytest.skip("the GPU here is whole")
    model = Model(dim=32, hidden=32, layers=1, heads=1, kv=1)
    model.write_gguf(tmp_path / "m.gguf")
    args = [tmp_path / "m.gguf", "-t", 0, "-n", 4]
    for trouble, words in (({"CUDA_ON_CPU_NO_DEVICE": "1"}, "no GPU can be used ("),
                           ({"CUDA_ON_CPU_MEMORY": "100000"}, "GiB are needed")):
        assert words in one_line(run(runcuda_bin, *args, status=1, **trouble).stderr)
        done = run(runcuda_bin, *args, "--device=auto", **trouble)
        assert words.encode() in done.stderr
        assert done.stdout == run(runcuda_bin, *args, "--device=cpu").stdout
    Model(dim=514, hidden=32, layers=1, heads=1, kv=1).write_gguf(tmp_path / "m.gguf")
    assert "the head size is 514" in one_line(run(runcuda_bin, *args, status=1).stderr)


def test_where_the_driver_refuses(runcuda_bin, tmp_path, where):
    """
    Without cooperative launches or recordings (some ways to share a GPU), or with little shared
    memory, separate ops compute the same text.
    """
    if where:
        pytest.skip("the GPU here is whole")
    Model(dim=32, hidden=64, layers=1, heads=2, kv=1, seq=64).write_gguf(tmp_path / "m.gguf")
    args = [tmp_path / "m.gguf", "-t", 0, "-n", 12, "-i", "Hello", "--raw"]
    expected = run(runcuda_bin, *args, "--device=cpu").stdout
    for refused in ("together", "recording", "together recording"):
        assert run(runcuda_bin, *args, CUDA_ON_CPU_REFUSES=refused).stdout == expected
    for most in 1 << 12, 1 << 14, 1 << 15, 1 << 16:
        assert run(runcuda_bin, *args, CUDA_ON_CPU_SHARED=str(most)).stdout == expected


@pytest.mark.slow
def test_the_bench_waits_for_what_it_times(runcuda_bin, tmp_path):
    Model(dim=32, hidden=64, layers=1, heads=2, kv=1, seq=64).write_gguf(tmp_path / "m.gguf")
    found = json.loads(run(runcuda_bin, tmp_path / "m.gguf", "--bench", "--json", "-n", 2).stdout)
    assert found["bandwidth_gb_per_s"] > 0 and found["decode_tokens_per_s"] > 0


def test_every_allocation_may_fail(runcuda_bin, tmp_path, where):
    """
    This includes the allocations after the memory was counted. The program ends with one line, or
    uses the CPU, which gets its weights back.
    """
    if where:
        pytest.skip("the GPU here is whole")
    Model(dim=32, hidden=32, layers=1, heads=1, kv=1).write_gguf(tmp_path / "m.gguf")
    args = [tmp_path / "m.gguf", "-t", 0, "-n", 4]
    expected = run(runcuda_bin, *args, "--device=cpu").stdout
    for n in range(40):
        done = run(runcuda_bin, *args, "--device=auto", CUDA_ON_CPU_ALLOCATIONS=str(n))
        assert done.stdout == expected
        if not done.stderr.startswith(b"on the CPU"):
            break
        one_line(run(runcuda_bin, *args, status=1, CUDA_ON_CPU_ALLOCATIONS=str(n)).stderr)
    assert 10 < n < 39


def test_a_failing_gpu_is_an_error(runcuda_bin, tmp_path, where):
    """
    A failure while the engine starts ends the program with one line, or it uses the CPU. A failure
    while the engine computes is an error of the model.
    """
    if where:
        pytest.skip("the GPU here is whole")
    Model(dim=32, hidden=32, layers=1, heads=1, kv=1).write_gguf(tmp_path / "m.gguf")
    args, words = ([tmp_path / "m.gguf", "-t", 0, "-n", 4],
                   "the GPU failed: unspecified launch failure (")
    for calls in (0, 20):
        assert words in one_line(run(
            runcuda_bin, *args, status=1, CUDA_ON_CPU_CALLS=str(calls)).stderr)
        done = run(runcuda_bin, *args, "--device=auto", CUDA_ON_CPU_CALLS=str(calls))
        assert words.encode() in done.stderr
        assert done.stdout == run(runcuda_bin, *args, "--device=cpu").stdout
    messages = []
    for calls in range(0, 400, 4):
        done = subprocess.run([runcuda_bin, *map(str, args)], capture_output=True,
                              env=os.environ | {"CUDA_ON_CPU_CALLS": str(calls)})
        if done.returncode == 0:
            break
        messages.append(done.stderr[done.stderr.rfind(b"run: "):])
    assert done.returncode == 0 and all(words.encode() in message for message in messages)
    assert {message.split(b":")[1] for message in messages} == {b" cuda", b" model"}


@pytest.mark.slow
def test_make_runcuda(tmp_path):
    """
    nvcc reports no warnings. Without a GPU the program says so, and computes on the CPU where that
    is allowed.
    """
    if not shutil.which("nvcc"):
        pytest.skip("no nvcc here")
    known = subprocess.run(["nvcc", "--list-gpu-arch"], capture_output=True,
                           text=True).stdout.replace("compute_", "")
    # The speed of the kernels does not matter here.
    flags = "-O1 -Xptxas -O0 --Werror all-warnings -Xcompiler -Wall,-Wextra,-Werror"
    copy = tmp_path / "copy"
    for folder in "runtime", "cli":
        shutil.copytree(ROOT / folder, copy / folder)
    for file in "Makefile", "run.c":
        shutil.copy(ROOT / file, copy)
    subprocess.run(
        ["make", "runcuda", f"ARCH={max(int(a) for a in known.split() if int(a) <= 90)}",
         f"NVCCFLAGS={flags}", "CFLAGS=-O0 -Werror"], check=True, cwd=copy, capture_output=True)
    Model(dim=32, hidden=32, layers=1, heads=1, kv=1).write_gguf(tmp_path / "m.gguf")
    args = [copy / "runcuda", tmp_path / "m.gguf", "-t", 0, "-n", 4]
    if gpu_problem():
        assert "no GPU can be used (" in one_line(run(*args, status=1).stderr)
    assert run(*args, "--device=auto").stdout == run(*args, "--device=cpu").stdout


@pytest.mark.slow
def test_engines_on_models_of_different_sizes(objects, where, tmp_path):
    """The limit on a launch's shared memory is set for the process, not for an engine."""
    program = build(objects, "tests/engines.c", gpu=where)
    # The large model needs 64 KiB; a kernel has 48 KiB without a request.
    for name, hidden in ("small", 64), ("large", 16384):
        Model(dim=32, hidden=hidden, layers=1, heads=2, kv=1, seq=16).write_gguf(
            tmp_path / f"{name}.gguf")
    for order in ["small", "large"], ["large", "small"]:
        done = run(program, *(tmp_path / f"{name}.gguf" for name in order))
        assert done.stdout == b"fine\n" and done.stderr == b""


@pytest.fixture(scope="module")
def sequences_bin(objects, where):
    return build(objects, "tests/cuda_sequences.cpp", gpu=where)


def use_sequences(binary, case, model, **environment):
    done = run(binary, case, model, CUDA_ON_CPU_MULTIPROCESSORS="2", **environment)
    assert done.stdout == b"fine\n" and done.stderr == b"", done


@pytest.mark.parametrize("case", ["turns", "copies", "saved", "logits", "embed"])
@pytest.mark.parametrize("hidden", [64, 60], ids=["one kernel", "recorded ops"])
def test_sequences_of_an_engine(sequences_bin, tmp_path, hidden, case):
    """
    Sequences evaluated by turns have the texts of each alone. Copies continue alike, and so do
    saved sequences. Logits equal the CPU's wherever they are written; embeddings nearly do.
    """
    Model(dim=32, hidden=hidden, layers=2, heads=2, kv=1, seq=320, tied=False, seed=3).write_gguf(
        tmp_path / "m.gguf")
    use_sequences(sequences_bin, case, tmp_path / "m.gguf")


@pytest.mark.parametrize("case", ["shapes", "failures", "exhausted"])
def test_recordings_are_few_and_failures_are_returned(sequences_bin, tmp_path, where, case):
    """
    Prompts of similar lengths share a recording, and at most 32 are kept. After any failed call, an
    engine fails and is stopped as usual. Too little memory of the host is an error.
    """
    if where:
        pytest.skip("the program cannot look into this GPU")
    Model(dim=32, hidden=60, layers=1, heads=2, kv=1, seq=320).write_gguf(tmp_path / "m.gguf")
    use_sequences(sequences_bin, case, tmp_path / "m.gguf")


def test_sequences_leave_memory_for_kernels(sequences_bin, tmp_path, where):
    """The driver loads the code of a kernel when the kernel is first called."""
    if where:
        pytest.skip("the program cannot look into this GPU")
    Model(dim=32, hidden=60, layers=1, heads=2, kv=1, seq=320).write_gguf(tmp_path / "m.gguf")
    use_sequences(sequences_bin, "memory", tmp_path / "m.gguf", CUDA_ON_CPU_MEMORY=str(40 << 20))


def test_an_infinite_temperature(sequences_bin, tmp_path):
    """Half of the logits are 2.5e38, the others -2.5e38: their difference exceeds float32."""
    model = Model(dim=32, hidden=32, layers=1, heads=2, kv=1, seq=320, tied=False)
    with torch.no_grad():
        prompt = torch.tensor([[34, 41, 48]])
        x = model.oracle().model(prompt).last_hidden_state[0, -1].double().numpy()
    logits = np.where(np.arange(300) % 2, 2.5e38, -2.5e38)
    model.w["output"] = (logits[:, None] * x / (x @ x)).astype(np.float32)
    model.write_gguf(tmp_path / "m.gguf")
    use_sequences(sequences_bin, "hot", tmp_path / "m.gguf")
