"""
Track the metrics of a training, and of any other program.

    python track.py sync out/my       upload, in order, those rows of a run that are not in W&B
    python track.py -- CMD ...        run a program and track what it prints; before the --:

    --out_dir=FOLDER   folder of log.jsonl (out/program; if it exists, out/program2, ...)
    --pattern=REGEX    more metrics: the numbers that its named groups match, as in
                       'BLEU (?P<bleu>[0-9.]+)'; may be given several times
    --wandb_log=False  don't track in Weights & Biases
    --name=, --project=  name and project of the run in Weights & Biases

Every run writes log.jsonl in its out folder, a row per logged step. With wandb_log=True the same
rows, texts and models go to Weights & Biases: online if there is a key and the server can be
reached, otherwise offline. tensorboard_log, swanlab_log and trackio_log do the same for those
trackers. The clients work in processes of their own, TensorBoard in a thread: whatever happens to a
server, a service or a disk, the training neither stops nor waits; a failure costs one warning.

The trackers are in engine/tracking/, where a new one is one more file; see doc/tracking.md.
"""
import contextlib
import os
import re
import shutil
import signal
import sys
from pathlib import Path

from configurator import BOOLS, fail, needs_posix  # first: it reports missing packages

from engine import untrusted
from engine.streams import ignore_closed_pipe, outlast, tell
from engine.system import IS_WINDOWS
from engine.tracking.anomalies import AnomalyDetector
from engine.tracking.console import Parser
from engine.tracking.destination import Session, new_run_id
from engine.tracking.follow import follow
from engine.tracking.log import TABLES, Jsonl, parse_row, read_rows, rising_rows
from engine.tracking.process import serve
from engine.tracking.redact import redact
from engine.tracking.source import source_version
from engine.tracking.sync import sync
from engine.tracking.tracker import Tracker, make_tracker
from engine.tracking.trackers import find_trackers
from engine.tracking.trackers.wandb import Wandb
from engine.tracking.wandb_client import about, read_wandb, reason, user_setting, wandb_run

__all__ = ["PROJECT", "TABLES", "AnomalyDetector", "Jsonl", "Session", "Tracker", "Wandb", "about",
           "make_tracker", "new_run_id", "parse_row", "read_rows", "read_wandb", "reason",
           "rising_rows", "source_version", "start_tracking", "wandb_run"]

PROJECT = "llamac"  # the project, unless a flag or the tracker's own settings name one
PROGRAM_FOLDER = "out/program"  # a tracked program's out folder, unless --out_dir names one


def start_tracking(cfg, recorded, state):
    """
    Return the Tracker of a training. cfg: train.py's settings, as attributes; recorded: the
    settings and figures that trackers get; state: the training's state, a dict. Set its "run_id" if
    that is empty, and its "noted", the kinds of metrics already reported as out of range, to [] if
    that is absent.
    """
    # `given` has the entries that the user set by flags. They override a tracker's own settings,
    # such as WANDB_NAME, which in turn override the defaults in `run`.
    flags = {"project": cfg.wandb_project, "name": cfg.wandb_run_name}
    given = {entry: value for entry, value in flags.items() if value and value != "auto"}
    default_name = f"{Path(cfg.data).stem}-{cfg.dim}x{cfg.n_layers}"
    # The id begins with the run's name in W&B, which the user's W&B settings may set. Those do not
    # apply to other trackers, so run["name"] ignores them; Wandb.resolve applies them.
    name_in_id = given.get("name") or (cfg.wandb_log and user_setting("run_name")) or default_name
    state["run_id"] = state["run_id"] or new_run_id(name_in_id)
    run = {"id": state["run_id"], "project": PROJECT, "name": default_name, "job_type": "train"}
    # The log drops the rows of earlier sessions whose iter exceeds Session.step. A state with a
    # "row" was saved before the row of state["step"] was logged, so the resumed training logs that
    # row. The earlier session may have logged it too, after the save: half a step less drops it.
    step = state["step"] - (0.5 if state.get("row") else 0)
    session = Session(cfg.out_dir, redact(recorded), run | given, step,
                      tables="tables" in cfg.log_extras, models="model" in cfg.log_extras)
    # A tracker's knob is the flag that turns it on; one without a knob is always on.
    chosen = [name for name, kind in find_trackers().items()
              if not kind.knob or getattr(cfg, kind.knob, False)]
    return make_or_fail(session, chosen, given, state.setdefault("noted", []))


def make_or_fail(session, *arguments):
    """Return make_tracker(...); exit with a message if the out folder cannot be written."""
    try:
        return make_tracker(session, *arguments)
    except OSError as e:
        fail(f"--out_dir={session.out_dir}: cannot be written ({untrusted.reason(e)}); free "
             "disk space or choose another folder")


# ---- any other program --------------------------------------------------------------------------

def program_folder(name):
    """
    Create the folder of a program's log and return it. A folder that --out_dir names may exist, but
    exit if it holds a run. If the default folder exists, take the first free name: out/program2,
    out/program3, ...
    """
    path, number = Path(name), 1
    while True:
        try:  # mkdir rather than exists: of two programs that start together, one creates it
            path.mkdir(parents=True, exist_ok=name != PROGRAM_FOLDER)
            break
        except OSError as e:
            if name != PROGRAM_FOLDER or not isinstance(e, FileExistsError):
                fail(f"--out_dir={path}: cannot be written ({untrusted.reason(e)}); "
                     "choose another folder")
        number += 1
        path = Path(f"{name}{number}")
    for file in ("trainer.json", "log.jsonl", "config.json", "wandb.json", "diff.patch"):
        if (path / file).exists():
            fail(f"--out_dir={path}: holds {file}, of another run; choose another folder")
    if number > 1:
        tell(f"tracking: {path}", sys.stderr)
    return str(path)


def program_options(words):
    """Return ({option: text}, patterns) of the words before the --."""
    options = {"out_dir": PROGRAM_FOLDER, "name": "auto", "project": "auto", "wandb_log": "True"}
    patterns = []
    for word in words:
        key, equals, value = word.removeprefix("--").partition("=")
        if key == "pattern" and equals:
            patterns.append(value)
        elif key in options and equals:
            options[key] = value
        else:
            expected = ", ".join(f"--{name}={text}" for name, text in options.items())
            fail(f"{word}: expected --pattern=REGEX, {expected}")
    if options["wandb_log"].lower() not in BOOLS:
        fail(f"--wandb_log={options['wandb_log']}: expected True or False")
    return options, patterns


def program_parser(patterns):
    """Return a Parser that also looks for the patterns; exit if one has no named group."""
    try:
        parser = Parser(patterns)
    except (re.error, OverflowError, RecursionError) as e:
        fail(f"--pattern: not a regular expression ({e})")
    for pattern in parser.patterns:
        if not pattern.groupindex:
            fail(f"--pattern={pattern.pattern}: expected a named group, such as (?P<bleu>[0-9.]+)")
    return parser


def track_program(words):
    """
    Run the command after the -- and track what it prints. Exit with its exit code, or by the signal
    that ended it.
    """
    split = words.index("--")
    command = words[split + 1:]
    options, patterns = program_options(words[:split])
    if not command:
        fail("no program; expected: python track.py -- CMD ...")
    if IS_WINDOWS:
        fail(f"track.py -- CMD {needs_posix('signals to pass on to CMD')}")
    if shutil.which(command[0]) is None:
        fail(f"{command[0]}: not a program that can be started; check its path and permissions")
    parser = program_parser(patterns)
    given = {key: options[key] for key in ("name", "project") if options[key] != "auto"}
    name = given.get("name") or user_setting("run_name") or Path(command[0]).name
    outlast("stdout")  # a failing terminal, disk or pipe must not end the program
    out_dir = program_folder(options["out_dir"])
    run = {"id": new_run_id(name), "project": PROJECT, "name": name} | given
    # x: metric on the x axis of charts; the rows of a program need not have "tokens", the default
    session = Session(out_dir, redact({"command": command}), run, x="iter")
    trackers = ["wandb"] if BOOLS[options["wandb_log"].lower()] else []
    tracker = make_or_fail(session, trackers, given)
    code = follow(command, tracker, parser)
    tracker.finish()
    with ignore_closed_pipe():
        sys.stdout.flush()
    if code < 0:  # a signal ended the program: end in the same way
        end_by_signal(-code)
    sys.exit(code)


def end_by_signal(number):
    """
    End this process by a signal, without a core dump, since the program has written one. If the
    signal does not end it, exit with 128 + number.
    """
    with contextlib.suppress(OSError, ValueError):
        import resource  # Windows lacks it
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    with contextlib.suppress(OSError, ValueError):  # SIGKILL takes no handler
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    sys.exit(128 + number)  # process 1 of a container ignores signals that it does not handle


if __name__ == "__main__":
    if "--" in sys.argv:
        track_program(sys.argv[1:])
    elif sys.argv[1:] == ["serve"]:  # a tracker's process, see engine/tracking/process.py
        serve()
    elif len(sys.argv) == 3 and sys.argv[1] == "sync":
        try:
            sync(sys.argv[2])
        except Exception as e:
            fail(f"{sys.argv[2]} cannot be synced now ({redact(reason(e))}); nothing is lost, try "
                 "again")
    else:
        print(__doc__.strip())
        sys.exit(0 if "--help" in sys.argv else 2)
