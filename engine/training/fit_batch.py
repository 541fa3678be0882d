"""--batch_size=0: the largest batch that fits, by real steps in a process of its own, which may die of it."""
import contextlib
import multiprocessing
import sys

from configurator import fail
from engine.training import costs, distributed, hardware

HEADROOM = 0.1  # of the memory that is free, left to what else a training needs: evaluation, samples, other programs
GAIN = 1.03     # how much faster a larger batch has to be, to be worth its memory


def first_guess(config):
    """
    Return (config, the names given, whether the largest batch is to be found). With --batch_size=0 the batch is the
    preset's or the default until it is found: a step keeps its sequences, and a resumed run has a batch of its own.
    """
    given = config.given.keys()
    if config.batch_size:
        return config, given, False
    return (config.changed(batch_size=max(1, config.given["batch_size"])),
            given - {"batch_size", "gradient_accumulation_steps"}, True)


def batches(sequences, share):
    """The divisors of a step's sequences from 1 to a process's share of them, each half as large again at least."""
    found = []
    for size in range(1, share + 1):
        if sequences % size == 0 and (not found or size >= 1.5 * found[-1]):
            found.append(size)
    return found


def largest_batch(s, args, device, amp_dtype, build, gain=GAIN):
    """
    {"batch_size", "gradient_accumulation_steps"}: as many sequences a step as s has, by the largest forward passes that fit
    into the memory that is free, less HEADROOM, and are faster than smaller ones.
    """
    if s.sharded:
        fail("--batch_size=0 tries a model on one process; with --sharded=True it needs a number")
    sequences, free = s.batch_size * s.gradient_accumulation_steps, hardware.free_memory(device)
    here = 1 if device.type == "cuda" else distributed.local_world
    limit = (1 - HEADROOM) * free / here if free else None
    context = multiprocessing.get_context("spawn")
    receive, send = context.Pipe(duplex=False)
    todo = batches(sequences, costs.sequences_here(s))
    child = context.Process(target=try_batches, daemon=True,
                            args=(send, s, args.vocab_size, build, device, amp_dtype, todo, limit, gain))
    child.start()
    send.close()
    tried, ended = [], "all have been tried"
    try:
        while True:
            answer = receive.recv()
            if isinstance(answer, str):
                ended = answer
            else:
                tried.append(answer)
    except EOFError:
        child.join()
    if child.exitcode:
        ended = f"{todo[len(tried)]} did not fit"
    if not tried:
        fail(f"--batch_size=0: not even a batch of 1 fits into {costs.binary(limit or 0)}; choose a smaller --dim (now "
             f"{args.dim}), --n_layers (now {args.n_layers}) or --max_seq_len (now {s.max_seq_len})")
    size, peak, speed = tried[0]
    for larger in tried[1:]:
        if larger[2] >= gain * speed:
            size, peak, speed = larger
    distributed.say(f"batch_size {size} x gradient_accumulation_steps {sequences // size}, the {sequences} sequences a step that "
                 f"were asked for: {speed:,.0f} tokens/s in {costs.binary(peak)}; {ended}")
    return {"batch_size": size, "gradient_accumulation_steps": sequences // size}


def try_batches(send, s, vocab_size, build, device, amp_dtype, todo, limit, gain):
    """
    In the child: steps of one size after the other; sends (size, peak in bytes, tokens/s) of each, then in words why no more.
    """
    prepare_to_die(device, limit)
    best, idle = 0, 0
    try:
        trial = costs.Rehearsal(s, vocab_size, build, device, amp_dtype)
        for size in todo:
            times = []
            for _ in range(3):
                times.append(costs.timed(trial.forward_backward, size))
                trial.update()
            peak, speed = hardware.peak_memory(device), size * s.max_seq_len / min(times[1:])
            if limit and peak > limit:
                return send.send(f"{size} takes {costs.binary(peak)}, and {costs.binary(limit)} is there for it")
            send.send((size, peak, speed))
            best, idle = (speed, 0) if speed >= gain * best else (best, idle + 1)
            if idle == 2:  # one alone may have met with a busy moment
                return send.send("larger ones are not faster")
    except (MemoryError, RuntimeError) as e:  # of torch, on a CPU and on a GPU
        if not hardware.is_out_of_memory(e):
            raise
        send.send(f"{size} did not fit")
    finally:
        send.close()


def prepare_to_die(device, limit):
    """Linux: a limit that allocations fail at, and to be the first that is killed where memory is short."""
    if device.type == "cpu":
        hardware.keep_memory()
    if sys.platform != "linux":
        return
    with contextlib.suppress(OSError):
        with open("/proc/self/oom_score_adj", "w") as f:
            f.write("1000")
    if device.type == "cpu" and limit:
        import resource
        now = next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmData"))
        most = now + max(0, int(limit) - hardware.memory_now(device))  # what is reserved is more than what is used
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
