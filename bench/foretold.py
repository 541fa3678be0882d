"""
Compare the memory and time that train.py predicts before its first step with the measured ones, for
ten runs in sequence.

    python bench/foretold.py                 the table: predicted, measured, difference in percent
    python bench/foretold.py --seconds=60    longer runs

A run has as many steps as take `seconds` at the speed of a first short run. Memory is the peak of
the process (perf/peak_mib of its log). Time is measured from the line that predicts it to the last
line, including evaluations and checkpoints.
"""
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from configurator import configure, fail

seconds = 30  # approximate time of a run
only = ""     # numbers of the rows to run: 1,4

SMALL, LARGE = "--data=words.txt --vocab_source=byte", "--data=words.txt --vocab_size=8192"
ROWS = [
    "--data=stories:20000",
    f"{SMALL} --dim=96 --n_layers=3 --n_heads=3 --batch_size=16 --max_seq_len=128 --optimizer=adamw",
    f"{LARGE} --dim=128 --n_layers=4 --n_heads=4 --batch_size=8 --max_seq_len=256",
    f"{SMALL} --dim=192 --n_layers=4 --n_heads=6 --n_kv_heads=2 --batch_size=2 --max_seq_len=1024 --document_mask=False",
    f"{LARGE} --dim=256 --n_layers=6 --n_heads=8 --batch_size=8 --max_seq_len=256 --dtype=bfloat16",
    f"{LARGE} --dim=256 --n_layers=4 --n_heads=8 --batch_size=4 --max_seq_len=256 --gradient_accumulation_steps=3 --tie_embeddings=False",
    f"{SMALL} --dim=384 --n_layers=6 --n_heads=6 --batch_size=4 --max_seq_len=256 --activation_checkpointing=True",
    f"{LARGE} --dim=384 --n_layers=4 --n_heads=6 --batch_size=4 --max_seq_len=128 --optimizer=adamw --tie_embeddings=False",
    f"{SMALL} --dim=512 --n_layers=4 --n_heads=8 --batch_size=4 --max_seq_len=256",
    f"{LARGE} --dim=512 --n_layers=4 --n_heads=8 --batch_size=8 --max_seq_len=128 --dtype=bfloat16 --optimizer=adamw",
]


def write_words(path):
    """Write 2 MB of invented words, frequent and rare: enough for a vocabulary of 8192."""
    rng = random.Random(1)
    syllables = [a + b for a in "bcdfghjklmnprstvwz" for b in ("a", "e", "i", "o", "u", "an", "er", "in", "ou")]
    words = ["".join(rng.choice(syllables) for _ in range(rng.randint(1, 4))) for _ in range(30_000)]
    texts = (" ".join(words[int(30_000 * rng.random() ** 3)] for _ in range(rng.randint(20, 400))) for _ in range(1500))
    path.write_text("\n<|endoftext|>\n".join(texts))


def train(folder, words, steps):
    """
    Run train.py. Return (config, last row, seconds from the line with the predicted time to the last
    line).
    """
    every = max(1, steps // 4)
    command = [sys.executable, ROOT / "train.py", *words.split(), "--init_from=scratch", f"--max_iters={steps}", "--device=cpu",
               f"--eval_interval={every}", "--eval_iters=8", f"--log_interval={max(1, steps // 20)}", "--peak_tflops=1",
               f"--out_dir={folder}/run{time.time()}", "--learning_rate=1e-4"]
    process, begin, end = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True), 0, 0
    for line in process.stdout:
        begin, end = (time.time(), end) if line.startswith("time: ") else (begin, time.time())
    if process.wait():
        fail(f"train.py {words}: {process.stderr.read().splitlines()[-1]}")
    out = Path(command[-2].split("=")[1])
    rows = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return json.loads((out / "config.json").read_text()), rows[-1], end - begin


def main():
    print("| run | MiB predicted | found | | seconds predicted | found | |\n| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    with tempfile.TemporaryDirectory() as folder:
        write_words(Path(folder, "words.txt"))
        for number, words in enumerate(ROWS, 1):
            if only and str(number) not in only.split(","):
                continue
            short = train(folder, words, 8)[0]
            steps = round(seconds * short["estimate"]["tokens_per_sec"] / short["tokens_per_iter"])
            config, row, took = train(folder, words, max(10, steps))
            memory, told = config["estimate"]["memory"] / 2 ** 20, config["estimate"]["seconds"]
            print(f"| {number}: `{words}` | {memory:.0f} | {row['perf/peak_mib']:.0f} | {100 * (memory / row['perf/peak_mib'] - 1):+.0f} % "
                  f"| {told:.1f} | {took:.1f} | {100 * (told / took - 1):+.0f} % |", flush=True)


if __name__ == "__main__":
    configure(globals())
    main()
