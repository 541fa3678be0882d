"""
run --json-object, and response_format of requests: whatever the model, the temperature and -n, the
text is one JSON object.
"""
import json
import random

import pytest

from tests.test_bpe_run import texts, trained, write_model
from tests.test_encode import VOCABULARIES, pieces_of, train
from tests.test_grammar import MADE, no_surrogates, refuse
from tests.test_run import Model, run
from tests.test_run_texts import answers

OBJECT = {"response_format": {"type": "json_object"}}


class Pairs(list):
    """The members of an object. Repeated keys are kept, of which a dict would keep the last."""


def read_object(text):
    """
    Return the Pairs of a text that is an object as in RFC 8259, which allows repeated keys.
    Python's json is the oracle.
    """
    value = json.loads(text, object_pairs_hook=Pairs, parse_constant=refuse)
    assert isinstance(value, Pairs), text
    no_surrogates(value)
    return value


def values_in(value):
    yield value
    for part in value if isinstance(value, list) else []:
        yield from values_in(part[1] if isinstance(value, Pairs) else part)


def test_the_oracle_keeps_repeated_keys_and_refuses_what_is_no_object():
    assert read_object('{"a": 1, "a": {"b": 2, "b": []}}') == [
        ("a", 1), ("a", [("b", 2), ("b", [])])]
    for text in ('[["a", 1]]', '{"a": NaN}', '{"a": "\\ud800"}', '{"\\udc00": 1}', "{} {}",
                 '{"a": 1', '{"a": "\n"}', ""):
        with pytest.raises((ValueError, AssertionError)):
            read_object(text)


BLANKS = [b"<0x09>", b"<0x0A>", b"<0x0D>", b"<0x20>", b"\xe2\x96\x81"]
NAMES = ["bytes", "odd", "characters", "ours", "byte-level"]


def liven(model, pieces):
    """
    Let a random model write more than {}: the first number of each embedding is large, so the first
    number of each row of the classifier is a bias.
    """
    model.w["output"] *= 0.3
    model.w["tok"][:, 0] = 3
    model.w["output"][:, 0] = [
        0.8 if piece in (b'"', b",", b"[", b"{", b"<0x22>", b"<0x2C>", b"<0x5B>", b"<0x7B>")
        else -0.5 if piece in (b"}", b"]", b"<0x7D>", b"<0x5D>")
        or not piece.strip() or piece in BLANKS else 0
        for piece in pieces
    ]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """
    Return {name: file}: a model with random weights for each vocabulary. Its context window slides.
    """
    folder = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(NAMES[:4]):
        made = (MADE[name] if name in MADE
                else pieces_of(train(**VOCABULARIES[name], required_chars="{}[]:,\"")))
        model = Model(dim=32, hidden=32, layers=1, heads=2, kv=1, vocab=len(made), seq=64,
                      tied=False, seed=seed)
        model.pieces = [(piece, kind) for piece, _, kind in made]
        liven(model, [piece for piece, _, _ in made])
        has_bytes = any(kind == 6 for _, kind in model.pieces)
        model.write_gguf(folder / f"{name}.gguf",
                         tokenizer="llama" if has_bytes else "llama-without-bytes")
    path = folder / "byte-level.gguf"
    write_model(trained(
        json.dumps([{"a": [1, None, True], "b": "é"}] * 9, indent=2) + texts()[2], "qwen2", path),
        path)
    return {name: folder / f"{name}.gguf" for name in NAMES}


@pytest.mark.parametrize("count", [50, pytest.param(2000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", NAMES)
def test_every_answer_is_an_object(run_bin, models, name, count):
    """Slow tests make 10,000 answers in all, at temperatures from 0 to 3 and of 2 to 200 tokens."""
    rng, requests = random.Random(name), []
    for i in range(count):
        sampling = {"temperature": rng.choice((0, rng.random(), 3 * rng.random())),
                    "top_p": rng.choice((0, 0.5, 0.9)), "top_k": rng.choice((0, 0, 40)),
                    "frequency_penalty": rng.choice((0, 0, 0.5))}
        requests.append({"id": i, "prompt": rng.choice(("", "a", 'The {"', "x: [1")),
                         "max_tokens": rng.choice((2, 3, 5, rng.randrange(2, 201))),
                         "seed": rng.randrange(1, 1 << 30)} | sampling | OBJECT)
    found = answers(run_bin, models[name], requests, "-b", 64, *["--lookup"] * (count % 100 == 0))
    assert len(found) == count
    seen, full = set(), 0
    for answer in found:
        value, most = read_object(answer["text"]), requests[answer["id"]]["max_tokens"]
        seen |= {type(part).__name__ for part in values_in(value)}
        assert answer["finish_reason"] == "stop" and answer["tokens"] <= most, answer
        full += answer["tokens"] == most > 5
    expected = {"Pairs", "str", "int"} | (
        {"list", "float", "bool", "NoneType"} if count > 1000 else set())
    assert expected <= seen and full > count / 50, (seen, full)


def test_texts_and_chats_are_objects(run_bin, run_debug_bin, models, tmp_path):
    """
    The text without the prompt is an object: for lines of a file, for several seeds, with guessed
    tokens, and in every turn of a chat, where the grammar begins anew.
    """
    (tmp_path / "lines").write_text("one\ntwo three\n\nfour")
    for name in "odd", "byte-level":
        common = [models[name], "--json-object", "-n", 60, "-s", 3]
        for more, n in ((["-i", "Tom: {"], 1), (["-i", "Tom", "-b", 5, "-t", 1.5], 5),
                        (["--prompts", tmp_path / "lines", "-b", 2], 4)):
            said = run(run_debug_bin, *common, *more)
            written = said.decode().split("\n---\n")
            assert len(written) == n, said
            assert all(read_object(text) is not None for text in written), said
            assert run(run_bin, *common, *more, "--lookup") == said
        said = run(run_debug_bin, *common, "-m", "chat", "-y", "", "--template", "llama2",
                   stdin=b"Hi\nMore\nMore\n").decode()
        turns = [turn.split("\nUser: ")[0] for turn in said.split("Assistant: ")[1:]]
        assert len(turns) == 3 and all(read_object(turn) is not None for turn in turns), said


def test_requests_choose_their_format(run_debug_bin, models):
    ask = {"prompt": "a", "max_tokens": 30, "temperature": 0.5, "seed": 4}
    requests = [ask | {"id": "given"} | OBJECT, ask | {"id": "none"},
                ask | {"id": "text", "response_format": {"type": "text"}},
                ask | {"id": "null", "response_format": None}]
    objects = {"given": True, "none": False, "text": False, "null": False}
    for flags in ([], ["--json-object"]):
        found = {answer["id"]: answer["text"]
                 for answer in answers(run_debug_bin, models["odd"], requests, *flags)}
        for name, text in found.items():
            if objects[name] or (flags and name != "text"):
                read_object(text)
            else:
                with pytest.raises((ValueError, AssertionError)):
                    read_object(text)
    for form, named in (
            ({"type": "json_schema"}, "'json_schema', expected text or json_object"),
            ({}, "expected a string"), ("text", "expected {"),
            ({"type": "text", "schema": {}}, "expected }"),
            ({"kind": "text"}, "'kind' of response_format")):
        found, = answers(run_debug_bin, models["odd"], [ask | {"response_format": form}])
        assert set(found) == {"id", "error"} and named in found["error"], found
    found, = answers(run_debug_bin, models["bytes"], [ask | OBJECT | {"max_tokens": 1}])
    assert found["error"] == "the text has room for 1 tokens, too few for a JSON object"


def test_what_leaves_no_room_for_an_object_is_refused(run_debug_bin, models, tmp_path):
    path = models["bytes"]
    assert run(run_debug_bin, path, "--json-object", "-n", 2, "-t", 0) == b"{}\n"
    assert run(run_debug_bin, path, "--json-object", "-i", "abc", "-n", 5, "-t", 0) == b"{}\n"
    for n in 4, 3, 1:
        room = max(n - 3, 0)
        assert run(run_debug_bin, path, "--json-object", "-i", "abc", "-n", n, status=1) == (
            f"run: --json-object: the text has room for {room} tokens, too few for a JSON object\n")
    for task in (["--bench"], ["--logits"], ["--tokenize"]):
        assert "--json-object" in run(run_debug_bin, path, "--json-object", *task, status=1)
    model = Model()
    model.pieces[3 + ord("{")] = (b"other", 1)
    model.pieces[3:259] = [(piece, 1) if kind == 6 else (piece, kind)
                           for piece, kind in model.pieces[3:259]]
    model.write_gguf(tmp_path / "m.gguf", tokenizer="llama-without-bytes")
    assert "cannot write JSON" in run(run_debug_bin, tmp_path / "m.gguf", "--json-object", status=1)
    found, = answers(run_debug_bin, tmp_path / "m.gguf", [{"prompt": "a"} | OBJECT])
    assert "cannot write JSON" in found["error"]
