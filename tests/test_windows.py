"""The trainer without the parts of Python that Windows lacks: tests/like_windows.py."""
import json
import os
import subprocess
import sys

import pytest

from engine import system
from tests import forked
from tests.conftest import ROOT

SMALL = ["--vocab_source=byte", "--dim=32", "--n_layers=1", "--max_seq_len=32", "--eval_interval=2",
         "--data=stories:50"]


def like_windows(folder, program, *arguments):
    environment = ({k: v for k, v in os.environ.items() if not k.startswith("WANDB")}
                   | {"OMP_NUM_THREADS": "1"})
    return forked.run([ROOT / "tests/like_windows.py", ROOT / program, *arguments], folder,
                      environment)


def test_the_debug_preset_trains_and_resumes(tmp_path):
    train = ["train.py", str(ROOT / "config/debug.py"), *SMALL]
    first = like_windows(tmp_path, *train, "--max_iters=2")
    assert first.returncode == 0 and "finished" in first.stdout, first.stdout + first.stderr
    more = like_windows(tmp_path, *train, "--max_iters=4")
    assert more.returncode == 0 and "resum" in more.stdout, more.stdout + more.stderr
    rows = [json.loads(line)
            for line in (tmp_path / "out/debug/log.jsonl").read_text().splitlines()]
    assert rows[-1]["iter"] == 4 and (tmp_path / "out/debug/model.gguf").exists()
    assert not list((tmp_path / "cache").glob("*.partial"))
    text = like_windows(tmp_path, "sample.py", "out/debug", "--prompt=Once", "--max_new_tokens=5")
    assert text.returncode == 0 and "Once" in text.stdout, text.stderr


def test_a_lock_holds_for_other_processes_until_its_end(tmp_path):
    """The lock of Windows is on a byte beyond the content, which others can still read."""
    code = (
        "import sys; sys.path[:0] = sys.argv[1:]; "
        "from tests import like_windows; like_windows.become_windows()\n"
        "from engine import system\nf = open('mark', 'r+')\n"
        "try:\n    system.lock(f)\nexcept BlockingIOError:\n    print('refused', flush=True)\n"
        "else:\n    print('locked', f.read(), flush=True); sys.stdin.read()")
    (tmp_path / "mark").write_text("content")
    command = [sys.executable, "-c", code, ROOT]
    with subprocess.Popen(command, cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          text=True) as holder:
        assert holder.stdout.readline() == "locked content\n"
        assert subprocess.run(command, cwd=tmp_path, stdin=subprocess.DEVNULL,
                              stdout=subprocess.PIPE, text=True).stdout == "refused\n"
        holder.kill()
    assert subprocess.run(command, cwd=tmp_path, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          text=True).stdout == "locked content\n"


@pytest.mark.parametrize("program, arguments", [
    ("page.py", []), ("experiment.py", ["A"]), ("track.py", ["--", "true"])])
def test_what_needs_linux_says_so_in_one_line(tmp_path, program, arguments):
    done = like_windows(tmp_path, program, *arguments)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "needs Linux or macOS" in done.stderr and "WSL" in done.stderr


def test_is_running():
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait()
    assert system.is_running(os.getpid())
    assert not system.is_running(child.pid)
    assert not system.is_running(1 << 70)
