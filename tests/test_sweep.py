"""Sweep files, run here with a trainer that only pretends, and read the way `wandb agent` does."""
import importlib.util
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from wandb.sdk.launch.sweeps import utils as agent

import compare
import sweep
import train
from configurator import configure

ROOT = Path(__file__).resolve().parents[1]
TRAINER = """
import json, os, sys
from pathlib import Path
given = dict(word[2:].split("=", 1) for word in sys.argv[1:])
if given.get("stop") == given["x"]:
    sys.exit(130)
folder = Path(given["out_dir"])
if (folder / "log.jsonl").exists():
    sys.exit(0)
folder.mkdir(parents=True)
x = float(given["x"])
if given.get("fail") == given["x"]:
    sys.exit(2)
(folder / "config.json").write_text(json.dumps({"x": x, "y": given.get("y")}))
(folder / "log.jsonl").write_text(json.dumps({"iter": 1, "tokens": 1, "time": 0, "loss/val": (x - 0.3) ** 2 + 1}) + "\\n")
with open("calls", "a") as f:
    f.write(" ".join(sorted(sys.argv[1:])) + "\\n")
"""

STOPPABLE = """
import signal, sys, time
from pathlib import Path
folder = Path(dict(word[2:].split("=", 1) for word in sys.argv[1:])["out_dir"])
stop = []
for signum in signal.SIGINT, signal.SIGTERM:
    signal.signal(signum, lambda *which: stop.append(which))
folder.mkdir(parents=True)
(folder / "started").touch()
while not stop:
    time.sleep(0.01)
time.sleep(0.5)  # a step, its checkpoint, an evaluation
(folder / "saved").touch()
"""


def run(folder, content, *words):
    (folder / "fake.py").write_text(TRAINER)
    (folder / "s.yaml").write_text(yaml.safe_dump({"program": "fake.py"} | content))
    return subprocess.run([sys.executable, str(ROOT / "sweep.py"), "s.yaml", "--out_dir=o", *words], cwd=folder,
                          capture_output=True, text=True)


def tried(folder):
    return [dict(word[2:].split("=", 1) for word in line.split()) for line in (folder / "calls").read_text().splitlines()]


def test_a_grid_tries_every_combination_once_and_continues(tmp_path):
    content = {"method": "grid", "parameters": {"x": {"values": [0.1, 0.2]}, "y": {"values": ["a", "b", "c"]}}}
    assert run(tmp_path, content, "--count=4").returncode == 0
    done = run(tmp_path, content)
    assert done.returncode == 0, done.stderr
    assert [(t["x"], t["y"]) for t in tried(tmp_path)] == [(x, y) for x in ("0.1", "0.2") for y in "abc"]
    table = [line.split() for line in done.stdout.splitlines()[-7:]]
    assert table[0][0] == "run" and [row[0] for row in table[1:]] == ["o/3", "o/4", "o/5", "o/0", "o/1", "o/2"]


def test_a_changed_sweep_does_not_take_the_trials_of_the_one_before_for_its_own(tmp_path):
    content = {"method": "random", "run_cap": 1, "parameters": {"x": {"min": 0.0, "max": 1.0}, "y": {"values": ["a"]}}}
    assert run(tmp_path, content).returncode == run(tmp_path, content).returncode == 0
    before, x = (tmp_path / "calls").read_text(), tried(tmp_path)[0]["x"]
    changed = content | {"parameters": {"x": {"values": [5]}, "y": {"values": ["a"]}}}
    for another, words, value in (changed, [], "x=5"), (content, ["--seed=2"], "x=0."):
        done = run(tmp_path, another, *words)
        assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
        assert f"o/0: holds a trial with x={x}, this sweep's has {value}" in done.stderr and "another --out_dir" in done.stderr
    assert (tmp_path / "calls").read_text() == before
    assert run(tmp_path, changed | {"parameters": {"x": {"values": [x]}, "y": {"values": ["a"]}}}).returncode == 0


def test_values_are_the_same_however_they_are_written(tmp_path, monkeypatch):
    (tmp_path / "0").mkdir()
    (tmp_path / "0/config.json").write_text(json.dumps({"learning_rate": 1.0, "dim": 64, "tie_embeddings": True, "batch_size": 32}))
    values = {"learning_rate": "1e0", "dim": 64.0, "tie_embeddings": "yes", "batch_size": 0, "dropout": 0.1}
    found = {"program": str(ROOT / "train.py"), "parameters": {name: {"values": [value]} for name, value in values.items()}}
    sweep.refuse_other(found, values, tmp_path / "0")  # batch_size=0: the trainer has found 32
    for other in {"dim": 32}, {"tie_embeddings": False}, {"learning_rate": 0}, {"batch_size": 16}:
        with pytest.raises(SystemExit):
            sweep.refuse_other(found, values | other, tmp_path / "0")


NOTED = """
import json, os, sys
with open("noted", "a") as f:
    f.write(json.dumps([sys.argv, {k: v for k, v in os.environ.items() if k.startswith("WANDB")}]) + "\\n")
"""


@pytest.mark.parametrize("form", ["args", "args_no_hyphens", "args_no_equals", "args_no_boolean_flags", "args_json", "args_append_hydra",
                                  "args_override_hydra"])
def test_a_command_becomes_the_words_that_the_agent_makes_of_it(form, monkeypatch):
    """The agent's own functions are the oracle."""
    monkeypatch.setenv("MY_RATE", "0.5")
    command = ["${env}", "${interpreter}", "-X", "dev", "${program}", "--rate=${envvar:MY_RATE}", f"${{{form}}}", 3]
    values = {"x": 0.1, "tie_embeddings": True, "compile": False, "name": "two words"}
    theirs = agent.create_sweep_command_args({"args": {k: {"value": v} for k, v in values.items()}})
    theirs |= {"env": ["/usr/bin/env"], "interpreter": [sys.executable], "program": ["train.py"]}
    expected = []
    for word in map(str, agent.create_sweep_command(list(command))):
        expected += theirs[word[2:-1]] if word.startswith("${") else [word]
    monkeypatch.setattr(sweep, "program", lambda sweep: "train.py")
    assert sweep.command_of({"command": command}, values) == (expected, {})
    monkeypatch.setenv("MY_RATE", "${no name of a macro}")
    assert sweep.command_of({"command": ["${envvar:MY_RATE}"]}, values) == (["${no name of a macro}"], {})


def test_what_a_sweep_file_says_is_done(tmp_path):
    """Its command's flags, its project, its names, its target, and the model that its trials begin from."""
    program = TRAINER.replace('with open("calls"', NOTED + 'with open("calls"').replace("sys.argv[1:])", "sys.argv[2:])", 1)
    content = {"program": "fake.py", "method": "grid", "name": "two rates", "description": "which one?", "project": "mine", "entity": "us",
               "command": ["${env}", "A=b", "${interpreter}", "${program}", "first", "${args}", "--y=3"],
               "metric": {"name": "loss/val", "goal": "minimize", "target": 1.01},
               "parameters": {"x": {"values": [0.1, 0.25, 0.3]}, "init_from": {"values": ["base", "scratch"]}}}
    (tmp_path / "fake.py").write_text(program)
    (tmp_path / "s.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    command = [sys.executable, str(ROOT / "sweep.py"), "s.yaml", "--out_dir=o"]
    for _ in range(2):  # the second time nothing is left to do
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        noted = [json.loads(line) for line in (tmp_path / "noted").read_text().splitlines()]
        assert [words[1:] for words, _ in noted] == [
            ["first", f"--x={x}", f"--init_from={origin}", f"--out_dir=o/{n}", "--y=3"]
            for n, (x, origin) in enumerate([(0.1, "base"), (0.1, "auto"), (0.25, "base")])]
        assert all(env == env | {"WANDB_PROJECT": "mine", "WANDB_ENTITY": "us"} for _, env in noted)
        assert done.stdout.startswith("two rates: which one?\n")
        assert "loss/val has reached its target of 1.01: the sweep ends" in done.stdout


def test_random_values_follow_their_distributions_and_the_seed(tmp_path):
    content = {"method": "random", "run_cap": 5, "parameters": {"x": {"min": 0.0, "max": 1.0}}}
    assert run(tmp_path, content).returncode == 0
    first = [t["x"] for t in tried(tmp_path)]
    other = tmp_path / "other"
    other.mkdir()
    run(other, content)
    assert len(set(first)) == 5 and first == [t["x"] for t in tried(other)]
    rng = random.Random(0)

    def draws(**spec):
        return [sweep.draw(spec, rng) for _ in range(2000)]

    rates = draws(distribution="log_uniform_values", min=1e-4, max=1e-2)
    assert 1e-4 <= min(rates) and max(rates) <= 1e-2 and 0.45 < sum(r < 1e-3 for r in rates) / 2000 < 0.55
    assert set(draws(distribution="q_uniform", min=0, max=30, q=10)) == {0, 10, 20, 30}
    assert set(draws(min=2, max=4)) == {2, 3, 4} and {type(v) for v in draws(min=2, max=4)} == {int}
    assert 0.85 < draws(values=["a", "b"], probabilities=[0.9, 0.1]).count("a") / 2000 < 0.95
    assert set(draws(distribution="q_uniform", min=0.0, max=1.0, q=0.5)) == {0.0, 0.5, 1.0}
    assert set(draws(distribution="int_log_uniform_values", min=1, max=3)) == {1, 2, 3}
    assert set(draws(value=7)) == {7}


def test_numbers_as_people_write_them_are_numbers(tmp_path, monkeypatch):
    """YAML 1.1 takes 1e-4, without a point, for a text."""
    text = """{program: train.py, method: random, parameters: {learning_rate: {distribution: log_uniform_values, min: 1e-4, max: 2e-2},
              beta2: {min: 1e-1, max: 0.5}, dim: {distribution: int_uniform, min: 1e1, max: 1e2}, embedding_lr_scale: {values: [1e0, 2]},
              warmup_iters: {distribution: q_uniform, min: 0, max: 1e2, q: 1e1}, data: {values: [1e3]}}}"""
    monkeypatch.setattr(sweep, "file", "s.yaml")
    content = yaml.safe_load(text)
    sweep.check(content)
    drawn = [{k: sweep.draw(spec, random.Random(n)) for k, spec in content["parameters"].items()} for n in range(200)]
    assert 1e-4 <= min(d["learning_rate"] for d in drawn) < 2e-4 < 1e-2 < max(d["learning_rate"] for d in drawn) <= 2e-2
    assert {d["warmup_iters"] for d in drawn} == {*range(0, 101, 10)} and {d["embedding_lr_scale"] for d in drawn} == {1.0, 2.0}
    assert {type(d["dim"]) for d in drawn} == {int} and drawn[0]["data"] == "1e3"


def test_what_optuna_is_asked_for_keeps_to_the_file():
    class Trial:
        suggest_categorical = suggest_int = suggest_float = lambda self, *words, **more: (words, more)

    wide = {"min": 1, "max": 9}
    assert sweep.suggest("x", {"value": 3}, Trial()) == 3
    assert sweep.suggest("x", {"values": [4, 5]}, Trial()) == (("x", [4, 5]), {})
    assert sweep.suggest("x", wide, Trial()) == (("x", 1, 9), {"log": False})
    assert sweep.suggest("x", wide | {"distribution": "int_log_uniform_values"}, Trial()) == (("x", 1, 9), {"log": True})
    assert sweep.suggest("x", wide | {"distribution": "log_uniform_values"}, Trial()) == (("x", 1, 9), {"log": True})


def test_a_trial_that_fails_does_not_end_the_sweep(tmp_path):
    done = run(tmp_path, {"method": "grid", "parameters": {"x": {"values": [0.1, 0.2, 0.3]}, "fail": {"value": 0.2}}})
    assert done.returncode == 0 and "trial 1 failed with code 2" in done.stdout
    assert [t["x"] for t in tried(tmp_path)] == ["0.1", "0.3"]


def test_a_trial_that_is_stopped_stops_the_sweep(tmp_path):
    done = run(tmp_path, {"method": "grid", "parameters": {"x": {"values": [0.1, 0.2, 0.3]}, "stop": {"value": 0.2}}})
    assert done.returncode == 2 and "trial 1 was stopped" in done.stderr and "trial 2" not in done.stdout
    assert "trial 1: x=0.2\n" in done.stdout  # what all have in common is left out


@pytest.mark.parametrize("signum, to_all", [(signal.SIGINT, True), (signal.SIGTERM, False), (signal.SIGTERM, True)])
def test_a_sweep_that_is_stopped_waits_until_its_trial_has_saved(tmp_path, signum, to_all):
    """A terminal sends Ctrl-C to both, the page SIGTERM to both, kill to the sweep alone."""
    (tmp_path / "slow.py").write_text(STOPPABLE)
    (tmp_path / "s.yaml").write_text("{program: slow.py, method: grid, parameters: {x: {values: [1, 2]}}}")
    with subprocess.Popen([sys.executable, str(ROOT / "sweep.py"), "s.yaml", "--out_dir=o"], cwd=tmp_path, text=True,
                          start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                          preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler)) as p:
        while not (tmp_path / "o/0/started").exists():
            time.sleep(0.01)
        (os.killpg if to_all else os.kill)(p.pid, signum)
        said = p.communicate()[1]
    assert (tmp_path / "o/0/saved").exists() and not (tmp_path / "o/1").exists()
    assert p.returncode == 128 + signum and said == "stopped in trial 0; the same command continues the sweep\n"


def test_the_best_value_is_the_goals():
    found = compare.Run("x")
    for i, row in enumerate(({"acc": 0.125, "loss/val": 3.0}, {"acc": 0.5, "loss/val": "nan"}, {"acc": 0.25, "loss/val": 2.0})):
        found.add_row({"iter": i} | row)
    assert sweep.best_value({"metric": {"name": "acc", "goal": "maximize"}}, found) == 0.5
    assert sweep.best_value({"metric": {"name": "acc"}}, found) == 0.125 and sweep.best_value({}, found) == 2.0


def test_unknown_parameters_and_sweeps_without_results_end_in_one_line(tmp_path):
    grid = {"method": "grid", "parameters": {"x": {"values": [0.1]}, "fail": {"value": 0.1}}}
    for content, words, message in [
            (grid, [], "no trial logged a row"),
            (grid | {"program": "train.py", "parameters": {"lr": {"value": 1}}}, [], "'lr'; here it is 'learning_rate'"),
            (grid | {"program": "nowhere.py"}, [], "no program nowhere.py"),
            (grid, ["t.yaml"], "s.yaml and t.yaml: expected one sweep"),
            (grid, ["--count=-3"], "--count=-3: expected"), (grid, ["--counts=3"], "did you mean 'count'?"),
            ({"method": "grid", "metric": {"name": "acc"}, "parameters": {"x": {"value": 0.1}}}, ["--out_dir=p"],
             "no run has the metric 'acc'; expected one of iter")]:
        done = run(tmp_path, content, *words)
        assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_bayes_comes_nearer_to_the_best_or_says_what_it_needs(tmp_path):
    done = run(tmp_path, {"method": "bayes", "metric": {"name": "loss/val", "goal": "minimize"}, "run_cap": 25,
                          "parameters": {"x": {"min": -10.0, "max": 10.0}}})
    if importlib.util.find_spec("optuna") is None:
        assert done.returncode == 2 and "pip install optuna" in done.stderr
    else:
        far = [abs(float(t["x"]) - 0.3) for t in tried(tmp_path)]
        assert len(far) == 25 and sum(far[15:]) / 10 < sum(far[:10]) / 10


@pytest.mark.parametrize("name", ["grid", "random", "bayes"])
def test_the_sweeps_that_come_along_fit_the_agent_and_the_trainer(name, monkeypatch):
    content = yaml.safe_load((ROOT / f"sweeps/{name}.yaml").read_text())
    monkeypatch.setattr(sweep, "file", name)
    sweep.check(content)
    values = {k: sweep.draw(spec, random.Random(0)) for k, spec in content["parameters"].items()}
    words = agent.create_sweep_command_args({"args": {k: {"value": v} for k, v in values.items()}})["args"]
    settings = vars(train).copy()  # as the agent passes them, the trainer takes them
    assert configure(settings, argv=words).given.keys() == set(values)
    assert {k: settings[k] for k in values} == values and content["program"] == "train.py"


@pytest.mark.parametrize("change, message", [
    ({"method": "guess"}, "expected grid, random or bayes"), ({"parameters": {}}, "has no parameters"),
    ({"early_terminate": {"type": "hyperband"}}, "'early_terminate' is not known here"),
    ({"parameters": {"x": {"min": 1, "max": 2}}}, "a grid needs values"), ({"parameters": {"x": 3}}, "x is 3"),
    ({"method": "random", "parameters": {"x": {"min": 2, "max": 1}}}, "expected min <= max"),
    ({"method": "random", "parameters": {"x": {"min": 1.0, "max": 2.0, "distribution": "odd"}}}, "'odd'"),
    ({"method": "random", "parameters": {"x": {"min": 0, "max": 2.0, "distribution": "log_uniform_values"}}}, "expected above 0"),
    ({"method": "bayes"}, "bayes needs a metric"),
    ({"parameters": {"x": {"values": 3}}}, "x has values 3, expected a list"),
    ({"parameters": {"x": {"values": []}}}, "x has values [], expected a list"),
    ({"method": "random", "parameters": {"x": {"values": [1, 2], "probabilities": [1]}}}, "x has probabilities [1], expected 2 numbers"),
    ({"method": "random", "parameters": {"x": {"values": [1, 2], "probabilities": [0, 0]}}}, "expected 2 numbers"),
    ({"method": "random", "parameters": {"x": {"values": [1, 2], "probabilities": [2, -1]}}}, "expected 2 numbers"),
    ({"method": "random", "parameters": {"x": {"values": [1, 2], "probabilities": "ab"}}}, "expected 2 numbers"),
    ({"method": "random", "parameters": {"x": {"min": 1, "max": 9, "distribution": "q_uniform", "q": 0}}}, "x has q 0, expected above 0"),
    ({"method": "random", "parameters": {"x": {"min": "few", "max": 2}}}, "x has min 'few', expected a number"),
    ({"method": "random", "parameters": {"x": {"min": 1, "max": None}}}, "x has max None, expected a number"),
    ({"method": "random", "parameters": {"x": {"min": 1}}}, "x has no max"),
    ({"method": "random", "parameters": {"x": {"min": 1, "max": math.inf}}}, "x has max inf, expected a number"),
    ({"method": "random", "parameters": {"x": {"min": 1.5, "max": 3, "distribution": "int_uniform"}}}, "x has min 1.5, expected a whole"),
    ({"run_cap": "many"}, "run_cap is 'many', expected a whole number"), ({"run_cap": -1}, "run_cap is -1"),
    ({"program": None}, "no program None"), ({"program": 3}, "no program 3"), ({"program": "tests"}, "no program tests"),
    ({"metric": "loss/val"}, "metric is 'loss/val', expected "), ({"metric": {"name": "a", "goal": "maximise"}}, "'maximise'}, expected "),
    ({"metric": {"name": ["loss/val"]}}, "{'name': ['loss/val']}, expected "),
    ({"metric": {"name": "a", "impute": "best"}}, "metric has 'impute', which is not known here"),
    ({"metric": {"name": "a", "target": "low"}}, "'target': 'low'}, expected "),
    ({"command": "python train.py"}, "command is 'python train.py', expected a list"), ({"command": []}, "command is [], expected"),
    ({"command": ["${interpreter}", "${program}"]}, "command has no ${args}"),
    ({"command": ["${args}", "${args_json_file}"]}, "command has ${args_json_file}, expected one of ${env}, "),
    ({"command": ["${args}", "${envvar:NOT_HERE}"]}, "command has ${envvar:NOT_HERE}, but the environment has no NOT_HERE"),
    ({"command": ["${program}", "${args}", "--out-dir=here"]}, "command sets --out-dir=here, but the sweep gives"),
    ({"command": ["${program}", "${args}", "--init_from", "x"]}, "command sets --init_from, but the sweep gives"),
    ({"name": 3}, "name is 3, expected a text"), ({"project": ["a"]}, "project is ['a'], expected a text"),
    ({"parameters": {"out_dir": {"values": ["a", "b"]}}}, "expected value: the folder for all trials"),
    ({"parameters": {"x": {"values": [1], "probabilities": [1]}}}, "x has 'probabilities', which is not used with values in method grid"),
    ({"method": "bayes", "metric": {"name": "a"}, "parameters": {"x": {"values": [1, 2], "probabilities": [1, 0]}}}, "x has 'probabilities'"),
    ({"parameters": {"x": {"value": 1, "values": [2]}}}, "x has 'values', which is not used with a value"),
    ({"parameters": {"x": {"values": [1], "distribution": "q_uniform"}}}, "x has values and distribution 'q_uniform', expected categorical"),
    ({"method": "random", "parameters": {"x": {"min": 0.0, "max": 1.0, "q": 0.1}}}, "x has 'q', which is not used with a range of"),
    ({"method": "random", "parameters": {"x": {"min": 0.0, "max": 1.0, "mu": 2}}}, "x has 'mu', which is not used"),
    ({"method": "random", "parameters": {"x": {"distribution": "normal", "mu": 0, "sigma": 1}}}, "x is {'distribution': 'normal'"),
    ({"parameters": {"x": {"parameters": {"y": {"value": 1}}}}}, "x is {'parameters'"),
    ({"parameters": {"learning_rate": {"values": ["fast"]}}}, "learning_rate is 'fast', expected float")])
def test_mistakes_end_in_one_line(change, message, monkeypatch, capsys):
    monkeypatch.setattr(sweep, "file", "s.yaml")
    with pytest.raises(SystemExit) as e:
        sweep.check({"method": "grid", "parameters": {"x": {"values": [1]}}} | change)
    err = capsys.readouterr().err
    assert e.value.code == 2 and message in err and err.count("\n") == 1
