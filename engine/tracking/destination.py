"""
Trackers: the base class of all trackers, and the session that each receives.

A tracker is a file in engine/tracking/trackers/ with a subclass of Destination. It defines
__init__(session), log(row) and finish(failed), and may define others. doc/tracking.md shows one.
"""
import abc
import importlib.util
import os
import re
import secrets
import shlex
import unicodedata
from dataclasses import dataclass, field

from engine.tracking.redact import redact

FINISH_SECONDS = 60  # at the end of a run, stop a tracker that has sent nothing for this long
RUN_ENTRIES = ("id", "project", "entity", "name", "group", "tags", "notes", "job_type")


@dataclass
class Session:
    """A run, from its start or resume to its end."""
    out_dir: str        # folder of log.jsonl; "": the run has no such folder
    config: dict        # resolved settings without secrets
    run: dict           # {one of RUN_ENTRIES: value}; "id", "project" and "name" are always there
    step: float = 0     # keep rows of earlier sessions up to this iteration; 0: a new run
    # last row kept from earlier sessions; {"tokens": -1}: a new run
    last_row: dict = field(default_factory=dict)
    x: str = "tokens"   # metric on the x axis of charts
    tables: bool = True  # send tables of text
    models: bool = True  # send exported models
    trainer: int = 0    # id of the process that logs, set if the tracker runs in another process

    def __post_init__(self):
        self.out_dir = os.fspath(self.out_dir)


class Destination(abc.ABC):
    """
    A tracker. It runs in its own process or thread, so a method may block or raise: the training
    continues after one warning.
    """
    title = ""            # name in messages
    package = ""          # Python package of its client
    knob = ""             # setting of train.py that turns the tracker on; "": it is always on
    own_process = True    # False: a thread, for a client that neither hangs nor crashes
    waits_at_end = False  # the program ends only when the tracker has sent everything
    variables = {}        # {entry of Session.run: environment variable that sets it for the client}
    messages = ()         # lines for the user that were not shown yet

    @abc.abstractmethod
    def __init__(self, session):
        """Start the run."""

    @abc.abstractmethod
    def log(self, row):
        """Log a row, see log.py. Rows come in the order of their iter."""

    @abc.abstractmethod
    def finish(self, failed=False):
        """End the run. failed: the process that logs has ended without finishing the run."""

    # ---- optional methods: empty, not abstract
    # ruff: noqa: B027

    def alert(self, title, text):
        """Warn of an anomaly."""

    def model(self, path, metrics, aliases):
        """Record a model file with its metrics, a dict; aliases: of "best" and "latest"."""

    def console(self, stream, text):
        """
        Record text that the program printed to "stdout" or "stderr". Only one tracker of a run may
        define this, because each would wrap both streams; W&B does.
        """

    @classmethod
    def resolve(cls, session, given):
        """Return the run's entries for this client, without secrets. given: see resolve_run."""
        settings = {entry: os.environ.get(name) for entry, name in cls.variables.items()}
        return presentable(resolve_run(session.run, given, settings))

    @classmethod
    def remedy(cls, session):
        """Return what the user can do about a failure, as the end of a warning."""
        missing = cls.package and not importlib.util.find_spec(cls.package)
        return f"; needed: pip install {cls.package}" if missing else ""

    @staticmethod
    def reason(error):
        """Return an exception as one line."""
        return error_line(error)

    # ---- for subclasses

    def say(self, line):
        """Show a line to the user; "warning: ..." goes to stderr."""
        self.messages = [*self.messages, line]

    def take_messages(self):
        """Return the lines that were not shown yet."""
        lines, self.messages = list(self.messages), []
        return lines


def error_line(error):
    """Return an exception as one line."""
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no reason given'}"


def resolve_run(run, given, settings, earlier=()):
    """
    Return the entries of a run, each from the first of these sources that has it:

    1. the id, and the entries of `run` named in `given`, which the user set by flags;
    2. `settings`, which the user made for the client in environment variables or files;
    3. `earlier`, the entries that the run had before it was resumed;
    4. the defaults in `run`.
    """
    earlier = {name: earlier[name] for name in RUN_ENTRIES if name in earlier}
    settings = {name: value for name, value in settings.items() if value}
    if "tags" in settings:
        settings["tags"] = [tag.strip() for tag in settings["tags"].split(",")]
    flags = {name: run[name] for name in ("id", *given) if name in run}
    return run | earlier | settings | flags


def presentable(run):
    """Return the entries of a run that are set, without secrets."""
    return redact({name: value for name, value in run.items() if value})


def new_run_id(name):
    """
    Return a unique run id that begins with the name, such as "my-run-3f2a". Under `wandb agent`,
    return the id that the agent chose.
    """
    # NFKD splits é into e and an accent.
    letters = re.sub(r"[\u0300-\u036f]", "", unicodedata.normalize("NFKD", name))
    words = re.sub(r"[^A-Za-z0-9]+", "-", letters)[:40].strip("-").lower() or "run"
    return os.environ.get("WANDB_RUN_ID") or f"{words}-{secrets.token_hex(2)}"


def sync_command(out_dir):
    """Return the command that uploads the rows of a run that W&B lacks."""
    return shlex.join(["python", "track.py", "sync", out_dir])
