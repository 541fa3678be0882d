"""
Muon for the matrices (two-dimensional parameters) inside the blocks, AdamW for all else.

Muon replaces the momentum of a weight matrix by the nearest (semi-)orthogonal matrix: every direction of the update
gets the same length. https://kellerjordan.github.io/posts/muon. Its updates are scaled to the size that AdamW's
have, so one learning rate and one weight decay serve both. https://arxiv.org/abs/2502.16982

SpikeDetector tells which steps had better not be taken.

step(observe) enters observe(params), a context manager, around the update of some parameters at a time: see UpdateNorms
in engine/debug/instruments.py. Without it AdamW updates all of a group at once: a few of them don't fill a GPU.
"""
import functools
import math
from collections import defaultdict
from contextlib import nullcontext

import torch

from engine.training import distributed, hardware
from engine.spans import spanned


def orthogonalize(g, dtype=torch.float32, steps=5):
    """
    (n, R, C) -> about U V^T of each matrix's singular value decomposition, by Newton-Schulz iterations of a quintic
    whose slope at 0 is steep: singular values end between 0.7 and 1.2, which is near enough. dtype: of the products.
    """
    x = g.to(dtype)
    if g.shape[1] > g.shape[2]:
        x = x.mT.contiguous()  # the product of the short sides is the smaller one
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)  # largest singular value below 1
    a, b = (x.new_empty(len(x), x.shape[1], x.shape[1]) for _ in range(2))  # memory once used is faster than fresh
    y = torch.empty_like(x)
    for _ in range(steps):
        torch.bmm(x, x.mT, out=a)
        torch.baddbmm(a, a, a, beta=-4.7750, alpha=2.0315, out=b)
        torch.baddbmm(x, b, x, beta=3.4445, out=y)
        x, y = y, x
    return (x.mT if g.shape[1] > g.shape[2] else x).type_as(g)


def portions(params, most):
    """The parameters in order, as lists of at most `most` elements together; one that has more is by itself."""
    portion, size = [], 0
    for p in params:
        if portion and size + p.numel() > most:
            yield portion
            portion, size = [], 0
        portion.append(p)
        size += p.numel()
    if portion:
        yield portion


# The two below are not torch.optim.Optimizer: making one of those imports PyTorch's compiler, a second and 70 MB.
class AdamW:
    """One kernel for many parameters of a group. https://arxiv.org/abs/1711.05101"""
    TOGETHER = 2 ** 22  # elements observed at a time, or one parameter that has more: what UpdateNorms copies

    def __init__(self, groups, lr, beta1, beta2, eps=1e-8):
        groups = [{"scale": 1.0} | group for group in groups]  # of the rate
        self.param_groups = [group | {"lr": lr * group["scale"]} for group in groups]
        self.state = defaultdict(dict)
        self.numbers = {"beta1": beta1, "beta2": beta2, "eps": eps, "amsgrad": False, "maximize": False}

    @torch.no_grad()
    def step(self, observe=nullcontext):
        most = math.inf if observe is nullcontext else self.TOGETHER
        for group in self.param_groups:
            for params in portions([p for p in group["params"] if p.grad is not None], most):
                with observe(params):
                    self.move(params, group)

    def move(self, params, group):
        for p in params:
            if not self.state[p]:
                self.state[p] = {"step": torch.zeros((), device=p.device),
                                 "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
        steps, means, squares = ([self.state[p][key] for p in params] for key in ("step", "exp_avg", "exp_avg_sq"))
        torch._foreach_add_(steps, 1)
        torch._fused_adamw_(params, [p.grad for p in params], means, squares, [], steps, lr=group["lr"],
                            weight_decay=group["weight_decay"], **self.numbers)


class Muon:
    """
    Momentum, orthogonalised, over matrices (R, C); those of one shape go through the iterations together. Raises
    ValueError for parameters of other dimensions.
    """
    TOGETHER = 2 ** 28  # their elements at most: a gigabyte for each copy that the iterations make
    WIDE = 128          # short side from which the iterations are faster in bfloat16, where there is such; good enough for them

    def __init__(self, params, lr, weight_decay, momentum=0.95):
        odd = [tuple(p.shape) for p in params if p.dim() != 2]
        if not params or odd:
            raise ValueError(f"Muon takes parameters of two dimensions, found {f'the shape {odd[0]}' if odd else 'none'}; "
                             f"give others to AdamW, as make_optimizer does")
        self.param_groups = [{"params": params, "lr": lr, "scale": 1.0, "weight_decay": weight_decay, "momentum": momentum}]
        self.state = defaultdict(dict)
        self.half = hardware.has_bfloat16(params[0].device)

    @torch.no_grad()
    def step(self, observe=nullcontext):
        for group in self.param_groups:
            by_shape = defaultdict(list)
            for p in group["params"]:
                if p.grad is not None:  # else it is frozen
                    by_shape[p.shape].append(p)
            for shape, alike in by_shape.items():
                for params in portions(alike, self.TOGETHER):
                    with observe(params):
                        self.move(params, shape, group)

    def move(self, params, shape, group):
        """One update of matrices of one shape, which sharded processes put together for it."""
        for p in params:
            if not self.state[p]:
                self.state[p]["momentum"] = torch.zeros_like(p)
        grads, momenta = [p.grad for p in params], [self.state[p]["momentum"] for p in params]
        torch._foreach_lerp_(momenta, grads, 1 - group["momentum"])
        ahead = torch._foreach_lerp(grads, momenta, group["momentum"])  # Nesterov: one step further
        dtype = torch.bfloat16 if self.half and min(shape) >= self.WIDE else torch.float32
        updates = distributed.split_across_ranks(lambda some: orthogonalize(some, dtype), torch.stack(distributed.unshard(ahead)))
        updates *= 0.2 * max(shape) ** 0.5
        updates = [distributed.shard_like(u, p) for u, p in zip(updates, params)]
        torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(params, updates, alpha=-group["lr"])


class Together:
    """Several optimizers behind the interface of one; its state goes by the names of the model's parameters."""

    def __init__(self, model, *optimizers):
        self.optimizers = optimizers
        self.param_groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        self.names = {p: name for name, p in model.named_parameters()}
        self.scale = LossScale()
        self.ready = lambda: None  # returns when the weights may change, which a checkpoint's writer may be reading

    @spanned("optimizer")
    def step(self, observe=nullcontext):
        self.ready()
        self.scale.divide([p.grad for p in self.names if p.grad is not None])
        for optimizer in self.optimizers:
            optimizer.step(observe)

    def set_rate(self, rate):
        for group in self.param_groups:
            group["lr"] = rate * group["scale"]

    @spanned("optimizer")
    def zero_grad(self):
        for p in self.names:
            p.grad = None

    def state_dict(self):
        """{"layers.0.attention.wq.weight.momentum": tensor}, sharded as its parameter is. Rates and decay are settings."""
        return {f"{self.names[p]}.{key}": value for optimizer in self.optimizers
                for p, values in optimizer.state.items() for key, value in values.items()}

    def load_state_dict(self, state):
        """state: as above, of whole tensors; each process takes its slice."""
        owner = {self.names[p]: (optimizer, p) for optimizer in self.optimizers
                 for group in optimizer.param_groups for p in group["params"]}
        for name, value in state.items():
            name, _, key = name.rpartition(".")
            optimizer, p = owner[name]
            value = value.to(p.device, copy=True)
            optimizer.state[p][key] = distributed.shard_like(value, p) if value.shape == p.shape else value


class LossScale:
    """
    Small gradients vanish in float16. So the loss is multiplied by a factor before backward(), and the gradients are
    divided by it before the update. It is halved where something overflows, and doubled after GROWS steps without.
    wanted: whether it is float16; else the factor stays 1. https://arxiv.org/abs/1710.03740
    """
    GROWS = 2000

    def __init__(self, wanted=False, saved=None):
        self.wanted = wanted
        self.state = saved if wanted and saved else {"factor": 2.0 ** 16 if wanted else 1.0, "steps": 0}

    @property
    def factor(self):
        return self.state["factor"]

    def divide(self, grads):
        if self.wanted:
            torch._foreach_mul_(grads, 1 / self.factor)

    def update(self, norm):
        """norm: of the gradients, the same in all processes, not finite where one overflowed."""
        s = self.state
        if self.wanted:
            finite = math.isfinite(norm)
            s["steps"] = s["steps"] + 1 if finite else 0
            s["factor"] *= 0.5 if not finite else 1 if s["steps"] % self.GROWS else 2


say_once = functools.cache(distributed.say)  # a program makes optimizers for measurements and checks too


def make_optimizer(model, kind, learning_rate, weight_decay, beta1, beta2, table_rate=1.0, momentum=0.95):
    """
    kind: "muon" or "adamw". Scales and biases are not decayed; all parameters of more dimensions are. table_rate: by how much
    the rate of embedding and classifier is larger. beta1, beta2: AdamW's; momentum: Muon's.
    """
    blocks, tables, vectors, others = [], [], [], []
    for name, p in model.named_parameters():
        if p.dim() > 2:  # stacked experts, kernels of convolutions: Muon has no rule for them
            others.append(p)
            if kind == "muon":
                say_once(f"optimizer: AdamW updates {name}, since Muon takes matrices and its shape is {tuple(p.shape)}")
        else:
            (vectors if p.dim() < 2 else blocks if name.startswith("layers.") else tables).append(p)
    if kind == "muon" and not blocks:
        say_once("optimizer: AdamW updates all parameters, since Muon is for matrices named layers.* and there are none")
    use_muon = kind == "muon" and blocks
    kinds = [(tables, table_rate, weight_decay), (vectors, 1.0, 0.0)] + [(blocks, 1.0, weight_decay)] * (not use_muon)
    kinds += [(others, 1.0, weight_decay)] * bool(others)
    adamw = AdamW([{"params": params, "scale": scale, "weight_decay": decay} for params, scale, decay in kinds],
                  learning_rate, beta1, beta2)
    if not use_muon:
        return Together(model, adamw)
    return Together(model, Muon(blocks, learning_rate, weight_decay, momentum), adamw)


class SpikeDetector:
    """
    Tells whether a step would harm: its loss or gradient norm is no number, or lies spike_z deviations above a running
    mean. Each refusal in a row widens that, so that a new level is soon taken up and only what is far beyond the usual is
    refused for long. seen, skipped: steps judged and refused; in_a_row: refused ones since the last good one.
    (engine/tracking/anomalies.py warns of odd rows in the log; it changes nothing.)
    """
    WARM, DECAY, WIDER = 100, 0.98, 1.2  # steps before the running mean is believed; its memory; by how much

    def __init__(self, spike_z, saved=None):
        self.spike_z = spike_z
        self.state = saved or {"mean": [0.0, 0.0], "var": [0.0, 0.0], "seen": 0, "skipped": 0, "in_a_row": 0}

    def refuses(self, loss, norm):
        """loss, norm: floats, the same in all processes."""
        s = self.state
        values = [x if math.isfinite(x) else math.inf for x in (loss, math.log(norm) if norm > 0 else 0.0)]
        most = self.spike_z * self.WIDER ** s["in_a_row"] if self.spike_z else math.inf  # 0: only what is no number
        far = [x - m > most * max(v ** 0.5, 0.01) for x, m, v in zip(values, s["mean"], s["var"])]
        if math.inf in values or math.isnan(norm) or (s["seen"] >= self.WARM and any(far)):
            s["skipped"], s["in_a_row"] = s["skipped"] + 1, s["in_a_row"] + 1
            return True
        keep = min(self.DECAY, s["seen"] / (s["seen"] + 1))  # a plain mean at first
        for i, x in enumerate(values):
            gap = x - s["mean"][i]
            s["mean"][i] += (1 - keep) * gap
            s["var"][i] = keep * (s["var"][i] + (1 - keep) * gap ** 2)
        s["seen"], s["in_a_row"] = s["seen"] + 1, 0
        return False


def learning_rate_at(s, step, last_step, spent=0.0):
    """
    The rate of step 0, 1, ...: linear warm-up, then the schedule down to min_lr. It follows the steps or, where that is
    further, the clock: spent is the part of max_minutes that has gone.
    """
    if step < s.warmup_iters:
        return s.learning_rate * (step + 1) / s.warmup_iters
    if not s.decay_lr:
        return s.learning_rate
    step = max(step, spent * last_step)
    if s.schedule == "cosine":
        done = min(1.0, (step - s.warmup_iters) / max(1, last_step - s.warmup_iters))
        return s.min_lr + 0.5 * (1 + math.cos(math.pi * done)) * (s.learning_rate - s.min_lr)
    left = (last_step - step) / max(1, s.decay_fraction * last_step)
    return s.min_lr + min(1.0, max(0.0, left)) * (s.learning_rate - s.min_lr)
