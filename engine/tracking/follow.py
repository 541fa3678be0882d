"""What programs print: Tee records this one's output, follow() runs and tracks another one."""
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
    """stdout or stderr that also passes each finished line, redacted and as shown, to `listen`."""

    def __init__(self, stream, listen):
        self.stream, self.listen = getattr(stream, "stream", stream), listen
        self.line = ""  # not finished yet
        self.lock = threading.RLock()  # several threads print, and `listen` may print

    def write(self, text):
        with self.lock:
            *lines, line = (self.line + text).split("\n")
            self.line = shown(line)[:2 * MAX_LINE] + "\r" * line.endswith("\r")
            for ended in lines:
                self.tell(shown(ended))
            return self.stream.write(text)

    def tell(self, line):
        # Redact before the cut at MAX_LINE: it might halve a secret, which then looks like none.
        self.listen(redact(line[:2 * MAX_LINE])[:MAX_LINE] + "\n")

    def end(self):
        """Pass on the unfinished line, and return the original stream."""
        if shown(self.line):
            self.tell(shown(self.line))
        return self.stream

    def __getattr__(self, name):
        return getattr(self.stream, name)


# ---- another program ----------------------------------------------------------------------------

SILENT_SECONDS = 10  # max wait for output of processes that a failed program left behind


def pass_on(data):
    """Write all data to stdout; return the OSError that stops this, or None."""
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
    """Prints warnings to stderr, one of each kind. It ignores a stderr that cannot be written."""

    def __init__(self):
        self.printed = set()

    def __call__(self, kind, text):
        if kind not in self.printed:
            self.printed.add(kind)
            with contextlib.suppress(OSError):
                tell(f"warning: {text}", sys.stderr)


class Child:
    """A started program; signals that this process receives are forwarded to it."""

    def __init__(self, command):
        self.orphaned = False  # the program has ended, but its own processes hold its output open
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                        env=os.environ | {"PYTHONUNBUFFERED": "1"})
        forwarded = (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1,
                     signal.SIGUSR2)
        self.handlers = {number: signal.signal(number, self.forward) for number in forwarded}

    def forward(self, number, frame):
        if self.orphaned:
            raise KeyboardInterrupt
        from_terminal = number in (signal.SIGINT, signal.SIGQUIT) and sys.stdin.isatty()
        if not from_terminal:  # a terminal sends these to the program itself
            self.process.send_signal(number)

    def chunks(self, warn):
        """Yield the program's output as bytes, until the last process that holds it open ends."""
        output, silent_seconds = self.process.stdout, 0
        while True:
            if not select.select([output], [], [], 1)[0]:
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
            if not (chunk := os.read(output.fileno(), 1 << 16)):
                return
            yield chunk

    def wait(self):
        """Return the exit code, negative for a signal, and stop forwarding signals."""
        code = self.process.wait()
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        return code


def follow(command, tracker, parser: Parser):
    """
    Run a command and log the metrics that it prints. Its output is passed on byte by byte, and so
    are input and signals; return its exit code. What fails meanwhile costs a warning.
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

    # Incremental, as a chunk may end within a character.
    decode = codecs.getincrementaldecoder("utf-8")("replace").decode
    try:
        for chunk in child.chunks(warn):
            error = pass_on(chunk)
            if error and error.errno != errno.EPIPE:  # EPIPE: the reader, such as head, has ended
                warn("output", f"the program's output cannot be written ({error.strerror}); "
                               "the program runs on, and its metrics are logged")
            log(decode(chunk))
    except KeyboardInterrupt:  # see Child.forward
        pass
    log(decode(b"", True), end=True)
    return child.wait()
