"""
Convert a file of any kind to UTF-8 text. Plain UTF-8 is read in place; any other file is copied
once.

    .gz .bz2 .xz .zst      unpacked; recognised by their first bytes, regardless of their names
    another encoding       converted if its bytes identify it for certain (engine/text/encodings.py)
    .csv .tsv .parquet     the text column is written to a .jsonl file (engine/text/tables.py)
    .json                  a list of objects is converted like a table; a file with one object per
                           line is read like .jsonl

Any other kind of file raises Unfit, with a reason.
"""
import bz2
import codecs
import gzip
import lzma
import os
import re
import shlex
import shutil
import sys
import zlib
from pathlib import Path

from engine.files import replacing
from engine.text import blocks, conversations
from engine.text.blocks import NotUTF8, Unfit, progress
from engine.text.encodings import damaged, decoded, encoding
from engine.text.tables import (check_growth, column_names, find_column, from_csv, from_list,
                                from_parquet)
from engine.untrusted import open_untrusted, reason

HEAD = 1 << 16    # bytes that identify the kind of a file
SAMPLE = 1 << 20  # bytes that identify the encoding of a file
PACKED = {".gz": 3, ".bz2": 4, ".xz": 4, ".zst": 3}  # typical unpacked size / packed size
# the program that unpacks what a class of Python reads
UNPACKERS = {"GzipFile": "gzip", "BZ2File": "bzip2", "LZMAFile": "xz", "ZstdFile": "zstd"}
TABLES = (".csv", ".tsv")
LINES = (".jsonl", ".ndjson")
# Suffixes of files in a folder that are always read; has_documents examines TABLES and .json first.
DOCUMENTS = (".txt", *LINES, ".parquet")
DAMAGED = (EOFError, OSError, zlib.error, lzma.LZMAError)  # errors of unpacking a damaged file

PLAIN = "; save it as plain text"
UNPACK = "; unpack it first"
BINARY = [  # (pattern of the first bytes, "kind of file; what to do")
    (rb"\x89PNG\r\n", "a PNG image"), (rb"\xff\xd8\xff", "a JPEG image"), (rb"GIF8", "a GIF image"),
    (rb"II\*\0", "a TIFF image"), (rb"\{\\rtf", "an RTF document" + PLAIN),
    (rb"%PDF-", "a PDF document; pdftotext, for example, extracts its text"),
    (rb"\xd0\xcf\x11\xe0", "an old Office document" + PLAIN), (rb"GGUF", "a GGUF model"),
    (rb"SQLite format 3\0", "an SQLite database"), (rb"\x93NUMPY", "a NumPy array"),
    (rb"\x89HDF\r\n", "an HDF5 file"), (rb"\x7fELF|MZ\x90", "a program"),
    (rb"7z\xbc\xaf\x27\x1c", "a 7z archive" + UNPACK), (rb"Rar!", "a RAR archive" + UNPACK),
    (rb"ID3|OggS", "a sound"), (rb"RIFF", "a sound, film or image"),
    (rb".{4}ftyp", "a film or image"), (rb"wOF2", "a font"), (rb"\0asm", "WebAssembly"),
    (rb"\xca\xfe\xba\xbe", "a compiled program"),
    (rb"PK\x05\x06", "an empty zip"), (rb"ARROW1", "an Arrow file"), (rb"Obj\x01", "an Avro file"),
    (rb"\x80[\x02-\x05]", "pickled"), (rb".{4}\0{4}\{\"", "a safetensors model"),
    (rb"\x28\xb5\x2f\xfd",
     "packed by Zstandard, which Python reads from 3.14 on; unpack it first: zstd -d {path}"),
    (rb".{257}ustar", "a tar archive; unpack it first: tar xf {path}"),
]
ZIPPED = [  # (name in a zip archive, "kind of file; what to do")
    (b"word/", "a Word document" + PLAIN), (b"xl/", "an Excel table; save it as CSV"),
    (b"ppt/", "a PowerPoint document"), (b"application/epub", "an EPUB book" + PLAIN),
    (b"application/vnd.oasis", "an OpenDocument file" + PLAIN), (b"data.pkl", "a PyTorch file"),
    (b".npy", "NumPy arrays"), (b"META-INF/", "a Java program"),
    (b"", "a zip archive; unpack it first: unzip {path}"),  # b"" matches all others
]


# ---- the kind of a file --------------------------------------------------------------------------

def open_unpacked(path):
    """
    Open a file and return (stream of its unpacked content, raw file).

    The position of the raw file shows the progress. Both are the same object if the file is not
    packed.
    """
    raw = open_untrusted(path)
    magic = raw.read(6)
    raw.seek(0)
    if magic[:3] == b"\x1f\x8b\x08":
        return gzip.open(raw), raw
    if re.match(rb"BZh[1-9]1A", magic):
        return bz2.open(raw), raw
    if magic == b"\xfd7zXZ\0":
        return lzma.open(raw), raw
    if magic[:4] == b"\x28\xb5\x2f\xfd" and sys.version_info >= (3, 14):
        from compression import zstd
        return zstd.open(raw), raw
    return raw, raw


def unpacker(path):
    """Return the name of the program that unpacks a file, "" if it is not packed."""
    content, raw = open_unpacked(path)
    with raw, content:
        return UNPACKERS.get(type(content).__name__, "")


def is_packed(path):
    return bool(unpacker(path))


def quoted(path):
    """Return a path quoted for a shell."""
    return shlex.quote(str(path))


def first_bytes(path):
    """Return the first HEAD bytes of the unpacked content, fewer if the file is damaged."""
    found = b""
    content, raw = open_unpacked(path)
    with raw, content:
        try:
            while len(found) < HEAD and (more := content.read(HEAD - len(found))):
                found += more
        except DAMAGED:
            if content is raw:  # not packed: a disk error
                raise
    return found


def binary_format(first, path):
    """Name the binary format of a file from its first bytes. Return "" if it may be text."""
    if first.startswith(b"PK\x03\x04"):
        words = next(words for name, words in ZIPPED if name in first)
    else:
        words = next((words for magic, words in BINARY if re.match(magic, first, re.S)), "")
    return words.format(path=quoted(path))


def suffix(path):
    """Return the suffix in lower case, ignoring compression: .csv for a.CSV.gz, .txt for a.gz."""
    path = Path(Path(path).name.lower())
    return (Path(path.stem).suffix or ".txt") if path.suffix in PACKED else path.suffix


def is_text(path):
    """Return whether a file looks like text."""
    first = first_bytes(path)
    if not first or binary_format(first, path) or first.startswith(b"PAR1"):
        return False
    is_utf8 = b"\0" not in first and decoded(first, "utf-8") is not None
    return is_utf8 or bool(encoding(first))


def has_documents(path, column):
    """
    Return whether to read a file of a folder as documents, judged by its suffix.

    Tables and .json must also have the text column; if that cannot be determined, return True, so
    that `readable` reports the error.
    """
    end = suffix(path)
    if end not in (*TABLES, ".json"):
        return end in DOCUMENTS
    try:
        text = first_characters(first_bytes(path))
        if end in TABLES:
            return find_column(text, column)[0] is not None
    except (Unfit, OSError):
        return True
    names = "|".join(map(re.escape, column_names(column)))
    has_column = re.search(f'"({names})"\\s*:\\s*"', text) or conversations.LOOKS.search(text)
    return bool(has_column and is_records(text))


def first_characters(first):
    """
    Decode the first bytes of a file and remove the byte order mark.

    Invalid bytes are dropped, so the ASCII characters remain even if the file is not UTF-8.
    """
    name = encoding(first) if b"\0" in first else "utf-8"
    return first.decode(name or "utf-8", "ignore").lstrip("\ufeff")


def first_text(path):
    """
    Decode the first HEAD bytes of a file, including the \\uXXXX escapes of JSON. Return "" if the
    bytes are not text.
    """
    first = first_bytes(path)
    text = None if b"\0" in first else decoded(first, "utf-8")
    if text is None and (name := encoding(first)):
        text = decoded(first, name)
    if suffix(path) in (".json", ".jsonl"):
        text = re.sub(r"\\u([0-9a-fA-F]{4})", lambda found: chr(int(found[1], 16)), text or "")
    return text or ""


def is_list(text):
    """Return whether the text starts like a JSON list of objects."""
    return bool(re.match(r"\s*\[\s*\{", text))


def is_records(text):
    """Return whether the text starts like a JSON list of objects, or like lines of objects."""
    # The first line starts with { and ends with }, or continues beyond the first HEAD bytes.
    return is_list(text) or bool(re.match(r"\s*\{[^\n]*(\}\s*\n|$)", text))


# ---- from any file to .txt or .jsonl -------------------------------------------------------------

def readable(path, copy, column, scan, in_folder=True):
    """
    Return (path of a UTF-8 .txt or .jsonl file, result of scan(path), what was done, in words).

    The path is that of the file itself or of a copy. copy: path of the copies without their
    suffixes. in_folder: whether the user named a folder that holds the file, as a source tree may
    have .json files that are text like the rest. Raises Unfit for a file without text, OSError for
    one that cannot be opened or copied.
    """
    try:
        return read_any(path, copy, column, scan, in_folder)
    except Exception as e:  # for a damaged file, packages may raise any type
        if isinstance(e, Unfit) or isinstance(e, OSError) and e.errno:
            raise
        raise Unfit(f"cannot be read ({reason(e)})",
                    "expected text, or a file that holds some") from e


def read_any(path, copy, column, scan, in_folder):
    """Do the work of `readable`. A damaged file may raise any exception."""
    here, done = path, []  # the newest copy, and how it was made

    def step(words, new):
        nonlocal here
        if here != path:
            os.unlink(here)
        here = new
        done.append(words)

    first, end = first_bytes(path), suffix(path)
    kind, _, advice = binary_format(first, path).partition("; ")
    if kind:
        raise Unfit(kind, advice or "expected text")
    has_records = end == ".json" and (
        has_documents(path, column) or not in_folder and is_records(first_characters(first)))
    in_list = has_records and is_list(first_characters(first))
    in_lines = end in LINES or has_records and not in_list
    if is_packed(path):
        step("unpacked", unpack(path, f"{copy}.unpacked{'.jsonl' if in_lines else end}"))
    if first.startswith(b"PAR1"):
        step(*from_parquet(here, column, f"{copy}.jsonl"))
    elif end in TABLES or in_list:
        read = from_csv if end in TABLES else from_list
        try:
            new = read(here, column, f"{copy}.jsonl")
        except NotUTF8 as e:
            step(*convert(here, path, e, f"{copy}.utf8"))
            new = read(here, column, f"{copy}.jsonl")
        step(*new)
    elif in_lines and here.suffix != ".jsonl":
        # `scan` recognises lines of JSON only by the suffix .jsonl: link such a name to the file.
        here = Path(f"{copy}.jsonl")
        try:
            os.symlink(path.resolve(), here)
        except OSError:  # Windows allows only some users to create links
            shutil.copyfile(path, here)
    try:
        found = scan(str(here))
    except NotUTF8 as e:
        step(*convert(here, path, e, f"{copy}.utf8{'.jsonl' if in_lines else '.txt'}"))
        found = scan(str(here))
    return here, found, ", ".join(done)


def unpack(path, copy):
    """Write the unpacked content of a file to `copy`, and return its Path."""
    content, raw = open_unpacked(path)
    with raw, content, replacing(copy) as out, progress("unpacking", os.path.getsize(path)) as bar:
        while True:
            try:
                block = content.read(blocks.BLOCK)
            except DAMAGED as e:
                raise Unfit(f"damaged near byte {raw.tell():,} ({e})") from e
            if not block:
                return Path(copy)
            out.write(block)
            check_growth(out.tell(), path)
            bar.update(raw.tell() - bar.n)


def convert(path, name, problem, copy):
    """
    Convert a file that is not UTF-8, and return (what was done, in words; path of the copy).

    path: the file to convert, perhaps a copy; name: path of the user's file, for messages;
    problem: the NotUTF8 that was raised. Raises Unfit, with a command that converts the file, if
    the encoding is not certain.
    """
    with open_untrusted(path) as f:
        start = max(0, problem.offset - SAMPLE // 2)
        f.seek(start)
        sample = f.read(SAMPLE)
    # Skip the first line of a sample that begins inside the file: it may be incomplete.
    found = encoding(sample[sample.find(b"\n") + 1:] if start else sample)

    def command(program, what):
        """Return a command for the user's shell, whose new file is read like the old one."""
        path, source = Path(name), f"{program} < {quoted(name)}"
        if tool := unpacker(name):
            source = f"{tool} -dc < {quoted(name)} | {program}"
            path = path.with_suffix("") if path.suffix.lower() in PACKED else path
        return f"{source} > {quoted(path.stem + what + suffix(name))}"

    def iconv(words):
        return command(f"iconv {words} -t UTF-8", ".utf8")

    if not found:
        advice = ("its encoding cannot be determined; if you know it, put it in place of "
                  f"LATIN1: {iconv('-f LATIN1')}")
        if problem.byte == 0:
            removing = command("tr -d '\\000'", ".clean")
            advice = f"if it is text, this command removes the zero bytes: {removing}"
        elif damaged(sample):
            advice = ("it is damaged UTF-8; this command leaves out the damaged bytes: "
                      f"{iconv('-c -f UTF-8')}")
        raise Unfit(problem.reason, advice)
    decoder = codecs.getincrementaldecoder(found)()
    offset = utf8_lines = other_lines = 0
    with open_untrusted(path) as f, replacing(copy) as out, \
            progress("converting", os.path.getsize(path)) as bar:
        while True:
            block = f.read(blocks.BLOCK)
            for line in block.split(b"\n"):
                if not line.isascii():
                    # `decoded` accepts a character that is cut off at the end, but not before "\n".
                    is_utf8 = decoded(line + b"\n", "utf-8") is not None
                    utf8_lines += is_utf8
                    other_lines += not is_utf8
            # Lines of UTF-16 and UTF-32 may be valid UTF-8 by chance.
            mixed = utf8_lines > max(10, (utf8_lines + other_lines) / 10)
            if mixed and not found.startswith("UTF-"):
                raise Unfit(f"some of its lines are {found}, others UTF-8",
                            "expected one encoding; convert the parts separately")
            try:
                out.write(decoder.decode(block, not block).encode())
            except UnicodeDecodeError as e:
                byte, at = e.object[e.start], offset + e.start
                raise Unfit(f"{found}, but byte 0x{byte:02x} near offset {at} is not valid in it",
                            "this command leaves such bytes out: "
                            f"{iconv(f'-c -f {found}')}") from e
            if not block:
                return f"{found}, converted", Path(copy)
            offset += len(block)
            bar.update(len(block))
