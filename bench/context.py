"""
Measure long prompts, and decoding after them, of the library here and of llama.cpp and ik_llama.cpp
on the same files.

    make lib
    python bench/context.py --shapes=110M,1.1B --formats=q8_0,q4_k_m \\
        --llama_bench=llama.cpp/build/bin/llama-bench

The programs take turns; the result is the ratio of the medians. A sample of ours evaluates a prompt
in chunks, as ./run does, then decodes `decoded` tokens after it. The models (random weights, a
context of 32768) are written to `models`.
"""
import functools
import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from bench.run import call
from configurator import configure

shapes = "110M,1.1B"      # of bench/models.py
formats = "q8_0,q4_k_m"   # of the model files
positions = 4096          # tokens of the prompt
decoded = 16              # tokens to decode after it
threads = 2
samples = 3               # of each program, in turns
kv_bits = 0               # bits per number in our KV cache: 32, 16, 8; 0: auto, here 16 as theirs
llama_bench = ""          # llama.cpp's llama-bench
ik_llama_bench = ""       # ik_llama.cpp's
ik_flags = "-rtr 1 -fa 1"
models = "cache/bench_long"

AT_ONCE = 512    # tokens of a prompt per call


def ours(path):
    """Return (tokens/s of the prompt, tokens/s of decoding after it)."""
    import llamac
    session = llamac.Session(llamac.Model(path), positions + decoded, threads=threads, logits="sample", kv_bits=kv_bits)
    vocabulary = session.model.info.vocab_size
    tokens = (np.arange(positions) * 97 % (vocabulary - 300) + 300).astype(np.int32)
    for _ in range(20):  # ./run repacks the weights after 16 tokens
        session.forward(tokens[:1], 0)
    session.forward(tokens[:128], 0)
    start = time.perf_counter()
    for at in range(0, positions, AT_ONCE):
        session.forward(tokens[at:at + AT_ONCE], at)
    middle = time.perf_counter()
    for n in range(decoded):
        session.forward(tokens[:1], positions + n)
    return positions / (middle - start), decoded / (time.perf_counter() - middle)


def theirs(binary, path, more):
    """Return [tokens/s] of the tests that llama-bench runs with the flags `more`."""
    said, _ = call([binary, "-m", path, "-t", threads, "-r", 1, "-o", "json", *more], threads)
    return [test["avg_ts"] for test in json.loads(said)]


def peers():
    """Return {name: function from a file to (prompt, decode) in tokens/s}."""
    prompt, behind, ik_behind = (["-p", positions, "-n", 0], ["-p", 0, "-n", decoded, "-d", positions],
                                 ["-p", 0, "-n", 0, "-gp", f"{positions},{decoded}"])
    programs = {}
    if llama_bench:
        programs |= {f"llama.cpp, -fa {n}": (llama_bench, [[*test, "-fa", n] for test in (prompt, behind)]) for n in (0, 1)}
    if ik_llama_bench:
        programs["ik_llama.cpp"] = ik_llama_bench, [[*test, *ik_flags.split()] for test in (prompt, ik_behind)]
    return {"llamac": ours} | {name: functools.partial(both, *program) for name, program in programs.items()}


def both(binary, tests, path):
    """Return [tokens/s] of two tests of llama-bench."""
    return sum((theirs(binary, path, test) for test in tests), [])


def main():
    print("| model | program | prompt, tok/s | decode, tok/s |\n| --- | --- | ---: | ---: |")
    for shape in shapes.split(","):
        for form in formats.split(","):
            subprocess.run([sys.executable, ROOT / "bench/models.py", f"--shapes={shape}", f"--formats={form}",
                            f"--models={models}", "--context=32768"], check=True, stdout=sys.stderr)
            taken, path = {}, Path(models, shape, f"{form}.gguf")
            for _ in range(samples):
                for name, program in peers().items():
                    taken.setdefault(name, []).append(program(path))
            speeds = {name: [median(values) for values in zip(*found)] for name, found in taken.items()}
            best = [max(found) for found in zip(*[s for name, s in speeds.items() if name != "llamac"])]
            for name, found in speeds.items():
                ratios = [f" ({a / b:.2f}×)" for a, b in zip(found, best)] if name == "llamac" and best else ["", ""]
                print(f"| {shape} {form} | {name} | " + " | ".join(f"{v:,.1f}{r}" for v, r in zip(found, ratios)) + " |", flush=True)


if __name__ == "__main__":
    configure(globals())
    main()
