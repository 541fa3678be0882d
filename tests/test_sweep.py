"""Sweep files: sweep.py runs them with fake trainers and reads them the way `wandb agent` does."""
import fcntl
import importlib.util
import json
import math
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from wandb.sdk.launch.sweeps import utils as agent

import sweep
import train
from configurator import configure
from engine import sweep_file, system

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
loss = "nan" if given.get("diverge") == given["x"] else (x - 0.3) ** 2 + 1
if given.get("fail") == given["x"]:
    print("loading\\nerror: x is bad; expected another\\nmore", file=sys.stderr)
    sys.exit(2)
(folder / "config.json").write_text(json.dumps({"x": x, "y": given.get("y")}))
(folder / "log.jsonl").write_text(json.dumps({"iter": 1, "tokens": 1, "time": 0, \
"loss/val": loss}) + "\\n")
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
    return subprocess.run([sys.executable, str(ROOT / "sweep.py"), "s.yaml", "--out_dir=o", *words],
                          cwd=folder, capture_output=True, text=True)


def tried(folder):
    return [dict(word[2:].split("=", 1) for word in line.split())
            for line in (folder / "calls").read_text().splitlines()]


def test_a_grid_tries_every_combination_once_and_continues(tmp_path):
    content = {
        "method": "grid",
        "parameters": {"x": {"values": [0.1, 0.2]}, "y": {"values": ["a", "b", "c"]}}
    }
    assert run(tmp_path, content, "--count=4").returncode == 0
    done = run(tmp_path, content)
    assert done.returncode == 0, done.stderr
    assert ([(t["x"], t["y"]) for t in tried(tmp_path)] ==
            [(x, y) for x in ("0.1", "0.2") for y in "abc"])
    lines = done.stdout.splitlines()
    assert lines[0] == "6 trials; the output of trial N is in o/N.txt"
    assert re.fullmatch(
        r"trial 1: 1.0400 nats per token \(x=0.1, y=a\), [\d.]+ s, in an earlier session", lines[1])
    assert re.fullmatch(
        r"trial 5 of 6, best so far 1.0100 nats per token \(x=0.2, y=a\), [\d.]+ s left", lines[5])
    table = [line.split() for line in lines[-9:-2]]
    assert table[0] == ["trial", "loss/val", "status", "steps", "minutes", "x", "y"]
    assert [row[0] for row in table[1:]] == ["4", "5", "6", "1", "2", "3"]
    assert table[1][1:4] == ["1.0100", "finished", "1"]
    assert lines[-2] == "best: trial 4, 1.0100 nats per token (x=0.2, y=a), in o/4"
    command = lines[-1].removeprefix("its command: ")
    assert command == "python fake.py --x=0.2 --y=a --out_dir=o-best --init_from=auto"
    subprocess.run([sys.executable, *shlex.split(command)[1:]], cwd=tmp_path, check=True)
    assert (tmp_path / "o-best/log.jsonl").read_bytes() == (tmp_path / "o/4/log.jsonl").read_bytes()


def test_a_changed_sweep_does_not_take_the_trials_of_the_one_before_for_its_own(tmp_path):
    content = {
        "method": "random", "run_cap": 1,
        "parameters": {"x": {"min": 0.0, "max": 1.0}, "y": {"values": ["a"]}}
    }
    assert run(tmp_path, content).returncode == run(tmp_path, content).returncode == 0
    before, x = (tmp_path / "calls").read_text(), tried(tmp_path)[0]["x"]
    changed = content | {"parameters": {"x": {"values": [5]}, "y": {"values": ["a"]}}}
    for another, words, value in (changed, [], "x=5"), (content, ["--seed=2"], "x=0."):
        done = run(tmp_path, another, *words)
        assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
        assert f"o/1: holds a trial with x={x}, this sweep's has {value}" in done.stderr
        assert "another --out_dir" in done.stderr
    assert (tmp_path / "calls").read_text() == before
    assert run(tmp_path, changed | {"parameters": {"x": {"values": [x]},
                                                   "y": {"values": ["a"]}}}).returncode == 0


def test_values_are_the_same_however_they_are_written(tmp_path, monkeypatch):
    (tmp_path / "0").mkdir()
    (tmp_path / "0/config.json").write_text(
        json.dumps({"learning_rate": 1.0, "dim": 64, "tie_embeddings": True, "batch_size": 32}))
    values = {
        "learning_rate": "1e0", "dim": 64.0, "tie_embeddings": "yes", "batch_size": 0,
        "dropout": 0.1
    }
    found = {
        "program": str(ROOT / "train.py"),
        "parameters": {name: {"values": [value]} for name, value in values.items()}
    }
    # batch_size=0 agrees with 32, which the trainer has derived from it.
    sweep.refuse_other(found, values, tmp_path / "0")
    for other in {"dim": 32}, {"tie_embeddings": False}, {"learning_rate": 0}, {"batch_size": 16}:
        with pytest.raises(SystemExit):
            sweep.refuse_other(found, values | other, tmp_path / "0")


NOTED = """
import json, os, sys
with open("noted", "a") as f:
    f.write(json.dumps([sys.argv, {k: v for k, v in os.environ.items() \
if k.startswith("WANDB")}]) + "\\n")
"""


@pytest.mark.parametrize("form", [
    "args", "args_no_hyphens", "args_no_equals", "args_no_boolean_flags", "args_json",
    "args_append_hydra", "args_override_hydra"])
def test_a_command_becomes_the_words_that_the_agent_makes_of_it(form, monkeypatch):
    """The expected words come from the agent's own functions."""
    monkeypatch.setenv("MY_RATE", "0.5")
    command = ["${env}", "${interpreter}", "-X", "dev", "${program}", "--rate=${envvar:MY_RATE}",
               f"${{{form}}}", 3]
    values = {"x": 0.1, "tie_embeddings": True, "compile": False, "name": "two words"}
    theirs = agent.create_sweep_command_args({"args": {k: {"value": v} for k, v in values.items()}})
    theirs |= {"env": ["/usr/bin/env"], "interpreter": [sys.executable], "program": ["train.py"]}
    expected = []
    for word in map(str, agent.create_sweep_command(list(command))):
        expected += theirs[word[2:-1]] if word.startswith("${") else [word]
    monkeypatch.setattr(sweep_file, "program", lambda sweep: "train.py")
    assert sweep_file.command_of({"command": command}, values) == (expected, {})
    monkeypatch.setenv("MY_RATE", "${no name of a macro}")
    assert sweep_file.command_of({"command": ["${envvar:MY_RATE}"]},
                                 values) == (["${no name of a macro}"], {})


def test_a_date_may_be_a_value():
    """YAML reads an unquoted 2026-11-27 as a date."""
    parameters = yaml.safe_load("{since: 2026-11-27}")
    words, _ = sweep_file.command_of({"command": ["run", "${args}", "${args_json}"]}, parameters)
    assert words == ["run", "--since=2026-11-27", '{"since": "2026-11-27"}']


def test_what_a_sweep_file_says_is_done(tmp_path):
    """
    The sweep applies its file's command with flags, project, names and target, and the model that
    its trials start from.
    """
    program = TRAINER.replace(
        'with open("calls"', NOTED + 'with open("calls"'
    ).replace("sys.argv[1:])", "sys.argv[2:])", 1)
    content = {
        "program": "fake.py", "method": "grid", "name": "two rates", "description": "which one?",
        "project": "mine", "entity": "us",
        "command": ["${env}", "A=b", "${interpreter}", "${program}", "first", "${args}", "--y=3"],
        "metric": {"name": "loss/val", "goal": "minimize", "target": 1.01},
        "parameters": {"x": {"values": [0.1, 0.25, 0.3]},
                       "init_from": {"values": ["base", "scratch"]}}
    }
    (tmp_path / "fake.py").write_text(program)
    (tmp_path / "s.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    command = [sys.executable, str(ROOT / "sweep.py"), "s.yaml", "--out_dir=o"]
    for _ in range(2):  # the second time no trial is left
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        noted = [json.loads(line) for line in (tmp_path / "noted").read_text().splitlines()]
        assert [words[1:] for words, _ in noted] == [
            ["first", f"--x={x}", f"--init_from={origin}", f"--out_dir=o/{n}", "--y=3"]
            for n, (x, origin) in enumerate([(0.1, "base"), (0.1, "auto"), (0.25, "base")], 1)]
        assert all(env == env | {"WANDB_PROJECT": "mine", "WANDB_ENTITY": "us",
                                 "WANDB_RUN_GROUP": "two rates", "WANDB_NAME": f"two rates {n}"}
                   for n, (_, env) in enumerate(noted, 1))
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
        return [sweep_file.draw(spec, rng) for _ in range(2000)]

    rates = draws(distribution="log_uniform_values", min=1e-4, max=1e-2)
    assert 1e-4 <= min(rates)
    assert max(rates) <= 1e-2
    assert 0.45 < sum(r < 1e-3 for r in rates) / 2000 < 0.55
    assert set(draws(distribution="q_uniform", min=0, max=30, q=10)) == {0, 10, 20, 30}
    assert set(draws(min=2, max=4)) == {2, 3, 4} and {type(v) for v in draws(min=2, max=4)} == {int}
    assert 0.85 < draws(values=["a", "b"], probabilities=[0.9, 0.1]).count("a") / 2000 < 0.95
    assert set(draws(distribution="q_uniform", min=0.0, max=1.0, q=0.5)) == {0.0, 0.5, 1.0}
    assert set(draws(distribution="int_log_uniform_values", min=1, max=3)) == {1, 2, 3}
    assert set(draws(value=7)) == {7}


def test_numbers_as_people_write_them_are_numbers():
    """YAML 1.1 reads 1e-4, which has no decimal point, as a string."""
    text = ("{program: train.py, method: random, parameters: {"
            "learning_rate: {distribution: log_uniform_values, min: 1e-4, max: 2e-2},\n"
            "              beta2: {min: 1e-1, max: 0.5}, "
            "dim: {distribution: int_uniform, min: 1e1, max: 1e2}, "
            "embedding_lr_scale: {values: [1e0, 2]},\n"
            "              warmup_iters: {distribution: q_uniform, min: 0, max: 1e2, q: 1e1}, "
            "data: {values: [1e3]}}}")
    content = yaml.safe_load(text)
    sweep_file.check(content)
    drawn = [{k: sweep_file.draw(spec, random.Random(n))
              for k, spec in content["parameters"].items()} for n in range(200)]
    assert (1e-4 <= min(d["learning_rate"] for d in drawn) < 2e-4
            < 1e-2 < max(d["learning_rate"] for d in drawn) <= 2e-2)
    assert {d["warmup_iters"] for d in drawn} == {*range(0, 101, 10)}
    assert {d["embedding_lr_scale"] for d in drawn} == {1.0, 2.0}
    assert {type(d["dim"]) for d in drawn} == {int} and drawn[0]["data"] == "1e3"


def test_what_optuna_is_asked_for_keeps_to_the_file():
    """Optuna is asked for the ranges, values and scales of the file."""
    class Trial:
        suggest_categorical = suggest_int = suggest_float = (
            lambda self, *words, **more: (words, more))

    wide = {"min": 1, "max": 9}
    assert sweep_file.suggest("x", {"value": 3}, Trial()) == 3
    assert sweep_file.suggest("x", {"values": [4, 5]}, Trial()) == (("x", [4, 5]), {})
    assert sweep_file.suggest("x", wide, Trial()) == (("x", 1, 9), {"log": False})
    assert sweep_file.suggest("x", wide | {"distribution": "int_log_uniform_values"},
                              Trial()) == (("x", 1, 9), {"log": True})
    assert sweep_file.suggest("x", wide | {"distribution": "log_uniform_values"},
                              Trial()) == (("x", 1, 9), {"log": True})


def test_a_trial_that_fails_does_not_end_the_sweep(tmp_path):
    done = run(tmp_path, {"method": "grid", "parameters": {"x": {"values": [0.1, 0.2, 0.3]},
                                                           "fail": {"value": 0.2}}})
    assert done.returncode == 0
    assert ("trial 2 (x=0.2) failed with code 2: x is bad; expected another; "
            "its output: o/2.txt\n") in done.stdout
    assert [t["x"] for t in tried(tmp_path)] == ["0.1", "0.3"]
    assert done.stdout.splitlines()[-3].split()[:3] == ["2", "failed", "0"]


def test_a_trial_that_diverges_does_not_end_the_sweep(tmp_path):
    """Its program ends without an error, and its metric is never finite."""
    done = run(tmp_path, {"method": "grid", "parameters": {"x": {"values": [0.1, 0.2, 0.3]},
                                                           "diverge": {"value": 0.2}}})
    assert done.returncode == 0, done.stderr
    assert "trial 2 (x=0.2) failed without a finite loss/val" in done.stdout
    assert [t["x"] for t in tried(tmp_path)] == ["0.1", "0.2", "0.3"]


def test_what_a_trainer_derives_is_not_taken_for_another_trial(tmp_path):
    (tmp_path / "0").mkdir()
    values = {"teacher": "auto", "minutes": 5, "sample_prompt": "auto", "lora_targets": "wv,wq",
              "dim": 64}
    stored = {"teacher": "a/seed2,a/seed3,a/seed4", "minutes": 2.0, "sample_prompt": "The",
              "lora_targets": "wq,wv", "dim": 64}
    (tmp_path / "0/config.json").write_text(json.dumps(stored))
    content = {"program": str(ROOT / "train.py"),
               "parameters": {name: {"values": [value]} for name, value in values.items()}}
    sweep.refuse_other(content, values, tmp_path / "0")
    with pytest.raises(SystemExit):
        sweep.refuse_other(content, values | {"teacher": ""}, tmp_path / "0")
    with pytest.raises(SystemExit):
        sweep.refuse_other(content, values | {"dim": 96}, tmp_path / "0")
    (tmp_path / "0/config.json").write_text(json.dumps({"dtype": "float32"}))
    with pytest.raises(SystemExit):  # the trainer stores auto for this setting
        sweep.refuse_other(content | {"parameters": {"dtype": {"values": ["auto"]}}},
                           {"dtype": "auto"}, tmp_path / "0")


def test_a_choice_that_was_removed_is_one_line(tmp_path):
    if importlib.util.find_spec("optuna") is None:
        pytest.skip("needs Optuna")
    content = {"method": "bayes", "metric": {"name": "loss/val"}}
    done = run(tmp_path, content | {"parameters": {"x": {"values": ["0.1", "0.2"]}}}, "--count=3")
    assert done.returncode == 0, done.stderr
    done = run(tmp_path, content | {"parameters": {"x": {"values": ["0.5", "0.6"]}}}, "--count=3")
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert "o/1: holds a trial whose values s.yaml no longer has" in done.stderr


def test_a_trial_that_is_stopped_stops_the_sweep(tmp_path):
    done = run(tmp_path, {"method": "grid", "parameters": {"x": {"values": [0.1, 0.2, 0.3]},
                                                           "stop": {"value": 0.2}}})
    assert done.returncode == 2
    assert "trial 2 was stopped" in done.stderr
    assert "trial 3" not in done.stdout
    # Parameters that are the same in all trials are left out.
    assert "trial 1: 1.0400 nats per token (x=0.1), " in done.stdout


@pytest.mark.parametrize("signum, to_all", [
    (signal.SIGINT, True), (signal.SIGTERM, False), (signal.SIGTERM, True)])
def test_a_sweep_that_is_stopped_waits_until_its_trial_has_saved(tmp_path, signum, to_all):
    """
    A terminal sends Ctrl-C to the sweep and its trial, the page sends SIGTERM to both, and kill
    signals the sweep alone.
    """
    (tmp_path / "slow.py").write_text(STOPPABLE)
    (tmp_path / "s.yaml").write_text(
        "{program: slow.py, method: grid, parameters: {x: {values: [1, 2]}}}")
    with subprocess.Popen(
            [sys.executable, str(ROOT / "sweep.py"), "s.yaml", "--out_dir=o"], cwd=tmp_path,
            text=True, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler)) as p:
        while not (tmp_path / "o/1/started").exists():
            time.sleep(0.01)
        (os.killpg if to_all else os.kill)(p.pid, signum)
        said = p.communicate()[1]
    assert (tmp_path / "o/1/saved").exists() and not (tmp_path / "o/2").exists()
    assert p.returncode == 128 + signum
    assert said == "stopped in trial 1; the same command continues the sweep\n"


def test_unknown_parameters_and_sweeps_without_results_end_in_one_line(tmp_path):
    grid = {"method": "grid", "parameters": {"x": {"values": [0.1]}, "fail": {"value": 0.1}}}
    for content, words, message in [
        (grid, [], "no trial finished"),
        (grid | {"program": "train.py", "parameters": {"lr": {"value": 1}}}, [],
         "'lr'; here it is 'learning_rate'"),
        (grid | {"program": "nowhere.py"}, [], "no program nowhere.py"),
        (grid, ["t.yaml"], "s.yaml and t.yaml: expected one sweep"),
        (grid, ["--count=-3"], "--count=-3: expected"),
        (grid, ["--parallel=0"], "--parallel=0: expected at least 1"),
        (grid, ["--seeds=2"], "--seeds=2: fake.py has no setting seeds, as train.py has"),
        (grid, ["--counts=3"], "did you mean 'count'?"),
        ({"method": "grid", "metric": {"name": "acc"}, "parameters": {"x": {"value": 0.1}}},
         ["--out_dir=p"], "no run has the metric 'acc'; expected one of iter")
    ]:
        done = run(tmp_path, content, *words)
        assert done.returncode == 2, done.stderr
        assert message in done.stderr, done.stderr
        assert done.stderr.count("\n") == 1, done.stderr


def test_bayes_comes_nearer_to_the_best_or_says_what_it_needs(tmp_path):
    done = run(tmp_path, {"method": "bayes", "metric": {"name": "loss/val", "goal": "minimize"},
                          "run_cap": 25, "parameters": {"x": {"min": -10.0, "max": 10.0}}})
    if importlib.util.find_spec("optuna") is None:
        assert done.returncode == 2 and "optuna" in done.stderr
    else:
        far = [abs(float(t["x"]) - 0.3) for t in tried(tmp_path)]
        assert len(far) == 25 and sum(far[15:]) / 10 < sum(far[:10]) / 10


@pytest.mark.parametrize("name", ["grid", "random", "bayes", "own_text", "debug"])
def test_the_sweeps_that_come_along_fit_the_agent_and_the_trainer(name):
    """The agent and the trainer accept the sweeps in sweeps/."""
    content = yaml.safe_load((ROOT / f"sweeps/{name}.yaml").read_text())
    sweep_file.check(content)
    values = {k: sweep_file.draw(spec, random.Random(0))
              for k, spec in content["parameters"].items()}
    words = agent.create_sweep_command_args(
        {"args": {k: {"value": v} for k, v in values.items()}})["args"]
    settings = vars(train).copy()  # the trainer accepts the words as the agent passes them
    assert configure(settings, argv=words).given.keys() == set(values)
    assert {k: settings[k] for k in values} == values and content["program"] == "train.py"


@pytest.mark.parametrize("change, message", [
    ({"method": "guess"}, "expected grid, random or bayes"),
    ({"parameters": {}}, "has no parameters"),
    ({"early_terminate": {"type": "hyperband"}}, "'early_terminate' is not supported; run"),
    ({"parameters": {"x": {"min": 1, "max": 2}}}, "a grid needs values"),
    ({"parameters": {"x": 3}}, "x is 3"),
    ({"method": "random", "parameters": {"x": {"min": 2, "max": 1}}}, "expected min <= max"),
    ({"method": "random", "parameters": {"x": {"min": 1.0, "max": 2.0, "distribution": "odd"}}},
     "'odd'"),
    ({"method": "random",
      "parameters": {"x": {"min": 0, "max": 2.0, "distribution": "log_uniform_values"}}},
     "expected above 0"),
    ({"method": "bayes"}, "bayes needs a metric"),
    ({"parameters": {"x": {"values": 3}}}, "x has values 3, expected a list"),
    ({"parameters": {"x": {"values": []}}}, "x has values [], expected a list"),
    ({"method": "random", "parameters": {"x": {"values": [1, 2], "probabilities": [1]}}},
     "x has probabilities [1], expected 2 numbers"),
    ({"method": "random", "parameters": {"x": {"values": [1, 2], "probabilities": [0, 0]}}},
     "expected 2 numbers"),
    ({"method": "random", "parameters": {"x": {"values": [1, 2], "probabilities": [2, -1]}}},
     "expected 2 numbers"),
    ({"method": "random", "parameters": {"x": {"values": [1, 2], "probabilities": "ab"}}},
     "expected 2 numbers"),
    ({"method": "random",
      "parameters": {"x": {"min": 1, "max": 9, "distribution": "q_uniform", "q": 0}}},
     "x has q 0, expected above 0"),
    ({"method": "random", "parameters": {"x": {"min": "few", "max": 2}}},
     "x has min 'few', expected a number"),
    ({"method": "random", "parameters": {"x": {"min": 1, "max": None}}},
     "x has max None, expected a number"),
    ({"method": "random", "parameters": {"x": {"min": 1}}}, "x has no max"),
    ({"method": "random", "parameters": {"x": {"min": 1, "max": math.inf}}},
     "x has max inf, expected a number"),
    ({"method": "random",
      "parameters": {"x": {"min": 1.5, "max": 3, "distribution": "int_uniform"}}},
     "x has min 1.5, expected a whole"),
    ({"run_cap": "many"}, "run_cap is 'many', expected a whole number"),
    ({"run_cap": -1}, "run_cap is -1"),
    ({"program": None}, "no program None"),
    ({"program": 3}, "no program 3"),
    ({"program": "tests"}, "no program tests"),
    ({"metric": "loss/val"}, "metric is 'loss/val', expected "),
    ({"metric": {"name": "a", "goal": "maximise"}}, "'maximise'}, expected "),
    ({"metric": {"name": ["loss/val"]}}, "{'name': ['loss/val']}, expected "),
    ({"metric": {"name": "a", "impute": "best"}}, "metric has 'impute', which is not supported"),
    ({"metric": {"name": "a", "target": "low"}}, "'target': 'low'}, expected "),
    ({"command": "python train.py"}, "command is 'python train.py', expected a list"),
    ({"command": []}, "command is [], expected"),
    ({"command": ["${interpreter}", "${program}"]}, "command lacks ${args}"),
    ({"command": ["${interpreter}", "${program}", "${args}x"]}, "command lacks ${args}"),
    ({"command": ["${args}", "${args_json_file}"]},
     "command has ${args_json_file}, expected one of ${env}, "),
    ({"command": ["${args}", "${envvar:NOT_HERE}"]},
     "command has ${envvar:NOT_HERE}, but the environment has no NOT_HERE"),
    ({"command": ["${program}", "${args}", "--out-dir=here"]},
     "command sets --out-dir=here, but the sweep gives"),
    ({"command": ["${program}", "${args}", "--init_from", "x"]},
     "command sets --init_from, but the sweep gives"),
    ({"name": 3}, "name is 3, expected a string"),
    ({"project": ["a"]}, "project is ['a'], expected a string"),
    ({"parameters": {"out_dir": {"values": ["a", "b"]}}},
     "expected value: the folder for all trials"),
    ({"parameters": {"x": {"values": [1], "probabilities": [1]}}},
     "x has 'probabilities', which is not used with values in method grid"),
    ({"method": "bayes", "metric": {"name": "a"},
      "parameters": {"x": {"values": [1, 2], "probabilities": [1, 0]}}}, "x has 'probabilities'"),
    ({"parameters": {"x": {"value": 1, "values": [2]}}},
     "x has 'values', which is not used with a value"),
    ({"parameters": {"x": {"values": [1], "distribution": "q_uniform"}}},
     "x has values and distribution 'q_uniform', expected categorical"),
    ({"method": "random", "parameters": {"x": {"min": 0.0, "max": 1.0, "q": 0.1}}},
     "x has 'q', which is not used with a range of"),
    ({"method": "random", "parameters": {"x": {"min": 0.0, "max": 1.0, "mu": 2}}},
     "x has 'mu', which is not used"),
    ({"method": "random", "parameters": {"x": {"distribution": "normal", "mu": 0, "sigma": 1}}},
     "x is {'distribution': 'normal'"),
    ({"parameters": {"x": {"parameters": {"y": {"value": 1}}}}}, "x is {'parameters'"),
    ({"parameters": {"learning_rate": {"values": ["fast"]}}},
     "learning_rate is 'fast', expected float"),
])
def test_mistakes_are_one_line(change, message):
    with pytest.raises(ValueError) as e:
        sweep_file.check({"method": "grid", "parameters": {"x": {"values": [1]}}} | change)
    assert message in str(e.value) and "\n" not in str(e.value)


# ---- parallel trials, seeds, pruning, kills ------------------------------------------------------

MEETING = """
import json, os, sys, time
from pathlib import Path
given = dict(word[2:].split("=", 1) for word in sys.argv[1:])
folder = Path(given["out_dir"])
folder.mkdir(parents=True)
(folder / "variables").write_text(json.dumps([os.environ.get(name) \
for name in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")]))
end = time.time() + 20
while len(list(folder.parent.glob("*/variables"))) < int(given["meet"]) and time.time() < end:
    time.sleep(0.01)
assert time.time() < end
(folder / "config.json").write_text(json.dumps({"x": given["x"]}))
(folder / "log.jsonl").write_text(json.dumps({"iter": 1, "tokens": 1, "time": 0, \
"loss/val": float(given["x"])}) + "\\n")
"""


def start(folder, program, content, *words, **more):
    (folder / "fake.py").write_text(program)
    (folder / "s.yaml").write_text(yaml.safe_dump({"program": "fake.py"} | content))
    return subprocess.Popen(
        [sys.executable, str(ROOT / "sweep.py"), "s.yaml", "--out_dir=o", *words], cwd=folder,
        text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **more)


def ledger(folder):
    return [json.loads(line) for line in (folder / "o/sweep.jsonl").read_text().splitlines()]


def test_parallel_trials_share_cores_and_gpus(tmp_path):
    """Each of the two trials waits until the other one runs."""
    env = ({k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
           | {"CUDA_VISIBLE_DEVICES": "5,GPU-7"})
    content = {"method": "grid", "metric": {"name": "loss/val", "goal": "maximize"},
               "parameters": {"x": {"values": [1, 2]}, "meet": {"value": 2}}}
    p = start(tmp_path, MEETING, content, "--parallel=2", "--json", env=env)
    out, err = p.communicate()
    assert p.returncode == 0, out + err
    found = json.loads(out.splitlines()[-1])
    assert found["best"] == 2
    assert [(trial["trial"], trial["value"]) for trial in found["trials"]] == [(2, 2.0), (1, 1.0)]
    threads = str(max(1, system.cores() // 2))
    assert (sorted(json.loads((tmp_path / f"o/{n}/variables").read_text()) for n in (1, 2)) ==
            [[threads, "5"], [threads, "GPU-7"]])
    assert out.startswith(f"2 trials, 2 at a time, with {threads} thread")
    assert "\ntrials 1, 2 of 2\n" in out


SEEDED = """
seed, seeds = 1337, 1
# configure(globals())
seed = 1337
seeds = 1
x = 0.5
out_dir = "out"
init_from = "auto"
import json, sys
from pathlib import Path
given = dict(word[2:].split("=", 1) for word in sys.argv[1:])
for n in range(7, 7 + int(given["seeds"])):
    folder = Path(given["out_dir"], f"seed{n}")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"x": float(given["x"]), "seed": n}))
    loss = float(given["x"]) + (n == 8) * float(given["x"]) * 2
    (folder / "log.jsonl").write_text(json.dumps({"iter": 1, "tokens": 1, "time": 0, \
"bpb/val": loss}) + "\\n")
"""


def test_the_mean_of_several_seeds_decides(tmp_path):
    content = {
        "method": "grid", "metric": {"name": "bpb/val"},
        "parameters": {"x": {"values": [2.0, 1.0]}, "seed": {"value": 7}}
    }
    p = start(tmp_path, SEEDED, content, "--seeds=3", "--json")
    out, err = p.communicate()
    assert p.returncode == 0, out + err
    found = json.loads(out.splitlines()[-1])
    assert found["best"] == 2 and found["trials"][0]["results"] == {"7": 1.0, "8": 3.0, "9": 1.0}
    assert found["trials"][0]["value"] == pytest.approx(5 / 3)
    assert found["trials"][0]["sd"] == pytest.approx((4 / 3) ** 0.5)
    assert "trial 1: 3.3333 bits per byte (standard deviation 2.3094, n = 3, x=2)" in out
    assert out.splitlines()[-7].split() == [
        "trial", "bpb/val", "sd", "n", "status", "steps", "minutes", "x"]
    assert out.splitlines()[-4] == ("best: trial 2, 1.6667 bits per byte "
                                    "(standard deviation 1.1547, n = 3, x=1), in o/2")
    assert "against the second: not distinguishable; " in out
    assert "(trial 2 minus trial 1: -1.7 bits per byte" in out
    assert found["command"] == "python fake.py --seed=7 --x=1.0 --seeds=3 --out_dir=o-best"
    p = start(tmp_path, SEEDED, content)
    out, err = p.communicate()
    assert p.returncode == 2
    assert ("o/1: holds a trial with several seeds; give the same --seeds, "
            "or another --out_dir") in err


def test_a_model_from_before_the_first_step_does_not_decide(tmp_path):
    """The trials fine-tune one model, and most values make it worse."""
    before = json.dumps({"iter": 0, "tokens": 0, "time": 0, "bpb/val": 0.25})
    program = SEEDED.replace('.write_text(json.dumps({"iter": 1,',
                             f".write_text({before!r} + chr(10) + json.dumps({{\"iter\": 1,")
    p = start(tmp_path, program, {"method": "grid", "metric": {"name": "bpb/val"}, "parameters": {
        "x": {"values": [2.0, 1.0]}, "seed": {"value": 7}}}, "--seeds=2", "--json")
    out, err = p.communicate()
    assert p.returncode == 0, out + err
    found = json.loads(out.splitlines()[-1])
    assert found["trials"][0]["results"] == {"7": 1.0, "8": 3.0}, (out, program)


PRUNABLE = """
import json, signal, sys, time
from pathlib import Path
given = dict(word[2:].split("=", 1) for word in sys.argv[1:])
folder, x, stop = Path(given["out_dir"]), float(given["x"]), []
signal.signal(signal.SIGTERM, lambda *which: stop.append(which))
folder.mkdir(parents=True)
(folder / "config.json").write_text(json.dumps({"x": x}))
with open(folder / "log.jsonl", "w") as f:
    for step in 0, 10, 20:
        print(json.dumps({"iter": step, "tokens": step, "time": 0, \
"loss/val": 9 + x if step == 0 else x - step / 100}), file=f, flush=True)
        end = time.time() + 20
        while x > 5 and step == 10 and not stop and time.time() < end:
            time.sleep(0.01)
        if stop:
            break
status = {"status": "stopped", "ended_by": "signal"} if stop else \
{"status": "finished", "ended_by": "max_iters"}
(folder / "result.json").write_text(json.dumps(status))
with open("calls", "a") as f:
    f.write(given["x"] + "\\n")
"""


@pytest.mark.skipif(importlib.util.find_spec("optuna") is None, reason="needs Optuna")
def test_a_hopeless_trial_is_pruned_and_ends_as_after_ctrl_c(tmp_path):
    content = {
        "method": "grid", "parameters": {"x": {"values": [1.4, 1.3, 1.2, 1.1, 1.0, 6.0, 0.9]}}
    }
    for _ in range(2):
        p = start(tmp_path, PRUNABLE, content, "--prune", "--json")
        out, err = p.communicate()
        assert p.returncode == 0, out + err
        assert ("trial 6 (x=6) was pruned at step 10, worse than the median of the others, "
                "with 5.9000 nats per token") in out
        found = json.loads(out.splitlines()[-1])
        assert [trial["trial"] for trial in found["trials"]] == [7, 5, 4, 3, 2, 1, 6]
        assert found["best"] == 7
        assert found["trials"][-1]["status"] == "pruned" and found["trials"][-1]["steps"] == 10
        assert found["trials"][-1]["runs"] == [json.loads(
            (tmp_path / "o/6/result.json").read_text())]
        assert found["trials"][-1]["runs"][0]["ended_by"] == "pruned"
    assert len((tmp_path / "calls").read_text().split()) == 7  # the second time no trial runs
    rows = ledger(tmp_path)
    # As if the sweep had been killed while trial 6 ran. The rows that trial 6 logged before do not
    # prune it when it starts.
    with open(tmp_path / "o/sweep.jsonl", "a") as f:
        f.write(json.dumps(next(row for row in rows if row.get("trial") == 6
                                and row["status"] == "started")) + "\n")
    p = start(tmp_path, "import time\ntime.sleep(0.5)", content, "--prune")
    out, err = p.communicate()
    assert p.returncode == 0 and "trial 6: 5.9000 nats per token (x=6), " in out, out + err
    assert (tmp_path / "o/6.txt").read_text() == (
        "the sweep has pruned this trial at step 10, worse than the median of the others\n")


def test_pruning_without_optuna_says_what_to_install(tmp_path):
    (tmp_path / "none").mkdir()
    (tmp_path / "none/optuna.py").write_text("raise ImportError")
    p = start(tmp_path, PRUNABLE, {"method": "grid", "parameters": {"x": {"values": [1]}}},
              "--prune", env=os.environ | {"PYTHONPATH": str(tmp_path / "none")})
    out, err = p.communicate()
    assert p.returncode == 2
    assert err == "error: --prune needs Optuna: pip install -c requirements-extras.txt optuna\n"


SLOW = TRAINER.replace("folder.mkdir(parents=True)", """folder.mkdir(parents=True, exist_ok=True)
import time
while given["x"] == "2" and not Path("go").exists():
    time.sleep(0.01)""")


def test_after_a_kill_finished_trials_are_kept_and_the_running_one_is_waited_for(tmp_path):
    content = {"method": "grid", "parameters": {"x": {"values": [1, 2, 3]}}}
    p = start(tmp_path, SLOW, content)
    end = time.time() + 30
    while not (tmp_path / "o/2").exists():
        assert time.time() < end and p.poll() is None
        time.sleep(0.01)
    p.kill()
    p.communicate()
    with open(tmp_path / "o/sweep.jsonl", "a") as f:
        f.write('{"trial": 2, "stat')  # a row that was only partly written
    again = start(tmp_path, SLOW, content)
    lines = [again.stdout.readline() for _ in range(4)]
    assert lines[1].startswith("trial 1: ") and lines[1].endswith("in an earlier session\n")
    assert lines[2] == "trial 2 still runs, started by a sweep that was killed: waiting for it\n"
    (tmp_path / "go").touch()
    out, err = again.communicate()
    assert again.returncode == 0 and [t["x"] for t in tried(tmp_path)] == ["1", "2", "3"], out + err
    assert len(re.findall(r"(?m)^\d +\d.*finished", out)) == 3
    statuses = [(row["trial"], row["status"]) for row in map(json.loads, (
        line for line in (tmp_path / "o/sweep.jsonl").read_text().splitlines()[1:]
        if line.endswith("}")))]
    assert statuses == [(1, "started"), (1, "finished"), (2, "started"), (2, "started"),
                        (2, "finished"), (3, "started"), (3, "finished")]


def test_folders_that_are_not_its_own_are_left_alone(tmp_path):
    content = {"method": "grid", "parameters": {"x": {"values": [1]}}}
    (tmp_path / "o").mkdir()
    for name, text, message in [
        ("sweep.jsonl", "mine\n", "o/sweep.jsonl: was not written by a sweep; move it elsewhere"),
        ("1.txt", "mine\n",
         "o/1.txt: exists, but a trial's output needs this name; give another --out_dir")
    ]:
        (tmp_path / "o" / name).write_text(text)
        done = run(tmp_path, content)
        assert done.returncode == 2, done.stderr
        assert message in done.stderr, done.stderr
        assert done.stderr.count("\n") == 1, done.stderr
        assert (tmp_path / "o" / name).read_text() == text and not (tmp_path / "o/1").exists()
        (tmp_path / "o" / name).unlink()
    assert run(tmp_path, content).returncode == 0
    with open(tmp_path / "o/sweep.jsonl", "a") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        done = run(tmp_path, content)
    assert done.returncode == 2
    assert "o: another sweep runs there; wait for it, or give another --out_dir" in done.stderr


def test_bayes_goes_on_with_the_values_that_it_would_have_had(tmp_path):
    """A continued sweep tries the same values as an uninterrupted one."""
    if importlib.util.find_spec("optuna") is None:
        pytest.skip("needs Optuna")
    content = {
        "method": "bayes", "metric": {"name": "loss/val"},
        "parameters": {"x": {"min": -10.0, "max": 10.0}}
    }
    for name, counts in ("whole", [13]), ("cut", [11, 13]):
        (tmp_path / name).mkdir()
        for n in counts:
            done = run(tmp_path / name, content, f"--count={n}")
            assert done.returncode == 0, done.stderr
    assert [t["x"] for t in tried(tmp_path / "whole")] == [t["x"] for t in tried(tmp_path / "cut")]


def test_a_command_that_names_its_program_needs_no_other():
    content = {
        "method": "grid", "program": "nowhere.py", "parameters": {"x": {"values": [1]}},
        "command": ["echo", "${args}"]
    }
    sweep_file.check(content)
    assert sweep_file.command_of(content, {"x": 1}) == (["echo", "--x=1"], {})
