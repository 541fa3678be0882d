"""
The C library in Python: runtime/llamac.h through ctypes. `pip install .` compiles it into the
package; in a checkout, `make lib` builds it.

    model = llamac.Model("out/demo/model.gguf")
    for text in model.generate("Once upon a time", max_tokens=100, temperature=0.8, seed=1):
        print(text, end="", flush=True)
    texts = model.generate_batch(["One day", "Lily had"], temperature=0)
    answer = "".join(model.chat([{"role": "user", "content": "Who are you?"}]))
    tokens, logits, embedding = model.encode("One"), model.logits("One"), model.embed("One")

With explicit sequences and samplers:

    engine = llamac.Engine(model)
    sequence = llamac.Sequence(engine)
    sampler = llamac.Sampler(temperature=0.8, topp=0.9, state=1)
    prompt = model.encode("Once upon a time")
    for text, *_ in llamac.generate(sequence, prompt, sampler, max_tokens=100, stop=["The end"]):
        print(text, end="", flush=True)

    sequence.forward(tokens, 0)  # step by step
    token = sequence.sample(sampler)
    model.decode([token], previous=tokens[-1])

    a, b = llamac.Sequence(engine), llamac.Sequence(engine)  # several texts in one call
    engine.evaluate([llamac.Part(a, tokens), llamac.Part(b, tokens)])

    for row in llamac.runs("out").rows("loss/val"):  # training logs, as dicts
        print(row["run"], row["tokens"], row["loss/val"])

The library's errors are raised as Error. Model's encode methods return arrays in the library's
memory, which is freed with the last reference to the array; all other arrays are copies. Threads
may share a model and an engine; the calls of an engine run one at a time.
"""
from __future__ import annotations

import contextlib
import copy
import ctypes
import functools
import operator
import random
import re
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from ctypes import (CFUNCTYPE, POINTER, byref, c_bool, c_char_p, c_float, c_int, c_size_t, c_uint64,
                    c_void_p)
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from llamac.logs import Runs, runs
from llamac.text import CHUNK, Continuation, common_prefix, generate

__all__ = ["Continuation", "Engine", "Error", "Grammar", "Info", "Model", "OutOfMemory", "Part",
           "Runs", "Sampler", "Sequence", "common_prefix", "generate", "runs"]

Tokens = NDArray[np.int32]      # (n,)
Floats = NDArray[np.float32]
Stop = str | Iterable[str]      # stop texts, before which a text ends
Pooling = Literal["mean", "last"]

# Paths where library() looks for the library: in the installed package, then in the checkout.
NAME = "llamac.dll" if sys.platform == "win32" else "libllamac.so"
PATHS = [folder / NAME for folder in Path(__file__).resolve().parents[:2]]


class Error(RuntimeError):
    """An error of the library, or a wrong argument. The message is one line."""


class OutOfMemory(Error):
    """The library could not allocate memory. The call can be repeated after some is freed."""


PROGRESS = CFUNCTYPE(c_bool, c_void_p, c_float)  # types of the callbacks in llamac_options
ABORT = CFUNCTYPE(c_bool, c_void_p)


class Options(ctypes.Structure):
    """llamac_options in runtime/llamac.h, which describes the fields."""
    _fields_ = [("positions", c_int), ("n_threads", c_int), ("device", c_char_p),
                ("no_copy", c_bool), ("sample_only", c_bool), ("kv_bits", c_int),
                ("progress", PROGRESS), ("abort", ABORT), ("data", c_void_p), ("isa", c_char_p)]


class Sampler(ctypes.Structure):
    """
    How tokens are drawn: llamac_sampler in runtime/llamac.h, which describes the fields. A filter
    or penalty of 0 is off. With temperature 0, the most likely token is drawn. state: set it to the
    seed of the random generator; each draw changes it.
    """
    temperature: float
    topp: float
    state: int
    topk: int
    minp: float
    repeat_penalty: float
    frequency_penalty: float
    presence_penalty: float
    penalty_tokens: int
    _fields_ = [("temperature", c_float), ("topp", c_float), ("state", c_uint64), ("topk", c_int),
                ("minp", c_float), ("repeat_penalty", c_float), ("frequency_penalty", c_float),
                ("presence_penalty", c_float), ("penalty_tokens", c_int),
                ("bias_tokens", POINTER(c_int)), ("biases", POINTER(c_float)), ("n_biases", c_int),
                ("allowed", c_void_p)]

    def set_biases(self, biases: Mapping[int, float]) -> None:
        """Set the biases that are added to the logits: {token: bias}. -inf excludes a token."""
        tokens = [c_integer("a token", token) for token in biases]
        self.bias_tokens = (c_int * len(tokens))(*tokens)
        self.biases = (c_float * len(tokens))(*biases.values())
        self.n_biases = len(tokens)


class Info(ctypes.Structure):
    """llamac_info: the header of a model file. bos, eos, eot: token ids, -1 if there is none."""
    dim: int
    hidden_dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    vocab_size: int
    seq_len: int
    has_tokenizer: bool
    add_bos: bool
    bos: int
    eos: int
    eot: int
    _fields_ = [(name, c_int) for name in ("dim", "hidden_dim", "n_layers", "n_heads", "n_kv_heads",
                                           "vocab_size", "seq_len")]
    _fields_ += [("has_tokenizer", c_bool), ("add_bos", c_bool)]
    _fields_ += [(name, c_int) for name in ("bos", "eos", "eot")]


# llamac_batch_token as a numpy type. uintp: the pointer to the sequence; align: pad as C does.
BATCH_TOKEN = np.dtype([("sequence", np.uintp), ("token", np.int32), ("position", np.int32),
                        ("logits", np.bool_)], align=True)

TEXTS = (str, list, tuple, np.ndarray)  # types of a text or of its tokens, for Engine.embed
POOLINGS = ("mean", "last")  # the index of each is its number in C: LLAMAC_MEAN, LLAMAC_LAST

STREAM = 2  # a flag of llamac_open: LLAMAC_STREAM

MODEL = ENGINE = SEQUENCE = GRAMMAR = TOKENS = c_void_p
COUNT, ERROR = POINTER(c_int), c_char_p
TEXT = c_char_p, c_size_t  # two arguments: bytes and their number
# {name without llamac_: (type of the result, types of the arguments ...)}. A function whose last
# argument is ERROR can fail: use call(), which passes that argument. A function named _sized also
# takes the sizeof of a struct, because later versions of the library may add fields to the struct.
FUNCTIONS = {
    "open": (MODEL, c_char_p, c_int, ERROR),
    "open_memory": (MODEL, *TEXT, c_int, ERROR),
    "close": (None, MODEL),
    "describe_sized": (None, MODEL, POINTER(Info), c_size_t),
    "encode": (TOKENS, MODEL, *TEXT, c_bool, COUNT, ERROR),
    "decode": (c_size_t, MODEL, c_int, c_int, *TEXT),
    "ends": (c_bool, MODEL, c_int),
    "use_template": (c_bool, MODEL, c_char_p, ERROR),
    "encode_turn": (TOKENS, MODEL, c_bool, c_char_p, *TEXT, COUNT, ERROR),
    "encode_answer": (TOKENS, MODEL, *TEXT, COUNT, ERROR),
    "free": (None, TOKENS),
    "start_sized": (ENGINE, MODEL, POINTER(Options), c_size_t, ERROR),
    "stop": (None, ENGINE),
    "positions": (c_int, ENGINE),
    "threads": (c_int, ENGINE),
    "note": (c_char_p, ENGINE),
    "sequence_new": (SEQUENCE, ENGINE, ERROR),
    "sequence_free": (None, SEQUENCE),
    "sequence_copy": (SEQUENCE, SEQUENCE, c_int, ERROR),
    "sequence_truncate": (c_bool, SEQUENCE, c_int, ERROR),
    "sequence_save": (c_bool, SEQUENCE, c_char_p, ERROR),
    "sequence_load": (SEQUENCE, ENGINE, c_char_p, ERROR),
    "sequence_length": (c_int, SEQUENCE),
    "sequence_tokens": (c_void_p, SEQUENCE),
    "forward": (c_bool, SEQUENCE, TOKENS, c_int, c_int, ERROR),
    "evaluate_sized": (c_bool, ENGINE, c_void_p, c_int, c_size_t, ERROR),
    "logits": (c_void_p, SEQUENCE),
    "batch_logits": (c_void_p, ENGINE, c_int),
    "embed": (c_bool, ENGINE, TOKENS, c_int, c_int, c_void_p, ERROR),
    "sample_sized": (c_int, SEQUENCE, POINTER(Sampler), c_size_t, ERROR),
    "sample_at_sized": (c_int, ENGINE, c_int, POINTER(Sampler), c_size_t, ERROR),
    "sample_batch_sized": (c_bool, c_void_p, c_void_p, c_int, c_void_p, c_size_t, ERROR),
    "grammar_json": (GRAMMAR, MODEL, c_bool, ERROR),
    "grammar_copy": (GRAMMAR, GRAMMAR, ERROR),
    "grammar_free": (None, GRAMMAR),
    "grammar_reset": (None, GRAMMAR),
    "grammar_accept": (c_bool, GRAMMAR, c_int),
    "grammar_allowed": (c_void_p, GRAMMAR, c_int),
    "grammar_complete": (c_bool, GRAMMAR),
}
# Functions that take about a microsecond. library() loads them with PyDLL, which holds the GIL
# during the call: to release and reacquire it, as CDLL does, would take longer than the function.
QUICK = {"decode", "ends", "sequence_length", "sequence_tokens", "grammar_reset", "grammar_accept",
         "grammar_complete"}


@functools.cache
def library():
    """Load the library and return it. Raises Error if it is missing or lacks a function."""
    path = next((path for path in PATHS if path.exists()), PATHS[-1])
    try:
        loaded, quick = ctypes.CDLL(str(path)), ctypes.PyDLL(str(path))
        for name, (result, *arguments) in FUNCTIONS.items():
            function = getattr(quick if name in QUICK else loaded, f"llamac_{name}")
            function.restype, function.argtypes = result, arguments
            setattr(loaded, f"llamac_{name}", function)
    except (OSError, AttributeError) as e:
        raise Error(f"{path} cannot be loaded ({e}); reinstall the package, or in a checkout "
                    "run: make lib") from e
    return loaded


def call(name, *arguments):
    """
    Call a function of the library that can fail, and return its result. Raises Error with the
    library's message if the result is None (a NULL pointer), False, or a negative int.
    """
    message = ctypes.create_string_buffer(512)
    result = getattr(library(), f"llamac_{name}")(*arguments, message)
    if result is None or result is False or (FUNCTIONS[name][0] is c_int and result < 0):
        text = message.value.decode()
        raise (OutOfMemory if text.startswith("not enough memory") else Error)(text)
    return result


def c_integer(name, number):
    """
    Return a whole number of any type as an int. Raises Error if it is not a whole number, or does
    not fit into 32 bits, to which ctypes would truncate it. name: the number's name in the message.
    """
    try:
        number = operator.index(number)
    except TypeError:
        raise Error(f"{name} is {number!r}, expected a whole number") from None
    if not -1 << 31 <= number < 1 << 31:
        raise Error(f"{name} is {number}, expected a 32-bit number")
    return number


def token_array(tokens):
    """Return tokens as a contiguous array (n,) int32. Raises Error as c_integer does."""
    tokens = np.asarray(tokens)
    if tokens.dtype != np.int32 and tokens.size:  # an empty list becomes a float64 array
        if tokens.dtype.kind not in "iu":
            raise Error(f"the tokens have type {tokens.dtype}, expected whole numbers")
        for token in tokens.min(), tokens.max():
            c_integer("a token", token)
    return np.ascontiguousarray(tokens, np.int32)


def owned(owner, free, pointer, *needs):
    """
    Return the pointer, and have it freed when `owner` is garbage-collected. free: name of the
    library's function that frees it; needs: objects to keep alive until then, because the pointer
    refers to their memory.

    When Python exits, the pointer is not freed, because other threads may still compute with it.
    """
    finalizer = weakref.finalize(owner, lambda *needs: getattr(library(), free)(pointer), *needs)
    finalizer.atexit = False
    # At exit, Python drops the finalizer, and with it a reference to `needs`. A thread that still
    # computes then holds `owner`, which holds `needs` by this attribute.
    owner.needs = needs
    return pointer


def encoded(name, *arguments):
    """Call a function of the library that returns tokens. Return them, (n,) int32."""
    count = c_int()
    pointer = call(name, *arguments, byref(count))
    memory = (c_int * count.value).from_address(pointer)
    owned(memory, "llamac_free", pointer)  # the array below keeps `memory` alive
    return np.ctypeslib.as_array(memory)


def utf8(text):
    """Return a str as the two arguments TEXT: its UTF-8 bytes and their number."""
    data = text.encode()
    return data, len(data)


class ModelMemory:
    """A model of the library, closed with the last reference to this. source: path or bytes."""

    def __init__(self, pointer, source):
        self.pointer = owned(self, "llamac_close", pointer, source)


class Model:
    """
    A model and its tokenizer. source: the path of a model file, which stays mapped into memory, or
    the bytes of one. stream: keep no matrices in memory; engines read them from the file for every
    pass. This is for machines that have less memory than the model, and source must be a path.

    info: an Info, with vocab_size, seq_len, bos and more.
    """

    info: Info

    def __init__(self, source: str | Path | bytes, stream: bool = False) -> None:
        flags = STREAM if stream else 0
        try:
            if isinstance(source, bytes):
                pointer = call("open_memory", source, len(source), flags)
            else:
                pointer = call("open", bytes(Path(source)), flags)
        except Error as e:
            if isinstance(source, bytes):
                raise
            # The library's message begins with the path in ASCII, truncated. Use the whole path.
            cut = re.sub("[^ -~]", "?", bytes(Path(source)).decode("latin-1"))[:200]
            message = str(e).removeprefix(f"{cut}: ")
            raise Error(f"{source}: {message}") from None  # also in place of an OutOfMemory
        self.memory, self.pointer = ModelMemory(pointer, source), pointer
        self.info, self.decoded = Info(), {}  # decoded: {token: bytes}, the cache of decode_next
        self.has_template = False  # whether a chat template was chosen
        library().llamac_describe_sized(self.pointer, byref(self.info), ctypes.sizeof(Info))

    def encode(self, text: str, bos: bool | None = None) -> Tokens:
        """Return the tokens of a str. bos: begin with BOS; None: only if the model expects it."""
        bos = self.info.add_bos if bos is None else bos
        return encoded("encode", self.pointer, *utf8(text), bos)

    def decode(self, tokens: ArrayLike, previous: int | None = None) -> bytes:
        """
        Return the text of tokens as bytes, which may begin or end within a UTF-8 character.
        previous: the token before them; None: BOS.
        """
        decode = library().llamac_decode
        previous = self.info.bos if previous is None else c_integer("previous", previous)
        parts = []
        for token in token_array(tokens).tolist():
            size = decode(self.pointer, previous, token, None, 0)
            buffer = ctypes.create_string_buffer(size)
            decode(self.pointer, previous, token, buffer, size)
            parts.append(buffer.raw)
            previous = token
        return b"".join(parts)

    def decode_next(self, token: int, previous: int) -> bytes:
        """
        Return decode([token], previous), from a cache if possible. previous: a token, not None.
        The bytes are the same after every token but BOS, after which some tokenizers drop a space.
        """
        if previous == self.info.bos:
            return self.decode([token], previous)
        data = self.decoded.get(token)
        if data is None:
            data = self.decoded[token] = self.decode([token], previous)
        return data

    def use_template(self, name: str | None = None) -> None:
        """
        Choose the chat template by its name: chatml, llama3, llama3.1, zephyr, llama2, mistral-v0,
        mistral-v1, mistral-v3, mistral-v3-tekken, phi3 or phi4-mini; None: the one in the file.
        Call this before the model is used for anything else.
        """
        call("use_template", self.pointer, name and name.encode())
        self.has_template = True

    def encode_turn(self, text: str, first: bool = True, system: str | None = None) -> Tokens:
        """
        Return the tokens of a user's turn, up to the place where the answer begins.

        first: whether this is the first turn, the only one with a system prompt. system: the system
        prompt; "": none; None: that of the file's template, if it has one.
        """
        system = None if system is None else system.encode()
        if system and b"\0" in system:
            raise Error("the system prompt holds a zero byte, which would end it in C")
        return encoded("encode_turn", self.pointer, first, system, *utf8(text))

    def encode_answer(self, text: str) -> Tokens:
        """Return the tokens of an earlier answer. The next encode_turn adds its end marker."""
        return encoded("encode_answer", self.pointer, *utf8(text))

    def encode_chat(self, messages: Iterable[Mapping[str, str]]) -> Tokens:
        """
        Return the tokens of a conversation up to its next answer. messages: [{"role", "content"}]
        as in OpenAI's API: an optional "system" message, then "user" and "assistant" in turn, the
        user last. Chooses the template in the model file if use_template() was not called.
        """
        turns = [(message["role"], message["content"]) for message in messages]
        roles, system = [role for role, _ in turns], None
        if roles[:1] == ["system"]:
            (_, system), *turns = turns
        if roles[-len(turns):] != ["user", "assistant"] * (len(turns) // 2) + ["user"]:
            raise Error(f"the roles of the messages are {roles}, expected an optional system "
                        "message, then user and assistant in turn, ending with user")
        if not self.has_template:
            self.use_template()
        parts = []
        for i, (role, text) in enumerate(turns):
            is_answer = role == "assistant"
            parts.append(self.encode_answer(text) if is_answer else
                         self.encode_turn(text, i == 0, system))
        return np.concatenate(parts)

    def ends(self, token: int) -> bool:
        """Return whether a token ends a text, or an answer in the chat template in use."""
        return library().llamac_ends(self.pointer, c_integer("a token", token))

    # ---- with an engine of its own

    @functools.cached_property
    def engine(self) -> Engine:
        """
        The Engine of the methods below, started by the first of them. For other options, set it
        first: model.engine = llamac.Engine(model, threads=2).
        """
        # The engine gets a copy of this object: a reference cycle would keep their memory in use.
        return Engine(copy.copy(self))

    def generate(self, prompt: str, max_tokens: int | None = 256, stop: Stop = (),
                 seed: int | None = None, **sampling: Any) -> Iterator[str]:
        """
        Return an iterator over the text that follows a prompt, in parts as soon as they are
        certain. The text ends when the model ends it, before a text of `stop`, or after max_tokens.

        max_tokens: None: no limit; the context slides. seed: the same seed returns the same text;
        None: a random one. sampling: other fields of Sampler; temperature is 1 and topp 0.9 by
        default, as in the program run.
        """
        return self.start_text(self.encode_prompt(prompt), max_tokens, stop, seed, sampling).run()

    def generate_batch(self, prompts: Iterable[str], max_tokens: int | None = 256, stop: Stop = (),
                       seed: int | None = None, **sampling: Any) -> list[str]:
        """
        Return the texts that follow several prompts, which the engine computes together. Arguments
        as in generate(); text i has the seed seed + i.
        """
        seed = random.getrandbits(63) if seed is None else seed
        texts = [self.start_text(self.encode_prompt(prompt), max_tokens, stop, seed + i, sampling)
                 for i, prompt in enumerate(prompts)]
        found = [[] for _ in texts]
        while running := [i for i, text in enumerate(texts) if not text.reason]:
            self.engine.evaluate([texts[i].part(CHUNK) for i in running])
            for i in running:
                if texts[i].ready:
                    found[i].append(texts[i].advance()[0])
        return list(map("".join, found))

    def chat(self, messages: Iterable[Mapping[str, str]], max_tokens: int | None = 256,
             stop: Stop = (), seed: int | None = None, **sampling: Any) -> Iterator[str]:
        """
        Return an iterator over the answer to a conversation, in parts as soon as they are certain.
        messages: as in encode_chat(); other arguments: as in generate().
        """
        return self.start_text(self.encode_chat(messages), max_tokens, stop, seed, sampling).run()

    def logits(self, text: str | ArrayLike) -> Floats:
        """Return the logits after each token of a text (str or tokens): (n, vocab_size) float32."""
        tokens = self.encode_prompt(text) if isinstance(text, str) else token_array(text)
        self.engine.evaluate([Part(Sequence(self.engine), tokens, logits="all")])
        return np.stack([self.engine.logits(i) for i in range(len(tokens))])

    def embed(self, text: Any, pooling: Pooling = "mean") -> Any:
        """Return the embedding of a text, or a list of embeddings for a list; see Engine.embed."""
        return self.engine.embed(text, pooling)

    def encode_prompt(self, text):
        """Return the tokens of a text to continue. If it is empty, they are BOS."""
        return self.encode(text, bos=None if text else True)

    def start_text(self, tokens, max_tokens, stop, seed, sampling):
        """Return the Continuation of tokens, in a new sequence; arguments as in generate()."""
        seed = random.getrandbits(63) if seed is None else operator.index(seed)
        known = [name for name, _ in Sampler._fields_]
        if unknown := [name for name in sampling if name not in known]:  # ctypes accepts any name
            raise Error(f"{unknown[0]}: a sampler has no such field, expected one of: "
                        + ", ".join(known))
        sampler = Sampler(**{"temperature": 1, "topp": 0.9, "state": seed} | sampling)
        stop = [stop] if isinstance(stop, str) else stop
        return Continuation(Sequence(self.engine), tokens, sampler, max_tokens, stop)


class Callbacks:
    """
    The functions `progress` and `abort` of an engine. Each may be None.

    An exception cannot pass through C. So on_progress and on_abort catch it and stop the library,
    and deferring_exceptions() raises it after the library has returned. Ctrl-C is deferred too:
    Python could raise KeyboardInterrupt in a callback before its `try`, where it would be lost.
    """

    def __init__(self, progress, abort):
        self.progress, self.abort = progress, abort
        self.error = None  # the exception of a callback
        self.interrupts = []  # one per Ctrl-C: the arguments for its handler
        self.options = {}  # the fields of Options that are set to the callbacks
        if progress or abort:
            self.options = {"progress": PROGRESS(self.on_progress), "abort": ABORT(self.on_abort)}

    def on_progress(self, data, fraction):
        """Return False to stop the library, else True."""
        try:
            if self.interrupts:
                return False
            return not self.progress or self.progress(fraction) is not False
        except BaseException as e:
            self.error = e
            return False

    def on_abort(self, data):
        """Return True to stop the library, else False."""
        try:
            return bool(self.interrupts or self.abort and self.abort())
        except BaseException as e:
            self.error = e
            return True

    @contextlib.contextmanager
    def deferring_exceptions(self):
        """
        Hold back Ctrl-C and the exceptions of callbacks during a block that calls the library. Then
        call the handler of Ctrl-C, and raise the exception of a callback or else of the block.
        """
        if not self.options:
            yield
            return
        handler, failure = signal.getsignal(signal.SIGINT), None
        # Only the main thread may replace a handler. SIG_DFL and SIG_IGN are not callable.
        replace = threading.current_thread() is threading.main_thread() and callable(handler)
        if replace:
            signal.signal(signal.SIGINT, lambda *details: self.interrupts.append(details))
        try:
            yield
        except BaseException as e:
            failure = e
        finally:
            if replace:
                signal.signal(signal.SIGINT, handler)
        interrupts, error = self.interrupts, self.error
        self.interrupts, self.error = [], None
        try:
            if interrupts:
                handler(*interrupts[0])
            if error or failure:
                raise error or failure
        finally:
            error = failure = None  # break the cycle: an exception refers to this frame


class Engine:
    """
    CPU threads or a GPU, with the model's weights in the layout that they need. The sequences of an
    engine share both.

    positions: max tokens of a sequence; 0: the model's context length.
    threads: number of CPU threads; 0: chosen by the library.
    no_copy: compute from the file's own pages, which processes share; this is slower.
    sample_only: the program samples with temperature and topp alone and reads no logits, so that a
    GPU keeps them in its memory.
    device: "cpu", "cuda" or "auto"; None: the default of the build.
    kv_bits: bits of a number in the KV cache, 32, 16 or 8; 0: 16 for quantised weights, else 32.
    isa: name of the CPU instruction set to use, for tests; None: the best one available.
    progress: a function that is called with the fraction done, from 0 to 1, while the engine
    starts. If it returns False, the start fails.
    abort: a function that is called from time to time while tokens are evaluated. If it returns a
    true value, the evaluation fails. The engine can be used after that.
    note (an attribute): a message for the user, such as why the engine fell back to the CPU.

    `progress` and `abort` must not use the engine. If one of them raises an exception, the call of
    the engine stops and raises it. If either of them is given, Ctrl-C stops a call too.
    """

    model: Model
    positions: int
    threads: int
    note: str

    def __init__(self, model: Model, positions: int = 0, threads: int = 0, no_copy: bool = False,
                 sample_only: bool = False, device: str | None = None, kv_bits: int = 0,
                 isa: str | None = None, progress: Callable[[float], Any] | None = None,
                 abort: Callable[[], Any] | None = None) -> None:
        self.callbacks = Callbacks(progress, abort)
        options = Options(positions=c_integer("positions", positions),
                          n_threads=c_integer("threads", threads),
                          device=device and device.encode(), no_copy=no_copy,
                          sample_only=sample_only, kv_bits=c_integer("kv_bits", kv_bits),
                          isa=isa and isa.encode(), **self.callbacks.options)
        self.model, self.lock = model, threading.Lock()
        self.lock_owner = None  # identifier of the thread that holds the lock
        self.dropped = []  # pointers of sequences that were garbage-collected, still to be freed
        with self.callbacks.deferring_exceptions():
            pointer = call("start_sized", model.pointer, byref(options), ctypes.sizeof(Options))
            finalizer = weakref.finalize(self, stop_engine, pointer, self.dropped, model)
            finalizer.atexit = False  # as in owned()
        self.pointer = pointer
        self.positions = library().llamac_positions(pointer)
        self.threads = library().llamac_threads(pointer)
        self.note = library().llamac_note(pointer).decode()

    @contextlib.contextmanager
    def using(self):
        """
        Hold the engine's lock, and defer exceptions, during a block that calls the library. First
        free the sequences that were garbage-collected. Raises Error within a callback of the
        engine: its thread already holds the lock and would wait forever.
        """
        if self.lock_owner == threading.get_ident():
            raise Error("a callback of the engine must not use the engine")
        with self.lock, self.callbacks.deferring_exceptions():
            self.lock_owner = threading.get_ident()
            try:
                free_sequences(self.dropped)
                yield
            finally:
                self.lock_owner = None

    def evaluate(self, parts: Iterable[Part]) -> None:
        """
        Evaluate Parts of any of the engine's sequences in one call. If it fails, it adds no token,
        but may already have dropped the tokens that the Parts were to replace.
        """
        rows = []  # tuples: converting their list to an array is faster than filling its slices
        for sequence, tokens, position, logits in parts:
            if sequence.engine is not self:
                raise Error("the sequence belongs to another engine")
            if logits not in ("last", "all", "none"):
                raise Error(f"logits is {logits!r}, expected 'last', 'all' or 'none'")
            tokens = token_array(tokens).tolist()
            begin = c_integer("the position", len(sequence) if position is None else position)
            c_integer("the position after the tokens", begin + len(tokens))
            pointer = sequence.pointer or 0  # 0 if it was freed: the library then fails
            rows += [(pointer, token, pos, logits == "all")
                     for pos, token in enumerate(tokens, begin)]
            if tokens and logits == "last":
                rows[-1] = (*rows[-1][:3], True)
        batch = np.array(rows, BATCH_TOKEN)
        with self.using():
            call("evaluate_sized", self.pointer, batch.ctypes.data, len(batch),
                 BATCH_TOKEN.itemsize)

    def sample_batch(self, sequences: SequenceOf[Sequence],
                     samplers: SequenceOf[Sampler]) -> list[int | Error]:
        """
        Sample the next token of each sequence, in one call of the library: that of sequences[i]
        with samplers[i], as in Sequence.sample. Return a list of the tokens, with the Error in
        place of each token whose sampling failed.
        """
        if any(sequence.engine is not self for sequence in sequences):
            raise Error("the sequence belongs to another engine")
        n = len(sequences)
        pointers = (c_void_p * n)(*(sequence.pointer for sequence in sequences))
        addresses = (c_void_p * n)(*map(ctypes.addressof, samplers))
        tokens = (c_int * n)()
        with self.using():
            # call() would raise the error of one sequence and lose the tokens of the others.
            library().llamac_sample_batch_sized(pointers, addresses, n, tokens,
                                                ctypes.sizeof(Sampler), None)
            found = list(tokens)
            for i, sampler in enumerate(samplers):
                if found[i] < 0:
                    try:  # it fails again, and raises its own message
                        found[i] = call("sample_sized", sequences[i].pointer, byref(sampler),
                                        ctypes.sizeof(sampler))
                    except Error as e:
                        found[i] = e
            return found

    def load(self, path: str | Path) -> Sequence:
        """
        Return the sequence that Sequence.save wrote to a file. Its keys and values are read from
        there, not computed again. It has no logits until a token is evaluated.
        """
        sequence = object.__new__(Sequence)
        with self.using():
            sequence.adopt(self, call("sequence_load", self.pointer, bytes(Path(path))))
        return sequence

    def embed(self, text: Any, pooling: Pooling = "mean") -> Any:
        """
        Return the embedding of a text: (dim,) float32; for a list of texts, a list of embeddings.
        text: a str, its tokens, or a list of these.

        pooling: "mean" averages the hidden states of all tokens, "last" takes that of the last
        token, both after the final norm. The embedding is not scaled to unit length. This changes
        neither the engine's sequences nor the logits of its latest call.
        """
        if pooling not in POOLINGS:
            raise Error(f"pooling is {pooling!r}, expected 'mean' or 'last'")
        if not isinstance(text, TEXTS):
            raise Error(f"{str(text)[:80]!r} is not a text, its tokens or a list of texts")
        if len(text) and not isinstance(text, str) and isinstance(text[0], TEXTS):
            return [self.embed(one, pooling) for one in text]
        tokens = token_array(self.model.encode(text) if isinstance(text, str) else text)
        embedding = np.empty(self.model.info.dim, np.float32)
        with self.using():
            call("embed", self.pointer, tokens.ctypes.data, tokens.size, POOLINGS.index(pooling),
                 embedding.ctypes.data)
        return embedding

    def logits(self, i: int) -> Floats:
        """
        Return the logits of a token of the latest call that evaluated tokens: (vocab_size,)
        float32. i: index of the token among those of all Parts of the call.
        """
        with self.using():
            return copied_logits(library().llamac_batch_logits(self.pointer, c_integer("i", i)),
                                 self.model)

    def sample(self, i: int, sampler: Sampler) -> int:
        """
        Return a token to follow token i, sampled from the logits of token i. i: index as in
        logits(). Penalties apply to the tokens of its sequence up to token i.
        """
        with self.using():
            return call("sample_at_sized", self.pointer, c_integer("i", i), byref(sampler),
                        ctypes.sizeof(sampler))


class Sequence:
    """The tokens of a text and their KV cache in an engine. len() is the number of tokens."""

    engine: Engine

    def __init__(self, engine: Engine) -> None:
        with engine.using():
            self.adopt(engine, call("sequence_new", engine.pointer))

    def adopt(self, engine, pointer):
        """Take ownership of the engine's sequence at a pointer: free it when self is collected."""
        self.engine, self.pointer = engine, pointer
        self.finalizer = weakref.finalize(self, drop_sequence, engine, pointer)
        self.finalizer.atexit = False  # as in owned()

    def copy(self, n: int) -> Sequence:
        """Return a new sequence with the first n tokens of this one. Both share their memory."""
        copy = object.__new__(Sequence)
        with self.engine.using():
            copy.adopt(self.engine, call("sequence_copy", self.pointer, c_integer("n", n)))
        return copy

    def free(self) -> None:
        """
        Free the memory now. After that, the sequence has no tokens, free() has no effect, and other
        methods raise Error.
        """
        if self.pointer:
            with self.engine.using():
                self.finalizer.detach()
                # First, because a deferred exception is raised at the end of this block.
                pointer, self.pointer = self.pointer, None
                library().llamac_sequence_free(pointer)

    def truncate(self, n: int) -> None:
        """Drop all tokens but the first n."""
        with self.engine.using():
            call("sequence_truncate", self.pointer, c_integer("n", n))

    def save(self, path: str | Path) -> None:
        """
        Save the tokens and their keys and values to a file, for Engine.load. This overwrites a file
        that save() has written, and raises Error if `path` is anything else that exists.
        """
        with self.engine.using():
            call("sequence_save", self.pointer, bytes(Path(path)))

    def __len__(self) -> int:
        return library().llamac_sequence_length(self.pointer)

    def __bool__(self) -> bool:
        return True  # an empty sequence is still a sequence

    @property
    def tokens(self) -> Tokens:
        """The tokens: (n,) int32, a copy."""
        with self.engine.using():
            address = library().llamac_sequence_tokens(self.pointer)
            size = len(self)
            if not size:
                return np.empty(0, np.int32)
            return np.ctypeslib.as_array((c_int * size).from_address(address)).copy()

    def forward(self, tokens: ArrayLike, pos: int) -> None:
        """Evaluate tokens at positions pos, pos + 1, ... after dropping the tokens from pos on."""
        tokens, pos = token_array(tokens), c_integer("the position", pos)
        with self.engine.using():
            call("forward", self.pointer, tokens.ctypes.data, tokens.size, pos)

    @property
    def logits(self) -> Floats:
        """
        The logits of the latest token of the sequence for which they were computed: (vocab_size,)
        float32, a copy. The engine discards them when it evaluates again.
        """
        with self.engine.using():
            return copied_logits(library().llamac_logits(self.pointer), self.engine.model)

    def sample(self, sampler: Sampler) -> int:
        """Return a next token, sampled from the logits that the property `logits` returns."""
        with self.engine.using():
            return call("sample_sized", self.pointer, byref(sampler), ctypes.sizeof(sampler))


class Grammar:
    """
    A mask of the tokens that may come next, so that a text becomes a JSON object (RFC 8259). Pass
    it to Continuation or generate(). It follows one text at a time; reset() begins the next one.
    """

    def __init__(self, model: Model) -> None:
        pointer = call("grammar_json", model.pointer, True)  # True: an object, not any value
        self.pointer = owned(self, "llamac_grammar_free", pointer, model.memory)

    def copy(self) -> Grammar:
        """
        Return a grammar for another text. It shares the tables of this one, which take tens of
        milliseconds to compute for a large vocabulary.
        """
        copy = object.__new__(Grammar)
        pointer = call("grammar_copy", self.pointer)
        copy.pointer = owned(copy, "llamac_grammar_free", pointer, self)
        return copy

    def reset(self) -> None:
        """Begin a new text."""
        library().llamac_grammar_reset(self.pointer)

    def allowed(self, left: int) -> int:
        """
        Return the address of a mask for Sampler.allowed. A token is allowed if the text can still
        be completed with `left` more tokens, this one included.
        """
        return library().llamac_grammar_allowed(self.pointer, c_integer("left", left))

    def accept(self, token: int) -> bool:
        """Append a token if it is allowed. Return whether it is."""
        return library().llamac_grammar_accept(self.pointer, c_integer("a token", token))

    @property
    def complete(self) -> bool:
        """Whether the text is a complete JSON object."""
        return library().llamac_grammar_complete(self.pointer)


class Part(NamedTuple):
    """
    Tokens of one sequence in a batch.

    position: position of the first token. The tokens replace those of the sequence from this
    position on. None: append the tokens.
    logits: compute the logits of the "last" token, of "all" tokens or of "none".
    """
    sequence: Sequence
    tokens: ArrayLike
    position: int | None = None
    logits: Literal["last", "all", "none"] = "last"


def copied_logits(address, model):
    """Copy logits from an address, because the library may move them in its next call."""
    if not address:
        raise Error("there are no logits: expected an engine without sample_only whose latest call "
                    "computed them")
    return np.ctypeslib.as_array((c_float * model.info.vocab_size).from_address(address)).copy()


def free_sequences(dropped):
    """Remove all pointers of sequences from a list, and free the sequences."""
    while dropped:
        library().llamac_sequence_free(dropped.pop())


def drop_sequence(engine, pointer):
    """
    Free a sequence that was garbage-collected: now, or in the engine's next call if a call is
    running. Python can collect it in any thread at any time, even within a call of the engine.
    """
    engine.dropped.append(pointer)
    if engine.lock.acquire(blocking=False):
        try:
            free_sequences(engine.dropped)
        finally:
            engine.lock.release()


def stop_engine(pointer, dropped, model):
    """
    Stop an engine that was garbage-collected. model: unused; as an argument of the finalizer, it
    stays alive until then, because the engine uses its memory.
    """
    free_sequences(dropped)
    library().llamac_stop(pointer)
