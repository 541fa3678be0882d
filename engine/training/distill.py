"""
--teacher: distillation. The model (the student) minimizes the cross-entropy with the mean of its
teachers' next-token probabilities, instead of that with the text's tokens.
https://arxiv.org/abs/1503.02531

Teachers that have memorized a small text predict it almost with certainty, which adds little to the
text itself. So the student is also trained on text that is sampled from the teachers. Measurements:
doc/lab/own_text.md
"""
import hashlib
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from configurator import fail
from engine.files import replacing
from engine.text.prepare import errors_in_one_line
from engine.training import distributed
from engine.untrusted import reading

WRITTEN_PER_TOKEN = 8  # tokens that the teachers write for each token of the training text
MAX_WRITTEN = 1 << 19  # max tokens that they write; for a longer training text they write nothing
PROMPT = 8             # max tokens of the training text that begin each written text
ROWS = 256             # texts that a teacher writes at once
SEED = 1337            # of the sampling


def paths(teacher):
    """
    Return the paths of the models that the setting `teacher` names, separated by commas. A folder
    that --seeds has made is replaced by the runs in it, seed1, seed2, ...
    """
    found = []
    for path in filter(None, map(str.strip, teacher.split(","))):
        runs = [str(run) for run in sorted(Path(path).glob("seed[0-9]*")) if run.is_dir()]
        found += runs or [path]
    return found


def written_tokens(config, meta):
    """
    Return how many tokens the teachers write before a training; meta: meta.json of its text. The
    length of the training does not matter, as it may change when the run is resumed.
    """
    n = meta["train_tokens"]
    return min(WRITTEN_PER_TOKEN * n, MAX_WRITTEN) if config.teacher and n <= MAX_WRITTEN else 0


def loss(network, teachers, x, y, documents=None):
    """
    Return the mean cross-entropy in nats between the mean of the teachers' probabilities and those
    of the network, 0 without targets. x: (B, T) tokens; y: (B, T), of which only the sign matters:
    positions with y < 0 have no target; documents: see Transformer.forward.
    """
    with torch.no_grad():
        target = mean_probabilities(teachers, x, documents)  # (B T, V)
    logits, _ = network(x, every=1, documents=documents)  # (B, T, V)
    losses = F.cross_entropy(logits.flatten(0, 1).float(), target, reduction="none")  # (B T,)
    has_target = y.flatten() >= 0
    return (losses * has_target).sum() / has_target.sum().clamp(min=1)


def mean_probabilities(teachers, x, documents):
    """Return the mean of the teachers' probabilities of the token after each of x: (B T, V)."""
    total = 0
    for teacher in teachers:
        logits, _ = teacher(x, every=1, documents=documents)
        total = total + logits.flatten(0, 1).float().softmax(-1)
    return total / len(teachers)


# ---- text that the teachers write ----------------------------------------------------------------

def written_text(teachers, dataset, n, folder):
    """
    Return n tokens or a few more that the teachers write, an array of the dataset's dtype. A file
    in the cache, `folder`, keeps them, so that a resumed run reads the same tokens.
    """
    key = dataset.meta["fingerprint"], dataset.seq_len, n, PROMPT, ROWS, SEED
    digest = hashlib.sha256(repr(key).encode())
    for teacher in teachers:
        for tensor in teacher.state_dict().values():
            digest.update(tensor.cpu().float().numpy().tobytes())
    path = Path(folder, "written", digest.hexdigest()[:16] + ".bin")
    with errors_in_one_line("--teacher", path.parent):
        distributed.on_master(write_text, teachers, dataset, n, path)
    with reading(path, "tokens that teachers have written", fail):
        tokens = np.fromfile(path, dataset.train.dtype)
        if len(tokens) < n:
            raise ValueError(f"{len(tokens)} tokens, expected {n}; delete it to write it anew")
        return tokens


@torch.no_grad()
def write_text(teachers, dataset, n, path):
    """
    Write a file with at least n tokens. The teachers take turns, each for ROWS texts. Do nothing if
    the file exists.
    """
    if path.exists():
        return
    distributed.say(f"teachers: {len(teachers)} write {n:,} tokens, which are trained on beside "
                    f"the text; kept in {path}")
    device = next(teachers[0].parameters()).device
    generator = torch.Generator(device).manual_seed(SEED)
    total, batches = 0, []
    while total < n:
        teacher = teachers[len(batches) % len(teachers)]
        batches.append(sample_texts(teacher, dataset, generator, device))
        total += len(batches[-1])
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as f:
        f.write(np.concatenate(batches).astype(dataset.train.dtype).tobytes())


def sample_texts(teacher, dataset, generator, device):
    """
    Sample ROWS texts of up to seq_len tokens from a teacher and return their tokens, one text after
    the other. Each begins with a prompt from the training text, and ends after EOS.
    """
    prompt = prompts(dataset, generator, device)  # (ROWS, P)
    seen = prompt.clone()
    if dataset.window_bos is not None:  # the teacher was trained on windows that begin with it
        seen[:, 0] = dataset.window_bos
    kv_cache = teacher.new_cache(ROWS, dataset.seq_len)
    columns, x = [prompt], seen
    for _ in range(dataset.seq_len - prompt.shape[1]):
        logits = teacher(x, cache=kv_cache)[0][:, -1]
        x = torch.multinomial(logits.float().softmax(-1), 1, generator=generator)  # (ROWS, 1)
        columns.append(x)
    texts = torch.cat(columns, 1).cpu().numpy()  # (ROWS, seq_len)
    is_end = texts == dataset.tokenizer.eos_id
    is_end[:, :prompt.shape[1]] = False
    lengths = np.where(is_end.any(1), is_end.argmax(1) + 1, texts.shape[1])
    return np.concatenate([text[:length] for text, length in zip(texts, lengths)])


def prompts(dataset, generator, device):
    """
    Return ROWS prompts of P tokens from random places of the training text, (ROWS, P); from
    beginnings of documents if documents are short, so that windows of the training have some.
    """
    P = max(1, min(PROMPT, dataset.seq_len - 1))
    places = np.arange(len(dataset.train) - P)
    if dataset.separator is not None and dataset.window_bos is None:
        places = np.flatnonzero(dataset.train[:-P] == dataset.separator)
    drawn = torch.randint(len(places), (ROWS,), generator=generator, device=device).cpu().numpy()
    tokens = dataset.train[places[drawn][:, None] + np.arange(P)]
    return torch.from_numpy(tokens.astype(np.int64)).to(device)
