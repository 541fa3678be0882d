"""Run a tracker in the background, so that its delays and failures do not affect training."""
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

MAX_WAITING = 10_000         # max queued calls; a tracker with more is given up
MIN_BYTES_PER_SEC = 125_000  # 1 Mbit/s: a slower upload of models is given up
MIN_PROGRESS = 1 << 16       # bytes; a client that writes less within FINISH_SECONDS is given up


class Background:
    """
    A tracker and the thread that calls it. If the tracker raises an exception, it is given up:
    one warning is printed, and later calls do nothing.
    """

    def __init__(self, name, tracker_class, session):
        """Start the tracker. name, tracker_class: its entry in find_trackers()."""
        self.tracker_class, self.title = tracker_class, tracker_class.title
        self.remedy = tracker_class.remedy(session)
        self.process = ClientProcess(name, session) if tracker_class.own_process else None
        self.calls, self.started, self.ended = queue.SimpleQueue(), threading.Event(), False
        self.takes_models = session.models and tracker_class.model is not Destination.model
        self.model_bytes = 0
        self.takes_console = tracker_class.console is not Destination.console
        if self.takes_console:
            sys.stdout = Tee(sys.stdout, lambda text: self.call("console", "stdout", text))
            sys.stderr = Tee(sys.stderr, lambda text: self.call("console", "stderr", text))
        self.thread = threading.Thread(target=self.work, args=(session,), daemon=True)
        self.thread.start()
        atexit.register(self.flush)

    def wait_for_start(self, deadline):
        """Wait until the tracker has started or failed. deadline: in time.monotonic() seconds."""
        if not self.started.wait(max(0, deadline - time.monotonic())):
            tell(f"tracking: {self.title} is still starting; training goes on without waiting")

    def work(self, session):
        """
        Start the tracker and pass the queued calls on to it; runs in the thread. A process receives
        calls while its tracker still starts, so no call is lost if this program ends meanwhile.
        """
        try:
            if self.process:
                self.process.start()
                threading.Thread(target=self.confirm_start, daemon=True).start()
                call = self.process.call
            else:
                tracker = self.tracker_class(session)
                self.started.set()
                call = lambda method, *arguments: getattr(tracker, method)(*arguments)
            for method, *arguments in iter(self.calls.get, None):  # None: see flush
                call(method, *arguments)
                if method == "finish":
                    if self.process:
                        # confirm_start must read the first answer before end() reads the second.
                        self.started.wait()
                        self.process.end()
                    break
        except BrokenPipeError as e:
            self.give_up(self.reason_of(e))
        except Exception as e:
            self.give_up(error_line(e))
        self.ended = True
        self.started.set()

    def confirm_start(self):
        """Wait until the process has started the tracker; give it up if that fails."""
        try:
            self.process.receive()
        except Exception as e:
            self.give_up(error_line(e))
        self.started.set()

    def reason_of(self, error):
        """Return the error that a process sent before it ended, or `error` if it sent none."""
        self.started.wait()  # until confirm_start has read its answer
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
            tell(f"warning: tracking with {self.title} stopped ({redact(why)}); "
                 f"log.jsonl is still written{self.remedy}", sys.stderr)

    def call(self, method, *arguments):
        """Queue a call of the tracker's method."""
        if not self.ended and self.calls.qsize() > MAX_WAITING:
            self.give_up(f"it is more than {MAX_WAITING} messages behind")
        if not self.ended:
            self.calls.put((method, *arguments))

    def flush(self):
        """Pass on the queued calls at the exit of a program that did not call finish()."""
        if not self.ended:
            self.calls.put(None)  # ends the loop of work()
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
        # Without a process, the tracker runs in a thread that would end with the program.
        must_wait = self.tracker_class.waits_at_end or not self.process
        if not self.ended:
            self.thread.join(3 if must_wait else 2)  # no message if it ends by then
        if self.ended or not self.thread.is_alive():
            return
        if must_wait:
            tell(f"tracking: {self.title} is uploading the rest; it is stopped after "
                 f"{FINISH_SECONDS} s without progress")
            self.wait_for_upload()
        else:
            self.ended = True
            lost = self.calls.qsize()  # calls that did not fit into the pipe to the process
            tell(f"tracking: {self.title} uploads the rest in the background, for "
                 f"{FINISH_SECONDS} s at most"
                 + (f"; the last {lost} rows are only in log.jsonl" if lost else ""))

    def wait_for_upload(self):
        """
        Wait until the thread ends, with a progress bar if models are uploaded. Give the tracker up
        if its processes write too little for FINISH_SECONDS (checked on Linux only), or if it takes
        longer than that plus the time for its models at MIN_BYTES_PER_SEC.
        """
        size = self.model_bytes if self.process else 0
        begin = last_progress = time.monotonic()
        written, sent_before = 0, None
        refresh = 0.1 if sys.stderr.isatty() else 30  # seconds
        with tqdm(total=size, desc="upload", unit="B", unit_scale=True, dynamic_ncols=True,
                  disable=not size, miniters=1, mininterval=refresh) as bar:
            while self.thread.is_alive() and not self.ended:
                processes = self.process.processes() if self.process else []
                # The bar excludes processes[0]: its child, the client's service, does the upload.
                sent, now = bytes_written(processes[1:]), time.monotonic()
                sent_before = sent if sent_before is None else sent_before
                bar.update(max(0, min(sent - sent_before, size) - bar.n))
                total = bytes_written(processes)
                if total - written > MIN_PROGRESS or not sys.platform.startswith("linux"):
                    written, last_progress = total, now
                if now - last_progress > FINISH_SECONDS:
                    self.give_up(f"no progress for {FINISH_SECONDS} s")
                elif now - begin > FINISH_SECONDS + size / MIN_BYTES_PER_SEC:
                    self.give_up(f"it has not finished after {now - begin:.0f} s")
                self.thread.join(0.5)
            if self.process and self.process.child and self.process.child.returncode == 0:
                bar.update(size - bar.n)  # everything is uploaded: fill the bar
