"""
Text ⇄ token ids. Three kinds of vocabulary behind one interface:

    sentencepiece  a Llama-style BPE model (tokenizer.model), trained here or by someone else
    byte           259 ids: <unk>, <s>, </s> and the 256 bytes; any text, nothing to train
    char           <unk>, <s>, </s> and the sorted characters of one text; a character it has not seen is <unk>

`pieces()` spells each vocabulary the way sentencepiece does, so that a GGUF file or llama2.c's tokenizer.bin made of
it works in a program that knows sentencepiece alone. There a space is U+2581 (▁), and so it is here: a text that
itself holds U+2581 is encoded as if it held a space, and decodes to one.
"""
import base64
import hashlib
import json
import re
import struct
from collections import Counter
from pathlib import Path

import sentencepiece as spm
from sentencepiece import sentencepiece_model_pb2

from configurator import fail

SPACE = "\u2581"  # sentencepiece's visible space
SPECIALS = [("<unk>", 2), ("<s>", 3), ("</s>", 3)]  # ids 0, 1, 2 of the vocabularies we make
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # types of piece, as in sentencepiece and GGUF
UNKNOWN_TEXT = " \u2047 "  # what sentencepiece decodes <unk> to
NEEDED_COVERAGE = 0.9999


def spell(piece, space=" "):
    """An entry of `pieces()` as one reads it: a byte is its ASCII character or else <0x..>, a space is what `space` says."""
    data, _, kind = piece
    byte = int(data[3:5], 16) if kind == BYTE else 255
    return (chr(byte) if byte < 128 else data.decode("utf-8", "replace")).replace(SPACE, " ").replace(" ", space)


class Tokenizer:
    """
    What all kinds share. kind: "sentencepiece", "byte" or "char"; vocab_size, bos_id, eos_id, unk_id: int;
    add_dummy_prefix: a space is put before every text; remove_extra_whitespaces: runs of spaces are collapsed;
    normalizer: "identity", or the name of the rules a loaded model rewrites its text by, compiled in charsmap.
    """
    unk_id, bos_id, eos_id = 0, 1, 2
    add_dummy_prefix = remove_extra_whitespaces = False
    normalizer, charsmap = "identity", b""

    @staticmethod
    def load(path):
        """The tokenizer in a file: .json for a byte or char vocabulary, anything else a sentencepiece model."""
        path = Path(path)
        try:
            data = path.read_bytes()
        except OSError as e:
            fail(f"{path}: {e.strerror}, expected a tokenizer (tokenizer.model or tokenizer.json)")
        return (load_json if path.suffix == ".json" else SentencePiece)(data, path)

    def encode(self, text, bos=False, eos=False):
        """text: str -> ids: list of int, with BOS before and EOS behind where asked."""
        return [self.bos_id] * bos + self._encode(text) + [self.eos_id] * eos

    def sha256(self):
        """Hex digest of the file this tokenizer is saved as."""
        return hashlib.sha256(self.data).hexdigest()

    def save(self, path):
        Path(path).write_bytes(self.data)

    def export_bin(self, path):
        """
        llama2.c's tokenizer.bin, little-endian: uint32 length of the longest piece, then for each piece its float32
        score, int32 length and bytes. A space is a space there, and BOS and EOS are written on lines of their own.
        """
        spelled = {self.bos_id: b"\n<s>\n", self.eos_id: b"\n</s>\n"}
        entries = [(spelled.get(i, piece.replace(SPACE.encode(), b" ")), score)
                   for i, (piece, score, _) in enumerate(self.pieces())]
        with open(path, "wb") as f:
            f.write(struct.pack("<I", max(len(piece) for piece, _ in entries)))
            for piece, score in entries:
                f.write(struct.pack("<fi", score, len(piece)) + piece)

    def hugging_face(self):
        """A tokenizer.json of Hugging Face's tokenizers, as a dict: the same ids for the same text, BOS before them."""
        names = [piece.decode() for piece, _, _ in self.pieces()]
        bos = names[self.bos_id]
        return {
            "version": "1.0", "truncation": None, "padding": None, "added_tokens": added_tokens(self),
            "normalizer": {"type": "Sequence", "normalizers": normalizers(self)}, "pre_tokenizer": None,
            "post_processor": {
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
                "pair": [{"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}},
                         {"SpecialToken": {"id": bos, "type_id": 1}}, {"Sequence": {"id": "B", "type_id": 1}}],
                "special_tokens": {bos: {"id": bos, "ids": [self.bos_id], "tokens": [bos]}}},
            "decoder": {"type": "Sequence", "decoders": decoders(self)},
            "model": {
                "type": "BPE", "dropout": None, "unk_token": names[self.unk_id], "continuing_subword_prefix": None,
                "end_of_word_suffix": None, "fuse_unk": True, "ignore_merges": False,
                "byte_fallback": any(kind == BYTE for _, _, kind in self.pieces()),
                "vocab": {name: i for i, name in enumerate(names)}, "merges": merges(self.pieces())},
        }


class SentencePiece(Tokenizer):
    """A sentencepiece BPE model. data: the bytes of the file, path: its name in messages."""
    kind = "sentencepiece"

    def __init__(self, data, path):
        spm.set_min_log_level(5)  # its own complaints would stand above our one line
        try:
            self.model = spm.SentencePieceProcessor(model_proto=data)
        except RuntimeError:
            fail(f"{path}: not a sentencepiece model, expected a Llama-style tokenizer.model")
        self.data = data
        proto = sentencepiece_model_pb2.ModelProto.FromString(data)
        self._pieces = [(piece.piece.encode(), piece.score, piece.type) for piece in proto.pieces]
        rules = proto.normalizer_spec
        if proto.trainer_spec.model_type != proto.trainer_spec.BPE:
            fail(f"{path}: not a BPE model, expected a Llama-style one (run and llama.cpp merge pairs, as BPE does)")
        self.vocab_size = self.model.vocab_size()
        self.unk_id, self.bos_id, self.eos_id = self.model.unk_id(), self.model.bos_id(), self.model.eos_id()
        if self.bos_id < 0 or self.eos_id < 0:
            fail(f"{path}: has no <s> or no </s>, but every document must begin and end with one")
        self.add_dummy_prefix = rules.add_dummy_prefix
        self.remove_extra_whitespaces = rules.remove_extra_whitespaces
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
        spelled = {0: UNKNOWN_TEXT.encode(), 1: b"", 2: b""}
        return b"".join(spelled[i] if i < 3 else bytes([i - 3]) for i in map(int, ids)).decode(errors="replace")

    def pieces(self):
        """[(bytes of the piece, score, type)] in order of id."""
        letters = [(b"<0x%02X>" % b, 0.0, BYTE) for b in range(256)]
        letters[ord(" ")] = (SPACE.encode(), 0.0, NORMAL)
        return [(piece.encode(), 0.0, kind) for piece, kind in SPECIALS] + letters

    def hugging_face(self):
        """As above, but bytes are spelled as GPT-2 does: its decoder keeps what is UTF-8 beside what is not."""
        made = super().hugging_face()
        plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]  # these are their own letters
        others = iter(range(0x100, 0x200))
        names = [name for name, _ in SPECIALS] + [chr(b if b in plain else next(others)) for b in range(256)]
        level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
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


def load_json(data, path):
    """The byte or char vocabulary in the bytes of a tokenizer.json."""
    try:
        stored = json.loads(data)
        made = Bytes() if stored["kind"] == "byte" else Characters(stored["characters"])
        if made.data == data:
            return made
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    fail(f"{path}: not a vocabulary of ours, expected {{\"kind\": \"byte\"}} or {{\"kind\": \"char\", \"characters\": …}}")


# ---- the parts of Hugging Face's tokenizer.json

def replace(pattern, content, kind="String"):
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def merges(pieces):
    """
    ["left right"], best first: every way to make a piece of two, by the score of the whole. sentencepiece merges what
    makes the best piece, whichever two it is made of.
    """
    normal = {piece.decode(): score for piece, score, kind in pieces if kind == NORMAL}
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
    lines = [line for text in texts for line in text.split("\n") if line]
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

