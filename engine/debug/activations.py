"""
Read what happens inside a model during a forward pass: outputs of modules, attention weights and
statistics of each block. Forward hooks collect them; the model runs unchanged.
"""
import contextlib

import torch

from engine import ops

DEAD_FRACTION = 1e-3  # a unit is dead if it never exceeds this fraction of the layer's mean maximum
MAX_SEQUENCES = 2     # attention is measured in the first sequences of a batch only,
MAX_QUERIES = 64      # and for the last positions of each sequence only


@contextlib.contextmanager
def watch(callbacks):
    """
    Within this context, call callback(input, output) after each call of its module. callbacks:
    [(module, callback)].
    """
    def hook(callback):
        def after(module, inputs, output):
            callback(inputs[0], output)  # not returned: that would replace the module's output
        return after

    handles = [module.register_forward_hook(hook(callback)) for module, callback in callbacks]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def capture(modules):
    """Yield {name: (input, output)} of the last call of each module. modules: {name: module}."""
    calls = {}

    def keep(name):
        return lambda *call: calls.update({name: call})

    with watch([(module, keep(name)) for name, module in modules.items()]):
        yield calls


@torch.no_grad()
def block_outputs(model, tokens, amp):
    """
    Return {"layers.0": (B, T, D), ..., "the logits": (B, T, V)} in float32: the output of each
    block and of the model for tokens (B, T), without dropout.
    """
    model.eval()
    with amp, capture({f"layers.{i}": layer for i, layer in enumerate(model.layers)}) as calls:
        logits = model(tokens, every=1)[0]
    return {name: x.float() for name, (_, x) in calls.items()} | {"the logits": logits.float()}


def rotate(model, x):
    """Rotate x, an output of q_norm or k_norm (B, T, heads, Q). Return float32 (B, heads, T, Q)."""
    return ops.rotate(x.float(), model.rope[:x.shape[1]]).transpose(1, 2)


def attention_weights(q, k, mask):
    """
    Return softmax(q k^T / sqrt(Q)), (B, H, N, T), of N rotated queries q (B, H, N, Q) and T keys k
    (B, K, T, Q) of K KV heads. mask: which keys a query sees, bool, broadcast to (B, H, N, T).
    """
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)  # (B, H, T, Q)
    scores = q @ k.mT / q.shape[-1] ** 0.5
    return scores.masked_fill(~mask, -torch.inf).softmax(-1)


class ActivationStats:
    """
    Metrics of each block in a forward pass of `tokens` (B, T) under torch.no_grad():
    norm/activation/<layer>, the root mean square of the block's output; dead/<layer>, the fraction
    of hidden units that are inactive on every token; attention/entropy/<layer>, the mean entropy of
    the attention weights, 1 if they are uniform and 0 if each query attends to a single token.

        with watch(stats.callbacks()):
            model(tokens)
        metrics = stats.read()
    """

    def __init__(self, model, tokens):
        self.model, self.tokens, self.metrics = model, tokens[:MAX_SEQUENCES], {}

    def callbacks(self):
        """Return [(module, callback)] for `watch`."""
        callbacks = []
        for i, layer in enumerate(self.model.layers):
            callbacks += self.layer_callbacks(f"layers.{i}", layer)
        return callbacks

    def layer_callbacks(self, name, layer):
        heads = {}  # queries and keys before their rotation, kept until the attention has run
        return [
            (layer.attention.q_norm, lambda _, q: heads.update(q=q[:MAX_SEQUENCES])),
            (layer.attention.k_norm, lambda _, k: heads.update(k=k[:MAX_SEQUENCES])),
            (layer.attention, lambda *_: self.add_entropy(name, heads.pop("q"), heads.pop("k"))),
            (layer.feed_forward.w2, lambda hidden, _: self.add_dead_units(name, hidden)),
            (layer, lambda _, x: self.add_norm(name, x)),
        ]

    def add_norm(self, name, x):
        self.metrics[f"norm/activation/{name}"] = x.float().square().mean().sqrt()

    def add_dead_units(self, name, hidden):
        highest = hidden.abs().flatten(0, -2).amax(0).float()  # (F,), over all tokens
        dead = highest <= DEAD_FRACTION * highest.mean()
        self.metrics[f"dead/{name}"] = dead.float().mean()

    def add_entropy(self, name, q, k):
        """Add the mean entropy of the layer. q (B, T, H, Q), k (B, T, K, Q): not yet rotated."""
        bos_id = -1 if self.model.bos_id is None else self.model.bos_id
        mask = ops.within_documents(self.tokens, bos_id)[:, :, -MAX_QUERIES:]  # (B, 1, N, T)
        q = rotate(self.model, q)[:, :, -MAX_QUERIES:]
        p = attention_weights(q, rotate(self.model, k), mask)
        entropy = -torch.xlogy(p, p).sum(-1)  # (B, H, N)
        keys = mask.sum(-1).expand_as(entropy)
        relative = (entropy / keys.log())[keys > 1]  # with one key the entropy is 0 by definition
        if len(relative):
            self.metrics[f"attention/entropy/{name}"] = relative.mean()

    def read(self):
        """Return {metric: float}; waits for the device once."""
        if not self.metrics:
            return {}
        return dict(zip(self.metrics, torch.stack(list(self.metrics.values())).tolist()))
