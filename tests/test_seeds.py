"""--seeds: the same command with several seeds, resumable, and the results of all of them."""
import json
import os
import statistics
import sys
from pathlib import Path

import pytest

import train
from configurator import configure, settings
from engine.training import checkpoint, repeat, seeds, teachers
from tests import forked
from tests.test_repeat import SMALL
from tests.test_train import ROOT, folder  # noqa: F401


@pytest.fixture
def started(folder, monkeypatch, capsys):  # noqa: F811
    """
    Return a function that calls train.start with command-line arguments and returns (exit code,
    stdout, stderr). Its trainings are forked; `ends` has (code, signals) that trainings return
    instead of running, and `calls` has the commands of the trainings.
    """
    calls, ends = [], []

    def run_program(command, environment):
        calls.append(command)
        if ends:
            return ends.pop(0)
        done = forked.run(command[1:], folder, os.environ | {"OMP_NUM_THREADS": "1"} | environment)
        print(done.stdout, end="")
        print(done.stderr, end="", file=sys.stderr)
        return done.returncode, []

    def start(*words):
        del calls[:]
        words = [str(word) for word in words]
        monkeypatch.setattr(sys, "argv", [str(ROOT / "train.py"), *words])
        values = vars(train).copy()
        try:
            code = train.start(configure(values, "data", words, adapt=repeat.settings))
        except SystemExit as e:
            code = e.code
        said = capsys.readouterr()
        return code, said.out, said.err

    for name, value in settings(vars(train)).items():  # train.main sets them; pytest restores them
        monkeypatch.setattr(train, name, value)
    monkeypatch.chdir(folder)
    for module in seeds, teachers:
        monkeypatch.setattr(module, "run_program", run_program)
    start.calls, start.ends = calls, ends
    return start


def result(folder, seed):  # noqa: F811
    return json.loads((folder / f"group/seed{seed}/result.json").read_text())


def test_seeds_are_trained_in_turn_and_go_on_where_they_were_stopped(folder, started):  # noqa: F811
    words = ["--data=my.txt", *SMALL, "--seeds=2", "--seed=5", "--out_dir=group", "--json"]
    started.ends += [(0, [15])]
    code, out, err = started(*words)
    assert code == 128 + 15
    assert "stopped at seed 5; the same command continues" in err
    assert len(started.calls) == 1
    started.ends += [(1, [])]
    code, out, err = started(*words)
    assert code == 2 and "seed 5 ended with code 1" in err
    code, out, err = started(*words)
    assert code == 0 and len(started.calls) == 2, err
    losses = [result(folder, seed)["best"]["loss/val"] for seed in (5, 6)]
    assert losses[0] != losses[1] and [result(folder, seed)["seed"] for seed in (5, 6)] == [5, 6]
    assert (f"loss/val: mean {statistics.mean(losses):.4f}, "
            f"standard deviation {statistics.stdev(losses):.4f} (n = 2)") in out
    found = json.loads(out.splitlines()[-1])
    assert found["results"]["loss/val"]["mean"] == pytest.approx(statistics.mean(losses))
    assert found["seeds"] == [5, 6]
    assert found["runs"] == [result(folder, seed) for seed in (5, 6)]
    code, out, err = started(*words)
    assert code == 0 and not started.calls and out.count("finished before") == 2
    code, out, err = started(*words, "--learning_rate=1e-3")
    assert code == 2
    assert ("seed5 holds a run with learning_rate=0.006, now it is 0.001; "
            "give another --out_dir") in err
    code, out, err = started(*words[:-1], "--seeds=3")
    assert code == 0 and len(started.calls) == 1 and "(n = 3)" in out
    code, out, err = started(
        "group/seed5/config.json", "--seeds=1", "--seed=6", "--out_dir=group/seed6")
    assert code == 0 and "this run is finished" in out


def test_later_seeds_have_the_sizes_that_the_first_one_derived(
        folder, started, monkeypatch):  # noqa: F811
    """Also if the first one was trained before, and if the command gives a size."""
    calls = []

    def run_program(command, environment):
        calls.append(command)
        values = configure(vars(train).copy(), "data", command[2:], adapt=repeat.settings)
        trained = folder / values.out_dir
        trained.mkdir(parents=True)
        stored = {"dim": 96, "max_seq_len": values.max_seq_len, "max_text_bytes": 0, "n_layers": 2}
        (trained / "config.json").write_text(json.dumps(stored))
        (trained / "result.json").write_text(json.dumps({
            "status": "finished", "seconds": 1,
            "best": {"loss/val": 2.0, "bpb/val": 1.0, "iter": 5}}))
        return 0, []

    monkeypatch.setattr(seeds, "run_program", run_program)
    words = ["--data=my.txt", "--minutes=1", "--max_seq_len=32", "--out_dir=sized"]
    code, _, err = started(*words, "--seeds=2")
    assert code == 0, err
    assert not any(word.startswith("--dim=") for word in calls[0])
    sizes = ["--dim=96", "--max_text_bytes=0"]
    assert calls[1][-3:] == ["--out_dir=sized/seed1338", *sizes]
    code, _, err = started(*words, "--seeds=3")
    assert code == 0 and len(calls) == 3 and calls[2][-2:] == sizes, err
    code, _, err = started("--data=my.txt", "--max_iters=5", "--out_dir=fixed", "--seeds=2")
    assert code == 0 and calls[4][-1] == "--out_dir=fixed/seed1338", err


def test_a_prompt_that_is_chosen_is_not_another_prompt(folder, started):  # noqa: F811
    words = ["--data=my.txt", *SMALL, "--seeds=2", "--out_dir=prompted", "--sample_prompt=auto"]
    for _ in range(2):
        code, _, err = started(*words)
        assert code == 0, err
    assert json.loads((folder / "prompted/seed1337/config.json").read_text())["sample_prompt"]
    code, _, err = started(*words[:-1], "--sample_prompt=Another")
    assert code == 2 and "now it is Another" in err


@pytest.mark.parametrize("words, said", [
    (["--eval_only"], "--seeds and --eval_only: expected one of them"),
    (["--dry_run"], "--seeds and --dry_run: expected one of them"),
    (["--seeds=0"], "seeds is 0, expected at least 1"),
    (["--out_dir=lone"], "--out_dir=lone: holds a run; with --seeds")])
def test_what_several_seeds_cannot_be_is_one_line(folder, started, words, said):  # noqa: F811
    (folder / "lone").mkdir(exist_ok=True)
    (folder / "lone/trainer.json").write_text('{"made_by": "llamac"}')
    code, out, err = started("--data=my.txt", "--seeds=2", *words)
    assert code == 2 and said in err and err.count("\n") == 1, err


def test_teachers_of_other_seeds_are_trained_first_and_go_on_where_they_were_stopped(
        folder, started):  # noqa: F811
    words = ["--data=my.txt", *SMALL, "--teacher=auto", "--seed=5", "--out_dir=taught", "--json"]
    started.ends += [(0, [15])]
    code, out, err = started(*words)
    assert code == 128 + 15 and len(started.calls) == 1
    code, out, err = started(*words)
    assert code == 0, err
    config, found = (json.loads((folder / "taught" / name).read_text())
                     for name in ("config.json", "result.json"))
    own = "taught-teachers/seed6,taught-teachers/seed7,taught-teachers/seed8"
    assert config["teacher"] == own
    assert config["seed"] == 5
    assert found["status"] == "finished"
    assert [result["seed"] for result in map(json.loads, (path.read_text() for path in sorted(
        (folder / "taught-teachers").glob("seed*/result.json"))))] == [6, 7, 8]
    assert "teachers: 3 write" in out and json.loads(out.splitlines()[-1]) == found
    # The teachers' results are not printed.
    assert sum(line.startswith("{") for line in out.splitlines()) == 1
    code, out, err = started(*words)
    assert code == 0 and out.count("finished before") == 3 and "this run is finished" in out
    code, out, err = started(*words, "--learning_rate=1e-3")
    assert code == 2
    assert "taught-teachers/seed6 holds a run with learning_rate=0.006, now it is 0.001" in err
    # A student of another seed has a folder and teachers of its own.
    started.ends += [(0, [])] * 2
    code, out, err = started(*words, "--seed=8")
    assert code == 0 and "--out_dir=taught-seed8-teachers" in started.calls[0], err
    assert "--out_dir=taught-seed8" in started.calls[1]


def test_a_run_without_teachers_is_not_taken_for_a_student(
        folder, started, monkeypatch):  # noqa: F811
    words = ["--data=my.txt", "--teacher=auto", "--minutes=1"]
    (folder / "alone").mkdir()
    (folder / "alone/config.json").write_text('{"teacher": ""}')
    monkeypatch.setattr(checkpoint, "newest", lambda out_dir: Path(out_dir, "checkpoints/step_1"))
    code, out, err = started(*words, "--out_dir=alone")
    assert code == 2 and not started.calls
    expected = ",".join(f"alone-teachers/seed{seed}" for seed in (1338, 1339, 1340))
    assert (f"--out_dir=alone: holds a run with no teacher, expected teacher={expected}; "
            f"give another --out_dir") in err


def test_a_run_that_ended_before_its_first_checkpoint_is_no_obstacle(folder, started):  # noqa: F811
    (folder / "early").mkdir()
    (folder / "early/config.json").write_text('{"teacher": ""}')
    started.ends += [(0, [])] * 2
    code, _, err = started("--data=my.txt", *SMALL, "--teacher=auto", "--out_dir=early")
    assert code == 0 and len(started.calls) == 2, err


def test_a_student_learns_from_the_teachers_of_its_own_seed(folder, started):  # noqa: F811
    """A command with another seed was stopped before it had all of its teachers."""
    words = ["--data=my.txt", *SMALL, "--teacher=auto", "--out_dir=mixed"]
    (folder / "mixed-teachers/seed9").mkdir(parents=True)
    started.ends += [(0, [])] * 2
    code, _, err = started(*words, "--seed=5")
    own = ",".join(f"mixed-teachers/seed{seed}" for seed in (6, 7, 8))
    assert code == 0 and f"--teacher={own}" in started.calls[1], err


def test_teachers_of_another_time_budget_are_named(folder, started):  # noqa: F811
    words = ["--data=my.txt", "--teacher=auto", "--out_dir=timed"]
    (folder / "timed-teachers/seed1338").mkdir(parents=True)
    (folder / "timed-teachers/seed1338/config.json").write_text('{"minutes": 0.2}')
    code, _, err = started(*words, "--minutes=3")
    assert code == 2 and not started.calls and err.count("\n") == 1
    assert ("--minutes=3: the teachers in timed-teachers have 0.2 minutes each, expected 0.6; "
            "give --minutes=1, or another --out_dir") in err
    started.ends += [(0, [])] * 2
    assert started(*words, "--minutes=1")[0] == 0


def test_a_training_that_is_killed_is_named(folder, started):  # noqa: F811
    words = ["--data=my.txt", *SMALL, "--teacher=auto", "--out_dir=killed"]
    started.ends += [(0, []), (-9, [])]
    code, _, err = started(*words)
    assert code == 2 and "killed by signal 9, expected it to end by itself" in err


def test_student_and_teachers_have_folders_of_their_own_beside_that_of_a_run_of_the_text(
        folder, started, monkeypatch):  # noqa: F811
    monkeypatch.setattr(teachers, "run_program", lambda command, environment: (
        calls.append(command), (0, []))[1])
    calls = []
    code, _, err = started("--data=my.txt", "--teacher=auto", "--minutes=1", "--out_dir=auto")
    assert code == 0, err
    assert "--out_dir=out/my-teachers" in calls[0]
    own = ",".join(f"out/my-teachers/seed{seed}" for seed in (1338, 1339, 1340))
    assert f"--teacher={own}" in calls[1]
    assert "--out_dir=out/my-student" in calls[1]


def test_the_minutes_of_teachers_and_student_are_those_of_the_command(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "--minutes=10"])
    config = configure(
        vars(train).copy(), "data", ["--minutes=10", "--out_dir=out"], adapt=repeat.settings)
    first, student = teachers.commands(config, "out-teachers")
    minutes = [
        float([word for word in words if word.startswith("--minutes=")][-1].partition("=")[2])
        for words in (first, student)]
    assert minutes == [2, 4]  # three teachers of 2 minutes, then 4 minutes: 10 in total
    assert "--seeds=3" in first
    assert ("--teacher=out-teachers/seed1338,out-teachers/seed1339,out-teachers/seed1340"
            in student)


@pytest.mark.parametrize("words, said", [
    (["--dry_run"], "--teacher=auto and --dry_run: expected one of them"),
    (["--seeds=2"], "--teacher=auto and --seeds: expected one of them"),
    (["--data=chats.jsonl"], "--teacher=auto: chats.jsonl holds conversations, expected a text")])
def test_what_can_have_no_teachers_is_refused_before_any_is_trained(
        folder, started, words, said):  # noqa: F811
    (folder / "chats.jsonl").write_text(
        '{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]}')
    code, _, err = started("--data=my.txt", *SMALL, "--teacher=auto", *words)
    assert code == 2 and said in err and not started.calls


def test_a_text_about_conversations_may_have_teachers(folder, started, monkeypatch):  # noqa: F811
    calls = []
    monkeypatch.setattr(teachers, "run_program", lambda command, environment: (
        calls.append(command), (0, []))[1])
    (folder / "about.txt").write_text(
        'An example: {"messages": [{"role": "user", "content": "Hi"}]}')
    code, _, err = started("--data=about.txt", "--teacher=auto", "--seed=5", "--out_dir=about")
    assert code == 0 and len(calls) == 2, err
