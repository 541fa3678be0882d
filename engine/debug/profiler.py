"""
--profile=True: where the time of a training step goes. train_step marks its spans; torch.profiler records some steps of a
training after a warm-up. A table by span, the largest ops beside what the device could do, and a trace.
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

WARM, STEPS = 4, 5  # steps before the profile, and in it
WIDEST = 1 << 28    # bytes of the largest copy that is timed


def profile(t, train_step):
    """Take WARM + STEPS steps, STEPS of them recorded and with one row of the log; print the table, write the trace."""
    kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (t.device.type == "cuda")
    schedule = torch.profiler.schedule(wait=WARM - 1, warmup=1, active=STEPS, repeat=1)
    profiler = torch.profiler.profile(activities=kinds, schedule=schedule, record_shapes=True)
    spike_detector, norms, clock = SpikeDetector(t.config.spike_z), UpdateNorms(t.model), []
    if hasattr(t.network, "register_comm_hook"):
        t.network.register_comm_hook(None, distributed.average_at_once)
    measure(True)
    with silent_stderr():
        profiler.start()
    for step in range(WARM + STEPS):
        clock.append(time.perf_counter())
        norms.wanted = is_last = step == WARM + STEPS - 1
        t.opt.set_rate(learning_rate_at(t.config, step, t.config.max_iters))
        x, y = t.dataset.batch(step)
        loss, norm, _ = train_step(t, step, x, y, spike_detector, norms)
        if is_last:
            with span("logging"):
                loss.item()
                norm.item()
                norms.take()
        clock.append(time.perf_counter())
        with silent_stderr():
            profiler.step()
    measure(False)
    if distributed.master:
        report(t, profiler, clock)


def phase_seconds(events):
    """{phase: seconds} of the profiler's events: what each span takes by itself, without those within it, in any thread."""
    spans = sorted((e.time_range.start, -e.time_range.end, e.name) for e in events
                    if e.name in PHASES and e.device_type == torch.autograd.DeviceType.CPU)
    seconds, open_ = Counter(), []  # open_: (end, name) of the spans around the next one
    for start, end, name in spans:
        while open_ and open_[-1][0] <= start:
            open_.pop()
        took = (-end - start) / 1e6
        seconds[name] += took
        if open_:
            seconds[open_[-1][1]] -= took
        open_.append((-end, name))
    return seconds


def report(t, profiler, clock):
    """Print the tables, and where the trace is. clock: seconds at the begin and the end of each step."""
    events, record, config = profiler.events(), t.record, t.config
    steps = [end - begin for begin, end in zip(clock[::2], clock[1::2])]
    wall, plain = sum(steps[WARM:]), steps[WARM - 2]
    seconds = phase_seconds(events)
    seconds["waiting"] = wall - sum(seconds.values())
    say(f"profile: {STEPS} steps of {record['tokens_per_iter']:,} tokens with one row of the log in {1e3 * wall:.1f} ms by "
        f"the clock, {1e3 * wall / STEPS:.2f} ms a step; without the profiler {1e3 * plain:.2f} ms")
    for name in (*PHASES, "waiting"):
        say(f"  {name:<14} {100 * seconds[name] / wall:6.2f} %  {1e3 * seconds[name] / STEPS:9.3f} ms a step")
    say(f"  {'sum':<14} {100 * sum(seconds.values()) / wall:6.2f} %")
    say(f"the ten largest ops, against {record['peak_flops'] / 1e12:.3g} TFLOP/s ({record['mfu_basis']}) and against a copy "
        f"of as many bytes:")
    say(f"  {'op':<46} {'calls':>7} {'ms a step':>10} {'share':>8}   of the roofline")
    for op in largest_ops(events, record["peak_flops"], t.device, t.amp):
        say(f"  {op.name[:46]:<46} {op.calls / STEPS:7.0f} {1e3 * op.seconds / STEPS:10.3f} {100 * op.seconds / wall:6.1f} %   "
            f"{op.roofline}")
    trace = artifact(config, "json.gz")
    profiler.export_chrome_trace(str(trace))
    say(f"wrote {trace}: open it at https://ui.perfetto.dev")


def largest_ops(events, peak_flops, device, amp, most=10):
    """
    The ops that take the most time by themselves, as objects with name, calls, seconds and roofline: the share of the time
    that their FLOPs, or their bytes if those take longer, need at the peak of this device.
    """
    ops = defaultdict(lambda: SimpleNamespace(name="", calls=0, seconds=0.0, ideal=Counter()))
    for e in events:
        seconds = (e.self_cpu_time_total if device.type == "cpu" else e.self_device_time_total) / 1e6
        if e.is_user_annotation or e.name in PHASES or e.name.startswith("ProfilerStep") or not seconds:
            continue
        op = ops[e.name]
        op.name, op.calls, op.seconds = e.name, op.calls + 1, op.seconds + seconds
        flops, moved = work(e.name, e.input_shapes or [], 2 if amp._enabled and "mm" in e.name else 4)
        computing, copying = flops / peak_flops, copy_seconds(moved, device)
        op.ideal["FLOPs" if computing > copying else "bytes"] += max(computing, copying)
    found = sorted(ops.values(), key=lambda op: -op.seconds)[:most]
    for op in found:
        kind, _ = max(op.ideal.items(), key=lambda item: item[1])
        share = sum(op.ideal.values()) / op.seconds
        op.roofline = f"{100 * share:.0f} % ({kind})" if share else "-"
    return found


def work(name, shapes, itemsize=4):
    """(FLOPs, bytes) of one call, about, by the shapes of its inputs: of products and attention; of all else the bytes."""
    shapes = [shape for shape in shapes if shape and all(isinstance(n, int) for n in shape)]
    sizes = [math.prod(shape) for shape in shapes]
    if not shapes:
        return 0, 0
    flops, out = 0, 0 if name == "aten::copy_" else max(sizes)
    if "mm" in name and len(shapes) > 1:
        a, b = shapes[1:3] if "add" in name and len(shapes) > 2 else shapes[:2]
        flops, out = 2 * math.prod(a) * b[-1], math.prod(a) // a[-1] * b[-1]
    elif "scaled_dot_product" in name and len(shapes) > 2:
        (*heads, q, width), k = shapes[1 if "backward" in name else 0], shapes[2 if "backward" in name else 1]
        flops = (10 if "backward" in name else 4) * math.prod(heads) * q * k[-2] * width
    return flops, itemsize * (sum(sizes) + out)


@functools.cache
def copied(size, device):
    """Bytes a second, read and written, of a copy that reads and writes `size` bytes together."""
    a, b = (torch.empty(max(1, size // 8), device=device) for _ in range(2))
    best, end, times = math.inf, time.perf_counter() + 0.01, 0
    while time.perf_counter() < end or times < 5:
        times += 1
        start = time.perf_counter()
        b.copy_(a)
        if device.type != "cpu":
            torch.accelerator.synchronize()
        best = min(best, time.perf_counter() - start)
    return size / best


def copy_seconds(size, device):
    """The time in which `size` bytes can be read and written, at the speed of a copy of about as many."""
    return size / copied(1 << min(size, WIDEST).bit_length(), device) if size else 0.0
