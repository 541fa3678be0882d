"""
Read the bytes of model files, which may be damaged or hostile. The program exits with a message on
a read beyond the end of a file, or on a number that no model can have. Each tensor is read when it
is accessed, so a model that does not fit into memory can be converted.
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

MAX_CONTEXT = 1 << 20  # tokens
MAX_HEAD_DIM = 1 << 13  # elements
MAX_LIST = 1 << 22     # entries of a list in metadata: four times the largest vocabulary
# Names, in any of the formats, of tensors that are never all zeros in a model. runtime/model.c has
# the same list.
NEVER_ZERO = re.compile(
    r"(norm|w[qkv13]|attn_[qkv]|ffn_gate|ffn_up|[qkv]_proj|gate_proj|up_proj|"
    r"tok_embeddings|token_embd|embed_tokens)\.weight$")
# {GGUF's number of a metadata type: format of the struct module}; 8 is a string and 9 a list
SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q",
           11: "<q", 12: "<d"}


class Tensors(Mapping):
    """
    Mapping {name: tensor} that reads a tensor from disk at each access. readers: {name: function
    without arguments that returns the tensor}; where: the file or folder, for messages; q8_0:
    {name: function that returns (int8 values (R, C), float16 scales (R, C / 32))} of the matrices
    that are stored in GGUF's Q8_0.
    """

    def __init__(self, readers, where, q8_0=None):
        self.readers, self.where, self.q8_0 = readers, where, q8_0 or {}

    def __getitem__(self, name):
        read = self.readers[name]
        with reading(self.where, f"a model's {name}", fail):
            return read()

    def __iter__(self):
        return iter(self.readers)

    def __len__(self):
        return len(self.readers)


def plausible(name, w, where):
    """
    Return the tensor w. Exit with a message if it contains NaN or infinity, or if it is all zeros
    and its name matches NEVER_ZERO.
    """
    flat = w.reshape(-1)
    if not all(part.isfinite().all() for part in flat.split(1 << 24)):
        fail(f"{where}: {name} holds values that are not finite; the file is damaged, or its "
             "run diverged")
    # Test a few values first: they are nearly always not all zeros, so the rest need not be read.
    if NEVER_ZERO.search(name) and not flat[:4096].any() and not w.any():
        fail(f"{where}: {name} contains only zeros; damaged, for example by an incomplete download")
    return w


def open_safetensors(path):
    """
    Open a .safetensors file, whose header the library checks. Return the library's safe_open, a
    context manager. Exit with a message if the package is not installed.
    """
    try:
        from safetensors import safe_open
    except ImportError:
        fail(f"{path}: reading .safetensors files needs: pip install safetensors")
    open_untrusted(path).close()  # refuses a pipe or a device, on which the library would block
    return safe_open(path, framework="pt")


class Reader:
    """The bytes of a file, read from front to back. `at` is the offset of the next byte to read."""

    def __init__(self, path):
        self.path, self.at = path, 0
        with reading(path, "a model", fail), open_untrusted(path) as file:
            self.data = np.memmap(file, np.uint8, "r")

    def fail(self, problem):
        """Exit with a message that begins with the path of the file."""
        fail(f"{self.path}: {problem}")

    def take(self, count):
        """Return a view of the next `count` bytes. Exit with a message if the file has fewer."""
        if not 0 <= count <= len(self.data) - self.at:
            self.fail(f"truncated or damaged: its header implies more than its {len(self.data)} "
                      "bytes")
        self.at += count
        return self.data[self.at - count:self.at]

    def skip(self, count):
        """Skip the next `count` bytes and return (offset, count), for `bytes_at`."""
        self.take(count)
        return self.at - count, count

    def bytes_at(self, at, count):
        """
        Return `count` bytes from the offset `at`. They are read into a copy, because the pages of a
        memory map would stay in memory after their use.
        """
        with open_untrusted(self.path) as file:
            return np.fromfile(file, np.uint8, count, offset=at)

    def end(self, padding=0):
        """
        Exit with a message unless the file ends at the current offset, or exactly `padding` bytes
        after it.
        """
        if len(self.data) not in (self.at, self.at + padding):
            self.fail(f"holds {len(self.data)} bytes, its header implies {self.at}")

    def unpack(self, pattern):
        """Return the tuple of the next numbers. pattern: their types, as for struct.unpack."""
        return struct.unpack(pattern, self.take(struct.calcsize(pattern)).tobytes())

    def string(self):
        """Return the bytes of GGUF's next string."""
        return self.take(self.unpack("<Q")[0]).tobytes()

    def weights(self, name, w, shape):
        """Return the float32 array w as a tensor of this shape. Exit unless it is plausible."""
        return plausible(name, torch.from_numpy(w.reshape(shape)), self.path)

    def sha256(self):
        """Return the hex digest of all bytes from the current offset to the end of the file."""
        digest, chunk = hashlib.sha256(), 1 << 20
        for at in range(self.at, len(self.data), chunk):
            digest.update(self.bytes_at(at, min(chunk, len(self.data) - at)))
        return digest.hexdigest()

    def value(self, kind, wanted=True):
        """
        Return the next value of GGUF's type number `kind`: a bool, int, float, str or list. Strings
        in a list are bytes. wanted=False skips the entries of a list and returns []: as Python
        objects they would take up to forty times their size in the file.
        """
        if kind == 8:
            return self.string().decode(errors="replace")
        if kind == 9:
            return self.list_of(*self.unpack("<IQ"), wanted)
        value, = self.unpack(SCALARS[kind])
        # The shortest decimal that rounds to a float32: 1e-05, not 9.99999974e-06.
        return float(str(np.float32(value))) if kind == 6 else value

    def list_of(self, kind, count, wanted):
        """Return the list of the next `count` values of type number `kind`, or [] if not wanted."""
        if count > MAX_LIST:
            self.fail(f"a list of {count:,} entries in its metadata, expected at most {MAX_LIST:,}")
        if kind == 8:
            strings = (self.string() for _ in range(count))  # skipping one requires its length
            return [string for string in strings if wanted]
        dtype = np.dtype(SCALARS[kind])
        entries = self.take(count * dtype.itemsize).view(dtype)
        return entries.tolist() if wanted else []


def checked(args, where):
    """Return the ModelArgs. Exit with a message that begins with `where` if they are impossible."""
    problem = args.problem()
    if not problem and args.max_seq_len > MAX_CONTEXT:
        problem = f"a context of {args.max_seq_len} tokens, expected at most {MAX_CONTEXT}"
    if not problem and args.head_dim > MAX_HEAD_DIM:
        problem = f"heads of {args.head_dim} numbers, expected at most {MAX_HEAD_DIM}"
    return fail(f"{where}: {problem}") if problem else args


def getter(values, where):
    """
    Return a function get(key, kind, default) that returns values[key]. It exits with a message if
    the value is not of type `kind` (an int is accepted as float), or is a number that is not
    positive and finite.
    """
    def get(key, kind, default=None):
        value = values.get(key, default)
        number = kind in (int, float)
        if kind is float and type(value) is int and value < 1 << 64:
            value = float(value)
        if type(value) is not kind or number and not 0 < value < math.inf:
            positive = "positive " if number else ""
            fail(f"{where}: {key} is {repr(value)[:80]}, expected a {positive}{kind.__name__}")
        return value
    return get
