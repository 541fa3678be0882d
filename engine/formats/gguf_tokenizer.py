"""
Make a Tokenizer from the vocabulary in a GGUF file. A vocabulary is a list of pieces, (bytes,
score, type), with sentencepiece's types. Piece is sentencepiece's word for a token.
"""
import math

from sentencepiece import sentencepiece_model_pb2

from configurator import fail
from engine.formats.layout import (
    END_OF_MESSAGE,
    END_OF_TURN,
    NO_BYTES,
    PADDING,
    is_character_level,
)
from engine.untrusted import reading
from tokenizer import (
    BYTE,
    BYTE_OF,
    CONTROL,
    NORMAL,
    PRE_TOKENIZERS,
    UNUSED,
    USER_DEFINED,
    BosEos,
    Bytes,
    SentencePiece,
    byte_level,
    bytes_of,
)


def read_gguf_tokenizer(metadata, where):
    """Return the Tokenizer in the metadata of a GGUF file; where: the file, for messages."""
    def get(key, default=None):
        return metadata.get(f"tokenizer.ggml.{key}", default)

    with reading(where, "a GGUF file's vocabulary", fail):
        read = byte_level_tokenizer if get("model") == "gpt2" else llama_tokenizer
        return read(get, metadata.get(END_OF_TURN), where)


def byte_level_tokenizer(get, end_of_turn, where):
    """
    Return the ByteLevel of a GGUF file whose tokenizer.ggml.model is "gpt2". get: a function that
    returns the value of tokenizer.ggml.NAME.
    """
    eos, pre = get("eos_token_id"), get("pre")
    bos = get("bos_token_id", eos)  # some files, such as Qwen's, lack BOS: EOS separates texts
    if pre not in PRE_TOKENIZERS:
        fail(f"{where}: the pre-tokenizer is {pre!r}, expected one of {', '.join(PRE_TOKENIZERS)}")
    pieces = []
    for i, (token, kind) in enumerate(zip(get("tokens"), get("token_type"), strict=True)):
        text = token.decode(errors="replace")
        in_letters = kind == NORMAL and all(letter in BYTE_OF for letter in text)
        if not in_letters and kind not in (CONTROL, USER_DEFINED, UNUSED):
            fail(f"{where}: token {i} is {text!r} of type {kind}, expected GPT-2's letters of "
                 "bytes, or type 3, 4 or 5")
        pieces.append((bytes_of(text) if in_letters else token, 0.0, kind))
    pieces = with_control(pieces, (bos, eos, end_of_turn))
    merges = [merge.decode(errors="replace") for merge in get("merges")]
    add_bos = bool(get("add_bos_token", pre == "llama-bpe"))
    return byte_level(pieces, merges, pre, BosEos(bos, eos, add_bos), where)


def llama_tokenizer(get, end_of_turn, where):
    """
    Return the Tokenizer of a GGUF file whose tokenizer.ggml.model is "llama", "t5" (which
    export.py writes for character-level vocabularies) or NO_BYTES. get: as in byte_level_tokenizer.
    """
    model = get("model")
    if model not in ("llama", "t5", NO_BYTES):
        fail(f"{where}: tokenizer {repr(model)[:80]}, expected 'gpt2' or 'llama'")
    unk, bos, eos = (get(f"{key}_token_id", i) for i, key in enumerate(("unknown", "bos", "eos")))
    pieces = zip(get("tokens"), get("scores"), get("token_type"), strict=True)
    vocabulary = tokenizer_of_pieces(
        with_control(pieces, (bos, eos, end_of_turn)), (unk, bos, eos),
        get("add_space_prefix", True), get("remove_extra_whitespaces", False), where)
    if model == "t5" and not is_character_level(vocabulary):
        fail(f"{where}: tokenizer 't5', expected one whose pieces are single characters, or "
             "'llama'")
    if vocabulary.kind != "sentencepiece":
        return vocabulary  # Bytes, which always has add_bos
    return vocabulary.with_bos(bool(get("add_bos_token", True)), where)


def with_control(pieces, ids):
    """
    Return the pieces, with the user-defined ones among `ids` turned into control pieces, as in
    runtime/tokenizer.c. ids: the tokens that begin or end texts and answers; as control pieces,
    they never result from encoding a text.
    """
    return [(piece, score, CONTROL if i in ids and kind == USER_DEFINED else kind)
            for i, (piece, score, kind) in enumerate(pieces)]


def tokenizer_of_pieces(pieces, ids, add_dummy_prefix, remove_extra_whitespaces, where):
    """
    Return the Tokenizer with these pieces: Bytes if its pieces are the same, otherwise a
    SentencePiece with a rebuilt sentencepiece model. ids: the ids of <unk>, BOS and EOS.
    """
    control = [piece.decode() for piece, *_ in pieces[Bytes().vocab_size:]]
    if pieces == Bytes(control).pieces():
        return Bytes(control)
    proto = sentencepiece_model_pb2.ModelProto()
    for i, (piece, score, kind) in enumerate(pieces):
        if not math.isfinite(score):
            fail(f"{where}: piece {i}, {piece!r}, has score {score}, expected a finite number")
        proto.pieces.add(piece=piece.decode(), score=score, type=kind)
    names = dict(enumerate(piece.piece for piece in proto.pieces))
    trainer, rules = proto.trainer_spec, proto.normalizer_spec
    trainer.model_type = trainer.BPE
    trainer.byte_fallback = any(kind == BYTE for _, _, kind in pieces)
    trainer.unk_id, trainer.bos_id, trainer.eos_id = ids
    trainer.unk_piece, trainer.bos_piece, trainer.eos_piece = (names[i] for i in ids)
    rules.name, rules.add_dummy_prefix = "identity", add_dummy_prefix
    rules.remove_extra_whitespaces = remove_extra_whitespaces
    return SentencePiece(proto.SerializeToString(), where)


def chat_ids(metadata, vocab_size):
    """
    Return {GGUF's key: id} of the padding token and of the tokens besides EOS that end an answer.
    Values that are not ids of this vocabulary are left out.
    """
    found = {key: metadata.get(key) for key in (END_OF_TURN, END_OF_MESSAGE, PADDING)}
    return {key: i for key, i in found.items() if type(i) is int and 0 <= i < vocab_size}
