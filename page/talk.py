"""
Serve models through OpenAI's API: /v1/models, /v1/completions, /v1/chat/completions.

A request asks for one or more texts: what a model writes after a prompt, a "choice" in OpenAI's
API. Each open model has one engine, with which scheduler.py generates the texts of all requests.
"""
import contextlib
import itertools
import json
import mmap
import os
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import llamac
from engine.files import stamp
from engine.untrusted import open_untrusted, read_untrusted
from page.scheduler import Inbox, Scheduler, SequenceCache, Task
from page.server import Response

MAX_MODELS = 4         # max open model files
MAX_TEXTS = 64         # max texts in a request: number of prompts times n
MAX_TOKENS = (1 << 31) - 1  # max value of fields that become an int in C
PAUSE = 0.02           # min seconds between two writes of a stream
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


class LoadedModel:
    """An open model file. chat_error: why the model can't chat, or ""."""

    def __init__(self, path):
        self.stamp = stamp(path)  # a different stamp later means that the file has changed
        self.chat_error = ""
        self.cache = self.json_grammar = None  # made by the first request that needs it
        self.lock = threading.Lock()  # guards the cache and the grammar
        _, size, _ = self.stamp
        fits = size <= MAX_IN_MEMORY
        self.model = llamac.Model(read_untrusted(path, MAX_IN_MEMORY) if fits else path)
        if not self.model.info.has_tokenizer:
            raise llamac.Error("the file has no tokenizer")
        try:
            self.model.use_template()
        except llamac.Error as e:
            # Keep only the reason: the advice after the semicolon is for the command line.
            self.chat_error = str(e).partition(";")[0]

    def sequence_cache(self):
        """Return the SequenceCache of the model's engine. The first call starts the engine."""
        with self.lock:
            self.cache = self.cache or SequenceCache(llamac.Engine(self.model))
            return self.cache

    def grammar(self):
        """Return the grammar of JSON objects. Each text needs a copy of its own."""
        with self.lock:
            self.json_grammar = self.json_grammar or llamac.Grammar(self.model)
            return self.json_grammar


# ---- the fields of a request

class Field(NamedTuple):
    """The valid values of a request field."""
    types: tuple    # exact types: an int field refuses True
    expected: str   # the valid values in words, for error messages
    is_valid: Callable = lambda value: True  # called with a value of one of the types


def integer(low, high):
    """Return the Field for an integer from low to high, both included."""
    expected = f"a whole number from {low} to {high}"
    return Field((int,), expected, lambda n: low <= n <= high)


def is_stop(value):
    """Return whether a value is up to four texts of at most 10,000 characters each."""
    texts = [value] if isinstance(value, str) else value
    return len(texts) <= 4 and all(isinstance(text, str) and len(text) <= 10_000 for text in texts)


def is_bias(value):
    """Return whether a dict has up to 1024 items {token in digits: bias from -100 to 100}."""
    return len(value) <= 1024 and all(
        token.isascii() and token.isdigit() and len(token) < 10 and type(bias) in (int, float)
        and -100 <= bias <= 100 for token, bias in value.items())


PENALTY = Field((int, float), "a number from -2 to 2", lambda x: -2 <= x <= 2)
FLAG = Field((bool,), "true or false")
COUNT = integer(1, MAX_TOKENS)
# Fields of completions and of chats; None: the code that uses the field checks it.
FIELDS = {
    "model": None, "max_tokens": COUNT, "seed": Field((int,), "a whole number"), "stream": FLAG,
    "temperature": Field((int, float), "a number from 0 to 100", lambda x: 0 <= x <= 100),
    "top_p": Field((int, float), "a number above 0 and at most 1", lambda x: 0 < x <= 1),
    "stop": Field((str, list), "a text of at most 10,000 characters, or a list of up to 4 of them",
                  is_stop),
    "stream_options": Field((dict,), "an object"), "n": integer(1, MAX_TEXTS),
    "top_k": integer(0, MAX_TOKENS), "presence_penalty": PENALTY, "frequency_penalty": PENALTY,
    "min_p": Field((int, float), "a number from 0 to 1", lambda x: 0 <= x <= 1),
    "repeat_penalty": Field((int, float), "a number above 0 and at most 100",
                            lambda x: 0 < x <= 100),
    "logit_bias": Field((dict,), "an object of tokens and numbers from -100 to 100", is_bias),
    "response_format": Field((dict,), 'an object whose type is "text" or "json_object"',
                             lambda value: value.get("type") in ("text", "json_object")
                             and len(value) == 1),
}
COMPLETION = FIELDS | {"logprobs": integer(0, 20), "prompt": None}
CHAT = FIELDS | {"logprobs": FLAG, "top_logprobs": integer(0, 20), "max_completion_tokens": COUNT,
                 "messages": Field((list,), "a list of one or more messages", len)}
IGNORED_FIELDS = {"user", "metadata"}
# Fields of OpenAI's API for which only the value without any effect is supported.
FIXED_FIELDS = {"best_of": 1, "echo": False, "suffix": "", "tools": [], "functions": [],
                "store": False, "modalities": ["text"]}


@dataclass
class Generation:
    """What a request asks for, checked and with defaults filled in."""
    name: str        # name of the model
    chat: bool       # True: a chat completion; False: a completion
    prompts: list    # a list of tokens for each prompt
    n: int           # number of texts for each prompt
    max_tokens: int  # max tokens of each text
    sampling: dict   # {field of llamac.Sampler: value}
    biases: dict     # {token: number to add to its logit}
    grammar: llamac.Grammar | None  # grammar of JSON objects; None: any text
    seed: int        # seed of the first text of each prompt; text i of a prompt has seed + i
    stop: list       # stop texts: a text ends where it contains one of them
    top_logprobs: int | None  # number of likeliest tokens to report; None: no log probabilities
    stream: bool
    include_usage: bool  # end the stream with the numbers of tokens

    def usage(self, n_generated):
        """Return the "usage" of a response. n_generated: number of tokens of all texts."""
        n_prompt = sum(map(len, self.prompts))
        return {"prompt_tokens": n_prompt, "completion_tokens": n_generated,
                "total_tokens": n_prompt + n_generated}

    def tasks(self, loaded, inbox):
        """
        Return a Task for each text: the n texts of the first prompt, then those of the second,
        and so on. loaded: a LoadedModel; inbox: receives what the texts generate.
        """
        tasks, cache = [], loaded.sequence_cache()
        for tokens in self.prompts:
            for i in range(self.n):
                state = (self.seed + i) % (1 << 64)  # the state is a uint64_t
                sampler = llamac.Sampler(state=state, **self.sampling)
                sampler.set_biases(self.biases)
                options = {"sampler": sampler, "max_tokens": self.max_tokens, "stop": self.stop,
                           "top_logprobs": self.top_logprobs}
                index = len(tasks)
                tasks.append(Task(cache, tokens, options, inbox, index, self.grammar))
        return tasks


def checked(body, fields, name, default=None):
    """
    Return body[name], or `default` if it is null or missing. Raises ApiError for a value that the
    Field fields[name] does not allow.
    """
    value, field = body.get(name), fields[name]
    if value is None:
        return default
    if type(value) not in field.types or not field.is_valid(value):
        raise ApiError(f"{name} is {str(value)[:80]!r}, expected {field.expected}", name)
    return value


def refuse_unknown(given, known, prefix="", param=None):
    """
    Raise ApiError if `given` has a field that is not in `known`, because the client may rely on it.
    A field that is null counts as missing.

    prefix: of the message; param: "param" of the error; None: the name of the unknown field.
    """
    for name, value in given.items():
        if name not in known and value is not None:
            name = str(name)[:80]
            message = f"{prefix}{name!r} is not a supported field, expected one of "
            raise ApiError(message + ", ".join(sorted(known)), param or name, "unknown_parameter")


def valid_text(text):
    """Return a str with "?" in place of each lone surrogate, which UTF-8 can't encode."""
    return text.encode("utf-8", "replace").decode()


def prompt_tokens(model, body, name="prompt"):
    """
    Return a list of tokens for each prompt. body[name] is a text, a list of tokens, or a list of
    texts or of lists of tokens. Raises ApiError or llamac.Error.
    """
    prompt, size = body.get(name), model.info.vocab_size

    def is_tokens(value):
        return isinstance(value, list) and len(value) > 0 and all(
            type(token) is int and 0 <= token < size for token in value)

    prompts = [prompt] if isinstance(prompt, str) or is_tokens(prompt) else prompt
    if isinstance(prompts, list) and prompts:
        if all(isinstance(text, str) for text in prompts):
            # An empty prompt becomes BOS alone; others begin with BOS if the model expects it.
            return [model.encode(valid_text(text), bos=None if text else True).tolist()
                    for text in prompts]
        if all(map(is_tokens, prompts)):
            return prompts
    message = (f"{name}: expected a text, a list of tokens, each from 0 to {size - 1}, or a list "
               "of texts or of lists of tokens")
    raise ApiError(message, name)


def message_text(message):
    """Return the text of a message: its content, or the parts of it joined. Raises ApiError."""
    # Clients send back earlier answers that have unused, empty fields, such as "tool_calls": [].
    empty = {name for name, value in message.items() if value in ([], "")}
    refuse_unknown(message, {"role", "content"} | empty, "messages: ", "messages")
    parts = message.get("content")
    if isinstance(parts, str):
        parts = [{"type": "text", "text": parts}]
    if not isinstance(parts, list) or not all(
            isinstance(part, dict) and part.get("type") == "text" for part in parts):
        raise ApiError("messages: expected each content to be a text, or a list of parts of type "
                       "'text'", "messages")
    for part in parts:
        refuse_unknown(part, {"type", "text"}, "messages: ", "messages")
        if not isinstance(part.get("text"), str):
            raise ApiError("messages: expected the 'text' of each part to be a text", "messages")
    return valid_text("".join(part["text"] for part in parts))


def chat_tokens(model, body):
    """Return the tokens of a conversation up to its next answer. Raises ApiError, llamac.Error."""
    messages = checked(body, CHAT, "messages", [])
    if not messages or not all(isinstance(message, dict) for message in messages):
        raise ApiError("messages: expected a list of {role, content}", "messages")
    system = None
    if messages[0].get("role") in ("system", "developer"):
        system = message_text(messages[0])
        messages = messages[1:]
    roles = [message.get("role") for message in messages]
    if roles != ["user", "assistant"] * (len(roles) // 2) + ["user"]:
        raise ApiError("messages: expected a system message if any, then user and assistant in "
                       "turn, the user last", "messages")
    tokens = []
    for i, message in enumerate(messages):
        text, is_answer = message_text(message), i % 2 == 1
        found = model.encode_answer(text) if is_answer else model.encode_turn(text, i == 0, system)
        tokens += found.tolist()
    return tokens


def sampling(body, fields):
    """Return {field of llamac.Sampler: its value for a request}. Raises ApiError."""
    names = {"temperature": "temperature", "topp": "top_p", "topk": "top_k", "minp": "min_p",
             "repeat_penalty": "repeat_penalty", "frequency_penalty": "frequency_penalty",
             "presence_penalty": "presence_penalty"}
    defaults = {"temperature": 1, "topp": 1}  # the default of the others is 0, which disables them
    return {field: checked(body, fields, name, defaults.get(field, 0))
            for field, name in names.items()}


def biases(body, fields, model):
    """Return the logit_bias of a request as {token: bias}. Raises ApiError."""
    found = {int(token): bias for token, bias in checked(body, fields, "logit_bias", {}).items()}
    for token in found:
        if token >= model.info.vocab_size:
            raise ApiError(f"logit_bias: token {token} is outside the vocabulary of "
                           f"{model.info.vocab_size} tokens", "logit_bias")
    return found


def parse(body, chat, loaded):
    """Return the Generation that a request asks for. Raises ApiError or llamac.Error."""
    model, fields = loaded.model, CHAT if chat else COMPLETION
    for name, fixed in FIXED_FIELDS.items():
        if body.get(name) not in (None, fixed):
            raise ApiError(f"{name} is {str(body[name])[:80]!r}, expected {fixed!r}: nothing else "
                           "is supported here", name)
    refuse_unknown(body, fields.keys() | IGNORED_FIELDS | FIXED_FIELDS.keys())
    if chat and loaded.chat_error:
        raise ApiError(f"{loaded.chat_error}: this model can't chat; /v1/completions continues a "
                       "text", "model")
    n = checked(body, fields, "n", 1)
    prompts = [chat_tokens(model, body)] if chat else prompt_tokens(model, body)
    param = "messages" if chat else "prompt"
    if n * len(prompts) > MAX_TEXTS:
        raise ApiError(f"{len(prompts)} prompts with n = {n} are {n * len(prompts)} texts, "
                       f"expected at most {MAX_TEXTS}", "n")
    for tokens in prompts:
        if not tokens:
            message = "the prompt has no tokens, and this model has no BOS; expected a text"
            raise ApiError(message, param)
        if len(tokens) > model.info.seq_len:
            raise ApiError(f"the prompt has {len(tokens)} tokens, the model's context is "
                           f"{model.info.seq_len}", param, "context_length_exceeded")
    max_tokens = checked(body, fields, "max_tokens", model.info.seq_len if chat else 16)
    logprobs = checked(body, fields, "logprobs")  # a number for completions, a flag for chats
    if chat:
        max_tokens = checked(body, fields, "max_completion_tokens", max_tokens)
        top_logprobs = checked(body, fields, "top_logprobs", 0)
        logprobs = top_logprobs if logprobs else None
    stop = checked(body, fields, "stop", [])
    stops = [stop] if isinstance(stop, str) else stop
    is_json = checked(body, fields, "response_format", {}).get("type") == "json_object"
    options = checked(body, fields, "stream_options", {})
    refuse_unknown(options, {"include_usage"}, "stream_options: ", "stream_options")
    return Generation(
        name=str(body["model"]), chat=chat, prompts=prompts, n=n, max_tokens=max_tokens,
        sampling=sampling(body, fields), biases=biases(body, fields, model),
        grammar=loaded.grammar() if is_json else None,
        seed=checked(body, fields, "seed", secrets.randbits(63)),
        stop=[text for text in stops if text],
        top_logprobs=logprobs, stream=checked(body, fields, "stream", False),
        include_usage=checked(options, {"include_usage": FLAG}, "include_usage", False))


# ---- answers

class Talk:
    """The routes. models: a function that returns {name: path of a model file}."""

    def __init__(self, models):
        self.models = models
        self.loaded = {}  # {name: LoadedModel} in the order of opening
        self.lock = threading.Lock()  # guards self.loaded
        self.scheduler = Scheduler()

    def routes(self):
        return {"GET /v1/models": self.list_models,
                "POST /v1/completions": lambda request: self.answer(request, False),
                "POST /v1/chat/completions": lambda request: self.answer(request, True)}

    def list_models(self, request):
        """Return all models. "chat", not in OpenAI's API: whether the file has a chat template."""
        found = []
        for name, path in self.models().items():
            with contextlib.suppress(OSError):  # the file is gone
                created = int(path.stat().st_mtime)
                found.append({"id": name, "object": "model", "owned_by": "llamac",
                              "created": created, "chat": has_template(path)})
        return {"object": "list", "data": found}

    def load(self, name):
        """
        Return the LoadedModel with this name; open its file if it is not open or has changed. If
        MAX_MODELS are already open, drop the one that was opened first. Raises ApiError.
        """
        paths = self.models()
        if not isinstance(name, str) or name not in paths:
            raise ApiError(f"there is no model {str(name)[:200]!r}; GET /v1/models lists all",
                           "model", "model_not_found", 404)
        try:
            with self.lock:
                if name not in self.loaded or self.loaded[name].stamp != stamp(paths[name]):
                    kept = list(self.loaded.items())[1 - MAX_MODELS:]  # room for one more
                    self.loaded = dict(kept) | {name: LoadedModel(paths[name])}
                return self.loaded[name]
        except (OSError, llamac.Error) as e:
            raise ApiError(f"{name}: {e}", "model", "model_not_found", 404) from e

    def answer(self, request, chat):
        """
        Answer a request for completions or, if `chat`, for chat completions. Return an iterator of
        server-sent events if the client asks for a stream, otherwise a dict; or the Response of an
        error.
        """
        try:
            body = request.json()
            loaded = self.load(body.get("model"))
            asked = parse(body, chat, loaded)
        except ApiError as e:
            return e.response
        # ValueError: invalid JSON. llamac.Error: a prompt that can't be encoded, or a vocabulary
        # that lacks characters which response_format needs.
        except (ValueError, llamac.Error) as e:
            return ApiError(str(e)).response
        except RecursionError:
            return ApiError("the request is nested too deeply").response
        if asked.stream:
            return self.stream(loaded, asked, request.gone)
        return self.whole(loaded, asked, request.gone)

    def generate(self, loaded, asked):
        """
        Generate all texts. Yield lists of (index of a text, event), each with what is new since the
        previous one; a list is empty if nothing is new for scheduler.POLL seconds. An event is what
        llamac.Continuation.advance() returns: (text, details, count, reason). Closing this iterator
        cancels the texts. Raises llamac.Error or MemoryError.
        """
        inbox, tasks = Inbox(), []
        try:
            tasks = asked.tasks(loaded, inbox)
            self.scheduler.submit(tasks)
            left, pause = len(tasks), 0
            while left:
                arrived = inbox.take(pause)
                for _, event in arrived:
                    if isinstance(event, Exception):
                        raise event
                    *_, reason = event
                    left -= reason is not None  # it was the last event of its text
                yield arrived
                pause = PAUSE if arrived else 0
        finally:
            self.scheduler.cancel(tasks)

    def stream(self, loaded, asked, gone):
        """
        Yield lists of server-sent events, in JSON. The server writes each list, even an empty one,
        and so notices a closed connection. gone(): returns whether the client has closed it; called
        when nothing is new.
        """
        head = {"id": new_id(), "created": int(time.time()), "model": asked.name,
                "object": "chat.completion.chunk" if asked.chat else "text_completion"}
        # A chunk is `begin`, one choice and "]}", so that the head is encoded only once.
        begin = json.dumps(head)[:-1] + ', "choices": ['
        n_generated = 0
        try:
            if asked.chat:
                first = {"delta": {"role": "assistant", "content": ""}}
                yield [f"{begin}{json.dumps(choice(True, index, '', [], None) | first)}]}}"
                       for index in range(asked.n)]
            with contextlib.closing(self.generate(loaded, asked)) as batches:
                for arrived in batches:
                    if not arrived and gone():
                        return
                    choices = [choice(asked.chat, index, text, details, reason)
                               for index, (text, details, _, reason) in arrived
                               if text or details or reason]
                    yield [f"{begin}{json.dumps(one)}]}}" for one in choices]
                    # The last event of a text, which has a reason, counts all its tokens.
                    n_generated += sum(count for _, (*_, count, reason) in arrived if reason)
            if asked.include_usage:
                yield [json.dumps(head | {"choices": [], "usage": asked.usage(n_generated)})]
            yield ["[DONE]"]
        except (llamac.Error, MemoryError) as e:  # such as broken weights
            yield [json.dumps(server_error(e))]

    def whole(self, loaded, asked, gone):
        """
        Return a dict with all texts once they have ended, or the Response of an error. The
        arguments are those of stream().
        """
        texts = [[] for _ in range(asked.n * len(asked.prompts))]  # the events of each text
        try:
            with contextlib.closing(self.generate(loaded, asked)) as batches:
                for arrived in batches:
                    for index, event in arrived:
                        texts[index].append(event)
                    if gone():
                        return Response("")
        except (llamac.Error, MemoryError) as e:
            return Response(server_error(e), 500)
        n_generated = sum(events[-1][2] for events in texts)  # the count in the last event of each
        return {"id": new_id(), "created": int(time.time()), "model": asked.name,
                "object": "chat.completion" if asked.chat else "text_completion",
                "choices": [whole_choice(asked, i, events) for i, events in enumerate(texts)],
                "usage": asked.usage(n_generated)}


def new_id():
    return f"cmpl-{secrets.token_hex(12)}"


def server_error(e):
    """Return an exception in OpenAI's format. A MemoryError has no message of its own."""
    return error(str(e) or "not enough memory", "server_error")


def log_probabilities(chat, details):
    """Return the "logprobs" of a choice. details: a list of llamac.token_details."""
    if chat:
        fields = ("token", "logprob", "bytes", "top_logprobs")
        return {"content": [{field: entry[field] for field in fields} for entry in details]}
    return {"tokens": [entry["token"] for entry in details],
            "token_logprobs": [entry["logprob"] for entry in details],
            "top_logprobs": [{top["token"]: top["logprob"] for top in entry["top_logprobs"]}
                             for entry in details],
            "text_offset": [entry["offset"] for entry in details]}


def choice(chat, index, text, details, reason):
    """
    Return a chunk's "choice": a piece of the text with this index. text, details, reason: as
    llamac.Continuation.advance() returns them.
    """
    content = {"delta": {"content": text}} if chat else {"text": text}
    logprobs = log_probabilities(chat, details) if details else None
    return {"index": index, **content, "logprobs": logprobs, "finish_reason": reason}


def whole_choice(asked, index, events):
    """Return the "choice" of a whole text. events: all results of advance() for it."""
    pieces, lists, _, reasons = zip(*events)
    text, details = "".join(pieces), list(itertools.chain(*lists))
    content = {"message": {"role": "assistant", "content": text}} if asked.chat else {"text": text}
    wanted = asked.top_logprobs is not None
    logprobs = log_probabilities(asked.chat, details) if wanted else None
    return {"index": index, **content, "logprobs": logprobs, "finish_reason": reasons[-1]}


# ---- model files

def has_template(path):
    """Return whether a model file has a chat template, which is stored before the tensors."""
    with contextlib.suppress(OSError, ValueError), open_untrusted(path) as f:
        with mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return data.find(b"tokenizer.chat_template", 0, MAX_HEADER) >= 0
    return False


def model_files(runs):
    """
    Return {name: path} of the runs' model files. The name of a run refers to its best model,
    NAME/last.gguf to its latest model.
    """
    runs.refresh()
    found = {}
    for name, run in list(runs.runs.items()):
        paths = {name: run.folder / "model.gguf", f"{name}/last.gguf": run.folder / "last.gguf"}
        # Unlike this, Path.is_file() raises an error in a folder that can't be read.
        found |= {key: path for key, path in paths.items() if os.path.isfile(path)}
    return found
