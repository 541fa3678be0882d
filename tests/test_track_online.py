"""Tracking over a real connection, to a small W&B server on the loopback interface."""
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

import track
from engine.tracking import background
from tests import forked
from tests.conftest import usual
from tests.wandb_server import Server

ROOT = Path(__file__).resolve().parents[1]
KEY = "0123456789" * 4
TINY = [
    "--data=my.txt", "--vocab_source=byte", "--dim=32", "--n_layers=1", "--n_heads=2",
    "--max_seq_len=32", "--batch_size=4", "--log_interval=5", "--eval_iters=1",
    "--eval_interval=20", "--device=cpu", "--wandb_log=True", "--out_dir=out", "--checks=none"
]


@pytest.fixture()
def server():
    server = Server()
    yield server
    server.stop()


@pytest.fixture()
def folder(tmp_path):
    (tmp_path / "my.txt").write_text("the cat sat on the mat and the dog ran under a tree. " * 600)
    return tmp_path


def environment(folder, url):
    clean = {k: v for k, v in os.environ.items() if not k.startswith("WANDB")}
    return clean | {
        "OMP_NUM_THREADS": "1", "HOME": str(folder), "WANDB_API_KEY": KEY, "WANDB_BASE_URL": url
    }


def start(folder, url, script, *words):
    return subprocess.Popen([sys.executable, str(ROOT / script), *words], cwd=folder,
                            env=environment(folder, url), stdin=subprocess.DEVNULL,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def trained(folder, url, *words):
    """Train to the end, without a tracking warning; return stdout."""
    done = forked.run([ROOT / "train.py", *TINY, *words], folder, environment(folder, url))
    assert done.returncode == 0 and "warning: tracking" not in done.stderr, done.stderr
    return done.stdout


def finish(process):
    """Wait for a process that must succeed without a tracking warning; return stdout."""
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0 and "warning: tracking" not in err, err
    return out


def numbers(rows):
    return [{k: v for k, v in row.items() if type(v) in (int, float) and k != "time"}
            for row in rows]


def uploaded(server, folder):
    """Check that the server has all rows of the JSON lines, complete and in order; return them."""
    rows = numbers(track.read_rows(folder / "out/log.jsonl"))
    history = server.runs[track.about(folder / "out")["id"]]["history"]
    assert [row["iter"] for row in history] == [row["iter"] for row in rows]
    assert all(row.items() <= got.items() for row, got in zip(rows, history))
    return rows


def test_a_run_arrives_with_rows_tables_and_model_and_is_resumed(server, folder):
    out = trained(folder, server.url, "--max_iters=20")
    assert "W&B online" in out and server.keys == {KEY}
    rows = uploaded(server, folder)
    assert [row["iter"] for row in rows] == [0, 5, 10, 15, 20]
    run_id = track.about(folder / "out")["id"]
    assert server.runs[run_id]["exit"] == 0
    models = [(f"A{n}", a) for n, a in enumerate(server.artifacts)
              if a["artifactTypeName"] == "model"]
    assert len(models) == 1 and models[0][1]["committed"]
    assert server.uploads[f"{models[0][0]}/model.gguf"] == (folder / "out/model.gguf").read_bytes()
    tables = [json.loads(data) for name, data in server.uploads.items()
              if name.startswith("A") and "samples" in name]
    assert sorted(row[0] for table in tables for row in table["data"]) == [0, 0, 20, 20]
    console = "\n".join(line.split(" ", 1)[1] for line in server.runs[run_id]["output"]
                        if not line.startswith("ERROR"))
    shown = [line for line in out.splitlines() if line.startswith("iter ")]
    assert len(shown) == 5
    assert [line for line in console.splitlines() if line.startswith("iter ")] == shown
    # the metrics in W&B's own format: "2" is the name, "6": [2] means hidden
    metrics = server.runs[run_id]["config"]["_wandb"]["value"]["m"]
    assert {m["2"] for m in metrics if m.get("6") == [2]} == {
        f"tables/{name}.*" for name in track.TABLES}
    sent = len(server.artifacts)
    trained(folder, server.url, "--max_iters=40", "--log_extras=")
    assert [row["iter"] for row in uploaded(server, folder)] == list(range(0, 45, 5))
    assert list(server.runs) == [run_id] and len(server.artifacts) == sent
    assert server.runs[run_id]["config"]["max_iters"]["value"] == 40  # the value of the second run
    assert track.read_rows(folder / "out/log.jsonl")[5]["settings"] == [["max_iters", "20", "40"]]
    assert sum(" iter     40 | " in line
               for line in server.runs[run_id]["output"][len(shown):]) == 1
    assert KEY not in "".join(
        p.read_text(errors="replace") for p in folder.rglob("*") if p.is_file())


def wait_for_rows(folder, n, trainer):
    log, end = folder / "out/log.jsonl", time.monotonic() + 60
    while not log.exists() or log.read_bytes().count(b"\n") < n:
        assert trainer.poll() is None and time.monotonic() < end
        time.sleep(0.1)


@pytest.mark.slow
def test_a_server_that_dies_in_mid_run_gets_all_rows_later(folder):
    first = Server()
    trainer = start(folder, first.url, "train.py", *TINY, "--max_iters=1000000")
    wait_for_rows(folder, 20, trainer)
    first.stop()
    wait_for_rows(folder, track_rows(folder) + 50, trainer)  # training continues
    time.sleep(2)  # the client flushes its rows to disk every second
    trainer.kill()
    trainer.communicate()
    second = Server()
    finish(start(folder, second.url, "track.py", "sync", "out"))
    uploaded(second, folder)
    second.stop()


def track_rows(folder):
    return len(track.read_rows(folder / "out/log.jsonl"))


@pytest.mark.slow
def test_a_run_without_a_server_is_synced_complete_even_where_the_client_lost_rows(server, folder):
    out = trained(folder, "http://127.0.0.1:9", "--max_iters=20")
    assert "W&B offline (http://127.0.0.1:9 does not answer)" in out
    assert "python track.py sync out" in out
    # append rows from a time when the W&B client was not running
    with open(folder / "out/log.jsonl", "a") as f:
        f.writelines(
            json.dumps({"iter": i, "tokens": 128 * i, "loss/train": 1.5, "time": 0}) + "\n"
            for i in (25, 30))
    assert "complete up to iter 30" in finish(start(folder, server.url, "track.py", "sync", "out"))
    assert [row["iter"] for row in uploaded(server, folder)] == [0, 5, 10, 15, 20, 25, 30]
    refused = start(folder, "http://127.0.0.1:9", "track.py", "sync", "out")
    assert "does not answer; try again later" in refused.communicate()[1]
    assert refused.returncode == 2


@pytest.fixture()
def online(server, folder, monkeypatch):
    """Configure this process for a user with an API key for the local server."""
    for name, value in {
            "WANDB_API_KEY": KEY, "WANDB_BASE_URL": server.url, "WANDB_DIR": str(folder),
            "HOME": str(folder), "WANDB_DATA_DIR": str(folder)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    (folder / "out").mkdir()
    return server


def named(name):
    return {"id": name, "project": "p", "name": name}


def session(folder, step, rows, wandb_log=True, finished=True):
    """Log rows [(iter, loss)] to the run "x", as a trainer that resumes at `step`."""
    tracker = track.make_tracker(track.Session(folder / "out", {}, named("x"), step),
                                 ["wandb"] * wandb_log)
    for i, loss in rows:
        tracker.log({"iter": i, "tokens": i, "loss/val": loss})
    if finished:
        tracker.finish()
    return tracker


def sync(server, folder):
    """Run track.py sync and return its output. W&B then has each row of the JSON lines once."""
    said = finish(start(folder, server.url, "track.py", "sync", "out"))
    uploaded(server, folder)
    return said


@pytest.mark.slow
def test_a_run_that_is_synced_again_gets_each_row_once(online, folder, monkeypatch):
    session(folder, 0, [(0, 3.0), (20, 2.0), (40, 1.5)])
    assert "complete up to iter 40" in sync(online, folder)  # the run was online from the start
    monkeypatch.setenv("WANDB_MODE", "offline")
    model = folder / "out/model.gguf"

    def end(tracker, iteration):
        model.write_bytes(os.urandom(1000))
        tracker.model(model, {"iter": iteration}, ["best"])
        tracker.finish()

    end(session(folder, 40, [(60, 1.4), (80, 1.3)], finished=False), 80)
    tracker = session(folder, 80, [(100, 1.2)], finished=False)
    assert "complete up to iter 100" in sync(online, folder)  # a nightly sync while training runs
    tracker.log({"iter": 120, "tokens": 120, "loss/val": 1.1})
    end(tracker, 120)
    assert "complete up to iter 120" in sync(online, folder) and online.runs["x"]["exit"] == 0
    sent = [a for a in online.artifacts if a["artifactTypeName"] == "model" and a["committed"]]
    assert [json.loads(a["metadata"])["iter"] for a in sent] == [80, 120]
    assert {alias["alias"] for alias in sent[-1]["aliases"]} == {"latest", "best"}


@pytest.mark.slow
def test_a_run_killed_offline_and_resumed_arrives_as_it_went_on(online, folder, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    # killed after its last checkpoint at 100
    session(folder, 0, [(0, 3.0), (100, 2.0), (120, 1.9), (140, 1.8)])
    tracker = session(folder, 100, [(120, 1.5), (140, 1.4), (160, 1.3)], finished=False)
    model, content = folder / "out/model.gguf", os.urandom(1000)
    model.write_bytes(content)
    tracker.model(model, {"loss/val": 1.3}, ["best"])
    tracker.finish()
    model.unlink()  # the client keeps a copy of a file that waits for its upload
    with open(folder / "out/log.jsonl", "a") as f:
        f.write(json.dumps({"iter": 180, "tokens": 180, "loss/val": 1.2,
                            "samples": [["my", "greedy", "own words"]]}) + "\n")
    (folder / "out/config.json").write_text('{"wandb_tables": false}')
    for again in range(2):
        sync(online, folder)
    sent = [(n, a) for n, a in enumerate(online.artifacts) if a["artifactTypeName"] == "model"]
    assert len(sent) == 1
    assert json.loads(sent[0][1]["metadata"])["loss/val"] == 1.3
    assert sent[0][1]["committed"]
    assert online.uploads[f"A{sent[0][0]}/model.gguf"] == content
    assert {alias["alias"] for alias in sent[0][1]["aliases"]} == {"latest", "best"}
    assert not any(b"own words" in data for data in online.uploads.values())


def test_a_run_killed_online_and_resumed_has_each_row_once(online, folder):
    # killed after its last checkpoint at 100
    session(folder, 0, [(0, 3.0), (100, 2.0), (120, 1.9), (140, 1.8)])
    session(folder, 100, [(120, 1.9), (140, 1.8), (160, 1.3)])
    uploaded(online, folder)


@pytest.mark.slow
def test_rows_from_before_the_tracking_arrive_too(online, folder, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    session(folder, 0, [(0, 3.0), (100, 2.0)], wandb_log=False)
    session(folder, 100, [(120, 1.5), (200, 1.0)])
    session(folder, 120, [(200, 1.0)])  # killed; resumes and logs the same row again
    assert "complete up to iter 200" in sync(online, folder)
    # a state left by earlier versions: W&B rejects rows older than its last one
    del online.runs["x"]["history"][:2]
    refused = start(folder, online.url, "track.py", "sync", "out")
    assert "W&B has 2 of the run's 4 rows" in refused.communicate()[1] and refused.returncode == 2
    noted = folder / "out/wandb.json"
    noted.write_text(noted.read_text().replace('"x"', '"y"'))
    assert "run y is complete up to iter 200" in sync(online, folder)
    (folder / "out/log.jsonl").unlink()
    refused = start(folder, online.url, "track.py", "sync", "out")
    assert ("out: its log.jsonl is gone; upload what the client wrote with: wandb sync /"
            in refused.communicate()[1])


@pytest.mark.slow
def test_a_model_gets_the_time_its_upload_needs_and_only_what_stands_still_is_given_up(
        online, folder, monkeypatch, capfd):
    monkeypatch.setattr(background, "FINISH_SECONDS", round(usual(5)))
    model, family = folder / "model.gguf", []
    model.write_bytes(os.urandom(12_000_000))

    def track_one(name, speed):
        tracker = track.make_tracker(track.Session(folder / "out", {}, named(name)), ["wandb"])
        tracker.log({"iter": 0, "tokens": 0, "loss/val": 1.0})
        tracker.model(folder / "none.gguf", {}, ["latest"])
        online.speed = speed
        tracker.model(model, {"loss/val": 1.0}, ["best"])
        begin = time.monotonic()
        family[:] = tracker.destinations[1].process.processes()
        tracker.finish()
        return time.monotonic() - begin, capfd.readouterr().err

    def state(pid):
        stat = Path(f"/proc/{pid}/stat")
        return stat.read_text().rpartition(")")[2].split()[0] if stat.exists() else "X"

    seconds, err = track_one("slow", 1_500_000)
    assert seconds > 7
    assert online.runs["slow"]["exit"] == 0
    assert model.read_bytes() in online.uploads.values()
    assert "none.gguf does not exist; no model is recorded" in err and err.count("warning") == 1
    assert "upload: 100%" in err
    seconds, err = track_one("stuck", 0)
    assert seconds < usual(30)
    assert f"no progress for {background.FINISH_SECONDS} s" in err
    assert "track.py sync" in err
    end = time.monotonic() + 20
    while any(state(pid) not in "ZX" for pid in family):
        assert len(family) == 2 and time.monotonic() < end
        time.sleep(0.1)


@pytest.mark.parametrize(
    "fault, faulty, said", ids=["unauthorized", "rows not found", "garbage"], argvalues=[
        (401, "", "warning: could not find out which of the run's 30 rows W&B has "
                  "(OSError: {url} answers with an error: "),
        (404, "file_stream", "warning: W&B has 0 of the run's 30 rows; "),
        (b"<html>Welcome to the hotel's network</html>", "",
         "warning: could not find out which of the run's 30 rows W&B has")])
def test_a_server_that_refuses_in_mid_run_is_told_of_at_the_end(online, folder, capfd, monkeypatch,
                                                                fault, faulty, said):
    """The W&B client gives up silently; track.py warns, and its command sends the missing rows."""
    monkeypatch.setattr("engine.tracking.tracker.START_SECONDS", 60)
    tracker = session(folder, 0, [(0, 3.0)], finished=False)
    online.fault, online.faulty = fault, faulty
    for i in range(1, 30):
        tracker.log({"iter": i, "tokens": i, "loss/val": 1.0})
    tracker.finish()
    err = [line for line in capfd.readouterr().err.splitlines() if "warning" in line]
    assert len(err) == 1 and said.format(url=online.url) in err[0], err
    assert err[0].endswith(f"; send what is missing with: python track.py sync {folder / 'out'}")
    online.fault = None
    if fault == 404:
        assert "complete up to iter 29" in sync(online, folder)


def test_a_model_whose_upload_fails_is_told_of_and_the_run_is_whole(online, folder, capfd,
                                                                    monkeypatch):
    monkeypatch.setattr("engine.tracking.tracker.START_SECONDS", 60)
    tracker = session(folder, 0, [(0, 3.0)], finished=False)
    online.fault, online.faulty = 403, "/A"  # path of artifact files
    (folder / "out/model.gguf").write_bytes(os.urandom(1000))
    tracker.model(folder / "out/model.gguf", {"loss/val": 1.0}, ["best"])
    tracker.finish()
    err = [line for line in capfd.readouterr().err.splitlines() if "warning" in line]
    assert len(err) == 1 and f"{folder}/out/model.gguf is not in W&B (" in err[0], err
    assert "; send it with: wandb artifact put --type=model --name=p/model-x" in err[0]
    uploaded(online, folder)


def test_a_program_that_dies_leaves_a_run_that_failed_with_its_last_words(online, folder):
    program = (
        f"import sys, time; sys.path.insert(0, {str(ROOT)!r}); import track\n"
        "import engine.tracking.tracker; engine.tracking.tracker.START_SECONDS = 60\n"
        f"tracker = track.make_tracker(track.Session('out', {{}}, {named('x')}), ['wandb'])\n"
        "tracker.log({'iter': 0, 'tokens': 0})\nprint('bar 1\\rbar 2')\n"
        "for i in range(5000): print(i)\n1 / 0")
    done = subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True,
                          text=True)
    assert "ZeroDivisionError" in done.stderr and done.returncode == 1
    end = time.monotonic() + 60
    run = online.runs["x"]
    # these arrive in any order
    while (run["exit"] is None or not run["history"]
           or "Zero" not in "".join(run["output"][-1:])):
        assert time.monotonic() < end
        time.sleep(0.1)
    output = run["output"]
    assert run["exit"] == 1 and len(run["history"]) == 1
    assert sum(line.endswith(" bar 2") for line in output) == 1
    assert [line.split()[1] for line in output
            if line[-1].isdigit() and " bar" not in line] == [str(i) for i in range(5000)]


def test_rows_that_were_logged_while_the_client_was_starting_arrive_once(
        online, folder, monkeypatch):
    """These rows are in log.jsonl when the client starts, and also in its queue."""
    monkeypatch.setattr("engine.tracking.tracker.START_SECONDS", 0)
    tracker = track.make_tracker(track.Session(folder / "out", {}, named("slow")), ["wandb"])
    for i in range(3):
        tracker.log({"iter": i, "tokens": i, "loss/val": 1.0,
                     "samples": [["once", "greedy", f"upon {i}"]]})
    tracker.finish()
    tables = [json.loads(data) for name, data in online.uploads.items()
              if name.startswith("A") and "samples" in name]
    assert sorted(row[0] for table in tables for row in table["data"]) == [0, 1, 2]
    assert [row["iter"] for row in online.runs["slow"]["history"]] == [0, 1, 2]


def wandb_tool(folder, url, *words):
    env = {k: v for k, v in os.environ.items() if not k.startswith("WANDB")}
    # PATH: the agent starts trials with the first `python` in it
    env |= {
        "OMP_NUM_THREADS": "1", "HOME": str(folder), "WANDB_API_KEY": KEY, "WANDB_BASE_URL": url,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    }
    done = subprocess.run([sys.executable, "-m", "wandb", *words], cwd=folder, env=env,
                          stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
def test_a_login_at_a_server_of_ones_own_counts_and_so_does_a_proxy(server, folder):
    """`wandb login --host=...` stores the address in a settings file and the key in netrc."""
    env = {k: v for k, v in os.environ.items()
           if not k.startswith("WANDB") and "proxy" not in k.lower()}
    env |= {"HOME": str(folder), "NETRC": str(folder / "keys")}

    def run(*words, **more):
        return subprocess.run([sys.executable, *words], cwd=folder, env=env | more,
                              stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)

    def tracked(name, **more):
        return run(str(ROOT / "track.py"), f"--name={name}", "--", "echo", "step 1: loss 2.5",
                   WANDB_RUN_ID=name, **more).stdout

    assert "offline (no API key)" in tracked("before")
    done = run("-m", "wandb", "login", f"--host={server.url}", KEY)
    assert done.returncode == 0 and KEY in (folder / "keys").read_text(), done.stderr
    assert "W&B online (API key found)" in tracked("own")
    assert [row["loss/train"] for row in server.runs["own"]["history"]] == [2.5]
    assert server.keys == {KEY}
    assert not server.proxied
    own = folder / "wandb/settings"
    own.write_text("[default]\nbase_url = http://wandb.test\n")
    (folder / "keys").write_text(f"machine wandb.test\n login user\n password {KEY}\n")
    assert "offline (http://wandb.test does not answer)" in tracked("nowhere")
    assert "W&B online (API key found)" in tracked("proxied", HTTP_PROXY=server.url)
    assert [row["loss/train"] for row in server.runs["proxied"]["history"]] == [2.5]
    assert server.proxied
    assert ("offline (http://wandb.test does not answer)"
            in tracked("gone", HTTP_PROXY="http://127.0.0.1:9"))
    own.write_text("[default]\nmode = offline\n")  # as `wandb offline` writes it
    assert ("offline (W&B's settings)"
            in tracked("asked", WANDB_BASE_URL=server.url, WANDB_API_KEY=KEY))
    assert set(server.runs) == {"own", "proxied"}


@pytest.mark.slow
def test_a_sweep_runs_under_the_agent(server, folder):
    """With `wandb sweep` and `wandb agent`, every trial is a run with the id the agent gave it."""
    sweep = yaml.safe_load((ROOT / "sweeps/grid.yaml").read_text())
    tiny = dict(word.removeprefix("--").split("=") for word in TINY)
    sweep["program"] = str(ROOT / "train.py")
    sweep["parameters"] = ({name: {"value": value} for name, value in tiny.items()}
                           | sweep["parameters"])
    (folder / "grid.yaml").write_text(yaml.dump(sweep))
    assert ("wandb agent me/llamac/sweep1"
            in wandb_tool(folder, server.url, "sweep", "--project=llamac", "grid.yaml"))
    assert yaml.safe_load(server.sweep)["parameters"] == sweep["parameters"]
    fixed = {name: one["value"] for name, one in sweep["parameters"].items() if "value" in one}
    server.trials = [
        (f"trial{n}", fixed | {"max_iters": 10, "batch_size": n, "learning_rate": 0.001})
        for n in (2, 4)]
    told = wandb_tool(folder, server.url, "agent", "me/llamac/sweep1")
    assert sorted(server.runs) == ["trial2", "trial4"], told
    for n in (2, 4):
        run = server.runs[f"trial{n}"]
        assert [row["iter"] for row in run["history"]] == [0, 5, 10] and run["exit"] == 0
        assert run["history"][-1]["tokens"] == 10 * n * 32
