"""
Named spans of a training step for torch.profiler; --profile=True sums them up as phases
(engine/debug/profiler.py).

    with span("forward"):
        loss = model(x, y)[1]

Without a profiler a span costs a function call. Time in nested spans counts for the inner one.
"""
import contextlib
import functools

import torch

NOTHING = contextlib.nullcontext()
PHASES = ("data", "forward", "backward", "clipping", "optimizer", "communication", "logging")
measured = False  # --profile: each span waits for the GPU, and DDP communicates after backward


def measure(on):
    """Begin or end the measurement of phases."""
    global measured
    measured = on


def span(name):
    """Return a context that a profiler shows under this name, one of PHASES."""
    if torch.compiler.is_compiling() or not torch.autograd._profiler_enabled():
        return NOTHING
    if measured and torch.accelerator.is_available():
        return waited(name)
    return torch.profiler.record_function(name)


@contextlib.contextmanager
def waited(name):
    """A span that ends when the device has finished, so that its time counts for this span."""
    with torch.profiler.record_function(name):
        yield
        torch.accelerator.synchronize()


def spanned(name):
    """Decorate a function: its calls are spans of this name."""
    def decorate(function):
        @functools.wraps(function)
        def call(*arguments, **named):
            with span(name):
                return function(*arguments, **named)
        return call
    return decorate
