"""
What one tries before a training: whether the model can learn at all (overfit) and whether everything works (dry_run); at
which rate (lr_find) stands in lr_find.py, and where the time goes (profile) in profiler.py.

A mode replaces what train.py is made of, a setting, a batch, a schedule, a function, and uses its step and its loop as they
are. It starts from nothing, or from --init_from=PATH, in a folder of its own beside the run's, which is removed at the end:
nothing of a run is read or written. `g` are train.py's globals.
"""
import atexit
import contextlib
import functools
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from configurator import fail
from engine.training import checkpoint, distributed
from engine.debug.instruments import UpdateNorms
from engine.training.distributed import say

NAMES = ("overfit", "dry_run", "lr_find", "profile")
ENOUGH = 0.05        # overfit passes this many nats above the least loss that can be had
HOPELESS = 400       # overfit fails after so many steps without a loss that is 1 % lower ...
LONGEST = 5000       # ... or so many in all
WARM = 10            # steps of warm-up before the constant rate
leaving = []         # the folder to remove at the end, and those made for it


class Training(NamedTuple):
    """
    All that a loop needs, settled. config: the settings and what costs.describe derived; state: what a continuation needs
    besides weights and optimizer; args: ModelArgs; amp: autocast's context; changes: [[setting, before, now]] of a resumed run.
    """
    config: dict
    state: dict
    dataset: Any
    args: Any
    model: Any
    opt: Any
    device: Any
    amp: Any
    changes: list


# ---- what they have in common ------------------------------------------------------------------------------------------

def chosen(s):
    """The name of the mode that the settings ask for; None: a training."""
    names = [name for name in NAMES if getattr(s, name)]
    if len(names) > 1:
        fail(f"--{names[0]} and --{names[1]}: expected one of them")
    return names[0] if names else None


def check(s):
    """Refuse what does not go together with a mode."""
    mode = chosen(s)
    if s.overfit < 0:
        fail(f"overfit is {s.overfit}, expected a number of windows, or 0")
    for other in ("eval_only", "supervise"):
        if mode and getattr(s, other):
            fail(f"--{mode} and --{other}: expected one of them")
    if mode and s.init_from == "resume":
        fail(f"--{mode} starts from nothing or from a checkpoint, --init_from=PATH; it does not resume a run")
    if mode == "profile" and s.sharded and distributed.world > 1:
        fail("--profile does not tell the gathering of shards from the computing; leave --sharded out, or profile one process")


def own_place(s):
    """{"out_dir": a new folder beside the run's}, removed when the program ends; {} for a training."""
    mode = chosen(s)
    if not mode:
        return {}
    run = Path(s.out_dir)
    made = [folder for folder in run.parents if not folder.exists()]  # the nearest first
    run.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{run.name}.{mode}-", dir=run.parent))
    leaving.append((folder, made))
    atexit.register(clean_up)
    distributed.on_stops(lambda signum, frame: sys.exit(128 + signum))  # as a shell says it, after that
    if os.environ.get("WANDB_MODE") != "disabled":
        os.environ["WANDB_MODE"] = "offline"
    for name in ("WANDB_DIR", "WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_ARTIFACT_DIR"):
        os.environ[name] = str(folder.absolute())
    return {"out_dir": str(folder)}


def clean_up():
    """Remove the mode's folder, and those above it that were made for it and hold nothing else. Once, in the master."""
    folder, above = leaving.pop() if leaving else (None, ())
    if folder:
        shutil.rmtree(folder, ignore_errors=True)
    for parent in above:
        with contextlib.suppress(OSError):
            parent.rmdir()


def own_settings(s):
    """{setting: value} that a mode has instead of what was given or derived."""
    mode = chosen(s)
    if not mode:
        return {}
    own = {"minutes": 0.0, "max_minutes": 0.0, "early_stop": 0, "always_save_checkpoint": False}
    if mode == "overfit":
        rows = max(n for n in range(1, min(s.overfit, s.batch_size) + 1) if s.overfit % n == 0)
        return own | {"batch_size": rows, "gradient_accumulation_steps": s.overfit // rows, "dropout": 0.0,
                      "weight_decay": 0.0, "spike_z": 0.0}
    if mode == "lr_find":
        return own | {"spike_z": 0.0}
    if mode == "dry_run":
        few = min(s.gradient_accumulation_steps, 2 * distributed.world)  # two micro-batches in each process
        return own | {"max_iters": 2, "eval_interval": 2, "log_interval": 1, "eval_iters": 1, "gradient_accumulation_steps": few}
    return own | {"wandb_log": False, "tensorboard_log": False, "swanlab_log": False, "trackio_log": False}


def loop(g):
    """What main calls: train, or the mode in its place. Both take a Training."""
    name = chosen(SimpleNamespace(**g))
    if not name:
        return g["train"]
    if name in ("lr_find", "profile"):  # imported here, since they import this file
        from engine.debug import lr_find, profiler
        return functools.partial(run, lr_find.lr_find if name == "lr_find" else profiler.profile, g)
    return functools.partial(run, overfit if name == "overfit" else dry_run, g)


def run(mode, g, training):
    """A mode to its end: its folder goes, and its exit code, if it is not 0, ends the program."""
    code = mode(g, training)
    distributed.on_master(checkpoint.release)
    distributed.on_master(clean_up)
    if code:
        distributed.close(code)
        sys.exit(code)


def artifact(g, ending):
    """The path of what a mode leaves: beside the run's folder, of its name and the mode's, and of no file that is there."""
    name, number = Path(g["out_dir"]).name.rpartition("-")[0], 1
    path = Path(g["out_dir"]).with_name(f"{name}.{ending}")
    while path.exists():
        number += 1
        path = path.with_name(f"{name}{number}.{ending}")
    return path


@contextlib.contextmanager
def replaced(place, **new):
    """For a while others in the place of a module's or an object's attributes, or of a program's globals (a dict)."""
    own, put = (place, place.update) if isinstance(place, dict) else (vars(place), lambda new: set_all(place, new))
    old, added = {name: own[name] for name in new if name in own}, new.keys() - own.keys()
    put(new)
    try:
        yield
    finally:
        put(old)
        for name in added:
            delattr(place, name)


def set_all(place, values):
    for name, value in values.items():
        setattr(place, name, value)


def stepper(g, t):
    """take(step, rate): train.py's step of a Training t at this rate, which returns the loss, a float."""
    wrapped, guard, norms = distributed.wrap(t.model), g["SpikeDetector"](math.inf), UpdateNorms(t.model)
    t.opt.scale = g["LossScale"](t.config["compute_dtype"] == "float16")

    def take(step, rate):
        t.opt.set_rate(rate)
        return g["train_step"](step, wrapped, t.opt, t.dataset, t.device, t.amp, guard, norms)[0].item()
    return take


# ---- overfit -----------------------------------------------------------------------------------------------------------

def overfit(g, t):
    """
    Step 0 again and again: the same windows, the same randomness, a constant rate. What can learn anything learns these by
    heart. Returns the exit code, 0 for PASS.
    """
    take, model, dataset = stepper(g, t), t.model, t.dataset
    x, y = whole_batch(dataset)
    least = {reach: least_loss(x, y, model.bos_id, reach) for reach in (0, 1, None)}
    enough = least[None] + ENOUGH
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    right = [p_right(t, g["batch_size"])]
    say(f"overfit: {len(x)} window{'s' * (len(x) > 1)} of {x.shape[1]} tokens, the same at every step, without dropout, at "
        f"learning_rate={g['learning_rate']}; who knows them by heart has a loss of {least[None]:.4f}, {enough:.4f} is enough")
    losses, lowest, since = [], math.inf, 0
    while len(losses) < LONGEST and len(losses) - since < HOPELESS:
        losses.append(take(0, g["learning_rate"] * min(1, (len(losses) + 1) / WARM)))
        if losses[-1] < 0.99 * lowest:
            lowest, since = losses[-1], len(losses)
        if (n := len(losses) - 1) & (n - 1) == 0:  # 0, 1, 2, 4, 8 ...
            say(f"step {n:>5} | loss {losses[-1]:.4f}")
        if losses[-1] <= enough or not math.isfinite(losses[-1]):
            break
    right.append(p_right(t, g["batch_size"]))
    still = [name for name, p in model.named_parameters() if not differs(p, before[name])]
    reached = f"loss {losses[-1]:.4f} after {len(losses)} steps, the right tokens' probability {right[0]:.4f} -> {right[1]:.4f}"
    moved = f"; {named(still)} never changed" if still else ""
    if losses[-1] <= enough and right[1] > 0.5 * math.exp(-losses[-1]):
        say(f"PASS: {reached}{moved}")
        return 0
    say(f"FAIL: {reached}; {suspect(losses, right, least, enough, batch_changes(dataset))}{moved}")
    return 1


def suspect(losses, right, least, enough, changes):
    """What to look at, by where the loss stands. least: what can be had from 0 tokens, the last one, all."""
    end, start = losses[-1], losses[0]
    if not math.isfinite(end):
        return f"the loss is no number from step {len(losses)} on: lower --learning_rate, or look for a division by 0"
    if changes:
        return "the batch of a step, asked for twice, is not the same: look at the data's order, augmentation and targets"
    if end <= enough:
        return "the loss falls, but it is not that of these targets: look at what the model shifts or compares"
    if end > 0.97 * start:
        return (f"stuck at the start, about ln V = {start:.2f}: look at whether gradients reach the weights, whether the "
                f"optimizer has these parameters, and at the rate")
    if end > 0.95 * least[0]:
        return (f"no better than without seeing the text ({least[0]:.2f}): look at whether the tokens reach the lm_head, at "
                f"detached or frozen layers, a limit on the logits, and the rate, which may be too high")
    if end > 0.95 * least[1]:
        return f"no better than from the last token alone ({least[1]:.2f}): look at the attention, its mask and positions"
    return ("it falls, but not to the end: look at the rate (too high or too low?), at capacity, a limit on the logits, a mask "
            "that hides too much, a frozen layer")


def whole_batch(dataset):
    """The global batch of step 0, (x, y), in every process."""
    return type(dataset).make_batch(SimpleNamespace(**vars(dataset) | {"rank": 0, "world": 1, "opening": dataset.opening}), 0)


def least_loss(x, y, bos_id, reach=None):
    """
    The mean loss, in nats, of who knows x, y (N, T) by heart and sees of the text the last `reach` tokens (None: all in the
    window, back to bos_id): the same tokens may go on in several ways.
    """
    after = defaultdict(Counter)  # {what is seen: {target: times}}
    for tokens, targets in zip(x.tolist(), y.tolist()):
        seen = ()
        for token, target in zip(tokens, targets):
            seen = (token,) if token == bos_id else (hash(seen), token)
            if target >= 0:
                after[seen if reach is None else seen[-1:] * reach][target] += 1
    counts = [list(targets.values()) for targets in after.values()]
    return sum(n * math.log(sum(row) / n) for row in counts for n in row) / max(1, sum(map(sum, counts)))


@torch.no_grad()
def p_right(t, rows):
    """The mean probability that a Training's model gives to the targets of step 0, over all processes."""
    total = torch.zeros(2, device=t.device)  # sum of probabilities, predictions
    t.model.eval()
    for x, y in zip(*(both.split(rows) for both in t.dataset.batch(0))):
        x, y = distributed.to_device(t.device, x, y)
        with t.amp:
            logits = t.model(x, every=1)[0]  # (B, T, V)
        p = logits.float().softmax(-1).gather(-1, y.clamp(min=0)[..., None])[..., 0]
        total += torch.stack(((p * (y >= 0)).sum(), (y >= 0).sum()))
    t.model.train()
    right, predictions = distributed.mean(total).tolist()
    return right / max(1, predictions)


def batch_changes(dataset):
    """Whether the batch of step 0 differs when it is asked for again."""
    return any(not torch.equal(a, b) for a, b in zip(dataset.batch(0), dataset.batch(0)))


def differs(a, b):
    """Whether two tensors differ anywhere. All processes have to call it, as either may be sharded."""
    a, b = (distributed.unshard(t.detach()).cpu() for t in (a, b))
    return not torch.equal(a, b)


def named(names, most=3):
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


# ---- dry run -------------------------------------------------------------------------------------------------------------

def dry_run(g, t):
    """
    The loop for two steps, with evaluation, tracking, checkpoint and export; a model and an optimizer made anew from the
    checkpoint, which have to be the same; the third step with them; ./run on the exported file.
    """
    seconds = Counter()
    t.state["clock"] = {"seconds": 0.0, "limit": 0.0, "end": math.inf}
    with contextlib.ExitStack() as stack:
        stack.enter_context(replaced(checkpoint, farewell=lambda s, state, *_: f"dry run: {state['step']} steps are taken"))
        for place, name, what in ((g, "train_step", "steps"), (g, "assess", "evaluation"), (checkpoint, "save", "checkpoints"),
                                  (g, "export_model", "export"), (g, "start_tracking", "tracker's start")):
            old = place[name] if isinstance(place, dict) else getattr(place, name)
            stack.enter_context(replaced(place, **{name: timed(seconds, what, old)}))
        g["train"](t)
        again = timed(seconds, "reload", reloaded)(g, t)
        g["max_iters"] = 3
        g["train"](again._replace(changes=[["max_iters", "2", "3"]]))
    distributed.on_master(try_files, g, seconds)
    spent = ", ".join(f"{what} {taken:.1f} s" for what, taken in seconds.items())
    say(f"dry run: all worked, 3 steps with everything around them: {spent}; of all this only prepared data stay, in {g['cache']}")


def timed(seconds, what, call):
    """`call`, whose time is added up under a name."""
    def timed_call(*arguments, **named):
        start = time.perf_counter()
        try:
            return call(*arguments, **named)
        finally:
            seconds[what] += time.perf_counter() - start
    return timed_call


def reloaded(g, t):
    """The Training as a resumed run gets it from the checkpoint; one line if weights or optimizer are not what was saved."""
    kept = {kind: {name: p.detach().clone() if distributed.is_shard(p) else p.detach().to("cpu", copy=True)
                   for name, p in tensors.items()} for kind, tensors in parts(t.model, t.opt).items()}
    distributed.on_master(checkpoint.release)
    s = SimpleNamespace(**g | {"init_from": "resume"})
    start, _ = distributed.on_master(checkpoint.find_start, s)
    model, opt = g["make_model"](t.args, t.dataset, t.device)
    state = checkpoint.restore(s, start, t.state["fixed"], opt)
    distributed.load_weights(model, checkpoint.load(start, check=False)["model"])
    for kind, tensors in parts(model, opt).items():
        for name, tensor in kept[kind].items():
            if name not in tensors or differs(tensor, tensors[name]):
                fail(f"the checkpoint gives back another {kind} {name} than was saved")
    return t._replace(model=model, opt=opt, state=state)


def parts(model, opt):
    """What a checkpoint holds: {kind: {name: tensor}}."""
    return {"weight": dict(model.named_parameters()), "optimizer's state": opt.state_dict()}


def try_files(g, seconds):
    """Whether what a run leaves behind is there and good for something; a line where it is not."""
    model, program = Path(g["out_dir"], "model.gguf"), Path(__file__).resolve().parents[2] / "run"
    if not model.exists():
        fail("no model.gguf was exported")
    if g["wandb_log"] and os.environ["WANDB_MODE"] != "disabled" and not [*Path(g["out_dir"]).rglob("*.wandb")]:
        fail("W&B has recorded nothing; the warning above says why")
    if not program.exists():
        return say("note: ./run is not built (make run), so it has not read the exported file")
    command = [program, model, "-n", "8", "-i", g["sample_prompt"].split("|")[0]]
    done = timed(seconds, "./run", subprocess.run)(command, capture_output=True, text=True, errors="replace")
    if done.returncode:
        fail(f"./run does not read the exported file: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return None
