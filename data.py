"""
Any text → tokens on disk → batches.

    python data.py SOURCE [--vocab_source=bpe] [--vocab_size=999] [--val_fraction=0.2] [--show=True]

SOURCE is one of

    stories, stories:N             60,000 or N stories that engine/text/stories.py generates
    tinystories, tinyshakespeare   downloads
    NAME, NAME:ARGUMENT            a module NAME.py of engine/text/sources/
    a path                         a file, a folder of files, or a prepared folder

A file may be plain text with any name, .jsonl, .csv, .tsv, .parquet or a .json list, compressed or
not (.gz, .bz2, .xz). In a folder, .txt files and files of these formats are read. If the other text
files, such as source code, are larger in total, they are read too. Hidden files, installed
packages, folders of training runs and the cache are skipped. The program prints what it skipped.

The prepared folder holds

    train.bin, val.bin   token ids, uint16 or uint32, every document BOS … EOS
    tokenizer.model      the vocabulary (tokenizer.json for byte-level BPE, bytes and characters)
    meta.json            counts, sizes, hashes; for stories also their entropy in bits per byte,
                         the lowest loss that a model can reach
    train_mask.bin, val_mask.bin    of conversations: a byte for each token, 1 if it is part of an
                         answer (engine/formats/chat_template.py)

It is prepared once: its name ends in a hash of everything it depends on (path, size and
modification time of each file, and the settings).

Documents. In a text file, lines `<|endoftext|>` separate the documents. White space around each
document is removed. A file without such a line is one document and keeps its white space. In a
table each row is a document, in .jsonl each line is one; --column names the column or key of its
text. The validation split consists of whole documents, drawn with a fixed seed, with at most
val_fraction of the bytes. If documents are too few or too long to come near that, as in one long
text, the validation split is the end of the text.

Windows. The windows of an epoch lie side by side in the training split, from an offset drawn for
each epoch. If documents are long compared with the context (if they fill 8 windows or more on
average: LONG below), every window begins with BOS, as every prompt does.

Conversations. Records with conversations (engine/text/conversations.py) are encoded by a chat
template: that of the vocabulary's model, else ChatML. Instead of windows, rows of whole
conversations are read, and only answers are targets.
"""
import concurrent.futures
import functools
import math
from pathlib import Path
from types import SimpleNamespace

from configurator import configure, fail  # first: it reports missing packages

import numpy as np

from engine.text import prepare as preparation
from engine.streams import print_highlighted
from engine.formats.chat_template import FIRST, TARGET
from engine.text import survey
from engine.text.corpus import SEED
from engine.text.packing import (BEGINS, NO_TARGET, cut_at_turns, lengths_of, pack,
                                 read_rows)
from engine.text.prepare import as_prepared
from engine.text.prepared import SPLITS, Prepared, check_ids, load
from tokenizer import BYTE, UNKNOWN

source = "stories"       # stories, stories:N, tinystories, tinyshakespeare, a file, a folder
vocab_source = "custom"  # custom, bpe (trained on the text), byte, char, llama2, a tokenizer's path
vocab_size = 0           # size of a trained vocabulary; 0: chosen from the size of the text
max_vocab_size = 0       # max size to choose when vocab_size is 0; rare characters become bytes to
                         # stay below it; 0: no limit
max_text_bytes = 0       # max bytes of text to train on, as evenly spaced stretches; 0: all of it
val_fraction = 0.0       # fraction for validation; 0: a tenth, at most 5 MB or 2000 stories
cache = "cache"          # folder of prepared data and downloads
column = "text"          # column or key of the text in tables and .jsonl; "text" also finds "story"
skip_bad = False         # leave out files of a folder that cannot be read as text, and count them
workers = 0              # number of processes that encode; 0: one per core
show = False             # print documents, their lengths, use of the vocabulary, repeated
                         # documents, with the vocabulary that train.py would choose, unless one is
                         # given here
page = ""                # .html file to write the output of --show to
png = ""                 # .png file to draw lengths and piece frequencies to (needs matplotlib)
tinystories_url = "https://huggingface.co/datasets/roneneldan/TinyStories/resolve/f54c09fd23315a6f9c86f9dc80f725de7d8f9c64"  # or a mirror
tinyshakespeare_url = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare"  # or a mirror

EXCERPT = 1 << 22  # max tokens of a split that a survey reads; an evaluation may read more: see
                   # eval_windows
LONG = 8           # every window begins with BOS if documents fill this many windows on average


def prepare(*arguments, **named):
    """Call engine.text.prepare.prepare with the URLs of this file's settings."""
    urls = {"tinystories": tinystories_url, "tinyshakespeare": tinyshakespeare_url}
    return preparation.prepare(*arguments, urls=urls, **named)


class Dataset(Prepared):
    """
    The batches of a training run, from a prepared folder. A batch depends only on the folder, the
    arguments, the step and `resumed_at`.

    seq_len: tokens of context; micro_batch: sequences of a forward pass of one process;
    global_batch: sequences of a step of all processes; rank: index of this process; world: number
    of processes; pinned: put batches in page-locked memory, which a GPU copies from while it
    computes.

    Attribute resumed_at: (step at which the run was resumed, sequences read before that step). It
    is needed because global_batch may have been different before.
    """

    def __init__(self, prepared, seq_len, micro_batch, global_batch, seed, rank=0, world=1,
                 pinned=False):
        super().__init__(**vars(prepared))
        self.seq_len, self.micro_batch, self.global_batch = seq_len, micro_batch, global_batch
        self.seed, self.rank, self.world, self.pinned = seed, rank, world, pinned
        self.prefetch = Prefetch(self.make_batch)
        self.resumed_at = 0, 0
        self.read_from = self.train  # the tokens from which training windows are read

    def read_beside(self, tokens):
        """
        Let training batches also read windows of an array of tokens, appended to the training
        split.
        """
        self.read_from = np.concatenate((self.train, tokens))

    @staticmethod
    def of(prepared, *arguments, **named):
        """Return the Dataset of a Prepared, a ConversationDataset if it holds conversations."""
        kind = ConversationDataset if prepared.masks else Dataset
        return kind(prepared, *arguments, **named)

    def batch(self, step):
        """Return make_batch(step). A thread then makes the batch of the next step."""
        from engine.spans import span  # here: it imports torch, which preparing does not need
        with span("data"):
            return self.prefetch.get(step)

    def make_batch(self, step, whole=False):
        """
        Return (x, y) of read_windows for this process's slice of a step's batch; with `whole`, for
        the batch of all processes.
        """
        starts, lengths = self.windows(step, whole)
        x, y = read_windows(self.read_from, starts, self.seq_len, lengths, self.window_bos)
        return tuple(t.pin_memory() if self.pinned else t for t in self.checked(x, y))

    def places(self, step):
        """
        Return the positions in read_from of the targets of make_batch(step), (n, seq_len) int64.
        """
        starts, _ = self.windows(step)
        return (starts[:, None] + 1 + np.arange(self.seq_len)) % len(self.read_from)

    def windows(self, step, whole=False):
        """Return (starts, lengths) of slice_windows for the windows of make_batch."""
        first = sequences_before(step, self.global_batch, self.resumed_at)
        share = (0, 1) if whole else (self.rank, self.world)
        return slice_windows(len(self.read_from), self.seed, first, self.global_batch, self.seq_len,
                             share)

    def eval_batches(self, split, limit, batch_tokens):
        """
        Yield the batches of an evaluation, (x, y, is_counted); x, y: see read_windows.

        For either split, the max number of predictions is the number of tokens in the validation
        split that are not BOS (BOS is never predicted), or `limit` if that is smaller and not 0. A
        batch has about batch_tokens tokens or micro_batch sequences, whichever is more. A rank for
        which no sequences are left repeats the first of the sequences that the ranks share in this
        iteration, with is_counted=False, since the processes of a sharded model must compute
        together.
        """
        count, bos_id = self.meta["val_tokens"] - self.meta["val_documents"], self.tokenizer.bos_id
        tokens, starts, lengths = eval_windows(getattr(self, split), bos_id, self.seq_len,
                                               min(count, limit or count))

        def read(taken, longest):
            return read_windows(tokens, starts[taken], longest, lengths[taken], self.window_bos)
        yield from self.shared_batches(read, lengths, batch_tokens)

    def shared_batches(self, read, lengths, batch_tokens):
        """
        Yield this rank's batches of an evaluation; see eval_batches. lengths: inputs of each
        sequence, descending; read(slice of the sequences, max inputs): returns (x, y).
        """
        rows = max(self.micro_batch, batch_tokens // self.seq_len)
        rows = min(rows, math.ceil(len(lengths) / self.world))  # so that all ranks share the work
        for first in range(0, len(lengths), self.world * rows):
            own = slice(first + self.rank * rows, first + (self.rank + 1) * rows)
            is_counted = len(lengths[own]) > 0
            taken = own if is_counted else slice(first, first + 1)
            longest = int(lengths[first])  # on all ranks, since the lengths descend
            yield *self.checked(*read(taken, longest)), is_counted

    def probe_batches(self, sequences=4):
        """Return {split: (x, y)} of a few windows of each split, the same ones at every call."""
        found = {}
        for split in SPLITS:
            tokens = getattr(self, split)
            starts, _ = slice_windows(len(tokens), 0, 0, sequences, self.seq_len)
            x, y = read_windows(tokens, starts, self.seq_len, bos_id=self.window_bos)
            found[split] = self.checked(x, y)
        return found

    def checked(self, *arrays):
        """Return these arrays of token ids. Fails if an id is not in the vocabulary."""
        return tuple(check_ids(self.folder, array, self.meta["vocab_size"]) for array in arrays)

    @property
    def window_bos(self):
        """
        The token that replaces the first input of windows, in training and evaluation: BOS if
        documents fill LONG windows or more on average, else None. Without this, the model would
        rarely see BOS in long documents, although every prompt begins with it.
        """
        is_long = self.meta["train_tokens"] >= LONG * self.seq_len * self.meta["train_documents"]
        return self.tokenizer.bos_id if is_long else None

    @property
    def coder(self):
        """The encoder of prompts and decoder of generated tokens: the vocabulary."""
        return self.tokenizer

    @property
    def separator(self):
        """The token that begins each document; None if there is only one document."""
        return self.tokenizer.bos_id if self.meta["train_documents"] > 1 else None

    def epochs(self, sequences):
        """
        Return the number of epochs after this many sequences: how often a run has read the training
        split and the tokens of read_beside.
        """
        return sequences * self.seq_len / len(self.read_from)

    def bits_per_byte(self, loss):
        """Convert a validation loss in nats per token to bits per byte of text."""
        predicted = self.meta["val_tokens"] - self.meta["val_documents"]  # all but BOS
        return loss / math.log(2) * predicted / self.meta["val_bytes"]


class ConversationDataset(Dataset):
    """
    The batches of a training on conversations. Each row of a batch holds whole conversations, or
    whole turns of those that are longer than the context, and padding; only answers are targets. In
    targets, packing.BEGINS marks where a conversation begins.
    """

    def __init__(self, *arguments, **named):
        super().__init__(*arguments, **named)
        size = self.seq_len + 1  # tokens of a row: inputs and the last target
        self.cuts = {split: cut_at_turns(self.masks[split], size) for split in SPLITS}
        for split, found in self.cuts.items():
            if not len(found.pieces):
                fail(f"{self.folder}: no turn of the {split} split fits into the context of "
                     f"max_seq_len={self.seq_len} tokens; use a longer context")
        pieces = self.cuts["train"].pieces
        order, self.edges = pack(lengths_of(pieces), size)
        self.packed, self.n_rows = pieces[order], len(self.edges) - 1  # of the training split

    def row(self, n):
        """Return the pieces, (m, 4), of a row of the training split."""
        return self.packed[self.edges[n]:self.edges[n + 1]]

    def read(self, split, rows, seq_len):
        """Return read_rows of a split."""
        tokens, marks = getattr(self, split), self.masks[split]
        return read_rows(tokens, marks, rows, seq_len, self.tokenizer.eos_id)

    def make_batch(self, step, whole=False):
        rows, counted = self.windows(step, whole)
        x, y = self.read("train", [self.row(n) for n in rows], self.seq_len)
        y[counted == 0] = NO_TARGET
        return tuple(t.pin_memory() if self.pinned else t for t in self.checked(x, y))

    def windows(self, step, whole=False):
        """
        Return (rows, counted), (n,) int64 each, of make_batch: indices of rows, and 0 for a row
        that only fills the batch of a rank, else 1.
        """
        first = sequences_before(step, self.global_batch, self.resumed_at)
        share = (0, 1) if whole else (self.rank, self.world)
        return slice_windows(self.n_rows, self.seed, first, self.global_batch, 1, share)

    def eval_batches(self, split, limit, batch_tokens):
        """
        Yield the batches of an evaluation, (x, y, is_counted): conversations with about `limit`
        targets in total (0: as many as the validation split has), each one in a row of its own.
        """
        pieces, count = self.cuts[split].pieces, self.answer_tokens("val").sum()
        drawn = np.random.Generator(np.random.PCG64(SEED)).permutation(len(pieces))
        targets = np.cumsum(self.answer_tokens(split)[drawn])
        pieces = pieces[drawn[:np.searchsorted(targets, min(count, limit or count)) + 1]]
        pieces = pieces[np.argsort(-lengths_of(pieces), kind="stable")]

        def read(taken, longest):
            return self.read(split, pieces[taken][:, None], longest)
        yield from self.shared_batches(read, lengths_of(pieces) - 1, batch_tokens)

    def answer_tokens(self, split):
        """Return the number of targets in each piece of a split, (n,)."""
        before = np.cumsum(np.append(0, self.masks[split] & TARGET > 0))
        pieces = self.cuts[split].pieces
        return before[pieces[:, 3]] - before[pieces[:, 2]]

    def probe_batches(self, sequences=4):
        pieces = {"train": [self.row(n) for n in range(min(sequences, self.n_rows))],
                  "val": [piece[None] for piece in self.cuts["val"].pieces[:sequences]]}
        return {split: self.checked(*self.read(split, rows, self.seq_len))
                for split, rows in pieces.items()}

    window_bos, separator = None, BEGINS

    @property
    def coder(self):
        """The encoder of prompts and decoder of answers: the chat template with the vocabulary."""
        return self.chat

    def epochs(self, sequences):
        return sequences / self.n_rows

    def bits_per_byte(self, loss):
        """Convert a validation loss in nats per token of answers to bits per byte of answers."""
        return loss / math.log(2) * self.meta["val_answer_tokens"] / self.meta["val_answer_bytes"]

    def describe(self):
        """Return a line that describes the training data."""
        meta, notes = self.meta, ""
        full = lengths_of(self.packed).sum() / (self.n_rows * (self.seq_len + 1))
        cut = sum(found.cut for found in self.cuts.values())
        too_long = sum(found.too_long for found in self.cuts.values())
        if cut:
            notes += f"; longer than the context and cut at turns: {cut:,}"
        if too_long:
            notes += f"; turns left out, longer than the context: {too_long:,}"
        return (f"{meta['train_documents']:,} conversations to train on, {meta['val_documents']:,} "
                f"to validate; {self.answer_share:.0%} of the tokens are answers, the only "
                f"targets; packed in {self.n_rows:,} rows, {full:.0%} full{notes}")

    @property
    def answer_share(self):
        """The fraction of the training split's tokens that are answers."""
        return self.meta["train_answer_tokens"] / self.meta["train_tokens"]


class Prefetch:
    """Call make(step) for consecutive steps, in a thread one step ahead of the caller."""

    def __init__(self, make):
        self.make, self.thread = make, concurrent.futures.ThreadPoolExecutor(1)
        self.next_step, self.next_made = -1, None

    def get(self, step):
        """
        Return make(step). If the thread has made a different step, call make in the caller's
        thread. The thread finishes that step before it begins step + 1.
        """
        made = self.next_made.result() if step == self.next_step else self.make(step)
        self.next_step, self.next_made = step + 1, self.thread.submit(self.make, step + 1)
        return made


# ---- windows of training -------------------------------------------------------------------------

@functools.lru_cache(maxsize=8)
def epoch_windows(seed, epoch, n_tokens, seq_len):
    """
    Return the position of the first token of each window of an epoch, in shuffled order:
    (n_tokens // seq_len,) int64. The windows lie side by side from a random offset below seq_len,
    so the last of them may extend past the end of the tokens; see read_windows.
    """
    rng = np.random.Generator(np.random.PCG64([seed, epoch]))
    offset = rng.integers(seq_len)
    return offset + seq_len * rng.permutation(n_tokens // seq_len)


def sequences_before(step, global_batch, resumed_at=(0, 0)):
    """
    Return how many sequences a run reads before a step. resumed_at: see Dataset; steps before the
    resumed step count as global_batch sequences each.
    """
    resumed_step, read_before = resumed_at
    if step < resumed_step:
        return step * global_batch
    return read_before + (step - resumed_step) * global_batch


def slice_windows(n_tokens, seed, first, global_batch, seq_len, share=(0, 1)):
    """
    Return (starts, lengths), (n,) int64 each, of the windows in a rank's slice of a global batch:
    position of the first token and number of targets. Each window occurs once in an epoch.

    first: number of sequences that the run has read before; share: (rank, number of ranks). If
    global_batch is not a multiple of the number of ranks, n is rounded up. The last ranks then
    repeat the last window of the batch, with 0 targets.
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
    each. It needs no Dataset: tests and bench/ read batches of any array of tokens. share: see
    slice_windows.
    """
    first = sequences_before(step, global_batch)
    starts, lengths = slice_windows(len(tokens), seed, first, global_batch, seq_len, share)
    return read_windows(tokens, starts, seq_len, lengths)


def read_windows(tokens, starts, seq_len, lengths=None, bos_id=None):
    """
    Return inputs and targets, (n, seq_len) int64 each, of the windows that begin at `starts` (n,).
    A window that extends past the last token continues with the first.

    lengths: (n,), number of targets of each window; the targets after these become -1, which the
    loss ignores. bos_id: replaces the first input of each window, unless None. A window whose first
    target is BOS keeps its first input, the EOS of the document before: BOS never follows BOS.
    """
    import torch  # here: preparing and its worker processes do not need it
    places = (starts[:, None] + np.arange(seq_len + 1)) % len(tokens)
    both = torch.from_numpy(tokens[places].astype(np.int64))
    # Copies, since the two slices overlap and both are edited below.
    x, y = both[:, :-1].clone(), both[:, 1:].clone()
    if bos_id is not None:
        x[y[:, 0] != bos_id, 0] = bos_id
    if lengths is not None:
        y[torch.arange(seq_len) >= torch.from_numpy(lengths)[:, None]] = -1
    return x, y


# ---- windows of an evaluation --------------------------------------------------------------------

def eval_spans(tokens, bos_id, seq_len):
    """
    Return (starts, lengths), (n,) int64 each, of spans that cover a split: position of the first
    token and number of predictions, which are the tokens after the first. The first span of a
    document starts at its BOS. A document of more than seq_len predictions has several spans.
    """
    edges = np.append(np.flatnonzero(tokens == bos_id), len(tokens))
    if edges[0]:  # the split begins inside a document
        edges = np.insert(edges, 0, 0)
    spans = [np.arange(start, end - 1, seq_len) for start, end in zip(edges, edges[1:])]
    starts = np.concatenate(spans)
    ends = edges[np.searchsorted(edges, starts, "right")]  # where each span's document ends
    return starts, np.minimum(ends - 1 - starts, seq_len)


def excerpt(tokens, bos_id, size, pieces=64):
    """
    Return evenly spaced pieces of a split, about `size` tokens in total, or all of a smaller split.
    A piece with a BOS in its first half is cut to start there.
    """
    if len(tokens) <= size:
        return tokens
    each, found = size // pieces, []
    for at in np.arange(pieces) * (len(tokens) - each) // (pieces - 1):
        piece = np.asarray(tokens[at:at + each])
        first_bos = np.argmax(piece[:each // 2] == bos_id)  # 0 if there is none
        found.append(piece[first_bos:])
    return np.concatenate(found)


def eval_windows(tokens, bos_id, seq_len, count):
    """
    Return (tokens, starts, lengths) of spans with `count` predictions in total, fewer if the split
    has fewer. tokens: the split, or an excerpt of max(4 * count, EXCERPT) tokens of a larger one.

    The spans are drawn from all of the tokens with a fixed seed and sorted, the longest first. The
    last span drawn is cut, so that the total is exact.
    """
    tokens = excerpt(tokens, bos_id, max(4 * count, EXCERPT))
    starts, lengths = eval_spans(tokens, bos_id, seq_len)
    drawn = np.random.Generator(np.random.PCG64(SEED)).permutation(len(starts))
    # Keep the spans up to the one with which the total reaches `count`.
    drawn = drawn[:np.searchsorted(np.cumsum(lengths[drawn]), count) + 1]
    lengths = lengths[drawn]
    lengths[-1] -= max(0, lengths.sum() - count)
    order = np.argsort(-lengths, kind="stable")
    return tokens, starts[drawn][order], lengths[order]


# ---- what a text looks like ----------------------------------------------------------------------

def document_starts(dataset, split, count):
    """Return where documents start in the first `count` tokens of a split."""
    if dataset.masks:
        return np.flatnonzero(dataset.masks[split][:count] & FIRST)
    return np.flatnonzero(getattr(dataset, split)[:count] == dataset.tokenizer.bos_id)


def document_rows(dataset, count=3, max_tokens=40):
    """
    Return rows about the first `count` documents of each split, for the table `documents`: split,
    the first max_tokens tokens as text and as pieces, length in tokens, fraction of <unk>, fraction
    of byte tokens that spell characters which the vocabulary lacks. Only the first 262,144 tokens
    of a split are read: a document that extends beyond them is counted up to there.
    """
    tokenizer, rows = dataset.tokenizer, []
    pieces = tokenizer.pieces()
    # Byte pieces are a fallback only in sentencepiece: a byte vocabulary has nothing else.
    # No piece is of kind None, so its fraction is 0.
    fallback = BYTE if tokenizer.kind == "sentencepiece" else None
    for split in SPLITS:
        tokens = np.asarray(getattr(dataset, split)[:1 << 18])
        starts = document_starts(dataset, split, len(tokens))
        ends = [*starts[1:], len(tokens)]
        for start, end in zip(starts[:count], ends):
            ids = tokens[start:end].tolist()
            beginning, kinds = ids[:max_tokens], [pieces[i][2] for i in ids]
            shares = [round(kinds.count(kind) / len(ids), 4) for kind in (UNKNOWN, fallback)]
            text, spelled = tokenizer.decode(beginning), survey.spelled(beginning, pieces)
            rows.append([split, text, spelled, len(ids), *shares])
    return rows


def survey_excerpts(dataset, max_tokens=EXCERPT):
    """Return what survey.survey finds in an excerpt of each split."""
    bos_id, starts = dataset.tokenizer.bos_id, None
    splits = {name: excerpt(getattr(dataset, name), bos_id, max_tokens) for name in SPLITS}
    if dataset.masks:
        splits = {name: getattr(dataset, name)[:max_tokens] for name in SPLITS}
        starts = {name: document_starts(dataset, name, max_tokens) for name in SPLITS}
    return survey.survey(splits, dataset.tokenizer, dataset.meta, starts)


def data_rows(dataset):
    """Return {column: value} about the data for the first row of a run's log."""
    found = survey_excerpts(dataset, 1 << 20)
    counts, edges = np.histogram(found["lengths"], bins=32)
    answers = {"data/answers": dataset.answer_share} if dataset.masks else {}
    # The first row of a table names its columns.
    return answers | {"documents": document_rows(dataset), "data": found["summary"][1:],
            "pieces": found["most frequent pieces"][1:],
            "data/lengths": {"counts": counts.tolist(), "edges": edges.tolist()}}


def show_conversations(prepared, count=3, max_tokens=400):
    """Print the first `count` conversations of each split with the targets highlighted."""
    pieces = prepared.tokenizer.pieces()
    for split in SPLITS:
        tokens, marks = getattr(prepared, split), prepared.masks[split]
        starts = document_starts(prepared, split, 1 << 18)[:count + 1].tolist()
        ends = [*starts[1:], min(len(tokens), 1 << 18)]
        for start, end in list(zip(starts, ends))[:count]:
            shown = slice(start, min(end, start + max_tokens))
            is_target = marks[shown] & TARGET > 0
            edges = [0, *(np.flatnonzero(np.diff(is_target)) + 1).tolist(), len(is_target)]
            print(f"\n{split}: {end - start} tokens, {is_target.sum()} of them targets")
            print_highlighted((survey.with_markers(tokens[shown][a:b].tolist(), pieces),
                               is_target[a]) for a, b in zip(edges, edges[1:]))


def vocabulary_of_training(config):
    """
    Print and return {setting: value} of the vocabulary that train.py would choose for the text on
    this machine, {} if the user has set one.
    """
    if {"vocab_source", "vocab_size", "max_vocab_size"} & config.given.keys():
        return {}
    from engine.training import plan  # here and below: they import torch, which takes seconds
    from engine.training.costs import Build
    from model import ModelArgs
    from optim import make_optimizer
    values = {"data": source, "cache": cache, "column": column, "val_fraction": val_fraction,
              "max_text_bytes": max_text_bytes}
    given = {"data"} | {name for name in values if name in config.given}
    chosen = plan.text_settings(values, given, Build(ModelArgs.of, make_optimizer))
    found = plan.values(chosen)
    if found:
        shown = " ".join(f"--{name}={value}" for name, value in found.items())
        print(f"as `python train.py --data={source}` would prepare it: {shown}")
    return found


def show_data(prepared):
    """Print the survey for --show, and write the files of --page and --png."""
    found, rows = survey_excerpts(prepared), document_rows(prepared)
    if show and prepared.masks:
        show_conversations(prepared)
    elif show:
        for split, text, tokens, length, unknown, fallback in rows:
            print(f"\n{split}: {length} tokens, {unknown:.2%} unknown, "
                  f"{fallback:.2%} byte fallback")
            print(f"  {text!r}\n  {tokens}")
    if show:
        for name, lines in survey.tables(found).items():
            print(f"\n{name}", *survey.table(lines), sep="\n")
    columns = ["split", "text", "tokens", "length", "unknown", "byte fallback"]
    try:
        if page:
            text = survey.page(source, found | {"documents": [columns, *rows]})
            # A file name that is not UTF-8 is shown with escapes.
            Path(page).write_text(text, encoding="utf-8", errors="backslashreplace")
        if png:
            survey.picture(source, found, png)
    except OSError as e:
        fail(f"{e.filename}: cannot be written ({e.strerror})")
    for path in filter(None, (page, png)):
        print(f"wrote {path}")


if __name__ == "__main__":
    config = configure(globals(), positional="source")
    for path, ending in (page, ".html"), (png, ".png"):
        if path and not path.endswith(ending):
            fail(f"{path}: expected a name that ends in {ending}")
    vocabulary = {"vocab_source": vocab_source, "vocab_size": vocab_size,
                  "max_vocab_size": max_vocab_size, "max_text_bytes": max_text_bytes}
    if show or page or png:
        vocabulary |= vocabulary_of_training(config)
    prepared = prepare(source, val_fraction=val_fraction, cache=cache, workers=workers,
                       skip_bad=skip_bad, column=column, **vocabulary)
    found = load(prepared)
    # This fails if `source` is a prepared folder and a setting given here differs from its own.
    as_prepared(SimpleNamespace(data=source, **config.as_dict()), config.given, found.meta)
    print(prepared)
    if show or page or png:
        show_data(found)
