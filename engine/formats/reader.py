"""
Bytes of model files, which may be damaged or hostile: what goes beyond the end of a file, or is no number that a model can have,
ends in one line. Tensors are read when they are asked for, so that a model need not fit into memory to be converted.
"""
import hashlib
import math
import re
import struct
from collections.abc import Mapping

import numpy as np
import torch

from configurator import fail
from engine.untrusted import open_untrusted, reading

MAX_CONTEXT = 1 << 20  # the longest context we believe a file
MAX_HEAD = 1 << 13     # ... and the widest head
MAX_LIST = 1 << 22     # entries of a list in a file's metadata: four times the tokens that a vocabulary may have
# Tensors that no model has all zeros in, as runtime/model.c has it, by the names of all formats.
NEVER_ZERO = re.compile(r"(norm|w[qkv13]|attn_[qkv]|ffn_gate|ffn_up|[qkv]_proj|gate_proj|up_proj|"
                        r"tok_embeddings|token_embd|embed_tokens)\.weight$")


def refuse(where, problem):
    """End with one line about a file."""
    fail(f"{where}: {problem}")


class Tensors(Mapping):
    """
    {name: tensor}, each read when it is asked for. reads: {name: function without arguments that returns the tensor}; where:
    the file or folder that they are in.
    """

    def __init__(self, reads, where):
        self.reads, self.where = reads, where

    def __getitem__(self, name):
        read = self.reads[name]
        with reading(self.where, f"a model's {name}", fail):
            return read()

    def __iter__(self):
        return iter(self.reads)

    def __len__(self):
        return len(self.reads)


def finite(name, w, where):
    """The tensor w, or one line where it holds what is no number."""
    if not all(part.isfinite().all() for part in w.reshape(-1).split(1 << 24)):
        fail(f"{where}: {name} holds values that are not finite; damaged, or of a run that diverged")
    if NEVER_ZERO.search(name) and not w.reshape(-1)[:4096].any() and not w.any():  # the first ones say it soon
        fail(f"{where}: {name} holds nothing but zeros; damaged, as by a download that broke off")
    return w


class Reader:
    """The bytes of a file, front to back; whatever goes beyond its end is one line."""
    SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}

    def __init__(self, path):
        self.path, self.at = path, 0
        with reading(path, "a model", fail), open_untrusted(path) as file:
            self.data = np.memmap(file, np.uint8, "r")

    def fail(self, problem):
        refuse(self.path, problem)

    def take(self, count):
        """The next `count` bytes, a view."""
        if not 0 <= count <= len(self.data) - self.at:
            self.fail(f"truncated or damaged, its {len(self.data)} bytes end in the middle of what its header implies")
        self.at += count
        return self.data[self.at - count:self.at]

    def place(self, count):
        """(where the next `count` bytes stand, count), which are passed over: for `bytes_at`."""
        self.take(count)
        return self.at - count, count

    def bytes_at(self, at, count):
        """A copy of `count` bytes: as mapped pages they would stay in memory when the tensor is gone."""
        with open_untrusted(self.path) as file:
            found = np.fromfile(file, np.uint8, count, offset=at)
        if len(found) < count:
            self.fail("has become shorter while it was read")
        return found

    def unpack(self, pattern):
        return struct.unpack(pattern, self.take(struct.calcsize(pattern)).tobytes())

    def string(self):
        return self.take(self.unpack("<Q")[0]).tobytes()

    def weights(self, name, w, shape):
        """float32 w as a tensor of that shape."""
        return finite(name, torch.from_numpy(w.reshape(shape)), self.path)

    def sha256(self):
        """Hex digest of all bytes from here to the end."""
        digest, at = hashlib.sha256(), self.at
        while at < len(self.data):
            digest.update(self.bytes_at(at, size := min(1 << 20, len(self.data) - at)))
            at += size
        return digest.hexdigest()

    def value(self, number, wanted=True):
        """
        The next value of GGUF's type `number`: bool, int, float, str, or a list, its strings as bytes. wanted: False skips the
        entries of a list, which would take up to forty times their bytes in the file, and returns [].
        """
        if number == 8:
            return self.string().decode(errors="replace")
        if number == 9:
            return self.list_of(*self.unpack("<IQ"), wanted)
        value, = self.unpack(self.SCALARS[number])
        return float(str(np.float32(value))) if number == 6 else value  # 1e-05, not the 9.99999974e-06 it is

    def list_of(self, number, count, wanted):
        """The next `count` values of a type, as for `value`."""
        if count > MAX_LIST:
            self.fail(f"a list of {count:,} entries in its metadata, expected at most {MAX_LIST:,}")
        if number == 8:
            strings = (self.string() for _ in range(count))
            return [string for string in strings if wanted]
        kind = np.dtype(self.SCALARS[number])
        entries = self.take(count * kind.itemsize).view(kind)
        return entries.tolist() if wanted else []


def checked(args, refuse, note=""):
    """args, or one line, by refuse(problem), when no model we can hold has them."""
    problem = args.problem()
    if not problem and args.max_seq_len > MAX_CONTEXT:
        problem = f"a context of {args.max_seq_len} tokens, expected at most {MAX_CONTEXT}"
    if not problem and args.head_dim > MAX_HEAD:
        problem = f"heads of {args.head_dim} numbers, expected at most {MAX_HEAD}"
    return refuse(note + problem) if problem else args


def getter(values, refuse):
    """get(key, kind, default): the value of a key, refused where it is no positive `kind`; an int will do for a float."""
    def get(key, kind, default=None):
        value = values.get(key, default)
        number = kind in (int, float)
        if kind is float and type(value) is int and value < 1 << 64:
            value = float(value)
        if type(value) is not kind or number and not 0 < value < math.inf:
            refuse(f"{key} is {repr(value)[:80]}, expected a {'positive ' * number}{kind.__name__}")
        return value
    return get
