"""
The supervisor that restarts a training from its last checkpoint after a crash.
"""
import signal
import subprocess
import sys
import threading

from engine.streams import tell
from engine.training import signals


def supervise(max_restarts, *more):
    """
    Run this program, with `more` words on its command line, as a child; run it again from its last checkpoint when it
    crashes, at ever longer intervals. Signals go on to the child; after one that asks to stop it is not run again.
    """
    command, stopped, child = [sys.executable, *sys.argv, "--supervise=False", *more], threading.Event(), None

    def pass_on(signum, frame):
        if signum != signal.SIGUSR1:
            stopped.set()
        if child:
            child.send_signal(signum)

    for signum in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(signum, pass_on)
    signals.on_stops(pass_on)
    for attempt in range(max_restarts + 1):
        child = subprocess.Popen(command, start_new_session=True)  # else a terminal's Ctrl-C would reach it twice
        code = child.wait()
        if code in (0, 2) or attempt == max_restarts or stopped.is_set():  # 2: a mistake that would repeat itself
            break
        pause = min(60, 2 ** attempt)
        tell(f"supervise: the training ended with code {code}; restart {attempt + 1} of {max_restarts} in {pause} s")
        if stopped.wait(pause):
            break
    sys.exit(code if code >= 0 else 1)
