"""
--teacher=auto: train COUNT models, whose seeds are --seed + 1 to --seed + COUNT, then one that
learns their average prediction (see distill.py). One child process trains all teachers, another the
student; both continue where they were stopped.
"""
import contextlib
import os
import sys
from pathlib import Path

from configurator import fail
from engine.programs import run_program
from engine.text import conversations, readers
from engine.training import checkpoint, distributed, mode, resume
from engine.training.distributed import say
from engine.untrusted import MAX_JSON, read_json

COUNT = 3
# Fractions of --minutes: for each teacher, and for the student, whose steps take twice as long, as
# they include the predictions of all teachers.
TEACHER_TIME, STUDENT_TIME = 0.2, 0.4
STUDENT = "-student"  # suffix of out_dir unless it is given


def folder_of(config):
    """Return the folder in which the teachers train: out/my-teachers for out/my-student."""
    return Path(f"{str(Path(config.out_dir)).removesuffix(STUDENT)}-teachers")


def teachers_of(config):
    """
    Return the student's setting `teacher`: the folders of its teachers, separated by commas. Other
    runs in their folder, such as teachers of another seed, are not among them.
    """
    seeds = range(config.seed + 1, config.seed + 1 + COUNT)
    return ",".join(str(folder_of(config) / f"seed{seed}") for seed in seeds)


def check(config):
    """End the program if these settings can't be trained with teachers of their own."""
    name = "eval_only" if config.eval_only else mode.chosen(config)
    if name:
        fail(f"--teacher=auto and --{name}: expected one of them")
    if config.seeds > 1:
        fail("--teacher=auto and --seeds: expected one of them; run it once for each --seed")
    if distributed.world > 1:
        fail("--teacher=auto is for one process; train the teachers with --seeds, then give their "
             "folder as --teacher to torchrun")
    # Leave a file that is unreadable or compressed to the trainer, which has messages for it.
    with contextlib.suppress(OSError):
        is_json = readers.suffix(config.data) in (*readers.LINES, ".json")
        if is_json and conversations.LOOKS.search(readers.first_text(config.data)):
            fail(f"--teacher=auto: {config.data} holds conversations, expected a text")
    if config.init_from == "scratch":  # sets the runs in these folders aside
        return
    # The student could not resume a run with other teachers: say so before any is trained.
    stored = read_json(Path(config.out_dir, "config.json"), MAX_JSON, {})
    teacher, expected = stored.get("teacher", ""), teachers_of(config)
    if stored and teacher != expected and checkpoint.newest(config.out_dir):
        has = f"teacher={teacher}" if teacher else "no teacher"
        fail(f"--out_dir={config.out_dir}: holds a run with {has}, expected teacher={expected}; "
             f"give another --out_dir")
    first = folder_of(config) / f"seed{config.seed + 1}"
    before = read_json(first / "config.json", MAX_JSON, {}).get("minutes")
    wanted = f"{TEACHER_TIME * config.minutes:g}"  # as commands() rounds it
    if config.minutes and isinstance(before, float) and f"{before:g}" != wanted:
        fail(f"--minutes={config.minutes:g}: the teachers in {folder_of(config)} have {before:g} "
             f"minutes each, expected {wanted}; give --minutes={before / TEACHER_TIME:g}, or "
             f"another --out_dir to train new ones")


def commands(config, folder):
    """
    Return the words of the two commands: of the teachers, which train in `folder`, and of the
    student, without --max_seq_len, which train_all adds.
    """
    words = [sys.executable, *sys.argv]  # the last word for a setting counts
    teachers, student = words + ["--teacher="], words + [f"--teacher={teachers_of(config)}"]
    teachers += [f"--seeds={COUNT}", f"--seed={config.seed + 1}", f"--out_dir={folder}"]
    teachers += ["--json=False"]  # the last line is the student's
    student += [f"--out_dir={config.out_dir}"]
    if config.minutes:
        teachers += [f"--minutes={TEACHER_TIME * config.minutes:g}"]
        student += [f"--minutes={STUDENT_TIME * config.minutes:g}"]
    return teachers, student


def train_all(config):
    """Train the teachers and the student. Return the exit code."""
    config = config.changed(out_dir=resume.folder_of_seed(config))
    check(config)
    folder = folder_of(config)
    group = os.environ.get("WANDB_RUN_GROUP") or Path(config.out_dir).name
    teachers, student = commands(config, folder)
    say(f"teachers: {COUNT} with other seeds, in {folder}")
    if code := run(teachers, group, config):
        return code
    # With minutes of its own, the student might choose a longer context than the teachers have.
    stored = read_json(folder / f"seed{config.seed + 1}" / "config.json", MAX_JSON, {})
    student += [f"--max_seq_len={stored.get('max_seq_len', config.max_seq_len)}"]
    say(f"the model that learns from them: {config.out_dir}")
    return run(student, group, config)


def run(command, group, config):
    """
    Run a training, in a group of runs that share charts in W&B. Return its exit code or, like a
    shell, 128 + the number of the signal that asked this process to stop. Ends the program if
    another signal killed the training, for example for lack of memory.
    """
    code, signals = run_program(command, {"WANDB_RUN_GROUP": group})
    if code < 0 and not signals:
        fail(f"a training was killed by signal {-code}, expected it to end by itself; "
             f"{resume.same_command(config)} continues")
    return 128 + signals[0] if signals else code
