"""
Signals that stop a training, or ask it to save.
"""
import signal
import time

from engine.system import SAVE, STOPS
from engine.training import distributed


def on_stops(handler):
    """Handle the signals of STOPS, except those that were ignored at the start, as by nohup."""
    for signum in STOPS:
        if signal.getsignal(signum) != signal.SIG_IGN:
            signal.signal(signum, handler)


class Signals:
    """
    Signals and the time limit of a run. Ctrl-C and the signals of STOPS: save after the current
    step and end (a later Ctrl-C ends at once). SIGUSR1: save and continue.
    """

    def __init__(self, seconds, end):
        """seconds: what the run's clock shows now; end: what it shows when the run must stop."""
        self.stop = self.save = False
        self.previous = None  # with several processes: the function that ends the last exchange
        self.start, self.end = time.monotonic() - seconds, end
        signal.signal(signal.SIGINT, self.on_stop)
        on_stops(self.on_stop)
        if SAVE:
            signal.signal(SAVE, self.on_save)

    def on_stop(self, signum, frame):
        self.stop = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def on_save(self, signum, frame):
        self.save = True

    def read(self):
        """
        Return (stop, save, seconds): whether to stop, by a signal to any process or by the time
        limit, whether any process was asked to save, and the run's clock. All processes return the
        same. With several processes, these are the values that the previous call exchanged, so that
        no step waits for the exchange; only the first call waits.
        """
        # Reset it before the exchange, so that the next call sees a signal that arrives meanwhile.
        save, self.save = self.save, False
        exchange = distributed.start_max([self.stop, save, time.monotonic() - self.start])
        finish = self.previous or exchange
        if distributed.world > 1:
            self.previous = exchange
        stop, save, seconds = finish()
        return bool(stop) or seconds >= self.end, bool(save), seconds
