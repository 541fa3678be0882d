"""Looks into a model that are worth logging: norms of an update, histograms, what the model predicts."""
import collections
import contextlib
import math

import torch

from engine import parallel


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
            self.histograms |= {f"{kind}/{self.names[p]}": histogram(parallel.whole(t)) for p, t in zip(params, tensors)}

    def take(self):
        """The metrics of the step that was measured, once, with one wait for the device."""
        squares, found = collections.Counter(), self.histograms
        norms = torch.stack(parallel.whole([n for *_, n in self.norms])).tolist() if self.norms else []
        for (norm, layer, _), n in zip(self.norms, norms):
            squares[norm, layer] += n * n
        found |= {f"norm/{norm}/{layer}": math.sqrt(square) for (norm, layer), square in squares.items()}
        for layer in {layer for norm, layer in squares if norm == "update"}:
            found[f"norm/update/{layer}"] /= found[f"norm/weight/{layer}"] + 1e-12
        self.norms, self.histograms = [], {}
        return found


def spell(pieces, i):
    """A token as it is read: its space is a space, its byte a character or, where it is none by itself, <0x..>."""
    piece, _, kind = pieces[i]
    byte = int(piece[3:5], 16) if kind == 6 else 255
    return chr(byte) if byte < 128 else piece.decode("utf-8", "replace").replace("\u2581", " ")


PROBED = 1 << 22  # logits that probe holds at a time, in several copies: 16 MiB each


def probe(model, batches, tokenizer, amp, places=6):
    """
    What the model says on fixed batches, {"train": (x, y), "val": (x, y)} of (B, T) each: logits/* on the last of
    them, and of every one some rows of the table `predictions`. Of a large vocabulary only every n-th position counts.
    """
    row, pieces, lines = {}, tokenizer.pieces(), []
    model.eval()
    for split, (x, y) in batches.items():
        every = math.ceil(x.numel() * tokenizer.vocab_size / PROBED)
        with torch.no_grad(), amp:
            logits = model(x, every=every)[0].float()  # (B, N, V), of the positions 0, every, 2 every ...
        row = {"logits/histogram": histogram(logits)}
        log_p = logits.sub_(logits.logsumexp(-1, keepdim=True))
        p_target = log_p.gather(-1, y[:, ::every].clamp(min=0)[..., None])[..., 0].exp()  # (B, N)
        p = log_p.exp()
        top_p, top = p.topk(3)
        for n in range(places):  # spread over the batch: another sequence and place each time
            b, i = n % len(x), (2 * n + 1) * p.shape[1] // (2 * places)
            t = i * every
            seen = tokenizer.decode(x[b, max(0, t - 24):t + 1].tolist())
            guesses = [cell for j, q in zip(top[b, i].tolist(), top_p[b, i].tolist())
                       for cell in (spell(pieces, j), round(q, 4))]
            lines.append([split, seen, spell(pieces, int(y[b, t])), round(p_target[b, i].item(), 4), *guesses])
        row |= {"logits/p_target": p_target.mean().item(), "logits/p_max": top_p[..., 0].mean().item(),
                "logits/entropy": -p.mul_(log_p).sum(-1).mean().item()}
    model.train()
    return row | {"predictions": lines}
