"""
Yardsticks for the loss of a model: the bits per byte that chance, token frequencies, gzip and xz
need for the same validation text. They show whether a loss is normal.
"""
import gzip
import lzma
import math

import numpy as np

from engine.formats.chat_template import TARGET

MAX_TOKENS = 1 << 17  # max tokens of the validation text to compress; xz takes 0.3 s for them
# {name: words}. "chance" assigns the same probability to all tokens.
WORDS = {"chance": "chance", "unigram": "token frequencies", "gzip": "gzip", "xz": "xz"}

OTHERS = "xz {xz}, gzip {gzip}, token frequencies {unigram}, chance {chance}"
SENTENCES = {
    "chance": "not normal: {loss} bits per byte is no better than chance ({chance}); is the "
              "learning_rate too high? --overfit=1 shows whether it can learn at all",
    "below the floor": "not normal: {loss} bits per byte is less than {floor}, the entropy of "
                       "these stories; the model sees what it should predict",
    "token frequencies": "not normal yet: {loss} bits per byte is more than token frequencies "
                         f"alone need ({OTHERS})",
    "short": "normal for a short training: {loss} bits per byte is less than token frequencies "
             f"need and not yet what a compressor reaches ({OTHERS})",
    "normal": f"normal: {{loss}} bits per byte is less than a compressor needs ({OTHERS})",
    "normal, with a floor": "normal: {loss} bits per byte is less than a compressor needs "
                            f"({OTHERS}; no model can beat {{floor}})",
}
# Validation loss / training loss above which a text counts as memorized, after at least MIN_EPOCHS
# epochs. After one epoch, the ratio for four texts was 1.00 to 1.27, because the two splits of a
# small text differ. For 60 kB of Chinese it was 1.44 to 1.5 while the validation loss still fell,
# 1.6 when it had stopped falling, and 8.5 after 18 epochs without dropout.
MEMORIZED, MIN_EPOCHS = 1.5, 2
GAP = ("; the validation loss is {gap} % above the training loss, as the model memorizes the text: "
       "more text helps most; --minutes chooses dropout, --early_stop=3 stops the run in time")
LONGER = "; train longer, or try other rates with --lr_find"


def predicted(dataset, split, count):
    """Return the tokens that a model predicts among the first `count` tokens of a split, (n,)."""
    tokens = np.asarray(getattr(dataset, split)[:count])
    if dataset.masks:
        return tokens[dataset.masks[split][:count] & TARGET > 0]
    return tokens[tokens != dataset.tokenizer.bos_id]


def measure(dataset):
    """
    Return {name: bits per byte} for the names of WORDS, measured on the first MAX_TOKENS of the
    validation split. For the built-in stories, also return "floor", which no model can beat.

    "unigram" knows only how frequent each token is in training. For conversations, only the answers
    count, since only they are predicted. Return {} if the tokens have no text.
    """
    size = dataset.meta["vocab_size"]
    tokens = predicted(dataset, "val", MAX_TOKENS)
    text = dataset.tokenizer.decode(tokens.tolist()).encode(errors="replace")
    if not text:
        return {}
    # Add-one smoothing: a token that is absent from training must not have probability 0.
    times = 1 + np.bincount(predicted(dataset, "train", 1 << 20), minlength=size)
    nats = math.log(times.sum()) - np.log(times[tokens]).mean()
    found = {"chance": dataset.bits_per_byte(math.log(size)),
             "unigram": dataset.bits_per_byte(float(nats)),
             "gzip": 8 * len(gzip.compress(text)) / len(text),
             "xz": 8 * len(lzma.compress(text)) / len(text)}
    if "floor_bpb" in dataset.meta:
        found["floor"] = dataset.meta["floor_bpb"]
    return found


def metrics(record):
    """Return a run record's yardsticks as {metric: bits per byte}, for the first row of the log."""
    return {f"yardstick/{name}": bits for name, bits in record.get("yardsticks", {}).items()}


def describe(found, vocab_size):
    """Return the yardsticks in words, for the table before a training run."""
    shown = ", ".join(f"{words} {found[name]:.3g}" for name, words in WORDS.items())
    floor = f"; no model can beat {found['floor']:.3f}" if "floor" in found else ""
    return (f"bits per byte of the validation text: {shown}{floor}; chance is ln {vocab_size} = "
            f"{math.log(vocab_size):.2f} nats per token")


def judge(loss, found):
    """
    Return (sentence, {name: text}), which describe whether a loss is normal. The sentence has
    {name} in the place of each value, so that the page can translate it. loss: the best validation
    loss in bits per byte, finite; found: the result of `measure`, not empty.
    """
    values = {name: f"{bits:.3f}" if name == "floor" else f"{bits:.3g}"
              for name, bits in found.items()}
    values["loss"] = f"{loss:.4f}"
    if loss >= 0.98 * found["chance"]:
        kind = "chance"
    elif "floor" in found and loss < 0.99 * found["floor"]:
        kind = "below the floor"
    elif loss > found["unigram"]:
        kind = "token frequencies"
    elif loss > min(found["gzip"], found["xz"]):
        kind = "short"
    else:
        kind = "normal, with a floor" if "floor" in found else "normal"
    return SENTENCES[kind], values


def gap(row, meta):
    """
    Return by how many percent the validation loss exceeds the training loss if the gap is so large
    that the model memorizes the text, otherwise 0. row: {metric: value} of the last evaluation;
    meta: meta.json of the prepared text. Return 0 for conversations, where only the answers count,
    which are few.
    """
    losses = row.get("loss/val"), row.get("loss/train_eval")
    if "chat_template" in meta or None in losses or row.get("epoch", 0) < MIN_EPOCHS:
        return 0
    validation, training = losses
    if not validation > MEMORIZED * training > 0:
        return 0
    return round(100 * (validation / training - 1))


def parts_of_answer(loss, found, row, meta):
    """
    Return [(text, {name: text})]: the sentence of `judge`, and, if needed, a sentence about
    memorization or about what to do. loss, found: see judge; row, meta: see gap.
    """
    text, values = judge(loss, found)
    if percent := gap(row, meta):
        return [(text, values), (GAP, {"gap": f"{percent:,}"})]
    return [(text, values), *[(LONGER, {})] * (text == SENTENCES["token frequencies"])]


def assess(loss, found, row, meta):
    """Return a description of whether a loss is normal. row, meta: see gap."""
    parts = parts_of_answer(loss, found, row, meta)
    return "".join(text.format(**values) for text, values in parts)
