"""
Read GGUF files. https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""
import hashlib
import math
import re
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
import torch

from configurator import fail
from engine.formats import quant, rope
from engine.formats.layout import (
    ALIGNMENT,
    CHECKSUM,
    LIST_CHECKSUM,
    ROPE_FACTORS,
    SINGLE,
    TYPES,
    Type,
    check_tensors,
    halves_to_interleaved,
    heads_in,
    padding_to,
    tensors,
)
from engine.formats.reader import Reader, Tensors, checked, getter, plausible
from engine.untrusted import reading
from model import ModelArgs

ARCHITECTURES = "llama", "qwen2", "qwen3"
# Metadata keys under the architecture's prefix. check_keys accepts KNOWN_KEYS with any value, since
# model_args checks the values that matter. check_keys accepts FIXED_KEYS, and three keys that
# model_args adds, only with the expected value. Any other key may change what the model computes,
# so a file that has one is refused. runtime/gguf.c has the same keys.
KNOWN_KEYS = set("""
    vocab_size context_length embedding_length block_count feed_forward_length attention.head_count
    attention.head_count_kv attention.key_length attention.sliding_window
    attention.layer_norm_rms_epsilon rope.freq_base rope.scaling.type rope.scaling.factor
    rope.scaling.finetuned rope.scaling.original_context_length pooling_type tensor_data_layout
    """.split())
FIXED_KEYS = {
    "attention.causal": 1, "attention.clamp_kqv": 0, "attention.max_alibi_bias": 0,
    "expert_count": 0, "expert_used_count": 0, "rope.scaling.attn_factor": 1,
    "rope.scaling.yarn_beta_fast": 32, "rope.scaling.yarn_beta_slow": 1, "use_parallel_residual": 0,
}
# Lists in the metadata that are read; the entries of all others are skipped.
LISTS = {f"tokenizer.ggml.{name}" for name in ("tokens", "scores", "token_type", "merges")}
MAX_ENTRIES = 1 << 16  # max number of tensors, and of metadata keys


def read_gguf(path):
    """
    Return (Tensors in float32, ModelArgs, {metadata key: value}) of a GGUF file. Exit with a
    message if the file is damaged or describes a model that model.py cannot compute.
    """
    with reading(path, "a GGUF file", fail):
        r = Reader(path)
        metadata, infos, list_matches = read_header(r)
        if metadata.get("split.count", 1) != 1:
            first = re.sub(r"-\d{5}-of-", "-00001-of-", Path(path).name)
            part = metadata.get("split.no", 0) + 1
            r.fail(f"part {part} of {metadata['split.count']} of a split model; join them: "
                   f"llama-gguf-split --merge {first} joined.gguf")
        args = model_args(r, metadata, {name for name, *_ in infos})
        check_list(r, infos, args)
        alignment = getter(metadata, path)("general.alignment", int, ALIGNMENT)
        r.take(padding_to(r.at, alignment))
        # If the list does not match, another program derived this file and copied our metadata, so
        # CHECKSUM is not the checksum of its tensors.
        if list_matches and CHECKSUM in metadata and metadata[CHECKSUM] != r.sha256():
            r.fail("damaged: its tensors are not those exported, their checksum differs")
        halves = metadata["general.architecture"] != "llama"
        readers, q8_0 = tensor_readers(r, infos, args, alignment, halves)
        if ROPE_FACTORS in readers:
            stored = readers.pop(ROPE_FACTORS)().numpy()
            args.rope_factors = rope.factors(stored * np.array(args.rope_factors or (1.0,)))
        return Tensors(readers, path, q8_0), checked(args, path), metadata


def read_header(r):
    """
    Read the metadata and the list of tensors. Return ({key: value}, [(name, shape, type number,
    offset)], whether the list matches its checksum). Without a checksum the list matches.
    """
    magic, version, n_tensors, n_keys = r.unpack("<4sIQQ")
    if magic != b"GGUF" or version not in (2, 3):
        r.fail(f"magic {magic!r} and version {version}, expected b'GGUF' and 2 or 3")
    if max(n_tensors, n_keys) > MAX_ENTRIES:
        r.fail(f"{n_tensors:,} tensors and {n_keys:,} keys of metadata, expected at most "
               f"{MAX_ENTRIES:,} of each")
    metadata, infos = {}, []
    for _ in range(n_keys):
        key = r.string().decode(errors="replace")
        metadata[key] = r.value(*r.unpack("<I"), wanted=key in LISTS)
    start = r.at
    for _ in range(n_tensors):
        name = r.string().decode(errors="replace")
        n_dims = min(*r.unpack("<I"), 4)  # GGUF's max; check_list refuses more than 2 dimensions
        shape = r.unpack(f"<{n_dims}Q")[::-1]
        infos.append((name, shape, *r.unpack("<IQ")))
    digest = hashlib.sha256(r.data[start:r.at]).hexdigest()
    return metadata, infos, metadata.get(LIST_CHECKSUM, digest) == digest


def is_gguf_of_ours(path):
    """
    Return whether export.py wrote this file. A program that derives another model from such a file
    copies the metadata, but its list of tensors does not match the copied checksum.
    """
    r = Reader(path)
    if r.data[:4].tobytes() != b"GGUF":
        return False
    with reading(path, "a GGUF file", fail):
        metadata, _, list_matches = read_header(r)
    return LIST_CHECKSUM in metadata and list_matches


def model_args(r, metadata, names):
    """
    Return the ModelArgs that the metadata and the names of the tensors describe. If the file has
    the tensor ROPE_FACTORS, read_gguf multiplies rope_factors by it later.
    """
    kind = metadata.get("general.architecture")
    if kind not in ARCHITECTURES:
        r.fail(f"architecture {kind!r}, expected {' or '.join(map(repr, ARCHITECTURES))}")
    get_any = getter(metadata, r.path)

    def get(key, *rest):
        return get_any(f"{kind}.{key}", *rest)

    dim, n_heads, context = (get(key, int) for key in (
        "embedding_length", "attention.head_count", "context_length"))
    default_width = dim // n_heads
    head_width = get("attention.key_length", int, max(1, default_width))
    # ModelArgs derives the head width dim / n_heads only if there is no remainder, so compare the
    # product: with dim 33 and 2 heads, a stored width of 16 is not implied, although it is 33 // 2.
    is_implied = f"{kind}.attention.key_length" not in metadata or head_width * n_heads == dim
    args = checked(ModelArgs(
        dim=dim,
        n_layers=get("block_count", int),
        n_heads=n_heads,
        n_kv_heads=get("attention.head_count_kv", int, n_heads),
        head_width=0 if is_implied else head_width,
        vocab_size=len(get_any("tokenizer.ggml.tokens", list)),
        hidden_dim=get("feed_forward_length", int),
        max_seq_len=context,
        norm_eps=get("attention.layer_norm_rms_epsilon", float),
        rope_theta=get("rope.freq_base", float, 10000.0),
        tied="output.weight" not in names,
        qkv_bias="blk.0.attn_q.bias" in names,
        qk_norm=kind == "qwen3"), r.path)
    window = metadata.get(f"{kind}.attention.sliding_window", 0)
    if window != 0 and not (type(window) is int and window >= context):
        r.fail(f"{kind}.attention.sliding_window is {window!r}, expected none or the context of "
               f"{context}")
    # rope.scale_linear is the older name of rope.scaling.factor.
    factor = get("rope.scaling.factor", float, get("rope.scale_linear", float, 1.0))
    expected = FIXED_KEYS | {
        "rope.scale_linear": factor,
        "rope.dimension_count": args.head_dim,
        "attention.value_length": args.head_dim,
    }
    # Without attention.value_length, the value heads have the default width even if
    # attention.key_length differs. model.py has one width for both, so such a file is refused.
    check_keys(r, {f"{kind}.attention.value_length": default_width} | metadata, kind, expected)
    scaling = metadata.get(f"{kind}.rope.scaling.type", "linear")
    vars(args).update(rope_settings(r, scaling, factor, get, args))
    return checked(args, r.path)


def check_keys(r, metadata, kind, expected):
    """
    Exit with a message if a key under the prefix of the architecture `kind` is unknown, or if a
    value differs from the one in `expected`: the model may compute something else.
    """
    expected = {f"{kind}.{key}": value for key, value in expected.items()}
    expected["general.quantization_version"] = 2
    for key, value in metadata.items():
        prefix, _, name = key.partition(".")
        unknown = prefix == kind and name not in KNOWN_KEYS and key not in expected
        if unknown or key in expected and value != expected[key]:
            wanted = expected.get(key, "no such key: it may change what the model computes")
            r.fail(f"{key[:80]!r} is {repr(value)[:80]}, expected {wanted}")


def rope_settings(r, scaling, factor, get, args):
    """
    Return {setting of ModelArgs: value} for rotary embeddings that are scaled by `factor`. scaling:
    "none", "linear" or "yarn"; get: function that returns the value of a metadata key.
    """
    if scaling not in ("none", "linear", "yarn"):
        r.fail(f"rope scaling {scaling!r}, expected linear, yarn or none")
    if scaling == "none":
        return {}
    if scaling == "linear":
        return {"rope_scaling": factor}
    context = get("rope.scaling.original_context_length", int, args.max_seq_len)
    return {"rope_factors": rope.yarn(args.head_dim, args.rope_theta, factor, context),
            "rope_attention": rope.yarn_attention(factor)}


def check_list(r, infos, args):
    """Exit with a message unless the list has exactly the model's tensors, each of them once."""
    found = {name: shape for name, shape, *_ in infos}
    if len(found) != len(infos):
        r.fail("one of its tensors is listed twice")
    optional = [(ROPE_FACTORS, (args.head_dim // 2,))] if ROPE_FACTORS in found else []
    names_and_shapes = ((gguf_name, shape) for _, gguf_name, _, shape in tensors(args))
    check_tensors(found, chain(names_and_shapes, optional), r.path)


def find_type(r, name, number):
    """
    Return the Type for ggml's type number. The gguf package decodes types that export.py does not
    write. r, name: file and tensor, for messages.
    """
    known = next((kind for kind in TYPES.values() if kind.number == number), None)
    if known:
        return known
    problem = f"{name} has type {number}, expected one of {', '.join(TYPES)}"
    try:
        import gguf
    except ImportError:
        r.fail(f"{problem}; other types need: pip install gguf")
    try:
        kind = gguf.GGMLQuantizationType(number)  # ValueError: the package does not know the type
        block, size = gguf.GGML_QUANT_SIZES[kind]
        gguf.quants.dequantize(np.zeros(size, np.uint8), kind)  # a trial with one block
    except (ValueError, NotImplementedError):
        r.fail(f"{problem}, or another that the gguf package decodes")

    def decode(raw):
        return gguf.quants.dequantize(raw.reshape(-1, size), kind).reshape(-1)

    return Type(number, block, size, largest=SINGLE, encode=None, decode=decode)


def tensor_readers(r, infos, args, alignment, halves):
    """
    Return {name in model.py: function that reads the tensor} for the listed tensors, whose data
    begins at the Reader's position, and {name: function that reads the blocks} for those in Q8_0.
    Exit with a message if the offsets are not those of adjacent, aligned tensors. halves: whether
    the rows of each head are in Hugging Face's order and must be reordered to model.py's (see
    halves_to_interleaved).
    """
    start, readers, q8_0 = r.at, {}, {}
    names = {gguf_name: ours for ours, gguf_name, _, _ in tensors(args)}
    names[ROPE_FACTORS] = ROPE_FACTORS
    for gguf_name, shape, number, offset in infos:
        kind, name = find_type(r, gguf_name, number), names[gguf_name]
        r.take(padding_to(r.at - start, alignment))
        if shape[-1] % kind.block or offset != r.at - start:
            r.fail(f"{gguf_name} has rows of {shape[-1]} values at offset {offset}, expected a "
                   f"multiple of {kind.block} at {r.at - start}")
        place = r.skip(math.prod(shape) // kind.block * kind.size)
        heads = heads_in(name, args) if halves else 0
        readers[name] = partial(read_tensor, r, gguf_name, kind, place, shape, heads)
        if kind is TYPES["q8_0"] and len(shape) == 2:
            q8_0[name] = partial(read_q8_0, r, gguf_name, place, shape, heads)
    r.end(padding_to(r.at - start, alignment))
    return readers, q8_0


@np.errstate(all="ignore")  # Reader.weights refuses NaN and infinity
def read_tensor(r, name, kind, place, shape, heads):
    """Return one tensor in float32, with the rows of heads in model.py's order."""
    w = r.weights(name, kind.decode(r.bytes_at(*place)), shape)
    return halves_to_interleaved(w, heads)


@np.errstate(all="ignore")
def read_q8_0(r, name, place, shape, heads):
    """Return the int8 values (R, C) and the float16 scales (R, C / 32) of a matrix in Q8_0."""
    blocks = r.bytes_at(*place).view(quant.Q8_0)
    q = torch.from_numpy(blocks["q"].reshape(shape))
    d = torch.from_numpy(blocks["d"].reshape(shape[0], -1))
    return (halves_to_interleaved(q, heads),
            halves_to_interleaved(plausible(name, d, r.path), heads))
