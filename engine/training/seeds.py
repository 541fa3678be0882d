"""
--seeds=4: train the same command with several seeds, one run after the other, and print the mean
and the standard deviation of their results.

Seed N trains in out_dir/seedN. The same command continues where the last one was stopped.
"""
import json
import os
import shlex
import statistics
import sys
from pathlib import Path

from configurator import fail
from engine.advice import renamed
from engine.programs import run_program
from engine.tracking.redact import redact
from engine.training import distributed, mode, plan, result, resume, run_folder
from engine.training.distributed import say
from engine.untrusted import MAX_JSON, read_json

METRICS = "loss/val", "bpb/val"
# Sizes that a time budget derives from measured times of a step, and those that follow from them.
# Every seed gets those of the first: else, on a busy machine, runs could differ in more than seeds.
SIZES = "dim", "max_seq_len", "max_text_bytes"
# Settings in which a seed's run may differ from this command.
NOT_COMPARED = {"out_dir", "seed", "seeds", "json", "init_from", "lora_targets"}


def check(config):
    """End the program if these settings can't be trained with several seeds."""
    name = "eval_only" if config.eval_only else mode.chosen(config)
    if name:
        fail(f"--seeds and --{name}: expected one of them")
    if distributed.world > 1:
        fail(f"--seeds={config.seeds} is for one process; with torchrun give one --seed after the "
             f"other")
    if run_folder.is_run(config.out_dir):
        fail(f"--out_dir={config.out_dir}: holds a run; with --seeds each seed trains in a folder "
             f"of its own in out_dir, so give another one")


def is_done(found):
    """Return whether a result is that of a run that the same command would not continue."""
    return found.get("status") == "finished" or found.get("ended_by") == "max_minutes"


def refuse_other(config, folder):
    """End the program if a seed's folder holds a run with other settings than this command's."""
    stored = renamed(read_json(folder / "config.json", MAX_JSON, {}))
    names = config.given.keys() & stored.keys() - NOT_COMPARED
    if not config.batch_size:  # derived
        names -= {"batch_size", "gradient_accumulation_steps"}
    if config.sample_prompt == "auto":  # config.json has the prompt that was chosen
        names -= {"sample_prompt"}
    for name in sorted(names):
        now = redact({name: getattr(config, name)})[name]
        if redact({name: stored[name]})[name] != now:
            fail(f"{folder} holds a run with {name}={stored[name]}, now it is {now}; give another "
                 f"--out_dir")


def sizes_of(config, folder):
    """
    Return the words that give a command the sizes which the run in `folder` has derived from the
    time budget.
    """
    if not plan.derives_from_time(config, set(config.given)):
        return []
    stored = read_json(folder / "config.json", MAX_JSON, {})
    return [f"--{name}={stored[name]}" for name in SIZES
            if name in stored and name not in config.given]


def train_all(config):
    """Train with config.seeds seeds, from config.seed on, and print their results."""
    check(config)
    seeds = range(config.seed, config.seed + config.seeds)
    folders = {seed: Path(config.out_dir, f"seed{seed}") for seed in seeds}
    is_anew = config.init_from == "scratch"  # each trainer then sets the run in its folder aside
    for folder in folders.values() if not is_anew else ():
        refuse_other(config, folder)
    again = resume.same_command(config)
    # Runs with the same group share charts in W&B.
    group = os.environ.get("WANDB_RUN_GROUP") or Path(config.out_dir).name
    for number, (seed, folder) in enumerate(folders.items(), 1):
        if is_done(result.read(folder)) and not is_anew:
            say(f"seed {seed}, {number} of {config.seeds}: finished before, in {folder}")
            continue
        say(f"seed {seed}, {number} of {config.seeds}: {folder}")
        command = [sys.executable, *sys.argv, "--seeds=1", f"--seed={seed}", f"--out_dir={folder}"]
        if number > 1:
            command += sizes_of(config, folders[config.seed])
        code, signals = run_program(command, {"WANDB_RUN_GROUP": group})
        if signals or code == 130:
            print(f"stopped at seed {seed}; {again} continues", file=sys.stderr)
            return 128 + signals[0] if signals else code
        if code:
            fail(f"seed {seed} ended with code {code}; the messages above have the reason, and "
                 f"{again} continues")
        if not is_done(result.read(folder)):
            fail(f"seed {seed} was stopped; {again} continues")
    show(config, {seed: result.read(folder) for seed, folder in folders.items()})
    return 0


def show(config, results):
    """Print each seed's result, mean and standard deviation. results: {seed: its result.json}."""
    for seed, found in results.items():
        best = found["best"]
        losses = ", ".join(f"{name} {best[name]:.4f}" for name in METRICS if best[name] is not None)
        say(f"seed {seed}: {losses} at iter {best['iter']}, {found['seconds'] / 60:.1f} min")
    summary = {}
    for name in METRICS:
        known = [found["best"][name] for found in results.values()]
        if None in known:  # a run that was never evaluated
            continue
        mean, std = statistics.fmean(known), statistics.stdev(known)
        summary[name] = {"mean": mean, "std": std, "best": min(known), "n": len(known)}
        say(f"{name}: mean {mean:.4f}, standard deviation {std:.4f} (n = {len(known)})")
    group = {"status": "finished", "out_dir": config.out_dir, "seeds": list(results),
             "results": summary, "runs": list(results.values())}
    say(f"compare with others: python compare.py {shlex.quote(config.out_dir)}")
    if config.json:
        say(json.dumps(group, allow_nan=False))
