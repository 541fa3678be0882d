"""
Signals that stop a training, or ask it to save.
"""
import signal
import time

from engine.training import distributed

STOPS = (signal.SIGTERM, signal.SIGHUP, signal.SIGXCPU)  # the user's or the queue's, a terminal that closes, ulimit -t


def on_stops(handler):
    """Handle the signals of STOPS, but for those that whoever started the program ignores, as nohup does."""
    for signum in STOPS:
        if signal.getsignal(signum) != signal.SIG_IGN:
            signal.signal(signum, handler)


class Signals:
    """
    Ctrl-C and the signals of STOPS: save at the next step boundary and end (a second Ctrl-C ends at once). SIGUSR1: save
    now, go on. The time limit is one more way to stop.
    """

    def __init__(self, seconds, end):
        """seconds: what the run's clock shows now; end: what it shows when the time is over."""
        self.stop = self.save = False
        self.start, self.end = time.monotonic() - seconds, end
        signal.signal(signal.SIGINT, self.on_stop)
        on_stops(self.on_stop)
        signal.signal(signal.SIGUSR1, self.on_save)

    def on_stop(self, signum, frame):
        self.stop = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def on_save(self, signum, frame):
        self.save = True

    def read(self, device):
        """(stop, save, seconds): whether any process was asked to, and the run's clock, the same in all of them."""
        stop, save, seconds = distributed.all_max([self.stop, self.save, time.monotonic() - self.start], device)
        self.save = False
        return bool(stop) or seconds >= self.end, bool(save), seconds
