"""A tracker in the background: the program neither waits for it nor stops with it."""
import atexit
import os
import queue
import sys
import threading
import time

from tqdm import tqdm

from engine.streams import tell
from engine.tracking.destination import FINISH_SECONDS, Destination, error_line
from engine.tracking.follow import Tee
from engine.tracking.process import ClientProcess, bytes_written, kill
from engine.tracking.redact import redact

MAX_WAITING = 10_000         # calls that may wait for a slow tracker before it is given up
MIN_BYTES_PER_SEC = 125_000  # an upload gets the time that a line of 1 Mbit/s needs
MIN_PROGRESS = 1 << 16       # bytes; a client that only waits writes less


class Background:
    """A thread that calls a tracker. An exception of the tracker ends it with one warning."""

    def __init__(self, name, kind, session):
        """Start the tracker. name, kind: its entry in find_trackers()."""
        self.kind, self.remedy = kind, kind.remedy(session)
        self.process = ClientProcess(name, session) if kind.own_process else None
        self.calls, self.started, self.ended = queue.SimpleQueue(), threading.Event(), False
        self.takes_models = session.models and kind.model is not Destination.model
        self.model_bytes = 0
        self.takes_console = kind.console is not Destination.console
        if self.takes_console:
            sys.stdout = Tee(sys.stdout, lambda text: self.call("console", "stdout", text))
            sys.stderr = Tee(sys.stderr, lambda text: self.call("console", "stderr", text))
        self.thread = threading.Thread(target=self.work, args=(session,), daemon=True)
        self.thread.start()
        atexit.register(self.flush)

    def wait_for_start(self, until):
        """Wait until the tracker has started, at most until this time.monotonic()."""
        if not self.started.wait(max(0, until - time.monotonic())):
            tell(f"tracking: {self.kind.title} is still starting; training goes on without waiting")

    def work(self, session):
        """
        In the thread: start the tracker and pass calls on to it. A process gets them before it has
        started, so that it has all of them if the program ends meanwhile.
        """
        try:
            if self.process:
                self.process.start()
                threading.Thread(target=self.confirm_start, daemon=True).start()
                call = self.process.call
            else:
                tracker = self.kind(session)
                self.started.set()
                call = lambda method, *arguments: getattr(tracker, method)(*arguments)
            for method, *arguments in iter(self.calls.get, None):
                call(method, *arguments)
                if method == "finish":
                    if self.process:
                        self.started.wait()  # the process answers the start first
                        self.process.end()
                    break
        except BrokenPipeError as e:
            self.give_up(self.reason_of(e))
        except Exception as e:
            self.give_up(error_line(e))
        self.ended = True
        self.started.set()

    def confirm_start(self):
        """In a thread: wait until the process has started the tracker, or give it up."""
        try:
            self.process.receive()
        except Exception as e:
            self.give_up(error_line(e))
        self.started.set()

    def reason_of(self, error):
        """Return why a process has ended, if it told; `error`: the broken pipe."""
        self.started.wait()
        try:
            if not self.ended:
                self.process.receive()
        except Exception as e:
            error = e
        return error_line(error)

    def give_up(self, why):
        if not self.ended:
            self.ended = True
            kill(self.process.processes() if self.process else ())
            tell(f"warning: tracking with {self.kind.title} stopped ({redact(why)}); "
                 f"log.jsonl goes on{self.remedy}", sys.stderr)

    def call(self, method, *arguments):
        """Queue a call of the tracker's method."""
        if not self.ended and self.calls.qsize() > MAX_WAITING:
            self.give_up(f"it has not taken {MAX_WAITING} rows")
        if not self.ended:
            self.calls.put((method, *arguments))

    def flush(self):
        """At the exit of a program that did not call finish(): send what it printed last."""
        if not self.ended:
            self.calls.put(None)
            self.thread.join(3)

    def log(self, row):
        self.call("log", row)

    def alert(self, title, text):
        self.call("alert", title, text)

    def model(self, path, metrics, aliases):
        if self.takes_models:
            self.model_bytes += os.path.getsize(path)
            self.call("model", str(path), metrics, aliases)

    def finish(self):
        """End the run, and wait for its upload if the tracker asks for that."""
        if self.takes_console and isinstance(sys.stdout, Tee):
            sys.stdout, sys.stderr = sys.stdout.end(), sys.stderr.end()
        self.call("finish")
        waits = self.kind.waits_at_end or not self.process  # a thread would end with the program
        self.thread.join(0 if self.ended else 3 if waits else 2)
        if self.ended or not self.thread.is_alive():
            return
        if waits:
            tell(f"tracking: {self.kind.title} is uploading what is left; given up when nothing "
                 f"moves for {FINISH_SECONDS} s")
            self.wait_for_upload()
        else:
            self.ended = True
            lost = self.calls.qsize()  # calls that the process has no room for yet
            tell(f"tracking: {self.kind.title} goes on by itself with what is left, for "
                 f"{FINISH_SECONDS} s at most"
                 + (f"; the last {lost} rows are in log.jsonl alone" if lost else ""))

    def wait_for_upload(self):
        """Wait for the thread as long as its process writes something and the upload is in time."""
        size = self.model_bytes if self.process else 0
        begin = last_progress = time.monotonic()
        written, sent_before = 0, None
        refresh = 0.1 if sys.stderr.isatty() else 30  # seconds
        with tqdm(total=size, desc="upload", unit="B", unit_scale=True, dynamic_ncols=True,
                  disable=not size, miniters=1, mininterval=refresh) as bar:
            while self.thread.is_alive() and not self.ended:
                processes = self.process.processes() if self.process else []
                sent, now = bytes_written(processes[1:]), time.monotonic()
                sent_before = sent if sent_before is None else sent_before
                bar.update(max(0, min(sent - sent_before, size) - bar.n))
                total = bytes_written(processes)
                if total - written > MIN_PROGRESS or not sys.platform.startswith("linux"):
                    written, last_progress = total, now
                if now - last_progress > FINISH_SECONDS:
                    self.give_up(f"nothing has moved for {FINISH_SECONDS} s")
                elif now - begin > FINISH_SECONDS + size / MIN_BYTES_PER_SEC:
                    self.give_up(f"it has not finished after {now - begin:.0f} s")
                self.thread.join(0.5)
            if self.process and self.process.child and self.process.child.returncode == 0:
                bar.update(size - bar.n)
