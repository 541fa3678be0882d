"""
--teacher: distillation. The model (the student) minimizes the cross-entropy with the predictions of
its teachers, instead of that with the text's tokens. https://arxiv.org/abs/1503.02531

Teachers that have memorized a small text predict it almost with certainty, which adds little to the
text itself. So the student also reads text that the teachers write, that is, text sampled from
them, and n-grams (ngrams.py) are an additional teacher. With --teacher=ngrams, the n-grams are the
only teacher: they write the text, and each target is their prediction, in the training text mixed
with the actual token.

Measurements: doc/lab/own_text.md
"""
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from configurator import fail
from engine.files import replacing
from engine.text.prepare import errors_in_one_line
from engine.training import distributed
from engine.training.ngrams import MAX_VOCAB, Ngrams, kept_bytes
from engine.untrusted import reading

NGRAMS_ALONE = "ngrams"  # the value of --teacher without models
MAX_TOKENS = 1 << 19   # max tokens of a training text for which teachers write text and n-grams
                       # teach; also the max tokens that they write
MODELS_WRITE = 8       # tokens that models write for each token of the training text
NGRAMS_WRITE = 4       # tokens that n-grams alone write for each token of the training text
NGRAMS_WRITE_BELOW = 70_000  # bytes; for a larger training text, n-grams alone write nothing
PROMPT = 8             # max tokens of the training text that prompt each text of a model
ROWS = 256             # texts that a model writes in one batch
SEED = 1337            # seed of the models' sampling
NGRAMS_SHARE = 0.35    # weight of the n-grams in a target; the rest is from the models or, without
                       # models, the token of the training text


@dataclass(frozen=True)
class Teachers:
    """
    models: Transformers, [] for --teacher=ngrams; ngrams: Ngrams that are counted in the training
    text and predict it and the written text, or None.
    """
    models: list
    ngrams: Any

    @torch.no_grad()
    def probabilities(self, x, places, documents=None):
        """
        Return the probabilities of the token that follows each token of x (B, T): (B T, V) float32.
        places: a numpy array (B, T), the indices of the following tokens in the training text,
        continued by the written text. The n-grams need them.
        """
        if self.models:
            total = 0
            for model in self.models:
                logits, _ = model(x, every=1, documents=documents)
                total = total + logits.flatten(0, 1).float().softmax(-1)
            target, share = total / len(self.models), NGRAMS_SHARE
            if self.ngrams is None:
                return target
        places = places.flatten()
        if not self.models:
            tokens, is_written = distributed.to_device(
                x.device, torch.from_numpy(self.ngrams.tokens[places]),
                torch.from_numpy(places >= self.ngrams.counted))
            target = F.one_hot(tokens, self.ngrams.V).float()
            share = torch.where(is_written, 1.0, NGRAMS_SHARE)[:, None]
        by_ngrams = torch.from_numpy(self.ngrams.probabilities(places))
        by_ngrams, = distributed.to_device(x.device, by_ngrams)
        return target + share * (by_ngrams - target)


def paths(teacher):
    """
    Return the paths of the models that the setting `teacher` names, separated by commas; [] for
    NGRAMS_ALONE. A folder that --seeds has made is replaced by the runs in it.
    """
    found = []
    if teacher == NGRAMS_ALONE:
        return found
    for path in filter(None, map(str.strip, teacher.split(","))):
        runs = [str(run) for run in sorted(Path(path).glob("seed[0-9]*")) if run.is_dir()]
        found += runs or [path]
    return found


def written_tokens(config, meta):
    """
    Return how many tokens the teachers write before a training, 0 if its text is large; meta:
    meta.json of the text. The length of the training does not matter, as it may change when the run
    is resumed.
    """
    n, per_token = meta["train_tokens"], MODELS_WRITE
    if config.teacher == NGRAMS_ALONE:
        per_token = NGRAMS_WRITE if meta["train_bytes"] < NGRAMS_WRITE_BELOW else 0
    return min(per_token * n, MAX_TOKENS) if config.teacher and n <= MAX_TOKENS else 0


def ngrams_memory(config, meta):
    """Return the bytes that n-grams keep during a training; meta: meta.json of the text."""
    if not (config.teacher and ngrams_can_teach(meta)):
        return 0
    n = meta["train_tokens"] + written_tokens(config, meta)
    return kept_bytes(n, meta["vocab_size"])


def ngrams_can_teach(meta):
    """
    Return whether n-grams can be a teacher for the text of this meta.json. They can't for rows of
    conversations, whose targets are not positions in a continuous text.
    """
    return (meta["train_tokens"] <= MAX_TOKENS and meta["vocab_size"] <= MAX_VOCAB
            and "chat_template" not in meta)


def assemble(models, config, dataset):
    """
    Return the Teachers of a training. models: Transformers, [] for --teacher=ngrams. For a small
    text, they first write more text, which the dataset then reads too: see written_tokens.
    """
    meta, n, ngrams = dataset.meta, len(dataset.train), None
    if written := written_tokens(config, meta):
        if models:
            dataset.read_beside(cached_text(models, dataset, written, config.cache))
        else:  # not cached: writing takes a second and always gives the same text
            distributed.say(f"teachers: n-grams write {written:,} tokens, which are added to "
                            f"the training text")
            tokens = Ngrams(dataset.train, n, meta["vocab_size"]).write(written)
            dataset.read_beside(tokens.astype(dataset.train.dtype))
    if ngrams_can_teach(meta):  # if not, validate.checked_args requires models
        ngrams = Ngrams(dataset.read_from, n, meta["vocab_size"])
    return Teachers(models, ngrams)


def loss(network, teachers, x, y, places, documents=None):
    """
    Return the mean cross-entropy in nats between the probabilities of the teachers and those of the
    network; 0 if there are no targets. x: (B, T) tokens; y: (B, T), of which only the sign matters:
    positions with y < 0 have no target; places: see Teachers.probabilities; documents: see
    Transformer.forward.
    """
    target = teachers.probabilities(x, places, documents)  # (B T, V)
    logits, _ = network(x, every=1, documents=documents)  # (B, T, V)
    losses = F.cross_entropy(logits.flatten(0, 1).float(), target, reduction="none")  # (B T,)
    has_target = y.flatten() >= 0
    return (losses * has_target).sum() / has_target.sum().clamp(min=1)


# ---- text that models write ----------------------------------------------------------------------

def cached_text(models, dataset, n, folder):
    """
    Return at least n tokens that the models write, as an array of the dataset's dtype. They are
    kept in a file in the cache, `folder`, so that a resumed run reads the same tokens.
    """
    key = dataset.meta["fingerprint"], dataset.seq_len, n, PROMPT, ROWS, SEED
    digest = hashlib.sha256(repr(key).encode())
    for model in models:
        for tensor in model.state_dict().values():
            digest.update(tensor.cpu().float().numpy().tobytes())
    path = Path(folder, "written", digest.hexdigest()[:16] + ".bin")
    with errors_in_one_line("--teacher", path.parent):
        distributed.on_master(write_text, models, dataset, n, path)
    with reading(path, "tokens that teachers have written", fail):
        tokens = np.fromfile(path, dataset.train.dtype)
        if len(tokens) < n:
            raise ValueError(f"{len(tokens)} tokens, expected {n}; delete it to write it anew")
        return tokens


@torch.no_grad()
def write_text(models, dataset, n, path):
    """
    Write a file with at least n tokens sampled from the models, which take turns, each for ROWS
    texts. Do nothing if the file exists.
    """
    if path.exists():
        return
    distributed.say(f"teachers: {len(models)} write {n:,} tokens, which are added to the "
                    f"training text; kept in {path}")
    device = next(models[0].parameters()).device
    generator = torch.Generator(device).manual_seed(SEED)
    total, batches = 0, []
    while total < n:
        model = models[len(batches) % len(models)]
        batches.append(sample_texts(model, dataset, generator, device))
        total += len(batches[-1])
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as f:
        f.write(np.concatenate(batches).astype(dataset.train.dtype).tobytes())


def sample_texts(teacher, dataset, generator, device):
    """
    Sample ROWS texts of up to seq_len tokens from a teacher and return their tokens, concatenated.
    Each text begins with a prompt from the training text, and ends after EOS.
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
    Return ROWS prompts of P tokens of the training text, (ROWS, P), from random positions, or from
    beginnings of documents if there are several and windows don't each begin with BOS.
    """
    P = max(1, min(PROMPT, dataset.seq_len - 1))
    places = np.arange(len(dataset.train) - P)
    if dataset.separator is not None and dataset.window_bos is None:
        places = np.flatnonzero(dataset.train[:-P] == dataset.separator)
    drawn = torch.randint(len(places), (ROWS,), generator=generator, device=device).cpu().numpy()
    tokens = dataset.train[places[drawn][:, None] + np.arange(P)]
    return torch.from_numpy(tokens.astype(np.int64)).to(device)
