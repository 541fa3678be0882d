"""
Named spans of a training step for torch.profiler. With --profile=True, engine/debug/profiler.py
adds up their time by name, the phase.

    with span("forward"):
        loss = model(x, y)[1]

Without a profiler a span costs a function call. Time in nested spans counts for the innermost only.
"""
import contextlib
import functools

import torch

NOTHING = contextlib.nullcontext()
PHASES = ("data", "forward", "backward", "clipping", "optimizer", "communication", "logging")
measured = False  # True during --profile: each span then ends only when the GPU has finished


def measure(on):
    """Set whether spans wait for the GPU, so that its time counts for the span that uses it."""
    global measured
    measured = on


def span(name):
    """Return a context that a profiler shows under this name, one of PHASES."""
    if torch.compiler.is_compiling() or not torch.autograd._profiler_enabled():
        return NOTHING
    if measured and torch.accelerator.is_available():
        return synchronized(name)
    return torch.profiler.record_function(name)


@contextlib.contextmanager
def synchronized(name):
    """Span that ends when the GPU has finished, so that the GPU's time counts for this span."""
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
