"""The page's models through OpenAI's client: completions, chats, streams, stop texts, seeds."""
import gc
import json
import math
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import httpx
import numpy as np
import openai
import pytest

import llamac
from page import scheduler, talk
from page.server import Server
from tests.conftest import ROOT, compile_c, usual
from tests.test_chat import CHATML
from tests.test_run import Model, reciter, run

pytestmark = pytest.mark.usefixtures("library")


def plain(seed):
    """Return a model whose three special tokens have a logit of 0: its greedy texts never end."""
    model = Model(tied=False, seed=seed, seq=64)
    model.w["output"][:3] = 0
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    plain(3).write_gguf(folder / "plain.gguf")
    model = Model(dim=32, hidden=64, layers=1, vocab=261, seq=256, tied=False, seed=37)
    model.pieces[259:] = [(b"<|im_start|>", 3), (b"<|im_end|>", 3)]
    model.w["output"][260] *= 2.5  # so that an answer ends soon
    model.write_gguf(folder / "chat.gguf", template=CHATML)
    (folder / "reciter").mkdir()
    reciter(folder / "reciter",
            [(c.encode(), 1) for c in ("a", "b", "é", "<", "s", "t", "o", "p", ">", "c", "d")])
    (folder / "bad.gguf").write_bytes(b"GGUF" + bytes(60))
    Model(dim=32, hidden=64, layers=1, seq=8192,
          tied=False, seed=5).write_gguf(folder / "long.gguf")
    broken = Model()
    broken.w["norm"][0] = np.nan
    broken.write_gguf(folder / "broken.gguf")
    return folder


@pytest.fixture(scope="module")
def server(folder, library):
    paths = {path.relative_to(folder).with_suffix("").as_posix(): path
             for path in sorted(folder.rglob("*.gguf"))}
    found = talk.Talk(lambda: paths)
    served = Server("127.0.0.1", 0, found.routes())
    served.talk = found
    threading.Thread(target=served.serve_forever, daemon=True).start()
    yield served
    served.shutdown()
    served.server_close()


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.url().split("/?")[0] + "/v1", api_key=server.token,
                       max_retries=0, timeout=60) as client:
        yield client


def spoken(binary, path, prompt, n, *flags):
    """Return the text that the C program generates after a prompt."""
    return run(binary, path, *flags, "-n", n, "--raw", "-i", prompt)[:-1].decode(
        errors="replace").removeprefix(prompt)


def test_bos_follows_the_model_and_an_empty_prompt_has_one():
    asked = []
    model = SimpleNamespace(encode=lambda text, bos: asked.append((text, bos)) or np.array([1]),
                            info=SimpleNamespace(vocab_size=9))
    for prompt in "One", "", ["One"], [""]:
        assert talk.prompt_tokens(model, {"prompt": prompt}) == [[1]]
    assert asked == 2 * [("One", None), ("", True)]
    assert talk.prompt_tokens(model, {"prompt": ["", "One"]}) == [[1], [1]]


def test_models(client):
    assert {m.id: m.chat for m in client.models.list()} == {
        "plain": False, "chat": True, "reciter/m": False, "bad": False, "broken": False,
        "long": False}


def test_a_completion_is_what_run_writes(client, folder, run_bin):
    """Compare greedy and sampled texts, whole and streamed, within the context and beyond it."""
    for wish, flags in (
            (dict(temperature=0), ("-t", 0)),
            (dict(temperature=0.8, top_p=0.9, seed=7), ("-t", 0.8, "-p", 0.9, "-s", 7))):
        for most in 20, 100:
            asked = dict(model="plain", prompt="One", max_tokens=most, **wish)
            found = client.completions.create(**asked)
            expected = spoken(run_bin, folder / "plain.gguf", "One", most + 3, *flags)
            assert found.choices[0].text == expected
            assert found.choices[0].finish_reason == "length" and found.object == "text_completion"
            assert (found.usage.prompt_tokens, found.usage.completion_tokens,
                    found.usage.total_tokens) == (4, most, 4 + most)
            *parts, last, usage = client.completions.create(
                stream=True, stream_options={"include_usage": True}, **asked)
            assert "".join(p.choices[0].text for p in [*parts, last]) == expected
            assert len(parts) > most // 2
            assert last.choices[0].finish_reason == "length" and {p.id for p in parts} == {last.id}
            assert usage.usage == found.usage and usage.choices == []
    tokens = llamac.Model(folder / "plain.gguf").encode("One").tolist()
    assert client.completions.create(
        model="plain", prompt=tokens, max_tokens=20, temperature=0
    ).choices[0].text == client.completions.create(
        model="plain", prompt=["One"], max_tokens=20, temperature=0
    ).choices[0].text


def test_seeds(client):
    def say(**how):
        return client.completions.create(
            model="plain", prompt="A", max_tokens=30, **how).choices[0].text
    assert say(seed=5) == say(seed=5) != say(seed=6)
    assert say() != say()
    assert say(seed=0) == say(seed=0)
    assert say(seed=-3) == say(seed=-3)


def test_stops(client):
    """The model writes abé<stop>cd. The text is cut before a stop text, which may span tokens."""
    def say(**how):
        found = client.completions.create(model="reciter/m", prompt="a", temperature=0,
                                          max_tokens=50, **how)
        *parts, last = client.completions.create(model="reciter/m", prompt="a", temperature=0,
                                                 max_tokens=50, stream=True, **how)
        assert "".join(p.choices[0].text for p in [*parts, last]) == found.choices[0].text
        assert last.choices[0].finish_reason == found.choices[0].finish_reason == "stop"
        return found.choices[0].text
    assert say() == "bé<stop>cd"
    assert say(stop="<stop>") == "bé"
    assert say(stop=["op>c", "never"]) == "bé<st"
    assert say(stop="<stoq") == "bé<stop>cd"
    assert say(stop=["<stop>!", "stop"]) == "bé<"
    assert say(stop="b") == ""
    assert say(stop="d!") == "bé<stop>cd"
    cut = client.completions.create(model="reciter/m", prompt="a", temperature=0, stop="stop",
                                    logprobs=0, max_tokens=50).choices[0]
    assert cut.logprobs.tokens == ["b", "é", "<"] and cut.logprobs.text_offset == [0, 1, 2]


def test_logprobs_equal_transformers(client, folder):
    """Compare the log probabilities of completions, and check the format of those of chats."""
    found = client.completions.create(
        model="plain", prompt="One", max_tokens=8, temperature=0, logprobs=3).choices[0].logprobs
    model = llamac.Model(folder / "plain.gguf")
    ids = model.encode("One").tolist()
    oracle = plain(3)
    for token, logprob, top in zip(found.tokens, found.token_logprobs, found.top_logprobs):
        row = oracle.logits(ids)[-1].astype(float)
        row -= math.log(np.exp(row).sum())
        best = np.argsort(-row)[:3]
        assert abs(logprob - row[best[0]]) < 1e-3
        assert np.allclose(sorted(top.values()), sorted(row[best]), atol=1e-3)
        spelled = model.decode([int(best[0])], ids[-1])
        assert spelled.decode("latin-1") == (
            token if token[:6] != "bytes:" else token[6:].encode().decode("unicode_escape"))
        ids.append(int(best[0]))
    told = client.chat.completions.create(
        model="chat", messages=[{"role": "user", "content": "Hi"}], temperature=0, max_tokens=3,
        logprobs=True, top_logprobs=2).choices[0].logprobs.content
    assert len(told) == 3
    assert all(len(t.top_logprobs) == 2 and t.logprob == t.top_logprobs[0].logprob for t in told)
    assert all(len(t.bytes) == 1 for t in told)


def test_a_chat_is_what_run_answers(client, folder, run_bin):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    said = run(run_bin, folder / "chat.gguf", "-m", "chat", "-t", 0, "-n", 0, "--raw", "-y",
               "Be brief.", stdin=b"Hi\nAnd you?\n")
    answers = [part.rsplit(b"\n", 1)[0].decode(errors="replace")
               for part in said.split(b"Assistant: ")[1:]]
    first = client.chat.completions.create(model="chat", messages=messages, temperature=0)
    assert first.choices[0].message.content == answers[0]
    assert first.choices[0].finish_reason == "stop"
    assert first.object == "chat.completion" and first.choices[0].message.role == "assistant"
    messages += [{"role": "assistant", "content": "Fine."},
                 {"role": "user", "content": [{"type": "text", "text": "And you?"}]}]
    told = client.chat.completions.create(model="chat", messages=messages, temperature=0,
                                          max_completion_tokens=5)
    parts = list(client.chat.completions.create(
        model="chat", messages=messages, temperature=0, stream=True, max_tokens=5))
    assert parts[0].choices[0].delta.role == "assistant"
    assert parts[-1].choices[0].finish_reason == told.choices[0].finish_reason
    assert "".join(p.choices[0].delta.content for p in parts) == told.choices[0].message.content
    model = llamac.Model(folder / "chat.gguf")
    model.use_template()
    ids = [*model.encode_turn("Hi", True, "Be brief."), *model.encode_answer("Fine."),
           *model.encode_turn("And you?", False)]
    assert told.usage.prompt_tokens == len(ids)


def test_mistakes_are_reported_in_openais_format(client, server):
    def wrong(kind, words, call=client.completions.create, **how):
        with pytest.raises(kind, match=words) as caught:
            call(**{"model": "plain", "prompt": "A"} | how
                 if call == client.completions.create else {"model": "chat"} | how)
        assert caught.value.body["type"] in ("invalid_request_error", "server_error")
        return caught.value
    refused, hi = openai.BadRequestError, [{"role": "user", "content": "Hi"}]
    assert wrong(openai.NotFoundError, "there is no model", model="none").code == "model_not_found"
    assert wrong(openai.NotFoundError, "bad: ", model="bad").param == "model"
    assert wrong(refused, "context is 64", prompt="A" * 500).code == "context_length_exceeded"
    for name, values in {
            "n": [0, 65, -1, True, "2"], "best_of": [3], "echo": [True], "suffix": ["x"],
            "max_tokens": [0, -1, 1.5, True, "3"], "temperature": [-1, "hot", float("inf"), 1e9],
            "top_p": [0, 1.5], "seed": ["x", 1.5],
            "stop": [5, list("abcde"), [1], ["a", "b" * 10_001]], "logprobs": [21, -1, "a"],
            "presence_penalty": [3], "frequency_penalty": [-2.1], "stream_options": [3],
            "logit_bias": [{"1": 200}, {"x": 1}, {"-1": 1}, {"300": 1}, {"1": "a"}],
            "response_format": [{"type": "xml"}, {}],
            "prompt": [None, [], ["a"] * 65, ["a", [1]], [[1], []], [[1], [300]], [1, 300],
                       [-1], [True], {"a": 1}, 5]}.items():
        for value in values:
            # The client's completions lack the parameter response_format.
            field = {name: value} if name != "response_format" else {"extra_body": {name: value}}
            # The client itself refuses to send infinity, with an error of another type.
            with pytest.raises(ValueError if value == float("inf") else refused):
                client.completions.create(**{"model": "plain", "prompt": "A"} | field)
    chat = client.chat.completions.create
    assert "continues a text" in str(
        wrong(refused, "no chat template", chat, model="plain", messages=hi))
    for messages in ([], hi * 2, hi + [{"role": "assistant", "content": "x"}],
                     [{"role": "system", "content": "x"}], [{"role": "user"}],
                     [{"role": "tool", "content": "x"}],
                     [{"role": "user", "content": [{"type": "image_url"}]}]):
        wrong(refused, "messages", chat, messages=messages)
    wrong(refused, "zero byte", chat, messages=[{"role": "system", "content": "a\0b"}, *hi])
    wrong(refused, "top_logprobs", chat, messages=hi, extra_body={"top_logprobs": "abc"})
    assert wrong(
        openai.InternalServerError, "not finite", model="broken").body["type"] == "server_error"
    with pytest.raises(openai.APIError, match="not finite"):
        list(client.completions.create(model="broken", prompt="A", stream=True))
    assert "1 to 2147483647" in str(
        wrong(refused, "max_tokens is '2147483648'", max_tokens=1 << 31))
    for n in 1 << 31, 1 << 32, 1 << 64, 10 ** 40:
        wrong(refused, "max_tokens", max_tokens=n)
        wrong(refused, "max_completion_tokens", chat, messages=hi, max_completion_tokens=n)
    for name, value in (("top_k", -1), ("top_k", 0.5), ("min_p", False), ("min_p", 2),
                        ("repeat_penalty", 0)):
        assert wrong(refused, f"{name} is", extra_body={name: value}).param == name
    for name, value in (("tempature", 0), ("repetition_penalty", 1.1), ("max_new_tokens", 3),
                        ("messages", hi), ("top_logprobs", 2), ("max_completion_tokens", 3)):
        error = wrong(refused, f"'{name}' is not a supported field", extra_body={name: value})
        assert error.param == name and error.code == "unknown_parameter"
    assert wrong(refused, "'prompt' is not a supported field", chat, messages=hi,
                 extra_body={"prompt": "A"}).param == "prompt"
    wrong(refused, "'include'", stream=True, stream_options={"include": True})
    wrong(refused, "include_usage", stream=True, stream_options={"include_usage": "yes"})
    for message in ({"name": "Ann"}, {"tool_calls": [{"id": 1}]},
                    {"content": [{"type": "text", "text": "a", "cache_control": {}}]},
                    {"content": [{"type": "text", "text": 5}]}, {"content": [{"type": "text"}]}):
        wrong(refused, "messages", chat, messages=[hi[0] | message])
    fine = client.completions.create(model="plain", prompt="A", max_tokens=1, user="me",
                                     extra_body={"top_k": None, "store": False})
    assert fine.usage.completion_tokens == 1
    back = {"role": "assistant", "content": "Fine.", "refusal": None, "annotations": [],
            "tool_calls": None}
    assert chat(model="chat", messages=[hi[0], back, hi[0]], max_tokens=1, user="me").choices
    url = f"{client.base_url}completions"
    head = {"Authorization": f"Bearer {server.token}"}
    for depth in 100, 300, 900, 5000, 100_000:
        for name in "model", "prompt", "stop", "n", "top_k", "logit_bias":
            body = f'{{"model": "plain", "prompt": "A", "{name}": {"[" * depth + "]" * depth}}}'
            answer = httpx.post(url, content=body, headers=head)
            assert answer.status_code in (400, 404), answer.text
            assert answer.json()["error"]["type"] == "invalid_request_error", answer.text
    for body in (b"", b"[]", b"{", b"[" * 100000, b'{"model": ["plain"]}',
                 b'{"model": "plain", "prompt": "\\ud800", "max_tokens": 1}'):
        answer = httpx.post(url, content=body, headers=head)
        assert answer.status_code == (
            200 if b"ud800" in body else 404 if b"model" in body else 400), answer.text
    assert httpx.post(url, json={"model": "plain", "prompt": "A"}).status_code == 403  # no token


def test_an_answer_in_json_is_an_object_that_ends_within_its_tokens(client):
    """A model with random weights would hardly write JSON without the constraint."""
    asked = dict(model="chat", messages=[{"role": "user", "content": "Hi"}], temperature=1.5,
                 response_format={"type": "json_object"})
    lengths = []
    for seed, most in (1, 2), (2, 7), (3, 7), (4, 40):
        found = client.chat.completions.create(**asked, seed=seed, max_tokens=most)
        assert type(json.loads(found.choices[0].message.content)) is dict
        assert found.choices[0].finish_reason == "stop"
        lengths.append(found.usage.completion_tokens)
    assert lengths[0] == 2 and lengths[1] <= 7 >= lengths[2] and 7 < lengths[3] <= 40


def test_a_prompt_without_tokens_is_refused():
    info = SimpleNamespace(seq_len=64, vocab_size=9)
    voice = SimpleNamespace(
        chat_error="", model=SimpleNamespace(info=info, encode=lambda text, bos: np.array([], int)))
    for prompt in "", "x", [""]:  # where a model has no BOS
        with pytest.raises(talk.ApiError, match="the prompt has no tokens"):
            talk.parse({"model": "x", "prompt": prompt}, False, voice)


def test_no_request_waits_for_a_thread_that_has_ended():
    found = scheduler.Scheduler()
    found.thread = threading.Thread(target=lambda: None)
    found.thread.start()
    found.thread.join()
    assert found.call(lambda: 5) == 5
    # A request receives its text's error even if the text's memory can't be freed.
    heard = []
    task = SimpleNamespace(text=SimpleNamespace(sequence=None),
                           inbox=SimpleNamespace(put=lambda *event, ends: heard.append(event)),
                           index=3)
    found.running.append(task)
    with pytest.raises(AttributeError):
        found.end(task, llamac.Error("x"))
    assert heard[0][0] == 3 and not found.running


def test_the_fields_of_the_sampler(client, folder):
    """
    Each field reaches the sampler, of streams too: the text equals that of llamac.generate with
    the field and differs from the text without it.
    """
    model = llamac.Model(folder / "plain.gguf")
    engine, prompt = llamac.Engine(model), model.encode("One")

    def generated(**fields):
        sampler = llamac.Sampler(**{"temperature": 1, "state": 4} | fields)
        return "".join(text for text, *_ in llamac.generate(
            llamac.Sequence(engine), prompt, sampler, 40))

    def say(**how):
        asked = dict(model="plain", prompt="One", max_tokens=40, seed=4) | how
        whole = client.completions.create(**asked).choices[0].text
        assert whole == "".join(
            c.choices[0].text for c in client.completions.create(stream=True, **asked))
        return whole
    extra = {"top_k": 4, "min_p": 0.1, "repeat_penalty": 1.3}
    theirs = {"topk": 4, "minp": 0.1, "repeat_penalty": 1.3}
    common = {"temperature": 1.5, "top_p": 0.7, "frequency_penalty": 1.5, "presence_penalty": -1.0}
    plain, texts = say(), []
    assert plain == generated()
    for (name, value), own in zip(extra.items(), theirs):
        texts.append(say(extra_body={name: value}))
        assert texts[-1] == generated(**{own: value})
    for name, value in common.items():
        texts.append(say(**{name: value}))
        assert texts[-1] == generated(**{"topp" if name == "top_p" else name: value})
    assert say(**common, extra_body=extra) == generated(
        **theirs, **{"topp" if k == "top_p" else k: v for k, v in common.items()})
    assert len({plain, *texts}) == 8
    greedy = say(temperature=0)
    assert greedy == say(extra_body={"top_k": 1}) == say(extra_body={"min_p": 1}) == say(
        extra_body={"top_k": 0, "repeat_penalty": 1}, temperature=0)
    # A punctuation mark is a token of its own: its byte.
    mark = next(c for c in plain
                if c.isascii() and c.isprintable() and not c.isalnum() and c != " ")
    token = 3 + ord(mark)
    assert say(logit_bias={str(token): 100}) == 40 * mark
    assert mark not in say(logit_bias={str(token): -100, str(token + 1): 0.0},
                           extra_body={"top_k": 0})


def test_texts_that_are_json(client, server, monkeypatch):
    """
    Request JSON whole and streamed, alone and many at once, as completions and as chats. A model's
    grammar is built once.
    """
    built, call = [], llamac.call
    monkeypatch.setattr(llamac, "call", lambda name, *given: (
        name == "grammar_json" and built.append(name), call(name, *given))[1])
    server.talk.loaded.pop("plain", None)

    def say(model="plain", **how):
        asked = dict(model=model, max_tokens=60, temperature=1.5,
                     extra_body={"response_format": {"type": "json_object"}}) | how
        create = client.chat.completions.create if model == "chat" else client.completions.create
        found = create(**asked)
        streamed = [""] * len(found.choices)
        for c in create(stream=True, **asked):
            streamed[c.choices[0].index] += (
                c.choices[0].delta.content if model == "chat" else c.choices[0].text)
        texts = [c.message.content if model == "chat" else c.text for c in found.choices]
        assert texts == streamed and {c.finish_reason for c in found.choices} == {"stop"}
        assert found.usage.completion_tokens <= 60 * len(texts)
        assert all(isinstance(json.loads(text), dict) for text in texts)
        return texts
    alone = [say(prompt="A", seed=seed)[0] for seed in range(12)]
    assert len(set(alone)) > 6
    assert say(prompt="A", seed=0, n=12) == alone
    assert built == ["grammar_json"]
    assert say(prompt="A", seed=0, max_tokens=2) == ["{}"]
    say("chat", messages=[{"role": "user", "content": "Hi"}], n=3, seed=1)
    text = dict(model="plain", prompt="A", seed=5, max_tokens=30)
    assert client.completions.create(
        extra_body={"response_format": {"type": "text"}}, **text
    ).choices[0].text == client.completions.create(**text).choices[0].text
    with pytest.raises(openai.BadRequestError, match="cannot write JSON"):
        client.completions.create(model="reciter/m", prompt="a",
                                  extra_body={"response_format": {"type": "json_object"}})


@pytest.mark.parametrize("clients", [16, 64])
def test_clients_at_once(client, server, clients, monkeypatch):
    """
    Each client gets the same text as when it is alone, and all texts end. Some are evaluated in the
    same batch.
    """
    batches, evaluate = [], llamac.Engine.evaluate
    monkeypatch.setattr(llamac.Engine, "evaluate", lambda self, parts: (
        batches.append(len(parts)), evaluate(self, parts)))

    def say(n):
        return client.completions.create(model=("plain", "chat")[n % 2] if n % 4 < 3 else "plain",
                                         prompt=f"A{n}", max_tokens=100, seed=n + 1, stream=True)
    alone = [[c.choices[0].text for c in say(n)] for n in range(clients)]
    assert max(batches) == 1
    found, ready = {}, threading.Barrier(clients)

    def work(n):
        ready.wait()
        for chunk in say(n):
            found.setdefault(n, []).append(chunk.choices[0].text)
    threads = [threading.Thread(target=work, args=(n,)) for n in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ["".join(found[n]) for n in range(clients)] == ["".join(a) for a in alone]
    assert max(batches) > 1
    assert idle(server.talk.scheduler)
    for name in "plain", "chat":
        assert 0 < len(server.talk.loaded[name].cache.kept) <= scheduler.MAX_KEPT


def idle(found):
    """Wait up to 30 seconds for all texts to end; return whether they have."""
    end = time.monotonic() + 30
    while (found.running or found.waiting) and time.monotonic() < end:
        time.sleep(0.01)
    return not found.running and not found.waiting


def test_several_texts_of_one_request(client):
    """
    The n texts of a prompt use consecutive seeds, from the given one; each prompt of a list gets
    the same texts as alone.
    """
    def say(**how):
        return client.completions.create(model="plain", max_tokens=12, temperature=0.9, **how)
    alone = [[say(prompt=prompt, seed=seed).choices[0] for seed in (5, 6, 7)]
             for prompt in ("One", "Two")]
    found = say(prompt=["One", "Two"], n=3, seed=5, logprobs=1)
    assert [c.text for c in found.choices] == [c.text for cs in alone for c in cs]
    assert [c.index for c in found.choices] == list(range(6))
    assert all(len(c.logprobs.tokens) == 12 for c in found.choices)
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (8, 72)
    texts = [""] * 6
    for chunk in say(prompt=["One", "Two"], n=3, seed=5, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [c.text for c in found.choices]
    tokens = client.completions.create(model="plain", prompt=[[1, 5], [1, 9, 7]], max_tokens=3,
                                       temperature=0)
    assert [c.text for c in tokens.choices] == [
        client.completions.create(
            model="plain", prompt=p, max_tokens=3, temperature=0).choices[0].text
        for p in ([1, 5], [1, 9, 7])]
    answers = client.chat.completions.create(
        model="chat", messages=[{"role": "user", "content": "Hi"}], n=2, seed=5, max_tokens=9)
    assert [c.index for c in answers.choices] == [0, 1]
    assert answers.choices[1].message.content == client.chat.completions.create(
        model="chat", messages=[{"role": "user", "content": "Hi"}], seed=6, max_tokens=9
    ).choices[0].message.content


def test_a_conversation_evaluates_only_what_is_new(client, server, monkeypatch):
    """
    The answer equals that of evaluating the whole conversation; a prefix that several texts share
    is evaluated once.
    """
    evaluated, evaluate = [], llamac.Engine.evaluate
    monkeypatch.setattr(llamac.Engine, "evaluate", lambda self, parts: (
        evaluated.append(sum(len(p.tokens) for p in parts)), evaluate(self, parts)))

    def say(prompt):
        evaluated.clear()
        text = client.completions.create(
            model="plain", prompt=prompt, temperature=0, max_tokens=5).choices[0].text
        return text, sum(evaluated) - 4  # without the text's own tokens
    server.talk.loaded.pop("plain", None)
    first, following = [1, *range(10, 30)], [1, *range(10, 26), 99, 98]
    assert say(first)[1] == 21 and say(first)[1] == 1
    text, size = say(following)
    assert size == 2
    kept = server.talk.loaded["plain"].cache.kept
    # The next turn of the conversation: the prompt, the answer to it and two new tokens.
    whole = [*following, *kept[-1][1][len(following):].tolist(), 50, 51]
    continued, size = say(whole)
    assert size == 2 and [len(known) for _, known in kept] == [25, 25, 29]
    server.talk.loaded.pop("plain")
    evaluated.clear()
    client.completions.create(model="plain", prompt=first, n=4, max_tokens=2)
    # The prompt once, its last token for each of the other texts, the first token of each text.
    assert sum(evaluated) == len(first) + 3 + 4
    server.talk.loaded.pop("plain")
    assert say(following) == (text, 19)
    server.talk.loaded.pop("plain")
    assert say(whole) == (continued, len(whole))


def test_kept_sequences_are_limited(folder, monkeypatch):
    engine = llamac.Engine(llamac.Model(folder / "plain.gguf"))
    cache = scheduler.SequenceCache(engine)
    for n in range(scheduler.MAX_KEPT + 5):
        sequence = cache.take(np.array([1, n], np.int32))
        sequence.forward([1, n, 5], 0)
        cache.keep(sequence)
    assert [known.tolist()[1] for _, known in cache.kept] == list(range(5, scheduler.MAX_KEPT + 5))
    monkeypatch.setattr(cache, "max_kept_tokens", 10)
    cache.keep(llamac.Sequence(engine))
    assert [len(known) for _, known in cache.kept] == [3, 3, 3, 0]


def test_a_budget_is_split_evenly():
    assert scheduler.split_evenly([100, 3, 100], 64) == [30, 3, 31]
    assert scheduler.split_evenly([], 64) == []
    assert scheduler.split_evenly([5, 5], 64) == [5, 5]
    assert scheduler.split_evenly([9] * 70, 64).count(0) == 0


def new_cache(path, **options):
    return scheduler.SequenceCache(llamac.Engine(llamac.Model(path), **options))


def new_task(cache, tokens, max_tokens=9, inbox=None, index=0, **sampling):
    options = {"sampler": llamac.Sampler(**{"temperature": 1, "state": 1} | sampling),
               "max_tokens": max_tokens}
    return scheduler.Task(cache, tokens, options, inbox or scheduler.Inbox(), index)


def written(task):
    """Return the text in a task's inbox and the reason why it ended."""
    events = [event for _, event in task.inbox.take()]
    return "".join(text for text, *_ in events), events[-1][-1]


def finish(found):
    """Run a scheduler in this thread until all texts end; return the max number running at once."""
    most = 0
    while found.waiting or found.running:
        found.step()
        most = max(most, len(found.running))
    return most


def test_a_long_prompt_does_not_stall_running_texts(folder, monkeypatch):
    """Each batch has one token of every running text and at most 64 tokens of prompts."""
    batches, evaluate = [], llamac.Engine.evaluate
    monkeypatch.setattr(llamac.Engine, "evaluate", lambda self, parts: (
        batches.append([len(part.tokens) for part in parts]), evaluate(self, parts)))
    found, cache = scheduler.Scheduler(), new_cache(folder / "chat.gguf")
    tasks = [new_task(cache, tokens, 30) for tokens in ([5], [6] * 200, [7] * 20)]
    for task in tasks:  # so that no text ends early
        task.options["sampler"].set_biases(dict.fromkeys((1, 2, 260), -math.inf))
    found.waiting.extend(tasks)
    for _ in range(7):
        found.step()
    assert batches == [[1, 44, 20], [1, 64, 1], [1, 64, 1], [1, 28, 1], [1, 1, 1], [1, 1, 1],
                       [1, 1, 1]]


def test_texts_wait_in_the_order_of_their_arrival(folder, monkeypatch):
    """At most MAX_RUNNING run at once; a client that leaves while it waits never begins."""
    found, cache = scheduler.Scheduler(), new_cache(folder / "plain.gguf")
    monkeypatch.setattr(scheduler, "MAX_RUNNING", 3)
    tasks = [new_task(cache, [1, 10 + n]) for n in range(7)]
    found.waiting.extend(tasks)
    found.begin()
    assert found.running == tasks[:3] and not any(task.text for task in tasks[3:])
    found.cancel(tasks[3:5])
    found.end(tasks[1])
    found.end(tasks[0], llamac.Error("broken"))
    found.begin()
    assert found.running == [tasks[2], tasks[5], tasks[6]] and not found.waiting
    assert str(tasks[0].inbox.take()[0][1]) == "broken"
    finish(found)
    # A later request begins before the second text of a prompt in a request with many texts.
    many, prompt = scheduler.Inbox(), [1, 8, 9]
    tasks = [new_task(cache, tokens, inbox=many) for tokens in (prompt, prompt, [1, 9])] + [
        new_task(cache, [1, 7])]
    found.waiting.extend(tasks)
    found.begin()
    assert found.running == [tasks[0], tasks[3], tasks[2]]
    found.end(tasks[3], llamac.Error("it has left"))
    found.begin()
    # The second text of the prompt waits until the first has evaluated the prompt.
    assert found.running == [tasks[0], tasks[2]]
    found.step()
    found.begin()
    assert found.running == [tasks[0], tasks[2], tasks[1]]


def test_all_texts_of_a_prompt_begin_together(folder):
    """The first text evaluates the prompt; the others get their first token in the next step."""
    found, cache = scheduler.Scheduler(), new_cache(folder / "plain.gguf")
    prompt, inbox = [1, 5, 9, 7], scheduler.Inbox()
    tasks = [new_task(cache, prompt, inbox=inbox, index=n, state=n + 1) for n in range(5)]
    found.waiting.extend(tasks)
    found.step()
    assert [bool(task.text) for task in tasks] == [True, False, False, False, False]
    found.step()
    assert [task.text.count for task in tasks] == [2, 1, 1, 1, 1]


def test_sixty_four_texts_run_at_once(folder, monkeypatch):
    """Each text equals the text of the same request alone."""
    cache, asked = new_cache(folder / "plain.gguf"), [
        dict(tokens=[1, 5 + n % 40, 9], max_tokens=20 + n % 7, state=n + 1) for n in range(70)]
    alone = []
    for wish in asked:
        found, task = scheduler.Scheduler(), new_task(cache, **wish)
        found.waiting.append(task)
        finish(found)
        alone.append(written(task))
    cache.kept.clear()
    found, tasks = scheduler.Scheduler(), [new_task(cache, **wish) for wish in asked]
    found.waiting.extend(tasks)
    assert finish(found) == scheduler.MAX_RUNNING == 64
    assert [written(task) for task in tasks] == alone
    assert 0 < len(cache.kept) <= scheduler.MAX_KEPT


def test_a_text_waits_until_there_is_memory_for_it(folder, monkeypatch):
    """
    A text begins when there is memory for all of its tokens, at most a context. Later texts do not
    overtake it.
    """
    found, cache = scheduler.Scheduler(), new_cache(folder / "plain.gguf")
    assert cache.max_running_tokens > 10 ** 6  # of a very small model
    monkeypatch.setattr(cache, "max_running_tokens", 64 + 32)
    tasks = [new_task(cache, [1, 5, n], max_tokens)
             for n, max_tokens in enumerate((29, 1000, 7, 7, 7))]
    for task in tasks:  # so that no text ends early
        task.options["sampler"].set_biases({1: -math.inf, 2: -math.inf})
    found.waiting.extend(tasks)
    found.begin()
    assert found.running == tasks[:2]
    while tasks[0].text.reason is None:
        found.step()
    assert not any(task.text for task in tasks[2:])
    found.step()
    assert found.running == [tasks[1], *tasks[2:]]
    found.cancel(tasks)
    finish(found)
    alone = new_task(cache, [1], 1000)
    monkeypatch.setattr(cache, "max_running_tokens", 1)  # a single text begins in any case
    found.waiting.append(alone)
    found.begin()
    assert found.running == [alone]


# A library to preload: aligned_alloc, which allocates the pages of the KV cache, fails after
# pages_left calls.
FEW_PAGES = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
int pages_left = 1 << 30;
void *aligned_alloc(size_t alignment, size_t size) {
    void *(*real)(size_t, size_t) = (void *(*)(size_t, size_t))dlsym(RTLD_NEXT, "aligned_alloc");
    return pages_left-- > 0 ? real(alignment, size) : NULL;
}
"""
WITH_FEW_PAGES = """
import ctypes, sys
sys.path.insert(0, ".")
import llamac
from page import scheduler
from pathlib import Path
library, shim, model = sys.argv[1:]
llamac.PATHS[:] = [Path(library)]
pages_left = ctypes.c_int.in_dll(ctypes.CDLL(shim), "pages_left")
N, LENGTH = 20, 150  # three pages of 64 tokens each

def task(cache, n, length=LENGTH):
    sampler = llamac.Sampler(temperature=1, state=n + 1)
    sampler.set_biases(dict.fromkeys((1, 2, 260), float("-inf")))  # so that no text ends early
    return scheduler.Task(cache, [1, 5 + n, 9], {"sampler": sampler, "max_tokens": length}, \
scheduler.Inbox(), n)

def finish(found, tasks):
    found.waiting.extend(tasks)
    first, most = [], 0
    while found.waiting or found.running:
        found.step()
        most = max(most, len(found.running))
        first += [task.index for task in tasks if task.text and task.text.count and \
task.index not in first]
    events = [[event for _, event in task.inbox.take()] for task in tasks]
    for event in sum(events, []):
        if isinstance(event, Exception):
            return f"{type(event).__name__}: {event}", most, first
    return ["".join(text for text, *_ in one) for one in events], most, first

engine = llamac.Engine(llamac.Model(model))
cache, found = scheduler.SequenceCache(engine), scheduler.Scheduler()
alone = [finish(found, [task(cache, n)])[0][0] for n in range(N)]
assert len(cache.kept) == N, len(cache.kept)
pages_left.value = 0  # what is kept is freed for new texts, which go on with the memory that \
there is
together, most, first = finish(found, [task(cache, n) for n in range(N)])
assert together == alone and most == N and not found.memory_is_short, most
pages_left.value = 1 << 30
engine = llamac.Engine(llamac.Model(model))
cache = scheduler.SequenceCache(engine)
pages_left.value = 3 * N // 4  # a quarter of what they need
together, most, first = finish(found, [task(cache, n) for n in range(N)])
assert together == alone and most < N and first == list(range(N)), (most, first)
assert not found.memory_is_short
pages_left.value = 1 << 30
engine = llamac.Engine(llamac.Model(model))
cache = scheduler.SequenceCache(engine)
pages_left.value = 2  # not enough for one
text, _, _ = finish(found, [task(cache, 0)])
assert text.startswith("OutOfMemory: not enough memory"), text
text, _, _ = finish(found, [task(cache, 0, 100)])  # but for a shorter one
assert text[0] and text[0] == alone[0][:len(text[0])], text
print("fine")
"""


def test_texts_wait_while_memory_is_short(tmp_path, folder, library):
    """
    Kept sequences are freed for the waiting texts. A text fails only if its memory would not
    suffice even if it ran alone.
    """
    (tmp_path / "few.c").write_text(FEW_PAGES)
    compile_c(tmp_path / "few.so", "-shared", "-fPIC", tmp_path / "few.c", "-ldl", standard="gnu11")
    done = subprocess.run(
        [sys.executable, "-c", WITH_FEW_PAGES, library, tmp_path / "few.so", folder / "chat.gguf"],
        cwd=ROOT, capture_output=True, text=True,
        env=os.environ | {"LD_PRELOAD": str(tmp_path / "few.so")})
    assert (done.stdout, done.stderr) == ("fine\n", "")


def test_a_sequence_that_cannot_be_kept_is_freed(folder, monkeypatch):
    """The text of the sequence still ends as usual."""
    found, cache = scheduler.Scheduler(), new_cache(folder / "plain.gguf")
    tasks = [new_task(cache, [1, 5]), new_task(cache, [1, 5])]
    found.waiting.append(tasks[0])
    finish(found)
    tokens = llamac.Sequence.tokens.fget

    def scarce(sequence):
        if len(sequence) > 2:
            raise MemoryError
        return tokens(sequence)
    cache.kept.clear()
    monkeypatch.setattr(llamac.Sequence, "tokens", property(scarce))
    found.waiting.append(tasks[1])
    finish(found)
    assert written(tasks[1]) == written(tasks[0])
    assert not cache.kept
    assert tasks[1].text.sequence.pointer is None


def test_a_text_that_fails_does_not_end_the_others(folder):
    """One sequence is freed early, so its batch fails; one text has a model with broken weights."""
    found, fine, broken = (scheduler.Scheduler(), new_cache(folder / "plain.gguf"),
                           new_cache(folder / "broken.gguf"))
    tasks = [new_task(fine, [1, 5]), new_task(fine, [1, 6]), new_task(broken, [1, 5]),
             new_task(fine, [1, 7])]
    found.waiting.extend(tasks)
    found.begin()
    tasks[1].text.sequence.free()
    finish(found)
    assert written(tasks[0])[1] == written(tasks[3])[1] == "length"
    assert [str(task.inbox.take()[0][1]) for task in tasks[1:3]] == [
        "the sequence is NULL", "the logits are not finite; the weights of the model are broken"]


def test_a_client_that_goes_away_ends_its_generation(client, server, monkeypatch):
    """The sequence of the generation is freed."""
    steps, freed = [], []
    evaluate, free = llamac.Engine.evaluate, llamac.Sequence.free
    monkeypatch.setattr(llamac.Engine, "evaluate", lambda *a: (steps.append(1), evaluate(*a)))
    monkeypatch.setattr(llamac.Sequence, "free", lambda self: (freed.append(self), free(self)))
    # The greedy text repeats itself and never ends.
    endless = dict(model="plain", prompt="A", max_tokens=1_000_000, temperature=0)
    for streamed in True, False:
        if streamed:
            stream = client.completions.create(stream=True, **endless)
            next(iter(stream))
            (task,) = server.talk.scheduler.running
            stream.close()
        else:
            with pytest.raises(openai.APITimeoutError):
                client.completions.create(timeout=0.5, **endless)
        assert idle(server.talk.scheduler) and 0 < len(steps) < 100_000
        seen = len(steps)
        time.sleep(0.1)
        assert len(steps) == seen
        steps.clear()
    assert task.text.sequence in freed and task.text.sequence.pointer is None and len(freed) >= 2


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n_prompt", [8000, 1])
def test_a_client_that_leaves_frees_its_memory(server, monkeypatch, stream, n_prompt):
    """The client leaves while its prompt is evaluated, or while its text is generated."""
    monkeypatch.setattr(scheduler, "PROMPT_CHUNK", 1)  # so that the prompt takes seconds
    found, asked = server.talk.scheduler, {
        "model": "long", "prompt": [5] * n_prompt, "max_tokens": 1_000_000, "stream": stream,
        "logit_bias": {"1": -100, "2": -100}}
    body = json.dumps(asked).encode()
    with socket.create_connection(server.server_address) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer %s\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (server.token.encode(), len(body), body))
        end = time.monotonic() + usual(10)
        while time.monotonic() < end and not (found.running and found.running[0].text
                                              and len(found.running[0].text.sequence) > 3):
            time.sleep(0.01)
        (task,) = found.running
    assert idle(found) and task.cancelled
    end = time.monotonic() + usual(10)
    while task.text.sequence.pointer is not None and time.monotonic() < end:
        time.sleep(0.01)  # the sequence is freed after the text leaves the list of running texts
    assert task.text.sequence.pointer is None
    assert bool(task.text.count) == (n_prompt == 1)


def test_a_client_that_reads_slowly_pauses_its_text(client, server, monkeypatch):
    """At most MAX_QUEUED events wait for the client, and the texts of other clients continue."""
    monkeypatch.setattr(scheduler, "MAX_QUEUED", 5)
    loaded = server.talk.load("plain")
    endless = server.talk.generate(loaded, talk.parse(
        {"model": "plain", "prompt": "A", "max_tokens": 1_000_000, "temperature": 0},
        False, loaded))
    next(endless)
    (task,) = server.talk.scheduler.running
    end = time.monotonic() + 30
    while not task.inbox.is_full() and time.monotonic() < end:
        time.sleep(0.01)
    count = task.text.count
    assert len(client.completions.create(
        model="plain", prompt="B", max_tokens=30, temperature=0, logprobs=0
    ).choices[0].logprobs.tokens) == 30
    assert task.text.count == count and task.inbox.queue.qsize() == 5
    assert sum(len(next(endless)) for _ in range(20)) > 20
    endless.close()
    assert idle(server.talk.scheduler)


def test_a_changed_file_is_opened_again(client, server, folder):
    path = server.talk.models()["plain"]
    say = lambda: client.completions.create(
        model="plain", prompt="A", temperature=0, max_tokens=9).choices[0].text
    before, old = path.read_bytes(), say()
    plain(4).write_gguf(path)
    assert say() != old
    path.write_bytes(before[:100])  # truncates the file in place
    with pytest.raises(openai.NotFoundError):
        say()
    path.write_bytes(before)
    assert say() == old
    gc.collect()


PAGE = """
import pathlib, runpy, sys
import llamac
llamac.PATHS[:] = [pathlib.Path(sys.argv.pop())]
runpy.run_path("page.py", run_name="__main__")
"""


def test_the_page_ends_while_its_models_answer(tmp_path, library):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text("{}")
    (run / "log.jsonl").touch()
    plain(3).write_gguf(run / "model.gguf")
    for _ in range(3):
        page = subprocess.Popen([sys.executable, "-c", PAGE, tmp_path, "--port=0", library],
                                cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        address, _, token = (
            page.stdout.readline().removeprefix("page: ").strip().partition("/?token="))
        asked = {"model": str(run), "prompt": "A", "max_tokens": 1_000_000, "temperature": 0,
                 "stream": True}
        with httpx.stream("POST", f"{address}/v1/completions", json=asked,
                          headers={"Authorization": f"Bearer {token}"}) as answer:
            events = answer.iter_lines()
            assert [next(events) for _ in range(99)][0].startswith("data:")
            page.terminate()
            out, err = page.communicate(timeout=20)
        assert (page.returncode, err) == (0, "") and "the page has ended" in out


def test_one_model_is_served_without_the_page(tmp_path, library, folder):
    """The server has the API alone: no route shows runs or starts a training."""
    command = [sys.executable, "-c", PAGE, "--port=0"]
    for model in "chat.gguf", "reciter":
        shutil.copy(folder / "reciter/m.gguf", folder / "reciter/model.gguf")
        page = subprocess.Popen([*command, f"--serve={folder / model}", library], cwd=ROOT,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                env=os.environ | {"XDG_STATE_HOME": str(tmp_path)})
        _, address, *_, key, _, _, _, name = page.stdout.readline().split()
        with openai.OpenAI(base_url=address, api_key=key, max_retries=0, timeout=60) as client:
            assert [m.id for m in client.models.list()] == [name] == [str(folder / model)]
            assert 1 <= client.completions.create(
                model=name, prompt="a", max_tokens=5).usage.completion_tokens <= 5
            with pytest.raises(openai.NotFoundError, match="no model"):
                client.completions.create(model="plain", prompt="a")
        for path in "/", "/api/runs", "/api/start", "/app.js":
            for method in "GET", "POST":
                answer = httpx.request(method, address.removesuffix("/v1") + path,
                                       headers={"Authorization": f"Bearer {key}"})
                assert answer.status_code == 404
        page.terminate()
        assert page.communicate(timeout=20) == ("the API has ended\n", "") and page.returncode == 0
    assert not list(tmp_path.iterdir())
    for model, words in ((folder / "none.gguf", "none.gguf"), (folder / "bad.gguf", "version"),
                         (tmp_path, "model.gguf")):
        done = subprocess.run([*command, f"--serve={model}", library], cwd=ROOT,
                              capture_output=True, text=True)
        assert done.returncode == 2 and words in done.stderr and done.stderr.count("\n") == 1
