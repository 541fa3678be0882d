"""Byte-level BPE in C compared with Hugging Face's tokenizers.

Covers random strings, vocabularies that must be refused, and the table of character classes. As a
program: a long comparison, or the encoding time of both. ENGLISH, CHINESE and CODE are texts to
train the vocabularies on.

    python -m tests.test_bpe_run STRINGS [ENGLISH CHINESE CODE]
    python -m tests.test_bpe_run time [ENGLISH CHINESE CODE]
"""
import codecs
import json
import random
import re
import resource
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import tokenizers
from tokenizers import pre_tokenizers

import export
import llamac
from engine.text import stories
from tests.conftest import ROOT
from tests.odd_strings import STRINGS
from tests.test_bpe import small_model, theirs
from tests.test_encode import encode_file, tokenize, write_gguf
from tests.test_run import run
from tokenizer import LETTERS, BosEos, Tokenizer, byte_level, train_byte_level

# one U+FFFD for each invalid byte, as in every vocabulary here
codecs.register_error("each byte", lambda e: ("\ufffd" * (e.end - e.start), e.end))
VOCABULARIES = {  # (index of the training text, pre-tokenizer)
    "english, llama-bpe": (0, "llama-bpe"), "english, gpt-2": (0, "gpt-2"),
    "chinese, qwen2": (1, "qwen2"), "code, smollm": (2, "smollm"), "code, qwen2": (2, "qwen2")
}
SYMBOLS = ["<|user|>", "<|user|>x", "<|", "  ", "日月", "éé", "\n\n", " a"]
ODD = [
    "'s", "'S", "'ll", "'LL", "'Re", "'ſ", "’s", "'", "''d", "\n", "\r\n", "\n\n", "\t", "\x0b",
    "\x1c", "\x85", "\u00a0", "\u2028", "\u3000", "\u200b", "\u180e", "\ufeff", "٣٤", "Ⅷ", "½",
    "㊿", "12345", "1", "e\u0301", "\u0301", "ǅ", "ªº", "ʰ", "Ã", "Ġ", "ĊĊ", "🙂", "👩‍👩‍👧", "🇨🇳",
    "한국어", "नमस्ते", "مرحبا", "_", "__init__", "==", "()", "...", "。", "，", "「", "…", "<s>",
    "</s>", "<0x41>", "\u2581"
]


def english():
    return "\n\n".join(stories.write(5, n)[0] for n in range(120))


def texts():
    """Return an English, a Chinese and a code text from the project's own files."""
    return [english(), (ROOT / "README.zh.md").read_text(),
            "".join(f.read_text() for f in sorted(ROOT.glob("*.py")))[:150_000]]


def trained(text, pre, path, vocab_size=1000, symbols=SYMBOLS):
    """Train a vocabulary; add user-defined symbols, which match in text, and the unused [PAD]."""
    made = train_byte_level([text], vocab_size, path, pre, exact=False)
    pieces = (made.pieces() + [(symbol.encode(), 0.0, 4) for symbol in symbols]
              + [(b"[PAD]", 0.0, 5)])
    return byte_level(pieces, made.merges(), pre, BosEos(0, 1, True), path)


def write_model(vocabulary, path):
    model = small_model(vocabulary.vocab_size)
    export.export_model(model.state_dict(), model.args, vocabulary, path)


def random_string(rng, words):
    """Return bytes: words, white space, symbols, characters of all planes, broken UTF-8."""
    def piece():
        kind = rng.randrange(16)
        if kind < 6:
            return rng.choice(words).encode()
        if kind < 9:
            return b" " * rng.choice((1, 1, 1, 2, 3, 5))
        if kind < 11:
            return rng.choice(ODD).encode()
        if kind == 11:
            return rng.choice(SYMBOLS).encode()
        if kind == 12:
            return bytes(rng.choices(range(256), k=rng.randrange(1, 4)))
        if kind == 13:
            return chr(rng.choice((
                rng.randrange(128), rng.randrange(0x80, 0x3000), rng.randrange(0x3000, 0xd800),
                rng.randrange(0xe000, 0x11000), rng.randrange(0x1e000, 0x20000)))).encode()
        if kind == 14:
            return rng.choice(words).encode()[:rng.randrange(1, 4)]
        return "".join(rng.choices("\n\r\t  \u00a0\u3000", k=rng.randrange(1, 5))).encode()
    return b"".join(piece() for _ in range(rng.randrange(14)))


def words_of(text):
    """Return the words of a text, some with white space before them, and runs of punctuation."""
    return [*dict.fromkeys(re.findall(r"\s*\w+|[^\w\s]+|\w[\w，。]{1,6}", text))][:5000] or ["a"]


def difference(model, vocabulary, strings):
    """Compare encoding and decoding of strings between the library and tokenizers.

    Return the first string that differs, the library's ids and those of tokenizers, or None.
    """
    expected = vocabulary.model.encode_batch([s.decode(errors="each byte") for s in strings],
                                             add_special_tokens=False)
    for string, other in zip(strings, expected):
        ours = llamac.encoded("encode", model.pointer, string, len(string), False).tolist()
        if ours != other.ids or model.decode(ours) != string.decode(errors="each byte").encode():
            return string, ours, other.ids
    return None


@pytest.mark.parametrize("name", VOCABULARIES)
def test_encodes_and_decodes_as_tokenizers_does(library, name, tmp_path, count=1000, seed=0):
    number, pre = VOCABULARIES[name]
    text = texts()[number]
    vocabulary, rng = trained(text, pre, tmp_path / "t.json"), random.Random(f"{name} {seed}")
    write_model(vocabulary, tmp_path / "m.gguf")
    words = words_of(text)
    strings = ([s.encode() for s in STRINGS] + [random_string(rng, words) for _ in range(count)]
               + [text.encode()[:20_000]])
    assert difference(llamac.Model(tmp_path / "m.gguf"), vocabulary, strings) is None


@pytest.mark.parametrize("pre", ["llama-bpe", "gpt-2"])
def test_a_text_may_be_no_more_than_a_contraction(library, tmp_path, pre):
    contractions = ["'s", "'t", "'m", "'d", "'re", "'ve", "'ll"]
    vocabulary = trained(" ".join(f"it{c} {c}" for c in contractions) * 50, pre,
                         tmp_path / "t.json", 290)
    write_model(vocabulary, tmp_path / "m.gguf")
    strings = [word[:n].encode() for c in contractions for word in (c, c.upper(), f"it{c}")
               for n in range(1, len(word) + 1)]
    assert len(vocabulary.encode("'re")) == 1
    assert difference(llamac.Model(tmp_path / "m.gguf"), vocabulary, strings) is None


def test_the_first_piece_takes_part_in_merges_as_any_other(library, tmp_path):
    letters = [chr(c) for c in range(65, 123) if chr(c).isalpha()]
    text = "\n".join(f"a{letter}" for letter in letters)
    content = json.loads(trained(text * 20, "qwen2", tmp_path / "t.json", 340, []).model.to_str())
    ids = content["model"]["vocab"]
    first = next(token for token, i in ids.items() if i == 0)
    ids["a"], ids[first] = 0, ids["a"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    vocabulary = Tokenizer.load(tmp_path / "tokenizer.json")
    write_model(vocabulary, tmp_path / "m.gguf")
    strings = [f"a{letter}".encode() for letter in letters]
    assert sum(len(vocabulary.encode(s.decode())) == 1 for s in strings) > 40
    assert vocabulary.encode("a") == [0]
    assert difference(llamac.Model(tmp_path / "m.gguf"), vocabulary,
                      [*strings, text.encode()]) is None


def test_characters_have_the_classes_that_regular_expressions_of_tokenizers_give_them():
    """Check the first and the last character of each run in runtime/unicode.h."""
    runs = [int(run, 16) for run in
            re.findall("0x([0-9a-f]+),", (ROOT / "runtime/unicode.h").read_text())]
    found = {c: run & 3 for run, after in zip(runs, [*runs[1:], 0x110000 << 2])
             for c in (run >> 2, (after >> 2) - 1) if not 0xD800 <= c < 0xE000}
    text, of_class = "".join(map(chr, found)), {
        n: [chr(c) for c in found if found[c] == n] for n in range(4)}
    for number, pattern in ((1, r"\p{L}"), (2, r"\p{N}"), (3, r"\s")):
        split = pre_tokenizers.Split(tokenizers.Regex(pattern), "removed", invert=True)
        assert [piece for piece, _ in split.pre_tokenize_str(text)] == of_class[number], pattern
    assert [piece for piece, _ in
            pre_tokenizers.Digits(True).pre_tokenize_str("a".join(of_class[2]))
            ][::2] == of_class[2]


def test_a_byte_that_has_no_token_is_left_out(run_bin, tmp_path):
    """As in tokenizers, the bytes around it may merge."""
    content = json.loads(theirs("qwen2").to_str())
    gone = LETTERS[ord("#")]
    content["model"]["vocab"] = {
        name: i for i, name in enumerate(n for n in content["model"]["vocab"] if gone not in n)}
    content["model"]["merges"] = [
        pair for pair in content["model"]["merges"] if gone not in "".join(pair)]
    content["added_tokens"] = [token | {"id": len(content["model"]["vocab"]) + i}
                               for i, token in enumerate(content["added_tokens"])]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    vocabulary = Tokenizer.load(tmp_path / "tokenizer.json")
    write_model(vocabulary, tmp_path / "m.gguf")
    strings = ["th#e", "#", "a # b", "##the"]
    assert tokenize(run_bin, [tmp_path / "m.gguf"],
                    [s.encode() for s in strings]) == [vocabulary.encode(s) for s in strings]


@pytest.mark.parametrize("pre", ["qwen2", "smollm"])
def test_a_long_text_without_an_end_is_encoded_at_once(run_bin, tmp_path, pre):
    """Long texts of one word, of white space or without digits are encoded in good time.

    Quadratic encoding would take hours and exceed the time limit.
    """
    vocabulary = trained(english(), pre, tmp_path / "t.json")
    write_model(vocabulary, tmp_path / "m.gguf")
    rng = random.Random(1)
    for text in ("".join(rng.choices("abcdefghilmnoprstuwé日", k=100_000)), " " * 100_000,
                 "a b " * 25_000, "\n " * 50_000, "1" * 100_000):
        assert encode_file(run_bin, tmp_path, text.encode()) == vocabulary.encode(text)


def test_run_prints_characters_that_several_tokens_make(run_bin, tmp_path):
    """Each token is printed at once; an incomplete character waits for its other bytes."""
    text = "天地玄黃，宇宙洪荒。日月盈昃🙂，辰宿列張。"
    vocabulary = trained(text * 3, "qwen2", tmp_path / "t.json", 280, [])
    ids = vocabulary.encode(text)
    parts = [vocabulary.pieces()[i][0] for i in ids]
    assert any(part.decode(errors="ignore").encode() != part and len(part) > 1 for part in parts)
    assert len(ids) > 31
    model = small_model(vocabulary.vocab_size)
    model.args.max_seq_len = 2 * len(ids)
    export.export_model(model.state_dict(), model.args, vocabulary, tmp_path / "m.gguf")
    assert run(run_bin, tmp_path / "m.gguf", "-i", text, "-n", len(ids)) == text.encode() + b"\n"


# ---- damaged and unusual vocabularies

TOKENS = ["<s>", "</s>", "a", "b", "c", "ab", "abc", "<|u|>", "Ġ", "[PAD]"]
TYPES = [3, 3, 1, 1, 1, 1, 1, 4, 1, 5]
KEYS = {"pre": "qwen2", "merges": ["a b", "ab c"], "bos_token_id": 0, "eos_token_id": 1}


def write_bpe(path, tokens=TOKENS, types=TYPES, model="gpt2", **changes):
    """Write the smallest model with a vocabulary.

    changes: metadata values that replace KEYS; None removes the key.
    """
    keys = {f"tokenizer.ggml.{key}": value
            for key, value in (KEYS | changes).items() if value is not None}
    pieces = [(token if isinstance(token, bytes) else token.encode(), 0.0, kind)
              for token, kind in zip(tokens, types)]
    write_gguf(path, pieces, tokenizer=model, **keys)


def other(number, token):
    """Return the change that replaces one of TOKENS."""
    return {"tokens": [token if i == number else t for i, t in enumerate(TOKENS)]}


HOSTILE = {  # (changes, text of run's error message)
    "no merges": ({"merges": None}, "merges is missing"),
    "merges are numbers": ({"merges": [1]}, "merges is missing"),
    "merges are one text": ({"merges": "a b"}, "merges is missing"),
    "a merge without a space": ({"merges": ["a b", "abc"]}, "merge 1 is not two tokens"),
    **{f"the merge {merge!r}": ({"merges": [merge]}, "merge 0 is not two tokens")
       for merge in ("", " ", "a", "a ", " b", "  ")},
    "a merge of three": ({"merges": ["a b c"]}, "the second part is not a text token"),
    "a merge of what is no token": ({"merges": ["x b"]}, "the first part is not a text token"),
    "a merge to what is no token": ({"merges": ["b c"]}, "the result is not a text token"),
    "a merge to a control token": ({**other(1, "bc"), "merges": ["b c"]},
                                "the result is not a text token"),
    "a merge to what is unused": ({**other(9, "bc"), "merges": ["b c"]},
                               "the result is not a text token"),
    "a merge twice": ({"merges": ["a b", "ab c", "a b"]}, "merges 0 and 2 are the same"),
    "a token twice": (other(4, "a"), "tokens 2 and 4 have the same text"),
    "an empty token": (other(4, ""), "token 4 is empty"),
    **{f"the token {token!r}": (other(4, token), "token 4 has a character outside GPT-2's")
       for token in (" ", "a b", "日", "\n", "\u0144", "\u00ad", "\x7f", "a\u0080")},
    "unknown": ({"types": [3, 3, 1, 1, 2, 1, 1, 4, 1, 5]}, "token 4 has type 2"),
    "a byte": ({"types": [3, 3, 1, 1, 6, 1, 1, 4, 1, 5]}, "token 4 has type 6"),
    "another pre-tokenizer": ({"pre": "deepseek-llm"}, "'deepseek-llm'"),
    "no pre-tokenizer": ({"pre": None}, "the pre-tokenizer is ''"),
    "a number": ({"pre": 1}, "the pre-tokenizer is ''"),
    "no end": ({"eos_token_id": None}, "eos_token_id is missing"),
    "an end beyond": ({"eos_token_id": 10}, "beyond the vocabulary"),
    "a beginning beyond": ({"bos_token_id": 10}, "beyond the vocabulary"),
    "another model": ({"model": "bert"}, "'bert'"),
}


def test_damaged_vocabularies_are_refused_in_one_line(run_debug_bin, tmp_path):
    path = tmp_path / "m.gguf"
    for changes, words in HOSTILE.values():
        write_bpe(path, **changes)
        assert words in run(run_debug_bin, path, "--tokenize", "-i", "a", status=1), words
    write_bpe(path)
    data = path.read_bytes()
    assert data.count(b"a b") == 1
    for bad in (b"\xff b", b"a\0b", b"\xc4 b"):
        path.write_bytes(data.replace(b"a b", bad))
        run(run_debug_bin, path, "--tokenize", "-i", "a", status=1)
    for n in range(100, len(data) - 32, 101):
        path.write_bytes(data[:n])
        run(run_debug_bin, path, "--tokenize", "-i", "a", status=1)


def test_no_memory_for_merges_that_are_none(run_bin, tmp_path):
    """12 MB of empty merges are refused before the hash table for them, 64 MiB, is allocated."""
    path, count = tmp_path / "m.gguf", 1_572_866
    write_bpe(path, merges=["a bbbbbb"])  # 8 bytes, so that all tensors stay aligned
    before, after = path.read_bytes().split(struct.pack("<QQ", 1, 8) + b"a bbbbbb")
    path.write_bytes(before + struct.pack("<Q", count) + bytes(8 * count) + after)
    done = subprocess.run(
        [run_bin, path, "--tokenize", "-i", "a"], capture_output=True, text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (48 << 20, 48 << 20)))
    assert done.returncode == 1 and "merge 0 is not two tokens" in done.stderr


def test_what_a_vocabulary_may_lack(run_debug_bin, library, tmp_path):
    """Byte tokens, merges for a token, and BOS may be missing.

    Without add_bos_token, only llama-bpe begins with BOS, as in llama.cpp.
    """
    path = tmp_path / "m.gguf"
    for changes, text, ids in (
            ({}, "abc<|u|>ab cx", b"6 7 5 8 4"), ({"merges": ["ab c"]}, "ab", b"2 3"),
            ({"merges": ["ab c"], "pre": "llama-bpe"}, "ab abc", b"5 8 2 3 4"),
            ({}, "[PAD]</s>é", b""),
            # text never becomes BOS or EOS
            ({"types": [4, 4, *TYPES[2:]]}, "a<s>b</s>", b"2 3")):
        write_bpe(path, **changes)
        assert run(run_debug_bin, path, "--tokenize", "-i", text) == ids + b"\n", changes
    assert run(run_debug_bin, path, "-n", 5, "-t", 9, "-s", 1)
    for changes, expected in (({}, (0, 1, False)), ({"pre": "llama-bpe"}, (0, 1, True)),
                              ({"bos_token_id": None, "add_bos_token": True}, (1, 1, True))):
        write_bpe(path, **changes)
        info = llamac.Model(path).info
        assert (info.bos, info.eos, info.add_bos) == expected, changes


def test_merges_built_to_collide(run_debug_bin, tmp_path):
    """Refuse merges whose pairs have the same hash, which would make a lookup slow."""
    # The slot of a pair is (left << 32 | right) * C >> (64 - bits); the table has 2^bits slots.
    golden, size, bits = 0x9E3779B97F4A7C15, 3000, 12
    base = [f"{a}{b}{c}" for a in "abcdefghijklmnop" for b in "abcdefghijklmnop"
            for c in "abcdefghijklmnop"][:size]
    pairs = sorted((((left << 32 | right) * golden % 2**64) >> (64 - bits), left, right)
                   for left in range(2, 402) for right in range(2, 402))[:2500]
    names = ["<s>", "</s>", *base]
    wholes = [names[left] + names[right] for _, left, right in pairs]
    write_bpe(tmp_path / "m.gguf", names + wholes, [3, 3] + [1] * (len(base) + len(wholes)),
              merges=[f"{names[left]} {names[right]}" for _, left, right in pairs])
    assert "same hash" in run(run_debug_bin, tmp_path / "m.gguf", "--tokenize", "-i", "a", status=1)


# ---- the long comparison

def compare_many(count, sources):
    for name, (number, pre) in VOCABULARIES.items():
        with tempfile.TemporaryDirectory() as folder:
            folder, rng = Path(folder), random.Random(f"long {name}")
            vocabulary, words = (trained(sources[number], pre, folder / "t.json", 4000),
                                 words_of(sources[number]))
            write_model(vocabulary, folder / "m.gguf")
            model, each = llamac.Model(folder / "m.gguf"), count // len(VOCABULARIES)
            for at in range(0, each, 10000):
                found = difference(
                    model, vocabulary,
                    [random_string(rng, words) for _ in range(min(10000, each - at))])
                assert found is None, (name, found)
            print(f"{name}, {vocabulary.vocab_size:,} tokens: {each:,} strings, no difference",
                  flush=True)


def cpu_seconds(encode, text, times=15):
    """Return the CPU time in seconds of one encoding, the minimum of several tries."""
    def once():
        start = time.process_time()
        encode(text)
        return time.process_time() - start
    return min(once() for _ in range(times))


def time_encoding(sources):
    """Print a table of the CPU time of encoding.

    The columns are the library, tokenizers with a cache of the words it has seen, and the first
    encoding by tokenizers, without that cache.
    """
    print("| vocabulary | bytes | here, ms | tokenizers, ms | tokenizers at first, ms |\n"
          "| --- | ---: | ---: | ---: | ---: |")
    for name, (number, pre) in VOCABULARIES.items():
        with tempfile.TemporaryDirectory() as folder:
            vocabulary = trained(sources[number], pre, Path(folder, "t.json"), 16000, [])
            write_model(vocabulary, Path(folder, "m.gguf"))
            model, source = llamac.Model(Path(folder, "m.gguf")), sources[number].encode()
            for size in (10**4, 10**5, 10**6):
                text = source[len(source) // 2:][:size].decode(errors="ignore")
                fresh = tokenizers.Tokenizer.from_str(vocabulary.model.to_str())
                first = cpu_seconds(fresh.encode, text, 1)
                ours, theirs = (cpu_seconds(encode, text)
                                for encode in (lambda t: model.encode(t, bos=False), fresh.encode))
                print(f"| {name} | {len(text.encode()):,} | {1e3 * ours:.2f} | "
                      f"{1e3 * theirs:.2f} | {1e3 * first:.2f} |", flush=True)


if __name__ == "__main__":
    what, *paths = sys.argv[1:]
    sources = [Path(path).read_text(errors="ignore") for path in paths] or texts()
    time_encoding(sources) if what == "time" else compare_many(int(what), sources)
