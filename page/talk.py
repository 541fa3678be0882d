"""
Answers from models through OpenAI's API: /v1/models, /v1/completions, /v1/chat/completions.

The texts of all requests share one engine for each model; scheduler.py generates them.
"""
import contextlib
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

MAX_MODELS = 4         # open model files
MAX_TEXTS = 64         # texts of a request: its prompts, times n
MAX_TOKENS = (1 << 31) - 1  # the largest int of C
PAUSE = 0.02           # seconds from one write of a stream to the next
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
    """An open model file. chat_error: why it can't chat, or ""."""

    def __init__(self, path):
        self.stamp, self.chat_error = stamp(path), ""
        self.cache = self.json_grammar = None  # made by the first request that needs them
        self.lock = threading.Lock()
        _, size, _ = self.stamp
        fits = size <= MAX_IN_MEMORY
        self.model = llamac.Model(read_untrusted(path, MAX_IN_MEMORY) if fits else path)
        if not self.model.info.has_tokenizer:
            raise llamac.Error("the file has no tokenizer")
        try:
            self.model.use_template()
        except llamac.Error as e:
            # What follows the semicolon advises users of the program run.
            self.chat_error = str(e).partition(";")[0]

    def sequences(self):
        """Return the SequenceCache of the model's engine."""
        with self.lock:
            self.cache = self.cache or SequenceCache(llamac.Engine(self.model))
            return self.cache

    def grammar(self):
        """Return the grammar of JSON objects. Each text uses a copy of it."""
        with self.lock:
            self.json_grammar = self.json_grammar or llamac.Grammar(self.model)
            return self.json_grammar


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
    """Return whether a value is a text of at most 10,000 characters, or at most four texts."""
    if isinstance(value, str):
        return len(value) <= 10_000
    return len(value) <= 4 and all(isinstance(text, str) for text in value)


def is_bias(value):
    """Return whether a value is {token: bias} as OpenAI's API has it."""
    return len(value) <= 1024 and all(
        token.isascii() and token.isdigit() and len(token) < 10 and type(bias) in (int, float)
        and -100 <= bias <= 100 for token, bias in value.items())


PENALTY = Field((int, float), "a number from -2 to 2", lambda x: -2 <= x <= 2)
FLAG = Field((bool,), "true or false")
COUNT = integer(1, MAX_TOKENS)
FIELDS = {  # of completions and chats; None: checked where the field is used
    "model": None, "max_tokens": COUNT, "seed": Field((int,), "a whole number"), "stream": FLAG,
    "temperature": Field((int, float), "a number from 0 to 100", lambda x: 0 <= x <= 100),
    "top_p": Field((int, float), "a number above 0 and at most 1", lambda x: 0 < x <= 1),
    "stop": Field((str, list), "one to four texts", is_stop),
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
                 "messages": Field((list,), "a list of messages", len)}
IGNORED_FIELDS = {"user", "metadata"}
# Fields that are accepted with these values alone, which mean the same as no field.
FIXED = {"best_of": 1, "echo": False, "suffix": "", "tools": [], "functions": [],
         "store": False, "modalities": ["text"]}


@dataclass
class Generation:
    """A checked request."""
    name: str        # of the model
    chat: bool       # a chat completion rather than a completion
    prompts: list    # the tokens of each prompt
    n: int           # texts for each prompt
    max_tokens: int
    sampling: dict   # fields of llamac.Sampler
    biases: dict     # {token: what is added to its logit}
    grammar: llamac.Grammar | None  # of JSON objects, if the texts are such
    seed: int        # of the first text of each prompt; the next ones have the numbers after it
    stop: list       # of texts that end the generation
    top_logprobs: int | None  # number of likeliest tokens to report; None: no log probabilities
    stream: bool
    include_usage: bool  # end the stream with the numbers of tokens

    def usage(self, n_tokens):
        """Return the numbers of tokens. n_tokens: of all texts."""
        size = sum(map(len, self.prompts))
        return {"prompt_tokens": size, "completion_tokens": n_tokens,
                "total_tokens": size + n_tokens}

    def tasks(self, loaded, inbox):
        """
        Return a Task for each text: n of the first prompt, then those of the second, and so
        on. loaded: the LoadedModel.
        """
        found, cache = [], loaded.sequences()
        for tokens in self.prompts:
            for i in range(self.n):
                state = (self.seed + i) & (1 << 64) - 1  # for uint64_t
                sampler = llamac.Sampler(state=state, **self.sampling)
                sampler.set_biases(self.biases)
                options = {"sampler": sampler, "max_tokens": self.max_tokens, "stop": self.stop,
                           "top_logprobs": self.top_logprobs}
                found.append(Task(cache, tokens, options, inbox, len(found), self.grammar))
        return found


def checked(body, fields, name, default=None):
    """
    Return body[name], or `default` if it is null or missing. Raises ApiError if its Field refuses
    it.
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

    place: prefix of the message; param: the field to name as the error's param, None: the unknown
    field itself.
    """
    for name, value in given.items():
        if name not in known and value is not None:
            name = str(name)[:80]
            message = f"{place}{name!r} is not a field that is used here, expected one of "
            raise ApiError(message + ", ".join(sorted(known)), param or name, "unknown_parameter")


def valid_text(text):
    """Return a str with a "?" for each lone surrogate, which UTF-8 can't encode."""
    return text.encode("utf-8", "replace").decode()


def prompt_tokens(model, body, name="prompt"):
    """
    Return a list of the tokens of each prompt. The field `name` has a text, a list of tokens, a
    list of texts or a list of lists of tokens. Raises ApiError.
    """
    prompt, size = body.get(name), model.info.vocab_size

    def is_tokens(value):
        return isinstance(value, list) and len(value) > 0 and all(
            type(token) is int and 0 <= token < size for token in value)

    prompts = [prompt] if isinstance(prompt, str) or is_tokens(prompt) else prompt
    if isinstance(prompts, list) and prompts:
        if all(isinstance(text, str) for text in prompts):
            # Second argument: whether to put BOS before the tokens. An empty prompt is BOS alone;
            # None leaves the choice to the model.
            return [model.encode(valid_text(text), None if text else True).tolist()
                    for text in prompts]
        if all(map(is_tokens, prompts)):
            return prompts
    message = (f"{name}: expected a text, a list of tokens, each from 0 to {size - 1}, or a list "
               "of texts or of lists of tokens")
    raise ApiError(message, name)


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


def sampling(body, fields):
    """Return the fields of llamac.Sampler that a request sets. Raises ApiError."""
    names = {"temperature": "temperature", "topp": "top_p", "topk": "top_k", "minp": "min_p",
             "repeat_penalty": "repeat_penalty", "frequency_penalty": "frequency_penalty",
             "presence_penalty": "presence_penalty"}
    defaults = {"temperature": 1, "topp": 1}
    return {field: checked(body, fields, name, defaults.get(field, 0))
            for field, name in names.items()}


def biases(body, fields, model):
    """Return {token: bias} of a request. Raises ApiError."""
    found = {int(token): bias for token, bias in checked(body, fields, "logit_bias", {}).items()}
    for token in found:
        if token >= model.info.vocab_size:
            raise ApiError(f"logit_bias: token {token} is outside the vocabulary of "
                           f"{model.info.vocab_size} tokens", "logit_bias")
    return found


def parse(body, chat, loaded):
    """Return the Generation that a request asks for. Raises ApiError."""
    model, fields = loaded.model, CHAT if chat else COMPLETION
    for name, fixed in FIXED.items():
        if body.get(name) not in (None, fixed):
            raise ApiError(f"{name} is {str(body[name])[:80]!r}, expected {fixed!r}: nothing else "
                           "is supported here", name)
    refuse_unknown(body, fields.keys() | IGNORED_FIELDS | FIXED.keys())
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
    top_logprobs = checked(body, fields, "logprobs")
    if chat:
        max_tokens = checked(body, fields, "max_completion_tokens", max_tokens)
        top_logprobs = checked(body, fields, "top_logprobs", 0) if top_logprobs else None
    stop = checked(body, fields, "stop", [])
    is_json = checked(body, fields, "response_format", {}).get("type") == "json_object"
    options = checked(body, fields, "stream_options", {})
    refuse_unknown(options, {"include_usage"}, "stream_options: ", "stream_options")
    return Generation(
        name=str(body["model"]), chat=chat, prompts=prompts, n=n, max_tokens=max_tokens,
        sampling=sampling(body, fields), biases=biases(body, fields, model),
        grammar=loaded.grammar() if is_json else None,
        seed=checked(body, fields, "seed", secrets.randbits(63)),
        stop=[text for text in ([stop] if isinstance(stop, str) else stop) if text],
        top_logprobs=top_logprobs, stream=checked(body, fields, "stream", False),
        include_usage=checked(options, {"include_usage": FLAG}, "include_usage", False))


# ---- answers

class Talk:
    """The routes. models: a function that returns {name: path of a model file}."""

    def __init__(self, models):
        self.models = models
        self.loaded, self.lock = {}, threading.Lock()  # {name: LoadedModel}, the oldest first
        self.scheduler = Scheduler()

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
        Yield lists of (index of a text, (text, details, count, reason)). The inner tuple is what
        llamac.Continuation.advance() has returned for it; a list has those that arrived since the
        list before, and is empty if none arrived within PAUSE. Closing this iterator ends the
        texts. Raises llamac.Error or MemoryError.
        """
        inbox, tasks = Inbox(), []
        try:
            tasks = asked.tasks(loaded, inbox)
            self.scheduler.submit(tasks)
            left, pause = len(tasks), 0
            while left:
                found = inbox.take(pause)
                for _, event in found:
                    if isinstance(event, Exception):
                        raise event
                    left -= event[-1] is not None
                yield found
                pause = PAUSE if found else 0
        finally:
            self.scheduler.cancel(tasks)

    def stream(self, loaded, asked, gone):
        """
        Yield lists of the events of a response, in JSON; a list may be empty. Each lets the server
        notice a closed connection. gone(): returns whether the client has closed it; it is asked
        when a list is empty.
        """
        head = {"id": new_id(), "created": int(time.time()), "model": asked.name,
                "object": "chat.completion.chunk" if asked.chat else "text_completion"}
        begin = json.dumps(head)[:-1] + ', "choices": ['  # of each chunk
        total = 0
        try:
            if asked.chat:
                first = {"delta": {"role": "assistant", "content": ""}}
                yield [f"{begin}{json.dumps(choice(True, index, '', [], None) | first)}]}}"
                       for index in range(asked.n)]
            with contextlib.closing(self.generate(loaded, asked)) as batches:
                for found in batches:
                    if not found and gone():
                        return
                    choices = [choice(asked.chat, index, text, details, reason)
                               for index, (text, details, _, reason) in found
                               if text or details or reason]
                    yield [f"{begin}{json.dumps(one)}]}}" for one in choices]
                    total += sum(count for _, (*_, count, reason) in found if reason)
            if asked.include_usage:
                yield [json.dumps(head | {"choices": [], "usage": asked.usage(total)})]
            yield ["[DONE]"]
        except (llamac.Error, MemoryError) as e:  # broken weights, too little memory
            yield [json.dumps(server_error(e))]

    def whole(self, loaded, asked, gone):
        """Return one Response with all texts. The arguments are those of stream()."""
        parts = [[] for _ in range(asked.n * len(asked.prompts))]  # of each text
        try:
            with contextlib.closing(self.generate(loaded, asked)) as batches:
                for found in batches:
                    for index, event in found:
                        parts[index].append(event)
                    if gone():
                        return Response("")
        except (llamac.Error, MemoryError) as e:
            return Response(server_error(e), 500)
        total = sum(events[-1][2] for events in parts)
        return {"id": new_id(), "created": int(time.time()), "model": asked.name,
                "object": "chat.completion" if asked.chat else "text_completion",
                "choices": [whole_choice(asked, index, part) for index, part in enumerate(parts)],
                "usage": asked.usage(total)}


def new_id():
    return f"cmpl-{secrets.token_hex(12)}"


def server_error(e):
    """Return an exception in OpenAI's format."""
    return error(str(e) or "not enough memory", "server_error")


def log_probabilities(chat, details):
    """Return token_details of llamac in the format of completions or of chats."""
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
    Return the "choice" of a chunk. index: of the text; details, reason: as
    llamac.Continuation.advance() returns them.
    """
    content = {"delta": {"content": text}} if chat else {"text": text}
    logprobs = log_probabilities(chat, details) if details else None
    return {"index": index, **content, "logprobs": logprobs, "finish_reason": reason}


def whole_choice(asked, index, events):
    """Return the "choice" of a whole text. events: what advance() has returned for it."""
    text = "".join(text for text, *_ in events)
    details = [entry for _, found, *_ in events for entry in found]
    content = {"message": {"role": "assistant", "content": text}} if asked.chat else {"text": text}
    wanted = asked.top_logprobs is not None
    logprobs = log_probabilities(asked.chat, details) if wanted else None
    return {"index": index, **content, "logprobs": logprobs, "finish_reason": events[-1][3]}


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
        # Path.is_file() would raise an error in a folder that can't be read.
        found |= {key: path for key, path in paths.items() if os.path.isfile(path)}
    return found
