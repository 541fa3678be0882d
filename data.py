"""
Any text → tokens on disk → batches.

    python data.py SOURCE [--vocab_source=custom] [--vocab_size=0] [--val_fraction=0] [--show=True]

SOURCE is `stories` or `stories:N` (engine/text/stories.py writes them), `tinystories` or
`tinyshakespeare` (downloaded), a module of engine/text/sources/, a file, a folder, or a prepared
folder. A file is text of any name, .jsonl, .csv, .tsv, .parquet or a .json list, also packed (.gz,
.bz2, .xz). Of a folder the documents are read: .txt and these. If other text, such as source code,
is more than they are, all files that are text are read. Hidden files, installed packages, runs, the
cache and other files are left out, and a line names them. The prepared folder holds

    train.bin, val.bin   token ids, uint16 or uint32, every document BOS … EOS
    tokenizer.model      the vocabulary (tokenizer.json for byte-level BPE, bytes and characters)
    meta.json            counts, sizes, hashes; for stories the bits per byte no model can go below

and is made once: its name ends in a hash of all it depends on (path, size and time of change of
each file, and the settings).

Documents. Lines `<|endoftext|>` separate the documents of a text, whose outer white space is
removed. A file without such a line is one document and stays as it is. Each row of a table and each
line of .jsonl is a document, in the column that --column names. Whole documents, drawn with a fixed
seed, form the validation split, until it holds val_fraction of the bytes. If documents are too few
or too long for that (one long text, say), it is the end of the text.

Windows. The windows of an epoch lie side by side in the training split, from an offset drawn for
each epoch. If documents are long compared with the context (LONG windows or more on average), every
window begins with BOS, as every prompt does.
"""
import concurrent.futures
import functools
import math
from pathlib import Path
from types import SimpleNamespace

from configurator import configure, fail  # first: it reports missing packages

import numpy as np

from engine.spans import spanned
from engine.text import prepare as preparation
from engine.text import survey
from engine.text.corpus import SEED
from engine.text.prepare import as_prepared
from engine.text.prepared import SPLITS, Prepared, check_ids, load
from tokenizer import BYTE, UNKNOWN

source = "stories"       # stories, stories:N, tinystories, tinyshakespeare, a file, a folder
vocab_source = "custom"  # custom or bpe (trained on the text), byte, char, llama2, a tokenizer's file
vocab_size = 0           # of a vocabulary that is trained; 0: chosen by the size of the text
vocab_most = 0           # max size if vocab_size is 0: rare characters become bytes; 0: no limit
text_most = 0            # max bytes of text to train on, in stretches spread over it; 0: all of it
val_fraction = 0.0       # share held out for validation; 0: a tenth, at most 5 MB (2000 stories)
cache = "cache"          # folder of prepared data and downloads
column = "text"          # column or key that holds the text of a table or .jsonl; text: story, too
skip_bad = False         # leave out files of a folder that cannot be read as text, and count them
workers = 0              # processes that encode; 0: one a core
show = False             # print some documents, their lengths, the use of the vocabulary, copies
page = ""                # the same as an .html file
png = ""                 # lengths of documents, frequencies of pieces as a .png (needs matplotlib)
tinystories_url = "https://huggingface.co/datasets/roneneldan/TinyStories/resolve/f54c09fd23315a6f9c86f9dc80f725de7d8f9c64"  # or a mirror
tinyshakespeare_url = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare"  # or a mirror

EXCERPT = 1 << 22  # max tokens of a split that an evaluation or a survey reads
LONG = 8           # windows a document fills on average, from which on every window begins with BOS


def prepare(*arguments, **named):
    """Call engine.text.prepare.prepare with the URLs that are set here."""
    urls = {"tinystories": tinystories_url, "tinyshakespeare": tinyshakespeare_url}
    return preparation.prepare(*arguments, urls=urls, **named)


class Dataset(Prepared):
    """
    A prepared folder as batches of a training. To resume it, only `changed` has to be stored.

    seq_len: tokens of context; micro_batch: sequences of a forward pass of one process;
    global_batch: sequences of a step of all processes; rank, world: number of this process, number
    of all; pinned: put batches in page-locked memory, which a GPU copies from while it computes;
    changed: (step, sequences read before it) if the global batch was another one before that step.
    """

    def __init__(self, prepared, seq_len, micro_batch, global_batch, seed, rank=0, world=1,
                 pinned=False):
        super().__init__(**vars(prepared))
        self.seq_len, self.micro_batch, self.global_batch = seq_len, micro_batch, global_batch
        self.seed, self.rank, self.world, self.pinned = seed, rank, world, pinned
        self.prefetch = Prefetch(self.make_batch)
        self.changed = 0, 0

    @spanned("data")
    def batch(self, step):
        """Return this process's slice of the batch of a step, (x, y). A thread makes the next."""
        return self.prefetch.get(step)

    def make_batch(self, step, whole=False):
        """Make that slice, or with `whole` the batch of all processes."""
        starts, lengths = self.windows(step, whole)
        x, y = read_windows(self.train, starts, self.seq_len, lengths, self.window_bos)
        return tuple(t.pin_memory() if self.pinned else t for t in self.checked(x, y))

    def windows(self, step, whole=False):
        """Return (first tokens, counts of targets) of the windows of make_batch, (n,) each."""
        first = sequences_before(step, self.global_batch, self.changed)
        share = (0, 1) if whole else (self.rank, self.world)
        return slice_windows(len(self.train), self.seed, first, self.global_batch, self.seq_len,
                             share)

    def eval_batches(self, split, limit, batch_tokens):
        """
        Yield (x, y, counts) of an evaluation; inputs and targets as from read_windows.

        From each split as many tokens are predicted as the validation split has, at most `limit`
        (0: no limit), never a BOS. A batch has about batch_tokens tokens, or as many as in
        training. Idle ranks repeat a sequence with counts=False, as sharded processes must compute
        together.
        """
        count, bos_id = self.meta["val_tokens"] - self.meta["val_documents"], self.tokenizer.bos_id
        tokens, starts, lengths = eval_windows(getattr(self, split), bos_id, self.seq_len,
                                               min(count, limit or count))
        rows = max(self.micro_batch, batch_tokens // self.seq_len)
        rows = min(rows, math.ceil(len(starts) / self.world))
        for at in range(0, len(starts), self.world * rows):
            mine = slice(at + self.rank * rows, at + (self.rank + 1) * rows)
            counts = len(starts[mine]) > 0
            some = mine if counts else slice(at, at + 1)
            longest = int(lengths[at])
            x, y = read_windows(tokens, starts[some], longest, lengths[some], self.window_bos)
            yield *self.checked(x, y), counts

    def probe_batches(self, sequences=4):
        """Return {"train", "val"}: (x, y) of some windows, always the same ones."""
        found = {}
        for split in SPLITS:
            tokens = getattr(self, split)
            starts, _ = slice_windows(len(tokens), 0, 0, sequences, self.seq_len)
            x, y = read_windows(tokens, starts, self.seq_len, bos_id=self.window_bos)
            found[split] = self.checked(x, y)
        return found

    def checked(self, *arrays):
        """Return arrays of token ids. Fails if the vocabulary lacks one."""
        return tuple(check_ids(self.folder, array, self.meta["vocab_size"]) for array in arrays)

    @property
    def window_bos(self):
        """
        The token that begins every window, in training and evaluation: BOS if documents fill LONG
        windows or more on average, since a model would hardly see how texts begin; else None.
        """
        is_long = self.meta["train_tokens"] >= LONG * self.seq_len * self.meta["train_documents"]
        return self.tokenizer.bos_id if is_long else None

    @property
    def separator(self):
        """The token that begins each document; None if there is only one document."""
        return self.tokenizer.bos_id if self.meta["train_documents"] > 1 else None

    def bits_per_byte(self, loss):
        """Convert a validation loss in nats per token to bits per byte of text."""
        predicted = self.meta["val_tokens"] - self.meta["val_documents"]  # all but BOS
        return loss / math.log(2) * predicted / self.meta["val_bytes"]


class Prefetch:
    """Call make(step) for consecutive steps, each in a thread while the one before is used."""

    def __init__(self, make):
        self.make, self.thread = make, concurrent.futures.ThreadPoolExecutor(1)
        self.step, self.coming = -1, None

    def get(self, step):
        made = self.coming.result() if step == self.step else self.make(step)
        self.step, self.coming = step + 1, self.thread.submit(self.make, step + 1)
        return made


# ---- windows of training -------------------------------------------------------------------------

@functools.lru_cache(maxsize=8)
def epoch_windows(seed, epoch, n_tokens, seq_len):
    """
    Return the first token of every window of an epoch, shuffled: (n_tokens // seq_len,) int64. The
    windows lie side by side from a random offset; after the last token comes the first again.
    """
    rng = np.random.Generator(np.random.PCG64([seed, epoch]))
    offset = rng.integers(seq_len)
    return (offset + seq_len * rng.permutation(n_tokens // seq_len)) % n_tokens


def sequences_before(step, global_batch, changed=(0, 0)):
    """Return how many sequences a run reads before a step. changed: see Dataset."""
    since, read = changed
    return read + (step - since) * global_batch if step >= since else step * global_batch


def slice_windows(n_tokens, seed, first, global_batch, seq_len, share=(0, 1)):
    """
    Return the windows of a rank's slice of a global batch: (first tokens, counts of targets), (n,)
    int64 each. Every window comes once in an epoch.

    first: sequences that the run has read before; share: (rank, number of ranks). If that is no
    divisor of global_batch, n is rounded up, and the last ranks have windows with 0 targets.
    """
    windows = n_tokens // seq_len
    if windows < 1:
        fail(f"a split of {n_tokens} tokens holds no window of {seq_len} tokens; "
             f"use more text, a larger --val_fraction or a smaller --max_seq_len")
    rank, world = share
    n = math.ceil(global_batch / world)
    rows = rank * n + np.arange(n)
    epochs, places = np.divmod(first + np.minimum(rows, global_batch - 1), windows)
    starts = [epoch_windows(seed, int(epoch), n_tokens, seq_len)[places[epochs == epoch]]
              for epoch in np.unique(epochs)]
    return np.concatenate(starts), np.where(rows < global_batch, seq_len, 0)


def batch_slice(tokens, seed, step, global_batch, seq_len, share=(0, 1)):
    """
    Return a rank's slice of the global batch of a step: inputs and targets, (n, seq_len) int64
    each, a pure function of the arguments. share: see slice_windows.
    """
    first = sequences_before(step, global_batch)
    starts, lengths = slice_windows(len(tokens), seed, first, global_batch, seq_len, share)
    return read_windows(tokens, starts, seq_len, lengths)


def read_windows(tokens, starts, seq_len, lengths=None, bos_id=None):
    """
    Return inputs and targets, (n, seq_len) int64 each, of the windows that begin at `starts` (n,).

    lengths: (n,), targets that count; those after them are -1, which the loss ignores. bos_id:
    replaces the first input, except of a window whose first target is BOS; None: nothing is
    replaced.
    """
    import torch  # here: preparing, and its worker processes, start without it
    places = (starts[:, None] + np.arange(seq_len + 1)) % len(tokens)
    both = torch.from_numpy(tokens[places].astype(np.int64))
    x, y = torch.empty(2, len(starts), seq_len, dtype=torch.int64)  # apart: both may change
    x[:], y[:] = both[:, :-1], both[:, 1:]
    if bos_id is not None:
        x[y[:, 0] != bos_id, 0] = bos_id
    if lengths is not None:
        y[torch.arange(seq_len) >= torch.from_numpy(lengths)[:, None]] = -1
    return x, y


# ---- windows of an evaluation --------------------------------------------------------------------

def eval_spans(tokens, bos_id, seq_len):
    """
    Return (starts, lengths), (n,) int64 each, that cover a split: each document from its BOS, a
    long one in spans of seq_len predictions. A span predicts the `lengths` tokens after its start.
    """
    edges = np.append(np.flatnonzero(tokens == bos_id), len(tokens))
    if edges[0]:  # the split begins inside a document
        edges = np.insert(edges, 0, 0)
    spans = [np.arange(start, end - 1, seq_len) for start, end in zip(edges, edges[1:])]
    starts = np.concatenate(spans)
    ends = edges[np.searchsorted(edges, starts, "right")]
    return starts, np.minimum(ends - 1 - starts, seq_len)


def excerpt(tokens, bos_id, size, pieces=64):
    """
    Return an evenly spaced excerpt of about `size` tokens of a larger split. Each piece starts at
    the beginning of a document if there is one in its first half.
    """
    if len(tokens) <= size:
        return tokens
    each, found = size // pieces, []
    for at in np.arange(pieces) * (len(tokens) - each) // (pieces - 1):
        piece = np.asarray(tokens[at:at + each])
        found.append(piece[np.argmax(piece[:each // 2] == bos_id):])
    return np.concatenate(found)


def eval_windows(tokens, bos_id, seq_len, count):
    """
    Return (tokens, starts, lengths) of `count` predictions, or as many as there are: spans drawn
    from all of a split, always the same ones, the longest first. The tokens are the split or an
    excerpt.
    """
    tokens = excerpt(tokens, bos_id, max(4 * count, EXCERPT))
    starts, lengths = eval_spans(tokens, bos_id, seq_len)
    drawn = np.random.Generator(np.random.PCG64(SEED)).permutation(len(starts))
    drawn = drawn[:np.searchsorted(np.cumsum(lengths[drawn]), count) + 1]
    lengths = lengths[drawn]
    lengths[-1] -= max(0, lengths.sum() - count)
    order = np.argsort(-lengths, kind="stable")
    return tokens, starts[drawn][order], lengths[order]


# ---- what a text looks like ----------------------------------------------------------------------

def document_rows(dataset, count=3, max_tokens=40):
    """
    Return the first documents of each split as rows of the table `documents`: split, text and
    tokens of the beginning, length in tokens, share of <unk>, share of bytes in place of missing
    pieces.
    """
    tokenizer, rows = dataset.tokenizer, []
    pieces = tokenizer.pieces()
    # Byte pieces are a fallback only in sentencepiece: a byte vocabulary has nothing else.
    fallback = BYTE if tokenizer.kind == "sentencepiece" else None
    for split in SPLITS:
        tokens = np.asarray(getattr(dataset, split)[:1 << 18])
        starts = np.flatnonzero(tokens == tokenizer.bos_id)
        ends = [*starts[1:], len(tokens)]
        for start, end in zip(starts[:count], ends):
            ids = tokens[start:end].tolist()
            beginning, kinds = ids[:max_tokens], [pieces[i][2] for i in ids]
            shares = [round(kinds.count(kind) / len(ids), 4) for kind in (UNKNOWN, fallback)]
            text, spelled = tokenizer.decode(beginning), survey.spelled(beginning, pieces)
            rows.append([split, text, spelled, len(ids), *shares])
    return rows


def look(dataset, max_tokens=EXCERPT):
    """Return the tables of engine/text/survey.py, of an excerpt of each split."""
    bos_id = dataset.tokenizer.bos_id
    splits = {name: excerpt(getattr(dataset, name), bos_id, max_tokens) for name in SPLITS}
    return survey.survey(splits, dataset.tokenizer, dataset.meta)


def data_rows(dataset):
    """Return what the first row of a run's log holds about its data."""
    found = look(dataset, 1 << 20)
    counts, edges = np.histogram(found["lengths"], bins=32)
    return {"documents": document_rows(dataset), "data": found["summary"][1:],
            "pieces": found["most frequent pieces"][1:],
            "data/lengths": {"counts": counts.tolist(), "edges": edges.tolist()}}


def show_data(prepared):
    """Do what --show, --page and --png ask for."""
    for path, ending in (page, ".html"), (png, ".png"):
        if path and not path.endswith(ending):
            fail(f"{path}: expected a name that ends in {ending}")
    found, rows = look(prepared), document_rows(prepared)
    if show:
        for split, text, tokens, length, unknown, fallback in rows:
            print(f"\n{split}: {length} tokens, {unknown:.2%} unknown, {fallback:.2%} byte fallback")
            print(f"  {text!r}\n  {tokens}")
        for name, lines in survey.tables(found).items():
            print(f"\n{name}", *survey.table(lines), sep="\n")
    columns = ["split", "text", "tokens", "length", "unknown", "byte fallback"]
    try:
        if page:
            text = survey.page(source, found | {"documents": [columns, *rows]})
            Path(page).write_text(text, encoding="utf-8", errors="backslashreplace")  # odd names
        if png:
            survey.picture(source, found, png)
    except OSError as e:
        fail(f"{e.filename}: cannot be written ({e.strerror})")
    for path in filter(None, (page, png)):
        print(f"wrote {path}")


if __name__ == "__main__":
    config = configure(globals(), positional="source")
    prepared = prepare(source, vocab_source, vocab_size, val_fraction, cache, workers, skip_bad,
                       column, vocab_most=vocab_most, text_most=text_most)
    found = load(prepared)
    as_prepared(SimpleNamespace(data=source, **config.as_dict()), config.given, found.meta)
    print(prepared)
    if show or page or png:
        show_data(found)
