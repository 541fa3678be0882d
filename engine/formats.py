"""
What model files are made of: the tensors of a model with their names in each format and their shapes, and the types of
weights. export.py writes them, engine/load.py reads them.
"""
import struct
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from tokenizer import CONTROL, NORMAL, UNKNOWN

# Our name, GGUF's, Hugging Face's, shape. N: layer. V vocabulary, D width, Q width of all queries, K of all keys or values,
# H of a head, F hidden width. A name without .bias means its .weight.
TENSORS = [
    ("tok_embeddings",            "token_embd",        "model.embed_tokens",                       "VD"),
    ("layers.N.attention_norm",   "blk.N.attn_norm",   "model.layers.N.input_layernorm",           "D"),
    ("layers.N.attention.wq",     "blk.N.attn_q",      "model.layers.N.self_attn.q_proj",          "QD"),
    ("layers.N.attention.wk",     "blk.N.attn_k",      "model.layers.N.self_attn.k_proj",          "KD"),
    ("layers.N.attention.wv",     "blk.N.attn_v",      "model.layers.N.self_attn.v_proj",          "KD"),
    ("layers.N.attention.wo",     "blk.N.attn_output", "model.layers.N.self_attn.o_proj",          "DQ"),
    ("layers.N.attention.wq.bias", "blk.N.attn_q.bias", "model.layers.N.self_attn.q_proj.bias",    "Q"),
    ("layers.N.attention.wk.bias", "blk.N.attn_k.bias", "model.layers.N.self_attn.k_proj.bias",    "K"),
    ("layers.N.attention.wv.bias", "blk.N.attn_v.bias", "model.layers.N.self_attn.v_proj.bias",    "K"),
    ("layers.N.attention.q_norm", "blk.N.attn_q_norm", "model.layers.N.self_attn.q_norm",          "H"),
    ("layers.N.attention.k_norm", "blk.N.attn_k_norm", "model.layers.N.self_attn.k_norm",          "H"),
    ("layers.N.ffn_norm",         "blk.N.ffn_norm",    "model.layers.N.post_attention_layernorm",  "D"),
    ("layers.N.feed_forward.w1",  "blk.N.ffn_gate",    "model.layers.N.mlp.gate_proj",             "FD"),
    ("layers.N.feed_forward.w2",  "blk.N.ffn_down",    "model.layers.N.mlp.down_proj",             "DF"),
    ("layers.N.feed_forward.w3",  "blk.N.ffn_up",      "model.layers.N.mlp.up_proj",               "FD"),
    ("norm",                      "output_norm",       "model.norm",                               "D"),
    ("output",                    "output",            "lm_head",                                  "VD"),
]
BY_NAME = {row[0].split(".")[-1]: row for row in TENSORS}
LLAMA2C_V0 = [BY_NAME[n] for n in "tok_embeddings attention_norm wq wk wv wo ffn_norm w1 w2 w3 norm output".split()]
LLAMA2C_V1 = [BY_NAME[n] for n in "attention_norm ffn_norm norm tok_embeddings wq wk wv wo w1 w2 w3 output".split()]
LLAMA2C_MAGIC, LLAMA2C_HEADER = 0x616b3432, 256
CHECKSUM = "llamac.tensor_data.sha256"  # of all bytes from the first tensor to the end of a GGUF file
NO_BYTES = "llama-without-bytes"  # tokenizer.ggml.model is this, "llama" or "t5"; see gguf_tokenizer
ITER = "llamac.iter"  # of which iteration of a run the model is
# Of the names, shapes, types and places of the tensors: programs that write others keep metadata they don't know, and where
# this one does not fit, CHECKSUM is about another file.
LIST_CHECKSUM = "llamac.tensor_list.sha256"
ROPE_FACTORS = "rope_freqs.weight"  # ModelArgs.rope_factors in a GGUF file
ALIGNMENT = 32


def tensors(args, rows=TENSORS):
    """(our name, GGUF's, Hugging Face's, shape) of every tensor of a model, each row for all layers in turn."""
    size = {"V": args.vocab_size, "D": args.dim, "Q": args.n_heads * args.head_dim, "K": args.n_kv_heads * args.head_dim,
            "H": args.head_dim, "F": args.hidden_dim}
    there = {"output": not args.tied, "bias": args.qkv_bias, "q_norm": args.qk_norm, "k_norm": args.qk_norm}
    for *names, shape in rows:
        if there.get(names[0].split(".")[-1], True):
            full = [name if name.endswith(".bias") else f"{name}.weight" for name in names]
            for n in range(args.n_layers if "N" in names[0] else 1):
                yield (*(name.replace("N", str(n)) for name in full), tuple(size[c] for c in shape))


def architecture(args):
    """GGUF's name of a model's architecture."""
    return "qwen3" if args.qk_norm else "qwen2" if args.qkv_bias else "llama"


def heads_in(name, args):
    """How many heads' pairs the rows of a tensor hold, by its name: of queries, keys, or the norm of one head; else 0."""
    return {"wq": args.n_heads, "wk": args.n_kv_heads, "q_norm": 1, "k_norm": 1}.get(name.split(".")[-2], 0)


def interleaved_to_halves(w, n_heads):
    """The rows of a tensor from pairs (2i, 2i+1) in each head, which we and GGUF's llama have, to Hugging Face's (i, i + Q/2)."""
    return w.unflatten(0, (n_heads, -1, 2)).transpose(1, 2).flatten(0, 2) if n_heads else w


def halves_to_interleaved(w, n_heads):
    """And back."""
    return w.unflatten(0, (n_heads, 2, -1)).transpose(1, 2).flatten(0, 2) if n_heads else w


# ---- types of weights

Q8_0 = np.dtype([("d", "<f2"), ("q", "i1", 32)])  # 32 values: x = d q
Q4_0 = np.dtype([("d", "<f2"), ("q", "u1", 16)])  # 32 values: x = d (q - 8); the first 16 in the low nibbles
HALF, SINGLE = float(np.finfo("f2").max), float(np.finfo("f4").max)


class Type(NamedTuple):
    number: int         # ggml's number of the type
    file_type: int      # general.file_type of a GGUF file mostly of this type
    block: int          # values in a block ...
    size: int           # ... and the bytes they take
    largest: float      # magnitude that fits
    encode: Callable    # float32 (n block,) -> array of the stored bytes
    decode: Callable    # stored bytes, uint8 (n size,) -> float32, n block values


def reciprocal(d):
    """1 / d; 0 where that would overflow, which is where half precision stores d as 0."""
    return np.divide(1, d, out=np.zeros_like(d), where=np.abs(d) > 1e-38)


def to_bf16(x):
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")  # to nearest, ties to even


def to_q8_0(x):
    blocks = x.reshape(-1, 32)
    d = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127)
    scaled = blocks * reciprocal(d)
    whole = np.trunc(scaled)
    out = np.empty(len(blocks), Q8_0)
    out["d"], out["q"] = d[:, 0], whole + np.sign(scaled) * (np.abs(scaled - whole) >= 0.5)  # ties away from 0, as ggml
    return out


def to_q4_0(x):
    blocks = x.reshape(-1, 32)
    extreme = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=1)[:, None], axis=1)
    d = extreme / np.float32(-8)  # the value of greatest magnitude, whatever its sign, becomes q = 0
    q = np.minimum(np.trunc(blocks * reciprocal(d) + np.float32(8.5)), 15).astype(np.uint8)
    out = np.empty(len(blocks), Q4_0)
    out["d"], out["q"] = d[:, 0], q[:, :16] | q[:, 16:] << 4
    return out


def from_q8_0(raw):
    blocks = raw.view(Q8_0)
    return blocks["q"] * blocks["d"].astype(np.float32)[:, None]


def from_q4_0(raw):
    blocks = raw.view(Q4_0)
    q = np.concatenate((blocks["q"] & 15, blocks["q"] >> 4), axis=1).astype(np.float32)
    return (q - 8) * blocks["d"].astype(np.float32)[:, None]


TYPES = {
    "f32": Type(0, 0, 1, 4, SINGLE, lambda x: x.astype("<f4"), lambda raw: raw.view("<f4").astype("f4")),
    "f16": Type(1, 1, 1, 2, HALF, lambda x: x.astype("<f2"), lambda raw: raw.view("<f2").astype("f4")),
    "bf16": Type(30, 32, 1, 2, 3.38e38, to_bf16, lambda raw: (raw.view("<u2").astype("u4") << 16).view("f4")),
    "q8_0": Type(8, 7, 32, 34, 127 * HALF, to_q8_0, from_q8_0),
    "q4_0": Type(2, 2, 32, 18, 8 * HALF, to_q4_0, from_q4_0),
}


# ---- parts of a GGUF file

def gap(position, alignment):
    """Bytes of padding from a position to the next multiple of the alignment."""
    return -position % alignment


def gguf_string(text):
    data = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(data)) + data


def of_characters(vocabulary):
    """Whether all pieces are specials or single characters, and no space is put before a text or taken out of it."""
    plain = not vocabulary.add_dummy_prefix and not vocabulary.remove_extra_whitespaces
    return plain and all(kind in (UNKNOWN, CONTROL) or kind == NORMAL and len(piece.decode()) == 1
                         for piece, _, kind in vocabulary.pieces())
