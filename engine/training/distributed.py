"""
One process or many: what torchrun says about this process, the device it computes on, what that device can do, and
what the system tells a process to do.

    torchrun --nproc_per_node=4 train.py ...

starts one process (rank) per GPU, or per group of cores; each takes its slice of every global batch.
"""
import ctypes
import inspect
import itertools
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import nullcontext, suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from configurator import fail
from engine import spans
from engine.spans import spanned
from engine.streams import tell, unread

many = os.environ.get("RANK") and os.environ.get("WORLD_SIZE")  # torchrun sets both
rank = int(os.environ["RANK"]) if many else 0      # this process among all
world = int(os.environ["WORLD_SIZE"]) if many else 1  # how many processes there are
local_rank = int(os.environ.get("LOCAL_RANK", 0))  # this process on its machine
local_world = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # how many there are on it
master = rank == 0                                 # the one that writes files and talks
if world > 1:
    from torch.distributed.fsdp import FSDPModule, fully_shard
    from torch.distributed.tensor import DTensor, distribute_tensor
else:
    FSDPModule = DTensor = ()  # one process has none, and is spared half a second and 45 MB of imports
writers = None  # of sharded processes: the group for the messages of their writers, which may not mix with training's
store, waits = None, itertools.count()  # of many processes: where they meet; how often they have waited for the master
PATIENCE = timedelta(minutes=60)  # of messages; a dead process is torchrun's to notice, not theirs

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


def setup(device="auto", deterministic=False):
    """
    Join the other processes, if there are any; return the torch.device this one computes on. deterministic: GPU kernels
    that give the same bits every time, where there are such (a warning names those that have none). A CPU's always do.
    """
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read by cuBLAS when it starts
        torch.use_deterministic_algorithms(True, warn_only=True)
    if device == "auto":
        mps = getattr(torch.backends, "mps", None)
        device = "cuda" if torch.cuda.is_available() else "mps" if mps and mps.is_available() else "cpu"
    try:
        device = torch.device(device)
        if device.type not in ("cpu", "cuda", "mps"):
            raise RuntimeError("of no kind that trains")
        if device.type == "cuda" and not torch.cuda.is_available():
            raise RuntimeError("PyTorch finds no GPU")
        if device.type == "cuda":
            device = torch.device("cuda", local_rank if device.index is None else device.index)
            torch.cuda.set_device(device)
            torch.set_float32_matmul_precision("high")  # TF32
            # Read by the compiler when it is imported: what softmax of one pass saves in reading, it spends on exponentials
            os.environ.setdefault("TORCHINDUCTOR_ONLINE_SOFTMAX", "0")
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as e:
        fail(f"--device={device}: not usable here ({str(e).splitlines()[0]}); expected auto, cpu, cuda or mps")
    if world > 1:
        global store
        store = rendezvous()
        place = {"device_id": device} if device.type == "cuda" else {}  # else NCCL guesses it at the first message
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=store, rank=rank, world_size=world,
                                timeout=PATIENCE, **place)
    return device


def keep_memory():
    """
    Have glibc keep what is freed for the next step. By itself it hands the memory of large tensors back to the system,
    which has to find and clear every page of it anew. doc/lab/train_speed.md
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "gnu_get_libc_version"):
        libc.mallopt(-4, 0)            # M_MMAP_MAX: large blocks too come from the heap ...
        libc.mallopt(-1, 2 ** 31 - 1)  # M_TRIM_THRESHOLD: ... which does not shrink


def under_torchrun():
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def rendezvous():
    """
    The store in which processes find each other: the master's, at a port that it announces in torchrun's. That one
    itself outlives a restart, with the addresses of dead processes in it (github.com/pytorch/pytorch/issues/135712).
    So the port found may be that of a dead master: try until one answers.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if not under_torchrun():
        return dist.TCPStore(host, port, world, is_master=master, timeout=PATIENCE)
    announced = dist.TCPStore(host, port, is_master=False, timeout=PATIENCE)
    if master:
        store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=PATIENCE)
        announced.set("llamac", str(store.port))
        return store
    while True:
        try:
            store = dist.TCPStore(host, int(announced.get("llamac")), is_master=False, timeout=timedelta(seconds=1))
            store.set_timeout(PATIENCE)
            return store
        except dist.DistError:
            time.sleep(0.1)


def shard(model):
    """
    FSDP2: from here on each process holds a slice of every parameter (a DTensor), and gathers the parameters of one
    block when it comes to compute it. https://arxiv.org/abs/2304.11277
    """
    global writers
    for block in model.layers:
        fully_shard(block)
    fully_shard(model)
    writers = dist.new_group(backend="gloo", timeout=PATIENCE)


def is_sharded(model):
    return isinstance(model, FSDPModule)


def is_shard(tensor):
    return isinstance(tensor, DTensor)


def wrap(model):
    """The model as training calls it: in many processes, gradients are averaged over them."""
    if world == 1 or is_sharded(model):
        return model
    known = inspect.signature(DistributedDataParallel).parameters  # newer PyTorch warns of the older name
    quiet = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True, **{quiet: False})  # the only one is the same in all
    if spans.measured:
        wrapped.register_comm_hook(None, average)
    return wrapped


def average(_, bucket):
    """DDP's communication, at once rather than beside the computing, so that either has a time of its own."""
    with spans.span("communication"):
        dist.all_reduce(bucket.buffer())
        bucket.buffer().div_(world)
    done = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def accumulate(model, last):
    """The context of one micro-batch: gradients travel between processes only with the last one of a step."""
    if hasattr(model, "set_requires_gradient_sync"):  # sharded; a compiled one has it too, but another type
        model.set_requires_gradient_sync(last)
    return model.no_sync() if hasattr(model, "no_sync") and not last else nullcontext()


def unshard(value):
    """Nested dicts and lists with every sharded tensor put together. All processes have to call it."""
    if isinstance(value, DTensor):
        return value.full_tensor()
    if isinstance(value, dict):
        return {k: unshard(v) for k, v in value.items()}
    return [unshard(v) for v in value] if isinstance(value, (list, tuple)) else value


def shard_like(tensor, like):
    """A whole tensor as this process holds it: the slice that `like` has, if `like` is sharded."""
    if not isinstance(like, DTensor):
        return tensor
    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


SHARED = 1 << 20  # elements from which a share of the work saves more than it costs to exchange the results


def share_out(compute, stack):
    """
    compute(stack), for a function that treats each tensor of a stack (n, ...) by itself: each process computes some of
    them, and all get all results.
    """
    if world == 1 or stack.numel() < SHARED:
        return compute(stack)
    share = -(-len(stack) // world)
    here = stack[rank * share:(rank + 1) * share]
    mine = stack.new_zeros(share, *stack.shape[1:])
    if len(here):
        mine[:len(here)] = compute(here)
    results = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(results, mine)
    return torch.cat(results)[:len(stack)]


def load_weights(model, weights):
    """
    Copy whole tensors, {name: parameter}, into a model, sharded or not, one after the other. Checkpoints of old hold a
    tied classifier besides the embedding: model.state_dict().
    """
    own = dict(model.named_parameters())
    odd = weights.keys() - model.state_dict().keys() or own.keys() - weights.keys()
    if odd:
        fail(f"the checkpoint holds {'a' if min(odd) in weights else 'no'} parameter {min(odd)}, unlike "
             "a model of its own settings; it was changed after it was written, or model.py was")
    with torch.no_grad():
        for name, tensor in own.items():
            weight = weights[name]
            if weight.shape != tensor.shape:
                fail(f"the checkpoint's parameter {name} is {tuple(weight.shape)}, its own settings imply "
                     f"{tuple(tensor.shape)}; it was changed after it was written")
            tensor.copy_(shard_like(weight, tensor))


@spanned("data")
def to_device(device, *tensors):
    """Batches travel to a GPU from pinned memory, while it computes."""
    if device.type == "cuda":
        return [t.pin_memory().to(device, non_blocking=True) for t in tensors]  # pinned already: as it is
    return [t.to(device) for t in tensors]


def reading(tensor):
    """
    A function that returns the tensor's numbers as they are now. It waits for them alone, not for what the device is given to do
    meanwhile, which keeps it busy until it is told what comes next.
    """
    if tensor.device.type != "cuda":
        return tensor.tolist
    numbers, there = tensor.to("cpu", non_blocking=True), torch.cuda.Event()
    there.record()

    def read():
        there.synchronize()
        return numbers.tolist()
    return read


def mean(value):
    """The mean over all processes of a scalar tensor."""
    if world > 1:
        with spans.span("communication"):
            value = value.clone()
            dist.all_reduce(value)
            value /= world
    return value


def all_max(values, device):
    """For each number the largest that any process has, so that all of them act alike at the same step."""
    if world == 1:
        return values
    with spans.span("communication"):
        values = torch.tensor(values, dtype=torch.float32, device=device)
        dist.all_reduce(values, dist.ReduceOp.MAX)
        return values.tolist()


def any_true(flags, device):
    """For each flag, whether it is set in any process."""
    return [bool(value) for value in all_max(flags, device)]


def on_master(function, *args, **kwargs):
    """Call `function` in the master process while the others wait; its files are there for all when this returns."""
    result = function(*args, **kwargs) if master else None
    if world > 1:
        await_master()
        shared = [result]
        dist.broadcast_object_list(shared, src=0)
        result = shared[0]
    return result


def await_master():
    """Returns when the master comes here too. That has no limit, as messages have: preparing a corpus may take a day."""
    wait = f"wait {next(waits)}"
    if master:
        store.set(wait, "done")
    while not master:
        try:
            return store.wait([wait], timedelta(seconds=10))  # no longer, so that signals are heard
        except dist.DistStoreError:  # not yet
            pass


def gather(work):
    """[what `work()` returned in each process], in all of them; what one raises is raised in all. For writers."""
    try:
        mine = work()
    except Exception as e:
        mine = e
    results = [None] * world
    dist.all_gather_object(results, mine, group=writers)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def close(code=0):
    """Leave together, with this exit code. A process that has shared its work ends at once: gloo's threads can abort an
    ordinary exit."""
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def say(text):
    """A line on stdout, above a progress bar, from the master alone."""
    if master:
        with unread():  # whoever stops reading does not stop the training
            tqdm.write(text, file=sys.stdout)


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


STOPS = (signal.SIGTERM, signal.SIGHUP, signal.SIGXCPU)  # the user's or the queue's, a terminal that closes, ulimit -t


def on_stops(handler):
    """Handle the signals of STOPS, but for those that whoever started the program ignores, as nohup does."""
    for signum in STOPS:
        if signal.getsignal(signum) != signal.SIG_IGN:
            signal.signal(signum, handler)


class Signals:
    """
    Ctrl-C and the signals of STOPS: save at the next step boundary and end (a second Ctrl-C ends at once). SIGUSR1: save
    now, go on. The time limit is one more way to stop.
    """

    def __init__(self, seconds, end):
        """seconds: what the run's clock shows now; end: what it shows when the time is over."""
        self.stop = self.save = False
        self.start, self.end = time.monotonic() - seconds, end
        signal.signal(signal.SIGINT, self.on_stop)
        on_stops(self.on_stop)
        signal.signal(signal.SIGUSR1, self.on_save)

    def on_stop(self, signum, frame):
        self.stop = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def on_save(self, signum, frame):
        self.save = True

    def read(self, device):
        """(stop, save, seconds): whether any process was asked to, and the run's clock, the same in all of them."""
        stop, save, seconds = all_max([self.stop, self.save, time.monotonic() - self.start], device)
        self.save = False
        return bool(stop) or seconds >= self.end, bool(save), seconds


def supervise(max_restarts, *more):
    """
    Run this program, with `more` words on its command line, as a child; run it again from its last checkpoint when it
    crashes, at ever longer intervals. Signals go on to the child; after one that asks to stop it is not run again.
    """
    command, stopped, child = [sys.executable, *sys.argv, "--supervise=False", *more], threading.Event(), None

    def pass_on(signum, frame):
        if signum != signal.SIGUSR1:
            stopped.set()
        if child:
            child.send_signal(signum)

    for signum in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(signum, pass_on)
    on_stops(pass_on)
    for attempt in range(max_restarts + 1):
        child = subprocess.Popen(command, start_new_session=True)  # else a terminal's Ctrl-C would reach it twice
        code = child.wait()
        if code in (0, 2) or attempt == max_restarts or stopped.is_set():  # 2: a mistake that would repeat itself
            break
        pause = min(60, 2 ** attempt)
        tell(f"supervise: the training ended with code {code}; restart {attempt + 1} of {max_restarts} in {pause} s")
        if stopped.wait(pause):
            break
    sys.exit(code if code >= 0 else 1)
