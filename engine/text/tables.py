"""
Tables and JSON: write the text column to a .jsonl file with one object per line.

    .csv .tsv   one document per row; the first line names the columns
    .parquet    one document per row
    .json       a list of objects, one document per object
    (a row or object may contain a conversation instead: conversations.py)
    .jsonl      one object per line; read in place by `jsonl_text`

Each from_* function returns (description of what was done, path of the copy) and raises Unfit.
"""
import csv
import io
import json
import os
import re
from pathlib import Path

from engine.files import replacing
from engine.text import conversations
from engine.text.blocks import MAX_LINE, NotUTF8, Unfit, blocks, listed, progress
from engine.untrusted import MAX_VALUES, SMALL_JSON, count_values, parse_json

MAX_GROWTH = 200       # max bytes of text per byte of a file; about 20 is common for prose
GROWTH_FROM = 1 << 26  # bytes of text below which MAX_GROWTH does not apply
ROWS = 256             # max rows of a Parquet table to read at once
ROWS_SIZE = 1 << 27    # max bytes of these rows
DELIMITERS = {"\t": "a tab", ",": "a comma", ";": "a semicolon", "|": "a vertical bar"}
# Keys of records that are probably meant as conversations.
TURNS = {"messages", "conversations", "conversation", "dialogue", "turns", "instruction"}


# ---- columns -------------------------------------------------------------------------------------

def column_names(column):
    """Return the names that the text column may have. The default `text` also allows `story`."""
    return ["text", "story"] if column == "text" else [column]


def pick_column(names, column):
    """
    Return the name in `names` of the text column, or None. Outer blanks are ignored.

    Raises Unfit if several columns have that name.
    """
    stripped = [str(name).strip() for name in names]
    for name in map(str.strip, column_names(column)):
        count = stripped.count(name)
        if count > 1:
            raise Unfit(f"{count} columns are called {name!r}", "rename all but one")
        if count:
            return names[stripped.index(name)]
    return None


def no_column(column, names):
    """Return the Unfit of a table that lacks the column."""
    if not names:
        return Unfit("no row of column names", "expected a table")
    wanted = " or ".join(map(repr, column_names(column)))
    return Unfit(f"no column {wanted}, only {listed(names)}",
                 "name the one that holds the text: --column=NAME")


def find_column(start, column):
    """
    Return (delimiter, index of the text column, all column names) of a .csv or .tsv table.

    start: the first characters of the table. Delimiter and index are None if it lacks the column.
    Raises Unfit if several columns have the name of the text column.
    """
    header, names = start.lstrip("\ufeff").splitlines()[:1], []
    # With a single column, the first delimiter is used: a tab, the rarest of them in texts.
    for delimiter in DELIMITERS:
        fields = next(csv.reader(header, delimiter=delimiter, skipinitialspace=True), [])
        row = [name.strip() for name in fields]
        names = max(names, row, key=len)
        name = pick_column(row, column)
        if name is not None:
            return delimiter, row.index(name), row
    return None, None, names


# ---- writing the copy ----------------------------------------------------------------------------

def write_lines(texts, column, copy, path):
    """
    Write the texts of the table `path`, or its records of conversations, to the .jsonl file `copy`.
    Return the Path of the copy.
    """
    key = column_names(column)[0]
    with replacing(copy) as out:
        for number, text in enumerate(texts):
            if isinstance(text, dict):
                out.write(json.dumps(text).encode() + b"\n")
            elif text:
                out.write(json.dumps({key: text}, ensure_ascii=False).encode() + b"\n")
            if number % 1024 == 0 or len(text or "") > 1 << 16 or isinstance(text, dict):
                check_growth(out.tell() + number, path)  # an empty row counts as a byte
    return Path(copy)


def check_growth(size, path):
    """Raise Unfit if `size` bytes of text are too many for this file: it could fill the disk."""
    file_size = os.path.getsize(path)
    if size > max(GROWTH_FROM, MAX_GROWTH * file_size):
        raise Unfit(f"its {file_size:,} bytes become more than {size:,} bytes of text",
                    f"expected at most {MAX_GROWTH} for each; if that is right, unpack it yourself")


# ---- .csv and .tsv -------------------------------------------------------------------------------

class Dialect:
    """
    The notation of a table: its delimiter, and whether quotation marks enclose fields or are text.

    Each line is checked against both readings, and the one that fits is used. Marks can be text if
    each line alone has all columns. If both readings fit, `encloses` decides: a program that
    encloses fields encloses every field that contains a mark, so a mark in a field without marks
    around it is text.
    """

    def __init__(self, header, column):
        self.delimiter, self.index, self.names = find_column(header, column)
        if self.delimiter is None:
            raise no_column(column, self.names)
        spaces = re.findall(re.escape(self.delimiter) + "( ?)", header)
        self.space_follows = bool(spaces) and all(spaces)  # a space follows each delimiter
        self.header_quoted = header.lstrip("\ufeff").startswith('"')
        # Observations of the lines so far, if marks are text:
        self.lines_fit = True        # each line alone has all columns
        self.quote_begins = False    # a field begins with a mark
        self.quote_open = False      # a field begins with a mark and does not end with one
        # Observations if marks enclose fields:
        self.quote_inside = False    # a field that is not enclosed has a mark in it
        self.row_spans = False       # a row has several lines

    def split(self, line):
        """Return the fields of a line whose quotation marks are text."""
        fields = line.rstrip("\r\n").split(self.delimiter)
        if self.space_follows:
            fields = [field.lstrip(" ") for field in fields]
        return fields if fields != [""] else []

    def observe_line(self, line):
        """Update the observations for marks as text, up to the first line that does not fit."""
        if not self.lines_fit:
            return
        fields = self.split(line)
        self.lines_fit = not fields or len(fields) == len(self.names)
        quoted = [field for field in fields if field.startswith('"')]
        self.quote_begins |= bool(quoted)
        self.quote_open |= any(len(field) == 1 or not field.endswith('"') for field in quoted)

    def observe_row(self, row, row_lines):
        """Update the observations for enclosing marks from a row and the lines that contain it."""
        self.row_spans |= len(row_lines) > 1
        if self.lines_fit and not self.quote_inside and len(row_lines) == 1 and '"' in row_lines[0]:
            # A field with marks that is unchanged in the line, between delimiters, is not enclosed.
            d = self.delimiter
            line = d + d.join(self.split(row_lines[0])) + d
            self.quote_inside = any('"' in field and d + field + d in line for field in row)

    def encloses(self):
        """
        Return whether marks enclose fields, for a table that fits both readings.

        Raises Unfit if the readings differ in rows of several lines and neither can be ruled out.
        """
        unclear = self.row_spans and not self.quote_inside and not self.header_quoted
        if unclear and len(self.names) > 1:
            raise Unfit("some texts begin with a quotation mark, and it is unclear whether "
                        "these marks enclose texts of several lines",
                        "if they do, enclose the names in the first line too; if not, no text may "
                        "begin with such a mark")
        return self.header_quoted or not self.quote_inside

    def words(self, enclosing):
        """Return a description of the reading for the user."""
        words = f"the column {self.names[self.index]!r} read"
        if len(self.names) > 1:
            words += f", one of {len(self.names)} separated by {DELIMITERS[self.delimiter]}"
        if self.quote_begins:
            words += f"; quotation marks {'enclose texts' if enclosing else 'belong to the texts'}"
        return words

    def unfit(self, number, problem):
        """Return the Unfit for a line with a problem."""
        return Unfit(f"line {number} {problem}", "put quotation marks right around each text that "
                     f"holds {DELIMITERS[self.delimiter]} or a line end, and double those within")

    def wrong_count(self, row):
        return f"has {len(row)} fields, the first line {len(self.names)}"


def enclosed_texts(lines, dialect):
    """
    Yield the text of each row after the header if marks enclose fields. Updates the observations of
    the dialect.
    """
    row_lines = []

    def observed():
        for line in lines:
            dialect.observe_line(line)
            row_lines.append(line)
            yield line

    reader = csv.reader(observed(), delimiter=dialect.delimiter, strict=True,
                        skipinitialspace=dialect.space_follows)
    try:
        for row in reader:
            dialect.observe_row(row, row_lines)
            row_lines.clear()
            # Surplus fields that are not empty mean that a text contains a delimiter.
            if row and len(row) <= dialect.index or any(row[len(dialect.names):]):
                raise dialect.unfit(1 + reader.line_num, dialect.wrong_count(row))
            yield row[dialect.index] if row else ""
    except csv.Error as e:
        raise dialect.unfit(1 + reader.line_num, f"is not a row of a table ({e})") from e


def plain_texts(lines, dialect):
    """Yield the text of each row after the header if marks are text."""
    for number, line in enumerate(lines, 2):
        dialect.observe_line(line)
        row = dialect.split(line)
        if not dialect.lines_fit:
            raise dialect.unfit(number, dialect.wrong_count(row))
        yield row[dialect.index] if row else ""


def text_lines(path, bar):
    """Yield the lines of a UTF-8 file as str, with their ends."""
    for offset, block in blocks(path, True, bar.update):
        text = block.decode()
        yield from io.StringIO(text if offset else text.lstrip("\ufeff"), newline="")


def from_csv(path, column, copy):
    """Read a .csv or .tsv file. Dialect determines what its quotation marks mean."""
    csv.field_size_limit(MAX_LINE)

    def read(texts):
        """Return (path of the copy, None), or (None, the Unfit) if this reading does not fit."""
        try:
            with progress("reading rows", os.path.getsize(path)) as bar:
                lines = text_lines(path, bar)
                next(lines, "")
                return write_lines(texts(lines, dialect), column, copy, path), None
        except NotUTF8:
            raise
        except Unfit as e:
            return None, e

    with progress("reading rows", os.path.getsize(path)) as bar:
        dialect = Dialect(next(text_lines(path, bar), ""), column)
    new, problem = read(enclosed_texts)
    # Both readings are the same if no field begins with a mark.
    could_be_plain = dialect.lines_fit and dialect.quote_begins
    if problem and (not could_be_plain or dialect.header_quoted):
        raise problem
    if not problem and (not could_be_plain or dialect.encloses()):
        return dialect.words(True), new
    new, plain_problem = read(plain_texts)
    if plain_problem:
        raise problem or plain_problem
    # If every field that begins with a mark also ends with one, marks do enclose fields, and the
    # problem is an error in the file.
    if problem and not dialect.quote_open:
        raise problem
    return dialect.words(False), new


# ---- JSON ----------------------------------------------------------------------------------------

def from_list(path, column, copy):
    """Read a .json file that is a list of objects, one object at a time."""
    decoder = json.JSONDecoder()

    def texts(bar):
        rest, count = "", 0
        for _, block in blocks(path, False, bar.update):
            rest, at = (rest + block.decode()).lstrip("\ufeff"), 0
            while True:
                between = r"[\s,]*" if count else r"[\s,]*\[?\s*"
                at = re.compile(between).match(rest, at).end()
                try:
                    record, end = decoder.raw_decode(rest, at)
                except (ValueError, RecursionError):  # cut at the block's end, or end of the list
                    break
                count += 1
                source, at = rest[at:end], end
                if conversations.format_of(record, column_names(column)):
                    yield conversations.stored(record)
                else:
                    yield checked_text(source, record, column, f"object {count}").decode()
            rest = rest[at:]
            too_many = len(rest) > SMALL_JSON and count_values(rest.encode()) > MAX_VALUES
            if len(rest) > MAX_LINE or too_many:
                raise Unfit(f"object {count + 1} is longer than {MAX_LINE >> 20} MB, or not JSON")
        if rest.strip() != "]":  # rest: the text after the last object
            raise Unfit(f"object {count + 1} is not JSON: {rest[:40]!r}",
                        "expected a list of objects")

    with progress("reading objects", os.path.getsize(path)) as bar:
        return "the column read", write_lines(texts(bar), column, copy, path)


def jsonl_record(line, column, where):
    """Return the JSON value in `line`, bytes of a .jsonl file. where: its place, for messages."""
    try:
        return parse_json(line)
    except ValueError as e:
        raise no_text(f"{where} is not JSON ({e})", column) from e


def jsonl_text(line, column, number):
    """Return the text in a line of a .jsonl file, as UTF-8 bytes."""
    where = f"line {number}"
    return checked_text(line, jsonl_record(line, column, where), column, where)


def checked_text(source, record, column, where):
    """
    Return the text of a JSON value, as UTF-8 bytes. source: its JSON, bytes or str. Raises Unfit.
    """
    refuse_doubled(source, column_names(column), where)
    return record_text(record, column, where)


def refuse_doubled(source, names, where):
    """
    Raise Unfit if a JSON object has one of the keys `names` twice: json would keep only the last
    value.

    source: the object, bytes or str.
    """
    for name in names:
        key = json.dumps(name, ensure_ascii=False)
        if source.count(key if isinstance(source, str) else key.encode()) < 2:
            continue
        pairs = json.loads(source, object_pairs_hook=tuple)  # an inner object may have the key too
        if isinstance(pairs, tuple) and sum(k == name for k, _ in pairs) > 1:
            raise Unfit(f"{where} has the key {name!r} twice", "rename one")


def record_text(record, column, where):
    """Return the text under the column's name in a JSON value, as UTF-8 bytes. Raises Unfit."""
    if not isinstance(record, dict):
        found = json.dumps(record, ensure_ascii=False)[:40]
        raise no_text(f"{where} holds {found}, not an object", column)
    key = next((name for name in column_names(column) if name in record), None)
    if key is None:
        key = pick_column([*record], column)
    if key is None:
        keys = f"with the keys {listed(record)}" if record else "without keys"
        raise no_text(f"{where} holds an object {keys}", column, not TURNS.isdisjoint(record))
    text = record[key]
    if not isinstance(text, str):
        is_chat = isinstance(text, list) and text[:1] and isinstance(text[0], dict)
        raise no_text(f'{where} holds "{key}": {json.dumps(text)[:40]}', column, is_chat)
    try:
        return text.encode()
    except UnicodeEncodeError as e:
        found = f"{where} holds a character that UTF-8 can't write ({e.object[e.start]!r})"
        raise no_text(found, column) from e


def no_text(found, column, is_chat=False):
    """Return the Unfit of a record without a text."""
    names = " or ".join(f'"{name}"' for name in column_names(column))
    advice = f"expected an object with a string under {names}"
    if is_chat:
        advice += ("; or a conversation: messages with role and content, conversations with from "
                   "and value, prompt and response, or instruction and output")
    return Unfit(found, advice)


# ---- Parquet -------------------------------------------------------------------------------------

def from_parquet(path, column, copy):
    """Read a Parquet table. Raises what pyarrow raises for a damaged one."""
    try:
        from pyarrow import parquet
    except ImportError:
        raise Unfit("a Parquet table, which needs a package", "pip install pyarrow") from None
    table = parquet.ParquetFile(path)
    key = conversation_columns(table.schema_arrow, column)
    names = key or [parquet_column(table.schema_arrow, column)]
    read = conversations.stored if key else parquet_text

    def texts():
        with progress("reading rows", table.metadata.num_rows, " rows") as bar:
            for group in range(table.metadata.num_row_groups):
                # A Parquet dictionary stores a text that rows share once, so a single row may need
                # as much memory as its group. (The metadata of the column are more exact, but
                # pyarrow aborts the process if they are damaged.)
                size = table.metadata.row_group(group).total_byte_size
                rows = min(ROWS, max(1, ROWS_SIZE // max(1, size)))
                for batch in table.iter_batches(rows, [group], names):
                    yield from map(read, batch.to_pylist())
                    bar.update(len(batch))

    new = write_lines(texts(), column, copy, path)
    return f"the column{'s' * (len(names) > 1)} {', '.join(map(repr, names))} read", new


def conversation_columns(schema, column):
    """Return the names of the columns that hold conversations; [] if the table has none."""
    if pick_column(schema.names, column) is not None:
        return []
    is_one = conversations.format_of(dict.fromkeys(schema.names), column_names(column))
    return [name for name in schema.names if name in conversations.KEYS] if is_one else []


def parquet_column(schema, column):
    """
    Return the name of the text column, or the dotted path to a field of a struct column.

    Raises Unfit if that column does not exist or its values are not strings.
    """
    from pyarrow import types
    fields = [*schema]
    name = pick_column(schema.names, column)
    path = [name] if name is not None else column.split(".")
    for part in path:
        field = next((field for field in fields if field.name == part), None)
        if field is None:
            raise no_column(column, schema.names)
        kind, fields = field.type, []
        if types.is_struct(kind):
            fields = [kind.field(i) for i in range(kind.num_fields)]
    path = ".".join(path)
    if not holds_strings(kind):
        advice = f"; name a field of it, such as --column={path}.{fields[0].name}" if fields else ""
        raise Unfit(f"column {path!r} holds {str(kind)[:80]}", f"expected strings{advice}")
    return path


def holds_strings(kind):
    """
    Return whether an Arrow type contains strings: in any layout, as a dictionary, or as bytes,
    which older programs wrote.
    """
    from pyarrow import types
    while types.is_dictionary(kind) or hasattr(kind, "storage_type"):
        kind = kind.value_type if types.is_dictionary(kind) else kind.storage_type
    layouts = "string", "large_string", "string_view", "binary", "large_binary", "binary_view"
    tests = [getattr(types, f"is_{layout}", None) for layout in layouts]  # old versions lack some
    return any(test(kind) for test in tests if test)


def parquet_text(row):
    """Return the text of a value, or of the only field of a nested struct; "" for null."""
    while isinstance(row, dict):
        row = next(iter(row.values()))
    return row.decode() if isinstance(row, bytes) else row or ""
