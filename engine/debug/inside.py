"""
Describe what a model does with one text, for the page and for sample.py: the attention of every
head, the logit lens of every layer, the probability of each token, the nearest embeddings, and
histograms of the weights.
"""
import base64
import math

import torch

from configurator import fail
from engine.debug.activations import attention_weights, capture, rotate
from engine.debug.instruments import histogram
from tokenizer import spell

MAX_NUMBERS = 1 << 20  # max attention weights in a description; max numbers in its "q"
TOP_TOKENS = 3         # number of most likely tokens at each position
NEIGHBOURS = 8         # number of nearest embeddings of each token


@torch.inference_mode()
def record(model, ids):
    """
    Run the model on ids, a list of T tokens. Return {"logits": (T, V), "q": (L, H, T, Q),
    "k": (L, K, T, Q), "attention": (L, H, T, T), "residual": (L + 1, T, D)}. q and k are rotated;
    residual holds the embedding and the output of each layer.
    """
    layers, device = range(model.args.n_layers), model.rope.device
    modules = {"embedding": model.tok_embeddings}
    for i, layer in enumerate(model.layers):
        modules |= {("x", i): layer, ("q", i): layer.attention.q_norm,
                    ("k", i): layer.attention.k_norm}
    with capture(modules) as calls:
        logits = model(torch.tensor([ids], device=device), every=1)[0][0]
    q, k = (torch.cat([rotate(model, calls[name, i][1]) for i in layers]) for name in "qk")
    causal = torch.ones(len(ids), len(ids), dtype=torch.bool, device=device).tril()
    residual = torch.cat([calls["embedding"][1], *(calls["x", i][1] for i in layers)])
    return {"logits": logits.float(), "q": q, "k": k, "attention": attention_weights(q, k, causal),
            "residual": residual}


@torch.inference_mode()
def logit_lens(model, residual):
    """
    Apply the final norm and the classifier to each layer's residual stream, as if the layer were
    the last. Yield its logits (T, V). residual: (L + 1, T, D); the first is the embedding.
    """
    for x in residual:
        yield model.output(model.norm(x)).float()


@torch.inference_mode()
def neighbours(model, ids):
    """
    Return the tokens with the most similar embeddings for each of ids: (cosines, tokens), both
    (T, NEIGHBOURS).
    """
    table = torch.nn.functional.normalize(model.tok_embeddings.weight.float(), dim=-1)
    cosines = table[ids] @ table.T  # (T, V)
    cosines[torch.arange(len(ids)), ids] = -math.inf  # excludes the token itself
    return cosines.topk(min(NEIGHBOURS, len(table) - 1))


def max_tokens(args):
    """Return the max length in tokens of a described text; the limit keeps the JSON small."""
    by_attention = int((MAX_NUMBERS / (args.n_layers * args.n_heads)) ** 0.5)
    return min(args.max_seq_len, by_attention, MAX_NUMBERS // (args.n_layers * args.dim))


def pack(tensor):
    """Return a tensor for JSON: its shape, and float32 in base64."""
    data = tensor.cpu().contiguous().numpy().astype("<f4").tobytes()
    return {"shape": list(tensor.shape), "data": base64.b64encode(data).decode()}


def predictions(pieces, logits, ids):
    """
    Return for each position {"rivals": [[token, p], ...], "p": p}: the most likely next tokens, and
    the probability of the token that follows. The last position lacks "p". logits: (T, V).
    """
    rows = []
    log_p = torch.log_softmax(logits, -1)
    top = log_p.topk(min(TOP_TOKENS, log_p.shape[-1]))
    for t, (tokens, values) in enumerate(zip(top.indices.tolist(), top.values.exp().tolist())):
        row = {"rivals": [[spell(pieces[i]), round(p, 5)] for i, p in zip(tokens, values)]}
        if t + 1 < len(ids):
            row["p"] = round(log_p[t, ids[t + 1]].exp().item(), 6)
        rows.append(row)
    return rows


def describe(model, vocabulary, text, name=""):
    """
    Return the description of what a model does with a text, as a dict for JSON. The text is encoded
    like a prompt of ./run, and cut to max_tokens; "cut" counts the tokens left out. Exits with a
    message if a weight or logit is not finite. name: the model's, for the message and the page.
    """
    prompt, pieces = vocabulary.encode_prompt(text), vocabulary.pieces()
    ids = prompt[:max_tokens(model.args)]
    found = record(model, ids)
    if not all(x.isfinite().all() for x in [found["logits"], *model.parameters()]):
        fail(f"{name}: cannot be inspected, its weights are broken (they or their logits are not "
             f"finite)")
    near = []
    for cosines, tokens in zip(*(rows.tolist() for rows in neighbours(model, ids))):
        near.append([[spell(pieces[i]), round(c, 4)] for i, c in zip(tokens, cosines)])
    weights = [{"name": key, "shape": list(p.shape), "mean": p.mean().item(),
                "std": p.std(correction=0).item(), **histogram(p, 40)}
               for key, p in model.named_parameters()]
    lens = [predictions(pieces, logits, ids) for logits in logit_lens(model, found["residual"])]
    return {
        "name": str(name), "cut": len(prompt) - len(ids), "ids": ids,
        "tokens": [spell(pieces[i]) for i in ids],
        "heads": model.args.n_heads, "kv_heads": model.args.n_kv_heads,
        **{key: pack(found[key]) for key in ("attention", "q", "k")},
        "predictions": predictions(pieces, found["logits"], ids), "lens": lens,
        "neighbours": near, "weights": weights,
    }
