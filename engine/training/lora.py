"""
LoRA: train low-rank adapters beside the frozen matrices of a model.
https://arxiv.org/abs/2106.09685

    y = W x + alpha / rank B (A x)

W (out, in) is frozen; A (rank, in) and B (out, rank) are trained, in float32.
B starts as zeros, so an adapted model starts as the model itself. Frozen weights need no gradients,
no optimizer state and no float32 copy: their matrices are held in the dtype of the training, or as
the 8-bit blocks of a GGUF file in Q8_0, which are dequantized one matrix at a time
(https://arxiv.org/abs/2305.14314).

A parameter has the name that it has in model.py. An adapter adds NAME.lora_A and NAME.lora_B, a
Q8_0 matrix has NAME.q and NAME.d in place of NAME.weight, and tokens that the frozen model lacks
have a trained row each in NAME.new_rows of embedding and classifier.
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

# {last word of a matrix's name in model.py: in Hugging Face's}, of the matrices of a block
TARGETS = {ours.split(".")[-1]: theirs.split(".")[-1]
           for ours, _, theirs, letters in LAYER_TENSORS if len(letters) == 2}
# Adapters are scaled by ALPHA / rank. The best learning rate is then about the same for ranks 2, 8
# and 32; with the scale 2 for all of them it falls as the rank grows (doc/lab/lora.md).
ALPHA = 16.0
CACHED = 1 << 18  # numbers of a matrix that are dequantized at a time on a CPU


class LoRA(NamedTuple):
    """
    What is frozen and what is trained in an adapted model.

    rank: of the adapters; targets: last words of the names of the matrices that get one; alpha:
    their scale times the rank; dtype: torch dtype of the frozen matrices; quantized: names of the
    matrices, such as "layers.0.attention.wq", that are held in Q8_0; frozen_rows: number of tokens
    of the frozen model.
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


def parse_targets(words):
    """
    Return the names in TARGETS that --lora_targets selects, in the order of TARGETS. words: "all",
    or names of ours or of Hugging Face, separated by commas.
    """
    names = {word.strip() for word in words.split(",")} - {""}
    if names == {"all"}:
        return tuple(TARGETS)
    ours = {theirs: name for name, theirs in TARGETS.items()}
    found = {ours.get(name, name) for name in names}
    expected = (f"expected all alone, or some of {','.join(TARGETS)} (Hugging Face's "
                f"{','.join(TARGETS.values())})")
    if not found:
        fail(f"--lora_targets={words}: names no matrix; {expected}")
    if found - TARGETS.keys():
        unknown = min(found - TARGETS.keys())
        fail(f"--lora_targets={words}: there is no matrix {unknown!r} in a block; {expected}")
    return tuple(name for name in TARGETS if name in found)


def new(config, dtype, frozen_rows, quantized=frozenset()):
    """Return the LoRA of a new run with these settings; the other arguments are as of LoRA."""
    targets = parse_targets(config.lora_targets)
    return LoRA(config.lora_rank, targets, ALPHA, dtype, quantized, frozen_rows)


def target_words(targets):
    """Return the value of --lora_targets that selects these targets."""
    return "all" if targets == tuple(TARGETS) else ",".join(targets)


# ---- the adapted model ---------------------------------------------------------------------------

def frozen(tensor):
    return nn.Parameter(tensor, requires_grad=False)


def dequantized(q, d, dtype):
    """
    Return a Q8_0 matrix (R, C) in a dtype. q: (R, C) int8; d: (R, C / 32) float16. The products are
    float32; on a CPU they are computed for some rows at a time, which stay in its cache.
    """
    w = torch.empty(q.shape, dtype=dtype, device=q.device)
    in_pieces = q.device.type == "cpu" and not torch.compiler.is_compiling()
    rows = max(1, CACHED // q.shape[1]) if in_pieces else len(q)
    for part, integers, scales in zip(w.split(rows), q.split(rows), d.split(rows)):
        blocks = integers.float().unflatten(-1, (-1, 32))
        part.copy_(blocks.mul_(scales.float()[..., None]).flatten(-2))
    return w


class Q8Product(torch.autograd.Function):
    """
    The product x W^T with a frozen Q8_0 matrix, (..., C) -> (..., R). backward dequantizes W again,
    instead of keeping it since forward.
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
    A frozen matrix W (R, C): `weight`, or the int8 values `q` and float16 scales `d` of Q8_0. Its
    numbers are undefined until weights are loaded.
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
        if self.q is None:
            return self.weight.to(dtype)
        return dequantized(self.q, self.d, dtype)

    def product(self, x):
        """
        Return x W^T in the dtype of x. The product is in the training's dtype outside autocast too,
        where samples are drawn: W in float32 would take much memory, and time for each token.
        """
        low = x.to(self.dtype)
        y = F.linear(low, self.weight) if self.q is None else Q8Product.apply(low, self.q, self.d)
        return y.to(x.dtype)


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
            if device.type != "meta":  # drawing there would import PyTorch's compiler
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
    Frozen rows of an embedding or a classifier, and `new_rows` (N, D), which are trained: the
    vocabulary of conversations has markers that the frozen model lacks, and a model that can't
    learn them would never learn to end an answer.
    """

    def __init__(self, shape, lora, is_quantized, device):
        rows, columns = shape
        super().__init__((lora.frozen_rows, columns), lora, is_quantized, device)
        self.frozen_rows, self.new_rows = lora.frozen_rows, None
        if rows > lora.frozen_rows:
            self.new_rows = nn.Parameter(torch.zeros(rows - lora.frozen_rows, columns,
                                                     device=device))

    def share(self, other):
        """Use the weights of another Table, as tied embedding and classifier do."""
        for name in ("weight", "q", "d", "new_rows"):
            setattr(self, name, getattr(other, name))


class Embedding(Table):
    """Tokens (B, T) in, float32 (B, T, D) out, so that the residual stream is float32."""

    def forward(self, tokens):
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
    """The logits (..., V) of x (..., D). ops.cross_entropy takes its `rows` instead."""

    def forward(self, x):
        y = self.product(x)
        return y if self.new_rows is None else torch.cat((y, F.linear(x, self.new_rows)), -1)

    def rows(self, dtype):
        """Return (the frozen rows in a dtype, the new rows or None)."""
        return self.matrix(dtype), self.new_rows


def build(args, lora, device):
    """
    Return the Transformer of ModelArgs on a device, with new weights. If `lora` is not None, all
    but its adapters and new rows is frozen and has undefined numbers until load_base.
    """
    if lora is None:
        return args.build().to(device)
    device = torch.device(device)
    model = args.build("meta")
    for name, module in [*model.named_modules()]:
        is_quantized = name in lora.quantized
        if isinstance(module, nn.Embedding):
            adapted = Embedding(module.weight.shape, lora, is_quantized, device)
            model.set_submodule(name, adapted)
        elif module is model.output:
            place = torch.device("meta") if args.tied else device  # share() replaces its weights
            adapted = Classifier(module.weight.shape, lora, is_quantized, place)
            model.set_submodule(name, adapted)
        elif isinstance(module, nn.Linear):
            rank = lora.rank if name.split(".")[-1] in lora.targets else 0
            has_bias = module.bias is not None
            adapted = Linear(module.weight.shape, lora, is_quantized, device, has_bias, rank)
            model.set_submodule(name, adapted)
        else:  # norms
            for kind, p in module.named_parameters(recurse=False):
                setattr(module, kind, frozen(torch.empty(p.shape, device=device)))
    if args.tied:
        model.output.share(model.tok_embeddings)
    model.fill_rope(device)
    model.lora = lora
    return model


def plain_copy(module, model):
    """
    Return a copy of a module of a model; if it is a LoRA, one of model.py's with the adapters
    merged. The module's class takes ModelArgs.
    """
    if model.lora is None:
        return copy.deepcopy(module)
    plain = type(module)(model.args)
    plain.load_state_dict({**merged(module.state_dict(), model.lora)})
    return plain


def split(model):
    """
    Return ({name: trained parameter}, {name: frozen parameter}) of a model. Without LoRA, all are
    trained.
    """
    named = dict(model.named_parameters())
    if getattr(model, "lora", None) is None:  # also a module that is no Transformer
        return named, {}
    trained = {name: p for name, p in named.items() if p.requires_grad}
    return trained, {name: p for name, p in named.items() if name not in trained}


def describe(lora, trained, total):
    """Return a LoRA in words. trained, total: parameters that are trained, and of the model."""
    targets = target_words(lora.targets).replace("all", "all matrices of the blocks")
    base = str(lora.dtype).removeprefix("torch.")
    if lora.quantized:
        base = f"Q8_0 where the file has it, else in {base}"
    return (f"adapters of rank {lora.rank} and alpha {lora.alpha:g} for {targets}: "
            f"{trained:,} trained parameters, {trained / total:.2%} of the model's; the others are "
            f"frozen in {base}")


# ---- weights in and out --------------------------------------------------------------------------

def base_weights(state, model):
    """
    Return the weights of a plain model, {name: tensor}, under the names of an adapted one, whose
    adapters stay as they are. The tensors are read at each access. A new row starts as the mean of
    the others, see load.with_new_rows.
    """
    readers, used = {}, {"output.weight"} if model.args.tied else set()
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
    # load_weights refuses what the model does not have.
    readers |= {name: partial(state.__getitem__, name) for name in state if name not in used}
    return Tensors(readers, "the model")


def quantized_part(state, name, kind):
    """Return the int8 values ("q") or the scales ("d") of a Q8_0 matrix of a reader.Tensors."""
    q, d = state.q8_0[name]()
    return q if kind == "q" else d


def mean_rows(state, name, count):
    return state[name].float().mean(0, keepdim=True).expand(count, -1)


def merged(state, lora):
    """
    Return the weights of the plain model that computes what an adapted one does, {name: tensor}.
    Each is computed in float32 at each access. state: {name: tensor} of an adapted model. If `lora`
    is None, return the state, which is that of a plain model.
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
    """Yield (name, shape) of every tensor of an adapted model."""
    for name, _, _, shape in tensors(args):
        module, word = name.removesuffix(".weight"), name.split(".")[-2]
        if len(shape) == 1:
            yield name, shape
            continue
        if "layers" not in name and shape[0] > lora.frozen_rows:
            yield f"{module}.new_rows", (shape[0] - lora.frozen_rows, shape[1])
            shape = lora.frozen_rows, shape[1]
        if module in lora.quantized:
            yield f"{module}.q", shape
            yield f"{module}.d", (shape[0], shape[1] // 32)
        else:
            yield name, shape
        if word in lora.targets:
            yield f"{module}.lora_A", (lora.rank, shape[1])
            yield f"{module}.lora_B", (shape[0], lora.rank)


def stored(lora):
    """Return the entry {"lora": values} that a checkpoint has besides the weights; {} for None."""
    if lora is None:
        return {}
    values = {"rank": lora.rank, "targets": [*lora.targets], "alpha": lora.alpha,
              "quantized": sorted(lora.quantized), "frozen_rows": lora.frozen_rows}
    return {"lora": values}


def of_checkpoint(saved, dtype=torch.float32):
    """
    Return the LoRA of the dict in a checkpoint's model.pt, None if it has none. dtype: as of LoRA.
    Raises KeyError, TypeError or ValueError if an entry is missing or invalid.
    """
    if "lora" not in saved:
        return None
    values = saved["lora"]
    targets, quantized = tuple(values["targets"]), frozenset(values["quantized"])
    found = LoRA(values["rank"], targets, values["alpha"], dtype, quantized, values["frozen_rows"])
    counts = found.rank, found.frozen_rows
    are_counts = all(type(count) is int and count > 0 for count in counts)
    is_alpha = type(found.alpha) is float and 0 < found.alpha < math.inf
    if not are_counts or not is_alpha or not {*targets} <= TARGETS.keys():
        raise ValueError("the entry lora of a checkpoint is invalid")
    return found
