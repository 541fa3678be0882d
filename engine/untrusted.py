"""
Read files that other people wrote.

Every reader of such a file opens it here, parses its JSON here, and runs inside `reading`:

    open_untrusted    open a regular file; pipes, devices and sockets may block or never end
    read_untrusted    return the bytes of a file; refuse a file over the limit before reading it
    parse_json        return the value in JSON bytes; refuse too many values before they take memory
    read_json         return the object in a JSON file
    load_torch        return what torch.save wrote: plain values and tensors within the file's size
    reading           turn any exception of a reader into one line: the file, the format, the reason
    reason            explain in a few words why a file could not be read or written

This module imports only engine.system, so that configurator.py can use it too.
"""
import contextlib
import errno
import json
import os
import pickletools
import re
import stat
import zipfile
from pathlib import Path

from engine.system import READ

MAX_SETTINGS = 1 << 20  # bytes of a file of settings: config.json, meta.json, a sweep
MAX_JSON = 100 << 20    # bytes of other JSON, such as a tokenizer.json
MAX_VALUES = 5_000_000  # values in a JSON text, twice Gemma's tokenizer.json; at worst 1 GB
MAX_PICKLE = 1 << 24    # bytes of the pickle inside a torch.save file; at worst 1 GB of memory
SMALL_JSON = 1 << 20    # bytes up to which JSON values are not counted: at worst 100 MB of memory
TORCH_GLOBALS = re.compile(  # the only classes and functions that such a pickle may name
    r"collections OrderedDict|torch Size|torch\._utils _rebuild_(tensor_v2|parameter)|"
    r"torch (Float|Double|Half|BFloat16|ComplexFloat|Long|Int|Short|Char|Byte|Bool)Storage")


class NotRegular(OSError):
    """The path names a pipe, device, socket or folder instead of a regular file."""

    def __init__(self, path):
        super().__init__(errno.EINVAL, "not a regular file", str(path))


def open_untrusted(path):
    """
    Open a regular file, or a link to one, for reading bytes. Raises NotRegular for anything else,
    such as a pipe or a device, without opening it.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise NotRegular(path)
    handle = os.open(path, READ)  # non-blocking, in case a pipe has replaced the file meanwhile
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise NotRegular(path)
    return os.fdopen(handle, "rb")


def read_untrusted(path, max_bytes):
    """Return the bytes of a regular file. Raises OSError, also if there are over max_bytes."""
    with open_untrusted(path) as file:
        size = os.fstat(file.fileno()).st_size
        # read(n) allocates n bytes, so ask for the size, and one more to see whether it has grown.
        data = file.read(size + 1) if size <= max_bytes else b""
        if len(data) > size:  # the file has grown, or is in /proc, where every size is 0
            data += file.read(max(0, max_bytes + 1 - len(data)))
    if max(size, len(data)) > max_bytes:
        limit = f"larger than {max_bytes:,} bytes, the limit for such a file"
        raise OSError(errno.EFBIG, limit, str(path))
    return data


def count_values(data):
    """
    Return an upper bound of the number of values in JSON bytes, without the outermost: the number
    of , [ { outside strings, since each value or its key follows one. The text may be truncated.
    """
    import numpy as np  # here: configurator.py imports this module before it checks for packages
    # Without escaped quotes, a byte is outside strings if the number of quotes up to it is even.
    letters = np.frombuffer(data.replace(b"\\\\", b"").replace(b'\\"', b""), np.uint8)
    outside_strings = ~np.logical_xor.accumulate(letters == ord('"'))
    return sum(np.count_nonzero(outside_strings & (letters == mark)) for mark in b",[{")


def parse_json(data):
    """
    Return the value in JSON, given as UTF-8 bytes or str. Raises ValueError, also for more than
    MAX_VALUES values and for nesting that is too deep.
    """
    data = data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data
    if len(data) > SMALL_JSON and count_values(data) > MAX_VALUES:
        raise ValueError(f"more than {MAX_VALUES:,} values in one JSON text")
    try:
        return json.loads(data.decode("utf-8-sig"))
    except RecursionError as e:
        raise ValueError("nested too deeply") from e


def read_json(path, max_bytes=MAX_SETTINGS, default=None):
    """
    Return the object in a JSON file. Without a default, raises OSError or ValueError, also if the
    file holds something other than an object. With a default, returns it in these cases.
    """
    try:
        found = parse_json(read_untrusted(path, max_bytes))
        if not isinstance(found, dict):
            raise ValueError(f"holds a {type(found).__name__}, expected an object")
    except (OSError, ValueError):
        if default is None:
            raise
        return default
    return found


def load_torch(path, mmap=False):
    """
    Return what torch.save wrote to a file: numbers, texts, lists, dicts and plain tensors. Raises
    ValueError, or what torch.load raises, for anything else, such as sparse or quantized tensors,
    and for tensors that claim more memory than the file has bytes.
    """
    import torch  # here: programs that read no weights start without it
    with open_untrusted(path) as file, zipfile.ZipFile(file) as archive:
        entries, size = archive.infolist(), os.fstat(file.fileno()).st_size
        compressed = any(entry.compress_type for entry in entries)
        if compressed or sum(entry.file_size for entry in entries) > size:
            raise ValueError("its entries are compressed or overlap, unlike those of torch.save")
        pickled = next(entry for entry in entries if entry.filename.endswith("/data.pkl"))
        if pickled.file_size > MAX_PICKLE:
            raise ValueError(f"{pickled.filename} has {pickled.file_size:,} bytes, "
                             f"expected at most {MAX_PICKLE:,}")
        # torch.load(weights_only=True) itself refuses other ways to name a global (STACK_GLOBAL).
        for operation, name, _ in pickletools.genops(archive.read(pickled)):
            if operation.name == "GLOBAL" and not TORCH_GLOBALS.fullmatch(name):
                raise ValueError(f"holds {name.replace(' ', '.')}, expected numbers, texts, lists, "
                                 "dicts and plain tensors")
    found = torch.load(path, map_location="cpu", mmap=mmap, weights_only=True)
    # Twice, because tied weights are stored once and counted twice.
    if sum(tensor.nbytes for tensor in tensors_in(found, set())) > 2 * size:
        raise ValueError(f"its tensors need more than the file's {size:,} bytes")
    return found


def tensors_in(value, seen):
    """Yield the tensors in nested dicts, lists and tuples. seen: ids of the containers visited."""
    if hasattr(value, "untyped_storage"):  # a tensor; torch is not imported here
        yield value
    elif isinstance(value, (dict, list, tuple)) and id(value) not in seen:
        seen.add(id(value))
        children = value.values() if isinstance(value, dict) else value
        for each in children:
            yield from tensors_in(each, seen)


def is_plain_name(name):
    """Return whether a value is the name of one file, without folders: no "a/b", no ".."."""
    plain = isinstance(name, str) and name not in ("", ".", "..") and "\0" not in name
    return plain and Path(name).name == name


def reason(error):
    """Return why a file could not be read or written, as a few words on one line."""
    if isinstance(error, MemoryError):
        return "there is not enough memory"
    if isinstance(error, RecursionError):
        return "nested too deeply"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "the disk is full"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    words = (str(error).splitlines() or [""])[0][:200]
    # A ValueError or OSError explains itself; the message of another exception, such as KeyError,
    # may be a bare name.
    explains_itself = type(error) in (ValueError, OSError) and words
    return words if explains_itself else f"{type(error).__name__}: {words}"


@contextlib.contextmanager
def reading(path, what, refuse):
    """
    Call refuse(line) if the block raises an exception while it reads an untrusted file. Exceptions
    that the file did not cause pass through: an exit, Ctrl-C, a missing package, a closed pipe.

    what: the expected format, in words. refuse: raises, as configurator.fail does.
    """
    try:
        yield
    except (SystemExit, KeyboardInterrupt, GeneratorExit, ImportError, BrokenPipeError):
        raise
    except BaseException as e:  # a panic in a package written in Rust is not an Exception
        refuse(f"{path}: cannot be read ({reason(e)}); expected {what}")
