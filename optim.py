"""
The optimizers of a training run: Muon for the matrices inside the blocks and AdamW for all other
parameters, AdamW alone, or any torch.optim.Optimizer that is added to OPTIMIZERS.

Also the schedule of the learning rate, the loss scale of float16, and the spike detector.
"""
import functools
import inspect
import math
from collections import defaultdict
from contextlib import nullcontext
from typing import NamedTuple

import torch

from configurator import fail
from engine.spans import spanned
from engine.training import distributed, hardware, lora


def orthogonalize(g, dtype=torch.float32, steps=5):
    """
    Return approximately U V^T of each matrix of g (n, R, C), whose singular value decomposition is
    U S V^T. Newton-Schulz iterations of a quintic that is steep at 0 bring all singular values
    between 0.7 and 1.2, which is close enough to 1: x <- 3.4445 x - 4.7750 a x + 2.0315 a^2 x with
    a = x x^T. dtype: of the matrix products.
    """
    x = g.to(dtype)
    if g.shape[1] > g.shape[2]:
        x = x.mT.contiguous()  # so that x x^T has the size of the short side
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)  # now the largest singular value is below 1
    # Allocate once, since memory that was used before is faster than fresh memory.
    a, b = (x.new_empty(len(x), x.shape[1], x.shape[1]) for _ in range(2))
    y = torch.empty_like(x)
    for _ in range(steps):
        torch.bmm(x, x.mT, out=a)
        torch.baddbmm(a, a, a, beta=-4.7750, alpha=2.0315, out=b)
        torch.baddbmm(x, b, x, beta=3.4445, out=y)
        x, y = y, x
    return (x.mT if g.shape[1] > g.shape[2] else x).type_as(g)


def chunk_by_numel(params, max_numel):
    """
    Yield the parameters in order, in lists of at most max_numel elements together. A parameter with
    more elements is a list of its own.
    """
    chunk, numel = [], 0
    for p in params:
        if chunk and numel + p.numel() > max_numel:
            yield chunk
            chunk, numel = [], 0
        chunk.append(p)
        numel += p.numel()
    if chunk:
        yield chunk


def with_gradient(group):
    """Return the parameters of a group that have a gradient; frozen ones have none."""
    return [p for p in group["params"] if p.grad is not None]


def own_gradients(model):
    """
    Copy the gradients of a model into memory of their own. A backward pass that is replayed as a
    CUDA graph leaves them in memory that the next replay overwrites, so that a second micro-batch
    would be added to itself.
    """
    params = [p for p in model.parameters() if p.grad is not None]
    # Multiplying by 1 copies all of them in few kernels.
    for p, copy in zip(params, torch._foreach_mul([p.grad for p in params], 1.0)):
        p.grad = copy


class ObservedOptimizer(torch.optim.Optimizer):
    """
    A torch.optim.Optimizer with step_observed(observe), which enters the context observe(params)
    around the update of each chunk of parameters. UpdateNorms in engine/debug/instruments.py copies
    the parameters that it observes: in chunks it needs less memory.
    """
    # PyTorch wraps these methods to hide them from torch.compile. The first call of a wrapper
    # imports the compiler: a second and 70 MB.
    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    state_dict = inspect.unwrap(torch.optim.Optimizer.state_dict)
    load_state_dict = inspect.unwrap(torch.optim.Optimizer.load_state_dict)

    def step(self, closure=None):
        """
        Update the weights, as any torch.optim.Optimizer. CombinedOptimizer calls step_observed
        instead: PyTorch wraps `step` with hooks and profiling, a tenth of a millisecond.
        """
        loss = None
        if closure:
            with torch.enable_grad():
                loss = closure()
        self.step_observed(nullcontext)
        return loss

    def step_observed(self, observe):
        raise NotImplementedError


class AdamW(ObservedOptimizer):
    """
    AdamW, with one kernel for many parameters of a group. https://arxiv.org/abs/1711.05101
    """
    MAX_CHUNK = 2 ** 22  # max elements of an observed chunk

    def __init__(self, params, lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0):
        # "fused" makes load_state_dict move the step counts to the device of their parameters.
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps,
                                  "weight_decay": weight_decay, "fused": True})

    @torch.no_grad()
    def step_observed(self, observe):
        # Without an observer a whole group is one chunk, since small ones leave a GPU partly idle.
        max_numel = math.inf if observe is nullcontext else self.MAX_CHUNK
        for group in self.param_groups:
            for params in chunk_by_numel(with_gradient(group), max_numel):
                with observe(params):
                    self.update(params, group)

    def update(self, params, group):
        for p in params:
            if not self.state[p]:
                self.state[p] = {"step": torch.zeros((), device=p.device),
                                 "exp_avg": torch.zeros_like(p),
                                 "exp_avg_sq": torch.zeros_like(p)}
        steps = [self.state[p]["step"] for p in params]
        means = [self.state[p]["exp_avg"] for p in params]
        squares = [self.state[p]["exp_avg_sq"] for p in params]
        beta1, beta2 = group["betas"]
        torch._foreach_add_(steps, 1)
        torch._fused_adamw_(params, [p.grad for p in params], means, squares, [], steps,
                            lr=group["lr"], beta1=beta1, beta2=beta2, eps=group["eps"],
                            weight_decay=group["weight_decay"], amsgrad=False, maximize=False)


class Muon(ObservedOptimizer):
    """
    Muon for matrices (R, C): it replaces the momentum of a matrix by the nearest (semi-)orthogonal
    matrix, so that all singular values of the update are about equal. Raises ValueError for
    parameters that are not matrices. https://kellerjordan.github.io/posts/muon

    Its updates are scaled to the size of AdamW's, so one learning rate and one weight decay serve
    both. https://arxiv.org/abs/2502.16982

    Matrices of one shape are orthogonalized together.
    """
    MAX_CHUNK = 2 ** 28      # max elements orthogonalized at a time: 1 GiB per temporary copy
    MIN_BFLOAT16_SIDE = 128  # min short side for which bfloat16 is faster, where the device has it

    def __init__(self, params, lr, weight_decay=0.0, momentum=0.95):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})
        self.has_bfloat16 = hardware.has_bfloat16(self.param_groups[0]["params"][0].device)
        self.orthogonalize = orthogonalize

    def compile(self, **options):
        """Compile orthogonalize, separately for each shape. options: those of torch.compile."""
        self.orthogonalize = torch.compile(orthogonalize, dynamic=False, **options)

    def add_param_group(self, param_group):
        super().add_param_group(param_group)
        for p in param_group["params"]:
            if p.dim() != 2:
                raise ValueError(f"Muon takes parameters of two dimensions, found the shape "
                                 f"{tuple(p.shape)}; give others to AdamW, as make_optimizer does")

    @torch.no_grad()
    def step_observed(self, observe):
        for group in self.param_groups:
            by_shape = defaultdict(list)
            for p in with_gradient(group):
                by_shape[p.shape].append(p)
            for shape, matrices in by_shape.items():
                for params in chunk_by_numel(matrices, self.MAX_CHUNK):
                    with observe(params):
                        self.update(params, shape, group)

    def update(self, params, shape, group):
        """
        Update matrices of one shape. Each rank orthogonalizes some of the matrices, and all ranks
        get all results. If parameters are sharded, each rank gathers whole matrices for this, and
        then keeps only its slice of each result.
        """
        for p in params:
            if not self.state[p]:
                self.state[p]["momentum"] = torch.zeros_like(p)
        grads = [p.grad for p in params]
        momenta = [self.state[p]["momentum"] for p in params]
        torch._foreach_lerp_(momenta, grads, 1 - group["momentum"])
        nesterov = torch._foreach_lerp(grads, momenta, group["momentum"])  # look ahead one step
        stack = torch.stack(distributed.unshard(nesterov))
        in_bfloat16 = self.has_bfloat16 and min(shape) >= self.MIN_BFLOAT16_SIDE
        dtype = torch.bfloat16 if in_bfloat16 else torch.float32
        updates = distributed.split_across_ranks(lambda part: self.orthogonalize(part, dtype),
                                                stack)
        # A semi-orthogonal matrix has RMS 1 / sqrt(max(shape)); AdamW's updates have about 0.2.
        updates *= 0.2 * max(shape) ** 0.5
        updates = [distributed.shard_like(u, p) for u, p in zip(updates, params)]
        torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(params, updates, alpha=-group["lr"])


# The choices of --optimizer, each with a callable that makes it from parameter groups and lr. Any
# subclass of torch.optim.Optimizer can be added, with functools.partial for its own arguments:
#     "nadam": functools.partial(torch.optim.NAdam, decoupled_weight_decay=True),
OPTIMIZERS = {"muon": Muon, "adamw": AdamW}  # "muon" uses AdamW for all but the blocks' matrices

AVERAGE, TRAINED = "average", "trained"  # suffixes of weights that are not in the model
NUMBER = ":number"  # suffix of the names of Python numbers, which state_dict saves as tensors


class CombinedOptimizer:
    """
    Several torch.optim.Optimizer that update one model together. Their state is keyed by the names
    of the model's parameters, so that any number of ranks can resume it.

    With `averaging`, it also keeps running averages of the weights. use_averages() puts them into
    the model, where they stay until use_trained() puts back the weights that training goes on
    from.
    """

    def __init__(self, model, *optimizers):
        self.optimizers = optimizers
        self.names = {p: name for name, p in model.named_parameters()}
        self.initial_groups = [dict(group) for group in self.param_groups]
        self.scale = LossScale()
        # Called before the weights or their averages are changed. On CPUs, train.py makes it wait
        # for the checkpoint's writer, which reads them.
        self.ready = lambda: None
        # The share of the new weights in the averages after a step; 0: do not average.
        self.averaging = 0.0
        # {parameter: its other values}: the averages, or the trained weights while the model has
        # the averages; {} without averages.
        self.others = {}
        self.model_has_averages = False

    @property
    def param_groups(self):
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @spanned("optimizer")
    def step(self, observe=nullcontext):
        """Update the weights. observe(params): a context entered around the update of params."""
        self.ready()
        self.scale.divide([p.grad for p in self.names if p.grad is not None])
        for optimizer in self.optimizers:
            if isinstance(optimizer, ObservedOptimizer):
                optimizer.step_observed(observe)
                continue
            params = [p for group in optimizer.param_groups for p in with_gradient(group)]
            with observe(params):
                optimizer.step()
        if self.averaging:
            self.update_averages()

    @torch.no_grad()
    def update_averages(self):
        """Move the averages towards the weights. They begin as the weights after the first step."""
        if not self.others:
            params = [p for group in self.param_groups for p in group["params"]]
            self.others = {p: p.detach().clone() for p in params}
        torch._foreach_lerp_([*self.others.values()], [*self.others], self.averaging)

    def use_averages(self):
        """Put the averages into the model, to evaluate or save it. Without any, do nothing."""
        if not self.model_has_averages:
            self.exchange()

    def use_trained(self):
        """Put the weights that training goes on from into the model."""
        if self.model_has_averages:
            self.exchange()

    @torch.no_grad()
    def exchange(self):
        """Swap the model's weights with `others`. Without averages, do nothing."""
        if not self.others:
            return
        self.ready()
        for p, other in self.others.items():
            shown = p.detach().clone()
            p.copy_(other)
            other.copy_(shown)
        self.model_has_averages = not self.model_has_averages

    def compile(self, **options):
        """Compile what torch.compile can make faster: Muon. options: those of torch.compile."""
        for optimizer in self.optimizers:
            if isinstance(optimizer, Muon):
                optimizer.compile(**options)

    def set_rate(self, rate):
        """Set the learning rate: each group gets `rate` times its lr_scale."""
        for group in self.param_groups:
            group["lr"] = rate * group["lr_scale"]

    @spanned("optimizer")
    def zero_grad(self):
        for p in self.names:
            p.grad = None

    def parameter_names(self, optimizer):
        """Return the names of an optimizer's parameters, in the order of its state_dict."""
        return [self.names[p] for group in optimizer.param_groups for p in group["params"]]

    def state_dict(self):
        """
        Return {"layers.0.attention.wq.weight.momentum": tensor}, each sharded as its parameter is.
        The numbers in the parameter groups are settings and are left out. But if an optimizer
        itself has changed one, such as the step size "d" that Prodigy estimates, it is state and
        is saved as "param_groups.0.d:number". "lr" is left out, since the schedule sets it.
        The averages are saved as "name.average"; while the model has the averages, the trained
        weights are saved instead, as "name.trained".
        """
        suffix = TRAINED if self.model_has_averages else AVERAGE
        state = {f"{self.names[p]}.{suffix}": values for p, values in self.others.items()}
        for optimizer in self.optimizers:
            names = self.parameter_names(optimizer)
            for index, values in optimizer.state_dict()["state"].items():
                state |= flatten(names[index], values)
        for index, (group, initial) in enumerate(zip(self.param_groups, self.initial_groups)):
            changed = {key: value for key, value in group.items() if key != "lr"
                       and isinstance(value, (int, float)) and value != initial.get(key)}
            state |= flatten(f"param_groups.{index}", changed)
        return state

    def load_state_dict(self, state):
        """
        Load a state of state_dict() whose sharded tensors have been gathered into whole ones; each
        rank keeps its slices of them.
        """
        params = {name: p for p, name in self.names.items()}
        found = defaultdict(dict)
        self.others, self.model_has_averages = {}, False
        for optimizer in self.optimizers:
            optimizer.state.clear()  # there may be no memory for the old state and the new
        for full_name, value in state.items():
            name, _, key = full_name.rpartition(".")
            if key.endswith(NUMBER):
                found[name][key.removesuffix(NUMBER)] = value.item()
                continue
            p = params[name]
            # The optimizer's load_state_dict moves a scalar to the device where it needs it.
            value = value.to(p.device, copy=True) if value.dim() else value.clone()
            if value.shape == p.shape:
                value = distributed.shard_like(value, p)
            if key in (AVERAGE, TRAINED):
                self.others[p] = value
                self.model_has_averages = key == TRAINED  # the same for all parameters
                continue
            found[name][key] = value
        for optimizer in self.optimizers:
            names = self.parameter_names(optimizer)
            own = {index: found.pop(name) for index, name in enumerate(names) if name in found}
            # Keep the parameter groups of this run, since they hold settings.
            optimizer.load_state_dict(optimizer.state_dict() | {"state": own})
        for index, group in enumerate(self.param_groups):
            group.update(found.pop(f"param_groups.{index}", {}))
        if found:
            raise ValueError(f"no optimizer updates {min(found)}, whose state was saved")


def flatten(name, values):
    """
    Return {"name.key": tensor} of {key: tensor or number}. Raises TypeError for other values, which
    a checkpoint can't hold.
    """
    state = {}
    for key, value in values.items():
        if isinstance(value, torch.Tensor):
            state[f"{name}.{key}"] = value
        elif isinstance(value, (int, float)):
            dtype = torch.float64 if isinstance(value, float) else None
            state[f"{name}.{key}{NUMBER}"] = torch.tensor(value, dtype=dtype)
        else:
            raise TypeError(f"the optimizer keeps a {type(value).__name__} as {key!r} of {name}; "
                            f"a checkpoint holds tensors and numbers")
    return state


class LossScale:
    """
    The loss scale of float16, in which small gradients vanish: the loss is multiplied by `factor`
    before backward(), and the gradients are divided by it before the update. The factor is halved
    when a gradient overflows and doubled after GROWTH_INTERVAL steps without an overflow.
    https://arxiv.org/abs/1710.03740

    wanted: whether training is in float16; if not, the factor stays 1. saved: state to resume.
    """
    GROWTH_INTERVAL = 2000

    def __init__(self, wanted=False, saved=None):
        self.wanted = wanted
        initial = {"factor": 2.0 ** 16 if wanted else 1.0, "steps": 0}
        self.state = saved if wanted and saved else initial

    @property
    def factor(self):
        return self.state["factor"]

    def divide(self, grads):
        if self.wanted:
            torch._foreach_mul_(grads, 1 / self.factor)

    def update(self, norm):
        """
        Adapt the factor after a step. norm: of the gradients, the same on all ranks; not finite if
        a gradient overflowed.
        """
        if not self.wanted:
            return
        if not math.isfinite(norm):
            self.state["steps"] = 0
            self.state["factor"] *= 0.5
            return
        self.state["steps"] += 1
        if self.state["steps"] % self.GROWTH_INTERVAL == 0:
            self.state["factor"] *= 2


class OptimizerConfig(NamedTuple):
    """The settings of train.py that make_optimizer reads."""
    optimizer: str
    learning_rate: float
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    embedding_lr_scale: float = 1.0
    momentum: float = 0.95


def check_optimizer(name):
    """Fail unless the name of --optimizer is one of OPTIMIZERS."""
    if name not in OPTIMIZERS:
        fail(f"optimizer is {name!r}, expected {' or '.join(OPTIMIZERS)}")


# Measurements and checks also call make_optimizer; its messages appear only once.
say_once = functools.cache(distributed.say)


def parameter_groups(model, config):
    """
    Return {kind: parameter group for torch.optim} of the kinds that the model has: "tables"
    (embedding and lm_head), "vectors" (norms and biases, which get no weight decay), "matrices"
    (of the blocks) and "others" (of more dimensions: stacked experts, convolutions). The frozen
    weights of a LoRA are left out.
    """
    groups = {kind: {"params": [], "lr_scale": 1.0, "weight_decay": config.weight_decay}
              for kind in ("tables", "vectors", "matrices", "others")}
    groups["tables"]["lr_scale"] = config.embedding_lr_scale
    groups["vectors"]["weight_decay"] = 0.0
    for name, p in lora.split(model)[0].items():
        if p.dim() > 2:
            kind = "others"
        elif p.dim() < 2:
            kind = "vectors"
        else:
            kind = "matrices" if name.startswith("layers.") else "tables"
        groups[kind]["params"].append(p)
    for group in groups.values():
        group["lr"] = config.learning_rate * group["lr_scale"]
    return {kind: group for kind, group in groups.items() if group["params"]}


def make_optimizer(model, config):
    """
    Return the CombinedOptimizer of --optimizer for a model. config: an OptimizerConfig, or
    train.py's Config, which has its attributes too. beta1 and beta2 are for AdamW, momentum is for
    Muon.
    """
    check_optimizer(config.optimizer)
    groups, lr = parameter_groups(model, config), config.learning_rate
    make_adamw = functools.partial(AdamW, lr=lr, betas=(config.beta1, config.beta2))
    make = functools.partial(OPTIMIZERS[config.optimizer], lr=lr)
    if make.func is AdamW:
        make = make_adamw
    if make.func is not Muon:
        return CombinedOptimizer(model, make([*groups.values()]))
    for name, p in model.named_parameters():
        if p.dim() > 2:
            say_once(f"optimizer: AdamW updates {name}, since Muon takes matrices and its shape is "
                     f"{tuple(p.shape)}")
    optimizers = []
    if "matrices" in groups:
        optimizers.append(make([groups.pop("matrices")], momentum=config.momentum))
    else:
        say_once("optimizer: AdamW updates all parameters, since Muon is for matrices named "
                 "layers.* and there are none")
    if groups:
        optimizers.append(make_adamw([*groups.values()]))
    return CombinedOptimizer(model, *optimizers)


class SpikeDetector:
    """
    Detector of loss spikes, whose steps are skipped: the loss or the log of the gradient norm is
    not finite, or exceeds its running mean by more than spike_z standard deviations. Each skip in a
    row raises that limit, so that a new level is soon accepted and only extreme values are skipped
    for long. (engine/tracking/anomalies.py only warns of anomalies in the log.)

    spike_z: 0 skips only values that are not finite. saved: state to resume. It has "mean" and
    "var" of (loss, log of the norm) and three counts of steps: "seen" counts the accepted ones,
    "skipped" all skipped ones, "in_a_row" those skipped since the last accepted one.
    """
    WARMUP = 100   # accepted steps before the running mean is trusted
    DECAY = 0.98   # weight of the old mean and variance at each step
    WIDEN = 1.2    # factor by which each skip in a row raises the limit
    MIN_STD = 0.01

    def __init__(self, spike_z, saved=None):
        self.spike_z = spike_z
        self.state = saved or {"mean": [0.0, 0.0], "var": [0.0, 0.0],
                               "seen": 0, "skipped": 0, "in_a_row": 0}

    def refuses(self, loss, norm):
        """Return whether to skip a step. loss, norm: floats, the same on all ranks."""
        state = self.state
        log_norm = math.log(norm) if norm > 0 else 0.0
        values = [x if math.isfinite(x) else math.inf for x in (loss, log_norm)]
        max_z = self.spike_z * self.WIDEN ** state["in_a_row"] if self.spike_z else math.inf
        is_far = [x - mean > max_z * max(var ** 0.5, self.MIN_STD)
                  for x, mean, var in zip(values, state["mean"], state["var"])]
        is_spike = state["seen"] >= self.WARMUP and any(is_far)
        if is_spike or math.inf in values or math.isnan(norm):
            state["skipped"] += 1
            state["in_a_row"] += 1
            return True
        # At first, average all steps alike.
        decay = min(self.DECAY, state["seen"] / (state["seen"] + 1))
        for i, x in enumerate(values):
            gap = x - state["mean"][i]
            state["mean"][i] += (1 - decay) * gap
            state["var"][i] = decay * (state["var"][i] + (1 - decay) * gap ** 2)
        state["seen"] += 1
        state["in_a_row"] = 0
        return False


def learning_rate_at(config, step, last_step, spent=0.0):
    """
    Return the learning rate of step 0, 1, ...: linear warm-up, then the schedule down to min_lr.
    spent: the fraction of max_minutes that has passed. The schedule follows the steps or the clock,
    whichever is further ahead.
    """
    peak, end = config.learning_rate, config.min_lr
    if step < config.warmup_iters:
        return peak * (step + 1) / config.warmup_iters
    if config.schedule == "constant":
        return peak
    step = max(step, spent * last_step)
    if config.schedule == "cosine":
        decay_steps = max(1, last_step - config.warmup_iters)
        done = min(1.0, (step - config.warmup_iters) / decay_steps)
        return end + 0.5 * (1 + math.cos(math.pi * done)) * (peak - end)
    # The schedule "linear": constant, then linear over the last decay_fraction of the steps.
    left = (last_step - step) / max(1, config.decay_fraction * last_step)
    return end + min(1.0, max(0.0, left)) * (peak - end)
