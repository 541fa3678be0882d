"""Test that a run is repeated bit for bit from its folder, whatever it was started with."""
import json
import os
import shlex

import pytest

from configurator import configure
from engine.training import checkpoint, progress, repeat
from tests import forked
from tests.test_train import ROOT, TINY, folder, rows  # noqa: F401

SMALL = ["--dim=32", "--n_layers=1", "--n_heads=2", "--max_seq_len=32", "--batch_size=4",
         "--max_iters=12", "--warmup_iters=2", "--log_interval=4", "--eval_interval=6",
         "--eval_iters=1", "--checks=none", "--device=cpu", "--peak_tflops=0.1"]
KINDS = {  # the order matters: some start from the model of an earlier one
    "preset": [ROOT / "config/debug.py", "--data=stories:300", "--peak_tflops=0.1", "--device=cpu"],
    "own": ["--data=my.txt", *SMALL, "--dropout=0.1"],
    "char": ["--data=my.txt", "--vocab_source=char", *SMALL, "--optimizer=adamw"],
    "bpe": ["--data=my.txt", "--vocab_source=bpe", "--vocab_size=290", *SMALL],
    "tuned": ["--init_from=preset", "--data=my.txt", "--max_iters=12", "--eval_iters=1",
              "--peak_tflops=0.1", "--device=cpu"],
    "chat": ["--init_from=preset", f"--data={ROOT / 'examples/chats.jsonl'}", "--max_seq_len=192",
             "--max_iters=4", "--eval_iters=1", "--peak_tflops=0.1", "--device=cpu"],
    "lora": ["--init_from=preset/model.gguf", "--data=my.txt", "--lora_rank=4", "--max_iters=12",
             "--eval_iters=1", "--peak_tflops=0.1", "--device=cpu"],
    "minutes": ["--data=my.txt", "--minutes=0.07", "--max_seq_len=64", "--peak_tflops=0.1",
                "--device=cpu"],
    "depth": ["--data=my.txt", "--depth=1", *SMALL[3:]],
    "accumulation": ["--data=my.txt", *SMALL, "--gradient_accumulation_steps=3", "--early_stop=1"],
}


def run(folder, *words, code=0):  # noqa: F811
    done = forked.run([ROOT / "train.py", *words], folder, os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == code, done.stdout + done.stderr
    return done


def figures(folder, out):  # noqa: F811
    """
    Return ({iter: metrics} of all rows in a run's log, the last row's metrics of an evaluation). A
    run that is stopped evaluates at its last step; the repetition logs loss/train there, too.
    """
    names = "loss/train", "loss/val", "loss/train_eval", "bpb/val", "grad/norm", "lr"
    found = {row["iter"]: {name: row[name] for name in names if name in row}
             for row in rows(folder, out)}
    last = found[max(found)]
    return found, {name: last[name] for name in names[1:4]}


def same(folder, out, again):  # noqa: F811
    """Return whether two runs have equal metrics; the last row of `again` may have more of them."""
    (found, last), (repeated, repeated_last) = figures(folder, out), figures(folder, again)
    end = found.pop(max(found)), repeated.pop(max(repeated))
    return found == repeated and last == repeated_last and end[0].items() <= end[1].items()


@pytest.mark.slow
def test_ten_kinds_of_runs_are_repeated_bit_for_bit(folder):  # noqa: F811
    for name, words in KINDS.items():
        run(folder, *words, f"--out_dir={name}")
    ends = {name: json.loads((folder / name / "result.json").read_text())["ended_by"]
            for name in KINDS}
    assert ends["minutes"] == "minutes", ends
    for name in KINDS:
        done = run(folder, f"{name}/config.json")
        assert f"the run of {name} is repeated in {name}-repeat" in done.stdout
        assert "another text" not in done.stdout
        assert same(folder, name, f"{name}-repeat"), name
        assert "this run is finished" in run(folder, f"{name}/config.json").stdout


def test_a_run_is_repeated_from_its_folder(folder):  # noqa: F811
    """A run that max_minutes ended is repeated to the same step, however fast the machine is."""
    run(folder, *KINDS["own"], "--out_dir=first/own")
    run(folder, *TINY, "--data=my.txt", "--max_iters=100000", "--max_minutes=0.025",
        "--out_dir=timed", "--eval_interval=1000")
    before = {path: path.read_bytes() for path in (folder / "first/own").glob("*.*")}
    done = run(folder, "first/own/config.json")
    assert "the run of own is repeated in first/own-repeat" in done.stdout
    assert same(folder, "first/own", "first/own-repeat")
    assert before == {path: path.read_bytes() for path in (folder / "first/own").glob("*.*")}
    run(folder, "timed/checkpoints/" + checkpoint.newest(folder / "timed").name + "/config.json",
        "--max_seq_len=32")
    assert same(folder, "timed", "timed-repeat")
    results = [json.loads((folder / name / "result.json").read_text())
               for name in ("timed", "timed-repeat")]
    assert [found["ended_by"] for found in results] == ["max_minutes"] * 2
    assert results[0]["best"] == results[1]["best"]
    rates = [row["lr"] for row in rows(folder, "timed-repeat") if "lr" in row]
    assert rates[-1] < 0.1 * max(rates)


def test_a_command_is_repeated_with_another_seed(folder):  # noqa: F811
    run(folder, *KINDS["own"], "--out_dir=plain")
    words = shlex.split(json.loads((folder / "plain/result.json").read_text())["command"])
    done = run(folder, *words[2:], "--seed=2")
    assert "plain holds a run with seed=1337; the run with seed=2 is in plain-seed2" in done.stdout
    assert json.loads((folder / "plain-seed2/config.json").read_text())["seed"] == 2
    assert "this run is finished" in run(folder, *words[2:], "--seed=2").stdout
    done = run(folder, "plain/config.json", "--seed=2", "--max_iters=13")
    assert "resuming plain-seed2 at iteration 12" in done.stdout
    assert rows(folder, "plain-seed2")[-1]["iter"] == 13
    assert rows(folder, "plain")[-1]["iter"] == 12


def test_what_a_repetition_takes_from_a_run():
    stored = {"out_dir": "out/a", "eval_only": True, "init_from": "scratch", "dim": 32,
              "patience": 3, "n_params": 9, "vocab_source": "char", "model_args": {}, "dataset": {},
              "seed": 5}
    defaults = dict.fromkeys(["out_dir", "eval_only", "init_from", "dim", "early_stop",
                              "vocab_source", "seed", "max_seq_len"])
    assert repeat.settings({"dim": 3, "no": 4}, defaults) == {"dim": 3, "no": 4}
    assert repeat.settings(stored, defaults) == {
        "init_from": "auto", "dim": 32, "early_stop": 3, "vocab_source": "char", "seed": 5}
    tuned = stored | {
        "init_from": "out/base", "vocab_source": "out/a/checkpoints/step_00000010/tokenizer.model",
        "max_seq_len": 64}
    assert repeat.settings(tuned, defaults) == {
        "init_from": "out/base", "early_stop": 3, "seed": 5, "max_seq_len": 64}
    kept = tuned | {"vocab_source": "cache/vocabulary/tokenizer.model"}
    assert repeat.settings(kept, defaults)["vocab_source"] == kept["vocab_source"]


@pytest.mark.parametrize("change, words, said", [
    ({"data": "password=***"}, [],
     "--data was password=***, without its secret; give the full value to repeat the run"),
    ({}, ["--depth=4"], "--depth=4: run/config.json sets all sizes"),
])
def test_what_cannot_be_repeated_is_one_line(tmp_path, capsys, change, words, said):
    (tmp_path / "run").mkdir()
    stored = {"data": "my.txt", "depth": 0, "model_args": {}, "dataset": {}} | change
    (tmp_path / "run/config.json").write_text(json.dumps(stored))
    import train
    values = vars(train).copy()
    config = configure(values, "data", [str(tmp_path / "run/config.json"), *words],
                       adapt=repeat.settings)
    with pytest.raises(SystemExit):
        repeat.name_folder(config)
    assert said in capsys.readouterr().err


def test_the_step_at_which_the_clock_ends_a_run_is_extrapolated_again_after_each_hundredth():
    state = {"step": 0}
    assert progress.last_by_clock(state, 0.0) == progress.last_by_clock(state, 0.5) == float("inf")
    for step in range(1, 1001):
        state["step"] = step
        assert progress.last_by_clock(state, step / 1000) in (1000, 1001)
    schedule = state["schedule"]
    assert 200 < len(schedule) < 400 and len({step for step, _ in schedule}) == len(schedule)
    state["step"], before = schedule[-1][0] + 1, schedule[-1][1]
    spent = state["step"] / before
    assert progress.last_by_clock(state, spent) == before
    assert progress.last_by_clock(state, 0.5, anew=True) == 2 * state["step"]
    # The run has become slower.
    assert progress.last_by_clock(state, 0.52) == round(state["step"] / 0.52)
    # A repetition has no time limit: its last step follows from the schedule.
    assert progress.last_by_clock({"step": 500, "schedule": schedule}, 0.0) == 1000
    assert progress.last_by_clock({"step": 500, "schedule": []}, 0.0) == float("inf")
