"""
The JSON grammar, through tests/grammar.c, compared with Python's json: random walks over allowed
tokens, documents read byte by byte and as encoded, texts that json refuses, and the token budget
compared with an exhaustive search over sequences of tokens.
"""
import itertools
import json
import random
import re
import subprocess

import pytest

from tests.conftest import LIBRARY, SANITIZE, compile_c
from tests.test_bpe_run import texts, trained, write_model
from tests.test_encode import SPACE, VOCABULARIES, pieces_of, train, write_gguf

DEPTH, SPACES = 64, 20  # LLAMAC_JSON_DEPTH, LLAMAC_JSON_SPACES
SPECIAL = [(b"<unk>", 0.0, 2), (b"<s>", 0.0, 3), (b"</s>", 0.0, 3)]
BYTES = [(b"<0x%02X>" % b, 0.0, 6) for b in range(256)]
ODD = [
    '"}', '"}}', "]]", "]]]]", "}]", "},", "},{", '"},{"', '":', '":"', '": "', '", "', '"]', "[]",
    "{}", "[[", "[{", '{"', '[{"', "[[[[[[[[", " ", '"\\u', "\\", "\\\\", "\\ud83d", "\\ude00",
    "\\uD", "00", "12", "-1", "0.", ".5", "e+", "E-1", "1e5", "tru", "true", "ue", "false", "null",
    "nul", "l,", "NaN", "Infinity", "\n", "\n  ", "  ", " " * 16, "\t", "\r\n", " }", "\n}", ",\n",
    " : ", "\x7f", "é", "日本", "😀", '"é"', "é\"", "1,", "1]", "1}", "a", "ab", "a\"}", "/*", "//",
    "'", "{'", ",]", ",}", ',"', ',"":1}', '],"', "[1,"
]
HALVES = [
    b"\xc3", b"\xa9\"", b"\xf0\x9f", b"\x98\x80", b"\xe6\x97", b"\xa5\xe6", b"\xed\xa0", b"\xc0",
    b"\x80", b"\xf4\x90", b"\xe0\x80"
]
MADE = {
    "bytes": SPECIAL + BYTES,
    "odd": SPECIAL + BYTES + [(piece.replace(" ", SPACE).encode(), 0.0, 1) for piece in ODD]
    + [(half, 0.0, 1) for half in HALVES] + [(b"<|end|>", 0.0, 4), (b"unused", 0.0, 5)],
    "characters": SPECIAL + [(c.encode(), 0.0, 1) for c in "{}[]:,\"\\u01dDceftrslan-. é😀"]
}


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    return compile_c(
        tmp_path_factory.mktemp("grammar") / "grammar", *SANITIZE, "tests/grammar.c", *LIBRARY)


def write_vocabulary(name, path):
    if name in MADE:
        write_gguf(path, MADE[name], tokenizer="llama"
                   if (b"<0x00>", 0.0, 6) in MADE[name] else "llama-without-bytes")
    elif name == "byte-level":
        write_model(trained(
            json.dumps(json.loads(document(random.Random(0), 2000)), indent=2) + texts()[2],
            "qwen2", path), path)
    else:
        write_gguf(path, pieces_of(train(**VOCABULARIES[name], required_chars="{}[]:,\"")),
                   VOCABULARIES[name].get("add_dummy_prefix", True))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Return a function that returns the model file of a vocabulary, written at its first call."""
    folder, made = tmp_path_factory.mktemp("models"), {}

    def file(name):
        if name not in made:
            made[name] = folder / f"{len(made)}.gguf"
            write_vocabulary(name, made[name])
        return made[name]
    return file


NAMES = [*MADE, "byte-level", "ours", "symbols", "unused", "no prefix, no bytes"]


def call(*command, texts=()):
    done = subprocess.run([*map(str, command)], capture_output=True, text=True,
                          input="".join(text.hex() + "\n" for text in texts))
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()


def refuse(constant):
    raise ValueError(constant)


def no_surrogates(value):
    """Raise ValueError if a string holds a surrogate: json.loads accepts unpaired ones."""
    json.dumps(value, ensure_ascii=False).encode()


def is_json(text):
    """
    Return whether bytes are JSON as in RFC 8259, within the grammar's bounds. Python's json is the
    oracle. Objects become lists of pairs, because a dict forgets the first of two values of a key.
    Integers stay texts, because Python refuses long ones.
    """
    try:
        no_surrogates(json.loads(text.decode(), parse_constant=refuse, parse_int=str,
                                 object_pairs_hook=list))
    except ValueError:
        return False
    outside = re.sub(rb'"(?:[^"\\]|\\.)*"', b'""', text)
    depth = max(itertools.accumulate({91: 1, 123: 1, 93: -1, 125: -1}.get(c, 0) for c in outside),
                default=0)
    return depth <= DEPTH and max(map(len, re.findall(rb"[ \t\n\r]*", outside))) <= SPACES


# ---- random documents

CHARACTERS = [
    "a", "Z", "0", " ", "\x7f", "\x80", "é", "߿", "ࠀ", "日", "\ud7ff", "\ue000", "\uffff", "\ufeff",
    "\U00010000", "😀", "\U0010ffff", '\\"', "\\\\", "\\/", "\\b", "\\f", "\\n", "\\r", "\\t",
    "\\u0000", "\\uD7ff", "\\ue000", "\\u00e9", "\\ud83d\\ude00", "\\uDBFF\\uDFFF",
    "\\uD800\\udC00", "{", "}", "[", "]", ":", ","
]


def string(rng):
    return '"' + "".join(rng.choices(CHARACTERS, k=rng.choice([0, 1, 2, 5, 12]))) + '"'


def number(rng):
    whole = rng.choice(["0", str(rng.randrange(1, 10)), str(rng.randrange(10**12))])
    return (rng.choice(["", "-"]) + whole
            + rng.choice(["", "", "." + str(rng.randrange(1000)).zfill(rng.randrange(1, 5))])
            + rng.choice(["", "", "", rng.choice("eE") + rng.choice(["", "+", "-"])
                          + str(rng.randrange(20)).zfill(rng.randrange(1, 4))]))


def document(rng, size, depth=0):
    """Return a JSON text with about `size` values, and whitespace of all kinds up to SPACES."""
    def space():
        return "".join(rng.choices(" \t\n\r", k=rng.choice([0, 0, 0, 0, 1, 2, 20])))
    kind = rng.randrange(6) if size > 1 and depth < DEPTH - 1 else rng.randrange(4)
    if kind < 2:
        return string(rng) if kind else number(rng)
    if kind < 4:
        return rng.choice(["true", "false", "null", "[]", "{}", f"[{space()}]",
                           f"{{{space()}}}"]) if depth < DEPTH else "0"
    n = rng.randrange(1, 5)
    items = [space() + document(rng, size // n, depth + 1) + space() for _ in range(n)]
    if kind == 4:
        return "[" + ",".join(items) + "]"
    return "{" + ",".join(f"{space()}{string(rng)}{space()}:{item}" for item in items) + "}"


def documents(count, seed=0, size=40):
    rng = random.Random(seed)
    made = [document(rng, rng.randrange(size)).encode() for _ in range(count)]
    made += [b"[" * DEPTH + b"]" * DEPTH, b'{"":' * DEPTH + b"0" + b"}" * DEPTH,
             b" " * SPACES + b"0" + b"\n" * SPACES, b"[0" + b" " * SPACES + b"]"]
    assert all(map(is_json, made))
    return made


WRONG = [
    b"", b" ", b"[", b"]", b"{", b"}", b"[1", b"[1,", b"[1,]", b"[,1]", b"[1 2]", b"[1}",
    b'{"a":1]', b'{"a"}', b'{"a":}', b'{"a":1,}', b"{1:2}", b"{a:1}", b"{'a':1}", b"01", b"-",
    b"-01", b"+1", b".5", b"1.", b"1.e5", b"1e", b"1e+", b"0x10", b"1 2", b"NaN", b"Infinity",
    b"-Infinity", b"nan", b"True", b"tru", b"truee", b"nulll", b'"', b'"\n"', b'"\t"', b'"\x00"',
    b'"\x1f"', b'"\\x41"', b'"\\u12g4"', b'"\\u123"', b'"\\', b'"\\ud800"', b'"\\udc00"',
    b'"\\ud800\\ud800"', b'"\\ud800\\n"', b'"\\ud800x"', b'"\\udbff\\ue000"', b'"\xc0\x80"',
    b'"\xc1\xbf"', b'"\xe0\x9f\xbf"', b'"\xed\xa0\x80"', b'"\xf0\x8f\xbf\xbf"',
    b'"\xf4\x90\x80\x80"', b'"\xf5\x80\x80\x80"', b'"\xff"', b'"\xc3"', b'"\xc3', b'"\x80"',
    b'"\xe6\x97"', b'"\xf0\x9f\x98"', b"\xef\xbb\xbf1", b"1\x0b", b"\xc2\xa01", b"1//", b"/**/1",
    b"[" * (DEPTH + 1) + b"]" * (DEPTH + 1), b'{"a":"\\ud800","a":1}', b'{"a":["\\udc00"],"a":1}',
    b" " * (SPACES + 1) + b"1", b"1" + b" " * (SPACES + 1), b"1,2", b"[]]", b"{}{}", b'"a""b"',
    b'"a":1', b"[1:2]", b'{"a":1:2}', b'{"a","b"}'
]


def mutated(rng, text):
    """
    Return a text after one to three random edits: a byte is removed, inserted, changed or swapped
    with another, or the text is truncated.
    """
    text = bytearray(text)
    for _ in range(rng.randrange(1, 4)):
        at, other = rng.randrange(len(text)), rng.randrange(len(text))
        kind = rng.randrange(5)
        if kind == 0 and len(text) > 1:
            del text[at]
        elif kind == 1:
            text.insert(at, text[other])
        elif kind == 2:
            text[at] = rng.choice(
                b'{}[]:,"\\0123456789eE+-.tfnu \n\x00\x1f\x7f\x80\xbf\xc0\xe0\xed\xf0\xf4\xff')
        elif kind == 3:
            text[at], text[other] = text[other], text[at]
        else:
            del text[at + 1:]
    return bytes(text)


# ---- tests

def walk(program, model, count, is_object, seed=0):
    """Walk until the budget or the text ends; check that each text is JSON and return the texts."""
    written = []
    for line in call(program, "walk", model, int(is_object), seed, count):
        budget, used, *text = line.split(" ")
        text = bytes.fromhex(text[0])
        assert int(used) <= int(budget)
        if not text:  # the budget is too small: {} takes two tokens, unless the two are one token
            assert int(budget) < 1 + is_object
            continue
        assert is_json(text), text
        written.append(text)
        assert not is_object or isinstance(json.loads(text), dict)
    return written


@pytest.mark.parametrize("count", [300, pytest.param(10000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", NAMES)
def test_random_walks_write_json(program, models, name, count):
    """The walks have random budgets and choose tokens in different ways."""
    written = walk(program, models(name), count // 2, False) + walk(
        program, models(name), count // 2, True, seed=1)
    assert len(written) > .9 * count
    outside = b"".join(re.sub(rb'"(?:[^"\\]|\\.)*"', b'""', text) for text in written)
    assert all(outside.count(c) > 5 for c in (b"{", b"[", b'"', b",", b":"))
    assert max(map(len, written)) > 50


@pytest.mark.parametrize("count", [1000, pytest.param(20000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["bytes", "byte-level"])
def test_what_json_accepts_is_accepted_byte_by_byte(program, models, name, count):
    made = documents(count)
    for text, line in zip(made, call(program, "read", models(name), 0, "bytes", texts=made),
                          strict=True):
        assert line == f"{len(text)} {len(text)} 1", (text, line)
    objects = [text for text in made if isinstance(json.loads(text), dict)]
    assert len(objects) > count // 10
    for text, line in zip(objects, call(program, "read", models(name), 1, "bytes", texts=objects),
                          strict=True):
        assert line == f"{len(text)} {len(text)} 1", (text, line)


@pytest.mark.parametrize("name", ["odd", "byte-level", "ours", "symbols"])
def test_what_json_accepts_is_accepted_as_encoded(program, models, name):
    # A tokenizer may prepend a space, which would exceed the bound.
    made = [text for text in documents(1000, seed=1) if not text.startswith(b" " * SPACES)]
    for text, line in zip(made, call(program, "read", models(name), 0, "tokens", texts=made),
                          strict=True):
        accepted, tokens, complete = map(int, line.split())
        assert accepted == tokens and complete, (text, line)


@pytest.mark.parametrize("count", [4000, pytest.param(200_000, marks=pytest.mark.slow)])
def test_what_json_refuses_is_refused(program, models, count):
    """
    A wrong text has a byte that is not accepted, or is incomplete at its end. The mutated texts
    that json accepts are accepted.
    """
    rng = random.Random(2)
    made = WRONG + [mutated(rng, text) for text in documents(count, seed=2, size=8)]
    expected = [is_json(text) for text in made]
    assert not any(expected[:len(WRONG)]) and .03 < sum(expected) / len(made) < .7
    for text, valid, line in zip(
            made, expected, call(program, "read", models("bytes"), 0, "bytes", texts=made),
            strict=True):
        accepted, _, complete = map(int, line.split())
        assert (accepted == len(text) and complete) == valid, (text, line)
    for text in b"[]", b"1", b'"a"', b"null", b" [{}]":
        assert call(program, "read", models("bytes"), 1, "bytes",
                    texts=[text])[0].startswith(f"{text.startswith(b' '):d} ")


def completions(pieces, text, left):
    """
    Return the tokens after which at most left - 1 others complete the text to JSON. Try all
    sequences of tokens.
    """
    return [i for i, piece in enumerate(pieces)
            if any(is_json(text + piece + b"".join(others))
                   for n in range(left) for others in itertools.product(pieces, repeat=n))]


def test_the_budget_allows_what_some_completion_follows(program, tmp_path):
    """
    Try all sequences of up to three tokens of a small vocabulary with json.

    The costs of runtime/grammar.c assume that a shortest completion needs no token that opens what
    another token closes, and none that closes after whitespace. That holds for this vocabulary.
    """
    pieces = [b"{", b"}", b"[", b"]", b":", b",", b'"', b'":', b"]}", b'"]', b"1", b"\\", b"}\n",
              b"\xc3", b"\xa9", b",1]}"]
    write_gguf(tmp_path / "m.gguf", SPECIAL + [(piece, 0.0, 1) for piece in pieces],
               tokenizer="llama-without-bytes")
    prefixes = [b"", b"[", b"{", b'["', b'{"', b'[{"', b'{"":[', b'{"":["', b"[1", b"[{",
                b'{"1":[1', b'["\\', b'["\xc3', b"[[[", b'{"":1', b"[1,", b'{"":', b'{""']
    for left in 0, 1, 2, 3:
        lines = call(program, "masks", tmp_path / "m.gguf", 0, left, texts=prefixes)
        for prefix, line in zip(prefixes, lines, strict=True):
            allowed = [int(token) - 3 for token in line.split()]
            assert allowed == completions(pieces, prefix, left), (
                prefix, left, [pieces[i] for i in allowed])


def test_a_vocabulary_that_cannot_write_json_is_named(program, tmp_path):
    for lacking in "{}[]:,\"":
        pieces = SPECIAL + [(c.encode(), 0.0, 1) for c in "{}[]:,\"01" if c != lacking]
        write_gguf(tmp_path / "m.gguf", pieces, tokenizer="llama-without-bytes")
        done = subprocess.run([program, "walk", tmp_path / "m.gguf", "1", "0", "1"],
                              capture_output=True, text=True)
        assert done.returncode == 1
        assert done.stderr == (f"{tmp_path}/m.gguf: the vocabulary cannot write JSON: "
                               f"it has no token for the character {lacking}\n")


def test_what_a_vocabulary_cannot_finish_is_never_begun(program, tmp_path):
    """
    The vocabulary lacks letters to complete a literal, the second byte of an é, and digits. So
    tokens that begin these are not allowed.
    """
    pieces = [b"{", b"}", b"[", b"]", b":", b",", b'"', b"t", b"ru", b"f", b"n", b"\xc3", b"\\",
              b"u", b"-", b"ulle", b"als"]
    write_gguf(tmp_path / "m.gguf", SPECIAL + [(piece, 0.0, 1) for piece in pieces],
               tokenizer="llama-without-bytes")
    value, within = call(program, "masks", tmp_path / "m.gguf", 0, 1000, texts=[b"", b'"'])
    assert {pieces[int(i) - 3] for i in value.split()} == {b"{", b"[", b'"'}
    assert {pieces[int(i) - 3] for i in within.split()} == set(pieces) - {b"\xc3"}
    assert call(program, "read", tmp_path / "m.gguf", 0, "bytes",
                texts=[b"t", b'"\xc3', b"-"]) == ["0 1 0", "1 2 0", "0 1 0"]


def test_mistakes_are_answered(program, models):
    assert call(program, "wrong", models("bytes")) == [
        "the model is NULL", f"{models('bytes')}: it has no tokenizer", "the grammar is NULL"]
