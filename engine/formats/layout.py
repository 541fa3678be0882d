"""
Tables of a model's tensors, with their names in each file format and their shapes, and of the
types in which weights are stored. export.py writes model files, and engine/training/load.py reads
them, according to these tables.
"""
import struct
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from configurator import fail
from engine.formats import quant
from tokenizer import CONTROL, NORMAL, UNKNOWN

# Names in model.py, in GGUF and in Hugging Face's files, and the shape. Sizes: V vocabulary,
# D model width, Q all query heads together, K all key (or value) heads together, H one head,
# F hidden width of the feed-forward network. Names without ".bias" get ".weight" appended.
LAYER_TENSORS = [
    ("attention_norm",    "attn_norm",   "input_layernorm",          "D"),
    ("attention.wq",      "attn_q",      "self_attn.q_proj",         "QD"),
    ("attention.wk",      "attn_k",      "self_attn.k_proj",         "KD"),
    ("attention.wv",      "attn_v",      "self_attn.v_proj",         "KD"),
    ("attention.wo",      "attn_output", "self_attn.o_proj",         "DQ"),
    ("attention.wq.bias", "attn_q.bias", "self_attn.q_proj.bias",    "Q"),
    ("attention.wk.bias", "attn_k.bias", "self_attn.k_proj.bias",    "K"),
    ("attention.wv.bias", "attn_v.bias", "self_attn.v_proj.bias",    "K"),
    ("attention.q_norm",  "attn_q_norm", "self_attn.q_norm",         "H"),
    ("attention.k_norm",  "attn_k_norm", "self_attn.k_norm",         "H"),
    ("ffn_norm",          "ffn_norm",    "post_attention_layernorm", "D"),
    ("feed_forward.w1",   "ffn_gate",    "mlp.gate_proj",            "FD"),
    ("feed_forward.w2",   "ffn_down",    "mlp.down_proj",            "DF"),
    ("feed_forward.w3",   "ffn_up",      "mlp.up_proj",              "FD"),
]
TENSORS = [
    ("tok_embeddings", "token_embd", "model.embed_tokens", "VD"),
    *((f"layers.N.{ours}", f"blk.N.{gguf}", f"model.layers.N.{hf}", shape)  # N: number of the layer
      for ours, gguf, hf, shape in LAYER_TENSORS),
    ("norm", "output_norm", "model.norm", "D"),
    ("output", "output", "lm_head", "VD"),
]

# llama2.c's files have no tensor names, only a fixed order: one order in version 0, another in
# versions 1 and 2. Both orders list the last word of each tensor's name in model.py.
V0_ORDER = "tok_embeddings attention_norm wq wk wv wo ffn_norm w1 w2 w3 norm output"
V1_ORDER = "attention_norm ffn_norm norm tok_embeddings wq wk wv wo w1 w2 w3 output"
BY_LAST_WORD = {row[0].split(".")[-1]: row for row in TENSORS}
LLAMA2C_V0 = [BY_LAST_WORD[word] for word in V0_ORDER.split()]
LLAMA2C_V1 = [BY_LAST_WORD[word] for word in V1_ORDER.split()]
LLAMA2C_MAGIC = 0x616b3432
LLAMA2C_HEADER = 256  # bytes

# Our own keys in the metadata of a GGUF file
CHECKSUM = "llamac.tensor_data.sha256"  # of all bytes from the first tensor to the end of the file
# sha256 of the list of tensors (names, shapes, types, offsets). A program that converts the tensors
# copies our keys unchanged, and then neither checksum matches its file. The reader therefore
# ignores CHECKSUM if LIST_CHECKSUM does not match.
LIST_CHECKSUM = "llamac.tensor_list.sha256"
ITER = "llamac.iter"  # training step of the model

# A value of the key tokenizer.ggml.model: it makes llama.cpp refuse a file whose vocabulary lacks
# the byte pieces that llama.cpp needs; see export.gguf_tokenizer_model
NO_BYTES = "llama-without-bytes"

# GGUF's keys for the ids besides EOS that end an answer, for padding, and for the chat template
END_OF_TURN, END_OF_MESSAGE, PADDING = (
    f"tokenizer.ggml.{name}_token_id" for name in ("eot", "eom", "padding"))
TEMPLATE = "tokenizer.chat_template"
CHAT = END_OF_TURN, END_OF_MESSAGE, PADDING, TEMPLATE

ROPE_FACTORS = "rope_freqs.weight"  # the tensor of a GGUF file that holds ModelArgs.rope_factors
ALIGNMENT = 32  # bytes; each tensor of a GGUF file begins at a multiple of it


def tensors(args, rows=TENSORS):
    """
    Yield (name in model.py, in GGUF, in Hugging Face's files, shape) of every tensor of a model, in
    the order of the table `rows`. A row of LAYER_TENSORS yields the tensors of all layers at once:
    wq of every layer, then wk of every layer.
    """
    sizes = {
        "V": args.vocab_size,
        "D": args.dim,
        "Q": args.n_heads * args.head_dim,
        "K": args.n_kv_heads * args.head_dim,
        "H": args.head_dim,
        "F": args.hidden_dim,
    }
    optional = {
        "output": not args.tied,
        "bias": args.qkv_bias,
        "q_norm": args.qk_norm,
        "k_norm": args.qk_norm,
    }
    for *names, letters in rows:
        if not optional.get(names[0].split(".")[-1], True):
            continue
        names = [name if name.endswith(".bias") else f"{name}.weight" for name in names]
        shape = tuple(sizes[letter] for letter in letters)
        for layer in range(args.n_layers if "N" in names[0] else 1):
            yield (*(name.replace("N", str(layer)) for name in names), shape)


def check_tensors(found, expected, where, ignored=()):
    """
    Exit with a message unless the tensors `found`, {name: shape}, are exactly the `expected` ones.

    expected: iterable of (name, shape), which is read only up to the first difference, because a
    damaged file may claim billions of layers. where: the file or folder, for the message. ignored:
    names of tensors that may be present too.
    """
    known = {*ignored}
    for name, shape in expected:
        if name not in found:
            fail(f"{where}: tensor {name} {shape} is missing")
        if tuple(found[name]) != shape:
            fail(f"{where}: {name} has shape {tuple(found[name])}, expected {shape}")
        known.add(name)
    for name in found:
        if name not in known:
            fail(f"{where}: tensor {name[:80]!r} is not part of the model described")


def unnamed_parameters(names, args):
    """
    Return the sorted names in a state_dict that have no counterpart in model files: an export would
    drop these parameters or buffers.
    """
    tied = {"output.weight"} if args.tied else set()
    return sorted({*names} - {name for name, *_ in tensors(args)} - tied)


def refuse_other_tensors(state, args):
    """
    Exit with a message unless a state_dict {name: tensor} has exactly the tensors of a model with
    these ModelArgs. If `state` is a reader.Tensors, which reads each tensor when it is accessed,
    compare only names: the shapes were checked when the file was opened.
    """
    if unnamed := unnamed_parameters(state.keys(), args):
        more = f" and {len(unnamed) - 1} more" if len(unnamed) > 1 else ""
        fail(f"the model's {unnamed[0]}{more} would be lost: no model file has a name for it; "
             "add it to TENSORS in engine/formats/layout.py and to runtime/, or remove it "
             "(train.py --checks=-export trains it without model files)")
    expected = {name: shape for name, _, _, shape in tensors(args)}
    tied = {"output.weight"} if args.tied else set()
    lazy = not isinstance(state, dict)
    shapes = {name: expected.get(name) if lazy else state[name].shape for name in state.keys()}
    check_tensors(shapes, expected.items(), "the model", tied)
    if lazy or not tied & state.keys():
        return
    if not torch.equal(state["output.weight"], state["tok_embeddings.weight"]):
        fail("the model's output.weight differs from tok_embeddings.weight, but its settings "
             "have tied=True")


def architecture(args):
    """Return GGUF's name for a model's architecture."""
    if args.qk_norm:
        return "qwen3"
    return "qwen2" if args.qkv_bias else "llama"


def heads_in(name, args):
    """
    Return the number of heads in a tensor whose rows belong to the pairs that RoPE rotates: the
    query heads for wq, the key heads for wk, 1 for the norms of a head. Return 0 for other tensors.
    """
    rotated = {"wq": args.n_heads, "wk": args.n_kv_heads, "q_norm": 1, "k_norm": 1}
    return rotated.get(name.split(".")[-2], 0)


def interleaved_to_halves(w, n_heads):
    """
    Reorder the rows of each head from rotated pairs (2i, 2i+1), the order of model.py and of GGUF's
    architecture llama, to pairs (i, i + H/2), the order of Hugging Face. Return w itself if n_heads
    is 0.
    """
    return w.unflatten(0, (n_heads, -1, 2)).transpose(1, 2).flatten(0, 2) if n_heads else w


def halves_to_interleaved(w, n_heads):
    """Undo interleaved_to_halves."""
    return w.unflatten(0, (n_heads, 2, -1)).transpose(1, 2).flatten(0, 2) if n_heads else w


# ---- types of weights

HALF, SINGLE = float(np.finfo("f2").max), float(np.finfo("f4").max)


class Type(NamedTuple):
    """How the weights of a tensor are stored."""
    number: int       # ggml's number for the type
    block: int        # values in a block
    size: int         # bytes of a block
    largest: float    # max magnitude of a weight; export.py refuses larger ones
    encode: Callable  # float32 (n block,) -> array of the stored bytes
    decode: Callable  # stored bytes, uint8 (n size,) -> float32, n block values


def to_bf16(x):
    """Round float32 to the nearest bfloat16, ties to even, stored as uint16."""
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")


def block_type(number, dtype, largest, encode, decode, *options):
    """
    Return the Type whose blocks have the numpy dtype `dtype`. It encodes with encode(x, dtype,
    *options) and decodes with decode(raw, dtype, *options).
    """
    values = 256 if "scales" in dtype.names else 32
    return Type(number, values, dtype.itemsize, largest, quant.in_chunks(encode, dtype, *options),
                lambda raw: decode(raw, dtype, *options))


TYPES = {
    "f32": Type(0, 1, 4, SINGLE, lambda x: x.astype("<f4"),
                lambda raw: raw.view("<f4").astype("f4")),
    "f16": Type(1, 1, 2, HALF, lambda x: x.astype("<f2"),
                lambda raw: raw.view("<f2").astype("f4")),
    "bf16": Type(30, 1, 2, 3.38e38, to_bf16,
                 lambda raw: (raw.view("<u2").astype("u4") << 16).view("f4")),
    "q8_0": block_type(8, quant.Q8_0, 127 * HALF, quant.to_q8_0, quant.from_q8_0),
    "q4_0": block_type(2, quant.Q4_0, 8 * HALF, quant.to_symmetric, quant.from_32, 8),
    "q4_1": block_type(3, quant.Q4_1, HALF, quant.to_affine, quant.from_32, 15),
    "q5_0": block_type(6, quant.Q5_0, 16 * HALF, quant.to_symmetric, quant.from_32, 16),
    "q5_1": block_type(7, quant.Q5_1, HALF, quant.to_affine, quant.from_32, 31),
    "q4_k": block_type(12, quant.Q4_K, 63 * HALF, quant.to_k, quant.from_k, 15),
    "q5_k": block_type(13, quant.Q5_K, 63 * HALF, quant.to_k, quant.from_k, 31),
    "q6_k": block_type(14, quant.Q6_K, 31 * 127 * HALF, quant.to_q6_k, quant.from_q6_k),
}
# {--dtype of a GGUF file: its number in the metadata, general.file_type}
FILE_TYPES = {"f32": 0, "f16": 1, "bf16": 32, "q8_0": 7, "q4_0": 2, "q4_k_m": 15, "q5_k_m": 17,
              "q6_k": 18}
# The types that llama.cpp uses instead of 256-value blocks if the length of a row is not a multiple
# of 256
FALLBACK_TYPES = {"q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0"}


def has_more_bits(layer, n_layers):
    """
    Return whether the mixtures q4_k_m and q5_k_m store wv and w2 of this layer in 6 bits, as
    llama.cpp does.
    """
    eighth = n_layers // 8
    return layer < eighth or layer >= 7 * n_layers // 8 or (layer - eighth) % 3 == 2


def gguf_type(name, shape, dtype, n_layers):
    """
    Return the type, a key of TYPES, of a tensor in a GGUF file of `dtype`, a key of FILE_TYPES.
    Vectors, and matrices whose rows are not whole blocks, stay float32. The embedding and the
    classifier of a quantised model get 6 or 8 bits, because precision matters most there. The
    mixtures q4_k_m and q5_k_m choose types as llama.cpp does.
    """
    if len(shape) == 1:
        return "f32"
    kind = dtype.removesuffix("_m")
    mixture = kind != dtype
    if kind[0] == "q" and name in ("tok_embeddings.weight", "output.weight"):
        kind = "q8_0" if dtype in ("q8_0", "q4_0") else "q6_k"
    elif mixture and name.split(".")[-2] in ("wv", "w2"):
        layer = int(name.split(".")[1])
        kind = "q6_k" if has_more_bits(layer, n_layers) else kind
    if kind in FALLBACK_TYPES and shape[-1] % 256:
        kind = FALLBACK_TYPES[kind]
    return "f32" if shape[-1] % TYPES[kind].block else kind


# ---- parts of a GGUF file

def padding_to(position, alignment):
    """Return the number of padding bytes from a position to the next multiple of `alignment`."""
    return -position % alignment


def gguf_string(text):
    """Return a str or bytes as GGUF stores it: the length in bytes as uint64, then the UTF-8."""
    data = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(data)) + data


def is_character_level(vocabulary):
    """
    Return whether every piece is a special token or one character, and the vocabulary neither puts
    a space before a text nor removes spaces from it.
    """
    if vocabulary.add_dummy_prefix or vocabulary.remove_extra_whitespaces:
        return False
    return all(kind in (UNKNOWN, CONTROL) or kind == NORMAL and len(piece.decode()) == 1
               for piece, _, kind in vocabulary.pieces())
