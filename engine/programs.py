"""Run other programs to their end, and pass on the signals that ask to stop."""
import contextlib
import os
import signal
import subprocess

GRACE = 20  # seconds that a program has to save after SIGTERM, before SIGKILL ends it


def run_program(command, environment=None, limit=None, output=None):
    """
    Run a program to its end. Return (exit code, signals that asked this process to stop meanwhile).
    Raises OSError if it cannot be started.

    The program gets time to save: Ctrl-C reaches it from the terminal, SIGTERM and SIGHUP are
    forwarded. environment: variables added to those of this process. limit: seconds after which it
    is ended, first by SIGTERM. output: binary file that receives its output; None: the output goes
    to this process's stdout and stderr.
    """
    children = []
    with passing_signals(children) as received:
        child = subprocess.Popen(command, env=os.environ | (environment or {}), stdout=output,
                                 stderr=output and subprocess.STDOUT)
        children.append(child)
        return wait(child, limit), received


@contextlib.contextmanager
def passing_signals(children):
    """
    Survive the signals that ask to stop, and forward SIGTERM and SIGHUP to the processes that are
    in the list `children` at that time; Ctrl-C reaches them from the terminal. Yield the list of
    the signals received so far.
    """
    received = []

    def stop(signum, frame):
        received.append(signum)
        for child in children if signum != signal.SIGINT else ():
            child.send_signal(signum)

    handled = [signal.SIGINT, signal.SIGTERM]
    hangup = getattr(signal, "SIGHUP", None)  # Windows lacks it
    if hangup and signal.getsignal(hangup) != signal.SIG_IGN:  # nohup ignores it
        handled.append(hangup)
    before = {signum: signal.signal(signum, stop) for signum in handled}
    try:
        yield received
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def wait(child, limit):
    """Return the exit code of a process; end it when `limit` seconds have passed, unless None."""
    try:
        return child.wait(limit)
    except subprocess.TimeoutExpired:
        child.terminate()
    try:
        return child.wait(GRACE)
    except subprocess.TimeoutExpired:
        child.kill()
    return child.wait()
