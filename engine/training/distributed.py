"""
One process or many: what torchrun says about this process, the device it computes on, what that device can do, and
what the system tells a process to do.

    torchrun --nproc_per_node=4 train.py ...

starts one process (rank) per GPU, or per group of cores; each takes its slice of every global batch.
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
from engine.streams import unread

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
    if world > 1 and not dist.is_initialized():
        global store
        store = rendezvous()
        place = {"device_id": device} if device.type == "cuda" else {}  # else NCCL guesses it at the first message
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=store, rank=rank, world_size=world,
                                timeout=PATIENCE, **place)
    return device


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
    # The only buffers, the rotary tables, are the same in all processes.
    return DistributedDataParallel(model, gradient_as_bucket_view=True, **{quiet: False})


def average_at_once(_, bucket):
    """A communication hook for DDP that waits, so that a profile tells communication from computation."""
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



