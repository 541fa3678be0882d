"""
Encode documents to token ids with worker processes. Each worker encodes one part after another and
publishes it as parts/N.npz. An interrupted preparation continues with the parts that are missing.
"""
import collections
import concurrent.futures
import contextlib
import errno
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
from tqdm import tqdm

from engine.files import replacing
from engine.formats.chat_template import TARGET, Chat
from engine.text.blocks import Unfit, progress
from engine.text.corpus import FIRST, LAST, VAL, Conversations, load_corpus
from engine.text.prepared import SPLITS, mask_name
from engine.text.vocabulary import stored_vocabulary

PART = 1 << 21  # bytes of text in a part
# Counts per split: documents, bytes of their text, its information content in bits (0 if unknown),
# and, for conversations, the tokens that are targets and the bytes of the answers.
COUNTS = "documents", "bytes", "bits", "answer_tokens", "answer_bytes"


def part_starts(corpus):
    """
    Return the first row of each part, then the number of rows: (parts + 1,) int64. Rows are never
    split, so a part may have more than PART bytes.
    """
    sizes = corpus.sizes(corpus.rows)
    row_starts = np.cumsum(sizes) - sizes  # bytes
    part = row_starts // PART
    return np.append(np.flatnonzero(np.diff(part, prepend=-1)), len(sizes))


def part_file(folder, number):
    return folder / "parts" / f"{number}.npz"


def token_type(tokenizer):
    """Return the dtype of stored token ids."""
    return np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)


def part_encoder(folder):
    """Return a function that encodes and stores part `number` of the preparation in a folder."""
    corpus, tokenizer = load_corpus(folder), stored_vocabulary(folder)
    starts, dtype = part_starts(corpus), token_type(tokenizer)
    is_chat = isinstance(corpus, Conversations)
    documents = encoded_conversations if is_chat else encoded_texts

    def encode(number):
        ids, marks = ([], []), ([], [])  # of train and val
        counts = np.zeros((2, len(COUNTS)))
        rows = corpus.rows[starts[number]:starts[number + 1]]
        for flags, tokens, token_marks, counted in documents(corpus, tokenizer, rows):
            split = flags & VAL  # VAL is 1, the index in SPLITS
            ids[split].extend(tokens)
            marks[split].extend(token_marks)
            counts[split] += counted
        arrays = {split: np.array(tokens, dtype) for split, tokens in zip(SPLITS, ids)}
        if is_chat:
            arrays |= {mask_name(split): np.array(m, np.uint8) for split, m in zip(SPLITS, marks)}
        with replacing(part_file(folder, number)) as f:
            np.savez(f, **arrays, counts=counts)

    return encode


def encoded_texts(corpus, tokenizer, rows):
    """Yield (flags, ids, (), COUNTS) of each row of a Corpus."""
    has_eos = tokenizer.eos_id != tokenizer.bos_id  # if one token is both, write it only as BOS
    for text, size, flags, bits in corpus.texts(rows):
        is_first, before = bool(flags & FIRST), ""
        if not is_first and tokenizer.add_dummy_prefix:
            # The tokenizer puts a space before every text, which is one too many inside a
            # document. If the text begins with a space, remove it: the tokenizer's space replaces
            # it. Otherwise put a line end before the text, and drop the tokens of the tokenizer's
            # space and of the line end.
            before, text = ("", text[1:]) if text[0] == " " else ("\n", text)
        is_last = bool(flags & LAST)
        tokens = tokenizer.encode(before + text, bos=is_first, eos=is_last and has_eos)
        dropped = len(tokenizer.encode(before)) if before else 0
        yield flags, tokens[dropped:], (), (is_first, size, bits, 0, 0)


def encoded_conversations(corpus, tokenizer, rows):
    """Yield (flags, ids, marks, COUNTS) of each row of Conversations. marks: see chat_template."""
    chat = Chat(corpus.chat_template, tokenizer)
    for turns, flags in corpus.turns(rows):
        ids, marks = chat.encode(turns)
        sizes = [len(text.encode()) for _, text in turns]
        answers = sum(size for size, (role, _) in zip(sizes, turns) if role == "assistant")
        targets = sum(mark & TARGET > 0 for mark in marks)
        yield flags, ids, marks, (1, sum(sizes), 0, targets, answers)


def encode_parts(corpus, folder, workers):
    """Encode the parts that are missing, with up to `workers` processes."""
    sizes = np.add.reduceat(corpus.sizes(corpus.rows), part_starts(corpus)[:-1])
    missing = [number for number in range(len(sizes)) if not part_file(folder, number).exists()]
    total = int(sizes.sum())
    with tqdm(total=total, initial=total - int(sizes[missing].sum()), desc="encoding", unit="B",
              unit_scale=True, dynamic_ncols=True) as bar:
        if workers == 1 or len(missing) == 1:
            encode = part_encoder(folder)
            for number in missing:
                encode(number)
                bar.update(int(sizes[number]))
            return
        todo, count = collections.deque(missing), min(workers, len(missing))
        # If no part is missing, count is 0, which the pool does not accept.
        with concurrent.futures.ThreadPoolExecutor(max(count, 1)) as pool:
            try:
                drivers = [pool.submit(drive_worker, folder, todo, bar, sizes)
                           for _ in range(count)]
                concurrent.futures.wait(drivers, return_when="FIRST_EXCEPTION")
            finally:
                todo.clear()  # after an error, no worker begins another part
            for driver in drivers:
                driver.result()  # raises the error


def drive_worker(folder, todo, bar, sizes):
    """
    Run one worker process, which encodes part after part of the deque `todo` until it is empty.

    The worker is a separate program: a child of multiprocessing would import train.py, and torch,
    again. It has its own session, so Ctrl-C does not reach it. It ends when its stdin is closed, so
    it never outlives this process.
    """
    # With -c, sys.path begins with "", the current folder, whose random.py must not be imported.
    program = ("import sys; sys.path[:] = [sys.argv[1], *filter(None, sys.path)]; "
               "from engine.text import encode; encode.serve(sys.argv[2])")
    command = [sys.executable, "-c", program, str(Path(__file__).resolve().parents[2]), str(folder)]
    with subprocess.Popen(command, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          start_new_session=True) as worker:
        while todo:
            try:
                number = todo.popleft()
            except IndexError:  # another worker was faster
                break
            with contextlib.suppress(BrokenPipeError):  # it died: readline returns nothing
                worker.stdin.write(b"%d\n" % number)
            answer = worker.stdout.readline()
            if not answer:
                code = worker.wait()
                raise OSError(errno.ECHILD, f"a process that encodes ended with code {code}")
            problem = json.loads(answer)
            if problem:
                raise OSError(*problem) if isinstance(problem, list) else Unfit(problem)
            bar.update(int(sizes[number]))


def serve(folder):
    """
    Run as a worker: read the number of a part from each line of stdin, encode that part, and answer
    with a line of JSON: null, the arguments of an OSError, or the message of an Unfit.
    """
    encode = part_encoder(Path(folder))
    for line in sys.stdin:
        problem = None
        try:
            encode(int(line))
        except Unfit as e:
            problem = str(e)
        except OSError as e:
            problem = [e.errno, e.strerror, e.filename]
        print(json.dumps(problem), flush=True)


def join_parts(corpus, folder):
    """
    Join the parts into train.bin and val.bin, and into masks for conversations. Return the COUNTS
    of both splits, (2, 5) float64.
    """
    counts, numbers = np.zeros((2, len(COUNTS))), range(len(part_starts(corpus)) - 1)
    names = [*SPLITS]
    if isinstance(corpus, Conversations):
        names += map(mask_name, SPLITS)
    with progress("joining", len(numbers), " parts") as bar, contextlib.ExitStack() as files:
        out = {name: files.enter_context(replacing(folder / f"{name}.bin")) for name in names}
        for number in numbers:
            with np.load(part_file(folder, number)) as part:
                for name in names:
                    out[name].write(part[name].tobytes())
                counts += part["counts"]
            bar.update()
    return counts
