"""
Read llama2.c's model files, versions 0, 1 and 2, and its tokenizer.bin.
https://github.com/karpathy/llama2.c
"""
import math
import re
from functools import partial

import numpy as np

from configurator import fail
from engine.formats.gguf_tokenizer import tokenizer_of_pieces
from engine.formats.layout import LLAMA2C_HEADER, LLAMA2C_MAGIC, LLAMA2C_V0, LLAMA2C_V1, tensors
from engine.formats.reader import Reader, Tensors, checked
from engine.untrusted import reading
from model import ModelArgs
from tokenizer import BYTE, CONTROL, NORMAL, SPACE, UNKNOWN


def read_llama2c(path):
    """
    Return (Tensors in float32, ModelArgs) of a llama2.c file. Exit with a message if the file is
    damaged.
    """
    with reading(path, "a llama2.c file", fail):
        r = Reader(path)
        version, args, group_size = read_header(r)
        readers = {}
        for name, _, _, shape in tensors(args, LLAMA2C_V1 if version else LLAMA2C_V0):
            count = math.prod(shape)
            quantised = None
            if version == 2 and len(shape) == 2:
                if group_size < 1 or count % group_size:
                    r.fail(f"groups of {group_size} do not fill {name}, which has {count} values")
                quantised = r.skip(count)  # int8 values; the floats after them are their scales
                count //= group_size
            floats = r.skip(4 * count)
            readers[name] = partial(read_tensor, r, name, quantised, floats, shape)
            if version == 0 and name == "norm.weight":
                r.skip(4 * args.max_seq_len * args.head_dim)  # tables of rotary positions
        r.end()
        return Tensors(readers, path), args


def read_header(r):
    """Return (version, ModelArgs, number of values that share a scale in version 2)."""
    version, group_size, where = 0, 1, r.path
    if r.unpack("<I")[0] == LLAMA2C_MAGIC:
        version, = r.unpack("<i")
        if version not in (1, 2):
            r.fail(f"llama2.c version {version}, expected 1 or 2")
    else:  # version 0 has no magic number: it begins with the sizes
        r.at = 0
        where = f"{r.path}: neither GGUF nor llama2.c's v1 or v2; read as v0"
    dim, hidden_dim, n_layers, n_heads, n_kv_heads, vocab_size, max_seq_len = r.unpack("<7i")
    if version:
        tied = r.unpack("<B")[0] != 0
    else:  # a negative vocab_size means that the classifier is untied
        tied, vocab_size = vocab_size > 0, abs(vocab_size)
    if version == 2:
        group_size, = r.unpack("<i")
    args = checked(ModelArgs(
        dim=dim, n_layers=n_layers, n_heads=n_heads, n_kv_heads=n_kv_heads, vocab_size=vocab_size,
        hidden_dim=hidden_dim, max_seq_len=max_seq_len, tied=tied), where)
    if version:
        r.at = LLAMA2C_HEADER
    return version, args, group_size


def read_tensor(r, name, quantised, floats, shape):
    """
    Return one tensor in float32. floats: (offset, bytes) of its values, or of the scales of its
    groups if it is quantised; quantised: (offset, bytes) of its int8 values, or None.
    """
    w = r.bytes_at(*floats).view("<f4").astype(np.float32)
    if quantised:
        with np.errstate(over="ignore", invalid="ignore"):  # Reader.weights refuses the result
            w = r.bytes_at(*quantised).view(np.int8).reshape(len(w), -1) * w[:, None]
    return r.weights(name, w, shape)


def read_tokenizer_bin(path, vocab_size):
    """
    Return the Tokenizer of a tokenizer.bin. Ids 0, 1 and 2 become <unk>, <s> and </s>, regardless
    of their spelling in the file.
    """
    with reading(path, "a llama2.c tokenizer.bin", fail):
        r = Reader(path)
        pieces = [(b"<unk>", 0.0, UNKNOWN), (b"<s>", 0.0, CONTROL), (b"</s>", 0.0, CONTROL)]
        r.skip(4)  # length of the longest piece
        for i in range(vocab_size):
            score, length = r.unpack("<fI")
            piece = r.take(length).tobytes().replace(b" ", SPACE.encode())
            if i >= len(pieces):
                kind = BYTE if re.fullmatch(rb"<0x[0-9A-F]{2}>", piece) else NORMAL
                pieces.append((piece, score, kind))
        r.end()
        return tokenizer_of_pieces(pieces, (0, 1, 2), add_dummy_prefix=True,
                                   remove_extra_whitespaces=False, where=path)
