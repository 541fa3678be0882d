"""
Repeat a run from its folder:

    python train.py out/my/config.json             the same settings, in out/my-repeat
    python train.py out/my/config.json --seed=2    with another seed, in out/my-seed2

On a CPU, with the same program and text, the repetition has the same losses bit for bit. A run that
--minutes or --max_minutes limits is repeated step by step: with the same learning rates, to the
same last step, however long that takes now.
"""
import dataclasses
import math
from pathlib import Path

from configurator import fail
from engine.advice import renamed
from engine.tracking.redact import HIDDEN
from engine.training import checkpoint, progress, resume
from engine.training.distributed import say
from engine.untrusted import MAX_JSON, read_json, reading
from model import ModelArgs

# Settings of one session, or of one folder, which a repetition does not take from a config.json.
OF_FOLDER = ("out_dir", "eval_only", "json", "seeds")
# Recorded values whose change may change the losses: {name in config.json: words}.
MACHINE = {"git_commit": "commit", "torch_version": "torch", "device_name": "device",
           "compute_dtype": "dtype", "world_size": "processes"}


def is_record(values):
    """Return whether the values of a .json file are those of a run's config.json."""
    return isinstance(values.get("model_args"), dict) and isinstance(values.get("dataset"), dict)


def settings(values, defaults):
    """
    Return {setting: value} of a file of overrides. From a run's config.json this takes the settings
    and leaves out what was derived from them or belongs to the run's folder. defaults: {setting:
    value} of train.py.
    """
    if not is_record(values):
        return values
    found = {name: value for name, value in renamed(values).items()
             if name in defaults and name not in OF_FOLDER}
    if found.get("init_from", "auto") in resume.STARTS:
        return found | {"init_from": "auto"}
    # Fine-tuning takes the sizes from the model that it starts from, and also the vocabulary, if
    # vocab_source is a file in a checkpoint, since checkpoints are pruned.
    sizes = {field.name for field in dataclasses.fields(ModelArgs)} - {"max_seq_len", "dropout"}
    left_out = set(renamed(dict.fromkeys(sizes)))
    if checkpoint.STEP.fullmatch(Path(str(found.get("vocab_source"))).parent.name):
        left_out.add("vocab_source")
    return {name: value for name, value in found.items() if name not in left_out}


def source(config):
    """
    Return (folder of the run that this command repeats, the content of the config.json that the
    command names), or (None, {}).
    """
    for path in map(Path, reversed(config.files)):
        stored = read_json(path, MAX_JSON, {}) if path.suffix == ".json" else {}
        if is_record(stored):
            is_step = checkpoint.STEP.fullmatch(path.absolute().parent.name)
            return path.absolute().parents[2 if is_step else 0], renamed(stored)
    return None, {}


def name_folder(config):
    """
    Return the Config with an out_dir beside the run that it repeats, unless the command gives an
    out_dir or repeats no run. Ends the program if the config.json does not have what is needed.
    """
    folder, stored = source(config)
    if not folder:
        return config
    for name in ("data", "init_from", "vocab_source"):
        if HIDDEN in getattr(config, name):
            fail(f"--{name} was {getattr(config, name)}, without its secret; give the full "
                 f"value to repeat the run")
    if config.depth != stored.get("depth", 0):
        fail(f"--depth={config.depth}: {folder.name}/config.json sets all sizes, so --depth "
             f"has no effect; give --dim, --n_layers and others, or leave config.json out")
    if config.out_dir != "auto":
        return config
    is_same = config.seed == stored.get("seed", config.seed)
    ending = "repeat" if is_same else f"seed{config.seed}"
    if config.seeds > 1:
        ending = "seeds"
    out_dir = folder.with_name(f"{folder.name}-{ending}")
    if out_dir.is_relative_to(Path.cwd()):
        out_dir = out_dir.relative_to(Path.cwd())
    say(f"the run of {folder.name} is repeated in {out_dir}")
    return config.changed(out_dir=str(out_dir))


def schedule(config):
    """
    Return the entries of progress.new_state that let a run follow the learning rates of the run
    that it repeats: {} if no clock limited that one, or if this command has other limits.
    """
    folder, stored = source(config)
    limits = "minutes", "max_minutes", "max_iters"
    is_limited = config.minutes or config.max_minutes
    if not is_limited or any(getattr(config, name) != stored.get(name) for name in limits):
        return {}
    newest = checkpoint.newest(folder)
    if not newest:
        say(f"note: {folder.name} has no checkpoint with its learning rates, which depended "
            f"on the elapsed time; those of this run do too")
        return {}
    with reading(newest, "a checkpoint", fail):
        state = checkpoint.load(newest, "train", check=False, mmap=True)["state"]
        resume.check_state(state)
    pairs, ended_by = state.get("schedule", []), progress.ended_by(config, state)
    if not pairs or ended_by == "signal":
        say(f"note: {folder.name} was stopped before its time was over, so the learning rates here "
            f"depend on the elapsed time")
        return {}
    # A repetition of an early stop stops early by itself, but with another seed perhaps later. So
    # its end is the step at which the time would have ended.
    end = pairs[-1][1] if ended_by == "early_stop" else state["step"]
    clock = progress.NO_LIMIT
    if config.minutes:
        clock = clock | {"end": math.inf, "minutes": config.minutes}
    return {"schedule": pairs, "end": end, "clock": clock}


def note_differences(config, record):
    """
    Print what differs from the run that a command repeats and may change its losses: text, commit,
    machine. record: what config.json will hold.
    """
    folder, stored = source(config)
    if not folder:
        return
    found = [f"{words} {stored[name]}, here {record[name]}" for name, words in MACHINE.items()
             if name in stored and name in record and stored[name] != record[name]]
    if stored["dataset"].get("fingerprint") != record["dataset"]["fingerprint"]:
        found.append("another text")
    if stored.get("git_changed") or record.get("git_changed"):
        found.append("uncommitted changes")
    if found:
        say(f"note: {folder.name} had {'; '.join(found)}: the losses may differ")
