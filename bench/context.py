"""
Measure the speed of a long prompt and of decoding after it: our library, llama.cpp and ik_llama.cpp
on the same files.

    make lib
    python bench/context.py --shapes=110M,1.1B --formats=q8_0,q4_k_m \\
        --llama_bench=llama.cpp/build/bin/llama-bench

The programs take turns, and the ratios are those of their medians. Each sample of our library
evaluates a prompt in chunks, as ./run does, then decodes `decoded` tokens after it. The models have
random weights and a context of 32768 tokens. They are written to the folder `models`.
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

shapes = "110M,1.1B"         # shapes of bench/models.py, separated by commas
formats = "q8_0,q4_k_m"      # formats of the model files, separated by commas
positions = 4096             # tokens of the prompt
decoded = 16                 # tokens to decode after the prompt
threads = 2                  # threads of each program
samples = 3                  # samples of each program
kv_bits = 0                  # bits per element of our KV cache: 32, 16, 8; 0: auto, 16 like theirs
llama_bench = ""             # path of llama.cpp's llama-bench; empty: skip llama.cpp
ik_llama_bench = ""          # path of ik_llama.cpp's llama-bench; empty: skip ik_llama.cpp
ik_flags = "-rtr 1 -fa 1"    # flags of ik_llama.cpp's llama-bench
models = "cache/bench_long"  # folder of the model files

CHUNK = 512  # tokens of a prompt per call


def ours(path):
    """Measure our library. Return (tokens/s of the prompt, tokens/s of decoding after it)."""
    import llamac
    engine = llamac.Engine(llamac.Model(path), positions + decoded, threads=threads,
                           sample_only=True, kv_bits=kv_bits)
    sequence, vocab_size = llamac.Sequence(engine), engine.model.info.vocab_size
    tokens = (np.arange(positions) * 97 % (vocab_size - 300) + 300).astype(np.int32)
    # The library repacks the weights after 16 decoded tokens. Warm up until they are repacked.
    for _ in range(20):
        sequence.forward(tokens[:1], 0)
    sequence.forward(tokens[:128], 0)
    start = time.perf_counter()
    for at in range(0, positions, CHUNK):
        sequence.forward(tokens[at:at + CHUNK], at)
    prompt_end = time.perf_counter()
    for n in range(decoded):
        sequence.forward(tokens[:1], positions + n)
    end = time.perf_counter()
    return positions / (prompt_end - start), decoded / (end - prompt_end)


def llama_bench_speeds(binary, flags, path):
    """Run llama-bench once with `flags`. Return [tokens/s] of its tests."""
    command = [binary, "-m", path, "-t", threads, "-r", 1, "-o", "json", *flags]
    stdout, _ = call(command, threads)
    return [test["avg_ts"] for test in json.loads(stdout)]


def peer(binary, prompt_flags, decode_flags, path):
    """Run llama-bench twice. Return [tokens/s of the prompt, tokens/s of decoding after it]."""
    return (llama_bench_speeds(binary, prompt_flags, path)
            + llama_bench_speeds(binary, decode_flags, path))


def programs():
    """Return {name: function from a model file to (prompt, decode) in tokens/s}."""
    prompt = ["-p", positions, "-n", 0]
    decode = ["-p", 0, "-n", decoded, "-d", positions]
    ik_decode = ["-p", 0, "-n", 0, "-gp", f"{positions},{decoded}"]
    found = {"llamac": ours}
    if llama_bench:
        for n in (0, 1):
            flash = ["-fa", n]  # flash attention off, on
            found[f"llama.cpp, -fa {n}"] = functools.partial(
                peer, llama_bench, [*prompt, *flash], [*decode, *flash])
    if ik_llama_bench:
        flags = ik_flags.split()
        found["ik_llama.cpp"] = functools.partial(
            peer, ik_llama_bench, [*prompt, *flags], [*ik_decode, *flags])
    return found


def measure(path):
    """Return {program: [prompt, decode]}, medians in tokens/s of samples taken in turns."""
    taken = {}
    for _ in range(samples):
        for name, program in programs().items():
            taken.setdefault(name, []).append(program(path))
    return {name: [median(values) for values in zip(*speeds)] for name, speeds in taken.items()}


def main():
    print("| model | program | prompt, tok/s | decode, tok/s |\n| --- | --- | ---: | ---: |")
    for shape in shapes.split(","):
        for form in formats.split(","):
            command = [sys.executable, ROOT / "bench/models.py", f"--shapes={shape}",
                       f"--formats={form}", f"--models={models}", "--context=32768"]
            subprocess.run(command, check=True, stdout=sys.stderr)
            speeds = measure(Path(models, shape, f"{form}.gguf"))
            peers = [values for name, values in speeds.items() if name != "llamac"]
            best = [max(values) for values in zip(*peers)]  # the fastest peer of each column
            for name, values in speeds.items():
                cells = [f"{value:,.1f}" for value in values]
                if name == "llamac" and best:
                    ratios = [value / peer_value for value, peer_value in zip(values, best)]
                    cells = [f"{cell} ({ratio:.2f}×)" for cell, ratio in zip(cells, ratios)]
                print(f"| {shape} {form} | {name} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    configure(globals())
    main()
