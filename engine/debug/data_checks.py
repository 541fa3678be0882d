"""
Checks of data and text before the first step. engine/debug/preflight.py makes them; each takes its Ready, and raises Bug, Suspicion
or Skip.
"""
import copy
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
from engine.untrusted import open_untrusted

GRAM = 13            # tokens that stand together, and ...
GRAM_BYTES = 64      # ... have about so many bytes at least
PASSAGE = 256        # tokens of a passage of validation text
COPIED = 0.8         # of a passage's grams, found in the training text: it is a copy
MOST_COPIED = 0.1    # of all passages, from which on there is a warning; source code has 0.05, prose and stories none
VAL_TOKENS, TRAIN_TOKENS = 1 << 17, 1 << 23  # looked at at most, spread over the split
CHUNK = 1 << 18      # training tokens at a time
BUCKETS = 1 << 22
HEAD = 1 << 20       # bytes of a source's beginning


class Bug(Exception):
    """Certainly wrong: ends the run."""


class Suspicion(Exception):
    """Likely wrong: a warning."""


class Skip(Exception):
    """The check does not apply here."""


# ---- the batch ----------------------------------------------------------------------------------------------------

def asked(dataset):
    """The data set with a prefetch of its own, so that the training's is not touched."""
    other = copy.copy(dataset)
    other.prefetch = type(dataset.prefetch)(other.make_batch)
    return other


def batch(r):
    """A batch that is drawn or altered by chance: the one of a step has to be the same when it is asked twice."""
    dataset = asked(r.dataset)
    for step in (0, 1, 0):
        first, again = dataset.batch(step), r.dataset.make_batch(step)
        for what, a, b in zip(("inputs", "targets"), first, again):
            if a.shape != b.shape or not torch.equal(a, b):
                raise Bug(f"the {what} of step {step} differ when they are asked for twice: something draws by "
                         f"chance or changes them in place; a resumed run would read another text")


def windows(r):
    """(x, y, what the training split has there), of step 0: (n, T), (n, T), (n, T + 1)."""
    x, y = asked(r.dataset).batch(0)
    starts, _ = r.dataset.windows(0)
    train = r.dataset.train
    return x, y, torch.from_numpy(train[(starts[:, None] + np.arange(x.shape[1] + 1)) % len(train)].astype(np.int64))


def text(r):
    """An augmented batch: its inputs have to be the text on disk, token by token."""
    x, _, there = windows(r)
    same = x == there[:, :-1]
    if r.dataset.window_bos is not None:
        same[:, 0] |= x[:, 0] == r.dataset.window_bos
    if not same.all():
        row, t = (~same).nonzero()[0].tolist()
        raise Bug(f"{(~same).float().mean():.1%} of the first batch's inputs are not the text on disk: in sequence {row} token "
                  f"{t} is {spelled(r, x[row, t])}, on disk {spelled(r, there[row, t])}; something alters the batch")


def targets(r):
    """Shifted targets: each has to be the token behind its input, or -1."""
    x, y, there = windows(r)
    wrong = (y != there[:, 1:]) & (y != -1)
    if wrong.any():
        row, t = wrong.nonzero()[0].tolist()
        end = min(t + 6, x.shape[1])
        gaps = [gap for gap in (-1, 0, 2, 3) if torch.equal(y[row, 4:-4], there[row, 4 + gap:][:len(y[row, 4:-4])])]
        shift = f" (they are shifted by {gaps[0]}, not by 1)" if gaps and x.shape[1] > 9 else ""
        raise Bug(f"targets are not the tokens behind their inputs{shift}: {decoded(r, x[row, t:end])} is to be followed by "
                  f"{decoded(r, y[row, t:end])}, on disk {decoded(r, there[row, t + 1:end + 1])}")
    if (y == -1).all():
        raise Bug("no token of the first batch is a target; look at what is masked")


def spelled(r, token):
    return f"{int(token)} {decoded(r, [token])}"


def decoded(r, tokens):
    tokens = [int(i) for i in tokens]
    known = all(0 <= i < r.dataset.tokenizer.vocab_size for i in tokens)
    return repr(r.dataset.tokenizer.decode(tokens)[:40]) if known else str(tokens)


# ---- the vocabulary -----------------------------------------------------------------------------------------------

def vocabulary(r):
    """A wrong vocabulary: ids on disk beyond it, decoded text that is not the source's, text that it does not give back."""
    tokenizer, size = r.dataset.tokenizer, r.args.vocab_size
    if tokenizer.vocab_size != size:
        raise Bug(f"the vocabulary has {tokenizer.vocab_size} pieces, the model {size}")
    for split in ("train", "val"):
        largest = int(np.max(getattr(r.dataset, split)[:1 << 20]))
        if largest >= size:
            raise Bug(f"{r.dataset.folder}/{split}.bin has the token {largest}, the vocabulary {size} pieces: it is that of "
                      f"other data")
    ids = first_document(r)
    said, source = tokenizer.decode(ids).rstrip("\ufffd"), beginning(r)  # the last token may be a part of a character
    if source and is_held_out(r, source):
        source = None
    if source is None:
        back = tokenizer.encode(said)[:len(ids) // 2]  # the end depends on what was cut off
        if tokenizer.unk_id not in ids and back != ids[:len(back)]:
            raise Bug(f"the first document on disk reads {said[:60]!r}, which this vocabulary encodes otherwise: it was "
                      f"encoded with another one")
        source = said
    round_trip = tokenizer.decode(tokenizer.encode(source))
    if said.strip() not in round_trip and said.strip() not in source:
        raise Bug(f"the first document on disk reads {said[:60]!r}, which does not stand in {r.s.data}: it was encoded with "
                  f"another vocabulary, or from another text")
    if round_trip != source:
        raise Suspicion(lost(source, round_trip))


def first_document(r, most=64, split="train"):
    """The first tokens of a split's first document, without BOS and EOS."""
    tokens = np.asarray(getattr(r.dataset, split)[:1 << 16])
    starts = np.flatnonzero(tokens == r.dataset.tokenizer.bos_id)
    start = starts[0] + 1 if len(starts) else 0
    ids = tokens[start:start + most].tolist()
    return ids[:ids.index(r.dataset.tokenizer.eos_id)] if r.dataset.tokenizer.eos_id in ids else ids


def is_held_out(r, source):
    """Whether a source's first document went to validation, so that the first training document may stand anywhere in it."""
    held = r.dataset.tokenizer.decode(first_document(r, split="val")).rstrip("\ufffd").strip()
    start = r.dataset.tokenizer.decode(r.dataset.tokenizer.encode(source[:1 << 12]))
    return start.lstrip().startswith(held)


def beginning(r):
    """The beginning of the source's own text, None where it is not plain text at hand."""
    if r.s.data.split(":")[0] == "stories":
        return stories.write(SEED, 0)[0]
    if r.s.data in DOWNLOADS or not Path(r.s.data).exists() or Path(r.s.data, "meta.json").exists():
        return None
    try:
        files = text_files(Path(r.s.data), Path(r.s.cache).resolve(), r.s.column)[0]
    except (OSError, Unfit):
        return None
    found = b""
    for path in files:
        if readers.suffix(path) in (*readers.LINES, *readers.TABLES, ".json", ".parquet") or path.suffix.lower() in readers.PACKED:
            return None
        with open_untrusted(path) as f:
            found += f.read(HEAD)
        if len(found) >= HEAD:
            break
    if b"\0" in found:  # UTF-16, which was converted
        return None
    try:
        text = found[:HEAD].decode()
    except UnicodeDecodeError as e:
        if e.start <= HEAD - 4:
            return None
        text = found[:e.start].decode()
    return without_separators(text.removeprefix("\ufeff"), cut=len(found) > HEAD)


def without_separators(text, cut):
    """The documents of a text one after the other. cut: whether the text ends anywhere, even inside a separator."""
    separator = SEPARATOR.decode()
    documents = re.split(rf"(?<![^\r\n]){re.escape(separator)}(?![^\r\n])", text)
    if cut:
        begun = next((n for n in range(len(separator), 0, -1) if documents[-1].endswith(separator[:n])), 0)
        documents[-1] = documents[-1][:len(documents[-1]) - begun]
    return "".join(document.strip() for document in documents) if documents[1:] else documents[0]


def lost(source, back):
    """In words: what of a text does not come back from its tokens."""
    at = next((i for i, (a, b) in enumerate(zip(source, back)) if a != b), min(len(source), len(back)))
    gone = sum(changed(*lines) for lines in itertools.zip_longest(source.split("\n"), back.split("\n"), fillvalue=""))
    return (f"the vocabulary does not give all of the text back: of the first {len(source.encode()):,} bytes {gone:,} are "
            f"lost or changed, first {source[at:at + 20]!r} which becomes {back[at:at + 20]!r}; ./run writes text that way, too")


def changed(a, b):
    """Bytes of `a` between what two lines have in common at their beginnings and ends; of something added, its own."""
    start = len(os.path.commonprefix((a, b)))
    a, b = a[start:], b[start:]
    end = len(os.path.commonprefix((a[::-1], b[::-1])))
    return len(a[:len(a) - end].encode()) or len(b[:len(b) - end].encode())


# ---- the split ----------------------------------------------------------------------------------------------------

def leak(r):
    """Validation text that stands in the training text: passages whose 13-grams nearly all come there."""
    copied, of, seen = copied_passages(r.dataset)
    if of and copied > max(1, MOST_COPIED * of * seen):
        part = "" if seen == 1 else f" (of which {seen:.0%} was looked at)"
        raise Suspicion(f"{copied} of {of} passages of validation text stand in the training text{part}, so the validation "
                        f"loss says little about new text; remove the copies, or hold out other documents")


def copied_passages(dataset):
    """(how many passages of validation text stand in the training text, of how many, the part of the latter looked at)."""
    bos = dataset.tokenizer.bos_id
    n = max(GRAM, math.ceil(GRAM_BYTES * dataset.meta["val_tokens"] / max(1, dataset.meta["val_bytes"])))
    val = np.concatenate(list(spread(dataset.val, VAL_TOKENS, 1 << 12)))
    grams, inside = hashes(val, n), ~borders(val, bos, n)
    passage = np.cumsum(borders(val, bos, 1) | (np.arange(len(val)) % PASSAGE == 0))[:len(grams)]
    grams, passage = grams[inside], passage[inside]
    if not len(grams):
        return 0, 0, 1.0
    known, place = np.unique(grams, return_inverse=True)
    maybe, found = np.zeros(BUCKETS, bool), np.zeros(len(known), bool)
    maybe[known % BUCKETS] = True
    for chunk in spread(dataset.train, TRAIN_TOKENS, CHUNK):
        theirs = hashes(chunk, n)
        theirs = theirs[maybe[theirs % BUCKETS]]
        at = np.minimum(np.searchsorted(known, theirs), len(known) - 1)
        found[at[known[at] == theirs]] = True
    hits = np.bincount(passage, found[place])
    total = np.bincount(passage)
    long = total >= n
    return int((hits > COPIED * total)[long].sum()), int(long.sum()), min(1.0, TRAIN_TOKENS / len(dataset.train))


def spread(tokens, most, size):
    """Pieces of `size` tokens: all of them, or where these are more than `most`, so many at equal distances."""
    count = math.ceil(len(tokens) / size)
    for k in range(min(count, max(1, most // size))):
        at = k * size if count * size <= most else k * (len(tokens) - size) // max(1, most // size - 1)
        yield np.asarray(tokens[at:at + size])


def borders(tokens, bos, n):
    """Whether one of the n tokens from each place on is BOS: (len(tokens) - n + 1,)."""
    ahead = np.cumsum(np.append(0, tokens == bos))
    return ahead[n:] > ahead[:-n]


def hashes(tokens, n):
    """A number for each n tokens that stand together: (len(tokens) - n + 1,) uint64, by doubling."""
    if len(tokens) < n:
        return np.empty(0, np.uint64)
    base, length = 0x9E3779B97F4A7C15, 1
    part, whole, done = (tokens.astype(np.uint64) + np.uint64(1)) * np.uint64(0xBF58476D1CE4E5B9), None, 0
    while True:  # modulo 2^64; part: of `length` tokens; whole: of the `done` first ones
        power = np.uint64(base)
        if n & length:
            whole = part if whole is None else whole[:len(part) - done] * power + part[done:][:len(whole)]
            done += length
        if 2 * length > n:
            break
        part = part[:-length] * power + part[length:]
        base, length = base * base % 2 ** 64, 2 * length
    whole = whole[:len(tokens) - n + 1]
    return whole ^ (whole >> np.uint64(29))
