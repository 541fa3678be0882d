"""
Compare run with llama.cpp on the same GGUF files: perplexity, and the likeliest next tokens.

    python bench/perplexity.py out/my/model.gguf --text=text.txt --llama_cpp=llama.cpp/build/bin \\
        --quantize=Q4_K_M,Q6_K

Needs `make lib`. llama-perplexity splits the text into windows of a context, each after BOS if the
file has add_bos, counts the second half of each, and writes log probabilities in 16 bits (steps of
0.00024 nats); the library here reads the same tokens. The last column is the largest difference in
nats between llama.cpp's own two best tokens where the two programs disagree on the likeliest.
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
text = ""        # the text, UTF-8
llama_cpp = ""   # folder of llama-perplexity and llama-quantize
quantize = ""    # types to quantize each file to first, separated by commas; empty: none
context = 256    # tokens of a window
pieces = 16      # max windows of the text

AT_ONCE = 64     # tokens per call, whose logits are all returned


def theirs(model, folder):
    """
    Return llama.cpp's (tokens (n, context) int32,
    log probabilities (n, context / 2 - 1, vocabulary) float32).
    """
    file = Path(folder, "logits")
    call([Path(llama_cpp, "llama-perplexity"), "-m", model, "-f", text, "-c", context, "-b", context, "--chunks", pieces,
          "-t", 2, "--kl-divergence-base", file], 2)
    data = file.read_bytes()
    size, vocabulary, n = np.frombuffer(data, "<i4", 3, 8)
    tokens = np.frombuffer(data, "<i4", n * size, 20).reshape(n, size)
    rows = np.frombuffer(data, "<u2", offset=20 + 4 * n * size).reshape(n, size - 1 - size // 2, -1)
    scale, least = np.moveaxis(rows[..., :4].copy().view("<f4"), -1, 0)
    return tokens, rows[..., 4:4 + vocabulary] * scale[..., None] + least[..., None]


def ours(path, tokens):
    """Return the library's log probabilities of the same tokens."""
    import llamac
    model, found = llamac.Model(path), []
    for row in tokens:
        session, half = llamac.Session(model, len(row), logits="all"), len(row) // 2
        row = np.array([model.info.bos, *row[1:]] if model.info.add_bos else row)
        logits = []
        for at in range(0, len(row), AT_ONCE):
            session.forward(row[at:at + AT_ONCE], at)
            logits.append(session.logits.astype(np.float64))
        x = np.concatenate(logits)[half:-1]
        found.append(x - np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True)) - x.max(-1, keepdims=True))
    return np.array(found)


def compare(name, path, folder):
    """Print the row of one file."""
    tokens, there = theirs(path, folder)
    here, targets = ours(path, tokens), tokens[:, tokens.shape[1] // 2 + 1:, None]
    perplexities = [np.exp(-np.take_along_axis(x, targets, -1).mean()) for x in (here, there)]
    differ = here.argmax(-1) != there.argmax(-1)
    best = np.sort(there[differ], -1)[:, -2:]
    gap = f"{(best[:, 1] - best[:, 0]).max():.4f}" if differ.any() else "–"
    print(f"| {name} | {perplexities[0]:.4f} | {perplexities[1]:.4f} | {perplexities[0] / perplexities[1]:.4f} | "
          f"{differ.sum()} of {differ.size} | {gap} |", flush=True)


def main():
    if not (models and text and llama_cpp):
        fail("expected models, --text= and --llama_cpp=; see the top of this file")
    print("| file | run | llama.cpp | ratio | other token likeliest | by nats |\n| --- | ---: | ---: | ---: | ---: | ---: |")
    with tempfile.TemporaryDirectory() as folder:
        for model in models.split(","):
            for kind in quantize.split(","):
                path = Path(folder, "quantised.gguf") if kind else Path(model)
                if kind:
                    call([Path(llama_cpp, "llama-quantize"), model, path, kind], 2)
                compare(f"{Path(model).parent.name or model} {kind}", path, folder)


if __name__ == "__main__":
    configure(globals(), positional="models")
    main()
