"""
Any text → a prepared folder. data.py says which sources there are and what a document is; its Dataset reads the folder.

Long documents are encoded in segments, cut at a single space between two words. No piece of a Llama-style vocabulary
holds a space behind a letter, so the tokens are those of the whole text. (Where a file has no such space for BLOCK
bytes, the cuts fall behind lines, or between two characters; the tokens around them can then differ, but not the text.)

Worker processes encode a source part by part, and publish each part when it is on disk. What was interrupted
continues with the parts that are missing.
"""
import array
import collections
import concurrent.futures
import contextlib
import dataclasses
import errno
import hashlib
import http.client
import itertools
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from configurator import fail  # first: it answers for packages that are missing

import numpy as np
from tqdm import tqdm

from engine.text import readers, stories
from engine.advice import hub
from engine.files import publish, refuse_odd, replacing, sha256
from engine.text.readers import Unfit, blocks, character_start, jsonl_text, listed
from engine.untrusted import is_plain_name, open_untrusted, read_json, reading
from tokenizer import PRE_TOKENIZERS, Bytes, Characters, Tokenizer, train_byte_level, train_tokenizer
from engine.formats import hf_vocabulary

VERSION = 1
TOKENS = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}  # what token ids are stored as
META = {"vocab_size": int, "vocab_source": str, "tokenizer": str, "tokenizer_sha256": str, "dtype": str, "source": str,
        "fingerprint": str} | dict.fromkeys((f"{split}_{what}" for split in ("train", "val")
                                             for what in ("tokens", "documents", "bytes")), int)  # of a meta.json
CHECKED_AT_ONCE = 1 << 28  # bytes of prepared data that are read through when they are loaded
SEGMENT = 1 << 16   # bytes of a long document encoded at once
PART = 1 << 21      # bytes of text in a part, the unit of progress
STRETCH = 1 << 18   # bytes of text that are taken together where a part of a text is prepared
SAMPLE = 1 << 25    # bytes of text a vocabulary is trained on
STORIES = 60_000    # how many stories "stories" is: about 34 MB
LEAST_PIECES = 320  # of a vocabulary that is learned, 259 of which are specials and bytes
STORY_BYTES = 560   # of an average story, for the progress bar
HELD_OUT = 5e6      # bytes of text that validation takes at most, unless val_fraction is given
SEED = 1337         # of the stories, and of the draw of validation documents
SEPARATOR = b"<|endoftext|>"
BOM = b"\xef\xbb\xbf"  # is no text
JOINT = re.compile(rb"[^\s\x81] [^\s\xe2]")  # a single space between words, neither of which touches it with a U+2581
VAL, FIRST, LAST, STRIP = 1, 2, 4, 8  # flags of a row: is validation; begins, ends a document; white space is cut off

# What data are prepared with, and where each setting says nothing.
NEUTRAL = {"vocab_source": "custom", "vocab_size": 0, "vocab_most": 0, "val_fraction": 0.0, "text_most": 0, "column": "text",
           "skip_bad": False}

# Size and sha256 of the files of each source that is downloaded: those of TinyStories at the revision that tinystories_url
# in data.py names, as public copies of them are listed. The downloads have only been tried against a server of the tests.
DOWNLOADS = {
    "tinystories": {
        "TinyStoriesV2-GPT4-train.txt":
            (2_227_753_162, "6418d412de72888f52b5142c761ac21a582f7d1166f0bfbdb5f03ccfdec90443"),
        "TinyStoriesV2-GPT4-valid.txt":
            (22_502_601, "6874bae9a4c1a4e7edcf0e53b86c17817e9cf881fc75ff2368da457b80c0585d"),
    },
    "tinyshakespeare": {
        "input.txt": (1_115_394, "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"),
    },
}
PATIENCE = (1, 2, 4, 8, 16)  # seconds to wait after one, two, … failures in a row before a download goes on


# ---- a prepared folder ------------------------------------------------------------------------------------------

@dataclasses.dataclass
class Prepared:
    """A prepared folder. meta: dict of meta.json; train, val: 1-D memory maps of token ids; tokenizer: Tokenizer."""
    folder: Path
    meta: dict
    train: np.memmap
    val: np.memmap
    tokenizer: Tokenizer


def is_prepared(folder):
    """Whether a folder is of data that were prepared, or what is left of it, rather than one with a meta.json of somebody's own."""
    beside = ("train.bin", "val.bin", "tokenizer.model", "tokenizer.json")
    return Path(folder, "meta.json").is_file() and any(Path(folder, name).exists() for name in beside)


def load(folder):
    """
    The Prepared of a folder. Sizes and the vocabulary's hash are always checked, and the hash of the tokens where they are
    less than 256 MB (0.2 s); what disagrees is refused in one line.
    """
    folder = Path(folder)
    with reading(folder, "prepared data, a folder that data.py made", fail):
        meta = read_meta(folder)
        splits, size = [], 0
        for split in ("train", "val"):
            with open_untrusted(folder / f"{split}.bin") as file:
                found, expected = os.fstat(file.fileno()).st_size, TOKENS[meta["dtype"]].itemsize * meta[f"{split}_tokens"]
                if found != expected:
                    fail(f"{folder}/{split}.bin: {found} bytes, expected {expected}; delete {folder} to prepare it anew")
                splits.append(np.memmap(file, TOKENS[meta["dtype"]], "r"))
            size += found
        tokenizer = Tokenizer.load(folder / meta["tokenizer"])
        same = tokenizer.sha256() == meta["tokenizer_sha256"] and tokenizer.vocab_size == meta["vocab_size"]
        if not same or (size < CHECKED_AT_ONCE and fingerprint(folder) != meta["fingerprint"]):
            fail(f"{folder}: is not what its meta.json records (hashes differ); delete it to prepare it anew")
        for tokens in splits if size < CHECKED_AT_ONCE else ():  # of larger ones each batch is checked, see Dataset
            check_ids(folder, tokens, meta["vocab_size"])
    return Prepared(folder, meta, *splits, tokenizer)


def read_meta(folder):
    """
    Return the meta.json of a prepared folder. Raises OSError, or ValueError, KeyError or TypeError where it does not say what
    a prepared folder is read by.
    """
    meta = read_json(Path(folder, "meta.json"))
    if meta["version"] != VERSION:
        raise ValueError(f"version {meta['version']!r}; delete it to prepare it anew")
    for name, kind in META.items():
        if type(meta[name]) is not kind or kind is int and not 0 < meta[name] < 1 << 62:
            raise ValueError(f"its meta.json has {name}={repr(meta[name])[:80]}")
    if meta["dtype"] not in TOKENS or not is_plain_name(meta["tokenizer"]):
        raise ValueError(f"its meta.json has dtype={meta['dtype'][:80]!r} and tokenizer={meta['tokenizer'][:80]!r}")
    if any(meta[f"{split}_documents"] > meta[f"{split}_tokens"] for split in ("train", "val")):
        raise ValueError("its meta.json counts more documents than tokens")
    return meta


def check_ids(folder, tokens, vocab_size):
    """Return an array of token ids, or refuse those that the vocabulary of a prepared folder lacks."""
    if (largest := int(tokens.max())) >= vocab_size:
        fail(f"{folder}: holds the token {largest}, expected ids below the vocabulary's size {vocab_size}; delete it to prepare it "
             "anew")
    return tokens


def fingerprint(folder):
    """Hex sha256 of train.bin followed by val.bin."""
    return sha256(folder / "train.bin", folder / "val.bin")


def as_prepared(s, given, meta):
    """
    {setting: value} of those that say otherwise than how the folder s.data was prepared (meta: its meta.json); {} where it is
    no such folder. Where one of them is `given` it is refused: it would change nothing.
    """
    taken = {}
    for name in NEUTRAL if is_prepared(s.data) else ():
        value, found = getattr(s, name), meta.get(name, NEUTRAL[name])
        if value in (found, NEUTRAL[name]) and name != "vocab_source" or name == "vocab_most" and value >= meta["vocab_size"]:
            continue
        if name == "vocab_source" and is_vocabulary(value, name in given, meta, s.cache):
            continue
        if name in given:
            so = f", with {name}={found}" if name in meta else ""
            fail(f"--{name}={value}: {s.data} is prepared already{so}; leave --{name} out, or set it to {found} where a preset has "
                 f"it, or give a text")
        taken[name] = found
    return taken


def is_vocabulary(source, given, meta, cache):
    """Whether a vocab_source names that of prepared data. One that is not given may have gone since."""
    if source == meta["vocab_source"] or source.partition(":")[0] in ("custom", "bpe", "byte", "char"):
        return source == meta["vocab_source"]
    return (given or Path(source).exists()) and Tokenizer.load(vocabulary_file(source, cache)).sha256() == meta["tokenizer_sha256"]


# ---- what to prepare --------------------------------------------------------------------------------------------

def prepare(source, vocab_source="custom", vocab_size=0, val_fraction=0.0, cache="cache", workers=0, skip_bad=False,
            column="text", urls=None, vocab_most=0, text_most=0):
    """
    The prepared folder of a source (a Path), made if it is not there yet, whatever the number of worker processes
    (0: one for each core) with the same bytes. val_fraction: 0 holds out a tenth, HELD_OUT bytes at most; skip_bad: files
    of a folder that can't be read are left out, not refused; column: where the text stands in tables and .jsonl; urls:
    {source: URL} of the folders that DOWNLOADS are in; vocab_most: see train_tokenizer; text_most: see spread.
    """
    try:
        refuse_odd(source=source, cache=cache, vocab_source=vocab_source)
        if is_prepared(source):
            return Path(source)
        job = describe(str(source), vocab_source, vocab_size, val_fraction, Path(cache).resolve(), skip_bad, column, vocab_most,
                       text_most)
        folder = Path(cache) / job["name"]
        if not folder.exists():
            with locked(Path(cache)):  # who waits here finds the work done
                if not folder.exists():
                    build(job, folder, workers or cores(), urls)
        return folder
    except Unfit as e:
        fail(e)
    except BrokenPipeError:  # whoever read what is printed here has gone
        raise
    except OSError as e:
        again = "; make room, then the same command continues" if e.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        fail(f"{e.filename or cache}: {e.strerror or e}{again}")
    except KeyboardInterrupt:
        fail(f"{source}: preparation was interrupted; the same command continues it")


def describe(source, vocab_source, vocab_size, val_fraction, cache, skip_bad, column="text", vocab_most=0, text_most=0):
    """All that preparation needs to know, as a dict for JSON; its "name" holds a hash of all the result depends on."""
    if not 0 <= val_fraction < 1:
        fail(f"--val_fraction={val_fraction}: expected a number between 0 and 1 (0: a tenth, at most 5 MB)")
    for name, value in ("vocab_size", vocab_size), ("vocab_most", vocab_most), ("text_most", text_most):
        if value < 0:
            fail(f"--{name}={value}: expected 0 or more")
    if 0 < vocab_most < LEAST_PIECES:
        fail(f"--vocab_most={vocab_most}: too few, expected at least {LEAST_PIECES}, or --vocab_source=byte")
    if vocab_source == "custom" and vocab_size and vocab_size < 260:
        fail(f"--vocab_size={vocab_size}: too small, expected at least 260 (3 specials, 256 bytes and the characters), "
             f"or --vocab_source=byte or char")
    job = {"source": source, "stories": 0, "files": [], "changes": [], "left_out": "", "skip_bad": skip_bad, "column": column,
           "val_fraction": val_fraction or 0.1, "val_most": HELD_OUT if not val_fraction else math.inf,
           "text_most": text_most, "vocab_source": vocab_source, "vocab_size": vocab_size, "vocab_file": "",
           "vocab_most": 0 if vocab_size else vocab_most, "vocab_goal": vocab_size or vocab_most}
    unsure = False  # whether the tenth may be above the limit, or below
    if source.split(":")[0] == "stories":
        job["stories"] = count_stories(source)
        if text_most:
            fail(f"--text_most={text_most}: the stories are made, not read; expected stories:N")
        name, depends_on, size = source.replace(":", ""), [job["stories"], stories.GRAMMAR], 0
        job["vocab_goal"] = job["vocab_goal"] or stories.VOCAB_SIZE
    elif source in DOWNLOADS:
        files = DOWNLOADS[source]
        job["files"] = [str(cache / source / file) for file in files]
        name, depends_on, size = source, list(files.items()), sum(size for size, _ in files.values())
    else:
        files, job["left_out"] = text_files(Path(source), cache, column)
        job["files"], job["changes"] = [str(path) for path in files], changes(files)
        name, depends_on, size = Path(source).resolve().stem, [*job["changes"]], sum(map(unpacked_size, files))
        unsure = size != sum(p.stat().st_size for p in files)
    job["vocab_goal"] = job["vocab_goal"] or usual_pieces(size)
    kind, _, pre = vocab_source.partition(":")
    if pre and kind in ("custom", "byte", "char"):
        fail(f"--vocab_source={vocab_source}: expected {kind}; how many pieces, --vocab_size says")
    if kind == "bpe" and pre not in ("", *PRE_TOKENIZERS):
        fail(f"--vocab_source={vocab_source}: expected bpe, or bpe:NAME with a pre-tokenizer's name: {', '.join(PRE_TOKENIZERS)}")
    if kind not in ("custom", "bpe", "byte", "char"):
        job["vocab_file"] = vocabulary_file(vocab_source, cache)
        depends_on.append(Tokenizer.load(job["vocab_file"]).sha256())
        vocab_source = Path(job["vocab_file"]).stem
    key = [VERSION, depends_on, vocab_source, vocab_size, job["vocab_goal"], job["val_fraction"], *["skip_bad"] * skip_bad,
           *["vocab_most"] * bool(job["vocab_most"]), *["text_most", text_most] * bool(text_most), *[column] * (column != "text"),
           *["most"] * (not val_fraction and (unsure or size > 10 * HELD_OUT))]
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:8]
    words = [name, vocab_source + str(vocab_size or ""), digest]
    job["name"] = "-".join(re.sub(r"[^\w.]+", "_", word)[:40] for word in words)
    return job


def usual_pieces(size):
    """Pieces of a vocabulary for `size` bytes: the power of two next to the square root, 1024 for 1 MB, 32768 for 1 GB."""
    return min(max(1 << round(math.log2(max(1, size)) / 2), 512), 32768)


def text_bytes(source, cache="cache", column="text"):
    """How many bytes of text a source holds, about, without preparing it; what is no source is refused in one line."""
    source = str(source)
    if is_prepared(source):
        meta = load(source).meta
        return meta["train_bytes"] + meta["val_bytes"]
    if source.split(":")[0] == "stories":
        return count_stories(source) * STORY_BYTES
    if source in DOWNLOADS:
        return sum(size for size, _ in DOWNLOADS[source].values())
    try:
        files = text_files(Path(source), Path(cache).resolve(), column)[0]
        return round(sum(unpacked_size(path) * text_share(path, column) for path in files))
    except OSError as e:
        fail(f"{e.filename or source}: {e.strerror or e}")


def unpacked_size(path):
    """Bytes of a file once it is unpacked: what the end of a .gz file says, of others about."""
    size = path.stat().st_size
    if path.suffix == ".gz" and size >= 18:
        with open_untrusted(path) as f:
            f.seek(-4, os.SEEK_END)
            told = int.from_bytes(f.read(), "little")  # modulo 4 GB, and of the last member alone
        if size / 2 <= told <= 20 * size:
            return told
    return size * (readers.PACKED | {".parquet": 2}).get(path.suffix, 1)


def text_share(path, column):
    """How much of a .jsonl file is text rather than what stands beside it, by its beginning; 1 of other files."""
    if path.suffix != ".jsonl":
        return 1
    with open_untrusted(path) as f:
        lines = f.readlines(1 << 20)
    with contextlib.suppress(Unfit):  # which is told when the file is read
        return sum(len(jsonl_text(line, column, 0)) for line in lines if line.strip()) / max(1, sum(map(len, lines)))
    return 1


def vocabulary_file(vocab_source, cache):
    """
    The file of a vocabulary that is not made here: llama2's, that of other prepared data or of Hugging Face's folder, or the
    path itself.
    """
    path = Path("tokenizer.model" if vocab_source == "llama2" else vocab_source)
    if is_prepared(path):
        path /= load(path).meta["tokenizer"]
    elif (path / "tokenizer.model").is_file():  # of Hugging Face's folder, whose other files say more of it
        path = keep_vocabulary(hf_vocabulary.read_hf_vocabulary(path), cache)
    elif (path / "tokenizer.json").is_file():
        path /= "tokenizer.json"
    if not path.is_file():
        fail(f"--vocab_source={vocab_source}: no file {path}; expected custom, bpe, byte, char, llama2 (tokenizer.model in "
             f"the working directory) or the path of a tokenizer")
    return str(path)


def keep_vocabulary(vocabulary, cache):
    """The vocabulary of somebody else's model as a file in the cache, for data to be prepared with."""
    kind = ".model" if vocabulary.kind == "sentencepiece" else ".json"
    path = Path(cache, "vocabularies", vocabulary.sha256()[:16] + kind)
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as f:
            f.write(vocabulary.data)
    return path


def count_stories(source):
    """N of "stories:N"."""
    digits = source.partition(":")[2] if ":" in source else str(STORIES)
    if not re.fullmatch("[0-9]{1,9}", digits) or int(digits) < 2:
        fail(f"{source}: expected stories, or stories:N with N from 2 to 999999999")
    return int(digits)


def text_files(path, cache, column):
    """
    ([the file itself], ""), or the files to read in a folder and the folders in it, in order of their names, and what was
    left out there, as words.
    """
    files, left_out = walk(path, cache, column) if path.is_dir() else ([path], "")
    if not files:
        fail(f"{path}: a folder without text files, and not one that data.py prepared (no meta.json)"
             + f"; left out: {left_out}" * bool(left_out))
    if not path.exists():
        fail(f"{path}: no such file; expected stories, {', '.join(DOWNLOADS)}, a text file, or a folder of text files"
             f"{hub(path, 'dataset')}")
    if not path.is_dir():
        open_untrusted(path).close()  # what can't be opened is told before any work is done
    if not any(file.stat().st_size for file in files):
        fail(f"{path}: is empty, expected text")
    return files, left_out


def walk(path, cache, column):
    """
    The files to read below a folder, sorted, and what was left out, as words: its documents (see readers.has_documents), or
    all files that are text, where the others among them hold more than the documents.
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
            seen = not name.startswith(".") and file.is_file() and not (file.is_symlink() and is_within(file, path))
            (hidden if not seen else documents if may_be_documents(file, column) else others).append(file)
    size = sum(file.stat().st_size for file in documents)
    if sum(file.stat().st_size for file in others) > size:
        plain = [file for file in others if readers.suffix(file) not in readers.TABLES and readers.is_text(file)]
        if sum(file.stat().st_size for file in plain) > size:
            documents, others = documents + plain, sorted(set(others) - set(plain))
    left_out = [f"{len(some)} {what}: {listed(p.relative_to(path) for p in some)}" for some, what in
                ((folders, "folder(s)"), (hidden + others, "file(s) hidden or of another kind")) if some]
    return sorted(documents), "; ".join(left_out)


def is_within(file, folder):
    """Whether the file that a link leads to lies below a folder, where it is read anyway."""
    return Path(os.path.realpath(file)).is_relative_to(os.path.realpath(folder))


def may_be_documents(file, column):
    """readers.has_documents; also of a file that can't be opened, which is told with all the others."""
    try:
        return readers.has_documents(file, column)
    except (Unfit, OSError):
        return True


def is_foreign(folder, cache):
    """Whether the text in a folder is none to learn from: hidden, linked, installed, a run's, or in the cache."""
    return (folder.name.startswith(".") or folder.is_symlink() or folder.resolve() == cache
            or folder.name in ("node_modules", "site-packages", "__pycache__", "wandb")
            or folder.name.endswith((".egg-info", ".dist-info"))
            or any((folder / sign).exists() for sign in ("pyvenv.cfg", "trainer.json", "log.jsonl")))


def source_files(source, cache, column="text"):
    """What `changes` says of every file of a source, [] where they are not the user's."""
    path = Path(source)
    if not path.exists() or is_prepared(path):
        return []
    return changes(text_files(path, Path(cache).resolve(), column)[0])


def changes(files):
    """What tells whether files have changed: [[path, size, time of change in ns]]."""
    return [[str(p.resolve()), p.stat().st_size, p.stat().st_mtime_ns] for p in map(Path, files)]


# ---- preparing --------------------------------------------------------------------------------------------------

def build(job, folder, workers, urls):
    """Make a prepared folder, in folder.partial, where what is finished waits for another try if this one fails."""
    partial = folder.with_name(folder.name + ".partial")
    (partial / "parts").mkdir(parents=True, exist_ok=True)
    if job["left_out"]:
        print(f"left out of {job['source']}: {job['left_out']}")
    for file, (size, digest) in DOWNLOADS.get(job["source"], {}).items():
        download(folder.parent / job["source"] / file, urls[job["source"]], size, digest)
    try:
        if not (partial / "meta.json").exists():
            if not (partial / "rows.npy").exists():
                rows = plan(job, partial / "texts")
                write(partial / "job.json", json.dumps(job).encode())
                write(partial / "rows.npy", lambda f: np.save(f, rows))
            job = json.loads((partial / "job.json").read_text()) | {name: job[name] for name in ("source", "files", "vocab_file")}
            rows = np.load(partial / "rows.npy", mmap_mode="r")
            tokenizer = vocabulary(job, rows, partial)
            encode_parts(job, rows, partial, workers)
            meta = assemble(job, rows, partial, tokenizer)
            if job["changes"] and job["changes"] != changes(job["files"]):
                raise Unfit(f"{job['source']}: changed while it was read; run the same command again")
            write(partial / "meta.json", json.dumps(meta, indent=1).encode())
    except (Unfit, SystemExit):  # nothing here is worth keeping
        shutil.rmtree(partial, ignore_errors=True)
        raise
    for name in "parts", "texts":
        shutil.rmtree(partial / name, ignore_errors=True)
    for path in [partial / "job.json", partial / "rows.npy", *partial.glob("*.tmp")]:
        path.unlink(missing_ok=True)
    publish(partial, folder)
    meta = read_meta(folder)
    part = f" ({meta['train_bytes'] / meta['whole_bytes']:.2%} of the text)" if "whole_bytes" in meta else ""
    print(f"prepared {folder}: {meta['train_tokens']:,} tokens to train on{part}, {meta['val_tokens']:,} to validate, "
          f"vocabulary of {meta['vocab_size']:,}, {meta['train_bytes'] / meta['train_tokens']:.2f} bytes per token")


@contextlib.contextmanager
def locked(cache):
    """Keeps other processes that would prepare data in this cache waiting, until the block or its process ends."""
    import fcntl  # here, since Windows lacks it, of which configurator.py tells
    cache.mkdir(parents=True, exist_ok=True)
    with open(cache / ".lock", "a") as f:
        try:
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another program, which prepares data in {cache}", flush=True)
            fcntl.flock(f, fcntl.LOCK_EX)
        yield


def cores():
    """The cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def write(path, content):
    """Write bytes, or what the function `content` writes into the file it is given, so that it is there whole or not."""
    with replacing(path, f"{path}.{os.getpid()}.tmp") as f:  # nobody else's, even if we were killed and go on twice
        content(f) if callable(content) else f.write(content)


# ---- rows: where the documents are ------------------------------------------------------------------------------

def plan(job, copies):
    """
    The documents as rows (file, start, end, flags) of int64, in order: bytes start to end of a file, or a segment of
    them. Of stories, a row is the stories number start to end. copies: the folder for copies of files, see read_files.
    """
    if job["stories"]:
        n = job["stories"]
        held_out = min(max(round(job["val_fraction"] * n), 1), 2000, n - 1)
        edges = [*range(0, n - held_out, 1000), *range(n - held_out, n, 1000), n]
        return np.array([(0, a, b, FIRST | LAST | VAL * (a >= n - held_out)) for a, b in zip(edges, edges[1:])])
    documents, cuts = read_files(job, copies)
    if job["source"] == "tinystories":  # comes with a validation file
        documents[documents[:, 0] == 1, 3] |= VAL
    else:
        documents = split(documents, job)
    rows = segments(documents, cuts)
    whole = int(weights(job, rows[rows[:, 3] & VAL == 0]).sum())
    if not 0 < job["text_most"] < whole:
        return rows
    job["whole"] = whole
    return spread(rows, job["text_most"])


def spread(rows, most):
    """
    Of the `rows` to train on as many stretches of STRETCH bytes as have `most` bytes, at equal distances; of those of
    validation all. A stretch that begins or ends within a document does so as a document of its own.
    """
    sizes = np.where(rows[:, 3] & VAL, 0, rows[:, 2] - rows[:, 1])
    stretch = (np.cumsum(sizes) - sizes) // STRETCH
    count = max(1, int(sizes.sum() // STRETCH))  # and one that is shorter, which is never chosen
    chosen = np.zeros(count + 1, bool)
    chosen[np.linspace(0, count - 1, max(1, round(most / STRETCH))).astype(int)] = True
    keep = chosen[stretch] | (rows[:, 3] & VAL > 0)
    for flag, beside in (FIRST, np.append(True, keep[:-1])), (LAST, np.append(keep[1:], True)):
        inside = ~beside & (rows[:, 3] & flag == 0)
        rows[inside, 3] |= flag | STRIP
    return rows[keep]


def read_files(job, copies):
    """
    The documents of all files, (n, 4), and for each file where it may be cut. job gets "texts", the file that is read in
    place of each (itself, or a copy in UTF-8), and "bad": [file, why it can't be read], all of which are told in a line.
    """
    shutil.rmtree(copies, ignore_errors=True)  # of another try
    copies.mkdir(parents=True)
    documents, cuts, changed = [], [], collections.defaultdict(list)
    job["texts"], job["bad"] = [os.path.abspath(path) for path in job["files"]], []
    with tqdm(total=sum(map(os.path.getsize, job["files"])), desc="reading", unit="B", unit_scale=True, leave=False, delay=1,
              dynamic_ncols=True) as bar:
        for number, path in enumerate(job["files"]):
            def look(here, path=path):
                bar.total += os.path.getsize(here) - os.path.getsize(path)
                return scan(here, job["column"], bar.update)

            found, where = np.empty((0, 3), np.int64), []
            try:
                here, (found, where), words = readers.readable(Path(path), copies / str(number), job["column"], look)
                job["texts"][number] = os.path.abspath(here)
                changed[words].append(path)
            except Unfit as e:
                job["bad"].append([path, str(e) if len(job["files"]) == 1 else e.reason])
            except PermissionError as e:
                job["bad"].append([path, e.strerror])
                found, where = np.empty((0, 3), np.int64), []
            documents.append(np.insert(found, 0, number, axis=1))
            cuts.append(where)
            found = where = None  # of millions of documents one array is enough
    tell(job, {words: files for words, files in changed.items() if words})
    documents = np.concatenate(documents) if len(documents) > 1 else documents[0]
    if not len(documents):
        raise Unfit(f"{job['source']}: no text, only white space")
    return documents, cuts


def tell(job, changed):
    """Print what was done to files, {words: [file]}, and those that can't be read; refuse them unless skip_bad says so."""
    bad, count, source = [f"{path}: {why}" for path, why in job["bad"]], len(job["files"]), job["source"]
    if bad and count == 1:
        raise Unfit(bad[0])
    if len(bad) == count:
        raise Unfit(f"{source}: none of its {count} files can be read: {listed(bad)}")
    if bad and not job["skip_bad"]:
        raise Unfit(f"{source}: {len(bad)} of {count} files can't be read: {listed(bad)}; --skip_bad=True leaves such files out")
    for words, files in changed.items():
        print(f"{source}: {words}" if count == 1 else f"{source}: {len(files)} of {count} files {words}: {listed(files)}")
    if bad:
        print(f"left out of {source}: {len(bad)} of {count} files, which can't be read: {listed(bad)}")


def scan(path, column, update=lambda size: None):
    """
    The documents of a .txt or .jsonl file, (n, 3) int64 of start, end and flags, and where long ones may be cut, (m,) int64,
    about every SEGMENT bytes. Refuses a file that is not UTF-8. update: told of each block's size.
    """
    found, cuts, jsonl, begin, text = array.array("q"), array.array("q"), path.endswith(".jsonl"), 0, False
    for offset, block in blocks(path, jsonl, update):
        text = text or bool(block.removeprefix(BOM).strip())
        if jsonl:
            ends = offset + 1 + np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n"))
            ends = np.union1d(ends, offset + len(block))
            starts = np.insert(ends, 0, offset)[:-1]
            for number, (start, end) in enumerate(zip((starts - offset).tolist(), (ends - offset).tolist()), begin + 1):
                line = block[start:end].strip()
                if line:
                    jsonl_text(line, column, number)
            begin = number  # of lines
            found.frombytes(np.stack([starts, ends, np.full_like(ends, FIRST | LAST | STRIP)], 1).tobytes())
            continue
        if block.startswith(BOM) and not offset:
            begin = len(BOM)
        at = block.find(SEPARATOR)
        while at >= 0:
            end = at + len(SEPARATOR)
            if block[at - 1:at] in (b"", b"\n", b"\r") and block[end:end + 1] in (b"", b"\n", b"\r"):
                found.extend((begin, offset + at, FIRST | LAST | STRIP))
                begin = offset + end
            at = block.find(SEPARATOR, end)
        joints = [JOINT.search(block, at, at + SEGMENT) for at in range(0, len(block), SEGMENT)]
        ends = [block.rfind(b"\n", at, at + SEGMENT) + 1 for at in range(0, len(block), SEGMENT)]  # of a text without spaces
        cuts.extend([offset + joint.start() + 1 for joint in joints if joint] or [offset + end for end in ends if end]
                    or [offset + len(block)])
    if not jsonl and text:
        found.extend((begin, os.path.getsize(path), FIRST | LAST | STRIP * (len(found) > 0)))
    return np.frombuffer(found, np.int64).reshape(-1, 3), np.frombuffer(cuts, np.int64)


def split(documents, job):
    """`documents`, (n, 4), with the flag VAL on val_fraction of their bytes, or val_most: whole documents, or the last ones."""
    sizes = documents[:, 2] - documents[:, 1]
    wanted = min(job["val_fraction"] * sizes.sum(), job["val_most"])
    order = np.random.Generator(np.random.PCG64(SEED)).permutation(len(documents))
    drawn = order[np.cumsum(sizes[order]) <= wanted]
    if sizes[drawn].sum() >= wanted / 2:
        documents[drawn, 3] |= VAL
        return documents
    first = np.searchsorted(np.cumsum(sizes), min(sizes.sum() - wanted, sizes.sum() - 1), "right")  # where the boundary falls
    documents[first:, 3] |= VAL
    file, start, end, _ = documents[first]
    path = job["texts"][file]
    if path.endswith(".jsonl"):
        if not first:
            raise Unfit(f"{job['source']}: {len(documents)} document(s), the first one of which holds nearly all; "
                 f"too few to hold some out for validation")
        return documents
    boundary = end - int(np.cumsum(sizes)[first] - (sizes.sum() - wanted))
    with open_untrusted(path) as f:
        f.seek(boundary)
        block = f.read(min(SEGMENT, end - boundary))
    joint = JOINT.search(block)
    stop = boundary + (joint.start() + 1 if joint else character_start(block, 0))
    if not start < stop < end:
        raise Unfit(f"{job['source']}: too short to hold out {job['val_fraction']:.0%} for validation")
    documents = np.insert(documents, first, documents[first], axis=0)
    documents[first, 2:] = stop, documents[first, 3] & ~VAL
    documents[first + 1, 1] = stop + (joint is not None)  # the space between the two goes
    return documents


def segments(documents, cuts):
    """`documents`, (n, 4), with a long one as several rows. cuts: for each file the places it may be cut at."""
    rows, done = [], 0
    for k in np.flatnonzero(documents[:, 2] - documents[:, 1] > 2 * SEGMENT):
        file, start, end, flags = documents[k]
        inside = cuts[file][(cuts[file] > start) & (cuts[file] < end)]
        edges = np.concatenate([[start], inside, [end]])
        pieces = np.stack([np.full(len(edges) - 1, file), edges[:-1], edges[1:],
                           np.full(len(edges) - 1, flags & ~FIRST & ~LAST)], axis=1)
        pieces[0, 3] |= FIRST
        pieces[-1, 3] |= LAST
        rows += [documents[done:k], pieces]
        done = k + 1
    return np.concatenate([*rows, documents[done:]]) if rows else documents


def texts(job, rows):
    """Yields (text, bytes, flags, bits) of every document, segment or story of some rows; bits are those of stories."""
    some = (row for at in range(0, len(rows), 1 << 12) for row in rows[at:at + (1 << 12)].tolist())
    for file, group in itertools.groupby(some, key=lambda row: row[0]):
        if job["stories"]:
            for _, start, end, flags in group:
                for text, bits in (stories.write(SEED, number) for number in range(start, end)):
                    yield text, len(text.encode()), flags, bits
            continue
        path = job["texts"][file]
        with open_untrusted(path) as f:
            for _, start, end, flags in group:
                f.seek(start)
                raw = f.read(end - start)
                if path.endswith(".jsonl") and raw.strip():
                    raw = jsonl_text(raw, job["column"], f"at byte {start}")
                if flags & STRIP:
                    raw = raw.lstrip() if flags & FIRST else raw
                    raw = raw.rstrip() if flags & LAST else raw
                if raw:
                    yield text_of(raw, path), len(raw), flags, 0.0


def text_of(raw, path):
    """Bytes that were UTF-8 when the file was looked through."""
    try:
        return raw.decode()
    except UnicodeDecodeError as e:
        raise Unfit(f"{path}: changed while it was read; run the same command again") from e


# ---- tokens -----------------------------------------------------------------------------------------------------

def vocabulary(job, rows, partial):
    """The Tokenizer of a preparation: what an earlier try stored in the folder, or made now and stored there."""
    name, _, pre = job["vocab_source"].partition(":")
    path = partial / tokenizer_name(job)
    if path.exists():
        return Tokenizer.load(path)
    temporary = path.with_name("new_" + path.name)
    if name in ("custom", "bpe"):
        size = min(weights(job, rows).sum(), stories.SAMPLE if job["stories"] else SAMPLE)
        if size > 1 << 23:  # takes longer than one waits without a word
            print(f"learning a vocabulary of {job['vocab_goal']:,} from {size / 1e6:.0f} MB of text: 10 to 60 seconds", flush=True)
        if name == "bpe":
            train_byte_level(sample(job, rows), job["vocab_goal"], temporary, pre or "qwen2", bool(job["vocab_size"]))
        else:
            train_tokenizer(sample(job, rows), job["vocab_goal"], temporary, bool(job["vocab_size"]), bool(job["vocab_most"]))
    elif name == "byte":
        Bytes().save(temporary)
    elif name == "char":
        Characters(stories.CHARACTERS if job["stories"] else characters(job, rows)).save(temporary)
    else:
        Tokenizer.load(job["vocab_file"]).save(temporary)
    size = Tokenizer.load(temporary).vocab_size
    if job["vocab_size"] not in (0, size):
        fail(f"--vocab_size={job['vocab_size']}: the vocabulary of --vocab_source={name} has {size}; "
             f"leave --vocab_size out")
    publish(temporary, path)
    return Tokenizer.load(path)


def tokenizer_name(job):
    """The file name of a preparation's tokenizer."""
    ours = job["vocab_source"].split(":")[0] in ("bpe", "byte", "char") or job["vocab_file"].endswith(".json")
    return "tokenizer.json" if ours else "tokenizer.model"


def sample(job, rows):
    """Yields SAMPLE bytes of training text, from rows at equal distances."""
    rows = rows[rows[:, 3] & VAL == 0]
    limit = stories.SAMPLE if job["stories"] else SAMPLE
    for text, *_ in texts(job, rows[::max(1, round(weights(job, rows).sum() / limit))]):
        yield text


def characters(job, rows):
    """Every character of a source, as a str."""
    found = set()
    with tqdm(total=int(weights(job, rows).sum()), desc="characters", unit="B", unit_scale=True, leave=False, delay=1,
              dynamic_ncols=True) as bar:
        for text, size, *_ in texts(job, rows):
            found.update(text)
            bar.update(size)
    return "".join(found)


def weights(job, rows):
    """Bytes of text in each row, (n,) int64; of stories, about."""
    return (rows[:, 2] - rows[:, 1]) * (STORY_BYTES if job["stories"] else 1)


def part_starts(job, rows):
    """The first row of each part, and the number of rows at the end: (parts + 1,) int64."""
    sizes = weights(job, rows)
    part = (np.cumsum(sizes) - sizes) // PART
    return np.append(np.flatnonzero(np.diff(part, prepend=-1)), len(rows))


def part_encoder(partial):
    """The function that encodes part number N of the preparation in a folder, and publishes it as parts/N.npz."""
    job = json.loads((partial / "job.json").read_text())
    rows = np.load(partial / "rows.npy", mmap_mode="r")
    starts = part_starts(job, rows)
    tokenizer = Tokenizer.load(partial / tokenizer_name(job))
    dtype, ends = token_type(tokenizer), tokenizer.eos_id != tokenizer.bos_id  # a token that is both stands once between two

    def encode(number):
        ids, counts = ([], []), np.zeros((2, 3))  # of train and val: documents, bytes, bits
        for text, size, flags, bits in texts(job, rows[starts[number]:starts[number + 1]]):
            before = ""
            if not flags & FIRST and tokenizer.add_dummy_prefix:  # the tokenizer puts a space in front
                before, text = ("", text[1:]) if text[0] == " " else ("\n", text)
            tokens = tokenizer.encode(before + text, bos=bool(flags & FIRST), eos=bool(flags & LAST) and ends)
            ids[flags & VAL].extend(tokens[len(tokenizer.encode(before, bos=False, eos=False)) if before else 0:])
            counts[flags & VAL] += bool(flags & FIRST), size, bits
        arrays = {"train": np.array(ids[0], dtype), "val": np.array(ids[1], dtype), "counts": counts}
        write(partial / "parts" / f"{number}.npz", lambda f: np.savez(f, **arrays))

    return encode


def token_type(tokenizer):
    """The dtype that token ids are stored in."""
    return np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)


def encode_parts(job, rows, partial, workers):
    """Encode the parts that are missing, each worker taking the next one when it is done with one."""
    starts = part_starts(job, rows)
    sizes = np.add.reduceat(weights(job, rows), starts[:-1])
    missing = [n for n in range(len(sizes)) if not (partial / "parts" / f"{n}.npz").exists()]
    workers = min(workers, len(missing))
    with tqdm(total=int(sizes.sum()), initial=int(sizes.sum() - sizes[missing].sum()), desc="encoding", unit="B",
              unit_scale=True, dynamic_ncols=True) as bar:
        if workers == 1:
            encode = part_encoder(partial)
            for number in missing:
                encode(number)
                bar.update(int(sizes[number]))
            return
        todo = collections.deque(missing)
        with concurrent.futures.ThreadPoolExecutor(max(workers, 1)) as pool:
            try:
                for done in [pool.submit(drive_worker, partial, todo, bar, sizes) for _ in range(workers)]:
                    done.result()
            finally:
                todo.clear()  # after a failure nobody begins another part


def drive_worker(partial, todo, bar, sizes):
    """
    Run one worker process on the parts in `todo` until there are none. It is a program of its own, not a fork or a
    multiprocessing child (which would import train.py, and torch, anew), so it needs nothing of the script that called us.
    Ctrl-C does not reach it; it ends when its input does, so none outlives us even if we are killed.
    """
    program = "import sys; sys.path.insert(0, sys.argv[1]); from engine.text import prepare; prepare.serve(sys.argv[2])"
    command = [sys.executable, "-c", program, str(Path(__file__).resolve().parents[2]), str(partial)]
    with subprocess.Popen(command, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          start_new_session=True) as worker:
        while todo:
            try:
                number = todo.popleft()
            except IndexError:  # another worker was quicker
                break
            with contextlib.suppress(BrokenPipeError):  # if it died, the answer, which is none, tells
                worker.stdin.write(b"%d\n" % number)
            answer = worker.stdout.readline()
            if not answer:
                raise ChildProcessError(errno.ECHILD, f"a process that encodes ended with code {worker.wait()}")
            problem = json.loads(answer)
            if problem:
                raise OSError(*problem) if isinstance(problem, list) else Unfit(problem)
            bar.update(int(sizes[number]))


def serve(partial):
    """The worker: a part's number comes in on a line; null goes out, or what an OSError holds, or why it is Unfit."""
    encode = part_encoder(Path(partial))
    for line in sys.stdin:
        problem = None
        try:
            encode(int(line))
        except Unfit as e:
            problem = str(e)
        except OSError as e:
            problem = [e.errno, e.strerror, e.filename]
        print(json.dumps(problem), flush=True)


def assemble(job, rows, partial, tokenizer):
    """Join the parts to train.bin and val.bin; return what goes into meta.json."""
    parts = [partial / "parts" / f"{n}.npz" for n in range(len(part_starts(job, rows)) - 1)]
    dtype, tokens, counts = token_type(tokenizer), {}, np.zeros((2, 3))
    for split in ("train", "val"):
        def join(f, split=split):
            for path in tqdm(parts, desc=f"joining {split}.bin", unit=" parts", leave=False, delay=1, dynamic_ncols=True):
                with np.load(path) as part:
                    f.write(part[split].tobytes())

        write(partial / f"{split}.bin", join)
        tokens[split] = (partial / f"{split}.bin").stat().st_size // dtype.itemsize
    for path in parts:
        with np.load(path) as part:
            counts += part["counts"]
    if not counts[0, 0] or not counts[1, 0]:
        raise Unfit(f"{job['source']}: no text to {'train on' if not counts[0, 0] else 'validate'}, expected more documents")
    meta = {"version": VERSION, "vocab_size": tokenizer.vocab_size, "vocab_source": job["vocab_source"],
            "tokenizer": tokenizer_name(job), "tokenizer_sha256": tokenizer.sha256(), "dtype": dtype.name,
            "source": job["source"], "train_tokens": tokens["train"], "val_tokens": tokens["val"],
            "train_documents": int(counts[0, 0]), "val_documents": int(counts[1, 0]),
            "train_bytes": int(counts[0, 1]), "val_bytes": int(counts[1, 1]), "fingerprint": fingerprint(partial)}
    if job.get("bad"):
        meta["skipped"] = [path for path, _ in job["bad"]]
    if "whole" in job:
        meta["whole_bytes"] = job["whole"]
    if job["stories"]:
        meta["floor_bpb"] = counts[1, 2] / counts[1, 1]
        meta["entropy_bits_per_story"] = stories.entropy()
    return meta


# ---- download ---------------------------------------------------------------------------------------------------

def download(path, base_url, size, expected):
    """
    Fetch a file to `path` from base_url/name, unless it is there. A broken download continues where it stopped, in this
    call or a later one; only what has that size and sha256 gets the file's name, or is taken where it lies.
    """
    url, part = f"{base_url}/{path.name}", path.with_name(path.name + ".part")
    if path.exists():
        if (digest := sha256(path)) != expected:
            raise Unfit(f"{path}: {path.stat().st_size:,} bytes with sha256 {digest}, expected {size:,} with {expected}; "
                        f"move it away, and the same command downloads it")
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    part.touch()
    have = reached = part.stat().st_size
    if shutil.disk_usage(path.parent).free < size - have:
        raise Unfit(f"{path.parent}: too little room for {path.name}, {(size - have) / 1e9:.1f} GB more needed")
    failures, problem = 0, "connection closed"
    with tqdm(total=size, initial=have, desc=path.name, unit="B", unit_scale=True, dynamic_ncols=True) as bar:
        while have < size:
            try:
                fetch(url, part, size, bar)
            except urllib.error.HTTPError as e:
                problem = f"{e.code} {e.reason}"
                failures += 100 * (400 <= e.code < 500 and e.code not in (408, 429))  # asking again won't help
            except (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError) as e:
                problem = str(getattr(e, "reason", "") or e or type(e).__name__)
            have = part.stat().st_size
            failures = 0 if have > reached and failures < 100 else failures + 1
            reached = max(reached, have)
            if have < size and failures > len(PATIENCE):
                raise Unfit(f"{url}: {problem}, {have:,} of {size:,} bytes are here; the same command continues; or "
                            f"put the file at {path}")
            if have < size and failures:
                time.sleep(PATIENCE[failures - 1])
    if (digest := sha256(part)) != expected:
        part.unlink()
        raise Unfit(f"{url}: {have:,} bytes with sha256 {digest}, expected {size:,} with {expected}; "
             f"deleted, so the same command downloads it anew")
    publish(part, path)


def fetch(url, part, size, bar):
    """One request: append to the file `part` what it still lacks of `size` bytes, or, if the server can't, begin anew."""
    have = part.stat().st_size
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    with urllib.request.urlopen(request, timeout=30) as answer, open(part, "ab") as f:
        if answer.status != 206 or not answer.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
            if answer.status == 206:
                raise http.client.HTTPException("the server sent another range than the one asked for")
            f.truncate(0)
            bar.reset()
            have = 0
        while have <= size and (block := answer.read(1 << 16)):  # more than `size` is wrong, and found by its hash
            f.write(block)
            have += len(block)
            bar.update(len(block))
