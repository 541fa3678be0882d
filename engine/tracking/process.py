"""
Run a tracker in its own process, which can be killed even while the client hangs.

ClientProcess, in the program that logs, starts `track.py serve` and writes JSON lines to its
stdin: first {"tracker", "session", "argv"}, then [method, *arguments] for each call. serve() writes
JSON lines to its stdout: ["ready", lines for the user] when the tracker has started and again when
it has finished, or ["error", text].
"""
import contextlib
import dataclasses
import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

from engine import system
from engine.streams import tell
from engine.tracking.destination import FINISH_SECONDS, Session
from engine.tracking.redact import redact
from engine.tracking.source import ROOT
from engine.tracking.trackers import find_trackers


class ClientProcess:
    """The tracker's process and the pipes to it, in the program that logs."""

    def __init__(self, tracker, session):
        """tracker: its name in find_trackers()."""
        self.tracker, self.child = tracker, None
        self.session = dataclasses.replace(session, trainer=os.getpid())

    def start(self):
        """Start the process; return at once. Calls may be sent before its first answer."""
        # Without WANDB_SERVICE the client starts a service of its own: killing the children must
        # not kill the service of another program.
        environment = {name: v for name, v in os.environ.items() if name != "WANDB_SERVICE"}
        self.child = subprocess.Popen(
            [sys.executable, str(ROOT / "track.py"), "serve"], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, encoding="utf-8",
            env=environment, start_new_session=True)
        self.send({"tracker": self.tracker, "session": dataclasses.asdict(self.session),
                   "argv": redact(sys.argv)})

    def send(self, message):
        print(json.dumps(encodable(message)), file=self.child.stdin, flush=True)

    def receive(self):
        """Wait for an answer and print its lines. Raises RuntimeError if the tracker failed."""
        answer = self.child.stdout.readline() or '["error", "its process has ended"]'
        kind, content = json.loads(answer)
        if kind == "error":
            raise RuntimeError(content)
        for line in content:
            tell(line, sys.stderr if line.startswith("warning: ") else sys.stdout)

    def call(self, method, *arguments):
        """Send a call of the tracker's method. Raises BrokenPipeError if the process has ended."""
        self.send([method, *arguments])

    def end(self):
        """Wait for the answer to the call of finish, and for the exit. Raises like receive()."""
        self.receive()
        self.child.wait()

    def processes(self):
        """Return the id of the process, then those of its children; [] before the start."""
        return [self.child.pid, *children(self.child.pid)] if self.child else []


def encodable(message):
    """
    Return JSON data with "?" in place of each lone surrogate, which UTF-8 cannot encode. Python
    makes them from the bytes of a file name that are not UTF-8.
    """
    return json.loads(json.dumps(message, ensure_ascii=False).encode("utf-8", "replace"))


def serve():
    """
    Run a tracker for the ClientProcess at the other end of stdin and stdout, then exit. If stdin
    ends without a call of finish, because that program has ended, finish the run as failed.
    """
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the client still records prints
    reason = repr  # until the tracker, which formats its own errors, is known

    def answer(kind, content):
        with contextlib.suppress(OSError):
            print(json.dumps([kind, content]), file=answers, flush=True)

    try:
        request = json.loads(sys.stdin.readline())
        sys.argv[:], session = request["argv"], Session(**request["session"])
        threading.Thread(target=exit_after, args=(session.trainer,), daemon=True).start()
        kind = find_trackers()[request["tracker"]]
        reason = kind.reason
        tracker = kind(session)
        answer("ready", tracker.take_messages())
        for line in sys.stdin:
            if not line.endswith("\n"):  # cut off: the writer was killed
                continue
            method, *arguments = json.loads(line)
            getattr(tracker, method)(*arguments)
            if method == "finish":
                answer("ready", tracker.take_messages())
                break
        else:  # stdin ended
            threading.Timer(FINISH_SECONDS, exit_at_once).start()
            tracker.finish(failed=True)
    except Exception as e:
        answer("error", reason(e))
    exit_at_once()


def exit_after(pid):
    """Exit FINISH_SECONDS after the parent process `pid` has ended, even if the client hangs."""
    while os.getppid() == pid:
        time.sleep(1)
    time.sleep(FINISH_SECONDS)
    exit_at_once()


def exit_at_once():
    """Kill the client's service and exit: a regular exit would wait for the service."""
    kill(children(os.getpid()))
    os._exit(0)


# ---- processes ----------------------------------------------------------------------------------

def children(pid):
    """Return the ids of the processes that a process started; on Linux only, otherwise []."""
    found = []
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (thread / "children").read_text().split())
    return found


def kill(pids):
    for pid in pids:
        with contextlib.suppress(OSError):
            system.kill(pid)


def bytes_written(pids):
    """Return the bytes that processes wrote to files and servers; on Linux only, otherwise 0."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            total += int(re.search(r"wchar: (\d+)", Path(f"/proc/{pid}/io").read_text())[1])
    return total
