"""
Checks of model, step and files before the first step. engine/debug/preflight.py makes them; each takes its Ready, and raises Bug,
Suspicion or Skip.
"""
import contextlib
import copy
import math
import os
import subprocess
import tempfile
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

from engine.training import checkpoint, distributed
from engine.debug.data_checks import Bug, Skip, Suspicion
from engine.debug.instruments import outputs, watching
from model import Transformer

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "run"
TOKENS = 1024     # of a forward pass of a check, about
TRIAL_STEPS = 6   # of the check `rate`, and how far the loss may rise in them, in nats, ...
MOST_RISE = 1.4   # ... and the first of them may change a matrix, of its length. At a good rate 0.1, or 1 where it is bold, and 0.3
MOST_CHANGE = 2


# ---- the model ----------------------------------------------------------------------------------------------------

def future(r):
    """A mask that is off by one, or missing, in any layer: a token changes, and one before it moves, or none behind it."""
    T = min(r.s.max_seq_len, 64)
    if T < 2 or r.args.vocab_size < 3:
        raise Skip
    tokens = r.line(T)
    before = r.outputs(tokens)
    for t in sorted({1, T // 2, T - 1}):
        after = r.outputs(r.other(tokens, t))
        for layer in before:
            moved = (before[layer] - after[layer]).abs().amax(-1)[0]  # (T,)
            early = moved[:t].max().item()
            if early > 1e-5 * moved.max().item():
                raise Bug(f"{layer}: position {int(moved[:t].argmax())} moves when token {t} changes: it sees the future, so "
                          f"the loss is none; look at the mask of the attention")
        if t < T - 1 and not moved[t + 1:].max():
            raise Bug(f"no position behind {t} moves when token {t} changes: the past is not seen; look at the mask of the "
                      f"attention")


def documents(r):
    """within_documents is set, and attention reaches into the document before."""
    few = r.s.max_seq_len < 8 or r.args.vocab_size < 3
    if not r.s.within_documents or r.dataset.separator is None or few:
        raise Skip
    T = min(r.s.max_seq_len, 64)
    tokens = r.line(T)
    tokens[0, T // 2] = r.dataset.separator
    before, after = r.outputs(tokens), r.outputs(r.other(tokens, T // 4))
    for layer in before:
        moved = (before[layer] - after[layer]).abs().amax(-1)[0]
        if moved[T // 2:].max() > 1e-5 * moved.max():
            raise Bug(f"{layer}: position {T // 2 + int(moved[T // 2:].argmax())} moves when token {T // 4} changes, which "
                      f"stands in another document (it ends at {T // 2 - 1}); look at ops.within_documents and model.bos_id")


def norms(r):
    """
    Find a forgotten normalization: compare what each matrix reads from the residual stream with
    the root mean square that RMSNorm gives to that stream.
    """
    if not r.fresh:
        raise Skip
    read, blocks, attended, looks = {}, [], [], []

    def look(name, linear):
        looks.append((linear, lambda given, out: read.update({name: given.float()})))

    for i, layer in enumerate(r.model.layers):
        for part in ("attention.wq", "attention.wk", "attention.wv", "feed_forward.w1", "feed_forward.w3"):
            look(f"layers.{i}.{part}", layer.get_submodule(part))
        looks.append((layer.attention, lambda given, out: attended.append(out.float())))
        looks.append((layer, lambda given, out: blocks.append((given.float(), out.float()))))
    look("output", r.model.output)
    with watching(looks):
        r.outputs(r.x[:1])
    for name, x in read.items():
        layer, part, *_ = name.removeprefix("layers.").split(".") + [""]
        residual = blocks[-1][1] if name == "output" else blocks[int(layer)][0]
        if part == "feed_forward":
            residual = residual + attended[int(layer)]
        square = residual.square().mean(-1)  # of each token; norm_eps may not be small beside it
        expected = (square / (square + r.args.norm_eps)).mean().sqrt().item()
        length = x.square().mean().sqrt().item()
        if not 0.7 * expected < length < 1.4 * expected:
            raise Bug(f"what {name} reads has a root mean square of {length:.3g}, expected "
                      f"{expected:.3g}: an RMSNorm before it is missing or wrong")


def attention(r):
    """Swapped rotary halves, heads or scale: the attention of model.py beside plain loops of the formula."""
    if r.sharded:
        raise Skip
    T = min(r.s.max_seq_len, 6)
    for i in sorted({0, r.args.n_layers - 1}):
        module = copy.deepcopy(r.model.layers[i].attention).cpu().float().eval()
        x = torch.randn(1, T, r.args.dim)
        q, k = (x @ w.weight.detach().T for w in (module.wq, module.wk))
        x *= (2 / (q.std() * k.std() + 1e-12)).sqrt()  # scores with a deviation of 2, of fresh weights they are nearly alike
        with torch.no_grad():
            ours = module(x, r.model.rope[:T].cpu())[0].double().numpy()
        plain, halves = (plain_attention(module, x[0], r.args, swapped) for swapped in (False, True))
        if far(ours, plain) < 1e-3:
            continue
        where = f"attention of layers.{i} differs from the formula by {far(ours, plain):.2g}"
        if far(ours, halves) < 1e-3:
            raise Bug(f"{where}: it rotates the pairs (i, i + Q/2), expected (2i, 2i + 1), which every model file and ./run "
                      f"have; look at ops.rotate")
        raise Bug(f"{where}, so model.gguf will not compute what is trained; look at its positions, heads, scale and mask")


def far(a, b):
    return float(np.abs(a - b).max() / (np.abs(b).max() + 1e-12))


def plain_attention(module, x, args, swapped):
    """Attention by loops over heads, positions and pairs, in float64. x: (T, D) -> (T, D). swapped: the other pairs."""
    w = {name: p.detach().double().numpy() for name, p in module.named_parameters()}
    T, Q, x = len(x), args.head_dim, x.double().numpy()
    out = np.zeros((T, args.n_heads * Q))

    def projected(name, head, t):
        rows = slice(head * Q, (head + 1) * Q)
        return w[f"{name}.weight"][rows] @ x[t] + (w[f"{name}.bias"][rows] if args.qkv_bias else 0)

    def rotated(name, head, t):
        vector = projected(f"w{name}", head, t)
        if args.qk_norm:
            vector = vector / math.sqrt((vector ** 2).mean() + args.norm_eps) * w[f"{name}_norm.weight"]
        turned = vector.copy()
        for i in range(Q // 2):
            a, b = (i, i + Q // 2) if swapped else (2 * i, 2 * i + 1)
            angle = t / args.rope_scaling * args.rope_theta ** (-2 * i / Q) / (args.rope_factors[i] if args.rope_factors else 1)
            turned[a] = vector[a] * math.cos(angle) - vector[b] * math.sin(angle)
            turned[b] = vector[a] * math.sin(angle) + vector[b] * math.cos(angle)
        return args.rope_attention * turned

    for h in range(args.n_heads):
        g = h // (args.n_heads // args.n_kv_heads)  # the key/value head of this one
        q, k = ([rotated(name, head, t) for t in range(T)] for name, head in (("q", h), ("k", g)))
        v = [projected("wv", g, t) for t in range(T)]
        for t in range(T):
            scores = np.array([q[t] @ k[s] / math.sqrt(Q) for s in range(t + 1)])
            p = np.exp(scores - scores.max())
            out[t, h * Q:(h + 1) * Q] = sum(p[s] / p.sum() * v[s] for s in range(t + 1))
    return out @ w["wo.weight"].T


LOGITS = 1 << 22  # max logits that the check `loss` holds at a time


def loss(r):
    """
    Find wrong units of the loss, or a wrong initialization. The loss of the first batch must be the
    mean cross entropy of the logits. A fresh model must find all tokens but the one it reads about
    equally likely: with tied weights a token's own logit stands out, the more so the wider the
    model, and in a text of few letters it decides the loss.
    """
    V = r.args.vocab_size
    r.model.eval()
    T = min(r.x.shape[1], max(1, LOGITS // V))
    x, y = r.x[:max(1, LOGITS // (V * T)), :T], r.y[:max(1, LOGITS // (V * T)), :T]
    with torch.no_grad(), r.amp:
        whole, found = (r.model(*both)[1].item() for both in ((r.x, r.y), (x, y)))
        logits = r.model(x, every=True)[0].float()
    if not math.isfinite(whole):
        raise Bug(f"the loss before the first step is {whole}; look at the initialisation, and at the data's ids")
    count = max(1, (y >= 0).sum().item())
    sums = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), y.flatten(), ignore_index=-1, reduction="sum").item()
    if abs(found - sums / count) > 0.3:
        raise Bug(f"the loss before the first step is {found:.2f}, the mean cross entropy of the model's logits "
                  f"{sums / count:.2f}; look at the mean of the loss over tokens")
    slack = 0.3 + 4e-4 * r.args.dim * (1 + 10 / V)  # logits of deviation d add d^2 / 2
    if not r.fresh:
        if whole > math.log(V) + slack:
            raise Suspicion(f"the loss before the first step is {whole:.2f}, worse than ln V = {math.log(V):.2f} of a "
                            f"model that knows nothing; were these weights trained with this vocabulary?")
        return
    if V < 2:
        return
    ids = torch.arange(min(V, max(1, LOGITS // V)), device=r.device)
    with torch.no_grad(), r.amp:
        logits = r.model(ids[:, None])[0][:, 0].float()  # (ids, V), of each token by itself
    others = logits[torch.arange(V, device=r.device) != ids[:, None]].view(len(ids), V - 1)
    likely = (others.logsumexp(1) - others.mean(1)).mean().item()
    if not abs(likely - math.log(V - 1)) < slack:
        raise Bug(f"a fresh model finds some tokens much likelier than others: the loss before the first step is "
                  f"{likely:.2f} where targets are drawn by chance, expected {math.log(V - 1):.2f}, as of equal "
                  f"chances; look at the initialisation")


# ---- gradients ----------------------------------------------------------------------------------------------------

def gradients(r):
    """
    Find a frozen layer, a detached gradient and a parameter that no optimizer has: each must get a
    finite gradient, not zero. The tokens are drawn: in a text of one letter attention has no choice.
    """
    r.model.train(not r.args.dropout)
    x, y = drawn_tokens(r)
    trained = {p for group in r.opt.param_groups for p in group["params"]}
    # of a tied embedding lm_head's gradient would hide that its own is missing
    with outputs({"embedding": r.model.tok_embeddings}) as found, r.amp:
        value = r.model(x, y)[1]
    if found["embedding"].requires_grad:
        found["embedding"].retain_grad()
    if value.requires_grad:
        (value * r.scale.factor).backward()
    lengths = {name: None if p.grad is None else distributed.unshard(p.grad.norm()).item() for name, p in
               r.model.named_parameters()}
    for name, p in r.model.named_parameters():
        if not p.requires_grad:
            raise Bug(f"{name} is frozen (requires_grad is False), it will not learn")
        if lengths[name] is None:
            raise Bug(f"{name} gets no gradient: between it and the loss something is detached, or it is never used")
        if not math.isfinite(lengths[name]):
            raise Bug(f"the gradient of {name} is {lengths[name]}; look at what divides or takes logarithms behind it")
        choosing = name.split(".")[-2] in ("wq", "wk", "q_norm", "k_norm")
        if not lengths[name] and not (choosing and x.shape[1] < 2):  # of one key no choice
            raise Bug(f"the gradient of {name} is zero: what it computes does not reach the loss")
        if p not in trained:
            raise Bug(f"{name} is in no group of the optimizer, it will not learn")
    if not r.sharded and (found["embedding"].grad is None or not found["embedding"].grad.norm()):
        raise Bug("tok_embeddings gets no gradient from what it puts in: behind it something is detached")


def drawn_tokens(r):
    """Inputs and targets drawn from the whole vocabulary, (B, T) each, as many as r.x has or more."""
    T = r.x.shape[1]
    shape = max(2, TOKENS // T), T
    generator = torch.Generator().manual_seed(0)
    drawn = (torch.randint(r.args.vocab_size, shape, generator=generator) for _ in range(2))
    return distributed.to_device(r.device, *drawn)


class Catcher:
    """An optimizer that takes no step, but the gradients, by the names of the parameters."""

    def __init__(self, model, scale):
        self.names, self.found, self.scale = dict(model.named_parameters()), {}, scale

    def step(self, observe=None):
        self.found = {name: p.grad.clone() for name, p in self.names.items() if p.grad is not None}

    def zero_grad(self):
        for p in self.names.values():
            p.grad = None


def accumulation(r):
    """A wrong divisor: the micro-batches of train_step have to give the gradient of their batch in one forward pass."""
    r.model.train(not r.args.dropout)
    x, y = r.small
    # Where some targets of a sequence are left out, the mean of means is another one: predict all.
    # A process may have rows without any target, to have as many as the others.
    y = torch.where((y >= 0).any(1, keepdim=True), y.clamp(min=0), -1)
    real, steps = (y >= 0).any(1).sum().item(), f"with gradient_accumulation_steps={r.s.gradient_accumulation_steps}"
    opt = Catcher(r.model, copy.deepcopy(r.scale))
    _, norm, _ = r.step(0, r.model, opt, (x, y))
    r.model.train(not r.args.dropout)
    xd, yd = distributed.to_device(r.device, x, y)
    with r.amp:
        value = r.model(xd, yd)[1] * (real * distributed.world / (r.s.batch_size * r.s.gradient_accumulation_steps))
    (value * r.scale.factor).backward()
    one = {name: p.grad for name, p in opt.names.items() if p.grad is not None}
    length, clipped = total_norm(one.values()), total_norm(opt.found.values())
    ratio = norm.item() / (length / r.scale.factor)
    if not abs(ratio - 1) < 0.05:
        raise Bug(f"a step's gradient has {ratio:.3g} times the length of that of its batch in one pass, {steps}; look at what "
                  f"divides a micro-batch's loss")
    gap = total_norm([opt.found[name] / clipped - g / length for name, g in one.items()])
    if not gap < (0.02 if r.config["compute_dtype"] == "float32" else 0.2):
        raise Bug(f"a step's gradient is another one than its batch's in one pass (they differ by {gap:.2g} of their length), "
                  f"{steps}; look at the weights of the micro-batches")


def total_norm(tensors):
    return math.sqrt(sum(distributed.unshard(t.float().norm()).item() ** 2 for t in tensors))


def rate(r):
    """
    A learning rate far too high: in a few steps of the real optimizer on one batch, at the peak of the rate, the loss rises
    again, or the first step changes the matrices by more than they are.
    """
    if r.sharded:
        raise Skip
    model, s, losses = r.model, r.s, []
    model.train(not r.args.dropout)
    opt = r.make_optimizer(model, s.optimizer, s.learning_rate, s.weight_decay, s.beta1, s.beta2, s.table_rate, s.momentum)
    opt.scale = copy.deepcopy(r.scale)
    with put_back(model) as before:
        for step in range(TRIAL_STEPS):
            taken = r.step(step, model, opt)
            losses.append(taken[0].item())
            if not step:
                change = float(np.median([((p - old).norm() / old.norm()).item() for p, old in before.items() if p.dim() == 2]))
    best = np.minimum.accumulate(losses)
    at, advice = f"at learning_rate={s.learning_rate:g}", "it is too high, try a tenth or a hundredth"
    if not max(losses - best) < MOST_RISE:
        raise Suspicion(f"{at} the loss of one batch goes {' '.join(f'{x:.2f}' for x in losses)} in {TRIAL_STEPS} steps: "
                        f"{advice}")
    if change > MOST_CHANGE:
        raise Suspicion(f"{at} the first step changes a matrix by {change:.1f} times its own length: {advice}")


@contextlib.contextmanager
def put_back(model):
    """{parameter: a copy of it}, from which they all are set again in the end."""
    before = {p: p.detach().clone() for p in model.parameters()}
    try:
        yield before
    finally:
        for p, old in before.items():
            p.data.copy_(old)


# ---- files --------------------------------------------------------------------------------------------------------

def saved(r):
    """A checkpoint that does not hold all: saved and loaded into a new model it has to give the same logits."""
    if r.sharded:
        raise Skip
    tokens = r.line(min(r.s.max_seq_len, 32))
    with tempfile.TemporaryDirectory(prefix="llamac-") as folder:
        weights = checkpoint.snapshot(dict(r.model.named_parameters()))
        path = checkpoint.save(folder, checkpoint.Contents(
            0, {"args": asdict(r.args), "model": weights}, {}, {},
            r.dataset.folder / r.dataset.meta["tokenizer"]))
        stored = checkpoint.load(path)
        again = Transformer(type(r.args)(**stored["args"])).to(r.device)
        distributed.load_weights(again, stored["model"])
    again.bos_id = r.model.bos_id
    other = copy.copy(r)
    other.model = again
    a, b = (one.outputs(tokens)["the logits"] for one in (r, other))
    if not torch.allclose(a, b, atol=1e-4 * a.abs().max().item()):
        raise Bug(f"a checkpoint of this model, loaded again, gives other logits (by {(a - b).abs().max():.2g}); look at "
                  f"buffers and settings that no parameter or ModelArgs holds")


def run(r):
    """model.gguf in ./run has to give the model's own logits: what is exported is what was trained."""
    if r.sharded or not is_built():
        raise Skip
    prompt = r.s.sample_prompt.split("|")[0]
    tokens = torch.tensor([r.dataset.tokenizer.encode_prompt(prompt)[:r.s.max_seq_len]], device=r.device)
    if not 2 <= tokens.shape[1] < r.s.max_seq_len:
        raise Skip
    other = copy.copy(r)
    other.model, other.amp = sharpened(r.model), contextlib.nullcontext()
    with tempfile.TemporaryDirectory(prefix="llamac-") as folder, contextlib.redirect_stdout(None):
        r.export_model(other.model.state_dict(), r.args, r.dataset.tokenizer, Path(folder, "model.gguf"))
        command = [PROGRAM, Path(folder, "model.gguf"), "--logits", "-i", prompt]
        done = subprocess.run(command, capture_output=True, timeout=60)
    if done.returncode:
        raise Suspicion(f"./run does not read the exported model: {done.stderr.decode(errors='replace').strip()[:200]}")
    theirs = np.frombuffer(done.stdout, np.float32).reshape(-1, r.args.vocab_size)
    ours = other.outputs(tokens)["the logits"][0].cpu().numpy()
    if theirs.shape != ours.shape:
        raise Bug(f"./run reads {len(theirs)} tokens where the tokenizer gives {len(ours)} for {prompt!r}")
    gap = far(theirs - theirs.mean(), ours - ours.mean())
    if gap > 0.01:
        raise Bug(f"./run computes other logits from the exported model (they differ by {gap:.2g} of the largest): model.py is "
                  f"not what the file format says, or ./run is wrong")


def sharpened(model):
    """A copy whose attention looks somewhere, as that of fresh weights does not: else positions would hardly matter."""
    model = copy.deepcopy(model)
    for layer in model.layers:
        q, k = layer.attention.wq.weight.data, layer.attention.wk.weight.data
        scores = (q.std() * k.std() * q.shape[1]).item()  # their deviation, about
        if 0 < scores < 2:
            q *= (2 / scores) ** 0.5
            k *= (2 / scores) ** 0.5
    return model


def is_built():
    """Whether ./run is there and not older than its sources."""
    sources = [path for pattern in ("run.c", "runtime/*.[ch]", "runtime/cpu/*.[ch]") for path in ROOT.glob(pattern)]
    return os.access(PROGRAM, os.X_OK) and all(PROGRAM.stat().st_mtime >= path.stat().st_mtime for path in sources)
