"""
--teacher=auto: train COUNT models with other seeds, then one that learns what they predict on
average (see distill.py). Each is a run of train.py; the same command continues where the last one
was stopped.
"""
import os
import sys
from pathlib import Path

from configurator import fail
from engine.programs import run_program
from engine.text import conversations
from engine.training import distributed, mode, result, seeds
from engine.training.distributed import say
from engine.untrusted import MAX_JSON, read_json

COUNT = 3
# Fractions of --minutes: of each teacher, and of the student, which reads as much and asks them for
# their predictions at each step.
TEACHER_TIME, STUDENT_TIME = 0.2, 0.4


def check(config):
    """End the program if these settings can't be trained with teachers of their own."""
    name = "eval_only" if config.eval_only else mode.chosen(config)
    if name:
        fail(f"--teacher=auto and --{name}: expected one of them")
    if config.seeds > 1:
        fail("--teacher=auto and --seeds: expected one of them; give one --seed after the other")
    if distributed.world > 1:
        fail("--teacher=auto is for one process; train the teachers with --seeds, then give their "
             "folder as --teacher to torchrun")
    if Path(config.data).is_file():
        with open(config.data, "rb") as f:
            beginning = f.read(1 << 16).decode(errors="replace")
        if conversations.LOOKS.search(beginning):
            fail(f"--teacher=auto: {config.data} holds conversations, expected a text")


def commands(config, folder):
    """
    Return the words of the two commands: of the teachers, which train in `folder`, and of the
    student, without its context.
    """
    words = [sys.executable, *sys.argv]
    first, student = words + ["--teacher="], words + [f"--teacher={folder}"]
    first += [f"--seeds={COUNT}", f"--seed={config.seed + 1}", f"--out_dir={folder}"]
    first += ["--json=False"]  # the last line is the student's
    student += [f"--out_dir={config.out_dir}"]
    if config.minutes:
        first += [f"--minutes={TEACHER_TIME * config.minutes:g}"]
        student += [f"--minutes={STUDENT_TIME * config.minutes:g}"]
    return first, student


def train_all(config):
    """Train the teachers and the student. Return the exit code."""
    check(config)
    folder = Path(f"{config.out_dir}-teachers")
    group = os.environ.get("WANDB_RUN_GROUP") or Path(config.out_dir).name
    first, student = commands(config, folder)
    runs = [folder / f"seed{seed}" for seed in range(config.seed + 1, config.seed + 1 + COUNT)]
    is_anew = config.init_from == "scratch"  # each training then sets the run in its folder aside
    if is_anew or not all(seeds.is_done(result.read(path)) for path in runs):
        say(f"teachers: {COUNT} with other seeds, in {folder}")
        if code := run(first, group):
            return code
    # A teacher needs the student's context, which --minutes would choose anew.
    stored = read_json(runs[0] / "config.json", MAX_JSON, {})
    student += [f"--max_seq_len={stored.get('max_seq_len', config.max_seq_len)}"]
    say(f"the model that learns from them: {config.out_dir}")
    return run(student, group)


def run(command, group):
    """Run a training; runs with the same group share charts in W&B. Return its exit code."""
    code, signals = run_program(command, {"WANDB_RUN_GROUP": group})
    return 128 + signals[0] if signals else code
