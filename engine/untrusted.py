"""
Files that other people wrote. Every reader of such a file opens it here, parses its JSON here, and runs inside `reading`:

    open_untrusted    open a regular file, never a pipe, device, socket or folder: those block, or have no end
    read_untrusted    return its bytes; a file beyond the limit is refused before it is read
    parse_json        return the JSON in bytes; too many values are refused before they take memory
    read_json_file    both of them
    load_torch        return what torch.save has written: plain values and tensors, no larger than the file
    reading           turn whatever a reader raises into one line: the file, what was being read, why

This module imports nothing of the project, so that configurator.py can use it too.
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

MAX_SETTINGS = 1 << 20   # bytes of a file of settings: config.json, meta.json, checkpoint.json, a sweep
MAX_JSON = 100 << 20     # bytes of other JSON: a tokenizer.json, the header of a .safetensors file
MAX_VALUES = 5_000_000   # values in a JSON text: twice as many as Gemma's tokenizer.json has; 1 GB of memory at worst
MAX_PICKLE = 1 << 24   # bytes of the pickle in a file of torch.save's, which tensors stand beside; 1 GB of memory at worst
PLAIN = re.compile(r"collections OrderedDict|torch Size|torch\._utils _rebuild_(tensor_v2|parameter)|"  # what it may name
                   r"torch (Float|Double|Half|BFloat16|ComplexFloat|Long|Int|Short|Char|Byte|Bool)Storage")
SMALL_JSON = 1 << 20     # bytes of JSON that take 100 MB of memory at worst, so that their values need no count


class NotRegular(OSError):
    """A pipe, a device, a socket or a folder stands in the place of a file."""

    def __init__(self, path):
        super().__init__(errno.EINVAL, "not a regular file", str(path))


def open_untrusted(path):
    """
    Open a regular file, or a link to one, for reading bytes. Raises NotRegular for anything else, such as a pipe, a device, a
    socket or a folder, without opening it.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise NotRegular(path)
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # it may have become a pipe since
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise NotRegular(path)
    return os.fdopen(handle, "rb")


def read_untrusted(path, max_bytes):
    """Return the bytes of a regular file. Raises OSError, also where it has more than max_bytes."""
    with open_untrusted(path) as file:
        size = os.fstat(file.fileno()).st_size
        data = file.read(size + 1) if size <= max_bytes else b""  # read allocates what it is asked for
        if len(data) > size:  # it has grown, or is one of those in /proc
            data += file.read(max(0, max_bytes + 1 - len(data)))
    if max(size, len(data)) > max_bytes:
        raise OSError(errno.EFBIG, f"larger than {max_bytes:,} bytes, the limit for such a file", str(path))
    return data


def count_values(data):
    """Count the values in JSON bytes, or a few more; those in a text that is cut off anywhere too."""
    import numpy as np  # here: configurator.py imports this module before it knows which packages there are
    letters = np.frombuffer(data.replace(b"\\\\", b"").replace(b'\\"', b""), np.uint8)
    outside = ~np.logical_xor.accumulate(letters == ord('"'))  # of strings
    return sum(int(np.count_nonzero(outside & (letters == ord(mark)))) for mark in ",[{")


def parse_json(data):
    """
    Return the value in JSON bytes (UTF-8) or in a text. Raises ValueError, also for more than MAX_VALUES values or for deep
    nesting.
    """
    data = data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data
    if len(data) > SMALL_JSON and count_values(data) > MAX_VALUES:
        raise ValueError(f"more than {MAX_VALUES:,} values in one JSON text")
    try:
        return json.loads(data.decode("utf-8-sig"))
    except RecursionError as e:
        raise ValueError("nested too deeply") from e


def read_json_file(path, max_bytes=MAX_SETTINGS):
    """Return the object in a JSON file. Raises OSError or ValueError, also where it holds something other than an object."""
    found = parse_json(read_untrusted(path, max_bytes))
    if not isinstance(found, dict):
        raise ValueError(f"holds a {type(found).__name__}, expected an object")
    return found


def load_torch(path, mmap=False):
    """
    Return what torch.save has written to a file: numbers, texts, lists, dicts and plain tensors. Raises ValueError, or what
    torch.load raises, for anything else, such as sparse or quantised tensors, and for more numbers than the file holds.
    """
    import torch  # here: what reads no weights starts without it
    with open_untrusted(path) as file, zipfile.ZipFile(file) as archive:
        entries, size = archive.infolist(), os.fstat(file.fileno()).st_size
        if any(entry.compress_type for entry in entries) or sum(entry.file_size for entry in entries) > size:
            raise ValueError("its entries are compressed or overlap, which torch.save does not write")
        pickled = next(entry for entry in entries if entry.filename.endswith("/data.pkl"))
        if pickled.file_size > MAX_PICKLE:
            raise ValueError(f"{pickled.filename} has {pickled.file_size:,} bytes, expected at most {MAX_PICKLE:,}")
        named = {name for operation, name, _ in pickletools.genops(archive.read(pickled)) if operation.name == "GLOBAL"}
    odd = [name for name in sorted(named) if not PLAIN.fullmatch(name)]
    if odd:
        raise ValueError(f"holds {odd[0].replace(' ', '.')}, expected numbers, texts, lists, dicts and plain tensors")
    found = torch.load(path, map_location="cpu", mmap=mmap, weights_only=True)
    if sum(w.nbytes for w in tensors_in(found, set())) > 2 * size:  # a tied classifier stands there once and counts twice
        raise ValueError(f"its tensors are larger than its {size:,} bytes hold")
    return found


def tensors_in(value, seen):
    """Yield the tensors in nested dicts, lists and tuples. seen: the ids of those containers that were looked through."""
    if hasattr(value, "untyped_storage"):
        yield value
    elif isinstance(value, (dict, list, tuple)) and id(value) not in seen:
        seen.add(id(value))
        for each in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(each, seen)


def is_plain_name(name):
    """Return whether a text is the name of a file in a folder, rather than a path that leads elsewhere."""
    return isinstance(name, str) and name not in ("", ".", "..") and Path(name).name == name and "\0" not in name


def reason(error):
    """Return why a reader failed, as a few words on one line."""
    if isinstance(error, MemoryError):
        return "it needs more memory than there is"
    if isinstance(error, RecursionError):
        return "nested too deeply"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    words = (str(error).splitlines() or [""])[0][:200]
    return words if type(error) is ValueError and words else f"{type(error).__name__}: {words}"


@contextlib.contextmanager
def reading(path, what, refuse):
    """
    Call refuse(line) for whatever the block raises over an untrusted file. what: the format that is expected, in words;
    refuse: raises, as configurator.fail does. Pass on what is no fault of the file: an exit, Ctrl-C, a missing package, a
    pipe without a reader.
    """
    try:
        yield
    except (SystemExit, KeyboardInterrupt, GeneratorExit, ImportError, BrokenPipeError):
        raise
    except BaseException as e:  # a panic of a package in Rust, as pyo3 raises it, is no Exception
        refuse(f"{path}: cannot be read ({reason(e)}); expected {what}")
