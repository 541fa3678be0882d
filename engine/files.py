"""Files that a crash leaves whole, and what is said of them."""
import errno
import hashlib
import os
from pathlib import Path


def to_disk(path):
    """Force a file, or a folder's list of names, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomic(path, text):
    """Replace a small text file so that a reader sees the old content or the new, never a part."""
    temporary = Path(f"{path}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8") as f:
            f.write(text)
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    to_disk(Path(path).parent)


def why(error):
    """What an OSError says to a user."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return "the disk is full" if full else error.strerror or str(error).splitlines()[0]


def sha256(path):
    digest = hashlib.sha256()
    with open(path, "rb") as f:
        while chunk := f.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
