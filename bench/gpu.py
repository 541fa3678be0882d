"""
Build, check and measure on a GPU; bench/gpu.sh runs this program.

Every step has a time limit and prints one line; a step that fails is reported and the others run.
The results are JSON, {step: {name: value}}, written after every step. Steps are in order of
importance: correctness before speed. Steps for which no time is left are listed at the end, and the
exit code is 1.

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

results = "cache/bench/gpu.json"  # file of the results
seconds = 520                     # time budget: skip steps that would end later
steps = ""                        # steps to run, separated by commas; empty: all
plan = False                      # only print the steps and their expected seconds
models = "cache/bench"            # the folder of bench/models.py
nanogpt = ""                      # a checkout of nanoGPT to measure beside ours

FORMATS = {"15M": ["f32", "bf16", "q8_0", "q4_0"], "1.1B": ["bf16", "q8_0", "q4_0"]}
TRAINING = ["config/stories110M.py", "--batch_size=16", "--max_seq_len=1024", "--dtype=bfloat16", "--compile=True", "--threads=0"]
PROMPT = "abc once upon a time there was a little model that had to read a prompt of some length, longer than a tile. " * 3
START = time.monotonic()
found = {}


def call(*command, limit=120, cwd=ROOT, errors=False):
    """
    Return stdout of a command, or stderr. Raises RuntimeError with its last lines if it fails.
    """
    try:
        done = subprocess.run([str(word) for word in command], cwd=cwd, capture_output=True, timeout=limit)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{command[0]} took more than {limit} s") from None
    if done.returncode:
        said = (done.stdout + done.stderr).decode(errors="replace").strip().splitlines()[-6:]
        raise RuntimeError(f"{command[0]}: exit code {done.returncode}: " + " / ".join(said))
    return done.stderr if errors else done.stdout


def path_of(shape, form):
    return Path(models, shape, f"{form}.gguf")


def start_models():
    """Start the processes that write the models while the programs are compiled."""
    return [subprocess.Popen([sys.executable, "bench/models.py", f"--shapes={shape}", f"--formats={form}",
                              f"--models={models}"], cwd=ROOT, stdout=subprocess.DEVNULL)
            for shape, forms in FORMATS.items() for form in forms]


# ---- the steps: each returns {name: value}

def machine():
    """GPU, driver and versions."""
    driver = call("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").decode().split("\n")[0]
    release = re.search(r"release ([\d.]+)", call("nvcc", "--version").decode())[1]
    return {"gpu": torch.cuda.get_device_name(), "driver": driver, "nvcc": release, "torch": torch.__version__,
            "commit": call("git", "describe", "--always", "--dirty").decode().strip() if Path(".git").exists() else "",
            "date": date.today().isoformat()}


# builds of ./runcuda that show what a feature is worth
VARIANTS = {"ops": "-DFUSED=0",                 # without the fused kernel of a whole token
            "many": "-DWARPS=11"}               # with more warps


def build():
    """Compile ./runcuda, its variants and the tests of ops."""
    arch = "".join(map(str, torch.cuda.get_device_capability()))
    nvcc = ["nvcc", "-std=c++17", f"-arch=sm_{arch}", "runtime/cuda/cuda.cu", "-lm", "-lpthread"]
    began = time.monotonic()
    Path("cache/bench/objects").mkdir(parents=True, exist_ok=True)
    call("make", "run")
    sources = [Path("run.c"), *Path("runtime").glob("**/*.c")]
    for source in sources:
        call("cc", "-std=c11", "-D_GNU_SOURCE", "-O3", "-DCUDA", "-c", source, "-o", f"cache/bench/objects/{source.stem}.o")
    objects = [f"cache/bench/objects/{source.stem}.o" for source in sources]
    commands = [[*nvcc, "-O3", *flags.split(), *objects, "-o", f"cache/bench/runcuda-{name}"] for name, flags in VARIANTS.items()]
    commands += [["make", "-B", "runcuda", f"ARCH={arch}"],
                 [*nvcc, "-O2", "-lineinfo", "tests/cuda_ops.cpp", *objects[1:], "-o", "cache/bench/cuda_ops"]]
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda command: call(*command), commands))
    return {"seconds": round(time.monotonic() - began, 1)}


def ops():
    """Compare every op with the CPU's on random shapes, and whole tokens of tiny to wide shapes."""
    lines = call("cache/bench/cuda_ops", 1, 20).decode().splitlines()
    shapes = call("cache/bench/cuda_ops", 5).decode().splitlines()
    return {"models": len(lines) - 1, "last": lines[-1], "shapes": len(shapes) - 1}


def sanitizers():
    """Run compute-sanitizer's memcheck and racecheck on the ops."""
    names = {"memcheck": "ERROR SUMMARY: 0 errors", "racecheck": "RACECHECK SUMMARY: 0 hazards"}
    out = {}
    for tool, clean in names.items():
        said = call("compute-sanitizer", "--tool", tool, "cache/bench/cuda_ops", 4, 1, limit=100).decode()
        out[tool] = "clean" if clean in said else said.strip().splitlines()[-1]
    return out


def tests():
    """Run the tests that need a GPU."""
    call(sys.executable, "-c", "import gguf, pytest, transformers", limit=60)
    said = call(sys.executable, "-m", "pytest", "-q", "-k", "gpu", "tests/test_cuda.py", "tests/test_ops.py", limit=150).decode()
    return {"pytest": said.strip().splitlines()[-1]}


def logits():
    """
    Largest difference of logits from model.py in float32 on the CPU, relative to the largest logit.

    Both programs read the same file.
    """
    from engine.training.load import load_model
    torch.set_float32_matmul_precision("highest")
    out = {}
    for form in FORMATS["15M"]:
        model, vocabulary = load_model(str(path_of("15M", form)), "", "cpu")
        ids = vocabulary.encode_prompt(PROMPT)
        with torch.no_grad():
            expected = model(torch.tensor([ids]), every=True)[0][0].numpy()
        ours = np.frombuffer(call("./runcuda", path_of("15M", form), "--logits", "-i", PROMPT), np.float32)
        out[form] = float(np.abs(ours.reshape(expected.shape) - expected).max() / np.abs(expected).max())
    return {form: float(f"{error:.1e}") for form, error in out.items()} | {"tokens": len(ids)}


def text():
    """
    Compare greedy texts of 256 tokens, and one with a temperature, with the CPU's, byte by byte.
    """
    out = {}
    for form in FORMATS["15M"]:
        args = [path_of("15M", form), "-n", 256, "-i", "once upon a time"]
        ours, cpus = (call(program, *args, "-t", 0) for program in ("./runcuda", "./run"))
        same = next((i for i, (a, b) in enumerate(zip(ours, cpus)) if a != b), min(len(ours), len(cpus)))
        out[form] = "identical" if ours == cpus else f"the first {same} of {len(cpus)} bytes"
    ours, cpus = (call(program, path_of("15M", "f32"), "-t", 0.8, "-s", 7, "-n", 256) for program in ("./runcuda", "./run"))
    return out | {"f32, -t 0.8 -s 7": "identical" if ours == cpus else "differs"}


def milliseconds(work):
    """Return the median of 20 GPU times, after 3 for warm-up."""
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
    """Measure GB/s of a copy inside device memory: bytes read plus bytes written."""
    x = torch.empty(1 << 31, dtype=torch.uint8, device="cuda")
    y = torch.empty_like(x)
    return {"gb_per_s": round(2 * x.numel() / milliseconds(lambda: y.copy_(x)) / 1e6, 1)}


def speed(shape, program="./runcuda", formats=None):
    """Run --bench with each format; the share is relative to the bandwidth of the copy."""
    out = {}
    for form in formats or FORMATS[shape]:
        b = json.loads(call(program, path_of(shape, form), "--bench", "--json"))
        out[form] = {"decode_tok_s": round(b["decode_tokens_per_s"]), "prompt_tok_s": round(b["prompt_tokens_per_s"]),
                     "first_token_ms": round(b["first_token_ms"]), "gb_per_s": round(b["decode_gb_per_s"]),
                     "read_gb_per_s": round(b["bandwidth_gb_per_s"])}
        if "copy" in found:
            out[form]["share_of_copy"] = round(b["decode_gb_per_s"] / found["copy"]["gb_per_s"], 3)
    return out


def variants():
    """Run --bench in BF16 with the VARIANTS of ./runcuda."""
    return {f"{name} {shape}": speed(shape, f"cache/bench/runcuda-{name}", ["bf16"])["bf16"]
            for name in VARIANTS for shape in ("15M", "1.1B")}


def sampling():
    """Measure tokens/s of 15M in BF16 with sampling on the GPU."""
    rate = re.compile(rb"achieved tok/s: ([\d.]+)")
    args = [path_of("15M", "bf16"), "-n", 256, "-s", 1, "-i", "once upon a time"]
    return {flags: float(rate.search(call("./runcuda", *args, *flags.split(), errors=True))[1])
            for flags in ("-t 0", "-t 0.8 -p 0.9", "-t 1 -p 1")}


def random_data():
    """
    Return a prepared folder of random tokens from a vocabulary of 32,000: the cost of a step does not
    depend on its tokens.
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
        tokens[::512], tokens[511::512] = tokenizer.bos_id, tokenizer.eos_id
        tokens.tofile(folder / f"{split}.bin")
    meta = {"version": prepare.VERSION, "vocab_size": 32000, "vocab_source": "custom", "tokenizer": "tokenizer.model",
            "tokenizer_sha256": tokenizer.sha256(), "dtype": "uint16", "source": "random", "train_tokens": 1 << 23,
            "val_tokens": 1 << 18, "train_documents": 1 << 14, "val_documents": 1 << 9, "train_bytes": 1 << 25,
            "val_bytes": 1 << 20, "fingerprint": prepare.fingerprint(folder)}
    (folder / "meta.json").write_text(json.dumps(meta))
    return folder


def rows(out_dir):
    return [json.loads(line) for line in Path(out_dir, "log.jsonl").read_text().splitlines()]


def training():
    """Train stories110M in bfloat16, compiled; report medians of the rows after the first."""
    out_dir = "cache/bench/train110M"
    call(sys.executable, "train.py", "config/stories110M.py", f"--data={random_data()}", f"--out_dir={out_dir}",
         "--init_from=scratch", "--checks=none", "--max_iters=40", "--warmup_iters=5", "--log_interval=5", "--eval_iters=1",
         "--gradient_accumulation_steps=8", limit=200)
    speeds = [r for r in rows(out_dir) if "perf/tokens_per_sec" in r][1:]
    return {"tok_s": round(median(r["perf/tokens_per_sec"] for r in speeds)),
            "mfu": round(median(r["mfu"] for r in speeds), 1), "loss": round(rows(out_dir)[-1]["loss/train"], 3)}


def beside():
    """
    Run bench/train.py at the shape of stories110M: ours, VARIANTS, transformers' Llama, nanoGPT.

    Speeds are also given relative to ours, compiled.
    """
    file = Path("cache/bench/train.json")
    call(sys.executable, "bench/train.py", *TRAINING, "--hf=True", "--variants=True", "--together=True", "--steps=10",
         f"--nanogpt={nanogpt}", f"--json_file={file}", limit=300)
    measured = json.loads(file.read_text())
    rows = {row["program"]: row for row in measured["programs"]}
    ours = rows["ours, compiled"]["tokens_per_sec"]
    return {"product_tflops": round(measured["peak_flops"] / 1e12)} | {
        name: {"tok_s": round(row["tokens_per_sec"]), "mfu": round(row["mfu"], 1), "loss": round(row["loss"], 3),
               "over ours": round(row["tokens_per_sec"] / ours, 3)} for name, row in rows.items()}


def profile():
    """Profile a training step; the whole list is written to cache/bench."""
    said = call(sys.executable, "bench/train.py", *TRAINING, "--profile=ours, compiled", "--steps=5", limit=150).decode()
    Path("cache/bench/profile.txt").write_text(said)
    lines = said.strip().splitlines()
    return {"step": lines[0].partition(": ")[2]} | {f"{i}.": line.strip() for i, line in enumerate(lines[1:13], 1)}


def attention():
    """
    Milliseconds of attention, forward and backward, by each of PyTorch's kernels.

    The shape is that of a step of stories110M.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel
    q, k, v = (torch.randn(16, 12, 1024, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))

    def once():
        torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).backward(q.detach())

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
    Train 40 steps of a small model; repeat the last 20 from the checkpoint; compare the losses
    exactly.
    """
    whole, again = Path("cache/bench/whole"), Path("cache/bench/again")
    for folder in (whole, again):
        shutil.rmtree(folder, ignore_errors=True)
    args = [sys.executable, "train.py", f"--data={random_data()}", "--max_iters=40", "--log_interval=10",
            "--eval_interval=20", "--eval_iters=2", "--always_save_checkpoint=True", "--deterministic=True", "--checks=none"]
    call(*args, f"--out_dir={whole}")
    shutil.copytree(whole / "checkpoints/step_00000020", again / "checkpoints/step_00000020")
    call(*args, f"--out_dir={again}")
    losses = [[(r["iter"], r["loss/train"]) for r in rows(folder) if "loss/train" in r and r["iter"] > 20]
              for folder in (whole, again)]
    return {"same_losses": losses[0] == losses[1] and len(losses[0]) > 0, "losses": losses}


# (name, function, expected seconds), most important first
STEPS = [("machine", machine, 5), ("build", build, 60), ("ops", ops, 30), ("logits", logits, 20), ("text", text, 20),
         ("sanitizers", sanitizers, 60), ("copy", copy_bandwidth, 5), ("speed 15M", lambda: speed("15M"), 20),
         ("speed 1.1B", lambda: speed("1.1B"), 30), ("training", training, 120), ("resume", resume, 40),
         ("beside", beside, 150), ("profile", profile, 50), ("variants", variants, 40), ("attention", attention, 5),
         ("sampling", sampling, 10), ("tests", tests, 60)]


NEED_MODELS = {"logits", "text", "speed 15M", "speed 1.1B", "variants", "sampling"}


def show_plan():
    """Print the steps, and which of them fit into `seconds`."""
    total = 0
    for name, step, expected in STEPS:
        total += expected
        about = (step.__doc__ or speed.__doc__ if name.startswith("speed") else step.__doc__ or "").strip().split("\n")[0]
        print(f"{name:12}{expected:>5} s {total:>5} s {'  ' if total <= seconds else '+ '}{about}")
    print(f"all: {total} s; those with a + are left for a second run when --seconds={seconds:g} are allowed")


def short(value):
    if isinstance(value, dict):
        return "  ".join(f"{k} {short(v)}" if not isinstance(v, dict) else f"\n{'':12}{k}: {short(v)}"
                         for k, v in value.items())
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def main():
    Path(results).parent.mkdir(parents=True, exist_ok=True)
    wanted, left = steps.split(",") if steps else [name for name, *_ in STEPS], []
    making = start_models() if NEED_MODELS.intersection(wanted) else []
    for name, step, expected in STEPS:
        if name not in wanted:
            continue
        if name == "logits":
            [process.wait() for process in making]
        began = time.monotonic()
        if began - START + expected > seconds:
            left.append(name)
            continue
        try:
            found[name] = step()
        except Exception as e:  # the other steps still run
            found[name] = {"failed": f"{type(e).__name__}: {e}"}
        print(f"{name:12}{short(found[name])}  [{time.monotonic() - began:.0f} s]", flush=True)
        Path(results).write_text(json.dumps(found, indent=1))
    print(f"all in {time.monotonic() - START:.0f} s; {results}")
    if left:
        print(f"no time was left for: --steps='{','.join(left)}'")
    sys.exit(bool(left) or any("failed" in value for value in found.values()))


if __name__ == "__main__":
    configure(globals())
    show_plan() if plan else main()
