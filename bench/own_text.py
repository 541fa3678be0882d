"""
Compare the model sizes that --minutes chooses with a random search. Each text is trained once with
the chosen sizes and `tries` times with settings drawn from sweeps/own_text.yaml. Every run has the
same time budget. The result is in bits per byte of the validation text; every evaluation reads the
same number of tokens.

    python bench/own_text.py my.txt other.txt --minutes=1 --tries=20 [--workers=2 --threads=1]

--nanogpt=FOLDER also measures nanoGPT's CPU recipe, whose tokens are characters. --litgpt=PYTHON,
a Python that has litgpt, also measures the training of litgpt_text.py. The learning rates of both
decay over the number of steps that fit the time budget. Shorter runs are timed to estimate this
number. The result of both is the smallest validation loss; each loss is a mean over 20 batches.

The result of a run is that of its best checkpoint, which is evaluated again after training with
EVAL_ITERS. Two workers with one thread each keep two runs on the machine at all times, so runs with
the chosen sizes are as slow as those of the search. A drawn vocabulary size of 0 means bytes.
"""
import concurrent.futures
import itertools
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
import typing
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import compare
import time_to_loss
from configurator import configure, fail, read_file
from engine import sweep_file

minutes = 1.0            # time budget of every run
tries = 20               # random settings per text
workers = 2              # concurrent runs
threads = 1              # CPU threads per run
out_dir = "out/own_text"  # folder of the runs; existing runs are not repeated
seed = 1                 # random seed of the draws
nanogpt = ""             # folder of nanoGPT
litgpt = ""              # path of a Python that has litgpt

ROOT = Path(__file__).resolve().parents[1]
EVAL_ITERS = 40          # eval_iters of the final evaluation, in units of 1024 tokens
NANOGPT_INTERVAL = 250   # eval_interval of nanoGPT in steps, as in its recipe
LITGPT_INTERVAL = 20     # steps of litgpt's shortest run
MIN_LITGPT_STEPS = 10    # with fewer steps litgpt logs no evaluation
LOSS = re.compile(r"validation loss ([\d.]+)")


class Result(typing.NamedTuple):
    """The result of a run. Results sort by `best` first."""
    best: float       # bits per byte of the best checkpoint; inf if the run failed
    last: float       # bits per byte of the last checkpoint; inf if the run failed
    seconds: float    # training time
    n_params: int     # number of parameters
    description: str  # settings, or the last line of the error


def environment():
    """Return the environment variables of a run, with its number of threads."""
    return os.environ | {"OMP_NUM_THREADS": str(threads)}


def draws():
    """Yield the settings of each try, as options of train.py."""
    parameters = read_file(str(ROOT / "sweeps/own_text.yaml"))["parameters"]
    rng = random.Random(seed)
    for _ in range(tries):
        values = {name: sweep_file.draw(spec, rng) for name, spec in parameters.items()}
        values["max_minutes"] = minutes
        if values["dim"] % (2 * values["n_heads"]):
            values["n_heads"] = 2
        del values["data"], values["out_dir"]
        if not values["vocab_size"]:
            values["vocab_source"] = "byte"
        yield [f"--{name}={value}" for name, value in values.items()]


def train(text, name, words):
    """Train on a text with these options of train.py, unless the run exists; return its Result."""
    folder = Path(out_dir, Path(text).stem, name)
    command = [sys.executable, str(ROOT / "train.py"), f"--data={text}"]
    start = time.perf_counter()
    if not (folder / "judged").exists():
        training = [*command, f"--out_dir={folder}", "--init_from=scratch", *words]
        done = subprocess.run(training, env=environment(), capture_output=True, text=True)
        if done.returncode:
            error = done.stderr.strip().splitlines()[-1]
            return Result(float("inf"), float("inf"), 0.0, 0, error)
        (folder / "seconds").write_text(str(time.perf_counter() - start))
        best_and_latest = {checkpoint: evaluate(command, folder, checkpoint)
                           for checkpoint in ("best", "latest")}
        (folder / "judged").write_text(json.dumps(best_and_latest))
    run = compare.read_runs([folder])[0]
    losses = json.loads((folder / "judged").read_text())
    seconds = float((folder / "seconds").read_text())
    return Result(losses["best"], losses["latest"], seconds, run.config["n_params"], describe(run))


def describe(run):
    """Return the settings and the length of a run as one line of text."""
    config, metrics = run.config, run.metrics
    return (f"V {config['model_args']['vocab_size']}, {config['dim']} x {config['n_layers']}, "
            f"{config['batch_size']} x {config['max_seq_len']}, "
            f"rate {config['learning_rate']:.2g}, dropout {config['dropout']}, "
            f"{config['optimizer']}, {metrics['iter']} steps, epoch {metrics['epoch']:.2g}")


def evaluate(command, folder, name, eval_iters=EVAL_ITERS):
    """Return the bits per byte of a run's checkpoint; `name` is best or latest."""
    config = compare.read_runs([folder])[0].config
    path = folder / "checkpoints" / (folder / name).read_text().strip()
    words = [f"--init_from={path}", f"--max_seq_len={config['max_seq_len']}", "--eval_only=True",
             f"--eval_iters={eval_iters}", f"--out_dir={folder}/judge"]
    done = subprocess.run([*command, *words], env=environment(), capture_output=True, text=True,
                          check=True)
    bits_per_token = float(LOSS.search(done.stdout)[1]) / math.log(2)
    meta = config["dataset"]
    return bits_per_token * (meta["val_tokens"] - meta["val_documents"]) / meta["val_bytes"]


def in_time(run, interval):
    """
    Return run(steps), a pair (bits per byte, seconds), for the number of steps that fits the time
    budget, estimated from two shorter runs. It is a multiple of `interval` if that many steps fit.
    """
    run(interval)  # warm-up: fills the page cache
    _, short = run(interval)
    _, longer = run(4 * interval)
    # Both times include the startup, so their difference is the time of three intervals.
    intervals = 1 + (60 * minutes - short) / ((longer - short) / 3)
    if intervals > 1:
        return run(interval * round(intervals))
    return run(max(1, round(interval * intervals)))


def measure_nanogpt(text):
    """Return (bits per byte, seconds) of nanoGPT's CPU recipe on a text, in the time budget."""
    with tempfile.TemporaryDirectory(dir=Path(nanogpt, "data")) as folder:
        return train_nanogpt(Path(folder), text)


def train_nanogpt(folder, text):
    """Prepare the text in `folder`, a folder in nanoGPT's data, and measure nanoGPT on it."""
    shutil.copy(Path(nanogpt, "data/shakespeare_char/prepare.py"), folder)
    shutil.copy(text, folder / "input.txt")
    subprocess.run([sys.executable, folder / "prepare.py"], check=True, capture_output=True)
    characters = Path(text).read_text(encoding="utf-8")
    characters_per_byte = len(characters) / len(characters.encode())

    def run(steps):
        start = time.perf_counter()
        command = [sys.executable, "train.py", *time_to_loss.NANOGPT.split(),
                   f"--dataset={folder.name}", f"--max_iters={steps}", f"--lr_decay_iters={steps}",
                   f"--eval_interval={min(NANOGPT_INTERVAL, steps)}",
                   f"--out_dir={Path(out_dir).resolve()}/nanogpt"]
        done = subprocess.run(command, cwd=nanogpt, env=environment(), check=True,
                              capture_output=True, text=True)
        loss = min(map(float, time_to_loss.SAID.findall(done.stdout)))
        return loss / math.log(2) * characters_per_byte, time.perf_counter() - start

    return in_time(run, NANOGPT_INTERVAL)


def measure_litgpt(text):
    """
    Return (bits per byte, seconds) of litgpt's pretrain on a text, in the time budget, which
    includes the preparation of the text.
    """
    def run(steps):
        start = time.perf_counter()
        command = [litgpt, str(ROOT / "bench/litgpt_text.py"), text,
                   str(max(MIN_LITGPT_STEPS, steps))]
        done = subprocess.run(command, env=environment(), check=True, capture_output=True,
                              text=True)
        return float(done.stdout.split()[-1]), time.perf_counter() - start

    return in_time(run, LITGPT_INTERVAL)


def main(texts):
    jobs = []  # (text, name of the run, options of train.py)
    for text in texts:
        jobs.append((text, "rules", [f"--minutes={minutes}"]))
        jobs += [(text, f"try{n}", words) for n, words in enumerate(draws())]
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        results = list(pool.map(lambda job: train(*job), jobs))
    rules = {}                               # {text: Result with the chosen sizes}
    searches = {text: [] for text in texts}  # {text: [(Result, name of the run)]}, best first
    for (text, name, _), result in zip(jobs, results):
        if name == "rules":
            rules[text] = result
        else:
            searches[text].append((result, name))
    for search in searches.values():
        search.sort()

    print("| text | rules: last | best | seconds | best of search | rules over it |\n"
          "| --- | ---: | ---: | ---: | ---: | ---: |")
    for text in texts:
        best, last, seconds, *_ = rules[text]
        best_of_search = searches[text][0][0].best if searches[text] else math.nan
        print(f"| {Path(text).name} | {last:.4f} | {best:.4f} | {seconds:.1f} | "
              f"{best_of_search:.4f} | {best / best_of_search:.3f} |", flush=True)
    peers = [("nanoGPT", measure_nanogpt)] * bool(nanogpt)
    peers += [("litgpt", measure_litgpt)] * bool(litgpt)
    for text, (name, measure) in itertools.product(texts, peers):
        bits, seconds = measure(text)
        print(f"{name} on {Path(text).name}: {bits:.4f} bits per byte after {seconds:.1f} s; ours "
              f"reaches {rules[text].best / bits:.3f} times this value", flush=True)
    for text in texts:
        print(f"\n{Path(text).name}\n  rules: {rules[text].best:.4f} {rules[text].description}")
        for result, name in searches[text][:5]:
            print(f"  {name}: {result.best:.4f} {result.description}")


if __name__ == "__main__":
    words = []
    configure(globals(), positional=words)
    if not words:
        fail("no text; expected files, as in: python bench/own_text.py my.txt --minutes=1")
    main(words)
