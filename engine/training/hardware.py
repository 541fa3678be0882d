"""
Find out what the device and the machine can do: number formats, memory, peak FLOP/s.
"""
import ctypes
import os
import re
import sys
import time
from contextlib import suppress
from pathlib import Path

import torch

from configurator import fail
from engine import system

DTYPES = ("auto", "float32", "bf32", "bfloat16", "float16")  # values of the setting `dtype`
# Dense peak TFLOP/s (no sparsity, float32 accumulation) as (bfloat16, float32), by a part of the
# device's name; None: the card only emulates bfloat16, so peak_flops measures it. NVIDIA's float32
# is TF32, which distributed.setup enables. The figures are from the data sheets of the data-centre
# products; MI300X has plain float32. GeForce has the plain float32 of the architecture white papers
# (GA102, AD102, GB202): by these papers TF32 is as fast and bfloat16 twice as fast.
GEFORCE = {"3060": 12.7, "3060 Ti": 16.2, "3070": 20.3, "3070 Ti": 21.7, "3080": 29.8,
           "3080 Ti": 34.1, "3090": 35.6, "3090 Ti": 40.0, "4060": 15.1, "4060 Ti": 22.1,
           "4070": 29.1, "4070 SUPER": 35.5, "4070 Ti": 40.1, "4070 Ti SUPER": 44.1, "4080": 48.7,
           "4080 SUPER": 52.2, "4090": 82.6, "4090 D": 73.5, "5070": 30.9, "5070 Ti": 43.9,
           "5080": 56.3, "5090": 104.8}
PEAKS = {"GB200": (2500, 1250), "B200": (2250, 1125), "GH200": (989, 494), "H200 NVL": (835, 417),
         "H200": (989, 494), "H100 PCIe": (756, 378), "H100 NVL": (835, 417), "H100": (989, 494),
         "A100": (312, 156), "L40S": (362, 183), "L40": (181, 90.5), "L4": (121, 60),
         "A10G": (70, 35), "A10": (125, 62.5), "T4": (None, 8.1), "V100-SXM2": (None, 15.7),
         "V100-PCIE": (None, 14.0), "MI300X": (1307, 163)} | {
    f"RTX {name}": (2 * x, x) for name, x in GEFORCE.items()}
# TFLOP/s; on other devices float16 is as fast as bfloat16.
FLOAT16 = {"T4": 65, "V100-SXM2": 125, "V100-PCIE": 112}
# TFLOP/s of one GPU core, in any type: the chip's figure divided by its number of cores. Apple
# publishes no figure for later chips.
APPLE = {"M1": 2.6 / 8, "M2": 3.6 / 10}
MIN_BF32_DIM = 128  # min model width for which dtype "auto" chooses bf32 with several threads
# torch dtype of the values of the setting `dtype`, except "auto".
TORCH_DTYPES = {"float32": torch.float32, "bf32": torch.float32, "bfloat16": torch.bfloat16,
                "float16": torch.float16}


# ---- number formats ------------------------------------------------------------------------------

def has_bfloat16(device):
    """
    Return whether a device multiplies matrices faster in bfloat16 than in float32: NVIDIA GPUs from
    Ampere on, CPUs with AMX, and AMD CPUs with AVX-512 BF16. An Intel CPU with AVX-512 BF16 but
    without AMX took twice as long in bfloat16 as in float32 (doc/lab/train_speed.md).
    """
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device)[0] >= 8
    if device.type != "cpu":
        return False
    has_fast_avx512 = torch.cpu._is_avx512_bf16_supported() and is_amd()
    return torch.cpu._is_amx_tile_supported() or has_fast_avx512


def is_amd():
    """Return whether AMD made the processor; False if unknown."""
    with suppress(OSError):
        return "AuthenticAMD" in Path("/proc/cpuinfo").read_text()
    return False


def use_dtype(config, device, dim):
    """
    Set the precision of this process's matrix products to the setting `dtype`, and return the torch
    dtype of autocast; float32: no autocast. dim: width of the model.

    "auto" is bfloat16 on NVIDIA GPUs that support it, float16 on older ones with tensor cores
    (V100, T4), bf32 on CPUs with AMX (see default_dtype), and float32 elsewhere.

    bf32 is float32, but oneDNN rounds the factors of products to bfloat16, except in attention. It
    is PyTorch's float32 matmul precision "medium". GPUs have TF32 instead. A compiled model's
    attention would be rounded, too, which is slow.
    """
    dtype = config.dtype
    if dtype not in DTYPES:
        fail(f"--dtype={dtype}: expected {', '.join(DTYPES[:-1])} or {DTYPES[-1]}")
    if dtype == "auto":
        dtype = default_dtype(device, dim, config.compile)
    if dtype == "bf32" and (device.type != "cpu" or config.compile):
        compiled = " with --compile" if config.compile else ""
        fail(f"--dtype=bf32 on {device.type}{compiled}: expected a CPU without --compile, or "
             f"another dtype")
    if device.type == "cpu":
        torch.set_float32_matmul_precision("medium" if dtype == "bf32" else "highest")
    return TORCH_DTYPES[dtype]


def default_dtype(device, dim, compiles):
    """
    Return the value of the setting `dtype` that "auto" stands for. compiles: whether --compile is
    set. For a model narrower than MIN_BF32_DIM, two threads that share a product in bf32 gain
    nothing.
    """
    if device.type == "cpu":
        is_faster = dim >= MIN_BF32_DIM or torch.get_num_threads() == 1
        has_units = torch.cpu._is_amx_tile_supported()
        return "bf32" if has_units and is_faster and not compiles else "float32"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (7, 0):
        return "bfloat16" if has_bfloat16(device) else "float16"
    return "float32"


def dtype_name(amp_dtype, device):
    """
    Return the value of the setting `dtype` for which use_dtype has returned amp_dtype. Inside
    ops.float32_products(), bf32 looks like float32.
    """
    rounds = device.type == "cpu" and torch.get_float32_matmul_precision() == "medium"
    return "bf32" if rounds else str(amp_dtype).split(".")[-1]


# ---- memory --------------------------------------------------------------------------------------

def keep_memory():
    """
    Have glibc keep freed memory for the next step. By default it returns the memory of large
    tensors to the system, which then has to find and clear every page again.
    doc/lab/train_speed.md
    """
    if system.IS_WINDOWS:
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "gnu_get_libc_version"):
        libc.mallopt(-4, 0)            # M_MMAP_MAX: take large blocks from the heap, too
        libc.mallopt(-1, 2 ** 31 - 1)  # M_TRIM_THRESHOLD: never shrink the heap


def status_bytes(field):
    """Return a field of /proc/self/status, such as VmHWM, in bytes. Raises OSError off Linux."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")


def peak_memory(device):
    """Return the peak memory so far in bytes: of the tensors on a GPU, of this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "darwin":
        import resource  # here: Windows lacks it
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if system.IS_WINDOWS:
        return system.process_memory()[1]
    # Linux's ru_maxrss may be that of the process that started this one.
    return status_bytes("VmHWM")


def current_memory(device):
    """Return the approximate bytes that this process uses now."""
    if system.IS_WINDOWS:
        return system.process_memory()[0]
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # not Linux
        return peak_memory(device)


def is_out_of_memory(error):
    """
    Return whether an exception means that memory ran out: in Python, on a CPU or on a GPU. The
    message of a RuntimeError decides, since PyTorch has an exception type for CUDA alone.
    """
    # A thread can't start when there is no memory for its stack.
    words = "out of memory", "can't allocate memory", "can't start new thread"
    if isinstance(error, RuntimeError):
        return any(w in str(error) for w in words)
    return isinstance(error, MemoryError)


def free_memory(device):
    """
    Return the max bytes that this process can still get; None if unknown. On a GPU this is its free
    memory plus the memory that PyTorch has reserved but no tensor uses; on Linux what the system
    can make available, swap included, within the limits of this process's control groups.
    """
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + kept
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        system = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        groups = [line.split(":", 2) for line in lines]
    except (OSError, ValueError, IndexError):
        return None
    # Upper bounds in bytes on memory, on swap, and on their sum (`both`): the system's, then those
    # of each control group. Version 1 of control groups limits memory and the sum, version 2 memory
    # and swap.
    memory, swap, both = [system["MemAvailable"]], [system.get("SwapFree", 0)], [float("inf")]
    for _, controller, path in groups:
        if controller not in ("", "memory"):  # "" in version 2, "memory" in version 1
            continue
        folder = Path("/sys/fs/cgroup", controller, path.strip("/"))
        # The limits of parent groups apply too. A container may see its own group as
        # the root of the mounted file system, which is one of these parents.
        for group in (folder, *folder.parents):
            cached = cached_files(group)
            if controller:
                memory.append(below_limit(group, "memory.limit_in_bytes", "memory.usage_in_bytes",
                                          cached))
                both.append(below_limit(group, "memory.memsw.limit_in_bytes",
                                        "memory.memsw.usage_in_bytes", cached))
            else:
                memory.append(below_limit(group, "memory.max", "memory.current", cached))
                swap.append(below_limit(group, "memory.swap.max", "memory.swap.current"))
    return min(min(memory) + min(swap), *both)


def release_memory(device):
    """Release GPU memory that PyTorch has reserved but no tensor uses, for other processes."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def below_limit(group, limit, usage, reclaimable=0):
    """
    Return the bytes that a control group has left below its limit; inf if it has none. group: its
    folder; limit, usage: names of files in it; reclaimable: bytes of the usage that the system
    frees when they are needed.
    """
    try:
        remaining = int((group / limit).read_text())
    except (OSError, ValueError):  # the file is missing, or contains "max"
        return float("inf")
    with suppress(OSError, ValueError):
        remaining -= max(0, int((group / usage).read_text()) - reclaimable)
    return max(0, remaining)


def cached_files(group):
    """Return the bytes of cached files in a control group's memory; 0 if unknown."""
    try:
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        names = "inactive_file", "active_file"
        # In version 1 only the fields total_* include the groups below; in version 2 all fields do.
        return sum(int(stat.get(f"total_{name}", stat.get(name, 0))) for name in names)
    except (OSError, ValueError):
        return 0


# ---- peak FLOP/s ---------------------------------------------------------------------------------

def device_name(device):
    if device.type == "mps" and hasattr(torch.backends.mps, "get_name"):
        return torch.backends.mps.get_name()
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def published_flops(name, dtype, cores=0):
    """
    Return (FLOP/s by the data sheet of the device of this name, the part of the name that
    identified it), or (None, "") for an unknown one. cores: GPU cores of an Apple chip.
    """
    # Laptop and Max-Q cards have a desktop card's name but not its power, and MIG is a slice of a
    # card: the data sheet does not hold for them.
    if re.search("Laptop|Max-Q| MIG ", name):
        return None, ""
    chip = name.removeprefix("Apple ").split(" ")[0] if name.startswith("Apple") else ""
    if chip in APPLE and cores:
        return APPLE[chip] * cores * 1e12, f"{cores} cores of {name}"
    # "RTX 3080" must not match "RTX 3080 Ti", and "H200 NVL" comes before "H200" in PEAKS.
    for words, (bfloat16, float32) in PEAKS.items():
        if re.search(rf"\b{words}\b(?! (?:Ti|SUPER|D)\b)", name):
            peaks = {torch.float16: FLOAT16.get(words, bfloat16), torch.bfloat16: bfloat16}
            peak = peaks.get(dtype, float32)
            return peak and peak * 1e12, words  # None stays None
    return None, ""


def peak_flops(device, dtype, given=0.0):
    """
    Return (peak FLOP/s of a device, where the figure comes from): `given` in TFLOP/s if it is not
    0, else from the data sheet, else from a measured matrix product. T4 and V100, which only
    emulate bfloat16, are measured in that type.
    """
    if given:
        return given * 1e12, "given by --peak_tflops"
    name = device_name(device)
    if device.type != "cpu":
        cores = torch.backends.mps.get_core_count() if name.startswith("Apple") else 0
        peak, words = published_flops(name, dtype, cores)
        if peak:
            return peak, f"data sheet of {words}"
    return measured_flops(device, dtype), f"matmul measured on this {name}"


def measured_flops(device, dtype, seconds=0.3, products=8):
    """
    Return the FLOP/s of the fastest of `products` n x n x n matrix products, or of as many as about
    `seconds` allow, but at least one; n is large enough to fill the device.
    """
    n = 1024 if device.type == "cpu" else 8192
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    times, end = [], time.perf_counter() + seconds
    while len(times) < products and time.perf_counter() < end:
        start = time.perf_counter()
        (a @ b)[0, 0].item()  # the item waits for an asynchronous device
        times.append(time.perf_counter() - start)
    return 2 * n ** 3 / min(times)
