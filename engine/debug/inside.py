"""
What a model does with one text: attention of every head, what each layer would say, how likely each token was, whose
embedding is near whose, and how the weights are spread. Hooks read it; the model runs as it is.
"""
import base64
import math

import torch

from configurator import fail
from engine.debug.instruments import histogram, outputs, rotated, scores
from tokenizer import spell

MOST = 1 << 20  # numbers of attention, or of queries and keys, that are told
RIVALS = 3      # likeliest tokens beside each
NEAR = 8        # neighbours of each embedding


@torch.inference_mode()
def record(model, ids):
    """
    ids: list of T int -> {"logits": (T, V), "q": (L, H, T, Q), "k": (L, K, T, Q), both rotated, "attention": (L, H, T, T),
    "residual": (L + 1, T, D), of the embedding and behind every layer}.
    """
    a, device = model.args, model.rope.device
    wanted = {"embedding": model.tok_embeddings}
    for i, layer in enumerate(model.layers):
        wanted |= {("q", i): layer.attention.q_norm, ("k", i): layer.attention.k_norm, ("x", i): layer}
    with outputs(wanted) as found:
        logits = model(torch.tensor([ids], device=device), every=True)[0][0]
    q, k = (torch.cat([rotated(model, found[name, i]) for i in range(a.n_layers)]) for name in "qk")  # layers as a batch
    later = torch.ones(len(ids), len(ids), dtype=torch.bool, device=device).triu(1)
    residual = torch.stack([found["embedding"][0], *(found["x", i][0] for i in range(a.n_layers))])
    attention = scores(q, k).masked_fill(later, -math.inf).softmax(-1)
    return {"logits": logits.float(), "q": q, "k": k, "attention": attention, "residual": residual}


@torch.inference_mode()
def lens(model, residual):
    """What each layer would say if it were the last: the logits (L + 1, T, V) of residual (L + 1, T, D), a layer at a time."""
    for x in residual:
        yield model.output(model.norm(x)).float()


@torch.inference_mode()
def neighbours(model, ids, most=NEAR):
    """For each token the ones with the most similar embeddings, by cosine: (values, ids), both (T, most)."""
    table = torch.nn.functional.normalize(model.tok_embeddings.weight.float(), dim=-1)
    near = table[ids] @ table.T  # (T, V)
    near[torch.arange(len(ids)), ids] = -math.inf  # itself
    return near.topk(min(most, len(table) - 1))


def most_tokens(args):
    """How long a text may be, so that what is told of it is not too much."""
    return min(args.max_seq_len, int((MOST / (args.n_layers * args.n_heads)) ** 0.5), MOST // (args.n_layers * args.dim))


def packed(tensor):
    """A tensor for JSON: float32 in base64, and its shape."""
    data = tensor.cpu().contiguous().numpy().astype("<f4").tobytes()
    return {"shape": list(tensor.shape), "data": base64.b64encode(data).decode()}


def likeliest(pieces, log_p, target=None):
    """What the page shows of log probabilities (V,): [[token, p], ...] of the likeliest, and p of the target."""
    top = log_p.topk(min(RIVALS, len(log_p)))
    rivals = [[spell(pieces[i]), round(p, 5)] for i, p in zip(top.indices.tolist(), top.values.exp().tolist())]
    return {"rivals": rivals} | ({} if target is None else {"p": round(log_p[target].exp().item(), 6)})


def describe(model, vocabulary, text, name=""):
    """All of it, for JSON. The text is cut to what can be shown; its tokens begin as run's."""
    ids = vocabulary.encode_prompt(text)
    whole, ids = len(ids), ids[:most_tokens(model.args)]
    found, pieces = record(model, ids), vocabulary.pieces()
    if not all(p.isfinite().all() for p in [found["logits"], *model.parameters()]):
        fail(f"{name}: cannot be looked into, its weights are broken (they or their logits are not finite)")
    said = torch.log_softmax(found["logits"], -1)
    targets = [*ids[1:], None]
    layers = [[likeliest(pieces, row, target) for row, target in zip(torch.log_softmax(logits, -1), targets)]
              for logits in lens(model, found["residual"])]
    near, near_ids = neighbours(model, ids)
    weights = [{"name": key, "shape": list(p.shape), "mean": p.mean().item(), "std": p.std(correction=0).item(), **histogram(p, 40)}
               for key, p in model.named_parameters()]
    return {
        "name": str(name), "cut": whole - len(ids), "tokens": [spell(pieces[i]) for i in ids], "ids": ids,
        "heads": model.args.n_heads, "kv_heads": model.args.n_kv_heads,
        "attention": packed(found["attention"]), "q": packed(found["q"]), "k": packed(found["k"]),
        "predictions": [likeliest(pieces, row, target) for row, target in zip(said, targets)], "lens": layers,
        "neighbours": [[[spell(pieces[i]), round(c, 4)] for i, c in zip(row, cosines)]
                       for row, cosines in zip(near_ids.tolist(), near.tolist())],
        "weights": weights,
    }
