"""Replace files so that a crash leaves the complete old or new file; hash files."""
import contextlib
import errno
import hashlib
import os
from pathlib import Path

from configurator import fail
from engine.system import to_disk
from engine.untrusted import open_untrusted


def refuse_impossible_paths(**paths):
    """
    Exit with one line if a path can't exist: a loop of links, too long, or with a zero byte.
    paths: {setting that gives the path: path}.
    """
    for name, path in paths.items():
        try:
            os.stat(path)
        except (OSError, ValueError) as e:
            if isinstance(e, ValueError) or e.errno in (errno.ELOOP, errno.ENAMETOOLONG):
                fail(f"--{name}={str(path)[:80]}: {getattr(e, 'strerror', e)}; "
                     "expected the path of a file or folder")


def publish(temporary, final):
    """
    Rename a finished file or folder to its final name, after forcing the file, or the folder's
    list of names, to disk. The files in a folder must already be on disk.
    """
    to_disk(temporary)
    os.replace(temporary, final)
    to_disk(Path(final).parent)


@contextlib.contextmanager
def replacing_all():
    """
    Yield writing(path), which opens a temporary file for writing bytes (use it in a `with`). At the
    end of the outer block all temporary files are on disk: rename each to its `path`. After an
    error in the block, delete them and leave the old files.
    """
    renames = []

    @contextlib.contextmanager
    def writing(path):
        if os.path.isdir(path):  # renaming would fail, maybe after other renames
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        # The name has the process id, because several processes may write the same file.
        temporary = Path(f"{path}.{os.getpid()}.tmp")
        renames.append((temporary, path))
        # Large writes make Linux cache the file in large pages: fewer page faults when mapped.
        with open(temporary, "wb", buffering=1 << 21) as f:
            yield f
        to_disk(temporary)

    try:
        yield writing
        for temporary, path in renames:
            os.replace(temporary, path)
            to_disk(Path(path).parent)
    except BaseException:
        for temporary, _ in renames:
            temporary.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def replacing(path):
    """
    Open a temporary file for writing bytes, and rename it to `path` at the end of the block, so
    that readers see the old content or the new. After an error, delete it.
    """
    with replacing_all() as writing, writing(path) as f:
        yield f


def write_atomic(path, text):
    """Replace a small text file so that readers see the old content or the new, never a mix."""
    with replacing(path) as f:
        f.write(text.encode())


def stamp(path):
    """
    Return (inode, size in bytes, time of the last write in ns) of a file; at least one of them
    changes with every write. Raises OSError.
    """
    found = os.stat(path)
    return found.st_ino, found.st_size, found.st_mtime_ns


def sha256(*paths):
    """Return the hex SHA-256 of the concatenation of files."""
    digest = hashlib.sha256()
    for path in paths:
        with open_untrusted(path) as f:
            while chunk := f.read(1 << 20):
                digest.update(chunk)
    return digest.hexdigest()
