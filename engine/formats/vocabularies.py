"""
Tokenizers from the vocabularies that GGUF and llama2.c files carry.
"""
import math
import re

from sentencepiece import sentencepiece_model_pb2

from configurator import fail
from engine.formats.layout import END_OF_MESSAGE, END_OF_TURN, NO_BYTES, PADDING, of_characters
from engine.formats.reader import Reader
from engine.untrusted import reading
from tokenizer import (
    BYTE,
    BYTE_OF,
    CONTROL,
    NORMAL,
    PRE_TOKENIZERS,
    SPACE,
    UNUSED,
    USER_DEFINED,
    BosEos,
    Bytes,
    SentencePiece,
    byte_level,
)


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
    return byte_level(pieces, [merge.decode(errors="replace") for merge in merges], pre,
                      BosEos(*ids, bool(adds)), where)


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
