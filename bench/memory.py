"""
Measure the peak memory of train.py: with its steps alone; with evaluations, instruments, samples,
checkpoints and exports; and with W&B too.

    python bench/memory.py                                        table of three shapes
    python bench/memory.py --only="--data=my.txt --batch_size=4"  these options of train.py instead

A separate process runs train.py for each figure. For the steps alone it sets the training up and
only calls train_step. Each process reads all of the memory-mapped data once, as a longer run does,
so that its pages count in every figure. On a GPU the figure is the peak memory of the tensors. On a
CPU it is the peak resident memory of the process, which includes its code and the model file that
W&B's client maps at the end to hash it.
"""
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from configurator import configure, fail
from engine.debug.instruments import UpdateNorms
from engine.training import hardware

vocab_source = "llama2"  # tokenizer of the stories15M shapes; needs a vocabulary of 32,000
steps = 6                # steps of each run, which evaluates and saves at every second step
most = 1.10              # max ratio of the peak without W&B to the peak of the steps alone; the
                         # exit code is 1 above it
wandb = True             # measure with W&B too
only = ""                # options of train.py to measure instead of the three shapes
worker = ""              # internal: measure train.py in this process, as one of KINDS

PRESET = Path(__file__).resolve().parents[1] / "config/stories15M.py"
STORIES = f"{PRESET} --data=stories:2000 --compile=False --gradient_accumulation_steps=1"
KINDS = ("steps", "all", "wandb")
SHAPES = {"the defaults": "", "stories15M, 8 x 256": f"{STORIES} --batch_size=8",
          "stories15M, 2 x 1024": f"{STORIES} --batch_size=2 --max_seq_len=1024"}


def take_steps(train_step, t):
    """Take the steps of a Training t, without the rest of the training loop."""
    accept_all = SimpleNamespace(refuses=lambda loss, norm: False)  # replaces the spike detector
    update_norms = UpdateNorms(t.model)  # it measures nothing unless `wanted` is set
    for step in range(steps):
        x, y = t.dataset.batch(step)
        train_step(t, step, x, y, accept_all, update_norms)


def work(words):
    """
    Run train.py with the options `words`, as the kind in `worker`. The last line of the output is
    the peak memory in bytes.
    """
    import train
    t, _ = train.main(configure(vars(train), argv=words), steps=0)  # set up and check
    t.dataset.train.max()  # reads all tokens, so that their pages are in memory
    t.dataset.val.max()
    if worker == "steps":
        take_steps(train.train_step, t)
    else:
        train.train(t)
    print(hardware.peak_memory(t.device))


def peak(kind, words, folder):
    """
    Return the peak memory in bytes of train.py. kind: one of KINDS. words: options of train.py.
    folder: parent of the out_dir and of W&B's files.
    """
    words = [*words, f"--max_iters={steps}", "--eval_interval=2", "--log_interval=1",
             "--warmup_iters=1", "--eval_iters=2", f"--out_dir={folder}/{kind}",
             f"--wandb_log={kind == 'wandb'}"]
    command = [sys.executable, __file__, f"--worker={kind}", "--", *words]
    env = os.environ | {"WANDB_MODE": "offline", "WANDB_DIR": folder}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1]
        fail(f"train.py {' '.join(words)}: ended with code {done.returncode}: {reason}")
    return int(done.stdout.split()[-1])


def main():
    worst = 0.0
    print("| peak in MiB | steps alone | all of train.py | |" + " with W&B | |" * wandb)
    print("| --- | ---: | ---: | ---: |" + " ---: | ---: |" * wandb)
    for name, words in ({only: only} if only else SHAPES).items():
        words = words.split() + [f"--vocab_source={vocab_source}"] * ("stories15M.py" in words)
        with tempfile.TemporaryDirectory() as folder:
            kinds = KINDS[:2 + wandb]
            alone, together, *tracked = (peak(kind, words, folder) / 2 ** 20 for kind in kinds)
        cells = [f" {more:.0f} | {more / alone:.2f} |" for more in (together, *tracked)]
        print(f"| {name} | {alone:.0f} |" + "".join(cells), flush=True)
        worst = max(worst, together / alone)
    sys.exit(worst > most)


if __name__ == "__main__":
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    configure(globals(), argv=sys.argv[1:split])
    work(sys.argv[split + 1:]) if worker else main()
