"""Looks into a model that are worth logging: norms of an update, histograms, what the model predicts."""
import collections
import contextlib
import math
import time

import torch

from engine import ops
from engine.training import distributed, hardware
from engine.spans import spanned
from engine.training.costs import PROBED
from tokenizer import spell


def histogram(values, bins=32):
    """The histogram of a tensor's finite values, as a row holds it."""
    values = values.detach().float().flatten()
    if not values.isfinite().all():
        values = values[values.isfinite()]
    if not len(values):
        return {"counts": [0], "edges": [0.0, 1.0]}
    low, high = torch.stack((values.min(), values.max())).tolist()
    high = high if high > low else low + 1e-6 * max(1.0, abs(low))
    edges = [low + (high - low) * i / bins for i in range(bins + 1)]
    return {"counts": [int(n) for n in torch.histc(values, bins, low, high).tolist()], "edges": edges}


def layer_of(name):
    """layers.3.attention.wq.weight -> layers.3; norm.weight -> norm."""
    words = name.split(".")
    return ".".join(words[:2]) if words[0] == "layers" else words[0]


class UpdateNorms:
    """
    Around an update of the weights, when `wanted`: for each layer the norms of gradient (as the optimizer gets it,
    clipped) and weights, and the size of the update relative to the weights; with watch="all", "gradients" or
    "parameters" histograms of those too.

        optimizer.step(norms)

    The optimizer enters norms(params) around the update of some parameters at a time: only those are copied.
    """

    def __init__(self, model, watch="off"):
        self.names = {p: name for name, p in model.named_parameters()}
        self.watch, self.wanted, self.norms, self.histograms = watch, False, [], {}

    @contextlib.contextmanager
    def __call__(self, params):
        if not self.wanted:
            yield
            return
        weights, grads = [p.detach() for p in params], [p.grad for p in params]
        updates = [w.clone() for w in weights]
        self.note("grad", "gradients", params, grads)
        yield
        self.note("weight", "parameters", params, weights)
        torch._foreach_sub_(updates, weights)  # before - after, as long as after - before
        self.note("update", "", params, updates)

    def note(self, norm, kind, params, tensors):
        """The norms of the tensors, which stay on their device until `take`, and the histograms that are watched."""
        self.norms += [(norm, layer_of(self.names[p]), n) for p, n in zip(params, torch._foreach_norm(tensors))]
        if kind and self.watch in ("all", kind):
            self.histograms |= {f"{kind}/{self.names[p]}": histogram(distributed.unshard(t)) for p, t in zip(params, tensors)}

    @spanned("logging")
    def take(self):
        """The metrics of the step that was measured, once, with one wait for the device."""
        squares, found = collections.Counter(), self.histograms
        norms = torch.stack(distributed.unshard([n for *_, n in self.norms])).tolist() if self.norms else []
        for (norm, layer, _), n in zip(self.norms, norms):
            squares[norm, layer] += n * n
        found |= {f"norm/{norm}/{layer}": math.sqrt(square) for (norm, layer), square in squares.items()}
        for layer in {layer for norm, layer in squares if norm == "update"}:
            found[f"norm/update/{layer}"] /= found[f"norm/weight/{layer}"] + 1e-12
        self.norms, self.histograms = [], {}
        return found


DEAD = 1e-3   # of what the units of a layer give at most, on average: a unit that never gives more is dead
QUERIES = 64  # positions, the last of a sequence, whose attention is read


@contextlib.contextmanager
def watching(looks):
    """While it lasts, look(what a module was given, what it gave) after each of its calls. looks: [(module, look)]"""
    def hook(look):
        def after(module, given, out):
            look(given[0], out)  # whose own result must not become the module's
        return after

    hooks = [module.register_forward_hook(hook(look)) for module, look in looks]
    try:
        yield
    finally:
        for one in hooks:
            one.remove()


@contextlib.contextmanager
def outputs(modules):
    """{name: what the module gave last} while they run. modules: {name: module}"""
    found = {}
    with watching([(module, lambda given, out, name=name: found.update({name: out})) for name, module in modules.items()]):
        yield found


def rotated(model, z):
    """What q_norm or k_norm gave, (B, T, heads, Q), as attention takes it: (B, heads, T, Q) in float32."""
    return ops.rotate(z.float(), model.rope[:z.shape[1]]).transpose(1, 2)


def scores(q, k):
    """Attention before its softmax and mask: q (B, H, N, Q), k (B, K, T, Q) -> (B, H, N, T)."""
    return q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT / q.shape[-1] ** 0.5


class Inside:
    """
    What `looks` see in a forward pass of `tokens` (B, T): of each block the root mean square of what it gives
    (norm/activation/<layer>), the share of hidden units that give nothing on any token (dead/<layer>) and the entropy of its
    attention, 1 where that is spread evenly and 0 where it is on one token (attention/entropy/<layer>).
    """

    def __init__(self, model, tokens):
        self.model, self.tokens, self.found = model, tokens[:2], {}

    def looks(self):
        """For `watching`."""
        found = []
        for i, layer in enumerate(self.model.layers):
            a, name, scored = layer.attention, f"layers.{i}", {}
            found += [(layer, lambda given, out, name=name: self.length(name, out)),
                      (layer.feed_forward.w2, lambda given, out, name=name: self.units(name, given))]
            found += [(norm, lambda given, out, key=key, scored=scored: scored.update({key: out[:2].detach()}))
                      for key, norm in (("q", a.q_norm), ("k", a.k_norm))]
            found += [(a, lambda given, out, name=name, scored=scored: self.entropy(name, **scored))]
        return found

    def length(self, name, out):
        self.found[f"norm/activation/{name}"] = out.detach().float().square().mean().sqrt()

    def units(self, name, given):
        most = given.detach().abs().flatten(0, -2).amax(0).float()  # (F,), of each unit over all tokens
        self.found[f"dead/{name}"] = (most <= DEAD * most.mean()).float().mean()

    def entropy(self, name, q, k):
        """q: (B, T, H, Q), k: (B, T, K, Q), before their rotation."""
        q, k, bos = rotated(self.model, q), rotated(self.model, k), self.model.bos_id
        seen = ops.within_documents(self.tokens, -1 if bos is None else bos)[:, :, -QUERIES:]  # (B, 1, queries, T)
        log_p = scores(q[:, :, -QUERIES:], k).masked_fill(~seen, -math.inf).log_softmax(-1)
        entropy = -(log_p.exp() * log_p.masked_fill(~seen, 0)).sum(-1)  # (B, H, queries)
        keys = seen.sum(-1).expand_as(entropy)
        share = (entropy / keys.log())[keys > 1]  # of what an even spread has
        if len(share):
            self.found[f"attention/entropy/{name}"] = share.mean()

    def read(self):
        """The metrics, with one wait for the device."""
        return dict(zip(self.found, torch.stack(list(self.found.values())).tolist())) if self.found else {}


def gradient_noise(model, dataset, device, amp, batches=4, pieces=32):
    """
    {"grad/noise_scale"}: tokens of a batch from which on larger ones pay less, B_simple of https://arxiv.org/abs/1812.06162:
    the variance of the gradient over its square, both from the gradients of `pieces` small batches and that of all together.
    """
    x, y = (torch.cat(both) for both in zip(*map(dataset.make_batch, range(batches))))
    pieces = min(pieces, len(x))
    if pieces < 2:
        return {}
    size, total, small = len(x) // pieces, None, 0.0
    model.eval()
    for xb, yb in zip(x.split(size)[:pieces], y.split(size)):
        xb, yb = distributed.to_device(device, xb, yb)
        with amp:
            loss = model(xb, yb)[1]
        (loss * 1024).backward()  # nothing vanishes in float16; the result has no unit of the loss
        grads = [p.grad for p in model.parameters()]
        small += sum(g.square().sum() for g in grads) / pieces
        total = grads if total is None else torch._foreach_add(total, grads)
        for p in model.parameters():
            p.grad = None
    model.train()
    large = sum((g / pieces).square().sum() for g in total)
    small, large = (distributed.mean(distributed.unshard(z)) for z in (small, large))
    b = size * x.shape[1] * (distributed.world if distributed.is_sharded(model) else 1)  # tokens of a small batch
    square = (pieces * large - small) / (pieces - 1)
    variance = (small - large) * b / (1 - 1 / pieces)
    return {"grad/noise_scale": (variance / square).item()} if square > 0 else {}


def probe(model, batches, tokenizer, amp, places=6):
    """
    What the model says on fixed batches, {"train": (x, y), "val": (x, y)} of (B, T) each: logits/* and what is Inside on the
    last of them, and of every one some rows of the table `predictions`. Of a large vocabulary only every n-th position counts.
    """
    row, pieces, lines = {}, tokenizer.pieces(), []
    model.eval()
    for split, (x, y) in batches.items():
        every = math.ceil(x.numel() * tokenizer.vocab_size / PROBED)
        inside = Inside(model, x)
        with torch.no_grad(), amp, watching(inside.looks()):
            logits = model(x, every=every)[0].float()  # (B, N, V), of the positions 0, every, 2 every ...
        row = {"logits/histogram": histogram(logits)} | inside.read()
        log_p = logits.sub_(logits.logsumexp(-1, keepdim=True))
        p_target = log_p.gather(-1, y[:, ::every].clamp(min=0)[..., None])[..., 0].exp()  # (B, N)
        p = log_p.exp()
        top_p, top = p.topk(3)
        for n in range(places):  # spread over the batch: another sequence and place each time
            b, i = n % len(x), (2 * n + 1) * p.shape[1] // (2 * places)
            t = i * every
            seen = tokenizer.decode(x[b, max(0, t - 24):t + 1].tolist())
            guesses = [cell for j, q in zip(top[b, i].tolist(), top_p[b, i].tolist())
                       for cell in (spell(pieces[j]), round(q, 4))]
            lines.append([split, seen, spell(pieces[int(y[b, t])]), round(p_target[b, i].item(), 4), *guesses])
        row |= {"logits/p_target": p_target.mean().item(), "logits/p_max": top_p[..., 0].mean().item(),
                "logits/entropy": -p.mul_(log_p).sum(-1).mean().item()}
    model.train()
    return row | {"predictions": lines}


def write_samples(model, tokenizer, device, prompts, seed):
    """Rows of the table: each prompt continued greedily and by sampling, which has its own random numbers."""
    rows = []
    model.eval()
    for prompt in prompts:
        ids = torch.tensor([tokenizer.encode_prompt(prompt)], device=device)
        if ids.shape[1] >= model.args.max_seq_len:
            ids = ids[:, :1]
        for how, temperature in (("greedy", 0), ("sampled", 0.8)):
            generator = torch.Generator(device=device).manual_seed(seed)
            try:
                out = model.generate(ids, 96, temperature, 0.95, (tokenizer.bos_id, tokenizer.eos_id), generator)
                rows.append([prompt, how, tokenizer.decode(out[0, ids.shape[1]:].tolist())])
            except RuntimeError as e:  # torch.multinomial, of probabilities that are NaN
                if hardware.is_out_of_memory(e):
                    raise
                rows.append([prompt, how, "(no text: the model's probabilities are not finite)"])
    model.train()
    return rows


class Stopwatch:
    """Steps and seconds of training since the last reading; evaluation and saving are taken out."""

    def __init__(self, device):
        self.device, self.steps, self.start = device, 0, time.perf_counter()

    @contextlib.contextmanager
    def paused(self):
        since = time.perf_counter()
        yield
        self.start += time.perf_counter() - since

    @spanned("logging")
    def read(self, config):
        """The speed metrics, and start anew."""
        seconds = time.perf_counter() - self.start
        speed = self.steps * config["tokens_per_iter"] / seconds
        check_peak(config, speed * config["flops_per_token"] / distributed.world, self.device)
        metrics = {"perf/tokens_per_sec": speed, "perf/iter_ms": 1e3 * seconds / self.steps,
                   "perf/peak_mib": hardware.peak_memory(self.device) / 2 ** 20,
                   "mfu": 100 * speed * config["flops_per_token"] / (config["peak_flops"] * distributed.world)}
        self.__init__(self.device)
        return metrics


AGAIN = ", measured again"


def check_peak(config, reached, device):
    """A peak that training passes, in FLOP/s, was taken too low, as on a busy machine: measure it again, once, and say so."""
    if reached <= config["peak_flops"]:
        return
    if config["mfu_basis"].endswith(AGAIN):  # a product takes longer than many steps where the CPU has no such numbers
        config["peak_flops"] = reached
        return
    again = hardware.measured_flops(device, getattr(torch, config["compute_dtype"]), seconds=1)
    old, config["peak_flops"] = config["peak_flops"], max(again, reached)
    distributed.say(f"mfu: training does {reached / 1e12:.3g} TFLOP/s, more than the peak of {old / 1e12:.3g} "
                 f"({config['mfu_basis']}); a product measured again: {again / 1e12:.3g}; from here on mfu is against "
                 f"{config['peak_flops'] / 1e12:.3g}")
    config["mfu_basis"] += AGAIN


@spanned("logging")
def mean_loss(state):
    """The mean training loss of the steps taken since the last row, NaN where all were skipped; and start anew."""
    total, steps = float(state["loss_sum"]), state["loss_steps"]
    state["loss_sum"], state["loss_steps"] = 0.0, 0
    return total / steps if steps else math.nan


@spanned("logging")
def show(row, bar):
    """One row of the log on the progress bar, or, where nobody watches, as a line; evaluations always as a line."""
    if "loss/train" in row:
        bar.set_postfix_str(f"loss {row['loss/train']:.3f}, {row['perf/tokens_per_sec'] / 1e3:.1f}k tok/s", refresh=False)
    if "loss/val" in row or bar.disable:
        short = {"loss/train": "loss {:.4f}", "loss/val": "val loss {:.4f}", "bpb/val": "bits/byte {:.4f}",
                 "lr": "lr {:.2e}", "perf/tokens_per_sec": "{:,.0f} tok/s", "mfu": "mfu {:.1f}%"}
        distributed.say(f"iter {row['iter']:>6} | tokens {row['tokens'] / 1e6:.2f}M | epoch {row['epoch']:.2f} | "
                     + " | ".join(text.format(row[name]) for name, text in short.items() if name in row))
