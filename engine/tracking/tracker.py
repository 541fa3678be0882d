"""The Tracker of a run: log.jsonl, and the trackers that the user asked for."""
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

START_SECONDS = 4  # the program waits for its trackers to start; then they go on alone


class Tracker:
    """
    Sends everything to each of its destinations. Without destinations, as on all ranks but the
    first, it does nothing.
    """

    def __init__(self, destinations=(), noted=None):
        """noted: see AnomalyDetector."""
        self.destinations, self.detector = list(destinations), AnomalyDetector(noted)

    def each(self, method, *arguments):
        for destination in self.destinations:
            getattr(destination, method)(*arguments)

    def log(self, row):
        """
        Log a row, and warn of its anomalies. Its iter is not less than the last row's; rows of the
        same iter have different metrics.
        """
        if not self.destinations:
            return
        notes = self.detector.out_of_range(row)
        row = redact_row(row | {"notes": notes} if notes else row)
        self.each("log", row)
        alerts = [(f"{name} is {value:.3g}", meaning) for name, value, meaning in notes]
        for title, text in alerts + self.detector.sudden_changes(row):
            tell(f"warning: {title}: {text}", sys.stderr)
            self.each("alert", title, text)

    def model(self, path, metrics, aliases):
        """Record an exported model with its metrics; aliases: of "best" and "latest"."""
        if os.path.exists(path):
            self.each("model", path, metrics, aliases)
        elif self.destinations:
            tell(f"warning: {path} does not exist; no model is recorded", sys.stderr)

    def is_logged(self):
        """Return whether log.jsonl holds all rows."""
        logs = [each for each in self.destinations if isinstance(each, Jsonl)]
        return not any(log.waiting for log in logs)

    def finish(self):
        self.each("finish")


def make_tracker(session, trackers=(), given=None, noted=None):
    """
    Return the Tracker of a Session, with the trackers of these names in find_trackers().

    given: names of the entries of session.run that the user gave on the command line; None: all.
    They override what environment variables and files tell a client. noted: see AnomalyDetector.
    Raises OSError if the folder cannot be written.
    """
    keep_diff(session.out_dir, session.config)
    log = Jsonl(session.out_dir, session.config, session.step)
    session = dataclasses.replace(session, last_row=log.last_row)
    given = session.run.keys() if given is None else given
    background = []
    for name in trackers:
        kind = find_trackers()[name]
        own_session = dataclasses.replace(session, run=kind.resolve(session, given))
        background.append(Background(name, kind, own_session))
    until = time.monotonic() + START_SECONDS
    for tracker in background:
        tracker.wait_for_start(until)
    return Tracker([log, *background], noted)
