"""
The supervisor that restarts a training from its last checkpoint after a crash.
"""
import signal
import subprocess
import sys
import threading

from engine.streams import tell
from engine.system import IS_WINDOWS, SAVE
from engine.training import signals


MAX_RESTARTS = 10


def supervise(*more):
    """
    Run this program as a child, and restart it when it crashes, after ever longer pauses. The child
    itself continues from the run's last checkpoint. Passes signals on to the child, and does not
    restart it after one that asks to stop. Ends the program with the child's exit code, or with 1
    if a signal ended the child.

    more: arguments for the child after those of this program; if an argument is given twice, the
    later one counts.
    """
    command = [sys.executable, *sys.argv, "--supervise=False", *more]
    stopped, child = threading.Event(), None

    def pass_on(signum, frame):
        if signum != SAVE:
            stopped.set()
        # On Windows Ctrl-C reaches the child by itself, and a signal would end it.
        if child and not IS_WINDOWS:
            child.send_signal(signum)

    for signum in filter(None, (signal.SIGINT, SAVE)):
        signal.signal(signum, pass_on)
    signals.on_stops(pass_on)
    for attempt in range(MAX_RESTARTS + 1):
        # The child gets its own session. In this one, Ctrl-C would reach it twice: from the
        # terminal and from pass_on.
        child = subprocess.Popen(command, start_new_session=True)
        code = child.wait()
        # Exit code 2 is a user's mistake, which a restart would repeat.
        if code in (0, 2) or attempt == MAX_RESTARTS or stopped.is_set():
            break
        pause = min(60, 2 ** attempt)
        tell(f"supervise: the training ended with code {code}; restart {attempt + 1} of "
             f"{MAX_RESTARTS} in {pause} s")
        if stopped.wait(pause):
            break
    sys.exit(code if code >= 0 else 1)
