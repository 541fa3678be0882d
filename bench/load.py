"""
Measure the peak memory of `export.py FOLDER` for several sizes of a Hugging Face folder: random
bfloat16 weights, saved in shards by transformers, written as GGUF.

    python bench/load.py --shapes=15M,110M,1.1B --dtypes=bf16,q8_0

Needs transformers, and disk space for one folder and file at a time; both are removed.
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

shapes = "15M,42M,110M,1.1B"  # of bench/models.py
dtypes = "bf16,q8_0"          # of the GGUF files
folder = "cache"              # in it a folder is made for the models, and removed at the end
shard = "500MB"               # max size of a file of the folder

MAKE = """
import sys, torch
from transformers import LlamaConfig, LlamaForCausalLM
d, f, n, h, k, v, c, tied = map(int, sys.argv[3:])
config = LlamaConfig(hidden_size=d, intermediate_size=f, num_hidden_layers=n, num_attention_heads=h, num_key_value_heads=k,
                     vocab_size=v, max_position_embeddings=c, tie_word_embeddings=bool(tied), dtype=torch.bfloat16)
torch.set_default_dtype(torch.bfloat16)
LlamaForCausalLM(config).save_pretrained(sys.argv[1], max_shard_size=sys.argv[2])
"""


def make(path, args):
    """Write the folder in another process, so that its memory does not count here."""
    numbers = (args.dim, args.hidden_dim, args.n_layers, args.n_heads, args.n_kv_heads, args.vocab_size, args.max_seq_len, args.tied)
    done = subprocess.run([sys.executable, "-c", MAKE, path, shard, *(str(int(n)) for n in numbers)], capture_output=True, text=True)
    if done.returncode:
        fail(f"transformers could not make {path}: {(done.stderr.splitlines() or [''])[-1]}")
    vocabulary(args.vocab_size).save(path / "tokenizer.model")


def measure(command):
    """
    Return (peak MiB, seconds) of a command. A process between this and the command keeps the peaks of
    earlier commands out.
    """
    code = ("import resource, subprocess, sys; code = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL).returncode; "
            "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss); sys.exit(code)")
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code, *map(str, command)], capture_output=True, text=True)
    if done.returncode:
        fail(done.stderr.strip())
    return int(done.stdout) / 1024, time.perf_counter() - start


def main():
    root = Path(__file__).resolve().parents[1]
    empty, _ = measure([sys.executable, root / "export.py", "--help"])
    print(f"{'shape':<8}{'parameters':>14}{'GGUF':>7}{'largest tensor, MiB':>21}{'peak, MiB':>11}{'seconds':>9}")
    print(f"{'(imports alone)':<50}{empty:>11.0f}")
    for shape in shapes.split(","):
        args = SHAPES[shape] if shape in SHAPES else fail(f"{shape}: no such shape; expected {', '.join(SHAPES)}")
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=f"load_{shape}_") as name:
            path = Path(name)
            make(path, args)
            for dtype in dtypes.split(","):
                peak, seconds = measure([sys.executable, root / "export.py", path, f"--dtype={dtype}"])
                largest = 4 * max(args.vocab_size, args.hidden_dim) * args.dim / 2 ** 20  # as float32
                print(f"{shape:<8}{num_params(args):>14,}{dtype:>7}{largest:>21.0f}{peak:>11.0f}{seconds:>9.1f}", flush=True)


if __name__ == "__main__":
    configure(globals())
    main()
