"""
A tracker in a process of its own, which can be killed whatever its client waits for.

ClientProcess starts `track.py serve` and writes JSON lines to its stdin: first {"tracker",
"session", "argv"}, then a call a line, [method, *arguments]. serve() answers on stdout, a
JSON line each: ["ready", lines for the user] after the start and after finish, or ["error", text].
"""
import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from engine.streams import tell
from engine.tracking.destination import FINISH_SECONDS, Session
from engine.tracking.redact import redact
from engine.tracking.source import ROOT
from engine.tracking.trackers import find_trackers


class ClientProcess:
    """A tracker's process, as the program that logs sees it."""

    def __init__(self, tracker, session):
        """tracker: its name in find_trackers()."""
        self.tracker, self.child = tracker, None
        self.session = dataclasses.replace(session, trainer=os.getpid())

    def start(self):
        """Start the process. It answers when the run has begun; calls may be sent before."""
        # A W&B service that another program started must not be killed with this process.
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
        """Print the lines that the process answers. Raises RuntimeError if it failed."""
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
        """Wait for the answer to finish. Raises RuntimeError if the tracker failed."""
        self.receive()
        self.child.wait()

    def processes(self):
        """Return the ids of the process and of those that it started."""
        return [self.child.pid, *children(self.child.pid)] if self.child else []


def encodable(message):
    """
    Return JSON data without lone surrogates, which have no UTF-8. Python decodes bytes of a file's
    name that are not UTF-8 to them.
    """
    return json.loads(json.dumps(message, ensure_ascii=False).encode("utf-8", "replace"))


def serve():
    """
    Run a tracker for the ClientProcess at the other end of stdin and stdout. If that program ends
    without a call of finish, finish the run as failed.
    """
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # prints here are only for the client to record
    reason = repr

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
            if not line.endswith("\n"):  # the program was killed while it wrote
                continue
            method, *arguments = json.loads(line)
            getattr(tracker, method)(*arguments)
            if method == "finish":
                answer("ready", tracker.take_messages())
                break
        else:
            threading.Timer(FINISH_SECONDS, exit_at_once).start()
            tracker.finish(failed=True)
    except Exception as e:
        answer("error", reason(e))
    exit_at_once()


def exit_after(pid):
    """Exit some time after the parent process `pid` has ended, whatever the client waits for."""
    while os.getppid() == pid:
        time.sleep(1)
    time.sleep(FINISH_SECONDS)
    exit_at_once()


def exit_at_once():
    """Exit and kill the client's service, which the client's own exit would wait for."""
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
            os.kill(pid, signal.SIGKILL)


def bytes_written(pids):
    """Return the bytes that processes wrote to files and servers; on Linux only, otherwise 0."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            total += int(re.search(r"wchar: (\d+)", Path(f"/proc/{pid}/io").read_text())[1])
    return total
