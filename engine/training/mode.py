"""
The modes of train.py that do not train a run: overfit, dry_run, lr_find, profile. engine/debug/
runs them; this file finds the one that the settings ask for, makes its temporary folder, and
returns the settings that it fixes.

A mode starts from new weights, or from --init_from=PATH, in a folder beside the run's that is
removed at the end: it neither reads nor writes a run.
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
# In the master, at most one pair: (folder to remove at the end, parent folders made for it).
temporary = []


def chosen(config):
    """
    Return the name of the mode that the settings ask for; None for a training. Ends the program if
    they ask for two.
    """
    names = [name for name in NAMES if getattr(config, name)]
    if len(names) > 1:
        fail(f"--{names[0]} and --{names[1]}: expected one of them")
    return names[0] if names else None


def check(config):
    """End the program if a mode can't be combined with another setting."""
    name = chosen(config)
    if config.overfit < 0:
        fail(f"overfit is {config.overfit}, expected a number of windows, or 0")
    for other in ("eval_only", "supervise", "json"):
        if name and getattr(config, other):
            fail(f"--{name} and --{other}: expected one of them")
    if name and config.init_from == "resume":
        fail(f"--{name} starts from new weights or from a model, --init_from=PATH; it does not "
             f"resume a run")
    if name == "overfit" and config.teacher:
        fail("--overfit and --teacher: expected one of them; teachers predict no window exactly")
    if name == "profile" and config.fsdp and distributed.world > 1:
        fail("--profile can't separate communication from computation with --fsdp; leave --fsdp "
             "out, or profile one process")


def make_folder(config):
    """
    Make a temporary folder beside the run's and return its path. The end of the program removes it.
    Called by the master, once per session of a dry run: later sessions already have the folder.
    """
    if config.out_dir in [str(folder) for folder, _ in temporary]:
        return config.out_dir
    run = Path(config.out_dir)
    made = [folder for folder in run.parents if not folder.exists()]  # the innermost first
    run.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{run.name}.{chosen(config)}-", dir=run.parent))
    temporary.append((folder, made))
    atexit.register(remove_folder)
    on_stops(lambda signum, frame: sys.exit(128 + signum))  # the exit code that a shell reports
    # Keep W&B offline, with all of its files in the folder that is removed.
    if os.environ.get("WANDB_MODE") != "disabled":
        os.environ["WANDB_MODE"] = "offline"
    for name in ("DIR", "DATA_DIR", "CACHE_DIR", "CONFIG_DIR", "ARTIFACT_DIR"):
        os.environ[f"WANDB_{name}"] = str(folder.absolute())
    return str(folder)


def remove_folder():
    """Remove the mode's folder and those parent folders made for it that are empty, once."""
    if not temporary:
        return
    folder, parents = temporary.pop()
    shutil.rmtree(folder, ignore_errors=True)
    for parent in parents:
        with contextlib.suppress(OSError):
            parent.rmdir()


def own_settings(config):
    """Return {setting: value} of the settings that the chosen mode fixes."""
    name = chosen(config)
    if not name:
        return {}
    own = {"minutes": 0.0, "max_minutes": 0.0, "early_stop": 0, "always_save_checkpoint": False}
    if name == "overfit":
        windows = config.overfit
        # A step reads all windows, in passes of equal size: their largest divisor up to batch_size.
        limit = min(windows, config.batch_size)
        rows = max(n for n in range(1, limit + 1) if windows % n == 0)
        return own | {"batch_size": rows, "gradient_accumulation_steps": windows // rows,
                      "dropout": 0.0, "weight_decay": 0.0, "spike_z": 0.0, "teacher": ""}
    if name == "lr_find":
        return own | {"spike_z": 0.0}
    if name == "dry_run":
        # Two micro-batches per process are enough to try gradient accumulation.
        passes = min(config.gradient_accumulation_steps, 2 * distributed.world)
        return own | {"max_iters": 3, "eval_interval": 2, "log_interval": 1, "eval_iters": 1,
                      "gradient_accumulation_steps": passes}
    return own


def artifact(config, suffix):
    """
    Return a path for a file that a mode leaves: beside the run's folder, named after the run and
    the mode, with a number if a file of that name exists. config.out_dir is the temporary folder.
    """
    folder = Path(config.out_dir)
    # make_folder named it RUN.MODE- and random characters.
    name, number = folder.name.rpartition("-")[0], 1
    path = folder.with_name(f"{name}.{suffix}")
    while path.exists():
        number += 1
        path = path.with_name(f"{name}{number}.{suffix}")
    return path
