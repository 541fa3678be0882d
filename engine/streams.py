"""What a program says, and whether anybody hears it: stdout and stderr that are closed, or that lose their reader."""
import contextlib
import io
import os
import select
import sys

broken = {}  # {"stdout" or "stderr": [bytes lost, why]} of each Console that could not be written to and was not told of yet


def open_streams():
    """At the start of a program: streams that can be written to, whatever is printed."""
    for name, mode in ("stdin", "r"), ("stdout", "w"), ("stderr", "w"):
        if getattr(sys, name) is None:  # closed by whoever started the program: the next file would have its number
            setattr(sys, name, open(os.devnull, mode))
    with contextlib.suppress(AttributeError):  # a notebook's stdout
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr has it: a name that the terminal's encoding lacks
    if sys.stderr is sys.__stderr__:  # nobody captures it
        outlast("stderr")


class Console(io.FileIO):
    """The file of stdout or stderr of a program that goes on without it: what can't be written is dropped and counted."""

    def __init__(self, name, stream):
        super().__init__(stream.fileno(), "wb", closefd=False)
        self.stream, self.lost = name, 0

    def write(self, data):
        left = memoryview(data)
        while left:
            try:
                size = super().write(left)
            except OSError as e:
                if not self.lost:
                    broken[self.stream] = [len(left), e.strerror]
                self.lost += len(left)
                break
            if size is None:  # the reader of this pipe has switched blocking off
                select.select([], [self], [])
            left = left[size or 0:]
        return len(data)


def outlast(name):
    """
    From here on no print to sys.stdout or sys.stderr fails, whatever happens to the terminal, the disk or the pipe behind
    it. For stderr, and for the stdout of programs whose results are in files.
    """
    stream = getattr(sys, name)
    with contextlib.suppress(AttributeError, OSError, ValueError):  # a notebook's has no file
        console = Console(name, stream)
        stream.flush()
        setattr(sys, name, io.TextIOWrapper(console, stream.encoding, stream.errors, line_buffering=stream.line_buffering,
                                            write_through=stream.write_through))


def console_notes():
    """Rows of the table `notes` about a console that has failed since the last call."""
    found = [[f"console/{name}", lost, f"bytes could not be written to {name} ({why}): what the program prints may be missing "
              "there from here on; training goes on"] for name, (lost, why) in broken.items()]
    broken.clear()
    return found


def flush_stdout(more=""):
    """Write what was printed so far, and `more`. Return None, or why it can't be written; then it is dropped."""
    try:
        with unread():
            if more:
                print(end=more)
            return None
    except OSError as e:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.stdout.flush()
        return e.strerror


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
