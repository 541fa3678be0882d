"""
Checks before the first step: short experiments with the model, the data and train.py's own step,
each of which finds one kind of bug and reports it in a line. `--checks` selects them. They leave
the training as it is, bit for bit: weights, gradients, optimizer, random numbers, later batches.

A check (data_checks.py, model_checks.py) is a function of a CheckContext. It raises Bug, which ends
the run; Suspicion, which is a warning; or Skip, if it does not apply.
"""
import contextlib
import difflib
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace

import torch

from configurator import fail
from engine.debug.data_checks import Bug, Skip, Suspicion, batch, leak, targets, text, vocabulary
from engine.debug.instruments import UpdateNorms
from engine.debug.model_checks import (TOKENS, accumulation, attention, documents, future,
                                       gradients, loss, norms, rate, run, saved)
from engine.ops import float32_products
from engine.training import distributed
from engine.training.training import Training
from engine.untrusted import reason
from optim import LossScale

# Time budget: SECONDS, or SHARE of the run's expected time if that is more. A COSTLY check is left
# out if the checks before it have taken longer; once begun, it may itself exceed the budget.
SECONDS = 2.0
SHARE = 0.03

CHECKS = {check.__name__: check for check in (
    batch, text, targets, vocabulary, future, documents, norms, attention, gradients, loss,
    accumulation, rate, saved, run, leak)}
# --checks accepts these names too, but run_checks does not run them: "files" runs while the data
# are prepared, "export" once the model is made.
EARLIER = ("files", "export")
# Only the master runs the checks that read or write files; the other processes wait for it.
ON_MASTER = {"vocabulary", "saved", "run", "leak"}
COSTLY = {"rate", "saved", "run", "leak"}


@dataclass
class CheckContext:
    """
    The inputs of a check, just before the first step.

    t: the Training; most of its fields are repeated as attributes here. fresh: whether the weights
    are random. train_step, make_optimizer, export_model: the functions of train.py.
    x, y and small are parts of the first batch, of about TOKENS tokens each. x, y: its first few
    sequences, uncut unless they exceed TOKENS, on the device. small: (x, y) of all its sequences,
    each cut short, on the CPU. scale: a LossScale for checks that run backward, separate from that
    of the training; its factor is 1 unless compute_dtype is float16. A check that takes steps
    copies it, because a step updates it.
    """
    t: Training
    fresh: bool
    train_step: Callable
    make_optimizer: Callable
    export_model: Callable

    def __post_init__(self):
        t = self.t
        self.config, self.record, self.args, self.model, self.opt = (
            t.config, t.record, t.args, t.model, t.opt)
        self.dataset, self.device, self.amp = t.dataset, t.device, t.amp
        x, y = self.dataset.make_batch(0)
        rows = max(1, TOKENS // x.shape[1])
        self.x, self.y = distributed.to_device(self.device, x[:rows, :TOKENS], y[:rows, :TOKENS])
        length = max(2, TOKENS // len(x))
        self.small = x[:, :length].contiguous(), y[:, :length].contiguous()
        self.sharded = distributed.is_sharded(self.model)
        is_float16 = self.record["compute_dtype"] == "float16"
        self.scale = LossScale(is_float16, {"factor": 1024.0, "steps": 0})

    def step(self, step, model, opt, batch=None):
        """
        Take training step number `step` of train.py with this model and optimizer on a batch
        (x, y), `small` by default. No step is skipped, not even one whose loss is not finite.
        The targets are those of the text, even if the training has teachers.
        `untouched` does not undo what opt does: the caller restores the weights, or passes an opt
        that changes none. Return what train_step returns.
        """
        # train_step reads only the separator of the dataset, the token that begins a document. The
        # model has it as bos_id, which is None without document_mask.
        dataset = SimpleNamespace(separator=self.model.bos_id)
        accept_all = SimpleNamespace(refuses=lambda loss, norm: False)  # replaces SpikeDetector
        t = replace(self.t, model=model, network=model, opt=opt, dataset=dataset, teachers=None)
        return self.train_step(t, step, *(batch or self.small), accept_all, UpdateNorms(self.model))

    def document(self, T):
        """Return one document of T tokens, (1, T): BOS, then tokens of x, repeated as needed."""
        bos_id, tokens = self.dataset.tokenizer.bos_id, self.x.flatten()
        others = tokens[tokens != bos_id]
        if not len(others):
            others = tokens[:1]
        tokens = others.repeat(math.ceil(T / len(others)))[:T]
        tokens[0] = bos_id
        return tokens[None]

    def with_other_token(self, tokens, t):
        """Return a copy of tokens (1, T) with another token at t, which is not BOS either."""
        tokens = tokens.clone()
        avoided = int(tokens[0, t]), self.dataset.tokenizer.bos_id
        tokens[0, t] = next(i for i in range(self.args.vocab_size) if i not in avoided)
        return tokens


def check_names(words):
    """Exit with a message if --checks has an unknown name."""
    chosen(words)


def chosen(words):
    """
    Return the names in CHECKS, in its order, that --checks selects: all, none, some (a,b), or all
    but some (-a,-b). Names in EARLIER are accepted, but not returned. Exit with a message if a name
    is unknown.
    """
    names = [word.strip() for word in words.split(",") if word.strip()]
    if names in (["all"], ["none"]):
        return list(CHECKS) if names == ["all"] else []
    for name in (name.removeprefix("-") for name in names):
        if name not in (*EARLIER, *CHECKS):
            near = difflib.get_close_matches(name, (*EARLIER, *CHECKS), 1, 0.5)
            advice = f"expected all, none, or some of {', '.join((*EARLIER, *CHECKS))}"
            if near:
                advice = f"did you mean {near[0]!r}?"
            fail(f"--checks={words}: there is no check {name!r}; {advice}")
    left_out = [name[1:] for name in names if name.startswith("-")]
    if not names or 0 < len(left_out) < len(names):
        fail(f"--checks={words}: expected names of checks, or names to leave out, each with a - "
             f"before it; or all or none")
    return [name for name in CHECKS if (name not in left_out if left_out else name in names)]


@contextlib.contextmanager
def untouched(model, device):
    """Restore torch's random states and train or eval mode at the end, and drop all gradients."""
    generators = [torch]
    if device.type in ("cuda", "mps"):
        generators.append(getattr(torch, device.type))
    states = [generator.get_rng_state() for generator in generators]
    training = {module: module.training for module in model.modules()}
    try:
        yield
    finally:
        for generator, state in zip(generators, states):
            generator.set_rng_state(state)
        for module, was_training in training.items():
            module.training = was_training
        if distributed.is_sharded(model):
            model.reshard()  # the last forward pass has gathered the parameters
        for p in model.parameters():
            p.grad = None


def outcome(check, ctx):
    """
    Run a check and return (Bug, Suspicion, Skip or None, its message). Any other exception is a
    Suspicion: the check may not fit a model whose modules the user has changed. Matrix products use
    float32 factors even under --dtype=bf32, whose rounding exceeds the tolerances of the checks.
    """
    try:
        with untouched(ctx.model, ctx.device), float32_products():
            check(ctx)
    except (Bug, Suspicion, Skip) as e:
        return type(e), str(e)
    except OSError as e:
        return Suspicion, f"could not run ({reason(e)})"
    except Exception as e:
        first_line = str(e).partition("\n")[0]
        return Suspicion, f"could not run ({type(e).__name__}: {first_line})"
    return None, ""


def agreed_outcome(name, ctx):
    """Return the gravest `outcome` of a check in all processes, with a message."""
    kind, message = None, ""
    if distributed.master or name not in ON_MASTER:
        kind, message = outcome(CHECKS[name], ctx)
    if distributed.world > 1 and not (ctx.small[1] >= 0).any():
        kind = None  # this process's part of the batch is only padding: ignore its outcome
    by_gravity = Bug, Suspicion, Skip
    found = distributed.any_true([kind is grave for grave in by_gravity], ctx.device)
    agreed = next((grave for grave, is_found in zip(by_gravity, found) if is_found), None)
    return agreed, message if kind is agreed else "found by another process"


def time_budget(ctx):
    """Return the seconds after which no COSTLY check begins."""
    config, record = ctx.config, ctx.record
    flops = config.max_iters * record["tokens_per_iter"] * record["flops_per_token"]
    seconds = flops / (record["peak_flops"] * distributed.world)
    limit = 60 * (config.minutes or config.max_minutes or math.inf)
    return max(SECONDS, SHARE * min(seconds, limit))


def run_checks(ctx):
    """
    Run the checks that config.checks selects, in all processes together. Print warnings and a
    summary; exit with a message if a check finds a bug.
    """
    names, start = chosen(ctx.config.checks), time.perf_counter()
    if not names:
        return
    budget, passed, bugs, late = time_budget(ctx), 0, [], []
    for name in names:
        elapsed = time.perf_counter() - start
        if name in COSTLY and distributed.all_max([elapsed], ctx.device)[0] > budget:
            late.append(name)
            continue
        kind, message = agreed_outcome(name, ctx)
        if kind is Bug:
            bugs.append((name, message))
        elif kind is Suspicion:
            distributed.say(f"warning: check {name}: {message}")
        elif kind is None:
            passed += 1
    if bugs:
        if not distributed.master:
            sys.exit(2)
        name, message = bugs[0]
        others = ", ".join(other for other, _ in bugs[1:])
        more = f"; failed too: {others}" if others else ""
        fail(f"check {name}: {message}{more} (--checks=-{name} skips this check)")
    left_out = ""
    if late:
        left_out = f"; skipped, since the others took more than {budget:.0f} s: {', '.join(late)}"
    distributed.say(f"checks: {passed} passed in {time.perf_counter() - start:.1f} s{left_out}")
