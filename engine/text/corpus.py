"""
Find the documents of a source, and read them in worker processes.

A row (file, start, end, flags) of int64 is the bytes from start to end of a file: a document, or a
segment of a long document. A segment ends before a single space between two words, and the next one
begins with that space. No token of a Llama-style vocabulary has a space after a letter, so the
segments encode to the same tokens as the whole text. A block of blocks() without such a space is
cut after lines, or, if it has no line end, at the end of the block, between two characters. The
tokens around such a cut may then differ, but the text does not.
"""
import array
import collections
import dataclasses
import itertools
import json
import os
import re
import shutil
from pathlib import Path

import numpy as np

from engine.files import replacing, write_atomic
from engine.formats.chat_template import CHATML
from engine.text import conversations, readers, stories
from engine.text.blocks import Unfit, blocks, character_start, listed, progress
from engine.text.downloads import DOWNLOADS, VALIDATION
from engine.text.sources import STORY_BYTES, text_share
from engine.text.tables import (checked_text, column_names, jsonl_record, jsonl_text,
                                refuse_doubled)
from engine.untrusted import NotRegular, open_untrusted, parse_json

SEGMENT = 1 << 16  # bytes of a long document to encode at once
STRETCH = 1 << 18  # bytes of adjacent text to keep together if only a part is prepared
SEED = 1337        # for the stories, and for drawing validation documents
SEPARATOR = b"<|endoftext|>"  # alone on a line of a .txt file, separates documents
BOM = b"\xef\xbb\xbf"
# A single space between words. Llama-style vocabularies encode U+2581 (E2 96 81) like a space, so
# it must not be beside this one: the byte before the space is not 81, the byte after it is not E2.
JOINT = re.compile(rb"[^\s\x81] [^\s\xe2]")
# Flags of a row.
VAL = 1    # in the validation split
FIRST = 2  # begins a document
LAST = 4   # ends a document
STRIP = 8  # white space around the document is removed


@dataclasses.dataclass
class Corpus:
    """
    The documents of files. files: paths of .txt and .jsonl files in UTF-8, which rows index;
    skipped: paths of files that could not be read; whole_bytes: bytes of the whole training text if
    only a part of it is prepared, otherwise 0.
    """
    rows: np.ndarray
    files: list
    column: str = "text"
    skipped: list = ()
    whole_bytes: int = 0
    vocab_sample = 1 << 25  # bytes of text to train a vocabulary on

    def sizes(self, rows):
        """Return the bytes of text in each row, (n,) int64."""
        return rows[:, 2] - rows[:, 1]

    def texts(self, rows):
        """Yield (text, bytes, flags, bits) of each row. bits: information content, 0 if unknown."""
        for number, group in itertools.groupby(in_chunks(rows), key=lambda row: row[0]):
            path = self.files[number]
            with open_untrusted(path) as f:
                for _, start, end, flags in group:
                    f.seek(start)
                    data = f.read(end - start)
                    if path.endswith(".jsonl") and data.strip():
                        data = jsonl_text(data, self.column, f"at byte {start}")
                    if flags & STRIP and flags & FIRST:
                        data = data.lstrip()
                    if flags & STRIP and flags & LAST:
                        data = data.rstrip()
                    if data:
                        yield decode(data, path), len(data), flags, 0.0

    def characters(self):
        """Return every character of the text, as a str."""
        found = set()
        with progress("characters", int(self.sizes(self.rows).sum())) as bar:
            for text, size, *_ in self.texts(self.rows):
                found.update(text)
                bar.update(size)
        return "".join(found)

    def sample(self):
        """Yield about vocab_sample bytes of training text, from evenly spaced rows."""
        train = self.rows[self.rows[:, 3] & VAL == 0]
        step = max(1, round(self.sizes(train).sum() / self.vocab_sample))
        for text, *_ in self.texts(train[::step]):
            yield text

    def save(self, folder):
        fields = {**vars(self)}
        with replacing(folder / "rows.npy") as f:
            np.save(f, fields.pop("rows"))
        write_atomic(folder / "corpus.json", json.dumps(fields))


@dataclasses.dataclass
class Conversations(Corpus):
    """Conversations, one per row. chat_template: the Jinja source that encodes them."""
    chat_template: str = CHATML

    def turns(self, rows):
        """Yield (turns, flags) of each row. turns: [(role, text)], ending with an answer."""
        columns = column_names(self.column)
        for number, group in itertools.groupby(in_chunks(rows), key=lambda row: row[0]):
            path = self.files[number]
            with open_untrusted(path) as f:
                for _, start, end, flags in group:
                    f.seek(start)
                    try:
                        record = parse_json(f.read(end - start))
                        key = conversations.format_of(record, columns)
                        turns = conversations.conversation(record, key)
                    except (ValueError, LookupError) as e:  # it was valid when it was scanned
                        raise changed_meanwhile(path) from e
                    yield conversations.trained_part(turns)[0], flags

    def texts(self, rows):
        """Yield the texts to train a vocabulary on, with the roles as ChatML spells them."""
        for turns, flags in self.turns(rows):
            text = "".join(f"{role}\n{text}\n" for role, text in turns)
            yield text, len(text.encode()), flags, 0.0

    def characters(self):
        return super().characters() + "".join(conversations.ROLES) + "\n"  # ChatML's words


class Stories(Corpus):
    """The built-in stories. A row represents the stories start to end - 1."""
    vocab_sample = stories.SAMPLE

    def sizes(self, rows):
        return super().sizes(rows) * STORY_BYTES

    def texts(self, rows):
        for _, start, end, flags in in_chunks(rows):
            for number in range(start, end):
                text, bits = stories.write(SEED, number)
                yield text, len(text.encode()), flags, bits

    def characters(self):
        return stories.CHARACTERS


def load_corpus(folder):
    """Return the Corpus that was saved in a folder."""
    fields = json.loads((folder / "corpus.json").read_text())
    kind = Corpus if fields["files"] else Stories
    if "chat_template" in fields:
        kind = Conversations
    return kind(np.load(folder / "rows.npy", mmap_mode="r"), **fields)


def in_chunks(rows):
    """Yield each row as a list of int. Read 4096 at a time: a memory map may have millions."""
    for at in range(0, len(rows), 1 << 12):
        yield from rows[at:at + (1 << 12)].tolist()


def decode(data, path):
    """Decode bytes of a file that was UTF-8 when it was scanned."""
    try:
        return data.decode()
    except UnicodeDecodeError as e:
        raise changed_meanwhile(path) from e


def changed_meanwhile(path):
    return Unfit(f"{path}: changed while it was read; run the same command again")


# ---- finding the documents -----------------------------------------------------------------------

def make_corpus(source, options, val_fraction, max_val_bytes, copies):
    """
    Return the Corpus of a Source. options: see prepare.Options; val_fraction, max_val_bytes: max
    fraction and max bytes of the text to hold out; copies: folder for copies of files.
    """
    if source.stories:
        return story_corpus(source.stories, val_fraction)
    intake = conversations.Intake(options.skip_bad)
    documents, cuts, files, skipped = read_files(source, options, copies, intake)
    if VALIDATION in DOWNLOADS.get(source.text, ()):  # a download with its own validation file
        file = [*DOWNLOADS[source.text]].index(VALIDATION)  # source.files has the same order
        documents[documents[:, 0] == file, 3] |= VAL
    else:
        documents = hold_out(documents, files, source.text, val_fraction, max_val_bytes)
    fields = segments(documents, cuts), files, options.column, skipped
    corpus = Corpus(*fields)
    if intake.formats:
        corpus = Conversations(*fields, chat_template=options.chat_template or CHATML)
    if options.max_text_bytes:
        share = text_share_of(files, options.column)  # rows of .jsonl hold more than their text
        train_bytes = int(share * corpus.sizes(corpus.rows[corpus.rows[:, 3] & VAL == 0]).sum())
        if options.max_text_bytes < train_bytes:
            corpus.rows = spread(corpus.rows, options.max_text_bytes / share)
            corpus.whole_bytes = train_bytes
    return corpus


def text_share_of(files, column):
    """Estimate the fraction of the bytes of files that is text."""
    sizes = [os.path.getsize(path) for path in files]
    text = sum(size * text_share(Path(path), column) for path, size in zip(files, sizes))
    return text / max(1, sum(sizes))


def story_corpus(count, val_fraction):
    """
    Return the Stories 0 to count - 1. The last ones are the validation split. A row represents
    up to 1,000 stories.
    """
    held_out = min(max(round(val_fraction * count), 1), 2000, count - 1)
    train = count - held_out
    edges = [*range(0, train, 1000), *range(train, count, 1000), count]
    rows = [(0, start, end, FIRST | LAST | (VAL if start >= train else 0))
            for start, end in itertools.pairwise(edges)]
    return Stories(np.array(rows), [])


def read_files(source, options, copies, intake):
    """
    Return (documents, cuts, files, skipped).

    documents: rows (n, 4) of all files; cuts: for each file the offsets where long documents may be
    cut; files: paths to read, of the files themselves or of copies in UTF-8; skipped: paths of
    files that cannot be read. Raises Unfit if there are such files, unless options.skip_bad.
    intake: a conversations.Intake, which records whether the documents are conversations.
    """
    shutil.rmtree(copies, ignore_errors=True)  # left by an interrupted attempt
    copies.mkdir(parents=True)
    documents, cuts, bad, conversions = [], [], {}, collections.defaultdict(list)
    files = [os.path.abspath(path) for path in source.files]
    with progress("reading", sum(map(os.path.getsize, files))) as bar:
        for number, path in enumerate(map(Path, source.files)):
            def look(here, path=path):
                # The bar counts scanned bytes: a file and its copy differ in size.
                bar.total += os.path.getsize(here) - os.path.getsize(path)
                # In a copy, line n is the n-th record of the user's file.
                intake.begin(path, "line" if samefile(here, path) else "record")
                return scan(here, options.column, bar.update, intake)

            found = np.empty((0, 3), np.int64), []
            try:
                copy = copies / str(number)
                here, found, done = readers.readable(path, copy, options.column, look,
                                                     in_folder=os.path.isdir(source.text))
                intake.accept()
                files[number] = os.path.abspath(here)
                conversions[done].append(path)
            except Unfit as e:
                # str(e) is the reason and the advice; a list of several files shows only reasons.
                bad[str(path)] = str(e) if len(files) == 1 else e.reason
            except (PermissionError, NotRegular) as e:
                bad[str(path)] = e.strerror
            documents.append(np.insert(found[0], 0, number, axis=1))
            cuts.append(found[1])
            found = None  # free its array, which may have millions of documents
    report(source, bad, conversions, options.skip_bad)
    if line := intake.report(source.text):
        print(line)
    if len(intake.files) > 1:
        raise Unfit(f"{source.text}: {intake.files[True]} holds conversations, "
                    f"{intake.files[False]} texts; expected one kind; prepare each separately")
    documents = np.concatenate(documents) if len(documents) > 1 else documents[0]
    if not len(documents):
        what = "conversation to train on" if intake.faults else "text, only white space"
        raise Unfit(f"{source.text}: no {what}")
    return documents, cuts, files, [*bad]


def samefile(a, b):
    return os.path.realpath(a) == os.path.realpath(b)


def report(source, bad, conversions, skip_bad):
    """
    Print how files were converted and which ones are left out. Raises Unfit if all files are bad,
    or if any is bad and skip_bad is False. bad: {path: reason}; conversions: {what was done, in
    words: paths}, with the key "" for files that are read as they are.
    """
    count = len(source.files)
    problems = listed(f"{path}: {reason}" for path, reason in bad.items())
    if count > 1:
        problems = f"{len(bad)} of {count} files can't be read: {problems}"
    if len(bad) == count:
        raise Unfit(problems if count == 1 else f"{source.text}: {problems}")
    if bad and not skip_bad:
        raise Unfit(f"{source.text}: {problems}", "train.py --checks=-files or data.py "
                    "--skip_bad=True leaves such files out")
    for done, files in conversions.items():
        if done and count == 1:
            print(f"{source.text}: {done}")
        elif done:
            print(f"{source.text}: {len(files)} of {count} files {done}: {listed(files)}")
    if bad:
        print(f"left out of {source.text}: {problems}")


def scan(path, column, update=lambda size: None, intake=None):
    """
    Return (documents, cuts) of a .txt or .jsonl file: (n, 3) int64 of start, end and flags; (m,)
    int64 of offsets where long documents may be cut, about every SEGMENT bytes. Raises NotUTF8, in
    which case readers.readable converts the file, and Unfit for a line of .jsonl without a text or
    conversation. update: called with the size of each block; intake: a conversations.Intake.
    """
    if not intake:
        intake = conversations.Intake()
        intake.begin(path)
    found, cuts = array.array("q"), array.array("q")
    if path.endswith(".jsonl"):
        scan_lines(path, column, update, found, intake)
    else:
        intake.is_conversation(None, "")
        scan_text(path, update, found, cuts)
    return np.frombuffer(found, np.int64).reshape(-1, 3), np.frombuffer(cuts, np.int64)


def scan_lines(path, column, update, found, intake):
    """
    Append the start, end and flags of each line of a .jsonl file to `found`, except conversations
    that the intake leaves out.
    """
    number, columns = 0, column_names(column)
    for offset, block in blocks(path, True, update):  # True: each block has whole lines only
        ends = np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n")) + 1
        ends = np.union1d(ends, len(block))  # the last line may lack its "\n"
        starts = np.append(0, ends[:-1])
        keeps = np.ones(len(ends), bool)
        for i, (start, end) in enumerate(zip(starts.tolist(), ends.tolist())):
            number += 1
            line = block[start:end].strip()
            if not line:
                continue
            where = f"{intake.unit} {number}"
            record = jsonl_record(line, column, where)
            key = conversations.format_of(record, columns)
            if not key:
                checked_text(line, record, column, where)
            if intake.is_conversation(key, where):
                refuse_doubled(line, [key], where)
                keeps[i] = intake.keeps(record, key, where)
        if intake.kind:  # drop blank lines, which are not conversations
            keeps &= [bool(block[start:end].strip()) for start, end in zip(starts, ends)]
        flags = np.full_like(ends, FIRST | LAST | STRIP)
        rows = np.stack([offset + starts, offset + ends, flags], 1)
        found.frombytes(rows[keeps].tobytes())


def scan_text(path, update, found, cuts):
    """Append the documents of a .txt file to `found`, and the offsets of cuts to `cuts`."""
    begin, has_text, before = 0, False, b"\n"  # before: the byte before the block
    # False: cut a line that is longer than a block. Shorter lines, such as separators, stay whole.
    for offset, block in blocks(path, False, update):
        has_text = has_text or bool(block.removeprefix(BOM).strip())
        if block.startswith(BOM) and not offset:
            begin = len(BOM)
        for match in re.finditer(re.escape(SEPARATOR), block):
            start, end = match.span()
            begins = (block[start - 1:start] or before) in b"\r\n"
            ends = block[end:end + 1] in b"\r\n"  # nothing follows at the end of the file
            if begins and ends:  # the separator is a line of its own
                found.extend((begin, offset + start, FIRST | LAST | STRIP))
                begin = offset + end
        # Cut at the first joint in every SEGMENT bytes. In a block without joints, cut after the
        # last line end in every SEGMENT bytes, or at the end of a block without line ends.
        edges = range(0, len(block), SEGMENT)
        joints = [JOINT.search(block, at, at + SEGMENT) for at in edges]
        inside = [joint.start() + 1 for joint in joints if joint]
        if not inside:
            inside = [end for at in edges if (end := block.rfind(b"\n", at, at + SEGMENT) + 1)]
        cuts.extend(offset + at for at in inside or [len(block)])
        before = block[-1:]
    if has_text:
        strip = STRIP if found else 0  # a text without separators keeps its outer white space
        found.extend((begin, os.path.getsize(path), FIRST | LAST | strip))


def hold_out(documents, files, name, fraction, max_bytes):
    """
    Return `documents`, (n, 4), with the flag VAL on a fraction of their bytes, at most max_bytes.

    Whole documents are drawn at random. If they have less than half of the wanted bytes, the end of
    the text becomes the validation split instead, and the document in which it begins is split in
    two. A document of .jsonl is not split: instead, the smallest documents are held out until they
    have half of the wanted bytes, even beyond max_bytes, but never the largest one. name: name of
    the source, for messages.
    """
    sizes = documents[:, 2] - documents[:, 1]
    total = sizes.sum()
    wanted = min(fraction * total, max_bytes)
    order = np.random.Generator(np.random.PCG64(SEED)).permutation(len(documents))
    order = order[sizes[order] <= wanted]  # a document that is too long does not end the drawing
    drawn = order[np.cumsum(sizes[order]) <= wanted]
    if sizes[drawn].sum() >= wanted / 2:
        documents[drawn, 3] |= VAL
        return documents
    ends = np.cumsum(sizes)
    # The document that contains the boundary between the two splits
    first = np.searchsorted(ends, min(total - wanted, total - 1), "right")
    file, start, end, _ = documents[first]
    if files[file].endswith(".jsonl"):
        if len(documents) < 2:
            raise Unfit(f"{name}: a single document; too few to hold some out for validation")
        smallest = np.argsort(sizes, kind="stable")[:-1]
        count = np.searchsorted(np.cumsum(sizes[smallest]), wanted / 2) + 1
        documents[smallest[:count], 3] |= VAL
        return documents
    documents[first:, 3] |= VAL
    boundary = end - int(ends[first] - (total - wanted))  # offset in the file
    with open_untrusted(files[file]) as f:
        f.seek(boundary)
        block = f.read(min(SEGMENT, end - boundary))
    joint = JOINT.search(block)
    stop = boundary + (joint.start() + 1 if joint else character_start(block, 0))
    if not start < stop < end:
        raise Unfit(f"{name}: too short to hold out {fraction:.0%} for validation")
    documents = np.insert(documents, first, documents[first], axis=0)
    documents[first, 2:] = stop, documents[first, 3] & ~VAL
    documents[first + 1, 1] = stop + (joint is not None)  # drop the space between the two
    return documents


def segments(documents, cuts):
    """
    Return `documents`, (n, 4), with each document of more than 2 * SEGMENT bytes divided into
    several rows. cuts: for each file the offsets where it may be cut.
    """
    rows, done = [], 0
    for k in np.flatnonzero(documents[:, 2] - documents[:, 1] > 2 * SEGMENT):
        file, start, end, flags = documents[k]
        inside = cuts[file][(cuts[file] > start) & (cuts[file] < end)]
        edges = np.concatenate([[start], inside, [end]])
        pieces = np.empty((len(edges) - 1, 4), np.int64)
        pieces[:, 0], pieces[:, 1], pieces[:, 2] = file, edges[:-1], edges[1:]
        pieces[:, 3] = flags & ~FIRST & ~LAST
        pieces[0, 3] |= FIRST
        pieces[-1, 3] |= LAST
        rows += [documents[done:k], pieces]
        done = k + 1
    return np.concatenate([*rows, documents[done:]]) if rows else documents


def spread(rows, max_bytes):
    """
    Return all validation rows, and evenly spaced stretches of the training rows: about STRETCH
    bytes each, about max_bytes in total. Where a stretch begins or ends inside a document, the part
    inside the stretch becomes a document.
    """
    is_val = rows[:, 3] & VAL > 0
    sizes = np.where(is_val, 0, rows[:, 2] - rows[:, 1])
    stretch = (np.cumsum(sizes) - sizes) // STRETCH  # index of each row's stretch
    count = max(1, int(sizes.sum() // STRETCH))
    chosen = np.zeros(count + 1, bool)  # the last is the remainder, shorter and never chosen
    chosen[np.linspace(0, count - 1, max(1, round(max_bytes / STRETCH))).astype(int)] = True
    keep = chosen[stretch] | is_val
    # For each row: whether the row before it is kept, and whether the row after it is.
    keeps_previous, keeps_next = np.append(True, keep[:-1]), np.append(keep[1:], True)
    for flag, keeps_neighbour in (FIRST, keeps_previous), (LAST, keeps_next):
        is_cut = ~keeps_neighbour & (rows[:, 3] & flag == 0)  # a document is cut there
        rows[is_cut, 3] |= flag | STRIP
    return rows[keep]
