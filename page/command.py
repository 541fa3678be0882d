"""
Turn the page's forms into commands of train.py and sweep.py, which run without a shell.

A form can set only knobs of train.py, but to any value, including any path: whoever knows the
token may read what the user may read.
"""
import ast
import functools
import hashlib
import json
import os
import shlex
from pathlib import Path
from typing import NamedTuple

from configurator import advice, convert, read_file, source_knobs
from engine.files import write_atomic

HOME = Path(__file__).resolve().parents[1]
TRAIN = HOME / "train.py"
# {knob: (source file, variable with the names that are valid values)}. These files are parsed
# rather than imported, because importing them takes seconds and loads PyTorch.
NAMES = {"optimizer": ("optim.py", "OPTIMIZERS"),
         "schedule": ("engine/training/validate.py", "CHOICES"),
         "dtype": ("engine/training/hardware.py", "DTYPES"),
         "init_from": ("engine/training/resume.py", "STARTS"),
         "vocab_source": ("engine/text/vocabulary.py", "MADE")}
OPEN = ("init_from", "vocab_source")  # knobs whose value may also be a path
MAX_PATHS = 50  # max paths in a completion


class Command(NamedTuple):
    program: str     # train.py or sweep.py
    arguments: list  # list of str
    out_dir: str     # folder of the run or of the sweep's trials; auto: train.py chooses it

    def line(self):
        """Return the command as a user types it in a terminal."""
        return shlex.join(["python", os.path.relpath(HOME / self.program), *self.arguments])


def refuse(message):
    raise ValueError(message)


def typed(knobs, source="--{}"):
    """
    Return {knob: value} with each value converted to the type of its knob. Raises ValueError for an
    unknown knob or a value that does not fit.

    source: where the values come from, for error messages; {} is replaced by the knob's name.
    """
    known, found = source_knobs(TRAIN), {}
    for name, value in knobs.items():
        origin = source.format(name)
        if name not in known:
            refuse(f"{origin}: train.py has no setting {name!r}; {advice(str(name), known)}")
        if isinstance(value, (dict, list)):
            refuse(f"{origin}: expected a number, true, false or a text")
        value = value if isinstance(value, (bool, int, float)) else str(value)
        found[name] = convert(name, value, known[name][0], origin, refuse)
        if "\0" in str(found[name]):
            refuse(f"{origin} holds a zero byte")
    return found


@functools.cache
def choices():
    """Return {knob: names that are valid values}, read from the source files in NAMES."""
    return {knob: names_in(HOME / path, variable, knob) for knob, (path, variable) in NAMES.items()}


def names_in(path, variable, knob):
    """
    Return the strings in a variable of a source file: the elements of a tuple, or the keys of a
    dict. If the dict has the key `knob`, return the elements of the tuple under this key.
    """
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == variable:
            value = node.value
            if isinstance(value, ast.Dict):
                keys = [ast.literal_eval(key) for key in value.keys]
                if knob not in keys:
                    return keys
                value = value.values[keys.index(knob)]
            return list(ast.literal_eval(value))
    return []


def data_names():
    """Return the names of data sources that are not paths."""
    from engine.text.sources import source_names  # imported here because it loads sentencepiece
    return source_names()


def completions(start):
    """Return the first MAX_PATHS visible files and folders whose paths begin with a text."""
    folder, name = os.path.split(start)
    try:
        with os.scandir(os.path.expanduser(folder) or ".") as entries:
            found = [entry.name + "/" * entry.is_dir() for entry in entries
                     if entry.name.startswith(name) and entry.name[0] != "."]
    except (OSError, ValueError):  # the folder is missing or can't be read
        return []
    return [os.path.join(folder, name) for name in sorted(found)[:MAX_PATHS]]


def refuse_missing(data):
    """Raise ValueError for data that is neither the name of a source nor a path that exists."""
    names, is_path = data_names(), os.path.exists(os.path.expanduser(data))
    if data.partition(":")[0] not in names and not is_path:
        refuse(f"--data={data}: no such file; expected {', '.join(names)}, a text file, or a "
               "folder of text files")


def presets():
    """Return ({file name: {knob: value}} of the presets in config/, [error of each other one])."""
    found, errors = {}, []
    for path in sorted((HOME / "config").glob("*.py")):
        try:
            found[path.name] = typed(read_file(str(path)), path.name)
        except SystemExit:  # raised by configurator.fail
            line = f"python train.py {os.path.relpath(path)}"
            errors.append(f"{path.name}: cannot be read; {line} shows why")
        except ValueError as e:
            errors.append(str(e))
    return found, errors


def preset_knobs(preset):
    """Return {knob: value} of a preset, or {} for the name "". Raises ValueError."""
    found = presets()[0] | {"": {}}
    if preset not in found:
        refuse(f"there is no preset {preset!r} that can be used")
    return found[preset]


def train_arguments(knobs, preset=""):
    """Return the arguments of train.py for a preset and knobs. Raises ValueError."""
    preset_knobs(preset)
    path = [os.path.relpath(HOME / "config" / preset)] if preset else []
    return path + [f"--{name}={value}" for name, value in typed(knobs).items()]


def object_in(form, name):
    """Return the dict form[name], or {} if it is missing or empty. Raises ValueError."""
    found = form.get(name) or {}
    if not isinstance(found, dict):
        refuse(f"{name} is not a JSON object")
    return found


def from_form(form, runs):
    """
    Return the Command for a form {"knobs", "preset", "resume", "sweep"}. Raises ValueError.

    resume: name of the run to continue; sweep: {"parameters", "method", "count"}; each may be
    missing.
    """
    knobs, sweep = object_in(form, "knobs"), object_in(form, "sweep")
    if form.get("resume"):
        out_dir = str(runs.run(form["resume"]).folder)
        arguments = train_arguments({"out_dir": out_dir, **knobs, "init_from": "resume"})
        return Command("train.py", arguments, out_dir)
    preset = str(form.get("preset") or "")
    if sweep:
        return sweep_command(knobs, preset, sweep, runs)
    out_dir = str(knobs.get("out_dir") or "auto")
    return Command("train.py", train_arguments(knobs, preset), out_dir)


def sweep_command(knobs, preset, sweep, runs):
    """
    Write the file of a sweep into the page's state folder, and return the Command that runs it.
    Raises ValueError, and OSError if the file can't be written.
    """
    parameters = object_in(sweep, "parameters")
    for name in parameters:
        spec = object_in(parameters, name)
        values = spec.get("values", [spec.get("min"), spec.get("max")])
        if not isinstance(values, list) or not values:
            values = [None]  # no valid value: typed() refuses None for a number
        for value in values:
            typed({name: value})
    knobs = typed(knobs)
    out_dir = knobs.get("out_dir", "")
    fixed = preset_knobs(preset) | knobs
    fixed.pop("out_dir", None)
    count = int(str(sweep.get("count") or 0))
    if count < 0:
        refuse(f"a sweep of {count} trials, expected at least 1")
    content = {"program": "train.py",
               "method": "random" if sweep.get("method") == "random" else "grid",
               "metric": {"name": "loss/val", "goal": "minimize"},
               "parameters": {name: {"value": value} for name, value in fixed.items()} | parameters}
    text = json.dumps(content, indent=1)
    # The name has a hash of the content, so no later sweep overwrites the file of a queued one.
    name = f"sweep-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    path = runs.state / f"{name}.json"
    write_atomic(path, text)
    out_dir = out_dir or str(runs.root / name)
    arguments = [str(path), f"--out_dir={out_dir}"]
    if count:  # 0: sweep.py chooses the number of trials
        arguments.append(f"--count={count}")
    return Command("sweep.py", arguments, out_dir)


def check_arguments(job, folder):
    """
    Raise ValueError for a job of jobs.json with arguments that from_form() never returns. folder:
    the page's state folder.
    """
    is_sweep = job["program"] == "sweep.py"
    first, *rest = job["arguments"] or [""]
    if is_sweep and first not in map(str, folder.glob("sweep-*.json")):
        refuse(f"{first}: expected the file of a sweep that the page has written")
    # The first argument of a training may be a preset, as a path relative to the folder where the
    # job was queued.
    paths = [os.path.relpath(HOME / "config" / name, job.get("folder")) for name in presets()[0]]
    if not is_sweep and first not in paths:
        rest = job["arguments"]
    for word in rest:
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or not equals:
            refuse(f"{word}: expected --key=value")
        if not is_sweep or name == "out_dir":
            typed({name: value})
        elif name != "count" or not value.isdecimal():
            refuse(f"{word}: expected --out_dir=FOLDER or --count=NUMBER")
