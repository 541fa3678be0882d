"""
The processes of a training, one or several: their ranks, devices and messages.

    torchrun --nproc_per_node=4 train.py ...

starts one process (rank) per GPU, or per group of cores. Each takes its slice of every global
batch. The master, rank 0, writes the files and prints.
"""
import inspect
import itertools
import os
import sys
import time
from contextlib import nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from configurator import fail
from engine import spans
from engine.spans import spanned
from engine.streams import ignore_closed_pipe

launched = os.environ.get("RANK") and os.environ.get("WORLD_SIZE")  # torchrun sets both
rank = int(os.environ["RANK"]) if launched else 0
world = int(os.environ["WORLD_SIZE"]) if launched else 1  # number of processes
local_rank = int(os.environ.get("LOCAL_RANK", 0))         # rank on this machine
local_world = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # number of processes on this machine
master = rank == 0
if world > 1:
    from torch.distributed.fsdp import FSDPModule, fully_shard
    from torch.distributed.tensor import DTensor, distribute_tensor
else:
    # isinstance(x, ()) is always False. A single process saves 0.5 s and 45 MB of imports.
    FSDPModule = DTensor = ()
writers = None  # process group for the threads that write checkpoints; sharded runs only
hosts = None    # process group for messages between the processes' CPUs, while GPUs compute
store = None               # the processes' key-value store
waits = itertools.count()  # numbers the calls of await_master, so that each has its own key
TIMEOUT = timedelta(minutes=60)  # max wait for a message; if a process dies, torchrun ends the
                                 # others sooner
MIN_SPLIT = 1 << 20  # min elements of a stack that split_across_ranks splits: below it, exchanging
                     # the results takes longer than computing all of them


# ---- start ---------------------------------------------------------------------------------------

def setup(device="auto", deterministic=False):
    """
    Join the other processes, if there are any, and return the torch.device that this one uses.

    deterministic: use GPU kernels whose results are bitwise reproducible; a warning names those
    that have no such version. A CPU's results are always reproducible. Ends the program if the
    device can't be used.
    """
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read by cuBLAS when it starts
        torch.use_deterministic_algorithms(True, warn_only=True)
    if device == "auto":
        device = "mps" if torch.backends.mps.is_available() else "cpu"
        if torch.cuda.is_available():
            device = "cuda"
    try:
        device = torch.device(device)
        if device.type not in ("cpu", "cuda", "mps"):
            raise RuntimeError("training does not support this kind of device")
        if device.type == "cuda" and not torch.cuda.is_available():
            raise RuntimeError("PyTorch finds no GPU")
        if device.type == "cuda":
            device = torch.device("cuda", local_rank if device.index is None else device.index)
            torch.cuda.set_device(device)
            torch.set_float32_matmul_precision("high")  # TF32
            # The compiler reads this when it is imported. Softmax in one pass reads less memory but
            # computes more exponentials, which is no faster.
            os.environ.setdefault("TORCHINDUCTOR_ONLINE_SOFTMAX", "0")
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as e:
        fail(f"--device={device}: not usable here ({str(e).splitlines()[0]}); expected auto, cpu, "
             f"cuda or mps")
    if world > 1 and not dist.is_initialized():
        global store, hosts
        store = rendezvous()
        is_gpu = device.type == "cuda"
        # Without device_id NCCL guesses it at the first message.
        dist.init_process_group("nccl" if is_gpu else "gloo", store=store, rank=rank,
                                world_size=world, timeout=TIMEOUT,
                                device_id=device if is_gpu else None)
        hosts = dist.new_group(backend="gloo", timeout=TIMEOUT)
    return device


def rendezvous():
    """
    Return the key-value store in which the processes find each other.

    The master serves it and announces its port in torchrun's own store. torchrun's store is not
    used directly, as after a restart it still has the addresses of dead processes
    (github.com/pytorch/pytorch/issues/135712). The announced port may also be that of a dead
    master, so the others retry until a master answers.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":  # not started by torchrun
        return dist.TCPStore(host, port, world, is_master=master, timeout=TIMEOUT)
    announced = dist.TCPStore(host, port, is_master=False, timeout=TIMEOUT)
    if master:
        own = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
        announced.set("llamac", str(own.port))
        return own
    while True:
        try:
            port = int(announced.get("llamac"))
            found = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=1))
            found.set_timeout(TIMEOUT)
            return found
        except dist.DistError:
            time.sleep(0.1)


# ---- the model in several processes --------------------------------------------------------------

def shard(model):
    """
    Shard a model by FSDP2: each process keeps a slice of every parameter (a DTensor), and gathers
    the parameters of a block when it computes that block. https://arxiv.org/abs/2304.11277
    """
    global writers
    for block in model.layers:
        fully_shard(block)
    fully_shard(model)
    writers = dist.new_group(backend="gloo", timeout=TIMEOUT)


def is_sharded(model):
    return isinstance(model, FSDPModule)


def is_shard(tensor):
    return isinstance(tensor, DTensor)


def wrap(model):
    """Return the model as training calls it; DDP averages gradients over several processes."""
    if world == 1 or is_sharded(model):
        return model
    # Newer PyTorch renames broadcast_buffers to forward_sync_buffers and warns of the old name.
    known = inspect.signature(DistributedDataParallel).parameters
    option = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    # Buffers need no exchange: the only ones, the rotary tables, are the same in all processes.
    return DistributedDataParallel(model, gradient_as_bucket_view=True, **{option: False})


def average_at_once(_, bucket):
    """
    Average a bucket of gradients and wait for the result: a communication hook for DDP. A profile
    can then separate communication from computation, which DDP otherwise overlaps.
    """
    with spans.span("communication"):
        dist.all_reduce(bucket.buffer())
        bucket.buffer().div_(world)
    done = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def accumulate(model, last):
    """
    Return the context of one micro-batch: only the last one of a step exchanges gradients between
    the processes.
    """
    # Not is_sharded(model): a compiled sharded model has this method, but is not an FSDPModule.
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(last)
    return model.no_sync() if hasattr(model, "no_sync") and not last else nullcontext()


def unshard(value):
    """
    Return nested dicts and lists with every sharded tensor made whole. All processes must call it.
    """
    if isinstance(value, DTensor):
        return value.full_tensor()
    if isinstance(value, dict):
        return {k: unshard(v) for k, v in value.items()}
    return [unshard(v) for v in value] if isinstance(value, (list, tuple)) else value


def shard_like(tensor, like):
    """
    Return this process's slice of a whole tensor, as `like` is sharded; the whole tensor if `like`
    is not sharded.
    """
    if not isinstance(like, DTensor):
        return tensor
    # With src_data_rank=None each process cuts its own copy, without communication.
    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements,
                             src_data_rank=None)


def split_across_ranks(compute, stack):
    """
    Return compute(stack), where each process computes a part of the stack and all get the whole
    result. compute: treats each tensor of a stack (n, ...) by itself.
    """
    if world == 1 or stack.numel() < MIN_SPLIT:
        return compute(stack)
    share = -(-len(stack) // world)  # tensors per process, rounded up
    part = stack[rank * share:(rank + 1) * share]
    result = stack.new_zeros(share, *stack.shape[1:])
    if len(part):
        result[:len(part)] = compute(part)
    results = [torch.empty_like(result) for _ in range(world)]
    dist.all_gather(results, result)
    return torch.cat(results)[:len(stack)]


def load_weights(model, weights):
    """
    Copy whole tensors, {name: tensor}, into a model, sharded or not, one at a time. Ends the
    program if names or shapes differ.
    """
    own = dict(model.named_parameters())
    # Old checkpoints also hold a tied classifier. It is allowed, since state_dict() lists it, but
    # not required, since named_parameters() leaves it out.
    unknown = weights.keys() - model.state_dict().keys()
    missing = own.keys() - weights.keys()
    if odd := unknown or missing:
        fail(f"the checkpoint holds {'a' if unknown else 'no'} parameter {min(odd)}, unlike a "
             "model with the checkpoint's settings; the checkpoint or model.py was changed after "
             "the checkpoint was written")
    with torch.no_grad():
        for name, tensor in own.items():
            weight = weights[name]
            if weight.shape != tensor.shape:
                fail(f"the checkpoint's parameter {name} is {tuple(weight.shape)}, its "
                     f"settings imply {tuple(tensor.shape)}; the checkpoint was changed after it "
                     f"was written")
            tensor.copy_(shard_like(weight, tensor))


# ---- messages ------------------------------------------------------------------------------------

@spanned("data")
def to_device(device, *tensors):
    """Return tensors on a device; a GPU copies them from pinned memory while it computes."""
    if device.type == "cuda":  # pin_memory returns a pinned tensor as it is
        return [t.pin_memory().to(device, non_blocking=True) for t in tensors]
    return [t.to(device) for t in tensors]


def read_async(tensor):
    """
    Return a function that returns the tensor's numbers. On an NVIDIA GPU it waits only for the work
    that is queued now, not for what is queued later, so the GPU stays busy. On other devices it
    reads the tensor only when it is called, so don't change the tensor before.
    """
    if tensor.device.type != "cuda":
        return tensor.tolist
    numbers, copied = tensor.to("cpu", non_blocking=True), torch.cuda.Event()
    copied.record()

    def read():
        copied.synchronize()
        return numbers.tolist()
    return read


def mean(value):
    """Return the mean of a tensor over all processes."""
    if world > 1:
        with spans.span("communication"):
            value = value.clone()
            dist.all_reduce(value)
            value /= world
    return value


def total(count):
    """Return the sum of an int over all processes. CPUs exchange it, without waiting for GPUs."""
    if world == 1:
        return count
    with spans.span("communication"):
        found = torch.tensor(count)
        dist.all_reduce(found, group=hosts)
        return found.item()


def all_max(values, device):
    """Return the max of each number over all processes, so that all act alike at the same step."""
    if world == 1:
        return values
    with spans.span("communication"):
        values = torch.tensor(values, dtype=torch.float32, device=device)
        dist.all_reduce(values, dist.ReduceOp.MAX)
        return values.tolist()


def start_max(values):
    """
    Begin to find the max of each number over all processes, and return a function that waits for it
    and returns the list. The messages go between CPUs, so neither this call nor the returned
    function waits for a GPU.
    """
    if world == 1:
        return lambda: values
    found = torch.tensor(values, dtype=torch.float64)
    work = dist.all_reduce(found, dist.ReduceOp.MAX, group=hosts, async_op=True)

    def finish():
        work.wait()
        return found.tolist()
    return finish


def any_true(flags, device):
    """Return for each flag whether it is set in any process."""
    return [bool(value) for value in all_max(flags, device)]


def on_master(function, *args, **kwargs):
    """
    Call `function` in the master while the other processes wait, and return its result in all of
    them. The files that it wrote exist then.
    """
    result = function(*args, **kwargs) if master else None
    if world > 1:
        await_master()  # the broadcast alone would end after TIMEOUT
        shared = [result]
        dist.broadcast_object_list(shared, src=0)
        result = shared[0]
    return result


def await_master():
    """
    Wait until the master calls this too, without the time limit that messages have: preparing a
    corpus may take a day.
    """
    key = f"wait {next(waits)}"
    if master:
        return store.set(key, "done")
    while True:
        try:
            return store.wait([key], timedelta(seconds=10))  # short, so that signals are handled
        except dist.DistStoreError:  # not yet
            pass


def gather(work):
    """
    Return [the result of `work()` in each process], in all of them. An exception of one process is
    raised in all. Called by threads that write checkpoints.
    """
    try:
        own = work()
    except Exception as e:
        own = e
    results = [None] * world
    dist.all_gather_object(results, own, group=writers)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def close(code=0):
    """
    End all processes together with this exit code; a single process returns. During an ordinary
    exit gloo's threads can crash a process (SIGABRT), so each one ends by os._exit.
    """
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def say(text):
    """Print a line on stdout, above a progress bar, in the master."""
    if master:
        with ignore_closed_pipe():  # training goes on when the reader of stdout is gone
            tqdm.write(text, file=sys.stdout)
