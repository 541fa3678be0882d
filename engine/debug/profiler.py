"""
--profile=True: measure where the time of a training step goes. train_step marks its spans;
torch.profiler records some steps after a warm-up. The result is a table of the spans, a table of
the largest ops with the share of the device's peak that each reaches, and a trace.
"""
import functools
import math
import time
from collections import Counter, defaultdict
from types import SimpleNamespace

import torch
from torch.profiler import ProfilerActivity

from engine.debug.instruments import UpdateNorms
from engine.spans import PHASES, measure, span
from engine.streams import silent_stderr
from engine.training import distributed
from engine.training.distributed import say
from engine.training.mode import artifact
from optim import SpikeDetector, learning_rate_at

WARMUP_STEPS, STEPS = 4, 5  # steps before the profile, and in it
MAX_COPY = 1 << 28          # max bytes of a timed copy, which moves twice as many: reads and writes


def profile(t, train_step):
    """
    Profile STEPS steps after WARMUP_STEPS others, and report the result. The last step computes a
    row of the log.
    """
    activities = [ProfilerActivity.CPU]
    if t.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    schedule = torch.profiler.schedule(wait=WARMUP_STEPS - 1, warmup=1, active=STEPS, repeat=1)
    profiler = torch.profiler.profile(activities=activities, schedule=schedule, record_shapes=True)
    spike_detector, update_norms = SpikeDetector(t.config.spike_z), UpdateNorms(t.model)
    clock = []  # seconds at the start and at the end of each step
    if hasattr(t.network, "register_comm_hook"):  # DDP: separate its communication from backward()
        t.network.register_comm_hook(None, distributed.average_at_once)
    measure(True)
    with silent_stderr():
        profiler.start()
    for step in range(WARMUP_STEPS + STEPS):
        clock.append(time.perf_counter())
        update_norms.wanted = is_last = step == WARMUP_STEPS + STEPS - 1
        t.opt.set_rate(learning_rate_at(t.config, step, t.config.max_iters))
        x, y = t.dataset.batch(step)
        loss, norm, _ = train_step(t, step, x, y, spike_detector, update_norms)
        if is_last:
            with span("logging"):
                loss.item()
                norm.item()
                update_norms.take()
        clock.append(time.perf_counter())
        with silent_stderr():
            profiler.step()
    measure(False)
    if distributed.master:
        report(t, profiler, clock)


def phase_seconds(events):
    """
    Return {phase: seconds} of the profiler's events: the time of the spans of each phase, without
    the spans nested in them. Spans nest by time even across threads: "communication" may run in
    autograd's thread, within "backward".
    """
    spans = [(e.time_range.start, e.time_range.end, e.name) for e in events
             if e.name in PHASES and e.device_type == torch.autograd.DeviceType.CPU]
    seconds, enclosing = Counter(), []  # enclosing: (end, name) of the spans around the current one
    for start, end, name in sorted(spans, key=lambda span: (span[0], -span[1])):
        while enclosing and enclosing[-1][0] <= start:
            enclosing.pop()
        duration = (end - start) / 1e6
        seconds[name] += duration
        if enclosing:
            seconds[enclosing[-1][1]] -= duration
        enclosing.append((end, name))
    return seconds


def report(t, profiler, clock):
    """
    Print the tables and write the trace. clock: seconds at the start and at the end of each step.
    """
    events, record = profiler.events(), t.record
    steps = [end - begin for begin, end in zip(clock[::2], clock[1::2])]
    wall = sum(steps[WARMUP_STEPS:])
    unprofiled = steps[WARMUP_STEPS - 2]  # the profiler warms up in the next step
    seconds = phase_seconds(events)
    seconds["waiting"] = wall - sum(seconds.values())
    say(f"profile: {STEPS} steps of {record['tokens_per_iter']:,} tokens with one row of the log "
        f"in {1e3 * wall:.1f} ms by the clock, {1e3 * wall / STEPS:.2f} ms a step; without the "
        f"profiler {1e3 * unprofiled:.2f} ms")
    for name in (*PHASES, "waiting"):
        say(f"  {name:<14} {100 * seconds[name] / wall:6.2f} %  "
            f"{1e3 * seconds[name] / STEPS:9.3f} ms a step")
    say(f"  {'sum':<14} {100 * sum(seconds.values()) / wall:6.2f} %")
    say(f"the ten largest ops, against {record['peak_flops'] / 1e12:.3g} TFLOP/s "
        f"({record['mfu_basis']}) and against a copy of as many bytes:")
    say(f"  {'op':<46} {'calls':>7} {'ms a step':>10} {'share':>8}   of the roofline")
    for op in largest_ops(events, record["peak_flops"], t.device, t.amp):
        say(f"  {op.name[:46]:<46} {op.calls / STEPS:7.0f} {1e3 * op.seconds / STEPS:10.3f} "
            f"{100 * op.seconds / wall:6.1f} %   {op.roofline}")
    trace = artifact(t.config, "json.gz")
    profiler.export_chrome_trace(str(trace))
    say(f"wrote {trace}: open it at https://ui.perfetto.dev")


def largest_ops(events, peak_flops, device, amp, max_ops=10):
    """
    Return the ops that take the most time, without the time of the ops that they call, as objects
    with name, calls, seconds and roofline. The roofline is the ideal time as a share of the
    seconds: the time of the FLOPs at the device's peak or of the bytes at the speed of a copy,
    whichever is longer, summed over the calls.
    """
    ops = defaultdict(lambda: SimpleNamespace(name="", calls=0, seconds=0.0, ideal=Counter()))
    for e in events:
        on_cpu = device.type == "cpu"
        seconds = (e.self_cpu_time_total if on_cpu else e.self_device_time_total) / 1e6
        is_span = e.is_user_annotation or e.name in PHASES or e.name.startswith("ProfilerStep")
        if is_span or not seconds:
            continue
        op = ops[e.name]
        op.name, op.calls, op.seconds = e.name, op.calls + 1, op.seconds + seconds
        itemsize = 2 if amp._enabled and "mm" in e.name else 4  # autocast acts on the products
        flops, size = work(e.name, e.input_shapes or [], itemsize)
        computing, copying = flops / peak_flops, copy_seconds(size, device)
        op.ideal["FLOPs" if computing > copying else "bytes"] += max(computing, copying)
    found = sorted(ops.values(), key=lambda op: -op.seconds)[:max_ops]
    for op in found:
        kind = max(op.ideal, key=op.ideal.get)
        share = sum(op.ideal.values()) / op.seconds
        op.roofline = f"{100 * share:.0f} % ({kind})" if share else "-"
    return found


def work(name, shapes, itemsize=4):
    """
    Estimate (FLOPs, bytes) of one call from the shapes of its inputs. Only matrix products and
    attention count FLOPs.
    """
    shapes = [shape for shape in shapes if shape and all(isinstance(n, int) for n in shape)]
    sizes = [math.prod(shape) for shape in shapes]
    if not shapes:
        return 0, 0
    # The output has about the size of the largest input; copy_ has its output among the inputs.
    flops, out = 0, 0 if name == "aten::copy_" else max(sizes)
    if "mm" in name and len(shapes) > 1:
        a, b = shapes[1:3] if "add" in name and len(shapes) > 2 else shapes[:2]
        flops, out = 2 * math.prod(a) * b[-1], math.prod(a) // a[-1] * b[-1]
    elif "scaled_dot_product" in name and len(shapes) > 2:
        backward = "backward" in name
        first = 1 if backward else 0  # index of the queries; backward begins with a gradient
        (*heads, q, width), (*_, k, _) = shapes[first:first + 2]
        flops = (10 if backward else 4) * math.prod(heads) * q * k * width
    return flops, itemsize * (sum(sizes) + out)


@functools.cache
def copy_speed(size, device):
    """Measure the bytes/s of a copy that reads and writes `size` bytes in total."""
    # Two arrays of size // 8 float32 values, 4 bytes each.
    a, b = (torch.empty(max(1, size // 8), device=device) for _ in range(2))
    best, end, repeats = math.inf, time.perf_counter() + 0.01, 0
    while time.perf_counter() < end or repeats < 5:
        repeats += 1
        start = time.perf_counter()
        b.copy_(a)
        if device.type != "cpu":
            torch.accelerator.synchronize()
        best = min(best, time.perf_counter() - start)
    return size / best


def copy_seconds(size, device):
    """
    Return the seconds to read and write `size` bytes, at the speed of a copy of the next higher
    power of 2, which is measured once.
    """
    return size / copy_speed(1 << min(size, MAX_COPY).bit_length(), device) if size else 0.0
