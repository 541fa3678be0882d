"""
Predict the memory and the traffic of each process in distributed training, from the model's number
of parameters. Prints the tables of doc/lab/scaling.md.

    python bench/scaling.py                             shapes 15M to 70B on 8 and 64 processes
    unshare -rn python bench/scaling.py --measure=True  compare with a measurement (Linux)

The measurement trains a small shape with two processes. It counts the bytes through the loopback
device in a separate network namespace, and measures the growth of resident memory.
"""
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch

from configurator import configure
from engine.training import distributed
from engine.training.costs import num_params
from model import ModelArgs, Transformer
from optim import Muon, OptimizerConfig, make_optimizer

processes = "8,64"          # numbers of processes, separated by commas; prints tables for each
measure = False             # train a small shape with two processes and compare
rank_of = ""                # internal, set by --measure: "ddp" or "fsdp", then the optimizer

LLAMA3 = dict(n_kv_heads=8, vocab_size=128256)
SHAPES = {  # 15M and 110M are llama2.c's; the others are Llama 3's
    "15M": dict(dim=288, n_layers=6, n_heads=6, vocab_size=32000),
    "110M": dict(dim=768, n_layers=12, n_heads=12, vocab_size=32000),
    "1B": dict(dim=2048, n_layers=16, n_heads=32, hidden_dim=8192, **LLAMA3),
    "8B": dict(dim=4096, n_layers=32, n_heads=32, hidden_dim=14336, tied=False, **LLAMA3),
    "70B": dict(dim=8192, n_layers=80, n_heads=64, hidden_dim=28672, tied=False, **LLAMA3),
}
# The shape, steps and batch size of --measure. Few tokens keep the activations negligible.
SMALL = dict(dim=512, n_layers=8, n_heads=8, vocab_size=4096, max_seq_len=32)
STEPS = 5
SEQUENCES = 2


def count(shape):
    """
    Return four parameter counts: of the model, of one block, of the matrices that Muon updates, and
    of the matrices that Muon orthogonalizes at the same time.
    """
    with torch.device("meta"):
        model = Transformer(ModelArgs(**shape))
    block = sum(p.numel() for p in model.layers[0].parameters())
    shapes = Counter(p.shape for p in model.layers.parameters() if p.dim() == 2)
    matrices = 0
    at_once = 0
    for matrix_shape, n_matrices in shapes.items():
        total = n_matrices * matrix_shape.numel()
        chunk = max(matrix_shape.numel(), Muon.MAX_CHUNK)  # a chunk holds at least one matrix
        matrices += total
        at_once = max(at_once, min(total, chunk))
    return num_params(model.args), block, matrices, at_once


def predict(shape, world, sharded, optimizer):
    """
    Predict the memory and the traffic of one of `world` processes, in bytes.

    Return {"weights", "gradients", "optimizer", "in passing", "sent"}. "in passing" is the size of
    temporary buffers, without activations. "sent" is the traffic of a step of one micro-batch, with
    ring algorithms. All tensors are float32 (4 bytes an element), as in train.py.
    """
    n, block, matrices, at_once = count(shape)
    # AdamW keeps two moments of each parameter. Muon keeps one for its matrices.
    state = 4 * (2 * n if optimizer == "adamw" else 2 * n - matrices)
    part = 1 / world if sharded else 1
    ring = (world - 1) / world
    root = n - block * ModelArgs(**shape).n_layers  # parameters outside the blocks
    if sharded:
        # The buffers hold the gathered weights of the root, of the current block and of the next
        # block, and the gradients of the root and of one block.
        passing = 4 * (2 * root + 3 * block)
        sent = ring * 4 * (3 * n - root)
    else:
        passing = 0
        sent = ring * 4 * 2 * n
    if optimizer == "muon":
        # The iteration needs about four copies of the matrices that it orthogonalizes together.
        passing = max(passing, 4 * 4 * at_once)
        if sharded:
            sent += ring * 4 * matrices  # Muon gathers whole matrices
    return {
        "weights": 4 * n * part,
        "gradients": 4 * n * part,
        "optimizer": state * part,
        "in passing": passing,
        "sent": sent,
    }


def size(n):
    """Return n bytes as text, such as "1.5 MB"."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if n < 1000 or unit == "TB":
            return f"{n:.3g} {unit}" if n < 100 else f"{n:.0f} {unit}"
        n /= 1000


def table(world, optimizer):
    """Print the prediction for each shape on `world` processes, with DDP and with FSDP2."""
    print(f"\n{optimizer}, {world} processes:\n")
    print("| shape | parameters | | weights | gradients | optimizer | in passing | together "
          "| sent in a step |")
    print("| --- | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for name, shape in SHAPES.items():
        for sharded in (False, True):
            predicted = predict(shape, world, sharded, optimizer)
            sent = predicted.pop("sent")
            memory = list(predicted.values())
            cells = [name, f"{count(shape)[0]:,}", "FSDP2" if sharded else "DDP"]
            cells += map(size, [*memory, sum(memory), sent])
            print("| " + " | ".join(cells) + " |")


def loopback():
    """Return the number of bytes that the loopback device has received."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        if line.strip().startswith("lo:"):
            return int(line.split()[1])
    raise RuntimeError("/proc/net/dev has no loopback device")


def resident():
    """Return the resident memory of this process in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no line VmRSS")


def one_rank(kind, optimizer):
    """
    Train a few steps. Print the memory growth of the first process and the traffic of the last step
    per process, in bytes.
    """
    torch.set_num_threads(1)
    device = distributed.setup("cpu")
    torch.manual_seed(0)
    x = torch.randint(0, SMALL["vocab_size"], (SEQUENCES, SMALL["max_seq_len"]))
    # Libraries allocate some memory at their first use. A tiny model excludes it from the growth.
    warm = Transformer(ModelArgs(**(SMALL | {"dim": 32})))
    warm(x, x)[1].backward()
    del warm
    before = resident()
    model = Transformer(ModelArgs(**SMALL)).to(device)
    if kind == "fsdp":
        distributed.shard(model)
    opt = make_optimizer(model, OptimizerConfig(optimizer, 1e-3))
    wrapped = distributed.wrap(model)
    sent = 0
    for step in range(STEPS):
        torch.distributed.barrier()
        start = loopback()
        wrapped(x, x)[1].backward()
        opt.step()
        torch.distributed.barrier()
        sent = loopback() - start
        held = resident() - before
        opt.zero_grad()
    if distributed.master:
        # The loopback device carries the traffic of all processes.
        print(f"held {held} sent {sent / distributed.world}", flush=True)
    distributed.close()


def compare():
    """Train SMALL with two processes. Print a table of predicted and measured sizes."""
    print("| | optimizer | held, predicted | measured | | sent in a step, predicted | measured | |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    # With this threshold, free() returns memory to the system immediately.
    env = os.environ | {"OMP_NUM_THREADS": "1", "MALLOC_TRIM_THRESHOLD_": "0"}
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    for kind in ("ddp", "fsdp"):
        for optimizer in ("adamw", "muon"):
            command = [sys.executable, *launcher, __file__, f"--rank_of={kind} {optimizer}"]
            done = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
            _, held, _, sent = done.stdout.split()[-4:]
            held = float(held)
            sent = float(sent)
            predicted = predict(SMALL, 2, kind == "fsdp", optimizer)
            predicted_held = (predicted["weights"] + predicted["gradients"]
                              + predicted["optimizer"])
            predicted_sent = predicted["sent"]
            cells = ["FSDP2" if kind == "fsdp" else "DDP", optimizer,
                     size(predicted_held), size(held), f"{held / predicted_held:.2f}",
                     size(predicted_sent), size(sent), f"{sent / predicted_sent:.2f}"]
            print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    configure(globals())
    if rank_of:
        one_rank(*rank_of.split())
    elif measure:
        compare()
    else:
        for world in map(int, processes.split(",")):
            for optimizer in ("adamw", "muon"):
                table(world, optimizer)
