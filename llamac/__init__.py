"""
The C library in Python: runtime/llamac.h through ctypes. `make lib` builds libllamac.so.

    model = llamac.Model("out/demo/model.gguf")
    session = llamac.Session(model)
    sampler = llamac.Sampler(temperature=0.8, topp=0.9, state=1)
    prompt = model.encode("Once upon a time")
    for text, *_ in llamac.generate(session, prompt, sampler, max_tokens=100, stop=["The end"]):
        print(text, end="", flush=True)

    session.forward(tokens, 0)  # step by step
    token = session.sample(sampler)
    model.decode([token], previous=tokens[-1])

The library's errors are raised as Error. Arrays of tokens and logits are the library's memory,
which is freed with the last reference to it. Threads may share a model; calls of one session wait
for each other.
"""
import ctypes
import functools
import operator
import threading
import weakref
from ctypes import POINTER, byref, c_bool, c_char_p, c_float, c_int, c_size_t, c_uint64, c_void_p
from pathlib import Path

import numpy as np

from llamac.text import generate  # noqa: F401 (part of the interface)

# Paths where library() looks for the library.
PATHS = [folder / "libllamac.so" for folder in Path(__file__).resolve().parents[:2]]


class Error(RuntimeError):
    """An error of the library; its text is one line."""


class Options(ctypes.Structure):
    _fields_ = [("positions", c_int), ("n_threads", c_int), ("device", c_char_p),
                ("no_copy", c_bool), ("logits", c_int), ("kv_bits", c_int)]


class Sampler(ctypes.Structure):
    """How tokens are drawn. state: the seed; each token changes it."""
    _fields_ = [("temperature", c_float), ("topp", c_float), ("state", c_uint64)]


class Info(ctypes.Structure):
    """The header of a model file. bos, eos, eot: tokens, or -1."""
    _fields_ = [(name, c_int) for name in ("dim", "hidden_dim", "n_layers", "n_heads", "n_kv_heads",
                                           "vocab_size", "seq_len")]
    _fields_ += [("has_tokenizer", c_bool), ("add_bos", c_bool)]
    _fields_ += [(name, c_int) for name in ("bos", "eos", "eot")]


MODEL = SESSION = TOKENS = c_void_p
COUNT, ERROR, TEXT = POINTER(c_int), c_char_p, (c_char_p, c_size_t)
# {name without llamac_: (type of the result, types of the arguments ...)}. A function whose last
# argument is ERROR can fail: use call(), which passes that argument.
FUNCTIONS = {
    "open": (MODEL, c_char_p, c_int, ERROR),
    "open_memory": (MODEL, *TEXT, c_int, ERROR),
    "close": (None, MODEL),
    "describe": (Info, MODEL),
    "encode": (TOKENS, MODEL, *TEXT, c_bool, COUNT, ERROR),
    "decode": (c_size_t, MODEL, c_int, c_int, *TEXT),
    "ends": (c_bool, MODEL, c_int),
    "use_template": (c_bool, MODEL, c_char_p, ERROR),
    "encode_turn": (TOKENS, MODEL, c_bool, c_char_p, *TEXT, COUNT, ERROR),
    "encode_answer": (TOKENS, MODEL, *TEXT, COUNT, ERROR),
    "free": (None, TOKENS),
    "start": (SESSION, MODEL, POINTER(Options), ERROR),
    "stop": (None, SESSION),
    "positions": (c_int, SESSION),
    "note": (c_char_p, SESSION),
    "forward": (c_bool, SESSION, TOKENS, c_int, c_int, ERROR),
    "logits": (c_void_p, SESSION),
    "sample": (c_int, SESSION, POINTER(Sampler), ERROR),
}


@functools.cache
def library():
    """Return the loaded library. Raises Error."""
    path = next((path for path in PATHS if path.exists()), PATHS[-1])
    try:
        loaded = ctypes.CDLL(str(path))
        for name, (result, *arguments) in FUNCTIONS.items():
            function = getattr(loaded, f"llamac_{name}")
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as e:
        raise Error(f"{path} cannot be used ({e}); make it with: make lib") from e
    return loaded


def call(name, *arguments):
    """
    Return the result of a function that can fail; it tells so by NULL, which ctypes returns as
    None, by False, or by a negative int. Raises Error.
    """
    message = ctypes.create_string_buffer(512)
    result = getattr(library(), f"llamac_{name}")(*arguments, message)
    if result is None or result is False or (FUNCTIONS[name][0] is c_int and result < 0):
        raise Error(message.value.decode())
    return result


def c_integer(name, number):
    """Return a number as C's int. Raises Error where ctypes would cut it to its last 32 bits."""
    try:
        number = operator.index(number)
    except TypeError:
        raise Error(f"{name} is {number!r}, expected a whole number") from None
    if not -1 << 31 <= number < 1 << 31:
        raise Error(f"{name} is {number}, expected a number of 32 bits")
    return number


def token_array(tokens):
    """Return tokens as a contiguous array of int32: (n,). Raises Error."""
    tokens = np.asarray(tokens)
    if tokens.dtype != np.int32 and tokens.size:
        if tokens.dtype.kind not in "iu":
            raise Error(f"tokens of type {tokens.dtype}, expected whole numbers")
        for token in tokens.min(), tokens.max():
            c_integer("a token", token)
    return np.ascontiguousarray(tokens, np.int32)


def owned(owner, free, pointer, *needs):
    """
    Return the pointer, and let the library's function `free` free it when `owner` is collected. The
    objects in `needs`, whose memory the pointer uses, are kept until then.

    It is not freed when Python ends, because threads may still compute then.
    """
    finalizer = weakref.finalize(owner, lambda *needs: getattr(library(), free)(pointer), *needs)
    finalizer.atexit = False
    # Python drops the finalizer, and what it refers to, when it ends. A thread that still computes
    # holds `owner` and thereby `needs`.
    owner.needs = needs
    return pointer


def encoded(name, *arguments):
    """Return the tokens that a function of the library makes: (n,) int32. Raises Error."""
    count = c_int()
    pointer = call(name, *arguments, byref(count))
    memory = (c_int * count.value).from_address(pointer)
    owned(memory, "llamac_free", pointer)
    return np.ctypeslib.as_array(memory)


def utf8(text):
    """Return a str as the two arguments of C: bytes and their number."""
    data = text.encode()
    return data, len(data)


class Model:
    """
    A model from a file or from bytes. A file stays mapped into memory.

    info: dim, n_layers, vocab_size, seq_len, bos and more.
    """

    def __init__(self, source):
        try:
            if isinstance(source, bytes):
                pointer = call("open_memory", source, len(source), 0)  # 0: no flags
            else:
                pointer = call("open", bytes(Path(source)), 0)
        except Error as e:
            raise (e if isinstance(source, bytes) else Error(f"{source}: {e}")) from None
        self.pointer = owned(self, "llamac_close", pointer, source)
        self.info = library().llamac_describe(self.pointer)

    def encode(self, text, bos=None):
        """Return the tokens of a str. bos: whether BOS comes first; None: as the model expects."""
        bos = self.info.add_bos if bos is None else bos
        return encoded("encode", self.pointer, *utf8(text), bos)

    def decode(self, tokens, previous=None):
        """Return the bytes of tokens after `previous` (None: BOS). They may cut characters."""
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

    def use_template(self, name=None):
        """
        Choose the chat template by its name: chatml, llama3, llama3.1, zephyr, llama2, mistral-v0,
        mistral-v1, mistral-v3, mistral-v3-tekken, phi3 or phi4-mini; None: the one in the file.
        Call this before the model is used for anything else.
        """
        call("use_template", self.pointer, name and name.encode())

    def encode_turn(self, text, first=True, system=None):
        """
        Return the tokens of a user's turn, up to where the answer begins.

        system: the system prompt, in the first turn; "": none; None: the one in the file's
        template, if it has one.
        """
        system = None if system is None else system.encode()
        return encoded("encode_turn", self.pointer, first, system, *utf8(text))

    def encode_answer(self, text):
        """Return the tokens of an earlier answer. The next turn adds its end marker."""
        return encoded("encode_answer", self.pointer, *utf8(text))

    def ends(self, token):
        """Return whether a token ends a text, or an answer in the template in use."""
        return library().llamac_ends(self.pointer, c_integer("a token", token))


class Session:
    """
    A KV cache, and the threads that compute.

    positions: size of the context in tokens; 0: the model's.
    threads: 0: the library chooses.
    no_copy: compute from the file's own pages, which processes share; this is slower.
    logits: which ones forward() leaves: of the "last" token, of "all", or just enough to "sample".
    device: "cpu", "cuda" or "auto"; None: the default of the build.
    kv_bits: size of a number in the cache: 32, 16 or 8; 0: 16 for quantised weights, otherwise 32.
    note: a message for the user, such as why it computes on the CPU instead of a GPU.
    """

    def __init__(self, model, positions=0, threads=0, no_copy=False, logits="last", device=None,
                 kv_bits=0):
        kept = ["sample", "last", "all"].index(logits)  # as in llamac_logits_kept
        options = Options(c_integer("positions", positions), c_integer("threads", threads),
                          device and device.encode(), no_copy, kept, c_integer("kv_bits", kv_bits))
        pointer = call("start", model.pointer, byref(options))
        self.pointer = owned(self, "llamac_stop", pointer, model)
        self.lock, self.model = threading.Lock(), model
        self.keeps_all, self.shape = logits == "all", None
        self.positions = library().llamac_positions(self.pointer)
        self.note = library().llamac_note(self.pointer).decode()

    def forward(self, tokens, pos):
        """Evaluate tokens at the positions from `pos` on."""
        tokens, pos = token_array(tokens), c_integer("the position", pos)
        with self.lock:
            call("forward", self.pointer, tokens.ctypes.data, tokens.size, pos)
            self.shape = (tokens.size if self.keeps_all else 1, self.model.info.vocab_size)

    @property
    def logits(self):
        """Logits of the latest forward: (rows, vocab_size) float32. The next call changes them."""
        address = library().llamac_logits(self.pointer)
        if not address or not self.shape:
            raise Error("there are no logits: expected a session with logits='last' or 'all', and "
                        "forward before")
        memory = (c_float * self.shape[1] * self.shape[0]).from_address(address)
        memory.session = self  # keeps the memory while the array is in use
        return np.ctypeslib.as_array(memory)

    def sample(self, sampler):
        """Return a next token, drawn from the logits of the last token that forward() evaluated."""
        with self.lock:
            return call("sample", self.pointer, byref(sampler))
