"""
Signals that stop a training, or ask it to save.
"""
import signal
import time

from engine.training import distributed

# From the user or a job queue; from a terminal that closes; from `ulimit -t`.
STOPS = (signal.SIGTERM, signal.SIGHUP, signal.SIGXCPU)


def on_stops(handler):
    """Handle the signals of STOPS, except those that were ignored at the start, as by nohup."""
    for signum in STOPS:
        if signal.getsignal(signum) != signal.SIG_IGN:
            signal.signal(signum, handler)


class Signals:
    """
    Signals and the time limit of a run. Ctrl-C and the signals of STOPS: save after the current
    step and end (a second Ctrl-C ends at once). SIGUSR1: save and continue.
    """

    def __init__(self, seconds, end):
        """seconds: the run's clock now; end: the clock at which the time is over."""
        self.stop = self.save = False
        self.agreed = None  # a function that returns the answer of the call of `read` before
        self.start, self.end = time.monotonic() - seconds, end
        signal.signal(signal.SIGINT, self.on_stop)
        on_stops(self.on_stop)
        signal.signal(signal.SIGUSR1, self.on_save)

    def on_stop(self, signum, frame):
        self.stop = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def on_save(self, signum, frame):
        self.save = True

    def read(self):
        """
        Return (stop, save, seconds): whether any process was asked to, and the run's clock. All
        processes return the same. Where there are several, it is what they knew at the call before,
        so that no step waits for the exchange.
        """
        save, self.save = self.save, False  # at once: a signal during the exchange counts next time
        asked = distributed.start_max([self.stop, save, time.monotonic() - self.start])
        agreed, self.agreed = self.agreed if distributed.world > 1 else asked, asked
        stop, save, seconds = (agreed or asked)()
        return bool(stop) or seconds >= self.end, bool(save), seconds
