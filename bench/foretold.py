"""
Compare the memory and the time that train.py predicts before its first step with measurements, for
ten runs in sequence.

    python bench/foretold.py                 print predicted, measured, difference in percent
    python bench/foretold.py --seconds=60    use longer runs

Each row first trains 8 steps. The speed that train.py predicts there determines how many steps the
measured run needs for `seconds`. Memory is the peak of the process (perf/peak_mib in its log). Time
is measured from the output line with the predicted time to the last line, including evaluations and
checkpoints.
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

seconds = 30  # approximate duration of a run in seconds
only = ""     # numbers of the rows to run, separated by commas; empty: all

SMALL = "--data=words.txt --vocab_source=byte"
LARGE = "--data=words.txt --vocab_size=8192"
ROWS = [
    "--data=stories:20000",
    f"{SMALL} --dim=96 --n_layers=3 --n_heads=3 --batch_size=16 --max_seq_len=128 "
    "--optimizer=adamw",
    f"{LARGE} --dim=128 --n_layers=4 --n_heads=4 --batch_size=8 --max_seq_len=256",
    f"{SMALL} --dim=192 --n_layers=4 --n_heads=6 --n_kv_heads=2 --batch_size=2 --max_seq_len=1024 "
    "--document_mask=False",
    f"{LARGE} --dim=256 --n_layers=6 --n_heads=8 --batch_size=8 --max_seq_len=256 "
    "--dtype=bfloat16",
    f"{LARGE} --dim=256 --n_layers=4 --n_heads=8 --batch_size=4 --max_seq_len=256 "
    "--gradient_accumulation_steps=3 --tie_embeddings=False",
    f"{SMALL} --dim=384 --n_layers=6 --n_heads=6 --batch_size=4 --max_seq_len=256 "
    "--activation_checkpointing=True",
    f"{LARGE} --dim=384 --n_layers=4 --n_heads=6 --batch_size=4 --max_seq_len=128 "
    "--optimizer=adamw --tie_embeddings=False",
    f"{SMALL} --dim=512 --n_layers=4 --n_heads=8 --batch_size=4 --max_seq_len=256",
    f"{LARGE} --dim=512 --n_layers=4 --n_heads=8 --batch_size=8 --max_seq_len=128 "
    "--dtype=bfloat16 --optimizer=adamw",
]


def write_words(path):
    """Write 2 MB of invented frequent and rare words, enough for a vocabulary of 8192 tokens."""
    rng = random.Random(1)
    syllables = []
    for consonant in "bcdfghjklmnprstvwz":
        for ending in ("a", "e", "i", "o", "u", "an", "er", "in", "ou"):
            syllables.append(consonant + ending)
    words = []
    for _ in range(30_000):
        n_syllables = rng.randint(1, 4)
        words.append("".join(rng.choice(syllables) for _ in range(n_syllables)))
    texts = []
    for _ in range(1500):
        n_words = rng.randint(20, 400)
        # The cube makes the first words of the list frequent and the last ones rare.
        drawn = [words[int(30_000 * rng.random() ** 3)] for _ in range(n_words)]
        texts.append(" ".join(drawn))
    path.write_text("\n<|endoftext|>\n".join(texts))


def train(folder, options, steps):
    """
    Run train.py in `folder`. Return (config, last row of the log, seconds from the line with the
    predicted time to the last line).
    """
    out = Path(f"{folder}/run{time.time()}")
    command = [
        sys.executable, ROOT / "train.py", *options.split(), "--init_from=scratch",
        f"--max_iters={steps}", "--device=cpu", f"--eval_interval={max(1, steps // 4)}",
        "--eval_iters=8", f"--log_interval={max(1, steps // 20)}", "--peak_tflops=1",
        f"--out_dir={out}", "--learning_rate=1e-4",
    ]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True)
    begin = 0
    end = 0
    for line in process.stdout:
        if line.startswith("time: "):
            begin = time.time()
        else:
            end = time.time()
    if process.wait():
        fail(f"train.py {options}: {process.stderr.read().splitlines()[-1]}")
    rows = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    config = json.loads((out / "config.json").read_text())
    return config, rows[-1], end - begin


def main():
    print("| run | MiB predicted | found | | seconds predicted | found | |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    with tempfile.TemporaryDirectory() as folder:
        write_words(Path(folder, "words.txt"))
        for number, options in enumerate(ROWS, 1):
            if only and str(number) not in only.split(","):
                continue
            short, _, _ = train(folder, options, 8)
            speed = short["estimate"]["tokens_per_sec"]
            steps = round(seconds * speed / short["tokens_per_iter"])
            config, row, measured_s = train(folder, options, max(10, steps))
            predicted_mib = config["estimate"]["memory"] / 2 ** 20
            measured_mib = row["perf/peak_mib"]
            predicted_s = config["estimate"]["seconds"]
            memory_error = 100 * (predicted_mib / measured_mib - 1)
            time_error = 100 * (predicted_s / measured_s - 1)
            print(f"| {number}: `{options}` "
                  f"| {predicted_mib:.0f} | {measured_mib:.0f} | {memory_error:+.0f} % "
                  f"| {predicted_s:.1f} | {measured_s:.1f} | {time_error:+.0f} % |", flush=True)


if __name__ == "__main__":
    configure(globals())
    main()
