"""
Run SwanLab and trackio: their own readers find the rows of log.jsonl. Needs: pip install swanlab
trackio.
"""
import json
import os
import subprocess
import sys
import time

from swanlab.proto.swanlab.record.v1.record_pb2 import Record
from swanlab.sdk.internal.core_python.store import DataStoreReader

import track
from tests.conftest import ROOT

ROWS = 500


def numbers(row):
    return {k: v for k, v in row.items()
            if isinstance(v, (int, float)) and k not in ("time", "step", "timestamp")}


def swanlab_records(path):
    """
    Return all records of a file once it is finished, after 60 s at most: the client may outlive the
    training by a moment.
    """
    for _ in range(120):
        reader = DataStoreReader()
        reader.open(str(path))
        records = [Record.FromString(data) for data in reader]
        if records[-1].WhichOneof("record_type") == "finish":
            break
        time.sleep(0.5)
    return records


def test_rows_read_back_are_the_logs(tmp_path):
    (tmp_path / "out").mkdir()
    env = os.environ | {"TRACKIO_DIR": str(tmp_path / "trackio"), "HOME": str(tmp_path),
                        "SWANLAB_MODE": "offline"}
    done = subprocess.run([sys.executable, "-m", "tests.trackers", tmp_path / "out", str(ROWS)],
                          cwd=ROOT, env=env, text=True, capture_output=True)
    print(done.stdout, done.stderr)
    assert (done.returncode, done.stderr) == (0, "")
    # On a busy machine, a client may start too late to print its own message.
    for name, said in ("SwanLab", "SwanLab offline"), ("trackio", "trackio show"):
        assert said in done.stdout or f"{name} is still starting" in done.stdout
    logged = track.read_rows(tmp_path / "out/log.jsonl")
    assert len(logged) == ROWS

    read = (
        "import json; from trackio.sqlite_storage import SQLiteStorage as s; "
        "print(json.dumps([s.get_logs('llamac', 'run-ab12'), "
        "s.get_run_config('llamac', 'run-ab12')]))")
    until = time.monotonic() + 60
    while True:  # the client's process may outlive the training
        found = subprocess.run([sys.executable, "-c", read], env=env, text=True,
                               capture_output=True, check=True).stdout
        rows, config = json.loads(found)
        if len(rows) >= ROWS or time.monotonic() > until:
            break
        time.sleep(0.5)
    assert [numbers(row) for row in rows] == [numbers(row) for row in logged]
    assert config["lr"] == 0.1
    assert [row["step"] for row in rows] == [row["iter"] for row in logged]
    assert [row["tables/samples"]["_value"][0]["text"]
            for row in rows if "tables/samples" in row] == [
        row["samples"][0][2] for row in logged if "samples" in row]
    assert rows[0]["logits/histogram"]["values"] == [1, 2]
    assert rows[0]["logits/histogram"]["bins"] == [0, 1, 2]

    found, media = {}, []
    for record in swanlab_records(next((tmp_path / "out/swanlab").glob("run-*/*.swanlab"))):
        if record.WhichOneof("record_type") == "scalar":
            found.setdefault(record.scalar.step, {})[record.scalar.key] = record.scalar.value.number
        elif record.WhichOneof("record_type") == "media":
            media.append(record.media)
    assert [found[step] for step in sorted(found)] == [numbers(row) for row in logged]
    assert [m.step for m in media] == list(range(0, ROWS, 10))
    assert {m.key for m in media} == {"tables/samples"}
    took = json.loads(done.stdout.splitlines()[-1])
    assert took["start"] < 5 and took["row"] < 1 and took["end"] < 5, took


def test_trackio_has_each_row_of_a_killed_and_resumed_run_once(tmp_path):
    session = (
        "import sys, time, track, engine.tracking.tracker; "
        "engine.tracking.tracker.START_SECONDS = 60; "
        "step, first, end = map(int, sys.argv[1:]); "
        "run = {'id': 'x-1', 'project': 'p', 'name': 'x'}; "
        "t = track.make_tracker(track.Session('.', {}, run, step), ['trackio']); "
        "[t.log({'iter': i, 'tokens': i, 'loss/val': 2.0}) for i in range(first, end)]; "
        "t.finish(); time.sleep(3)")
    read = ("from trackio.sqlite_storage import SQLiteStorage as s; "
            "print([row['step'] for row in s.get_logs('p', 'x-1')])")
    env = os.environ | {"TRACKIO_DIR": str(tmp_path / "trackio"), "HOME": str(tmp_path),
                        "PYTHONPATH": str(ROOT)}
    # The second session resumes after its last checkpoint, that of iteration 2.
    for words in ("0", "0", "5"), ("2", "3", "8"):
        subprocess.run([sys.executable, "-c", session, *words], cwd=tmp_path, env=env, check=True)
    found = subprocess.run([sys.executable, "-c", read], env=env, text=True, capture_output=True,
                           check=True).stdout
    assert (json.loads(found) == list(range(8))
            == [row["iter"] for row in track.read_rows(tmp_path / "log.jsonl")])
