"""
Any text → tokens on disk → batches.

    python data.py SOURCE [--vocab_source=custom] [--vocab_size=0] [--val_fraction=0.1] [--cache=cache] [--show=True]

SOURCE is `stories` or `stories:N` (written by engine/stories.py), `tinystories` or `tinyshakespeare` (downloaded), a text
file, a folder of .txt and .jsonl files, or a folder prepared before. Of a folder are left out, and named: what is hidden or
installed, runs, the cache, other files. What is prepared is a folder of

    train.bin, val.bin   token ids, uint16 or uint32, every document BOS … EOS
    tokenizer.model      the vocabulary (tokenizer.json for bytes and characters)
    meta.json            counts, sizes, hashes; for stories the bits per byte that no model can beat

and it is made once: its name ends in a hash of all it depends on (of a file: path, size and time of change).

Documents. Lines `<|endoftext|>` in a .txt file separate documents, which lose their outer white space; a file without
such lines is one document and stays as it is. Each line of a .jsonl file is one, under the key "text" or "story".
Validation takes whole documents, drawn with a fixed seed, until it holds val_fraction of the bytes. Where they are
too few or too long for that (one long text, say) it takes the last val_fraction by position.

A step's windows lie side by side in the training split, from an offset drawn for each epoch. Where documents are long
compared with the context (LONG windows or more on average), every window begins with BOS, as every prompt does.
"""
import concurrent.futures
import functools

from configurator import configure, fail  # first: it answers for packages that are missing

import numpy as np

from engine import prepare as preparation
from engine.prepare import SEED, load

source = "stories"       # stories, stories:N, tinystories, tinyshakespeare, a text file, a folder of .txt and .jsonl
vocab_source = "custom"  # custom (trained on the data), byte, char, llama2 (./tokenizer.model), or a tokenizer's path
vocab_size = 0           # of a custom vocabulary; 0: chosen by the size of the text
val_fraction = 0.1       # of the text held out for validation (of stories, 2000 at most)
cache = "cache"          # prepared data and downloads go here
skip_bad = False         # leave out files of a folder that can't be read as text, and count them
workers = 0              # processes; 0: one for each core
show = False             # print some documents with their tokens, as a run's table `documents` has them
tinystories_url = "https://huggingface.co/datasets/roneneldan/TinyStories/resolve/f54c09fd23315a6f9c86f9dc80f725de7d8f9c64"  # or a mirror
tinyshakespeare_url = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare"  # or a mirror

EXCERPT = 1 << 22   # tokens of a larger split that an evaluation draws from
LONG = 8            # windows that a document fills on average, from which on all windows begin with BOS


def prepare(*arguments, **named):
    """engine/prepare.py's, which downloads from the URLs that are set here."""
    urls = {"tinystories": tinystories_url, "tinyshakespeare": tinyshakespeare_url}
    return preparation.prepare(*arguments, urls=urls, **named)


def look(dataset, count=3, longest=40):
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
            spelled = "|".join(pieces[i][0].decode("utf-8", "replace") for i in ids[:longest])
            rows.append([split, dataset.tokenizer.decode(ids[:longest]), spelled, len(ids),
                         round(kinds.count(2) / len(ids), 4), round(kinds.count(fallback) / len(ids), 4)])
    return rows


def print_look(dataset):
    for split, text, tokens, length, unknown, bytes_ in look(dataset):
        print(f"\n{split}: {length} tokens, {unknown:.2%} unknown, {bytes_:.2%} byte fallback\n  {text!r}\n  {tokens}")


def opening(dataset, seq_len):
    """
    The token that every window of a corpus begins with, in training and evaluation: BOS where documents fill LONG
    windows or more on average, since a model would hardly see there how texts begin, and every prompt does; else None.
    """
    meta = dataset.meta
    return dataset.tokenizer.bos_id if meta["train_tokens"] >= LONG * seq_len * meta["train_documents"] else None


@functools.lru_cache(maxsize=8)
def epoch_windows(seed, epoch, n_tokens, seq_len):
    """
    The first token of every window of an epoch, in the order of that epoch: (n_tokens // seq_len,) int64. The windows
    lie side by side, from an offset drawn anew; behind the last token comes the first, another document as ever.
    """
    rng = np.random.Generator(np.random.PCG64([seed, epoch]))
    return (rng.integers(seq_len) + seq_len * rng.permutation(n_tokens // seq_len)) % n_tokens


def batch(tokens, seed, step, batch_size, seq_len, rank=0, world=1, first=None):
    """
    Inputs and targets of one step, each (batch_size / world, seq_len) int64: a pure function of the arguments. Where
    world is no divisor, it is rounded up, and the last ranks have rows of targets -1, which the loss leaves out.
    tokens: (n_tokens,); batch_size: sequences of all ranks together; first: as for gather. Sample step * batch_size + i
    of the run is one of epoch_windows, so every window comes once in an epoch; a rank takes its slice of the step's batch.
    """
    windows = len(tokens) // seq_len
    if windows < 1:
        fail(f"a split of {len(tokens)} tokens holds no window of {seq_len} tokens; "
             f"use more text, a larger --val_fraction or a smaller --max_seq_len")
    share = -(-batch_size // world)
    rows = rank * share + np.arange(share)
    epochs, places = np.divmod(step * batch_size + np.minimum(rows, batch_size - 1), windows)
    starts = np.concatenate([epoch_windows(seed, int(epoch), len(tokens), seq_len)[places[epochs == epoch]]
                             for epoch in np.unique(epochs)])
    return gather(tokens, starts, seq_len, np.where(rows < batch_size, seq_len, 0), first)


class Ahead:
    """make(step) for one step after the other; a thread makes the next while the last is used. make: a pure function."""

    def __init__(self, make):
        self.make, self.thread = make, concurrent.futures.ThreadPoolExecutor(1)
        self.step, self.coming = -1, None

    def take(self, step):
        made = self.coming.result() if step == self.step else self.make(step)
        self.step, self.coming = step + 1, self.thread.submit(self.make, step + 1)
        return made


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


def eval_batches(dataset, split, seq_len, limit, rows, rank=0, world=1):
    """
    Yields (x, y, counts) of an evaluation: inputs and targets as from gather, and whether they count; a process that has
    nothing left repeats what does not. Of either split as many tokens are predicted as the validation split has, `limit`
    at most (0: no limit), and never a BOS. rows: sequences in a batch.
    """
    count, bos_id = dataset.meta["val_tokens"] - dataset.meta["val_documents"], dataset.tokenizer.bos_id
    tokens, starts, lengths = eval_windows(getattr(dataset, split), bos_id, seq_len, min(count, limit or count))
    for at in range(0, len(starts), world * rows):
        mine = slice(at + rank * rows, at + (rank + 1) * rows)
        counts = len(starts[mine]) > 0
        some = mine if counts else slice(at, at + 1)  # sharded processes compute together, needed or not
        yield *gather(tokens, starts[some], int(lengths[at]), lengths[some], opening(dataset, seq_len)), counts


def gather(tokens, starts, seq_len, lengths=None, first=None):
    """
    Inputs and targets, each (n, seq_len) int64, of the windows that begin at `starts` (n,). Behind `lengths` (n,), where
    given, targets are -1, which the loss leaves out. first: the token that stands in place of the first input (see
    opening), but for a window that predicts it there; None: the text's own.
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


if __name__ == "__main__":
    configure(globals(), positional="source")
    prepared = prepare(source, vocab_source, vocab_size, val_fraction, cache, workers, skip_bad)
    print(prepared)
    if show:
        print_look(load(prepared))
