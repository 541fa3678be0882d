"""
Compare the model sizes that --minutes chooses with a random search: each text is trained once with
them and `tries` times with settings drawn from sweeps/own_text.yaml, every run for the same time.
The result is bits per byte of the validation text, of which all runs read the same amount.

    python bench/own_text.py my.txt other.txt --minutes=1 --tries=20 [--workers=2 --threads=1]

--nanogpt=FOLDER also measures nanoGPT's CPU recipe, by characters, and --litgpt=PYTHON, a Python
with litgpt, the training of litgpt_text.py. Their learning rates decay over the number of steps that
fit the time, at the speed of shorter runs. The smallest of their losses counts, each over 20
batches.

Of a run its best checkpoint counts, which is evaluated again at the end, over JUDGED tokens. With
two workers of one thread each, two runs share the machine all the time, ours included. In a draw
the vocabulary size 0 stands for bytes.
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
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import compare
import sweep
import time_to_loss
from configurator import configure, fail, read_file

minutes = 1.0            # of every run
tries = 20               # random settings of each text
workers = 2              # concurrent runs
threads = 1              # of each run
out_dir = "out/own_text"  # folder of the runs; existing runs are not repeated
seed = 1                 # of the draws
nanogpt = ""             # folder of nanoGPT
litgpt = ""              # a Python that has litgpt
ROOT = Path(__file__).resolve().parents[1]
JUDGED = 40           # eval_iters of the final evaluation, 1024 tokens each
EVERY = 250           # nanoGPT's eval_interval, as in its recipe
LIT_EVERY = 20        # the same of litgpt
LIT_LEAST = 10        # min steps of litgpt, which logs no evaluation with fewer
LOSS = re.compile(r"validation loss ([\d.]+)")


def draws():
    """Yield the settings of each try, as words of the command line."""
    parameters = read_file(str(ROOT / "sweeps/own_text.yaml"))["parameters"]
    rng = random.Random(seed)
    for _ in range(tries):
        values = {name: sweep.draw(spec, rng) for name, spec in parameters.items()} | {"max_minutes": minutes}
        if values["dim"] % (2 * values["n_heads"]):
            values["n_heads"] = 2
        del values["data"], values["out_dir"]
        if not values["vocab_size"]:
            values["vocab_source"] = "byte"
        yield [f"--{name}={value}" for name, value in values.items()]


def train(text, name, words):
    """
    Return (best, last, seconds, n_params, description) of one run; best and last are bits per byte, inf
    if the run failed.
    """
    folder, start = Path(out_dir, Path(text).stem, name), time.perf_counter()
    command, env = [sys.executable, str(ROOT / "train.py"), f"--data={text}"], os.environ | {"OMP_NUM_THREADS": str(threads)}
    if not (folder / "judged").exists():
        done = subprocess.run([*command, f"--out_dir={folder}", "--init_from=scratch", *words], env=env, capture_output=True, text=True)
        if done.returncode:
            return float("inf"), float("inf"), 0.0, 0, done.stderr.strip().splitlines()[-1]
        (folder / "seconds").write_text(str(time.perf_counter() - start))
        (folder / "judged").write_text(json.dumps({name: judged(command, folder, name, env) for name in ("best", "latest")}))
    run, losses = compare.read_runs([folder])[0], json.loads((folder / "judged").read_text())
    config = run.config
    said = (f"V {config['model_args']['vocab_size']}, {config['dim']} x {config['n_layers']}, {config['batch_size']} x "
            f"{config['max_seq_len']}, rate {config['learning_rate']:.2g}, dropout {config['dropout']}, {config['optimizer']}, "
            f"{run.metrics['iter']} steps, epoch {run.metrics['epoch']:.2g}")
    return losses["best"], losses["latest"], float((folder / "seconds").read_text()), config["n_params"], said


def judged(command, folder, name, env):
    """Return the bits per byte of a run's best or latest checkpoint."""
    config, path = compare.read_runs([folder])[0].config, folder / "checkpoints" / (folder / name).read_text().strip()
    words = [f"--init_from={path}", f"--max_seq_len={config['max_seq_len']}", "--eval_only=True", f"--eval_iters={JUDGED}",
             f"--out_dir={folder}/judge"]
    done = subprocess.run([*command, *words], env=env, capture_output=True, text=True, check=True)
    meta = config["dataset"]
    return float(LOSS.search(done.stdout)[1]) / math.log(2) * (meta["val_tokens"] - meta["val_documents"]) / meta["val_bytes"]


def in_time(run, every):
    """
    Return run(steps), which is (bits per byte, seconds), for as many steps as fit the minutes at the
    speed of two shorter runs: a multiple of `every` if possible.
    """
    run(every)  # warm-up: fills the page cache
    (_, short), (_, longer) = run(every), run(4 * every)
    # Intervals of `every` steps; both times include the startup.
    intervals = 1 + (60 * minutes - short) / ((longer - short) / 3)
    return run(every * round(intervals) if intervals > 1 else max(1, round(every * intervals)))


def nano(text):
    """Return (bits per byte, seconds) of nanoGPT's CPU recipe on a text, in the same time."""
    with tempfile.TemporaryDirectory(dir=Path(nanogpt, "data")) as folder:
        return nano_in(Path(folder), text)


def nano_in(folder, text):
    shutil.copy(Path(nanogpt, "data/shakespeare_char/prepare.py"), folder)
    shutil.copy(text, folder / "input.txt")
    env = os.environ | {"OMP_NUM_THREADS": str(threads)}
    subprocess.run([sys.executable, folder / "prepare.py"], check=True, capture_output=True)
    written = Path(text).read_text(encoding="utf-8")
    characters_per_byte = len(written) / len(written.encode())

    def run(steps):
        start = time.perf_counter()
        command = [sys.executable, "train.py", *time_to_loss.NANOGPT.split(), f"--dataset={folder.name}", f"--max_iters={steps}",
                   f"--lr_decay_iters={steps}", f"--eval_interval={min(EVERY, steps)}", f"--out_dir={Path(out_dir).resolve()}/nanogpt"]
        done = subprocess.run(command, cwd=nanogpt, env=env, check=True, capture_output=True, text=True)
        loss = min(map(float, time_to_loss.SAID.findall(done.stdout)))
        return loss / math.log(2) * characters_per_byte, time.perf_counter() - start

    return in_time(run, EVERY)


def lit(text):
    """
    Return (bits per byte, seconds) of litgpt's pretrain on a text, in the same time, including its
    preparation of the text.
    """
    def run(steps):
        start = time.perf_counter()
        command = [litgpt, str(ROOT / "bench/litgpt_text.py"), text, str(max(LIT_LEAST, steps))]
        done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": str(threads)}, check=True, capture_output=True, text=True)
        return float(done.stdout.split()[-1]), time.perf_counter() - start

    return in_time(run, LIT_EVERY)


def main(texts):
    jobs = [(text, name, words) for text in texts
            for name, words in [("rules", [f"--minutes={minutes}"]), *((f"try{n}", words) for n, words in enumerate(draws()))]]
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        found = dict(zip([job[:2] for job in jobs], pool.map(lambda job: train(*job), jobs)))
    print("| text | rules: last | best | seconds | best of search | rules over it |\n| --- | ---: | ---: | ---: | ---: | ---: |")
    for text in texts:
        best, last, seconds, *_ = found[text, "rules"]
        others = sorted((found[text, name], name) for t, name in found if t == text and name != "rules")
        most = others[0][0][0] if others else math.nan
        print(f"| {Path(text).name} | {last:.4f} | {best:.4f} | {seconds:.1f} | {most:.4f} | {best / most:.3f} |", flush=True)
    peers = [("nanoGPT", nano)] * bool(nanogpt) + [("litgpt", lit)] * bool(litgpt)
    for text, (name, peer) in itertools.product(texts, peers):
        bits, seconds = peer(text)
        print(f"{name} on {Path(text).name}: {bits:.4f} bits per byte after {seconds:.1f} s; ours has "
              f"{found[text, 'rules'][0] / bits:.3f} of it", flush=True)
    for text in texts:
        print(f"\n{Path(text).name}\n  rules: {found[text, 'rules'][0]:.4f} {found[text, 'rules'][4]}")
        for result, name in sorted((found[t, name], name) for t, name in found if t == text and name != "rules")[:5]:
            print(f"  {name}: {result[0]:.4f} {result[4]}")


if __name__ == "__main__":
    words = []
    configure(globals(), positional=words)
    if not words:
        fail("no text; expected files, as in: python bench/own_text.py my.txt --minutes=1")
    main(words)
