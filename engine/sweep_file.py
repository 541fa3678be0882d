"""
Sweep files in W&B's format: check one, choose the values of a trial, make its command.

    sweep = read_file("sweeps/grid.yaml")  # {"method": "grid", "parameters": {name: spec}, ...}
    check(sweep)                           # raises ValueError, with the reason in one line
    for values in grid(sweep["parameters"]):
        words, environment = command_of(sweep, values)

A spec is {"value": x}, {"values": [x, y]} or {"min": a, "max": b}. The format:
https://docs.wandb.ai/models/sweeps/sweep-config-keys
"""
import contextlib
import itertools
import json
import math
import os
import re
import sys
from pathlib import Path

from configurator import advice, convert, source_knobs

UNIFORM = ("uniform", "int_uniform", "q_uniform", "log_uniform_values", "q_log_uniform_values",
           "int_log_uniform_values")
METRIC = "metric: {name: bpb/val, goal: minimize}"
KEYS = {"program", "method", "metric", "parameters", "run_cap", "name", "description", "project",
        "entity", "command"}
COMMAND = ["${env}", "${interpreter}", "${program}", "${args}"]  # W&B's default
ENVIRONMENT_VARIABLE = re.compile(r"\$\{envvar:([A-Z0-9_]*)\}")
SET_BY_SWEEP = ("out_dir", "init_from")  # set for each trial
ROOT = Path(__file__).resolve().parents[1]


def refuse(message):
    raise ValueError(message)


def check(sweep):
    """
    Raise ValueError if sweep.py cannot run a sweep, or would run it differently from W&B. Convert
    numbers that YAML reads as strings.
    """
    if not isinstance(sweep.get("parameters"), dict) or not sweep["parameters"]:
        refuse("has no parameters; sweeps/grid.yaml shows a sweep")
    if sweep.get("method") not in ("grid", "random", "bayes"):
        refuse(f"method is {sweep.get('method')!r}, expected grid, random or bayes")
    for key in sweep.keys() - KEYS:
        instead = "; use --prune instead" if key == "early_terminate" else ""
        refuse(f"{key!r} is not supported; run this sweep with wandb sweep, or remove it{instead}")
    check_metric(sweep)
    for key in ("name", "description", "project", "entity"):
        if not isinstance(sweep.get(key, ""), str):
            refuse(f"{key} is {sweep[key]!r}, expected a string")
    command = sweep.get("command", COMMAND)
    check_command(command)
    if type(sweep.get("run_cap", 1)) is not int or sweep.get("run_cap", 1) < 1:
        refuse(f"run_cap is {sweep['run_cap']!r}, expected a whole number of at least 1")
    if "${program}" in command:
        program(sweep)  # raises ValueError if the file does not exist
    known = knobs_of(sweep) if "${program}" in command else {}
    for name, spec in sweep["parameters"].items():
        check_parameter(name, spec, sweep["method"])
        if name == "out_dir" and "value" not in spec:
            refuse(f"out_dir is {spec!r}, expected value: the folder for all trials; trial N "
                   "trains in out_dir/N")
        if known and name not in known:
            refuse(f"{program(sweep)} has no setting {name!r}; {advice(str(name), known)}")
        if known and "values" in spec and type(known[name][0]) in (int, float):
            default = known[name][0]
            spec["values"] = [convert(name, str(value), default, "parameters", refuse)
                              for value in spec["values"]]


def check_metric(sweep):
    if "metric" not in sweep:
        if sweep["method"] == "bayes":
            refuse(f"bayes needs a metric; expected {METRIC}")
        return
    metric = sweep["metric"]
    valid = (isinstance(metric, dict) and isinstance(metric.get("name"), str)
             and type(metric.get("target", 0)) in (int, float)
             and metric.get("goal", "minimize") in ("minimize", "maximize"))
    if not valid:
        refuse(f"metric is {metric!r}, expected {METRIC}, or maximize")
    for key in metric.keys() - {"name", "goal", "target"}:
        refuse(f"metric has {key!r}, which is not supported; run this sweep with wandb "
               "sweep, or remove it")


def check_command(command):
    """Raise ValueError if sweep.py would expand a command differently than `wandb agent`."""
    is_list = isinstance(command, list) and command
    if not is_list or not all(isinstance(word, (str, int, float)) for word in command):
        refuse(f"command is {command!r}, expected a list of words such as "
               f"{json.dumps(COMMAND)}")
    words, known = [str(word) for word in command], macros({}, "")
    for word in words:
        # The value of ${envvar:NAME} may be any word, so it is removed before the check.
        if is_macro(ENVIRONMENT_VARIABLE.sub("", word)) and word[2:-1] not in known:
            refuse(f"command has {word}, expected one of "
                   f"{', '.join(f'${{{name}}}' for name in known)}")
        for name in ENVIRONMENT_VARIABLE.findall(word):
            if name not in os.environ:
                refuse(f"command has {word}, but the environment has no {name}")
        key = word.lstrip("-+").partition("=")[0].replace("-", "_")
        if key in SET_BY_SWEEP and word != key:  # "out_dir" without dashes or = is not an option
            refuse(f"command sets {word}, but the sweep gives each trial its own {key}; set "
                   "it under parameters")
    if not any(is_macro(word) and word.startswith("${args") for word in words):
        refuse("command lacks ${args}, so trials would not get their values")


def is_macro(word):
    return word.startswith("${") and word.endswith("}")


def program(sweep):
    """
    Return the path of the program to run: the path in the sweep file or, if no file is there, the
    file of that name beside sweep.py. Raises ValueError if neither exists.
    """
    path = Path(str(sweep.get("program", "train.py")))
    path = path if path.is_file() else ROOT / path.name
    return path if path.is_file() else refuse(f"no program {sweep['program']}")


def knobs_of(sweep):
    """
    Return {name: (default, section, comment)} of the settings of a sweep's program; {} if it is not
    one of this project's, which call configure(globals()).
    """
    try:
        path = program(sweep)
    except ValueError:
        return {}
    is_ours = "configure(globals()" in path.read_text(encoding="utf-8", errors="replace")
    return source_knobs(path) if is_ours else {}


def check_parameter(name, spec, method):
    if not isinstance(spec, dict) or not spec.keys() & {"value", "values", "min"}:
        refuse(f"{name} is {spec!r}, expected value: ..., values: [...], "
               "or min: ... and max: ...")
    refuse_unused(name, spec, method)
    if "min" in spec:
        check_range(name, spec, method)
    if "values" not in spec:
        return
    if not isinstance(spec["values"], list) or not spec["values"]:
        refuse(f"{name} has values {spec['values']!r}, expected a list such as [1, 2]")
    weights, n = spec.get("probabilities"), len(spec["values"])
    if weights is not None and not are_weights(weights, n):
        refuse(f"{name} has probabilities {weights!r}, expected {n} numbers of at least 0")


def refuse_unused(name, spec, method):
    """Raise ValueError if a key or distribution of a parameter would have no effect here."""
    # what: the parameter in words; used: keys that have an effect; kinds: allowed distributions
    if "value" in spec:
        what, used, kinds = "a value", {"value"}, ["constant"]
    elif "values" in spec:
        what, used, kinds = "values", {"values"}, ["categorical"]
        if method == "random":
            used.add("probabilities")
            kinds.append("categorical_w_probabilities")
    else:
        kind = str(distribution(spec)) if "max" in spec else ""
        what, used, kinds = f"a range of distribution {kind}", {"min", "max"}, []
        if kind.startswith("q_"):
            used.add("q")
    for key in spec.keys() - used - {"distribution"}:
        refuse(f"{name} has {key!r}, which is not used with {what} in method {method}; "
               "remove it")
    if kinds and spec.get("distribution", kinds[0]) not in kinds:
        refuse(f"{name} has {what} and distribution {spec['distribution']!r}, expected "
               f"{kinds[0]}")


def check_range(name, spec, method):
    """Check min, max and q, and convert them to numbers: YAML reads 1e-4 (no point) as a string."""
    if method == "grid":
        refuse(f"{name} is a range, but a grid needs values: [...]")
    if "max" not in spec:
        refuse(f"{name} has no max, expected min <= max")
    for key in spec.keys() & {"min", "max", "q"}:
        spec[key] = to_number(name, key, spec[key])
    kind = distribution(spec)
    if kind not in UNIFORM:
        refuse(f"{name} has distribution {kind!r}, expected one of {', '.join(UNIFORM)}")
    if kind.startswith("int"):
        for key in ("min", "max"):
            if spec[key] != int(spec[key]):
                refuse(f"{name} has {key} {spec[key]}, expected a whole number for {kind}")
            spec[key] = int(spec[key])
    if not spec["min"] <= spec["max"]:
        refuse(f"{name} goes from {spec['min']} to {spec['max']}, expected min <= max")
    if "log" in kind and spec["min"] <= 0:
        refuse(f"{name} has min {spec['min']}, expected above 0 for {kind}")
    if spec.get("q", 1) <= 0:
        refuse(f"{name} has q {spec['q']}, expected above 0")


def to_number(name, key, value):
    """Return an int unchanged and anything else as a finite float."""
    with contextlib.suppress(TypeError, ValueError):
        found = value if type(value) is int else float(value)
        if math.isfinite(found):
            return found
    return refuse(f"{name} has {key} {value!r}, expected a number")


def are_weights(weights, n):
    """Return whether these are n finite weights for a random choice, not all 0."""
    if not isinstance(weights, list) or len(weights) != n:
        return False
    return (all(type(w) in (int, float) and w >= 0 for w in weights)
            and 0 < sum(weights) < math.inf)


def distribution(spec):
    """Return the distribution of a range; as in W&B, the default for two ints is int_uniform."""
    ints = type(spec["min"]) is int and type(spec.get("max")) is int
    return spec.get("distribution", "int_uniform" if ints else "uniform")


# ---- values of a trial ---------------------------------------------------------------------------

def grid(parameters):
    """Yield every combination of values; the last parameter varies fastest."""
    choices = [spec.get("values") or [spec["value"]] for spec in parameters.values()]
    for values in itertools.product(*choices):
        yield dict(zip(parameters, values))


def draw(spec, rng):
    """Return one random value of a parameter."""
    if "value" in spec:
        return spec["value"]
    if "values" in spec:
        return rng.choices(spec["values"], spec.get("probabilities"))[0]
    kind, low, high = distribution(spec), spec["min"], spec["max"]
    if kind == "int_uniform":
        return rng.randint(low, high)
    if "log" in kind:
        x = math.exp(rng.uniform(math.log(low), math.log(high)))
    else:
        x = rng.uniform(low, high)
    return quantize(x, spec, kind)


def quantize(x, spec, kind):
    """Round to a multiple of q if the distribution has one; whole numbers become ints."""
    if kind.startswith("int"):
        return round(x)
    if kind.startswith("q_"):
        q = spec.get("q", 1)
        x = round(x / q) * q
        return int(x) if float(q).is_integer() else x
    return x


def suggest(name, spec, trial):
    """Return the value of a parameter that Optuna's trial proposes."""
    if "value" in spec:
        return spec["value"]
    if "values" in spec:
        return trial.suggest_categorical(name, spec["values"])
    kind, low, high = distribution(spec), spec["min"], spec["max"]
    if kind.startswith("int"):
        return trial.suggest_int(name, low, high, log="log" in kind)
    return quantize(trial.suggest_float(name, low, high, log="log" in kind), spec, kind)


# ---- the command of a trial ----------------------------------------------------------------------

def macros(values, path):
    """
    Return {name: words that replace ${name} in a command}, as `wandb agent` expands them.
    Source: wandb/sdk/launch/sweeps/utils.py
    """
    flags = [f"{name}={value}" for name, value in values.items()]
    no_booleans = [f"--{name}" if value is True else f"--{name}={value}"
                   for name, value in values.items() if value is not False]
    pairs = [[f"--{name}", str(value)] for name, value in values.items()]
    return {"env": ["/usr/bin/env"], "interpreter": [sys.executable], "program": [path],
            "args": [f"--{flag}" for flag in flags], "args_no_hyphens": flags,
            "args_append_hydra": [f"+{flag}" for flag in flags],
            "args_override_hydra": [f"++{flag}" for flag in flags],
            "args_json": [json.dumps(values, default=str)], "args_no_boolean_flags": no_booleans,
            "args_no_equals": list(itertools.chain.from_iterable(pairs))}


def command_of(sweep, values):
    """Return the words of a trial's command, and the environment variables that the sweep sets."""
    command, words = [str(word) for word in sweep.get("command", COMMAND)], []
    # Without ${program}, the sweep's program file need not exist.
    known = macros(values, str(program(sweep)) if "${program}" in command else "")
    for word in command:
        word = ENVIRONMENT_VARIABLE.sub(lambda match: os.environ[match[1]], word)
        words += known.get(word[2:-1], [word]) if is_macro(word) else [word]
    return words, {f"WANDB_{key.upper()}": sweep[key] for key in ("project", "entity")
                   if sweep.get(key)}


def varies(sweep, name):
    """Return whether a setting is a parameter of the sweep that has no fixed `value`."""
    return name in sweep["parameters"] and "value" not in sweep["parameters"][name]
