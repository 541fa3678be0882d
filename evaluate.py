"""
What a trained model is worth.

    python evaluate.py out --perplexity=text.txt     how well it predicts a text; `run --perplexity` gives the same
"""
import math
from pathlib import Path

import torch

import parallel
from configurator import configure, fail
from export import load_model

out_dir = "out"      # the model: a run's folder, one of its step folders, a GGUF file or a llama2.c file
tokenizer = ""       # the vocabulary of a llama2.c file: a tokenizer.model, tokenizer.json or tokenizer.bin
perplexity = ""      # a UTF-8 text to predict
device = "auto"      # auto, cpu, cuda, cuda:1, mps

LOGITS_AT_ONCE = 1 << 25  # 128 MB of float32


@torch.inference_mode()
def negative_log_likelihood(model, ids, device="cpu"):
    """
    Sum over ids[1:] of -ln p(id | those before it in its window), in nats. ids: list of int, BOS first. The inputs are
    cut into windows of max_seq_len that don't overlap; each starts anew at position 0.
    """
    ids, T = torch.tensor(ids), model.args.max_seq_len
    inputs, targets = ids[:-1], ids[1:]
    whole = len(inputs) // T * T
    windows = max(1, LOGITS_AT_ONCE // (T * model.args.vocab_size))
    batches = list(zip(inputs[:whole].view(-1, T).split(windows), targets[:whole].view(-1, T).split(windows)))
    if whole < len(inputs):
        batches.append((inputs[None, whole:], targets[None, whole:]))
    return sum(model(x.to(device), y.to(device))[1].item() * y.numel() for x, y in batches)


def print_perplexity(model, vocabulary, path, device):
    try:
        text = Path(path).read_bytes()
    except OSError as e:
        fail(f"--perplexity={path}: cannot be read ({e.strerror}); expected a text file")
    ids = vocabulary.encode(text.decode(errors="replace"), bos=True)
    if len(ids) < 2:
        fail(f"--perplexity={path}: the text has no tokens")
    count, total = len(ids) - 1, negative_log_likelihood(model, ids, device)
    nats = total / count
    if not nats < 700:  # NaN is not, either
        fail(f"{out_dir}: {nats:.4g} nats per token, expected about {math.log(model.args.vocab_size):.1f} or less; "
             "its weights are broken")
    print(f"perplexity {math.exp(nats):.4f} ({count} tokens, {nats:.6f} nats per token, "
          f"{total / math.log(2) / len(text):.6f} bits per byte)")


def main():
    if not perplexity:
        fail("nothing to evaluate; give --perplexity=FILE")
    place = parallel.setup(device)
    model, vocabulary = load_model(out_dir, tokenizer, place)
    print_perplexity(model, vocabulary, perplexity, place)


if __name__ == "__main__":
    configure(globals(), positional="out_dir")
    main()
