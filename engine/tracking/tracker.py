"""Tracker: passes the rows, alerts and models of a run to log.jsonl and to chosen trackers."""
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
    ranks but the first, its methods do nothing. Exceptions of destinations propagate.
    """

    def __init__(self, destinations=(), noted=None):
        """
        noted: list of metric prefixes that were reported already, extended in place; None: metrics
        may have any value. See AnomalyDetector.
        """
        self.destinations, self.detector = list(destinations), AnomalyDetector(noted)

    def each(self, method, *arguments):
        for destination in self.destinations:
            getattr(destination, method)(*arguments)

    def log(self, row):
        """
        Log a row, and warn of values out of range and of sudden changes. The table "notes" is added
        to the row: its values out of range, and failures to print. Over all calls, row["iter"]
        must not decrease, and rows of the same iter must have different metrics.
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
        """Return whether all rows are in log.jsonl; rows wait while it cannot be written."""
        return not any(destination.waiting for destination in self.destinations
                       if isinstance(destination, Jsonl))

    def finish(self):
        self.each("finish")


def make_tracker(session, trackers=(), given=None, noted=None):
    """
    Start the trackers of a Session; return a Tracker that writes to them and to log.jsonl.

    trackers: keys of find_trackers(). given: names of the entries of session.run that the user set
    on the command line; None: all. These entries override the settings that a tracker's client
    reads from environment variables and files. noted: see Tracker. Raises OSError if
    session.out_dir cannot be written.
    """
    keep_diff(session.out_dir, session.config)
    log = Jsonl(session.out_dir, session.config, session.step)
    session = dataclasses.replace(session, last_row=log.last_row)
    given = session.run.keys() if given is None else given
    background = []
    for name in trackers:
        tracker_class = find_trackers()[name]
        own_session = dataclasses.replace(session, run=tracker_class.resolve(session, given))
        background.append(Background(name, tracker_class, own_session))  # starts in its thread
    deadline = time.monotonic() + START_SECONDS  # for all trackers together
    for tracker in background:
        tracker.wait_for_start(deadline)
    return Tracker([log, *background], noted)
