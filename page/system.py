"""Measure the load of this machine: processors, memory, GPUs. The first two need Linux's /proc."""
import math
import shutil
import subprocess
import time
from pathlib import Path

INTERVAL = 2  # min seconds between two measurements, however many clients ask
# The latest measurement. ticks: processor time (total, idle) since the machine started.
last = {"time": 0.0, "ticks": (0, 0), "load": {}}
QUERY = ["nvidia-smi", "--query-gpu=name,utilization.gpu,memory.used,memory.total",
         "--format=csv,noheader,nounits"]


def system():
    """
    Return {"cpu": percent, "memory": [used, total] in GiB, "gpus": rows of gpus()}; "cpu" and
    "memory" are missing if they can't be read.
    """
    if time.monotonic() - last["time"] < INTERVAL:
        return last["load"]
    last["time"] = time.monotonic()
    load = {}
    try:
        load["memory"] = memory()
        load["cpu"] = cpu()
    except (OSError, ValueError, KeyError, IndexError, ZeroDivisionError):
        pass
    last["load"] = load | {"gpus": gpus()}
    return last["load"]


def cpu():
    """Return the percentage of processor time used since the previous call, from /proc/stat."""
    first_line = Path("/proc/stat").read_text(encoding="utf-8").split("\n")[0]
    # user, nice, system, idle, iowait, irq, softirq, steal
    ticks = [int(word) for word in first_line.split()[1:9]]
    total, idle = sum(ticks), ticks[3] + ticks[4]
    (total_before, idle_before), last["ticks"] = last["ticks"], (total, idle)
    return round(100 - 100 * (idle - idle_before) / (total - total_before))


def memory_info():
    """Return {"MemTotal:": KiB, ...} of /proc/meminfo. Raises OSError or ValueError."""
    lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    return {words[0]: int(words[1]) for line in lines if len(words := line.split()) > 1}


def memory():
    """Return [used, total] memory in GiB."""
    kib = memory_info()
    total = kib["MemTotal:"]
    used = total - kib["MemAvailable:"]
    return [round(used / 2 ** 20, 1), round(total / 2 ** 20, 1)]


def available_memory():
    """Return the bytes of memory available to programs; infinity if that can't be read."""
    try:
        return memory_info()["MemAvailable:"] * 1024
    except (OSError, ValueError, KeyError):
        return math.inf


def gpus():
    """Return [[name, utilization in percent, MiB used, MiB in total]] from nvidia-smi."""
    if not shutil.which("nvidia-smi"):
        return []
    try:
        done = subprocess.run(QUERY, capture_output=True, text=True, timeout=5)
        return [line.split(", ") for line in done.stdout.splitlines()]
    except (OSError, subprocess.SubprocessError):
        return []
