"""
A file of any kind → UTF-8 text: what is packed, in another encoding, or a table is copied once; all else is read where it lies.

    .gz .bz2 .xz .zst      unpacked, told by their first bytes, whatever their names
    another encoding       converted where it can be told for certain (engine/text/encodings.py)
    .csv .tsv .parquet     the column that holds the text becomes a .jsonl file, a row a line
    .json                  so does a list of objects; objects one a line are a .jsonl file already

What is none of that ends as Unfit, with a reason.
"""
import bz2
import codecs
import contextlib
import csv
import gzip
import io
import json
import lzma
import os
import re
import shlex
import zlib
from pathlib import Path

from tqdm import tqdm

from engine.text.encodings import damaged, decoded, encoding
from engine.files import replacing
from engine.streams import one_line
from engine.untrusted import MAX_VALUES, SMALL_JSON, NotRegular, count_values, open_untrusted, parse_json, reason

BLOCK = 1 << 22     # bytes of a file in memory at once
HEAD = 1 << 16      # bytes that tell what a file is
SAMPLE = 1 << 20    # bytes that tell its encoding
LONGEST = 1 << 26   # bytes of a line of .jsonl, of a field or an object of a table
MAX_GROWTH = 200    # bytes of text for each byte of a file, packed or a table; text that people wrote packs to a twentieth
GROWTH_FROM = 1 << 26  # bytes of text from which on MAX_GROWTH counts
ROWS = 256          # of a Parquet table that are read at once, fewer where rows may be long:
ROWS_SIZE = 1 << 27  # bytes that these may take, if each of them were as large as its column
PACKED = {".gz": 3, ".bz2": 4, ".xz": 4, ".zst": 3}  # bytes of text in a byte of such a file, about
TABLES = (".csv", ".tsv")
LINES = (".jsonl", ".ndjson")
DOCUMENTS = (".txt", *LINES, ".parquet")  # what a folder is read for; of tables and .json those that have the column

BINARY = [  # first bytes, and what such a file is
    (b"\x89PNG\r\n", "a PNG image"), (b"\xff\xd8\xff", "a JPEG image"), (b"GIF8", "a GIF image"), (b"II*\0", "a TIFF image"),
    (b"%PDF-", "a PDF document; pdftotext, for one, gets its text"), (b"{\\rtf", "an RTF document; save it as plain text"),
    (b"\xd0\xcf\x11\xe0", "an old Office document; save it as plain text"), (b"GGUF", "a GGUF model"),
    (b"SQLite format 3\0", "an SQLite database"), (b"\x93NUMPY", "a NumPy array"), (b"\x89HDF\r\n", "an HDF5 file"),
    (b"\x7fELF", "a program"), (b"MZ\x90", "a program"), (b"7z\xbc\xaf\x27\x1c", "a 7z archive; unpack it first"),
    (b"Rar!", "a RAR archive; unpack it first"), (b"ID3", "a sound"), (b"OggS", "a sound"), (b"RIFF", "a sound, film or image"),
    (b"wOF2", "a font"), (b"\0asm", "WebAssembly"), (b"\xca\xfe\xba\xbe", "a compiled program"), (b"PK\x05\x06", "an empty zip"),
    (b"ARROW1", "an Arrow file"), (b"Obj\x01", "an Avro file"), (b"\x80\x02", "pickled"), (b"\x80\x03", "pickled"),
    (b"\x80\x04", "pickled"), (b"\x80\x05", "pickled"),
]
ZIPPED = [  # names in a zip, and what it is then
    (b"word/", "a Word document; save it as plain text"), (b"xl/", "an Excel table; save it as CSV"),
    (b"ppt/", "a PowerPoint document"), (b"application/epub", "an EPUB book; save it as plain text"),
    (b"application/vnd.oasis", "an OpenDocument file; save it as plain text"), (b"data.pkl", "a PyTorch file"),
    (b".npy", "NumPy arrays"), (b"META-INF/", "a Java program"), (b"", "a zip archive; unpack it first: unzip {path}"),
]

class Unfit(Exception):
    """
    A source that cannot be prepared, and why, in one line. (Not `fail` at once: a progress bar has to end first.) advice:
    what to do about it.
    """

    def __init__(self, reason, advice=""):
        super().__init__(reason + f"; {advice}" * bool(advice))
        self.reason = reason


class NotUTF8(Unfit):
    """A file holds a byte that no text in UTF-8 has."""

    def __init__(self, byte, offset):
        super().__init__(f"not UTF-8 (byte 0x{byte:02x} at offset {offset})" if byte else
                         f"no text (a zero byte at offset {offset})", "expected UTF-8 text")
        self.byte, self.offset = byte, offset


# ---- what a file is ---------------------------------------------------------------------------------------------

def opened(path):
    """(a file open for reading what another holds, unpacked; that file itself, whose position tells how far that is)."""
    raw = open_untrusted(path)
    magic = raw.read(6)
    raw.seek(0)
    if magic[:3] == b"\x1f\x8b\x08":
        return gzip.open(raw), raw
    if re.match(rb"BZh[1-9]1A", magic):
        return bz2.open(raw), raw
    if magic == b"\xfd7zXZ\0":
        return lzma.open(raw), raw
    if magic[:4] == b"\x28\xb5\x2f\xfd":
        try:
            from compression import zstd  # of Python 3.14
        except ImportError:
            raw.close()
            raise Unfit("packed by Zstandard, which Python reads from 3.14 on", f"unpack it first: zstd -d {quoted(path)}"
                        ) from None
        return zstd.open(raw), raw
    return raw, raw


def quoted(path):
    return shlex.quote(str(path))


def head(path):
    """The first HEAD bytes of what a file holds, unpacked; of a damaged one as many as there are."""
    found = b""
    f, raw = opened(path)
    with raw, f:
        try:
            while len(found) < HEAD and (more := f.read(HEAD - len(found))):
                found += more
        except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile):
            pass
        except OSError:  # as bz2 has it
            if f is raw:
                raise
    return found


def binary(first, path):
    """What a file is that begins so and is no text, in words; "" where it may be one."""
    if first[:4] == b"PK\x03\x04":
        return next(words for sign, words in ZIPPED if sign in first).format(path=quoted(path))
    if first[257:262] == b"ustar":
        return f"a tar archive; unpack it first: tar xf {quoted(path)}"
    if first[8:10] == b'{"' and not any(first[4:8]):
        return "a safetensors model"
    if first[4:8] == b"ftyp":
        return "a film or image"
    return next((words for sign, words in BINARY if first.startswith(sign)), "")


def suffix(path):
    """What the name of a file ends in but for that of the packing, in lower case: .txt of a.TXT.gz."""
    path = Path(Path(path).name.lower())
    return (Path(path.stem).suffix or ".txt") if path.suffix in PACKED else path.suffix


def is_text(path):
    """Whether a file looks like text."""
    try:
        first = head(path)
    except Unfit:
        return False
    if binary(first, path) or first.startswith(b"PAR1"):
        return False
    try:
        return bool(first) and b"\0" not in first and decoded(first, "utf-8") is not None or bool(encoding(first))
    except Unfit:
        return False


def has_documents(path, column):
    """Whether a folder is read for a file: its name says so, or it is a table or .json that has the column."""
    end = suffix(path)
    if end not in (*TABLES, ".json"):
        return end in DOCUMENTS
    text = beginning(head(path))
    if end in TABLES:
        try:
            return find_column(text, column)[0] is not None
        except Unfit:  # `readable` says why
            return True
    names = "|".join(map(re.escape, columns(column)))
    lines = re.match(r"\s*\{[^\n]*(\}\s*\n|$)", text)  # or one that is longer than that
    return bool(re.search(f'"({names})"\\s*:\\s*"', text) and (lines or is_list(text)))


def beginning(first):
    """The first bytes of a file as text, without a byte order mark; under an encoding that is not known their ASCII."""
    name = encoding(first) if b"\0" in first else "utf-8"
    return first.decode(name or "utf-8", "ignore").lstrip("\ufeff")


def is_list(text):
    """Whether a file that begins so is a JSON list of objects."""
    return bool(re.match(r"\s*\[\s*\{", text))


def columns(column):
    """The names that the column of the texts may have."""
    return ["text", "story"] if column == "text" else [column]


def find_column(first, column):
    """
    (the delimiter, the place of the column of the texts, all names) of a table that begins so; None where there is none. A
    single name tells no delimiter: the tab it is then, as texts have commas. Raises Unfit where two columns have the name.
    """
    header, names = first.lstrip("\ufeff").splitlines()[:1], []
    for mark in "\t", ",", ";", "|":
        row = [name.strip() for name in next(csv.reader(header, delimiter=mark, skipinitialspace=True), [])]
        names = max(names, row, key=len)
        name = pick(row, column)
        if name is not None:
            return mark, row.index(name), row
    return None, None, names


def pick(names, column):
    """Return the column of `names` that holds the texts, or None; outer blanks are ignored. Raises Unfit for two."""
    stripped = [str(name).strip() for name in names]
    for name in columns(column):
        if stripped.count(name.strip()) > 1:
            raise Unfit(f"{stripped.count(name.strip())} columns are called {name.strip()!r}", "rename all but one")
        if name.strip() in stripped:
            return names[stripped.index(name.strip())]
    return None


# ---- from any file to .txt or .jsonl ----------------------------------------------------------------------------

def readable(path, copy, column, scan):
    """
    (the .txt or .jsonl in UTF-8 that holds the text of a file: itself or a copy; what `scan` says of it; what was done, in
    words). copy: the path of copies, but for their suffixes. Raises Unfit where there is no text.
    """
    try:
        return read_any(path, copy, column, scan)
    except NotRegular as e:
        raise Unfit(e.strerror) from e
    except (Unfit, OSError):
        raise
    except Exception as e:  # of whatever package reads such files
        raise Unfit(f"cannot be read ({reason(e)})", "expected text, or a file that holds some") from e


def read_any(path, copy, column, scan):
    """What `readable` returns; a file that is damaged, or of another kind than it seems, may raise anything."""
    here, done = path, []

    def step(words, new):
        nonlocal here
        if here != path:
            os.unlink(here)
        here = new
        done.append(words)

    first, end = head(path), suffix(path)
    words, _, advice = binary(first, path).partition("; ")
    if words:
        raise Unfit(words, advice or "expected text")
    records = end == ".json" and has_documents(path, column)
    in_list = records and is_list(beginning(first))
    in_lines = end in LINES or records and not in_list
    if is_packed(path):
        step("unpacked", unpack(path, f"{copy}.unpacked{'.jsonl' if in_lines else end}"))
    if first.startswith(b"PAR1"):
        step(*from_parquet(here, column, f"{copy}.jsonl"))
    elif end in TABLES or in_list:
        read = from_csv if end in TABLES else from_list
        try:
            new = read(here, column, f"{copy}.jsonl")
        except NotUTF8 as e:
            step(*recode(here, path, e, f"{copy}.utf8"))
            new = read(here, column, f"{copy}.jsonl")
        step(*new)
    elif in_lines and here.suffix != ".jsonl":  # the user's own file, since a copy has that name
        linked = Path(f"{copy}.jsonl")
        os.symlink(path.resolve(), linked)
        here = linked
    try:
        return here, scan(str(here)), ", ".join(done)
    except NotUTF8 as e:
        step(*recode(here, path, e, f"{copy}.utf8{'.jsonl' if in_lines else '.txt'}"))
        return here, scan(str(here)), ", ".join(done)


def is_packed(path):
    f, raw = opened(path)
    with raw, f:
        return f is not raw


def progress(raw, words):
    """A bar for the reading of an open file."""
    return tqdm(total=os.fstat(raw.fileno()).st_size, desc=words, unit="B", unit_scale=True, leave=False, delay=1,
                dynamic_ncols=True)


def unpack(path, copy):
    """The path of a copy of what a file holds, unpacked."""
    f, raw = opened(path)
    with raw, f, replacing(copy) as out, progress(raw, "unpacking") as bar:
        while True:
            try:
                block = f.read(BLOCK)
            except (EOFError, OSError, zlib.error, lzma.LZMAError) as e:
                raise Unfit(f"damaged, near byte {raw.tell():,} of it ({e})") from e
            if not block:
                return Path(copy)
            out.write(block)
            check_growth(out.tell(), path)
            bar.update(raw.tell() - bar.n)


def check_growth(size, path):
    """Refuse a packed file of which `size` bytes of text have come out so far, if that is too much: it may never end."""
    if size > max(GROWTH_FROM, MAX_GROWTH * os.path.getsize(path)):
        raise Unfit(f"its {os.path.getsize(path):,} bytes become more than {size:,} bytes of text",
                    f"expected at most {MAX_GROWTH} for each; if that is right, unpack it yourself")


def recode(path, name, problem, copy):
    """(in words what was done, the path of a copy in UTF-8). name: the user's file, of which `path` may be a copy."""
    with open_untrusted(path) as f:
        start = max(0, problem.offset - SAMPLE // 2)
        f.seek(start)
        sample = f.read(SAMPLE)
    found = encoding(sample[sample.find(b"\n") + 1 if start else 0:])
    to = f"-t UTF-8 {quoted(name)} > {quoted(Path(name).stem + '.utf8.txt')}"
    if not found and not problem.byte:
        raise Unfit(problem.reason, f"if it is one, this takes zero bytes out: tr -d '\\000' < {quoted(name)} > "
                                    f"{quoted(Path(name).stem + '.clean.txt')}")
    if not found and damaged(sample):
        raise Unfit(problem.reason, f"it is damaged UTF-8; this leaves out what is none: iconv -c -f UTF-8 {to}")
    if not found:
        raise Unfit(problem.reason, f"no encoding that can be told for certain; if you know it, say LATIN1: iconv -f LATIN1 {to}")
    decoder, place, right, beyond = codecs.getincrementaldecoder(found)(), 0, 0, 0
    with open_untrusted(path) as f, replacing(copy) as out, progress(f, "converting") as bar:
        while True:
            block = f.read(BLOCK)
            more = utf8_lines(block)
            right, beyond = right + more[0], beyond + more[1]
            if right > max(10, beyond / 10) and not found.startswith("UTF-"):
                raise Unfit(f"some of its lines are {found}, others UTF-8", "expected one; convert the parts by themselves")
            try:
                out.write(decoder.decode(block, not block).encode())
            except UnicodeDecodeError as e:
                raise Unfit(f"{found}, but byte 0x{e.object[e.start]:02x} near offset {place + e.start} is none of it",
                            f"this leaves such bytes out: iconv -c -f {found} {to}") from e
            if not block:
                return f"{found}, converted", Path(copy)
            place += len(block)
            bar.update(len(block))


def utf8_lines(block):
    """(how many lines of a block that have more than ASCII are UTF-8, how many there are)."""
    beyond, right = [line for line in block.split(b"\n") if not line.isascii()], 0
    for line in beyond:
        with contextlib.suppress(UnicodeDecodeError):
            right += bool(line.decode())
    return right, len(beyond)


def blocks(path, whole_lines, update=lambda size: None):
    """
    Yields (offset, bytes) of a file, about BLOCK at a time. A block ends behind a line; in a line that is longer
    than a block it ends behind a character, or, with whole_lines, grows, up to LONGEST. update: told of each block's size.
    """
    offset, rest = 0, b""
    with open_untrusted(path) as f:
        while True:
            fresh = f.read(BLOCK)
            block = rest + fresh
            cut = block.rfind(b"\n") + 1 or (not whole_lines and block.rfind(b"\r") + 1)  # lines of an old Mac
            if fresh and not cut:
                if whole_lines and len(block) > LONGEST:
                    raise Unfit(f"a line of more than {LONGEST >> 20} MB at offset {offset}", "expected a document a line")
                if whole_lines:
                    rest = block
                    continue
                cut = character_start(block, max(0, len(block) - 4))
            if not fresh:
                cut = len(block)
            check(block[:cut], offset)
            if cut:
                yield offset, block[:cut]
            update(cut)
            if not fresh:
                return
            offset, rest = offset + cut, block[cut:]


def check(block, offset):
    """Raises NotUTF8 where bytes, which stand at an offset of a file, are no text in UTF-8."""
    wrong = block.find(b"\0")
    try:
        block.decode()
    except UnicodeDecodeError as e:
        wrong = e.start if wrong < 0 else min(wrong, e.start)
    if wrong >= 0:
        raise NotUTF8(block[wrong], offset + wrong)


def character_start(block, at):
    """The first position from `at` on where a UTF-8 character starts (or the end)."""
    while at < len(block) and block[at] & 0xC0 == 0x80:
        at += 1
    return at


# ---- tables -----------------------------------------------------------------------------------------------------

def write_lines(texts, column, copy, path):
    """The path of a copy, .jsonl, of the texts in the file `path`."""
    with replacing(copy) as out:
        for number, text in enumerate(texts):
            if text:
                out.write(json.dumps({column: text}, ensure_ascii=False).encode() + b"\n")
            if not number & 1023 or len(text or "") > 1 << 16:
                check_growth(out.tell() + number, path)
    return Path(copy)


def lines(path, bar):
    """Yields the lines of a text, with their ends."""
    for offset, block in blocks(path, True, bar.update):
        yield from io.StringIO(block.decode().lstrip("\ufeff") if not offset else block.decode(), newline="")


SEPARATORS = {"\t": "a tab", ",": "a comma", ";": "a semicolon", "|": "a vertical bar"}


class Dialect:
    """
    How a table is written: what separates its columns, and whether quotation marks enclose texts or belong to them.

    Both readings are tried on every line. Marks enclose texts where the table can be read so and in no other way; where it
    can't, they belong to the texts, if each line has all columns by itself. Programs that write tables with enclosed texts
    enclose every text that holds a mark, so a mark elsewhere says that none encloses.
    """

    def __init__(self, header, column):
        self.mark, self.place, self.names = find_column(header, column)
        if self.mark is None:
            raise no_column(column, self.names)
        after = re.findall(re.escape(self.mark) + "( ?)", header)
        self.blank = bool(after) and all(after)       # a blank follows each separator
        self.header_quoted = header.lstrip("\ufeff")[:1] == '"'
        self.plain = True   # every line has all columns by itself
        self.begins = False  # a field begins with a quotation mark
        self.open = False    # ... and does not end with one
        self.inside = False  # a field holds one elsewhere, in a row of one line
        self.spans = False   # a row has several lines, if marks enclose texts

    def problem(self, row):
        """What is wrong with the number of fields of a row: else a text ended at a separator of its own. None if all is well."""
        wrong = row and len(row) <= self.place or any(row[len(self.names):])
        return f"has {len(row)} fields, the first line {len(self.names)}" if wrong else None

    def split(self, line):
        """The fields of a line in which quotation marks belong to the texts."""
        fields = line.rstrip("\r\n").split(self.mark)
        fields = [field.lstrip(" ") for field in fields] if self.blank else fields
        return fields if fields != [""] else []

    def look(self, line):
        """Notes what a line says of the reading in which quotation marks belong to the texts."""
        if not self.plain:
            return
        fields = self.split(line)
        self.plain = not fields or len(fields) == len(self.names)
        begins = [field for field in fields if field.startswith('"')]
        self.begins |= bool(begins)
        self.open |= any(len(field) == 1 or not field.endswith('"') for field in begins)

    def look_at_row(self, row, since):
        """The same of the reading in which they enclose texts. since: the lines of the row."""
        self.spans |= len(since) > 1
        if self.plain and not self.inside and len(since) == 1 and '"' in since[0]:
            apart = self.mark + self.mark.join(self.split(since[0])) + self.mark
            self.inside = any('"' in field and self.mark + field + self.mark in apart for field in row)

    def both_fit(self):
        """Whether marks enclose texts, where both readings fit. Raises Unfit if that can't be told."""
        if self.spans and not self.inside and not self.header_quoted and len(self.names) > 1:
            raise Unfit("some texts begin with a quotation mark, and it can't be told whether these enclose texts of several lines",
                        "enclose the names in the first line too if they do; else no text may begin with one")
        return self.header_quoted or not self.inside

    def words(self, enclosing):
        marks = "; quotation marks enclose texts" if enclosing else "; quotation marks belong to the texts"
        separated = f", one of {len(self.names)} separated by {SEPARATORS[self.mark]}" * (len(self.names) > 1)
        return f"the column {self.names[self.place]!r} read{separated}{marks * self.begins}"


def from_csv(path, column, copy):
    """(what was done, in words, the path of a copy of the texts in a .csv or .tsv)"""
    csv.field_size_limit(LONGEST)
    advice = "put quotation marks right around each text that holds {} or a line end, and double those within"

    def unfit(number, problem):
        return Unfit(f"line {number} {problem}", advice.format(SEPARATORS[dialect.mark]))

    def enclosed(rows):
        """Yields the texts if quotation marks enclose texts, and shows the dialect each line."""
        since = []  # lines since the last row ended

        def noted():
            for line in rows:
                dialect.look(line)
                since.append(line)
                yield line

        reader = csv.reader(noted(), delimiter=dialect.mark, strict=True, skipinitialspace=dialect.blank)
        try:
            for row in reader:
                dialect.look_at_row(row, since)
                since.clear()
                if dialect.problem(row):
                    raise unfit(1 + reader.line_num, dialect.problem(row))
                yield row[dialect.place] if row else ""
        except csv.Error as e:
            raise unfit(1 + reader.line_num, f"is no row of a table ({e})") from e

    def whole(rows):
        """Yields the texts if quotation marks belong to them."""
        for number, line in enumerate(rows, 2):
            dialect.look(line)
            row = dialect.split(line)
            if not dialect.plain:
                raise unfit(number, f"has {len(row)} fields, the first line {len(dialect.names)}")
            yield row[dialect.place] if row else ""

    def read(texts):
        with open_untrusted(path) as f, progress(f, "reading rows") as bar:
            rows = lines(path, bar)
            next(rows, "")
            return write_lines(texts(rows), columns(column)[0], copy, path)

    with open_untrusted(path) as f, progress(f, "reading rows") as bar:
        dialect = Dialect(next(lines(path, bar), ""), column)
    try:
        new, problem = read(enclosed), None
    except NotUTF8:
        raise
    except Unfit as e:
        problem = e
    if problem and (not dialect.plain or not dialect.begins or dialect.header_quoted):
        raise problem
    if not problem and (not dialect.plain or not dialect.begins or dialect.both_fit()):
        return dialect.words(True), new
    try:
        new = read(whole)
    except NotUTF8:
        raise
    except Unfit as e:
        raise problem or e from None
    if problem and not dialect.open:  # all marks enclose texts, but for one that is written wrongly
        raise problem
    return dialect.words(False), new


def from_list(path, column, copy):
    """(what was done, in words, the path of a copy of the texts in a .json that is a list of objects)"""
    decoder = json.JSONDecoder()

    def texts(bar):
        rest, count = "", 0
        for _, block in blocks(path, False, bar.update):
            rest, at = (rest + block.decode()).lstrip("\ufeff"), 0
            while True:
                at = re.compile(r"[\s,]*\[?\s*" if not count else r"[\s,]*").match(rest, at).end()
                try:
                    record, end = decoder.raw_decode(rest, at)
                except (ValueError, RecursionError):
                    break
                count += 1
                refuse_doubled(rest[at:end], column, f"object {count}")
                at = end
                yield record_text(record, column, f"object {count}").decode()
            rest = rest[at:]
            if len(rest) > LONGEST or len(rest) > SMALL_JSON and count_values(rest.encode()) > MAX_VALUES:
                raise Unfit(f"object {count + 1} is longer than {LONGEST >> 20} MB, or no JSON")
        if rest.strip() != "]":
            raise Unfit(f"object {count + 1} is no JSON: {rest[:40]!r}", "expected a list of objects")

    with open_untrusted(path) as f, progress(f, "reading objects") as bar:
        return "the column read", write_lines(texts(bar), columns(column)[0], copy, path)


def from_parquet(path, column, copy):
    """(what was done, in words, the path of a copy of the texts in a Parquet table)"""
    try:
        from pyarrow import parquet
    except ImportError:
        raise Unfit("a Parquet table, which needs a package", "pip install pyarrow") from None
    found = []

    def texts():
        try:
            table = parquet.ParquetFile(path)
            found.append(parquet_column(table.schema_arrow, column))
            with tqdm(total=table.metadata.num_rows, desc="reading rows", unit=" rows", leave=False, delay=1,
                      dynamic_ncols=True) as bar:
                for rows, group in row_groups(table.metadata):
                    for batch in table.iter_batches(rows, [group], [found[0]]):
                        yield from map(parquet_text, batch.to_pylist())
                        bar.update(len(batch))
        except (OSError, ValueError) as e:
            raise Unfit(f"a damaged Parquet table ({str(e).splitlines()[0]})") from e

    new = write_lines(texts(), columns(column)[0], copy, path)
    return f"the column {found[0]!r} read", new


def parquet_column(schema, column):
    """The name of the column of the texts, or behind a dot of a field of a struct. Raises Unfit where it holds no strings."""
    from pyarrow import types
    fields = [*schema]
    name = pick(schema.names, column)
    path = [name] if name is not None else column.split(".")
    for depth, part in enumerate(path):
        if part not in [field.name for field in fields]:
            raise no_column(column, schema.names)
        field = next(field for field in fields if field.name == part)
        kind = strings_in(field.type)
        fields = [field.type.field(i) for i in range(field.type.num_fields)] if types.is_struct(field.type) else []
    if not kind:
        advice = f"; name a field of it, such as --column={'.'.join(path)}.{fields[0].name}" if fields else ""
        raise Unfit(f"column {'.'.join(path)!r} holds {str(field.type)[:80]}", f"expected strings{advice}")
    return ".".join(path)


def strings_in(kind):
    """Whether an Arrow type holds strings: in any of their layouts, as a dictionary, or as bytes, which older programs wrote."""
    from pyarrow import types
    while types.is_dictionary(kind) or hasattr(kind, "storage_type"):
        kind = kind.value_type if types.is_dictionary(kind) else kind.storage_type
    return any(getattr(types, f"is_{name}", lambda kind: False)(kind)
               for name in ("string", "large_string", "string_view", "binary", "large_binary", "binary_view"))


def parquet_text(row):
    """The text in a row that has one column, or a field of a struct in it; "" where it is null."""
    while isinstance(row, dict):
        row = next(iter(row.values()))
    try:
        return row.decode() if isinstance(row, bytes) else row or ""
    except UnicodeDecodeError:
        raise Unfit(f"a column of bytes, {row[:20]!r} among them, which are no UTF-8", "expected strings") from None


def row_groups(metadata):
    """
    Yield (rows to read at once, number) of each group of rows in a Parquet table. A long text that stands in the file once may
    be the text of each row. (Metadata of a column would say more, but damaged ones abort the process in the package.)
    """
    for group in range(metadata.num_row_groups):
        size = metadata.row_group(group).total_byte_size
        yield min(ROWS, max(1, ROWS_SIZE // max(1, size))), group


def no_column(column, names):
    what = f"no column {' or '.join(map(repr, columns(column)))} but {listed(names)}" if names else "no row of names"
    return Unfit(what, "name the one that holds the text: --column=NAME" if names else "expected a table")


def jsonl_text(line, column, number):
    """The text (UTF-8 bytes) in a line of a .jsonl file."""
    try:
        record = parse_json(line)
    except ValueError as e:
        raise unlike(f"line {number} holds no JSON ({e})", column) from e
    refuse_doubled(line, column, f"line {number}")
    return record_text(record, column, f"line {number}")


def refuse_doubled(source, column, where):
    """Refuse a JSON object with the column's name twice: json keeps the last only. source: the object, bytes or str."""
    for name in columns(column):
        quoted_name = json.dumps(name, ensure_ascii=False)
        if source.count(quoted_name if isinstance(source, str) else quoted_name.encode()) < 2:
            continue
        pairs = json.loads(source, object_pairs_hook=tuple)  # an inner object may have it too
        if isinstance(pairs, tuple) and sum(key == name for key, _ in pairs) > 1:
            raise Unfit(f"{where} has the key {name!r} twice", "rename one")


def record_text(record, column, where):
    """The text (UTF-8 bytes) that an object of a .jsonl or .json holds under the column's name."""
    if not isinstance(record, dict):
        raise unlike(f"{where} holds no object but {json.dumps(record, ensure_ascii=False)[:40]}", column)
    key = next((name for name in columns(column) if name in record), None)
    key = pick([*record], column) if key is None else key
    if key is None:
        raise unlike(f"{where} holds an object {f'with the keys {listed(record)}' if record else 'without keys'}", column,
                     not TURNS.isdisjoint(record))
    if not isinstance(record[key], str):
        raise unlike(f'{where} holds "{key}": {json.dumps(record[key])[:40]}', column,
                     isinstance(record[key], list) and record[key][:1] and isinstance(record[key][0], dict))
    try:
        return record[key].encode()
    except UnicodeEncodeError as e:
        raise unlike(f"{where} holds a character that UTF-8 can't write ({e.object[e.start]!r})", column) from e


TURNS = {"messages", "conversations", "conversation", "dialogue", "instruction"}  # keys of texts in several parts


def unlike(found, column, parts=False):
    """The Unfit of a record without a text. parts: whether it holds one in several parts, as conversations have."""
    names = " or ".join(f'"{name}"' for name in columns(column))
    how = ("; write each conversation as one string, its turns with the marks of the chat template that the model will be "
           "used with, such as ChatML's <|im_start|>user") * bool(parts)
    return Unfit(found, f"expected an object with a string under {names}{how}")


def listed(words, most=8):
    """The first words of a list, separated by commas."""
    words = [one_line(word) for word in words]
    return ", ".join(words[:most] + ["..."] * (len(words) > most))
