"""
Read GGUF files. https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""
import hashlib
import math
import re
from functools import partial
from pathlib import Path

import numpy as np

from engine.formats import rope
from engine.formats.layout import (
    ALIGNMENT,
    CHECKSUM,
    LIST_CHECKSUM,
    ROPE_FACTORS,
    SINGLE,
    TYPES,
    Type,
    gap,
    halves_to_interleaved,
    heads_in,
    tensors,
)
from engine.formats.reader import Reader, Tensors, checked, getter
from model import ModelArgs

# Keys ARCHITECTURE.* of a GGUF file: those that say something of the model or change nothing that it computes, and those that
# are fine with one value. All others are refused, as in run.c, since they may change it.
ARCHITECTURES = "llama", "qwen2", "qwen3"
KNOWN_KEYS = set("""vocab_size context_length embedding_length block_count feed_forward_length attention.head_count
    attention.head_count_kv attention.key_length attention.value_length attention.sliding_window
    attention.layer_norm_rms_epsilon rope.dimension_count rope.freq_base rope.scaling.type rope.scaling.factor
    rope.scale_linear rope.scaling.finetuned rope.scaling.original_context_length pooling_type tensor_data_layout""".split())
FIXED_KEYS = {"attention.causal": 1, "attention.clamp_kqv": 0, "attention.max_alibi_bias": 0, "expert_count": 0,
              "expert_used_count": 0, "rope.scaling.attn_factor": 1, "rope.scaling.yarn_beta_fast": 32,
              "rope.scaling.yarn_beta_slow": 1, "use_parallel_residual": 0}
LISTS = {f"tokenizer.ggml.{name}" for name in ("tokens", "scores", "token_type", "merges")}  # that are read; others are skipped
MAX_ENTRIES = 1 << 16  # tensors, and keys of metadata, in a GGUF file


def check_keys(reader, metadata, prefix):
    """Refuses what may change the numbers, and we don't know or can't."""
    for key, value in metadata.items():
        name = key.removeprefix(prefix)
        if name in FIXED_KEYS and name != key and value != FIXED_KEYS[name]:
            reader.fail(f"{key} is {value!r}, expected {FIXED_KEYS[name]}")
        if name != key and name not in KNOWN_KEYS and name not in FIXED_KEYS:
            reader.fail(f"{key[:80]!r} is unknown, and may change what the model computes")
    scale, factor = metadata.get(f"{prefix}rope.scale_linear"), f"{prefix}rope.scaling.factor"
    if scale is not None and metadata.get(factor, scale) != scale:
        reader.fail(f"{prefix}rope.scale_linear is {scale!r}, but {factor} {metadata[factor]!r}")
    if metadata.get("general.quantization_version", 2) != 2:
        reader.fail(f"general.quantization_version is {metadata['general.quantization_version']!r}, expected 2")


def check_list(reader, infos, args):
    """Each tensor of the list [(name, shape, type, offset)] must be the model's and appear once, and none may be missing."""
    if args.n_layers > len(infos):
        reader.fail(f"its {len(infos)} tensors are too few for {args.n_layers} layers")
    kinds = {kind.number: name for name, kind in TYPES.items()}
    listed, expected = {name: number for name, _, number, _ in infos}, {gguf: shape for _, gguf, _, shape in tensors(args)}
    for name, number in listed.items():
        if name not in expected and name != ROPE_FACTORS:
            reader.fail(f"tensor {name[:80]!r} ({kinds.get(number, f'type {number}')}) is no part of the model described")
    for name, shape in expected.items():
        if name not in listed:
            reader.fail(f"tensor {name} {shape} is missing")
    if len(listed) != len(infos):
        reader.fail("one of its tensors appears twice")


def gguf_args(reader, metadata, names):
    """The ModelArgs that GGUF metadata and the names of the tensors describe, without what a tensor says of positions."""
    kind = metadata.get("general.architecture")
    if kind not in ARCHITECTURES:
        reader.fail(f"architecture {kind!r}, expected {' or '.join(map(repr, ARCHITECTURES))}")
    check_keys(reader, metadata, f"{kind}.")
    found = getter(metadata, reader.fail)

    def get(key, *rest):
        return found(f"{kind}.{key}", *rest)

    dim, n_heads = get("embedding_length", int), get("attention.head_count", int)
    usual = dim // n_heads
    head_width = get("attention.key_length", int, max(1, usual))
    args = checked(ModelArgs(
        dim=dim, n_layers=get("block_count", int), n_heads=n_heads, n_kv_heads=get("attention.head_count_kv", int, n_heads),
        head_width=0 if head_width == usual else head_width, tied="output.weight" not in names,
        vocab_size=len(found("tokenizer.ggml.tokens", list)), hidden_dim=get("feed_forward_length", int),
        max_seq_len=get("context_length", int), norm_eps=get("attention.layer_norm_rms_epsilon", float),
        rope_theta=get("rope.freq_base", float, 10000.0), qkv_bias="blk.0.attn_q.bias" in names, qk_norm=kind == "qwen3"),
        reader.fail)
    for key, missing in (("rope.dimension_count", args.head_dim), ("attention.value_length", usual)):
        if metadata.get(f"{kind}.{key}", missing) != args.head_dim:
            reader.fail(f"{kind}.{key} is {metadata.get(f'{kind}.{key}', missing)}, expected the head width {args.head_dim}")
    window = metadata.get(f"{kind}.attention.sliding_window", 0)
    if window != 0 and not (type(window) is int and window >= args.max_seq_len):
        reader.fail(f"{kind}.attention.sliding_window is {window!r}, expected none or the context of {args.max_seq_len}")
    vars(args).update(gguf_rope(metadata.get(f"{kind}.rope.scaling.type", "linear"), get, args, reader.fail))
    return checked(args, reader.fail)


def gguf_rope(scaling, get, args, refuse):
    """{setting of ModelArgs: value} of the keys of a scaling of rotary positions; get: reads one behind the architecture's name."""
    if scaling not in ("none", "linear", "yarn"):
        refuse(f"rope scaling {scaling!r}, expected linear, yarn or none")
    factor = get("rope.scaling.factor", float, get("rope.scale_linear", float, 1.0))  # the latter is the older name
    if scaling == "none":
        return {}
    if scaling == "linear":
        return {"rope_scaling": factor}
    if args.rope_theta <= 1:
        refuse(f"rope.freq_base is {args.rope_theta}, expected more than 1 with yarn")
    context = get("rope.scaling.original_context_length", int, args.max_seq_len)
    factors = rope.yarn(args.head_dim, args.rope_theta, factor, context)
    return {"rope_factors": factors, "rope_attention": rope.yarn_attention(factor)}


def known_type(reader, name, number):
    """The Type of a tensor; those of ggml that export.py doesn't write are decoded by the gguf package."""
    known = next((kind for kind in TYPES.values() if kind.number == number), None)
    if known:
        return known
    try:
        import gguf
        kind = gguf.GGMLQuantizationType(number)
        block, size = gguf.GGML_QUANT_SIZES[kind]
        gguf.quants.dequantize(np.zeros(size, np.uint8), kind)
    except (ImportError, ValueError, KeyError, NotImplementedError):
        reader.fail(f"{name} has type {number}, expected one of {', '.join(TYPES)}, or one that the gguf package reads: "
                    "pip install gguf")
    return Type(number, block, size, SINGLE, None, lambda raw: gguf.quants.dequantize(raw.reshape(-1, size), kind).reshape(-1))


def read_gguf(path):
    """(Tensors in float32, ModelArgs, {metadata key: value}) of a GGUF file; a damaged one ends in one line."""
    r = Reader(path)
    metadata, infos, listed = gguf_head(r)
    if metadata.get("split.count", 1) != 1:
        first = re.sub(r"-\d{5}-of-", "-00001-of-", Path(path).name)
        r.fail(f"part {metadata.get('split.no', 0) + 1} of {metadata['split.count']} of a split model; join them: "
               f"llama-gguf-split --merge {first} joined.gguf")
    alignment = getter(metadata, r.fail)("general.alignment", int, ALIGNMENT)
    args = gguf_args(r, metadata, {name for name, *_ in infos})
    check_list(r, infos, args)
    r.take(gap(r.at, alignment))
    if CHECKSUM in metadata and listed and metadata[CHECKSUM] != r.sha256():
        r.fail("damaged, its tensors are not what was exported (their checksum differs)")
    reads = gguf_tensors(r, infos, args, alignment, metadata["general.architecture"] != "llama")
    if ROPE_FACTORS in reads:
        both = reads.pop(ROPE_FACTORS)().numpy() * np.array(args.rope_factors or (1.0,))
        args.rope_factors = rope.factors(both)
    return Tensors(reads, path), checked(args, r.fail), metadata


def gguf_head(r):
    """({metadata key: value}, [(name, shape, type, offset)] of the tensors, whether that list is as it was exported)."""
    magic, version, n_tensors, n_metadata = r.unpack("<4sIQQ")
    if magic != b"GGUF" or version not in (2, 3):
        r.fail(f"magic {magic!r} and version {version}, expected b'GGUF' and 2 or 3")
    if max(n_tensors, n_metadata) > MAX_ENTRIES:
        r.fail(f"{n_tensors:,} tensors and {n_metadata:,} keys of metadata, expected at most {MAX_ENTRIES:,} of each")
    metadata = {}
    for _ in range(n_metadata):
        key = r.string().decode(errors="replace")
        metadata[key] = r.value(*r.unpack("<I"), wanted=key in LISTS)
    before = r.at
    infos = [(r.string().decode(errors="replace"), r.unpack(f"<{min(*r.unpack('<I'), 4)}Q")[::-1], *r.unpack("<IQ"))
             for _ in range(n_tensors)]  # (name, shape, type, offset)
    return metadata, infos, metadata.get(LIST_CHECKSUM) in (None, hashlib.sha256(r.data[before:r.at]).hexdigest())


def is_gguf_of_ours(path):
    """Whether export.py wrote a file: programs that make another of it keep its checksums, which then don't fit."""
    r = Reader(path)
    if r.data[:4].tobytes() != b"GGUF":
        return False
    metadata, _, listed = gguf_head(r)
    return LIST_CHECKSUM in metadata and listed


def gguf_tensors(r, infos, args, alignment, halves):
    """{our name: what reads the tensor}, from the Reader's place on. halves: its heads have Hugging Face's order of rows."""
    start, reads = r.at, {}
    ours = {gguf: (name, shape) for name, gguf, _, shape in tensors(args)} | {ROPE_FACTORS: (ROPE_FACTORS, (args.head_dim // 2,))}
    for gguf, shape, number, offset in infos:
        kind = known_type(r, gguf, number)
        r.take(gap(r.at - start, alignment))
        name, expected = ours[gguf]
        if shape != expected or shape[-1] % kind.block or offset != r.at - start:
            r.fail(f"{gguf} has shape {shape} at offset {offset}, expected {expected} at {r.at - start}")
        place = r.place(math.prod(shape) // kind.block * kind.size)
        reads[name] = partial(gguf_tensor, r, gguf, kind, place, shape, heads_in(name, args) if halves else 0)
    if len(r.data) not in (r.at, r.at + gap(r.at - start, alignment)):
        r.fail(f"holds {len(r.data)} bytes, its header implies {r.at}")
    return reads


@np.errstate(all="ignore")  # `weights` looks at what comes out
def gguf_tensor(r, name, kind, place, shape, heads):
    return halves_to_interleaved(r.weights(name, kind.decode(r.bytes_at(*place)), shape), heads)
