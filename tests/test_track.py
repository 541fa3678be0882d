"""Test tracking by reading back the files of the real W&B client and log.jsonl."""
import hashlib
import importlib.util
import io
import json
import math
import os
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import track
from engine.debug import instruments
from engine.tracking import background, follow, source, wandb_client
from engine.tracking.anomalies import AnomalyDetector
from engine.tracking.destination import Destination
from engine.tracking.process import children, encodable
from engine.tracking.redact import redact
from track import Session
from tests import forked
from tests.conftest import usual
from tokenizer import spell

ROOT = Path(__file__).resolve().parents[1]


def run(folder, *args, program=ROOT / "train.py", **env):
    clean = ({k: v for k, v in os.environ.items() if not k.startswith("WANDB")}
             | {"OMP_NUM_THREADS": "1"})
    tiny = [
        "--data=my.txt", "--vocab_source=byte", "--dim=32", "--n_layers=2", "--n_heads=2",
        "--max_seq_len=32", "--batch_size=4", "--max_iters=20", "--log_interval=5",
        "--eval_iters=4", "--eval_interval=10", "--device=cpu", "--out_dir=out"
    ]
    return forked.run([program, *tiny, *args], folder, clean | env)


@pytest.fixture(scope="module")
def tracked(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tracked")
    (folder / "my.txt").write_text("the cat sat on the mat and the dog ran under a tree. " * 600)
    done = run(folder, "--wandb_log=True", "--learning_rate=0.003", "--wandb_run_name=my first run",
               "--log_extras=tables,model,gradients,parameters", "--sample_prompt=the|dog",
               HOME=str(folder), WANDB_TAGS="red, green", WANDB_RUN_GROUP="trials",
               WANDB_NOTES="what for")
    assert done.returncode == 0, done.stderr
    log = next((folder / "wandb").glob("offline-run-*/*.wandb"))
    return folder, done, track.read_wandb(log)  # the records that W&B's own reader prints


def of_type(tracked, kind):
    return [record[kind] for record in tracked[2] if record["type"] == kind]


def rows(tracked):
    return [json.loads(line) for line in (tracked[0] / "out/log.jsonl").read_text().splitlines()]


def test_without_a_key_it_is_offline_and_says_how_to_upload(tracked):
    line = next(line for line in tracked[1].stdout.splitlines()
                if line.startswith("tracking: W&B o"))
    assert "offline (no API key)" in line and "python track.py sync out" in line
    assert "warning" not in tracked[1].stderr


def test_the_whole_configuration_is_recorded(tracked):
    run_record = of_type(tracked, "run")[0]
    config = run_record["config"]["update"]
    assert run_record["display_name"] == "my first run"
    assert run_record["run_id"].startswith("my-first-run-")
    assert config["dim"] == 32 and config["learning_rate"] == 0.003 and config["data"] == "my.txt"
    assert config["n_params"] > 10_000
    assert config["model_args"]["hidden_dim"] > 0
    assert config["mfu_basis"]
    assert len(config["dataset"]["fingerprint"]) == len(config["dataset"]["tokenizer_sha256"]) == 64
    assert run_record["tags"] == ["red", "green"] and run_record["run_group"] == "trials"
    assert run_record["notes"] == "what for" and run_record["job_type"] == "train"


def history(tracked):
    return [record["item"] for record in of_type(tracked, "history")]


def test_every_number_of_the_jsonl_is_in_wandb_with_tokens_as_axis(tracked):
    assert [row["iter"] for row in rows(tracked)] == [0, 5, 10, 15, 20]
    for written, row in zip(rows(tracked), history(tracked), strict=True):
        numbers = {k: v for k, v in written.items() if type(v) in (int, float) and k != "time"}
        assert numbers == {k: row[k] for k in numbers}
        assert all(f"tables/{k}._type" in row for k, v in written.items() if isinstance(v, list))
        assert all(f"{k}._type" in row for k, v in written.items() if isinstance(v, dict))
    metrics = {m.get("name", m.get("glob_name")): m for m in of_type(tracked, "metric")}
    assert metrics["*"]["step_metric"] == "tokens"
    assert metrics["loss/val"]["summary"] == {"last": True, "min": True}


def test_layers_logits_and_histograms_are_in_every_row_that_should_have_them(tracked):
    last = rows(tracked)[-1]
    for layer in ("tok_embeddings", "layers.0", "layers.1", "norm"):
        assert last[f"norm/grad/{layer}"] > 0 and last[f"norm/weight/{layer}"] > 0
        assert 1e-5 < last[f"norm/update/{layer}"] < 0.5
    assert 0 < last["logits/p_target"] <= last["logits/p_max"] <= 1
    assert 0 < last["logits/entropy"] < 5.6
    assert sum(last["logits/histogram"]["counts"]) == 4 * 32 * 259
    assert sum(last["parameters/layers.1.attention.wq.weight"]["counts"]) == 32 * 32
    recorded = history(tracked)[-1]
    assert any(k.startswith("gradients/layers.0.attention.wq.weight") for k in recorded)


def test_tables_grow_row_by_row(tracked):
    def table(name):
        found = [json.loads(path.read_text())
                 for path in (tracked[0] / "wandb").rglob(f"{name}_*.table.json")]
        assert {tuple(t["columns"]) for t in found} == {("iter", "tokens", *track.TABLES[name])}
        return sorted(row for t in found for row in t["data"])

    samples = table("samples")
    assert [row[:4] for row in samples] == [
        [i, 128 * i, prompt, how]
        for i in (0, 10, 20) for prompt in ("dog", "the") for how in ("greedy", "sampled")]
    predictions = table("predictions")
    assert {(row[0], row[2]) for row in predictions} == {
        (i, split) for i in (0, 10, 20) for split in ("train", "val")}
    text = (tracked[0] / "my.txt").read_text()
    for row in predictions:
        seen, target, ps = row[3], row[4], row[7::2]
        assert seen + target in text  # the target continues the context in the training text
        assert ps == sorted(ps, reverse=True) and 0 <= row[5] <= ps[0] + 1e-3 and sum(ps) <= 1.001
    documents = table("documents")
    assert {row[2] for row in documents} == {"train", "val"}
    assert documents[0][3].startswith("the cat sat")
    assert documents[0][5] == 28625 and documents[0][6:] == [0, 0]


def test_the_console_is_recorded(tracked):
    assert "iter     20 | tokens" in "".join(r["line"] for r in of_type(tracked, "output_raw"))


def test_the_exported_model_is_an_artifact(tracked):
    model = [a for a in of_type(tracked, "artifact") if a["type"] == "model"]
    assert len(model) == 1 and set(model[0]["aliases"]) == {"best", "latest"}
    size = str((tracked[0] / "out/model.gguf").stat().st_size)
    files = {entry["path"]: entry for entry in model[0]["manifest"]["contents"]}
    assert files["model.gguf"]["size"] == size and "tokenizer.json" in files
    about = json.loads(model[0]["metadata"])
    assert (about["sha256"]
            == hashlib.sha256((tracked[0] / "out/model.gguf").read_bytes()).hexdigest())
    assert about["loss/val"] > 0 and len(about["dataset"]) == 64


def copy_program(folder):
    """Copy the Python program, without tests and documentation."""
    def left_out(place, names):
        if "engine" in Path(place).relative_to(ROOT).parts:
            return [name for name in names if name == "__pycache__"]
        return [name for name in names if not name.endswith((".py", ".txt", "engine"))]

    return shutil.copytree(ROOT, folder, ignore=left_out)


def test_a_new_tracker_is_one_file(tmp_path):
    """Install the tracker of doc/tracking.md, and one whose import fails with a warning."""
    program = copy_program(tmp_path / "llamac")
    example = next(part for part in (ROOT / "doc/tracking.md").read_text().split("```")
                   if "(Destination)" in part)
    (program / "engine/tracking/trackers/spreadsheet.py").write_text(
        example.removeprefix("python\n"))
    (program / "engine/tracking/trackers/broken.py").write_text("import no_such_package\n")
    (tmp_path / "my.txt").write_text("the cat sat on the mat and the dog ran under a tree. " * 600)
    done = run(tmp_path, "--max_iters=10", "--eval_interval=5", program=program / "train.py")
    assert done.returncode == 0, done.stderr
    warnings = [line for line in done.stderr.splitlines() if "warning" in line]
    assert warnings == ["warning: the tracker in broken.py cannot be loaded "
                        "(ModuleNotFoundError: No module named 'no_such_package')"]
    logged = [[str(row["iter"]), str(row["loss/val"])]
              for row in track.read_rows(tmp_path / "out/log.jsonl")]
    until = time.monotonic() + 60  # the tracker's process may outlive the training
    while (found := [line.split(",") for line in
                     (tmp_path / "out/loss.csv").read_text().splitlines()]) != logged:
        assert time.monotonic() < until, found
        time.sleep(0.1)
    assert [row[0] for row in found] == ["0", "5", "10"]


def test_what_differs_from_the_commit_is_kept_without_its_secrets(tmp_path):
    """Change a committed copy of the program: the run stores git's diff, with secrets redacted."""
    repository = copy_program(tmp_path / "llamac")
    for words in ("init -q", "add .", "-c user.name=a -c user.email=a@b commit -qm first"):
        subprocess.run(["git", *words.split()], cwd=repository, check=True)
    with open(repository / "optim.py", "a") as f:
        f.write("\n# a change of mine, api_key=abcdefgh12345678\n")
    (tmp_path / "my.txt").write_text("the cat sat on the mat and the dog ran under a tree. " * 600)
    done = run(tmp_path, "--wandb_log=True", "--max_iters=1", HOME=str(tmp_path),
               program=repository / "train.py")
    assert done.returncode == 0, done.stderr
    log = next((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    for path in (tmp_path / "out/diff.patch", log.parent / "files/diff.patch"):
        assert "+# a change of mine, api_key=***" in path.read_text()
    records = track.read_wandb(log)
    assert any("diff.patch" in json.dumps(r) for r in records if r["type"] == "files")
    config = next(r for r in records if r["type"] == "run")["run"]["config"]["update"]
    assert config["git_changed"] is True and len(config["git_commit"]) == 40


def test_whatever_bytes_git_prints_are_kept(tmp_path, monkeypatch):
    """
    Check that `git apply` takes diff.patch, whatever git prints: bytes that are not UTF-8 in the
    text, in a file name and in the remote, CRLF, a blank last line of context, and colors that the
    user's settings ask for.
    """
    repository, name = tmp_path / "llamac", "na\udcefve.txt"
    repository.mkdir()

    def git(*words):
        return subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words],
                              cwd=repository, check=True, capture_output=True).stdout

    git("init", "-q")
    for file in ("a.txt", name):
        (repository / file).write_bytes(b"caf\xe9\r\none\r\ntwo\r\n\n")
    git("add", ".")
    git("commit", "-qm", "first")
    for words in ("color.ui always", "diff.external false", "diff.noprefix false",
                  "remote.origin.url /caf\udce9"):
        git("config", *words.split())
    changed = b"caf\xe9\r\n\xff one\r\ntwo\r\n\n"
    for file in ("a.txt", name):
        (repository / file).write_bytes(changed)
    monkeypatch.setattr(source, "ROOT", repository)
    config = source.source_version()
    assert config == {"git_commit": git("rev-parse", "HEAD").decode().strip(), "git_changed": True}
    assert source.git_remote() == "/caf\ufffd"
    source.keep_diff(tmp_path, config)
    git("checkout", "-q", ".")
    git("apply", "--whitespace=nowarn", str(tmp_path / "diff.patch"))
    assert all((repository / file).read_bytes() == changed for file in ("a.txt", name))


def test_programs_begun_together_have_a_folder_each(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    start = threading.Barrier(8)
    with ThreadPoolExecutor(8) as pool:
        found = [*pool.map(
            lambda _: (start.wait(), track.program_folder(track.PROGRAM_FOLDER))[1], range(8))]
    assert sorted(found) == sorted(["out/program", *(f"out/program{n}" for n in range(2, 9))])


def test_without_being_asked_for_no_tracker_writes_anything(tmp_path, tracked):
    (tmp_path / "my.txt").write_text((tracked[0] / "my.txt").read_text())
    done = run(tmp_path, "--max_iters=2")
    assert done.returncode == 0 and not (tmp_path / "wandb").exists()
    assert (tmp_path / "out/log.jsonl").exists() and not [*tmp_path.rglob("events.out.tfevents*")]


def test_a_key_and_no_server_is_offline(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    assert wandb_client.wandb_mode() == ("offline", "http://127.0.0.1:9 does not answer")


def test_a_login_at_the_usual_server_counts_under_both_its_names(monkeypatch, tmp_path):
    for name in "WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_CONFIG_DIR", "NETRC":
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert not wandb_client.has_wandb_key()
    for file, host, known in ((".netrc", "api.forge.coreweave.com", True),
                              (".netrc", "api.wandb.ai", True), (".netrc", "elsewhere.org", False),
                              ("keys", "elsewhere.org:8080", True)):
        Path(tmp_path, file).write_text(f"machine {host}\n login user\n password {'0' * 40}\n")
        if file == "keys":
            monkeypatch.setenv("NETRC", "~/keys")
            monkeypatch.setenv("WANDB_BASE_URL", "https://elsewhere.org:8080")
        assert wandb_client.has_wandb_key() is known, host


def test_a_run_id_is_made_of_the_name_or_says_run(monkeypatch):
    monkeypatch.delenv("WANDB_RUN_ID", raising=False)
    for name, words in {"小模型": "run", "Über-Größe 2": "uber-gro-e-2",
                        "x" * 39 + " y": "x" * 39, "--": "run"}.items():
        head, _, tail = track.new_run_id(name).rpartition("-")
        assert head == words and len(tail) == 4


def test_the_mode_the_user_set_counts(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert wandb_client.wandb_mode()[0] == "disabled"


def test_what_the_user_tells_the_client_counts_before_our_defaults_and_a_flag_before_both(
        tmp_path, tracked):
    """
    Set values by environment variables and in the file that `wandb init` writes. A resumed run
    keeps its values.
    """
    (tmp_path / "my.txt").write_text((tracked[0] / "my.txt").read_text())
    (tmp_path / "wandb").mkdir()
    settings = tmp_path / "wandb/settings"
    settings.write_text("[default]\nproject = of-init\nrun_group = filed\nentity = us\n")
    told = {"WANDB_NAME": "Mine", "WANDB_JOB_TYPE": "probe", "WANDB_TAGS": "a,b",
            "WANDB_CONSOLE": "off", "WANDB_NOTES": "why", "WANDB_DISABLE_CODE": "true",
            "HOME": str(tmp_path)}
    done = run(tmp_path, "--wandb_log=True", "--max_iters=1", **told)
    assert done.returncode == 0 and "warning: tracking" not in done.stderr, done.stderr
    log = next((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    records = track.read_wandb(log)
    found = next(r["run"] for r in records if r["type"] == "run")
    assert (found["project"], found["entity"], found["display_name"],
            found["run_group"]) == ("of-init", "us", "Mine", "filed")
    assert (found["job_type"], found["tags"], found["notes"]) == ("probe", ["a", "b"], "why")
    assert found["run_id"].startswith("mine-")
    assert not any(r["type"] == "output_raw" for r in records)
    assert not (log.parent / "files/diff.patch").exists()
    noted = track.about(tmp_path / "out")
    expected = {"project": "of-init", "entity": "us", "name": "Mine", "group": "filed",
                "tags": ["a", "b"], "job_type": "probe"}
    assert noted.items() >= expected.items()
    settings.unlink()
    done = run(tmp_path, "--wandb_log=True", "--max_iters=2", "--wandb_project=llamac",
               HOME=str(tmp_path), WANDB_PROJECT="other", WANDB_JOB_TYPE="train")
    assert done.returncode == 0, done.stderr
    assert (track.about(tmp_path / "out").items()
            >= (expected | {"job_type": "train", "project": "llamac"}).items())


def test_each_client_hears_its_own_variables(tmp_path, monkeypatch):
    class Process:
        def __init__(self, name, session):
            heard[name] = session.run

        start = call = receive = end = lambda *_: None

    heard = {}
    monkeypatch.setattr(background, "ClientProcess", Process)
    monkeypatch.chdir(tmp_path)
    for name, value in {"WANDB_PROJECT": "w", "WANDB_NAME": "wn", "SWANLAB_PROJ_NAME": "s",
                        "SWANLAB_EXP_NAME": "sn"}.items():
        monkeypatch.setenv(name, value)
    for given, expected in (([], [("w", "wn"), ("s", "sn"), ("p", "n")]),
                            (["name"], [("w", "n"), ("s", "n"), ("p", "n")])):
        run = {"id": "x", "project": "p", "name": "n"}
        names = ["wandb", "swanlab", "trackio"]
        track.make_tracker(Session(tmp_path, {}, run), names, given).finish()
        assert [(heard[name]["project"], heard[name]["name"]) for name in names] == expected
        (tmp_path / "wandb.json").unlink()


@pytest.mark.parametrize("env, settings, run, message", [
    ({"WANDB_MODE": "OFFLINE"}, "", {},
     "W&B refuses mode='OFFLINE', from the variable WANDB_MODE: "
     "Input should be 'online', 'offline'"),
    ({}, "mode = sometimes", {},
     "W&B refuses mode='sometimes', from wandb/settings: Input should be"),
    ({"WANDB_INIT_TIMEOUT": "soon"}, "mode = offline", {},
     "W&B refuses init_timeout='soon', from the variable WANDB_INIT_TIMEOUT"),
    ({"WANDB_TAGS": "a"}, "mode = offline", {"tags": ["t" * 100]},
     "W&B refuses run_tags='" + "t" * 77 + "...', set by llamac: Tag"),
    ({"WANDB_PROJECT": "a/b"}, "mode = offline", {},
     "Invalid project name 'a/b': cannot contain characters"),
    ({"WANDB_RUN_ID": "a/b"}, "mode = offline", {"id": "a/b"},
     "(run_id='a/b', from the variable WANDB_RUN_ID)")
])
def test_a_setting_that_the_client_refuses_is_named_with_its_value_and_origin(
        tmp_path, env, settings, run, message):
    program = ("import sys, track; run = eval(sys.argv[1])\n"
               "try: track.Wandb(track.Session('', {}, track.wandb_run(run, run)))\n"
               "except Exception as e: print(track.reason(e))")
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb/settings").write_text(f"[default]\n{settings}\n")
    clean = ({k: v for k, v in os.environ.items() if not k.startswith("WANDB")}
             | {"HOME": str(tmp_path), "PYTHONPATH": str(ROOT)})
    done = subprocess.run([sys.executable, "-c", program, repr({"id": "x", "name": "n"} | run)],
                          cwd=tmp_path, capture_output=True, text=True, env=clean | env)
    assert message in done.stdout and done.stdout.count("\n") == 1, done.stdout + done.stderr


def test_a_file_of_settings_that_the_client_ignores_is_named(tmp_path):
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb/settings").write_text("[default]\nconsole = loud\nmode = offline\n")
    clean = ({k: v for k, v in os.environ.items() if not k.startswith("WANDB")}
             | {"HOME": str(tmp_path)})
    done = subprocess.run([sys.executable, ROOT / "track.py", "--", "echo", "step 1: loss 2.5"],
                          cwd=tmp_path, capture_output=True, text=True, env=clean)
    assert ("warning: W&B refuses console='loud', from wandb/settings: Input should be 'auto'"
            in done.stderr)
    assert "W&B ignores all settings of that file" in done.stderr and done.returncode == 0


class Broken(Destination):
    title, own_process, calls = "Broken", False, 0

    def __init__(self, session):
        pass

    def log(self, row):
        Broken.calls += 1
        raise OSError(28, "No space left on device")

    def finish(self, failed=False):
        pass


def test_a_destination_that_fails_is_given_up_with_one_warning(tmp_path, capsys):
    jsonl = track.Jsonl(tmp_path, {}, 0)
    tracker = track.Tracker([background.Background("broken", Broken, Session(tmp_path, {}, {})),
                             jsonl])
    for step in range(3):
        tracker.log({"iter": step, "tokens": step})
    tracker.finish()
    assert Broken.calls == 1 and capsys.readouterr().err.count("No space left") == 1
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 3


def test_a_tracker_that_lacks_a_method_is_given_up_at_its_start(tmp_path, capsys):
    """Check it at the start: a missing finish() would otherwise show at the end of a training."""
    class Endless(Destination):
        title, own_process = "Endless", False
        __init__, log = Broken.__init__, Broken.log

    background.Background("endless", Endless, Session(tmp_path, {}, {})).wait_for_start(
        time.monotonic() + 60)
    err = capsys.readouterr().err
    assert err.startswith("warning: tracking with Endless stopped (TypeError: ")
    assert "finish" in err
    assert err.count("\n") == 1


def test_a_tracker_that_hangs_holds_up_neither_start_nor_rows_nor_end(monkeypatch, capsys):
    class Slow(Destination):
        title, own_process = "Slow", False

        def __init__(self, session):
            release.wait(60)

        log = finish = None  # never called

    monkeypatch.setattr(background, "FINISH_SECONDS", -9.9)
    release = threading.Event()
    slow = background.Background("slow", Slow, Session("", {}, {}))
    slow.wait_for_start(time.monotonic() + 0.1)
    for step in range(3):
        slow.log({"iter": step})
    slow.finish()
    out, err = capsys.readouterr()
    assert "goes on without waiting" in out
    assert err.count("warning: tracking with Slow stopped") == 1
    release.set()


class FullDisk:
    """A file whose disk fills up in the middle of a row, until the test sets `room` again."""
    def __init__(self):
        self.data, self.room, self.real = b"", 30, None

    def fileno(self):
        return self.real.fileno()

    def write(self, data):
        if not self.room:
            raise OSError(28, "No space left on device")
        part, self.room = data[:self.room], max(0, self.room - len(data))
        self.data += part
        return len(part)

    def close(self):
        pass


def test_rows_wait_while_the_disk_is_full(tmp_path, capsys):
    jsonl = track.Jsonl(tmp_path, {}, 0)
    disk = FullDisk()
    disk.real, jsonl.file = jsonl.file, disk
    for step in range(4):
        jsonl.log({"iter": step})
    disk.room = 10_000
    jsonl.finish()
    assert [json.loads(line)["iter"] for line in disk.data.splitlines()] == [0, 1, 2, 3]
    assert capsys.readouterr().err.count("No space left") == 1


def test_a_log_that_is_deleted_moved_or_replaced_meanwhile_loses_no_row(tmp_path, capsys):
    out = tmp_path / "out"
    out.mkdir()
    log = track.Jsonl(out, {"lr": 0.1}, 0)

    def logged(number, folder=out):
        log.log({"iter": number})
        return [row["iter"] for row in track.read_rows(folder / "log.jsonl")]

    assert logged(0) == [0]
    (out / "log.jsonl").unlink()
    assert logged(1) == [0, 1]
    assert "log.jsonl was deleted or moved; it is written again" in capsys.readouterr().err
    text = (out / "log.jsonl").read_text()
    (out / "edited").write_text(text)
    (out / "edited").rename(out / "log.jsonl")  # replace the file as an editor does
    assert logged(2) == [0, 1, 2]
    out.rename(tmp_path / "moved")
    log.log({"iter": 3})  # the row waits until the next checkpoint creates the folder
    assert not out.exists() and "rows stay in memory until it can" in capsys.readouterr().err
    out.mkdir()
    (out / "trainer.json").write_text('{"pid": 1}')
    log.log({"iter": 4})
    assert os.listdir(out) == ["trainer.json"]  # another training owns the folder now
    (out / "trainer.json").unlink()
    assert logged(4.5) == [0, 1, 2, 3, 4, 4.5]
    assert json.loads((out / "config.json").read_text()) == {"lr": 0.1}
    shutil.rmtree(out)
    log.log({"iter": 5})
    log.finish()
    assert [row["iter"] for row in track.read_rows(out / "log.jsonl")] == [0, 1, 2, 3, 4, 4.5, 5]
    assert [row["iter"] for row in track.read_rows(tmp_path / "moved/log.jsonl")] == [0, 1, 2]


def test_jsonl_continues_without_gap_or_doubled_row(tmp_path):
    path = tmp_path / "log.jsonl"
    log = track.Jsonl(tmp_path, {}, 0)
    for step in range(0, 50, 10):
        log.log({"iter": step, "loss/train": float("nan") if step == 10 else 1.0})
    log.finish()
    path.write_text(path.read_text() + '{"iter": 50, "loss/tr')  # as if killed while writing a row
    log = track.Jsonl(tmp_path, {}, 30)
    log.log({"iter": 40})
    log.finish()
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["iter"] for row in found] == [0, 10, 20, 30, 40] and found[1]["loss/train"] == "nan"


@pytest.mark.slow
def test_system_metrics_are_recorded_and_when_the_service_is_killed_the_training_goes_on(
        tmp_path, tracked):
    (tmp_path / "my.txt").write_text((tracked[0] / "my.txt").read_text())
    clean = {k: v for k, v in os.environ.items() if not k.startswith("WANDB")}
    trainer = subprocess.Popen(
        [sys.executable, str(ROOT / "train.py"), "--data=my.txt", "--vocab_source=byte",
         "--dim=32", "--n_layers=1", "--n_heads=2", "--max_seq_len=32", "--batch_size=4",
         "--max_iters=100000", "--log_interval=5", "--eval_iters=1", "--eval_interval=100000",
         "--device=cpu", "--wandb_log=True", "--out_dir=out"],
        cwd=tmp_path, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        stderr=(tmp_path / "err").open("w"), text=True,
        env=clean | {"HOME": str(tmp_path), "OMP_NUM_THREADS": "1"})
    log, err = tmp_path / "out/log.jsonl", tmp_path / "err"

    def wait_for(n, file, what):
        end = time.monotonic() + 60
        while not file.exists() or file.read_text().count(what) < n:
            assert trainer.poll() is None and time.monotonic() < end, err.read_text()
            time.sleep(0.1)

    wait_for(10, log, "\n")
    end, recorded = time.monotonic() + 60, next((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    while "memory_percent" not in json.dumps(
            [r for r in track.read_wandb(recorded) if r["type"] == "stats"]):
        assert time.monotonic() < end  # the client takes its first sample after 1 to 2 s
        time.sleep(0.5)
    client = children(trainer.pid)
    service = children(client[0])
    assert len(client) == len(service) == 1
    assert "wandb-core" in Path(f"/proc/{service[0]}/cmdline").read_text()
    os.kill(service[0], signal.SIGKILL)
    wait_for(1, err, "warning: tracking with W&B stopped")
    wait_for(log.read_text().count("\n") + 50, log, "\n")
    trainer.kill()
    trainer.wait()
    assert err.read_text().count("warning: tracking with W&B stopped") == 1
    assert "track.py sync out" in err.read_text()
    iters = [row["iter"] for row in track.read_rows(log)]
    assert iters == list(range(0, 5 * len(iters), 5))  # no row is missing before the kill -9


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_norms_of_a_layer_are_those_of_its_tensors_together(monkeypatch, optimizer):
    from model import ModelArgs, Transformer
    from optim import AdamW, OptimizerConfig, make_optimizer
    monkeypatch.setattr(AdamW, "MAX_CHUNK", 1000)  # split the parameters into several chunks
    model = Transformer(ModelArgs(dim=16, n_layers=2, n_heads=2, vocab_size=32, max_seq_len=8))
    opt, norms = (make_optimizer(model, OptimizerConfig(optimizer, 0.1)),
                  instruments.UpdateNorms(model))
    model(torch.arange(8)[None], torch.arange(8)[None])[1].backward()
    opt.step(norms)
    assert norms.take() == {}  # norms.wanted is not set yet
    norms.wanted = True
    before = torch.cat([p.detach().flatten().clone() for p in model.layers[1].parameters()])
    gradient = torch.cat([p.grad.flatten().clone() for p in model.layers[1].parameters()])
    opt.step(norms)
    after = torch.cat([p.detach().flatten() for p in model.layers[1].parameters()])
    found = norms.take()
    assert found["norm/grad/layers.1"] == pytest.approx(gradient.norm().item(), rel=1e-5)
    assert found["norm/weight/layers.1"] == pytest.approx(after.norm().item(), rel=1e-5)
    assert found["norm/update/layers.1"] == pytest.approx(
        ((after - before).norm() / after.norm()).item(), rel=1e-4)


@pytest.mark.parametrize("held, every", [(1 << 23, 1), (4 * 10 * 259, 2)])
def test_a_probe_holds_few_logits_at_a_time(monkeypatch, held, every):
    """Compare its metrics at the probed positions with plain formulas, too."""
    from model import ModelArgs, Transformer
    from tokenizer import Bytes
    monkeypatch.setattr(instruments, "PROBED", held)
    torch.manual_seed(0)
    model = Transformer(ModelArgs(dim=16, n_layers=1, n_heads=2, vocab_size=259, max_seq_len=20))
    x, y = torch.randint(3, 259, (2, 4, 20))
    row = instruments.probe(model, {"train": (y, x), "val": (x, y)}, Bytes(), nullcontext())
    with torch.no_grad():
        p = model(x, every=True)[0][:, ::every].softmax(-1)
    assert sum(row["logits/histogram"]["counts"]) == p.numel() <= held
    for name, expected in (("p_target", p.gather(-1, y[:, ::every, None]).mean()),
                           ("p_max", p.amax(-1).mean()),
                           ("entropy", torch.distributions.Categorical(p).entropy().mean())):
        assert row[f"logits/{name}"] == pytest.approx(expected.item(), rel=1e-4)
    masked = y.clone()
    masked[:, ::2] = -1  # positions without a target are neither counted nor shown as examples
    seen, rows = (masked[:, ::every] >= 0,
                  instruments.probe(model, {"val": (x, masked)}, Bytes(), nullcontext()))
    if seen.any():
        expected = p.gather(-1, y[:, ::every, None])[..., 0][seen].mean().item()
        assert rows["logits/p_target"] == pytest.approx(expected, rel=1e-4)
    assert len(rows["predictions"]) < 6
    split, _, _, p_target, _, p_first, *_ = row["predictions"][7]
    assert split == "val"
    assert p_target == round(
        p[1, 3 * p.shape[1] // 12, y[1, 3 * p.shape[1] // 12 * every]].item(), 4)
    assert p_first == round(p[1, 3 * p.shape[1] // 12].max().item(), 4)


def test_histograms_layers_and_tokens_as_rows_show_them():
    assert instruments.histogram(torch.tensor([0.0, 1.0, 2.0, math.nan, math.inf]), 2) == {
        "counts": [1, 2], "edges": [0, 1, 2]}
    assert instruments.histogram(torch.tensor([math.nan])) == {"counts": [0], "edges": [0.0, 1.0]}
    for value in (3.0, 0.0, -200.0):  # all values equal
        found = instruments.histogram(torch.full((5,), value))
        assert sum(found["counts"]) == 5
        assert value == found["edges"][0] < found["edges"][-1] <= value + 1e-6 * max(1, abs(value))
    assert [instruments.layer_of(name)
            for name in ("layers.3.attention.wq.weight", "norm.weight")] == ["layers.3", "norm"]
    pieces = [(b"<0x41>", 0.0, 6), (b"<0x7F>", 0.0, 6), (b"<0x80>", 0.0, 6),
              ("▁the".encode(), 0.0, 1), (b"<0x41>", 0.0, 4)]
    assert [spell(piece) for piece in pieces] == ["A", "\x7f", "<0x80>", " the", "<0x41>"]
    state = {"loss_sum": 6.0, "loss_steps": 4}
    assert instruments.mean_loss(state) == 1.5 and math.isnan(instruments.mean_loss(state))


def test_a_row_is_a_line_or_stands_on_the_bar(capsys):
    on_bar = []
    row = {"iter": 20, "tokens": 1_230_000, "epoch": 0.25, "loss/train": 2.5,
           "perf/tokens_per_sec": 31_400.0, "mfu": 45.56, "lr": 1e-4}
    for disable, more in (False, {}), (True, {}), (False, {"loss/val": 2.25, "bpb/val": 0.5}):
        bar = SimpleNamespace(disable=disable,
                              set_postfix_str=lambda text, refresh: on_bar.append(text))
        instruments.show(row | more, bar)
    instruments.show({"iter": 20, "tokens": 0, "epoch": 0.0}, SimpleNamespace(disable=False))
    line = ("iter     20 | tokens 1.23M | epoch 0.25 | loss 2.5000 | {}lr 1.00e-04 "
            "| 31,400 tok/s | mfu 45.6%\n")
    assert (capsys.readouterr().out
            == line.format("") + line.format("val loss 2.2500 | bits/byte 0.5000 | "))
    assert on_bar == ["loss 2.500, 31.4k tok/s"] * 3


def test_alerts_tell_of_what_is_far_from_the_usual_and_only_then():
    alerts = AnomalyDetector()
    for i in range(30):
        assert alerts.sudden_changes({
            "iter": i, "loss/train": 3 - i / 30, "grad/norm": 1 + i % 3 / 10,
            "perf/tokens_per_sec": 1000 + i}) == []
    found = alerts.sudden_changes(
        {"iter": 30, "loss/train": 9.0, "grad/norm": 30.0, "perf/tokens_per_sec": 100})
    assert [title for title, _ in found] == [
        "loss/train jumps", "grad/norm jumps", "the speed has collapsed"]
    assert alerts.sudden_changes({"iter": 31, "loss/val": math.nan})[0][0] == "loss/val is nan"
    # An alert needs 10 earlier rows and a value 6 deviations (of 2 % here) above their mean.
    for before, after, said in (9, 9.0, 0), (10, 9.0, 1), (10, 1.11, 0), (10, 1.13, 1):
        alerts = AnomalyDetector()
        assert not any(alerts.sudden_changes({"iter": i, "loss/val": 1.0}) for i in range(before))
        assert len(alerts.sudden_changes({"iter": 99, "loss/val": after})) == said


def test_metrics_of_another_program_have_no_ranges():
    row = {"iter": 1, "dead/layers.0": 1.0, "norm/grad/x": 0.0}
    assert AnomalyDetector().out_of_range(row) == []
    noted = ["dead"]  # noted by an earlier session
    assert [note[:2] for note in AnomalyDetector(noted).out_of_range(row)] == [["norm/grad/x", 0.0]]
    assert noted == ["dead", "norm/grad"]


def test_rows_are_redacted_and_alerts_told_where_anybody_hears_them(monkeypatch, capsys):
    class Destination:
        def __init__(self):
            self.rows, self.alerts = [], []
            self.log, self.alert = self.rows.append, lambda title, text: self.alerts.append(title)

    monkeypatch.setenv("MY_TOKEN", "s3cret" * 5)
    row, heard = ({"iter": 1, "loss/val": math.nan,
                   "samples": [["my " + "s3cret" * 5, "greedy", "fine"]]}, Destination())
    track.Tracker().log(row)
    assert capsys.readouterr().err == ""
    track.Tracker([heard]).log(row)
    assert heard.rows[0]["samples"] == [["my ***", "greedy", "fine"]]
    assert heard.alerts == ["loss/val is nan"]
    assert "loss/val is nan" in capsys.readouterr().err


def test_without_a_program_the_usage_is_shown(monkeypatch, capsys):
    for words, code in ([], 2), (["sync"], 2), (["--help"], 0):
        monkeypatch.setattr(sys, "argv", ["track.py", *words])
        with pytest.raises(SystemExit) as e:
            runpy.run_path(str(ROOT / "track.py"), run_name="__main__")
        assert e.value.code == code and "track.py" in capsys.readouterr().out


def test_a_days_console_costs_per_refresh_what_its_first_minutes_cost_and_stays_small():
    """Feed 12 hours of a tqdm bar on stderr: 10 refreshes a second, one line end in all."""
    class Nowhere:
        def write(self, text):
            return len(text)

    heard, seconds = [], []
    tee = follow.Tee(Nowhere(), heard.append)
    for hour in range(12):
        begin = time.process_time()
        for i in range(36_000):
            tee.write(f"\r{hour:>3}h|{'#' * (i // 600):<60}| {i}/36000 "
                      f"[loss 2.{i:05}, 31.5k tok/s]")
            if i % 600 == 599:
                tee.write(f"\r{' ' * 110}\r")  # clears the bar to print a line on stdout
                assert len(tee.line) < 200
        seconds.append(time.process_time() - begin)
    tee.write("\rdone\n")
    assert heard == ["done\n"] and min(seconds[-3:]) < 1.5 * max(seconds[:3])


def test_the_console_is_what_a_terminal_shows_in_the_end_and_no_line_is_endless(monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "s3cret" * 5)
    heard, shown = [], io.StringIO()
    tee = follow.Tee(shown, heard.append)
    for text in ("one\r\ntwo\r", "2\n", "bar 1\rbar 2\r\n", "no end", "\rnew\n", "\n"):
        tee.write(text)
    assert heard == ["one\n", "2\n", "bar 2\n", "new\n", "\n"]
    assert shown.getvalue().startswith("one\r\ntwo\r2\n")
    for _ in range(1000):
        tee.write("." * 100)  # a program that shows its progress as dots
        assert len(tee.line) <= 2 * follow.MAX_LINE
    tee.write("\n")
    tee.write("x" * (follow.MAX_LINE - 7) + "s3cret" * 5 + "\n")  # the cut would halve the secret
    assert heard[-2:] == ["." * follow.MAX_LINE + "\n", "x" * (follow.MAX_LINE - 7) + "***\n"]


def test_what_many_threads_print_is_heard_as_it_is_shown():
    heard, shown, interval = [], io.StringIO(), sys.getswitchinterval()
    tee = follow.Tee(shown, heard.append)
    threads = [threading.Thread(target=lambda n=n: [print(n, i, file=tee) for i in range(3000)])
               for n in range(4)]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert "".join(heard) == shown.getvalue() and len(heard) == 12_000


KERAS = ("Epoch 1/2\n" +
         "".join(f"\r{i}/199 [====>....] - ETA: 57s - loss: {1 / i:.4f} - accuracy: 0.5000"
                 for i in range(1, 199)) + "\b" * 70 +
         "199/199 [==========] - 9s 12ms/step - loss: 0.1000 - accuracy: 0.9000 - val_loss: 0.2\n"
         "Epoch 2/2\n199/199 [==========] - 9s 12ms/step - loss: 0.05 - accuracy: 0.95\n")


def test_metrics_are_read_out_of_what_programs_print():
    rows = follow.Parser(interval=3600).feed(KERAS, end=True)
    assert len(rows) == 3  # the start of the first bar, and the ends of both bars
    assert rows[1] == {"iter": 199, "epoch": 1, "loss/train": 0.1, "accuracy": 0.9, "loss/val": 0.2}
    assert rows[2] == {"iter": 398, "epoch": 2, "loss/train": 0.05, "accuracy": 0.95}
    read = follow.Parser(patterns=[r"BLEU (?P<bleu>[0-9.]+)"]).feed
    assert read("step 10: train loss 2.1, val loss 2.2\n") == [
        {"iter": 10, "loss/train_eval": 2.1, "loss/val": 2.2}]
    assert read("iter=20 lr=1e-4 \x1b[1mloss=3.5\x1b[0m\n") == [
        {"iter": 20, "lr": 1e-4, "loss/train": 3.5}]
    assert read('{"step": 30, "loss": 0.25, "note": "x"}\n') == [{"iter": 30, "loss/train": 0.25}]
    assert read("translated, BLEU 31.5\n") == [{"iter": 31, "bleu": 31.5}]
    assert follow.Parser().feed("epoch 2: loss=0.5\n") == [  # an epoch without a progress bar
        {"iter": 1, "epoch": 2, "loss/train": 0.5}]
    assert read("loading 5 files at 10:30:15, took 12s, 98% done\n") == []
    assert read("." * 10_000_000) == []
    assert read("\n") == []  # an endless line costs neither memory nor time
    assert read("loss=1.") == [] and read("5\n")[0]["loss/train"] == 1.5  # a line in two chunks


def test_any_program_is_tracked_with_its_output_exit_code_and_signals_unchanged(tmp_path):
    def follow(program, out_dir="p"):
        return subprocess.Popen(
            [sys.executable, str(ROOT / "track.py"), "--wandb_log=False", f"--out_dir={out_dir}",
             "--", sys.executable, "-c", program],
            cwd=tmp_path, stdout=subprocess.PIPE, stdin=subprocess.PIPE)

    done = follow("import sys; print('step 1: loss 2.5\\r\\x1b[1mé', input()); sys.exit(7)")
    out, _ = done.communicate("hello\n".encode())
    assert out == "step 1: loss 2.5\r\x1b[1mé hello\n".encode() and done.returncode == 7
    assert track.read_rows(tmp_path / "p/log.jsonl")[0]["loss/train"] == 2.5
    waiting = follow("import time; print('ready', flush=True); time.sleep(60)", "q")
    assert waiting.stdout.readline() == b"ready\n"
    waiting.terminate()
    assert waiting.wait(30) == -signal.SIGTERM


# Adjacent raw strings, because some lines of this program exceed 100 columns.
HOSTILE_CONSOLE = (
    r"""
import sys
for line in ("step=1 loss=2", "step=nan loss=1.5", "step=inf loss=1.4", """
    r""""step=1e400 loss=1", "step=-5 loss=1", "step=1.5 loss=1",
             "step " + "9" * 5000 + " loss 1", "epoch=nan loss=1", """
    r""""epoch 1e300: 5/10 [=====>...] - loss: 1", "epoch " + "9" * 400 + ": loss=1",
             '{"step": ' + "9" * 5000 + ', "loss": 1}', '{"loss": 1' + "0" * 400 + "}", """
    r"""'{"a":' * 100000, '{"step": [1], "loss": {"loss": 1}}',
             '{"\\ud800": 1, "": 2, "iter": "x", "loss": true}', "{'loss': " * 5000, """
    r""""\x1b[" * 5000, "\x1b]8;;" + "x" * 5000, "loss=1 " * 200000,
             "a" * 2000000, *["loss/train: 1e308"] * 12, "loss/train: nan", """
    r""""{'step': inf, 'loss': nan}", "\0 loss=1"):
    sys.stdout.buffer.write(line.encode() + b"\n")
sys.stdout.buffer.write(b"\xff\xfe loss=1 \xe4\xb8")
sys.stdout.buffer.write(b"\nstep=900719925474 loss=0.5\n")
sys.exit(7)
""")


def test_nothing_that_a_program_prints_ends_it_or_its_tracking(tmp_path):
    """
    Check that the program's output and exit code are unchanged, and that each row has an integer
    iter, in nondecreasing order.
    """
    (tmp_path / "p.py").write_text(HOSTILE_CONSOLE)
    alone = subprocess.run([sys.executable, "p.py"], cwd=tmp_path, capture_output=True)
    done = subprocess.run([sys.executable, ROOT / "track.py", "--wandb_log=False", "--out_dir=p",
                           "--", sys.executable, "p.py"], cwd=tmp_path, capture_output=True)
    assert done.returncode == alone.returncode == 7 and done.stdout == alone.stdout
    assert b"Traceback" not in done.stderr and b"error" not in done.stderr, done.stderr
    rows = track.read_rows(tmp_path / "p/log.jsonl")
    assert [row["loss/train"] for row in rows[:2]] == [2, 1.5]
    assert [row["iter"] for row in rows[:2]] == [1, 2]
    assert rows[-1]["iter"] == 900719925474 and rows[-1]["loss/train"] == 0.5
    assert all(type(row["iter"]) is int and a["iter"] <= row["iter"] < 2 ** 63
               for a, row in zip(rows, rows[1:]))


@pytest.mark.parametrize("where", [
    ">/dev/full", ">/dev/full 2>&1", "2>/dev/full", ">&-", ">&- 2>&-", "<&- 2>&-", "| true",
    "2>&1 | true"
])
def test_wherever_its_output_goes_a_program_runs_to_its_end_and_is_tracked(tmp_path, where):
    program = ('for i in 1 2 3; do echo "step $i: loss/train: nan"; sleep 0.1; done; '
               'echo done > finished; exit 7')
    wandb_log = where == ">/dev/full 2>&1"  # the messages of the tracking itself fail, too
    words = [sys.executable, str(ROOT / "track.py"), f"--wandb_log={wandb_log}", "--out_dir=p",
             "--", "sh", "-c", program]
    clean = ({k: v for k, v in os.environ.items() if not k.startswith("WANDB")}
             | {"HOME": str(tmp_path), "WANDB_MODE": "offline"})
    done = subprocess.run(
        ["sh", "-c", f"exec 3>code; {{ {shlex.join(words)}; echo $? >&3; }} {where}"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120, env=clean)
    assert (tmp_path / "code").read_text() == "7\n" and (tmp_path / "finished").exists()
    assert "Traceback" not in done.stderr and "Exception" not in done.stderr, done.stderr
    assert [row["iter"] for row in track.read_rows(tmp_path / "p/log.jsonl")] == [1, 2, 3]
    if wandb_log:
        recorded = track.read_wandb(next((tmp_path / "wandb").glob("offline-run-*/*.wandb")))
        assert [r["history"]["item"]["iter"]
                for r in recorded if r["type"] == "history"] == [1, 2, 3]
    if where == ">/dev/full":
        assert done.stderr.count("output cannot be written (No space left on device); "
                                 "the program runs on") == 1


def test_a_signal_that_ends_a_program_is_the_exit_code(tmp_path):
    """
    track.py ends by the same signal as the program, as a shell sees it, and without writing a
    second core dump.
    """
    for name, number in (("KILL", 9), ("SEGV", 11), ("ABRT", 6), ("TERM", 15), ("PIPE", 13),
                         ("INT", 2), ("HUP", 1), ("USR1", 10), ("RTMIN", 34)):
        words = [sys.executable, ROOT / "track.py", "--wandb_log=False", f"--out_dir={name}", "--",
                 "sh", "-c", f"echo step 1 loss 2; kill -{number} $$; sleep 60"]
        # A program that a shell starts with & ignores SIGINT: restore its default.
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True,
                              preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
        assert done.returncode == -number and "Traceback" not in done.stderr, (name, done)
        assert done.stdout == "step 1 loss 2\n"
        assert track.read_rows(tmp_path / name / "log.jsonl")[0]["loss/train"] == 2


def test_what_a_killed_program_leaves_behind_is_not_waited_for_without_end(monkeypatch, capfd):
    """Example: the workers of a data loader whose parent the kernel's OOM killer has ended."""
    monkeypatch.setattr(follow, "SILENT_SECONDS", 1)
    monkeypatch.setattr(signal, "signal", lambda number, handler: signal.SIG_DFL)
    begin, rows = time.monotonic(), []
    tracker = SimpleNamespace(log=rows.append, finish=lambda: None)
    code = follow.follow(["sh", "-c", "sleep 20 & echo step 1 loss 2; kill -9 $$"], tracker,
                         follow.Parser())
    assert code == -9 and rows == [{"iter": 1, "loss/train": 2.0}] and time.monotonic() - begin < 15
    out, err = capfd.readouterr()
    assert out == "step 1 loss 2\n" and "processes that it left" in err
    # After a success, tracking waits for the processes left behind: they may print more metrics.
    code = follow.follow(["sh", "-c", "(sleep 3; echo step 2 loss 1) & echo step 1 loss 2"],
                         tracker, follow.Parser())
    assert code == 0
    assert rows[1:] == [{"iter": 1, "loss/train": 2.0}, {"iter": 2, "loss/train": 1.0}]


def test_a_failure_of_the_tracking_itself_costs_a_warning(capfd, monkeypatch):
    monkeypatch.setattr(signal, "signal", lambda number, handler: signal.SIG_DFL)

    def log(row):
        rows.append(row)
        raise ValueError("not this one")

    rows = []
    code = follow.follow(["sh", "-c", "for i in 1 2 3; do echo step $i loss 2; done; exit 3"],
                         SimpleNamespace(log=log), follow.Parser())
    out, err = capfd.readouterr()
    assert code == 3
    assert len(rows) == 3
    assert err.count("ValueError('not this one')") == 1
    assert "the program runs on" in err


def test_without_tqdm_it_is_said_what_to_do(tmp_path):
    """Run track.py with a Python that has no packages."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", "v"], cwd=tmp_path, check=True)
    done = subprocess.run(["v/bin/python", ROOT / "track.py", "--", "echo", "hi"], cwd=tmp_path,
                          capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "has no package tqdm; " in done.stderr


@pytest.mark.parametrize(
    "words, said",
    [(["--", "no-such-program"], "no-such-program: not a program that can be started"),
     (["--", "./data"], "./data: not a program that can be started"),
     (["--wandb_log=False", "--", "./broken"], "./broken: cannot be started (Exec format error)"),
     (["--wandb_log=maybe", "--", "echo"], "--wandb_log=maybe: expected True or False"),
     (["--pattern=(", "--", "echo"], "--pattern: not a regular expression"),
     (["--pattern=x (.*)", "--", "echo"], "--pattern=x (.*): expected a named group"),
     (["--"], "no program; expected: python track.py -- CMD ...")])
def test_a_program_that_cannot_be_started_is_refused_in_a_line(tmp_path, words, said):
    (tmp_path / "data").write_text("text")
    (tmp_path / "broken").write_text("text")
    (tmp_path / "broken").chmod(0o755)
    done = subprocess.run([sys.executable, ROOT / "track.py", "--out_dir=p", *words], cwd=tmp_path,
                          capture_output=True, text=True,
                          env=os.environ | {"WANDB_MODE": "disabled"})
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith(f"error: {said}"), done.stderr
    assert done.stderr.count("\n") == 1, done.stderr


def test_what_stands_in_the_folder_of_another_program_or_training_stays(tmp_path):
    """
    Without --out_dir, each run gets a new folder; an --out_dir that holds another run is refused.
    """
    def follow(*words):
        return subprocess.run(
            [sys.executable, str(ROOT / "track.py"), "--wandb_log=False", *words,
             "--", "echo", "step 1: loss 2.5"], cwd=tmp_path, capture_output=True, text=True)

    told = [follow(), follow(), follow()]
    assert [done.returncode for done in told] == [0, 0, 0]
    assert {done.stdout for done in told} == {"step 1: loss 2.5\n"}
    assert [done.stderr for done in told] == [
        "", "tracking: out/program2\n", "tracking: out/program3\n"]
    assert all(len(track.read_rows(tmp_path / f"out/program{n}/log.jsonl")) == 1
               for n in ("", 2, 3))
    for name in "log.jsonl", "config.json", "wandb.json", "trainer.json":
        (tmp_path / "mine").mkdir(exist_ok=True)
        (tmp_path / "mine" / name).write_text("mine")
        done = follow("--out_dir=mine")
        assert done.returncode == 2
        assert f"--out_dir=mine: holds {name}" in done.stderr
        assert len(done.stderr.splitlines()) == 1
        assert [(path.name, path.read_text())
                for path in (tmp_path / "mine").iterdir()] == [(name, "mine")]
        (tmp_path / "mine" / name).unlink()
    assert follow("--out_dir=mine").returncode == 0  # an empty folder is accepted
    done = follow("--out_dir=mine/log.jsonl")
    assert done.returncode == 2
    assert done.stderr.endswith("cannot be written (File exists); choose another folder\n")


def test_secrets_are_found_nowhere(tmp_path, tracked):
    """
    Search all files for twenty secrets: four each in the environment, in arguments, in the
    configuration, in the output, and in an exception.
    """
    words = [f"{kind}{i}{'q7Zk2' * 4}"
             for kind in ("env", "arg", "cfg", "out", "exc") for i in range(4)]
    env = dict(zip(("WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD"),
                   words[:4]))
    config = [f"--wandb_run_name=token={words[8]} of https://me:{words[9]}@host hf_{words[10]}",
              f"--sample_prompt=password: {words[11]}"]
    program = (
        f"import os\nprint(*os.environ.values())\nprint('api_key = {words[12]} sk-{words[13]}')\n"
        f"print('Authorization: Bearer {words[14]}')\nprint('loss=1 password={words[15]}')\n"
        f"raise ValueError('token={words[16]} secret: {words[17]} ghp_{words[18]} "
        f"http://u:{words[19]}@h')")
    (tmp_path / "p.py").write_text(program)
    (tmp_path / "my.txt").write_text((tracked[0] / "my.txt").read_text())
    trained = run(tmp_path, "--wandb_log=True", *config, HOME=str(tmp_path), WANDB_MODE="offline",
                  **env)
    assert trained.returncode == 0, trained.stderr
    clean = {k: v for k, v in os.environ.items() if not k.startswith("WANDB")}
    subprocess.run(
        [sys.executable, str(ROOT / "track.py"), "--", sys.executable, "p.py",
         f"--api-key={words[4]}", "--token", words[5], f"--password={words[6]}",
         f"https://u:{words[7]}@host"], cwd=tmp_path, capture_output=True,
        env=clean | env | {"HOME": str(tmp_path), "WANDB_MODE": "offline"})
    (tmp_path / "p.py").unlink()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any(path.suffix == ".wandb" for path in files)
    assert any(path.name == "model.pt" for path in files)
    leaks = {(str(path.relative_to(tmp_path)), word)
             for path in files for word in words if word.encode() in path.read_bytes()}
    kept = {(name, word) for name, word in leaks
            if word == words[11] and "/checkpoints/" in name and name.endswith("/config.json")}
    assert leaks == kept  # a checkpoint keeps sample_prompt unredacted, for the resumed run


@pytest.mark.parametrize("text, hidden", [
    ("redis://:p4ssw0rdx@host/0", "redis://***@host/0"),
    ("https://0123456789abcdef0123@host/x", "https://***@host/x"),
    ("postgres://u:pa@ss@host/db", "postgres://***@host/db"),
    ("mysql://u:p/w0rd@h", "mysql://***@h"),
    ("amqp://u:2024pass@h/1", "amqp://***@h/1"),
    ("Authorization: Basic dXNlcjpwYXNz", "Authorization: Basic ***"),
    ("authorization: token abc123xyz", "authorization: token ***"),
    ("DB_PASS=hunter2222", "DB_PASS=***"),
    ("db_pass: hunter2222", "db_pass: ***"),
    ("PGPASSWORD=hunter2222 psql", "PGPASSWORD=*** psql"),
    ("passphrase=hunter2222", "passphrase=***"),
    ("SECRETKEY=hunter2222", "SECRETKEY=***"),
    ("GITHUB_PAT=hunter2222", "GITHUB_PAT=***"),
    ('{"password": "hunter2 222x", "a": 1}', '{"password": "***", "a": 1}'),
    ("password = 'ab,cdefgh;ij'", "password = '***'"),
    ("--password hunter2222 --n 3", "--password *** --n 3"),
    ("secret=correcthorse", "secret=***"),
    ("the token=ab12cd34", "the token=***"),
    ("Bearer abc123def456", "Bearer ***")])
def test_a_secret_is_known_by_its_shape(text, hidden):
    assert redact(text) == hidden == redact(hidden)


@pytest.mark.parametrize("text", [
    "compass=northeast", "COMPASS=northeast", "path=/home/me/work", "second_pass: 0.123456",
    "bypass=enabled", "pwd=/home/me/work/2024/of/a/long/name",
    "write to first.last2024@example.com: thanks", "mailto://me@example.com",
    "ssh://git@github.com/me/llamac.git", "git@github.com:me/llamac.git",
    "http://host:8080/of/me@example.com", "http://[::1]:8080/of/me@example.com",
    "see https://example.com/a:b@c", "https://me@host/x", "next token: beautiful, as=1",
    "eos_token: 128009", "eos_token=128009", "tokens_per_sec=123456.7", "the bearer welcomed us",
    "password reset", "a secret garden: flowers", "passes=123456", "pattern=[a-z0-9]+",
    "--token TOKEN", "loss=1.234567 lr=0.0001234", "an authorization: granted today"
])
def test_what_is_no_secret_stays(text):
    assert redact(text) == text


H40, B86 = "0123456789abcdef" * 2 + "01234567", "Ab1/+" * 17 + "A"


@pytest.mark.parametrize("text, secret", [
    ("AKIAIOSFODNN7EXAMPLE", "AKIAIOSFODNN7EXAMPLE"),
    ("ASIAQWERTYUIOPASDFGH", "ASIAQWERTYUIOPASDFGH"),
    ("aws_secret_access_key = wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
     "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"),
    (f"DefaultEndpointsProtocol=https;AccountName=a;AccountKey={B86}==;"
     "EndpointSuffix=core.windows.net", B86),
    ("AIzaSyA-0123456789abcdefghijklmnopqrstu", "SyA-0123456789abcdefghijklmnopqrstu"),
    ("x 3kF8Q~aBcDeFgHiJkLmNoPqRsTuVwXyZ0123456 y", "aBcDeFgHiJkLmNoPqRsTuVwXyZ"),
    ("LTAI4GBcdEfgHijKlmnOpQrs", "4GBcdEfgHijKlmnOpQrs"),
    ("GOCSPX-ab1cd2ef3gh4ij5kl6mn7op8", "ab1cd2ef3gh4ij5kl6mn7op8"),
    *((f"{prefix}{H40}", H40)
      for prefix in ("ghp_", "glpat-", "hf_", "npm_", "dop_v1_", "shpat_", "hvs.", "sk-ant-api03-",
                     "sk_live_", "rk_test_", "xoxb-", "pypi-AgEIcHlwaS5vcmc", "sntrys_", "pul-",
                     "glsa_", "lin_api_", "PMAK-", "gsk_", "nvapi-", "tgp_v1_")),
    ("hf_" + "abcdefghijklmnopq" * 2, "abcdefghijklmnopq"), ("dapi" + H40[:32], H40[:32]),
    ("SG.abcdefghij0123456789ab.0123456789abcdefghij", "abcdefghij0123456789ab"),
    ("https://b.s3.amazonaws.com/x?X-Amz-Credential=AKIAIOSFODNN7EXAMPLE%2F20260101"
     "&X-Amz-Signature=" + H40, H40),
    ("https://storage.googleapis.com/b/x?X-Goog-Expires=900&X-Goog-Signature=" + H40, H40),
    ("https://a.blob.core.windows.net/c?sv=2022-11-02&sr=b&sig=a1B2c3D4e5F6%2Bg7%3D",
     "a1B2c3D4e5F6"),
    ("https://d1.cloudfront.net/x?Expires=1&Signature=aBcDeF~gh-ij"
     "&Key-Pair-Id=APKAEIBAERJR2EXAMPLE", "aBcDeF~gh-ij"),
    ("https://oss.aliyuncs.com/x?OSSAccessKeyId=nz1Abc2defGhi&Expires=1&Signature=vjbyPxybdZaNmGa",
     "vjbyPxybdZaNmGa"),
    ("https://maps.example.com/json?key=" + H40, H40),
    ("https://example.com/x?access_token=abcdefghij", "abcdefghij"),
    ("https://hooks.slack.com/services/T00000000/B00000000/abcdefghijklmnop", "abcdefghijklmnop"),
    ("https://discord.com/api/webhooks/123456789/" + H40, H40),
    ("bot 123456789:AAabcdefghij0123456789klmnopqrstuvw", "abcdefghij0123456789"),
    ("machine a.example.com login me password hunter22", "hunter22"),
    ("curl -u me:hunter22 https://a.example.com", "hunter22"),
    ('{"username": "me", "key": "' + H40[:32] + '"}', H40[:32]),
    ('{"auths": {"a": {"auth": "bWU6aHVudGVyMjIyMg=="}}}', "bWU6aHVudGVyMjIyMg"),
    ("//registry.npmjs.org/:_authToken=abcdefghij", "abcdefghij"), ("X-Api-Key: " + H40, H40)
])
def test_keys_of_issuers_and_signatures_of_urls_are_known(text, secret):
    """Cover the patterns in the published rules of gitleaks and detect-secrets."""
    for shown in text, f"curl '{text}' -o x", f'+    url = "{text}"', f"['{text}']":
        assert secret not in redact(shown) and redact(redact(shown)) == redact(shown), redact(shown)
    assert secret not in str(redact({"a": [text]}))


@pytest.mark.parametrize("kind", [
    "RSA PRIVATE KEY", "OPENSSH PRIVATE KEY", "PRIVATE KEY", "ENCRYPTED PRIVATE KEY",
    "PGP PRIVATE KEY BLOCK"
])
def test_a_private_key_is_hidden_line_by_line(kind):
    lines = [f"{n}MIIEowIBAAKCAQEA+/{n}" for n in range(3)]
    block = "\n".join(["before", f"+-----BEGIN {kind}-----", *(f"+{line}" for line in lines),
                       f"+-----END {kind}-----", "+after"])
    assert redact(block).split("\n") == [
        "before", f"+-----BEGIN {kind}-----", "+***", "+***", "+***", f"+-----END {kind}-----",
        "+after"]
    # The key with escaped newlines, without its end, and inside JSON.
    for text in (block.replace("\n", "\\n"), block.partition("-----END")[0],
                 json.dumps({"private_key": block})):
        assert "MIIE" not in redact(text) and redact(text).startswith(text[:5])


@pytest.mark.parametrize("code", [
    "token=tokenizer.eos_token", "    stop(token=tokenizer.eos_token, n=3)",
    "token = tokenizer.convert_tokens_to_ids(pieces)", "password = getpass.getpass()",
    "secret = os.environ['SECRET']", "api_key=os.getenv('KEY')", "password=$PASSWORD",
    "token=${{TOKEN}}", "token=<token>", "secret_key=config.secret_key", "max_tokens=512",
    "https://a.example.com/x?max_tokens=512&page=2", "sk-learn-contrib-package",
    "API-REFERENCE-MANUAL",
    "-----BEGIN CERTIFICATE-----\nMIIEowIBAAKCAQEA\n-----END CERTIFICATE-----",
    "docker run -u 1000:1000 x", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
    "password: str = None", "glob/hf_model/pytorch_model.bin"
])
def test_code_and_common_words_stay(code):
    for text in code, f"+    {code}", f"- {code}":
        assert redact(text) == text


def test_the_words_of_a_command_line():
    words = [
        "x", "--password=abc", "--token", "abcde", "--max_tokens=512", "--max-tokens", "512",
        "--key=loss", "PGPASSWORD=1234", "-u", "me:pw12", "--use-token=true", 3, "--seed=1",
        "API_KEY=abc", "--user", "1000:1000"]
    assert redact(words) == [
        "x", "--password=***", "--token", "***", "--max_tokens=512", "--max-tokens", "512",
        "--key=***", "PGPASSWORD=***", "-u", "me:***", "--use-token=true", 3, "--seed=1",
        "API_KEY=***", "--user", "1000:1000"]


def test_what_a_model_or_the_data_wrote_is_logged_as_it_is(tmp_path, monkeypatch):
    """Redact only the columns that hold settings: prompts, and values in the table `settings`."""
    monkeypatch.setenv("MY_TOKEN", "s3cret" * 5)
    written = f"token=tokenizer.eos_token password=hunter2222 {'s3cret' * 5} ghp_{H40}"
    row = {
        "iter": 1, "tokens": 1, "samples": [["password=hunter2222", "greedy", written]],
        "documents": [["train", written, 1, 1, 0, 0]],
        "predictions": [["val", written, written, 0.5, written, 0.5, "", 0, "", 0]],
        "data": [["text", written, written]], "pieces": [[written, 1, 1]],
        "notes": [["grad/norm", 1.0, "is large"]],
        "settings": [["sample_prompt", "password=hunter2222", "none"], ["api_key", "old", "new"]]}
    tracker = track.make_tracker(Session(tmp_path, {}, {"id": "x"}))
    tracker.log(row)
    tracker.finish()
    logged = track.read_rows(tmp_path / "log.jsonl")[0]
    changed = {"samples": [["password=***", "greedy", written]],
               "settings": [["sample_prompt", "password=***", "none"], ["api_key", "***", "***"]]}
    assert {name: logged[name] for name in row} == row | changed


def test_a_resumed_run_goes_on_with_its_own_prompt_and_data(tmp_path, tracked):
    """Logs redact a secret in the settings; checkpoints keep it, because the run needs it."""
    (tmp_path / "my.txt").write_text((tracked[0] / "my.txt").read_text())
    prompt = "The password: hunter22 opened the"
    shutil.move(tmp_path / "my.txt", tmp_path / "token=abcd1234.txt")
    for words in (["--max_iters=1", f"--sample_prompt={prompt}", "--data=token=abcd1234.txt"],
                  ["--max_iters=2", "--data=token=abcd1234.txt"]):
        done = run(tmp_path, *words)
        assert done.returncode == 0, done.stderr
    newest = json.loads((tmp_path / "out/checkpoints"
                         / (tmp_path / "out/latest").read_text().strip()
                         / "config.json").read_text())
    assert (newest["sample_prompt"], newest["data"]) == (prompt, "token=abcd1234.txt")
    logged = json.loads((tmp_path / "out/config.json").read_text())
    assert (logged["sample_prompt"], logged["data"]) == (
        "The password: *** opened the", "token=***")
    assert {row[0] for r in track.read_rows(tmp_path / "out/log.jsonl")
            for row in r.get("samples", [])} == {"The password: *** opened the"}


def test_a_secret_is_known_by_its_name(monkeypatch):
    for name in ("PGPASSWORD", "DB_PASS", "SMTP_PASS", "GPG_PASSPHRASE", "GITHUB_PAT", "SECRETKEY",
                 "HF_ACCESSTOKEN", "REDISCLI_AUTH", "SSHPASS", "MYSQL_PWD", "OPENAI_APIKEY",
                 "CLIENT_SECRET", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, f"v4lue_{name.lower()}")
        assert redact(f"x v4lue_{name.lower()} y") == "x *** y", name
        assert redact({name.lower(): "s3cret"}) == {name.lower(): "***"}
        assert redact([f"--{name.lower()}", "s3cret"])[1] == "***"
    plain = {"PWD": "/home/me/work", "OLDPWD": "/home/me/before", "COMPASS": "northeast",
             "PATH": "/usr/bin:/bin", "AUTHOR": "somebody", "SSH_ASKPASS": "/usr/bin/askpass",
             "SSH_AUTH_SOCK": "/tmp/agent.1", "PATTERN": "something", "KEYBOARD": "qwertz-de"}
    for name, value in plain.items():
        monkeypatch.setenv(name, value)
        assert redact(f"x {value} y") == f"x {value} y", name
        assert name == "PWD" or redact({name.lower(): value}) == {name.lower(): value}, name


def test_no_text_takes_long_to_redact():
    for text in ("a:" * 5000, "://" * 3300, "token" + " " * 10000, "://" + "a" * 10000,
                 "://u:" * 2000, "authorization: " * 1000, "_" * 10000, "--password" * 1000,
                 "A" * 10000):
        begin = time.process_time()
        redact(text)
        assert time.process_time() - begin < 0.3, text[:20]


def test_tensorboard_gets_the_same_numbers_texts_and_histograms_or_says_what_it_needs(
        tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("engine.tracking.tracker.START_SECONDS", 60)
    tracker = track.make_tracker(Session(tmp_path, {}, {"id": "x"}), ["tensorboard"])
    for i in range(3):
        tracker.log({
            "iter": i, "tokens": 100 * i, "loss/val": 3.0 - i,
            "samples": [["once", "greedy", f"upon {i}"]],
            "logits/histogram": {"counts": [1, 2, 3], "edges": [0.0, 1.0, 2.0, 3.0]}})
    tracker.finish()
    assert len(track.read_rows(tmp_path / "log.jsonl")) == 3
    if importlib.util.find_spec("tensorboard") is None:
        assert "pip install tensorboard" in capsys.readouterr().err
        return
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss/val")] == [
        (0, 3.0), (100, 2.0), (200, 1.0)]
    assert (b"once|greedy|upon 2"
            in events.Tensors("samples/text_summary")[2].tensor_proto.string_val[0])
    histogram = events.Histograms("logits/histogram")[0].histogram_value
    assert histogram.num == 6 and list(histogram.bucket)[-3:] == [1, 2, 3]


def test_a_killed_and_resumed_run_has_each_point_in_tensorboard_once(tmp_path, monkeypatch):
    """
    Check that TensorBoard shows the rows of log.jsonl and drops those that a killed session wrote
    after its last checkpoint.
    """
    pytest.importorskip("tensorboard")
    # The EventAccumulator that TensorBoard's page uses.
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator
    from tensorboard.util import tensor_util
    monkeypatch.setattr("engine.tracking.tracker.START_SECONDS", 60)

    def session(step, iters, loss):
        tracker = track.make_tracker(Session(tmp_path, {}, {"id": "x"}, step), ["tensorboard"])
        for i in iters:
            tracker.log({
                "iter": i, "tokens": 100 * i, "loss/val": math.nan if i == 3 else loss,
                "samples": [["a", "greedy", str(loss)]],
                "logits/histogram": {"counts": [1], "edges": [0.0, loss]}})
        tracker.finish()
        time.sleep(1.1)  # TensorBoard orders its files by the time in their names, in whole seconds

    def shown():
        events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
        found = {name: events.Tensors(name) for name in events.Tags()["tensors"]}
        points = [(e.step // 100, tensor_util.make_ndarray(e.tensor_proto).item())
                  for e in found["loss/val"] if e.step != 300]
        texts, histograms = ([e.step // 100 for e in found[name]]
                             for name in ("samples/text_summary", "logits/histogram"))
        return points, texts, histograms, [e.step for e in found.get("alerts/text_summary", [])]

    session(0, range(5), 2.0)
    session(1.5, range(2, 7), 1.0)  # resumed from the checkpoint at iter 2: its row is logged again
    points, texts, histograms, alerts = shown()
    assert points == [(0, 2.0), (1, 2.0), (2, 1.0), (4, 1.0), (5, 1.0), (6, 1.0)]
    assert alerts == [300]
    assert (texts == histograms == list(range(7))
            == [row["iter"] for row in track.read_rows(tmp_path / "log.jsonl")])
    session(6, range(7, 9), 0.5)  # the last session had ended regularly: all points stay
    assert shown()[1] == list(range(9))
    (tmp_path / "log.jsonl").unlink()  # without it, which points are logged again is unknown
    session(8, range(9, 10), 0.5)
    assert shown()[1] == list(range(10))
    session(0, range(2), 4.0)  # killed before its first checkpoint: a new run in the same folder
    assert shown()[:2] == ([(0, 4.0), (1, 4.0)], [0, 1])


def test_data_shows_documents_with_the_shares_of_unknown_and_byte_tokens(tmp_path):
    known = "the cat sat on the mat and the dog ran under a tree and so on"
    lines = ([json.dumps({"text": known}) for _ in range(400)]
             + [json.dumps({"text": "a cat \u4e00"})])  # the last character has three bytes
    (tmp_path / "d.jsonl").write_text("\n".join(lines))
    done = subprocess.run(
        [sys.executable, str(ROOT / "data.py"), "d.jsonl", "--vocab_size=300", "--show=True"],
        cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\ntrain: ") == done.stdout.count("\nval: ") == 3
    assert f"'{known}'" in done.stdout
    import data
    dataset = data.load(next((tmp_path / "cache").glob("d-custom300-*/meta.json")).parent)
    rare = next(row for row in data.document_rows(dataset, count=1000) if row[1] == "a cat \u4e00")
    ids = dataset.tokenizer.encode("a cat \u4e00", bos=True, eos=True)
    assert rare[3:] == [len(ids), 0, round(3 / len(ids), 4)] and rare[2].endswith("|⟨\u4e00⟩|</s>")


FAULTY = """
import os, time
class Any:
    def __getattr__(self, name):
        return Any()
    def __call__(self, *args, **kwargs):
        return Any()
def fault(where):
    kind, _, place = os.environ["FAULT"].partition(" ")
    if place == where and kind == "raise":
        raise OSError("the server is on fire")
    if place == where and kind == "die":
        os._exit(3)
    if place == where and kind == "hang":
        time.sleep(1000)
    if place == where and kind == "late":
        time.sleep(9)
def init(*args, **kwargs):
    fault("init")
    return Any()
def log(row, step):
    if step == 20:
        fault("log")
    with open(os.environ["SEEN"] + __name__, "a") as f:
        f.write(f"{step}\\n")
def finish(*args):
    fault("finish")
echarts, Table, Histogram, AlertLevel, alert = Any(), Any(), Any(), Any(), Any()
"""


def test_swanlab_and_trackio_never_hold_a_training(tmp_path):
    """
    Run both clients at once: they fail, die or hang at the start, in the middle or at the end, or
    are missing. A client that starts only after the program has ended still receives all rows.
    """
    for name in "swanlab", "trackio":
        (tmp_path / "modules" / name).mkdir(parents=True)
        (tmp_path / "modules" / name / "__init__.py").write_text(FAULTY)
    faults = ["none", "late init", "missing",
              *(f"{kind} {place}" for kind in ("raise", "die", "hang")
                for place in ("init", "log", "finish"))]
    runs = {}
    for n, fault in enumerate(faults):
        out = tmp_path / str(n)
        out.mkdir()
        modules = str(tmp_path / "modules") if fault != "missing" else ""
        env = os.environ | {"FAULT": fault, "SEEN": f"{out}/seen-", "PYTHONPATH": modules,
                            "SWANLAB_MODE": "offline"}
        runs[fault] = out, subprocess.Popen(
            [sys.executable, "-m", "tests.trackers", str(out), "60"], cwd=ROOT, env=env, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    slowness = usual(1)  # measured while all programs run
    for fault, (out, process) in runs.items():
        said, warned = process.communicate(timeout=120)
        took = json.loads(said.splitlines()[-1])
        assert process.returncode == 0, (fault, warned)
        assert took["start"] < 5 * slowness, (fault, took, warned)
        assert took["row"] < slowness, (fault, took, warned)
        assert took["end"] < 5 * slowness, (fault, took, warned)
        assert [row["iter"] for row in track.read_rows(out / "log.jsonl")] == list(range(60)), fault
        warnings = [line for line in warned.splitlines()
                    if line.startswith("warning: tracking with")]
        assert len(warnings) == len(warned.splitlines()) == (
            0 if fault.startswith(("none", "late", "hang")) else 2), (fault, warned)
        if fault in ("none", "late init"):
            end = time.monotonic() + 60
            for seen in out / "seen-swanlab", out / "seen-trackio":
                while not (seen.exists()
                           and seen.read_text().split() == [str(i) for i in range(60)]):
                    assert time.monotonic() < end, (fault, seen)
                    time.sleep(0.1)
        elif fault == "missing":
            assert {line.split("pip install ")[1] for line in warnings} == {"swanlab", "trackio"}
        elif fault.startswith("raise"):
            assert all("the server is on fire" in line for line in warnings)
        elif fault.startswith("hang") and not fault.endswith("finish"):
            assert said.count("uploads the rest in the background") == 2, (fault, said)


def test_numbers_of_other_programs_may_have_the_names_of_our_tables(tmp_path):
    """Log them to log.jsonl and W&B, without a warning or a traceback."""
    row = {name: n / 2 for n, name in enumerate(track.TABLES, 1)}
    program = (f"print('step 1:', *{[f'{name}={value}' for name, value in row.items()]!r}, "
               "'loss=2.5')")
    clean = ({k: v for k, v in os.environ.items() if not k.startswith("WANDB")}
             | {"HOME": str(tmp_path), "WANDB_MODE": "offline"})
    done = subprocess.run(
        [sys.executable, ROOT / "track.py", "--out_dir=p", "--", sys.executable, "-c", program],
        cwd=tmp_path, capture_output=True, text=True, env=clean)
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    assert track.read_rows(tmp_path / "p/log.jsonl")[0].items() >= row.items()
    recorded = track.read_wandb(next((tmp_path / "wandb").glob("offline-run-*/*.wandb")))
    assert next(r["history"]["item"]
                for r in recorded if r["type"] == "history").items() >= row.items()


def test_a_log_with_a_broken_line_goes_on(tmp_path):
    lines = [
        b'{"iter": 0, "loss/val": 5.0}', b'\xff\xfe', b'{"iter": "many"}',
        b'{"iter": 10, "note": "caf\xe9"}', b"[" * 100_000, b'["iter"]',
        '{"iter": 20, "note": "one\u2028line"}'.encode()]
    (tmp_path / "log.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    assert [row["iter"] for row in track.read_rows(tmp_path / "log.jsonl")] == [0, 20]
    log = track.Jsonl(tmp_path, {}, 30)
    log.log({"iter": 30})
    log.finish()
    assert [row["iter"] for row in track.read_rows(tmp_path / "log.jsonl")] == [0, 20, 30]


def test_the_repositorys_token_is_not_recorded(tmp_path):
    """Put a token into the remote's address, which the client reads from git."""
    for words in (["init", "-q"],
                  ["remote", "add", "origin",
                   "https://ghp_Ab1Cd2Ef3Gh4Ij5Kl6Mn7@github.com/me/mine.git"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    shutil.copytree(ROOT / "engine", tmp_path / "engine",
                    ignore=shutil.ignore_patterns("__pycache__"))
    for name in "track.py", "configurator.py":
        shutil.copy(ROOT / name, tmp_path)
    clean = ({k: v for k, v in os.environ.items() if not k.startswith("WANDB")}
             | {"HOME": str(tmp_path), "WANDB_MODE": "offline"})
    done = subprocess.run([sys.executable, "track.py", "--", "echo", "step 1: loss 2.5"],
                          cwd=tmp_path, env=clean, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    log = next((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    assert "github.com/me/mine" in json.dumps(track.read_wandb(log))
    assert all(b"Ab1Cd2Ef3" not in path.read_bytes()
               for path in (tmp_path / "wandb").rglob("*") if path.is_file())


def test_names_that_are_no_utf8_reach_the_client(tmp_path):
    name = os.fsdecode(b"caf\xe9.txt")
    assert encodable({"data": name, "rows": [[name, 1.5, None]]}) == {
        "data": "caf?.txt", "rows": [["caf?.txt", 1.5, None]]}


def test_what_a_program_prints_is_passed_on_whole_into_a_pipe_that_does_not_block(monkeypatch):
    read, write = os.pipe()
    os.set_blocking(write, False)
    kept, found = os.dup(1), []
    reader = threading.Thread(target=lambda: found.extend(iter(lambda: os.read(read, 65536), b"")))
    os.dup2(write, 1)
    try:
        threading.Timer(0.2, reader.start).start()  # after the pipe has filled up
        follow.pass_on(b"x" * 1_000_000)
    finally:
        os.dup2(kept, 1)
        os.close(write)
        os.close(kept)
    reader.join(30)
    assert b"".join(found) == b"x" * 1_000_000


@pytest.mark.slow
def test_a_training_goes_on_and_is_tracked_though_nobody_reads_what_it_says(tmp_path, tracked):
    (tmp_path / "my.txt").write_text((tracked[0] / "my.txt").read_text())
    clean = ({k: v for k, v in os.environ.items() if not k.startswith("WANDB")}
             | {"HOME": str(tmp_path), "OMP_NUM_THREADS": "1"})
    words = ["--data=my.txt", "--vocab_source=byte", "--dim=32", "--n_layers=1", "--n_heads=2",
             "--max_seq_len=32", "--batch_size=4", "--max_iters=20", "--eval_iters=1",
             "--eval_interval=10", "--device=cpu", "--wandb_log=True", "--out_dir=out",
             "--supervise=True"]
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, ROOT / "train.py", *words], cwd=tmp_path, stdout=write,
                          stderr=write, env=clean)
    os.close(write)
    recorded = track.read_wandb(next((tmp_path / "wandb").glob("offline-run-*/*.wandb")))
    steps = [r["history"]["item"]["iter"] for r in recorded if r["type"] == "history"]
    assert done.returncode == 0
    assert steps[-1] == 20 == track.read_rows(tmp_path / "out/log.jsonl")[-1]["iter"]
