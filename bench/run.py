"""
Measure the speed of ./run on this machine, and of other programs if the options name them.

    python bench/run.py                              ours alone: all shapes and formats
    python bench/run.py --shapes=15M --formats=q8_0 --threads=all --llama_bench=PATH/llama-bench
    python bench/run.py --show=True                  print the table of all results so far

The programs take turns, so that other load on the machine affects all of them; the result is the
ratio of the medians. Each sample is one process: it evaluates a prompt of 128 tokens, then decodes
some tokens from an empty cache, both after a warm-up. The first token is timed separately, from the
start of a process to its end, including the time to load the model; llama-bench skips the tokenizer
there. Peers read the same weights: llama.cpp reads the same file, llama2.c reads the v0 or v2 file
in the same folder.
"""
import itertools
import json
import mmap
import os
import re
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from statistics import median
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from configurator import configure, fail

shapes = "15M,42M,110M,1.1B"          # shapes of bench/models.py, separated by commas
formats = "f32,bf16,q8_0,q4_0,v0,v2"  # formats of bench/models.py, separated by commas
threads = "1,all"                     # numbers of threads, separated by commas
samples = 5                           # samples of each program
starts = 5                            # measurements of each first token; 0: skip them
tokens = 0                            # tokens decoded per sample; 0: the shape's number in DECODED
models = "cache/bench"                # folder of the models; missing ones are written
results = "cache/bench/results.json"  # all results; a repeated measurement replaces the old
show = False                          # print all results instead of measuring
run = "./run"                         # path of our program
llama_bench = ""                      # path of llama.cpp's llama-bench
ik_llama_bench = ""                   # path of ik_llama.cpp's llama-bench
ik_flags = "-rtr 1 -fa 0"             # flags of ik_llama_bench: repack weights at load; disable
                                      # flash attention, which was slower on a Zen 4 CPU
llama2c = ""                          # path of llama2.c's run, measured on one thread
llama2c_omp = ""                      # path of llama2.c's run with OpenMP, for more threads
runq = ""                             # path of llama2.c's runq with OpenMP

PROMPT = 128          # prompt tokens
LARGE_PAGE = 2 << 20  # bytes
DECODED = {"15M": 128, "42M": 128, "110M": 64, "1.1B": 16}  # tokens, for samples of about a second
# {key in the results: title in the table}
COLUMNS = {"prompt": "prompt, tok/s",
           "decode": "decode, tok/s",
           "bandwidth_share": "of the read limit",
           "first_1": "first token, ms",
           "first_128": f"... of {PROMPT}, ms",
           "peak": "peak, MiB"}


def call(command, n_threads):
    """
    Run a command with n_threads OpenMP threads and return (stdout, stderr). If it fails, end this
    program with one line.
    """
    command = [str(word) for word in command]
    env = {**os.environ, "OMP_NUM_THREADS": str(n_threads)}
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, errors="replace")
    except OSError as e:
        fail(f"{command[0]}: {e.strerror}; expected the path of a program")
    if done.returncode:
        last_line = (done.stderr.strip() or "stderr is empty").splitlines()[-1]
        fail(f"{' '.join(command)}: exit code {done.returncode}: {last_line}")
    return done.stdout, done.stderr


def process(command, n_threads):
    """
    Return (milliseconds, peak MiB) of a whole process. The peak is at least about 15 MiB, because a
    forked child starts with the memory of this process.
    """
    begin = time.perf_counter()
    words = [str(word) for word in command]
    env = {**os.environ, "OMP_NUM_THREADS": str(n_threads)}
    child = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=env)
    _, status, used = os.wait4(child.pid, 0)
    milliseconds = 1000 * (time.perf_counter() - begin)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        call(command, n_threads)  # run it again, to end this program with its error message
    return milliseconds, used.ru_maxrss / 1024


def read_anew(path):
    """
    Read a file into the page cache in large pages, as export.py and run leave it there. The page
    size determines how long a process takes to map the file and how fast it reads the mapping.
    Without this, the page size would differ by chance from file to file.
    """
    with open(path, "rb") as f:
        os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        size = os.fstat(f.fileno()).st_size
        # Map one page at a time: a mapping of the whole file would raise the peak memory of this
        # process, which is included in the peak of each later child.
        for begin in range(0, size, LARGE_PAGE):
            length = min(LARGE_PAGE, size - begin)
            with mmap.mmap(f.fileno(), length, prot=mmap.PROT_READ, offset=begin) as page:
                page.madvise(mmap.MADV_HUGEPAGE)
                page[::mmap.PAGESIZE]  # reads a byte of each small page


def first_token(binary, path, n_prompt):
    """
    Return the command that prints one token after a prompt of n_prompt tokens, for programs with
    llama2.c's flags.
    """
    prompt = ["-i", " ".join("a" * (n_prompt - 1))] if n_prompt > 1 else []
    tokenizer = ["-z", path.with_name("tokenizer.bin")] if path.suffix == ".bin" else []
    return [binary, path, "-t", 0, "-n", n_prompt, *prompt, *tokenizer]


class Ours(NamedTuple):
    """Our program, ./run."""
    binary: str

    def speed(self, path, n_threads, n):
        """Return {"prompt": tokens/s, "decode": tokens/s, ...} of one process."""
        command = [self.binary, path, "--bench", "--json", "-j", n_threads, "-n", n]
        found = json.loads(call(command, n_threads)[0])
        return {"prompt": found["prompt_tokens_per_s"],
                "decode": found["decode_tokens_per_s"],
                "bandwidth_share": found["bandwidth_share"]}

    def first(self, path, n_threads, n_prompt):
        """Return the command whose duration is the time to the first token."""
        return [*first_token(self.binary, path, n_prompt), "-j", n_threads]


class LlamaBench(NamedTuple):
    """llama-bench of llama.cpp or ik_llama.cpp, with the methods of Ours."""
    binary: str
    extra: tuple        # flags of every call
    no_warmup: tuple    # flags that skip the warm-up

    def speed(self, path, n_threads, n):
        command = [self.binary, "-m", path, "-t", n_threads, "-p", PROMPT, "-n", n, "-r", 1,
                   "-o", "json", *self.extra]
        found = json.loads(call(command, n_threads)[0])
        return {"decode" if test["n_gen"] else "prompt": test["avg_ts"] for test in found}

    def first(self, path, n_threads, n_prompt):
        return [self.binary, "-m", path, "-t", n_threads, "-p", n_prompt, "-n", 0, "-r", 1,
                *self.extra, *self.no_warmup]


class Llama2c(NamedTuple):
    """run or runq of llama2.c, with the methods of Ours."""
    binary: str
    file: str           # name of the file that it reads

    def speed(self, path, n_threads, n):
        command = first_token(self.binary, path.with_name(self.file), 1)
        command[command.index("-n") + 1] = n
        stderr = call(command, n_threads)[1]
        return {"decode": float(re.search(r"achieved tok/s: ([\d.]+)", stderr)[1])}

    def first(self, path, n_threads, n_prompt):
        return first_token(self.binary, path.with_name(self.file), n_prompt)


def programs(form, n_threads):
    """Return {name: program} of the programs that read weights of this format, ours first."""
    found = {"llamac": Ours(run)}
    if llama_bench and not form.startswith("v"):
        found["llama.cpp"] = LlamaBench(llama_bench, (), ("--no-warmup",))
    if ik_llama_bench and not form.startswith("v"):
        found["ik_llama.cpp"] = LlamaBench(ik_llama_bench, tuple(ik_flags.split()), ("-w", 0))
    plain = llama2c if n_threads == 1 else llama2c_omp
    if plain and form in ("f32", "v0"):
        found["llama2.c"] = Llama2c(plain, "v0.bin")
    if runq and form in ("q8_0", "v2"):
        found["llama2.c runq"] = Llama2c(runq, "v2.bin")
    return {name: program._replace(binary=os.path.expanduser(program.binary))
            for name, program in found.items()}


def measure(path, form, n_threads, n):
    """
    Measure the programs in turns, decoding n tokens per sample. Return {program: {column: median}};
    "samples" holds all values of each column.
    """
    found = {name: {"samples": {}} for name in programs(form, n_threads)}

    def add(name, column, value):
        found[name]["samples"].setdefault(column, []).append(value)

    for i in range(max(samples, starts)):
        for name, program in programs(form, n_threads).items():
            if i < samples:
                for column, value in program.speed(path, n_threads, n).items():
                    add(name, column, value)
            if i >= starts:
                continue
            for n_prompt in (1, PROMPT):
                ms, mib = process(program.first(path, n_threads, n_prompt), n_threads)
                add(name, f"first_{n_prompt}", ms)
                if n_prompt == PROMPT:
                    add(name, "peak", mib)
    for row in found.values():
        row.update({column: median(values) for column, values in row["samples"].items()})
    return found


def ratio(found, column):
    """Return the factor by which ours is better than the best peer; None without a peer."""
    ours = found["llamac"].get(column)
    peers = [row[column] for name, row in found.items() if name != "llamac" and column in row]
    if not ours or not peers:
        return None
    return ours / max(peers) if column in ("prompt", "decode") else min(peers) / ours


def number(value):
    """Return a value as text with three digits, or as a whole number from 100 on."""
    if value >= 100:
        return f"{value:,.0f}"
    if value >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}"


def rows(key, found):
    """Yield the table's rows of one measurement; ours includes its ratio to the best peer."""
    for name, row in found.items():
        cells = [number(row[column]) if column in row else "–" for column in COLUMNS]
        if name == "llamac":
            times = [ratio(found, column) for column in COLUMNS]
            cells = [f"{cell} ({r:.2f}×)" if r else cell for cell, r in zip(cells, times)]
        yield "| " + " | ".join([key, name, *cells]) + " |"


def print_header():
    """Print the first two lines of the table."""
    print("| shape, format, threads | program | " + " | ".join(COLUMNS.values()) + " |")
    print("| --- | --- |" + " ---: |" * len(COLUMNS))


def forms_read(form):
    """Return the formats of all files that the programs read in the rows of `form`, ours first."""
    peer_forms = {"f32": "v0"} if llama2c or llama2c_omp else {}
    if runq:
        peer_forms["q8_0"] = "v2"
    return [form, peer_forms[form]] if form in peer_forms else [form]


def prepare(shape, form):
    """
    Return the path of the model with this shape and format. Write it and the files that peers read
    instead, if they are missing, and read all of them into the page cache.
    """
    folder, forms = Path(models, shape), forms_read(form)
    missing = [f for f in forms if not list(folder.glob(f"{f}.*"))]
    if missing:
        command = [sys.executable, ROOT / "bench" / "models.py", f"--shapes={shape}",
                   f"--formats={','.join(missing)}", f"--models={models}"]
        if subprocess.run(command, stdout=sys.stderr).returncode:
            sys.exit(2)
    paths = [next(folder.glob(f"{f}.*")) for f in forms]
    for path in paths:
        read_anew(path)
    return paths[0]


def processor():
    """Return the name of this machine's CPU, or "" if /proc/cpuinfo does not contain it."""
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.*)", info.read_text()) if info.exists() else None
    return found[1] if found else ""


def main():
    """Measure all shapes, formats and numbers of threads; write the results after each."""
    known = json.loads(Path(results).read_text()) if Path(results).exists() else {}
    if show:
        print_header()
        for key, entry in known.items():
            print("\n".join(rows(key, entry["programs"])))
        return
    if samples < 1:
        fail(f"--samples={samples}: expected at least 1")
    Path(results).parent.mkdir(parents=True, exist_ok=True)
    print_header()
    for shape, form in itertools.product(shapes.split(","), formats.split(",")):
        path = prepare(shape, form)
        for word in dict.fromkeys(threads.split(",")):
            n_threads = len(os.sched_getaffinity(0)) if word == "all" else int(word)
            found = measure(path, form, n_threads, tokens or DECODED.get(shape, PROMPT))
            key = f"{shape} {form} {n_threads}"
            known[key] = {"date": str(date.today()), "processor": processor(), "programs": found}
            Path(results).write_text(json.dumps(known, indent=1))
            print("\n".join(rows(key, found)), flush=True)


if __name__ == "__main__":
    configure(globals())
    main()
