"""
Run a W&B sweep file without a server.

    python sweep.py sweeps/random.yaml                 trial N trains in out/random/N
    python sweep.py sweeps/random.yaml --parallel=2    two trials at a time, which share the cores
    python sweep.py sweeps/random.yaml --seeds=3       train each with three seeds, compare means
    python sweep.py sweeps/random.yaml --prune         stop trials that are worse than the median

The same file runs with `wandb sweep FILE` and `wandb agent ID`. Grid and random search need no
package; bayes and --prune need Optuna. The output of trial N goes to out_dir/N.txt. At the end a
table shows all trials, the best one first, and a line shows the command of the best.

The same command continues a sweep after Ctrl-C or a kill. The ledger, out_dir/sweep.jsonl, records
each start and end, so that finished and pruned trials are not run again. The file and the seed
determine the values of every trial; with bayes, the results of earlier trials do too. A folder with
trials of another sweep is refused.
"""
import contextlib
import itertools
import os
import random
import shlex
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from json import dumps, loads
from pathlib import Path

from tqdm import tqdm

import compare
from configurator import configure, convert, fail, read_file
from engine import system
from engine.advice import renamed
from engine.files import write_atomic
from engine.programs import passing_signals
from engine.streams import format_seconds, one_line, outlast
from engine.sweep_file import check, command_of, draw, grid, knobs_of, program, suggest, varies
from engine.tracking.redact import redact
from engine.tracking.runs import Run, is_finite, read_run
from engine.untrusted import MAX_JSON, parse_json, read_json, read_untrusted
from engine.verdict import judge, sentence

file = ""       # the sweep: a .yaml file in W&B's format
count = 0       # number of trials; 0: the file's run_cap, else the whole grid, else 20
out_dir = ""    # folder for the trials' folders; "": the file's out_dir, else out/sweep
seed = 1337     # seed of random and bayes
seeds = 1       # number of seeds to train each trial with; trials are compared by their means
parallel = 1    # max trials at a time; each gets its share of the cores as threads, and of the GPUs
prune = False   # once 5 trials have finished, stop a trial whose metric is worse than their median
                # at the same step (needs: pip install optuna)
json = False    # print the result as the last line

LEDGER = "sweep.jsonl"
DERIVED = {"batch_size", "gradient_accumulation_steps"}  # the trainer derives them if batch_size=0
FROM_AUTO = ("teacher", "sample_prompt")  # the trainer stores what auto stands for
ENDED = ("finished", "pruned")  # status of trials that are not run again
ORDER = ("finished", "pruned", "stopped", "failed")  # order of statuses in the table
VOCABULARY = ("vocab_source", "vocab_size", "max_vocab_size", "data")  # settings that change it
MIN_FINISHED = 5      # trials that must have finished before one is pruned
POLL = 0.1            # seconds between polls of the running trials
MAX_OUTPUT = 1 << 20  # max bytes of a failed trial's output to search for the error
MAX_WHY = 300         # max characters of an error


@dataclass
class Trial:
    """
    A point of the search. number: from 1 on; values: {setting: value} for its program; folder: the
    program's out_dir.

    asked, params: Optuna's trial and the values that Optuna proposed, None and {} without it.
    status: "started", "finished", "pruned", "stopped" (to be continued, as after Ctrl-C) or
    "failed"; why: the reason for the last three. seconds: time in all sessions. results: {seed:
    best value of the metric}; steps: the last step that was logged. reported: the last step
    reported to Optuna.
    """
    number: int
    values: dict
    folder: Path
    asked: object = None
    params: dict = field(default_factory=dict)
    status: str = ""
    why: str = ""
    seconds: float = 0.0
    results: dict = field(default_factory=dict)
    steps: int = 0
    reported: int = 0

    @property
    def value(self):
        """The mean of the seeds' results, None without any."""
        return statistics.fmean(self.results.values()) if self.results else None

    @property
    def deviation(self):
        """The standard deviation of the seeds' results, None for fewer than two."""
        return statistics.stdev(self.results.values()) if len(self.results) > 1 else None


@dataclass
class Running:
    """
    A running trial. slot: number below `parallel` that no other running trial has. output: open
    file of what its program prints. log: what its first seed has logged. process: its program; None
    while it waits for a program that an earlier session started and that still runs. begin: time of
    its start by time.monotonic(); offset: size of `output` then. pruned: why the sweep has asked it
    to stop, "" if it has not.
    """
    trial: Trial
    slot: int
    output: object
    log: Run
    process: subprocess.Popen | None = None
    begin: float = 0.0
    offset: int = 0
    pruned: str = ""


# ---- the ledger ----------------------------------------------------------------------------------

class Ledger:
    """
    out_dir/sweep.jsonl: a line for the sweep, then one for each start and each end of a trial. This
    process holds a lock on it. rows: {number of a trial: its latest row of earlier sessions}.
    """

    def __init__(self, folder):
        """Open or create the ledger. Exit if a sweep runs there, or the file is not a ledger."""
        path = folder / LEDGER
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.file = open(path, "ab", buffering=0)
            system.lock(self.file)
            lines = read_untrusted(path, MAX_JSON).splitlines(keepends=True)
        except BlockingIOError:
            fail(f"{folder}: another sweep runs there; wait for it, or give another --out_dir")
        except OSError as e:
            fail(f"{path}: cannot be written ({e.strerror}); give another --out_dir")
        rows = []
        for line in lines:
            with contextlib.suppress(ValueError):
                rows.append(parse_json(line))
        rows = [row for row in rows if isinstance(row, dict)]
        if lines and (not rows or rows[0].get("made_by") != "llamac"):
            fail(f"{path}: was not written by a sweep; move it elsewhere, or give another "
                 "--out_dir")
        self.rows = {row["trial"]: row for row in rows if type(row.get("trial")) is int}
        if not lines:
            self.write({"made_by": "llamac", "sweep": file, "seed": seed})
        elif not lines[-1].endswith(b"\n"):  # cut off by a kill or a full disk
            self.file.write(b"\n")

    def write(self, row):
        """Append a row. Exit if the disk fails."""
        try:
            self.file.write((dumps(row) + "\n").encode())
        except OSError as e:
            fail(f"{self.file.name}: cannot be written ({e.strerror}); free disk space, then the "
                 "same command continues the sweep")

    def note(self, trial):
        """Append the state of a trial."""
        self.write({"trial": trial.number, "time": time.strftime("%Y-%m-%d %H:%M:%S"),
                    "status": trial.status, "why": trial.why, "seconds": round(trial.seconds, 1),
                    "value": trial.value, "params": trial.params, "values": recorded(trial)})


def recorded(trial):
    """Return the values of a trial as the ledger has them: without out_dir, which may be moved."""
    values = {name: value for name, value in trial.values.items() if name != "out_dir"}
    return redact(loads(dumps(values, default=str)))


def refuse_other(sweep, values, folder):
    """Exit if a trial's folder holds a trial with other values: the trainer would resume it."""
    of_seeds, of_one = sorted(folder.glob("seed*/config.json")), folder / "config.json"
    if not of_seeds and not of_one.exists():
        return
    known = knobs_of(sweep)
    has_seeds = "seeds" in known and values.get("seeds", 1) > 1
    if of_seeds and not has_seeds:
        fail(f"{folder}: holds a trial with several seeds; give the same --seeds, or another "
             "--out_dir")
    if of_one.exists() and has_seeds:
        fail(f"{folder}: holds a trial without --seeds; give another --out_dir")
    for path in of_seeds or [of_one]:
        stored = read_json(path, MAX_JSON, {})
        stored |= renamed(stored)  # another program than train.py may use the old names
        # The trainer stores what it derives from FROM_AUTO, and sorts the names of lora_targets.
        names = stored.keys() & values.keys() - {"lora_targets"}
        names -= {name for name in FROM_AUTO if values.get(name) == "auto"}
        if values.get("batch_size") == 0:
            names -= DERIVED
        if values.get("teacher") == "auto":  # the student gets a part of the minutes
            names.discard("minutes")
        for name in names:
            new = values[name]
            if name in known:
                new = convert(name, str(new), known[name][0], file)
            if varies(sweep, name) and new != stored[name] and str(new) != str(stored[name]):
                fail(f"{folder}: holds a trial with {name}={stored[name]}, this sweep's has "
                     f"{name}={new}; give another --out_dir")


# ---- the cores and GPUs that trials share --------------------------------------------------------

def gpus():
    """Return the NVIDIA GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return [name for name in given.split(",") if name]
    command = ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [] if done.returncode else done.stdout.split()


def shares(names):
    """
    Return the environment variables of each slot, [{variable: value}]: threads, so that the trials
    do not compete for cores, and a GPU. Variables that the user has set are kept. names: settings
    that the sweep sets.
    """
    found = [{} for _ in range(parallel)]
    if parallel == 1:
        return found
    devices = [] if "device" in names else gpus()
    for slot, variables in enumerate(found):
        if not os.environ.get("OMP_NUM_THREADS"):
            variables["OMP_NUM_THREADS"] = str(max(1, system.cores() // parallel))
        if len(devices) > 1:
            variables["CUDA_VISIBLE_DEVICES"] = devices[slot % len(devices)]
    return found


# ---- Optuna --------------------------------------------------------------------------------------

def make_study(sweep, goal):
    """Return Optuna's study if this sweep needs one, otherwise None. Exit if Optuna is missing."""
    if not prune and sweep["method"] != "bayes":
        return None
    try:
        import optuna
    except ImportError:
        needs = "--prune" if prune else f"{file}: method bayes"
        fail(f"{needs} needs Optuna: pip install -c requirements-extras.txt optuna")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    pruner = optuna.pruners.MedianPruner(n_startup_trials=MIN_FINISHED)
    return optuna.create_study(direction=goal, pruner=pruner)


def ask(study, number, row):
    """
    Return Optuna's next trial. number: that of our trial; row: its row in the ledger. A trial that
    was started before keeps its values, even if Optuna would now propose others.
    """
    from optuna.samplers import TPESampler
    if isinstance(row.get("params"), dict) and row["params"]:
        study.enqueue_trial(row["params"])
    # Each trial has its own sampler, so that a continued sweep draws the same random numbers.
    study.sampler = TPESampler(seed=seed + number)
    return study.ask()


def tell(study, trial):
    """Tell Optuna the result of a trial that has ended."""
    from optuna.trial import TrialState
    if trial.status == "finished":
        study.tell(trial.asked, trial.value)
    else:
        state = TrialState.PRUNED if trial.status == "pruned" else TrialState.FAIL
        study.tell(trial.asked, state=state)


# ---- the sweep -----------------------------------------------------------------------------------

class Sweep:
    """
    A sweep, from its file to its result. content: that of the file; folder: holds the trials'
    folders; limit: max number of trials; trials: [Trial] that have begun, in the order of their
    numbers; running: [Running]; processes: those of `running`; is_reached: whether a trial has
    reached the metric's target; shown: numbers of the trials that a progress line has named.
    """

    def __init__(self, content):
        parameters, method = content["parameters"], content["method"]
        self.content, self.trials, self.running = content, [], []
        self.folder = Path(str(out_dir or parameters.get("out_dir", {}).get("value")
                               or "out/sweep"))
        default = None if method == "grid" else 20  # None: the whole grid
        self.limit = count or content.get("run_cap") or default
        self.planned = []  # values of grid and random; bayes chooses them trial by trial
        if method == "grid":
            self.planned = list(itertools.islice(grid(parameters), self.limit))
            self.limit = len(self.planned)
        elif method == "random":
            rng = random.Random(seed)
            self.planned = [{name: draw(spec, rng) for name, spec in parameters.items()}
                            for _ in range(self.limit)]
        metric = content.get("metric", {"name": "loss/val"})
        self.metric, self.target = metric["name"], metric.get("target")
        self.goal = metric.get("goal", "minimize")
        self.sign = -1 if self.goal == "maximize" else 1
        self.knobs = knobs_of(content)
        self.study = make_study(content, self.goal)
        self.slots = shares(parameters.keys())
        self.processes, self.is_reached, self.shown = [], False, set()
        self.bar = tqdm(bar_format="{desc}", dynamic_ncols=True, leave=False,
                        disable=not sys.stderr.isatty())

    # ---- what to run

    def full_values(self, values, number):
        """Return the settings for the program of a trial, from the values of the parameters."""
        origin = values.get("init_from", "scratch")
        more = {"seeds": seeds} if seeds > 1 else {}
        return values | more | {"out_dir": str(self.folder / str(number)),
                                # auto resumes an interrupted trial
                                "init_from": "auto" if origin == "scratch" else origin}

    def begin(self):
        """Refuse trials of another sweep, and open the ledger, before any trial starts."""
        for number, values in enumerate(self.planned, 1):
            refuse_other(self.content, self.full_values(values, number), self.folder / str(number))
        self.ledger = Ledger(self.folder)

    def upcoming(self):
        """
        Yield the trials to run, in order; those that ended in an earlier session are only reported.
        """
        for number in range(1, self.limit + 1):
            if self.is_reached:
                return
            trial = self.make_trial(number)
            row = self.ledger.rows.get(number, {})
            has_same_values = row.get("values") == recorded(trial)
            if has_same_values and is_finite(row.get("seconds")):
                trial.seconds = row["seconds"]
            self.trials.append(trial)
            if has_same_values and row.get("status") in ENDED and trial.folder.is_dir():
                trial.status, trial.why = row["status"], str(row.get("why", ""))
                self.conclude(trial, is_known=True)
            else:
                yield trial

    def make_trial(self, number):
        """Return the Trial of this number. Exit if its folder holds another one."""
        asked, params, folder = None, {}, self.folder / str(number)
        if self.study:
            asked = ask(self.study, number, self.ledger.rows.get(number, {}))
        if self.planned:
            values = self.planned[number - 1]
        else:
            try:
                values = {name: suggest(name, spec, asked)
                          for name, spec in self.content["parameters"].items()}
            except ValueError as e:  # the ledger has a choice that the file no longer has
                fail(f"{folder}: holds a trial whose values {file} no longer has ({e}); give "
                     f"another --out_dir")
            if redact(asked.params) == asked.params:  # a secret is not stored; Optuna is asked anew
                params = asked.params
        values = self.full_values(values, number)
        refuse_other(self.content, values, folder)
        return Trial(number, values, folder, asked, params)

    def seed_folders(self, trial):
        """Return {seed: folder of its run} of a trial."""
        n = trial.values.get("seeds", 1) if "seeds" in self.knobs else 1
        first = trial.values.get("seed", self.knobs.get("seed", [1337])[0])
        if n == 1:
            return {first: trial.folder}
        return {first + i: trial.folder / f"seed{first + i}" for i in range(n)}

    # ---- running trials

    def run(self):
        """Run the trials, `parallel` at a time. Return the signals that asked to stop."""
        upcoming = self.upcoming()
        with passing_signals(self.processes) as signals:
            try:
                self.fill(upcoming, signals)
                while self.running:
                    self.show_progress()
                    time.sleep(POLL)
                    for one in list(self.running):
                        self.look_at(one, signals)
                    self.fill(upcoming, signals)
            finally:
                self.bar.close()
                self.stop_all()
        return signals

    def fill(self, upcoming, signals):
        """Start trials until `parallel` of them run; after a signal, start none."""
        if signals:  # trials that wait for a process of a killed sweep have not begun
            self.running = [one for one in self.running if one.process]
            return
        while len(self.running) < parallel:
            trial = next(upcoming, None)  # may read many trials of an earlier session first
            if not trial or signals:
                return
            self.start(trial)

    def start(self, trial):
        """Begin a trial: record it, open the file for its output, and start its program."""
        path = self.folder / f"{trial.number}.txt"
        if trial.number not in self.ledger.rows and path.exists():
            fail(f"{path}: exists, but a trial's output needs this name; give another --out_dir")
        trial.status = "started"
        self.ledger.note(trial)
        taken = {one.slot for one in self.running}
        slot = next(slot for slot in range(parallel) if slot not in taken)
        log = Run(next(iter(self.seed_folders(trial).values())))
        one = Running(trial, slot, open(path, "ab"), log)
        self.running.append(one)
        if not self.launch(one):
            self.say(f"trial {trial.number} still runs, started by a sweep that was killed: "
                     "waiting for it")

    def launch(self, one):
        """
        Start the program of a trial. Return False if a process of an earlier session still has the
        lock on the trial's output, which a process inherits with its stdout.
        """
        try:
            system.lock(one.output)
        except BlockingIOError:
            return False
        one.begin, one.offset = time.monotonic(), one.output.seek(0, os.SEEK_END)
        group = self.content.get("name") or self.folder.name
        names = {"WANDB_RUN_GROUP": group, "WANDB_NAME": f"{group} {one.trial.number}"}
        names = {name: value for name, value in names.items() if name not in os.environ}
        command, environment = command_of(self.content, one.trial.values)
        environment = names | environment | self.slots[one.slot]
        try:
            one.process = subprocess.Popen(command, env=os.environ | environment,
                                           stdin=subprocess.DEVNULL, stdout=one.output,
                                           stderr=subprocess.STDOUT)
        except OSError as e:
            fail(f"{file}: {command[0]} cannot be started ({e.strerror}); see command")
        self.processes.append(one.process)
        if prune:
            # Report what earlier sessions have logged. Only later rows may prune the trial: they
            # show that its program now handles SIGTERM.
            self.is_hopeless(one)
        return True

    def look_at(self, one, signals):
        """Record a trial that has ended; with --prune, ask a hopeless one to stop."""
        if not one.process:
            self.launch(one)
        elif one.process.poll() is not None:
            self.end(one, signals)
        elif prune and not one.pruned and not signals and self.is_hopeless(one):
            one.pruned = f"at step {one.trial.reported:,}, worse than the median of the others"
            one.process.terminate()  # as after Ctrl-C, it saves, evaluates and exports

    def is_hopeless(self, one):
        """Return whether Optuna's pruner would stop a trial, judging by its log so far."""
        try:
            while one.log.read():
                pass
        except OSError:  # it has logged nothing yet
            return False
        return self.report(one.trial, one.log)

    def report(self, trial, run):
        """Report a run's new values to Optuna. Return whether its pruner would stop the trial."""
        is_hopeless = False
        for step, value in zip(*run.line(self.metric, "iter")):
            if step > trial.reported:  # step 0 has untrained weights
                trial.reported = int(step)
                trial.asked.report(float(value), trial.reported)
                is_hopeless = is_hopeless or trial.asked.should_prune()
        return is_hopeless

    def end(self, one, signals):
        """Record how the program of a trial ended. Exit if Ctrl-C reached only the program."""
        trial, code = one.trial, one.process.returncode
        self.running.remove(one)
        self.processes.remove(one.process)
        trial.seconds += time.monotonic() - one.begin
        trial.status, trial.why = self.ending(one, code, signals)
        if trial.status == "pruned":
            one.output.write(f"the sweep has pruned this trial {trial.why}\n".encode())
            mark_pruned(self.seed_folders(trial).values(), trial.why)
        one.output.close()
        self.conclude(trial)
        if trial.status == "stopped" and not signals and code in (130, -signal.SIGINT):
            fail(f"trial {trial.number} was stopped; the same command continues the sweep")

    def ending(self, one, code, signals):
        """Return (status, why) of a trial whose program has ended with this exit code."""
        results = [found for folder in self.seed_folders(one.trial).values()
                   if (found := read_json(folder / "result.json", MAX_JSON, {}))]
        was_cut = any(found.get("status") == "stopped" and found.get("ended_by") == "signal"
                      for found in results)
        if one.pruned and (code or was_cut or not results):
            return "pruned", one.pruned
        if code == 0 and not was_cut and (results or not signals):
            return "finished", ""
        if signals or code in (0, 130, -signal.SIGINT):
            return "stopped", "by a signal"
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
        return "failed", f"{how}: {reason_of(one)}"

    def stop_all(self):
        """Ask the programs that still run to stop, and wait until they have saved."""
        for one in self.running:
            if one.process:
                one.process.terminate()
        for one in self.running:
            if one.process:
                one.process.wait()
                one.trial.status, one.trial.why = "stopped", "by a signal"
                one.trial.seconds += time.monotonic() - one.begin
                self.ledger.note(one.trial)

    def conclude(self, trial, is_known=False):
        """
        Read the results of a trial that has ended, tell Optuna, and print a line. is_known: whether
        it ended in an earlier session.
        """
        self.measure(trial)
        if not is_known:
            self.ledger.note(trial)
        if self.study:
            tell(self.study, trial)
        self.say(self.outcome(trial) + ", in an earlier session" * is_known)
        if trial.status == "finished" and self.target is not None:
            self.is_reached = self.sign * trial.value <= self.sign * self.target
            if self.is_reached:
                self.say(f"{self.metric} has reached its target of {self.target}: the sweep ends")

    def measure(self, trial):
        """Read the results of a trial's runs. Exit if a finished trial lacks the metric."""
        for n, (number, folder) in enumerate(self.seed_folders(trial).items()):
            try:
                run = read_run(folder)
            except ValueError as e:
                if trial.status == "finished":
                    fail(e)
                continue
            if prune and n == 0:
                self.report(trial, run)
            steps, values = run.line(self.metric, "iter")
            if steps.any():  # no model is kept of an evaluation before the first step
                values = values[steps > 0]
            if len(values):
                trial.results[number] = float(values.max() if self.sign < 0 else values.min())
            elif trial.status == "finished" and self.metric in run.metrics:  # it has diverged
                trial.status, trial.why = "failed", f"without a finite {self.metric}"
            elif trial.status == "finished":
                fail(f"{file}: no run has the metric {self.metric!r}; expected one of "
                     f"{', '.join(run.columns)}")
            trial.steps = max(trial.steps, run.metrics["iter"])

    # ---- what to print

    def say(self, line):
        """Print a line, above the line of progress if a terminal shows one."""
        tqdm.write(one_line(line), file=sys.stdout)
        sys.stdout.flush()

    def show_progress(self):
        """
        Show the progress: on a terminal as one updated line, elsewhere a line per start of trials.
        """
        numbers = {one.trial.number for one in self.running}
        if not self.bar.disable:
            line = one_line(self.progress(numbers))
            self.bar.set_description_str(line, refresh=line != self.bar.desc)
        elif numbers - self.shown:
            print(one_line(self.progress(numbers)), flush=True)
            self.shown |= numbers

    def progress(self, numbers):
        """Return a line: the numbers of the running trials, the best so far, the time left."""
        plural = "s" if len(numbers) > 1 else ""
        parts = [f"trial{plural} {', '.join(map(str, sorted(numbers)))} of {self.limit}"]
        if best := self.best():
            parts.append(f"best so far {self.worded(best)}")
        if (left := self.seconds_left()) is not None:
            parts.append(f"{format_seconds(left)} left")
        return ", ".join(parts)

    def seconds_left(self):
        """Estimate the seconds until the last trial ends from the mean of those that have ended."""
        taken = [trial.seconds for trial in self.trials if trial.status in ENDED]
        if not taken:
            return None
        mean, now = statistics.fmean(taken), time.monotonic()
        left = [max(0.0, mean - one.trial.seconds - (now - one.begin if one.process else 0.0))
                for one in self.running]
        waiting = (self.limit - len(self.trials)) * mean
        return max([(sum(left) + waiting) / parallel, *left])

    def ranked(self):
        """Return the trials, the best first; unfinished ones are at the end."""
        def key(trial):
            has_none = trial.value is None
            return ORDER.index(trial.status), has_none, 0 if has_none else self.sign * trial.value

        return sorted((trial for trial in self.trials if trial.status in ORDER), key=key)

    def best(self):
        """Return the finished trial with the best value, None if no trial has finished."""
        finished = [trial for trial in self.trials if trial.status == "finished"]
        return min(finished, key=lambda trial: self.sign * trial.value, default=None)

    def settings(self, trial):
        """Return {name: value} of the settings that the sweep varies."""
        return {name: value for name, value in trial.values.items() if varies(self.content, name)}

    def measured(self, value):
        """Return a value of the metric with its unit, or with its name if it has no unit."""
        unit = compare.NAMES.get(self.metric, ("", ""))[1]
        return f"{compare.text(value)} {unit}" if unit else f"{self.metric} {compare.text(value)}"

    def details(self, trial):
        """Return the settings of a trial in words, " (x=1, y=2)", and the seeds' noise if known."""
        found = [f"{name}={short(value)}" for name, value in self.settings(trial).items()]
        if trial.deviation is not None:
            found = [f"standard deviation {compare.text(trial.deviation)}", f"n = "
                     f"{len(trial.results)}", *found]
        return f" ({', '.join(found)})" if found else ""

    def worded(self, trial):
        """Return the value and the settings of a trial in words."""
        return self.measured(trial.value) + self.details(trial)

    def outcome(self, trial):
        """Return a line with the result of a trial that has ended, or why it has none."""
        name = f"trial {trial.number}"
        if trial.status == "finished":
            return f"{name}: {self.worded(trial)}, {format_seconds(trial.seconds)}"
        name += self.details(trial)
        if trial.status == "stopped":
            return f"{name} was stopped at step {trial.steps:,}; the same command continues it"
        if trial.status == "pruned":
            value = "" if trial.value is None else f", with {self.measured(trial.value)}"
            return f"{name} was pruned {trial.why}{value}"
        return f"{name} failed {trial.why}; its output: {self.folder}/{trial.number}.txt"

    def heading(self):
        """Return the lines before the first trial."""
        lines = [": ".join(self.content[key] for key in ("name", "description")
                           if self.content.get(key))]
        shared = ""
        if parallel > 1:
            threads = os.environ.get("OMP_NUM_THREADS") or self.slots[0]["OMP_NUM_THREADS"]
            shared = f", {parallel} at a time, with {threads} thread{'s' * (threads != '1')} each"
        lines.append(f"{self.limit} trial{'s' * (self.limit > 1)}{shared}; the output of trial N "
                     f"is in {self.folder}/N.txt")
        if prune and self.limit <= MIN_FINISHED:
            lines.append(f"note: --prune has no effect before {MIN_FINISHED} trials have finished")
        changed = [name for name in VOCABULARY if varies(self.content, name)]
        if self.metric.startswith("loss/") and changed:
            lines.append(f"note: trials with another {changed[0]} are not comparable by loss per "
                         "token, only by bits per byte, as with metric: {name: bpb/val}")
        return [line for line in lines if line]

    def table(self):
        """Return the trials as rows of values, the names of the columns first; results first."""
        trials = self.ranked()
        names = [name for name in self.content["parameters"] if varies(self.content, name)]
        has_seeds = any(len(self.seed_folders(trial)) > 1 for trial in trials)
        columns = ["trial", self.metric, *(["sd", "n"] if has_seeds else []), "status", "steps",
                   "minutes", *names]
        rows = []
        for trial in trials:
            seeds_of = [trial.deviation, len(trial.results)] if has_seeds else []
            rows.append([trial.number, trial.value, *seeds_of, trial.status, trial.steps,
                         trial.seconds / 60, *(trial.values[name] for name in names)])
        return [columns, *rows]

    def verdict(self):
        """Return whether the best trial differs from the second by more than the seeds' noise."""
        finished = [trial for trial in self.ranked() if trial.status == "finished"]
        if len(finished) < 2 or min(len(trial.results) for trial in finished[:2]) < 2:
            return None
        best, second = finished[:2]
        found = judge(second.results, best.results)
        unit = compare.NAMES.get(self.metric, ("", ""))[1]
        return sentence(found, f"trial {second.number}", f"trial {best.number}", unit,
                        self.goal == "minimize")

    def command(self, trial):
        """Return the command that repeats a trial, in a separate folder beside the sweep's."""
        values = trial.values | {"out_dir": f"{self.folder}-best"}
        if self.knobs and values["init_from"] == "auto":  # its default
            del values["init_from"]
        words, environment = command_of(self.content, values)
        if words[:2] == ["/usr/bin/env", sys.executable]:
            words = words[1:]
        shown = {sys.executable: "python"}
        with contextlib.suppress(ValueError):  # the command may start another program
            shown[str(program(self.content))] = os.path.relpath(program(self.content))
        words = redact([shown.get(word, word) for word in words])
        variables = [f"{name}={shlex.quote(value)}" for name, value in redact(environment).items()]
        return " ".join([*variables, shlex.join(words)])

    def show_result(self):
        """Print all trials as a table, and the command of the best one."""
        print("\n".join(compare.lines_of(self.table())))
        if not (best := self.best()):
            return
        print(one_line(f"best: trial {best.number}, {self.worded(best)}, in {best.folder}"))
        if verdict := self.verdict():
            print(one_line(f"against the second: {verdict}"))
        print(one_line(f"its command: {self.command(best)}"))

    def as_dict(self):
        """Return the result of the sweep for JSON."""
        def entry(trial):
            runs = [read_json(folder / "result.json", MAX_JSON, {})
                    for folder in self.seed_folders(trial).values()]
            return {"trial": trial.number, "status": trial.status, "why": trial.why,
                    "value": trial.value, "sd": trial.deviation,
                    "results": {str(number): value for number, value in trial.results.items()},
                    "settings": recorded(trial), "steps": trial.steps,
                    "seconds": round(trial.seconds, 3), "out_dir": str(trial.folder),
                    "runs": [run for run in runs if run]}

        best = self.best()
        return {"status": "finished", "sweep": file, "out_dir": str(self.folder),
                "metric": {"name": self.metric, "goal": self.goal},
                "best": best and best.number, "verdict": self.verdict(),
                "command": best and self.command(best),
                "trials": [entry(trial) for trial in self.ranked()]}


# ---- words and files -----------------------------------------------------------------------------

def short(value):
    """Return a setting as text, a float with four significant digits."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def reason_of(one):
    """Return the line of a failed program's output that says why: its first error, or the last."""
    with open(one.output.name, "rb") as f:
        end = f.seek(0, os.SEEK_END)
        f.seek(max(one.offset, end - MAX_OUTPUT))
        lines = f.read().decode(errors="replace").strip().splitlines() or ["no message"]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return redact([*errors, lines[-1]][0][:MAX_WHY])


def mark_pruned(folders, why):
    """Write into the result.json of a trial's stopped runs that the sweep has pruned them."""
    for folder in folders:
        found = read_json(folder / "result.json", MAX_JSON, {})
        if found.get("ended_by") == "signal":
            with contextlib.suppress(OSError):  # a full disk; the ledger records it, too
                text = dumps(found | {"ended_by": "pruned", "why": why}, indent=1)
                write_atomic(folder / "result.json", text + "\n")


# ---- the command ---------------------------------------------------------------------------------

def check_options(sweep):
    """Exit if an option is out of range or does not fit the sweep."""
    if count < 0:
        fail(f"--count={count}: expected a number of trials, or 0 for run_cap or the whole grid")
    for name, value in (("seeds", seeds), ("parallel", parallel)):
        if value < 1:
            fail(f"--{name}={value}: expected at least 1")
    parameters, known = sweep["parameters"], knobs_of(sweep)
    if "seeds" not in known:
        if seeds > 1:
            fail(f"--seeds={seeds}: {sweep.get('program', 'the program')} has no setting seeds, as "
                 "train.py has")
        return
    if "seeds" in parameters and seeds > 1:
        fail(f"--seeds={seeds}: {file} has seeds, too; expected one of them")
    number = parameters.get("seeds", {}).get("value", seeds)
    if varies(sweep, "seeds") or type(number) is not int or number < 1:
        fail(f"{file}: seeds is {parameters['seeds']!r}, expected value: with a whole number")
    first = parameters.get("seed", {}).get("value", seed)
    if number > 1 and (varies(sweep, "seed") or type(first) is not int):
        fail(f"{file}: seed is {parameters['seed']!r}, and each trial has {number} seeds; expected "
             "value: with the first seed")


def main():
    if not file:
        fail("no sweep; expected a file, as in: python sweep.py sweeps/random.yaml")
    content = read_file(file)
    try:
        check(content)
    except ValueError as e:
        fail(f"{file}: {e}")
    check_options(content)
    sweep = Sweep(content)
    sweep.begin()
    for line in sweep.heading():
        sweep.say(line)
    signals = sweep.run()
    if signals:
        stopped = [trial.number for trial in sweep.trials if trial.status == "stopped"]
        where = f" in trial{'s' * (len(stopped) > 1)} {', '.join(map(str, stopped))}"
        print(f"stopped{where * bool(stopped)}; the same command continues the sweep",
              file=sys.stderr)
        sys.exit(128 + signals[0])
    if not any(trial.status != "failed" for trial in sweep.trials):
        fail(f"{file}: no trial finished; the messages above have the reasons")
    sweep.show_result()
    if json:
        print(dumps(compare.finite(sweep.as_dict()), allow_nan=False))


if __name__ == "__main__":
    words = []
    configure(globals(), positional=words)
    if len(words) > 1:
        fail(f"{' and '.join(words)}: expected one sweep")
    file = words[0] if words else file
    outlast("stdout")  # the sweep goes on if stdout fails: its results are in files
    main()
