"""
Models in files: what is read of runs, of GGUF and llama2.c files, and of the folders of other projects (huggingface.py). A
damaged or hostile file ends in one line: every length, count and place in it is checked before it is used.
"""
import hashlib
import math
import re
from functools import partial
from pathlib import Path

import numpy as np
from sentencepiece import sentencepiece_model_pb2

from configurator import fail
from engine.formats import huggingface, rope
from engine.training import checkpoint, distributed
from engine.training.costs import num_params
from engine.formats.layout import (ALIGNMENT, CHAT, CHECKSUM, END_OF_MESSAGE, END_OF_TURN, ITER, LIST_CHECKSUM, LLAMA2C_HEADER,
                            LLAMA2C_MAGIC, LLAMA2C_V0, LLAMA2C_V1, NO_BYTES, PADDING, ROPE_FACTORS, SINGLE, TEMPLATE, TYPES, Type,
                            gap, halves_to_interleaved, heads_in, of_characters, tensors)
from engine.text.prepare import keep_vocabulary
from engine.files import sha256
from engine.formats.reader import Reader, Tensors, checked, getter, refuse
from engine.training.plan import rate_for
from engine.untrusted import reading
from model import ModelArgs, Transformer
from tokenizer import (BYTE, BYTE_OF, CONTROL, NORMAL, PRE_TOKENIZERS, SPACE, UNUSED, USER_DEFINED, Bytes, SentencePiece,
                       Tokenizer, byte_level)

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


# ---- GGUF

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


# ---- llama2.c

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


# ---- vocabularies

def claimed(pieces, ids):
    """[(bytes, score, type)] as runtime/tokenizer.c has them: what begins or ends texts and answers is nobody's words."""
    return [(piece, score, CONTROL if i in ids and kind == USER_DEFINED else kind) for i, (piece, score, kind) in enumerate(pieces)]


def vocabulary_of(pieces, unk_id, bos_id, eos_id, add_dummy_prefix, remove_extra_whitespaces, where):
    """A Tokenizer of the [(bytes, score, type)] in a model file, by way of the sentencepiece model they came from."""
    if pieces == Bytes().pieces():
        return Bytes()
    ids = unk_id, bos_id, eos_id
    for i, (piece, score, kind) in enumerate(pieces):
        if piece.decode(errors="ignore").encode() != piece or not math.isfinite(score) or not 1 <= kind <= 6:
            fail(f"{where}: piece {i} is {piece!r} with score {score} and type {kind}, expected UTF-8, a number, 1 to 6")
    proto = sentencepiece_model_pb2.ModelProto()
    for piece, score, kind in pieces:
        proto.pieces.add(piece=piece.decode(), score=score, type=kind)
    trainer, rules = proto.trainer_spec, proto.normalizer_spec
    trainer.model_type, trainer.byte_fallback = trainer.BPE, any(kind == BYTE for _, _, kind in pieces)
    trainer.unk_id, trainer.bos_id, trainer.eos_id = ids
    spelled = {i: piece.decode() for i, (piece, _, _) in enumerate(pieces)}
    trainer.unk_piece, trainer.bos_piece, trainer.eos_piece = (spelled[i] for i in ids)
    rules.name, rules.add_dummy_prefix, rules.remove_extra_whitespaces = "identity", add_dummy_prefix, remove_extra_whitespaces
    return SentencePiece(proto.SerializeToString(), where)


def byte_level_of(metadata, where):
    """The ByteLevel of a GGUF file whose tokenizer is "gpt2"."""
    def get(key, default=None):
        return metadata.get(f"tokenizer.ggml.{key}", default)

    tokens, types, merges, pre = get("tokens"), get("token_type"), get("merges"), get("pre")
    eos = get("eos_token_id")
    ids = get("bos_token_id", eos), eos
    if pre not in PRE_TOKENIZERS:
        fail(f"{where}: the pre-tokenizer is {pre!r}, expected one of {', '.join(PRE_TOKENIZERS)}")
    pieces = []
    for i, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        text = token.decode(errors="replace")
        if kind not in (NORMAL, CONTROL, USER_DEFINED, UNUSED) or kind == NORMAL and not all(c in BYTE_OF for c in text):
            fail(f"{where}: token {i} is {text!r} of type {kind}, expected GPT-2's letters of bytes, or type 3, 4 or 5")
        pieces.append((b"".join(map(BYTE_OF.get, text)) if kind == NORMAL else token, 0.0, kind))
    pieces, adds = claimed(pieces, (*ids, metadata.get(END_OF_TURN))), get("add_bos_token", pre == "llama-bpe")
    return byte_level(pieces, [merge.decode(errors="replace") for merge in merges], pre, *ids, bool(adds), where)


def gguf_vocabulary(metadata, where):
    """The Tokenizer of a GGUF file."""
    with reading(where, "a GGUF file's vocabulary", fail):
        return byte_level_of(metadata, where) if metadata.get("tokenizer.ggml.model") == "gpt2" else llama_of(metadata, where)


def llama_of(metadata, where):
    """The Tokenizer of a GGUF file whose tokenizer is "llama" or one like it."""
    def get(key, default=None):
        return metadata.get(f"tokenizer.ggml.{key}", default)

    columns = [get("tokens"), get("scores"), get("token_type")]
    if get("model") not in ("llama", "t5", NO_BYTES):
        fail(f"{where}: tokenizer {repr(get('model'))[:80]}, expected 'gpt2' or 'llama'")
    ids = [get(f"{key}_token_id", i) for i, key in enumerate(("unknown", "bos", "eos"))]
    flags, adds = (get("add_space_prefix", True), get("remove_extra_whitespaces", False)), get("add_bos_token", True)
    pieces = claimed(zip(*columns, strict=True), (*ids[1:], metadata.get(END_OF_TURN)))
    vocabulary = vocabulary_of(pieces, *ids, *flags, where)
    if get("model") == "t5" and not of_characters(vocabulary):
        fail(f"{where}: tokenizer 't5', expected one whose pieces are single characters, or 'llama'")
    return vocabulary.with_bos(bool(adds), where) if vocabulary.kind == "sentencepiece" else vocabulary


def chat_ids(metadata, vocab_size):
    """{GGUF's key: id} of what ends an answer beside EOS, and of padding; what is no id is left out."""
    found = {key: metadata.get(key) for key in (END_OF_TURN, END_OF_MESSAGE, PADDING)}
    return {key: i for key, i in found.items() if type(i) is int and 0 <= i < vocab_size}


def llama2c_vocabulary(path, vocab_size):
    """The Tokenizer in a llama2.c tokenizer.bin, whose ids 0, 1 and 2 are <unk>, <s> and </s>."""
    r, pieces = Reader(path), [(b"<unk>", 0.0, 2), (b"<s>", 0.0, 3), (b"</s>", 0.0, 3)]
    with reading(path, "a llama2.c tokenizer.bin", fail):
        r.take(4)
        for i in range(vocab_size):
            score, length = r.unpack("<fI")
            piece = r.take(length).tobytes().replace(b" ", SPACE.encode())
            if i >= len(pieces):
                pieces.append((piece, score, 6 if re.fullmatch(rb"<0x[0-9A-F]{2}>", piece) else 1))
        if r.at != len(r.data):
            r.fail(f"holds more than the {vocab_size} pieces of the model")
        return vocabulary_of(pieces, 0, 1, 2, True, False, path)


# ---- whatever it is

def read_model(path, tokenizer=""):
    """
    ({name: tensor}, ModelArgs, Tokenizer or None, {metadata to keep}) of a run's folder, a step folder, a GGUF or llama2.c file,
    a Hugging Face folder, a folder of Meta's, or a file of weights in one of these. The tensors of all but runs are read when
    they are asked for. tokenizer: a vocabulary file to use instead of the one that comes with the model.
    """
    with reading(path, "a model", fail):
        return read_any(path, tokenizer)


def read_any(path, tokenizer):
    """What `read_model` returns; a file that is damaged, or of another kind than it seems, may raise anything."""
    vocabulary, extra, path = tokenizer and not tokenizer.endswith(".bin") and Tokenizer.load(tokenizer) or None, {}, Path(path)
    if path.suffix in (".pth", ".safetensors") and path.is_file():
        huggingface.refuse_unread(path)
        path = path.parent
    if checkpoint.is_own(path) or checkpoint.is_run(path) or not path.exists():
        folder = checkpoint.locate(path)
        saved = checkpoint.load(folder)
        state, args = saved["model"], checked(ModelArgs(**saved["args"]), partial(refuse, folder / "model.pt"))
        for name, *_, shape in tensors(args) if isinstance(state, dict) else ():  # before a model of these sizes is made
            if state[name].shape != shape:
                raise ValueError(f"{name} has shape {tuple(state[name].shape)}, expected {shape}")
        vocabulary = vocabulary or Tokenizer.load(checkpoint.tokenizer_path(folder))
        extra = saved.get("chat", {}) | {ITER: checkpoint.manifest(folder)["step"]}
    elif path.is_dir() and ((path / "config.json").exists() or (path / "params.json").exists()):
        meta = (path / "params.json").exists() and not (path / "config.json").exists()
        read = huggingface.read_meta if meta else huggingface.read_hf
        state, args, vocabulary, extra = read(path, vocabulary)
    elif path.is_dir():
        fail(f"{path}: holds no complete checkpoint, no config.json of Hugging Face's and no params.json of Meta's")
    elif Reader(path).data[:4].tobytes() == b"GGUF":
        state, args, metadata = read_gguf(path)
        extra = {key: metadata[key] for key in ("general.name", TEMPLATE) if key in metadata}
        extra |= {} if tokenizer else chat_ids(metadata, args.vocab_size)
        vocabulary = vocabulary or gguf_vocabulary(metadata, path)
    else:
        state, args = read_llama2c(path)
    if tokenizer.endswith(".bin"):
        vocabulary = llama2c_vocabulary(tokenizer, args.vocab_size)
    if args.tied and "output.weight" not in state:
        state = Tensors({name: partial(state.__getitem__, name) for name in state} |
                        {"output.weight": partial(state.__getitem__, "tok_embeddings.weight")}, path)
    return state, args, vocabulary, extra


def load_model(path, tokenizer, device):
    """(Transformer ready to use, its Tokenizer) from whatever `read_model` reads."""
    state, args, vocabulary, _ = read_model(path, tokenizer)
    if vocabulary is None:
        fail(f"{path}: holds no vocabulary; give --tokenizer=tokenizer.bin (or .model, or .json)")
    if vocabulary.vocab_size != args.vocab_size:
        fail(f"{path}: the vocabulary has {vocabulary.vocab_size} pieces and the model {args.vocab_size}, expected the same; "
             "give the --tokenizer of this model")
    with reading(path, "a model", fail):
        model = Transformer(args)
        distributed.load_weights(model, state)
    return model.to(device).eval(), vocabulary


# ---- a model to fine-tune; `s` has the settings of train.py as attributes

MOST_ADOPTED = 1024  # tokens of context that fine-tuning takes over; more are for those who ask for them


def start_from(model, path, check=True):
    """The weights of what `checkpoint.origin` gives into a model. Returns {GGUF's key: value} of its chats, which it keeps."""
    if checkpoint.complete(path):
        saved = checkpoint.load(path, check=check)
        state, extra = saved["model"], saved.get("chat", {})
    else:
        state, _, _, extra = read_model(path)
    with reading(path, "a model", fail):
        distributed.load_weights(model, state)
    return {key: extra[key] for key in CHAT if key in extra}


def adopt(s, given):
    """
    To fine-tune: sizes, vocabulary and context are those of the model that init_from names, and the rate is a tenth of what a
    model of its width begins with; return these settings. What is `given` and says otherwise is refused, but for context and rate.
    """
    path = checkpoint.origin(s.init_from)
    own = checkpoint.complete(path)
    _, args, vocabulary, _ = read_model(path)
    compared = {"vocab_source"}
    if vocabulary is None and Path(s.vocab_source).is_file():
        vocabulary, compared = read_model(path, s.vocab_source)[2], set()
    if vocabulary is None:
        fail(f"--init_from={s.init_from}: holds no vocabulary; give it as --vocab_source=tokenizer.bin (or .model, or .json)")
    if vocabulary.vocab_size != args.vocab_size:
        fail(f"--init_from={s.init_from}: its vocabulary has {vocabulary.vocab_size} pieces, the model {args.vocab_size}")
    before = checkpoint.stored_settings(path) if own else {}
    file = checkpoint.tokenizer_path(path) if own else keep_vocabulary(vocabulary, s.cache)
    adopted = {k: v for k, v in vars(args).items() if k in vars(s) and k not in ("dropout", "max_seq_len")}
    adopted["rope_factors"] = ",".join(map(repr, args.rope_factors))
    for name in sorted(given & {*adopted, *compared}):
        now = getattr(s, name)
        same = now in (adopted.get(name), before.get(name))
        if not same and not (name == "vocab_source" and same_file(now, file)):
            fail(f"--{name}={now}: fine-tuning keeps sizes and vocabulary of {s.init_from}, where {name} is "
                 f"{before.get(name, adopted.get(name))}; leave --{name} out, or train from nothing, without --init_from")
    free = {"max_seq_len": min(args.max_seq_len, MOST_ADOPTED), "learning_rate": float(f"{rate_for(args.dim) / 10:.1e}")}
    if s.eval_only and before.get("text_most"):  # else all of a large text would be prepared
        free["text_most"] = before["text_most"]
    free = {name: value for name, value in free.items() if name not in given}
    distributed.say(f"fine-tuning {s.init_from} ({num_params(args):,} parameters, context {args.max_seq_len:,})"
                 + "".join(f"; {name}={value}" for name, value in free.items()))
    return adopted | free | {"vocab_source": str(file)}


def same_file(a, b):
    return Path(a).is_file() and sha256(a) == sha256(b)
