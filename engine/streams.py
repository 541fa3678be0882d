"""
The standard streams of a program: what may reach a terminal, and streams that are closed or that lose their reader.

Names, settings, vocabularies and metadata are text that anyone may have written. A terminal obeys control characters in
it: they move the cursor, hide lines, or type commands.
"""
import contextlib
import io
import os
import re
import select
import sys

broken = {}  # {"stdout" or "stderr": [bytes lost, why]} of each Console that could not be written to and was not told of yet
CONTROL = r"\0-\x08\x0b-\x1f\x7f-\x9f"         # C0 without tab and newline, DEL, C1
HIDDEN = r"\u2028\u2029\u202a-\u202e\u2066-\u2069"  # line separators; marks that reverse the order of text
LONE = r"\ud800-\udfff"                           # halves of surrogate pairs, which have no encoding
ODD = re.compile(f"[{CONTROL}{HIDDEN}{LONE}]")
ODD_IN_A_LINE = re.compile(f"[\t\n{CONTROL}{HIDDEN}{LONE}]")
CONTROLS = re.compile(f"[{CONTROL}]")
BAR_UP = re.compile(r"(\x1b\[A)+")  # tqdm writes this by itself, to move from one bar to another


def printable(text, pattern=ODD):
    """Return a text whose control characters are spelled out (`\\x1b`), so that a terminal shows them and obeys none."""
    return pattern.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def one_line(text):
    """Return the same as printable() for a part of a line: newlines and tabs are spelled out, too."""
    return printable(str(text), ODD_IN_A_LINE)


def generated(text):
    """Return a model's text as `run` prints it: without control characters other than newline and tab."""
    return CONTROLS.sub("", text)


class PrintableStream(io.TextIOWrapper):
    """stdout or stderr, to which all text is written as printable() returns it; progress bars keep what moves them."""

    def write(self, text):
        if not self.bars:
            super().write(printable(text))
        elif BAR_UP.fullmatch(text):
            super().write(text)
        else:
            start = text[:text.startswith("\r")]
            super().write(start + printable(text[len(start):]))
        return len(text)


def printable_stream(name, buffer, like):
    """Return a PrintableStream that writes to a buffer in place of `like`, the stream of this name."""
    stream = PrintableStream(buffer, like.encoding, "backslashreplace",  # a character that the encoding lacks
                             line_buffering=like.line_buffering, write_through=like.write_through)
    stream.bars, stream.mode = name == "stderr", "w"
    return stream


def open_streams():
    """At the start of a program: open streams that are closed, and let nothing be printed that a terminal obeys."""
    for name, mode in ("stdin", "r"), ("stdout", "w"), ("stderr", "w"):
        if getattr(sys, name) is None:  # closed by whoever started the program: the next file would have its number
            setattr(sys, name, open(os.devnull, mode))
    for name in "stdout", "stderr":
        stream = getattr(sys, name)
        if type(stream) is io.TextIOWrapper and stream is getattr(sys, f"__{name}__"):  # no notebook's, no test's
            safe = printable_stream(name, stream.buffer, stream)
            safe.before = stream  # the buffer would be closed with it; others, such as pytest -s, may write to it still
            setattr(sys, name, safe)
            setattr(sys, f"__{name}__", safe)
    if sys.stderr is sys.__stderr__:  # not captured by a test or a notebook
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
            if size is None:  # the pipe is non-blocking and full
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
        setattr(sys, name, printable_stream(name, console, stream))


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


@contextlib.contextmanager
def silent_stderr():
    """Discard what libraries write to file descriptor 2, below Python's stderr."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
