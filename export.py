"""
Checkpoint ⇄ model file.

    python export.py out/my                      the best checkpoint of a run as out/my/model.gguf
    python export.py out/my --dtype=q8_0         ... in 8 bits
    python export.py out/my --format=v2          out/my/model.bin and tokenizer.bin, for llama2.c and its ports
    python export.py out/my --format=hf          out/my/hf, a Hugging Face folder
    python export.py model.gguf --dtype=q4_0 --path=small.gguf
    python export.py stories15M.bin --tokenizer=tokenizer.bin    a llama2.c model as GGUF

The formats: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, https://huggingface.co/docs/safetensors, and
export.py of https://github.com/karpathy/llama2.c. A file is written tensor by tensor under a temporary name, then renamed.
"""
import hashlib
import json
import math
import mmap
import re
import struct
from collections import ChainMap
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from configurator import configure, fail  # first: it answers for packages that are missing

import numpy as np
import torch
from sentencepiece import sentencepiece_model_pb2

from engine import checkpoint, sizes
from engine.files import replacing, write_atomic
from model import ModelArgs, Transformer
from tokenizer import BYTE, CONTROL, NORMAL, SPACE, UNKNOWN, UNUSED, USER_DEFINED, Bytes, SentencePiece, Tokenizer

out_dir = "out"    # what to export: the folder of a run, or of runs (the newest), a step folder, a GGUF or llama2.c file
format = "gguf"    # gguf; v0, v1, v2 (llama2.c: legacy float32, float32, int8 in groups); hf (a Hugging Face folder)
dtype = "f32"      # of the matrices in gguf: f32, f16, bf16, q8_0 or q4_0; in hf: f32, f16 or bf16
group_size = 64    # values that share a scale in v2; halved until it divides dim
tokenizer = ""     # the vocabulary of a llama2.c file: a tokenizer.model, tokenizer.json or tokenizer.bin
path = ""          # where to write; empty: beside what is exported

# Our name, GGUF's, Hugging Face's, shape. N: layer. V vocabulary, D width, K width of keys and values, F hidden width.
TENSORS = [
    ("tok_embeddings",            "token_embd",        "model.embed_tokens",                       "VD"),
    ("layers.N.attention_norm",   "blk.N.attn_norm",   "model.layers.N.input_layernorm",           "D"),
    ("layers.N.attention.wq",     "blk.N.attn_q",      "model.layers.N.self_attn.q_proj",          "DD"),
    ("layers.N.attention.wk",     "blk.N.attn_k",      "model.layers.N.self_attn.k_proj",          "KD"),
    ("layers.N.attention.wv",     "blk.N.attn_v",      "model.layers.N.self_attn.v_proj",          "KD"),
    ("layers.N.attention.wo",     "blk.N.attn_output", "model.layers.N.self_attn.o_proj",          "DD"),
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
# Keys llama.* of a GGUF file: those that say something of the model or change nothing that it computes, and those that are
# fine with one value. All others are refused, as in run.c, since they may change it.
KNOWN_KEYS = set("""vocab_size context_length embedding_length block_count feed_forward_length attention.head_count
    attention.head_count_kv attention.key_length attention.value_length attention.sliding_window
    attention.layer_norm_rms_epsilon rope.dimension_count rope.freq_base rope.scaling.type rope.scaling.factor
    rope.scale_linear rope.scaling.finetuned rope.scaling.original_context_length pooling_type tensor_data_layout""".split())
FIXED_KEYS = {"attention.causal": 1, "attention.clamp_kqv": 0, "attention.max_alibi_bias": 0, "expert_count": 0,
              "expert_used_count": 0, "rope.scaling.attn_factor": 1, "use_parallel_residual": 0}
ALIGNMENT = 32
MAX_CONTEXT = 1 << 20  # the longest context we believe a file


def tensors(args, rows=TENSORS):
    """(our name, GGUF's, Hugging Face's, shape) of every tensor of a model, each row for all layers in turn."""
    size = {"V": args.vocab_size, "D": args.dim, "K": args.n_kv_heads * args.head_dim, "F": args.hidden_dim}
    for *names, shape in rows:
        if names[0] != "output" or not args.tied:
            for n in range(args.n_layers if "N" in names[0] else 1):
                yield (*(f"{name}.weight".replace("N", str(n)) for name in names), tuple(size[c] for c in shape))


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


def floats(name, tensor, largest=SINGLE):
    """Yields a tensor (any shape), some rows at a time, as flat float32 arrays that hold nothing beyond `largest`."""
    rows = tensor.detach().reshape(-1, tensor.shape[-1])
    for part in rows.split(max(1, (1 << 20) // rows.shape[1])):
        x = part.to("cpu", torch.float32).reshape(-1).numpy()
        if not np.abs(x).max() <= largest:  # NaN is not, either
            fail(f"{name} holds {np.abs(x).max()}, expected finite weights of at most {largest:.6g}; "
                 f"the run has diverged, or --dtype=f32 is needed")
        yield x


def encoded(name, tensor, dtype):
    """Yields the bytes of a tensor as `dtype`, some rows at a time."""
    for x in floats(name, tensor, TYPES[dtype].largest):
        yield TYPES[dtype].encode(x).tobytes()


# ---- writing

def gap(position, alignment):
    """Bytes of padding from a position to the next multiple of the alignment."""
    return -position % alignment


def gguf_string(text):
    data = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(data)) + data


def gguf_value(value, in_list=False):
    """(GGUF's number of the type, bytes) of a bool, int, float, str or bytes, or a list of one of them."""
    if isinstance(value, bool):
        return 7, struct.pack("<?", value)
    if isinstance(value, int):  # counts are unsigned; token types, the one list of ints, are signed by convention
        return (5, struct.pack("<i", value)) if in_list else (4, struct.pack("<I", value))
    if isinstance(value, float):
        return 6, struct.pack("<f", value)
    if isinstance(value, list):
        parts = [gguf_value(v, in_list=True) for v in value]
        return 9, struct.pack("<IQ", parts[0][0], len(parts)) + b"".join(data for _, data in parts)
    return 8, gguf_string(value)


def gguf_tokenizer(vocabulary):
    """
    The name of the encoder that llama.cpp shall use. "llama", its sentencepiece BPE, ends the program at a character
    that is no piece where no byte pieces are; "t5", its unigram encoder, gives <unk> for a run of those, and for pieces
    of one character, which nothing merges, it is the same otherwise. NO_BYTES is a name that llama.cpp refuses.
    """
    if any(kind == BYTE for _, _, kind in vocabulary.pieces()):
        return "llama"
    return "t5" if of_characters(vocabulary) else NO_BYTES


def of_characters(vocabulary):
    """Whether all pieces are specials or single characters, and no space is put before a text or taken out of it."""
    plain = not vocabulary.add_dummy_prefix and not vocabulary.remove_extra_whitespaces
    return plain and all(kind in (UNKNOWN, CONTROL) or kind == NORMAL and len(piece.decode()) == 1
                         for piece, _, kind in vocabulary.pieces())


def gguf_metadata(args, vocabulary, dtype, name, infos, extra):
    pieces, scores, types = (list(column) for column in zip(*vocabulary.pieces()))
    scaling = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": float(args.rope_scaling)}
    return {
        CHECKSUM: "0" * 64,  # first, so that its place in the file is known when the sum is
        LIST_CHECKSUM: hashlib.sha256(infos).hexdigest(),
        "general.architecture": "llama",
        "general.name": name,
        "general.alignment": ALIGNMENT,
        "general.file_type": TYPES[dtype].file_type,
        **({"general.quantization_version": 2} if TYPES[dtype].block > 1 else {}),
        "llama.vocab_size": args.vocab_size,
        "llama.context_length": args.max_seq_len,
        "llama.embedding_length": args.dim,
        "llama.block_count": args.n_layers,
        "llama.feed_forward_length": args.hidden_dim,
        "llama.attention.head_count": args.n_heads,
        "llama.attention.head_count_kv": args.n_kv_heads,
        "llama.attention.layer_norm_rms_epsilon": float(args.norm_eps),
        "llama.rope.dimension_count": args.head_dim,
        "llama.rope.freq_base": float(args.rope_theta),
        **(scaling if args.rope_scaling != 1 else {}),
        "tokenizer.ggml.model": gguf_tokenizer(vocabulary),
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.scores": [float(score) for score in scores],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": vocabulary.bos_id,
        "tokenizer.ggml.eos_token_id": vocabulary.eos_id,
        "tokenizer.ggml.unknown_token_id": vocabulary.unk_id,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": False,
        "tokenizer.ggml.add_space_prefix": vocabulary.add_dummy_prefix,
        "tokenizer.ggml.remove_extra_whitespaces": vocabulary.remove_extra_whitespaces,
        **extra,
    }


def gguf_type(name, shape, dtype):
    """
    The type a tensor has in a GGUF file of `dtype`. Norms, and rows that don't fill blocks, stay float32. Among 4-bit
    matrices the embedding and the classifier keep 8 bits, because precision is worth most there.
    """
    if len(shape) == 1 or shape[-1] % TYPES[dtype].block:
        return "f32"
    return "q8_0" if dtype == "q4_0" and name in ("tok_embeddings.weight", "output.weight") else dtype


def gguf_header(args, vocabulary, dtype, name, layout, extra):
    """GGUF version 3: counts, metadata, names, shapes, types and places of the tensors, padding."""
    infos, offset = b"", 0
    for _, gguf, shape, kind in layout:
        infos += gguf_string(gguf) + struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        infos += struct.pack("<IQ", TYPES[kind].number, offset)
        offset += math.prod(shape) // TYPES[kind].block * TYPES[kind].size
        offset += gap(offset, ALIGNMENT)
    metadata = gguf_metadata(args, vocabulary, dtype, name, infos, extra)
    header = b"GGUF" + struct.pack("<IQQ", 3, len(layout), len(metadata))
    for key, value in metadata.items():
        number, data = gguf_value(value)
        header += gguf_string(key) + struct.pack("<I", number) + data
    header += infos
    return header + bytes(gap(len(header), ALIGNMENT))


def write_gguf(path, state, args, vocabulary, dtype, name, extra):
    """The header, then the tensors, each padded to the alignment."""
    layout = [(ours, gguf, shape, gguf_type(ours, shape, dtype)) for ours, gguf, _, shape in tensors(args)]
    header = gguf_header(args, vocabulary, dtype, name, layout, extra)
    digest = hashlib.sha256()
    with replacing(path) as f:
        f.write(header)
        for ours, _, _, kind in layout:
            for data in encoded(ours, state[ours], kind):
                f.write(data)
                digest.update(data)
            padding = bytes(gap(f.tell(), ALIGNMENT))
            f.write(padding)
            digest.update(padding)
        f.seek(header.index(b"0" * 64))
        f.write(digest.hexdigest().encode())


def check_llama2c(args, vocabulary, version, group_size):
    """The group size that fits dim; says, in one line each, what these formats can't."""
    for key, standard in (("norm_eps", 1e-5), ("rope_theta", 10000.0), ("rope_scaling", 1.0)):
        if getattr(args, key) != standard:
            fail(f"the model has {key}={getattr(args, key)}, llama2.c's formats imply {standard}; use --format=gguf")
    if group_size < 1:
        fail(f"--group_size={group_size}: expected at least 1, such as 64")
    asked = group_size
    while args.dim % group_size:
        group_size //= 2
    if version == 2 and group_size != asked:
        print(f"groups of {group_size}: {asked} does not divide dim={args.dim}")
    if version == 2 and args.hidden_dim % group_size:
        print(f"groups of {group_size} run across the rows of w2, hidden_dim={args.hidden_dim}: run reads that, "
              f"llama2.c's runq does not; for it choose a --group_size that divides {args.dim} and {args.hidden_dim}")
    if vocabulary and not vocabulary.add_dummy_prefix:
        print("llama2.c's tokenizer.bin implies a space before every text, this vocabulary has none; "
              "--format=gguf can say so")
    return group_size


def frequency_tables(args):
    """cos and sin (max_seq_len, Q/2) as v0 stores them, in float32 throughout like llama2.c; readers skip them."""
    i = torch.arange(0, args.head_dim, 2).float()
    angle = torch.outer(torch.arange(args.max_seq_len), 1.0 / (args.rope_theta ** (i / args.head_dim))).float()
    return angle.cos(), angle.sin()


def to_groups(x, group_size):
    """float32 -> int8 (n, group_size) and float32 scales (n,), rounded as llama2.c does: ties to even."""
    groups = x.reshape(-1, group_size)
    scale = np.abs(groups).max(axis=1) / np.float32(127)
    return np.rint(groups / np.where(scale == 0, 1, scale)[:, None]).astype(np.int8), scale


def write_llama2c(path, state, args, version, group_size):
    """llama2.c version 0, 1 or 2: a header of ints, then the tensors, each for all layers in turn."""
    header = struct.pack("<7i", args.dim, args.hidden_dim, args.n_layers, args.n_heads, args.n_kv_heads,
                         args.vocab_size if version or args.tied else -args.vocab_size, args.max_seq_len)
    if version:
        header = struct.pack("<Ii", LLAMA2C_MAGIC, version) + header + struct.pack("<B", args.tied)
        header += struct.pack("<i", group_size) if version == 2 else b""
        header += bytes(LLAMA2C_HEADER - len(header))
    with replacing(path) as f:
        f.write(header)
        for name, _, _, shape in tensors(args, LLAMA2C_V1 if version else LLAMA2C_V0):
            if version == 2 and len(shape) == 2:
                q, scale = to_groups(np.concatenate(list(floats(name, state[name]))), group_size)
                f.write(q.tobytes() + scale.tobytes())
            else:
                f.writelines(encoded(name, state[name], "f32"))
            if version == 0 and name == "norm.weight":
                f.writelines(table.numpy().tobytes() for table in frequency_tables(args))


def interleaved_to_halves(w, n_heads):
    """The rows of wq or wk from pairs (2i, 2i+1) in each head to Hugging Face's pairs (i, i + Q/2)."""
    return w.unflatten(0, (n_heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def write_safetensors(path, state, args, dtype):
    """The tensors under Hugging Face's names: uint64 length of a JSON header, the header, the data."""
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for _, _, hf, shape in tensors(args):
        size = math.prod(shape) * TYPES[dtype].size
        header[hf] = {"dtype": dtype.upper(), "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * gap(len(text), 8)
    heads = {"wq": args.n_heads, "wk": args.n_kv_heads}
    with replacing(path) as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for name, _, _, _ in tensors(args):
            w, kind = state[name], name.split(".")[-2]
            f.writelines(encoded(name, interleaved_to_halves(w, heads[kind]) if kind in heads else w, dtype))


def write_hf(path, state, args, vocabulary, dtype):
    """
    A Hugging Face folder: model.safetensors, config.json, generation_config.json and the tokenizer. A text that holds
    "<s>" holds three letters, as everywhere here (split_special_tokens); generation ends where sample.py's does.
    """
    folder = Path(path)
    folder.mkdir(exist_ok=True)
    write_safetensors(folder / "model.safetensors", state, args, dtype)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
        "hidden_size": args.dim, "intermediate_size": args.hidden_dim, "num_hidden_layers": args.n_layers,
        "num_attention_heads": args.n_heads, "num_key_value_heads": args.n_kv_heads, "head_dim": args.head_dim,
        "vocab_size": args.vocab_size, "max_position_embeddings": args.max_seq_len, "rms_norm_eps": args.norm_eps,
        "rope_theta": args.rope_theta, "tie_word_embeddings": args.tied,
        "rope_scaling": {"rope_type": "linear", "factor": args.rope_scaling} if args.rope_scaling != 1 else None,
        "bos_token_id": vocabulary.bos_id, "eos_token_id": vocabulary.eos_id,
        "torch_dtype": {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}[dtype],
    }
    stop = {"eos_token_id": [vocabulary.eos_id, vocabulary.bos_id], "pad_token_id": vocabulary.eos_id}
    generation = {"bos_token_id": vocabulary.bos_id, **stop, "max_length": args.max_seq_len}
    name = [piece.decode() for piece, _, _ in vocabulary.pieces()]
    tokenizer = {
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": args.max_seq_len,
        "unk_token": name[vocabulary.unk_id], "bos_token": name[vocabulary.bos_id], "eos_token": name[vocabulary.eos_id],
        "split_special_tokens": True, "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
    }
    for file, values in (("config", config), ("generation_config", generation), ("tokenizer_config", tokenizer),
                         ("tokenizer", vocabulary.hugging_face())):
        write_atomic(folder / f"{file}.json", json.dumps(values, indent=1))
    if vocabulary.kind == "sentencepiece":
        vocabulary.save(folder / "tokenizer.model")


def differences(vocabulary, format):
    """Yields, a line each, where the readers of a format will not encode a text as this vocabulary does."""
    kinds = {kind for _, _, kind in vocabulary.pieces()}
    if vocabulary.normalizer != "identity":
        problem = "transformers combines accents otherwise" if format == "hf" else "model files can't say that"
        yield (f"the vocabulary rewrites text by {vocabulary.normalizer} and {problem}: "
               "unusual characters of a prompt may be encoded otherwise")
    if format == "gguf" and gguf_tokenizer(vocabulary) == NO_BYTES:
        yield "the vocabulary has no byte pieces, which llama.cpp needs: it will refuse this file, run reads it"
    elif format == "gguf" and vocabulary.remove_extra_whitespaces:
        yield "the vocabulary removes extra spaces, llama.cpp keeps them: it will encode such texts otherwise than run"
    if format == "gguf" and USER_DEFINED in kinds and vocabulary.add_dummy_prefix:
        yield "llama.cpp puts a space after each user-defined piece: it will encode texts with them otherwise than run"
    if format in ("gguf", "hf") and UNUSED in kinds:
        reader = "llama.cpp" if format == "gguf" else "transformers"
        yield f"the vocabulary has unused pieces, which {reader} does not take apart: it may encode texts otherwise than run"


def export_model(model_state, args, vocabulary, path, format="gguf", dtype="f32", group_size=64, name="llamac",
                 extra=None):
    """
    Write a model file. model_state: state_dict of a Transformer, args: its ModelArgs, vocabulary: its Tokenizer (None
    will do for v0, v1, v2), name: general.name, extra: more GGUF metadata. Raises OSError when the disk fails; what
    stood at `path` before is then untouched.
    """
    known = {"gguf": tuple(TYPES), "hf": ("f32", "f16", "bf16"), "v0": ("f32",), "v1": ("f32",), "v2": ("f32",)}
    if format not in known:
        fail(f"--format={format}: expected {' or '.join(known)}")
    if dtype not in known[format]:
        fail(f"--dtype={dtype}: expected {' or '.join(known[format])} with --format={format}")
    if vocabulary and vocabulary.vocab_size != args.vocab_size:
        fail(f"the vocabulary has {vocabulary.vocab_size} pieces and the model {args.vocab_size}, expected the same")
    if not vocabulary and format in ("gguf", "hf"):
        fail(f"--format={format} needs the vocabulary; give --tokenizer=tokenizer.model (or .json, or llama2.c's .bin)")
    for line in differences(vocabulary, format) if vocabulary else ():
        print(line)
    if format == "gguf":
        return write_gguf(path, model_state, args, vocabulary, dtype, name, extra or {})
    if format == "hf":
        return write_hf(path, model_state, args, vocabulary, dtype)
    group_size = check_llama2c(args, vocabulary, int(format[1]), group_size)
    write_llama2c(path, model_state, args, int(format[1]), group_size)
    if vocabulary:
        with replacing(Path(path).with_name("tokenizer.bin")) as f:
            vocabulary.export_bin(f.name)


# ---- reading

class Reader:
    """The bytes of a file, front to back; whatever goes beyond its end is one line."""
    SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}

    def __init__(self, path):
        self.path, self.at = path, 0
        try:
            self.data = np.memmap(path, np.uint8, "r")
        except (OSError, ValueError) as e:  # ValueError: empty
            fail(f"{path}: cannot be read ({getattr(e, 'strerror', None) or e})")

    def fail(self, problem):
        fail(f"{self.path}: {problem}")

    def take(self, count):
        """The next `count` bytes, a view."""
        if count > len(self.data) - self.at:
            self.fail(f"truncated or damaged, its {len(self.data)} bytes end in the middle of what its header implies")
        self.at += count
        return self.data[self.at - count:self.at]

    def unpack(self, pattern):
        return struct.unpack(pattern, self.take(struct.calcsize(pattern)).tobytes())

    def string(self):
        return self.take(self.unpack("<Q")[0]).tobytes()

    def weights(self, name, w, shape):
        """float32 w as a tensor of that shape."""
        if not np.isfinite(w).all():
            self.fail(f"{name} holds values that are not finite; damaged, or of a run that diverged")
        return torch.from_numpy(w.reshape(shape))

    def value(self, number):
        """The next value of GGUF's type `number`: bool, int, float, str, or a list, its strings as bytes."""
        if number == 8:
            return self.string().decode(errors="replace")
        if number == 9:
            number, count = self.unpack("<IQ")
            if number == 8:
                return [self.string() for _ in range(count)]
            kind = np.dtype(self.SCALARS.get(number) or self.fail(f"a list of type {number}, which GGUF has not"))
            return self.take(count * kind.itemsize).view(kind).tolist()
        value, = self.unpack(self.SCALARS.get(number) or self.fail(f"a value of type {number}, which GGUF has not"))
        return float(str(np.float32(value))) if number == 6 else value  # 1e-05, not the 9.99999974e-06 it is


def checked(reader, args, note=""):
    """args, or one line when no model we can hold has them."""
    problem = sizes.problem(args)
    if problem or args.max_seq_len > MAX_CONTEXT:
        reader.fail(note + (problem or f"a context of {args.max_seq_len} tokens, expected at most {MAX_CONTEXT}"))
    return args


def check_keys(reader, metadata):
    """Refuses what may change the numbers, and we don't know or can't."""
    for key, value in metadata.items():
        name = key.removeprefix("llama.")
        if name in FIXED_KEYS and name != key and value != FIXED_KEYS[name]:
            reader.fail(f"{key} is {value!r}, expected {FIXED_KEYS[name]}")
        if name != key and name not in KNOWN_KEYS and name not in FIXED_KEYS:
            reader.fail(f"{key[:80]!r} is unknown, and may change what the model computes")
    scale = metadata.get("llama.rope.scale_linear")
    if scale is not None and metadata.get("llama.rope.scaling.factor", scale) != scale:
        reader.fail(f"llama.rope.scale_linear is {scale!r}, but llama.rope.scaling.factor "
                    f"{metadata['llama.rope.scaling.factor']!r}")
    if metadata.get("general.quantization_version", 2) != 2:
        reader.fail(f"general.quantization_version is {metadata['general.quantization_version']!r}, expected 2")


def check_list(reader, infos, args):
    """Each tensor of the list [(name, shape, type, offset)] must be the model's and appear once, and none may be missing."""
    if args.n_layers > len(infos):
        reader.fail(f"its {len(infos)} tensors are too few for {args.n_layers} layers")
    kinds = {kind.number: name for name, kind in TYPES.items()}
    listed, expected = {name: number for name, _, number, _ in infos}, {gguf: shape for _, gguf, _, shape in tensors(args)}
    for name, number in listed.items():
        if name not in expected:
            reader.fail(f"tensor {name[:80]!r} ({kinds.get(number, f'type {number}')}) is no part of the model described")
    for name, shape in expected.items():
        if name not in listed:
            reader.fail(f"tensor {name} {shape} is missing")
    if len(listed) != len(infos):
        reader.fail("one of its tensors appears twice")


def gguf_args(reader, metadata, tied):
    """The ModelArgs that GGUF metadata describe."""
    def get(key, kind, default=None):
        value = metadata.get(key, default)
        if type(value) is not kind or (kind is not list and not 0 < value < math.inf):
            reader.fail(f"{key} is {value!r}, expected " + ("a list" if kind is list else f"a positive {kind.__name__}"))
        return value

    if metadata.get("general.architecture") != "llama":
        reader.fail(f"architecture {metadata.get('general.architecture')!r}, expected 'llama'")
    check_keys(reader, metadata)
    scaling, n_heads = metadata.get("llama.rope.scaling.type", "linear"), get("llama.attention.head_count", int)
    scale = get("llama.rope.scale_linear", float, 1.0)  # the older name
    if scaling not in ("none", "linear"):
        reader.fail(f"rope scaling {scaling!r}, expected linear or none")
    args = checked(reader, ModelArgs(
        dim=get("llama.embedding_length", int), n_layers=get("llama.block_count", int), n_heads=n_heads,
        n_kv_heads=get("llama.attention.head_count_kv", int, n_heads), tied=tied,
        vocab_size=len(get("tokenizer.ggml.tokens", list)), hidden_dim=get("llama.feed_forward_length", int),
        max_seq_len=get("llama.context_length", int), norm_eps=get("llama.attention.layer_norm_rms_epsilon", float),
        rope_theta=get("llama.rope.freq_base", float, 10000.0),
        rope_scaling=get("llama.rope.scaling.factor", float, scale) if scaling == "linear" else 1.0))
    for key in ("llama.rope.dimension_count", "llama.attention.key_length", "llama.attention.value_length"):
        if metadata.get(key, args.head_dim) != args.head_dim:
            reader.fail(f"{key} is {metadata[key]}, expected the head width {args.head_dim}")
    window = metadata.get("llama.attention.sliding_window", 0)
    if window != 0 and not (type(window) is int and window >= args.max_seq_len):
        reader.fail(f"llama.attention.sliding_window is {window!r}, expected none or the context of {args.max_seq_len}")
    return args


def exported_step(path):
    """The iteration of the model that a GGUF file holds; None where there is no file, or one that doesn't say."""
    try:
        with open(path, "rb") as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as data:
            key = gguf_string(ITER)
            at = data.find(key)
            return struct.unpack_from("<I", data, at + len(key) + 4)[0] if at >= 0 else None
    except (OSError, ValueError, struct.error):  # ValueError: empty
        return None


def read_gguf(path):
    """(state_dict in float32, ModelArgs, {metadata key: value}) of a GGUF file; a damaged one ends in one line."""
    r = Reader(path)
    magic, version, n_tensors, n_metadata = r.unpack("<4sIQQ")
    if magic != b"GGUF" or version not in (2, 3):
        r.fail(f"magic {magic!r} and version {version}, expected b'GGUF' and 2 or 3")
    metadata = {r.string().decode(errors="replace"): r.value(*r.unpack("<I")) for _ in range(n_metadata)}
    before = r.at
    infos = [(r.string().decode(errors="replace"), r.unpack(f"<{min(*r.unpack('<I'), 4)}Q")[::-1], *r.unpack("<IQ"))
             for _ in range(n_tensors)]  # (name, shape, type, offset)
    listed = LIST_CHECKSUM not in metadata or metadata[LIST_CHECKSUM] == hashlib.sha256(r.data[before:r.at]).hexdigest()
    alignment = metadata.get("general.alignment", ALIGNMENT)
    if type(alignment) is not int or alignment < 1:
        r.fail(f"alignment {alignment!r}, expected a positive number such as {ALIGNMENT}")
    args = gguf_args(r, metadata, tied="output.weight" not in [name for name, *_ in infos])
    check_list(r, infos, args)
    r.take(gap(r.at, alignment))
    start, body = r.at, r.data[r.at:]
    if CHECKSUM in metadata and listed and metadata[CHECKSUM] != hashlib.sha256(body).hexdigest():
        r.fail("damaged, its tensors are not what was exported (their checksum differs)")
    ours = {gguf: (name, shape) for name, gguf, _, shape in tensors(args)}
    kinds, state = {kind.number: kind for kind in TYPES.values()}, {}
    for gguf, shape, number, offset in infos:
        kind = kinds.get(number) or r.fail(f"{gguf} has type {number}, expected one of {', '.join(TYPES)}")
        r.take(gap(r.at - start, alignment))
        name, expected = ours[gguf]
        if shape != expected or shape[-1] % kind.block or offset != r.at - start:
            r.fail(f"{gguf} has shape {shape} at offset {offset}, expected {expected} at {r.at - start}")
        raw = r.take(math.prod(shape) // kind.block * kind.size)
        state[name] = r.weights(gguf, kind.decode(raw), shape)
    if len(r.data) not in (r.at, r.at + gap(r.at - start, alignment)):
        r.fail(f"holds {len(r.data)} bytes, its header implies {r.at}")
    return state, args, metadata


def read_llama2c(path):
    """(state_dict in float32, ModelArgs) of a llama2.c file, version 0, 1 or 2; a damaged one ends in one line."""
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
    args = ModelArgs(dim, n_layers, n_heads, n_kv_heads, vocab_size, hidden_dim, max_seq_len=max_seq_len, tied=tied)
    checked(r, args, "" if version else "neither GGUF nor llama2.c's v1 or v2; read as v0, ")
    r.at, state = LLAMA2C_HEADER if version else r.at, {}
    for name, _, _, shape in tensors(args, LLAMA2C_V1 if version else LLAMA2C_V0):
        count = math.prod(shape)
        if version == 2 and len(shape) == 2:
            if count % group_size:
                r.fail(f"groups of {group_size} do not fill {name}, which has {count} values")
            q = r.take(count).view(np.int8).reshape(-1, group_size)
            with np.errstate(over="ignore", invalid="ignore"):  # `weights` looks at what comes out
                w = q * r.take(4 * (count // group_size)).view("<f4").astype(np.float32)[:, None]
        else:
            w = r.take(4 * count).view("<f4").astype(np.float32)
        state[name] = r.weights(name, w, shape)
        if version == 0 and name == "norm.weight":
            r.take(4 * max_seq_len * args.head_dim)  # the frequency tables
    if r.at != len(r.data):
        r.fail(f"holds {len(r.data)} bytes, its header implies {r.at}")
    return state, args


def vocabulary_of(pieces, unk_id, bos_id, eos_id, add_dummy_prefix, remove_extra_whitespaces, where):
    """A Tokenizer of the [(bytes, score, type)] in a model file, by way of the sentencepiece model they came from."""
    if pieces == Bytes().pieces():
        return Bytes()
    ids = unk_id, bos_id, eos_id
    if not all(0 <= i < len(pieces) for i in ids):
        fail(f"{where}: special ids {ids}, expected below the vocabulary's size {len(pieces)}")
    for i, (piece, score, kind) in enumerate(pieces):
        if piece.decode(errors="ignore").encode() != piece or not math.isfinite(score) or not 1 <= kind <= 6:
            fail(f"{where}: piece {i} is {piece!r} with score {score} and type {kind}, expected UTF-8, a number, 1 to 6")
    proto = sentencepiece_model_pb2.ModelProto()
    for piece, score, kind in pieces:
        proto.pieces.add(piece=piece.decode(), score=score, type=kind)
    trainer, rules = proto.trainer_spec, proto.normalizer_spec
    trainer.model_type, trainer.byte_fallback = trainer.BPE, any(kind == BYTE for _, _, kind in pieces)
    trainer.unk_id, trainer.bos_id, trainer.eos_id = ids
    trainer.unk_piece, trainer.bos_piece, trainer.eos_piece = (pieces[i][0].decode() for i in ids)
    rules.name, rules.add_dummy_prefix, rules.remove_extra_whitespaces = "identity", add_dummy_prefix, remove_extra_whitespaces
    return SentencePiece(proto.SerializeToString(), where)


def gguf_vocabulary(metadata, where):
    def get(key, default=None):
        return metadata.get(f"tokenizer.ggml.{key}", default)

    columns = [get("tokens"), get("scores"), get("token_type")]
    same = all(type(c) is list and len(c) == len(columns[0]) for c in columns)
    if get("model") not in ("llama", "t5", NO_BYTES) or not same:
        fail(f"{where}: tokenizer {get('model')!r}, expected 'llama' with tokens, scores and types of equal number")
    ids = [get(f"{key}_token_id", i) for i, key in enumerate(("unknown", "bos", "eos"))]
    flags = get("add_space_prefix", True), get("remove_extra_whitespaces", False)
    kinds = [{bytes}, {int, float}, {int}, {int}, {bool}]
    if not all({type(v) for v in values} <= kind for values, kind in zip((*columns, ids, flags), kinds)):
        fail(f"{where}: a tokenizer with entries of the wrong type; it is damaged")
    vocabulary = vocabulary_of(list(zip(*columns)), *ids, *flags, where)
    if get("model") == "t5" and not of_characters(vocabulary):
        fail(f"{where}: tokenizer 't5', expected one whose pieces are single characters, or 'llama'")
    return vocabulary


def llama2c_vocabulary(path, vocab_size):
    """The Tokenizer in a llama2.c tokenizer.bin, whose ids 0, 1 and 2 are <unk>, <s> and </s>."""
    r, pieces = Reader(path), [(b"<unk>", 0.0, 2), (b"<s>", 0.0, 3), (b"</s>", 0.0, 3)]
    r.take(4)
    for i in range(vocab_size):
        score, length = r.unpack("<fI")
        piece = r.take(length).tobytes().replace(b" ", SPACE.encode())
        if i >= len(pieces):
            pieces.append((piece, score, 6 if re.fullmatch(rb"<0x[0-9A-F]{2}>", piece) else 1))
    if r.at != len(r.data):
        r.fail(f"holds more than the {vocab_size} pieces of the model")
    return vocabulary_of(pieces, 0, 1, 2, True, False, path)


def read_model(path, tokenizer=""):
    """
    (state_dict, ModelArgs, Tokenizer or None, {metadata to keep}) of a run's folder, a step folder, a GGUF or llama2.c
    file. tokenizer: a vocabulary file to use instead of the one that comes with the model.
    """
    vocabulary, extra = tokenizer and not tokenizer.endswith(".bin") and Tokenizer.load(tokenizer) or None, {}
    if not Path(path).is_file():
        folder = checkpoint.locate(path)
        saved = checkpoint.load(folder)
        state, args = saved["model"], ModelArgs(**saved["args"])
        vocabulary = vocabulary or Tokenizer.load(checkpoint.tokenizer_path(folder))
        extra = {ITER: checkpoint.manifest(folder)["step"]}
    elif Reader(path).data[:4].tobytes() == b"GGUF":
        state, args, metadata = read_gguf(path)
        vocabulary = vocabulary or gguf_vocabulary(metadata, path)
        extra = {key: metadata[key] for key in ("general.name", "tokenizer.chat_template") if key in metadata}
    else:
        state, args = read_llama2c(path)
    if tokenizer.endswith(".bin"):
        vocabulary = llama2c_vocabulary(tokenizer, args.vocab_size)
    if args.tied and "output.weight" not in state:
        state = ChainMap(state, {"output.weight": state["tok_embeddings.weight"]})
    return state, args, vocabulary, extra


def load_model(path, tokenizer, device):
    """(Transformer ready to use, its Tokenizer) from whatever `read_model` reads."""
    state, args, vocabulary, _ = read_model(path, tokenizer)
    if vocabulary is None:
        fail(f"{path}: a llama2.c file holds no vocabulary; give --tokenizer=tokenizer.bin (or .model, or .json)")
    model = Transformer(args)
    model.load_state_dict(state)
    return model.to(device).eval(), vocabulary


def main():
    origin = checkpoint.run_folder(out_dir)
    source, name = Path(origin), "model.gguf" if format == "gguf" else "hf" if format == "hf" else "model.bin"
    beside = source / name if source.is_dir() else source.with_name(name.replace("model", source.stem))
    target = Path(path or beside)
    if source.is_file() and target.exists() and target.samefile(source):
        fail(f"{target}: would be written over itself; give another --path")
    state, args, vocabulary, extra = read_model(origin, tokenizer)
    try:
        export_model(state, args, vocabulary, target, format, dtype, group_size, source.resolve().stem, extra)
    except OSError as e:
        fail(f"{target}: cannot be written ({e.strerror or e}); nothing was changed")
    print(f"wrote {target}")


if __name__ == "__main__":
    configure(globals(), positional="out_dir")
    main()
