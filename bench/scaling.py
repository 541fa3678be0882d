"""
Compute memory and communication of one process of many from the model's parameters: the tables of
doc/lab/scaling.md.

    python bench/scaling.py                             shapes 15M to 70B on 8 and 64 processes
    unshare -rn python bench/scaling.py --measure=True  compare with a measurement (Linux)

The measurement counts bytes through the loopback device of a separate network namespace, and the
growth of resident memory, for a small shape.
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

processes = "8,64"          # numbers of processes, a table each
measure = False             # train a small shape with two processes and compare
rank_of = ""                # internal: be a process of --measure: ddp or fsdp, and the optimizer

SHAPES = {  # 15M and 110M: llama2.c's; others: Llama 3's configurations, with context 8192
    "15M": dict(dim=288, n_layers=6, n_heads=6, vocab_size=32000),
    "110M": dict(dim=768, n_layers=12, n_heads=12, vocab_size=32000),
    "1B": dict(dim=2048, n_layers=16, n_heads=32, n_kv_heads=8, hidden_dim=8192, vocab_size=128256),
    "8B": dict(dim=4096, n_layers=32, n_heads=32, n_kv_heads=8, hidden_dim=14336, vocab_size=128256, tied=False),
    "70B": dict(dim=8192, n_layers=80, n_heads=64, n_kv_heads=8, hidden_dim=28672, vocab_size=128256, tied=False),
}
SMALL = dict(dim=512, n_layers=8, n_heads=8, vocab_size=4096, max_seq_len=32)
STEPS, SEQUENCES = 5, 2     # of --measure: few tokens, so that activations are negligible


def count(shape):
    """
    Return the numbers of parameters: of the model, of one block, of matrices for Muon, and of those
    that Muon orthogonalizes at once.
    """
    with torch.device("meta"):
        model = Transformer(ModelArgs(**shape))
    block = sum(p.numel() for p in model.layers[0].parameters())
    shapes = Counter(p.shape for p in model.layers.parameters() if p.dim() == 2)
    at_once = max(min(many * s.numel(), max(s.numel(), Muon.MAX_CHUNK)) for s, many in shapes.items())
    return num_params(model.args), block, sum(many * s.numel() for s, many in shapes.items()), at_once


def predict(shape, world, sharded, optimizer):
    """
    Return {"weights", "gradients", "optimizer", "in passing", "sent"}: bytes of one process, without
    activations. "in passing" are temporary buffers; "sent" is for a step of one micro-batch with ring
    algorithms. Everything is float32, as in train.py.
    """
    n, block, matrices, at_once = count(shape)
    state = 4 * (2 * n if optimizer == "adamw" else 2 * n - matrices)  # AdamW: two moments; Muon: one for matrices
    part, ring = (1 / world if sharded else 1), (world - 1) / world
    root = n - block * ModelArgs(**shape).n_layers
    passing, sent = 0, ring * 4 * 2 * n
    if sharded:  # gathered: root, block and next block; gradients of a block
        passing, sent = 4 * (2 * root + 3 * block), ring * 4 * (3 * n - root)
    if optimizer == "muon":  # about four copies of the matrices being orthogonalized
        passing = max(passing, 4 * 4 * at_once)
        sent += ring * 4 * matrices * sharded  # gathers whole matrices
    return {"weights": 4 * n * part, "gradients": 4 * n * part, "optimizer": state * part, "in passing": passing,
            "sent": sent}


def size(n):
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if n < 1000 or unit == "TB":
            return f"{n:.3g} {unit}" if n < 100 else f"{n:.0f} {unit}"
        n /= 1000


def table(world, optimizer):
    print(f"\n{optimizer}, {world} processes:\n")
    print("| shape | parameters | | weights | gradients | optimizer | in passing | together | sent in a step |")
    print("| --- | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for name, shape in SHAPES.items():
        for sharded in (False, True):
            p = predict(shape, world, sharded, optimizer)
            together = sum(p.values()) - p["sent"]
            cells = [name, f"{count(shape)[0]:,}", "FSDP2" if sharded else "DDP", *map(size, list(p.values())[:4]),
                     size(together), size(p["sent"])]
            print("| " + " | ".join(cells) + " |")


def loopback():
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split()[1])


def resident(what="VmRSS"):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(what + ":"))
    return int(line.split()[1]) * 1024


def one_rank(kind, optimizer):
    """Train a few steps; print the growth of this process's memory and the bytes sent."""
    torch.set_num_threads(1)
    place = distributed.setup("cpu")
    torch.manual_seed(0)
    x = torch.randint(0, SMALL["vocab_size"], (SEQUENCES, SMALL["max_seq_len"]))
    warm = Transformer(ModelArgs(**(SMALL | {"dim": 32})))  # excludes what libraries allocate once
    warm(x, x)[1].backward()
    del warm
    before = resident()
    model = Transformer(ModelArgs(**SMALL)).to(place)
    if kind == "fsdp":
        distributed.shard(model)
    opt = make_optimizer(model, OptimizerConfig(optimizer, 1e-3))
    wrapped, sent = distributed.wrap(model), 0
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
        print(f"held {held} sent {sent / distributed.world}", flush=True)
    distributed.close()


def compare():
    print("| | optimizer | held, predicted | measured | | sent in a step, predicted | measured | |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    for kind in ("ddp", "fsdp"):
        for optimizer in ("adamw", "muon"):
            words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", __file__]
            done = subprocess.run([*words, f"--rank_of={kind} {optimizer}"], capture_output=True, text=True, check=True,
                                  env=os.environ | {"OMP_NUM_THREADS": "1", "MALLOC_TRIM_THRESHOLD_": "0"})
            _, held, _, sent = done.stdout.split()[-4:]
            p = predict(SMALL, 2, kind == "fsdp", optimizer)
            want = p["weights"] + p["gradients"] + p["optimizer"]
            print(f"| {'FSDP2' if kind == 'fsdp' else 'DDP'} | {optimizer} | {size(want)} | {size(float(held))} | "
                  f"{float(held) / want:.2f} | {size(p['sent'])} | {size(float(sent))} | {float(sent) / p['sent']:.2f} |")


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
