"""
Checks before the first step: short experiments with the model, the data and train.py's own step, each of which finds one kind
of bug and says so in a line. `--checks` chooses among them. Nothing of the training changes: weights, gradients, optimizer,
random numbers and the batches to come stay as they are, bit for bit.

A check (data_checks.py, model_checks.py beside this file) is a function of a Ready. It raises Bug, which ends the run; Suspicion,
which is a warning; or Skip, where it does not apply.
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
from engine.training import distributed
from engine.training.training import Training
from engine.debug.data_checks import Bug, Skip, Suspicion, batch, leak, targets, text, vocabulary
from engine.files import why
from engine.debug.instruments import UpdateNorms, outputs
from engine.debug.model_checks import (TOKENS, accumulation, attention, documents, future, gradients, loss, norms, rate, run,
                                 saved)

SECONDS = 2.0  # what all checks together may take, or ...
SHARE = 0.03   # ... this part of the run, where that is more; the costly ones are left out then, and named


NEVER = SimpleNamespace(refuses=lambda loss, norm: False)  # a spike detector that finds none


@dataclass
class Ready:
    """
    All that exists just before the first step: a Training t, whose parts are attributes here too; fresh: whether the
    weights are new ones; train.py's train_step, make_optimizer and export_model.
    """
    t: Training
    fresh: bool
    train_step: Callable
    make_optimizer: Callable
    export_model: Callable

    def __post_init__(self):
        t = self.t
        self.s, self.args, self.model, self.opt, self.dataset = t.config, t.args, t.model, t.opt, t.dataset
        self.device, self.amp, self.config = t.device, t.amp, t.record
        x, y = self.dataset.make_batch(0)
        rows = max(1, TOKENS // x.shape[1])
        self.x, self.y = distributed.to_device(self.device, x[:rows, :TOKENS], y[:rows, :TOKENS])
        short = max(2, TOKENS // len(x))  # all sequences of a step, cut to few tokens
        self.small = x[:, :short].contiguous(), y[:, :short].contiguous()
        self.sharded = distributed.is_sharded(self.model)
        self.scale = type(self.opt.scale)(self.config["compute_dtype"] == "float16", {"factor": 1024.0, "steps": 0})

    def step(self, step, model, opt, batch=None):
        """
        Take train.py's step number `step` on a batch (x, y), the small one if none is given, with this model
        and optimizer, whatever its loss. Return what train_step returns.
        """
        documents = SimpleNamespace(separator=self.model.bos_id)  # kept apart as the model keeps them
        t = replace(self.t, model=model, network=model, opt=opt, dataset=documents)
        return self.train_step(t, step, *(batch or self.small), NEVER, UpdateNorms(self.model))

    def line(self, T):
        """(1, T) tokens of one document: BOS, and the batch's own behind it."""
        bos = self.dataset.tokenizer.bos_id
        tokens = self.x.flatten()[self.x.flatten() != bos]
        tokens = tokens.repeat(math.ceil(T / max(1, len(tokens))))[:T] if len(tokens) else self.x.flatten()[:1].repeat(T)
        tokens[0] = bos
        return tokens[None]

    def other(self, tokens, t):
        """The same but for token t, which is no BOS before nor after."""
        tokens, bos = tokens.clone(), self.dataset.tokenizer.bos_id
        old = int(tokens[0, t])
        tokens[0, t] = next(i for i in range(self.args.vocab_size) if i not in (old, bos))
        return tokens

    @torch.no_grad()
    def outputs(self, tokens):
        """{layer: what it gives}, each (1, T, ...): the blocks and the logits, without dropout."""
        self.model.eval()
        with self.amp, outputs({f"layers.{i}": layer for i, layer in enumerate(self.model.layers)}) as found:
            logits = self.model(tokens, every=True)[0]
        return {name: out.float() for name, out in (found | {"the logits": logits}).items()}


CHECKS = {check.__name__: check for check in (
    batch, text, targets, vocabulary, future, documents, norms, attention, gradients, loss, accumulation, rate, saved, run,
    leak)}
BY_MASTER = {"vocabulary", "saved", "run", "leak"}  # files and text: one process looks at them, while the others wait
LAST = {"rate", "saved", "run", "leak"}             # the costly ones, which are left out when the time is over


def check_names(words):
    """Refuse a --checks that names no check."""
    chosen(words)


def chosen(words):
    """The names that --checks means: all, none, some (a,b), all but some (-a,-b). One line for a name that is none."""
    names = [word.strip() for word in words.split(",") if word.strip()]
    if names in (["all"], ["none"]):
        return list(CHECKS) if names == ["all"] else []
    for name in names:
        if name.removeprefix("-") not in CHECKS:
            near = difflib.get_close_matches(name.removeprefix("-"), CHECKS, 1, 0.5)
            fail(f"--checks={words}: there is no check {name.removeprefix('-')!r}; "
                 + (f"did you mean {near[0]!r}?" if near else f"expected all, none, or some of {', '.join(CHECKS)}"))
    left_out = [name[1:] for name in names if name.startswith("-")]
    wanted = [name for name in names if not name.startswith("-")]
    if left_out and wanted or not names:
        fail(f"--checks={words}: expected names to make, or names to leave out, each with a - before it; or all or none")
    return [name for name in CHECKS if (name in wanted if wanted else name not in left_out)]


@contextlib.contextmanager
def untouched(model, device):
    """What checks do in here leaves no trace in random numbers, gradients and modes."""
    sources = [torch, *[getattr(torch, device.type)] * (device.type in ("cuda", "mps"))]
    states = [source.get_rng_state() for source in sources]
    modes = {module: module.training for module in model.modules()}
    try:
        yield
    finally:
        for source, state in zip(sources, states):
            source.set_rng_state(state)
        for module, mode in modes.items():
            module.training = mode
        if distributed.is_sharded(model):
            model.reshard()  # else the parameters of the last forward pass would stand in for the slices
        for p in model.parameters():
            p.grad = None


def outcome(check, r):
    """(kind, message): what a check says. That one can't be made, as in a model of other modules, is a suspicion too."""
    try:
        with untouched(r.model, r.device):
            check(r)
    except (Bug, Suspicion, Skip) as e:
        return type(e), str(e)
    except OSError as e:
        return Suspicion, f"could not be made ({why(e)})"
    except Exception as e:
        return Suspicion, f"could not be made ({type(e).__name__}: {(str(e).splitlines() or [''])[0]})"
    return None, ""


def run_checks(r):
    """Make the checks that r.s.checks names, all processes together; say how it went, and end where a bug is found."""
    names, config, start = chosen(r.s.checks), r.config, time.perf_counter()
    if not names:
        return
    seconds = r.s.max_iters * config["tokens_per_iter"] * config["flops_per_token"] / (config["peak_flops"] * distributed.world)
    budget = max(SECONDS, SHARE * min(seconds, 60 * (r.s.minutes or r.s.max_minutes or math.inf)))
    passed, bugs, late = 0, [], []
    for name in names:
        if name in LAST and distributed.all_max([time.perf_counter() - start], r.device)[0] > budget:
            late.append(name)
            continue
        kind, message = (None, "") if name in BY_MASTER and not distributed.master else outcome(CHECKS[name], r)
        if distributed.world > 1 and not (r.small[1] >= 0).any():  # a process that has no sequence of this step
            kind, message = None, ""
        bug, doubt, skip = distributed.any_true([kind is Bug, kind is Suspicion, kind is Skip], r.device)
        message = message or "found by another process"
        if bug:
            bugs.append((name, message))
        elif doubt:
            distributed.say(f"warning: check {name}: {message}")
        passed += not (bug or doubt or skip)
    if bugs and not distributed.master:
        sys.exit(2)
    if bugs:
        (name, message), more = bugs[0], [name for name, _ in bugs[1:]]
        more = f"; failed too: {', '.join(more)}" if more else ""
        fail(f"check {name}: {message}{more} (--checks=-{name} goes on without this check)")
    distributed.say(f"checks: {passed} passed in {time.perf_counter() - start:.1f} s"
                 + (f"; left out, since they take more than {budget:.0f} s: {', '.join(late)}" if late else ""))
