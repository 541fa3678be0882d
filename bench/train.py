"""
Measure the speed of a training step, ours beside llama2.c's, nanoGPT's and Hugging Face's, with the
same sizes and tokens.

    python bench/train.py                                    ours, at the shape of stories15M
    python bench/train.py --llama2c=PATH --hf=True --dtype=bfloat16
    python bench/train.py config/stories42M.py --batch_size=2 --max_seq_len=512
    python bench/train.py --profile="ours, compiled"         where the time of its step is spent
    python bench/train.py --compile=True --variants=True     cost of masks and others (on a GPU)

A step is forward, backward, clipping and the optimizer. Every program runs in its own process, so
that its peak memory is its own. The programs take turns of a few steps; the median of the turns
counts. Weights and tokens are random.
"""
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as train.py does; for all programs alike
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch

from configurator import configure, fail, read_file
from engine import ops
from engine.training import distributed, hardware
from engine.training.costs import flops_per_token

preset = "config/stories15M.py"  # sizes of the model
batch_size = 8      # sequences of a step
max_seq_len = 256   # tokens of a sequence
vocab_size = 32000  # of the model
dtype = "float32"   # float32, or bfloat16 by autocast
threads = 2         # of a program; 0: PyTorch's default
device = "auto"     # auto, cpu, cuda
samples = 5         # measured turns of each program
steps = 2           # steps of a turn
together = False    # compile all programs at the same time, before the first measured turn
llama2c = ""        # folder of llama2.c, to measure its model.py too
nanogpt = ""        # folder of nanoGPT, to measure its model.py too, compiled if ours is
hf = False          # also measure transformers' LlamaForCausalLM
muon = False        # also measure ours with Muon
compile = False     # also measure ours with torch.compile
recompute = False   # also measure ours with activation checkpointing
variants = False    # also measure VARIANTS of ours, compiled
profile = ""        # instead list the most expensive operations of this program
json_file = ""      # file for the result
worker = ""         # internal: be this program


def sizes():
    """Return the model's settings: the preset's, with this context and vocabulary."""
    found = read_file(str(Path(__file__).resolve().parents[1] / preset))
    keys = ("dim", "n_layers", "n_heads", "n_kv_heads", "hidden_dim", "multiple_of")
    return {k: found[k] for k in keys if k in found} | {"vocab_size": vocab_size, "max_seq_len": max_seq_len}


def build_ours(place, kind):
    from model import ModelArgs, Transformer
    from optim import OptimizerConfig, make_optimizer
    if place.type == "cpu":
        hardware.keep_memory()  # as train.py does
    model = Transformer(ModelArgs(**sizes())).to(place)
    opt = make_optimizer(model, OptimizerConfig(kind, 5e-4))
    return model, opt, lambda net, x, y: net(x, y)[1], flops_per_token(model.args)


def build_llama2c(place):
    sys.path.insert(0, llama2c)
    sys.modules.pop("model", None)
    from model import ModelArgs, Transformer
    args = {k: v for k, v in sizes().items() if v}
    model = Transformer(ModelArgs(**args)).to(place)
    opt = model.configure_optimizers(0.1, 5e-4, (0.9, 0.95), place.type)

    def loss_of(net, x, y):
        net(x, y)
        return net.last_loss

    return model, opt, loss_of, 0


def build_nanogpt(place):
    a = sizes()
    sys.path.insert(0, nanogpt)
    sys.modules.pop("model", None)
    from model import GPT, GPTConfig
    model = GPT(GPTConfig(vocab_size=vocab_size, block_size=max_seq_len, n_layer=a["n_layers"], n_head=a["n_heads"],
                          n_embd=a["dim"], dropout=0.0, bias=False)).to(place)
    opt = model.configure_optimizers(0.1, 5e-4, (0.9, 0.95), place.type)
    return model, opt, lambda net, x, y: net(x, y)[1], 0


def build_hf(place):
    from transformers import LlamaConfig, LlamaForCausalLM
    from model import ModelArgs
    a = ModelArgs(**sizes())
    config = LlamaConfig(vocab_size=a.vocab_size, hidden_size=a.dim, intermediate_size=a.hidden_dim,
                         num_hidden_layers=a.n_layers, num_attention_heads=a.n_heads, num_key_value_heads=a.n_kv_heads,
                         max_position_embeddings=a.max_seq_len, tie_word_embeddings=True, use_cache=False)
    model = LlamaForCausalLM(config).to(place).train()
    opt = torch.optim.AdamW(model.parameters(), lr=5e-4, betas=(0.9, 0.95), weight_decay=0.1)
    return model, opt, lambda net, x, y: net(x, labels=x).loss, 0  # it shifts the labels itself


# of ours, compiled; `make` has the differences
VARIANTS = {"mask": "attention within documents by a mask", "packed": "the same by PyTorch's kernel for packed documents",
            "half": "a residual stream in bfloat16", "waits": "synchronize before each update, as for spike detection"}
PROGRAMS = {
    "ours": lambda place: build_ours(place, "adamw"), "ours, muon": lambda place: build_ours(place, "muon"),
    "ours, compiled": lambda place: build_ours(place, "adamw"), "ours, recompute": lambda place: build_ours(place, "adamw"),
    **{f"ours, {kind}, compiled": lambda place: build_ours(place, "adamw") for kind in VARIANTS}, "llama2.c": build_llama2c, "nanoGPT": build_nanogpt, "nanoGPT, compiled": build_nanogpt, "transformers": build_hf,
}


def make(name):
    """
    Return the program: step() -> its loss, the device, and the FLOPs of a token (0 if not counted).
    """
    place = distributed.setup(device)
    torch.manual_seed(1)
    with contextlib.redirect_stdout(sys.stderr):  # stdout is for results of turns
        model, opt, loss_of, flops = PROGRAMS[name](place)
    net = torch.compile(model) if name.endswith("compiled") else model
    model.recompute = name.endswith("recompute")
    amp = torch.autocast(place.type, torch.bfloat16, enabled=dtype == "bfloat16")
    tokens = torch.randint(2, vocab_size, (batch_size, max_seq_len + 1))
    if "mask" in name or "packed" in name:
        tokens[:, ::200] = model.bos_id = 1
    if "packed" in name:
        known = ops.documents_of(tokens[:, :-1].contiguous(), 1, place)
        loss_of = lambda net, x, y: net(x, y, documents=known)[1]
    if "half" in name:
        model.tok_embeddings.register_forward_hook(lambda module, args, x: x.bfloat16())
    x, y = tokens[:, :-1].contiguous().to(place), tokens[:, 1:].contiguous().to(place)

    def step():
        with amp:
            loss = loss_of(net, x, y)
        loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        read = distributed.read_async(torch.stack((loss.detach(), norm)))
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, norm)
        if "waits" in name:
            read()
        opt.step()
        opt.zero_grad()
        return loss.detach()  # detached, so that its graph is freed before the next step

    return step, place, flops


def work(name):
    """
    Run a turn of `steps` steps for each line of stdin; print a line with seconds, last loss and peak
    memory.
    """
    step, place, flops = make(name)
    for _ in sys.stdin:
        start = time.perf_counter()
        for _ in range(steps):
            loss = step()
        last = loss.item()  # waits for an asynchronous device
        print(json.dumps({"seconds": time.perf_counter() - start, "loss": last, "mib": hardware.peak_memory(place) / 2 ** 20,
                          "flops": flops}), flush=True)


def show_profile(name):
    """Print the operations that take most of a step's time: on a GPU its kernels."""
    from torch.profiler import ProfilerActivity, profile
    step, place, _ = make(name)
    on_gpu = place.type == "cuda"

    def several(n):
        start = time.perf_counter()
        for _ in range(n):
            loss = step()
        loss.item()  # waits for an asynchronous device
        return time.perf_counter() - start

    several(3)  # compilation and other one-time work
    seconds = several(steps)
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as watched:
        several(steps)
    rows = [(e.self_device_time_total if on_gpu else e.self_cpu_time_total, e.count, e.key) for e in watched.key_averages()]
    busy = sum(us for us, _, _ in rows) * 1e-6
    print(f"{name}: {seconds / steps * 1e3:.1f} ms a step, {busy / steps * 1e3:.1f} of them in the operations listed")
    for us, count, key in sorted(rows, reverse=True)[:25]:
        print(f"{us / steps * 1e-3:>9.2f} ms {100e-6 * us / busy:>5.1f} % {count / steps:>7.1f} x  {key[:110]}")


def start_turn(process):
    process.stdin.write("go\n")
    process.stdin.flush()


def turn(process, started=False):
    """Return what `process` prints about its turn."""
    if not started:
        start_turn(process)
    line = process.stdout.readline()
    if not line:
        fail(f"a program ended with code {process.wait()}; its message is above")
    return json.loads(line)


def best_product():
    """Return FLOP/s of this machine's matrix product, the reference of MFU."""
    return hardware.measured_flops(distributed.setup(device), getattr(torch, dtype), seconds=1)


def main():
    peak = [best_product()]
    chosen = ["ours"] + ["ours, muon"] * muon + ["ours, compiled"] * compile + ["ours, recompute"] * recompute
    chosen += [f"ours, {kind}, compiled" for kind in VARIANTS] * variants
    chosen += ["llama2.c"] * bool(llama2c) + ["nanoGPT, compiled" if compile else "nanoGPT"] * bool(nanogpt)
    chosen += ["transformers"] * hf
    processes = {name: subprocess.Popen([sys.executable, __file__, *sys.argv[1:], f"--worker={name}"], text=True,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE) for name in chosen}
    if together:
        [start_turn(process) for process in processes.values()]
    # The first turn is for warm-up and compilation.
    first = {name: turn(process, started=together) for name, process in processes.items()}
    turns = {name: [] for name in chosen}
    for _ in range(samples):
        for name, process in processes.items():
            turns[name].append(turn(process))
    peak.append(best_product())  # again, in case other load slowed the first
    for process in processes.values():
        process.stdin.close()
        process.wait()
    report(first, turns, max(peak))


def report(first, turns, peak):
    tokens, rows = batch_size * max_seq_len * steps, []
    for name, values in turns.items():
        speed = sorted(tokens / v["seconds"] for v in values)
        rows.append({"program": name, "tokens_per_sec": statistics.median(speed), "slowest": speed[0],
                     "fastest": speed[-1], "mib": values[-1]["mib"], "loss": values[-1]["loss"],
                     "mfu": 100 * statistics.median(speed) * turns["ours"][0]["flops"] / peak,
                     "first_turn_s": first[name]["seconds"]})
    print(f"{preset}, batch {batch_size} x {max_seq_len}, {dtype}, {threads} threads, torch {torch.__version__}; "
          f"a matmul of this machine: {peak / 1e9:.0f} GFLOP/s")
    print(f"{'program':<18}{'tok/s':>8}{'from':>8}{'to':>8}{'ours is':>9}{'MFU %':>7}{'MiB':>7}{'loss':>8}{'first turn s':>14}")
    for r in rows:
        print(f"{r['program']:<18}{r['tokens_per_sec']:>8.0f}{r['slowest']:>8.0f}{r['fastest']:>8.0f}"
              f"{rows[0]['tokens_per_sec'] / r['tokens_per_sec']:>8.2f}x{r['mfu']:>7.1f}{r['mib']:>7.0f}{r['loss']:>8.3f}"
              f"{r['first_turn_s']:>14.1f}")
    if json_file:
        about = {"preset": preset, "batch_size": batch_size, "max_seq_len": max_seq_len, "dtype": dtype,
                 "threads": threads, "torch": torch.__version__, "peak_flops": peak, "programs": rows}
        Path(json_file).write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    configure(globals(), positional="preset", argv=[f"--preset={w}" if w.endswith(".py") else w for w in sys.argv[1:]])
    if threads:
        torch.set_num_threads(threads)
    if dtype not in ("float32", "bfloat16"):
        fail(f"--dtype={dtype}: expected float32 or bfloat16")
    if profile and profile not in PROGRAMS:
        fail(f"--profile={profile}: expected one of {'; '.join(PROGRAMS)}")
    work(worker) if worker else show_profile(profile) if profile else main()
