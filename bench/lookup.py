"""
Measure how --lookup of ./run changes the speed of texts that repeat themselves and of others.

    python bench/lookup.py
    python bench/lookup.py --shapes=110M --formats=q8_0 --tokens=512

The models have random weights. Their greedy texts repeat themselves. In the other texts, each token
is drawn at random from the three likeliest, so pairs of tokens recur, but with different tokens
after them. Runs with and without --lookup take turns. The ratio is the median speed with --lookup
divided by the median speed without.
"""
import itertools
import os
import re
import sys
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from bench.batches import prepare
from bench.run import call
from configurator import configure, fail

shapes = "15M,110M"         # shapes of bench/models.py, separated by commas
formats = "f32,q8_0"        # GGUF formats of bench/models.py, separated by commas
threads = 0                 # number of threads; 0: one for each available core
samples = 5                 # samples with --lookup, and as many without
tokens = 256                # tokens of a text
models = "cache/bench"      # folder of the models; missing ones are written
run = "./run"               # path of our program

TEXTS = {"repeats": ("-t", 0), "does not": ("-t", 100, "-k", 3)}  # {title in the table: flags}


def speed(path, n_threads, flags):
    """Generate a text. Return (tokens/s, right guesses, guesses)."""
    command = [os.path.expanduser(run), path, "-i", "a b c", "-n", tokens, "-s", 1,
               "-j", n_threads, *flags]
    stderr = call(command, n_threads)[1]
    guesses = re.search(r"lookup: (\d+) of (\d+)", stderr)
    found = re.search(r"achieved tok/s: ([\d.]+)", stderr)
    return float(found[1]), *(map(int, guesses.groups()) if guesses else (0, 0))


def main():
    """Measure all shapes and formats."""
    if samples < 1 or tokens < 32:
        fail(f"--samples={samples} --tokens={tokens}: expected at least 1 sample and 32 tokens")
    n_threads = threads or len(os.sched_getaffinity(0))
    print("| shape, format, threads | text | without, tok/s | with | ratio | guesses | right |\n"
          "| --- | --- | ---: | ---: | ---: | ---: | ---: |")
    for shape, form in itertools.product(shapes.split(","), formats.split(",")):
        path = prepare(models, shape, form)
        for title, flags in TEXTS.items():
            plain, found = [], []
            for _ in range(samples):
                plain.append(speed(path, n_threads, flags)[0])
                found.append(speed(path, n_threads, (*flags, "--lookup")))
            before = median(plain)
            after, right, guesses = map(median, zip(*found))
            print(f"| {shape} {form} {n_threads} | {title} | {before:,.0f} | {after:,.0f} | "
                  f"{after / before:.2f} | {guesses:.0f} | {right:.0f} |", flush=True)


if __name__ == "__main__":
    configure(globals())
    main()
