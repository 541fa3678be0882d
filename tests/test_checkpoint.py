"""Checkpoints under damage, interruption and full disks."""
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import checkpoint

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def vocabulary(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text('{"kind": "byte"}')
    return path


def save(out, step, vocabulary, value=0.0, **more):
    model = {"args": {"dim": 4}, "model": {"w": torch.full((4, 4), value)}}
    train = {"optimizer": {"m": torch.ones(3)}, "state": {"step": step, "best": 1.5}}
    checkpoint.save(out, step, model, train, {"lr": 0.1}, vocabulary, **more)


def test_round_trip(tmp_path, vocabulary):
    save(tmp_path / "out", 7, vocabulary, 3.0, metric=1.0)
    folder = checkpoint.locate(tmp_path / "out")
    assert folder.name == "step_00000007" and checkpoint.locate(folder) == folder
    assert torch.equal(checkpoint.load(folder)["model"]["w"], torch.full((4, 4), 3.0))
    assert checkpoint.load(folder, "train")["state"] == {"step": 7, "best": 1.5}
    assert json.loads((folder / "config.json").read_text()) == {"lr": 0.1}
    assert checkpoint.tokenizer_path(folder).read_text() == '{"kind": "byte"}'


def test_keeps_the_last_and_the_best(tmp_path, vocabulary):
    for step in range(1, 6):
        save(tmp_path, step, vocabulary, metric=abs(step - 2.0))
    assert [p.name for p in checkpoint.steps(tmp_path)] == ["step_00000002", "step_00000005"]
    assert checkpoint.pointer(tmp_path, "best").name == "step_00000002"
    assert checkpoint.pointer(tmp_path, "latest").name == "step_00000005" == checkpoint.newest(tmp_path).name
    assert checkpoint.locate(tmp_path).name == "step_00000002"


def test_keeps_the_best_few(tmp_path, vocabulary):
    for step, metric in enumerate([5.0, 1.0, 3.0, 2.0, float("inf"), 4.0]):
        save(tmp_path, step, vocabulary, metric=metric, keep_best=3)
    assert [int(p.name[5:]) for p in checkpoint.steps(tmp_path)] == [1, 2, 3, 5]


def test_the_writer_reports_a_failing_disk_and_goes_on():
    writer, done = checkpoint.Writer(), []
    def fail():
        raise OSError(28, "No space left on device")
    assert writer.start(fail) is None
    assert writer.start(lambda: done.append(1)).errno == 28
    assert writer.wait() is None and done == [1]


def test_a_snapshot_does_not_follow_the_original():
    live = {"a": [torch.ones(2)], "b": 3}
    kept = checkpoint.snapshot(live)
    live["a"][0].zero_()
    assert torch.equal(kept["a"][0], torch.ones(2)) and kept["b"] == 3


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
    manifest["files"]["model.pt"] = [(folder / "model.pt").stat().st_size, checkpoint.sha256(folder / "model.pt")]
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
    monkeypatch.setattr(torch, "save", lambda *a: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        save(tmp_path, 2, vocabulary, 2.0)
    assert checkpoint.newest(tmp_path).name == "step_00000001"
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step_00000001"]


def test_set_aside(tmp_path, vocabulary):
    out = tmp_path / "out"
    assert checkpoint.set_aside(out) is None
    save(out, 1, vocabulary)
    assert checkpoint.set_aside(out).name == "out.old1" and not out.exists()
    save(out, 2, vocabulary)
    assert checkpoint.set_aside(out).name == "out.old2"
    assert checkpoint.newest(tmp_path / "out.old1").name == "step_00000001"
    out.mkdir()
    (out / "log.jsonl").write_text("")
    assert checkpoint.set_aside(out) is None
    (out / "log.jsonl").write_text('{"iter": 0}\n')  # a run that was killed before its first checkpoint
    assert checkpoint.set_aside(out).name == "out.old3" and (tmp_path / "out.old3/log.jsonl").exists()


KILLED = """
import sys, torch
sys.path.insert(0, {root!r})
import checkpoint
for step in range(1, 10000):
    value = torch.full((400, 400), float(step))
    checkpoint.save({out!r}, step, {{"args": {{}}, "model": {{"w": value}}}}, {{"state": {{"step": step}}}}, {{}},
                    {vocabulary!r}, metric=-step // 3)
    print(step, flush=True)
"""


def test_killed_at_any_moment_a_loadable_one_remains(tmp_path, vocabulary):
    for attempt in range(6):
        out = tmp_path / str(attempt)
        script = KILLED.format(root=str(ROOT), out=str(out), vocabulary=str(vocabulary))
        process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
        lines = [process.stdout.readline() for _ in range(2)]  # it is saving now, again and again
        time.sleep(0.003 * attempt)
        process.send_signal(signal.SIGKILL)
        done = [int(line) for line in lines + process.stdout.read().split("\n") if line.strip()]
        process.wait()
        found = checkpoint.newest(out)
        step = checkpoint.load(found, "train")["state"]["step"]
        assert done[-1] <= step <= done[-1] + 1
        assert torch.equal(checkpoint.load(found)["model"]["w"], torch.full((400, 400), float(step)))
        assert checkpoint.pointer(out, "latest") is not None


SHARDED = """
import os, resource, sys
sys.path.insert(0, {root!r})
import torch
import checkpoint, parallel
from model import ModelArgs, Transformer
from optim import make_optimizer
parallel.setup("cpu")
torch.manual_seed(0)
model = Transformer(ModelArgs(dim=32, n_layers=1, n_heads=2, vocab_size=259, max_seq_len=8))
whole = {{k: v.clone() for k, v in model.state_dict().items()}}
parallel.shard(model)
opt = make_optimizer(model, "muon", 0.01, 0.1, 0.9, 0.95)
def save(step):
    train = {{"optimizer": opt.state_dict(), "state": {{"step": step}}}}
    parts = checkpoint.snapshot({{"args": {{"dim": 32}}, "model": model.state_dict()}}), checkpoint.snapshot(train)
    return checkpoint.save({out!r}, step, *parts, {{}}, {vocabulary!r}, metric=1.0)
folder = save(1)
parallel.everywhere(lambda: None)  # the first process publishes
loaded = checkpoint.load(folder)["model"]
assert loaded.keys() == whole.keys() and all(torch.equal(loaded[k], v) for k, v in whole.items())
if parallel.rank == 1:
    resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))  # its disk is full, the other's is not
try:
    save(2)
    print("no error")
except OSError as e:
    sys.stdout.write(f"process {{parallel.rank}} failed: {{str(e).splitlines()[0]}}\\n")  # one write: two share the pipe
parallel.close()
"""


def test_shards_are_saved_by_all_or_not_at_all(tmp_path, vocabulary, capsys):
    out = tmp_path / "out"
    script = tmp_path / "sharded.py"
    script.write_text(SHARDED.format(root=str(ROOT), out=str(out), vocabulary=str(vocabulary)))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", script]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("failed: process 1:") == 2 and "no error" not in done.stdout
    assert [p.name for p in (out / "checkpoints").iterdir()] == ["step_00000001"]
    folder = checkpoint.locate(out)
    sizes = {p.name[:11]: p.stat().st_size for p in folder.glob("*.*")}
    assert {"shard-00001", "shard-00002"} < set(sizes) and sizes["model.pt"] < 4000
    weights = checkpoint.load(folder)["model"]
    assert weights["layers.0.feed_forward.w1.weight"].shape == (96, 32) and len(weights) == len(list(weights)) == 12
    (folder / next(name for name in os.listdir(folder) if name.startswith("shard-00002"))).write_bytes(b"x" * sizes["shard-00002"])
    with pytest.raises(SystemExit):
        checkpoint.load(folder)
    assert "damaged" in capsys.readouterr().err
