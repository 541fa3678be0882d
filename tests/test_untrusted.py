"""
Files of strangers: which ones are opened, how much of them is read, and the one-line error of a
reader that fails.
"""
import errno
import json
import lzma
import os
import socket
import struct
import sys
import zipfile

import numpy as np
import pytest
import torch

from configurator import fail
from data import Dataset
from engine import untrusted
from engine.text import prepare
from engine.training import checkpoint
from tests import mutated_files
from tests.test_export import refused
from tokenizer import Tokenizer


def odd_files(folder):
    """Yield a path of each kind of file that has no end or that waits for a writer."""
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
        for read in (untrusted.open_untrusted, lambda p: untrusted.read_untrusted(p, 9),
                     untrusted.read_json):
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
    # /proc/self/maps has content, although its size is 0.
    for path, limit in ((tmp_path / "file", 8), (tmp_path / "sparse", 1 << 30),
                        ("/proc/self/maps", 5)):
        with pytest.raises(OSError) as e:
            untrusted.read_untrusted(path, limit)
        assert e.value.errno == errno.EFBIG and f"{limit:,}" in e.value.strerror


@pytest.mark.parametrize("text, count", [
    ("[1, 2, 3]", 3), ('{"a": "b, [c], {"}', 1), ('["\\\\", "\\",,,"]', 2), ('["cut, off', 1)])
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
        """Like the exception that pyo3 raises, this is not an Exception."""

    causes = [(Panic("index out of bounds\nat line 7"), "(Panic: index out of bounds)"),
              (KeyError("dim"), "(KeyError: 'dim')"), (ValueError("odd"), "(odd)"),
              (MemoryError(), "(there is not enough memory)"), (StopIteration(), "StopIteration"),
              (RecursionError("x"), "nested too deeply"),
              (OSError(errno.EIO, "Input/output error"), "(Input/output error)"),
              (OSError(errno.ENOSPC, "No space left on device"), "(the disk is full)"),
              (OSError("process 1: odd"), "(process 1: odd)"), (OSError(), "(OSError: )")]
    for error, words in causes:
        def read(error=error):
            with untrusted.reading("a.model", "a vocabulary", fail):
                raise error

        line = refused(capsys, read)
        assert line.startswith("error: a.model: cannot be read (")
        assert words in line
        assert line.endswith("; expected a vocabulary\n")
    for error in (KeyboardInterrupt, SystemExit, ModuleNotFoundError, BrokenPipeError):
        with pytest.raises(error), untrusted.reading("a.model", "a vocabulary", fail):
            raise error


# ---- prepared data

@pytest.fixture
def prepared(tmp_path):
    mutated_files.prepared(tmp_path)
    return tmp_path


@pytest.mark.parametrize("changes, said", [
    ({"dtype": "O"}, "dtype='O'"),
    ({"dtype": "<u2"}, "dtype='<u2'"),
    ({"dtype": "float32"}, "dtype='float32'"),
    ({"dtype": ["uint16"]}, "dtype=['uint16']"),
    ({"dtype": "uint32"}, "bytes, expected"),
    ({"train_tokens": -1}, "train_tokens=-1"),
    ({"train_tokens": 2.5}, "train_tokens=2.5"),
    ({"train_tokens": 0}, "train_tokens=0"),
    ({"val_tokens": 1}, "bytes, expected"),
    ({"train_documents": 0}, "train_documents=0"),
    ({"train_documents": 1 << 40}, "more documents than tokens"),
    ({"val_bytes": 10 ** 40}, "val_bytes=1000"),
    ({"vocab_size": 258}, "not what its meta.json records"),
    ({"tokenizer": "../tokenizer.json"}, "tokenizer='../tokenizer.json'"),
    ({"version": []}, "version []"),
    ({"fingerprint": None}, "fingerprint=None"),
    ({"train_documents": None}, "train_documents=None"),
])
def test_what_meta_json_says_of_prepared_data_is_checked(changes, said, prepared, capsys):
    prepare.load(prepared)
    meta = json.loads((prepared / "meta.json").read_text())
    (prepared / "meta.json").write_text(json.dumps(meta | changes))
    assert said in refused(capsys, prepare.load, prepared)


@pytest.mark.parametrize("text", [b"", b"[]", b"{}", b"\xff", b"[" * 9999, b"3", b'{"version": 1}'])
def test_a_meta_json_that_is_none(text, prepared, capsys):
    """A meta.json with other content than the description of prepared data is refused."""
    (prepared / "meta.json").write_bytes(text)
    assert "expected prepared data" in refused(capsys, prepare.load, prepared)


@pytest.mark.parametrize("small", [True, False])
def test_a_token_beyond_the_vocabulary_is_refused_whatever_the_size_of_the_data(
        small, prepared, capsys, monkeypatch):
    """
    Large data is not scanned when it is loaded. Instead, each batch of it is checked, whatever
    --checks is.
    """
    tokens = np.fromfile(prepared / "train.bin", "<u2")
    tokens[5:] = 259
    tokens.tofile(prepared / "train.bin")
    mutated_files.fitting_meta(prepared)
    if small:
        assert "holds the token 259, expected ids below the vocabulary's size 259" in refused(
            capsys, prepare.load, prepared)
        return
    monkeypatch.setattr("engine.text.prepared.CHECKED_AT_ONCE", 0)
    dataset = Dataset(prepare.load(prepared), 16, 2, 2, 1)
    assert "holds the token 259" in refused(capsys, dataset.batch, 0)
    assert "holds the token 259" in refused(
        capsys, lambda: [*dataset.eval_batches("train", 64, 64)])
    assert "holds the token 259" in refused(capsys, dataset.probe_batches)


# ---- a pipe, a device or a folder in place of any file of a format

# Readers skip these files if they can't be read.
OPTIONAL = {"generation_config.json", "best", "latest", "trainer.json"}


@pytest.mark.parametrize("name", [
    "hugging face", "hugging face in shards", "meta .pth", "checkpoint", "prepared data",
    "log.jsonl", "yaml config", "tokenizer.model", "labelled .jsonl", "llama2.c v1", "gguf",
    "txt.gz", "parquet"])
def test_a_pipe_or_a_device_in_place_of_a_file_is_refused_and_not_waited_for(name, tmp_path, capfd):
    make, read = mutated_files.FORMATS[name]
    (tmp_path / "m").mkdir()
    files = [path for path in sorted({*make(tmp_path / "m")}) if path.suffix != ".lock"]
    for path in files:
        data = path.read_bytes()
        for kind in "fifo", "/dev/zero", "folder":
            path.unlink()
            if kind == "folder":
                path.mkdir()
            elif kind == "fifo":
                os.mkfifo(path)
            else:
                path.symlink_to(kind)
            try:
                read(tmp_path / "m")
                assert path.name in OPTIONAL, (path, kind)
            except SystemExit as e:
                assert e.code == 2 and capfd.readouterr().err.count("\n") == 1, (path, kind)
            path.rmdir() if kind == "folder" else path.unlink()
            path.write_bytes(data)


def test_a_checkpoints_files_are_names_in_its_own_folder(tmp_path, capsys):
    (tmp_path / "run").mkdir()
    mutated_files.run_files(tmp_path / "run")
    (tmp_path / "secret").write_bytes(b"x")
    step, best = tmp_path / "run/checkpoints/step_00000001", tmp_path / "run/best"
    manifest = json.loads((step / "checkpoint.json").read_text())
    for name in "../../../secret", str(tmp_path / "secret"), "..", "":
        outside = manifest["files"] | {name: [1, "0" * 64]}
        (step / "checkpoint.json").write_text(json.dumps(manifest | {"files": outside}))
        assert not checkpoint.manifest(step) and not checkpoint.complete(step)
    (step / "checkpoint.json").write_text(json.dumps(manifest))
    for name in f"../../{tmp_path.name}/run/checkpoints/step_00000001", str(step), "..":
        best.write_text(name)
        assert checkpoint.pointer(tmp_path / "run", "best") is None
    best.write_text(step.name)
    assert checkpoint.pointer(tmp_path / "run", "best") == step


# ---- small files, large memory

def memory_of(read, *arguments):
    """Return (exit code, stderr, growth of peak memory in MB) of a call in a forked process."""
    def run(pipe):
        file = open(pipe, "wb", buffering=0)
        os.dup2(file.fileno(), 2)
        # pytest has replaced sys.stderr by its own file.
        sys.stderr = open(2, "w", encoding="utf-8", errors="replace", buffering=1)
        before = mutated_files.peak()
        try:
            read(*arguments)
            code = 0
        except SystemExit as e:
            code = e.code
        except BaseException as e:
            sys.stderr.write(repr(e))
            code = 1
        os.write(file.fileno(), b"\n%d %d" % (code, mutated_files.peak() - before))

    ours, theirs = os.pipe()
    child = os.fork()
    if not child:
        try:
            run(theirs)
        finally:
            os._exit(0)
    os.close(theirs)
    with os.fdopen(ours, "rb") as file:
        *said, last = file.read().decode().split("\n")
    os.waitpid(child, 0)
    return int(last.split()[0]), "\n".join(said), int(last.split()[1])


def gguf_of_small_numbers(path):
    """Write a GGUF file with 64 MB of lists in its metadata that no reader uses."""
    mutated_files.FORMATS["gguf"][0](path.parent)
    key = b"some.list"
    with open(path.parent / "m.gguf", "rb") as f:
        data = f.read()
    head = data[:16] + struct.pack("<Q", struct.unpack_from("<Q", data, 16)[0] + 16)
    entries = b"".join(
        struct.pack("<Q", len(key) + 1) + key + b"%c" % (97 + n)
        + struct.pack("<IIQ", 9, 0, 1 << 22) + bytes(1 << 22) for n in range(16))
    path.write_bytes(head + entries + data[24:])


def aliases(path):
    levels = "abcdefghi"
    path.write_text("dim: [&a [x,x,x,x,x,x,x,x,x,x]" + "".join(
        f", &{b} [{','.join(['*' + a] * 10)}]" for a, b in zip(levels, levels[1:])) + "]")


def one_text_in_all_rows(path):
    import pyarrow
    from pyarrow import parquet
    texts = pyarrow.DictionaryArray.from_arrays(
        np.zeros(16, "i4"), [os.urandom(1 << 23).hex()])  # 16 MB, which compress badly
    parquet.write_table(pyarrow.table({"text": texts}), path, compression="zstd")


def many_values(path):
    path.write_bytes(b'{"text": "a", "b": [' + b"[]," * 20_000_000 + b"[]]}\n")


def zeros(path):
    with lzma.open(path, "wb", preset=0) as f:
        for _ in range(300):
            f.write(bytes(1 << 20).replace(b"\0", b"a"))


def stride_of_zero(path):
    mutated_files.of_meta(path.parent)
    weights = torch.load(path)
    name = "tok_embeddings.weight"
    weights[name] = torch.zeros(1).expand(1 << 18, 1 << 18)
    torch.save(weights, path)


def packed_zeros(path):
    """Write a file like torch.save's, compressed: 200 MB of zeros in 200 KB."""
    mutated_files.of_meta(path.parent)
    weights = torch.load(path) | {"more": torch.zeros(50_000_000)}
    torch.save(weights, path)
    with zipfile.ZipFile(path) as old:
        entries = [(entry.filename, old.read(entry)) for entry in old.infolist()]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as new:
        for name, content in entries:
            new.writestr(name, content)


def long_template(path):
    """Write a tokenizer.json that puts 10,000 times 100,000 tokens before a text."""
    made = json.loads(mutated_files.byte_level(path.parent).data)["tokenizer"]
    special = {"x": {"id": "x", "ids": [0] * 100_000, "tokens": ["x"] * 100_000}}
    made["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "x", "type_id": 0}}] * 10_000, "pair": [],
        "special_tokens": special}
    path.write_text(json.dumps(made))


def empty_pieces(path):
    path.write_bytes(b"\n\0" * 8_000_000)


def read_model(path):
    mutated_files.read_model(path.parent if path.suffix == ".pth" else path)


def read_config(path):
    mutated_files.configurator.read_file(str(path))


@pytest.mark.parametrize("name, make, read, said", [
    ("a.gguf", gguf_of_small_numbers, read_model, ""),
    ("consolidated.00.pth", stride_of_zero, read_model, "its tensors need more than"),
    ("consolidated.00.pth", packed_zeros, read_model, "compressed"),
    ("a.yaml", aliases, read_config, "more than 10,000 values"),
    ("a.parquet", one_text_in_all_rows, lambda p: mutated_files.read_table(p.parent), ""),
    ("a.jsonl", many_values, lambda p: mutated_files.read_table(p.parent),
     "values in one JSON text"),
    ("a.txt.xz", zeros, lambda p: mutated_files.read_table(p.parent),
     "expected at most 200 for each"),
    ("a.json", long_template, Tokenizer.load, "post_processor is longer"),
    ("a.model", empty_pieces, Tokenizer.load, "too many pieces"),
])
def test_a_small_file_takes_little_memory(name, make, read, said, tmp_path):
    folder = tmp_path / "m"
    folder.mkdir()
    make(folder / name)
    code, line, megabytes = memory_of(read, folder / name)
    assert (code, line.count("error: ")) == ((2, 1) if said else (0, 0)), line
    assert said in line, line
    assert megabytes < 500


# ---- mutants

@pytest.mark.parametrize("name", mutated_files.FORMATS)
def test_some_mutants_of_each_format_are_read_or_end_in_one_line(name, tmp_path):
    """A sample of the mutants of tests/long_mutated_files.py."""
    wrong, refused, most = mutated_files.mutate(
        name, tmp_path / "m", range(10 if name == "checkpoint" else 25))
    assert not wrong and refused and most < mutated_files.MEMORY, "\n".join(wrong)
