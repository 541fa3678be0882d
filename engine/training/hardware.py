"""
What the device and the machine can do: peak FLOP/s, memory, number formats.
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

# Dense peak TFLOP/s (no sparsity, float32 accumulation), by words of the device's name, as (bfloat16, float32). NVIDIA's
# float32 is TF32, as `setup` asks for. None: not computed in. Sources: the data sheets of each data-centre product;
# for GeForce the architecture white papers (GA102, AD102, GB202), by which TF32 is as fast as the cards' plain
# float32, given here, and bfloat16 twice that; for AMD the data sheet of MI300X, without its TF32.
GEFORCE = {"3060": 12.7, "3060 Ti": 16.2, "3070": 20.3, "3070 Ti": 21.7, "3080": 29.8, "3080 Ti": 34.1, "3090": 35.6,
           "3090 Ti": 40.0, "4060": 15.1, "4060 Ti": 22.1, "4070": 29.1, "4070 SUPER": 35.5, "4070 Ti": 40.1,
           "4070 Ti SUPER": 44.1, "4080": 48.7, "4080 SUPER": 52.2, "4090": 82.6, "4090 D": 73.5,
           "5070": 30.9, "5070 Ti": 43.9, "5080": 56.3, "5090": 104.8}
PEAKS = {"GB200": (2500, 1250), "B200": (2250, 1125), "GH200": (989, 494), "H200 NVL": (835, 417), "H200": (989, 494),
         "H100 PCIe": (756, 378), "H100 NVL": (835, 417), "H100": (989, 494), "A100": (312, 156), "L40S": (362, 183),
         "L40": (181, 90.5), "L4": (121, 60), "A10G": (70, 35), "A10": (125, 62.5), "T4": (None, 8.1),
         "V100-SXM2": (None, 15.7), "V100-PCIE": (None, 14.0), "MI300X": (1307, 163)} | {
    f"RTX {name}": (2 * x, x) for name, x in GEFORCE.items()}
FLOAT16 = {"T4": 65, "V100-SXM2": 125, "V100-PCIE": 112}  # else as bfloat16
APPLE = {"M1": 2.6 / 8, "M2": 3.6 / 10}  # per GPU core in any type; later chips: Apple gives no figure


def keep_memory():
    """
    Have glibc keep what is freed for the next step. By itself it hands the memory of large tensors back to the system,
    which has to find and clear every page of it anew. doc/lab/train_speed.md
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "gnu_get_libc_version"):
        libc.mallopt(-4, 0)            # M_MMAP_MAX: large blocks too come from the heap ...
        libc.mallopt(-1, 2 ** 31 - 1)  # M_TRIM_THRESHOLD: ... which does not shrink


def has_bfloat16(device):
    """
    Whether a device multiplies matrices faster in bfloat16 than in float32. Of CPUs those with AMX, and AMD's with AVX-512
    BF16: Intel's without AMX took twice as long (doc/lab/train_speed.md).
    """
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device)[0] >= 8
    return device.type == "cpu" and (torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported() and is_amd())


def is_amd():
    """Whether AMD has made the processor; False where nobody says."""
    with suppress(OSError):
        return "AuthenticAMD" in Path("/proc/cpuinfo").read_text()
    return False


def autocast_dtype(dtype, device):
    """
    torch dtype of `dtype`: "auto" is bfloat16 on NVIDIA's GPUs that compute in it, float16 on older ones with tensor cores
    (V100, T4), else float32. On CPUs with AVX-512 BF16 or AMX --dtype=bfloat16 makes wide models faster, but that no loss
    suffers has not been shown: it has to be asked for.
    """
    if dtype == "auto" and device.type == "cuda":
        able = torch.cuda.get_device_capability(device)
        dtype = "bfloat16" if has_bfloat16(device) else "float16" if able >= (7, 0) else "float32"
    if dtype not in ("auto", "float32", "bfloat16", "float16"):
        fail(f"--dtype={dtype}: expected auto, float32, bfloat16 or float16")
    return getattr(torch, "float32" if dtype == "auto" else dtype)


def device_name(device):
    if device.type == "mps" and hasattr(torch.backends.mps, "get_name"):
        return torch.backends.mps.get_name()
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def peak_memory(device):
    """Bytes held at most so far: on a GPU by tensors, else by this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "darwin":
        import resource  # which Windows lacks, of which configurator.py tells
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with open("/proc/self/status") as f:  # Linux's ru_maxrss may be that of the process that started this one
        return next(int(line.split()[1]) * 1024 for line in f if line.startswith("VmHWM"))


def is_out_of_memory(error):
    """Whether memory ran out: in Python, on a CPU or on a GPU. PyTorch has a type for CUDA's alone, so by its words."""
    words = "out of memory", "can't allocate memory", "can't start new thread"  # whose stack found no place
    return isinstance(error, MemoryError) or isinstance(error, RuntimeError) and any(w in str(error) for w in words)


def memory_now(device):
    """Bytes that this process has now, about."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # not Linux
        return peak_memory(device)


def free_memory(device):
    """
    Bytes that a process can still have at most: of a GPU what is free, else what Linux can make available, swap too,
    within what this process's control groups have left; None where that is not known.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        found = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in Path("/proc/meminfo").read_text().splitlines()}
        groups = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    except (OSError, ValueError, IndexError):
        return None
    memory, swap, both = [found["MemAvailable"]], [found.get("SwapFree", 0)], [float("inf")]
    for _, kind, path in groups:
        if kind in ("", "memory"):  # version 2 of control groups, version 1
            folder = Path("/sys/fs/cgroup", kind, path.strip("/"))
            for place in (folder, *folder.parents):  # a container may see its own group as the root
                files = cached_files(place)
                if kind:
                    memory.append(left(place, "memory.limit_in_bytes", "memory.usage_in_bytes", files))
                    both.append(left(place, "memory.memsw.limit_in_bytes", "memory.memsw.usage_in_bytes", files))
                else:
                    memory.append(left(place, "memory.max", "memory.current", files))
                    swap.append(left(place, "memory.swap.max", "memory.swap.current"))
    return min(min(memory) + min(swap), *both)


def left(group, limit, used, given_back=0):
    """Bytes up to a limit of a control group (a folder), of whose use so many are given back when needed; inf without one."""
    try:
        most = int((group / limit).read_text())
    except (OSError, ValueError):  # "max"
        return float("inf")
    with suppress(OSError, ValueError):
        most -= max(0, int((group / used).read_text()) - given_back)
    return max(0, most)


def cached_files(group):
    """Bytes of files that a control group's memory holds as a cache; 0 where that is not known."""
    try:
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return sum(int(stat.get(f"total_{name}", stat.get(name, 0))) for name in ("inactive_file", "active_file"))
    except (OSError, ValueError):
        return 0


def published_flops(name, dtype, cores=0):
    """(FLOP/s of a device by its data sheet, the words of its name that tell); (None, "") where none is known."""
    if re.search("Laptop|Max-Q| MIG ", name):  # a desktop card's name, at whatever power the maker allows; a slice of a card
        return None, ""
    chip = name.removeprefix("Apple ").split(" ")[0] if name.startswith("Apple") else ""
    if chip in APPLE and cores:
        return APPLE[chip] * cores * 1e12, f"{cores} cores of {name}"
    for words, (half, single) in PEAKS.items():
        if re.search(rf"\b{words}\b(?! (?:Ti|SUPER|D)\b)", name):
            peak = FLOAT16.get(words, half) if dtype == torch.float16 else half if dtype == torch.bfloat16 else single
            return peak and peak * 1e12, words
    return None, ""


def peak_flops(device, dtype, given=0.0):
    """
    (FLOP/s this device can do at best, where the figure comes from): `given` in TFLOP/s, else a data sheet, else a
    matrix product measured here, as on a card without bfloat16 that is made to compute in it.
    """
    if given:
        return given * 1e12, "given by --peak_tflops"
    name = device_name(device)
    cores = torch.backends.mps.get_core_count() if name.startswith("Apple") else 0
    peak, words = published_flops(name, dtype, cores) if device.type != "cpu" else (None, "")
    if peak:
        return peak, f"data sheet of {words}"
    return measured_flops(device, dtype), f"matmul measured on this {name}"


def measured_flops(device, dtype, seconds=0.3):
    """FLOP/s of the best n × n × n matrix product within about `seconds`; n is what fills the device."""
    n = 1024 if device.type == "cpu" else 8192
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        (a @ b)[0, 0].item()  # the item waits for an asynchronous device
        best = min(best, time.perf_counter() - start)
    return 2 * n ** 3 / best
