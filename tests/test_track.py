"""Tracking, read back from what the real W&B client wrote and from the JSON lines."""
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import track

ROOT = Path(__file__).resolve().parents[1]


def run(folder, *args, **env):
    clean = {k: v for k, v in os.environ.items() if not k.startswith("WANDB")} | {"OMP_NUM_THREADS": "1"}
    tiny = ["--data=my.txt", "--vocab_source=byte", "--dim=32", "--n_layers=2", "--n_heads=2", "--max_seq_len=32",
            "--batch_size=4", "--max_iters=20", "--log_interval=5", "--eval_iters=4", "--eval_interval=10", "--device=cpu"]
    return subprocess.run([sys.executable, str(ROOT / "train.py"), *tiny, *args], cwd=folder, env=clean | env,
                          capture_output=True, text=True, stdin=subprocess.DEVNULL)


def records(path):
    """The records of an offline W&B run, as its own reader prints them."""
    out = subprocess.run([Path(sys.executable).with_name("wandb"), "leet", "inspect", "--json", path],
                         capture_output=True, text=True, check=True).stdout
    return [json.loads(line) for line in out.splitlines()]


def nested(items):
    """{key: value} of a history or config record."""
    return {item.get("key") or "/".join(item["nested_key"]): json.loads(item["value_json"]) for item in items}


@pytest.fixture(scope="module")
def tracked(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tracked")
    (folder / "my.txt").write_text("the cat sat on the mat and the dog ran under a tree. " * 600)
    done = run(folder, "--wandb_log=True", "--wandb_run_name=my first run", HOME=str(folder))
    assert done.returncode == 0, done.stderr
    log = next((folder / "wandb").glob("offline-run-*/*.wandb"))
    return folder, done, records(log)


def of_type(tracked, kind):
    return [record[kind] for record in tracked[2] if record["type"] == kind]


def rows(tracked):
    return [json.loads(line) for line in (tracked[0] / "out/log.jsonl").read_text().splitlines()]


def test_without_a_key_it_is_offline_and_says_how_to_upload(tracked):
    line = next(line for line in tracked[1].stdout.splitlines() if line.startswith("tracking:"))
    assert "offline (no API key)" in line and "wandb sync wandb/offline-run-" in line
    assert tracked[1].stderr == "" or "warning" not in tracked[1].stderr


def test_the_whole_configuration_is_recorded(tracked):
    run_record = of_type(tracked, "run")[0]
    config = run_record["config"]["update"]
    assert run_record["display_name"] == "my first run" and run_record["run_id"].startswith("my-first-run-")
    assert config["dim"] == 32 and config["learning_rate"] == 0.003 and config["data"] == "my.txt"
    assert config["n_params"] > 10_000 and config["model_args"]["hidden_dim"] > 0 and config["mfu_basis"]
    assert len(config["dataset"]["fingerprint"]) == 64


def test_every_scalar_of_the_jsonl_is_in_wandb_with_tokens_as_axis(tracked):
    history = [{k: v for k, v in record.items()} for record in of_type(tracked, "history")]
    text = json.dumps(history)
    for row in rows(tracked):
        for key in row.keys() - {"time"}:
            assert key in text
    metrics = {m.get("name", m.get("glob_name")): m for m in of_type(tracked, "metric")}
    assert metrics["*"]["step_metric"] == "tokens" and metrics["loss/val"]["summary"] == {"last": True, "min": True}


def test_the_exported_model_is_an_artifact_and_samples_are_a_table(tracked):
    artifacts = of_type(tracked, "artifact")
    model = [a for a in artifacts if a["type"] == "model"]
    assert len(model) == 1 and set(model[0]["aliases"]) == {"best", "latest"}
    assert any(entry["path"] == "model.gguf" and entry["size"] == str((tracked[0] / "out/model.gguf").stat().st_size)
               for entry in model[0]["manifest"]["contents"])
    tables = list((tracked[0] / "wandb").rglob("samples*.table.json"))
    data = [json.loads(path.read_text()) for path in tables]
    assert data[0]["columns"] == ["iter", "tokens", "prompt", "text"]
    written = [row[:2] for table in data for row in table["data"]]
    assert sorted(map(tuple, written)) == [(0, 0), (10, 1280), (20, 2560)]


def test_without_wandb_log_nothing_of_it_is_written(tmp_path, tracked):
    (tmp_path / "my.txt").write_text((tracked[0] / "my.txt").read_text())
    done = run(tmp_path, "--max_iters=2")
    assert done.returncode == 0 and not (tmp_path / "wandb").exists()
    assert (tmp_path / "out/log.jsonl").exists()


def test_a_key_and_no_server_is_offline(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    assert track.wandb_mode() == ("offline", "http://127.0.0.1:9 does not answer")


def test_the_mode_the_user_set_counts(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert track.wandb_mode()[0] == "disabled"


class Broken:
    def __init__(self):
        self.calls = 0

    def log(self, row):
        self.calls += 1
        raise OSError(28, "No space left on device")


def test_a_destination_that_fails_is_given_up_with_one_warning(tmp_path, capsys):
    broken, jsonl = Broken(), track.Jsonl(tmp_path, {}, 0)
    tracker = track.Tracker([broken, jsonl])
    for step in range(3):
        tracker.log({"iter": step, "tokens": step})
    tracker.finish()
    assert broken.calls == 1 and capsys.readouterr().err.count("No space left") == 1
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 3


def test_jsonl_continues_without_gap_or_doubled_row(tmp_path):
    path = tmp_path / "log.jsonl"
    log = track.Jsonl(tmp_path, {}, 0)
    for step in range(0, 50, 10):
        log.log({"iter": step, "loss/train": float("nan") if step == 10 else 1.0})
    log.finish()
    path.write_text(path.read_text() + '{"iter": 50, "loss/tr')  # killed while it wrote
    log = track.Jsonl(tmp_path, {}, 30)
    log.log({"iter": 40})
    log.finish()
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["iter"] for row in found] == [0, 10, 20, 30, 40] and found[1]["loss/train"] == "nan"
