"""
LoRA: train low-rank adapters beside the frozen matrices of a model.
https://arxiv.org/abs/2106.09685

    y = W x + (alpha / rank) B (A x)

W (out, in) is frozen; A (rank, in) and B (out, rank) are trained, in float32. B starts as zeros, so
training starts from the output of the unchanged model.

Frozen weights need no gradients, no optimizer state and no float32 master copy. Frozen matrices are
stored in the run's compute dtype (--dtype). Those that a GGUF file has in Q8_0, its 8-bit format,
stay in Q8_0, and each is dequantized when it is used (https://arxiv.org/abs/2305.14314).

Parameters have the names of model.py, with three exceptions:
- an adapter adds NAME.lora_A and NAME.lora_B to the NAME.weight of its matrix;
- a matrix in Q8_0 has NAME.q (values) and NAME.d (scales) in place of NAME.weight;
- embedding and classifier get NAME.new_rows, the trained rows of tokens that the base model lacks.
"""
import copy
import math
from functools import partial
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F

from configurator import fail
from engine.formats.layout import LAYER_TENSORS, tensors
from engine.formats.reader import Tensors

# The matrices of a block, which can get adapters: {name in model.py: name in Hugging Face's files},
# such as "wq": "q_proj"
TARGETS = {name.split(".")[-1]: hf_name.split(".")[-1]
           for name, _, hf_name, shape in LAYER_TENSORS if len(shape) == 2}
# An adapter is scaled by ALPHA / rank. The best learning rate is then about the same for ranks 2, 8
# and 32. With the same scale for all ranks, it would fall as the rank grows (doc/lab/lora.md).
ALPHA = 16.0
DEQUANT_CHUNK = 1 << 18  # values that a CPU dequantizes at a time: few enough to stay in its cache


class LoRA(NamedTuple):
    """
    What is frozen and what is trained in an adapted model.

    rank: the rank of every adapter.
    targets: the matrices of each block that get an adapter, as keys of TARGETS.
    alpha: adapters are scaled by alpha / rank.
    dtype: torch dtype in which frozen matrices are multiplied, and stored unless quantized.
    quantized: names of the matrices that are stored in Q8_0, such as "layers.0.attention.wq".
    frozen_rows: vocabulary size of the base model. Tokens with ids from this one on get new rows.
    """
    rank: int
    targets: tuple
    alpha: float
    dtype: torch.dtype
    quantized: frozenset
    frozen_rows: int

    @property
    def scale(self):
        return self.alpha / self.rank


def parse_targets(setting):
    """
    Return the keys of TARGETS that --lora_targets selects, in their order. setting: "all", or keys
    or values of TARGETS, separated by commas. Exit with a message if it is anything else.
    """
    names = {name.strip() for name in setting.split(",")} - {""}
    if names == {"all"}:
        return tuple(TARGETS)
    from_hf = {hf_name: name for name, hf_name in TARGETS.items()}
    selected = {from_hf.get(name, name) for name in names}
    expected = (f"expected all alone, or some of {','.join(TARGETS)} (Hugging Face's names: "
                f"{','.join(TARGETS.values())})")
    if not selected:
        fail(f"--lora_targets={setting}: names no matrix; {expected}")
    if selected - TARGETS.keys():
        unknown = min(selected - TARGETS.keys())
        fail(f"--lora_targets={setting}: there is no matrix {unknown!r} in a block; {expected}")
    return tuple(name for name in TARGETS if name in selected)


def new(config, dtype, frozen_rows, quantized=frozenset()):
    """Return the LoRA of a new run. config: its settings; the other arguments: see LoRA."""
    targets = parse_targets(config.lora_targets)
    return LoRA(config.lora_rank, targets, ALPHA, dtype, quantized, frozen_rows)


def target_words(targets):
    """Return the value of --lora_targets that selects these targets: undo parse_targets."""
    return "all" if targets == tuple(TARGETS) else ",".join(targets)


# ---- the adapted model ---------------------------------------------------------------------------

def frozen(tensor):
    """Return a tensor as a parameter that is not trained."""
    return nn.Parameter(tensor, requires_grad=False)


def dequantized(q, d, dtype):
    """
    Return a Q8_0 matrix W (R, C) in a dtype. q: (R, C) int8 values; d: (R, C / 32) float16, a scale
    for each block of 32 values. W = q d is computed in float32, then rounded to the dtype.
    """
    w = torch.empty(q.shape, dtype=dtype, device=q.device)
    # On a CPU, take few rows at a time, so that their float32 values stay in its cache.
    in_chunks = q.device.type == "cpu" and not torch.compiler.is_compiling()
    rows = max(1, DEQUANT_CHUNK // q.shape[1]) if in_chunks else len(q)
    for w_rows, values, scales in zip(w.split(rows), q.split(rows), d.split(rows)):
        blocks = values.float().unflatten(-1, (-1, 32))
        w_rows.copy_(blocks.mul_(scales.float()[..., None]).flatten(-2))
    return w


class Q8Product(torch.autograd.Function):
    """
    x W^T for a frozen Q8_0 matrix W (R, C): (..., C) -> (..., R). To save memory, forward does not
    save the dequantized W: backward dequantizes it again.
    """

    @staticmethod
    def forward(ctx, x, q, d):
        ctx.save_for_backward(q, d)
        return F.linear(x, dequantized(q, d, x.dtype))

    @staticmethod
    def backward(ctx, dy):
        q, d = ctx.saved_tensors
        return dy @ dequantized(q, d, dy.dtype), None, None


class Frozen(nn.Module):
    """
    A frozen matrix W (R, C), stored as `weight`, or in Q8_0 as int8 values `q` and float16 scales
    `d`. They are uninitialized until weights are loaded.
    """

    def __init__(self, shape, lora, is_quantized, device):
        super().__init__()
        rows, columns = shape
        make = partial(torch.empty, device=device)
        self.dtype, self.weight, self.q, self.d = lora.dtype, None, None, None
        if is_quantized:
            self.q = frozen(make(rows, columns, dtype=torch.int8))
            self.d = frozen(make(rows, columns // 32, dtype=torch.float16))
        else:
            self.weight = frozen(make(rows, columns, dtype=lora.dtype))

    def matrix(self, dtype):
        """Return W in a dtype."""
        if self.q is None:
            return self.weight.to(dtype)
        return dequantized(self.q, self.d, dtype)

    def product(self, x):
        """
        Return x W^T in the dtype of x, computed in lora.dtype. Samples are drawn without autocast,
        so x is converted here: converting W to float32 would take memory, and time for each token.
        """
        x_low = x.to(self.dtype)
        if self.q is None:
            return F.linear(x_low, self.weight).to(x.dtype)
        return Q8Product.apply(x_low, self.q, self.d).to(x.dtype)


class Linear(Frozen):
    """A frozen matrix of a block, with a frozen bias if `has_bias` and an adapter if rank > 0."""

    def __init__(self, shape, lora, is_quantized, device, has_bias, rank):
        super().__init__(shape, lora, is_quantized, device)
        rows, columns = shape
        self.bias = frozen(torch.empty(rows, device=device)) if has_bias else None
        self.scale, self.lora_A, self.lora_B = lora.scale, None, None
        if rank:
            self.lora_A = nn.Parameter(torch.empty(rank, columns, device=device))
            self.lora_B = nn.Parameter(torch.zeros(rows, rank, device=device))
            if device.type != "meta":  # random numbers on meta would import PyTorch's compiler
                nn.init.uniform_(self.lora_A, -1 / math.sqrt(columns), 1 / math.sqrt(columns))

    def forward(self, x):
        y = self.product(x)
        if self.bias is not None:
            y = y + self.bias.to(y.dtype)
        if self.lora_A is None:
            return y
        return torch.add(y, F.linear(F.linear(x, self.lora_A), self.lora_B), alpha=self.scale)


class Table(Frozen):
    """
    An embedding or a classifier: the frozen rows of the base model's tokens, followed by `new_rows`
    (N, D), the trained rows of the N tokens that the base model lacks. Those are the markers of
    conversations, such as the one that ends an answer: with a frozen row, a model could not learn
    to end answers.
    """

    def __init__(self, shape, lora, is_quantized, device):
        rows, columns = shape
        super().__init__((lora.frozen_rows, columns), lora, is_quantized, device)
        self.frozen_rows, self.new_rows = lora.frozen_rows, None
        if rows > lora.frozen_rows:
            self.new_rows = nn.Parameter(torch.zeros(rows - lora.frozen_rows, columns,
                                                     device=device))

    def share(self, other):
        """Use the parameters of another Table, to tie classifier and embedding."""
        for name in ("weight", "q", "d", "new_rows"):
            setattr(self, name, getattr(other, name))


class Embedding(Table):
    """Tokens (B, T) in, float32 (B, T, D) out, so that the residual stream is float32."""

    def forward(self, tokens):
        # Look every token up in both parts, at a row that exists there; then choose by the token.
        known = tokens.clamp(max=self.frozen_rows - 1)
        if self.q is None:
            x = F.embedding(known, self.weight).float()
        else:
            rows = known.flatten()
            x = dequantized(self.q[rows], self.d[rows], torch.float32).view(*tokens.shape, -1)
        if self.new_rows is None:
            return x
        new = F.embedding((tokens - self.frozen_rows).clamp(min=0), self.new_rows)
        return torch.where((tokens >= self.frozen_rows)[..., None], new, x)


class Classifier(Table):
    """x (..., D) in, logits (..., V) out. ops.cross_entropy computes logits from rows() instead."""

    def forward(self, x):
        y = self.product(x)
        return y if self.new_rows is None else torch.cat((y, F.linear(x, self.new_rows)), -1)

    def rows(self, dtype):
        """Return (frozen rows in a dtype, new rows in float32 or None)."""
        return self.matrix(dtype), self.new_rows


def build(args, lora, device):
    """
    Return the untrained Transformer of ModelArgs on a device. With a LoRA, all weights except its
    adapters and new rows are frozen, and uninitialized until base_weights() are loaded.
    """
    if lora is None:
        return args.build().to(device)
    device = torch.device(device)
    model = args.build("meta")  # the loop replaces all of its parameters
    for name, module in [*model.named_modules()]:
        is_quantized = name in lora.quantized
        if isinstance(module, nn.Embedding):
            adapted = Embedding(module.weight.shape, lora, is_quantized, device)
            model.set_submodule(name, adapted)
        elif module is model.output:
            # A tied classifier takes no memory here: share() replaces its parameters below.
            output_device = torch.device("meta") if args.tied else device
            adapted = Classifier(module.weight.shape, lora, is_quantized, output_device)
            model.set_submodule(name, adapted)
        elif isinstance(module, nn.Linear):
            rank = lora.rank if name.split(".")[-1] in lora.targets else 0
            has_bias = module.bias is not None
            adapted = Linear(module.weight.shape, lora, is_quantized, device, has_bias, rank)
            model.set_submodule(name, adapted)
        else:  # a norm, or a module without parameters of its own
            for parameter_name, p in module.named_parameters(recurse=False):
                setattr(module, parameter_name, frozen(torch.empty(p.shape, device=device)))
    if args.tied:
        model.output.share(model.tok_embeddings)
    model.fill_rope(device)
    model.lora = lora
    return model


def plain_copy(module, model):
    """
    Return a plain copy of a module of a model: the adapters of its matrices are merged into the
    copy's weights. The module's class must take ModelArgs as its only argument.
    """
    if model.lora is None:
        return copy.deepcopy(module)
    plain = type(module)(model.args)
    plain.load_state_dict({**merged(module.state_dict(), model.lora)})
    return plain


def split(model):
    """
    Return ({name: trained parameter}, {name: frozen parameter}) of a model. Without LoRA, all its
    parameters are trained.
    """
    named = dict(model.named_parameters())
    if getattr(model, "lora", None) is None:  # `model` may be any nn.Module
        return named, {}
    trained = {name: p for name, p in named.items() if p.requires_grad}
    return trained, {name: p for name, p in named.items() if name not in trained}


def describe(lora, trained, total):
    """
    Return a line that describes a LoRA. trained: number of trained parameters; total: number of the
    model's parameters without adapters.
    """
    targets = target_words(lora.targets).replace("all", "all matrices of the blocks")
    base = str(lora.dtype).removeprefix("torch.")
    if lora.quantized:
        base = f"Q8_0 where the GGUF file has it, else in {base}"
    return (f"adapters of rank {lora.rank} and alpha {lora.alpha:g} for {targets}: "
            f"{trained:,} trained parameters, {trained / total:.2%} of the model's; the others are "
            f"frozen in {base}")


# ---- weights in and out --------------------------------------------------------------------------

def base_weights(state, model):
    """
    Return the weights that an adapted model starts from, for load_weights(): {name of a parameter
    of `model`: tensor}, each read at each access. state: {name: tensor} of the plain model.

    Adapters keep their initial values. Each new row is the mean of the frozen rows, for the reason
    in load.with_new_rows.
    """
    readers = {}
    used = {"output.weight"} if model.args.tied else set()  # names in `state` that `model` has
    for name, p in model.named_parameters():
        module, _, kind = name.rpartition(".")
        used.add(name if kind in ("weight", "bias") else f"{module}.weight")
        if kind in ("lora_A", "lora_B"):
            readers[name] = p.detach
        elif kind in ("q", "d"):
            readers[name] = partial(quantized_part, state, f"{module}.weight", kind)
        elif kind == "new_rows":
            readers[name] = partial(mean_rows, state, f"{module}.weight", len(p))
        else:
            readers[name] = partial(state.__getitem__, name)
    # Pass on the names that `model` lacks, so that load_weights refuses them.
    readers |= {name: partial(state.__getitem__, name) for name in state if name not in used}
    return Tensors(readers, "the model")


def quantized_part(state, name, kind):
    """Return the values (kind "q") or the scales ("d") of a Q8_0 matrix of a reader.Tensors."""
    q, d = state.q8_0[name]()
    return q if kind == "q" else d


def mean_rows(state, name, count):
    """Return the mean row of a matrix (R, C), repeated: (count, C) float32."""
    return state[name].float().mean(0, keepdim=True).expand(count, -1)


def merged(state, lora):
    """
    Return {name: tensor} of a plain model that computes the same as an adapted one, whose adapters
    are merged into its matrices. Each matrix is computed in float32 at each access.

    state: {name: tensor} of the adapted model; with `lora` None, of a plain one, returned as it is.
    """
    if lora is None:
        return state
    readers = {}
    for name in state:
        module, _, kind = name.rpartition(".")
        if kind in ("weight", "q"):
            readers[f"{module}.weight"] = partial(merged_weight, state, module, lora.scale)
        elif kind == "bias":
            readers[name] = partial(state.__getitem__, name)
    return Tensors(readers, "the model")


@torch.no_grad()
def merged_weight(state, module, scale):
    """Return a module's weight in float32, with its adapter and its new rows if it has them."""
    if f"{module}.q" in state:
        w = dequantized(state[f"{module}.q"], state[f"{module}.d"], torch.float32)
    else:
        w = state[f"{module}.weight"].float()
    if f"{module}.lora_A" in state:
        a, b = (state[f"{module}.lora_{letter}"].float().to(w.device) for letter in "AB")
        w = w + scale * (b @ a)
    if f"{module}.new_rows" in state:
        w = torch.cat((w, state[f"{module}.new_rows"].to(w)))
    return w


def expected_tensors(args, lora):
    """
    Yield (name, shape) of every tensor of an adapted model. Raises ValueError if the LoRA does not
    fit the model.
    """
    if lora.frozen_rows > args.vocab_size:
        raise ValueError(f"the base model has {lora.frozen_rows} tokens, expected at most the "
                         f"model's {args.vocab_size}")
    for name, _, _, shape in tensors(args):
        if len(shape) == 1:  # a norm or a bias
            yield name, shape
            continue
        module = name.removesuffix(".weight")
        is_table = "layers" not in name  # embedding or classifier
        if is_table and shape[0] > lora.frozen_rows:
            yield f"{module}.new_rows", (shape[0] - lora.frozen_rows, shape[1])
            shape = lora.frozen_rows, shape[1]
        if module in lora.quantized:
            if shape[1] % 32:
                raise ValueError(f"{module} has {shape[1]} columns and is in Q8_0, expected a "
                                 "multiple of 32")
            yield f"{module}.q", shape
            yield f"{module}.d", (shape[0], shape[1] // 32)
        else:
            yield name, shape
        if module.split(".")[-1] in lora.targets:
            yield f"{module}.lora_A", (lora.rank, shape[1])
            yield f"{module}.lora_B", (shape[0], lora.rank)


def stored(lora):
    """Return {"lora": values}, which a checkpoint's model.pt stores; {} if `lora` is None."""
    if lora is None:
        return {}
    values = {"rank": lora.rank, "targets": [*lora.targets], "alpha": lora.alpha,
              "quantized": sorted(lora.quantized), "frozen_rows": lora.frozen_rows}
    return {"lora": values}


def of_checkpoint(saved, dtype=torch.float32):
    """
    Return the LoRA that stored() put into a checkpoint; None if there is none. saved: the dict in
    the checkpoint's model.pt; dtype: see LoRA, it is not stored. Raises KeyError, TypeError or
    ValueError if a value is missing or invalid.
    """
    if "lora" not in saved:
        return None
    values = saved["lora"]
    targets, quantized = tuple(values["targets"]), frozenset(values["quantized"])
    lora = LoRA(values["rank"], targets, values["alpha"], dtype, quantized, values["frozen_rows"])
    counts_ok = all(type(count) is int and count > 0 for count in (lora.rank, lora.frozen_rows))
    alpha_ok = type(lora.alpha) is float and 0 < lora.alpha < math.inf
    if not counts_ok or not alpha_ok or not {*targets} <= TARGETS.keys():
        raise ValueError("the checkpoint's entry 'lora' is invalid: expected rank and frozen_rows "
                         f"from 1 on, a finite alpha > 0, and targets from {','.join(TARGETS)}")
    return lora
