"""
Measure the speed of a training step of ours, llama2.c, nanoGPT and Hugging Face's transformers,
with the same model sizes and tokens.

    python bench/train.py                                    ours, at the shape of stories15M
    python bench/train.py --llama2c=PATH --hf=True --dtype=bfloat16
    python bench/train.py --llama2c=PATH --hf=True --bf32=True
    python bench/train.py config/stories42M.py --batch_size=2 --max_seq_len=512
    python bench/train.py --profile="ours, compiled"         time of each operation in a step
    python bench/train.py --compile=True --variants=True     cost of each variant (on a GPU)
    python bench/train.py --programs="ours, compiled; ours, graphs, compiled"

A step is the forward pass, the backward pass, gradient clipping and the optimizer's update. Each
program runs in its own process, so its peak memory is measured separately. The programs take turns
of a few steps. The reported speed is the median over the turns. Weights and tokens are random.
"""
import contextlib
import functools
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as train.py does; all programs inherit it
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch

from configurator import configure, fail, read_file
from engine import ops
from engine.training import distributed, hardware
from engine.training.costs import flops_per_token

preset = "config/stories15M.py"  # model sizes
batch_size = 8      # sequences per step
max_seq_len = 256   # tokens per sequence
vocab_size = 32000  # tokens in the model's vocabulary
dtype = "float32"   # float32, or bfloat16 by autocast
threads = 2         # CPU threads per program; 0: PyTorch's default
device = "auto"     # auto, cpu, cuda
samples = 5         # measured turns per program
steps = 2           # training steps per turn
together = False    # compile all programs at the same time, before the first measured turn
llama2c = ""        # folder of llama2.c, to measure its model.py too
nanogpt = ""        # folder of nanoGPT, to measure its model.py too, compiled if ours is
hf = False          # also measure transformers' LlamaForCausalLM
muon = False        # also measure ours with Muon
compile = False     # also measure ours with torch.compile
recompute = False   # also measure ours with activation checkpointing
variants = False    # also measure VARIANTS of ours, compiled
bf32 = False        # also measure each program with float32 products of bfloat16 factors (CPUs
                    # with AMX): ours as with train.py's --dtype=bf32, others in all products
programs = ""       # programs to measure beside ours, and no others; separated by semicolons
profile = ""        # list the most expensive operations of this program, and measure nothing else
json_file = ""      # file for the result
worker = ""         # internal: name of the program that this process runs


# ---- programs ------------------------------------------------------------------------------------
# Each build_ function returns (model, optimizer, loss_of, FLOPs per token). loss_of(net, x, y) runs
# the forward pass and returns the loss. FLOPs are 0 for programs other than ours.

def sizes():
    """Return the model's settings: the preset's, with --max_seq_len and --vocab_size."""
    found = read_file(str(Path(__file__).resolve().parents[1] / preset))
    keys = ("dim", "n_layers", "n_heads", "n_kv_heads", "hidden_dim", "multiple_of")
    config = {k: found[k] for k in keys if k in found}
    return config | {"vocab_size": vocab_size, "max_seq_len": max_seq_len}


def second_output(net, x, y):
    """Return the loss of a model whose forward pass returns (logits, loss)."""
    return net(x, y)[1]


def build_ours(torch_device, optimizer="adamw"):
    from model import ModelArgs, Transformer
    from optim import OptimizerConfig, make_optimizer
    if torch_device.type == "cpu":
        hardware.keep_memory()  # as train.py does
    model = Transformer(ModelArgs(**sizes())).to(torch_device)
    opt = make_optimizer(model, OptimizerConfig(optimizer, 5e-4))
    return model, opt, second_output, flops_per_token(model.args)


def build_ours_muon(torch_device):
    return build_ours(torch_device, "muon")


def build_llama2c(torch_device):
    sys.path.insert(0, llama2c)
    sys.modules.pop("model", None)
    from model import ModelArgs, Transformer
    args = {k: v for k, v in sizes().items() if v}
    model = Transformer(ModelArgs(**args)).to(torch_device)
    opt = model.configure_optimizers(0.1, 5e-4, (0.9, 0.95), torch_device.type)

    def loss_of(net, x, y):
        net(x, y)
        return net.last_loss

    return model, opt, loss_of, 0


def build_nanogpt(torch_device):
    args = sizes()
    sys.path.insert(0, nanogpt)
    sys.modules.pop("model", None)
    from model import GPT, GPTConfig
    config = GPTConfig(vocab_size=vocab_size, block_size=max_seq_len, n_layer=args["n_layers"],
                       n_head=args["n_heads"], n_embd=args["dim"], dropout=0.0, bias=False)
    model = GPT(config).to(torch_device)
    opt = model.configure_optimizers(0.1, 5e-4, (0.9, 0.95), torch_device.type)
    return model, opt, second_output, 0


def build_hf(torch_device):
    from transformers import LlamaConfig, LlamaForCausalLM
    from model import ModelArgs
    args = ModelArgs(**sizes())
    config = LlamaConfig(
        vocab_size=args.vocab_size, hidden_size=args.dim, intermediate_size=args.hidden_dim,
        num_hidden_layers=args.n_layers, num_attention_heads=args.n_heads,
        num_key_value_heads=args.n_kv_heads, max_position_embeddings=args.max_seq_len,
        tie_word_embeddings=True, use_cache=False)
    model = LlamaForCausalLM(config).to(torch_device).train()
    opt = torch.optim.AdamW(model.parameters(), lr=5e-4, betas=(0.9, 0.95), weight_decay=0.1)

    def loss_of(net, x, y):
        return net(x, labels=x).loss  # transformers shifts the labels itself

    return model, opt, loss_of, 0


def joined_product(x, *linears):
    """Return the output of each of these bias-free linears for x, computed by one product."""
    weights = [linear.weight.to(x.dtype) for linear in linears]  # autocast would concatenate first
    return torch.nn.functional.linear(x, torch.cat(weights)).split([*map(len, weights)], -1)


def joined_attention(layer, x, rope, cache=None, mask=None):
    """Return Attention.forward without a cache, with queries, keys and values in one product."""
    q, k, v = (z.unflatten(-1, (-1, layer.args.head_dim))
               for z in joined_product(x, layer.wq, layer.wk, layer.wv))
    return layer.wo(ops.attention(ops.rotate(q, rope), ops.rotate(k, rope), v, mask))


def joined_feed_forward(layer, x):
    """Return FeedForward.forward, with w1 and w3 in one product."""
    return layer.w2(ops.swiglu(*joined_product(x, layer.w1, layer.w3)))


def join_products(model):
    """Make the blocks concatenate matrices for a joint product; the parameters stay separate."""
    for block in model.layers:
        attention, feed_forward = block.attention, block.feed_forward
        attention.forward = functools.partial(joined_attention, attention)
        feed_forward.forward = functools.partial(joined_feed_forward, feed_forward)


# Variants of "ours, compiled"; `make` applies them by name.
VARIANTS = {
    "mask": "attention within documents by a mask",
    "packed": "attention within documents by PyTorch's kernel for packed documents",
    "half": "a residual stream in bfloat16",
    "waits": "synchronize before each update, as for spike detection",
}
PROGRAMS = {
    "ours": build_ours,
    "ours, muon": build_ours_muon,
    "ours, compiled": build_ours,
    "ours, recompute": build_ours,
    "ours, graphs, compiled": build_ours,  # CUDA graphs, as --cuda_graphs makes them
    "ours, half, graphs, compiled": build_ours,
    "ours, packed, graphs, compiled": build_ours,
    "ours, joined, compiled": build_ours,  # one product for wq, wk and wv, one for w1 and w3
    "ours, muon, compiled": build_ours_muon,  # compiled, except for Muon's iterations
    "ours, compiled muon, compiled": build_ours_muon,
    "ours, compiled muon, graphs, compiled": build_ours_muon,
    **{f"ours, {variant}, compiled": build_ours for variant in VARIANTS},
    "llama2.c": build_llama2c,
    "nanoGPT": build_nanogpt,
    "nanoGPT, compiled": build_nanogpt,
    "nanoGPT, graphs, compiled": build_nanogpt,
    "transformers": build_hf,
}


BF32 = ", bf32"  # suffix of the names of programs whose matrix products have bfloat16 factors


# ---- in a program's own process ------------------------------------------------------------------

def make(name):
    """
    Return (step, device, FLOPs per token) of a program. step() runs one training step and returns
    its loss, a tensor on the device. FLOPs are 0 for programs other than ours.
    """
    from optim import own_gradients
    torch_device = distributed.setup(device)
    if name.endswith(BF32):
        torch.set_float32_matmul_precision("medium")
        name = name.removesuffix(BF32)
    torch.manual_seed(1)
    with contextlib.redirect_stdout(sys.stderr):  # stdout is reserved for the turns' results
        model, opt, loss_of, flops = PROGRAMS[name](torch_device)
    has_graphs = "graphs" in name
    how = "reduce-overhead" if has_graphs else None  # torch.compile's mode for CUDA graphs
    if "joined" in name:
        join_products(model)
    net = torch.compile(model, mode=how) if name.endswith("compiled") else model
    if "compiled muon" in name:
        opt.compile(mode=how)
    model.recompute = name.endswith("recompute")
    amp = torch.autocast(torch_device.type, torch.bfloat16, enabled=dtype == "bfloat16")
    tokens = torch.randint(2, vocab_size, (batch_size, max_seq_len + 1))
    if "mask" in name or "packed" in name:
        tokens[:, ::200] = model.bos_id = 1  # documents of 200 tokens
    if "packed" in name:
        documents = ops.documents_of(tokens[:, :-1].contiguous(), 1, torch_device, has_graphs)

        def loss_of(net, x, y):
            return net(x, y, documents=documents)[1]

    if "half" in name:
        model.tok_embeddings.register_forward_hook(lambda module, args, x: x.bfloat16())
    x = tokens[:, :-1].contiguous().to(torch_device)
    y = tokens[:, 1:].contiguous().to(torch_device)

    def step():
        with amp:
            loss = loss_of(net, x, y)
        loss.backward()
        if has_graphs:
            own_gradients(model)
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        read = distributed.read_async(torch.stack((loss.detach(), norm)))
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, norm)
        if "waits" in name:
            read()
        opt.step()
        opt.zero_grad()
        return loss.detach()  # detached, so that its graph is freed before the next step

    return step, torch_device, flops


def work(name):
    """
    Run a turn of `steps` steps for each line of stdin. After each, print its seconds, the loss of
    its last step, the peak memory in MiB and the FLOPs per token as a line of JSON.
    """
    step, torch_device, flops = make(name)
    for _ in sys.stdin:
        start = time.perf_counter()
        for _ in range(steps):
            loss = step()
        last = loss.item()  # waits for an asynchronous device
        result = {"seconds": time.perf_counter() - start, "loss": last,
                  "mib": hardware.peak_memory(torch_device) / 2 ** 20, "flops": flops}
        print(json.dumps(result), flush=True)


def show_profile(name):
    """Print the operations that take most of a step's time; on a GPU, its kernels."""
    from torch.profiler import ProfilerActivity, profile
    step, torch_device, _ = make(name)
    on_gpu = torch_device.type == "cuda"

    def time_steps(n):
        start = time.perf_counter()
        for _ in range(n):
            loss = step()
        loss.item()  # waits for an asynchronous device
        return time.perf_counter() - start

    time_steps(3)  # compilation and other one-time work
    seconds = time_steps(steps)
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    with profile(activities=[activity]) as profiler:
        time_steps(steps)
    rows = []
    for event in profiler.key_averages():
        microseconds = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        rows.append((microseconds, event.count, event.key))
    busy = sum(us for us, _, _ in rows) * 1e-6
    print(f"{name}: {seconds / steps * 1e3:.1f} ms a step, {busy / steps * 1e3:.1f} of them in the "
          "operations listed")
    for us, count, key in sorted(rows, reverse=True)[:25]:
        milliseconds, percent = us / steps * 1e-3, 100e-6 * us / busy
        print(f"{milliseconds:>9.2f} ms {percent:>5.1f} % {count / steps:>7.1f} x  {key[:110]}")


# ---- turns of all programs -----------------------------------------------------------------------

def start_turn(process):
    process.stdin.write("go\n")
    process.stdin.flush()


def turn(process, started=False):
    """Return the result of a process's turn; start the turn unless it has been started."""
    if not started:
        start_turn(process)
    line = process.stdout.readline()
    if not line:
        fail(f"a program ended with code {process.wait()}; its message is above")
    return json.loads(line)


def best_product():
    """Return the FLOP/s of a matrix product on this machine, the peak that MFU refers to."""
    return hardware.measured_flops(distributed.setup(device), getattr(torch, dtype), seconds=1)


def chosen_programs():
    """Return the names of the programs that the options ask for."""
    names = ["ours"]
    if programs:
        names += [name.strip() for name in programs.split(";")]
        return names + [name + BF32 for name in names] * bf32
    names += ["ours, muon"] * muon
    names += ["ours, compiled"] * compile
    names += ["ours, recompute"] * recompute
    names += [f"ours, {variant}, compiled" for variant in VARIANTS] * variants
    names += ["llama2.c"] * bool(llama2c)
    names += ["nanoGPT, compiled" if compile else "nanoGPT"] * bool(nanogpt)
    names += ["transformers"] * hf
    return names + [name + BF32 for name in names] * bf32


def start_worker(name):
    """Start a process that runs this program's turns, with the options of this command."""
    command = [sys.executable, __file__, *sys.argv[1:], f"--worker={name}"]
    return subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def main():
    peak = [best_product()]
    processes = {name: start_worker(name) for name in chosen_programs()}
    if together:
        for process in processes.values():
            start_turn(process)
    # The first turn includes warm-up and compilation.
    first = {name: turn(process, started=together) for name, process in processes.items()}
    turns = {name: [] for name in processes}
    for _ in range(samples):
        for name, process in processes.items():
            turns[name].append(turn(process))
    peak.append(best_product())  # again, since other load may have slowed the first
    for process in processes.values():
        process.stdin.close()
        process.wait()
    report(first, turns, max(peak))


def report(first, turns, peak):
    """
    Print a table with a row per program, and write the JSON file if asked. `first` has the result
    of each program's first turn, `turns` those of its measured turns. `peak` is in FLOP/s.
    """
    tokens, rows = batch_size * max_seq_len * steps, []
    flops = turns["ours"][0]["flops"]  # per token; every program's MFU uses ours
    for name, values in turns.items():
        speed = sorted(tokens / v["seconds"] for v in values)
        median = statistics.median(speed)
        rows.append({"program": name, "tokens_per_sec": median, "slowest": speed[0],
                     "fastest": speed[-1], "mib": values[-1]["mib"], "loss": values[-1]["loss"],
                     "mfu": 100 * median * flops / peak, "first_turn_s": first[name]["seconds"]})
    print(f"{preset}, batch {batch_size} x {max_seq_len}, {dtype}, {threads} threads, torch "
          f"{torch.__version__}; a matmul of this machine: {peak / 1e9:.0f} GFLOP/s")
    print(f"{'program':<38}{'tok/s':>8}{'from':>8}{'to':>8}{'ours is':>9}{'MFU %':>7}{'MiB':>7}"
          f"{'loss':>8}{'first turn s':>14}")
    for r in rows:
        ratio = rows[0]["tokens_per_sec"] / r["tokens_per_sec"]
        print(f"{r['program']:<38}{r['tokens_per_sec']:>8.0f}{r['slowest']:>8.0f}"
              f"{r['fastest']:>8.0f}{ratio:>8.2f}x{r['mfu']:>7.1f}{r['mib']:>7.0f}"
              f"{r['loss']:>8.3f}{r['first_turn_s']:>14.1f}")
    if json_file:
        about = {"preset": preset, "batch_size": batch_size, "max_seq_len": max_seq_len,
                 "dtype": dtype, "threads": threads, "torch": torch.__version__,
                 "peak_flops": peak, "programs": rows}
        Path(json_file).write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    # The argument that ends in .py is the preset, at any position.
    argv = [f"--preset={word}" if word.endswith(".py") else word for word in sys.argv[1:]]
    configure(globals(), positional="preset", argv=argv)
    if threads:
        torch.set_num_threads(threads)
    if dtype not in ("float32", "bfloat16"):
        fail(f"--dtype={dtype}: expected float32 or bfloat16")
    for name in chosen_programs() + [profile] * bool(profile):
        if name.removesuffix(BF32) not in PROGRAMS:
            fail(f"there is no program {name!r}; expected some of {'; '.join(PROGRAMS)}")
    if worker:
        work(worker)
    elif profile:
        show_profile(profile)
    else:
        main()
