"""
Consoles: a Tee passes on what this program prints, a Parser finds metrics in what other programs print, and follow runs
such a program.
"""
import codecs
import json
import math
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time

from configurator import fail
from engine.redact import redact

LINE = 10_000  # characters that are kept of a line of a console


def shown(line):
    """What a terminal shows of a line: each carriage return lets the next text overwrite what stood there."""
    return line.rstrip("\r").rpartition("\r")[2]


class Tee:
    """stdout or stderr, of which every line, as a terminal shows it in the end, also goes, redacted, to `listen`."""

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


class Parser:
    """
    Metrics in what a program prints: Keras' progress bars, `step 10: train loss 2.1, val loss 2.2`, `key=value`, JSON
    lines. feed(text) returns rows; carriage returns and backspaces end a line as a newline does.
    """
    ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
    NUMBER = r"[-+]?(?:(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|nan|inf)(?![\w%/:])(?!\.\d)"
    NAMED = re.compile(r"(?i)(?<![a-z_])(?P<name>[a-z_][\w./-]{0,100}(?: (?:loss|accuracy|acc|perplexity|ppl|rate))?)\s*[=:]\s*"
                       rf"(?P<value>{NUMBER})")
    SPOKEN = re.compile(rf"(?i)\b(?P<name>(?:[a-z_]+ )?(?:loss|accuracy|acc|perplexity|ppl)|step|iter|iteration|epoch)\s+"
                        rf"(?P<value>{NUMBER}|\d+(?=:))")
    BAR = re.compile(r"(?:^|\s)(?P<step>\d+)/(?P<steps>\d+) ?(?:\[[=>.\s-]*\]|[━╸╺ ]{5,})")
    EPOCH = re.compile(r"(?i)\bepoch[ :=]+(?P<epoch>\d+)(?:/\d+)?")
    STEPS = {"step", "iter", "iteration", "global_step", "steps"}

    def __init__(self, patterns=(), interval=1.0):
        """patterns: regular expressions with named groups; interval: seconds between rows of one progress bar."""
        self.patterns, self.interval = [re.compile(p) for p in patterns], interval
        self.text, self.epoch, self.iter, self.pending, self.last = "", None, 0, None, -math.inf

    def feed(self, text, end=False):
        rows = []
        pieces = re.split(r"(\n|\r\n?|\x08+)", text)
        *lines, self.text = [(self.text + pieces[0])[:1 << 20], *pieces[1:]]
        for line, stop in zip(lines[::2], lines[1::2]):
            rows += self.line(line, "\n" in stop)
        if end:
            rows += self.line(self.text, True)
            self.text = ""
        return rows

    def line(self, line, whole):
        """The rows that follow from a line; one that will be overwritten counts every `interval` seconds."""
        found = self.parse(self.ANSI.sub("", line).strip())
        if not found:
            rows, self.pending = [self.pending] if whole and self.pending else [], self.pending if not whole else None
            return rows
        if not whole and time.monotonic() - self.last < self.interval:
            self.pending = found
            return []
        self.pending, self.last = None, time.monotonic()
        return [found]

    def parse(self, line):
        """{"iter", "epoch" where known, metric: number} of a line; None when it has no metric."""
        metrics, line = self.json(line), line[:LINE]
        if metrics is None:
            metrics = {m["name"]: m["value"] for r in (self.SPOKEN, self.NAMED) for m in r.finditer(line)}
        for pattern in self.patterns:
            for match in pattern.finditer(line):
                metrics |= {k: v for k, v in match.groupdict().items() if v}
        numbers = {}
        for name, value in metrics.items():
            try:
                numbers[self.name(name)] = float(value)
            except ValueError:
                continue
        return self.place(line, numbers)

    def json(self, line):
        try:
            found = json.loads(line) if line.startswith("{") else None
            return {k: v for k, v in found.items() if type(v) in (int, float)}
        except (ValueError, AttributeError):
            return None

    @staticmethod
    def name(text):
        """`train loss` and `val_loss` are the loss/train and loss/val of everything else."""
        text = text.strip().lower() if " " in text else text.strip()
        split, _, metric = text.replace(" ", "_").partition("_")
        return f"{metric}/{split}" if split in ("train", "val", "valid", "test") and metric else text.replace(" ", "_")

    def place(self, line, metrics):
        """Tell epochs and steps from metrics, and put them where the row is in the run."""
        bar, epoch = self.BAR.search(line), self.EPOCH.search(line)
        steps = [metrics.pop(name) for name in list(metrics) if name.lower() in self.STEPS]
        said = metrics.pop("epoch", None)
        self.epoch = int(epoch["epoch"]) if epoch else said if said is not None else self.epoch
        metrics.pop("ETA", None)
        if not metrics:
            return None
        step = int(steps[0]) if steps else int(bar["step"]) if bar else self.iter + 1
        if bar and not steps and self.epoch:
            step += int((self.epoch - 1) * int(bar["steps"]))
        self.iter = max(self.iter, step)
        return {"iter": self.iter} | ({"epoch": self.epoch} if self.epoch is not None else {}) | metrics


def pass_on(data):
    """Write all of it to stdout: a signal may cut a write short, and a pipe of others may not block."""
    while data:
        try:
            data = data[os.write(1, data):]
        except BlockingIOError:
            select.select([], [1], [])


def follow(command, tracker, parser):
    """Run a command, pass on its output byte by byte, its input, signals and exit code, and log what it prints."""
    try:
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                 env=os.environ | {"PYTHONUNBUFFERED": "1"})
    except OSError as e:
        fail(f"{command[0]}: cannot be started ({e.strerror})")
    for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(signum, lambda number, frame: child.send_signal(number))
    signal.signal(signal.SIGINT, lambda number, frame: None if sys.stdin.isatty() else child.send_signal(number))
    decode = codecs.getincrementaldecoder("utf-8")("replace").decode  # a chunk may end within a character
    while chunk := child.stdout.read1(1 << 16):
        pass_on(chunk)
        for row in parser.feed(decode(chunk)):
            tracker.log(row)
    for row in parser.feed("", end=True):
        tracker.log(row)
    return child.wait()
