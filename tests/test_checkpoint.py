"""Test checkpoints and run folders under damage, interruption and full disks."""
import errno
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import optim
from configurator import Config
from engine import advice, files
from engine.training import checkpoint, resume, run_folder

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def vocabulary(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text('{"kind": "byte"}')
    return path


def save(out, step, vocabulary, value=0.0, **more):
    model = {"args": {"dim": 4}, "model": {"w": torch.full((4, 4), value)}}
    train = {"optimizer": {"m": torch.ones(3)}, "state": {"step": step, "best": 1.5}}
    metric = more.pop("metric", math.inf)
    contents = checkpoint.Contents(step, model, train, {"lr": 0.1}, vocabulary, metric)
    checkpoint.save(out, contents, claim=run_folder.keep_claim, **more)


def test_round_trip(tmp_path, vocabulary):
    save(tmp_path / "out", 7, vocabulary, 3.0, metric=1.0)
    folder = checkpoint.locate(tmp_path / "out")
    assert folder.name == "step_00000007" and checkpoint.locate(folder) == folder
    assert torch.equal(checkpoint.load(folder)["model"]["w"], torch.full((4, 4), 3.0))
    assert checkpoint.load(folder, "train")["state"] == {"step": 7, "best": 1.5}
    assert json.loads((folder / "config.json").read_text()) == {"lr": 0.1}
    assert checkpoint.tokenizer_path(folder).read_text() == '{"kind": "byte"}'


def test_a_setting_that_was_renamed_since_is_taken(tmp_path, vocabulary):
    model, train = {"args": {}, "model": {}}, {"optimizer": {}, "state": {}}
    folder = checkpoint.save(
        tmp_path, checkpoint.Contents(3, model, train, {"patience": 4, "seed": 5}, vocabulary))
    known = {"early_stop": 0, "seed": 1337, "init_from": "auto", "eval_only": False,
             "out_dir": "out", "max_iters": 9}
    s = Config(known, known, {})
    taken, _, changes = resume.resume_settings(s, folder, set())
    assert taken["early_stop"] == 4 and taken["seed"] == 5 and not changes
    assert resume.resume_settings(s.changed(early_stop=2), folder, {"early_stop"})[2] == [
        ["early_stop", "4", "2"]]


def test_keeps_the_last_and_the_best(tmp_path, vocabulary):
    for step in range(1, 6):
        save(tmp_path, step, vocabulary, metric=abs(step - 2.0))
    assert [p.name for p in checkpoint.steps(tmp_path)] == ["step_00000002", "step_00000005"]
    assert checkpoint.pointer(tmp_path, "best").name == "step_00000002"
    assert (checkpoint.pointer(tmp_path, "latest").name == "step_00000005"
            == checkpoint.newest(tmp_path).name)
    assert checkpoint.locate(tmp_path).name == "step_00000002"


def test_a_users_copy_of_a_checkpoint_is_neither_counted_nor_removed(tmp_path, vocabulary):
    save(tmp_path, 1, vocabulary)
    mine = [tmp_path / "checkpoints" / name
            for name in ("step_00000001_mine", "step_mine", "step_00000001.bak")]
    for path in mine:
        shutil.copytree(checkpoint.step_folder(tmp_path, 1), path)
    for step in range(2, 5):
        save(tmp_path, step, vocabulary)
    assert all((path / "checkpoint.json").exists() for path in mine)
    assert [p.name for p in checkpoint.steps(tmp_path)] == ["step_00000004"]


def test_the_writer_reports_a_failing_disk_and_goes_on():
    writer, done = checkpoint.Writer(), []

    def fail():
        raise OSError(28, "No space left on device")

    assert writer.start(fail) is None
    assert writer.start(lambda: done.append(1)).errno == 28
    assert writer.wait() is None and done == [1]


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")])
def test_the_writer_reports_a_want_of_memory_and_raises_all_else_in_the_loop(error):
    writer, done = checkpoint.Writer(), []

    def raising(error):
        raise error

    writer.start(lambda: raising(error))
    assert writer.start(lambda: raising(SystemExit(2))) is error
    with pytest.raises(SystemExit):
        writer.wait()
    writer.start(lambda: raising(KeyError("a fault")))
    with pytest.raises(KeyError):
        writer.start(lambda: done.append(1))
    assert writer.start(lambda: done.append(2)) is None and writer.wait() is None and done == [2]


def test_where_no_thread_can_start_the_loop_writes_itself(monkeypatch):
    def start(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    writer, done = checkpoint.Writer(), []
    assert writer.start(lambda: done.append(1)) is None and writer.wait() is None and done == [1]


@pytest.mark.parametrize("error, raised", [
    (MemoryError(), MemoryError), (RuntimeError("can't allocate memory"), MemoryError),
    (KeyboardInterrupt(), KeyboardInterrupt), (SystemExit(2), SystemExit),
    (RuntimeError("unexpected pos"), OSError)])
def test_whatever_a_save_fails_of_leaves_the_old_one_and_no_folder(
        tmp_path, vocabulary, monkeypatch, error, raised):
    save(tmp_path, 1, vocabulary, 1.0)

    def fail(*_):
        raise error

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(raised):
        save(tmp_path, 2, vocabulary, 2.0)
    assert os.listdir(tmp_path / "checkpoints") == ["step_00000001"]


def test_a_folder_that_is_deleted_is_claimed_again_and_one_that_another_trains_in_is_left_alone(
        tmp_path, vocabulary, capsys):
    out, moved = tmp_path / "out", tmp_path / "moved"
    run_folder.claim(out)
    save(out, 1, vocabulary)
    shutil.rmtree(out)
    save(out, 2, vocabulary)
    assert "out was deleted or moved while this process trains in it" in capsys.readouterr().out
    assert run_folder.is_run(out) and run_folder.is_file_at(run_folder.held, out / "trainer.json")
    out.rename(moved)
    program = (
        f"import sys, time; sys.path.insert(0, {str(ROOT)!r}); "
        "from engine.training import run_folder; "
        f"run_folder.claim({str(out)!r}); print('claimed', flush=True); time.sleep(600)")
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE,
                          text=True) as other:
        other.stdout.readline()
        for _ in range(2):
            with pytest.raises(OSError, match="another process trains there"):
                save(out, 3, vocabulary)
        assert os.listdir(out) == ["trainer.json"]
        assert checkpoint.newest(moved).name == "step_00000002"
        other.kill()
    (out / "model.gguf").write_text("mine")
    (out / "trainer.json").unlink()
    with pytest.raises(OSError, match="holds model.gguf"):
        save(out, 3, vocabulary)
    assert os.listdir(out) == ["model.gguf"]
    run_folder.release()


def test_weights_do_not_change_while_they_are_written(tmp_path, vocabulary, monkeypatch):
    """
    A snapshot copies lists and numbers. It shares tensors on the CPU with the model, so
    optimizer.step() waits for the writer.
    """
    weight, writer, released = (torch.nn.Parameter(torch.ones(2)), checkpoint.Writer(),
                                threading.Event())
    opt = optim.CombinedOptimizer(torch.nn.ParameterList([weight]), optim.AdamW([weight], 1))
    live = {"a": [weight], "b": 3}
    kept = checkpoint.snapshot(live)
    live["a"][0], live["b"] = None, 4
    assert kept["a"][0].data_ptr() == weight.data_ptr() and kept["b"] == 3
    opt.ready, weight.grad, seen = writer.join, torch.ones(2), []
    writer.start(lambda: (released.wait(10), seen.append(kept["a"][0].tolist())))
    threading.Timer(0.2, released.set).start()
    opt.step()
    assert seen == [[1.0, 1.0]] and weight[0] < 1


def test_keeps_all_when_asked(tmp_path, vocabulary):
    for step in range(1, 5):
        save(tmp_path, step, vocabulary, keep_last=0)
    assert len(checkpoint.steps(tmp_path)) == 4


def test_incomplete_ones_are_ignored_and_leftovers_cleaned(tmp_path, vocabulary):
    for step in (1, 2, 3):
        save(tmp_path, step, vocabulary, keep_last=0)
    folder = tmp_path / "checkpoints"
    (folder / "step_00000003" / "model.pt").write_bytes(b"short")
    (folder / "step_00000009").mkdir()
    (folder / ".tmp_00000010").mkdir()
    (folder / ".tmp_00000010" / "model.pt").write_bytes(b"half")
    assert checkpoint.newest(tmp_path).name == "step_00000002"
    save(tmp_path, 11, vocabulary)
    assert not (folder / ".tmp_00000010").exists()
    assert checkpoint.newest(tmp_path).name == "step_00000011"


@pytest.mark.parametrize("harm, words", [
    (lambda f: (f / "model.pt").write_bytes(b"x" * (f / "model.pt").stat().st_size), "damaged"),
    (lambda f: (f / "model.pt").unlink(), "cannot be read"),
    (lambda f: (f / "checkpoint.json").write_text("{"), "cannot be read"),
    (lambda f: (f / "checkpoint.json").write_text('{"version": 99}'), "version 99"),
])
def test_damage_is_one_line(tmp_path, vocabulary, harm, words, capsys):
    save(tmp_path, 1, vocabulary)
    folder = checkpoint.newest(tmp_path)
    harm(folder)
    with pytest.raises(SystemExit) as end:
        checkpoint.load(folder)
    err = capsys.readouterr().err
    assert end.value.code == 2 and err.count("\n") == 1 and words in err


def test_cannot_run_code(tmp_path, vocabulary, capsys):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "harmed"),)

    save(tmp_path, 1, vocabulary)
    folder = checkpoint.newest(tmp_path)
    torch.save(Evil(), folder / "model.pt")
    manifest = json.loads((folder / "checkpoint.json").read_text())
    manifest["files"]["model.pt"] = [(folder / "model.pt").stat().st_size,
                                     files.sha256(folder / "model.pt")]
    (folder / "checkpoint.json").write_text(json.dumps(manifest))
    with pytest.raises(SystemExit):
        checkpoint.load(folder)
    assert not (tmp_path / "harmed").exists() and capsys.readouterr().err.count("\n") == 1


def test_nothing_there_is_one_line(tmp_path, capsys):
    with pytest.raises(SystemExit):
        checkpoint.locate(tmp_path / "nowhere")
    assert "holds no complete checkpoint" in capsys.readouterr().err


def test_a_failing_disk_leaves_the_old_one(tmp_path, vocabulary, monkeypatch):
    save(tmp_path, 1, vocabulary, 1.0)
    monkeypatch.setattr(torch, "save", lambda *a:
                        (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        save(tmp_path, 2, vocabulary, 2.0)
    assert checkpoint.newest(tmp_path).name == "step_00000001"
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step_00000001"]


def test_set_aside_moves_a_run_and_nothing_else(tmp_path, vocabulary):
    out = tmp_path / "out"
    run_folder.claim(out)
    assert run_folder.set_aside(out) is None
    (out / "demo").mkdir()
    kept = [out / "notes.txt", out / "demo/model.gguf", out / "checkpoints/step_mine"]
    for number in (1, 2):
        save(out, number, vocabulary)
        for path in kept:
            path.write_text("mine")
        assert run_folder.set_aside(out).name == f"out.old{number}"
        assert checkpoint.newest(tmp_path / f"out.old{number}").name == f"step_0000000{number}"
        assert checkpoint.newest(out) is None and all(path.read_text() == "mine" for path in kept)
    (out / "log.jsonl").write_text("")
    assert run_folder.set_aside(out) is None
    (out / "log.jsonl").write_text('{"iter": 0}\n')  # a run killed before its first checkpoint
    assert run_folder.set_aside(out).name == "out.old3"
    assert (tmp_path / "out.old3/log.jsonl").exists()
    run_folder.release()
    run_folder.claim(tmp_path / "out.old3")  # the moved folder counts as a run, too
    run_folder.release()


def test_only_what_a_trainer_wrote_is_removed(tmp_path, vocabulary):
    """Keep the user's files beside checkpoints, inside one, and under names like the trainer's."""
    mine = [tmp_path / name
            for name in ("notes.tmp", "model.gguf.tmp", "checkpoints/step_mine/model.bin",
                         "checkpoints/step_1000/model.pt", "checkpoints/.tmp_mine/a",
                         "checkpoints/step_00000001/notes.txt",
                         "checkpoints/step_00000003.damaged/model.pt")]
    save(tmp_path, 1, vocabulary)
    for path in mine:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    for step in (2, 3):
        save(tmp_path, step, vocabulary)
    assert [p.name for p in checkpoint.steps(tmp_path)] == ["step_00000001", "step_00000003"]
    assert run_folder.recover(tmp_path)[0].name == "step_00000003"
    assert all(path.read_text() == "mine" for path in mine)


@pytest.mark.parametrize("harm, words", [
    (lambda f: os.truncate(f / "train.pt", 1000), "train.pt has 1,000 bytes, expected"),
    (lambda f: (f / "train.pt").unlink(), "train.pt is missing"),
    (lambda f: (f / "model.pt").write_bytes(b"x" * (f / "model.pt").stat().st_size),
     "model.pt is not what was saved"),
    (lambda f: (f / "checkpoint.json").write_text("{"), "checkpoint.json cannot be read"),
])
def test_a_damaged_checkpoint_is_set_aside_and_named(tmp_path, vocabulary, harm, words):
    for step in (1, 2):
        save(tmp_path, step, vocabulary, keep_last=0)
    harm(checkpoint.newest(tmp_path))
    found, lines = run_folder.recover(tmp_path)
    assert found.name == "step_00000001" and len(lines) == 1
    assert words in lines[0] and "set aside as step_00000002.damaged" in lines[0]
    assert (tmp_path / "checkpoints/step_00000002.damaged").is_dir()
    assert run_folder.recover(tmp_path) == (found, [])
    harm(found)
    assert run_folder.recover(tmp_path)[0] is None
    assert run_folder.recover(tmp_path)[1]  # reported again while there is no intact checkpoint


def test_a_checkpoint_saved_twice_is_there_whatever_moment_the_writer_is_killed(
        tmp_path, vocabulary, monkeypatch):
    save(tmp_path, 1, vocabulary, 1.0)
    rename, calls = os.rename, []

    def die(a, b):
        calls.append(a)
        if len(calls) > 1:
            raise KeyboardInterrupt
        rename(a, b)

    monkeypatch.setattr(os, "rename", die)
    with pytest.raises(KeyboardInterrupt):  # after the rename of the old checkpoint, before the new
        save(tmp_path, 1, vocabulary, 2.0)
    monkeypatch.undo()
    assert checkpoint.newest(tmp_path) is None
    assert checkpoint.load(run_folder.recover(tmp_path)[0])["model"]["w"][0, 0] == 2.0
    assert os.listdir(tmp_path / "checkpoints") == ["step_00000001"]


def test_another_trainer_is_named_and_a_dead_ones_lock_is_none(tmp_path, capsys):
    program = (
        f"import sys, time; sys.path.insert(0, {str(ROOT)!r}); "
        "from engine.training import run_folder; "
        f"run_folder.claim({str(tmp_path / 'out')!r}); "
        "print('claimed', flush=True); time.sleep(600)")
    other = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    other.stdout.readline()
    with pytest.raises(SystemExit) as end:
        run_folder.claim(tmp_path / "out")
    err = capsys.readouterr().err
    assert end.value.code == 2 and err.count("\n") == 1
    assert f"process {other.pid} on {socket.gethostname()} since 2" in err
    other.kill()
    other.wait()
    run_folder.claim(tmp_path / "out")
    run_folder.release()


CLAIMING = """
import os, sys, time
sys.path.insert(0, {root!r})
from engine.training import run_folder
for name in ("is_run", "refuse_foreign", "write_mark"):  # each step of a claim takes some time, \
so that others come in between
    def slow(*args, step=getattr(run_folder, name)):
        found = step(*args)
        time.sleep(0.05)
        return found
    setattr(run_folder, name, slow)
for folder in range(6):
    out = {out!r} + str(folder)
    if folder % 2:
        os.mkdir(out)
    for number in range(3):
        if not os.fork():
            time.sleep(0.06 * folder * number)
            try:
                run_folder.claim(out)
                os.write(1, b"claimed ")
                time.sleep(1)
            except SystemExit:
                os.write(1, b"refused ")
            os._exit(0)
    for number in range(3):
        os.wait()
    os.write(1, b"\\n")
"""


def test_of_trainings_begun_together_one_claims_the_folder_and_the_others_are_told_so(tmp_path):
    program = CLAIMING.format(root=str(ROOT), out=str(tmp_path / "out"))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert [sorted(line.split()) for line in done.stdout.splitlines()] == [
        ["claimed", "refused", "refused"]] * 6, done.stderr
    assert (done.stderr.count("another process trains there")
            == done.stderr.count("\n") == 12), done.stderr


def test_a_lock_on_a_mark_that_was_removed_is_none(tmp_path, monkeypatch):
    """
    Another process removes its trainer.json, as a refused run does, after this process has opened
    that file: claim() opens it again and locks the new one.
    """
    run_folder.claim(tmp_path)
    (tmp_path / "trainer.json").rename(tmp_path / "gone")
    first = open(tmp_path / "gone", "r+", encoding="utf-8")
    run_folder.release()
    opened = iter([first])
    monkeypatch.setattr("builtins.open", lambda *args, open=open, **named:
                        next(opened, None) or open(*args, **named))
    run_folder.claim(tmp_path)
    monkeypatch.undo()
    assert first.closed and run_folder.is_file_at(run_folder.held, tmp_path / "trainer.json")
    run_folder.release()


def test_a_refused_training_leaves_an_empty_file_of_the_users_and_none_of_its_own(tmp_path):
    for name, theirs in (("with", True), ("without", False)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.gguf").write_text("mine")
        if theirs:
            (tmp_path / name / "trainer.json").touch()
        with pytest.raises(SystemExit):
            run_folder.claim(tmp_path / name)
        assert (tmp_path / name / "trainer.json").exists() == theirs
        assert (tmp_path / name / "model.gguf").read_text() == "mine"
    (tmp_path / "link").mkdir()
    (tmp_path / "link/trainer.json").symlink_to(tmp_path / "nothing")
    with pytest.raises(SystemExit):
        run_folder.claim(tmp_path / "link")
    assert (tmp_path / "link/trainer.json").is_symlink() and not (tmp_path / "nothing").exists()


@pytest.mark.parametrize("name", [
    "model.gguf", "config.json", "log.jsonl", "wandb.json", "tensorboard/mine", "trainer.json",
    "latest", "diff.patch", "model.gguf.4194305.tmp", "checkpoints/step_00001000/model.pt",
    "checkpoints/.tmp_x/model.pt", "checkpoints/.old_00000001/model.pt"])
def test_a_folder_with_foreign_files_under_our_names_is_refused(tmp_path, name, capsys):
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("mine")
    with pytest.raises(SystemExit) as end:
        run_folder.claim(tmp_path)
    err = capsys.readouterr().err
    assert end.value.code == 2
    assert err.count("\n") == 1
    assert name.removesuffix("/mine").removesuffix("/model.pt") in err
    assert path.read_text() == "mine" and [p for p in tmp_path.rglob("*") if p.is_file()] == [path]


def test_a_run_from_before_the_mark_goes_on(tmp_path, vocabulary):
    save(tmp_path, 1, vocabulary)
    (tmp_path / "log.jsonl").write_text("")
    run_folder.claim(tmp_path)
    run_folder.release()
    assert run_folder.is_run(tmp_path)


def test_without_locks_there_is_a_warning(tmp_path, monkeypatch, capsys):
    def none(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(run_folder.system, "lock", none)
    run_folder.claim(tmp_path)
    run_folder.release()
    assert "cannot be locked (No locks available)" in capsys.readouterr().out


def test_the_newest_run_of_a_folder(tmp_path, vocabulary, capsys):
    for number, name in enumerate(["b", "a"]):
        save(tmp_path / name, 1, vocabulary)
        os.utime(checkpoint.newest(tmp_path / name), (number, number))
    assert checkpoint.newest_run(tmp_path) == str(tmp_path / "a")
    assert "the newest run" in capsys.readouterr().err
    for path in (tmp_path / "b", checkpoint.newest(tmp_path / "b"), vocabulary):
        assert checkpoint.newest_run(path) == str(path)
    assert not capsys.readouterr().err
    assert checkpoint.newest_run(tmp_path / "nowhere") == str(tmp_path / "nowhere")


def test_a_kill_while_the_log_is_rewritten_loses_no_row(tmp_path):
    """The kernel kills the process in the middle of a write that exceeds RLIMIT_FSIZE."""
    rows = "".join(json.dumps({"iter": n, "tokens": n}) + "\n" for n in range(100))
    (tmp_path / "log.jsonl").write_text(rows)
    program = (
        f"import resource, signal, sys; sys.path.insert(0, {str(ROOT)!r}); import track\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_DFL); "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500))\n"
        f"track.Jsonl({str(tmp_path)!r}, {{}}, 99)")
    assert subprocess.run([sys.executable, "-c", program]).returncode == -signal.SIGXFSZ
    assert (tmp_path / "log.jsonl").read_text() == rows


KILLED = """
import sys, torch
sys.path.insert(0, {root!r})
from engine.training import checkpoint
for step in range(1, 10000):
    value = torch.full((400, 400), float(step))
    checkpoint.save({out!r}, checkpoint.Contents(step, {{"args": {{}}, "model": {{"w": value}}}}, \
{{"state": {{"step": step}}}},
                                                 {{}}, {vocabulary!r}, -step // 3))
    print(step, flush=True)
"""


@pytest.mark.parametrize("times", [3, pytest.param(12, marks=pytest.mark.slow)])
def test_killed_at_any_moment_a_loadable_one_remains(tmp_path, vocabulary, times):
    for attempt in range(times):
        out = tmp_path / str(attempt)
        script = KILLED.format(root=str(ROOT), out=str(out), vocabulary=str(vocabulary))
        process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE,
                                   text=True)
        lines = [process.stdout.readline() for _ in range(2)]  # from now on it saves continuously
        time.sleep(0.003 * attempt)
        process.send_signal(signal.SIGKILL)
        done = [int(line) for line in lines + process.stdout.read().split("\n") if line.strip()]
        process.wait()
        found = checkpoint.newest(out)
        step = checkpoint.load(found, "train")["state"]["step"]
        assert done[-1] <= step <= done[-1] + 1
        assert torch.equal(checkpoint.load(found)["model"]["w"],
                           torch.full((400, 400), float(step)))
        assert checkpoint.pointer(out, "latest") is not None


SHARDED = """
import os, resource, sys
sys.path.insert(0, {root!r})
import torch
from engine.training import checkpoint, distributed
from model import ModelArgs, Transformer
from optim import OptimizerConfig, make_optimizer
distributed.setup("cpu")
torch.manual_seed(0)
model = Transformer(ModelArgs(dim=32, n_layers=1, n_heads=2, vocab_size=259, max_seq_len=8))
whole = {{k: v.detach().clone() for k, v in model.named_parameters()}}
distributed.shard(model)
opt = make_optimizer(model, OptimizerConfig("muon", 0.01))
def save(step):
    train = {{"optimizer": opt.state_dict(), "state": {{"step": step}}}}
    parts = checkpoint.snapshot({{"args": {{"dim": 32}}, "model": \
dict(model.named_parameters())}}), checkpoint.snapshot(train)
    return checkpoint.save({out!r}, checkpoint.Contents(step, *parts, {{}}, {vocabulary!r}, 1.0))
folder = save(1)
distributed.gather(lambda: None)  # the first process publishes
loaded = checkpoint.load(folder)["model"]
assert loaded.keys() == whole.keys() and all(torch.equal(loaded[k], v) for k, v in whole.items())
if distributed.rank == 1:
    resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))  # its disk is full, \
the other's is not
try:
    save(2)
    print("no error")
except OSError as e:
    sys.stdout.write(f"process {{distributed.rank}} failed: \
{{str(e).splitlines()[0]}}\\n")  # one write: two share the pipe
distributed.close()
"""


@pytest.mark.slow
def test_shards_are_saved_by_all_or_not_at_all(tmp_path, vocabulary, capsys):
    out = tmp_path / "out"
    script = tmp_path / "sharded.py"
    script.write_text(SHARDED.format(root=str(ROOT), out=str(out), vocabulary=str(vocabulary)))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
               script]
    done = subprocess.run(command, capture_output=True, text=True,
                          env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("failed: process 1:") == 2 and "no error" not in done.stdout
    assert [p.name for p in (out / "checkpoints").iterdir()] == ["step_00000001"]
    folder = checkpoint.locate(out)
    sizes = {p.name[:11]: p.stat().st_size for p in folder.glob("*.*")}
    assert {"shard-00001", "shard-00002"} < set(sizes) and sizes["model.pt"] < 4000
    weights = checkpoint.load(folder)["model"]
    assert weights["layers.0.feed_forward.w1.weight"].shape == (96, 32)
    assert len(weights) == 11
    (folder / next(name for name in os.listdir(folder)
                   if name.startswith("shard-00002"))).write_bytes(b"x" * sizes["shard-00002"])
    with pytest.raises(SystemExit):
        checkpoint.load(folder)
    assert "damaged" in capsys.readouterr().err


def test_what_stands_behind_an_error_of_torch_save_is_told(tmp_path, monkeypatch):
    def save(content, f):
        try:
            raise content
        except Exception:
            raise RuntimeError("unexpected pos 64 vs 0")  # noqa: B904

    monkeypatch.setattr(torch, "save", save)
    for behind, number in ((OSError(errno.ENOSPC, "No space left on device"), errno.ENOSPC),
                           (ValueError("closed"), None)):
        with pytest.raises(OSError) as e:
            checkpoint.torch_save(behind, tmp_path / "model.pt")
        assert e.value.errno == number and ("unexpected pos" in str(e.value)) == (number is None)


def test_a_file_may_be_written_by_several_at_once(tmp_path, vocabulary):
    """
    Each writer uses its own temporary name until its file is complete. recover() removes the
    temporary file of a killed writer.
    """
    mine = tmp_path / "model.gguf.tmp"
    mine.write_text("mine")
    program = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\nfrom engine.files import replacing\n"
        f"with replacing({str(tmp_path / 'model.gguf')!r}) as f:\n"
        "    for _ in range(3): f.write(sys.argv[1].encode() * 1000); f.flush(); "
        "print(flush=True); sys.stdin.readline()\n")
    writers = [subprocess.Popen([sys.executable, "-c", program, word], stdin=subprocess.PIPE,
                                stdout=subprocess.PIPE) for word in "abc"]
    for _ in range(2):
        for writer in writers:
            assert writer.stdout.readline()
            writer.stdin.write(b"\n")
            writer.stdin.flush()
    for writer in writers:
        assert writer.stdout.readline()
    assert len([*tmp_path.glob("model.gguf.*.tmp")]) == 3
    save(tmp_path, 1, vocabulary)
    writers[2].kill()
    writers[2].wait()
    run_folder.recover(tmp_path)
    assert len([*tmp_path.glob("model.gguf.*.tmp")]) == 2  # those of the two running writers
    for writer, word in zip(writers[:2], "ab"):
        writer.communicate(b"\n")
        assert writer.returncode == 0 and (tmp_path / "model.gguf").read_text() == word * 3000
    assert mine.read_text() == "mine" and not [*tmp_path.glob("model.gguf.*.tmp")]


def test_a_manifest_of_another_shape_is_none(tmp_path, vocabulary):
    save(tmp_path, 1, vocabulary)
    folder = checkpoint.newest(tmp_path)
    (folder / "checkpoint.json").write_text(json.dumps({"version": 2, "step": 1, "files": 5}))
    assert checkpoint.newest(tmp_path) is None and "cannot be read" in checkpoint.damage(folder)


@pytest.mark.parametrize("metric, is_valid", [
    (None, True), (3, True), (1.5, True), ("1.5", False), ([1.5], False), (True, False),
    (math.nan, False), (math.inf, False), (10 ** 400, False)])
def test_the_metric_of_a_manifest_is_none_or_a_finite_number(
        metric, is_valid, tmp_path, vocabulary):
    save(tmp_path, 1, vocabulary)
    path = checkpoint.newest(tmp_path) / "checkpoint.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"metric": metric}))
    assert (checkpoint.newest(tmp_path) is not None) == is_valid


def test_of_several_files_none_stays_half_written_and_the_error_is_the_first(tmp_path):
    with pytest.raises(IsADirectoryError), files.replacing_all() as writing:
        for name in "a", "b":
            with writing(tmp_path / name) as f:
                f.write(b"new")
        (tmp_path / "b").mkdir()  # a can be renamed, b can't
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_settings_of_old_checkpoints_are_translated():
    old = {
        "patience": 3, "tied": False, "sharded": True, "within_documents": False, "vocab_most": 400,
        "text_most": 9, "table_rate": 2.0, "skip_bad": True, "checks": "all", "wandb_watch": "all",
        "noise_scale": True, "head_width": 24, "dim": 64}
    found = advice.renamed(old)
    assert not found.keys() & {"tied", "skip_bad", "wandb_watch", "noise_scale"}
    expected = {
        "early_stop": 3, "tie_embeddings": False, "fsdp": True, "document_mask": False,
        "max_vocab_size": 400, "max_text_bytes": 9, "embedding_lr_scale": 2.0, "checks": "-files",
        "dim": 64}
    assert found.items() >= expected.items() and resume.leaves_out(found["checks"], "files")
    assert advice.renamed({
        "wandb_watch": "off", "noise_scale": False, "wandb_tables": False})["log_extras"] == "model"
    assert advice.renamed(found) == found
