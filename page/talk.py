"""
Models that answer: `/v1/models`, `/v1/completions` and `/v1/chat/completions` as OpenAI's clients expect them, by llamac.

Every request has a context of its own; the requests' tokens are computed in turns, since one forward pass uses all cores.
"""
import contextlib
import mmap
import os
import secrets
import threading
import time
from collections import deque
from dataclasses import dataclass

import numpy as np

import llamac
from engine.files import stamp
from engine.untrusted import open_untrusted, read_untrusted
from page.server import Response

AT_ONCE = 16          # requests that are answered in turns; more wait
IDLE = 2              # sessions kept for the next requests: the start of one takes longer than a token
IN_MEMORY = 1 << 28   # bytes of a model file that is read whole, so that nobody can cut it off while it is in use
FIXED = {"n": 1, "best_of": 1, "echo": False, "suffix": "", "presence_penalty": 0, "frequency_penalty": 0, "logit_bias": {},
         "tools": [], "functions": [], "response_format": {"type": "text"}, "store": False,
         "modalities": ["text"]}  # what a request may say, but not otherwise
BOTH = {"model", "max_tokens", "temperature", "top_p", "seed", "stop", "logprobs", "stream", "stream_options",
        "user", "metadata"}  # fields of a request; the last two are labels, which change no answer
FIELDS = {False: BOTH | {"prompt"}, True: BOTH | {"messages", "max_completion_tokens", "top_logprobs"}}  # by whether it is a chat
MAX_TOKENS = (1 << 31) - 1
REQUIRED = object()


class Wrong(ValueError):
    """What a client did wrong, as its library expects it."""

    def __init__(self, message, param=None, code=None, status=400):
        super().__init__(message)
        told = {"message": message, "type": "invalid_request_error", "param": param, "code": code}
        self.response = Response({"error": told}, status)


class Turns:
    """A lock that is taken in the order of those who wait."""

    def __init__(self):
        self.lock, self.busy, self.waiting = threading.Lock(), False, deque()

    def __enter__(self):
        with self.lock:
            if not self.busy:
                self.busy = True
                return
            gate = threading.Lock()
            gate.acquire()
            self.waiting.append(gate)
        gate.acquire()

    def __exit__(self, *_):
        with self.lock:
            if self.waiting:
                self.waiting.popleft().release()
            else:
                self.busy = False


class Voice:
    """An open model file and its idle sessions."""

    def __init__(self, path):
        self.stamp, self.idle, self.unfit = stamp(path), [], ""
        self.model = llamac.Model(read_untrusted(path, IN_MEMORY) if self.stamp[1] <= IN_MEMORY else path)
        if not self.model.info.has_tokenizer:
            raise llamac.Error("the file has no tokenizer")
        try:
            self.model.use_template()
        except llamac.Error as e:
            self.unfit = str(e).partition(";")[0]

    @contextlib.contextmanager
    def session(self):
        try:
            session = self.idle.pop()
        except IndexError:
            session = llamac.Session(self.model)
        yield session
        self.idle = [*self.idle, session][:IDLE]  # not after an error


@dataclass
class Wish:
    """A request, checked. tokens: of the prompt; rivals: how many likeliest tokens are told beside each, None: nothing."""
    name: str
    chat: bool
    tokens: list
    most: int
    sampler: llamac.Sampler
    stop: list
    rivals: int
    stream: bool
    usage: bool


def value(body, name, kinds, default=REQUIRED, fine=lambda x: True, expected=""):
    """body[name], where null means the default."""
    found = body.get(name)
    if found is None and default is not REQUIRED:
        return default
    if not isinstance(found, kinds) or isinstance(found, bool) and bool not in np.atleast_1d(kinds) or not fine(found):
        raise Wrong(f"{name} is {str(found)[:80]!r}, expected {expected}", name)
    return found


def refuse_unknown(given, known, place="", param=None):
    """Refuse fields of a request that change nothing here, so that nobody believes they do; null is the same as no field."""
    for name, value in given.items():
        if name not in known and value is not None:
            said = f"{place}{str(name)[:80]!r} is no field that is used here, expected {', '.join(sorted(known))}"
            raise Wrong(said, param or str(name)[:80], "unknown_parameter")


def text(string):
    """A str that has an encoding: half of a surrogate pair has none."""
    return string.encode("utf-8", "replace").decode()


def prompt_tokens(model, body):
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return model.encode(text(prompt), None if prompt else True).tolist()
    vocab_size = model.info.vocab_size
    if isinstance(prompt, list) and prompt and all(type(t) is int and 0 <= t < vocab_size for t in prompt):
        return prompt
    raise Wrong(f"prompt: expected one text, or a list of tokens, each from 0 to {vocab_size - 1}", "prompt")


def content(message):
    """The text of a message, which may come in parts."""
    found = message.get("content")
    empty = {name for name, value in message.items() if value in ([], "")}  # as in an answer that a client sends back
    refuse_unknown(message, {"role", "content"} | empty, "messages: ", "messages")
    if isinstance(found, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in found):
        for part in found:
            refuse_unknown(part, {"type", "text"}, "messages: ", "messages")
        parts = [part.get("text") for part in found]
        found = "".join(parts) if all(isinstance(part, str) for part in parts) else None
    if not isinstance(found, str):
        raise Wrong("messages: expected each to have its text as content", "messages")
    return text(found)


def chat_tokens(model, body):
    """The tokens of a conversation, up to where the next answer begins."""
    messages = value(body, "messages", list, fine=len, expected="a list of messages")
    if not all(isinstance(m, dict) for m in messages):
        raise Wrong("messages: expected a list of {role, content}", "messages")
    system = content(messages.pop(0)) if messages[0].get("role") in ("system", "developer") else None
    expected = ["user", "assistant"] * len(messages)
    if len(messages) % 2 == 0 or [m.get("role") for m in messages] != expected[:len(messages)]:
        raise Wrong("messages: expected a system message if any, then user and assistant in turn, the user last", "messages")
    tokens = []
    for n, message in enumerate(messages):
        if n % 2:
            tokens += model.encode_answer(content(message)).tolist()
        else:
            tokens += model.encode_turn(content(message), n == 0, system).tolist()
    return tokens


def wish(body, chat, voice):
    """The Wish that a body says; Wrong where it can't be had."""
    model, number = voice.model, (int, float)
    for name, fixed in FIXED.items():
        if body.get(name) not in (None, fixed):
            raise Wrong(f"{name} is {str(body[name])[:80]!r}, expected {fixed!r}, which is all there is here", name)
    refuse_unknown(body, FIELDS[chat] | FIXED.keys())
    if chat and voice.unfit:
        raise Wrong(f"{voice.unfit}: it was not made to chat; /v1/completions continues a text", "model")
    tokens = (chat_tokens if chat else prompt_tokens)(model, body)
    if not tokens:
        raise Wrong("the prompt has no tokens, and this model has no BOS to begin with; expected a text",
                    "messages" if chat else "prompt")
    if len(tokens) > model.info.seq_len:
        raise Wrong(f"the prompt has {len(tokens)} tokens, the model's context is {model.info.seq_len}",
                    "messages" if chat else "prompt", "context_length_exceeded")
    whole = dict(kinds=int, fine=lambda n: 1 <= n <= MAX_TOKENS, expected=f"a whole number from 1 to {MAX_TOKENS}")
    most = value(body, "max_tokens", default=model.info.seq_len if chat else 16, **whole)
    temperature = value(body, "temperature", number, 1, lambda x: 0 <= x <= 100, "a number from 0 to 100")
    top_p = value(body, "top_p", number, 1, lambda x: 0 < x <= 1, "a number above 0 and at most 1")
    seed = value(body, "seed", int, secrets.randbits(63), expected="a whole number") & (1 << 64) - 1
    few = lambda found: len(found) <= (4 if isinstance(found, list) else 10000)
    stop = value(body, "stop", (str, list), [], few, "one to four texts")
    stop = [stop] if isinstance(stop, str) else stop
    if not all(isinstance(s, str) for s in stop):
        raise Wrong("stop: expected one to four texts", "stop")
    few = dict(kinds=int, fine=lambda n: 0 <= n <= 20, expected="a whole number from 0 to 20")
    if chat:
        wanted = value(body, "logprobs", bool, False, expected="true or false")
        rivals = value(body, "top_logprobs", default=0, **few) if wanted else None
    else:
        rivals = value(body, "logprobs", default=None, **few)
    options = value(body, "stream_options", dict, {}, expected="an object")
    refuse_unknown(options, {"include_usage"}, "stream_options: ", "stream_options")
    value(options, "include_usage", bool, False, expected="true or false")
    return Wish(str(body["model"]), chat, tokens, value(body, "max_completion_tokens", default=most, **whole),
                llamac.Sampler(temperature, top_p, seed), [s for s in stop if s], rivals,
                value(body, "stream", bool, False, expected="true or false"), bool(options.get("include_usage")))


class Talk:
    """models: a function that gives {name: path of a model file}."""

    def __init__(self, models):
        self.models, self.voices, self.lock = models, {}, threading.Lock()
        self.turns, self.places = Turns(), threading.Semaphore(AT_ONCE)

    def routes(self):
        return {"GET /v1/models": self.list, "POST /v1/completions": lambda r: self.answer(r, False),
                "POST /v1/chat/completions": lambda r: self.answer(r, True)}

    def list(self, request):
        found = []
        for name, path in self.models().items():
            with contextlib.suppress(OSError):  # it is gone
                found.append({"id": name, "object": "model", "owned_by": "llamac", "created": int(path.stat().st_mtime),
                              "chat": has_template(path)})
        return {"object": "list", "data": found}

    def voice(self, name):
        """The open model of this name, opened anew where its file is another."""
        paths = self.models()
        if not isinstance(name, str) or name not in paths:
            raise Wrong(f"there is no model {str(name)[:200]!r}; GET /v1/models lists all", "model", "model_not_found", 404)
        try:
            with self.lock:
                if name not in self.voices or self.voices[name].stamp != stamp(paths[name]):
                    self.voices = dict([*self.voices.items()][-3:]) | {name: Voice(paths[name])}
                return self.voices[name]
        except (OSError, llamac.Error) as e:
            raise Wrong(f"{name}: {e}", "model", "model_not_found", 404) from e

    def answer(self, request, chat):
        try:
            body = request.json()
            voice = self.voice(body.get("model"))
            asked = wish(body, chat, voice)
        except Wrong as e:
            return e.response
        except (ValueError, llamac.Error) as e:  # no JSON; a prompt that can't be encoded
            return Wrong(str(e)).response
        except RecursionError:
            return Wrong("the request is nested too deeply").response
        events = self.events(voice, asked)
        return events if asked.stream else whole(asked, events, request.gone)

    def events(self, voice, asked):
        """The events of a stream. A reader who goes ends it at the next."""
        kind = "chat.completion.chunk" if asked.chat else "text_completion"
        head = {"id": f"cmpl-{secrets.token_hex(12)}", "object": kind, "created": int(time.time()), "model": asked.name}
        while not self.places.acquire(timeout=1):
            yield None
        try:
            if asked.chat:
                yield head | {"choices": [choice(True, "", [], None) | {"delta": {"role": "assistant", "content": ""}}]}
            count, reason = 0, None
            how = dict(most=asked.most, stop=asked.stop, rivals=asked.rivals, turn=self.turns)
            with voice.session() as session:
                told = llamac.generate(session, asked.tokens, asked.sampler, **how)
                for words, entries, count, reason in told:
                    news = words or entries or reason
                    yield head | {"choices": [choice(asked.chat, words, entries, reason)]} if news else None
            if asked.usage or not asked.stream:
                n = len(asked.tokens)
                usage = {"prompt_tokens": n, "completion_tokens": count, "total_tokens": n + count}
                yield head | {"choices": [], "usage": usage}
            yield "[DONE]"
        except llamac.Error as e:  # too little memory, broken weights
            yield {"error": {"message": str(e), "type": "server_error", "param": None, "code": None}}
        finally:
            self.places.release()


def choice(chat, words, entries, reason):
    """One choice of an event."""
    told = None
    if entries and chat:
        told = {"content": [{k: v for k, v in e.items() if k != "offset"} for e in entries]}
    elif entries:
        told = {"tokens": [e["token"] for e in entries], "token_logprobs": [e["logprob"] for e in entries],
                "top_logprobs": [{r["token"]: r["logprob"] for r in e["top_logprobs"]} for e in entries],
                "text_offset": [e["offset"] for e in entries]}
    said = {"delta": {"content": words}} if chat else {"text": words}
    return {"index": 0, **said, "logprobs": told, "finish_reason": reason}


def whole(asked, events, gone):
    """The answer that a stream's events make together; gone(): nobody waits for it any more."""
    found = []
    with contextlib.closing(events):
        for event in events:
            found += [event] if isinstance(event, dict) else []
            if gone():
                return Response("")
    if "error" in found[-1]:
        return Response(found[-1], 500)
    choices = [event["choices"][0] for event in found if event["choices"]]
    told = None
    if asked.rivals is not None:
        parts = [c["logprobs"] for c in choices if c["logprobs"]]
        told = {key: [x for part in parts for x in part[key]] for key in (
            ["content"] if asked.chat else ["tokens", "token_logprobs", "top_logprobs", "text_offset"])}
    words = "".join(c["delta"]["content"] if asked.chat else c["text"] for c in choices)
    part = {"message": {"role": "assistant", "content": words}} if asked.chat else {"text": words}
    return found[-1] | {"object": "chat.completion" if asked.chat else "text_completion",
                        "choices": [{"index": 0, **part, "logprobs": told, "finish_reason": choices[-1]["finish_reason"]}]}


def has_template(path):
    """Whether a model file names a chat template, which stands before its tensors."""
    with contextlib.suppress(OSError, ValueError), open_untrusted(path) as f:
        with mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return data.find(b"tokenizer.chat_template", 0, 1 << 24) >= 0
    return False


def models_of(runs):
    """{name: path} of the model files in the runs of a page: the best of a run by the run's name, and its latest."""
    runs.refresh()
    found = {}
    for name, run in list(runs.runs.items()):
        for key, path in ((name, run.folder / "model.gguf"), (f"{name}/last.gguf", run.folder / "last.gguf")):
            if os.path.isfile(path):  # False also where the folder can't be read
                found[key] = path
    return found
