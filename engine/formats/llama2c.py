"""
Read llama2.c's model files, versions 0, 1 and 2. https://github.com/karpathy/llama2.c
"""
import math
from functools import partial

import numpy as np

from engine.formats.layout import LLAMA2C_HEADER, LLAMA2C_MAGIC, LLAMA2C_V0, LLAMA2C_V1, tensors
from engine.formats.reader import Reader, Tensors, checked
from model import ModelArgs


def read_llama2c(path):
    """(Tensors in float32, ModelArgs) of a llama2.c file, version 0, 1 or 2; a damaged one ends in one line."""
    r, version, group_size = Reader(path), 0, 1
    if r.unpack("<I")[0] == LLAMA2C_MAGIC:
        version, = r.unpack("<i")
        if version not in (1, 2):
            r.fail(f"llama2.c version {version}, expected 1 or 2")
    else:
        r.at = 0
    dim, hidden_dim, n_layers, n_heads, n_kv_heads, vocab_size, max_seq_len = r.unpack("<7i")
    tied = r.unpack("<B")[0] != 0 if version else vocab_size > 0
    if version == 2:
        group_size, = r.unpack("<i")
    vocab_size = vocab_size if version else abs(vocab_size)
    if min(dim, hidden_dim, n_layers, n_heads, n_kv_heads, vocab_size, max_seq_len, group_size) < 1:
        r.fail("neither GGUF nor a llama2.c header, whose numbers are all positive")
    args = ModelArgs(dim=dim, n_layers=n_layers, n_heads=n_heads, n_kv_heads=n_kv_heads, vocab_size=vocab_size,
                     hidden_dim=hidden_dim, max_seq_len=max_seq_len, tied=tied)
    checked(args, r.fail, "" if version else "neither GGUF nor llama2.c's v1 or v2; read as v0, ")
    r.at, reads = LLAMA2C_HEADER if version else r.at, {}
    for name, _, _, shape in tensors(args, LLAMA2C_V1 if version else LLAMA2C_V0):
        count, q = math.prod(shape), None
        if version == 2 and len(shape) == 2:
            if count % group_size:
                r.fail(f"groups of {group_size} do not fill {name}, which has {count} values")
            q = r.place(count)
            count //= group_size
        reads[name] = partial(llama2c_tensor, r, name, q, r.place(4 * count), shape, group_size)
        if version == 0 and name == "norm.weight":
            r.take(4 * max_seq_len * args.head_dim)  # the frequency tables
    if r.at != len(r.data):
        r.fail(f"holds {len(r.data)} bytes, its header implies {r.at}")
    return Tensors(reads, path), args


def llama2c_tensor(r, name, q, place, shape, group_size):
    """The float32 numbers at a place; q: where the integers stand that they scale, in groups."""
    w = r.bytes_at(*place).view("<f4").astype(np.float32)
    if q:
        with np.errstate(over="ignore", invalid="ignore"):  # `weights` looks at what comes out
            w = r.bytes_at(*q).view(np.int8).reshape(-1, group_size) * w[:, None]
    return r.weights(name, w, shape)
