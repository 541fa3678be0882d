"""
The Llama architecture: token embedding, blocks of grouped-query attention with rotary positions and SwiGLU, RMSNorm
before each, a classifier that may share the embedding. https://arxiv.org/abs/2302.13971

Shapes: B batch, T time, D model width, H heads, K key/value heads, Q head width, F hidden width, V vocabulary.
"""
import math
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint

from engine import ops


@dataclass
class ModelArgs:
    dim: int = 288
    n_layers: int = 6
    n_heads: int = 6
    n_kv_heads: int = 0        # 0: as many as n_heads
    head_width: int = 0        # 0: dim / n_heads
    vocab_size: int = 32000
    hidden_dim: int = 0        # 0: 2/3 of 4 dim, rounded up to a multiple of multiple_of
    multiple_of: int = 32
    max_seq_len: int = 256
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: float = 1.0  # positions are divided by it (linear scaling)
    rope_factors: tuple = ()   # Q/2 numbers by which the pairs' frequencies are divided, as in Llama 3.1; (): none
    rope_attention: float = 1.0  # by which the rotated queries and keys are multiplied, as YaRN does
    dropout: float = 0.0
    tied: bool = True          # the classifier shares the embedding's weights
    qkv_bias: bool = False     # queries, keys and values have biases, as in Qwen2
    qk_norm: bool = False      # each head's query and key is normed before its rotation, as in Qwen3

    def __post_init__(self):
        self.n_kv_heads = self.n_kv_heads or self.n_heads
        if not self.hidden_dim:
            self.hidden_dim = self.multiple_of * math.ceil(int(8 * self.dim / 3) / self.multiple_of)

    @property
    def head_dim(self):
        return self.head_width or self.dim // self.n_heads


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension. https://arxiv.org/abs/1910.07467"""

    def __init__(self, dim, eps):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))  # (D,)

    def forward(self, x):
        return ops.rms_norm(x, self.weight, self.eps)


def rope_table(args):
    """The rotation of pair i at position t, cosine and sine of t theta^(-2i/Q): (max_seq_len, Q/2, 2) float32."""
    i = torch.arange(0, args.head_dim, 2, dtype=torch.float64)
    t = torch.arange(args.max_seq_len, dtype=torch.float64) / args.rope_scaling
    angle = torch.outer(t, args.rope_theta ** (-i / args.head_dim)) / torch.tensor(args.rope_factors or 1.0, dtype=t.dtype)
    return torch.stack((angle.cos(), angle.sin()), -1).mul(args.rope_attention).float()


class Attention(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.args = args
        q_dim, kv_dim = args.n_heads * args.head_dim, args.n_kv_heads * args.head_dim
        self.wq = nn.Linear(args.dim, q_dim, bias=args.qkv_bias)
        self.wk, self.wv = (nn.Linear(args.dim, kv_dim, bias=args.qkv_bias) for _ in "kv")
        self.wo = nn.Linear(q_dim, args.dim, bias=False)
        self.q_norm, self.k_norm = (RMSNorm(args.head_dim, args.norm_eps) if args.qk_norm else nn.Identity() for _ in "qk")

    def forward(self, x, rope, cache=None, mask=None):
        """
        x (B, T, D) -> (B, T, D). `cache` is (keys, values, pos): (B, S, K, Q) filled up to pos; extended in place.
        mask: (B, 1, T, T), what a query may see of the keys, or ops.Documents; None: itself and all before.
        """
        T, a = x.shape[1], self.args
        q, k, v = (w(x).unflatten(-1, (-1, a.head_dim)) for w in (self.wq, self.wk, self.wv))  # (B, T, H or K, Q)
        q, k = ops.rotate(self.q_norm(q), rope), ops.rotate(self.k_norm(k), rope)
        if cache is not None:
            keys, values, pos = cache
            keys[:, pos:pos + T], values[:, pos:pos + T] = k, v
            k, v = keys[:, :pos + T], values[:, :pos + T]
            mask = torch.ones(T, pos + T, dtype=torch.bool, device=x.device).tril(pos)  # query t sees keys 0 .. pos + t
        return self.wo(ops.attention(q, k, v, mask))


class FeedForward(nn.Module):
    """SwiGLU: w2(silu(w1 x) * w3 x). https://arxiv.org/abs/2002.05202"""

    def __init__(self, args):
        super().__init__()
        self.w1 = nn.Linear(args.dim, args.hidden_dim, bias=False)
        self.w2 = nn.Linear(args.hidden_dim, args.dim, bias=False)
        self.w3 = nn.Linear(args.dim, args.hidden_dim, bias=False)

    def forward(self, x):
        return self.w2(ops.swiglu(self.w1(x), self.w3(x)))


class Block(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.attention_norm = RMSNorm(args.dim, args.norm_eps)
        self.attention = Attention(args)
        self.ffn_norm = RMSNorm(args.dim, args.norm_eps)
        self.feed_forward = FeedForward(args)
        self.dropout = ops.Dropout(args.dropout)

    def forward(self, x, rope, cache=None, mask=None):
        x = x + self.dropout(self.attention(self.attention_norm(x), rope, cache, mask))
        return x + self.dropout(self.feed_forward(self.ffn_norm(x)))


class Transformer(nn.Module):
    bos_id = None      # of training on packed documents: attention does not reach back over this token
    recompute = False  # in training keep only the blocks' inputs, and compute their insides again for the gradients

    def __init__(self, args):
        super().__init__()
        self.args = args
        self.tok_embeddings = nn.Embedding(args.vocab_size, args.dim)  # (V, D)
        self.dropout = ops.Dropout(args.dropout)
        self.layers = nn.ModuleList(Block(args) for _ in range(args.n_layers))
        self.norm = RMSNorm(args.dim, args.norm_eps)
        self.output = nn.Linear(args.dim, args.vocab_size, bias=False)  # (V, D)
        self.register_buffer("rope", rope_table(args), persistent=False)  # (max_seq_len, Q/2, 2)
        self.init_weights()
        if args.tied:
            self.output.weight = self.tok_embeddings.weight

    def init_weights(self):
        """
        Normal with deviation 0.02; w2, which adds to the residual stream, less by the number of additions. wo begins as
        the transpose of wv: a head first says what it looks at, and learns sooner where to look. doc/lab/recipe.md
        """
        for name, p in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(p)
            elif p.dim() == 2:
                residual = name.endswith("feed_forward.w2.weight")
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * self.args.n_layers) if residual else 0.02)
        for layer in self.layers:
            v = layer.attention.wv.weight.data.unflatten(0, (self.args.n_kv_heads, -1))  # (K, Q, D)
            v = v.repeat_interleave(self.args.n_heads // self.args.n_kv_heads, 0)  # (H, Q, D)
            layer.attention.wo.weight.data.copy_(v.flatten(0, 1).T)

    def forward(self, tokens, targets=None, cache=None, every=False, documents=None):
        """
        tokens (B, T) -> (logits, loss). With targets (B, T), -1 where none: None, and the mean cross entropy in nats. Else
        logits (B, 1, V) of the last position or, with every=n, of every n-th, and None. cache, documents: new_cache's, ops'.
        """
        T, pos = tokens.shape[1], cache["pos"] if cache else 0
        rope = self.rope[pos:pos + T]
        x = self.dropout(self.tok_embeddings(tokens))  # (B, T, D)
        mask = documents or (ops.within_documents(tokens, self.bos_id) if self.bos_id is not None and not cache else None)
        for i, layer in enumerate(self.layers):
            if self.recompute and self.training:
                x = checkpoint(layer, x, rope, None, mask, use_reentrant=False)
            else:
                x = layer(x, rope, (cache["keys"][i], cache["values"][i], pos) if cache else None, mask)
        x = self.norm(x)
        if cache:
            cache["pos"] += T
        if targets is None:
            return self.output(x[:, ::every] if every else x[:, -1:]), None
        return None, ops.cross_entropy(x.flatten(0, 1), self.output, targets.flatten())

    def new_cache(self, B):
        """An empty key/value cache for B sequences: {keys, values: (L, B, max_seq_len, K, Q), pos: positions filled}."""
        a = self.args
        shape = (a.n_layers, B, a.max_seq_len, a.n_kv_heads, a.head_dim)
        return {name: torch.zeros(shape, device=self.rope.device) for name in ("keys", "values")} | {"pos": 0}

    @torch.inference_mode()
    def generate(self, tokens, max_new_tokens, temperature=1.0, top_p=1.0, stop=(), generator=None):
        """
        Continue tokens (B, T) by up to max_new_tokens; return (B, T + new). Temperature 0 is greedy; top_p samples from the
        smallest set of tokens whose probability exceeds it; ends early when all have a token of `stop`. `latest` moves on.
        """
        cache, new = self.new_cache(tokens.shape[0]), tokens
        done = torch.zeros(tokens.shape[0], dtype=torch.bool, device=tokens.device)
        for _ in range(max_new_tokens):
            if cache["pos"] + new.shape[1] > self.args.max_seq_len:
                cache["pos"], new = 0, latest(tokens, self.args.max_seq_len)
            new = sample(self(new, cache=cache)[0][:, -1].float(), temperature, top_p, generator)  # (B, 1)
            tokens = torch.cat((tokens, new), dim=1)
            done |= torch.isin(new[:, 0], torch.tensor(tuple(stop), device=new.device, dtype=new.dtype))
            if done.all():
                break
        return tokens


def latest(tokens, max_seq_len):
    """What stays of tokens (B, T) that don't fit the context: the first, BOS, and the latest. `run` does the same."""
    half = max_seq_len // 2 if max_seq_len > 3 else 1  # so a token is evaluated twice, however long the text
    return torch.cat((tokens[:, :1], tokens[:, 1 - half:]), dim=1) if half > 1 else tokens[:, -1:]


def sample(logits, temperature, top_p, generator=None):
    """One token (B, 1) from each row of logits (B, V)."""
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    probs = torch.softmax(logits / temperature, dim=-1)
    if 0 < top_p < 1:
        ordered, index = probs.sort(dim=-1, descending=True)
        ordered[ordered.cumsum(dim=-1) - ordered > top_p] = 0  # keep the first token whose sum passes top_p
        probs = torch.zeros_like(probs).scatter(-1, index, ordered)
    return torch.multinomial(probs, 1, generator=generator)


if __name__ == "__main__":  # python model.py config/stories15M.py: what a training of these settings costs
    from engine.training.plan import show_costs
    show_costs()
