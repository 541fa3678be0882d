"""
Any text → tokens on disk → batches.

    python data.py SOURCE [--vocab_source=custom] [--vocab_size=0] [--val_fraction=0] [--cache=cache] [--show=True]

SOURCE is `stories` or `stories:N` (written by engine/text/stories.py), `tinystories` or `tinyshakespeare` (downloaded), a file,
a folder, or a folder prepared before. A file is text of any name, .jsonl, .csv, .tsv, .parquet or a .json list, also packed
(.gz, .bz2, .xz); engine/text/readers.py tells how each is read. Of a folder the documents are read (.txt and these); or, where other
text (source code, say) is more than they are, all that is text. Left out, and named: what is hidden or installed, runs, the
cache, other files. What is prepared is a folder of

    train.bin, val.bin   token ids, uint16 or uint32, every document BOS … EOS
    tokenizer.model      the vocabulary (tokenizer.json for byte-level BPE, bytes and characters)
    meta.json            counts, sizes, hashes; for stories the bits per byte that no model can beat

and it is made once: its name ends in a hash of all it depends on (of a file: path, size and time of change).

Documents. Lines `<|endoftext|>` in a text separate documents, which lose their outer white space; a file without such
lines is one document and stays as it is. Of a table each row is one, in .jsonl each line, under the name --column says.
Validation takes whole documents, drawn with a fixed seed, until it holds val_fraction of the bytes (0: a tenth, at most
5 MB). Where they are too few or too long for that (one long text, say) it takes the end of the text.

A step's windows lie side by side in the training split, from an offset drawn for each epoch. Where documents are long
compared with the context (LONG windows or more on average), every window begins with BOS, as every prompt does.
"""
import concurrent.futures
import functools
import math
from pathlib import Path
from types import SimpleNamespace

from configurator import configure, fail  # first: it answers for packages that are missing

import numpy as np

from engine.text import prepare as preparation
from engine.text import survey
from engine.text.prepare import SEED, Prepared, as_prepared, check_ids, load
from engine.spans import spanned

source = "stories"       # stories, stories:N, tinystories, tinyshakespeare, a file, a folder
vocab_source = "custom"  # custom or bpe (trained on the data), byte, char, llama2 (./tokenizer.model), or a tokenizer's path
vocab_size = 0           # of one that is trained; 0: chosen by the size of the text
vocab_most = 0           # where vocab_size is 0: at most so many, and the rarest characters as bytes; 0: no limit
text_most = 0            # bytes of the text to prepare for training, spread over all of it; 0: all of it
val_fraction = 0.0       # part held out for validation; 0: a tenth, at most 5 MB (of stories, 2000 at most)
cache = "cache"          # prepared data and downloads go here
column = "text"          # where the text stands in .jsonl, .csv, .tsv, .parquet; "text": "story" too
skip_bad = False         # leave out files of a folder that can't be read as text, and count them
workers = 0              # processes; 0: one for each core
show = False             # print some documents, their lengths, the use of the vocabulary, copies; of a large text of a part
page = ""                # an .html file: the same as a page
png = ""                 # a .png file: lengths of documents, how often pieces come (needs matplotlib)
tinystories_url = "https://huggingface.co/datasets/roneneldan/TinyStories/resolve/f54c09fd23315a6f9c86f9dc80f725de7d8f9c64"  # or a mirror
tinyshakespeare_url = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare"  # or a mirror

EXCERPT = 1 << 22  # tokens of a larger split that an evaluation draws from
LONG = 8           # windows that a document fills on average, from which on all windows begin with BOS


def prepare(*arguments, **named):
    """engine/text/prepare.py's, which downloads from the URLs that are set here."""
    urls = {"tinystories": tinystories_url, "tinyshakespeare": tinyshakespeare_url}
    return preparation.prepare(*arguments, urls=urls, **named)


class Dataset(Prepared):
    """
    A prepared folder as a training reads it: of that only `changed` has to be saved to resume. seq_len: tokens of context;
    micro_batch, global_batch: sequences of a forward pass of one process, and of a step of all; rank, world: this process,
    of how many; pinned: whether batches lie in memory that a GPU reads from while it computes; changed: (step, sequences
    read before it) of a run whose global batch was another one before that step, so that no window is read again.
    """

    def __init__(self, prepared, seq_len, micro_batch, global_batch, seed, rank=0, world=1, pinned=False):
        super().__init__(**vars(prepared))
        self.seq_len, self.micro_batch, self.global_batch, self.seed = seq_len, micro_batch, global_batch, seed
        self.rank, self.world, self.pinned, self.prefetch = rank, world, pinned, Prefetch(self.make_batch)
        self.changed = 0, 0

    @spanned("data")
    def batch(self, step):
        """This process's slice of the global batch of `step`, (x, y); the next one is made in the meantime."""
        return self.prefetch.get(step)

    def make_batch(self, step):
        both = batch_slice(self.train, self.seed, step, self.global_batch, self.seq_len, self.rank, self.world, self.opening,
                           self.changed)
        for tokens in both:
            check_ids(self.folder, tokens, self.meta["vocab_size"])
        return [t.pin_memory() for t in both] if self.pinned else both

    def windows(self, step):
        """Where this process's slice of `step` stands in the training split: (first tokens, how many targets count)."""
        return slice_windows(len(self.train), self.seed, step, self.global_batch, self.seq_len, self.rank, self.world,
                             self.changed)

    def eval_batches(self, split, limit, at_once):
        """
        Yields (x, y, counts) of an evaluation: inputs and targets as from read_windows, and whether they count; a process
        that has nothing left repeats what does not. Of either split as many tokens are predicted as the validation split
        has, `limit` at most (0: no limit), and never a BOS. A batch has about `at_once` tokens, or as many as in training.
        """
        count, bos_id = self.meta["val_tokens"] - self.meta["val_documents"], self.tokenizer.bos_id
        tokens, starts, lengths = eval_windows(getattr(self, split), bos_id, self.seq_len, min(count, limit or count))
        rows = min(max(self.micro_batch, at_once // self.seq_len), math.ceil(len(starts) / self.world))
        for at in range(0, len(starts), self.world * rows):
            mine = slice(at + self.rank * rows, at + (self.rank + 1) * rows)
            counts = len(starts[mine]) > 0
            some = mine if counts else slice(at, at + 1)  # sharded processes compute together, needed or not
            x, y = read_windows(tokens, starts[some], int(lengths[at]), lengths[some], self.opening)
            yield check_ids(self.folder, x, self.meta["vocab_size"]), check_ids(self.folder, y, self.meta["vocab_size"]), counts

    def probe_batches(self, sequences=4):
        """{"train", "val"}: (x, y) of some windows, always the same ones."""
        found = {}
        for split in ("train", "val"):
            both = batch_slice(getattr(self, split), 0, 0, sequences, self.seq_len, first=self.opening)
            found[split] = tuple(check_ids(self.folder, tokens, self.meta["vocab_size"]) for tokens in both)
        return found

    @property
    def opening(self):
        """
        The token that every window begins with, in training and evaluation: BOS where documents fill LONG windows or more
        on average, since a model would hardly see there how texts begin, and every prompt does; else None.
        """
        long = self.meta["train_tokens"] >= LONG * self.seq_len * self.meta["train_documents"]
        return self.tokenizer.bos_id if long else None

    @property
    def separator(self):
        """The token that begins each document, None where there is only one document."""
        return self.tokenizer.bos_id if self.meta["train_documents"] > 1 else None

    def bits_per_byte(self, loss):
        """A validation loss in nats per token as bits per byte of text."""
        predicted = self.meta["val_tokens"] - self.meta["val_documents"]  # all but BOS
        return loss / math.log(2) * predicted / self.meta["val_bytes"]


class Prefetch:
    """make(step) for one step after the other; a thread makes the next while the last is used. make: a pure function."""

    def __init__(self, make):
        self.make, self.thread = make, concurrent.futures.ThreadPoolExecutor(1)
        self.step, self.coming = -1, None

    def get(self, step):
        made = self.coming.result() if step == self.step else self.make(step)
        self.step, self.coming = step + 1, self.thread.submit(self.make, step + 1)
        return made


@functools.lru_cache(maxsize=8)
def epoch_windows(seed, epoch, n_tokens, seq_len):
    """
    The first token of every window of an epoch, in the order of that epoch: (n_tokens // seq_len,) int64. The windows
    lie side by side, from an offset drawn anew; behind the last token comes the first, another document as ever.
    """
    rng = np.random.Generator(np.random.PCG64([seed, epoch]))
    return (rng.integers(seq_len) + seq_len * rng.permutation(n_tokens // seq_len)) % n_tokens


def sequences_before(step, global_batch, changed=(0, 0)):
    """Return how many sequences a run reads before this step. changed: see Dataset; earlier steps count as if nothing had."""
    since, read = changed
    return read + (step - since) * global_batch if step >= since else step * global_batch


def slice_windows(n_tokens, seed, step, global_batch, seq_len, rank=0, world=1, changed=(0, 0)):
    """Where batch_slice reads: the first token of each window, and how many of its targets count; (n,) int64 each."""
    windows = n_tokens // seq_len
    if windows < 1:
        fail(f"a split of {n_tokens} tokens holds no window of {seq_len} tokens; "
             f"use more text, a larger --val_fraction or a smaller --max_seq_len")
    share = -(-global_batch // world)
    rows = rank * share + np.arange(share)
    first = sequences_before(step, global_batch, changed)
    epochs, places = np.divmod(first + np.minimum(rows, global_batch - 1), windows)
    starts = np.concatenate([epoch_windows(seed, int(epoch), n_tokens, seq_len)[places[epochs == epoch]]
                             for epoch in np.unique(epochs)])
    return starts, np.where(rows < global_batch, seq_len, 0)


def batch_slice(tokens, seed, step, global_batch, seq_len, rank=0, world=1, first=None, changed=(0, 0)):
    """
    A rank's slice of the global batch of a step: inputs and targets, each (global_batch / world, seq_len) int64, a pure
    function of the arguments. Where world is no divisor, it is rounded up, and the last ranks have rows of targets -1,
    which the loss leaves out. tokens: (n_tokens,); global_batch: sequences of all ranks together; first: as for
    read_windows; changed: see Dataset. Sequence sequences_before(step) + i of the run is one of epoch_windows: every window
    comes once in an epoch.
    """
    starts, lengths = slice_windows(len(tokens), seed, step, global_batch, seq_len, rank, world, changed)
    return read_windows(tokens, starts, seq_len, lengths, first)


def passages(tokens, bos_id, seq_len):
    """
    Where to read a split for evaluation: every document from its BOS, a long one in passages of seq_len predictions.
    Returns (starts, lengths), each (n,) int64; a passage predicts the `lengths` tokens behind its start.
    """
    edges = np.append(np.flatnonzero(tokens == bos_id), len(tokens))
    if edges[0]:  # a split cut from within a document
        edges = np.insert(edges, 0, 0)
    starts = np.concatenate([np.arange(a, b - 1, seq_len) for a, b in zip(edges, edges[1:])])
    ends = edges[np.searchsorted(edges, starts, "right")]
    return starts, np.minimum(ends - 1 - starts, seq_len)


def excerpt(tokens, bos_id, size, pieces=64):
    """
    About `size` tokens of a larger split, which nobody has to read through for it: pieces at equal distances, each from
    the beginning of a document where one is near.
    """
    if len(tokens) <= size:
        return tokens
    each = size // pieces
    found = [np.asarray(tokens[at:at + each]) for at in np.arange(pieces) * (len(tokens) - each) // (pieces - 1)]
    return np.concatenate([piece[np.argmax(piece[:each // 2] == bos_id):] for piece in found])


def eval_windows(tokens, bos_id, seq_len, count):
    """
    What an evaluation reads of a split: (tokens, starts, lengths) of passages drawn from all of it, the same ones every
    time, the longest first, with `count` predictions together, or as many as there are.
    """
    tokens = excerpt(tokens, bos_id, max(4 * count, EXCERPT))
    starts, lengths = passages(tokens, bos_id, seq_len)
    drawn = np.random.Generator(np.random.PCG64(SEED)).permutation(len(starts))
    drawn = drawn[:np.searchsorted(np.cumsum(lengths[drawn]), count) + 1]
    lengths = lengths[drawn]
    lengths[-1] -= max(0, lengths.sum() - count)
    order = np.argsort(-lengths, kind="stable")
    return tokens, starts[drawn][order], lengths[order]


def read_windows(tokens, starts, seq_len, lengths=None, first=None):
    """
    Inputs and targets, each (n, seq_len) int64, of the windows that begin at `starts` (n,). Behind `lengths` (n,), where
    given, targets are -1, which the loss leaves out. first: the token that stands in place of the first input (see
    Dataset.opening), but for a window that predicts it there; None: the text's own.
    """
    import torch  # here: preparing, and the processes that do it, start without it
    places = (starts[:, None] + np.arange(seq_len + 1)) % len(tokens)
    both = torch.from_numpy(tokens[places].astype(np.int64))
    x, y = torch.empty(2, len(starts), seq_len, dtype=torch.int64)  # apart, as both may change
    x[:], y[:] = both[:, :-1], both[:, 1:]
    if first is not None:
        x[y[:, 0] != first, 0] = first
    if lengths is not None:
        y[torch.arange(seq_len) >= torch.from_numpy(lengths)[:, None]] = -1
    return x, y


def document_rows(dataset, count=3, longest=40):
    """
    The first documents of each split as rows of the table `documents`: split, text, tokens (of both the beginning,
    `longest` tokens), length in tokens, share of <unk>, share of bytes that stand for what the vocabulary lacks.
    """
    pieces, rows = dataset.tokenizer.pieces(), []
    fallback = 6 if dataset.tokenizer.kind == "sentencepiece" else -1  # in a byte vocabulary bytes are all there is
    for split in ("train", "val"):
        tokens = np.asarray(getattr(dataset, split)[:1 << 18])
        starts = np.flatnonzero(tokens == dataset.tokenizer.bos_id)
        for start, end in list(zip(starts, [*starts[1:], len(tokens)]))[:count]:
            ids = tokens[start:end].tolist()
            kinds = [pieces[i][2] for i in ids]
            rows.append([split, dataset.tokenizer.decode(ids[:longest]), survey.spelled(ids[:longest], pieces), len(ids),
                         round(kinds.count(2) / len(ids), 4), round(kinds.count(fallback) / len(ids), 4)])
    return rows


def look(dataset, most=EXCERPT):
    """engine/text/survey.py's tables, of `most` tokens of each split at most."""
    splits = {name: excerpt(getattr(dataset, name), dataset.tokenizer.bos_id, most) for name in ("train", "val")}
    return survey.survey(splits, dataset.tokenizer, dataset.meta)


def data_rows(dataset):
    """What the first row of a run's log says of its data: tables, and the lengths of documents as a histogram."""
    found = look(dataset, most=1 << 20)
    counts, edges = np.histogram(found["lengths"], bins=32)
    return {"documents": document_rows(dataset), "data": found["summary"][1:], "pieces": found["most frequent pieces"][1:],
            "data/lengths": {"counts": counts.tolist(), "edges": edges.tolist()}}


def show_data(prepared):
    """Print, write as a page, draw: what --show, --page and --png ask for."""
    for path, ending in (page, ".html"), (png, ".png"):
        if path and not path.endswith(ending):
            fail(f"{path}: expected a name that ends in {ending}")
    found, rows = look(prepared), document_rows(prepared)
    if show:
        for split, text, tokens, length, unknown, fallback in rows:
            print(f"\n{split}: {length} tokens, {unknown:.2%} unknown, {fallback:.2%} byte fallback\n  {text!r}\n  {tokens}")
        for name, lines in survey.tables(found).items():
            print(f"\n{name}", *survey.table(lines), sep="\n")
    columns = ["split", "text", "tokens", "length", "unknown", "byte fallback"]
    try:
        if page:
            text = survey.page(source, found | {"documents": [columns, *rows]})
            Path(page).write_text(text, encoding="utf-8", errors="backslashreplace")  # of a name that is none
        if png:
            survey.picture(source, found, png)
    except OSError as e:
        fail(f"{e.filename}: cannot be written ({e.strerror})")
    for path in filter(None, (page, png)):
        print(f"wrote {path}")


if __name__ == "__main__":
    config = configure(globals(), positional="source")
    if workers < 0:
        fail(f"--workers={workers}: expected 0 or more")
    prepared = prepare(source, vocab_source, vocab_size, val_fraction, cache, workers, skip_bad, column, vocab_most=vocab_most,
                       text_most=text_most)
    found = load(prepared)
    as_prepared(SimpleNamespace(data=source, **config.as_dict()), config.given, found.meta)
    print(prepared)
    if show or page or png:
        show_data(found)
