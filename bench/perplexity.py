"""
Compare llamac with llama.cpp on the same GGUF files: perplexity and the likeliest next tokens.

    python bench/perplexity.py out/my/model.gguf --text=text.txt --llama_cpp=llama.cpp/build/bin \\
        --quantize=Q4_K_M,Q6_K

Run `make lib` first. llama-perplexity splits the text into windows, each of which starts with BOS
if the file has add_bos. It evaluates the second half of each window and writes log probabilities in
16 bits (steps of 0.00024 nats). Our library evaluates the same tokens.

The last two columns cover the positions where the programs disagree on the likeliest token: how
many there are, and the largest difference between the log probabilities that llama.cpp assigns to
its own two likeliest tokens there, in nats.
"""
import sys
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from bench.run import call
from configurator import configure, fail

models = ""      # GGUF files, separated by commas
text = ""        # text file in UTF-8
llama_cpp = ""   # folder that contains llama-perplexity and llama-quantize
quantize = ""    # types for llama-quantize, separated by commas; empty: keep the file's type
context = 256    # tokens per window
pieces = 16      # max number of windows

BATCH = 64       # tokens per call of our library


def theirs(model, folder):
    """
    Evaluate the text with llama-perplexity. Return (tokens (n, context) int32,
    log probabilities (n, context / 2 - 1, vocabulary) float32) of n windows.
    """
    file = Path(folder, "logits")
    call([Path(llama_cpp, "llama-perplexity"), "-m", model, "-f", text, "-c", context,
          "-b", context, "--chunks", pieces, "-t", 2, "--kl-divergence-base", file], 2)
    # The file contains 8 magic bytes; window size, vocabulary size and number of windows as int32;
    # the tokens as int32; then a row of 16-bit numbers per position. The first four of a row hold
    # two float32: the scale and the minimum of its log probabilities.
    data = file.read_bytes()
    size, vocabulary, n = np.frombuffer(data, "<i4", 3, 8)
    tokens = np.frombuffer(data, "<i4", n * size, 20).reshape(n, size)
    rows = np.frombuffer(data, "<u2", offset=20 + 4 * n * size).reshape(n, size - 1 - size // 2, -1)
    scale, minimum = np.moveaxis(rows[..., :4].copy().view("<f4"), -1, 0)
    return tokens, rows[..., 4:4 + vocabulary] * scale[..., None] + minimum[..., None]


def log_softmax(x):
    """Return the log probabilities of logits x along the last axis."""
    maximum = x.max(-1, keepdims=True)
    return x - np.log(np.exp(x - maximum).sum(-1, keepdims=True)) - maximum


def ours(path, tokens):
    """
    Evaluate the tokens (n, context) with our library. Return log probabilities
    (n, context / 2 - 1, vocabulary) float64.
    """
    import llamac
    model = llamac.Model(path)
    engine, found = llamac.Engine(model, tokens.shape[1]), []
    for row in tokens:
        sequence = llamac.Sequence(engine)
        if model.info.add_bos:
            # llama-perplexity does the same, but writes the original tokens to its file.
            row = np.array([model.info.bos, *row[1:]])
        logits = []
        for start in range(0, len(row), BATCH):
            batch = row[start:start + BATCH]
            engine.evaluate([llamac.Part(sequence, batch, logits="all")])
            logits += [engine.logits(i).astype(np.float64) for i in range(len(batch))]
        half = len(row) // 2
        found.append(log_softmax(np.array(logits)[half:-1]))
    return np.array(found)


def perplexity(log_probs, targets):
    """Return exp(mean loss) of log probabilities (n, positions, vocabulary)."""
    return np.exp(-np.take_along_axis(log_probs, targets, -1).mean())


def compare(name, path, folder):
    """Print the row of one file."""
    tokens, there = theirs(path, folder)
    here = ours(path, tokens)
    targets = tokens[:, tokens.shape[1] // 2 + 1:, None]
    run, llama = perplexity(here, targets), perplexity(there, targets)
    differ = here.argmax(-1) != there.argmax(-1)
    best = np.sort(there[differ], -1)[:, -2:]
    gap = f"{(best[:, 1] - best[:, 0]).max():.4f}" if differ.any() else "–"
    print(f"| {name} | {run:.4f} | {llama:.4f} | {run / llama:.4f} | "
          f"{differ.sum()} of {differ.size} | {gap} |", flush=True)


def main():
    """Print the table, with a row for each file and type."""
    if not (models and text and llama_cpp):
        fail("expected GGUF files, --text= and --llama_cpp=; see the example at the top of "
             "bench/perplexity.py")
    print("| file | run | llama.cpp | ratio | other token likeliest | by nats |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    with tempfile.TemporaryDirectory() as folder:
        for model in models.split(","):
            for kind in quantize.split(","):
                path = Path(model)
                if kind:
                    path = Path(folder, "quantised.gguf")
                    call([Path(llama_cpp, "llama-quantize"), model, path, kind], 2)
                compare(f"{Path(model).parent.name or model} {kind}", path, folder)


if __name__ == "__main__":
    configure(globals(), positional="models")
    main()
