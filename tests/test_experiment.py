"""
The ledger of experiments. Most tests use a repository of their own: its train.py writes a loss that
the settings determine, its scorer reads that loss, and experiment.py and engine/ are the real ones.
"""
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import experiment
from engine.training import load, score
from tests.test_train import ROOT, folder, run, rows  # noqa: F401

TRAIN = '''"""A training that ends at once, with the loss that its settings say."""
import json as js, os, random, sys, time
out_dir = "auto"
cache = "cache"
data = "stories"
val_fraction = 0.1
column = "text"
max_text_bytes = 0
minutes = 0.0
max_minutes = 0.0
max_iters = 10
seed = 1
dim = 64
gain = 0.0
salt = "a"
delay = 0.0
knobs = {name: value for name, value in globals().items() \
if type(value) in (int, float, str) and name[0] != "_"}
for word in sys.argv[1:]:
    if word.startswith("--"):
        name, value = word[2:].split("=")
        globals()[name] = type(knobs[name])(value)
    else:
        exec(open(word).read())
settings = {name: globals()[name] for name in knobs}
time.sleep(delay)
os.makedirs(f"{cache}/prepared-{data}", exist_ok=True)
os.makedirs(out_dir)
noise = random.Random(f"{seed}{salt}").gauss(0, 0.001)
sizes = dict.fromkeys(["train_bytes", "val_bytes", "train_documents", "val_documents", \
"fingerprint"], data)
files = {"loss": 1 - gain + noise, "config.json": settings | {"dataset": sizes}, \
"result.json": {"iter": dim}}
for name, value in files.items():
    with open(f"{out_dir}/{name}", "w") as f:
        js.dump(value, f)
print("trained", data, max_minutes, max_iters)
'''
SCORE = '''import json, sys
from pathlib import Path
tree, what, run, file = sys.argv[1:]
if what == "texts":
    Path(file).write_text('"text"\\n')
else:
    print(json.dumps({"bpb": float(Path(run, "loss").read_text()), "lost": 0}))
'''


class Repository:
    """A repository with a commit, a staged edit, an untracked file and an ignored folder, out/."""

    def __init__(self, folder):  # noqa: F811
        self.folder = folder
        shutil.copytree(ROOT / "engine", folder / "engine",
                        ignore=shutil.ignore_patterns("__pycache__"))
        for name in "experiment.py", "configurator.py", ".gitignore":
            shutil.copy(ROOT / name, folder)
        text = (folder / "experiment.py").read_text()
        assert "SLOWER = 1.1, 10 " in text
        (folder / "experiment.py").write_text(text.replace("SLOWER = 1.1, 10 ", "SLOWER = 1.1, 2 "))
        (folder / "train.py").write_text(TRAIN)
        (folder / "engine/training/score.py").write_text(SCORE)
        (folder / "config").mkdir()
        (folder / "config/preset.py").write_text("dim = 32\n")
        self.git("init", "-q")
        self.git("add", ".")
        self.git("commit", "-q", "-m", "all")
        (folder / "README.md").write_text("staged\n")
        self.git("add", "README.md")
        (folder / "notes.txt").write_text("mine\n")
        (folder / "out").mkdir()

    def git(self, *words):
        who = ["-c", "user.name=x", "-c", "user.email=x@y"]
        return subprocess.run(["git", *who, *words], cwd=self.folder, check=True,
                              capture_output=True, text=True).stdout

    def edit(self, before, after, name="train.py"):
        text = (self.folder / name).read_text()
        assert before in text
        (self.folder / name).write_text(text.replace(before, after))

    def state(self):
        """Return all that an experiment must not change: files, index, stashes, branches, HEAD."""
        files = {
            path.relative_to(self.folder): path.read_bytes() for path in self.folder.rglob("*")
            if path.is_file() and not {".git", "out", "cache", "__pycache__", "experiments.jsonl"}
            & set(path.relative_to(self.folder).parts)}
        return (files, (self.folder / ".git/index").read_bytes(), self.git("for-each-ref"),
                self.git("rev-parse", "HEAD"))

    def start(self, *words, **more):
        command = [sys.executable, "experiment.py", *words]
        return subprocess.Popen(command, cwd=self.folder, stdout=subprocess.PIPE,
                                stderr=subprocess.PIPE, text=True, **more)

    def try_change(self, *words, code=0):
        """
        Run an experiment and check that it leaves the repository unchanged; return (its row of the
        ledger, its output).
        """
        before, count = self.state(), len(self.rows())
        done = self.start(*words)
        out, err = done.communicate()
        assert done.returncode == code and "Traceback" not in err, out + err
        assert self.state() == before
        copies = [path.name for path in (self.folder / "cache/experiments").iterdir()]
        assert [name for name in copies if not name.startswith("base-") and name != ".lock"] == []
        # The main working tree makes up for .lock, which is not one.
        assert self.git("worktree", "list").count("\n") == len(copies)
        assert len(self.rows()) == count + 1
        return self.rows()[-1], out

    def refuse(self, *words):
        """
        Check that experiment.py refuses to begin and leaves the repository and the ledger
        unchanged; return its error message.
        """
        before, ledger = self.state(), self.rows()
        done = self.start(*words)
        _, err = done.communicate()
        assert done.returncode == 2, err
        assert err.count("\n") == 1, err
        assert self.state() == before, err
        assert self.rows() == ledger, err
        return err

    def rows(self):
        path = self.folder / "experiments.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def repository(tmp_path):
    return Repository(tmp_path)


def test_a_change_is_kept_if_it_is_better_than_the_noise_and_all_stays_as_it_was(repository):
    repository.edit("gain = 0.0", "gain = 0.1")
    repository.edit('salt = "a"', 'salt = "b"')
    row, out = repository.try_change("more gain", "--json", "--minutes=2")
    assert json.loads(out.splitlines()[-1]) == row and "keep: the change is better by 0." in out
    assert row["decision"] == "keep"
    assert -0.11 < row["low"] < row["difference"] < row["high"] < -0.09
    assert row["p"] < 0.01
    assert row["base"] == row["head"] == repository.git("rev-parse", "HEAD").strip()
    assert row["hypothesis"] == "more gain"
    assert row["seeds"] == [1337, 1338, 1339]
    assert len(row["base_bpb"]) == len(row["change_bpb"]) == 3
    assert row["base_steps"] == [64] * 3
    assert "+gain = 0.1" in row["diff"]
    assert "+staged" in row["diff"]
    assert "+mine" in row["diff"]  # an untracked file
    printed = (repository.folder / "out/experiments/1/change/seed1337.txt").read_text()
    assert printed == "trained stories 2.0 1000000000\n"
    repository.git("stash", "-u")
    subprocess.run(["git", "apply", "--check"], input=row["diff"], text=True, cwd=repository.folder,
                   check=True)
    repository.git("stash", "pop", "--index")

    # A worse change; then one that changes only the seeds' noise, which two seeds do not show as a
    # difference. Both sides train on the base's text.
    repository.edit("gain = 0.1", "gain = -0.1")
    row, out = repository.try_change("less gain", "--seeds=2", "--", "config/preset.py", "--dim=8")
    assert row["decision"] == "discard" and "the base is better by 0." in out and row["n"] == 2
    assert row["command"] == "train.py config/preset.py --dim=8" and row["change_steps"] == [8] * 2
    repository.edit("gain = -0.1", "gain = 0.0  # nothing")
    repository.edit('data = "stories"', 'data = "easier"')
    repository.edit("dim = 32", "dim = 16", "config/preset.py")
    row, out = repository.try_change("nothing", "--seeds=2", "--seed=7", "--steps=5", "--",
                                     "config/preset.py")
    assert row["decision"] == "unclear"
    assert "not distinguishable" in row["why"]
    assert row["seeds"] == [7, 8]
    # The preset is a part of what is tried.
    assert (row["base_steps"], row["change_steps"]) == ([32] * 2, [16] * 2)
    assert (repository.folder / "out/experiments/3/change/seed8.txt"
            ).read_text() == "trained stories 0.0 5\n"
    assert not (repository.folder / "cache/prepared-easier").exists()

    table = repository.start()
    lines = table.communicate()[0].splitlines()
    assert [line.split()[:2] for line in lines[1:4]] == [
        ["1", "keep"], ["2", "discard"], ["3", "unclear"]]
    assert "less gain" in lines[2]


def test_what_is_tried_cannot_touch_the_score_the_text_or_the_time(repository):
    repository.edit("float(", "0.1 * float(", "engine/training/score.py")
    row, _ = repository.try_change("an easier score", "--seeds=2")
    assert row["decision"] == "discard" and "the same results" in row["why"]
    repository.edit('[\"train_bytes\"', 'data and ["train_bytes"')
    repository.edit('"fingerprint"], data)', '"fingerprint"], data + "x")')
    row, _ = repository.try_change("another text", "--seeds=2", code=1)
    assert row["decision"] == "failed"
    assert "trains on another text: train_bytes is storiesx, with the base stories" in row["why"]
    repository.git("checkout", "train.py")
    repository.edit("delay = 0.0", "delay = 60.0")
    row, _ = repository.try_change("more time", "--seeds=2", code=1)
    assert row["decision"] == "failed"
    assert "the change takes too long" in row["why"]
    assert row["change_bpb"] == []


def test_an_edit_in_the_moment_of_the_commit_is_tried(repository):
    """
    The edit keeps the size of the file, so git can tell it from the committed text only by the time
    of the index.
    """
    for n in range(2):
        repository.edit(f"dim = {64 + n}", f"dim = {65 + n}")
        repository.git("commit", "-q", "-m", str(n), "train.py")
        repository.edit(f"dim = {65 + n}", f"dim = {66 + n}")
        snapshot = [sys.executable, "-c", "import experiment; print(experiment.snapshot('x'))"]
        commit = subprocess.check_output(snapshot, cwd=repository.folder, text=True).strip()
        assert f"dim = {66 + n}" in repository.git("show", f"{commit}:train.py")
        repository.edit(f"dim = {66 + n}", f"dim = {65 + n}")


def test_a_change_that_fails_is_a_row(repository):
    repository.edit("print(", "raise SystemExit('no such thing')\nprint(")
    row, out = repository.try_change("broken", "--seeds=2", code=1)
    assert row["decision"] == "failed"
    assert row["why"] == "the change ended with code 1: no such thing"
    assert len(row["base_bpb"]) == 1 and row["change_bpb"] == [] and out.startswith("failed: ")
    (repository.folder / "new.py").write_text("dim = 7\n")  # untracked; train.py needs it
    repository.git("checkout", "train.py")
    repository.edit("dim = 64", "from new import dim")
    row, _ = repository.try_change("a new file", "--seeds=2")
    assert row["change_steps"] == [7, 7]
    (repository.folder / "new.py").write_bytes(b"dim = 7\n#" + bytes(1 << 20))
    row, out = repository.try_change("a large file", "--seeds=2", code=1)
    assert "note: new.py is larger than 1 MiB and not in git: it is left out" in out
    assert "No module named 'new'" in row["why"]


def test_a_ledger_may_be_elsewhere_and_lack_its_last_newline(repository, tmp_path):
    repository.edit("dim = 64", "dim = 32")
    path = tmp_path / "elsewhere.jsonl"
    for count in 1, 2:
        done = repository.start(f"try {count}", "--seeds=2", f"--ledger={path}")
        out, err = done.communicate()
        assert done.returncode == 0, out + err
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        assert len(rows) == count
        path.write_text(path.read_text().rstrip("\n"))


@pytest.mark.parametrize("word", ["--ledger=a_folder", "--ledger=none/here.jsonl",
                                  "--out_dir=train.py", "--cache=train.py/cache"])
def test_a_path_that_cannot_be_written_is_named_before_any_run(repository, word):
    repository.edit("gain = 0.0", "gain = 0.1")
    (repository.folder / "a_folder").mkdir()
    err = repository.refuse("a gain", word)
    assert err.startswith(f"error: {word}: cannot be written (")
    assert not (repository.folder / "out/experiments/1").exists()
    if word == "--ledger=a_folder":
        assert "cannot be read (" in repository.refuse(word)


@pytest.mark.parametrize("signum, code", [
    (signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)])
def test_an_experiment_that_is_stopped_is_a_row(repository, signum, code):
    repository.edit("delay = 0.0", "delay = 30.0")
    repository.git("commit", "-q", "-m", "slow", "train.py")
    repository.edit("gain = 0.0", "gain = 0.1")
    before = repository.state()
    process = repository.start("stopped", start_new_session=True)
    end = time.time() + 60
    while not (repository.folder / "out/experiments/1/base/seed1337.txt").exists():
        assert time.time() < end and process.poll() is None
        time.sleep(0.05)
    time.sleep(0.2)
    # Like a terminal, send SIGINT to the whole process group.
    os.killpg(process.pid, signum) if signum == signal.SIGINT else process.send_signal(signum)
    out, err = process.communicate()
    assert process.returncode == code and "Traceback" not in err, out + err
    row, = repository.rows()
    assert row["decision"] == "interrupted"
    assert row["why"] == f"stopped by {signum.name}"
    assert repository.state() == before
    assert repository.git("worktree", "list").count("\n") == 2


def test_what_cannot_be_tried_is_one_line(repository, tmp_path):
    assert "holds no experiments yet" in repository.refuse()
    assert "--base=nowhere: no such commit" in repository.refuse("x", "--base=nowhere")
    assert "--seeds=1: expected at least 2" in repository.refuse("x", "--seeds=1")
    assert ("--max_iters=3: an experiment itself sets max_iters of its runs; give "
            "--steps=N") in repository.refuse("x", "--", "--max_iters=3")
    assert ("--max_iter=3: train.py has no setting 'max_iter'; did you mean 'max_iters'?"
            in repository.refuse("x", "--", "--max_iter=3"))
    repository.git("rm", "-q", "--cached", "README.md")
    (repository.folder / "README.md").unlink()
    (repository.folder / "notes.txt").unlink()
    assert "the working tree is the same as HEAD: nothing to compare" in repository.refuse("x")
    shutil.rmtree(repository.folder / ".git")
    done = subprocess.run([sys.executable, "experiment.py", "x"], cwd=repository.folder,
                          capture_output=True, text=True)
    assert done.returncode == 2
    assert "is not in a repository of git" in done.stderr or "no such commit" in done.stderr


# ---- the score -----------------------------------------------------------------------------------


def test_the_score_is_the_validation_loss_where_both_read_the_same(
        folder, monkeypatch):  # noqa: F811
    done = run(folder, "--data=my.txt", "--max_iters=10", "--eval_iters=0", "--out_dir=scored",
               "--dtype=float32")
    assert done.returncode == 0, done.stderr
    monkeypatch.chdir(folder)
    texts = score.validation_texts("scored")
    assert "".join(texts).encode() == (folder / "my.txt").read_bytes()[-len("".join(texts)):]
    found = score.score("scored", texts)
    assert found["bpb"] == pytest.approx(
        min(row["bpb/val"] for row in rows(folder, "scored")[1:] if "bpb/val" in row), rel=1e-5)
    assert found["lost"] == 0 and found["bytes"] == len("".join(texts))


def test_windows_predict_each_token_once():
    documents = [[1, *range(10, 20), 2], [1, 5, 2], [1, 2]]
    windows = score.windows_of(documents, 4, 1)
    assert sorted(token for _, targets in windows for token in targets) == sorted(
        sum((ids[1:] for ids in documents), []))
    assert all(len(inputs) == len(targets) <= 4 for inputs, targets in windows)
    assert ([13, 14, 15, 16], [14, 15, 16, 17]) in windows
    # A long document: each window begins with BOS.
    windows = score.windows_of([[1, *range(10, 100)]], 4, 1)
    assert {inputs[0] for inputs, _ in windows} == {1} and len(windows) == 23


def test_a_model_that_sees_what_it_should_predict_is_no_better(
        folder, monkeypatch, capsys):  # noqa: F811
    """A model whose logits depend on the next token is refused; an honest one gets a score."""
    def honest(x, every):
        return torch.nn.functional.one_hot(x, 64).float(), None

    def peeking(x, every):
        return torch.nn.functional.one_hot(x.roll(-1, 1), 64).float() * 20, None

    vocabulary = SimpleNamespace(encode=lambda text, bos: [1, *(ord(c) % 60 + 3 for c in text)],
                                 eos_id=2, bos_id=1, vocab_size=64, decode=lambda ids: "")
    for model, sees in (honest, False), (peeking, True):
        model.args = SimpleNamespace(max_seq_len=8)
        monkeypatch.setattr(load, "load_model", lambda *args: (model, vocabulary))
        if sees:
            with pytest.raises(SystemExit, match="depend on later tokens"):
                score.score("run", ["a text of some length"])
        else:
            found = score.score("run", ["a text of some length"])
            assert found["lost"] == 1 and 5 < found["bpb"] < 7


@pytest.mark.slow
def test_the_program_itself_is_tried(tmp_path):
    """In a clone of the working tree, AdamW instead of Muon is worse."""
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", ROOT, clone], check=True)
    changed = subprocess.check_output(["git", "ls-files", "-mo", "--exclude-standard"], cwd=ROOT,
                                      text=True).split()
    for name in changed:
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, clone / name)
    git = ["git", "-c", "user.name=x", "-c", "user.email=x@y"]
    subprocess.run([*git, "add", "-A"], cwd=clone, check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "as it is"], cwd=clone, check=True)
    path = clone / "train.py"
    path.write_text(path.read_text().replace('optimizer = "muon" ', 'optimizer = "adamw"'))
    command = [sys.executable, "experiment.py", "AdamW is as good", "--steps=150", "--",
               "--data=stories:2000", "--max_seq_len=64", "--device=cpu", "--peak_tflops=0.1",
               "--eval_iters=4", "--checks=none"]
    done = subprocess.run(command, cwd=clone, capture_output=True, text=True)
    row = json.loads(Path(clone, "experiments.jsonl").read_text())
    assert done.returncode == 0, row
    assert row["decision"] == "discard", row
    assert min(row["change_bpb"]) > max(row["base_bpb"]), row


def test_a_verdict_tells_whose_runs_took_more_steps():
    def sides(base, change):
        return [SimpleNamespace(name=name, steps=steps)
                for name, steps in (("base", base), ("change", change))]
    assert experiment.notes_on_steps(sides([400, 400], [400, 400])) == ""
    assert experiment.notes_on_steps(sides([1000, 1010], [1004, 1011])) == ""
    assert experiment.notes_on_steps(
        sides([1000, 1000], [960, 960])) == "; the change took 4% fewer steps"
    assert experiment.notes_on_steps(sides([1000, 700], [960, 960])) == (
        "; the machine was busy: the base took 700 to 1,000 steps; "
        "the change took 13% more steps")
