"""The Tracker of a run passes rows, alerts and models to log.jsonl and to the user's trackers."""
import dataclasses
import os
import sys
import time

from engine.streams import tell
from engine.tracking.anomalies import AnomalyDetector
from engine.tracking.background import Background
from engine.tracking.log import Jsonl, redact_row
from engine.tracking.source import keep_diff
from engine.tracking.trackers import find_trackers

START_SECONDS = 4  # max wait for all trackers to start; slower ones start in the background


class Tracker:
    """
    Sends each row, alert and model to all of its destinations. Without destinations, as on all
    ranks but the first, its methods do nothing.
    """

    def __init__(self, destinations=(), noted=None):
        """noted: kinds of metrics that had a note already, see AnomalyDetector."""
        self.destinations, self.detector = list(destinations), AnomalyDetector(noted)

    def each(self, method, *arguments):
        for destination in self.destinations:
            getattr(destination, method)(*arguments)

    def log(self, row):
        """
        Log a row and warn of its anomalies: of values out of range, which its notes record too, and
        of sudden changes. The caller passes no smaller iter than before, and no metric twice for an
        iter.
        """
        if not self.destinations:
            return
        notes = self.detector.out_of_range(row)
        if notes:
            row = row | {"notes": notes}
        row = redact_row(row)
        self.each("log", row)
        alerts = [(f"{name} is {value:.3g}", meaning) for name, value, meaning in notes]
        alerts += self.detector.sudden_changes(row)
        for title, text in alerts:
            tell(f"warning: {title}: {text}", sys.stderr)
            self.each("alert", title, text)

    def model(self, path, metrics, aliases):
        """Record an exported model and its metrics; aliases: a list of "best", "latest" or both."""
        if os.path.exists(path):
            self.each("model", path, metrics, aliases)
        elif self.destinations:
            tell(f"warning: {path} does not exist; no model is recorded", sys.stderr)

    def is_logged(self):
        """Return whether log.jsonl holds all rows; True without a log."""
        return not any(destination.waiting for destination in self.destinations
                       if isinstance(destination, Jsonl))

    def finish(self):
        self.each("finish")


def make_tracker(session, trackers=(), given=None, noted=None):
    """
    Return the Tracker of a Session, with log.jsonl and the named trackers. trackers: keys of
    find_trackers().

    given: names of the entries of session.run that the user gave on the command line, which
    override the environment variables and files that a tracker's client reads; None: all entries.
    noted: see Tracker. Raises OSError if session.out_dir cannot be written.
    """
    keep_diff(session.out_dir, session.config)
    log = Jsonl(session.out_dir, session.config, session.step)
    session = dataclasses.replace(session, last_row=log.last_row)
    given = session.run.keys() if given is None else given
    background = []
    for name in trackers:
        kind = find_trackers()[name]
        own_session = dataclasses.replace(session, run=kind.resolve(session, given))
        background.append(Background(name, kind, own_session))  # starts at once, in a thread
    until = time.monotonic() + START_SECONDS
    for each in background:
        each.wait_for_start(until)
    return Tracker([log, *background], noted)
