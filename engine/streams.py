"""What a program says, and whether anybody hears it: stdout and stderr that are closed, or that lose their reader."""
import contextlib
import os
import select
import sys


def open_streams():
    """At the start of a program: streams that can be written to, whatever is printed."""
    for name, mode in ("stdin", "r"), ("stdout", "w"), ("stderr", "w"):
        if getattr(sys, name) is None:  # closed by whoever started the program: the next file would have its number
            setattr(sys, name, open(os.devnull, mode))
    with contextlib.suppress(AttributeError):  # a notebook's stdout
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr has it: a name that the terminal's encoding lacks


@contextlib.contextmanager
def unread():
    """What is printed into a pipe whose reader has gone (`... | head`) is lost, and nothing else happens."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        for stream in filter(gone, (sys.stdout, sys.stderr)):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def gone(stream):
    """Whether a stream is a pipe that nobody reads any more."""
    poll = select.poll()
    with contextlib.suppress(ValueError):  # no file
        poll.register(stream, 0)
    return bool(poll.poll(0))


def tell(text, file=None):
    """A line for whoever still listens."""
    with unread():
        print(f"{text}\n", end="", file=file or sys.stdout, flush=True)  # at once: threads may tell something, too
