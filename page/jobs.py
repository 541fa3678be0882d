"""
Trainings that the page starts: processes of their own, in a queue.

A job is an entry of jobs.json; what it prints goes to ID.txt. The process holds a lock on that file through its stdout, so a
page that comes later knows which still run. The page passes knobs of train.py alone, as arguments, never through a shell.
Their values are the user's: who knows the token may read what he may.

The queue is the user's and starts by itself, so it stands in a folder of the user's, never among the runs: a folder of runs
may come from anyone.
"""
import fcntl
import hashlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from configurator import advice, convert, fail, read_file, source_knobs
from engine.files import read_json, why, write_atomic
from page.programs import Gone, OneAtATime
from page.runs import is_held, locks, make_own, trainer
from page.server import json_object

HOME = Path(__file__).resolve().parents[1]
TRAIN = HOME / "train.py"
MOST_JOBS = 1000
PROGRAMS = ("train.py", "sweep.py")
STATES = ("queued", "running", "stopped", "failed", "ended")
LOOK_SECONDS = 120  # a look at the data ends after that


def words(given, preset=""):
    """The arguments of train.py for these knobs, {name: value or text}. ValueError: an unknown knob, a wrong value."""
    known, found = source_knobs(TRAIN), [os.path.relpath(HOME / "config" / preset)] if preset else []
    if preset and preset not in presets()[0]:
        raise ValueError(f"there is no preset {preset!r} that can be used")
    for name, value in given.items():
        if name not in known:
            raise ValueError(f"train.py has no knob {name!r}; {advice(str(name), known)}")
        if isinstance(value, (dict, list)):
            refuse(f"--{name}: expected a number, true, false or a text")
        value = value if isinstance(value, (bool, int, float)) else str(value)
        value = convert(name, value, known[name][0], f"--{name}", refuse)
        if "\0" in str(value):
            raise ValueError(f"--{name} holds a zero byte")
        found.append(f"--{name}={value}")
    return found


def refuse(message):
    raise ValueError(message)


def part(given, name):
    """A JSON object in another, {} where there is none."""
    found = given.get(name) or {}
    if not isinstance(found, dict):
        refuse(f"{name} is no JSON object")
    return found


def presets():
    """({file name: {knob: value}} of the folder config/, [what is wrong with the others there])."""
    found, wrong = {}, []
    for path in sorted((HOME / "config").glob("*.py")):
        try:
            found[path.name] = read_preset(path)
        except ValueError as e:
            wrong.append(str(e))
    return found, wrong


def read_preset(path):
    """{knob: value} of a preset. ValueError: train.py would refuse it."""
    known = source_knobs(TRAIN)
    try:
        found = read_file(str(path))
    except SystemExit as e:
        raise ValueError(f"{path.name}: cannot be read; python train.py {os.path.relpath(path)} says why") from e
    for name in found.keys() - known.keys():
        refuse(f"{path.name}: train.py has no knob {name!r}; {advice(str(name), known)}")
    return {name: convert(name, value, known[name][0], path.name, refuse) for name, value in found.items()}


def line(program, arguments):
    """What one types in a terminal for the same."""
    return shlex.join(["python", os.path.relpath(HOME / program), *arguments])


def is_job(found):
    """Whether an entry of a jobs.json is one that the page has written."""
    if not isinstance(found, dict) or not isinstance(found.get("arguments"), list):
        return False
    texts = [found.get("id"), found.get("folder", ""), found.get("out_dir", ""), found.get("line", ""), *found["arguments"]]
    pid = found.get("pid", 2)
    return (all(isinstance(text, str) for text in texts) and bool(re.fullmatch("[1-9][0-9]{0,8}", found["id"]))
            and found.get("state") in STATES and found.get("program") in PROGRAMS and type(pid) is int and pid > 1)


def check_job(job, folder):
    """Refuse a job with arguments that the page passes to no program. folder: of the page's own files. ValueError."""
    is_sweep, (first, *rest) = job["program"] == "sweep.py", job["arguments"] or [""]
    if is_sweep and first not in map(str, folder.glob("sweep-*.json")):
        refuse(f"{first}: is not the file of a sweep that the page has written")
    if not is_sweep and first not in [os.path.relpath(HOME / "config" / name, job.get("folder")) for name in presets()[0]]:
        rest = job["arguments"]
    for word in rest:
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or not equals:
            refuse(f"{word}: expected --knob=value")
        elif not is_sweep or name == "out_dir":
            words({name: value})
        elif name != "count" or not value.isdecimal():
            refuse(f"{word}: expected --out_dir=FOLDER or --count=NUMBER")


def stored(path):
    """(how many jobs run at once, the jobs) of a jobs.json; a file that no page has written ends the program."""
    found = read_json(path)
    at_once, jobs = found.get("at_once", 1), found.get("jobs", [])
    whole = isinstance(jobs, list) and all(map(is_job, jobs))
    if type(at_once) is not int or not whole:
        fail(f"{path}: is not what a page has written; move it elsewhere")
    return at_once, jobs


class Jobs:
    """The queue: at most `at_once` run. Kept on disk, so that a new page goes on with it."""

    def __init__(self, runs):
        """Raises BlockingIOError where another page has this folder's queue, OSError where it can't be written."""
        self.runs, self.folder, self.lock, self.children = runs, runs.own, threading.RLock(), {}
        self.looks, self.estimates = OneAtATime(), OneAtATime()
        make_own(self.folder)
        self.alone = open(self.folder / "lock", "wb")
        fcntl.flock(self.alone, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.at_once, self.jobs = stored(self.folder / "jobs.json")
        self.changed, self.trouble = False, ""  # whether the file is behind; why nothing is started now
        for job in self.jobs:
            if job["state"] == "queued" and is_held(self.folder / f"{job['id']}.txt"):
                job["state"], self.changed = "running", True  # its start could not be written
        threading.Thread(target=self.work, daemon=True).start()

    def routes(self):
        asked = {"knobs": self.knobs, "jobs": self.state, "look": self.look, "console": self.console,
                 "estimate": self.estimate}
        told = {"line": self.line, "start": self.start, "stop": self.stop, "queue": self.queue}
        return {f"GET /api/{name}": f for name, f in asked.items()} | {f"POST /api/{name}": f for name, f in told.items()}

    def keep(self, *more):
        """Write the queue, with more jobs at its end. Raises OSError; what has changed is then written by work()."""
        jobs, self.changed = [*self.jobs, *more][-MOST_JOBS:], True
        write_atomic(self.folder / "jobs.json", json.dumps({"at_once": self.at_once, "jobs": jobs}, indent=1))
        self.jobs, self.changed = jobs, False

    def work(self):
        """Start what waits, note what has ended. Where the disk fails nothing starts until it can be written."""
        while True:
            try:
                with self.lock:
                    self.turn()
                self.trouble = ""
            except OSError as e:
                self.trouble = f"{self.folder}: cannot be written ({why(e)}); what waits starts once it can\n"
            time.sleep(0.3)

    def turn(self):
        for job in [job for job in self.jobs if job["state"] == "running"]:
            child = self.children.get(job["id"])
            if child and child.poll() is not None or not child and not is_held(self.folder / f"{job['id']}.txt"):
                failed = "failed" if child and child.returncode else "ended"
                job["state"] = "stopped" if job.get("stopped") else failed
                self.children.pop(job["id"], None)
                self.changed = True
        waiting = [job for job in self.jobs if job["state"] == "queued"]
        if waiting and sum(job["state"] == "running" for job in self.jobs) < self.at_once:
            self.run(waiting[0])
        if self.changed:
            self.keep()

    def run(self, job):
        """Start a job in a session of its own, which neither Ctrl-C nor the end of the page reaches. Raises OSError."""
        with open(self.folder / f"{job['id']}.txt", "ab") as out:
            fcntl.flock(out, fcntl.LOCK_EX | fcntl.LOCK_NB)
            out.truncate(0)
            try:
                job["state"] = "running"
                self.keep()  # before it runs: a page that comes later must not start it again
            except OSError:
                job["state"] = "queued"
                raise
            self.changed = True
            try:
                check_job(job, self.folder)
                child = subprocess.Popen([sys.executable, str(HOME / job["program"]), *job["arguments"]], stdout=out,
                                         stdin=subprocess.DEVNULL, stderr=subprocess.STDOUT, start_new_session=True,
                                         cwd=job.get("folder"))
                self.children[job["id"]] = child
                job |= {"pid": child.pid, "since": time.time()}
            except (OSError, ValueError) as e:
                job["state"] = "failed"
                out.write(f"error: cannot be started ({e})\n".encode("utf-8", "backslashreplace"))

    def state(self, request=None):
        """The jobs, the newest first, each with its line to type."""
        with self.lock:
            shown = [{k: job.get(k) for k in ("id", "state", "out_dir", "line")} for job in reversed(self.jobs[-200:])]
            return {"jobs": shown}

    def knobs(self, request):
        """All knobs with their help, presets and what the data can be."""
        known = {name: {"value": value, "section": section, "help": comment}
                 for name, (value, section, comment) in source_knobs(TRAIN).items()}
        found, wrong = presets()
        return {"knobs": known, "presets": found, "wrong": wrong, "cpus": os.cpu_count(), "root": str(self.runs.root),
                "at_once": self.at_once}

    def arguments(self, given):
        """(program, arguments, out_dir) of what the form describes."""
        knobs, sweep, preset = dict(part(given, "knobs")), part(given, "sweep"), str(given.get("preset") or "")
        if given.get("resume"):
            folder = self.runs.folder(given["resume"])
            return "train.py", words({"out_dir": str(folder), **knobs, "init_from": "resume"}), str(folder)
        if not sweep:
            out_dir = str(knobs.get("out_dir") or "auto")
            return "train.py", words(knobs, preset), out_dir
        path, out_dir = self.sweep(knobs, preset, part(sweep, "parameters"), sweep.get("method"))
        count = int(str(sweep.get("count") or 0))
        if count < 0:
            refuse(f"a sweep of {count} trials, expected at least 1")
        count = [f"--count={count}"] * (count > 0)
        return "sweep.py", [path, f"--out_dir={out_dir}", *count], out_dir

    def sweep(self, knobs, preset, parameters, method):
        """Write the file of a sweep: (its path, the folder of its trials). parameters: {knob: spec}, as sweep.py's."""
        known, fixed = source_knobs(TRAIN), {}
        out_dir = str(knobs.pop("out_dir", ""))
        words(knobs, preset)  # refuses what is wrong
        for name, value in ((presets()[0][preset] if preset else {}) | knobs).items():
            if name not in parameters and name != "out_dir":
                fixed[name] = {"value": convert(name, value, known[name][0], f"--{name}", refuse)}
        for name in parameters:
            spec = part(parameters, name)
            values = spec.get("values", [spec.get("min"), spec.get("max")])
            for value in values if isinstance(values, list) and values else [None]:
                words({name: value})
        content = {"program": "train.py", "method": "random" if method == "random" else "grid",
                   "metric": {"name": "loss/val", "goal": "minimize"}, "parameters": fixed | parameters}
        text = json.dumps(content, indent=1)
        name = f"sweep-{hashlib.sha256(text.encode()).hexdigest()[:12]}"  # each has its own file and folder
        write_atomic(self.folder / f"{name}.json", text)
        return str(self.folder / f"{name}.json"), out_dir or str(self.runs.root / name)

    def line(self, request):
        """The command line of a form."""
        program, arguments, _ = self.arguments(request.json())
        return {"line": line(program, arguments)}

    def start(self, request):
        """Put a form's training into the queue."""
        program, arguments, out_dir = self.arguments(request.json())
        with self.lock:
            number = max([int(job["id"]) for job in self.jobs], default=0) + 1
            self.keep({"id": str(number), "state": "queued", "program": program, "arguments": arguments,
                       "folder": os.getcwd(), "out_dir": out_dir, "line": line(program, arguments)})
        return {"id": str(number)}

    def job(self, number):
        """The job of this id. ValueError: there is none."""
        for job in self.jobs:
            if job["id"] == number:
                return job
        raise ValueError(f"there is no job {str(number)[:50]!r}")

    def stop(self, request):
        """End a job or the training of a run the way Ctrl-C does: it saves first. One that waits leaves the queue."""
        given = request.json()
        with self.lock:
            if "run" in given:
                pid = trainer(self.runs.folder(given["run"]), locks())
                if pid is None:
                    raise ValueError("nobody trains there")
                send_stop(os.kill, pid)
                return {}
            job = self.job(given.get("job"))
            if job["state"] == "queued":
                job["state"] = "stopped"
            elif job["state"] == "running" and is_held(self.folder / f"{job['id']}.txt"):
                if "pid" not in job:
                    raise ValueError("its process is not known; stop it on the page of its run")
                job["stopped"] = True
                send_stop(os.killpg, job["pid"])  # a sweep waits for its trial, which saves first
            self.keep()
        return {}

    def queue(self, request):
        """How many run at once."""
        with self.lock:
            self.at_once = min(max(int(str(request.json().get("at_once", 1))), 1), 64)
            self.keep()
        return {}

    def console(self, request):
        """The end of what a job has printed."""
        job = self.job(request.query.get("job"))
        trouble = self.trouble if job["state"] == "queued" else ""
        return {"text": tail(self.folder / f"{job['id']}.txt") + trouble, "state": job["state"]}

    def look(self, request):
        """What train.py would read of these data: their first documents."""
        data = request.query.get("data", "stories")
        if data.startswith("-") or "\0" in data:
            raise ValueError("expected a file, a folder or the name of data")
        return {"text": output([str(HOME / "data.py"), f"--source={data}", "--show=True"], self.looks, request.gone)}

    def estimate(self, request):
        """What train.py tells of this choice before its first step: parameters, memory, time. Three steps are taken."""
        arguments = words(json_object(request.query.get("knobs", "{}"), "knobs"), request.query.get("preset", ""))
        asked = [str(TRAIN), *arguments, "--dry_run=True", "--wandb_log=False"]
        return {"text": output(asked, self.estimates, request.gone)}


def output(arguments, turns, gone=lambda: False):
    """Return the end of what a program of ours prints. turns: OneAtATime; gone: whether the reader has gone."""
    try:
        _, said, _ = turns.run(arguments, LOOK_SECONDS, gone, stderr=subprocess.STDOUT)
        return said[-20000:].decode("utf-8", "replace")
    except subprocess.TimeoutExpired:
        return f"this takes more than {LOOK_SECONDS} s; a training prepares the data without such a limit\n"
    except Gone:
        return ""


def send_stop(kill, pid):
    """Send SIGTERM by os.kill or os.killpg. ValueError: the process is somebody else's, or has just ended."""
    try:
        kill(pid, signal.SIGTERM)
    except OSError as e:
        refuse(f"process {pid} cannot be stopped ({e.strerror})")


def tail(path, most=20000):
    """The end of a file of text, with what a progress bar has overwritten left out."""
    try:
        with open(path, "rb") as f:
            f.seek(max(0, f.seek(0, 2) - most))
            text = f.read().decode("utf-8", "replace")
    except OSError:
        return ""
    return "\n".join(part.rstrip("\r").rpartition("\r")[2] for part in text.split("\n"))
