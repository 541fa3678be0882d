"""
Checks of the model, the training step and the files before the first step.
engine/debug/preflight.py runs them; each takes its CheckContext and raises Bug, Suspicion or Skip.
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

from engine.debug.activations import block_outputs, capture
from engine.debug.data_checks import Bug, Skip, Suspicion
from engine.training import checkpoint, distributed, lora
from model import Transformer

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "run"
TOKENS = 1024         # approximate number of tokens in a forward pass of a check
# The matrices of a block that read its normalized residual stream.
READERS = (".attention.wq", ".attention.wk", ".attention.wv",
           ".feed_forward.w1", ".feed_forward.w3")
MAX_LOGITS = 1 << 22  # max number of logits that the check `loss` holds

# The check `rate`. At a good learning rate, the loss rises by 0.1 nats above its minimum so far and
# the first step changes a matrix by 0.3 of its norm. At a bold but usable rate, the loss rises by
# 1 nat.
TRIAL_STEPS = 6
MAX_RISE = 1.4  # nats
MAX_CHANGE = 2  # norm of the change, relative to the norm of the matrix


# ---- the model --------------------------------------------------------------------------------

def movement(before, after, layer):
    """Return how far each position of a layer's output, (1, T, D), has moved: (T,)."""
    return (before[layer] - after[layer]).abs().amax(-1)[0]


def future(ctx):
    """
    Find a causal mask that is off by one, or missing, in any layer: after a change of one token
    earlier positions must stay, and some later one must move.
    """
    T = min(ctx.config.max_seq_len, 64)
    if T < 2 or ctx.args.vocab_size < 3:
        raise Skip
    tokens = ctx.document(T)
    before = block_outputs(ctx.model, tokens, ctx.amp)
    for t in sorted({1, T // 2, T - 1}):
        after = block_outputs(ctx.model, ctx.with_other_token(tokens, t), ctx.amp)
        for layer in before:
            moved = movement(before, after, layer)
            if moved[:t].max() > 1e-5 * moved.max():
                raise Bug(f"{layer}: position {int(moved[:t].argmax())} moves when token {t} "
                          f"changes: it sees the future, so the loss is meaningless; look at the "
                          f"mask of the attention")
        # `moved` is now that of the logits, the last entry of `before`.
        if t < T - 1 and not moved[t + 1:].max():
            raise Bug(f"no position after {t} moves when token {t} changes: the past is not seen; "
                      f"look at the mask of the attention")


def documents(ctx):
    """Find attention that reaches into the previous document, although document_mask is set."""
    config, separator = ctx.config, ctx.dataset.separator
    too_small = config.max_seq_len < 8 or ctx.args.vocab_size < 3
    if not config.document_mask or separator is None or separator < 0 or too_small:
        raise Skip
    T = min(config.max_seq_len, 64)
    changed, second = T // 4, T // 2  # index of the changed token, start of the second document
    tokens = ctx.document(T)
    tokens[0, second] = separator
    before = block_outputs(ctx.model, tokens, ctx.amp)
    after = block_outputs(ctx.model, ctx.with_other_token(tokens, changed), ctx.amp)
    for layer in before:
        moved = movement(before, after, layer)
        if moved[second:].max() > 1e-5 * moved.max():
            raise Bug(f"{layer}: position {second + int(moved[second:].argmax())} moves when token "
                      f"{changed} changes, which is in another document (it ends at {second - 1}); "
                      f"look at ops.within_documents and model.bos_id")


def norms(ctx):
    """
    Find a missing normalization: compare the root mean square of each matrix's input with that of
    the normalized residual stream.
    """
    if not ctx.fresh:
        raise Skip
    model, layers = ctx.model, [f"layers.{i}" for i in range(ctx.args.n_layers)]
    names = [layer + part for layer in layers for part in ("", ".attention", *READERS)]
    with capture({name: model.get_submodule(name) for name in [*names, "output"]}) as calls:
        block_outputs(model, ctx.x[:1], ctx.amp)
    # Collect the residual stream before the RMSNorm in front of each matrix. calls[name] is the
    # (input, output) of a module.
    residuals = {"output": calls[layers[-1]][1]}
    for layer in layers:
        x, attended = calls[layer][0].float(), calls[layer + ".attention"][1].float()
        for part in READERS:
            residuals[layer + part] = x if part.startswith(".attention") else x + attended
    for name, residual in residuals.items():
        square = residual.float().square().mean(-1)  # of each token
        # The squares of fresh embeddings are so small that norm_eps lowers the result.
        expected = (square / (square + ctx.args.norm_eps)).mean().sqrt().item()
        rms = calls[name][0].float().square().mean().sqrt().item()
        if not 0.7 * expected < rms < 1.4 * expected:
            raise Bug(f"the input of {name} has a root mean square of {rms:.3g}, expected "
                      f"{expected:.3g}: an RMSNorm before it is missing or wrong")


def attention(ctx):
    """
    Find wrong rotations, heads or scale: compare the attention of model.py with plain loops over
    the formula.
    """
    if ctx.sharded:
        raise Skip
    T = min(ctx.config.max_seq_len, 6)
    for i in sorted({0, ctx.args.n_layers - 1}):
        module = lora.plain_copy(ctx.model.layers[i].attention, ctx.model).cpu().float().eval()
        x = torch.randn(1, T, ctx.args.dim)
        q, k = (x @ linear.weight.detach().T for linear in (module.wq, module.wk))
        # Scale x so that the scores have a standard deviation of 2: the scores of fresh weights are
        # too small to show errors.
        x *= (2 / (q.std() * k.std() + 1e-12)).sqrt()
        with torch.no_grad():
            ours = module(x, ctx.model.rope[:T].cpu())[0].double().numpy()
        gap = difference(ours, plain_attention(module, x[0], ctx.args))
        if gap < 1e-3:
            continue
        found = f"attention of layers.{i} differs from the formula by {gap:.2g}"
        if difference(ours, plain_attention(module, x[0], ctx.args, halves=True)) < 1e-3:
            raise Bug(f"{found}: it rotates the pairs (i, i + Q/2), but model files and ./run have "
                      f"(2i, 2i + 1); look at ops.rotate")
        raise Bug(f"{found}, so model.gguf will not compute what is trained; look at its "
                  f"positions, heads, scale and mask")


def difference(a, b):
    """Return the largest difference of two arrays, relative to the largest element of b."""
    return float(np.abs(a - b).max() / (np.abs(b).max() + 1e-12))


def plain_attention(module, x, args, halves=False):
    """
    Return the output (T, D) of attention on x (T, D), by loops over heads, positions and pairs in
    float64; shares no code with model.py. halves: rotate the pairs (i, i + Q/2), not (2i, 2i + 1).
    """
    weights = {name: p.detach().double().numpy() for name, p in module.named_parameters()}
    T, Q, x = len(x), args.head_dim, x.double().numpy()
    out = np.zeros((T, args.n_heads * Q))

    def project(name, head, t):
        rows = slice(head * Q, (head + 1) * Q)
        bias = weights[f"{name}.bias"][rows] if args.qkv_bias else 0
        return weights[f"{name}.weight"][rows] @ x[t] + bias

    def rotated(name, head, t):
        vector = project(f"w{name}", head, t)
        if args.qk_norm:
            rms = math.sqrt((vector ** 2).mean() + args.norm_eps)
            vector = vector / rms * weights[f"{name}_norm.weight"]
        turned = vector.copy()
        for i in range(Q // 2):
            a, b = (i, i + Q // 2) if halves else (2 * i, 2 * i + 1)
            factor = args.rope_factors[i] if args.rope_factors else 1
            angle = t / args.rope_scaling * args.rope_theta ** (-2 * i / Q) / factor
            turned[a] = vector[a] * math.cos(angle) - vector[b] * math.sin(angle)
            turned[b] = vector[a] * math.sin(angle) + vector[b] * math.cos(angle)
        return args.rope_attention * turned

    for h in range(args.n_heads):
        kv_head = h // (args.n_heads // args.n_kv_heads)
        q = [rotated("q", h, t) for t in range(T)]
        k = [rotated("k", kv_head, t) for t in range(T)]
        v = [project("wv", kv_head, t) for t in range(T)]
        for t in range(T):
            scores = np.array([q[t] @ k[s] / math.sqrt(Q) for s in range(t + 1)])
            p = np.exp(scores - scores.max())
            out[t, h * Q:(h + 1) * Q] = sum(p[s] / p.sum() * v[s] for s in range(t + 1))
    return out @ weights["wo.weight"].T


def loss(ctx):
    """
    Find a loss that is not the mean cross entropy of the logits, and a wrong initialization: fresh
    weights must compute about the same logit for all tokens except the input token. Tied weights
    raise the logit of the input token, the more so the wider the model.
    """
    V, model = ctx.args.vocab_size, ctx.model
    model.eval()
    T = min(ctx.x.shape[1], max(1, MAX_LOGITS // V))
    rows = max(1, MAX_LOGITS // (V * T))
    x, y = ctx.x[:rows, :T], ctx.y[:rows, :T]
    with torch.no_grad(), ctx.amp:
        whole = model(ctx.x, ctx.y)[1].item()
        found = model(x, y)[1].item()
        logits = model(x, every=1, documents=model.document_mask(x, y))[0].float()
    if not math.isfinite(whole):
        raise Bug(f"the loss before the first step is {whole}; look at the initialization, and at "
                  f"the data's ids")
    targets = y.flatten().clamp(min=-1)
    total = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets, ignore_index=-1,
                                              reduction="sum").item()
    expected = total / max(1, (y >= 0).sum().item())
    if abs(found - expected) > 0.3:
        raise Bug(f"the loss before the first step is {found:.2f}, the mean cross entropy of the "
                  f"model's logits {expected:.2f}; look at the mean of the loss over tokens")
    # Fresh logits have the variance d^2 = 0.02^2 * dim, which adds d^2 / 2 to the loss. Allow twice
    # that, and more if V is small.
    slack = 0.3 + 4e-4 * ctx.args.dim * (1 + 10 / V)
    if not ctx.fresh:
        # A base model has never seen the markers of conversations.
        if whole > math.log(V) + slack and not ctx.dataset.masks:
            raise Suspicion(f"the loss before the first step is {whole:.2f}, worse than ln V = "
                            f"{math.log(V):.2f} of an untrained model; were these weights "
                            f"trained with this vocabulary?")
        return
    if V < 2:
        return
    ids = torch.arange(min(V, max(1, MAX_LOGITS // V)), device=ctx.device)
    with torch.no_grad(), ctx.amp:
        logits = model(ids[:, None])[0][:, 0].float()  # (ids, V), each id is a sequence of its own
    is_other = torch.arange(V, device=ctx.device) != ids[:, None]
    others = logits[is_other].view(len(ids), V - 1)
    # The mean loss on targets drawn at random from all tokens but the input token.
    random_loss = (others.logsumexp(1) - others.mean(1)).mean().item()
    if not abs(random_loss - math.log(V - 1)) < slack:
        raise Bug(f"a new model should give all tokens about the same probability, but its loss on "
                  f"random targets is {random_loss:.2f}, expected {math.log(V - 1):.2f}; "
                  f"look at the initialization")


# ---- gradients --------------------------------------------------------------------------------

def set_deterministic_mode(ctx):
    """Set training mode; if the model has dropout, evaluation mode, which turns it off."""
    ctx.model.train(not ctx.args.dropout)


def gradients(ctx):
    """
    Find frozen layers, detached gradients and parameters without an optimizer: each parameter, or
    with LoRA each trained parameter, must get a finite gradient other than zero. The check uses
    random tokens instead of the batch: if all tokens were equal, all values would be equal too, and
    the gradients of the queries and keys would be zero.
    """
    set_deterministic_mode(ctx)
    x, y = random_tokens(ctx)
    parameters, _ = lora.split(ctx.model)
    with restored(ctx.model) if ctx.model.lora else contextlib.nullcontext():
        fill_adapters(parameters)
        with capture({"embedding": ctx.model.tok_embeddings}) as calls, ctx.amp:
            value = ctx.model(x, y)[1]
        _, embedded = calls["embedding"]
        if embedded.requires_grad:
            embedded.retain_grad()
        if value.requires_grad:
            (value * ctx.scale.factor).backward()
    trained = {p for group in ctx.opt.param_groups for p in group["params"]}
    # Compute every norm before the first Bug: each process must take part in each `unshard`.
    sizes = {name: distributed.unshard(p.grad.norm()).item()
             for name, p in parameters.items() if p.grad is not None}
    for name, p in parameters.items():
        size = sizes.get(name)
        if not p.requires_grad:
            raise Bug(f"{name} is frozen (requires_grad is False), it will not learn")
        if size is None:
            raise Bug(f"{name} gets no gradient: between it and the loss something is detached, or "
                      f"it is never used")
        if not math.isfinite(size):
            raise Bug(f"the gradient of {name} is {size}; look at divisions and logarithms "
                      f"after it")
        makes_scores = name.split(".")[-2] in ("wq", "wk", "q_norm", "k_norm")
        # The softmax of a single score is always 1.
        if not size and not (makes_scores and x.shape[1] < 2):
            raise Bug(f"the gradient of {name} is zero: its output does not affect the loss")
        if p not in trained:
            raise Bug(f"{name} is in no group of the optimizer, it will not learn")
    # If the embedding and the classifier are tied, their weight gets a gradient from the classifier
    # even if the output of the embedding is detached. A LoRA's embedding may be frozen.
    is_reached = embedded.grad is not None and embedded.grad.norm() > 0
    if not ctx.sharded and not ctx.model.lora and not is_reached:
        raise Bug("the output of tok_embeddings gets no gradient: after it something is detached")


@torch.no_grad()
def fill_adapters(parameters):
    """Fill the B of adapters with random numbers: while B is zero, the gradient of A is zero."""
    generator = torch.Generator().manual_seed(0)
    for name, p in parameters.items():
        if name.endswith("lora_B"):
            p.copy_(0.02 * torch.randn(p.shape, generator=generator))


def random_tokens(ctx):
    """Return random inputs and targets on the device, (B, T) each, of about TOKENS tokens."""
    T = ctx.x.shape[1]
    shape = 2, max(2, TOKENS // T), T
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(ctx.args.vocab_size, shape, generator=generator)
    tokens[0, 0, 0] = ctx.args.vocab_size - 1  # the embeddings that LoRA may train are the last
    return distributed.to_device(ctx.device, *tokens)


class GradientRecorder:
    """An optimizer that keeps the gradients, {name: gradient}, and changes no weight."""

    def __init__(self, model, scale):
        self.parameters, self.gradients, self.scale = dict(model.named_parameters()), {}, scale

    def current(self):
        return {name: p.grad for name, p in self.parameters.items() if p.grad is not None}

    def step(self, observe=None):
        self.gradients = {name: grad.clone() for name, grad in self.current().items()}

    def zero_grad(self):
        for p in self.parameters.values():
            p.grad = None


def accumulation(ctx):
    """
    Find a wrong divisor: the gradient that train_step accumulates over micro-batches must equal
    that of one forward pass of the whole batch.
    """
    set_deterministic_mode(ctx)
    x, y = ctx.small
    targets = (y >= 0).sum().item()
    total = distributed.total(targets)
    if not total:  # conversations that are cut short may have no answer left
        raise Skip
    recorder = GradientRecorder(ctx.model, copy.deepcopy(ctx.scale))
    _, norm, _ = ctx.step(0, ctx.model, recorder, (x, y))
    set_deterministic_mode(ctx)
    x, y = distributed.to_device(ctx.device, x, y)
    accumulated = ctx.config.gradient_accumulation_steps
    # As in train_step: this process's number of targets, relative to the mean over processes.
    share = targets * distributed.world / total
    with ctx.amp:
        value = ctx.model(x, y)[1] * share
    (value * ctx.scale.factor).backward()
    whole, stepped = recorder.current(), recorder.gradients
    whole_norm, stepped_norm = total_norm(whole.values()), total_norm(stepped.values())
    setting = f"with gradient_accumulation_steps={accumulated}"
    ratio = norm.item() / (whole_norm / ctx.scale.factor)  # `norm` is from before clipping
    if not abs(ratio - 1) < 0.05:
        raise Bug(f"a step's gradient has {ratio:.3g} times the norm of its batch's gradient in "
                  f"one pass, {setting}; look at the divisor of a micro-batch's loss")
    # train_step has clipped its gradient, so compare only the directions.
    gap = total_norm([stepped[name] / stepped_norm - grad / whole_norm
                      for name, grad in whole.items()])
    if not gap < (0.02 if ctx.record["compute_dtype"] == "float32" else 0.2):
        raise Bug(f"a step's gradient is not its batch's gradient in one pass (they differ by "
                  f"{gap:.2g} of their norm), {setting}; look at the weights of the micro-batches")


def total_norm(tensors):
    """Return the norm of all tensors together, which may be sharded."""
    return math.sqrt(sum(distributed.unshard(t.float().norm()).item() ** 2 for t in tensors))


def rate(ctx):
    """
    Find a learning rate that is far too high. In TRIAL_STEPS steps on one batch at the peak rate,
    the loss must not rise by MAX_RISE above its minimum so far, and the first step must not change
    the median matrix by more than MAX_CHANGE times its norm.
    """
    if ctx.sharded:
        raise Skip
    model, config, losses = ctx.model, ctx.config, []
    set_deterministic_mode(ctx)
    opt = ctx.make_optimizer(model, config)
    opt.scale = copy.deepcopy(ctx.scale)
    with restored(model) as before:
        for step in range(TRIAL_STEPS):
            losses.append(ctx.step(step, model, opt)[0].item())
            if step == 0:
                # B of an adapter starts as zeros, so it has no relative change.
                changes = [((p - old).norm() / old.norm()).item()
                           for p, old in before.items() if p.dim() == 2 and old.any()]
    change = float(np.median(changes))
    setting = f"at learning_rate={config.learning_rate:g}"
    advice = "it is too high, try a tenth or a hundredth"
    # np.max, unlike max, returns NaN if any loss is NaN.
    if not np.max(losses - np.minimum.accumulate(losses)) < MAX_RISE:
        shown = " ".join(f"{x:.2f}" for x in losses)
        raise Suspicion(f"{setting} the loss of one batch goes {shown} in {TRIAL_STEPS} "
                        f"steps: {advice}")
    if change > MAX_CHANGE:
        raise Suspicion(f"{setting} the first step changes a matrix by {change:.1f} times its own "
                        f"norm: {advice}")


@contextlib.contextmanager
def restored(model):
    """Yield {trained parameter: a copy of it}, and copy them back at the end."""
    before = {p: p.detach().clone() for p in lora.split(model)[0].values()}
    try:
        yield before
    finally:
        for p, old in before.items():
            p.data.copy_(old)


# ---- files ------------------------------------------------------------------------------------

def saved(ctx):
    """Find an incomplete checkpoint: a model loaded from it must compute the same logits."""
    # The first checkpoint and export of a LoRA hold only the weights it starts from, and a second
    # copy of those may not fit into memory.
    if ctx.sharded or ctx.model.lora:
        raise Skip
    tokens = ctx.document(min(ctx.config.max_seq_len, 32))
    with tempfile.TemporaryDirectory(prefix="llamac-") as folder:
        weights = checkpoint.snapshot(dict(ctx.model.named_parameters()))
        model = {"args": asdict(ctx.args), "model": weights}
        tokenizer = ctx.dataset.folder / ctx.dataset.meta["tokenizer"]
        contents = checkpoint.Contents(0, model, {}, {}, tokenizer)
        stored = checkpoint.load(checkpoint.save(folder, contents))
        loaded = Transformer(type(ctx.args)(**stored["args"])).to(ctx.device)
        distributed.load_weights(loaded, stored["model"])
    loaded.bos_id = ctx.model.bos_id
    a, b = (block_outputs(each, tokens, ctx.amp)["the logits"] for each in (loaded, ctx.model))
    if not torch.allclose(a, b, atol=1e-4 * b.abs().max().item()):
        raise Bug(f"a checkpoint of this model computes other logits when it is loaded (by "
                  f"{(a - b).abs().max():.2g}); look at buffers and settings that are neither "
                  f"parameters nor in ModelArgs")


def run(ctx):
    """Find a wrong export: ./run must compute the model's own logits from model.gguf."""
    if ctx.sharded or ctx.model.lora or not ctx.t.exports or not is_built():
        raise Skip
    prompt, tokenizer = ctx.config.sample_prompt.split("|")[0], ctx.dataset.tokenizer
    ids = tokenizer.encode_prompt(prompt)[:ctx.config.max_seq_len]
    if not 2 <= len(ids) < ctx.config.max_seq_len:
        raise Skip
    model = sharpened(ctx.model)
    with tempfile.TemporaryDirectory(prefix="llamac-") as folder, contextlib.redirect_stdout(None):
        path = Path(folder, "model.gguf")
        ctx.export_model(model.state_dict(), ctx.args, tokenizer, path)
        command = [PROGRAM, path, "--logits", "-i", prompt]
        done = subprocess.run(command, capture_output=True, timeout=60)
    if done.returncode:
        error = done.stderr.decode(errors="replace").strip()[:200]
        raise Suspicion(f"./run can't read the exported model: {error}")
    theirs = np.frombuffer(done.stdout, np.float32).reshape(-1, ctx.args.vocab_size)
    tokens = torch.tensor([ids], device=ctx.device)
    outputs = block_outputs(model, tokens, contextlib.nullcontext())
    ours = outputs["the logits"][0].cpu().numpy()
    if theirs.shape != ours.shape:
        raise Bug(f"./run encodes {prompt!r} in {len(theirs)} tokens, the tokenizer in "
                  f"{len(ours)}")
    gap = difference(theirs - theirs.mean(), ours - ours.mean())
    if gap > 0.01:
        raise Bug(f"./run computes other logits from the exported model (they differ by {gap:.2g} "
                  f"of the largest): model.py is not what the file format describes, or ./run is "
                  f"wrong")


def sharpened(model):
    """
    Return a copy of the model with attention that is far from uniform. That of fresh weights is
    nearly uniform, so an error in the positions would hardly change the logits.
    """
    model = copy.deepcopy(model)
    for layer in model.layers:
        q, k = layer.attention.wq.weight.data, layer.attention.wk.weight.data
        # About the standard deviation of the scores.
        deviation = (q.std() * k.std() * q.shape[1]).item()
        if 0 < deviation < 2:
            for weight in (q, k):
                weight *= (2 / deviation) ** 0.5
    return model


def is_built():
    """Return whether ./run exists and is newer than its sources."""
    if not os.access(PROGRAM, os.X_OK):
        return False
    built = PROGRAM.stat().st_mtime
    return all(path.stat().st_mtime <= built
               for pattern in ("run.c", "cli/*.h", "runtime/*.[ch]", "runtime/cpu/*.[ch]")
               for path in ROOT.glob(pattern))
