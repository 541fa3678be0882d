"""Files of strangers: what is opened, how much of it is read, and the one line that a failed reader becomes."""
import errno
import json
import os
import socket

import pytest

from configurator import fail
from engine import untrusted
from tests.test_export import refused


def odd_files(folder):
    """Yield the path of one of each kind of file that has no end, or that waits for a writer."""
    os.mkfifo(folder / "fifo")
    yield folder / "fifo"
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(folder / "socket"))
    yield folder / "socket"
    server.close()
    for name, target in (("zero", "/dev/zero"), ("linked fifo", "fifo"), ("tty", "/dev/tty")):
        (folder / name).symlink_to(target)
        yield folder / name
    (folder / "folder").mkdir()
    yield folder / "folder"


def test_only_regular_files_are_opened(tmp_path):
    for path in odd_files(tmp_path):
        for read in (untrusted.open_untrusted, lambda p: untrusted.read_untrusted(p, 9), untrusted.read_json_file):
            with pytest.raises(OSError) as e:
                read(path)
            assert e.value.strerror == "not a regular file" and e.value.filename == str(path)
    (tmp_path / "file").write_bytes(b"123456789")
    (tmp_path / "link").symlink_to("file")
    with untrusted.open_untrusted(tmp_path / "link") as f:
        assert f.read() == b"123456789"


def test_a_file_beyond_its_limit_is_not_read(tmp_path):
    (tmp_path / "file").write_bytes(b"123456789")
    assert untrusted.read_untrusted(tmp_path / "file", 9) == b"123456789"
    with open(tmp_path / "sparse", "wb") as f:
        f.truncate(1 << 40)
    for path, limit in ((tmp_path / "file", 8), (tmp_path / "sparse", 1 << 30), ("/proc/self/maps", 5)):  # that has size 0
        with pytest.raises(OSError) as e:
            untrusted.read_untrusted(path, limit)
        assert e.value.errno == errno.EFBIG and f"{limit:,}" in e.value.strerror


@pytest.mark.parametrize("text, count", [("[1, 2, 3]", 3), ('{"a": "b, [c], {"}', 1), ('["\\\\", "\\",,,"]', 2), ('["cut, off', 1)])
def test_values_of_json_are_counted_outside_strings(text, count):
    assert untrusted.count_values(text.encode()) == count


def test_json_of_too_many_values_is_refused_before_they_are_made(tmp_path):
    many = b"[" + b"[]," * untrusted.MAX_VALUES + b"[]]"
    with pytest.raises(ValueError, match="values in one JSON text"):
        untrusted.parse_json(many)
    text = "a, [b], {c} and so on" * 500_000
    assert untrusted.parse_json(json.dumps([text, text]).encode()) == [text, text]
    with pytest.raises(ValueError, match="nested too deeply"):
        untrusted.parse_json(b"[" * 200_000)


def test_whatever_a_reader_raises_is_one_line(capsys):
    class Panic(BaseException):
        """What pyo3 raises is no Exception."""

    causes = [(Panic("index out of bounds\nat line 7"), "(Panic: index out of bounds)"), (KeyError("dim"), "(KeyError: 'dim')"),
              (ValueError("odd"), "(odd)"), (MemoryError(), "more memory than there is"), (StopIteration(), "StopIteration"),
              (RecursionError("x"), "nested too deeply"), (OSError(errno.EIO, "Input/output error"), "(Input/output error)")]
    for error, words in causes:
        def read(error=error):
            with untrusted.reading("a.model", "a vocabulary", fail):
                raise error

        line = refused(capsys, read)
        assert line.startswith("error: a.model: cannot be read as a vocabulary (") and words in line and line.count("\n") == 1
    for error in (KeyboardInterrupt, SystemExit, ModuleNotFoundError, BrokenPipeError):
        with pytest.raises(error), untrusted.reading("a.model", "a vocabulary", fail):
            raise error
