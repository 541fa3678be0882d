"""llamac.runs: logs as plain lists and dicts, without PyTorch."""
import json
import subprocess
import sys

import pytest

import llamac
from tests.conftest import ROOT
from tests.test_compare import write_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("logs")
    write_run(folder / "out", "a", 2.5, seed=1)
    write_run(folder / "out", "b", 2.25, seed=2, dim=96)
    with open(folder / "out/b/log.jsonl", "a") as log:
        log.write('{"iter": 41, "time": 1000000005, "loss/train": "nan", "grad/norm": 0.5, '
                  '"samples": [["a", "b", "c"]]}\n')
    return folder


def test_rows_are_those_of_the_log(folder):
    rows = llamac.runs(folder / "out").rows("loss/val")
    assert rows[3] == {
        "run": str(folder / "out/a"), "iter": 30, "tokens": 3000, "seconds": 3.0,
        "loss/val": pytest.approx(2.6)
    }
    assert len(rows) == 10 and json.loads(json.dumps(rows)) == rows
    both = llamac.runs(folder / "out/b").rows("loss/val", "grad/norm")
    assert len(both) == 6 and both[0]["grad/norm"] is None
    assert both[-1] == {
        "run": str(folder / "out/b"), "iter": 41, "tokens": None, "seconds": 5.0, "loss/val": None,
        "grad/norm": 0.5
    }
    assert set(llamac.runs(folder / "out/b").rows()[-1]) == {
        "run", "iter", "tokens", "seconds", "loss/train", "loss/val", "bpb/val", "grad/norm"
    }


def test_results_and_settings_are_dicts(folder):
    found = llamac.runs(folder / "out/b", folder / "out/a")
    assert [(one["seed"], one["best loss/val"]) for one in found.results()] == [(2, 2.25), (1, 2.5)]
    assert len(found) == 2
    assert [one["dim"] for one in found.settings()] == [96, 64]
    assert [run.name for run in found] == [one["run"] for one in found.results()]


def test_it_needs_no_pytorch_and_leaves_the_program_alone(folder):
    code = (
        "import sys\nfor name in 'torch', 'wandb', 'pandas': sys.modules[name] = None\n"
        "import llamac\nassert 'engine' not in sys.modules\n"
        "sys.excepthook = hook = lambda *a: None\n"
        "print(len(llamac.runs().rows('loss/val')), sys.excepthook is hook)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True,
                          env={"PYTHONPATH": str(ROOT)})
    assert done.stdout == "10 True\n" and not done.stderr


def test_what_is_no_run_is_left_out_or_an_error(folder, tmp_path):
    (tmp_path / "log.jsonl").touch()
    assert len(llamac.runs(tmp_path, folder / "out")) == 2
    with pytest.raises(llamac.Error, match="nowhere: not a run"):
        llamac.runs(tmp_path / "nowhere", tmp_path)
