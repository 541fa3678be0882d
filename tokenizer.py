"""
Text ⇄ token ids. Four kinds of vocabulary behind one interface:

    sentencepiece  a Llama-style BPE model (tokenizer.model), trained here or by others
    bpe            byte-level BPE of GPT-2, Llama 3, Qwen, SmolLM (tokenizer.json); needs the
                   package tokenizers
    byte           259 ids: <unk>, <s>, </s> and the 256 bytes; encodes any text, without training
    char           <unk>, <s>, </s> and the sorted characters of one text; others become <unk>

The `pieces()` of byte and char vocabularies are spelled as in sentencepiece, so that a GGUF file or
llama2.c's tokenizer.bin made of them works in programs that only know sentencepiece. sentencepiece
writes a space as U+2581 (▁), so all kinds but bpe encode a U+2581 in a text like a space and decode
it to a space. The pieces of a bpe vocabulary are plain bytes of text, in which a space is a space.
"""
import base64
import codecs
import hashlib
import itertools
import json
import re
import struct
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import sentencepiece as spm
from google.protobuf.unknown_fields import UnknownFieldSet
from sentencepiece import sentencepiece_model_pb2

from configurator import fail
from engine.streams import silent_stderr
from engine.untrusted import MAX_JSON, parse_json, read_json, read_untrusted, reading

SPACE = "\u2581"  # sentencepiece's visible space
# Types of pieces, as in sentencepiece and GGUF.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
# (text, type) of ids 0, 1 and 2 of the vocabularies that we make.
SPECIALS = [("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL)]
UNKNOWN_TEXT = " \u2047 "   # sentencepiece decodes <unk> to this
UNTRAINABLE = "\u2585"      # sentencepiece's training ignores lines that contain this character
CHARACTER_COVERAGE = 0.9999
MAX_TOKENS = 1 << 20
# Max bytes of a user-defined piece, as in runtime/tokenizer.c. Encoding compares such pieces with
# the text at every position, so long ones would make it slow.
MAX_SYMBOL_BYTES = 256
MAX_MODEL = 1 << 25         # bytes of a tokenizer.model, eight times Gemma's
MAX_POST_PROCESSOR = 1 << 13  # characters of a tokenizer.json's post_processor; Llama 3's has 1,500
MAX_MERGES = 1 << 28        # characters of the list that `merges` makes of a vocabulary for export
# Our field in a sentencepiece model for add_bos; other programs skip unknown fields. The tag is
# protobuf's encoding of the field's number and of its type varint: 4242 << 3 | 0.
ADD_BOS_FIELD, ADD_BOS_TAG = 4242, b"\x90\x89\x02"
# Entries that turn off truncation and padding in a tokenizer.json. A training program may have left
# its own settings in the file, which would truncate or pad every text.
WHOLE = {"truncation": None, "padding": None}


def each_to_fffd(error):
    """Replace each invalid byte (of bytes.decode) or character (of str.encode) by U+FFFD."""
    # bytes.decode takes a str from its handler; str.encode takes bytes, or a str of ASCII only.
    character = "\ufffd".encode() if isinstance(error, UnicodeEncodeError) else "\ufffd"
    return character * (error.end - error.start), error.end


# Error handlers of bytes.decode and str.encode: each returns (replacement, where to go on).
codecs.register_error("hexadecimal", lambda e: (
    "".join(f"<0x{b:02X}>" for b in e.object[e.start:e.end]), e.end))
codecs.register_error("each to U+FFFD", each_to_fffd)

# GPT-2's letter of each byte: the Latin-1 character if it is visible, else one from U+0100 on.
VISIBLE = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
SUBSTITUTES = itertools.count(0x100)
LETTERS = [chr(b if b in VISIBLE else next(SUBSTITUTES)) for b in range(256)]
BYTE_OF = {letter: bytes([b]) for b, letter in enumerate(LETTERS)}

# The step that turns bytes into GPT-2's letters. With use_regex, it first splits the text by
# GPT-2's rules.
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
              "use_regex": True}
# Llama 3's and Qwen 2's rules; %s is the quantifier of the digits that stay together.
SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
         r"|\s*[\r\n]+|\s+(?!\S)|\s+")


def split_steps(digits):
    """
    Return the steps that split by SPLIT. digits: regex quantifier of the digits that stay together,
    such as "{1,3}"; "" splits a number into single digits.
    """
    split = {"type": "Split", "pattern": {"Regex": SPLIT % digits}, "behavior": "Isolated",
             "invert": False}
    return [split, BYTE_LEVEL | {"use_regex": False}]


# Pre-tokenizers split a text before byte-level BPE merges pairs: {llama.cpp's name: steps of a
# tokenizer.json}.
PRE_TOKENIZERS = {"gpt-2": [BYTE_LEVEL],
                  "smollm": [{"type": "Digits", "individual_digits": True}, BYTE_LEVEL],
                  "llama-bpe": split_steps("{1,3}"), "qwen2": split_steps("")}


def spell(piece, space=" "):
    """
    Return an entry of `pieces()` as readable text. A byte piece of ASCII becomes its character, one
    outside ASCII stays <0x..>. In other pieces, each byte of invalid UTF-8 becomes <0x..>. space:
    replacement for a space.
    """
    data, _, kind = piece
    text = data.decode("utf-8", "hexadecimal")
    if kind == BYTE and (byte := int(data[3:5], 16)) < 128:
        text = chr(byte)
    return text.replace(SPACE, " ").replace(" ", space)


def decode_utf8(data):
    """
    Return bytes as str. Each byte of invalid UTF-8 becomes one U+FFFD, as in sentencepiece and the
    program `run`; Python's "replace" writes one U+FFFD for several such bytes.
    """
    return data.decode(errors="each to U+FFFD")


def without_surrogates(text):
    """
    Return the text with U+FFFD for each surrogate, which UTF-8 cannot encode. In arguments of the
    command line, Python replaces each byte of invalid UTF-8 by a surrogate. So this function turns
    an argument into what `decode_utf8` returns for its bytes.
    """
    return text if text.isascii() else text.encode(errors="each to U+FFFD").decode()


class Tokenizer:
    """
    Base class of all kinds. Attributes:

    kind: "sentencepiece", "bpe", "byte" or "char"; data: bytes of its file; vocab_size, bos_id,
    eos_id: int; unk_id: int or None; add_bos: whether a prompt begins with BOS; add_dummy_prefix:
    whether a space is put before every text; remove_extra_whitespaces: whether runs of spaces are
    collapsed; normalizer: "identity", or the name of the rules by which a loaded vocabulary
    rewrites text; charsmap: these rules, compiled by sentencepiece.
    """
    unk_id, bos_id, eos_id = 0, 1, 2
    add_bos = True
    add_dummy_prefix = remove_extra_whitespaces = False
    normalizer, charsmap = "identity", b""

    @staticmethod
    def load(path):
        """
        Return the tokenizer in a file. A .json file is a byte, char or bpe vocabulary or Hugging
        Face's tokenizer.json; any other file is a sentencepiece model.
        """
        path = Path(path)
        is_json = path.suffix == ".json"
        with reading(path, "a tokenizer (tokenizer.model or tokenizer.json)", fail):
            data = read_untrusted(path, MAX_JSON if is_json else MAX_MODEL)
            return load_json(data, path) if is_json else SentencePiece(data, path)

    def encode(self, text, bos=False, eos=False):
        """Return the ids of a text as a list of int, with BOS before and EOS after if asked."""
        return [self.bos_id] * bos + self._encode(without_surrogates(text)) + [self.eos_id] * eos

    def encode_inside(self, text):
        """Return the ids of a part of a text, without the space that is put before a whole text."""
        return self._encode(without_surrogates(text))

    def with_control(self, names, path="the vocabulary"):
        """
        Return the same vocabulary with these pieces, str, as control tokens: user-defined ones of
        this name become control tokens, missing ones are added at the end. path: for messages.
        """
        kinds = {piece.decode(errors="replace"): kind for piece, _, kind in self.pieces()
                 if kind in (CONTROL, USER_DEFINED)}
        changed = [name for name in names if kinds.get(name) != CONTROL]
        return self._with_control(changed, path) if changed else self

    def encode_prompt(self, text, eos=False):
        """
        Return the ids of a prompt as `run` encodes it: with BOS before if the vocabulary has
        add_bos or the text has no ids, and with EOS after if asked.
        """
        ids = self.encode(text)
        return [self.bos_id] * (self.add_bos or not ids) + ids + [self.eos_id] * eos

    def sha256(self):
        """Return the hex digest of the file that `save` writes."""
        return hashlib.sha256(self.data).hexdigest()

    def save(self, path):
        Path(path).write_bytes(self.data)

    def tokenizer_bin(self):
        """
        Return llama2.c's tokenizer.bin, little-endian: uint32 length of the longest piece, then for
        each piece its float32 score, int32 length and bytes. A space is a plain space, and BOS and
        EOS are spelled between newlines.
        """
        entries = [(piece.replace(SPACE.encode(), b" "), score)
                   for piece, score, _ in self.pieces()]
        for i, text in (self.bos_id, b"\n<s>\n"), (self.eos_id, b"\n</s>\n"):
            entries[i] = text, entries[i][1]
        longest = struct.pack("<I", max(len(piece) for piece, _ in entries))
        return longest + b"".join(struct.pack("<fi", score, len(piece)) + piece
                                  for piece, score in entries)

    def hugging_face(self):
        """Return an equivalent Hugging Face tokenizer.json as a dict, adding BOS if `add_bos`."""
        pieces = self.pieces()
        names = [piece.decode() for piece, _, _ in pieces]
        return tokenizer_json(
            added_tokens(self), {"type": "Sequence", "normalizers": normalizers(self)},
            FIRST_SPACE if prefixes_first(self) else None,
            add_bos_step(names[self.bos_id], self.bos_id) if self.add_bos else None,
            {"type": "Sequence", "decoders": decoders(self)},
            {"unk_token": names[self.unk_id], "fuse_unk": True, "ignore_merges": False,
             "byte_fallback": any(kind == BYTE for _, _, kind in pieces),
             "vocab": ids_of(names), "merges": merges(pieces)})


def check_symbols(pieces, path):
    """Exit if user-defined pieces are so long that encoding a text would take forever."""
    for i, (piece, _, kind) in enumerate(pieces):
        if kind == USER_DEFINED and len(piece) > MAX_SYMBOL_BYTES:
            fail(f"{path}: token {i} is user-defined and has {len(piece)} bytes, "
                 f"expected at most {MAX_SYMBOL_BYTES}")


class SentencePiece(Tokenizer):
    """
    A sentencepiece BPE model. data: the bytes of the file; path: its name in messages.

    sentencepiece stores no add_bos, so we store it in a field of our own (`with_bos`); without this
    field prompts begin with BOS.
    """
    kind = "sentencepiece"

    def __init__(self, data, path):
        spm.set_min_log_level(5)  # its own messages would appear above our line
        # Bound the number of pieces before parsing, which takes much memory. protobuf writes two
        # bytes 0x0A (newline) for each piece: one before the piece, one before its text. We allow
        # a third, because texts, lengths and scores can contain this byte too.
        if data.count(b"\n") > 3 * MAX_TOKENS:
            fail(f"{path}: too many pieces, expected at most {MAX_TOKENS:,}")
        with reading(path, "a sentencepiece model, a Llama-style tokenizer.model", fail):
            proto = sentencepiece_model_pb2.ModelProto.FromString(data)
            self.model = spm.SentencePieceProcessor(model_proto=data)
        self.data = data
        self._pieces = [(piece.piece.encode(), piece.score, piece.type) for piece in proto.pieces]
        check_symbols(self._pieces, path)
        if proto.trainer_spec.model_type != proto.trainer_spec.BPE:
            fail(f"{path}: not a BPE model, expected a Llama-style one "
                 "(run and llama.cpp merge pairs, as BPE does)")
        self.vocab_size, self.unk_id = self.model.vocab_size(), self.model.unk_id()
        self.bos_id, self.eos_id = self.model.bos_id(), self.model.eos_id()
        if self.bos_id < 0 or self.eos_id < 0:
            fail(f"{path}: has no <s> or no </s>, but every document must begin and end with one")
        rules = proto.normalizer_spec
        self.add_dummy_prefix = rules.add_dummy_prefix
        self.remove_extra_whitespaces = rules.remove_extra_whitespaces
        self.charsmap = rules.precompiled_charsmap
        self.normalizer = rules.name if self.charsmap else "identity"
        unknown_fields = {field.field_number: field.data for field in UnknownFieldSet(proto)}
        self.add_bos = unknown_fields.get(ADD_BOS_FIELD) != 0
        self.inside = None  # the model without the leading space, made when it is needed

    def _encode(self, text):
        return self.model.encode(text)

    def encode_inside(self, text):
        if not self.add_dummy_prefix:
            return super().encode_inside(text)
        if not self.inside:
            proto = sentencepiece_model_pb2.ModelProto.FromString(self.data)
            proto.normalizer_spec.add_dummy_prefix = False
            self.inside = spm.SentencePieceProcessor(model_proto=proto.SerializeToString())
        return self.inside.encode(without_surrogates(text))

    def _with_control(self, names, path):
        proto = sentencepiece_model_pb2.ModelProto.FromString(self.data)
        for piece in proto.pieces:
            if piece.piece in names:
                piece.type = CONTROL
        known = {piece.piece for piece in proto.pieces}
        for name in names:
            if name not in known:
                proto.pieces.add(piece=name, score=0.0, type=CONTROL)
        return SentencePiece(proto.SerializeToString(), path)

    def decode(self, ids):
        """Return the text of ids, without BOS and EOS; invalid UTF-8 becomes U+FFFD."""
        return self.model.decode([int(i) for i in ids])

    def pieces(self):
        """Return [(bytes of the piece, score, type)] in order of id; a space is U+2581."""
        return self._pieces

    def with_bos(self, add_bos, path):
        """Return the same vocabulary with this add_bos."""
        if add_bos == self.add_bos:
            return self
        # protobuf takes the last value of a field, so an appended one replaces an earlier one.
        return SentencePiece(self.data + ADD_BOS_TAG + bytes([add_bos]), path)


class Bytes(Tokenizer):
    """
    Id 3 + b is byte b. The space is a normal piece, because sentencepiece turns it into U+2581
    before it searches for pieces; the other bytes are byte pieces, <0x00> to <0xFF>. control: names
    of control tokens that follow them.
    """
    kind = "byte"

    def __init__(self, control=()):
        self.control = [*control]
        self.vocab_size = 3 + 256 + len(self.control)
        self.data = json.dumps({"kind": "byte"} | stored_control(self.control)).encode()

    def _with_control(self, names, path):
        return Bytes([*self.control, *names])

    def _encode(self, text):
        return [3 + b for b in text.replace(SPACE, " ").encode()]

    def decode(self, ids):
        """
        Return the text of ids, without BOS and EOS. Invalid UTF-8 becomes U+FFFD, one for several
        bytes (Python's "replace"), unlike in `decode_utf8`.
        """
        spelled = [UNKNOWN_TEXT.encode(), b"", b"", *(bytes([b]) for b in range(256))]
        spelled += [b""] * len(self.control)
        text = bytearray()  # join would take 80 bytes of memory a token
        for i in map(int, ids):
            text += spelled[i]
        return text.decode(errors="replace")

    def pieces(self):
        """Return [(bytes of the piece, score, type)] in order of id."""
        letters = [(b"<0x%02X>" % b, 0.0, BYTE) for b in range(256)]
        letters[ord(" ")] = (SPACE.encode(), 0.0, NORMAL)
        return special_pieces() + letters + control_pieces(self.control)

    def hugging_face(self):
        """
        Return a tokenizer.json that spells bytes in GPT-2's letters rather than as byte pieces.
        If a run of byte pieces is not valid UTF-8, Hugging Face decodes all of it to U+FFFD. In
        letters, it decodes the valid characters of such a run and only the rest to U+FFFD.
        """
        made = super().hugging_face()
        level = BYTE_LEVEL | {"trim_offsets": False, "use_regex": False}
        made["model"] |= {"byte_fallback": False,
                          "vocab": ids_of([name for name, _ in SPECIALS] + LETTERS + self.control)}
        return made | {"normalizer": replace(SPACE, " "), "pre_tokenizer": level, "decoder": level}


class Characters(Tokenizer):
    """
    Id 3 + i is the i-th of the sorted `characters`. Consecutive others become one <unk>. control:
    names of control tokens that follow them.
    """
    kind = "char"

    def __init__(self, characters, control=()):
        self.characters = sorted(set(characters.replace(SPACE, " ")))
        self.control = [*control]
        self.vocab_size = 3 + len(self.characters) + len(self.control)
        self.ids = {c: 3 + i for i, c in enumerate(self.characters)}
        stored = {"kind": "char", "characters": "".join(self.characters)}
        self.data = json.dumps(stored | stored_control(self.control)).encode()

    def _with_control(self, names, path):
        return Characters("".join(self.characters), [*self.control, *names])

    def _encode(self, text):
        unk = self.unk_id
        ids = [*map(self.ids.get, text.replace(SPACE, " "), itertools.repeat(unk))]
        if unk not in ids:
            return ids
        # Drop each <unk> that follows another one.
        return [i for i, before in zip(ids, [None, *ids]) if i != unk or before != unk]

    def decode(self, ids):
        """Return the text of ids, without BOS and EOS."""
        spelled = [UNKNOWN_TEXT, "", ""] + self.characters + [""] * len(self.control)
        return "".join(map(spelled.__getitem__, ids))

    def pieces(self):
        """Return [(bytes of the piece, score, type)] in order of id; a space is U+2581."""
        letters = [(c.replace(" ", SPACE).encode(), 0.0, NORMAL) for c in self.characters]
        return special_pieces() + letters + control_pieces(self.control)


def special_pieces():
    """Return the entries of `pieces()` for ids 0, 1, 2 of the vocabularies we make."""
    return [(piece.encode(), 0.0, kind) for piece, kind in SPECIALS]


def control_pieces(names):
    """Return the entries of `pieces()` for control tokens with these names."""
    return [(name.encode(), 0.0, CONTROL) for name in names]


def stored_control(names):
    """Return the part of a stored byte or char vocabulary for its control tokens; {} for none."""
    return {"control": names} if names else {}


# ---- byte-level BPE ------------------------------------------------------------------------------

class ByteLevel(Tokenizer):
    """
    Byte-level BPE. data: the bytes of {"kind": "bpe", "bos": id, "eos": id, "add_bos": bool,
    "vocab_size": int, "tokenizer": content of Hugging Face's tokenizer.json}; path: its name in
    messages. An id below vocab_size without a token is [PAD<id>], the name that llama.cpp's
    converter gives to unused rows of an embedding.
    """
    kind, unk_id = "bpe", None

    def __init__(self, data, path):
        stored = parse_json(data)
        self.data, self.add_bos = data, bool(stored["add_bos"])
        self.tokenizer = stored["tokenizer"] | WHOLE
        self.bos_id, self.eos_id = int(stored["bos"]), int(stored["eos"])
        self.vocab_size = int(stored["vocab_size"])
        self.pre = pre_tokenizer(self.tokenizer, path)
        self.normalizer = (self.tokenizer.get("normalizer") or {"type": "identity"})["type"]
        self.model = hugging_face_model(self.tokenizer, path)
        self.model.encode_special_tokens = True  # "<s>" in a text is three characters, never BOS
        self._pieces = byte_level_pieces(self.model, self.vocab_size, path)
        check_symbols(self._pieces, path)
        if not all(0 <= i < self.vocab_size for i in (self.bos_id, self.eos_id)):
            fail(f"{path}: BOS is {self.bos_id} and EOS {self.eos_id}, "
                 f"expected tokens below {self.vocab_size}")

    def _encode(self, text):
        return self.model.encode(text, add_special_tokens=False).ids

    def _with_control(self, names, path):
        tokenizer, size = json.loads(json.dumps(self.tokenizer)), self.vocab_size
        added, vocabulary = tokenizer["added_tokens"], tokenizer["model"]["vocab"]
        for name in names:
            known = next((token for token in added if token["content"] == name), None)
            if known:
                known["special"] = True
            else:
                vocabulary[name] = size
                added.append(added_token(size, name, special=True))
                size += 1
        bos_eos = BosEos(self.bos_id, self.eos_id, self.add_bos)
        return stored_byte_level(tokenizer, bos_eos, size, path)

    def decode(self, ids):
        """
        Return the text of ids, without control tokens. Invalid UTF-8 becomes U+FFFD, one for
        several bytes (Python's "replace"), unlike in `decode_utf8`.
        """
        found = (self._pieces[int(i)] for i in ids)
        shown = (piece for piece, _, kind in found if kind not in (CONTROL, UNUSED))
        return b"".join(shown).decode(errors="replace")

    def pieces(self):
        """Return [(bytes of the text, 0.0, type)] in order of id."""
        return self._pieces

    def merges(self):
        """Return ["left right"] in GPT-2's letters, in the order of merging."""
        pairs = self.tokenizer["model"]["merges"]
        return [pair if isinstance(pair, str) else " ".join(pair) for pair in pairs]

    def tokenizer_bin(self):
        fail("byte-level BPE: llama2.c's tokenizer.bin can't hold it; "
             "use --format=gguf or --format=hf")

    def hugging_face(self):
        return self.tokenizer


def hugging_face_model(tokenizer, path):
    """Return the tokenizers.Tokenizer of a tokenizer.json's content."""
    try:
        import tokenizers
    except ImportError:
        fail(f"{path}: byte-level BPE needs a package: pip install tokenizers")
    # A panic in Rust writes its message to stderr; `reading` reports it in one line.
    with (reading(path, "a tokenizer.json that the package tokenizers wrote", fail),
          silent_stderr()):
        # A post-processor can list many ids for a special token and mention that token many times,
        # so it can add mentions × ids tokens to a text, up to the square of its own length.
        if len(json.dumps(tokenizer.get("post_processor"))) > MAX_POST_PROCESSOR:
            raise ValueError("its post_processor is longer than "
                             f"{MAX_POST_PROCESSOR:,} characters")
        model = tokenizers.Tokenizer.from_str(json.dumps(tokenizer))
        model.encode("a")  # some faults of the file raise only here
        return model


def pre_tokenizer(tokenizer, path):
    """
    Return llama.cpp's name of a tokenizer.json's pre-tokenizer. Exit if its steps, normalizer or
    model are not those of byte-level BPE.
    """
    model, pre = tokenizer["model"], tokenizer.get("pre_tokenizer") or {"type": "none"}
    steps = pre.get("pretokenizers", [pre])
    # Ignore trim_offsets: it changes the reported positions of tokens in a text, but no ids.
    steps = [BYTE_LEVEL | step | {"trim_offsets": True} if step["type"] == "ByteLevel" else step
             for step in steps]
    found = next((name for name, known in PRE_TOKENIZERS.items() if steps == known), None)
    if model.get("type", "BPE") != "BPE" or steps[-1]["type"] != "ByteLevel":
        fail(f"{path}: not byte-level BPE (its model is {model.get('type')}, its pre-tokenizer "
             f"{' + '.join(step['type'] for step in steps)}); of a sentencepiece vocabulary give "
             "the tokenizer.model")
    if not found:
        fail(f"{path}: its pre-tokenizer is unknown to ./run, expected one of "
             f"{', '.join(PRE_TOKENIZERS)}")
    if (tokenizer.get("normalizer") or {"type": "NFC"})["type"] != "NFC":
        fail(f"{path}: its normalizer is {tokenizer['normalizer']['type']}, expected none or NFC")
    for key in "dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback":
        if model.get(key):
            fail(f"{path}: its model has {key}={model[key]!r}, "
                 "expected none, as in byte-level BPE")
    # With ignore_merges, a word that is itself a token is encoded as this token, without merging.
    # llama.cpp derives this from the pre-tokenizer's name: only llama-bpe has it.
    ignores = bool(model.get("ignore_merges"))
    if ignores != (found == "llama-bpe"):
        fail(f"{path}: ignore_merges is {ignores} with the pre-tokenizer {found}, expected "
             f"{not ignores} as in llama.cpp")
    return found


def byte_level_pieces(model, vocab_size, path):
    """Return the entries of `pieces()` of a tokenizers.Tokenizer."""
    vocabulary = model.get_vocab(with_added_tokens=True)
    added = model.get_added_tokens_decoder()
    if vocab_size > MAX_TOKENS:
        fail(f"{path}: {vocab_size} tokens, expected at most {MAX_TOKENS}")
    pieces = [(b"[PAD%d]" % i, 0.0, UNUSED) for i in range(vocab_size)]
    largest = max(vocabulary.values(), default=-1)
    if largest >= vocab_size or len({*vocabulary.values()}) < len(vocabulary):
        fail(f"{path}: {len(vocabulary)} tokens with ids up to {largest}, "
             f"expected a different id below {vocab_size} for each")
    for name, i in vocabulary.items():
        if i in added:
            pieces[i] = name.encode(), 0.0, CONTROL if added[i].special else USER_DEFINED
        elif all(letter in BYTE_OF for letter in name):
            pieces[i] = bytes_of(name), 0.0, NORMAL
        else:
            fail(f"{path}: token {i} is {name!r}, expected GPT-2's letters of bytes; "
                 "not byte-level BPE")
    return pieces


def bytes_of(letters):
    """Return the bytes that GPT-2's letters stand for."""
    return b"".join(map(BYTE_OF.get, letters))


class BosEos(NamedTuple):
    """The tokens between documents, which a tokenizer.json does not name, and `add_bos`."""
    bos_id: int
    eos_id: int
    add_bos: bool


def stored_byte_level(tokenizer, bos_eos, vocab_size, path):
    """Return the ByteLevel of a tokenizer.json's content, BosEos and a number of ids."""
    stored = {"kind": "bpe", "bos": bos_eos.bos_id, "eos": bos_eos.eos_id,
              "add_bos": bos_eos.add_bos, "vocab_size": vocab_size, "tokenizer": tokenizer}
    return ByteLevel(json.dumps(stored).encode(), path)


def byte_level(pieces, merges, pre, bos_eos, path):
    """
    Return the ByteLevel with these pieces [(bytes of the text, score, type)], merges
    ["left right"] in GPT-2's letters, best first, and BosEos. pre: a key of PRE_TOKENIZERS.
    """
    names = ["".join(LETTERS[b] for b in piece) if kind == NORMAL
             else piece.decode(errors="replace") for piece, _, kind in pieces]
    if len({*names}) < len(names):
        fail(f"{path}: two of its {len(names)} tokens have the same spelling, so they cannot be "
             "told apart")
    steps, bos_id = PRE_TOKENIZERS[pre], bos_eos.bos_id
    used = [kind != UNUSED for _, _, kind in pieces]
    tokenizer = tokenizer_json(
        [added_token(i, names[i], kind == CONTROL) for i, (_, _, kind) in enumerate(pieces)
         if kind in (CONTROL, USER_DEFINED)],
        None, steps[0] if len(steps) == 1 else {"type": "Sequence", "pretokenizers": steps},
        add_bos_step(names[bos_id], bos_id) if bos_eos.add_bos else None, BYTE_LEVEL,
        {"unk_token": None, "fuse_unk": False, "byte_fallback": False,
         "ignore_merges": pre == "llama-bpe",
         "vocab": {name: i for name, i in ids_of(names).items() if used[i]}, "merges": merges})
    return stored_byte_level(tokenizer, bos_eos, len(pieces), path)


# ---- vocabularies of Hugging Face folders --------------------------------------------------------

def text_of(token):
    """Return the text of a token of tokenizer_config.json, which is a str or {"content": str}."""
    return token.get("content") if isinstance(token, dict) else token


def beside(folder, name):
    """Return the object in folder/name.json without its nulls; {} if it cannot be read."""
    found = read_json(folder / f"{name}.json", MAX_JSON, {})
    return {key: value for key, value in found.items() if value is not None}


def special_tokens(folder):
    """
    Return {"bos_token", "eos_token" and others: text or object} of a Hugging Face folder. As in
    transformers, special_tokens_map.json wins if tokenizer_config.json lists no added tokens.
    """
    config = beside(folder, "tokenizer_config")
    if "added_tokens_decoder" in config:
        return config
    return config | beside(folder, "special_tokens_map")


def generation(folder):
    """
    Return {"eos_token_id": [int], "pad_token_id": [int]}, the ids that transformers generates
    with: those of generation_config.json if it exists, else of config.json.
    """
    exists = (folder / "generation_config.json").exists()
    config = beside(folder, "generation_config" if exists else "config")
    found = {}
    for name in "eos_token_id", "pad_token_id":
        ids = config.get(name, [])
        ids = ids if isinstance(ids, list) else [ids]
        found[name] = [i for i in ids if type(i) is int and 0 <= i < MAX_TOKENS]
    return found


FLAGS = {"lstrip": "also matches the blanks before it",
         "rstrip": "also matches the blanks after it", "single_word": "matches only whole words"}


def refuse_flags(tokens, path):
    """
    Exit if the flags of an added token change how Hugging Face finds it in a text. Model files
    can't store these flags, and `run` searches a text once, from left to right, for the exact
    spellings. Special tokens may have any flag, since no text contains them.

    tokens: [{"id", "content", "special", ...}], as tokenizer.json lists added tokens.
    """
    tokens = [token for token in tokens if not token.get("special")]
    for token, flag in itertools.product(tokens, FLAGS):
        if token.get(flag):
            fail(f"{path}: the added token {token.get('content')!r} has {flag}: it {FLAGS[flag]}, "
                 f"which model files and run can't do; set {flag} to false there")
    # Hugging Face searches the text for tokens that are not normalized, and then the rest of it for
    # normalized ones. run searches for all at once, from left to right. Both find the same, unless
    # a token of the first search is part of a token of the second, or begins inside it (then the
    # first search takes characters that belong to the second's token).
    in_second = {str(token.get("content")) for token in tokens if token.get("normalized")}
    in_first = {str(token.get("content")) for token in tokens} - in_second
    for second, first in itertools.product(in_second, in_first):
        if first in second or any(second.endswith(first[:n]) for n in range(1, len(first))):
            fail(f"{path}: the added tokens {first!r} and {second!r} overlap, but only {second!r} "
                 "is normalized, so Hugging Face searches for it last, which model files and run "
                 "can't do; set normalized to the same value for both there")


def from_hugging_face(tokenizer, path):
    """
    Return the ByteLevel of a tokenizer.json's content. BOS is the token that its post-processor
    puts before a text. The files beside it define EOS, the number of rows of the model's embedding,
    and BOS if the post-processor adds none.
    """
    pre_tokenizer(tokenizer, path)
    merge_added_tokens(tokenizer, path)
    model, folder = hugging_face_model(tokenizer, path), path.parent
    found = beside(folder, "config") | beside(folder, "generation_config") | special_tokens(folder)

    def special(which):
        """
        Return the id of `which`, "bos" or "eos": the id of the text bos_token or eos_token in the
        tokenizer's files (see `special_tokens`), else bos_token_id or eos_token_id (the first, if
        it is a list) of generation_config.json, else that of config.json.
        """
        named = model.token_to_id(text_of(found.get(f"{which}_token", "")))
        ids = found.get(f"{which}_token_id")
        if named is not None:
            return named
        return ids[0] if isinstance(ids, list) and ids else ids

    eos_id = special("eos")
    if not isinstance(eos_id, int):
        fail(f"{path}: no file in its folder defines EOS; "
             "expected a tokenizer_config.json with eos_token")
    # Encoding "" would not tell a BOS before the text from an EOS after it.
    example = model.encode("a")
    add_bos = example.special_tokens_mask[:1] == [1]
    bos_id = example.ids[0] if add_bos else special("bos")
    if not isinstance(bos_id, int):
        bos_id = eos_id  # as in Qwen, where the end of a text also separates texts
    # Besides EOS, a GGUF file names only one token that ends an answer, so take the first.
    ends = [i for i in generation(folder)["eos_token_id"] if i not in (bos_id, eos_id)][:1]
    for token in tokenizer["added_tokens"]:
        # Mark these as special, whatever the file says: text is never encoded as a special token,
        # so a user's text cannot contain BOS or end an answer.
        token["special"] |= token["id"] in (bos_id, eos_id, *ends)
    refuse_flags(tokenizer["added_tokens"], path)
    size = max(model.get_vocab(with_added_tokens=True).values(), default=0) + 1
    rows = found.get("vocab_size")
    vocab_size = max(size, rows) if isinstance(rows, int) else size
    return stored_byte_level(tokenizer, BosEos(bos_id, eos_id, add_bos), vocab_size, path)


def merge_added_tokens(tokenizer, path):
    """
    Merge into a tokenizer.json's added tokens those of the tokenizer_config.json beside it, which
    replace those of the same id, as in transformers. Exit if their spellings differ.
    """
    listed = beside(path.parent, "tokenizer_config").get("added_tokens_decoder", {})
    added = {token["id"]: token for token in tokenizer["added_tokens"]}
    spelled = {i: name for name, i in tokenizer["model"]["vocab"].items()}
    spelled |= {i: token["content"] for i, token in added.items()}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    for i, token in listed.items():
        i = int(i)
        if token["content"] != spelled.get(i, token["content"]):
            fail(f"{path}: token {i} is {spelled[i]!r}, but {token['content']!r} in the "
                 "tokenizer_config.json in its folder; one of the two belongs to another model")
        added[i] = {"id": i, **flags, **added.get(i, {}), **token}
    tokenizer["added_tokens"] = [added[i] for i in sorted(added)]


def recognize_own(tokenizer):
    """Return the byte or char vocabulary that export.py wrote as this tokenizer.json, or None."""
    letters = (name.replace(SPACE, " ") for name in tokenizer["model"]["vocab"])
    characters = "".join(letter for letter in letters if len(letter) == 1)
    specials = {name for name, _ in SPECIALS}
    control = [token["content"] for token in tokenizer["added_tokens"]
               if token["special"] and token["content"] not in specials]
    for made in Bytes(control), Characters(characters, control):
        if json.loads(json.dumps(made.hugging_face())) == tokenizer:
            return made
    return None


def load_json(data, path):
    """Return the byte, char or bpe vocabulary in the bytes of a tokenizer.json."""
    stored = parse_json(data)
    if "model" in stored and "added_tokens" in stored:
        stored |= WHOLE
        return recognize_own(stored) or from_hugging_face(stored, path)
    if stored.get("kind") == "bpe":
        return ByteLevel(data, path)
    is_byte, control = stored.get("kind") == "byte", stored.get("control", [])
    made = Bytes(control) if is_byte else Characters(stored.get("characters", ""), control)
    if made.data != data:
        fail(f"{path}: neither a vocabulary of ours nor Hugging Face's byte-level BPE, expected "
             "one that data.py --vocab_source=byte or char has written, or a tokenizer.json")
    return made


# ---- parts of a tokenizer.json -------------------------------------------------------------------

def tokenizer_json(added, normalizer, pre_tokenizer, post_processor, decoder, model):
    """
    Return the content of a tokenizer.json. model: entries of its BPE model, which add to the
    defaults or replace them.
    """
    defaults = {"type": "BPE", "dropout": None, "unk_token": None,
                "continuing_subword_prefix": None, "end_of_word_suffix": None}
    return {"version": "1.0", **WHOLE, "normalizer": normalizer, "added_tokens": added,
            "pre_tokenizer": pre_tokenizer, "post_processor": post_processor, "decoder": decoder,
            "model": defaults | model}


def ids_of(names):
    return {name: i for i, name in enumerate(names)}


def replace(pattern, content, kind="String"):
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def add_bos_step(bos, bos_id):
    """Return the post-processor that puts BOS before a text, and before each of two texts."""
    text, pair = ([{"SpecialToken": {"id": bos, "type_id": n}},
                   {"Sequence": {"id": name, "type_id": n}}] for n, name in enumerate("AB"))
    return {"type": "TemplateProcessing", "single": text, "pair": text + pair,
            "special_tokens": {bos: {"id": bos, "ids": [bos_id], "tokens": [bos]}}}


def merges(pieces):
    """
    Return ["left right"], best first: each pair of pieces that makes a piece when it is merged. The
    score of a pair is that of the piece it makes, because sentencepiece always merges the pair that
    makes the best piece, and a piece can be made of several pairs.
    """
    normal = {piece.decode(): score for piece, score, kind in pieces if kind == NORMAL}
    if sum(len(piece) ** 2 for piece in normal) > MAX_MERGES:
        fail("the vocabulary's pieces are too long to be written as merges: "
             f"they would take over {MAX_MERGES:,} characters")
    found = []
    for whole in sorted(normal, key=normal.get, reverse=True):
        for i in range(1, len(whole)):
            left, right = whole[:i], whole[i:]
            if left in normal and right in normal:
                found.append(f"{left} {right}")
    return found


def added_token(i, content, special, normalized=False):
    return {"id": i, "content": content, "single_word": False, "lstrip": False, "rstrip": False,
            "normalized": normalized, "special": special}


def added_tokens(tokenizer):
    """
    Return the pieces that are never merged: specials, which no text contains, and user-defined
    ones, which a text may contain. User-defined pieces that no normalized text can contain are left
    out: those with a plain space, because `normalizers` replaces it by U+2581, and those that end
    in U+2581, if the vocabulary removes trailing spaces.
    """
    def is_findable(piece):
        removed = tokenizer.remove_extra_whitespaces and piece.endswith(SPACE.encode())
        return b" " not in piece and not removed

    found = []
    for i, (piece, _, kind) in enumerate(tokenizer.pieces()):
        symbol = kind == USER_DEFINED
        if kind in (UNKNOWN, CONTROL) or symbol and is_findable(piece):
            found.append(added_token(i, piece.decode(), special=not symbol, normalized=symbol))
    return found


# Puts a space before a text, but neither after a control token in it nor before another space. The
# latter differs from sentencepiece only at the beginning of a text.
FIRST_SPACE = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "first", "split": False}


def prefixes_first(tokenizer):
    """
    Return whether the vocabulary puts a space before a text and has ChatML's markers as control
    tokens: the space must then not come after each marker that a chat template writes.
    """
    if not tokenizer.add_dummy_prefix or tokenizer.remove_extra_whitespaces:
        return False
    return any(piece == b"<|im_start|>" and kind == CONTROL
               for piece, _, kind in tokenizer.pieces())


def normalizers(tokenizer):
    """
    Return the steps that rewrite a text before it is split into pieces. Hugging Face also applies
    them to each user-defined piece of `added_tokens` before it searches for it. The step that puts
    a space before a text would then put one before the piece, which would no longer be found inside
    a text. So a later step removes this space if the whole text is a user-defined piece. A side
    effect: a user's text that is exactly one user-defined piece loses this space too.
    """
    steps = []
    if tokenizer.charsmap:
        charsmap = base64.b64encode(tokenizer.charsmap).decode()
        steps.append({"type": "Precompiled", "precompiled_charsmap": charsmap})
    if tokenizer.remove_extra_whitespaces:
        steps += [replace("\\A +", "", "Regex"), replace("  +", " ", "Regex")]
    if tokenizer.add_dummy_prefix and not prefixes_first(tokenizer):
        steps.append({"type": "Prepend", "prepend": SPACE})
    steps.append(replace(" ", SPACE))
    symbols = "|".join(re.escape(token["content"]) for token in added_tokens(tokenizer)
                       if token["normalized"])
    if tokenizer.add_dummy_prefix and symbols and not prefixes_first(tokenizer):
        steps.append(replace(f"\\A{SPACE}(?=(?:{symbols})\\z)", "", "Regex"))
    if tokenizer.remove_extra_whitespaces:
        steps.append(replace(f"{SPACE}+\\z", "", "Regex"))
    return steps


def decoders(tokenizer):
    """Return the steps that turn pieces into text and remove the space that encoding adds."""
    steps = [replace(SPACE, " "), {"type": "ByteFallback"}, {"type": "Fuse"}]
    if tokenizer.remove_extra_whitespaces:
        steps.append(replace("\\A +", "", "Regex"))
    elif tokenizer.add_dummy_prefix:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return steps


# ---- training ------------------------------------------------------------------------------------

def train_tokenizer(texts, vocab_size, out_path, exact=True, is_maximum=False):
    """
    Train a Llama-style BPE vocabulary with byte fallback, split digits, no normalization and all
    spaces kept. Write the model to out_path and return the Tokenizer.

    texts: iterable of str. vocab_size: 3 specials, 256 bytes, characters (the rarest 0.01 % of the
    text are written as bytes) and merges.

    If the size is too large for the text: exit if `exact`, else lower it. If it is too small for
    the characters of the text: with is_maximum, keep the size and only the commonest characters
    (`exact` doesn't matter here); else exit if `exact`; else raise it to twice the minimum.

    With is_maximum, the other characters are written as bytes. The characters kept take half of the
    size beyond specials and bytes, and merges the other half. Exit if there is no room for one
    character.
    """
    lines = [line for text in texts for line in text.replace(UNTRAINABLE, "\n").split("\n") if line]
    model, low, high = train_sentencepiece(lines, vocab_size, exact)
    max_characters = (vocab_size - 259) // 2
    if low and is_maximum and max_characters < 1:
        # For the message: with is_maximum a size of 261 is enough, since (261 - 259) // 2 leaves
        # room for 1 character.
        low = min(low, 261)
    elif low and is_maximum:
        counts = Counter("".join(lines)).most_common()
        rare = [character for character, _ in counts[max_characters:]]
        split = str.maketrans(dict.fromkeys(rare, "\n"))
        lines = [part for line in lines for part in line.translate(split).split("\n") if part]
        model, low, high = train_sentencepiece(lines, vocab_size, exact)
    elif low and not exact:
        vocab_size = 2 * low  # half of it for merges
        model, low, high = train_sentencepiece(lines, vocab_size, exact)
    if low:
        fail(f"--vocab_size={vocab_size}: too small for this text, expected at least {low} "
             f"(3 specials, 256 bytes, {low - 259} characters)")
    if high:
        fail(f"--vocab_size={vocab_size}: this text is too small for so many pieces, "
             f"expected at most {high}")
    Path(out_path).write_bytes(model)
    return Tokenizer.load(out_path)


def train_sentencepiece(lines, vocab_size, exact):
    """
    Return (model, low, high). model: its bytes, or None if the text does not allow this size; low:
    the min size that it allows, if vocab_size is smaller, else 0; high: the max size that it
    allows, if vocab_size is larger, else 0.
    """
    model = []

    class Writer:
        write = staticmethod(model.append)

    try:
        spm.SentencePieceTrainer.train(
            sentence_iterator=iter(lines), model_writer=Writer, model_type="bpe",
            vocab_size=vocab_size, byte_fallback=True, split_digits=True,
            allow_whitespace_only_pieces=True, remove_extra_whitespaces=False,
            normalization_rule_name="identity", character_coverage=CHARACTER_COVERAGE,
            unk_surface=UNKNOWN_TEXT, required_chars=SPACE, max_sentence_length=1 << 30,
            hard_vocab_limit=exact, minloglevel=5)
    except RuntimeError as e:
        # sentencepiece's messages: "Vocabulary size is smaller than required_chars. 300 vs 412"
        # and "Vocabulary size too high (9000). Please set it to a value <= 512".
        low = re.search(r"required_chars\. \d+ vs (\d+)", str(e))
        high = re.search(r"value <= (\d+)", str(e))
        if not low and not high:
            fail(f"--vocab_size={vocab_size}: no vocabulary can be trained on a text of "
                 f"{len(lines)} lines")
        return None, int(low[1]) if low else 0, int(high[1]) if high else 0
    return b"".join(model), 0, 0


def train_byte_level(texts, vocab_size, out_path, pre="qwen2", exact=True):
    """
    Train byte-level BPE. Write it to out_path and return the Tokenizer.

    texts: iterable of str. vocab_size: <s>, </s>, 256 bytes and merges. pre: a key of
    PRE_TOKENIZERS. exact: exit if the size is below 258 or too large for the text; if not exact,
    raise it to 258 or lower it. Exit in any case if it is above MAX_TOKENS.
    """
    min_size = 2 + 256
    if vocab_size < min_size and exact:
        fail(f"--vocab_size={vocab_size}: too small, expected at least {min_size} "
             "(2 specials and 256 bytes)")
    if vocab_size > MAX_TOKENS:
        fail(f"--vocab_size={vocab_size}: expected at most {MAX_TOKENS}")
    letters = [(bytes([b]), 0.0, NORMAL) for b in range(256)]
    # The untrained start needs some BOS and EOS; the trainer replaces its vocabulary.
    start = byte_level(letters, [], pre, BosEos(0, 0, False), out_path)
    from tokenizers import trainers
    trainer = trainers.BpeTrainer(
        vocab_size=max(vocab_size, min_size), special_tokens=["<s>", "</s>"],
        initial_alphabet=LETTERS, show_progress=False)
    start.model.train_from_iterator(iter(texts), trainer)
    learned = json.loads(start.model.to_str())["model"]
    names = sorted(learned["vocab"], key=learned["vocab"].get)
    if exact and len(names) < vocab_size:
        fail(f"--vocab_size={vocab_size}: this text is too small for so many pieces, "
             f"expected at most {len(names)}")
    pieces = [(name.encode(), 0.0, CONTROL) if name in ("<s>", "</s>")
              else (bytes_of(name), 0.0, NORMAL) for name in names]
    pairs = [" ".join(pair) for pair in learned["merges"]]
    made = byte_level(pieces, pairs, pre, BosEos(0, 1, True), out_path)
    made.save(out_path)
    return made
