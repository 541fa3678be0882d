"""The page's models through OpenAI's client: completions, chats, streams, stop texts, seeds."""
import gc
import json
import math
import os
import queue
import shutil
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
from tests.conftest import ROOT
from tests.test_chat import CHATML
from tests.test_run import Model, reciter, run

pytestmark = pytest.mark.usefixtures("library")


def plain(seed):
    """Return a model that never ends a text."""
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
    reciter(folder / "reciter", [(c.encode(), 1) for c in ("a", "b", "é", "<", "s", "t", "o", "p", ">", "c", "d")])
    (folder / "bad.gguf").write_bytes(b"GGUF" + bytes(60))
    broken = Model()
    broken.w["norm"][0] = np.nan
    broken.write_gguf(folder / "broken.gguf")
    return folder


@pytest.fixture(scope="module")
def server(folder, library):
    paths = {path.relative_to(folder).with_suffix("").as_posix(): path for path in sorted(folder.rglob("*.gguf"))}
    found = talk.Talk(lambda: paths)
    served = Server("127.0.0.1", 0, found.routes())
    served.talk = found
    threading.Thread(target=served.serve_forever, daemon=True).start()
    yield served
    served.shutdown()
    served.server_close()


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.url().split("/?")[0] + "/v1", api_key=server.token, max_retries=0, timeout=60) as client:
        yield client


def spoken(binary, path, prompt, n, *flags):
    """Return what run generates after a prompt."""
    return run(binary, path, *flags, "-n", n, "--raw", "-i", prompt)[:-1].decode(errors="replace").removeprefix(prompt)


def test_bos_follows_the_model_and_an_empty_prompt_has_one():
    asked = []
    model = SimpleNamespace(encode=lambda text, bos: asked.append((text, bos)) or np.array([1]), info=SimpleNamespace(vocab_size=9))
    for prompt in "One", "", ["One"], [""]:
        assert talk.prompt_tokens(model, {"prompt": prompt}) == [[1]]
    assert asked == 2 * [("One", None), ("", True)] and talk.prompt_tokens(model, {"prompt": ["", "One"]}) == [[1], [1]]


def test_models(client):
    assert {m.id: m.chat for m in client.models.list()} == {
        "plain": False, "chat": True, "reciter/m": False, "bad": False, "broken": False}


def test_a_completion_is_what_run_writes(client, folder, run_bin):
    """Greedy and sampled, whole and streamed, within the context and beyond it."""
    for wish, flags in ((dict(temperature=0), ("-t", 0)), (dict(temperature=0.8, top_p=0.9, seed=7), ("-t", 0.8, "-p", 0.9, "-s", 7))):
        for most in 20, 100:
            asked = dict(model="plain", prompt="One", max_tokens=most, **wish)
            found = client.completions.create(**asked)
            expected = spoken(run_bin, folder / "plain.gguf", "One", most + 3, *flags)
            assert found.choices[0].text == expected
            assert found.choices[0].finish_reason == "length" and found.object == "text_completion"
            assert (found.usage.prompt_tokens, found.usage.completion_tokens, found.usage.total_tokens) == (4, most, 4 + most)
            *parts, last, usage = client.completions.create(stream=True, stream_options={"include_usage": True}, **asked)
            assert "".join(p.choices[0].text for p in [*parts, last]) == expected and len(parts) > most // 2
            assert last.choices[0].finish_reason == "length" and {p.id for p in parts} == {last.id}
            assert usage.usage == found.usage and usage.choices == []
    tokens = llamac.Model(folder / "plain.gguf").encode("One").tolist()
    assert client.completions.create(model="plain", prompt=tokens, max_tokens=20, temperature=0).choices[0].text == \
        client.completions.create(model="plain", prompt=["One"], max_tokens=20, temperature=0).choices[0].text


def test_seeds(client):
    def say(**how):
        return client.completions.create(model="plain", prompt="A", max_tokens=30, **how).choices[0].text
    assert say(seed=5) == say(seed=5) != say(seed=6) and say() != say() and say(seed=0) == say(seed=0) and say(seed=-3) == say(seed=-3)


def test_stops(client):
    """The model writes abé<stop>cd. A stop text is cut off, also if it spans tokens."""
    def say(**how):
        found = client.completions.create(model="reciter/m", prompt="a", temperature=0, max_tokens=50, **how)
        *parts, last = client.completions.create(model="reciter/m", prompt="a", temperature=0, max_tokens=50, stream=True, **how)
        assert "".join(p.choices[0].text for p in [*parts, last]) == found.choices[0].text
        assert last.choices[0].finish_reason == found.choices[0].finish_reason == "stop"
        return found.choices[0].text
    assert say() == "bé<stop>cd"
    assert say(stop="<stop>") == "bé" and say(stop=["op>c", "never"]) == "bé<st" and say(stop="<stoq") == "bé<stop>cd"
    assert say(stop=["<stop>!", "stop"]) == "bé<" and say(stop="b") == "" and say(stop="d!") == "bé<stop>cd"
    cut = client.completions.create(model="reciter/m", prompt="a", temperature=0, stop="stop", logprobs=0, max_tokens=50).choices[0]
    assert cut.logprobs.tokens == ["b", "é", "<"] and cut.logprobs.text_offset == [0, 1, 2]


def test_logprobs_equal_transformers(client, folder):
    """In the formats of completions and of chats."""
    found = client.completions.create(model="plain", prompt="One", max_tokens=8, temperature=0, logprobs=3).choices[0].logprobs
    model = llamac.Model(folder / "plain.gguf")
    ids = model.encode("One").tolist()
    oracle = plain(3)
    for token, logprob, top in zip(found.tokens, found.token_logprobs, found.top_logprobs):
        row = oracle.logits(ids)[-1].astype(float)
        row -= math.log(np.exp(row).sum())
        best = np.argsort(-row)[:3]
        assert abs(logprob - row[best[0]]) < 1e-3 and np.allclose(sorted(top.values()), sorted(row[best]), atol=1e-3)
        spelled = model.decode([int(best[0])], ids[-1])
        assert spelled.decode("latin-1") == (token if token[:6] != "bytes:" else token[6:].encode().decode("unicode_escape"))
        ids.append(int(best[0]))
    told = client.chat.completions.create(model="chat", messages=[{"role": "user", "content": "Hi"}], temperature=0, max_tokens=3,
                                          logprobs=True, top_logprobs=2).choices[0].logprobs.content
    assert len(told) == 3 and all(len(t.top_logprobs) == 2 and t.logprob == t.top_logprobs[0].logprob for t in told)
    assert all(len(t.bytes) == 1 for t in told)


def test_a_chat_is_what_run_answers(client, folder, run_bin):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    said = run(run_bin, folder / "chat.gguf", "-m", "chat", "-t", 0, "-n", 0, "--raw", "-y", "Be brief.", stdin=b"Hi\nAnd you?\n")
    answers = [part.rsplit(b"\n", 1)[0].decode(errors="replace") for part in said.split(b"Assistant: ")[1:]]
    first = client.chat.completions.create(model="chat", messages=messages, temperature=0)
    assert first.choices[0].message.content == answers[0] and first.choices[0].finish_reason == "stop"
    assert first.object == "chat.completion" and first.choices[0].message.role == "assistant"
    messages += [{"role": "assistant", "content": "Fine."}, {"role": "user", "content": [{"type": "text", "text": "And you?"}]}]
    told = client.chat.completions.create(model="chat", messages=messages, temperature=0, max_completion_tokens=5)
    parts = list(client.chat.completions.create(model="chat", messages=messages, temperature=0, stream=True, max_tokens=5))
    assert parts[0].choices[0].delta.role == "assistant" and parts[-1].choices[0].finish_reason == told.choices[0].finish_reason
    assert "".join(p.choices[0].delta.content for p in parts) == told.choices[0].message.content
    model = llamac.Model(folder / "chat.gguf")
    model.use_template()
    ids = [*model.encode_turn("Hi", True, "Be brief."), *model.encode_answer("Fine."), *model.encode_turn("And you?", False)]
    assert told.usage.prompt_tokens == len(ids)


def test_mistakes_are_reported_in_openais_format(client, server):
    def wrong(kind, words, call=client.completions.create, **how):
        with pytest.raises(kind, match=words) as caught:
            call(**{"model": "plain", "prompt": "A"} | how if call == client.completions.create else {"model": "chat"} | how)
        assert caught.value.body["type"] in ("invalid_request_error", "server_error")
        return caught.value
    refused, hi = openai.BadRequestError, [{"role": "user", "content": "Hi"}]
    assert wrong(openai.NotFoundError, "there is no model", model="none").code == "model_not_found"
    assert wrong(openai.NotFoundError, "bad: ", model="bad").param == "model"
    assert wrong(refused, "context is 64", prompt="A" * 500).code == "context_length_exceeded"
    for name, values in {"n": [0, 65, -1, True, "2"], "best_of": [3], "echo": [True], "suffix": ["x"], "max_tokens": [0, -1, 1.5, True, "3"],
                         "temperature": [-1, "hot", float("inf"), 1e9], "top_p": [0, 1.5], "seed": ["x", 1.5], "stop": [5, list("abcde"), [1]],
                         "logprobs": [21, -1, "a"], "presence_penalty": [3], "frequency_penalty": [-2.1], "stream_options": [3],
                         "logit_bias": [{"1": 200}, {"x": 1}, {"-1": 1}, {"300": 1}, {"1": "a"}], "response_format": [{"type": "xml"}, {}],
                         "prompt": [None, [], ["a"] * 65, ["a", [1]], [[1], []], [[1], [300]], [1, 300], [-1], [True], {"a": 1}, 5]}.items():
        for value in values:
            with pytest.raises((refused, ValueError, TypeError), match=None):  # the client itself refuses to send infinity
                client.completions.create(**{"model": "plain", "prompt": "A"} | {name: value})
    chat = client.chat.completions.create
    assert "continues a text" in str(wrong(refused, "no chat template", chat, model="plain", messages=hi))
    for messages in ([], hi * 2, hi + [{"role": "assistant", "content": "x"}], [{"role": "system", "content": "x"}],
                     [{"role": "user"}], [{"role": "tool", "content": "x"}], [{"role": "user", "content": [{"type": "image_url"}]}]):
        wrong(refused, "messages", chat, messages=messages)
    assert wrong(openai.InternalServerError, "not finite", model="broken").body["type"] == "server_error"
    with pytest.raises(openai.APIError, match="not finite"):
        list(client.completions.create(model="broken", prompt="A", stream=True))
    assert "1 to 2147483647" in str(wrong(refused, "max_tokens is '2147483648'", max_tokens=1 << 31))
    for n in 1 << 31, 1 << 32, 1 << 64, 10 ** 40:
        wrong(refused, "max_tokens", max_tokens=n)
        wrong(refused, "max_completion_tokens", chat, messages=hi, max_completion_tokens=n)
    for name, value in (("top_k", -1), ("top_k", 0.5), ("min_p", False), ("min_p", 2), ("repeat_penalty", 0)):
        assert wrong(refused, f"{name} is", extra_body={name: value}).param == name
    for name, value in (("tempature", 0), ("repetition_penalty", 1.1), ("max_new_tokens", 3),
                        ("messages", hi), ("top_logprobs", 2), ("max_completion_tokens", 3)):
        error = wrong(refused, f"'{name}' is not a field", extra_body={name: value})
        assert error.param == name and error.code == "unknown_parameter"
    assert wrong(refused, "'prompt' is not a field", chat, messages=hi, extra_body={"prompt": "A"}).param == "prompt"
    wrong(refused, "'include'", stream=True, stream_options={"include": True})
    wrong(refused, "include_usage", stream=True, stream_options={"include_usage": "yes"})
    for message in ({"name": "Ann"}, {"tool_calls": [{"id": 1}]}, {"content": [{"type": "text", "text": "a", "cache_control": {}}]},
                    {"content": [{"type": "text", "text": 5}]}, {"content": [{"type": "text"}]}):
        wrong(refused, "messages", chat, messages=[hi[0] | message])
    fine = client.completions.create(model="plain", prompt="A", max_tokens=1, user="me", extra_body={"top_k": None, "store": False})
    assert fine.usage.completion_tokens == 1
    back = {"role": "assistant", "content": "Fine.", "refusal": None, "annotations": [], "tool_calls": None}
    assert chat(model="chat", messages=[hi[0], back, hi[0]], max_tokens=1, user="me").choices
    url = f"{client.base_url}completions"
    head = {"Authorization": f"Bearer {server.token}"}
    for depth in 100, 300, 900, 5000, 100_000:
        for name in "model", "prompt", "stop", "n", "top_k", "logit_bias":
            body = f'{{"model": "plain", "prompt": "A", "{name}": {"[" * depth + "]" * depth}}}'
            answer = httpx.post(url, content=body, headers=head)
            assert answer.status_code in (400, 404) and answer.json()["error"]["type"] == "invalid_request_error", answer.text
    for body in (b"", b"[]", b"{", b"[" * 100000, b'{"model": ["plain"]}', b'{"model": "plain", "prompt": "\\ud800", "max_tokens": 1}'):
        answer = httpx.post(url, content=body, headers=head)
        assert answer.status_code == (200 if b"ud800" in body else 404 if b"model" in body else 400), answer.text
    assert httpx.post(url, json={"model": "plain", "prompt": "A"}).status_code == 403  # no token


def test_an_answer_in_json_is_an_object_that_ends_within_its_tokens(client):
    """Whatever a model of random weights would rather write."""
    asked = dict(model="chat", messages=[{"role": "user", "content": "Hi"}], temperature=1.5, response_format={"type": "json_object"})
    lengths = []
    for seed, most in (1, 2), (2, 7), (3, 7), (4, 40):
        found = client.chat.completions.create(**asked, seed=seed, max_tokens=most)
        assert type(json.loads(found.choices[0].message.content)) is dict and found.choices[0].finish_reason == "stop"
        lengths.append(found.usage.completion_tokens)
    assert lengths[0] == 2 and lengths[1] <= 7 >= lengths[2] and 7 < lengths[3] <= 40


def test_a_prompt_without_tokens_is_refused():
    info = SimpleNamespace(seq_len=64, vocab_size=9)
    voice = SimpleNamespace(chat_error="", model=SimpleNamespace(info=info, encode=lambda text, bos: np.array([], int)))
    for prompt in "", "x", [""]:  # where a model has no BOS
        with pytest.raises(talk.ApiError, match="the prompt has no tokens"):
            talk.parse({"model": "x", "prompt": prompt}, False, voice)


def test_sixteen_clients_at_once(client, server):
    """Each gets the same text as alone, and none waits until another has finished."""
    def say(n):
        return client.completions.create(model=("plain", "chat")[n % 2] if n % 4 < 3 else "plain", prompt=f"A{n}", max_tokens=40,
                                         seed=n + 1, stream=True)
    alone, begun, ended = [[c.choices[0].text for c in say(n)] for n in range(16)], {}, {}
    found, ready = {}, threading.Barrier(16)

    def work(n):
        ready.wait()
        for chunk in say(n):
            begun.setdefault(n, time.monotonic())
            found.setdefault(n, []).append(chunk.choices[0].text)
        ended[n] = time.monotonic()
    threads = [threading.Thread(target=work, args=(n,)) for n in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ["".join(found[n]) for n in range(16)] == ["".join(a) for a in alone]
    assert idle(server.talk.scheduler)
    for name in "plain", "chat":
        assert 0 < len(server.talk.loaded[name].cache.kept) <= scheduler.MAX_KEPT


def idle(found):
    """Return whether no text runs or waits, within 30 seconds."""
    end = time.monotonic() + 30
    while (found.running or found.waiting) and time.monotonic() < end:
        time.sleep(0.01)
    return not found.running and not found.waiting


def test_several_texts_of_one_request(client):
    """n texts have the seeds from the given one on; each prompt of a list has the texts that it has alone."""
    def say(**how):
        return client.completions.create(model="plain", max_tokens=12, temperature=0.9, **how)
    alone = [[say(prompt=prompt, seed=seed).choices[0] for seed in (5, 6, 7)] for prompt in ("One", "Two")]
    found = say(prompt=["One", "Two"], n=3, seed=5, logprobs=1)
    assert [c.text for c in found.choices] == [c.text for cs in alone for c in cs] and [c.index for c in found.choices] == list(range(6))
    assert all(len(c.logprobs.tokens) == 12 for c in found.choices)
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (8, 72)
    texts = [""] * 6
    for chunk in say(prompt=["One", "Two"], n=3, seed=5, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [c.text for c in found.choices]
    tokens = client.completions.create(model="plain", prompt=[[1, 5], [1, 9, 7]], max_tokens=3, temperature=0)
    assert [c.text for c in tokens.choices] == [client.completions.create(model="plain", prompt=p, max_tokens=3, temperature=0).choices[0].text
                                                for p in ([1, 5], [1, 9, 7])]
    answers = client.chat.completions.create(model="chat", messages=[{"role": "user", "content": "Hi"}], n=2, seed=5, max_tokens=9)
    assert [c.index for c in answers.choices] == [0, 1]
    assert answers.choices[1].message.content == client.chat.completions.create(
        model="chat", messages=[{"role": "user", "content": "Hi"}], seed=6, max_tokens=9).choices[0].message.content


def test_a_conversation_evaluates_only_what_is_new(client, server, monkeypatch):
    """And answers as if it were told anew; a beginning that several requests share is evaluated once."""
    evaluated, evaluate = [], llamac.Engine.evaluate
    monkeypatch.setattr(llamac.Engine, "evaluate", lambda self, parts: (evaluated.append(sum(len(p.tokens) for p in parts)),
                                                                        evaluate(self, parts)))

    def say(prompt):
        evaluated.clear()
        text = client.completions.create(model="plain", prompt=prompt, temperature=0, max_tokens=5).choices[0].text
        return text, sum(evaluated) - 4  # all but the tokens of the text
    server.talk.loaded.pop("plain", None)
    first, following = [1, *range(10, 30)], [1, *range(10, 26), 99, 98]
    assert say(first)[1] == 21 and say(first)[1] == 1
    text, size = say(following)
    assert size == 2
    kept = server.talk.loaded["plain"].cache.kept
    whole = [*following, *kept[-1][1][len(following):].tolist(), 50, 51]  # as a conversation goes on
    continued, size = say(whole)
    assert size == 2 and [len(known) for _, known in kept] == [25, 25, 29]
    server.talk.loaded.pop("plain")
    evaluated.clear()
    client.completions.create(model="plain", prompt=first, n=4, max_tokens=2)
    assert sum(evaluated) == len(first) + 3 + 4  # the prompt once, its last token for the others, the first token of each text
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
    monkeypatch.setattr(cache, "max_tokens", 10)
    cache.keep(llamac.Sequence(engine))
    assert [len(known) for _, known in cache.kept] == [3, 3, 3, 0]


def test_a_budget_is_split_evenly():
    assert scheduler.split_evenly([100, 3, 100], 64) == [30, 3, 31] and scheduler.split_evenly([], 64) == []
    assert scheduler.split_evenly([5, 5], 64) == [5, 5] and scheduler.split_evenly([9] * 70, 64).count(0) == 0


def test_a_long_prompt_does_not_stall_running_texts():
    """Each batch has a token of every running text, and at most so many of prompts."""
    batches = []

    class Text:
        def __init__(self, name, n_new, left):
            self.name, self.n_new, self.left, self.reason, self.sequence, self.count = name, n_new, left, None, self, 0

        ready = property(lambda self: not self.n_new)
        free = lambda self: None

        def part(self, n):
            n = min(n, self.n_new)
            self.n_new -= n
            return self.name, n

        def advance(self):
            self.left, self.n_new = self.left - 1, 1
            self.reason = None if self.left else "length"
            return "", [], 0, self.reason
    found = scheduler.Scheduler()
    cache = SimpleNamespace(engine=SimpleNamespace(evaluate=batches.append), keep=lambda sequence: None)
    for name, size in ("running", 1), ("long", 300), ("short", 20):
        found.running.append(scheduler.Task(cache, [], {}, queue.SimpleQueue(), text=Text(name, size, 9)))
    for _ in range(7):
        found.step()
    assert all(dict(batch)["running"] == 1 for batch in batches)
    assert all(sum(n for name, n in batch if name == "long") <= scheduler.PROMPT_CHUNK for batch in batches)
    assert batches[0] == [("running", 1), ("long", 44), ("short", 20)] and batches[1] == [("running", 1), ("long", 64), ("short", 1)]
    assert dict(batches[5])["long"] == 1


def test_texts_wait_in_the_order_of_their_arrival(monkeypatch):
    """At most MAX_RUNNING run at once; a client that leaves while it waits never begins."""
    found, begun = scheduler.Scheduler(), []
    monkeypatch.setattr(llamac, "Continuation", lambda sequence, tokens, **_: begun.append(int(tokens[0])) or SimpleNamespace(sequence=sequence, count=0))
    monkeypatch.setattr(scheduler, "MAX_RUNNING", 3)
    cache = SimpleNamespace(take=lambda tokens, running: SimpleNamespace(free=lambda: None), keep=lambda sequence: None)
    tasks = [scheduler.Task(cache, [n], {}, queue.SimpleQueue()) for n in range(7)]
    found.waiting.extend(tasks)
    found.begin()
    assert begun == [0, 1, 2]
    found.cancel(tasks[3:5])
    found.end(tasks[1])
    found.end(tasks[0], llamac.Error("broken"))
    found.begin()
    assert begun == [0, 1, 2, 5, 6] and found.running == [tasks[2], tasks[5], tasks[6]] and not found.waiting
    assert str(tasks[0].events.get()[1]) == "broken"
    many, prompt = queue.SimpleQueue(), [8]  # a request with many texts, two of one prompt, lets another one go first
    tasks = [scheduler.Task(cache, tokens, {}, many) for tokens in (prompt, prompt, [9])] + [scheduler.Task(cache, [7], {}, queue.SimpleQueue())]
    found.running.clear()
    begun.clear()
    found.waiting.extend(tasks)
    found.begin()
    assert begun == [8, 7, 9]
    found.end(tasks[3], llamac.Error("it has left"))
    found.begin()
    assert begun == [8, 7, 9]
    tasks[0].text.count = 1
    found.begin()
    assert begun == [8, 7, 9, 8]


def test_a_text_that_fails_does_not_end_the_others(client):
    """A model with broken weights beside one without, and a batch that fails because of one sequence."""
    parts, ended = [], []

    def evaluate(batch):
        parts.append(batch)
        if "bad" in batch:
            raise llamac.Error("bad tokens")
    found = scheduler.Scheduler()
    found.advance, found.end = lambda task: ended.append((task, "fine")), lambda task, error: ended.append((task, str(error)))
    named = lambda name: SimpleNamespace(name=name, text=SimpleNamespace(ready=True))
    tasks = [named("a"), named("bad"), named("b")]
    found.evaluate_parts(SimpleNamespace(evaluate=evaluate), [(task, task.name) for task in tasks])
    assert ended == [(tasks[0], "fine"), (tasks[1], "bad tokens"), (tasks[2], "fine")] and len(parts) == 4


def test_a_client_that_goes_away_ends_its_generation(client, server, monkeypatch):
    """And frees its sequence."""
    steps, freed = [], []
    evaluate, free = llamac.Engine.evaluate, llamac.Sequence.free
    monkeypatch.setattr(llamac.Engine, "evaluate", lambda *a: (steps.append(1), evaluate(*a)))
    monkeypatch.setattr(llamac.Sequence, "free", lambda self: (freed.append(self), free(self)))
    endless = dict(model="plain", prompt="A", max_tokens=1_000_000, temperature=0)  # it repeats itself and never ends
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


def test_a_client_that_reads_slowly_pauses_its_text(client, server, monkeypatch):
    """What waits for it stays limited, and other clients go on."""
    monkeypatch.setattr(scheduler, "MAX_QUEUED", 5)
    endless = server.talk.events(server.talk.load("plain"), talk.parse(
        {"model": "plain", "prompt": "A", "max_tokens": 1_000_000, "temperature": 0, "stream": True}, False, server.talk.load("plain")))
    next(endless)
    (task,) = server.talk.scheduler.running
    end = time.monotonic() + 30
    while not task.is_paused() and time.monotonic() < end:
        time.sleep(0.01)
    count = task.text.count
    assert len(client.completions.create(model="plain", prompt="B", max_tokens=30, temperature=0, logprobs=0).choices[0].logprobs.tokens) == 30
    assert task.text.count == count and task.events.qsize() == 5
    for _ in range(20):
        next(endless)
    endless.close()
    assert idle(server.talk.scheduler)


def test_a_changed_file_is_opened_again(client, server, folder):
    path = server.talk.models()["plain"]
    say = lambda: client.completions.create(model="plain", prompt="A", temperature=0, max_tokens=9).choices[0].text
    before, old = path.read_bytes(), say()
    plain(4).write_gguf(path)
    assert say() != old
    path.write_bytes(before[:100])  # cut off, in place
    with pytest.raises(openai.NotFoundError):
        say()
    path.write_bytes(before)
    assert say() == old
    gc.collect()
    assert json.dumps(old)


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
        page = subprocess.Popen([sys.executable, "-c", PAGE, tmp_path, "--port=0", library], cwd=ROOT, stdout=subprocess.PIPE,
                                stderr=subprocess.PIPE, text=True)
        address, _, token = page.stdout.readline().removeprefix("page: ").strip().partition("/?token=")
        asked = {"model": str(run), "prompt": "A", "max_tokens": 1_000_000, "temperature": 0, "stream": True}
        with httpx.stream("POST", f"{address}/v1/completions", json=asked, headers={"Authorization": f"Bearer {token}"}) as answer:
            events = answer.iter_lines()
            assert [next(events) for _ in range(99)][0].startswith("data:")
            page.terminate()
            out, err = page.communicate(timeout=20)
        assert (page.returncode, err) == (0, "") and "the page has ended" in out


def test_one_model_is_served_without_the_page(tmp_path, library, folder):
    """The API alone: no route shows runs or starts a training."""
    command = [sys.executable, "-c", PAGE, "--port=0"]
    for model in "chat.gguf", "reciter":
        shutil.copy(folder / "reciter/m.gguf", folder / "reciter/model.gguf")
        page = subprocess.Popen([*command, f"--serve={folder / model}", library], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                text=True, env=os.environ | {"XDG_STATE_HOME": str(tmp_path)})
        _, address, *_, key, _, _, _, name = page.stdout.readline().split()
        with openai.OpenAI(base_url=address, api_key=key, max_retries=0, timeout=60) as client:
            assert [m.id for m in client.models.list()] == [name] == [str(folder / model)]
            assert 1 <= client.completions.create(model=name, prompt="a", max_tokens=5).usage.completion_tokens <= 5
            with pytest.raises(openai.NotFoundError, match="no model"):
                client.completions.create(model="plain", prompt="a")
        for path in "/", "/api/runs", "/api/start", "/app.js":
            for method in "GET", "POST":
                answer = httpx.request(method, address.removesuffix("/v1") + path, headers={"Authorization": f"Bearer {key}"})
                assert answer.status_code == 404
        page.terminate()
        assert page.communicate(timeout=20) == ("the API has ended\n", "") and page.returncode == 0
    assert not list(tmp_path.iterdir())
    for model, words in (folder / "none.gguf", "none.gguf"), (folder / "bad.gguf", "version"), (tmp_path, "model.gguf"):
        done = subprocess.run([*command, f"--serve={model}", library], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 2 and words in done.stderr and done.stderr.count("\n") == 1
