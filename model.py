"""
The Llama architecture: a token embedding, blocks, and a classifier that may share the embedding's
weights. A block is grouped-query attention with rotary positions, then a SwiGLU feed-forward, each
preceded by an RMSNorm. https://arxiv.org/abs/2302.13971

Shapes: B batch, T time, D model width, H query heads, K key/value heads, Q head width, F hidden
width, V vocabulary.

Print the parameters, FLOPs, memory, time and file sizes of the training run in a config file:

    python model.py config/stories15M.py
"""
import math
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields

if __name__ == "__main__":
    import configurator  # noqa: F401  it reports missing packages

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
    rope_factors: tuple = ()   # divisors of the Q/2 rotation frequencies, as in Llama 3.1; (): none
    rope_attention: float = 1.0  # scales both the rotated queries and the rotated keys, as in YaRN
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
        Return the ModelArgs of a run with the settings `config`. Each field is the setting of the
        same name, except that `tied` is tie_embeddings and vocab_size is the argument. A field
        without a setting is taken from `imported`, the ModelArgs of the model that the run starts
        from, or is the default if that is None.
        """
        known = asdict(imported) if imported else {}
        known |= {field.name: getattr(config, field.name) for field in fields(cls)
                  if hasattr(config, field.name)}
        return cls(**known | {"vocab_size": vocab_size, "tied": config.tie_embeddings})

    def build(self, device="cpu"):
        """Return an untrained Transformer on a device; on "meta" it takes no memory."""
        with torch.device(device), SkipInit() if device == "meta" else nullcontext():
            return Transformer(self)

    def problem(self):
        """Return what is wrong with these sizes as one line, None if they are valid."""
        for name in ("dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "hidden_dim",
                     "max_seq_len"):
            if getattr(self, name) < 1:
                return f"{name} is {getattr(self, name)}, expected at least 1"
        if self.head_width < 0 or self.head_width % 2:
            return f"head_width is {self.head_width}, expected 0 or an even number"
        if not self.head_width and (self.dim % self.n_heads or self.head_dim % 2):
            return (f"dim={self.dim} over n_heads={self.n_heads} is not an even head width; choose "
                    f"a dim that is a multiple of 2 * n_heads")
        if self.n_heads % self.n_kv_heads:
            return f"n_heads={self.n_heads} is not a multiple of n_kv_heads={self.n_kv_heads}"
        if not 0 <= self.dropout < 1:
            return f"dropout is {self.dropout}, expected 0 <= dropout < 1"
        if min(self.rope_theta, self.rope_scaling, self.norm_eps, self.rope_attention) <= 0:
            return "rope_theta, rope_scaling, rope_attention and norm_eps must be positive"
        pairs = self.head_dim // 2
        factors = self.rope_factors
        if factors and len(factors) != pairs:
            return (f"rope_factors has length {len(factors)}, expected {pairs}: one number for "
                    "each pair of dimensions of a head")
        for factor in factors:
            if not 0 < factor < math.inf:
                return f"rope_factors contains {factor}, expected positive finite numbers"
        return None


class SkipInit(torch.overrides.TorchFunctionMode):
    """
    Turn the functions of torch.nn.init into no-ops: on the meta device there are no weights to
    draw, and drawing would import PyTorch's compiler, which takes a second and 60 MB.
    """

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if getattr(function, "__module__", "") == "torch.nn.init":
            return kwargs["tensor"]  # the tensor to initialize, always passed by name
        return function(*args, **(kwargs or {}))


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
    Return the cosine and sine of each rotation angle, both multiplied by rope_attention:
    (max_seq_len, Q/2, 2) float32. https://arxiv.org/abs/2104.09864

    The pair of dimensions (2i, 2i+1) at position t is rotated by the angle
    t / rope_scaling * rope_theta^(-2i/Q) / rope_factors[i].
    """
    if torch.get_default_device().type == "meta":  # arange would import PyTorch's compiler
        return torch.empty(args.max_seq_len, args.head_dim // 2, 2)
    two_i = torch.arange(0, args.head_dim, 2, dtype=torch.float64)
    t = torch.arange(args.max_seq_len, dtype=torch.float64) / args.rope_scaling
    factors = torch.tensor(args.rope_factors or 1.0, dtype=torch.float64)
    angle = torch.outer(t, args.rope_theta ** (-two_i / args.head_dim)) / factors
    return torch.stack((angle.cos(), angle.sin()), -1).mul(args.rope_attention).float()


class Attention(nn.Module):
    """Grouped-query attention with rotary positions. https://arxiv.org/abs/2305.13245"""

    def __init__(self, args):
        super().__init__()
        self.args = args
        q_dim, kv_dim = args.n_heads * args.head_dim, args.n_kv_heads * args.head_dim
        self.wq = nn.Linear(args.dim, q_dim, bias=args.qkv_bias)
        self.wk = nn.Linear(args.dim, kv_dim, bias=args.qkv_bias)
        self.wv = nn.Linear(args.dim, kv_dim, bias=args.qkv_bias)
        self.wo = nn.Linear(q_dim, args.dim, bias=False)
        if args.qk_norm:
            self.q_norm = RMSNorm(args.head_dim, args.norm_eps)
            self.k_norm = RMSNorm(args.head_dim, args.norm_eps)
        else:
            self.q_norm, self.k_norm = nn.Identity(), nn.Identity()

    def forward(self, x, rope, cache=None, mask=None):
        """
        Return the attention's output (B, T, D) for x (B, T, D).

        rope: (T, Q/2, 2) or (B, T, Q/2, 2), the rows of rope_table at the positions of x.
        cache: (keys, values, slots) or None. keys and values are (B, length, K, Q). `slots` indexes
        the B x T entries that this call fills. The queries then see those of the first S positions
        that `mask` (B, 1, T, S) allows.
        mask: bool (B, 1, T, S), True where a query sees a key, or ops.Documents, for causal
        attention within each document. None: causal attention.
        """
        a = self.args
        q = self.wq(x).unflatten(-1, (-1, a.head_dim))  # (B, T, H, Q)
        k = self.wk(x).unflatten(-1, (-1, a.head_dim))  # (B, T, K, Q)
        v = self.wv(x).unflatten(-1, (-1, a.head_dim))  # (B, T, K, Q)
        q, k = ops.rotate(self.q_norm(q), rope), ops.rotate(self.k_norm(k), rope)
        if cache is not None:
            keys, values, slots = cache
            keys[slots], values[slots] = k, v
            k, v = (z[:, :mask.shape[-1]] for z in (keys, values))  # (B, S, K, Q)
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
    """Attention and feed-forward, each preceded by a norm and added to the residual stream."""

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

    # The token that begins a document: a query sees only the positions from the latest such token
    # up to its own. A negative number: where a document begins, the target, not the token, is this
    # number. None: a query sees all positions up to its own.
    bos_id = None

    # Activation checkpointing in training mode: save only the blocks' inputs, and recompute the
    # rest in backward. The blocks then neither read nor fill a key/value cache.
    recompute = False

    # engine/training/lora.py: which weights are frozen or trained. None: all weights are trained.
    lora = None

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

    def fill_rope(self, device):
        """Compute `rope` on a device, for a model that was built on the meta device."""
        self.rope = rope_table(self.args).to(device)

    def init_weights(self):
        """
        Draw the matrices from a normal distribution with standard deviation 0.02, for w2 divided by
        sqrt(2 n_layers), because the outputs of all layers add up in the residual stream.

        wo starts as the transpose of wv, whose heads are repeated for the query heads that share
        them. At first, each head thus adds to the residual stream a projection of the vectors that
        it attends to. That rewards attending to the right token from the first step on.
        doc/lab/recipe.md

        train.py then changes the tables (engine/training/bigrams.py) and some heads
        (engine/training/previous_tokens.py).
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

    def forward(self, tokens, targets=None, cache=None, every=0, documents=None):
        """
        For tokens (B, T), return (logits, None) if targets is None, otherwise (None, loss).

        targets: (B, T), negative where a position has no target. The loss is the mean cross-entropy
        over all targets, in nats.
        every: with n > 0, return the logits of positions 0, n, 2n, ...; with 0, the logits of the
        last position, (B, 1, V).
        cache: a dict from new_cache with the earlier positions of each row, cache["pos"] of them;
        this call appends T positions to each row. A query then sees all positions of its row up to
        its own; bos_id and documents are ignored.
        documents: from ops.documents_of, or a mask from document_mask. A query then sees only its
        own document, as with bos_id, which is ignored. Documents need no mask of (B, 1, T, T).
        """
        B, T = tokens.shape
        rope, mask = self.rope[:T], documents
        x = self.dropout(self.tok_embeddings(tokens))  # (B, T, D)
        if cache:
            rows, steps, keys = (torch.arange(n, device=tokens.device)
                                 for n in (B, T, max(cache["pos"]) + T))
            positions = torch.tensor(cache["pos"], device=tokens.device)[:, None] + steps  # (B, T)
            slots = rows[:, None], positions
            rope = self.rope[positions]  # (B, T, Q/2, 2)
            mask = (keys <= positions[:, :, None])[:, None]  # (B, 1, T, S)
        elif mask is None:
            mask = self.document_mask(tokens, targets)
        for i, layer in enumerate(self.layers):
            if self.recompute and self.training:
                x = checkpoint(layer, x, rope, None, mask, use_reentrant=False)
            else:
                kv = (cache["keys"][i], cache["values"][i], slots) if cache else None
                x = layer(x, rope, kv, mask)
        x = self.norm(x)
        if cache:
            cache["pos"] = [pos + T for pos in cache["pos"]]
        if targets is None:
            return self.output(x[:, ::every] if every else x[:, -1:]), None
        return None, ops.cross_entropy(x.flatten(0, 1), self.output, targets.flatten())

    def document_mask(self, tokens, targets=None):
        """Return ops.within_documents for tokens and targets (B, T) by bos_id; None: no mask."""
        borders = targets if self.bos_id is not None and self.bos_id < 0 else tokens
        if self.bos_id is None or borders is None:
            return None
        return ops.within_documents(borders, self.bos_id)

    def new_cache(self, B, length):
        """
        Return an empty key/value cache for B sequences of up to `length` positions: {"keys",
        "values": (n_layers, B, length, K, Q), "pos": [number of filled positions of each]}.
        """
        a = self.args
        shape = (a.n_layers, B, length, a.n_kv_heads, a.head_dim)
        keys, values = (torch.zeros(shape, device=self.rope.device) for _ in range(2))
        return {"keys": keys, "values": values, "pos": [0] * B}

    def prefill(self, cache, row, text):
        """
        Fill a row of the cache with all tokens of a text except the last. If the text exceeds the
        context, latest() shortens it first.
        """
        text = latest(text, self.args.max_seq_len)
        part = {"keys": cache["keys"][:, row:row + 1], "values": cache["values"][:, row:row + 1],
                "pos": [0]}  # views: filling them fills the cache
        if len(text) > 1:
            self(torch.tensor([text[:-1]], device=self.rope.device), cache=part)
        cache["pos"][row] = len(text) - 1

    @torch.inference_mode()
    def generate(self, prompts, max_new_tokens, temperature=1.0, top_p=1.0, stop=(),
                 generators=None):
        """
        Continue each of B prompts by up to max_new_tokens sampled tokens. Return B lists of token
        ids, which begin with the prompts. A text does not depend on the other prompts, except by
        rounding: each prompt is evaluated alone, then all texts grow in one batch, a token a step.

        prompts: B lists or tensors (T,) of token ids, of any lengths.
        temperature: a number, or a list of one per prompt. temperature and top_p: as in `sample`.
        stop: token ids. A text ends with the first of them that it generates.
        generators: a list of one torch.Generator per prompt; None: PyTorch's default one for all.
        When the context is full, the model continues from the tokens that latest() keeps. The
        result still contains all tokens.
        """
        texts = [torch.as_tensor(prompt).tolist() for prompt in prompts]
        context, generators = self.args.max_seq_len, generators or [None] * len(texts)
        if not isinstance(temperature, list):
            temperature = [temperature] * len(texts)
        length = min(context, max(map(len, texts)) + max_new_tokens)
        cache = self.new_cache(len(texts), length)
        for row, text in enumerate(texts):
            self.prefill(cache, row, text)
        growing = list(range(len(texts)))  # index of the text in each row of the cache
        for _ in range(max_new_tokens):
            for row, i in enumerate(growing):
                if cache["pos"][row] == context:
                    self.prefill(cache, row, texts[i])
            last = torch.tensor([texts[i][-1:] for i in growing], device=self.rope.device)  # (B, 1)
            logits = self(last, cache=cache)[0][:, -1].float()  # (B, V)
            new = [sample(z, temperature[i], top_p, generators[i])
                   for i, z in zip(growing, logits.split(1))]
            for i, token in zip(growing, torch.cat(new)[:, 0].tolist()):
                texts[i].append(token)
            kept = [row for row, i in enumerate(growing) if texts[i][-1] not in stop]
            if not kept:
                break
            if len(kept) < len(growing):  # leave out the rows of texts that have ended
                growing = [growing[row] for row in kept]
                cache = {"keys": cache["keys"][:, kept], "values": cache["values"][:, kept],
                         "pos": [cache["pos"][row] for row in kept]}
        return texts


def latest(tokens, max_seq_len):
    """
    Shorten a list of more than max_seq_len tokens to half a context: the first token, usually BOS,
    and the latest ones; only the latest one if max_seq_len is 3 or less. ./run does the same.

    The next shortening comes after half a context of new tokens, and keeps only the first token and
    those. So each token but the first is evaluated at most twice: when it is new and when it is
    kept.
    """
    if len(tokens) <= max_seq_len:
        return tokens
    half = max_seq_len // 2 if max_seq_len > 3 else 1
    return tokens[:1] + tokens[1 - half:] if half > 1 else tokens[-1:]


def sample(logits, temperature, top_p, generator=None):
    """
    Draw one token from each row of logits (B, V); return (B, 1).

    temperature: divides the logits; 0 takes the most likely token.
    top_p: draw only from the most likely tokens, the fewest whose total probability exceeds top_p.
    0 or 1: draw from all tokens.
    """
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    probs = torch.softmax(logits / temperature, dim=-1)
    if 0 < top_p < 1:
        ordered, index = probs.sort(dim=-1, descending=True)
        # Drop a token if the more likely tokens alone already exceed top_p.
        more_likely = ordered.cumsum(dim=-1) - ordered
        ordered[more_likely > top_p] = 0
        probs = torch.zeros_like(probs).scatter(-1, index, ordered)
    return torch.multinomial(probs, 1, generator=generator)


if __name__ == "__main__":
    from engine.training.costs import Build
    from engine.training.plan import show_costs
    from optim import make_optimizer
    show_costs(Build(model_args=ModelArgs.of, make_optimizer=make_optimizer))
