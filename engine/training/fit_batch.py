"""
Find the largest batch that fits into memory, for --batch_size=0.

A child process takes real steps with ever larger batches, since the system may kill a process that
runs out of memory.
"""
import contextlib
import multiprocessing
import sys
from pathlib import Path
from typing import Any, NamedTuple

from configurator import fail
from engine.training import costs, distributed, hardware

HEADROOM = 0.1  # fraction of the free memory left for evaluations, samples and other programs
GAIN = 1.03     # speedup that justifies the memory of a larger batch


class Search(NamedTuple):
    """
    The task of the child process. sizes: batch sizes to try, in sequences, ascending; limit: max
    bytes of the process, None if unknown; gain: speedup that justifies a larger batch.
    """
    config: Any
    vocab_size: int
    setup: costs.TrialSetup
    sizes: list
    limit: float | None
    gain: float


class Fit(NamedTuple):
    """A batch that fits. size: in sequences; peak: bytes of memory; speed: tokens per second."""
    size: int
    peak: int
    speed: float


def first_guess(config):
    """
    Return (config, names of the given settings, whether the largest batch must be found). With
    --batch_size=0 the config starts with the batch size of the preset or the default, which decides
    the sequences per step. The names then leave out the batch settings, so that other rules may
    change them and a resumed run takes those of its checkpoint.
    """
    given = config.given.keys()
    if config.batch_size:
        return config, given, False
    # config.given has the value that the user's replaced.
    config = config.changed(batch_size=max(1, config.given["batch_size"]))
    return config, given - {"batch_size", "gradient_accumulation_steps"}, True


def batches(sequences, limit):
    """
    Return the batch sizes to try, ascending: divisors of `sequences`, the sequences of a step, up
    to `limit`, those of one process. Each is at least 1.5 times as large as the one before.
    """
    sizes = []
    for size in range(1, limit + 1):
        if sequences % size == 0 and (not sizes or size >= 1.5 * sizes[-1]):
            sizes.append(size)
    return sizes


def largest_batch(config, args, setup, gain=GAIN):
    """
    Return {"batch_size", "gradient_accumulation_steps"} that keep the settings' sequences per step.
    Batches must fit into the free memory, less HEADROOM. A larger one is chosen if it is at least
    `gain` times as fast as the one chosen before. setup: a costs.TrialSetup.
    """
    if config.fsdp:
        fail("--batch_size=0 tries batches on one process; with --fsdp=True give a number")
    sequences = config.batch_size * config.gradient_accumulation_steps
    hardware.release_memory(setup.device)  # the child process could not use it
    free = hardware.free_memory(setup.device)
    processes = 1 if setup.device.type == "cuda" else distributed.local_world
    limit = (1 - HEADROOM) * free / processes if free else None
    sizes = batches(sequences, costs.sequences_per_rank(config))
    tried, ended = run_child(Search(config, args.vocab_size, setup, sizes, limit, gain))
    if not tried:
        fail(f"--batch_size=0: not even a batch of 1 fits into {costs.format_bytes(limit or 0)}; "
             f"choose a smaller --dim (now {args.dim}), --n_layers (now {args.n_layers}) or "
             f"--max_seq_len (now {config.max_seq_len})")
    best = tried[0]
    for larger in tried[1:]:
        if larger.speed >= gain * best.speed:
            best = larger
    passes = sequences // best.size
    distributed.say(f"batch_size {best.size} x gradient_accumulation_steps {passes} make the "
                    f"{sequences} sequences per step of the settings: {best.speed:,.0f} tokens/s "
                    f"in {costs.format_bytes(best.peak)}; {ended}")
    return {"batch_size": best.size, "gradient_accumulation_steps": passes}


def run_child(search):
    """
    Return ([Fit] in ascending order, the reason why no larger batch was tried).
    """
    context = multiprocessing.get_context("spawn")
    receive, send = context.Pipe(duplex=False)
    child = context.Process(target=try_batches, daemon=True, args=(send, search))
    child.start()
    send.close()  # then only the child holds this end: recv() raises EOFError when it ends
    tried, ended = [], "all have been tried"
    try:
        while True:
            answer = receive.recv()
            if isinstance(answer, str):  # the reason for ending
                ended = answer
            else:
                tried.append(answer)
    except EOFError:
        child.join()
    if child.exitcode:  # the system killed it, most likely, as memory was short
        ended = f"{search.sizes[len(tried)]} did not fit"
    return tried, ended


def try_batches(send, search):
    """
    Take steps of each size, in the child process. Send a Fit for each, and finally the reason why
    no larger one is tried.
    """
    device, limit = search.setup.device, search.limit
    limit_memory(device, limit)
    best, not_faster = 0, 0
    try:
        trial = costs.TrialTraining(search.config, search.vocab_size, search.setup)
        for size in search.sizes:
            times = []
            for _ in range(3):
                times.append(costs.timed(trial.forward_backward, size))
                trial.update()
            peak = hardware.peak_memory(device)
            speed = size * search.config.max_seq_len / min(times[1:])
            if limit and peak > limit:
                return send.send(f"{size} takes {costs.format_bytes(peak)}, and only "
                                 f"{costs.format_bytes(limit)} is available")
            send.send(Fit(size, peak, speed))
            if speed >= search.gain * best:
                best, not_faster = speed, 0
            else:
                not_faster += 1
            if not_faster == 2:  # a single one may have been slowed down by other programs
                return send.send("larger ones are not faster")
    except (MemoryError, RuntimeError) as e:
        if not hardware.is_out_of_memory(e):
            raise
        send.send(f"{size} did not fit")
    finally:
        send.close()


def limit_memory(device, limit):
    """
    Make allocations beyond `limit` bytes fail on a CPU, and make this process the first that the
    system kills when memory is short. Linux only.
    """
    if device.type == "cpu":
        hardware.keep_memory()
    if sys.platform != "linux":
        return
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    if device.type == "cpu" and limit:
        import resource
        reserved = hardware.status_bytes("VmData")
        # The system limits the bytes that a process reserves, and a process reserves more than it
        # uses. So the new limit is the bytes reserved now plus those that it may still use.
        new = reserved + max(0, int(limit) - hardware.current_memory(device))
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        if hard != resource.RLIM_INFINITY:
            new = min(new, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (new, hard))
