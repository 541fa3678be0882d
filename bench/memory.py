"""
Measure the peak memory of train.py: steps alone; with evaluations, instruments, samples,
checkpoints and exports; and with W&B too.

    python bench/memory.py                                        table of three shapes
    python bench/memory.py --only="--data=my.txt --batch_size=4"  of this command line of train.py

Every figure is of a separate process that runs train.py's main. For the steps alone, everything
else that the loop calls is replaced by functions that do nothing. Each process reads the whole
prepared text once, which is mapped from its file, as a longer run does. On a GPU the figure is the
peak of its tensors, else that of the process: including its code, and the model file at the end,
which W&B's client maps to hash it.
"""
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from configurator import configure, fail
from engine.training import distributed, hardware

vocab_source = "llama2"  # of the stories15M shapes: a vocabulary of 32,000
steps = 6                # of a run; every second has an evaluation and a checkpoint
most = 1.10              # max ratio of the peak without W&B to that of the steps alone, else exit 1
wandb = True             # measure with W&B too
only = ""                # a command line of train.py to measure instead
worker = ""              # internal: run train.py's main as one of KINDS

STORIES = f"{Path(__file__).resolve().parents[1]}/config/stories15M.py --data=stories:2000 --compile=False " \
          "--gradient_accumulation_steps=1"
KINDS = ("steps", "all", "wandb")
SHAPES = {"the defaults": "", "stories15M, 8 x 256": f"{STORIES} --batch_size=8",
          "stories15M, 2 x 1024": f"{STORIES} --batch_size=2 --max_seq_len=1024"}


class Blind:
    """UpdateNorms that measure nothing."""

    def __init__(self, model, watch):
        self.wanted, self.take = False, dict

    def __call__(self, params):
        return distributed.nullcontext()


def work(words):
    """Run train.py's main with its command line; print the peak in bytes as last line."""
    import train
    if worker == "steps":
        train.assess, train.data_rows, train.UpdateNorms = lambda *_: {"loss/val": 0.0}, lambda _: {}, Blind
        train.save = train.conclude = lambda *_: None
    class Read(train.Dataset):
        def __init__(self, *args, **given):
            super().__init__(*args, **given)
            self.train.max(), self.val.max()

    train.Dataset = Read
    train.start(configure(vars(train), argv=words))
    print(hardware.peak_memory(distributed.setup(train.device)))


def peak(kind, words, folder):
    """Return the peak in bytes of train.py with these words, in a new out_dir."""
    words = [*words, f"--max_iters={steps}", "--eval_interval=2", "--log_interval=1", "--warmup_iters=1", "--eval_iters=2",
             f"--out_dir={folder}/{kind}", f"--wandb_log={kind == 'wandb'}"]
    done = subprocess.run([sys.executable, __file__, f"--worker={kind}", "--", *words], capture_output=True, text=True,
                          env=os.environ | {"WANDB_MODE": "offline", "WANDB_DIR": folder})
    if done.returncode:
        fail(f"train.py {' '.join(words)}: ended with code {done.returncode}: {done.stderr.strip().splitlines()[-1]}")
    return int(done.stdout.split()[-1])


def main():
    worst = 0.0
    print("| peak in MiB | steps alone | all of train.py | |" + " with W&B | |" * wandb)
    print("| --- | ---: | ---: | ---: |" + " ---: | ---: |" * wandb)
    for name, words in ({only: only} if only else SHAPES).items():
        words = words.split() + [f"--vocab_source={vocab_source}"] * ("stories15M.py" in words)
        with tempfile.TemporaryDirectory() as folder:
            alone, together, *tracked = (peak(kind, words, folder) / 2 ** 20 for kind in KINDS[:2 + wandb])
        print(f"| {name} | {alone:.0f} |" + "".join(f" {more:.0f} | {more / alone:.2f} |" for more in (together, *tracked)),
              flush=True)
        worst = max(worst, together / alone)
    sys.exit(worst > most)


if __name__ == "__main__":
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    configure(globals(), argv=sys.argv[1:split])
    work(sys.argv[split + 1:]) if worker else main()
