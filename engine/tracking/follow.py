"""Tee records the output of this program; follow() runs another program and logs its metrics."""
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
from engine.tracking.console import MAX_LINE, Parser
from engine.tracking.redact import redact
from engine.streams import tell


def shown(line):
    """Return what a terminal shows of a line: text after a carriage return overwrites the line."""
    return line.rstrip("\r").rpartition("\r")[2]


class Tee:
    """
    A stdout or stderr that also passes each finished line to listen(line), redacted and as a
    terminal shows it.
    """

    def __init__(self, stream, listen):
        self.stream = getattr(stream, "stream", stream)  # replace another Tee, do not wrap it
        self.listen = listen
        self.line = ""  # unfinished line
        self.lock = threading.RLock()  # several threads print, and `listen` may print

    def write(self, text):
        with self.lock:
            *lines, line = (self.line + text).split("\n")
            # Keep a last "\r": the next text overwrites the line, or "\n" ends it.
            self.line = shown(line)[:2 * MAX_LINE] + "\r" * line.endswith("\r")
            for ended in lines:
                self.emit(shown(ended))
            return self.stream.write(text)

    def emit(self, line):
        # Redact before the cut at MAX_LINE: half a secret would not be recognized.
        self.listen(redact(line[:2 * MAX_LINE])[:MAX_LINE] + "\n")

    def end(self):
        """Pass on the unfinished line, and return the original stream."""
        if shown(self.line):
            self.emit(shown(self.line))
        return self.stream

    def __getattr__(self, name):
        return getattr(self.stream, name)


# ---- another program ----------------------------------------------------------------------------

SILENT_SECONDS = 10  # max silence of processes that a failed program left behind


def pass_on(data):
    """Write all data to stdout; return None, or the OSError if that fails."""
    try:
        while data:
            try:
                data = data[os.write(1, data):]
            except BlockingIOError:  # another program made the pipe non-blocking
                select.select([], [1], [])
    except OSError as e:
        return e
    return None


class Warnings:
    """Prints warnings to stderr, only the first of each kind. Failures to print are ignored."""

    def __init__(self):
        self.printed = set()

    def __call__(self, kind, text):
        if kind not in self.printed:
            self.printed.add(kind)
            with contextlib.suppress(OSError):
                tell(f"warning: {text}", sys.stderr)


class Child:
    """A program in a child process; signals that this process receives are forwarded to it."""

    def __init__(self, command):
        self.orphaned = False  # the program has ended, but its children hold its output open
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                        env=os.environ | {"PYTHONUNBUFFERED": "1"})
        forwarded = (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1,
                     signal.SIGUSR2)
        self.handlers = {number: signal.signal(number, self.forward) for number in forwarded}

    def forward(self, number, frame):
        if self.orphaned:
            raise KeyboardInterrupt  # ends the reading in follow()
        from_terminal = number in (signal.SIGINT, signal.SIGQUIT) and sys.stdin.isatty()
        if not from_terminal:  # a terminal sends these to the child, too
            self.process.send_signal(number)

    def chunks(self, warn):
        """
        Yield the program's output as bytes until the last process that holds it open ends; if the
        program has failed, only until these processes print nothing for SILENT_SECONDS.
        """
        output, silent_seconds = self.process.stdout, 0
        while True:
            if not select.select([output], [], [], 1)[0]:  # no output within 1 s
                silent_seconds += 1
                code = self.process.poll()
                if code is not None:
                    self.orphaned = True
                    warn("orphans", "the program has ended, but processes that it left still hold "
                                    "its output open; Ctrl-C stops waiting for them")
                    if code != 0 and silent_seconds >= SILENT_SECONDS:
                        return
                continue
            silent_seconds = 0
            if not (chunk := os.read(output.fileno(), 1 << 16)):  # end of file
                return
            yield chunk

    def wait(self):
        """Wait for the exit and stop forwarding; return the exit code, -N after signal N."""
        code = self.process.wait()
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        return code


def follow(command, tracker, parser: Parser):
    """
    Run a command and log the metrics that it prints; return its exit code. Its output, input and
    signals are passed on unchanged. A failure to print or to log causes one warning, and the
    command keeps running.
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

    # Incremental: a chunk may end within a character.
    decode = codecs.getincrementaldecoder("utf-8")("replace").decode
    try:
        for chunk in child.chunks(warn):
            error = pass_on(chunk)
            # EPIPE needs no warning: the reader, such as head, has ended.
            if error and error.errno != errno.EPIPE:
                warn("output", f"the program's output cannot be written ({error.strerror}); "
                               "the program runs on, and its metrics are logged")
            log(decode(chunk))
    except KeyboardInterrupt:  # from Child.forward
        pass
    log(decode(b"", True), end=True)
    return child.wait()
