"""
Answers from models through OpenAI's API: /v1/models, /v1/completions, /v1/chat/completions.

Each request uses its own session. One forward pass uses all cores, so requests take turns, a token
each.
"""
import contextlib
import itertools
import mmap
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import llamac
from engine.files import stamp
from engine.untrusted import open_untrusted, read_untrusted
from page.server import Response

MAX_CONCURRENT = 16    # requests that take turns; others wait
MAX_IDLE_SESSIONS = 2  # per model, kept for later requests: starting one takes longer than a token
MAX_MODELS = 4         # open model files
MAX_TOKENS = (1 << 31) - 1  # the largest int of C
MAX_HEADER = 1 << 24   # bytes of a model file that are searched for a chat template
# Model files of up to this many bytes are read into memory rather than mapped, because reading a
# mapping whose file was truncated raises SIGBUS, which ends the program.
MAX_IN_MEMORY = 1 << 28


def error(message, kind, param=None, code=None):
    """Return an error in OpenAI's format."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


class ApiError(ValueError):
    """A client's mistake. response: the Response with the error in OpenAI's format."""

    def __init__(self, message, param=None, code=None, status=400):
        super().__init__(message)
        self.response = Response(error(message, "invalid_request_error", param, code), status)


class FairLock:
    """A lock that threads get in the order in which they asked for it."""

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
        gate.acquire()  # until the thread that has the lock releases it

    def __exit__(self, *_):
        with self.lock:
            if self.waiting:  # pass the lock on; it stays busy
                self.waiting.popleft().release()
            else:
                self.busy = False


class LoadedModel:
    """An open model file and its idle sessions. chat_error: why it can't chat, or ""."""

    def __init__(self, path):
        self.stamp, self.idle, self.chat_error = stamp(path), [], ""
        _, size, _ = self.stamp
        fits = size <= MAX_IN_MEMORY
        self.model = llamac.Model(read_untrusted(path, MAX_IN_MEMORY) if fits else path)
        if not self.model.info.has_tokenizer:
            raise llamac.Error("the file has no tokenizer")
        try:
            self.model.use_template()
        except llamac.Error as e:
            self.chat_error = str(e).partition(";")[0]  # without the advice for users of run

    @contextlib.contextmanager
    def session(self):
        """Lend an idle session or a new one. An error in the block discards the session."""
        try:
            session = self.idle.pop()
        except IndexError:
            session = llamac.Session(self.model)
        yield session  # raises the block's error, so that the session is not kept
        self.idle = [*self.idle, session][:MAX_IDLE_SESSIONS]


# ---- the fields of a request

class Field(NamedTuple):
    """The values that a field of a request accepts."""
    kinds: tuple    # their types
    expected: str   # describes them in error messages
    is_valid: Callable = lambda value: True


def integer(low, high):
    """Return the Field of an integer in a range that includes both ends."""
    expected = f"a whole number from {low} to {high}"
    return Field((int,), expected, lambda n: low <= n <= high)


def is_stop(value):
    """Return whether a value is a text, or up to four of them."""
    if isinstance(value, str):
        return len(value) <= 10_000
    return len(value) <= 4 and all(isinstance(text, str) for text in value)


FLAG = Field((bool,), "true or false")
COUNT = integer(1, MAX_TOKENS)
FIELDS = {  # of completions and chats; None: checked where the field is used
    "model": None, "max_tokens": COUNT, "seed": Field((int,), "a whole number"), "stream": FLAG,
    "temperature": Field((int, float), "a number from 0 to 100", lambda x: 0 <= x <= 100),
    "top_p": Field((int, float), "a number above 0 and at most 1", lambda x: 0 < x <= 1),
    "stop": Field((str, list), "one to four texts", is_stop),
    "stream_options": Field((dict,), "an object"),
}
COMPLETION = FIELDS | {"logprobs": integer(0, 20), "prompt": None}
CHAT = FIELDS | {"logprobs": FLAG, "top_logprobs": integer(0, 20), "max_completion_tokens": COUNT,
                 "messages": Field((list,), "a list of messages", len)}
LABELS = {"user", "metadata"}  # fields that are accepted and ignored
# Fields that are accepted with these values alone, which mean the same as no field.
FIXED = {"n": 1, "best_of": 1, "echo": False, "suffix": "", "presence_penalty": 0,
         "frequency_penalty": 0, "logit_bias": {}, "tools": [], "functions": [],
         "response_format": {"type": "text"}, "store": False, "modalities": ["text"]}


@dataclass
class Generation:
    """A checked request."""
    name: str        # of the model
    chat: bool       # a chat completion rather than a completion
    tokens: list     # of the prompt
    max_tokens: int
    sampler: llamac.Sampler
    stop: list       # of texts that end the generation
    top_logprobs: int | None  # number of likeliest tokens to report; None: no log probabilities
    stream: bool
    include_usage: bool  # end the stream with the numbers of tokens


def checked(body, fields, name, default=None):
    """
    Return body[name] if its Field accepts it, the default for null and for a missing field. Raises
    ApiError.
    """
    value, field = body.get(name), fields[name]
    if value is None:
        return default
    if type(value) not in field.kinds or not field.is_valid(value):
        raise ApiError(f"{name} is {str(value)[:80]!r}, expected {field.expected}", name)
    return value


def refuse_unknown(given, known, place="", param=None):
    """
    Raise ApiError for a field of `given` that is not in `known`, since a client may rely on a field
    that is ignored. Null is the same as no field.

    place: prefix of the message; param: field that the error names, None for the unknown one.
    """
    for name, value in given.items():
        if name not in known and value is not None:
            name = str(name)[:80]
            message = f"{place}{name!r} is not a field that is used here, expected one of "
            raise ApiError(message + ", ".join(sorted(known)), param or name, "unknown_parameter")


def valid_text(text):
    """Return a str with a "?" for each lone surrogate, which UTF-8 can't encode."""
    return text.encode("utf-8", "replace").decode()


def prompt_tokens(model, body):
    """Return the tokens of a prompt. Raises ApiError."""
    prompt = body.get("prompt")  # a text, a list of tokens, or a list of one of these
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]
    if isinstance(prompt, str):
        bos = None if prompt else True  # an empty prompt is BOS alone; None: as the model expects
        return model.encode(valid_text(prompt), bos).tolist()
    size = model.info.vocab_size
    if isinstance(prompt, list) and prompt:
        if all(type(token) is int and 0 <= token < size for token in prompt):
            return prompt
    message = f"prompt: expected one text, or a list of tokens, each from 0 to {size - 1}"
    raise ApiError(message, "prompt")


def message_text(message):
    """Return the text of a message, which may come in parts. Raises ApiError."""
    # Clients send earlier answers back with empty fields, such as "tool_calls": [].
    empty = {name for name, value in message.items() if value in ([], "")}
    refuse_unknown(message, {"role", "content"} | empty, "messages: ", "messages")
    parts = message.get("content")
    if isinstance(parts, str):
        parts = [{"type": "text", "text": parts}]
    if not isinstance(parts, list) or not all(
            isinstance(part, dict) and part.get("type") == "text" for part in parts):
        raise ApiError("messages: expected each to have its text as content", "messages")
    for part in parts:
        refuse_unknown(part, {"type", "text"}, "messages: ", "messages")
        if not isinstance(part.get("text"), str):
            raise ApiError("messages: expected each part to have a text", "messages")
    return valid_text("".join(part["text"] for part in parts))


def chat_tokens(model, body):
    """Return the tokens of a conversation, up to where the next answer begins. Raises ApiError."""
    messages = checked(body, CHAT, "messages", [])
    if not messages or not all(isinstance(message, dict) for message in messages):
        raise ApiError("messages: expected a list of {role, content}", "messages")
    system = None
    if messages[0].get("role") in ("system", "developer"):
        system = message_text(messages[0])
        messages = messages[1:]
    roles = [message.get("role") for message in messages]
    if len(roles) % 2 == 0 or roles != (["user", "assistant"] * len(roles))[:len(roles)]:
        raise ApiError("messages: expected a system message if any, then user and assistant in "
                       "turn, the user last", "messages")
    tokens = []
    for n, message in enumerate(messages):
        text = message_text(message)
        turn = model.encode_answer(text) if n % 2 else model.encode_turn(text, n == 0, system)
        tokens += turn.tolist()
    return tokens


def parse(body, chat, loaded):
    """Return the Generation that a request asks for. Raises ApiError."""
    model, fields = loaded.model, CHAT if chat else COMPLETION
    for name, fixed in FIXED.items():
        if body.get(name) not in (None, fixed):
            raise ApiError(f"{name} is {str(body[name])[:80]!r}, expected {fixed!r}: nothing else "
                           "is supported here", name)
    refuse_unknown(body, fields.keys() | LABELS | FIXED.keys())
    if chat and loaded.chat_error:
        raise ApiError(f"{loaded.chat_error}: this model can't chat; /v1/completions continues a "
                       "text", "model")
    tokens = chat_tokens(model, body) if chat else prompt_tokens(model, body)
    param = "messages" if chat else "prompt"
    if not tokens:
        message = "the prompt has no tokens, and this model has no BOS; expected a text"
        raise ApiError(message, param)
    if len(tokens) > model.info.seq_len:
        raise ApiError(f"the prompt has {len(tokens)} tokens, the model's context is "
                       f"{model.info.seq_len}", param, "context_length_exceeded")
    max_tokens = checked(body, fields, "max_tokens", model.info.seq_len if chat else 16)
    top_logprobs = checked(body, fields, "logprobs")
    if chat:
        max_tokens = checked(body, fields, "max_completion_tokens", max_tokens)
        top_logprobs = checked(body, fields, "top_logprobs", 0) if top_logprobs else None
    stop = checked(body, fields, "stop", [])
    options = checked(body, fields, "stream_options", {})
    refuse_unknown(options, {"include_usage"}, "stream_options: ", "stream_options")
    seed = checked(body, fields, "seed", secrets.randbits(63)) & (1 << 64) - 1  # for uint64_t
    sampler = llamac.Sampler(checked(body, fields, "temperature", 1),
                             checked(body, fields, "top_p", 1), seed)
    return Generation(
        name=str(body["model"]), chat=chat, tokens=tokens, max_tokens=max_tokens, sampler=sampler,
        stop=[text for text in ([stop] if isinstance(stop, str) else stop) if text],
        top_logprobs=top_logprobs, stream=checked(body, fields, "stream", False),
        include_usage=checked(options, {"include_usage": FLAG}, "include_usage", False))


# ---- answers

class Talk:
    """The routes. models: a function that returns {name: path of a model file}."""

    def __init__(self, models):
        self.models = models
        self.loaded, self.lock = {}, threading.Lock()  # {name: LoadedModel}, the oldest first
        self.compute_lock = FairLock()
        self.slots = threading.Semaphore(MAX_CONCURRENT)

    def routes(self):
        return {"GET /v1/models": self.list,
                "POST /v1/completions": lambda request: self.answer(request, False),
                "POST /v1/chat/completions": lambda request: self.answer(request, True)}

    def list(self, request):
        """Return all models. "chat": whether the file has a chat template."""
        found = []
        for name, path in self.models().items():
            with contextlib.suppress(OSError):  # the file is gone
                created = int(path.stat().st_mtime)
                found.append({"id": name, "object": "model", "owned_by": "llamac",
                              "created": created, "chat": has_template(path)})
        return {"object": "list", "data": found}

    def load(self, name):
        """
        Return the LoadedModel with this name; open its file if it is not open or has changed.
        Raises ApiError.
        """
        paths = self.models()
        if not isinstance(name, str) or name not in paths:
            raise ApiError(f"there is no model {str(name)[:200]!r}; GET /v1/models lists all",
                           "model", "model_not_found", 404)
        try:
            with self.lock:
                if name not in self.loaded or self.loaded[name].stamp != stamp(paths[name]):
                    kept = list(self.loaded.items())[1 - MAX_MODELS:]
                    self.loaded = dict(kept) | {name: LoadedModel(paths[name])}
                return self.loaded[name]
        except (OSError, llamac.Error) as e:
            raise ApiError(f"{name}: {e}", "model", "model_not_found", 404) from e

    def answer(self, request, chat):
        """Return a stream of events, a dict or the Response of an error, in OpenAI's format."""
        try:
            body = request.json()
            loaded = self.load(body.get("model"))
            asked = parse(body, chat, loaded)
        except ApiError as e:
            return e.response
        except (ValueError, llamac.Error) as e:  # invalid JSON; a prompt that can't be encoded
            return ApiError(str(e)).response
        except RecursionError:
            return ApiError("the request is nested too deeply").response
        events = self.events(loaded, asked)
        return events if asked.stream else joined(asked, events, request.gone)

    def events(self, loaded, asked):
        """
        Yield the chunks of a response and None in between, so that the server finds out whether the
        client has closed the connection. Closing this iterator ends the generation.
        """
        head = {"id": f"cmpl-{secrets.token_hex(12)}", "created": int(time.time()),
                "model": asked.name,
                "object": "chat.completion.chunk" if asked.chat else "text_completion"}
        while not self.slots.acquire(timeout=1):
            yield None
        try:
            if asked.chat:
                first = {"delta": {"role": "assistant", "content": ""}}
                yield head | {"choices": [choice(True, "", [], None) | first]}
            count = 0
            with loaded.session() as session:
                for text, details, count, reason in llamac.generate(
                        session, asked.tokens, asked.sampler, asked.max_tokens, asked.stop,
                        asked.top_logprobs, self.compute_lock):
                    if text or details or reason:
                        yield head | {"choices": [choice(asked.chat, text, details, reason)]}
                    else:
                        yield None
            if asked.include_usage or not asked.stream:
                size = len(asked.tokens)
                usage = {"prompt_tokens": size, "completion_tokens": count,
                         "total_tokens": size + count}
                yield head | {"choices": [], "usage": usage}
            yield "[DONE]"
        except llamac.Error as e:  # too little memory, broken weights
            yield error(str(e), "server_error")
        finally:
            self.slots.release()


def choice(chat, text, details, reason):
    """Return the "choice" of a chunk. details, reason: as llamac.generate yields them."""
    logprobs = None
    if details and chat:
        fields = ("token", "logprob", "bytes", "top_logprobs")
        logprobs = {"content": [{field: entry[field] for field in fields} for entry in details]}
    elif details:
        logprobs = {
            "tokens": [entry["token"] for entry in details],
            "token_logprobs": [entry["logprob"] for entry in details],
            "top_logprobs": [{top["token"]: top["logprob"] for top in entry["top_logprobs"]}
                             for entry in details],
            "text_offset": [entry["offset"] for entry in details]}
    content = {"delta": {"content": text}} if chat else {"text": text}
    return {"index": 0, **content, "logprobs": logprobs, "finish_reason": reason}


def joined(asked, events, gone):
    """
    Return the events of a stream as one response. gone(): returns whether the client has closed the
    connection.
    """
    found = []
    with contextlib.closing(events):
        for event in events:
            if isinstance(event, dict):
                found.append(event)
            if gone():
                return Response("")
    if "error" in found[-1]:  # otherwise the last event has the usage
        return Response(found[-1], 500)
    choices = [event["choices"][0] for event in found if event["choices"]]
    logprobs = None
    if asked.top_logprobs is not None:
        parts = [c["logprobs"] for c in choices if c["logprobs"]]
        names = ["content"] if asked.chat else ["tokens", "token_logprobs", "top_logprobs",
                                                "text_offset"]
        logprobs = {name: list(itertools.chain.from_iterable(part[name] for part in parts))
                    for name in names}
    text = "".join(c["delta"]["content"] if asked.chat else c["text"] for c in choices)
    content = {"message": {"role": "assistant", "content": text}} if asked.chat else {"text": text}
    whole = {"index": 0, **content, "logprobs": logprobs,
             "finish_reason": choices[-1]["finish_reason"]}
    kind = "chat.completion" if asked.chat else "text_completion"
    return found[-1] | {"object": kind, "choices": [whole]}


# ---- model files

def has_template(path):
    """Return whether a model file has a chat template, which is stored before the tensors."""
    with contextlib.suppress(OSError, ValueError), open_untrusted(path) as f:
        with mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return data.find(b"tokenizer.chat_template", 0, MAX_HEADER) >= 0
    return False


def model_files(runs):
    """
    Return {name: path} of the runs' model files. The name of a run stands for its best model,
    NAME/last.gguf for its latest.
    """
    runs.refresh()
    found = {}
    for name, run in list(runs.runs.items()):
        paths = {name: run.folder / "model.gguf", f"{name}/last.gguf": run.folder / "last.gguf"}
        # isfile() is False also for a folder that can't be read.
        found |= {key: path for key, path in paths.items() if os.path.isfile(path)}
    return found
