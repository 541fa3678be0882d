"""run --stream reads the weights from the file at every pass: the same text, less memory."""
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import llamac
from tests.test_kernels import MIB
from tests.test_run import ISAS, LAYER, Model, run

GROUPS = Path("/sys/fs/cgroup")


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """Write models of several sections of 4 MiB. Return {form: arguments of run}."""
    folder = tmp_path_factory.mktemp("wide")
    model = Model(dim=512, hidden=1376, heads=8, kv=4, vocab=3000, seq=4000, tied=False)
    model.w["output"][:259] = 0  # the model writes only letters
    # the order of export.py
    model.names = lambda order: [
        "tok", *((name, i) for i in range(2) for name in LAYER), "norm", "output"]
    old = Model(dim=512, hidden=1376, heads=8, kv=4, vocab=3000, seq=4000, tied=False)
    args = {}
    for form in ("f32", "bf16", "q8_0", "v2-32", "v2-16"):
        (folder / form).mkdir()
        args[form] = (old if form[0] == "v" else model).write(folder / form, form)[0]
    return args


@pytest.mark.parametrize("form", ["f32", "bf16", "q8_0", "v2-32", "v2-16"])
def test_streamed_text_is_the_same(run_bin, wide, form):
    for isa in ("scalar", ISAS[-1]) if form == "v2-32" else ISAS[-1:]:
        args = [*wide[form], "-t", 0, "-n", 12, "-i", "Once upon a time, a long prompt", "-b", 2]
        expected = run(run_bin, *args, isa=isa)
        for threads in (1, 2):
            assert run(run_bin, *args, "--stream", "-j", threads, isa=isa) == expected


def peak(program, args):
    """Return the peak memory in MiB of a process that has written 12 letters."""
    p = subprocess.Popen([program, *map(str, args), "-t", "0", "-n", "0", "-j", "1"],
                         stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    p.stdout.read(12)
    os.kill(p.pid, signal.SIGSTOP)
    status = Path(f"/proc/{p.pid}/status").read_text()
    p.kill()
    p.communicate()
    return int(re.search(r"VmHWM:\s+(\d+)", status)[1]) / 1024


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_streamed_model_takes_two_sections_of_memory(run_bin, wide):
    size = os.path.getsize(wide["f32"][0]) / MIB
    assert size > 30
    assert peak(run_bin, wide["f32"]) > size
    assert peak(run_bin, [*wide["f32"], "--stream"]) < 20  # 8 MiB of them are buffers


def test_a_streamed_model_cut_off_while_in_use(run_bin, wide, tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(Path(wide["f32"][0]).read_bytes())
    p = subprocess.Popen([run_bin, path, "-t", "0", "-n", "0", "-j", "1", "--stream"],
                         stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    p.stdout.read(12)
    os.truncate(path, path.stat().st_size // 2)
    _, message = p.communicate(timeout=60)
    assert p.returncode == 1
    # The norms are mapped, the rest is read: one message, whichever is read first.
    assert message.count(b"\n") == 1
    assert message.startswith(b"run: model: its file was cut off while in use")


@pytest.mark.usefixtures("library")
def test_python_streams_a_file_only(wide):
    path = wide["q8_0"][0]
    texts = [llamac.Engine(llamac.Model(path, stream=stream), positions=64).embed(
        "Once upon a time") for stream in (False, True)]
    assert (texts[0] == texts[1]).all()
    with pytest.raises(llamac.Error,
                       match="a model in memory cannot be streamed, expected the path of its file"):
        llamac.Model(Path(path).read_bytes(), stream=True)


def limited(limit, command):
    """
    Run a command in a memory control group of its own. Return its completed process and the group's
    peak usage in bytes.
    """
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    old = next((line.split(":", 2)[2] for line in lines if ":memory:" in line), None)
    new = next((line[3:] for line in lines if line.startswith("0::")), "")
    parent = GROUPS / "memory" / old.lstrip("/") if old else GROUPS / new.lstrip("/")
    group = parent / f"llamac-{os.getpid()}"
    names = (("memory.limit_in_bytes", "memory.max_usage_in_bytes") if old
             else ("memory.max", "memory.peak"))
    try:
        group.mkdir()
        (group / names[0]).write_text(str(limit))
    except OSError as e:
        if group.exists():
            group.rmdir()
        pytest.skip(f"no memory control group can be made here: {e}")
    try:
        p = subprocess.run(
            ["sh", "-c", f'echo $$ > "{group}/cgroup.procs"; exec "$@"', "sh", *map(str, command)],
            capture_output=True)
        return p, int((group / names[1]).read_text())
    finally:
        group.rmdir()


@pytest.mark.slow  # reads the file for every token
@pytest.mark.parametrize("flags", [["--stream"], []])
def test_a_model_larger_than_the_memory(run_bin, wide, flags):
    """
    The file has 36 MiB, the memory 24 MiB. With --stream no weights are kept in memory, without it
    as many as fit.
    """
    path, *rest = wide["f32"]
    command = [run_bin, path, *rest, "-t", "0", "-n", "40", "-c", "64", "-j", "1"]
    expected = run(*command)
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # its cached pages must be the group's own
    os.close(fd)
    p, used = limited(24 << 20, [*command, *flags])
    assert (p.returncode, p.stdout) == (0, expected), p.stderr
    assert used <= 24 << 20
    assert (b"do not fit in memory" in p.stderr) == (not flags)
