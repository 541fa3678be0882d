"""
The C library from Python: runtime/llamac.h by ctypes, over the libllamac.so that `make lib` makes.

    model = llamac.Model("out/demo/model.gguf")
    session, sampler = llamac.Session(model), llamac.Sampler(temperature=0.8, topp=0.9, state=1)
    for text, *_ in llamac.generate(session, model.encode("Once upon a time"), sampler, most=100, stop=["The end"]):
        print(text, end="", flush=True)

    session.forward(tokens, 0)  # step by step
    token = session.sample(sampler)
    model.decode([token], previous=tokens[-1])

What the library refuses is an Error. Tokens and logits are arrays in the library's memory, which is freed with the last
reference to it. Threads may share a model; calls of one session wait for one another.
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

PATHS = [folder / "libllamac.so" for folder in Path(__file__).resolve().parents[:2]]  # where it is looked for


def struct(name, **fields):
    return type(name, (ctypes.Structure,), {"_fields_": list(fields.items())})


Error = type("Error", (RuntimeError,), {"__doc__": "What is wrong, in one line.", "__module__": __name__})
Options = struct("Options", positions=c_int, n_threads=c_int, device=c_char_p, no_copy=c_bool, logits=c_int,
                 kv_bits=c_int)
Sampler = struct("Sampler", temperature=c_float, topp=c_float, state=c_uint64)  # state: a seed
Info = struct("Info", dim=c_int, hidden_dim=c_int, n_layers=c_int, n_heads=c_int, n_kv_heads=c_int, vocab_size=c_int,
              seq_len=c_int, has_tokenizer=c_bool, add_bos=c_bool, bos=c_int, eos=c_int, eot=c_int)
MODEL, SESSION, TOKENS, COUNT, WRONG = c_void_p, c_void_p, c_void_p, POINTER(c_int), c_char_p
FUNCTIONS = {  # name: (what it returns, its arguments ...)
    "open": (MODEL, c_char_p, c_int, WRONG), "open_memory": (MODEL, c_char_p, c_size_t, c_int, WRONG),
    "encode": (TOKENS, MODEL, c_char_p, c_size_t, c_bool, COUNT, WRONG), "free": (None, TOKENS), "describe": (Info, MODEL),
    "decode": (c_size_t, MODEL, c_int, c_int, c_char_p, c_size_t), "ends": (c_bool, MODEL, c_int), "close": (None, MODEL),
    "use_template": (c_bool, MODEL, c_char_p, WRONG), "encode_answer": (TOKENS, MODEL, c_char_p, c_size_t, COUNT, WRONG),
    "encode_turn": (TOKENS, MODEL, c_bool, c_char_p, c_char_p, c_size_t, COUNT, WRONG), "stop": (None, SESSION),
    "positions": (c_int, SESSION), "sample": (c_int, SESSION, POINTER(Sampler), WRONG),
    "start": (SESSION, MODEL, POINTER(Options), WRONG), "logits": (c_void_p, SESSION), "note": (c_char_p, SESSION),
    "forward": (c_bool, SESSION, TOKENS, c_int, c_int, WRONG),
}


@functools.cache
def library():
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
    """What a function that can fail returns, or an Error."""
    wrong = ctypes.create_string_buffer(512)
    result = getattr(library(), f"llamac_{name}")(*arguments, wrong)
    if result is None or result is False or (FUNCTIONS[name][0] is c_int and result < 0):
        raise Error(wrong.value.decode())
    return result


def whole(name, number):
    """A number as an int of C, which ctypes would cut to its last 32 bits, or an Error."""
    try:
        number = operator.index(number)
    except TypeError:
        raise Error(f"{name} is {number!r}, expected a whole number") from None
    if not -1 << 31 <= number < 1 << 31:
        raise Error(f"{name} is {number}, expected a number of 32 bits")
    return number


def token_array(tokens):
    """Tokens as C has them: (n,) int32, or an Error."""
    tokens = np.asarray(tokens)
    if tokens.dtype != np.int32 and tokens.size:
        if tokens.dtype.kind not in "iu":
            raise Error(f"tokens of type {tokens.dtype}, expected whole numbers")
        for token in tokens.min(), tokens.max():
            whole("a token", token)
    return np.ascontiguousarray(tokens, np.int32)


def owned(owner, free, pointer, *needs):
    """
    The pointer, freed after the last reference to its owner and before what it needs; not when Python ends, since threads
    may still compute then.
    """
    weakref.finalize(owner, lambda *needs: getattr(library(), free)(pointer), *needs).atexit = False
    owner.needs = needs  # the references above go when Python ends; this one stays with a thread that computes
    return pointer


def tokens_of(name, *arguments):
    """The tokens that a function makes: (n,) int32."""
    pointer = call(name, *arguments, byref(n := c_int()))
    memory = (c_int * n.value).from_address(pointer)
    owned(memory, "llamac_free", pointer)
    return np.ctypeslib.as_array(memory)


class Model:
    """A model file, by its path (it stays mapped) or as bytes."""

    def __init__(self, source):
        how, *where = ("open_memory", source, len(source)) if isinstance(source, bytes) else ("open", bytes(Path(source)))
        try:
            pointer = call(how, *where, 0)
        except Error as e:
            raise (e if isinstance(source, bytes) else Error(f"{source}: {e}")) from None
        self.pointer = owned(self, "llamac_close", pointer, source)
        self.info = library().llamac_describe(self.pointer)  # dim, n_layers, vocab_size, seq_len, bos ...

    def encode(self, text, bos=None):
        """The tokens of a str; behind BOS where the model wants it, or as asked."""
        return tokens_of("encode", self.pointer, text.encode(), len(text.encode()), self.info.add_bos if bos is None else bos)

    def decode(self, tokens, previous=None):
        """The bytes of tokens that stand behind `previous` (None: BOS). A character may be cut at either end."""
        tokens = token_array(tokens).tolist()
        parts, previous = [], self.info.bos if previous is None else whole("previous", previous)
        for pair in zip([previous, *tokens], tokens):
            room = ctypes.create_string_buffer(size := library().llamac_decode(self.pointer, *pair, None, 0))
            library().llamac_decode(self.pointer, *pair, room, size)
            parts.append(room.raw)
        return b"".join(parts)

    def use_template(self, name=None):
        """chatml, llama3, zephyr or llama2; None: what the file says. Before anything else is done with the model."""
        call("use_template", self.pointer, name and name.encode())

    def encode_turn(self, words, first=True, system=None):
        """The tokens of a user's turn, up to where the answer begins."""
        return tokens_of("encode_turn", self.pointer, first, system and system.encode(), words.encode(), len(words.encode()))

    def encode_answer(self, words):
        """The tokens of an answer given earlier; the next turn closes it."""
        return tokens_of("encode_answer", self.pointer, words.encode(), len(words.encode()))

    def ends(self, token):
        """Whether a token ends a text, or an answer by the template in use."""
        return library().llamac_ends(self.pointer, whole("a token", token))


class Session:
    """
    The KV cache of a text, and the threads that compute. logits: of the "last" token, "all", or enough to "sample".
    kv_bits: of a number in the cache, 32, 16 or 8; 0: 16 where the weights are quantised, else 32.
    """

    def __init__(self, model, positions=0, threads=0, no_copy=False, logits="last", device=None, kv_bits=0):
        kept = ["sample", "last", "all"].index(logits)
        options = Options(whole("positions", positions), whole("threads", threads), device and device.encode(), no_copy, kept,
                          whole("kv_bits", kv_bits))
        self.pointer = owned(self, "llamac_stop", call("start", model.pointer, byref(options)), model)
        self.lock, self.model, self.all, self.shape = threading.Lock(), model, logits == "all", None
        self.positions, self.note = library().llamac_positions(self.pointer), library().llamac_note(self.pointer).decode()

    def forward(self, tokens, pos):
        """Evaluates tokens that stand at positions from `pos` on."""
        tokens, pos = token_array(tokens), whole("the position", pos)
        with self.lock:
            call("forward", self.pointer, tokens.ctypes.data, tokens.size, pos)
            self.shape = (tokens.size if self.all else 1, self.model.info.vocab_size)

    @property
    def logits(self):
        """(rows, vocab_size) float32 of the last forward; the next call changes them."""
        if not (where := library().llamac_logits(self.pointer)) or not self.shape:
            raise Error("there are no logits: expected a session with logits='last' or 'all', and forward before")
        memory = (c_float * self.shape[1] * self.shape[0]).from_address(where)
        memory.session = self
        return np.ctypeslib.as_array(memory)

    def sample(self, sampler):
        """The token after the last one, by its logits."""
        with self.lock:
            return call("sample", self.pointer, byref(sampler))
