"""
What model files are made of: the tensors of a model with their names in each format and their shapes, and the types of
weights. export.py writes them, engine/training/load.py reads them.
"""
import struct
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from configurator import fail
from engine.formats import quant
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
# Keys of ids that end an answer beside EOS, of what fills a batch, and of the template of a chat.
END_OF_TURN, END_OF_MESSAGE, PADDING = (f"tokenizer.ggml.{name}_token_id" for name in ("eot", "eom", "padding"))
TEMPLATE = "tokenizer.chat_template"
CHAT = END_OF_TURN, END_OF_MESSAGE, PADDING, TEMPLATE
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


def refuse_leftovers(state, args):
    """
    One line where a state_dict {name: tensor} is not that of a model with these ModelArgs: a parameter
    or buffer that model files have no name for would be left out without a word. Lazy tensors were
    checked by their readers.
    """
    expected = {name: shape for name, _, _, shape in tensors(args)}
    tied = {"output.weight"} if args.tied else set()
    left, missing = sorted(state.keys() - expected.keys() - tied), sorted(expected.keys() - state.keys())
    if left:
        more = f" and {len(left) - 1} more" * (len(left) > 1)
        fail(f"the model's {left[0]}{more} would be lost: no model file has a name for it; add it to "
             "TENSORS in engine/formats/layout.py and to runtime/, or take it out of the model")
    if missing:
        fail(f"the model has no {missing[0]}, which every model file of these settings has; add it to the model")
    if not isinstance(state, dict):
        return
    for name, shape in expected.items():
        if tuple(state[name].shape) != shape:
            fail(f"the model's {name} has shape {tuple(state[name].shape)}, expected {shape} by its settings")
    if tied & state.keys() and not torch.equal(state["output.weight"], state["tok_embeddings.weight"]):
        fail("the model's output.weight is not tok_embeddings.weight, but its settings say tied=True")


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

HALF, SINGLE = float(np.finfo("f2").max), float(np.finfo("f4").max)


class Type(NamedTuple):
    number: int         # ggml's number of the type
    block: int          # values in a block ...
    size: int           # ... and the bytes they take
    largest: float      # magnitude that fits
    encode: Callable    # float32 (n block,) -> array of the stored bytes
    decode: Callable    # stored bytes, uint8 (n size,) -> float32, n block values


def to_bf16(x):
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")  # to nearest, ties to even


def in_blocks(number, kind, largest, encode, decode, *args):
    """The Type whose blocks are numpy's `kind`; encode and decode get the kind and args too."""
    values = 256 if "scales" in kind.names else 32
    return Type(number, values, kind.itemsize, largest, quant.in_pieces(encode, kind, *args), lambda raw: decode(raw, kind, *args))


TYPES = {
    "f32": Type(0, 1, 4, SINGLE, lambda x: x.astype("<f4"), lambda raw: raw.view("<f4").astype("f4")),
    "f16": Type(1, 1, 2, HALF, lambda x: x.astype("<f2"), lambda raw: raw.view("<f2").astype("f4")),
    "bf16": Type(30, 1, 2, 3.38e38, to_bf16, lambda raw: (raw.view("<u2").astype("u4") << 16).view("f4")),
    "q8_0": in_blocks(8, quant.Q8_0, 127 * HALF, quant.to_q8_0, quant.from_q8_0),
    "q4_0": in_blocks(2, quant.Q4_0, 8 * HALF, quant.to_symmetric, quant.from_32, 8),
    "q4_1": in_blocks(3, quant.Q4_1, 7 * HALF, quant.to_affine, quant.from_32, 15),
    "q5_0": in_blocks(6, quant.Q5_0, 16 * HALF, quant.to_symmetric, quant.from_32, 16),
    "q5_1": in_blocks(7, quant.Q5_1, HALF, quant.to_affine, quant.from_32, 31),
    "q4_k": in_blocks(12, quant.Q4_K, 63 * HALF, quant.to_k, quant.from_k, 15),
    "q5_k": in_blocks(13, quant.Q5_K, 63 * HALF, quant.to_k, quant.from_k, 31),
    "q6_k": in_blocks(14, quant.Q6_K, 31 * 127 * HALF, quant.to_q6_k, quant.from_q6_k),
}
# What a GGUF file may be written in: general.file_type of the file
FILE_TYPES = {"f32": 0, "f16": 1, "bf16": 32, "q8_0": 7, "q4_0": 2, "q4_k_m": 15, "q5_k_m": 17, "q6_k": 18}
# Types whose blocks rows of another length than a multiple of 256 don't fill, and what llama.cpp takes for them
SHORTER = {"q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0"}


def deserves_bits(layer, n_layers):
    """Whether llama.cpp gives this layer's values, and what leads out of its feed-forward network, 6 bits among 4 or 5."""
    eighth = n_layers // 8
    return layer < eighth or layer >= 7 * n_layers // 8 or (layer - eighth) % 3 == 2


def gguf_type(name, shape, dtype, n_layers):
    """
    The type a tensor has in a GGUF file of `dtype`. Norms, and rows that don't fill blocks, stay float32. Among matrices of
    fewer bits the embedding and the classifier keep 6 or 8, because precision is worth most there. The mixtures (_m) are
    llama.cpp's.
    """
    if len(shape) == 1:
        return "f32"
    kind = dtype.removesuffix("_m")
    if kind[0] == "q" and name in ("tok_embeddings.weight", "output.weight"):
        kind = "q8_0" if dtype in ("q8_0", "q4_0") else "q6_k"
    elif kind != dtype and name.split(".")[-2] in ("wv", "w2") and deserves_bits(int(name.split(".")[1]), n_layers):
        kind = "q6_k"
    if kind in SHORTER and shape[-1] % 256:
        kind = SHORTER[kind]
    return "f32" if shape[-1] % TYPES[kind].block else kind


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
