"""
Measure the speed of ./run with several texts at once, and of llama.cpp's llama-batched-bench.

    python bench/batches.py                         ours alone: 15M and 110M, 1 to 64 texts
    python bench/batches.py --shapes=15M --formats=q8_0 --batched_bench=PATH/llama-batched-bench
    python bench/batches.py --show=True             print the table of all results so far

The programs take turns, and read the same file. Each sample is one process, which evaluates a
separate prompt for each text and then decodes all texts together. Both programs decode from a
nearly empty cache: for decoding, llama-batched-bench runs again with prompts of one token. ./run
samples each token greedily, llama-batched-bench does not sample. A ratio is our median speed
divided by theirs.
"""
import itertools
import json
import os
import subprocess
import sys
from datetime import date
from pathlib import Path
from statistics import median
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from bench.run import call, processor, read_anew
from configurator import configure, fail

shapes = "15M,110M"                   # shapes of bench/models.py, separated by commas
formats = "f32,bf16,q8_0,q4_k_m"      # GGUF formats of bench/models.py, separated by commas
texts = "1,4,16,64"                   # numbers of concurrent texts, separated by commas
threads = 0                           # number of threads; 0: one for each available core
samples = 5                           # samples of each program
tokens = 32                           # tokens of each prompt, and tokens decoded for each text
models = "cache/bench"                # folder of the models; missing ones are written
results = "cache/bench/batches.json"  # all results; a repeated measurement replaces the old
show = False                          # print all results instead of measuring
run = "./run"                         # path of our program
batched_bench = ""                    # path of llama.cpp's llama-batched-bench

# {key in the results: title in the table}
COLUMNS = {"prompt": "prompts, tok/s", "decode": "decode, tok/s"}


class Ours(NamedTuple):
    """Our program, ./run."""
    binary: str

    def speed(self, path, n_threads, n_texts):
        """Return {"prompt": tokens/s, "decode": tokens/s} of all texts together."""
        command = [self.binary, path, "--bench", "--json", "-j", n_threads, "-b", n_texts,
                   "-c", tokens, "-n", tokens]
        found = json.loads(call(command, n_threads)[0])
        return {"prompt": found["prompt_tokens_per_s"], "decode": found["decode_tokens_per_s"]}


class BatchedBench(NamedTuple):
    """llama-batched-bench, with the method of Ours."""
    binary: str

    def speed(self, path, n_threads, n_texts):
        command = [self.binary, "-m", path, "-t", n_threads, "-npl", n_texts,
                   "-npp", f"{tokens},1", "-ntg", tokens, "-c", 2 * tokens * n_texts,
                   "--output-format", "jsonl"]
        lines = "\n".join(call(command, n_threads)).splitlines()  # stdout and stderr
        found = {row["pp"]: row for row in map(json.loads, filter(is_object, lines))}
        if not {tokens, 1} <= found.keys():
            fail(f"{' '.join(map(str, command))}: expected lines of JSON for prompts of {tokens} "
                 f"tokens and of one, found those of {sorted(found) or 'none'}")
        return {"prompt": found[tokens]["speed_pp"], "decode": found[1]["speed_tg"]}


def is_object(line):
    """Return whether a line of output looks like a JSON object."""
    return line.startswith("{") and line.endswith("}")


def programs():
    """Return {name: program} of the programs to measure, ours first."""
    found = {"llamac": Ours(os.path.expanduser(run))}
    if batched_bench:
        found["llama.cpp"] = BatchedBench(os.path.expanduser(batched_bench))
    return found


def measure(path, n_threads, n_texts):
    """
    Measure the programs in turns. Return {program: {column: median}}; "samples" holds all values of
    each column.
    """
    found = {name: {"samples": {column: [] for column in COLUMNS}} for name in programs()}
    for _ in range(samples):
        for name, program in programs().items():
            for column, value in program.speed(path, n_threads, n_texts).items():
                found[name]["samples"][column].append(value)
    for program in found.values():
        program |= {column: median(values) for column, values in program["samples"].items()}
    return found


def print_header():
    """Print the first two lines of the table."""
    print("| shape, format, threads, texts | " + " | ".join(
        f"{title} | theirs | ratio" for title in COLUMNS.values()) + " |")
    print("| --- |" + " ---: |" * (3 * len(COLUMNS)))


def row(key, found):
    """Return a line of the table."""
    cells = []
    for column in COLUMNS:
        ours = found["llamac"][column]
        theirs = found.get("llama.cpp", {}).get(column)
        cells.append(f"{ours:,.0f}")
        cells += [f"{theirs:,.0f}", f"{ours / theirs:.2f}"] if theirs else ["–", "–"]
    return "| " + " | ".join([key, *cells]) + " |"


def prepare(folder, shape, form):
    """
    Return the path of the model with this shape and format in the folder. Write it if it is
    missing, and read it into the page cache.
    """
    path = Path(folder, shape, f"{form}.gguf")
    if not path.exists():
        command = [sys.executable, ROOT / "bench" / "models.py", f"--shapes={shape}",
                   f"--formats={form}", f"--models={folder}"]
        if subprocess.run(command, stdout=sys.stderr).returncode:
            sys.exit(2)
    read_anew(path)
    return path


def main():
    """Measure all shapes, formats and numbers of texts; write the results after each."""
    known = json.loads(Path(results).read_text()) if Path(results).exists() else {}
    if show:
        print_header()
        for key, entry in known.items():
            print(row(key, entry["programs"]))
        return
    if samples < 1 or tokens < 2:
        fail(f"--samples={samples} --tokens={tokens}: expected at least 1 sample and 2 tokens")
    Path(results).parent.mkdir(parents=True, exist_ok=True)
    n_threads = threads or len(os.sched_getaffinity(0))
    print_header()
    for shape, form in itertools.product(shapes.split(","), formats.split(",")):
        path = prepare(models, shape, form)
        for n_texts in map(int, texts.split(",")):
            found = measure(path, n_threads, n_texts)
            key = f"{shape} {form} {n_threads} {n_texts}"
            known[key] = {"date": str(date.today()), "processor": processor(), "programs": found}
            Path(results).write_text(json.dumps(known, indent=1))
            print(row(key, found), flush=True)


if __name__ == "__main__":
    configure(globals())
    main()
