"""
The Llama architecture: token embedding, blocks of grouped-query attention with rotary positions and
SwiGLU, RMSNorm before each, a classifier that may share the embedding's weights.
https://arxiv.org/abs/2302.13971

Shapes: B batch, T time, D model width, H query heads, K key/value heads, Q head width, F hidden
width, V vocabulary.

    python model.py config/stories15M.py        parameters, FLOPs, memory, time and file sizes
"""
import math
from dataclasses import asdict, dataclass, fields

import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint

from engine import ops


@dataclass
class ModelArgs:
    """Sizes of a model. ModelArgs.of(config, vocab_size) reads them from settings."""
    dim: int = 288
    n_layers: int = 6
    n_heads: int = 6
    n_kv_heads: int = 0        # 0: as many as n_heads
    head_width: int = 0        # 0: dim / n_heads
    vocab_size: int = 32000
    hidden_dim: int = 0        # 0: 8/3 dim, rounded up to a multiple of multiple_of
    multiple_of: int = 32
    max_seq_len: int = 256
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: float = 1.0  # linear scaling: positions are divided by this
    rope_factors: tuple = ()   # Q/2 divisors of the pairs' frequencies, as in Llama 3.1; (): none
    rope_attention: float = 1.0  # factor of the rotated queries and keys, as in YaRN
    dropout: float = 0.0
    tied: bool = True          # the classifier shares the embedding's weights
    qkv_bias: bool = False     # biases for queries, keys and values, as in Qwen2
    qk_norm: bool = False      # RMSNorm of each query and key before its rotation, as in Qwen3

    def __post_init__(self):
        self.n_kv_heads = self.n_kv_heads or self.n_heads
        if not self.hidden_dim:
            self.hidden_dim = self.multiple_of * math.ceil(int(8 * self.dim / 3) / self.multiple_of)

    @property
    def head_dim(self):
        return self.head_width or self.dim // self.n_heads

    @classmethod
    def of(cls, config, vocab_size, imported=None):
        """
        Return the sizes in the settings `config`. imported: the ModelArgs of the model that a run
        starts from, which count where train.py has no setting.
        """
        known = asdict(imported) if imported else {}
        known |= {field.name: getattr(config, field.name) for field in fields(cls)
                  if hasattr(config, field.name)}
        return cls(**known | {"vocab_size": vocab_size, "tied": config.tie_embeddings})

    def build(self, device="cpu"):
        """Return an untrained Transformer on a device; on "meta" it takes no memory."""
        with torch.device(device):
            return Transformer(self)

    def problem(self):
        """Return what is wrong with these sizes as one line, None if they are possible."""
        for name in ("dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "hidden_dim",
                     "max_seq_len"):
            if getattr(self, name) < 1:
                return f"{name} is {getattr(self, name)}, expected at least 1"
        if self.head_width < 0 or self.head_width % 2:
            return f"head_width is {self.head_width}, expected 0 or an even number"
        if not self.head_width and (self.dim % self.n_heads or self.head_dim % 2):
            return (f"dim={self.dim} over n_heads={self.n_heads} is no even head width; choose dim "
                    f"a multiple of 2 n_heads")
        if self.n_heads % self.n_kv_heads:
            return f"n_heads={self.n_heads} is not a multiple of n_kv_heads={self.n_kv_heads}"
        if not 0 <= self.dropout < 1:
            return f"dropout is {self.dropout}, expected 0 <= dropout < 1"
        if min(self.rope_theta, self.rope_scaling, self.norm_eps, self.rope_attention) <= 0:
            return "rope_theta, rope_scaling, rope_attention and norm_eps must be positive"
        pairs = self.head_dim // 2
        factors = self.rope_factors
        if factors and (len(factors) != pairs or not all(0 < f < math.inf for f in factors)):
            return (f"rope_factors are {len(factors)}, expected {pairs} positive numbers, one a "
                    "pair of a head")
        return None


class RMSNorm(nn.Module):
    """Scale the last dimension: x / rms(x) * weight. https://arxiv.org/abs/1910.07467"""

    def __init__(self, dim, eps):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))  # (D,)

    def forward(self, x):
        return ops.rms_norm(x, self.weight, self.eps)


def rope_table(args):
    """
    Return cosine and sine of the rotation of pair i at position t, of the angle t theta^(-2i/Q):
    (max_seq_len, Q/2, 2) float32. https://arxiv.org/abs/2104.09864
    """
    i = torch.arange(0, args.head_dim, 2, dtype=torch.float64)
    t = torch.arange(args.max_seq_len, dtype=torch.float64) / args.rope_scaling
    factors = torch.tensor(args.rope_factors or 1.0, dtype=torch.float64)
    angle = torch.outer(t, args.rope_theta ** (-i / args.head_dim)) / factors
    return torch.stack((angle.cos(), angle.sin()), -1).mul(args.rope_attention).float()


class Attention(nn.Module):
    """Grouped-query attention with rotary positions. https://arxiv.org/abs/2305.13245"""

    def __init__(self, args):
        super().__init__()
        self.args = args
        q_dim, kv_dim = args.n_heads * args.head_dim, args.n_kv_heads * args.head_dim
        self.wq = nn.Linear(args.dim, q_dim, bias=args.qkv_bias)
        self.wk, self.wv = (nn.Linear(args.dim, kv_dim, bias=args.qkv_bias) for _ in "kv")
        self.wo = nn.Linear(q_dim, args.dim, bias=False)
        if args.qk_norm:
            self.q_norm, self.k_norm = (RMSNorm(args.head_dim, args.norm_eps) for _ in "qk")
        else:
            self.q_norm, self.k_norm = nn.Identity(), nn.Identity()

    def forward(self, x, rope, cache=None, mask=None):
        """
        x (B, T, D) -> (B, T, D). cache: (keys, values, pos), keys and values (B, S, K, Q) of which
        the first pos positions are filled; this call fills the next T. mask: which keys a query
        sees, (B, 1, T, T) or ops.Documents; None: those at its own position and before.
        """
        T, a = x.shape[1], self.args
        q = self.wq(x).unflatten(-1, (-1, a.head_dim))  # (B, T, H, Q)
        k = self.wk(x).unflatten(-1, (-1, a.head_dim))  # (B, T, K, Q)
        v = self.wv(x).unflatten(-1, (-1, a.head_dim))  # (B, T, K, Q)
        q, k = ops.rotate(self.q_norm(q), rope), ops.rotate(self.k_norm(k), rope)
        if cache is not None:
            keys, values, pos = cache
            keys[:, pos:pos + T], values[:, pos:pos + T] = k, v
            k, v = keys[:, :pos + T], values[:, :pos + T]
            # Query t sees the keys 0 .. pos + t.
            mask = torch.ones(T, pos + T, dtype=torch.bool, device=x.device).tril(pos)
        return self.wo(ops.attention(q, k, v, mask))


class FeedForward(nn.Module):
    """SwiGLU: w2(silu(w1 x) * w3 x), (B, T, D) -> (B, T, D). https://arxiv.org/abs/2002.05202"""

    def __init__(self, args):
        super().__init__()
        self.w1 = nn.Linear(args.dim, args.hidden_dim, bias=False)
        self.w2 = nn.Linear(args.hidden_dim, args.dim, bias=False)
        self.w3 = nn.Linear(args.dim, args.hidden_dim, bias=False)

    def forward(self, x):
        return self.w2(ops.swiglu(self.w1(x), self.w3(x)))


class Block(nn.Module):
    """Attention and feed-forward, each normed before and added to the residual stream."""

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
    """Tokens (B, T) in, logits or the loss out."""
    bos_id = None      # token that begins a document: attention does not reach back over it
    recompute = False  # activation checkpointing: keep only the blocks' inputs for the gradients

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
        Draw matrices from a normal distribution with deviation 0.02; w2, which adds to the residual
        stream, with less the more layers add to it. wo starts as the transpose of wv: a head first
        passes on what it looks at, and learns sooner where to look. doc/lab/recipe.md
        """
        residual_std = 0.02 / math.sqrt(2 * self.args.n_layers)
        for name, p in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(p)
            elif p.dim() == 2:
                residual = name.endswith("feed_forward.w2.weight")
                nn.init.normal_(p, std=residual_std if residual else 0.02)
        for layer in self.layers:
            v = layer.attention.wv.weight.data.unflatten(0, (self.args.n_kv_heads, -1))  # (K, Q, D)
            v = v.repeat_interleave(self.args.n_heads // self.args.n_kv_heads, 0)  # (H, Q, D)
            layer.attention.wo.weight.data.copy_(v.flatten(0, 1).T)

    def forward(self, tokens, targets=None, cache=None, every=False, documents=None):
        """
        tokens (B, T) -> (logits, loss).

        With targets (B, T), -1 where there is none: (None, mean cross entropy in nats). Without:
        (logits (B, 1, V) of the last position, None); with every=n, of every n-th position. cache:
        a dict of new_cache, extended by T; documents: ops.documents_of(tokens), which attends
        within documents without a mask.
        """
        T, pos = tokens.shape[1], cache["pos"] if cache else 0
        rope = self.rope[pos:pos + T]
        x = self.dropout(self.tok_embeddings(tokens))  # (B, T, D)
        mask = documents
        if mask is None and self.bos_id is not None and not cache:
            mask = ops.within_documents(tokens, self.bos_id)
        for i, layer in enumerate(self.layers):
            if self.recompute and self.training:
                x = checkpoint(layer, x, rope, None, mask, use_reentrant=False)
            else:
                kv = (cache["keys"][i], cache["values"][i], pos) if cache else None
                x = layer(x, rope, kv, mask)
        x = self.norm(x)
        if cache:
            cache["pos"] += T
        if targets is None:
            return self.output(x[:, ::every] if every else x[:, -1:]), None
        return None, ops.cross_entropy(x.flatten(0, 1), self.output, targets.flatten())

    def new_cache(self, B):
        """
        Return an empty key/value cache for B sequences: {"keys", "values": (n_layers, B,
        max_seq_len, K, Q), "pos": number of positions filled}.
        """
        a = self.args
        shape = (a.n_layers, B, a.max_seq_len, a.n_kv_heads, a.head_dim)
        keys, values = (torch.zeros(shape, device=self.rope.device) for _ in range(2))
        return {"keys": keys, "values": values, "pos": 0}

    @torch.inference_mode()
    def generate(self, tokens, max_new_tokens, temperature=1.0, top_p=1.0, stop=(), generator=None):
        """
        Continue tokens (B, T) by up to max_new_tokens and return (B, T + new). Temperature 0 takes
        the most likely token; top_p samples from the smallest set of tokens whose probability
        exceeds it. Ends early when every sequence has a token of `stop`. When the context is full,
        it goes on from `latest` tokens.
        """
        cache, new = self.new_cache(tokens.shape[0]), tokens
        done = torch.zeros(tokens.shape[0], dtype=torch.bool, device=tokens.device)
        for _ in range(max_new_tokens):
            if cache["pos"] + new.shape[1] > self.args.max_seq_len:
                cache["pos"], new = 0, latest(tokens, self.args.max_seq_len)
            logits, _ = self(new, cache=cache)  # (B, 1, V)
            new = sample(logits[:, -1].float(), temperature, top_p, generator)  # (B, 1)
            tokens = torch.cat((tokens, new), dim=1)
            stops = torch.tensor(tuple(stop), device=new.device, dtype=new.dtype)
            done |= torch.isin(new[:, 0], stops)
            if done.all():
                break
        return tokens


def latest(tokens, max_seq_len):
    """
    Return the tokens to keep of tokens (B, T) that fill the context: the first, BOS, and the latest
    ones, half a context together. Each token is then evaluated at most twice. ./run does the same.
    """
    half = max_seq_len // 2 if max_seq_len > 3 else 1
    return torch.cat((tokens[:, :1], tokens[:, 1 - half:]), dim=1) if half > 1 else tokens[:, -1:]


def sample(logits, temperature, top_p, generator=None):
    """Draw one token from each row of logits (B, V): (B, 1)."""
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    probs = torch.softmax(logits / temperature, dim=-1)
    if 0 < top_p < 1:
        ordered, index = probs.sort(dim=-1, descending=True)
        # Keep the tokens up to the first whose cumulative probability exceeds top_p.
        ordered[ordered.cumsum(dim=-1) - ordered > top_p] = 0
        probs = torch.zeros_like(probs).scatter(-1, index, ordered)
    return torch.multinomial(probs, 1, generator=generator)


if __name__ == "__main__":
    from engine.training.costs import Build
    from engine.training.plan import show_costs
    from optim import make_optimizer
    show_costs(Build(ModelArgs.of, make_optimizer))
