"""
Measure the peak memory and the time of `export.py FOLDER` for Hugging Face models of several sizes.
transformers saves random bfloat16 weights in shards; export.py writes them as GGUF.

    python bench/load.py --shapes=15M,110M,1.1B --dtypes=bf16,q8_0

This needs transformers, and disk space for one model and its GGUF file. Each model is removed
before the next one is made.
"""
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.models import SHAPES, vocabulary
from configurator import configure, fail
from engine.training.costs import num_params

shapes = "15M,42M,110M,1.1B"  # model shapes, from bench/models.py
dtypes = "bf16,q8_0"          # formats of the GGUF files
folder = "cache"              # parent of the temporary folders, one for each model
shard = "500MB"               # max size of a weights file in the Hugging Face folder

MAKE = """
import sys, torch
from transformers import LlamaConfig, LlamaForCausalLM
d, f, n, h, k, v, c, tied = map(int, sys.argv[3:])
config = LlamaConfig(hidden_size=d, intermediate_size=f, num_hidden_layers=n,
                     num_attention_heads=h, num_key_value_heads=k,
                     vocab_size=v, max_position_embeddings=c,
                     tie_word_embeddings=bool(tied), dtype=torch.bfloat16)
torch.set_default_dtype(torch.bfloat16)
LlamaForCausalLM(config).save_pretrained(sys.argv[1], max_shard_size=sys.argv[2])
"""
PEAK = """
import resource, subprocess, sys
code = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL).returncode
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
sys.exit(code)
"""


def make(path, args):
    """
    Write a Hugging Face folder with random weights to `path`. args: the ModelArgs. Another process
    builds the model, so that this process stays small.
    """
    numbers = (args.dim, args.hidden_dim, args.n_layers, args.n_heads, args.n_kv_heads,
               args.vocab_size, args.max_seq_len, args.tied)
    words = [str(int(number)) for number in numbers]
    command = [sys.executable, "-c", MAKE, path, shard, *words]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.splitlines() or [""])[-1]
        fail(f"transformers could not make {path}: {reason}")
    vocabulary(args.vocab_size).save(path / "tokenizer.model")


def measure(command):
    """
    Return (peak MiB, seconds) of a command. ru_maxrss is the max over all children of a process, so
    a new process runs each command: the peaks of earlier commands do not count.
    """
    words = [sys.executable, "-c", PEAK, *map(str, command)]
    start = time.perf_counter()
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        fail(done.stderr.strip())
    return int(done.stdout) / 1024, time.perf_counter() - start  # ru_maxrss is in KiB on Linux


def main():
    root = Path(__file__).resolve().parents[1]
    empty, _ = measure([sys.executable, root / "export.py", "--help"])
    print(f"{'shape':<8}{'parameters':>14}{'GGUF':>7}"
          f"{'largest tensor, MiB':>21}{'peak, MiB':>11}{'seconds':>9}")
    print(f"{'(imports alone)':<50}{empty:>11.0f}")
    for shape in shapes.split(","):
        if shape not in SHAPES:
            fail(f"{shape}: no such shape; expected {', '.join(SHAPES)}")
        args = SHAPES[shape]
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=f"load_{shape}_") as name:
            path = Path(name)
            make(path, args)
            for dtype in dtypes.split(","):
                export = [sys.executable, root / "export.py", path, f"--dtype={dtype}"]
                peak, seconds = measure(export)
                largest = max(args.vocab_size, args.hidden_dim) * args.dim  # elements
                largest_mib = 4 * largest / 2 ** 20  # in float32
                print(f"{shape:<8}{num_params(args):>14,}{dtype:>7}"
                      f"{largest_mib:>21.0f}{peak:>11.0f}{seconds:>9.1f}", flush=True)


if __name__ == "__main__":
    configure(globals())
    main()
