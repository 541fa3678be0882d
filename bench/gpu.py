"""
Build, check and measure on a GPU; bench/gpu.sh runs this program.

Every step has a time limit and prints its results. If a step fails, the program reports it and runs
the others. It writes the results after every step, as JSON: {step: {name: value}}. The steps run in
order of importance, correctness before speed. The program skips a step that would exceed the time
budget and lists the skipped steps at the end. It exits with 1 if a step failed or was skipped.

    python bench/gpu.py --plan     list the steps and their times, without a GPU
"""
import json
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from statistics import median

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from configurator import configure

results = "cache/bench/gpu.json"  # JSON file for the results
seconds = 520                     # time budget in seconds; skip steps that would exceed it
steps = ""                        # steps to run, separated by commas; empty: all
plan = False                      # only print the steps and their expected seconds
models = "cache/bench"            # folder of the models that bench/models.py writes
nanogpt = ""                      # folder of a nanoGPT checkout to measure too; empty: skip it

# {shape: formats of its files}
FORMATS = {"15M": ["f32", "bf16", "q8_0", "q4_0"], "1.1B": ["bf16", "q8_0", "q4_0"]}
# the same for the step `mixtures`; these formats are decoded op by op
MIXTURES = {"1.1B": ["q4_k_m", "q5_k_m", "q6_k"]}
# options of bench/train.py
TRAINING = ["config/stories110M.py", "--batch_size=16", "--max_seq_len=1024", "--dtype=bfloat16",
            "--compile=True", "--threads=0"]
# longer than a tile of the kernels that evaluate prompts
PROMPT = ("abc once upon a time there was a little model that had to read a prompt of some length, "
          "longer than a tile. ") * 3
START = time.monotonic()  # start time in seconds
found = {}  # results: {step: {name: value}}


def call(*command, limit=120, cwd=ROOT, errors=False):
    """
    Run a command for at most `limit` seconds and return its stdout as bytes; with `errors`, return
    its stderr. Raises RuntimeError if the command takes longer, or with its last lines if it fails.
    """
    words = [str(word) for word in command]
    try:
        done = subprocess.run(words, cwd=cwd, capture_output=True, timeout=limit)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{command[0]} took more than {limit} s") from None
    if done.returncode:
        output = (done.stdout + done.stderr).decode(errors="replace")
        last_lines = " / ".join(output.strip().splitlines()[-6:])
        raise RuntimeError(f"{command[0]}: exit code {done.returncode}: {last_lines}")
    return done.stderr if errors else done.stdout


def path_of(shape, form):
    """Return the path of the GGUF file of a model with this shape and format."""
    return Path(models, shape, f"{form}.gguf")


def start_models(wanted):
    """
    Start one process per model that writes its file, so that `build` compiles meanwhile. Return the
    processes. wanted: names of the steps to run.
    """
    processes = []
    files = [*FORMATS.items()]
    if "mixtures" in wanted:
        files += MIXTURES.items()
    elif "prompts" in wanted:
        files.append(("1.1B", ["q4_k_m"]))
    for shape, forms in files:
        for form in forms:
            command = [sys.executable, "bench/models.py", f"--shapes={shape}",
                       f"--formats={form}", f"--models={models}"]
            processes.append(subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL))
    return processes


# ---- the steps: each returns {name: value}

def machine():
    """Return the names and versions of the GPU, the driver and the software."""
    drivers = call("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").decode()
    release = re.search(r"release ([\d.]+)", call("nvcc", "--version").decode())[1]
    commit = ""
    if Path(".git").exists():
        commit = call("git", "describe", "--always", "--dirty").decode().strip()
    return {"gpu": torch.cuda.get_device_name(), "driver": drivers.split("\n")[0],
            "nvcc": release, "torch": torch.__version__, "commit": commit,
            "date": date.today().isoformat()}


# {name: nvcc's options}: builds of ./runcuda that differ in one feature, to measure its effect
VARIANTS = {"ops": "-DFUSED=0",    # no fused kernel that computes a whole token
            "many": "-DWARPS=11"}  # more warps per block

# the same for the step `decode`: variants of the fused kernel, which compete with the default
DECODE_VARIANTS = {"carried": "-DCARRIED=1",  # barriers that carry their data
                   # several blocks share a head beyond 32 positions instead of 256
                   "split": "-DSPLIT_POSITIONS=32",
                   "both": "-DCARRIED=1 -DSPLIT_POSITIONS=32"}


def build():
    """Compile ./runcuda, its variants and the tests of ops."""
    arch = "".join(map(str, torch.cuda.get_device_capability()))
    nvcc = ["nvcc", "-std=c++17", f"-arch=sm_{arch}", "runtime/cuda/cuda.cu", "-lm", "-lpthread"]
    began = time.monotonic()
    Path("cache/bench/objects").mkdir(parents=True, exist_ok=True)
    call("make", "run")
    objects = []
    for source in [Path("run.c"), *Path("runtime").glob("**/*.c")]:
        objects.append(f"cache/bench/objects/{source.stem}.o")
        call("cc", "-std=c11", "-D_GNU_SOURCE", "-O3", "-DCUDA", "-c", source, "-o", objects[-1])
    commands = []
    for name, flags in (VARIANTS | DECODE_VARIANTS).items():
        commands.append([*nvcc, "-O3", *flags.split(), *objects,
                         "-o", f"cache/bench/runcuda-{name}"])
    commands.append(["make", "-B", "runcuda", f"ARCH={arch}"])
    library = objects[1:]  # all but run.c: cuda_ops has its own main()
    for name, flags in {"cuda_ops": "", "cuda_ops-both": DECODE_VARIANTS["both"]}.items():
        commands.append([*nvcc, "-O2", "-lineinfo", *flags.split(), "tests/cuda_ops.cpp", *library,
                         "-o", f"cache/bench/{name}"])
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda command: call(*command, limit=300), commands))
    return {"seconds": round(time.monotonic() - began, 1)}


def ops():
    """Compare every op with the CPU's on random models, and whole tokens of tiny to wide models."""
    lines = call("cache/bench/cuda_ops", 1, 20).decode().splitlines()
    shapes = call("cache/bench/cuda_ops", 9).decode().splitlines()
    return {"models": len(lines) - 1, "last": lines[-1], "shapes": len(shapes) - 1}


def sanitizers():
    """Run compute-sanitizer's memcheck and racecheck on the ops."""
    names = {"memcheck": "ERROR SUMMARY: 0 errors", "racecheck": "RACECHECK SUMMARY: 0 hazards"}
    out = {}
    for tool, clean in names.items():
        command = ["compute-sanitizer", "--tool", tool, "cache/bench/cuda_ops", 4, 1]
        output = call(*command, limit=100).decode()
        out[tool] = "clean" if clean in output else output.strip().splitlines()[-1]
    return out


def tests():
    """Run the tests that need a GPU."""
    # Fail early if a package that the tests need is missing.
    call(sys.executable, "-c", "import gguf, pytest, transformers", limit=60)
    command = [sys.executable, "-m", "pytest", "-q", "-k", "gpu",
               "tests/test_cuda.py", "tests/test_ops.py"]
    output = call(*command, limit=150).decode()
    return {"pytest": output.strip().splitlines()[-1]}


def logits():
    """
    Compare logits with those of model.py in float32 on the CPU, for every format.

    Both programs read the same file. Return the largest absolute difference of each format,
    relative to the largest absolute logit.
    """
    from engine.training.load import load_model
    torch.set_float32_matmul_precision("highest")
    errors = {}
    for form in FORMATS["15M"]:
        path = path_of("15M", form)
        model, vocabulary = load_model(str(path), "", "cpu")
        ids = vocabulary.encode_prompt(PROMPT)
        with torch.no_grad():
            expected = model(torch.tensor([ids]), every=True)[0][0].numpy()
        ours = np.frombuffer(call("./runcuda", path, "--logits", "-i", PROMPT), np.float32)
        difference = np.abs(ours.reshape(expected.shape) - expected).max()
        errors[form] = float(difference / np.abs(expected).max())
    rounded = {form: float(f"{error:.1e}") for form, error in errors.items()}
    return rounded | {"tokens": len(ids)}


def text():
    """
    Compare the bytes of generated texts with the CPU's.

    Each text has 256 tokens. There is a greedy one per format, and one sampled with a temperature.
    """
    out = {}
    for form in FORMATS["15M"]:
        args = [path_of("15M", form), "-n", 256, "-i", "once upon a time", "-t", 0]
        ours, cpus = (call(program, *args) for program in ("./runcuda", "./run"))
        if ours == cpus:
            out[form] = "identical"
        else:
            shorter = min(len(ours), len(cpus))
            same = next((i for i in range(shorter) if ours[i] != cpus[i]), shorter)
            out[form] = f"the first {same} of {len(cpus)} bytes"
    args = [path_of("15M", "f32"), "-t", 0.8, "-s", 7, "-n", 256]
    ours, cpus = (call(program, *args) for program in ("./runcuda", "./run"))
    out["f32, -t 0.8 -s 7"] = "identical" if ours == cpus else "differs"
    return out


def milliseconds(work):
    """Return the median GPU time of 20 calls of work() in ms, after 3 calls for warm-up."""
    times = []
    for _ in range(23):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return round(median(times[3:]), 4)


def copy_bandwidth():
    """Measure GB/s of a copy inside device memory, counting bytes read and bytes written."""
    x = torch.empty(1 << 31, dtype=torch.uint8, device="cuda")
    y = torch.empty_like(x)
    ms = milliseconds(lambda: y.copy_(x))
    return {"gb_per_s": round(2 * x.numel() / ms / 1e6, 1)}


# Costs of a token in the fused kernel besides reading the weights, in microseconds. They were found
# by sampling on an H200 with 1.1B in bfloat16 (doc/lab/gpu.md) and do not depend on the type of the
# weights.
BARRIER = 2.4    # a grid barrier: 1.2, and 1.2 until the last block arrives
ATTENTION = 4.0  # attention of a layer
LOAD = 0.8       # load of the input of a matrix product
# Predicted, not measured. A barrier with a counter takes five trips between a multiprocessor and
# the L2 cache, one after another: the store of the data, its acknowledgement (the fence), the
# atomic, on average half a round trip until the next poll of the counter, and the counter's way
# back. So one trip takes 1.2 / 5 microseconds. Loading the data then takes two more trips. A
# barrier that carries its data takes three: the store, half a round trip until the next poll, and
# the data's way back.
TRIP = 1.2 / 5


def foretell(n_layers, weight_bytes, gb_per_s, carried=False):
    """
    Predict the time of a token in the fused kernel, as {part: microseconds}. The kernel reads
    `weight_bytes` at `gb_per_s`, and has five barriers and four matrix products per layer.

    carried: assume barriers that carry their data, except the last one, which has a counter.
    """
    meetings, loads = 5 * n_layers, 4 * n_layers + 1
    parts = {"bytes": weight_bytes / gb_per_s / 1e3, "barriers": BARRIER * (meetings + 1),
             "attention": ATTENTION * n_layers, "loads": LOAD * loads}
    if carried:
        parts["barriers"] -= 2 * TRIP * meetings
        parts["loads"] -= 2 * TRIP * (loads - 1)  # the first load reads the embedding
    return parts


def speed(shape, program="./runcuda", formats=None):
    """
    Run --bench with each format.

    Return {format: {name: value}}. share_of_copy is the bandwidth of decoding, relative to that of
    the step `copy`. Unless `formats` is given, token_us is the time of a token in microseconds, and
    foretold_us the time that `foretell` predicts.
    """
    from bench.models import SHAPES
    out = {}
    for form in formats or FORMATS[shape]:
        measured = json.loads(call(program, path_of(shape, form), "--bench", "--json"))
        out[form] = {"decode_tok_s": round(measured["decode_tokens_per_s"]),
                     "prompt_tok_s": round(measured["prompt_tokens_per_s"]),
                     "first_token_ms": round(measured["first_token_ms"]),
                     "gb_per_s": round(measured["decode_gb_per_s"]),
                     "read_gb_per_s": round(measured["bandwidth_gb_per_s"])}
        if formats is None:
            parts = foretell(SHAPES[shape].n_layers, measured["bytes_per_token"],
                             measured["bandwidth_gb_per_s"])
            out[form]["token_us"] = round(1e6 / measured["decode_tokens_per_s"])
            out[form]["foretold_us"] = round(sum(parts.values()))
        if "copy" in found:
            share = measured["decode_gb_per_s"] / found["copy"]["gb_per_s"]
            out[form]["share_of_copy"] = round(share, 3)
    return out


def mixtures():
    """Run --bench with 1.1B in K-quants, which are decoded op by op."""
    return speed("1.1B", formats=MIXTURES["1.1B"])


def batches():
    """
    Run --bench with 1.1B and 1 to 64 texts at once.

    Return tokens/s of all texts together, and relative to one text.
    """
    out = {}
    for form in ("bf16", "q8_0"):
        for n_texts in (1, 2, 4, 16, 64):
            measured = json.loads(call("./runcuda", path_of("1.1B", form), "--bench", "--json",
                                       "-b", n_texts, "-c", 128, "-n", 128))
            rate = measured["decode_tokens_per_s"]
            if n_texts == 1:
                alone = rate
            out[f"{form} {n_texts}"] = {"decode_tok_s": round(rate),
                                        "over one": round(rate / alone, 2)}
    return out


def variants():
    """Run --bench in BF16 with the VARIANTS of ./runcuda."""
    out = {}
    for name in VARIANTS:
        for shape in ("15M", "1.1B"):
            measured = speed(shape, f"cache/bench/runcuda-{name}", ["bf16"])
            out[f"{name} {shape}"] = measured["bf16"]
    return out


# {name: nvcc's options}: how weights reach the tensor cores when a prompt is evaluated
PROMPT_VARIANTS = {"default": "",                 # through registers, one step ahead
                   "stores": "-DSTORES_FIRST=1",  # the same, but no load waits for another load
                   "raw": "-DRAW_STAGES=4"}       # copied without conversion, three steps ahead
PROMPT_TOKENS = [128, 512]
PROMPT_ROUNDS = 2


def build_prompts():
    """Compile PROMPT_VARIANTS of ./runcuda, for each of PROMPT_TOKENS, and of the tests of ops."""
    arch = "".join(map(str, torch.cuda.get_device_capability()))
    folder = Path("cache/bench/prompts")
    folder.mkdir(parents=True, exist_ok=True)
    c_compiler = ["cc", "-std=c11", "-D_GNU_SOURCE", "-O3", "-DCUDA", "-c"]
    nvcc = ["nvcc", "-std=c++17", f"-arch=sm_{arch}", "-O3"]
    library = []
    for source in Path("runtime").glob("**/*.c"):
        library.append(f"{folder}/{source.stem}.o")
        call(*c_compiler, source, "-o", library[-1])
    for n in PROMPT_TOKENS:
        call(*c_compiler, f"-DBENCH_PROMPT={n}", "run.c", "-o", f"{folder}/run{n}.o")
    call(*nvcc, "-c", "tests/cuda_ops.cpp", "-o", f"{folder}/cuda_ops.o")

    def build_variant(name):
        kernels = f"{folder}/{name}.o"
        flags = PROMPT_VARIANTS[name].split()
        call(*nvcc, *flags, "-c", "runtime/cuda/cuda.cu", "-o", kernels, limit=300)
        for program in ("cuda_ops", *(f"run{n}" for n in PROMPT_TOKENS)):
            call(*nvcc, f"{folder}/{program}.o", kernels, *library, "-lm", "-lpthread",
                 "-o", f"{folder}/{program}-{name}")

    with ThreadPoolExecutor() as pool:
        list(pool.map(build_variant, PROMPT_VARIANTS))
    return folder


def prompts():
    """
    Check the ops of the PROMPT_VARIANTS, then time prompts of 128 and 512 tokens in turns.

    Return {"shape form tokens": {variant: tokens/s}}, medians over the rounds. In each round all
    variants run one after another; every second round reverses their order.
    """
    folder = build_prompts()
    for name in PROMPT_VARIANTS:
        call(f"{folder}/cuda_ops-{name}", 1, 3)
    times = {}
    for i in range(PROMPT_ROUNDS):
        names = list(PROMPT_VARIANTS)[::-1 if i % 2 else 1]
        for shape, forms in (("15M", FORMATS["15M"][1:]), ("1.1B", FORMATS["1.1B"] + ["q4_k_m"])):
            for form in forms:
                for n in PROMPT_TOKENS:
                    for name in names:
                        output = call(f"{folder}/run{n}-{name}", path_of(shape, form), "--bench",
                                      "--json", "-n", 8)
                        rate = json.loads(output)["prompt_tokens_per_s"]
                        of_variants = times.setdefault(f"{shape} {form} {n}", {})
                        of_variants.setdefault(name, []).append(rate)
    return {case: {name: round(median(rates)) for name, rates in of_variants.items()}
            for case, of_variants in times.items()}


def decode():
    """
    Compare DECODE_VARIANTS of the fused kernel with ./runcuda at 15M and 1.1B, in turns.

    Return {"shape form": {program: microseconds of a token}}: medians of three turns of all
    programs, then the times that `foretell` predicts without and with barriers that carry their
    data. First, the results of the variant `both` are compared with the CPU's.
    """
    from bench.models import SHAPES
    lines = call("cache/bench/cuda_ops-both", 9).decode().splitlines()
    out = {"shapes": len(lines) - 1}
    programs = {"default": "./runcuda"}
    programs |= {name: f"cache/bench/runcuda-{name}" for name in DECODE_VARIANTS}
    for shape, forms in {"15M": ["f32", "bf16"], "1.1B": FORMATS["1.1B"]}.items():
        for form in forms:
            times = {name: [] for name in programs}
            for _ in range(3):
                for name, program in programs.items():
                    answer = call(program, path_of(shape, form), "--bench", "--json")
                    measured = json.loads(answer)
                    times[name].append(1e6 / measured["decode_tokens_per_s"])
            rows = {name: round(median(of_program)) for name, of_program in times.items()}
            bandwidth = measured["bandwidth_gb_per_s"]
            for name, carried in (("foretold", False), ("predicted carried", True)):
                parts = foretell(SHAPES[shape].n_layers, measured["bytes_per_token"], bandwidth,
                                 carried)
                rows[name] = round(sum(parts.values()))
            out[f"{shape} {form}"] = rows
    return out


def sampling():
    """Measure tokens/s of 15M in BF16 with sampling on the GPU."""
    rate = re.compile(rb"achieved tok/s: ([\d.]+)")
    args = [path_of("15M", "bf16"), "-n", 256, "-s", 1, "-i", "once upon a time"]
    out = {}
    for flags in ("-t 0", "-t 0.8 -p 0.9", "-t 1 -p 1"):
        stderr = call("./runcuda", *args, *flags.split(), errors=True)
        out[flags] = float(rate.search(stderr)[1])
    return out


def random_data():
    """
    Return a prepared folder of random tokens from a vocabulary of 32,000 tokens. Random tokens
    suffice, because the time of a training step does not depend on its tokens.
    """
    from bench.models import vocabulary
    from engine.text import prepare
    folder, tokenizer = Path("cache/bench/random"), vocabulary(32000)
    if (folder / "meta.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(folder / "tokenizer.model")
    for split, count in (("train", 1 << 23), ("val", 1 << 18)):
        tokens = np.random.default_rng(0).integers(3, 32000, count, dtype=np.uint16)
        # documents of 512 tokens
        tokens[::512], tokens[511::512] = tokenizer.bos_id, tokenizer.eos_id
        tokens.tofile(folder / f"{split}.bin")
    meta = {"version": prepare.VERSION, "vocab_size": 32000, "vocab_source": "custom",
            "tokenizer": "tokenizer.model", "tokenizer_sha256": tokenizer.sha256(),
            "dtype": "uint16", "source": "random", "train_tokens": 1 << 23, "val_tokens": 1 << 18,
            "train_documents": 1 << 14, "val_documents": 1 << 9, "train_bytes": 1 << 25,
            "val_bytes": 1 << 20, "fingerprint": prepare.fingerprint(folder)}
    (folder / "meta.json").write_text(json.dumps(meta))
    return folder


def read_log(out_dir):
    """Return the rows of a run's log.jsonl as dicts."""
    return [json.loads(line) for line in Path(out_dir, "log.jsonl").read_text().splitlines()]


def training():
    """Train stories110M in bfloat16, compiled; report medians of the rows after the first."""
    return train("config/stories110M.py", "--gradient_accumulation_steps=8")


def recorded():
    """Train a small model with CUDA graphs and without: speeds, and losses that should agree."""
    options = ["config/stories15M.py", "--batch_size=8", "--gradient_accumulation_steps=2",
               "--optimizer=muon"]
    return {f"cuda_graphs={value}": train(*options, f"--cuda_graphs={value}")
            for value in (False, True)}


def train(*options):
    """Run train.py for 40 steps on random tokens; return medians of the rows after the first."""
    out_dir = "cache/bench/train"
    call(sys.executable, "train.py", *options, f"--data={random_data()}",
         f"--out_dir={out_dir}", "--init_from=scratch", "--checks=none", "--max_iters=40",
         "--warmup_iters=5", "--log_interval=5", "--eval_iters=1", limit=200)
    log = read_log(out_dir)
    timed = [row for row in log if "perf/tokens_per_sec" in row][1:]
    return {"tok_s": round(median(row["perf/tokens_per_sec"] for row in timed)),
            "mfu": round(median(row["mfu"] for row in timed), 1),
            "loss": round(log[-1]["loss/train"], 3)}


def beside():
    """
    Run bench/train.py at the shape of stories110M: ours, VARIANTS, transformers' Llama, nanoGPT.
    """
    return train_in_turns(*TRAINING, "--hf=True", "--variants=True", f"--nanogpt={nanogpt}")


# Optimizations that may speed up a small model: ours without them first, then with them.
SMALL = ["ours, compiled", "ours, graphs, compiled", "ours, packed, compiled",
         "ours, packed, graphs, compiled", "ours, half, compiled", "ours, half, graphs, compiled",
         "ours, joined, compiled", "ours, muon, compiled", "ours, compiled muon, compiled",
         "ours, compiled muon, graphs, compiled"]


def graphs(shape, batch):
    """
    Measure training with CUDA graphs and other optimizations for small models, beside nanoGPT.

    batch: (sequences, tokens per sequence).
    """
    names = SMALL + ["nanoGPT, compiled", "nanoGPT, graphs, compiled"] * bool(nanogpt)
    return train_in_turns(f"config/stories{shape}.py", f"--batch_size={batch[0]}",
                          f"--max_seq_len={batch[1]}", "--dtype=bfloat16", "--threads=0",
                          f"--nanogpt={nanogpt}", f"--programs={'; '.join(names)}")


def train_in_turns(*options):
    """
    Run bench/train.py with these options, 10 steps per turn. Return {program: {name: value}}; "over
    ours" is the speed relative to "ours, compiled".
    """
    file = Path("cache/bench/train.json")
    call(sys.executable, "bench/train.py", *options, "--together=True", "--steps=10",
         f"--json_file={file}", limit=300)
    measured = json.loads(file.read_text())
    rows = {row["program"]: row for row in measured["programs"]}
    ours = rows["ours, compiled"]["tokens_per_sec"]
    out = {"product_tflops": round(measured["peak_flops"] / 1e12)}
    for name, row in rows.items():
        out[name] = {"tok_s": round(row["tokens_per_sec"]), "mfu": round(row["mfu"], 1),
                     "loss": round(row["loss"], 3),
                     "over ours": round(row["tokens_per_sec"] / ours, 3)}
    return out


def profile():
    """Profile a training step and write the whole list of operations to cache/bench."""
    command = [sys.executable, "bench/train.py", *TRAINING, "--profile=ours, compiled", "--steps=5"]
    output = call(*command, limit=150).decode()
    Path("cache/bench/profile.txt").write_text(output)
    first, *operations = output.strip().splitlines()
    out = {"step": first.partition(": ")[2]}
    for i, line in enumerate(operations[:12], 1):
        out[f"{i}."] = line.strip()
    return out


def attention():
    """
    Measure the milliseconds of attention, forward and backward, with each of PyTorch's kernels.

    The shape is that of a training step of stories110M. "as chosen" is PyTorch's own choice.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel
    shape = 16, 12, 1024, 64  # (batch, heads, tokens, head dimension)
    options = {"device": "cuda", "dtype": torch.bfloat16, "requires_grad": True}
    q, k, v = (torch.randn(shape, **options) for _ in range(3))

    def once():
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        y.backward(q.detach())  # the values of the output's gradient do not affect the time

    out = {"as chosen": milliseconds(once)}
    for name in ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION"):
        with sdpa_kernel(getattr(SDPBackend, name)):
            try:
                out[name.lower()] = milliseconds(once)
            except RuntimeError as e:
                out[name.lower()] = str(e).splitlines()[0]
    return out


def resume():
    """
    Train a small model for 40 steps, resume from step 20, and compare the losses exactly.
    """
    whole, again = Path("cache/bench/whole"), Path("cache/bench/again")
    for folder in (whole, again):
        shutil.rmtree(folder, ignore_errors=True)
    args = [sys.executable, "train.py", f"--data={random_data()}", "--max_iters=40",
            "--log_interval=10", "--eval_interval=20", "--eval_iters=2",
            "--always_save_checkpoint=True", "--deterministic=True", "--checks=none"]
    call(*args, f"--out_dir={whole}")
    checkpoint = "checkpoints/step_00000020"
    shutil.copytree(whole / checkpoint, again / checkpoint)
    call(*args, f"--out_dir={again}")
    losses = []
    for folder in (whole, again):
        rows = [row for row in read_log(folder) if "loss/train" in row and row["iter"] > 20]
        losses.append([(row["iter"], row["loss/train"]) for row in rows])
    same = losses[0] == losses[1] and len(losses[0]) > 0
    return {"same_losses": same, "losses": losses}


# (name, function, expected seconds), in order of importance
STEPS = [("machine", machine, 5),
         ("build", build, 100),
         ("ops", ops, 60),
         ("logits", logits, 20),
         ("text", text, 20),
         ("sanitizers", sanitizers, 60),
         ("copy", copy_bandwidth, 5),
         ("speed 15M", lambda: speed("15M"), 20),
         ("speed 1.1B", lambda: speed("1.1B"), 30),
         ("batches", batches, 40),
         ("mixtures", mixtures, 30),
         ("training", training, 120),
         ("resume", resume, 40),
         ("beside", beside, 180),
         ("profile", profile, 50),
         ("decode", decode, 300),
         ("prompts", prompts, 320),
         ("recorded", recorded, 150),
         ("graphs 15M", lambda: graphs("15M", (8, 256)), 180),
         ("graphs 110M", lambda: graphs("110M", (16, 1024)), 220),
         ("variants", variants, 40),
         ("attention", attention, 5),
         ("sampling", sampling, 10),
         ("tests", tests, 60)]

# steps that read the model files of bench/models.py
NEED_MODELS = {"logits", "text", "speed 15M", "speed 1.1B", "batches", "mixtures", "decode",
               "variants", "prompts", "sampling"}


def show_plan():
    """Print the steps with their expected seconds; mark with a + those beyond the time budget."""
    total = 0
    for name, step, expected in STEPS:
        total += expected
        doc = {"speed": speed, "graphs": graphs}.get(name.split()[0], step).__doc__
        summary = doc.strip().split("\n")[0]
        mark = "  " if total <= seconds else "+ "
        print(f"{name:12}{expected:>5} s {total:>5} s {mark}{summary}")
    print(f"all: {total} s; --seconds={seconds:g} leaves the steps with a + for a second run")


def format_value(value):
    """Return a step's results as text, with a line per nested dict and commas in integers."""
    if isinstance(value, dict):
        parts = []
        for name, item in value.items():
            if isinstance(item, dict):
                parts.append(f"\n{'':12}{name}: {format_value(item)}")
            else:
                parts.append(f"{name} {format_value(item)}")
        return "  ".join(parts)
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value)


def main():
    """Run the wanted steps; write the results after each."""
    Path(results).parent.mkdir(parents=True, exist_ok=True)
    wanted = steps.split(",") if steps else [name for name, *_ in STEPS]
    writers = start_models(wanted) if NEED_MODELS.intersection(wanted) else []
    skipped = []
    for name, step, expected in STEPS:
        if name not in wanted:
            continue
        if name in NEED_MODELS:
            for process in writers:
                process.wait()
        began = time.monotonic()
        if began - START + expected > seconds:
            skipped.append(name)
            continue
        try:
            found[name] = step()
        except Exception as e:  # the other steps still run
            found[name] = {"failed": f"{type(e).__name__}: {e}"}
        took = time.monotonic() - began
        print(f"{name:12}{format_value(found[name])}  [{took:.0f} s]", flush=True)
        Path(results).write_text(json.dumps(found, indent=1))
    print(f"all in {time.monotonic() - START:.0f} s; {results}")
    if skipped:
        print(f"no time was left for: --steps='{','.join(skipped)}'")
    sys.exit(bool(skipped) or any("failed" in value for value in found.values()))


if __name__ == "__main__":
    configure(globals())
    show_plan() if plan else main()
