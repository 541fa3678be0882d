"""Files that a crash leaves whole, and what is said of them."""
import contextlib
import errno
import hashlib
import os
from pathlib import Path

from configurator import fail
from engine.untrusted import MAX_JSON, open_untrusted, read_json_file


def refuse_odd(**paths):
    """One line if one of these can be no path: a loop of links, a name that is too long or holds a zero byte."""
    for name, path in paths.items():
        try:
            os.stat(path)
        except (OSError, ValueError) as e:
            if not isinstance(e, OSError) or e.errno in (errno.ELOOP, errno.ENAMETOOLONG):
                fail(f"--{name}={str(path)[:80]}: {getattr(e, 'strerror', None) or e}; expected the path of a file or folder")


def to_disk(path):
    """Force a file, or a folder's list of names, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def publish(temporary, final):
    """Give a finished file or folder its name, once it is on disk."""
    to_disk(temporary)
    os.replace(temporary, final)
    to_disk(Path(final).parent)


@contextlib.contextmanager
def replacing(path, temporary=None):
    """
    A binary file open for writing that becomes `path` when all is on disk: a reader sees the old content or the new. After
    an error nothing is left of it. temporary: its name until then.
    """
    temporary = Path(temporary or f"{path}.{os.getpid()}.tmp")  # others may write the same file
    try:
        with open(temporary, "wb", buffering=1 << 21) as f:  # written in large pieces, it lies in large pages
            yield f
        publish(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_atomic(path, text):
    """Replace a small text file so that a reader sees the old content or the new, never a part."""
    with replacing(path) as f:
        f.write(text.encode())


def read_json(path):
    """Return the object in a JSON file, {} if the file can't be read."""
    try:
        return read_json_file(path, MAX_JSON)
    except (OSError, ValueError):
        return {}


def stamp(path):
    """What changes when a file is written. Raises OSError."""
    found = os.stat(path)
    return found.st_ino, found.st_size, found.st_mtime_ns


def why(error):
    """What an OSError says to a user."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return "the disk is full" if full else error.strerror or str(error).splitlines()[0]


def sha256(*paths):
    """Hex sha256 of files, one behind the other."""
    digest = hashlib.sha256()
    for path in paths:
        with open_untrusted(path) as f:
            while chunk := f.read(1 << 20):
                digest.update(chunk)
    return digest.hexdigest()
