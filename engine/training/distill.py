"""
--teacher: distillation. The model learns the predictions of other models, its teachers, instead of
the next tokens of the text alone. https://arxiv.org/abs/1503.02531

A small text is read many times, and teachers that have memorized it predict it too well for much to
be learned from them there. So the model also reads text that the teachers write, which has new
words in the same style. Measurements: doc/lab/own_text.md
"""
import hashlib
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from configurator import fail
from engine.files import replacing
from engine.training import distributed
from engine.untrusted import reading

TIMES = 8              # tokens that the teachers write for each token of the text
MAX_WRITTEN = 1 << 19  # max tokens that they write; a text with more tokens gets none
PROMPT = 8             # tokens of the text that begin what a teacher writes
ROWS = 256             # sequences that a teacher writes at once
SEED = 1337            # of what they write


def paths(teacher):
    """
    Return the paths of the models that the setting `teacher` names: paths separated by commas. A
    folder of --seeds stands for the runs in it.
    """
    found = []
    for path in filter(None, map(str.strip, teacher.split(","))):
        found += sorted(map(str, Path(path).glob("seed[0-9]*/"))) or [path]
    return found


def written_tokens(config, meta):
    """
    Return how many tokens the teachers of a training write; meta: meta.json of its text. The number
    does not depend on the length of the training, which a resumed run may change.
    """
    n = meta["train_tokens"]
    return min(TIMES * n, MAX_WRITTEN) if config.teacher and n <= MAX_WRITTEN else 0


def loss(network, teachers, x, y, documents=None):
    """
    Return the mean cross-entropy in nats between the predictions of the network and the mean
    predictions of the teachers. x, y: (B, T) tokens and targets, negative where a position counts
    not; documents: see Transformer.forward.
    """
    counts = y.flatten() >= 0
    with torch.no_grad():
        target = mean_prediction(teachers, x, documents)[counts]  # (N, V)
    logits = network(x, every=1, documents=documents)[0].flatten(0, 1)[counts].float()
    return F.cross_entropy(logits, target)


def mean_prediction(teachers, x, documents):
    """Return the mean of the teachers' probabilities of the tokens after x (B, T): (B T, V)."""
    total = 0
    for teacher in teachers:
        logits = teacher(x, every=1, documents=documents)[0].flatten(0, 1)
        total = total + logits.float().softmax(-1)
    return total / len(teachers)


# ---- text that the teachers write ----------------------------------------------------------------

def written_text(teachers, dataset, n, cache):
    """
    Return about n tokens that the teachers write, an array of the dataset's dtype. A file in the
    cache keeps them: a resumed run reads the same.
    """
    digest = hashlib.sha256(f"{dataset.meta['fingerprint']} {dataset.seq_len} {n}".encode())
    for teacher in teachers:
        for tensor in teacher.state_dict().values():
            digest.update(tensor.cpu().float().numpy().tobytes())
    path = Path(cache, "written", digest.hexdigest()[:16] + ".bin")
    distributed.on_master(write_text, teachers, dataset, n, path)
    with reading(path, "tokens that teachers have written", fail):
        return np.fromfile(path, dataset.train.dtype)


@torch.no_grad()
def write_text(teachers, dataset, n, path):
    """Let the teachers write about n tokens into a file, in turns, unless it exists."""
    if path.exists():
        return
    distributed.say(f"teachers: {len(teachers)} write {n:,} tokens, which the model reads beside "
                    f"the text; kept in {path}")
    device = next(teachers[0].parameters()).device
    dice = torch.Generator(device).manual_seed(SEED)
    tokens, rows = 0, []
    while tokens < n:
        teacher = teachers[len(rows) % len(teachers)]
        rows.append(write_rows(teacher, dataset, dice, device))
        tokens += len(rows[-1])
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as f:
        f.write(np.concatenate(rows).astype(dataset.train.dtype).tobytes())


def write_rows(teacher, dataset, dice, device):
    """
    Return the tokens of ROWS texts of up to seq_len tokens, one after the other, drawn from what a
    teacher predicts. Each continues PROMPT tokens of the training text: the first ones of a
    document, or, if documents are long, any. It ends at the context's end or after EOS.
    """
    x = prompts(dataset, dice, device)  # (ROWS, PROMPT)
    first = x.clone()
    if dataset.window_bos is not None:  # what every window of the training begins with
        first[:, 0] = dataset.window_bos
    cache, texts = teacher.new_cache(ROWS, dataset.seq_len), [x]
    logits = teacher(first, cache=cache)[0][:, -1]
    for _ in range(dataset.seq_len - PROMPT):
        x = torch.multinomial(logits.float().softmax(-1), 1, generator=dice)
        texts.append(x)
        logits = teacher(x, cache=cache)[0][:, -1]
    texts = torch.cat(texts, 1).cpu().numpy()
    ends = texts == dataset.tokenizer.eos_id
    lengths = np.where(ends.any(1), ends.argmax(1) + 1, texts.shape[1])
    return np.concatenate([text[:length] for text, length in zip(texts, lengths)])


def prompts(dataset, dice, device):
    """Return PROMPT tokens from each of ROWS random places of the training text, (ROWS, PROMPT)."""
    places = np.arange(len(dataset.train) - PROMPT)
    if dataset.separator is not None and dataset.window_bos is None:
        places = np.flatnonzero(dataset.train[:-PROMPT] == dataset.separator)
    drawn = torch.randint(len(places), (ROWS,), generator=dice, device=device).cpu().numpy()
    tokens = dataset.train[places[drawn][:, None] + np.arange(PROMPT)]
    return torch.from_numpy(tokens.astype(np.int64)).to(device)
