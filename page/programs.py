"""
Run programs whose output a request waits for, one at a time for each instance of OneAtATime. A
program is terminated at its time limit, when its client closes the connection, or when the page
ends.
"""
import contextlib
import subprocess
import sys
import tempfile
import threading
import time

running = set()  # Popen objects of the programs for which requests wait


class ClientGone(Exception):
    """The client has closed the connection."""


class OneAtATime:
    """Runs programs one after the other."""

    def __init__(self):
        self.lock = threading.Lock()

    def run(self, arguments, seconds, gone=lambda: False, **options):
        """
        Run Python with these arguments and return (exit code, stdout, stderr), the latter two in
        bytes. stderr is None unless options pipe it.

        gone(): returns whether the client has closed the connection. options: `data`, the bytes of
        stdin, and arguments of Popen. Raises ClientGone, and subprocess.TimeoutExpired after
        `seconds`; the time spent waiting for other programs does not count.
        """
        while not self.lock.acquire(timeout=0.2):
            if gone():
                raise ClientGone
        try:
            return run_now(arguments, seconds, gone, **options)
        finally:
            self.lock.release()


def run_now(arguments, seconds, gone, data=b"", **options):
    """Run a program as OneAtATime.run() describes, without waiting for others."""
    # stdin is a file: communicate() with a timeout may not send all of a long text through a pipe.
    with tempfile.TemporaryFile() as stdin:
        stdin.write(data)
        stdin.seek(0)
        program = subprocess.Popen([sys.executable, *arguments], stdin=stdin,
                                   stdout=subprocess.PIPE, **options)
    running.add(program)
    deadline = time.monotonic() + seconds
    try:
        while True:
            left = deadline - time.monotonic()
            try:
                out, err = program.communicate(timeout=max(0.0, min(0.2, left)))
                return program.returncode, out, err
            except subprocess.TimeoutExpired:
                if left <= 0:
                    raise
                if gone():
                    raise ClientGone from None
    finally:
        end(program)
        running.discard(program)


def end(program):
    """Terminate a program if it still runs; kill it if it does not end within ten seconds."""
    if program.poll() is not None:
        return
    program.terminate()
    try:
        program.communicate(timeout=10)
    except subprocess.TimeoutExpired:
        program.kill()
        program.communicate()


def end_all():
    """Terminate all running programs, because the page ends."""
    for program in list(running):
        with contextlib.suppress(OSError):
            program.terminate()
