"""
The sources of text that `--data`, and SOURCE of data.py, may name.

    stories, stories:N            engine/text/stories.py writes them
    tinystories, tinyshakespeare  engine/text/downloads.py fetches them
    NAME, NAME:ARGUMENT           a module NAME.py in this folder: add one to add a source
    a path                        a file, or a folder of files

A module has one function, `documents(argument)`, which yields each document: a str, or the dict of
a conversation. argument: the text after the colon, or "". The documents are written to a .jsonl
file in the cache, which is prepared like any other file. They are written again when the module,
the argument or --column changes. doc/data.md has an example.
"""
import contextlib
import dataclasses
import hashlib
import importlib
import json
import os
import pkgutil
import re
from pathlib import Path

from configurator import fail  # first: it reports missing packages

from engine.advice import hub
from engine.files import replacing
from engine.text import readers, stories
from engine.text.blocks import Unfit, listed
from engine.text.downloads import DOWNLOADS
from engine.text.tables import column_names, jsonl_text
from engine.untrusted import open_untrusted

STORIES = 60_000   # default number of stories, about 34 MB
STORY_BYTES = 560  # average bytes of a story
FOREIGN = "pyvenv.cfg", "trainer.json", "log.jsonl"  # files in virtual environments and in runs


@dataclasses.dataclass
class Source:
    """A source of text, found but not yet read."""
    text: str                # the source as the user wrote it
    name: str                # prefix of the name of the prepared folder
    identity: list           # JSON that identifies the content; if it changes, prepare again
    size: int                # bytes of text; 0 for stories
    is_exact: bool = True    # whether size is exact, not an estimate
    stories: int = 0         # number of built-in stories
    files: tuple = ()        # paths of the documents; () for stories
    stamps: tuple = ()       # file_stamps of the user's own files
    left_out: str = ""       # description of what was left out of a folder


def find_source(text, cache, column):
    """
    Return the Source that the str `text` names. Fails if there is no such source.

    If it names a module of this folder, write the module's documents to the cache first. cache: a
    resolved Path.
    """
    name, _, argument = text.partition(":")
    if name == "stories":
        count = count_stories(text)
        return Source(text, text.replace(":", ""), [count, stories.GRAMMAR], 0, stories=count)
    if text in DOWNLOADS:
        files = DOWNLOADS[text]
        paths = [cache / text / file for file in files]
        size = sum(size for size, _ in files.values())
        return Source(text, text, list(files.items()), size, files=paths)
    if name in module_names():
        file = generated(name, argument, cache, column)
        identity = [file.parent.name, argument]  # the folder's name has a hash of the module
        return Source(text, name, identity, file.stat().st_size, files=[file])
    files, left_out = text_files(Path(text), cache, column)
    size, stamps = sum(map(unpacked_size, files)), file_stamps(files)
    is_exact = size == sum(path.stat().st_size for path in files)
    name = Path(text).resolve().stem
    return Source(text, name, stamps, size, is_exact, files=files, stamps=stamps, left_out=left_out)


def source_size(text, cache, column):
    """Estimate the bytes of text in a source. Fails if there is no such source."""
    source = find_source(text, cache, column)
    if source.stories:
        return source.stories * STORY_BYTES
    if text in DOWNLOADS:
        return source.size
    return round(sum(unpacked_size(path) * text_share(path, column) for path in source.files))


def count_stories(source):
    """Return N of "stories:N", or the default for "stories"."""
    _, colon, digits = source.partition(":")
    if not colon:
        return STORIES
    if not re.fullmatch("[0-9]{1,9}", digits) or int(digits) < 2:
        fail(f"{source}: expected stories, or stories:N with N from 2 to 999999999")
    return int(digits)


# ---- modules of this folder ----------------------------------------------------------------------

def module_names():
    return {module.name for module in pkgutil.iter_modules(__path__)}


def source_names():
    """Return the names of sources that are not paths."""
    return ["stories", *DOWNLOADS, *sorted(module_names())]


def generated(name, argument, cache, column):
    """Return the .jsonl file with the documents of a module. Write it if it is not in the cache."""
    module = importlib.import_module(f"{__name__}.{name}")
    content = [Path(module.__file__).read_text(encoding="utf-8"), argument, column]
    digest = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]
    path = cache / f"{name}-{digest}" / "documents.jsonl"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        key = column_names(column)[0]
        with replacing(path) as f:
            for document in module.documents(argument):
                record = document if isinstance(document, dict) else {key: document}
                f.write(json.dumps(record).encode() + b"\n")
    return path


# ---- files and folders ---------------------------------------------------------------------------

def text_files(path, cache, column):
    """
    Return (sorted files to read, description of what was left out) of a path.

    The path is a file, or a folder, in which `walk` selects files. Fails if there is no text.
    cache: the resolved Path of a folder to skip.
    """
    files, left_out = walk(path, cache, column) if path.is_dir() else ([path], "")
    if not files:
        more = f"; left out: {left_out}" if left_out else ""
        fail(f"{path}: a folder without text files, and not one that data.py prepared "
             f"(no meta.json){more}")
    if not path.exists():
        names = ", ".join(source_names())
        fail(f"{path}: no such file; expected {names}, a text file, or a folder of text files"
             f"{hub(path, 'dataset')}")
    if not path.is_dir():
        open_untrusted(path).close()  # report a file that cannot be opened before any work is done
    if not any(file.stat().st_size for file in files):
        fail(f"{path}: is empty, expected text")
    return files, left_out


def walk(path, cache, column):
    """
    Return (sorted files to read in a folder and its subfolders, description of what was left out).

    The files to read are the documents (see readers.has_documents). If the other text files are
    larger in total than the documents, as in a source tree, they are read too.
    """
    def stop(e):
        raise e

    documents, others, hidden, folders = [], [], [], []
    for here, inside, names in os.walk(path, onerror=stop):
        for name in sorted(inside):
            if is_foreign(Path(here, name), cache):
                inside.remove(name)
                folders.append(Path(here, name))
        for name in sorted(names):
            file = Path(here, name)
            is_duplicate = file.is_symlink() and is_within(file, path)
            if name.startswith(".") or not file.is_file() or is_duplicate:
                hidden.append(file)
            elif readers.has_documents(file, column):
                documents.append(file)
            else:
                others.append(file)
    size = total_size(documents)
    if total_size(others) > size:
        plain = [file for file in others
                 if readers.suffix(file) not in readers.TABLES and readers.is_text(file)]
        if total_size(plain) > size:
            documents, others = documents + plain, sorted(set(others) - set(plain))
    left_out = []
    kinds = {"folder(s)": folders, "file(s) hidden or of another kind": hidden + others}
    for kind, some in kinds.items():
        if some:
            names = listed(file.relative_to(path) for file in some)
            left_out.append(f"{len(some)} {kind}: {names}")
    return sorted(documents), "; ".join(left_out)


def total_size(files):
    return sum(file.stat().st_size for file in files)


def is_within(link, folder):
    """Return whether the target of a link is inside a folder."""
    return Path(os.path.realpath(link)).is_relative_to(os.path.realpath(folder))


def is_foreign(folder, cache):
    """Return whether to skip a folder: hidden, linked, the cache, installed packages, a run."""
    return (folder.name.startswith(".") or folder.is_symlink() or folder.resolve() == cache
            or folder.name in ("node_modules", "site-packages", "__pycache__", "wandb")
            or folder.name.endswith((".egg-info", ".dist-info"))
            or any((folder / name).exists() for name in FOREIGN))


def file_stamps(files):
    """Return [path, bytes, time of last change in ns] of each file, to detect later changes."""
    stats = [(path, path.stat()) for path in map(Path, files)]
    return [[str(path.resolve()), stat.st_size, stat.st_mtime_ns] for path, stat in stats]


def unpacked_size(path):
    """Return the bytes after unpacking: the size that a .gz file records, otherwise an estimate."""
    size = path.stat().st_size
    if path.suffix == ".gz" and size >= 18:
        with open_untrusted(path) as f:
            f.seek(-4, os.SEEK_END)
            recorded = int.from_bytes(f.read(), "little")
        # The recorded size is modulo 4 GiB, and of the last member only: use it if plausible.
        if size / 2 <= recorded <= 20 * size:
            return recorded
    return size * (readers.PACKED | {".parquet": 2}).get(path.suffix, 1)


def text_share(path, column):
    """Return the fraction of text in the first lines of a .jsonl file; 1 for other files."""
    if path.suffix != ".jsonl":
        return 1
    with open_untrusted(path) as f:
        lines = f.readlines(1 << 20)
    with contextlib.suppress(Unfit):  # reported later, when the file is read
        text_size = sum(len(jsonl_text(line, column, 0)) for line in lines if line.strip())
        return text_size / max(1, sum(map(len, lines)))
    return 1
