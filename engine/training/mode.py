"""
The modes of train.py that do not train a run: overfit, dry_run, lr_find, profile. Which one the settings ask for, the
temporary folder it works in, the settings it has in place of the given ones. engine/debug/ has what each does.

A mode starts from nothing, or from --init_from=PATH, in a folder beside the run's that is removed at the end: it reads
and writes nothing of a run.
"""
import atexit
import contextlib
import os
import shutil
import sys
import tempfile
from pathlib import Path

from configurator import fail
from engine.training import distributed
from engine.training.signals import on_stops

NAMES = ("overfit", "dry_run", "lr_find", "profile")
temporary = []  # (the folder to remove at the end, the folders above it that were made for it), of the master


def chosen(config):
    """Return the name of the mode that the settings ask for, None for a training. Ends in one line if there are two."""
    names = [name for name in NAMES if getattr(config, name)]
    if len(names) > 1:
        fail(f"--{names[0]} and --{names[1]}: expected one of them")
    return names[0] if names else None


def check(config):
    """Refuse settings that do not go together with a mode."""
    name = chosen(config)
    if config.overfit < 0:
        fail(f"overfit is {config.overfit}, expected a number of windows, or 0")
    for other in ("eval_only", "supervise"):
        if name and getattr(config, other):
            fail(f"--{name} and --{other}: expected one of them")
    if name and config.init_from == "resume":
        fail(f"--{name} starts from nothing or from a checkpoint, --init_from=PATH; it does not resume a run")
    if name == "profile" and config.sharded and distributed.world > 1:
        fail("--profile does not tell the gathering of shards from the computing; leave --sharded out, or profile one "
             "process")


def make_folder(config):
    """Make a temporary folder beside the run's and return its path; the end of the program removes it. For the master."""
    run = Path(config.out_dir)
    made = [folder for folder in run.parents if not folder.exists()]  # the nearest first
    run.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{run.name}.{chosen(config)}-", dir=run.parent))
    temporary.append((folder, made))
    atexit.register(remove_folder)
    on_stops(lambda signum, frame: sys.exit(128 + signum))  # the code that a shell reports
    if os.environ.get("WANDB_MODE") != "disabled":
        os.environ["WANDB_MODE"] = "offline"
    for name in ("WANDB_DIR", "WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_ARTIFACT_DIR"):
        os.environ[name] = str(folder.absolute())
    return str(folder)


def remove_folder():
    """Remove the mode's folder, and the folders above it that were made for it and are empty. Once, in the master."""
    folder, above = temporary.pop() if temporary else (None, ())
    if folder:
        shutil.rmtree(folder, ignore_errors=True)
    for parent in above:
        with contextlib.suppress(OSError):
            parent.rmdir()


def own_settings(config):
    """Return {setting: value} that a mode has in place of what was given or derived."""
    name = chosen(config)
    if not name:
        return {}
    own = {"minutes": 0.0, "max_minutes": 0.0, "early_stop": 0, "always_save_checkpoint": False}
    if name == "overfit":
        windows = config.overfit
        rows = max(n for n in range(1, min(windows, config.batch_size) + 1) if windows % n == 0)
        return own | {"batch_size": rows, "gradient_accumulation_steps": windows // rows, "dropout": 0.0,
                      "weight_decay": 0.0, "spike_z": 0.0}
    if name == "lr_find":
        return own | {"spike_z": 0.0}
    if name == "dry_run":
        two_each = 2 * distributed.world  # two micro-batches in each process
        return own | {"max_iters": 3, "eval_interval": 2, "log_interval": 1, "eval_iters": 1,
                      "gradient_accumulation_steps": min(config.gradient_accumulation_steps, two_each)}
    return own | {"wandb_log": False, "tensorboard_log": False, "swanlab_log": False, "trackio_log": False}


def artifact(config, suffix):
    """
    Return the path of a file that a mode leaves: beside the run's folder, named after it and the mode, with a number
    where a file of that name exists. config.out_dir is the mode's temporary folder.
    """
    folder = Path(config.out_dir)
    name, number = folder.name.rpartition("-")[0], 1
    path = folder.with_name(f"{name}.{suffix}")
    while path.exists():
        number += 1
        path = path.with_name(f"{name}{number}.{suffix}")
    return path
