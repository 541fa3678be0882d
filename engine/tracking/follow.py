"""A Tee passes on what this program prints; follow runs another program and logs what it prints."""
import codecs
import contextlib
import errno
import os
import select
import signal
import subprocess
import sys
import threading

from configurator import fail
from engine.tracking.console import LINE, Parser
from engine.tracking.redact import redact
from engine.streams import tell


def shown(line):
    """What a terminal shows of a line: each carriage return lets the next text overwrite what stood there."""
    return line.rstrip("\r").rpartition("\r")[2]


class Tee:
    """stdout or stderr that also calls `listen` with each finished line, redacted, as a terminal shows it in the end."""

    def __init__(self, stream, listen):
        self.stream, self.listen, self.line = getattr(stream, "stream", stream), listen, ""
        self.lock = threading.RLock()  # threads print, and so may `listen`

    def write(self, text):
        with self.lock:
            *lines, line = (self.line + text).split("\n")
            self.line = shown(line)[:2 * LINE] + "\r" * line.endswith("\r")
            for ended in lines:
                self.tell(shown(ended))
            return self.stream.write(text)

    def tell(self, line):
        """A secret that the cut at LINE would halve is still whole, and redacted, in twice as much."""
        self.listen(redact(line[:2 * LINE])[:LINE] + "\n")

    def end(self):
        """Pass on the line that was begun; returns the stream."""
        if shown(self.line):
            self.tell(shown(self.line))
        return self.stream

    def __getattr__(self, name):
        return getattr(self.stream, name)


# ---- following a program ----------------------------------------------------------------------

SILENT_SECONDS = 10  # max silence of processes that a failed program left with its output open


def pass_on(data):
    """Write all data to stdout, whatever interrupts a write; return the OSError that stops it."""
    try:
        while data:
            try:
                data = data[os.write(1, data):]
            except BlockingIOError:  # a pipe that somebody else has made non-blocking
                select.select([], [1], [])
    except OSError as e:
        return e
    return None


class Warnings:
    """Warnings on stderr, each kind once; a stderr that cannot be written stops nothing."""

    def __init__(self):
        self.told = set()

    def __call__(self, kind, text):
        if kind not in self.told:
            self.told.add(kind)
            with contextlib.suppress(OSError):
                tell(f"warning: {text}", sys.stderr)


class Child:
    """A started program; signals that this process receives are forwarded to it."""

    def __init__(self, command):
        self.orphaned = False  # processes that the ended program left hold its output open
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                        env=os.environ | {"PYTHONUNBUFFERED": "1"})
        numbers = (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1,
                   signal.SIGUSR2)
        self.previous = {number: signal.signal(number, self.forward) for number in numbers}

    def forward(self, number, frame):
        if self.orphaned:
            raise KeyboardInterrupt
        from_terminal = number in (signal.SIGINT, signal.SIGQUIT) and sys.stdin.isatty()
        if not from_terminal:  # which sends it to the program, too
            self.process.send_signal(number)

    def chunks(self, warn):
        """Yield the program's output as bytes, until its last writer closes it."""
        output, silent = self.process.stdout, 0
        while True:
            if not select.select([output], [], [], 1)[0]:
                silent += 1
                code = self.process.poll()
                if code is not None:
                    self.orphaned = True
                    warn("orphans", "the program has ended, but processes that it left still hold "
                                    "its output open; Ctrl-C stops waiting for them")
                    if code != 0 and silent >= SILENT_SECONDS:
                        return
                continue
            silent = 0
            if not (chunk := os.read(output.fileno(), 1 << 16)):
                return
            yield chunk

    def wait(self):
        """Return the exit code, negative for a signal, and forward no more signals."""
        code = self.process.wait()
        for number, handler in self.previous.items():
            signal.signal(number, handler)
        return code


def follow(command, tracker, parser: Parser):
    """
    Run a command, pass on its output byte by byte, its input, signals and exit code, and log what
    it prints. What cannot be passed on or logged costs a warning; the program runs on.
    """
    warn = Warnings()
    try:
        child = Child(command)
    except OSError as e:
        tracker.finish()
        fail(f"{command[0]}: cannot be started ({e.strerror})")

    def log(text, end=False):
        for row in parser.feed(text, end):
            try:
                tracker.log(row)
            except Exception as e:
                parser.error = e
        if parser.error:
            warn("row", f"a line of the program could not be tracked ({parser.error!r}); "
                        "the program runs on")

    decode = codecs.getincrementaldecoder("utf-8")("replace").decode  # a chunk may end within a character
    try:
        for chunk in child.chunks(warn):
            error = pass_on(chunk)
            if error and error.errno != errno.EPIPE:  # EPIPE: the reader has left on purpose
                warn("output", f"the program's output cannot be written ({error.strerror}); "
                               "the program runs on, and its metrics are logged")
            log(decode(chunk))
    except KeyboardInterrupt:  # see Child.forward
        pass
    log(decode(b"", True), end=True)
    return child.wait()
