"""
Test that one source serves every system: only os.c depends on the operating system, and the
Makefile's programs for Windows, ARM and macOS work, run by Wine and QEMU if these are installed.
"""
import os
import pty
import re
import select
import shlex
import shutil
import signal
import struct
import subprocess
import time
from typing import NamedTuple

import numpy as np
import pytest

from .conftest import ISAS, PROGRAM, ROOT, WARN, compile_c
from .test_hostile import hostile_gguf, hostile_llama2c
from .test_run import TEXT, Model, byte, instruction_sets, logits, reciter, run

C11 = ("assert ctype errno float inttypes limits math stdarg stdatomic stdbool stddef stdint stdio "
       "stdlib string time").split()
# Headers of the compilers, the same on every system.
PROCESSORS = ["arm_neon", "cpuid", "immintrin", "wasm_simd128"]
MINGW = "x86_64-w64-mingw32-gcc"
needs_mingw = pytest.mark.skipif(not shutil.which(MINGW), reason=f"needs {MINGW}")
ZIG = (ROOT / ".venv/bin/python").exists() and not subprocess.run(
    [ROOT / ".venv/bin/python", "-c", "import ziglang"], stderr=subprocess.DEVNULL).returncode


def sources():
    return [*PROGRAM, *(str(f.relative_to(ROOT)) for folder in ("cli", "runtime", "runtime/cpu")
                        for f in (ROOT / folder).glob("*.h"))]


def test_only_os_c_knows_an_operating_system():
    for source in sources():
        text = (ROOT / source).read_text()
        headers = set(re.findall(r"#\s*include <(.*)\.h>", text))
        systems = re.findall(r"\b(?:_WIN32|__MINGW32__|__linux__|__APPLE__|__wasi__|__unix__)\b",
                             text)
        if source not in ("runtime/os.c", "runtime/os.h"):
            assert headers <= {*C11, *PROCESSORS}, source
            # llamac.h tests for the system to export its names.
            assert not systems or source == "runtime/llamac.h", source


@needs_mingw
def test_no_warnings_for_windows():
    """
    Compile all but the vector files, whose headers take most of the time. The likeliest mistakes
    are printf's %zu and the alignment.
    """
    common = [source for source in PROGRAM if source not in ISAS]
    subprocess.run([MINGW, "-std=c11", *WARN, "-fsyntax-only", *common], check=True, cwd=ROOT)
    # As GNU C, without -std=c11.
    subprocess.run([MINGW, *WARN, "-fsyntax-only", "run.c", "runtime/os.c"], check=True, cwd=ROOT)


# ---- programs for other systems, compiled as the Makefile does ----------------------------------

class Port(NamedTuple):
    target: str          # in the Makefile
    compiler: str        # the Makefile's variable WITH; "": zig
    runner: list | None  # command that runs the program here; None: it cannot run here


PORTS = {"mingw": Port("run.exe", MINGW, ["wine"]), "windows": Port("run.exe", "", ["wine"]),
         "arm": Port("run-arm", "", ["qemu-aarch64"]), "linux": Port("run-linux", "", []),
         "clang": Port("run-linux", "clang", []), "macos": Port("run-macos", "", None),
         "macos-intel": Port("run-macos-intel", "", None)}
WINDOWS = ["mingw", "windows"]


def build(folder, name):
    """
    Compile a port, with warnings as errors. Return a script that runs it, or the compiled program
    itself if it cannot run here.
    """
    port = PORTS[name]
    if port.compiler and not shutil.which(port.compiler):
        pytest.skip(f"needs {port.compiler}")
    if not port.compiler and not ZIG:
        pytest.skip("needs ziglang (requirements-dev.txt)")
    told = subprocess.run(
        ["make", "-n", "-W", "run.c", port.target, "CFLAGS=-O1", f"WITH={port.compiler}"],
        cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()[-1]
    command = shlex.split(told)
    command[command.index("-o") + 1] = str(folder / port.target)
    subprocess.run([*command, "-Werror"], check=True, cwd=ROOT)
    if port.runner is None:
        return folder / port.target
    if port.runner and not shutil.which(port.runner[0]):
        pytest.skip(f"compiles; running it needs {port.runner[0]}")
    program = folder / name
    program.write_text(
        '#!/bin/sh\nexport WINEDEBUG=-all\n'
        f'exec {shlex.join([*port.runner, str(folder / port.target)])} "$@"\n')
    program.chmod(0o755)
    return program


@pytest.fixture(scope="module")
def ports(tmp_path_factory):
    built = {}

    def port(name):
        if name not in built:
            built[name] = build(tmp_path_factory.mktemp(name), name)
        return built[name]

    return port


FORMS = "v0: v1: v2:32 f32 f16 bf16 q8_0 q4_0 q4_1 q5_0 q5_1 q4_k_m q5_k q6_k".split()


@pytest.mark.slow  # each port takes half a minute to compile
@pytest.mark.parametrize("name", PORTS)
def test_texts_and_refusals_are_those_of_run(ports, run_bin, tmp_path, name):
    program, model = ports(name), Model(dim=256, hidden=256, kv=2, tied=False)
    if PORTS[name].runner is None:
        assert program.stat().st_size > 100_000
        pytest.skip("compiles; nothing here runs it")
    # avx512bf16 rounds the activations of BF16 weights to BF16, unlike every kernel for ARM.
    isa = [isa for isa in instruction_sets() if isa != "avx512bf16"][-1] if name == "arm" else ""
    for i, form in enumerate(FORMS):
        folder = tmp_path / str(i)
        folder.mkdir()
        args, _ = model.write(folder, form)
        text = [*args, "-t", 0, "-i", TEXT, "-n", 128]
        assert run(program, *text) == run(run_bin, *text, isa=isa), form
        ours, theirs = (logits(program, args, TEXT, model.vocab),
                        logits(run_bin, args, TEXT, model.vocab, isa=isa))
        # A different summation order may round an activation (8 bits or BF16) to the next value.
        tolerance = 1e-4 if form in ("v0:", "v1:", "f32", "f16") else 0.1
        assert np.abs(ours - theirs).max() < tolerance * theirs.std(), form
    small, refused = Model(vocab=260, layers=1, seq=16), []
    for version in 0, 1, 2:
        (tmp_path / f"v{version}").mkdir()
        args, _ = small.write(tmp_path / f"v{version}", f"v{version}:32")
        refused += [(args, data)
                    for data in list(hostile_llama2c(args[0].read_bytes(), version))[::20]]
    small.write_gguf(tmp_path / "m.gguf")
    refused += [([tmp_path / "m.gguf"], data)
                for data in list(hostile_gguf((tmp_path / "m.gguf").read_bytes()))[::20]]
    for args, data in refused:
        args[0].write_bytes(data)
        assert run(program, *args, "-n", 3, status=1) == run(run_bin, *args, "-n", 3, status=1)
    for wrong in ([tmp_path / "none.gguf"], [tmp_path], ["-n", 3], [tmp_path / "m.gguf", "-t", "x"],
                  [tmp_path / "m.gguf", "-f", tmp_path / "none"]):
        assert run(program, *wrong, status=1) == run(run_bin, *wrong, status=1)


# ---- Windows, by Wine ---------------------------------------------------------------------------

def sparse_model(path):
    """
    Write a model in format v0 whose last matrix begins more than 4 GB into the file; almost all of
    the file is a hole.
    """
    dim, hidden, vocab, seq = 64, 64, 300, (1 << 24) - 1
    before = 4 * (vocab * dim + 2 * dim + 4 * dim * dim + 3 * hidden * dim + dim)
    tables = 4 * seq * dim
    with open(path, "wb") as f:
        f.write(struct.pack("<7i", dim, hidden, 1, 1, 1, -vocab, seq))
        rng = np.random.default_rng(0)
        f.write(rng.standard_normal(before // 4).astype(np.float32).tobytes())
        f.seek(tables, os.SEEK_CUR)
        f.write(rng.standard_normal(vocab * dim).astype(np.float32).tobytes())
    assert path.stat().st_size > 1 << 32


@pytest.mark.slow
@pytest.mark.parametrize("name", WINDOWS)
def test_large_files_and_chinese_names_on_windows(ports, run_bin, tmp_path, name):
    program, folder = ports(name), tmp_path / "小 模型"
    folder.mkdir()
    args, _ = Model().write(folder, "v1:")
    sparse_model(folder / "大.bin")
    large = [folder / "大.bin", *args[1:], "-c", 64, "-n", 20, "-t", 0]
    assert run(program, *large) == run(run_bin, *large)
    path = reciter(tmp_path, [byte(ord("]")), ("你好，世界".encode(), 1)])
    shutil.copy(path, folder / "model.gguf")
    (folder / "提示.txt").write_bytes("\ufeff从前".encode())
    for flags in (["-i", "从前 \"a\\\\\" b"], ["-f", folder / "提示.txt"], ["-i", "🙂"],
                  ["--prompt-cache", folder / "缓存", "-i", "从前有一座山"]):
        for said in folder / "model.gguf", folder:
            assert (run(program, said, *flags, "-n", 12, "-t", 0)
                    == run(run_bin, said, *flags, "-n", 12, "-t", 0))
    assert (run(program, folder / "没有.gguf", status=1)
            == run(run_bin, folder / "没有.gguf", status=1))
    requests = '{"id": "一", "prompt": "从前", "max_tokens": 5, "temperature": 0}\n'.encode() * 3
    for stdin in requests, requests.replace(b"\n", b"\r\n"):
        assert (run(program, folder, "--jsonl", stdin=stdin)
                == run(run_bin, folder, "--jsonl", stdin=stdin))
    assert (run(program, folder, "--tokenize", stdin=b"a\r\nb\rc\r\n\r\n")
            == run(run_bin, folder, "--tokenize", stdin=b"a\nb\rc\n\n"))


@pytest.mark.slow
@pytest.mark.parametrize("name", WINDOWS)
def test_a_full_disk_on_windows(ports, run_bin, tmp_path, name):
    program, disk = ports(name), tmp_path / "disk"
    path = reciter(tmp_path, [byte(ord("x"))])
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", disk],
                      capture_output=True).returncode:
        pytest.skip("needs the right to mount a disk of 16 KB")
    try:
        args = [path, "--prompt-cache", disk / "cache", "-i", "x" * 60, "-n", 64]
        message = f"run: {disk}/cache: it cannot be written: No space left on device\n"
        assert run(run_bin, *args, status=1) == message
        assert run(program, *args, status=1) == message
        assert not list(disk.iterdir())
    finally:
        subprocess.run(["umount", disk], check=True)


def read_until(terminal, text, seconds=60):
    """Return what a program prints in a terminal, as soon as that contains `text`."""
    end, found = time.monotonic() + seconds, b""
    while text not in found:
        assert select.select([terminal], [], [], max(0, end - time.monotonic()))[0], found
        found += os.read(terminal, 4096)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", WINDOWS)
def test_chinese_in_a_console_on_windows(ports, tmp_path, name):
    """Run Wine's console in a terminal. The console's default code page is not Chinese."""
    program = ports(name)
    path = reciter(tmp_path, [byte(ord("]")), ("你好".encode(), 1)])
    ours, theirs = pty.openpty()
    p = subprocess.Popen(
        [program, path, "-m", "chat", "--template=llama2", "-y", "", "-t", "0", "-n", "8"],
        stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
        env=dict(os.environ, LC_ALL="C.UTF-8", TERM="xterm"))
    os.close(theirs)
    try:
        read_until(ours, b"User:")
        os.write(ours, "从前\r".encode())
        assert "从前".encode() in read_until(ours, "你好".encode())
    finally:
        p.kill()
        os.close(ours)


@pytest.mark.slow
@pytest.mark.parametrize("name", WINDOWS)
def test_ctrl_c_on_windows(ports, tmp_path, name):
    """
    Wine turns SIGINT into a Ctrl-C. The program ends at once, without its last line, the speed.
    """
    model = Model(tied=False)
    model.w["output"][1:3] = 0  # the most likely token is never one that ends the text
    model.write_gguf(tmp_path / "m.gguf")
    p = subprocess.Popen([ports(name), tmp_path / "m.gguf", "-t", "0", "-n", "100000000", "--raw"],
                         stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert p.stdout.read(1000)
    p.send_signal(signal.SIGINT)
    _, message = p.communicate(timeout=60)
    assert b"tok/s" not in message and b"run:" not in message


# ---- ARM, by QEMU -------------------------------------------------------------------------------

def count_instructions(plugin, isa, *command):
    told = subprocess.run(["qemu-aarch64", "-cpu", "max", "-plugin", plugin, *map(str, command)],
                          capture_output=True, text=True, env=dict(os.environ, LLAMAC_ISA=isa))
    if "instructions " not in told.stderr:
        pytest.skip(f"QEMU of another interface: {told.stderr[-200:]}")
    return int(told.stderr.split("instructions ")[1].split()[0])


@pytest.mark.slow
@pytest.mark.skipif(not all(map(shutil.which, ["aarch64-linux-gnu-gcc", "qemu-aarch64"])),
                    reason="needs an ARM compiler and QEMU")
def test_instructions_per_token_on_arm(tmp_path):
    """
    Each instruction set executes fewer instructions than the one before it, for the weight formats
    that it has kernels for.
    """
    plugin = compile_c(tmp_path / "instructions.so", "-shared", "-fPIC", "-O1",
                       "tests/instructions.c")
    program = compile_c(tmp_path / "run", "-O3", "-static", *PROGRAM,
                        compiler="aarch64-linux-gnu-gcc")
    # With this seed, texts do not end early.
    model, table = (Model(dim=288, hidden=768, layers=1, heads=6, kv=6, vocab=512, seq=256, seed=1),
                    {})
    for form in "f32", "q8_0":
        model.write_gguf(tmp_path / "m.gguf", form)
        for isa in "scalar", "neon", "neondot", "neoni8mm":
            command = [program, tmp_path / "m.gguf", "-t", 0, "-j", 1]
            few, decoded, prompt = (
                count_instructions(plugin, isa, *command, *more)
                for more in (["-n", 4], ["-n", 20], ["-i", "a" * 64, "-n", 68]))
            table[form, isa] = (decoded - few) / 16, (prompt - few) / 64
            print(f"{form:8}{isa:10}{table[form, isa][0]:14,.0f}{table[form, isa][1]:14,.0f}")
    for form, better in ("f32", ["scalar", "neon"]), ("q8_0", ["scalar", "neon", "neondot"]):
        for decoding_or_prompt in 0, 1:
            counts = [table[form, isa][decoding_or_prompt] for isa in better]
            assert 0 < counts[-1] and counts == sorted(counts, reverse=True)
    assert table["q8_0", "neoni8mm"][1] < table["q8_0", "neondot"][1]
