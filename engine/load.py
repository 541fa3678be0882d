"""
Models in files: what is read of runs, GGUF and llama2.c files. A damaged or hostile file ends in one line: every length, count
and place in it is checked before it is used.
"""
import hashlib
import math
import re
import struct
from collections import ChainMap
from pathlib import Path

import numpy as np
import torch
from sentencepiece import sentencepiece_model_pb2

from configurator import fail
from engine import checkpoint, sizes
from engine.formats import (ALIGNMENT, CHECKSUM, ITER, LIST_CHECKSUM, LLAMA2C_HEADER, LLAMA2C_MAGIC, LLAMA2C_V0, LLAMA2C_V1,
                            NO_BYTES, TYPES, gap, of_characters, tensors)
from model import ModelArgs, Transformer
from tokenizer import (BYTE, BYTE_OF, CONTROL, NORMAL, PRE_TOKENIZERS, SPACE, UNUSED, USER_DEFINED, Bytes, SentencePiece,
                       Tokenizer, byte_level)

# Keys llama.* of a GGUF file: those that say something of the model or change nothing that it computes, and those that are
# fine with one value. All others are refused, as in run.c, since they may change it.
KNOWN_KEYS = set("""vocab_size context_length embedding_length block_count feed_forward_length attention.head_count
    attention.head_count_kv attention.key_length attention.value_length attention.sliding_window
    attention.layer_norm_rms_epsilon rope.dimension_count rope.freq_base rope.scaling.type rope.scaling.factor
    rope.scale_linear rope.scaling.finetuned rope.scaling.original_context_length pooling_type tensor_data_layout""".split())
FIXED_KEYS = {"attention.causal": 1, "attention.clamp_kqv": 0, "attention.max_alibi_bias": 0, "expert_count": 0,
              "expert_used_count": 0, "rope.scaling.attn_factor": 1, "use_parallel_residual": 0}
MAX_CONTEXT = 1 << 20  # the longest context we believe a file


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


def byte_level_of(metadata, where):
    """The ByteLevel of a GGUF file whose tokenizer is "gpt2"."""
    def get(key, default=None):
        return metadata.get(f"tokenizer.ggml.{key}", default)

    tokens, types, merges, pre = get("tokens"), get("token_type"), get("merges"), get("pre")
    eos = get("eos_token_id")
    ids = get("bos_token_id", eos), eos
    lists = all(type(column) is list for column in (tokens, types, merges)) and len(tokens) == len(types)
    if not lists or {*map(type, tokens)} != {bytes} or {*map(type, types)} != {int} or {*map(type, merges)} - {bytes}:
        fail(f"{where}: a tokenizer 'gpt2' without tokens, types and merges of equal number; it is damaged")
    if pre not in PRE_TOKENIZERS:
        fail(f"{where}: the pre-tokenizer is {pre!r}, expected one of {', '.join(PRE_TOKENIZERS)}")
    if not all(type(i) is int and 0 <= i < len(tokens) for i in ids):
        fail(f"{where}: BOS and EOS are {ids}, expected ids below the vocabulary's size {len(tokens)}")
    pieces = []
    for i, (token, kind) in enumerate(zip(tokens, types)):
        text = token.decode(errors="replace")
        if kind not in (NORMAL, CONTROL, USER_DEFINED, UNUSED) or kind == NORMAL and not all(c in BYTE_OF for c in text):
            fail(f"{where}: token {i} is {text!r} of type {kind}, expected GPT-2's letters of bytes, or type 3, 4 or 5")
        pieces.append((b"".join(map(BYTE_OF.get, text)) if kind == NORMAL else token, 0.0, kind))
    adds = get("add_bos_token", pre == "llama-bpe")
    return byte_level(pieces, [merge.decode(errors="replace") for merge in merges], pre, *ids, bool(adds), where)


def gguf_vocabulary(metadata, where):
    def get(key, default=None):
        return metadata.get(f"tokenizer.ggml.{key}", default)

    if get("model") == "gpt2":
        return byte_level_of(metadata, where)
    columns = [get("tokens"), get("scores"), get("token_type")]
    same = all(type(c) is list and len(c) == len(columns[0]) for c in columns)
    if get("model") not in ("llama", "t5", NO_BYTES) or not same:
        fail(f"{where}: tokenizer {get('model')!r}, expected 'gpt2', or 'llama' with tokens, scores and types of equal number")
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
