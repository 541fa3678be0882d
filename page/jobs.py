"""
The queue of jobs: trainings and sweeps that the page starts, each as a separate process.

A job is an entry of jobs.json; its output goes to ID.txt. The process holds a lock on that file
through its stdout, so a page that is started later finds out which jobs still run.

The page starts queued jobs without asking, so jobs.json is in the user's own state folder and never
among the runs: a folder of runs may come from another person.
"""
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time

from configurator import fail, source_knobs
from engine.files import write_atomic
from engine.tracking.follow import shown
from engine.untrusted import MAX_JSON, read_json, reason
from page.command import (HOME, OPEN, TRAIN, check_arguments, choices, completions, data_names,
                          from_form, preset_knobs, presets, refuse, refuse_missing, train_arguments)
from page.locks import is_locked, lock_holders, trainer_pid
from page.programs import ClientGone, OneAtATime
from page.server import json_object
from page.state import make_state_folder

MAX_JOBS = 1000        # max jobs in jobs.json; beyond it, the oldest ended jobs are dropped
MAX_SHOWN = 200        # max jobs in a response
MAX_OUTPUT = 20_000    # max bytes of a program's output in a response
MAX_ERROR = 500        # max characters of a failed job's last line
PREVIEW_SECONDS = 120  # time limit for a data preview and for an estimate
PROGRAMS = ("train.py", "sweep.py")
STATES = ("queued", "running", "stopped", "failed", "ended")


def is_job(found):
    """Return whether an entry of jobs.json has the fields and types that the page writes."""
    if not isinstance(found, dict) or not isinstance(found.get("arguments"), list):
        return False
    texts = [found.get("id"), found.get("folder", ""), found.get("out_dir", ""),
             found.get("line", ""), found.get("error", ""), *found["arguments"]]
    pid = found.get("pid", 2)  # a job without a process has no pid; 2 passes the check below
    return (all(isinstance(text, str) for text in texts)
            and bool(re.fullmatch("[1-9][0-9]{0,8}", found["id"]))
            and found.get("state") in STATES and found.get("program") in PROGRAMS
            and type(pid) is int and pid > 1)


def read_queue(path):
    """
    Return (max jobs that run at once, list of jobs) of a jobs.json; (1, []) if it is missing. Exit
    if it is malformed, because the page would overwrite it. Raises OSError if it can't be read.
    """
    try:
        found = read_json(path, MAX_JSON)
    except FileNotFoundError:
        found = {}
    except ValueError:  # not a JSON object
        found = {"jobs": None}  # fails the check below
    at_once, jobs = found.get("at_once", 1), found.get("jobs", [])
    if type(at_once) is not int or not isinstance(jobs, list) or not all(map(is_job, jobs)):
        fail(f"{path}: expected a queue that the page has written; move the file elsewhere")
    return at_once, jobs


def without_old(jobs):
    """Drop the oldest ended jobs beyond MAX_JOBS jobs in all. Return the others."""
    ended = [job["id"] for job in jobs if job["state"] not in ("queued", "running")]
    excess = max(0, len(jobs) - MAX_JOBS)
    dropped = set(ended[:excess])
    return [job for job in jobs if job["id"] not in dropped]


class Jobs:
    """
    The queue, and its routes. At most `at_once` jobs run at a time. A page that is started later
    continues the queue.
    """

    def __init__(self, runs):
        """
        Read the queue and start its thread. Raises BlockingIOError if another page serves this
        queue, OSError if it can't be written.
        """
        self.runs, self.folder = runs, runs.state
        self.lock = threading.RLock()
        self.children = {}  # {id: Popen} of the jobs that this page has started
        self.previews, self.estimates = OneAtATime(), OneAtATime()
        make_state_folder(self.folder)
        self.lock_file = open(self.folder / "lock", "wb")
        fcntl.flock(self.lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.at_once, self.jobs = read_queue(self.folder / "jobs.json")
        self.unsaved = False  # whether jobs.json lacks the latest changes
        self.error = ""       # why no job can be started now
        for job in self.jobs:
            if job["state"] == "queued" and self.is_alive(job):  # jobs.json lacks its start
                job["state"] = "running"
                self.unsaved = True
        threading.Thread(target=self.work, daemon=True).start()

    def routes(self):
        return {"GET /api/knobs": self.knobs, "GET /api/jobs": self.list,
                "GET /api/paths": self.paths,
                "GET /api/look": self.preview, "GET /api/console": self.console,
                "GET /api/estimate": self.estimate, "POST /api/line": self.line,
                "POST /api/start": self.start, "POST /api/stop": self.stop,
                "POST /api/queue": self.set_at_once}

    # ---- the queue

    def output(self, job):
        """Return the path of the file with a job's output."""
        return self.folder / f"{job['id']}.txt"

    def is_alive(self, job):
        return is_locked(self.output(job))

    def save(self, *new):
        """
        Append new jobs to the queue and write it. If that fails, raise OSError without adding them;
        work() then tries again to write the other changes.
        """
        jobs, self.unsaved = without_old([*self.jobs, *new]), True
        text = json.dumps({"at_once": self.at_once, "jobs": jobs}, indent=1)
        write_atomic(self.folder / "jobs.json", text)
        self.jobs, self.unsaved = jobs, False

    def work(self):
        """
        Update the queue forever, in a separate thread. While jobs.json can't be written, no job
        starts.
        """
        while True:
            try:
                with self.lock:
                    self.update()
                self.error = ""
            except OSError as e:
                self.error = f"{self.folder}: cannot be written ({reason(e)}); the job waits\n"
            time.sleep(0.3)

    def update(self):
        """Note which jobs have ended, and start the next. Raises OSError."""
        running = [job for job in self.jobs if job["state"] == "running"]
        for job in running:
            child = self.children.get(job["id"])
            alive = child.poll() is None if child else self.is_alive(job)
            if alive:
                continue
            failed = child and child.returncode  # exit code; unknown if an earlier page started it
            job["state"] = "stopped" if job.get("stopped") else "failed" if failed else "ended"
            if job["state"] == "failed":
                job["error"] = last_line(self.output(job))
            self.children.pop(job["id"], None)
            self.unsaved = True
        running = [job for job in running if job["state"] == "running"]
        waiting = [job for job in self.jobs if job["state"] == "queued"]
        if waiting and len(running) < self.at_once:
            self.run(waiting[0])
        if self.unsaved:
            self.save()

    def run(self, job):
        """
        Start a job in a new session (setsid), so that it outlives the page. Raises OSError if
        jobs.json or the job's output can't be written.
        """
        with open(self.output(job), "ab") as out:
            fcntl.flock(out, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the process inherits the lock
            out.truncate(0)
            try:
                job["state"] = "running"
                self.save()  # before the start, so that no later page starts the job again
            except OSError:
                job["state"] = "queued"
                raise
            self.unsaved = True
            try:
                check_arguments(job, self.folder)
                child = subprocess.Popen(
                    [sys.executable, str(HOME / job["program"]), *job["arguments"]],
                    stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
                    cwd=job.get("folder"), start_new_session=True)
                self.children[job["id"]] = child
                job["pid"] = child.pid
            except (OSError, ValueError) as e:
                job["state"] = "failed"
                out.write(f"error: cannot be started ({e})\n".encode("utf-8", "backslashreplace"))
                out.flush()
                job["error"] = last_line(self.output(job))

    def job(self, job_id):
        """Return the job with this id. Raises ValueError."""
        for job in self.jobs:
            if job["id"] == job_id:
                return job
        raise ValueError(f"there is no job {str(job_id)[:50]!r}")

    # ---- routes

    def list(self, request=None):
        """Return the newest MAX_SHOWN jobs, the newest first."""
        fields = ("id", "state", "out_dir", "line", "error")
        with self.lock:
            newest = reversed(self.jobs[-MAX_SHOWN:])
            return {"jobs": [{name: job.get(name) for name in fields} for job in newest]}

    def knobs(self, request):
        """Return what the form needs: the knobs with their help and choices, and the presets."""
        names = choices()
        knobs = {name: {"value": value, "section": section, "help": comment,
                        "choices": names.get(name, []), "open": name in OPEN}
                 for name, (value, section, comment) in source_knobs(TRAIN).items()}
        found, errors = presets()
        return {"knobs": knobs, "presets": found, "wrong": errors, "cpus": os.cpu_count(),
                "root": str(self.runs.root), "at_once": self.at_once, "data": data_names()}

    def paths(self, request):
        """Return the paths that begin with the query "start", to complete the path of data."""
        return {"paths": completions(request.query.get("start", ""))}

    def line(self, request):
        """Return the command line of a form."""
        return {"line": from_form(request.json(), self.runs).line()}

    def start(self, request):
        """Append the training or sweep of a form to the queue. Raises ValueError."""
        form = request.json()
        command = from_form(form, self.runs)
        if not form.get("resume"):
            given = preset_knobs(str(form.get("preset") or "")) | (form.get("knobs") or {})
            if "data" in given:
                refuse_missing(str(given["data"]))
        with self.lock:
            job_id = str(max([int(job["id"]) for job in self.jobs], default=0) + 1)
            self.save({"id": job_id, "state": "queued", "folder": os.getcwd(),
                       "line": command.line(), **command._asdict()})
        return {"id": job_id}

    def stop(self, request):
        """
        Stop the training of {"run": name} or the job {"job": id}. A training stops as after Ctrl-C:
        it saves a checkpoint first. A queued job will not start.
        """
        body = request.json()
        with self.lock:
            if "run" in body:
                pid = trainer_pid(self.runs.run(body["run"]).folder, lock_holders())
                if pid is None:
                    raise ValueError("no process trains this run")
                terminate(os.kill, pid)
                return {}
            job = self.job(body.get("job"))
            if job["state"] == "queued":
                job["state"] = "stopped"
            elif job["state"] == "running" and self.is_alive(job):
                if "pid" not in job:
                    raise ValueError("the process of this job is unknown; stop it by its run")
                job["stopped"] = True
                # The signal also reaches a sweep's trial, which saves; the sweep waits for it.
                terminate(os.killpg, job["pid"])
            self.save()
        return {}

    def set_at_once(self, request):
        """Set the max number of jobs that run at once, from 1 to 64."""
        with self.lock:
            self.at_once = min(max(int(str(request.json().get("at_once", 1))), 1), 64)
            self.save()
        return {}

    def console(self, request):
        """Return a job's state and the end of its output; if it can't start, also the reason."""
        job = self.job(request.query.get("job"))
        error = self.error if job["state"] == "queued" else ""
        return {"text": tail(self.output(job)) + error, "state": job["state"]}

    def preview(self, request):
        """Return the first documents of a data set, as train.py would read them."""
        data = request.query.get("data", "stories")
        if data.startswith("-") or "\0" in data:
            raise ValueError("expected a file, a folder or the name of a data set")
        command = [str(HOME / "data.py"), f"--source={data}", "--show=True"]
        return {"text": printed(command, self.previews, request.gone)}

    def estimate(self, request):
        """Return what train.py --dry_run prints for a form: parameters, memory, time."""
        knobs = json_object(request.query.get("knobs", "{}"), "knobs")
        arguments = train_arguments(knobs, request.query.get("preset", ""))
        command = [str(TRAIN), *arguments, "--dry_run=True", "--wandb_log=False"]
        return {"text": printed(command, self.estimates, request.gone)}


def printed(command, programs, gone=lambda: False):
    """
    Return the end of what a Python program prints, or a message if it takes too long.

    programs: a OneAtATime, which runs the command; gone: see OneAtATime.run().
    """
    try:
        _, out, _ = programs.run(command, PREVIEW_SECONDS, gone, stderr=subprocess.STDOUT)
        return out[-MAX_OUTPUT:].decode("utf-8", "replace")
    except subprocess.TimeoutExpired:
        return (f"this takes more than {PREVIEW_SECONDS} s; "
                "a training prepares its data without a time limit\n")
    except ClientGone:
        return ""


def terminate(kill, pid):
    """Send SIGTERM to a process (kill=os.kill) or its group (os.killpg). Raises ValueError."""
    try:
        kill(pid, signal.SIGTERM)
    except OSError as e:
        refuse(f"process {pid} cannot be stopped ({e.strerror})")


def last_line(path):
    """Return the last non-empty line of a job's output, which shows why the job failed."""
    lines = [line.strip() for line in tail(path).split("\n")]
    return next((line[:MAX_ERROR] for line in reversed(lines) if line), "")


def tail(path):
    """Return the end of a file of output as a terminal shows it; "" if it can't be read."""
    try:
        with open(path, "rb") as f:
            f.seek(max(0, f.seek(0, os.SEEK_END) - MAX_OUTPUT))
            text = f.read().decode("utf-8", "replace")
    except OSError:
        return ""
    return "\n".join(map(shown, text.split("\n")))
