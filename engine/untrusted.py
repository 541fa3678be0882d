"""
Files that other people wrote. Every reader of such a file opens it here, parses its JSON here, and runs inside `reading`:

    open_untrusted    open a regular file, never a pipe, device, socket or folder: those block, or have no end
    read_untrusted    return its bytes; a file beyond the limit is refused before it is read
    parse_json        return the JSON in bytes; too many values are refused before they take memory
    read_json_file    both of them
    reading           turn whatever a reader raises into one line: the file, what was being read, why

This module imports nothing of the project, so that configurator.py can use it too.
"""
import contextlib
import errno
import json
import os
import stat
from pathlib import Path

MAX_SETTINGS = 1 << 20   # bytes of a file of settings: config.json, meta.json, checkpoint.json, a sweep
MAX_JSON = 100 << 20     # bytes of other JSON: a tokenizer.json, the header of a .safetensors file
MAX_VALUES = 5_000_000   # values in a JSON text: twice as many as Gemma's tokenizer.json has; 1 GB of memory at worst
SMALL_JSON = 1 << 20     # bytes of JSON that take 100 MB of memory at worst, so that their values need no count


def open_untrusted(path):
    """
    Open a regular file, or a link to one, for reading bytes. Raises OSError for anything else, such as a pipe, a device, a
    socket or a folder, without opening it.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # it may have become a pipe since
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(handle, "rb")


def read_untrusted(path, max_bytes):
    """Return the bytes of a regular file. Raises OSError, also where it has more than max_bytes."""
    with open_untrusted(path) as file:
        data = file.read(max_bytes + 1) if os.fstat(file.fileno()).st_size <= max_bytes else None
    if data is None or len(data) > max_bytes:
        raise OSError(errno.EFBIG, f"larger than {max_bytes:,} bytes, the limit for such a file", str(path))
    return data


def count_values(data):
    """Count the values in JSON bytes, or a few more; those in a text that is cut off anywhere too."""
    import numpy as np  # here: configurator.py imports this module before it knows which packages there are
    letters = np.frombuffer(data.replace(b"\\\\", b"").replace(b'\\"', b""), np.uint8)
    outside = ~np.logical_xor.accumulate(letters == ord('"'))  # of strings
    return sum(int(np.count_nonzero(outside & (letters == ord(mark)))) for mark in ",[{")


def parse_json(data):
    """Return the value in JSON bytes (UTF-8). Raises ValueError, also for more than MAX_VALUES values or deep nesting."""
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
    Call refuse(line) for whatever the block raises over an untrusted file. what: its format, in words; refuse: raises, as
    configurator.fail does. Pass on what is no fault of the file: an exit, Ctrl-C, a missing package, a reader that has gone.
    """
    try:
        yield
    except (SystemExit, KeyboardInterrupt, GeneratorExit, ImportError, BrokenPipeError):
        raise
    except BaseException as e:  # a panic of a package in Rust, as pyo3 raises it, is no Exception
        refuse(f"{path}: cannot be read as {what} ({reason(e)})")
