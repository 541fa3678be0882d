"""
Text ⇄ token ids. Four kinds of vocabulary behind one interface:

    sentencepiece  a Llama-style BPE model (tokenizer.model), trained here or by someone else
    bpe            byte-level BPE as GPT-2, Llama 3, Qwen and SmolLM have it (tokenizer.json); needs `tokenizers`
    byte           259 ids: <unk>, <s>, </s> and the 256 bytes; any text, nothing to train
    char           <unk>, <s>, </s> and the sorted characters of one text; a character it has not seen is <unk>

`pieces()` spells each vocabulary but bpe the way sentencepiece does, so that a GGUF file or llama2.c's tokenizer.bin made of
it works in a program that knows sentencepiece alone. There a space is U+2581 (▁), and so it is here: a text that
itself holds U+2581 is encoded as if it held a space, and decodes to one. The pieces of bpe are the bytes of their text.
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

import sentencepiece as spm
from google.protobuf.unknown_fields import UnknownFieldSet
from sentencepiece import sentencepiece_model_pb2

from configurator import fail
from engine.streams import silent_stderr
from engine.untrusted import MAX_JSON, parse_json, read_json, read_untrusted, reading

SPACE = "\u2581"  # sentencepiece's visible space
SPECIALS = [("<unk>", 2), ("<s>", 3), ("</s>", 3)]  # ids 0, 1, 2 of the vocabularies we make
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # types of piece, as in sentencepiece and GGUF
NO_TEXT = "\u2585"  # sentencepiece learns nothing from lines that hold this, its mark of what it does not know
UNKNOWN_TEXT = " \u2047 "  # what sentencepiece decodes <unk> to
NEEDED_COVERAGE = 0.9999
MOST_TOKENS = 1 << 20  # that a vocabulary may have
MAX_SYMBOL_BYTES = 256  # of a user-defined piece, which is looked for at every place of a text; runtime/tokenizer.c has it too
MAX_MODEL = 1 << 25  # bytes of a tokenizer.model, eight times Gemma's
MAX_POST_PROCESSOR = 1 << 13  # characters of the part of a tokenizer.json that puts BOS before a text; Llama 3's has 1,500
MAX_MERGES = 1 << 28  # characters of the merges that a vocabulary is written out with
ADDS_BOS, ADDS_BOS_TAG = 4242, b"\x90\x89\x02"  # a field of a sentencepiece model, among those left to others, who skip it
WHOLE = {"truncation": None, "padding": None}  # keys of a tokenizer.json; a training leaves some that cut or pad every text
codecs.register_error("hexadecimal", lambda e: ("".join(f"<0x{b:02X}>" for b in e.object[e.start:e.end]), e.end))
codecs.register_error("each to U+FFFD", lambda e: (  # the encoder of UTF-8 wants bytes
    ("\ufffd".encode() if isinstance(e, UnicodeEncodeError) else "\ufffd") * (e.end - e.start), e.end))

# GPT-2's letter of each byte: the Latin-1 character where it is visible, else one from U+0100 on.
PLAIN = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
LETTERS = [chr(b if b in PLAIN else 0x100 + sum(other not in PLAIN for other in range(b))) for b in range(256)]
BYTE_OF = {letter: bytes([b]) for b, letter in enumerate(LETTERS)}

# The pre-tokenizers: how byte-level BPE cuts a text before it merges pairs. By llama.cpp's names, as steps of tokenizer.json.
LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}  # with GPT-2's rules
WORDS = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
         r"|\s*[\r\n]+|\s+(?!\S)|\s+")
PRE_TOKENIZERS = {"gpt-2": [LEVEL], "smollm": [{"type": "Digits", "individual_digits": True}, LEVEL]} | {
    name: [{"type": "Split", "pattern": {"Regex": WORDS % digits}, "behavior": "Isolated", "invert": False},
           LEVEL | {"use_regex": False}] for name, digits in (("llama-bpe", "{1,3}"), ("qwen2", ""))}


def spell(piece, space=" "):
    """
    An entry of `pieces()` as one reads it: a byte is its ASCII character or else <0x..>, as bytes are that are no whole
    character; a space is what `space` says.
    """
    data, _, kind = piece
    byte = int(data[3:5], 16) if kind == BYTE else 255
    return (chr(byte) if byte < 128 else data.decode("utf-8", "hexadecimal")).replace(SPACE, " ").replace(" ", space)


def decode_utf8(data):
    """bytes -> str. Each byte that is no part of a character becomes one U+FFFD, as in run and in sentencepiece."""
    return data.decode(errors="each to U+FFFD")


def without_surrogates(text):
    """
    The text with U+FFFD for each surrogate, which has no UTF-8. Python writes a byte of the command line that is not UTF-8 as a
    surrogate, so this gives `decode_utf8` of the bytes that were typed.
    """
    return text if text.isascii() else text.encode(errors="each to U+FFFD").decode()


class Tokenizer:
    """
    What all kinds share. kind: "sentencepiece", "bpe", "byte" or "char"; vocab_size, bos_id, eos_id: int; unk_id: int or None;
    add_bos: whether a prompt begins with BOS; add_dummy_prefix: a space is put before every text; remove_extra_whitespaces:
    runs of spaces are collapsed; normalizer: "identity", or the name of the rules that a loaded vocabulary rewrites its text
    by, which a sentencepiece model holds compiled in charsmap.
    """
    unk_id, bos_id, eos_id = 0, 1, 2
    add_bos = True
    add_dummy_prefix = remove_extra_whitespaces = False
    normalizer, charsmap = "identity", b""

    @staticmethod
    def load(path):
        """
        The tokenizer in a file: .json for a byte, char or bpe vocabulary, which may be Hugging Face's own tokenizer.json;
        anything else is a sentencepiece model.
        """
        path = Path(path)
        with reading(path, "a tokenizer (tokenizer.model or tokenizer.json)", fail):
            data = read_untrusted(path, MAX_JSON if path.suffix == ".json" else MAX_MODEL)
            return (load_json if path.suffix == ".json" else SentencePiece)(data, path)

    def encode(self, text, bos=False, eos=False):
        """text: str -> ids: list of int, with BOS before and EOS behind where asked."""
        return [self.bos_id] * bos + self._encode(without_surrogates(text)) + [self.eos_id] * eos

    def encode_prompt(self, text, eos=False):
        """As run begins a prompt: with BOS where the vocabulary says so, or where there is nothing else."""
        ids = self.encode(text)
        return [self.bos_id] * (self.add_bos or not ids) + ids + [self.eos_id] * eos

    def sha256(self):
        """Hex digest of the file this tokenizer is saved as."""
        return hashlib.sha256(self.data).hexdigest()

    def save(self, path):
        Path(path).write_bytes(self.data)

    def tokenizer_bin(self):
        """
        llama2.c's tokenizer.bin, little-endian: uint32 length of the longest piece, then for each piece its float32
        score, int32 length and bytes. A space is a space there, and BOS and EOS are written on lines of their own.
        """
        spelled = {self.bos_id: b"\n<s>\n", self.eos_id: b"\n</s>\n"}
        entries = [(spelled.get(i, piece.replace(SPACE.encode(), b" ")), score)
                   for i, (piece, score, _) in enumerate(self.pieces())]
        longest = struct.pack("<I", max(len(piece) for piece, _ in entries))
        return longest + b"".join(struct.pack("<fi", score, len(piece)) + piece for piece, score in entries)

    def hugging_face(self):
        """A tokenizer.json of Hugging Face's, as a dict: the same ids for the same text, and BOS before them if `add_bos`."""
        names = [piece.decode() for piece, _, _ in self.pieces()]
        bos = names[self.bos_id]
        return {
            "version": "1.0", **WHOLE, "added_tokens": added_tokens(self),
            "normalizer": {"type": "Sequence", "normalizers": normalizers(self)}, "pre_tokenizer": None,
            "post_processor": behind(bos, self.bos_id) if self.add_bos else None,
            "decoder": {"type": "Sequence", "decoders": decoders(self)},
            "model": {
                "type": "BPE", "dropout": None, "unk_token": names[self.unk_id], "continuing_subword_prefix": None,
                "end_of_word_suffix": None, "fuse_unk": True, "ignore_merges": False,
                "byte_fallback": any(kind == BYTE for _, _, kind in self.pieces()),
                "vocab": {name: i for i, name in enumerate(names)}, "merges": merges(self.pieces())},
        }


def check_symbols(pieces, path):
    """Refuse a vocabulary whose user-defined pieces are so long that texts would take forever to encode."""
    for i, (piece, _, kind) in enumerate(pieces):
        if kind == USER_DEFINED and len(piece) > MAX_SYMBOL_BYTES:
            fail(f"{path}: token {i} is user-defined and has {len(piece)} bytes, expected at most {MAX_SYMBOL_BYTES}")


class SentencePiece(Tokenizer):
    """
    A sentencepiece BPE model. data: the bytes of the file, path: its name in messages. sentencepiece has no word for whether a
    prompt begins with BOS, so our field has it (`with_bos`); it does where there is none.
    """
    kind = "sentencepiece"

    def __init__(self, data, path):
        spm.set_min_log_level(5)  # its own complaints would stand above our one line
        if data.count(b"\n") > 3 * MOST_TOKENS:  # each piece has this byte twice, before itself and before its text
            fail(f"{path}: too many pieces, expected at most {MOST_TOKENS:,}")
        with reading(path, "a sentencepiece model, a Llama-style tokenizer.model", fail):
            proto = sentencepiece_model_pb2.ModelProto.FromString(data)
            self.model = spm.SentencePieceProcessor(model_proto=data)
        self.data = data
        self._pieces = [(piece.piece.encode(), piece.score, piece.type) for piece in proto.pieces]
        check_symbols(self._pieces, path)
        rules = proto.normalizer_spec
        if proto.trainer_spec.model_type != proto.trainer_spec.BPE:
            fail(f"{path}: not a BPE model, expected a Llama-style one (run and llama.cpp merge pairs, as BPE does)")
        self.vocab_size = self.model.vocab_size()
        self.unk_id, self.bos_id, self.eos_id = self.model.unk_id(), self.model.bos_id(), self.model.eos_id()
        if self.bos_id < 0 or self.eos_id < 0:
            fail(f"{path}: has no <s> or no </s>, but every document must begin and end with one")
        self.add_dummy_prefix = rules.add_dummy_prefix
        self.remove_extra_whitespaces = rules.remove_extra_whitespaces
        self.add_bos = {field.field_number: field.data for field in UnknownFieldSet(proto)}.get(ADDS_BOS) != 0
        self.charsmap = rules.precompiled_charsmap
        self.normalizer = rules.name if self.charsmap else "identity"

    def _encode(self, text):
        return self.model.encode(text)

    def decode(self, ids):
        """ids: ints -> str. BOS and EOS vanish; bytes that are not UTF-8 together become U+FFFD."""
        return self.model.decode([int(i) for i in ids])

    def pieces(self):
        """[(bytes of the piece, score, type)] in order of id; a space is U+2581."""
        return self._pieces

    def with_bos(self, adds, path):
        """The same vocabulary, whose prompts begin with BOS or don't."""
        return self if adds == self.add_bos else SentencePiece(self.data + ADDS_BOS_TAG + bytes([adds]), path)


class Bytes(Tokenizer):
    """
    Id 3 + b is byte b. All but one are byte pieces, <0x00> to <0xFF>; the space alone is spelled as a normal piece,
    because a sentencepiece tokenizer turns it into U+2581 before it looks for pieces.
    """
    kind, vocab_size = "byte", 3 + 256

    def __init__(self):
        self.data = json.dumps({"kind": "byte"}).encode()

    def _encode(self, text):
        return [3 + b for b in text.replace(SPACE, " ").encode()]

    def decode(self, ids):
        """ids: ints -> str. The specials vanish, <unk> excepted; bytes that are not UTF-8 become U+FFFD."""
        spelled = [UNKNOWN_TEXT.encode(), b"", b"", *(bytes([b]) for b in range(256))]
        text = bytearray()  # join would take 80 bytes for each token
        for i in map(int, ids):
            text += spelled[i]
        return text.decode(errors="replace")

    def pieces(self):
        """[(bytes of the piece, score, type)] in order of id."""
        letters = [(b"<0x%02X>" % b, 0.0, BYTE) for b in range(256)]
        letters[ord(" ")] = (SPACE.encode(), 0.0, NORMAL)
        return [(piece.encode(), 0.0, kind) for piece, kind in SPECIALS] + letters

    def hugging_face(self):
        """As above, but bytes are spelled as GPT-2 does: its decoder keeps what is UTF-8 beside what is not."""
        made = super().hugging_face()
        names, level = [name for name, _ in SPECIALS] + LETTERS, LEVEL | {"trim_offsets": False, "use_regex": False}
        made["model"] |= {"byte_fallback": False, "vocab": {name: i for i, name in enumerate(names)}}
        return made | {"normalizer": replace(SPACE, " "), "pre_tokenizer": level, "decoder": level}


class Characters(Tokenizer):
    """Id 3 + i is the i-th of the sorted `characters`. A run of characters it has not seen is one <unk>."""
    kind = "char"

    def __init__(self, characters):
        self.characters = sorted(set(characters.replace(SPACE, " ")))
        self.vocab_size = 3 + len(self.characters)
        self.ids = {c: 3 + i for i, c in enumerate(self.characters)}
        self.data = json.dumps({"kind": "char", "characters": "".join(self.characters)}).encode()

    def _encode(self, text):
        ids = [self.ids.get(c, 0) for c in text.replace(SPACE, " ")]
        if 0 not in ids:
            return ids
        return [i for i, before in zip(ids, [1] + ids) if i or before]  # as sentencepiece does: one for the run

    def decode(self, ids):
        """ids: ints -> str. BOS and EOS vanish."""
        spelled = [UNKNOWN_TEXT, "", ""] + self.characters
        return "".join(spelled[int(i)] for i in ids)

    def pieces(self):
        """[(bytes of the piece, score, type)] in order of id; a space is U+2581."""
        letters = [(c.replace(" ", SPACE).encode(), 0.0, NORMAL) for c in self.characters]
        return [(piece.encode(), 0.0, kind) for piece, kind in SPECIALS] + letters


class ByteLevel(Tokenizer):
    """
    Byte-level BPE. data: the bytes of {"kind": "bpe", "bos", "eos": ids, "add_bos": bool, "vocab_size": int, "tokenizer": what
    Hugging Face's tokenizer.json holds}, path: its name in messages. Ids up to vocab_size that no token has are [PAD<id>],
    as llama.cpp's converter calls the rows of a model that its tokenizer doesn't use.
    """
    kind, unk_id = "bpe", None

    def __init__(self, data, path):
        stored = parse_json(data)
        self.data, self.tokenizer, self.add_bos = data, stored["tokenizer"] | WHOLE, bool(stored["add_bos"])
        self.bos_id, self.eos_id, self.vocab_size = (int(stored[name]) for name in ("bos", "eos", "vocab_size"))
        self.pre = pre_tokenizer(self.tokenizer, path)
        self.normalizer = (self.tokenizer.get("normalizer") or {"type": "identity"})["type"]
        self.model = hugging_face_model(self.tokenizer, path)
        self.model.encode_special_tokens = True  # a text that holds "<s>" holds three letters, as everywhere here
        self._pieces = byte_level_pieces(self.model, self.vocab_size, path)
        check_symbols(self._pieces, path)
        if not 0 <= min(self.bos_id, self.eos_id) <= max(self.bos_id, self.eos_id) < self.vocab_size:
            fail(f"{path}: BOS is {self.bos_id} and EOS {self.eos_id}, expected tokens below {self.vocab_size}")

    def _encode(self, text):
        return self.model.encode(text, add_special_tokens=False).ids

    def decode(self, ids):
        """ids: ints -> str. Control tokens vanish; bytes that are not UTF-8 together become U+FFFD."""
        found = (self._pieces[int(i)] for i in ids)
        return b"".join(piece for piece, _, kind in found if kind not in (CONTROL, UNUSED)).decode(errors="replace")

    def pieces(self):
        """[(bytes of the text, 0.0, type)] in order of id."""
        return self._pieces

    def merges(self):
        """["left right"] in GPT-2's letters, the one that comes first first."""
        return [pair if isinstance(pair, str) else " ".join(pair) for pair in self.tokenizer["model"]["merges"]]

    def tokenizer_bin(self):
        fail("byte-level BPE: llama2.c's tokenizer.bin can't hold it; use --format=gguf or --format=hf")

    def hugging_face(self):
        return self.tokenizer


def hugging_face_model(tokenizer, path):
    """The tokenizers.Tokenizer of a tokenizer.json's content."""
    try:
        import tokenizers
    except ImportError:
        fail(f"{path}: byte-level BPE needs a package: pip install tokenizers")
    # A panic in Rust writes to stderr what `reading` says in one line.
    with reading(path, "a tokenizer.json that the package tokenizers wrote", fail), silent_stderr():
        if len(json.dumps(tokenizer.get("post_processor"))) > MAX_POST_PROCESSOR:  # its lists multiply each other
            raise ValueError(f"its post_processor is longer than {MAX_POST_PROCESSOR:,} characters")
        model = tokenizers.Tokenizer.from_str(json.dumps(tokenizer))
        model.encode("a")
        return model


def pre_tokenizer(tokenizer, path):
    """llama.cpp's name of a tokenizer.json's pre-tokenizer. Whatever makes it other than byte-level BPE is refused."""
    model, cut = tokenizer["model"], tokenizer.get("pre_tokenizer") or {"type": "none"}
    steps = [LEVEL | step | {"trim_offsets": True} if step["type"] == "ByteLevel" else step
             for step in cut.get("pretokenizers", [cut])]
    found = next((name for name, known in PRE_TOKENIZERS.items() if steps == known), None)
    if model.get("type", "BPE") != "BPE" or steps[-1]["type"] != "ByteLevel":
        fail(f"{path}: not byte-level BPE (its model is {model.get('type')}, its pre-tokenizer "
             f"{' + '.join(step['type'] for step in steps)}); of a sentencepiece vocabulary give the tokenizer.model")
    if not found:
        fail(f"{path}: its pre-tokenizer is none of {', '.join(PRE_TOKENIZERS)}, which are the ones that ./run knows")
    if (tokenizer.get("normalizer") or {"type": "NFC"})["type"] != "NFC":
        fail(f"{path}: its normalizer is {tokenizer['normalizer']['type']}, expected none or NFC")
    for key in "dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback":
        if model.get(key):
            fail(f"{path}: its model has {key}={model[key]!r}, expected none, as in byte-level BPE")
    if bool(model.get("ignore_merges")) != (found == "llama-bpe"):
        fail(f"{path}: ignore_merges is {bool(model.get('ignore_merges'))}, with the pre-tokenizer {found} "
             f"expected {found == 'llama-bpe'}, as llama.cpp has it")
    return found


def byte_level_pieces(model, vocab_size, path):
    """What `pieces()` says of a tokenizers.Tokenizer."""
    vocabulary, added = model.get_vocab(with_added_tokens=True), model.get_added_tokens_decoder()
    if vocab_size > MOST_TOKENS:
        fail(f"{path}: {vocab_size} tokens, expected at most {MOST_TOKENS}")
    pieces = [(b"[PAD%d]" % i, 0.0, UNUSED) for i in range(vocab_size)]
    if vocabulary and max(vocabulary.values()) >= vocab_size or len({*vocabulary.values()}) < len(vocabulary):
        fail(f"{path}: {len(vocabulary)} tokens with ids up to {max(vocabulary.values())}, expected one each below {vocab_size}")
    for name, i in vocabulary.items():
        if i in added:
            pieces[i] = name.encode(), 0.0, CONTROL if added[i].special else USER_DEFINED
        elif all(letter in BYTE_OF for letter in name):
            pieces[i] = b"".join(map(BYTE_OF.get, name)), 0.0, NORMAL
        else:
            fail(f"{path}: token {i} is {name!r}, expected GPT-2's letters of bytes; not byte-level BPE")
    return pieces


def stored_byte_level(tokenizer, bos_id, eos_id, add_bos, vocab_size, path):
    """The ByteLevel of what a tokenizer.json holds, and of what it doesn't say."""
    stored = {"kind": "bpe", "bos": bos_id, "eos": eos_id, "add_bos": add_bos, "vocab_size": vocab_size, "tokenizer": tokenizer}
    return ByteLevel(json.dumps(stored).encode(), path)


def byte_level(pieces, merges, pre, bos_id, eos_id, add_bos, path):
    """The ByteLevel of [(bytes of the text, score, type)] and ["left right"] in GPT-2's letters, best first."""
    names = ["".join(LETTERS[b] for b in piece) if kind == NORMAL else piece.decode(errors="replace") for piece, _, kind in pieces]
    if len({*names}) < len(names):
        fail(f"{path}: two of its {len(names)} tokens are spelled alike, so nobody can tell which is meant")
    steps, special = PRE_TOKENIZERS[pre], {CONTROL: True, USER_DEFINED: False}
    tokenizer = {
        "version": "1.0", **WHOLE, "normalizer": None,
        "added_tokens": [{"id": i, "content": names[i], "single_word": False, "lstrip": False, "rstrip": False,
                          "normalized": False, "special": special[kind]}
                         for i, (_, _, kind) in enumerate(pieces) if kind in special],
        "pre_tokenizer": steps[0] if len(steps) == 1 else {"type": "Sequence", "pretokenizers": steps},
        "post_processor": behind(names[bos_id], bos_id) if add_bos else None, "decoder": LEVEL,
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": pre == "llama-bpe",
                  "vocab": {name: i for i, name in enumerate(names) if pieces[i][2] != UNUSED}, "merges": merges}}
    return stored_byte_level(tokenizer, bos_id, eos_id, add_bos, len(pieces), path)


def text_of(token):
    """The text of a token of tokenizer_config.json, which is a string, or an object that holds one."""
    return token.get("content") if isinstance(token, dict) else token


def beside(folder, name):
    """The object in a .json file of a folder, without nulls; {} where there is none."""
    try:
        found = read_json(folder / f"{name}.json", MAX_JSON)
    except (OSError, ValueError):
        return {}
    return {key: value for key, value in found.items() if value is not None}


def special_tokens(folder):
    """
    {"bos_token", "eos_token" and others: text or object} of a Hugging Face folder. As in transformers,
    special_tokens_map.json comes first where tokenizer_config.json lists no added tokens.
    """
    config = beside(folder, "tokenizer_config")
    return config if "added_tokens_decoder" in config else config | beside(folder, "special_tokens_map")


def generation(folder):
    """
    {"eos_token_id", "pad_token_id": [ids]} that transformers generates with: those of
    generation_config.json where there is one, else of config.json.
    """
    there = (folder / "generation_config.json").exists()
    config, found = beside(folder, "generation_config" if there else "config"), {}
    for name in "eos_token_id", "pad_token_id":
        ids = config.get(name, [])
        found[name] = [i for i in (ids if isinstance(ids, list) else [ids]) if type(i) is int and 0 <= i < MOST_TOKENS]
    return found


FLAGS = {"lstrip": "takes the blanks before it along", "rstrip": "takes the blanks behind it along",
         "single_word": "stands only between words"}


def refuse_flags(tokens, path):
    """
    One line where a token that text may name is found in another way than by its spelling alone,
    which neither model files nor run can do. tokens: [{"id", "content", "special", ...}], as
    tokenizer.json lists them.
    """
    named = [token for token in tokens if not token.get("special")]
    for token in named:
        flag = next((flag for flag in FLAGS if token.get(flag)), None)
        if flag:
            fail(f"{path}: the added token {token.get('content')!r} has {flag}: it {FLAGS[flag]}, "
                 f"which model files and run can't do; set {flag} to false there to do without")
    normalized = {str(token.get("content")) for token in named if token.get("normalized")}
    others = {str(token.get("content")) for token in named} - normalized
    for late, early in itertools.product(normalized, others):
        if early in late or any(late.endswith(early[:n]) for n in range(1, len(early))):
            fail(f"{path}: the added tokens {early!r} and {late!r} overlap, and the former is looked for "
                 "first, as only the latter is normalized, which model files and run can't do; give "
                 "both the same there")


def from_hugging_face(tokenizer, path):
    """The ByteLevel of a tokenizer.json. BOS, EOS and the model's number of rows are what the files beside it say."""
    pre_tokenizer(tokenizer, path)
    merge_added_tokens(tokenizer, path)
    model = hugging_face_model(tokenizer, path)
    found = beside(path.parent, "config") | beside(path.parent, "generation_config") | special_tokens(path.parent)

    def special(which):
        """The id of "bos" or "eos": tokenizer_config.json has its text, the others its number or a list of those."""
        text, ids = found.get(f"{which}_token", ""), found.get(f"{which}_token_id")
        named = model.token_to_id(text_of(text))
        return named if named is not None else ids[0] if isinstance(ids, list) and ids else ids

    first, eos_id = model.encode("").ids[:1], special("eos")
    if not isinstance(eos_id, int):
        fail(f"{path}: no file beside it says what EOS is; expected a tokenizer_config.json with eos_token")
    bos_id = first[0] if first else special("bos")
    bos_id = bos_id if isinstance(bos_id, int) else eos_id  # as in Qwen: what ends a text stands between two
    size, rows = max(model.get_vocab(with_added_tokens=True).values(), default=0) + 1, found.get("vocab_size")
    ends = [i for i in generation(path.parent)["eos_token_id"] if i not in (bos_id, eos_id)]
    for token in tokenizer["added_tokens"]:
        token["special"] |= token["id"] in (bos_id, eos_id, *ends[:1])  # else words in a text could be one of these
    refuse_flags(tokenizer["added_tokens"], path)
    return stored_byte_level(tokenizer, bos_id, eos_id, first == [bos_id], max(size, rows if isinstance(rows, int) else 0), path)


def merge_added_tokens(tokenizer, path):
    """
    Give a tokenizer.json the added tokens that the tokenizer_config.json beside it lists, as
    transformers does: they replace those of the same id. Refuse one of another spelling.
    """
    listed = beside(path.parent, "tokenizer_config").get("added_tokens_decoder", {})
    added = {token["id"]: token for token in tokenizer["added_tokens"]}
    spelled = {i: name for name, i in tokenizer["model"]["vocab"].items()} | {i: token["content"] for i, token in added.items()}
    for i, token in listed.items():
        if token["content"] != spelled.get(int(i), token["content"]):
            fail(f"{path}: token {int(i)} is {spelled[int(i)]!r}, but {token['content']!r} in the tokenizer_config.json beside it; "
                 "one of the two is another model's")
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
        added[int(i)] = {"id": int(i), **flags, **added.get(int(i), {}), **token}
    tokenizer["added_tokens"] = [added[i] for i in sorted(added)]


def of_single_letters(tokenizer):
    """The byte or char vocabulary whose tokenizer.json this is, as export.py writes it; None where it is another's."""
    letters = (name.replace(SPACE, " ") for name in tokenizer["model"]["vocab"])
    candidates = Bytes(), Characters("".join(letter for letter in letters if len(letter) == 1))
    return next((made for made in candidates if json.loads(json.dumps(made.hugging_face())) == tokenizer), None)


def load_json(data, path):
    """The byte, char or bpe vocabulary in the bytes of a tokenizer.json."""
    stored = parse_json(data)
    if "model" in stored and "added_tokens" in stored:
        stored |= WHOLE
        return of_single_letters(stored) or from_hugging_face(stored, path)
    if stored.get("kind") == "bpe":
        return ByteLevel(data, path)
    made = Bytes() if stored.get("kind") == "byte" else Characters(stored.get("characters", ""))
    if made.data != data:
        fail(f"{path}: neither a vocabulary of ours nor Hugging Face's byte-level BPE, expected one that "
             f"data.py --vocab_source=byte or char has written, or a tokenizer.json")
    return made


# ---- the parts of Hugging Face's tokenizer.json

def replace(pattern, content, kind="String"):
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def behind(bos, bos_id):
    """The post-processor that puts BOS before a text, and before each of two."""
    text, pair = ([{"SpecialToken": {"id": bos, "type_id": n}}, {"Sequence": {"id": name, "type_id": n}}]
                  for n, name in enumerate("AB"))
    return {"type": "TemplateProcessing", "single": text, "pair": text + pair,
            "special_tokens": {bos: {"id": bos, "ids": [bos_id], "tokens": [bos]}}}


def merges(pieces):
    """
    ["left right"], best first: every way to make a piece of two, by the score of the whole. sentencepiece merges what
    makes the best piece, whichever two it is made of.
    """
    normal = {piece.decode(): score for piece, score, kind in pieces if kind == NORMAL}
    if sum(len(piece) ** 2 for piece in normal) > MAX_MERGES:
        fail(f"the vocabulary's pieces are too long to be written as merges: they would take over {MAX_MERGES:,} characters")
    ranked = sorted(normal, key=normal.get, reverse=True)
    return [f"{whole[:i]} {whole[i:]}" for whole in ranked for i in range(1, len(whole))
            if whole[:i] in normal and whole[i:] in normal]


def added_tokens(t):
    """
    The pieces that are never merged: specials, which text does not name, and user-defined ones, which it does. Those
    that hold a space, or end with one where such are removed, can't be in a text that `normalizers` has gone over.
    """
    def named(piece, kind):
        gone = b" " in piece or t.remove_extra_whitespaces and piece.endswith(SPACE.encode())
        return kind == USER_DEFINED and not gone

    return [{"id": i, "content": piece.decode(), "single_word": False, "lstrip": False, "rstrip": False,
             "normalized": kind == USER_DEFINED, "special": kind != USER_DEFINED}
            for i, (piece, _, kind) in enumerate(t.pieces()) if kind in (UNKNOWN, CONTROL) or named(piece, kind)]


def normalizers(t):
    """
    What becomes of a text before it is cut into pieces, step by step. The pieces of `added_tokens` go the same way before
    they are looked for, and must not get a space; a text that is one of them and nothing else gets none either.
    """
    symbols = [re.escape(token["content"]) for token in added_tokens(t) if token["normalized"]]
    steps = []
    if t.charsmap:
        steps.append({"type": "Precompiled", "precompiled_charsmap": base64.b64encode(t.charsmap).decode()})
    if t.remove_extra_whitespaces:
        steps += [replace("\\A +", "", "Regex"), replace("  +", " ", "Regex")]
    if t.add_dummy_prefix:
        steps.append({"type": "Prepend", "prepend": SPACE})
    steps.append(replace(" ", SPACE))
    if t.add_dummy_prefix and symbols:
        steps.append(replace(f"\\A{SPACE}(?=(?:{'|'.join(symbols)})\\z)", "", "Regex"))
    if t.remove_extra_whitespaces:
        steps.append(replace(f"{SPACE}+\\z", "", "Regex"))
    return steps


def decoders(t):
    """How pieces become text again."""
    steps = [replace(SPACE, " "), {"type": "ByteFallback"}, {"type": "Fuse"}]
    if t.remove_extra_whitespaces:
        return steps + [replace("\\A +", "", "Regex")]
    return steps + [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] * t.add_dummy_prefix


def train_tokenizer(texts, vocab_size, out_path, exact=True, most=False):
    """
    Train a Llama-style BPE vocabulary: byte fallback, digits split, no normalisation, every space kept.
    texts: iterable of str. The model is written to out_path, and returned as a Tokenizer.
    vocab_size counts 3 specials, 256 bytes, the characters (the rarest 0.01 % of a text are left to the bytes) and
    merges. A size this text cannot give is an error; with exact=False it is raised or lowered to one it can. With most=True
    it is never raised: the commonest characters get half of what the bytes leave, and the others are written as bytes.
    """
    lines = [line for text in texts for line in text.replace(NO_TEXT, "\n").split("\n") if line]
    model, low, high = attempt(lines, vocab_size, exact)
    if low and most:
        rare = Counter("".join(lines)).most_common()[(vocab_size - 259) // 2:]
        split = str.maketrans(dict.fromkeys((c for c, _ in rare), "\n"))
        lines = [part for line in lines for part in line.translate(split).split("\n") if part]
        model, low, high = attempt(lines, vocab_size, exact)
    elif low and not exact:
        vocab_size = 2 * low
        model, low, high = attempt(lines, vocab_size, exact)
    if low:
        fail(f"--vocab_size={vocab_size}: too small for this text, expected at least {low} "
             f"(3 specials, 256 bytes, {low - 259} characters)")
    if high:
        fail(f"--vocab_size={vocab_size}: this text does not hold so many pieces, expected at most {high}")
    Path(out_path).write_bytes(model)
    return Tokenizer.load(out_path)


def train_byte_level(texts, vocab_size, out_path, pre="qwen2", exact=True):
    """
    Train byte-level BPE with the pre-tokenizer of that name. texts: iterable of str. It is written to out_path, and returned.
    vocab_size counts <s>, </s>, 256 bytes and merges. A size this text cannot give is an error, or lowered with exact=False.
    """
    specials = ["<s>", "</s>"]
    least = len(specials) + 256
    if vocab_size < least and exact:
        fail(f"--vocab_size={vocab_size}: too small, expected at least {least} (2 specials and 256 bytes)")
    if vocab_size > MOST_TOKENS:
        fail(f"--vocab_size={vocab_size}: expected at most {MOST_TOKENS}")
    start = byte_level([(bytes([b]), 0.0, NORMAL) for b in range(256)], [], pre, 0, 0, False, out_path)
    from tokenizers import trainers
    trainer = trainers.BpeTrainer(vocab_size=max(vocab_size, least), special_tokens=specials, initial_alphabet=LETTERS,
                                  show_progress=False)
    start.model.train_from_iterator(iter(texts), trainer)
    learned = json.loads(start.model.to_str())["model"]
    names = sorted(learned["vocab"], key=learned["vocab"].get)
    if exact and len(names) < vocab_size:
        fail(f"--vocab_size={vocab_size}: this text does not hold so many pieces, expected at most {len(names)}")
    pieces = [(name.encode(), 0.0, CONTROL) if name in specials else (b"".join(map(BYTE_OF.get, name)), 0.0, NORMAL)
              for name in names]
    made = byte_level(pieces, [" ".join(pair) for pair in learned["merges"]], pre, 0, 1, True, out_path)
    made.save(out_path)
    return made


def attempt(lines, vocab_size, exact):
    """One training run -> (model bytes or None, least size this text needs or 0, greatest size it fills or 0)."""
    model = []

    class Writer:
        write = staticmethod(model.append)

    try:
        spm.SentencePieceTrainer.train(
            sentence_iterator=iter(lines), model_writer=Writer, model_type="bpe", vocab_size=vocab_size,
            byte_fallback=True, split_digits=True, allow_whitespace_only_pieces=True, remove_extra_whitespaces=False,
            normalization_rule_name="identity", character_coverage=NEEDED_COVERAGE, unk_surface=UNKNOWN_TEXT,
            required_chars=SPACE, max_sentence_length=1 << 30, hard_vocab_limit=exact, minloglevel=5)
    except RuntimeError as e:
        low, high = re.search(r"required_chars\. \d+ vs (\d+)", str(e)), re.search(r"value <= (\d+)", str(e))
        if not low and not high:
            fail(f"--vocab_size={vocab_size}: no vocabulary can be trained on a text of {len(lines)} lines")
        return None, int(low[1]) if low else 0, int(high[1]) if high else 0
    return b"".join(model), 0, 0

