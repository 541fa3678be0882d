"""
Standard streams: filter what reaches a terminal; survive streams that are closed or lose their
reader.

Names, settings, vocabularies and metadata may come from anyone. A terminal obeys control characters
in them: they move the cursor, hide lines, or type commands.
"""
import contextlib
import io
import os
import re
import select
import sys
import unicodedata

from engine.system import IS_WINDOWS

CONTROL = r"\0-\x08\x0b-\x1f\x7f-\x9f"              # C0 without tab and newline, DEL, C1
HIDDEN = r"\u2028\u2029\u202a-\u202e\u2066-\u2069"  # line separators; marks that reorder text
LONE = r"\ud800-\udfff"                             # surrogates, which cannot be encoded
UNSAFE = re.compile(f"[{CONTROL}{HIDDEN}{LONE}]")
UNSAFE_IN_A_LINE = re.compile(f"[\t\n{CONTROL}{HIDDEN}{LONE}]")
CONTROLS = re.compile(f"[{CONTROL}]")
CURSOR_UP = re.compile(r"(\x1b\[A)+")  # tqdm writes this alone, to move from one bar to another

# {"stdout" or "stderr": [bytes lost by its first failed write, reason]}; console_notes empties it
failures = {}


def printable(text, pattern=UNSAFE):
    """Return a text with control characters escaped (`\\x1b`), so that no terminal obeys them."""
    return pattern.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def format_seconds(seconds):
    """Return a duration in words, with two digits: 45 s, 3.2 min, 5.1 h, 12 days."""
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 1.5 * size:
            return f"{float(f'{seconds / size:.2g}'):g} {unit}"
    return f"{seconds:.2g} s"


def one_line(text):
    """Return printable() of a value as part of a line: newlines and tabs are escaped too."""
    return printable(str(text), UNSAFE_IN_A_LINE)


def width(text):
    """Return a text's width in terminal columns: 2 for a Chinese character, 0 for an accent."""
    return sum(0 if unicodedata.combining(c) else 1 + (unicodedata.east_asian_width(c) in "WF")
               for c in text)


def pad(text, columns, right=False):
    """Return the text padded with spaces to a width; `right` aligns it to the right."""
    space = " " * (columns - width(text))
    return space + text if right else text + space


def without_controls(text):
    """
    Return a model's text as the program `run` prints it: without control characters, except for
    newline and tab.
    """
    return CONTROLS.sub("", text)


class PrintableStream(io.TextIOWrapper):
    """
    A text stream that writes printable(text). With `bars`, the cursor movements of tqdm's progress
    bars pass unchanged.
    """

    def __init__(self, name, buffer, like):
        """
        name: "stdout" or "stderr"; buffer: binary stream to write to; like: text stream from which
        encoding and buffering are copied.
        """
        super().__init__(buffer, like.encoding, "backslashreplace",
                         line_buffering=like.line_buffering, write_through=like.write_through)
        self.bars = name == "stderr"
        self.mode = "w"  # as open() sets it; other libraries may read it

    def write(self, text):
        if not self.bars:
            super().write(printable(text))
        elif CURSOR_UP.fullmatch(text):
            super().write(text)
        else:
            start = "\r" if text.startswith("\r") else ""
            super().write(start + printable(text[len(start):]))
        return len(text)


def open_streams():
    """Open standard streams that are closed, and filter stdout and stderr. Call it at the start."""
    for name, mode in ("stdin", "r"), ("stdout", "w"), ("stderr", "w"):
        if getattr(sys, name) is None:  # otherwise the next opened file gets its descriptor
            setattr(sys, name, open(os.devnull, mode))
    for name in "stdout", "stderr":
        stream = getattr(sys, name)
        # Streams of a notebook or a test are left alone.
        if type(stream) is io.TextIOWrapper and stream is getattr(sys, f"__{name}__"):
            safe = PrintableStream(name, stream.buffer, stream)
            safe.before = stream  # its destructor would close the buffer, which others may use
            setattr(sys, name, safe)
            setattr(sys, f"__{name}__", safe)
    if sys.stderr is sys.__stderr__:  # not captured by a test or a notebook
        outlast("stderr")


class Console(io.FileIO):
    """
    The file behind stdout or stderr. It drops bytes that can't be written and notes the first such
    failure in `failures`.
    """

    def __init__(self, name, stream):
        super().__init__(stream.fileno(), "wb", closefd=False)
        self.stream_name, self.failed = name, False

    def write(self, data):
        left = memoryview(data)
        while left:
            try:
                size = super().write(left)
            except OSError as e:
                if not self.failed:
                    failures[self.stream_name] = [len(left), e.strerror]
                self.failed = True
                break
            if size is None:  # the pipe is non-blocking and full
                select.select([], [self], [])
            left = left[size or 0:]
        return len(data)


def outlast(name):
    """
    Make print to a stream succeed from here on, even when the terminal, disk or pipe behind it
    fails; what can't be written is dropped. Use it for stderr, and for the stdout of programs that
    write their results to files. name: "stdout" or "stderr".
    """
    stream = getattr(sys, name)
    with contextlib.suppress(AttributeError, OSError, ValueError):  # notebook streams have no file
        if IS_WINDOWS and stream.isatty():  # Python writes Unicode to Windows' terminals by itself
            return
        console = Console(name, stream)
        stream.flush()
        setattr(sys, name, PrintableStream(name, console, stream))


def console_notes():
    """Return rows of the table `notes`: consoles that have failed since the last call."""
    found = [[f"console/{name}", lost, f"bytes could not be written to {name} ({reason}): later "
              "output of the program may be missing there; training continues"]
             for name, (lost, reason) in failures.items()]
    failures.clear()
    return found


def flush_stdout(more=""):
    """Write the output printed so far, and `more`. Return None, or why it can't be written."""
    try:
        with ignore_closed_pipe():
            if more:
                print(end=more)
            return None
    except OSError as e:
        # Discard what is left in the buffer: Python would fail to write it at the exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.stdout.flush()
        return e.strerror


@contextlib.contextmanager
def ignore_closed_pipe():
    """Flush stdout at the end; discard output to a pipe whose reader has exited (`... | head`)."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        for stream in sys.stdout, sys.stderr:
            if reader_exited(stream):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def reader_exited(stream):
    """Return whether a stream is a pipe whose reader has exited; False if it has no file."""
    if not hasattr(select, "poll"):  # Windows, where this can't be determined
        return False
    poll = select.poll()
    with contextlib.suppress(ValueError):  # the stream has no file
        poll.register(stream, 0)  # 0: no events; poll always reports a closed end
    return bool(poll.poll(0))


def print_highlighted(parts):
    """
    Print [(text, whether it is highlighted)] as one text: in green on a terminal, elsewhere, and if
    NO_COLOR is set (https://no-color.org), between ⟦ and ⟧.
    """
    is_coloured = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    for text, is_highlighted in parts:
        begin, end = ("⟦", "⟧") if is_highlighted else ("", "")
        if not (is_highlighted and is_coloured):
            print(f"{begin}{text}{end}", end="")
            continue
        sys.stdout.flush()
        text = f"\x1b[32m{printable(text)}\x1b[0m"  # bypass PrintableStream: it escapes \x1b
        sys.stdout.buffer.write(text.encode(sys.stdout.encoding, "backslashreplace"))
    print()


def tell(text, file=None):
    """Print a line in one write, so that threads' lines don't mix; ignore readers that exited."""
    with ignore_closed_pipe():
        print(f"{text}\n", end="", file=file or sys.stdout, flush=True)


@contextlib.contextmanager
def silent_stderr():
    """Discard what libraries write to file descriptor 2, below Python's stderr."""
    sys.stderr.flush()
    kept, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(null)
