"""
Programs of ours whose output a request waits for. Of each kind one runs at a time, and it ends when its time is over, when
its reader has gone, or when the page ends.
"""
import contextlib
import subprocess
import sys
import tempfile
import threading
import time

running = set()  # programs that somebody waits for


class Gone(Exception):
    """The reader has closed the connection: nobody waits for the output any more."""


class OneAtATime:
    """Runs programs in turns."""

    def __init__(self):
        self.lock = threading.Lock()

    def run(self, arguments, seconds, gone=lambda: False, **how):
        """
        Run Python with these arguments: (exit code, stdout, stderr). gone(): whether the reader has gone; how: of Popen, and
        `data` for its stdin. Raises Gone, and subprocess.TimeoutExpired after so many seconds of its own.
        """
        while not self.lock.acquire(timeout=0.2):
            if gone():
                raise Gone
        try:
            return wait(arguments, seconds, gone, **how)
        finally:
            self.lock.release()


def wait(arguments, seconds, gone, data=b"", **how):
    """Run a program as OneAtATime.run() describes."""
    with tempfile.TemporaryFile() as stdin:  # communicate() with a timeout may not send all of a long text
        stdin.write(data)
        stdin.seek(0)
        program = subprocess.Popen([sys.executable, *arguments], stdin=stdin, stdout=subprocess.PIPE, **how)
    running.add(program)
    last = time.monotonic() + seconds
    try:
        while True:
            left = last - time.monotonic()
            try:
                out, err = program.communicate(timeout=max(0.0, min(0.2, left)))
                return program.returncode, out, err
            except subprocess.TimeoutExpired:
                if left <= 0:
                    raise
                if gone():
                    raise Gone from None
    finally:
        end(program)
        running.discard(program)


def end(program):
    """End a program that still runs, which may put things in order first."""
    if program.poll() is not None:
        return
    program.terminate()
    try:
        program.communicate(timeout=10)
    except subprocess.TimeoutExpired:
        program.kill()
        program.communicate()


def end_all():
    """End the programs that are waited for: the page ends."""
    for program in list(running):
        with contextlib.suppress(OSError):
            program.terminate()
