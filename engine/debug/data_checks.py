"""
Checks of data and text before the first step. engine/debug/preflight.py runs them; each takes its
CheckContext and raises Bug, Suspicion or Skip.
"""
import codecs
import copy
import functools
import itertools
import math
import os
import re
from pathlib import Path

import numpy as np
import torch

from engine.text import readers, stories
from engine.text.blocks import Unfit
from engine.text.corpus import SEED, SEPARATOR
from engine.text.downloads import DOWNLOADS
from engine.text.sources import text_files
from engine.text.vocabulary import is_made
from engine.untrusted import open_untrusted
from tokenizer import SPACE

GRAM = 13             # min tokens of an n-gram
GRAM_BYTES = 64       # min bytes of text that an n-gram covers on average
PASSAGE = 256         # max tokens of a passage of validation text
COPIED = 0.8          # passages with a larger share of n-grams in the training text are copies
MAX_COPIED = 0.1      # max share of copied passages; measured: up to 0.06 (doc/lab/instruments.md)
VAL_TOKENS, TRAIN_TOKENS = 1 << 17, 1 << 23  # max tokens read of each split
CHUNK = 1 << 18       # training tokens hashed at a time
BUCKETS = 1 << 22     # size of the table that rejects most n-grams before the binary search
HEAD_BYTES = 1 << 20  # bytes read from the beginning of a source


class Bug(Exception):
    """A certain error: ends the run."""


class Suspicion(Exception):
    """A probable error: prints a warning."""


class Skip(Exception):
    """The check does not apply to this run."""


# ---- the batch --------------------------------------------------------------------------------

def with_own_prefetch(dataset):
    """Return a copy of the dataset whose batches don't disturb the prefetch of the training."""
    dataset = copy.copy(dataset)
    dataset.prefetch = type(dataset.prefetch)(dataset.make_batch)
    return dataset


def batch(ctx):
    """Find batches that are drawn or altered at random: reading a step again must not change it."""
    dataset = with_own_prefetch(ctx.dataset)  # the prefetched batches of the training stay unread
    for step in (0, 1, 0):
        first, again = dataset.batch(step), ctx.dataset.make_batch(step)
        for kind, a, b in zip(("inputs", "targets"), first, again):
            if a.shape != b.shape or not torch.equal(a, b):
                raise Bug(f"the {kind} of step {step} differ when they are read again: they are "
                          f"drawn at random or changed in place; a resumed run would read other "
                          f"text")


def windows(ctx):
    """
    Return the batch of step 0, x and y (n, T), and the tokens of its windows as they are stored in
    the training split, (n, T + 1).
    """
    x, y = with_own_prefetch(ctx.dataset).batch(0)
    starts, _ = ctx.dataset.windows(0)
    train = ctx.dataset.read_from
    places = (starts[:, None] + np.arange(x.shape[1] + 1)) % len(train)
    return x, y, torch.from_numpy(train[places].astype(np.int64))


def text(ctx):
    """Find altered or augmented inputs: they must equal the text on disk, token by token."""
    if ctx.dataset.masks:  # rows of conversations are not contiguous on disk
        raise Skip
    x, _, stored = windows(ctx)
    same = x == stored[:, :-1]
    if ctx.dataset.window_bos is not None:
        same[:, 0] |= x[:, 0] == ctx.dataset.window_bos
    if not same.all():
        row, t = (~same).nonzero()[0].tolist()
        read, expected = (f"{int(tokens[row, t])} {decoded(ctx, tokens[row, t:t + 1])}"
                          for tokens in (x, stored))
        raise Bug(f"{(~same).float().mean():.1%} of the first batch's inputs are not the text on "
                  f"disk: in sequence {row} token {t} is {read}, on disk {expected}; something "
                  f"alters the batch")


def targets(ctx):
    """Find shifted targets: each must be the token after its input, or negative."""
    if ctx.dataset.masks:
        x, y = with_own_prefetch(ctx.dataset).batch(0)
        stored = torch.cat((x, y[:, -1:]), 1)  # each target but the last is also an input
    else:
        x, y, stored = windows(ctx)
    wrong = (y != stored[:, 1:]) & (y >= 0)
    if wrong.any():
        row, t = wrong.nonzero()[0].tolist()
        end, middle = min(t + 6, x.shape[1]), y[row, 4:-4]
        # Compare all but the ends of the row with the stored tokens at other shifts than 1.
        shifts = [shift for shift in (-1, 0, 2, 3)
                  if torch.equal(middle, stored[row, 4 + shift:][:len(middle)])]
        known = ""
        if shifts and len(middle) > 1:
            known = f" (they are shifted by {shifts[0]}, not by 1)"
        raise Bug(f"targets are not the tokens after their inputs{known}: "
                  f"{decoded(ctx, x[row, t:end])} is followed by {decoded(ctx, y[row, t:end])}, "
                  f"on disk by {decoded(ctx, stored[row, t + 1:end + 1])}")
    if (y < 0).all():
        raise Bug("no token of the first batch is a target; look at the mask of the targets")


def decoded(ctx, tokens):
    """Return the text of tokens (n,) in quotes, or their numbers if the vocabulary lacks one."""
    tokens, tokenizer = tokens.tolist(), ctx.dataset.tokenizer
    if not all(0 <= i < tokenizer.vocab_size for i in tokens):
        return str(tokens)
    return repr(tokenizer.decode(tokens)[:40])


# ---- the vocabulary ---------------------------------------------------------------------------

def vocabulary(ctx):
    """
    Find a wrong vocabulary: tokens on disk that it lacks, a first document on disk that is not in
    the source, or text that changes when it is encoded and decoded. If the source can't be read, or
    its first document is in the validation split, the decoded first document takes the source's
    place, and encoding it must return the tokens on disk.
    """
    tokenizer, size = ctx.dataset.tokenizer, ctx.args.vocab_size
    if tokenizer.vocab_size != size:
        raise Bug(f"the vocabulary has {tokenizer.vocab_size} pieces, the model {size}")
    for split in ("train", "val"):
        largest = int(np.max(getattr(ctx.dataset, split)[:1 << 20]))
        if largest >= size:
            raise Bug(f"{ctx.dataset.folder}/{split}.bin has the token {largest}, but the "
                      f"vocabulary has {size} pieces: one of them belongs to other data")
    if ctx.dataset.masks:  # decoding leaves out the markers
        return
    ids = first_document(ctx.dataset)
    first = tokenizer.decode(ids).rstrip("\ufffd")  # the last token may be part of a character
    source = source_text(ctx.config)
    if not source or is_held_out(ctx.dataset, source):
        source = first
        # The document is cut at ids' end, which changes how its last characters are encoded.
        again = tokenizer.encode(first)[:len(ids) // 2]
        if tokenizer.unk_id not in ids and again != ids[:len(again)]:
            raise Bug(f"the first document on disk reads {first[:60]!r}, which this vocabulary "
                      f"encodes differently: it was encoded with another one")
    restored = tokenizer.decode(tokenizer.encode(source))
    if first.strip() not in restored and first.strip() not in source:
        raise Bug(f"the first document on disk reads {first[:60]!r}, which is not in "
                  f"{ctx.config.data}: it was encoded with another vocabulary, or from other text")
    if restored != source:
        raise Suspicion(lost_text_message(source, restored, ctx.config.vocab_source))


def first_document(dataset, split="train", max_tokens=64):
    """Return the first tokens of a split's first document, without BOS and EOS."""
    tokens = np.asarray(getattr(dataset, split)[:1 << 16])
    starts = np.flatnonzero(tokens == dataset.tokenizer.bos_id)
    start = starts[0] + 1 if len(starts) else 0
    ids = tokens[start:start + max_tokens].tolist()
    eos_id = dataset.tokenizer.eos_id
    return ids[:ids.index(eos_id)] if eos_id in ids else ids


def is_held_out(dataset, source):
    """Return whether the source's first document is in the validation split."""
    tokenizer = dataset.tokenizer
    held_out = tokenizer.decode(first_document(dataset, "val")).rstrip("\ufffd").strip()
    start = tokenizer.decode(tokenizer.encode(source[:1 << 12]))
    return start.lstrip().startswith(held_out)


def source_text(config):
    """Return the beginning of the source's text; None unless it is local, plain UTF-8 text."""
    if config.data.split(":")[0] == "stories":
        return stories.write(SEED, 0)[0]
    source = Path(config.data)
    if config.data in DOWNLOADS or not source.exists() or Path(source, "meta.json").exists():
        return None
    try:
        files = text_files(source, Path(config.cache).resolve(), config.column)[0]
    except (OSError, Unfit):
        return None
    found = b""
    for path in files:
        structured = *readers.LINES, *readers.TABLES, ".json", ".parquet"
        if readers.suffix(path) in structured or path.suffix.lower() in readers.PACKED:
            return None
        with open_untrusted(path) as f:
            found += f.read(HEAD_BYTES)
        if len(found) >= HEAD_BYTES:
            break
    if b"\0" in found:  # probably UTF-16, which is not decoded here
        return None
    is_cut = len(found) >= HEAD_BYTES  # maybe within a character
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    try:
        return without_separators(decoder.decode(found[:HEAD_BYTES], final=not is_cut), is_cut)
    except UnicodeDecodeError:  # not UTF-8
        return None


def without_separators(text, is_cut):
    """
    Split a text at the lines that hold only SEPARATOR and return its documents, stripped and
    joined. Return a text without such lines unstripped. is_cut: the text may end within a
    separator; remove the beginning of one from its end.
    """
    separator = SEPARATOR.decode()
    documents = re.split(rf"(?<![^\r\n]){re.escape(separator)}(?![^\r\n])", text)
    if is_cut:
        for n in range(len(separator), 0, -1):
            if documents[-1].endswith(separator[:n]):
                documents[-1] = documents[-1][:-n]
                break
    return "".join(document.strip() for document in documents) if documents[1:] else documents[0]


def lost_text_message(source, restored, vocab_source):
    """Return a message about the text that encoding and decoding has changed."""
    if restored == source.replace(SPACE, " "):
        kept = "; --vocab_source=bpe keeps them" if is_made(vocab_source) else ""
        return (f"{source.count(SPACE):,} {SPACE} (U+2581) in the first {len(source.encode()):,} "
                f"bytes of the text become spaces, as this vocabulary writes a space as {SPACE}"
                f"{kept}")
    pairs = enumerate(zip(source, restored))
    at = next((i for i, (a, b) in pairs if a != b), min(len(source), len(restored)))
    lines = itertools.zip_longest(source.split("\n"), restored.split("\n"), fillvalue="")
    lost = sum(changed_bytes(*pair) for pair in lines)
    return (f"the vocabulary does not restore all of the text: of the first "
            f"{len(source.encode()):,} bytes {lost:,} are lost or changed, first "
            f"{source[at:at + 20]!r} which becomes {restored[at:at + 20]!r}; ./run writes text "
            f"that way, too")


def changed_bytes(a, b):
    """Count the bytes of line a that line b changes; if b only adds text, count what it adds."""
    start = len(os.path.commonprefix((a, b)))
    a, b = a[start:], b[start:]
    end = len(os.path.commonprefix((a[::-1], b[::-1])))
    return len(a[:len(a) - end].encode()) or len(b[:len(b) - end].encode())


# ---- the split --------------------------------------------------------------------------------

def leak(ctx):
    """Find validation text in the training text: passages that share nearly all their n-grams."""
    copied, total, read = copied_passages(ctx.dataset)
    # Only the share `read` of the training text was searched: lower the limit in proportion.
    if total and copied > max(1, MAX_COPIED * total * read):
        part = "" if read == 1 else f" ({read:.0%} of that text was read)"
        raise Suspicion(f"{copied} of {total} passages of validation text are in the training "
                        f"text{part}, so the validation loss says little about new text; remove "
                        f"the copies, or hold out other documents")


def copied_passages(dataset):
    """
    Return the number of passages of validation text that are also in the training text, the total
    number of passages, and the share of the training text that was read.
    """
    bos_id, meta = dataset.tokenizer.bos_id, dataset.meta
    n = max(GRAM, math.ceil(GRAM_BYTES * meta["val_tokens"] / max(1, meta["val_bytes"])))
    val = np.concatenate(list(spread(dataset.val, VAL_TOKENS, 1 << 12)))
    within_document = ~has_bos(val, bos_id, n)
    grams = hashes(val, n)[within_document]
    if not len(grams):
        return 0, 0, 1.0
    begins = has_bos(val, bos_id, 1) | (np.arange(len(val)) % PASSAGE == 0)
    passage = np.cumsum(begins)[:len(within_document)][within_document]  # index, for each n-gram
    known, index = np.unique(grams, return_inverse=True)
    candidates, found = np.zeros(BUCKETS, bool), np.zeros(len(known), bool)
    candidates[known % BUCKETS] = True
    for chunk in spread(dataset.train, TRAIN_TOKENS, CHUNK):  # mark the n-grams it contains
        theirs = hashes(chunk, n)
        theirs = theirs[candidates[theirs % BUCKETS]]
        at = np.minimum(np.searchsorted(known, theirs), len(known) - 1)
        found[at[known[at] == theirs]] = True
    hits, grams_in_passage = np.bincount(passage, found[index]), np.bincount(passage)
    is_long = grams_in_passage >= n  # shorter passages are not counted
    copied = (hits > COPIED * grams_in_passage) & is_long
    return int(copied.sum()), int(is_long.sum()), min(1.0, TRAIN_TOKENS / len(dataset.train))


def spread(tokens, max_tokens, size):
    """
    Yield chunks of `size` tokens: all of them, or evenly spaced ones if there are more than
    max_tokens.
    """
    count, kept = math.ceil(len(tokens) / size), max(1, max_tokens // size)
    for k in range(min(count, kept)):
        at = k * size
        if count * size > max_tokens:
            at = k * (len(tokens) - size) // max(1, kept - 1)
        yield np.asarray(tokens[at:at + size])


def has_bos(tokens, bos_id, n):
    """Return whether one of each n consecutive tokens is BOS: (len(tokens) - n + 1,) bool."""
    count = np.cumsum(np.append(0, tokens == bos_id))
    return count[n:] > count[:-n]


BASE = 0x9E3779B97F4A7C15  # odd, so that it has an inverse modulo 2^64


@functools.cache
def powers(base, count):
    """Return the first `count` powers of base modulo 2^64, from base^1 on."""
    return np.cumprod(np.full(count, base, np.uint64))


def hashes(tokens, n):
    """
    Return a hash of each n consecutive tokens, (len(tokens) - n + 1,) uint64: the polynomial
    sum_j x[i + j] BASE^j modulo 2^64, x the scrambled tokens. It is computed for all i at once: a
    difference of prefix sums of x[k] BASE^(k + 1), divided by BASE^(i + 1).
    """
    if len(tokens) < n:
        return np.empty(0, np.uint64)
    x = (tokens.astype(np.uint64) + np.uint64(1)) * np.uint64(0xBF58476D1CE4E5B9)
    sums = np.cumsum(np.append(np.uint64(0), x * powers(BASE, len(x))))
    inverse = pow(BASE, -1, 1 << 64)
    found = (sums[n:] - sums[:-n]) * powers(inverse, len(x))[:len(x) - n + 1]
    return found ^ (found >> np.uint64(29))
