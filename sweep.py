"""
Run a W&B sweep file without a server.

    python sweep.py sweeps/random.yaml [--count=12] [--out_dir=out/sweep]

The same file runs with `wandb sweep FILE` and `wandb agent ID`. Grid and random search need no
package, bayes needs `pip install optuna`. Trial N trains in out_dir/N. The file and the seed
determine the values of every trial, so the same command continues an interrupted sweep; a folder
with trials of another sweep is refused. At the end compare.py's table shows all trials.
"""
import contextlib
import itertools
import json
import math
import os
import random
import re
import sys
from pathlib import Path

import compare
from configurator import advice, configure, convert, fail, read_file, source_knobs
from engine.advice import renamed
from engine.programs import run_program
from engine.streams import one_line, outlast
from engine.untrusted import MAX_JSON, read_json

file = ""       # the sweep: a .yaml file in W&B's format
count = 0       # number of trials; 0: the file's run_cap, else the whole grid, else 20
out_dir = ""    # folder for the trials' folders; "": the file's out_dir, else out/sweep
seed = 1337     # of random and bayes

UNIFORM = ("uniform", "int_uniform", "q_uniform", "log_uniform_values", "q_log_uniform_values",
           "int_log_uniform_values")
METRIC = "metric: {name: loss/val, goal: minimize}"
KEYS = {"program", "method", "metric", "parameters", "run_cap", "name", "description", "project",
        "entity", "command"}
COMMAND = ["${env}", "${interpreter}", "${program}", "${args}"]  # W&B's default
ENVIRONMENT_VARIABLE = re.compile(r"\$\{envvar:([A-Z0-9_]*)\}")
SET_BY_SWEEP = ("out_dir", "init_from")  # for each trial
DERIVED = {"batch_size", "gradient_accumulation_steps"}  # the trainer derives them if batch_size=0


def check(sweep):
    """
    Exit if this program cannot run a sweep, or would run it differently from W&B. Convert numbers
    that YAML reads as texts.
    """
    if not isinstance(sweep.get("parameters"), dict) or not sweep["parameters"]:
        fail(f"{file}: has no parameters; sweeps/grid.yaml shows a sweep")
    if sweep.get("method") not in ("grid", "random", "bayes"):
        fail(f"{file}: method is {sweep.get('method')!r}, expected grid, random or bayes")
    for key in sweep.keys() - KEYS:
        fail(f"{file}: {key!r} is not known here; run this sweep with wandb sweep, or remove it")
    check_metric(sweep)
    for key in ("name", "description", "project", "entity"):
        if not isinstance(sweep.get(key, ""), str):
            fail(f"{file}: {key} is {sweep[key]!r}, expected a text")
    command = sweep.get("command", COMMAND)
    check_command(command)
    if type(sweep.get("run_cap", 1)) is not int or sweep.get("run_cap", 1) < 1:
        fail(f"{file}: run_cap is {sweep['run_cap']!r}, expected a whole number from 1 on")
    known = knobs_of(program(sweep)) if "${program}" in command else {}
    for name, spec in sweep["parameters"].items():
        check_parameter(name, spec, sweep["method"])
        if name == "out_dir" and "value" not in spec:
            fail(f"{file}: out_dir is {spec!r}, expected value: the folder for all trials; trial N "
                 "trains in out_dir/N")
        if known and name not in known:
            fail(f"{file}: {program(sweep)} has no knob {name!r}; {advice(str(name), known)}")
        if known and "values" in spec and type(known[name][0]) in (int, float):
            default = known[name][0]
            spec["values"] = [convert(name, str(value), default, file) for value in spec["values"]]


def check_metric(sweep):
    if "metric" not in sweep:
        if sweep["method"] == "bayes":
            fail(f"{file}: bayes needs a metric; expected {METRIC}")
        return
    metric = sweep["metric"]
    valid = (isinstance(metric, dict) and isinstance(metric.get("name"), str)
             and type(metric.get("target", 0)) in (int, float)
             and metric.get("goal", "minimize") in ("minimize", "maximize"))
    if not valid:
        fail(f"{file}: metric is {metric!r}, expected {METRIC}, or maximize")
    for key in metric.keys() - {"name", "goal", "target"}:
        fail(f"{file}: metric has {key!r}, which is not known here; run this sweep with wandb "
             "sweep, or remove it")


def check_command(command):
    """Exit if a command would not do here what it does under `wandb agent`."""
    is_list = isinstance(command, list) and command
    if not is_list or not all(isinstance(word, (str, int, float)) for word in command):
        fail(f"{file}: command is {command!r}, expected a list of words such as "
             f"{json.dumps(COMMAND)}")
    words, known = [str(word) for word in command], macros({}, "")
    for word in words:
        # The value of ${envvar:NAME} may be any word, so it is removed before the check.
        if is_macro(ENVIRONMENT_VARIABLE.sub("", word)) and word[2:-1] not in known:
            fail(f"{file}: command has {word}, expected one of "
                 f"{', '.join(f'${{{name}}}' for name in known)}")
        for name in ENVIRONMENT_VARIABLE.findall(word):
            if name not in os.environ:
                fail(f"{file}: command has {word}, but the environment has no {name}")
        key = word.lstrip("-+").partition("=")[0].replace("-", "_")
        if key in SET_BY_SWEEP and word != key:  # "out_dir" without dashes or = is no option
            fail(f"{file}: command sets {word}, but the sweep gives each trial its own {key}; set "
                 "it under parameters")
    if not any(word.startswith("${args") for word in words):
        fail(f"{file}: command has no ${{args}}, so that a trial would not get its values")


def is_macro(word):
    return word.startswith("${") and word.endswith("}")


def program(sweep):
    """Return the path of the program to run: as the file has it, else beside this program."""
    path = Path(str(sweep.get("program", "train.py")))
    path = path if path.is_file() else Path(__file__).parent / path.name
    return path if path.is_file() else fail(f"{file}: no program {sweep['program']}")


def knobs_of(path):
    """Return the settings of a program as {name: (default, ...)}; {} if it has no configure()."""
    is_ours = "configure(globals()" in path.read_text(encoding="utf-8", errors="replace")
    return source_knobs(path) if is_ours else {}


def check_parameter(name, spec, method):
    if not isinstance(spec, dict) or not spec.keys() & {"value", "values", "min"}:
        fail(f"{file}: {name} is {spec!r}, expected value: ..., values: [...], "
             "or min: ... and max: ...")
    refuse_unused(name, spec, method)
    if "min" in spec:
        check_range(name, spec, method)
    if "values" not in spec:
        return
    if not isinstance(spec["values"], list) or not spec["values"]:
        fail(f"{file}: {name} has values {spec['values']!r}, expected a list such as [1, 2]")
    weights, n = spec.get("probabilities"), len(spec["values"])
    if weights is not None and not are_weights(weights, n):
        fail(f"{file}: {name} has probabilities {weights!r}, expected {n} numbers from 0 on")


def refuse_unused(name, spec, method):
    """Exit if a parameter has a key or a distribution that would have no effect here."""
    # In words, the keys that are used, and the distributions that such a parameter may name.
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
        fail(f"{file}: {name} has {key!r}, which is not used with {what} in method {method}; "
             "remove it")
    if kinds and spec.get("distribution", kinds[0]) not in kinds:
        fail(f"{file}: {name} has {what} and distribution {spec['distribution']!r}, expected "
             f"{kinds[0]}")


def check_range(name, spec, method):
    """Check min, max and q, and convert them to numbers: YAML reads 1e-4 (no point) as a text."""
    if method == "grid":
        fail(f"{file}: {name} is a range, but a grid needs values: [...]")
    if "max" not in spec:
        fail(f"{file}: {name} has no max, expected min <= max")
    for key in spec.keys() & {"min", "max", "q"}:
        spec[key] = to_number(name, key, spec[key])
    kind = distribution(spec)
    if kind not in UNIFORM:
        fail(f"{file}: {name} has distribution {kind!r}, expected one of {', '.join(UNIFORM)}")
    if kind.startswith("int"):
        for key in ("min", "max"):
            if spec[key] != int(spec[key]):
                fail(f"{file}: {name} has {key} {spec[key]}, expected a whole number for {kind}")
            spec[key] = int(spec[key])
    if not spec["min"] <= spec["max"]:
        fail(f"{file}: {name} goes from {spec['min']} to {spec['max']}, expected min <= max")
    if "log" in kind and spec["min"] <= 0:
        fail(f"{file}: {name} has min {spec['min']}, expected above 0 for {kind}")
    if spec.get("q", 1) <= 0:
        fail(f"{file}: {name} has q {spec['q']}, expected above 0")


def to_number(name, key, value):
    """Return an int unchanged and anything else as a finite float."""
    with contextlib.suppress(TypeError, ValueError):
        found = value if type(value) is int else float(value)
        if math.isfinite(found):
            return found
    return fail(f"{file}: {name} has {key} {value!r}, expected a number")


def are_weights(weights, n):
    """Return whether these are n finite weights, not all 0, of a random choice."""
    if not isinstance(weights, list) or len(weights) != n:
        return False
    return (all(type(w) in (int, float) and w >= 0 for w in weights)
            and 0 < sum(weights) < math.inf)


def distribution(spec):
    """Return the distribution of a range; as in W&B, the default for two ints is an int."""
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


# ---- trials --------------------------------------------------------------------------------------

def refuse_other(sweep, values, folder):
    """Exit if a trial's folder holds a trial with other values: the trainer would resume it."""
    stored = read_json(folder / "config.json", MAX_JSON, {})
    stored |= renamed(stored)  # another program than train.py may use the old names
    known = knobs_of(program(sweep))
    names = stored.keys() & values.keys()
    if values.get("batch_size") == 0:
        names -= DERIVED
    for name in names:
        new = values[name]
        if name in known:
            new = convert(name, str(new), known[name][0], file)
        if varies(sweep, name) and new != stored[name] and str(new) != str(stored[name]):
            fail(f"{folder}: holds a trial with {name}={stored[name]}, this sweep's has "
                 f"{name}={new}; give another --out_dir")


def run_trial(sweep, number, values, folder):
    """
    Train with these values in folder/number. Return the best value of the metric, or None if the
    training failed.
    """
    origin = values.get("init_from", "scratch")
    values = values | {"out_dir": str(folder / str(number)),
                       "init_from": "auto" if origin == "scratch" else origin}  # auto: may resume
    refuse_other(sweep, values, folder / str(number))
    shown = [one_line(f"{k}={v}") for k, v in values.items() if varies(sweep, k)]
    print(f"trial {number}: {', '.join(shown)}", flush=True)
    command, environment = command_of(sweep, values)
    try:
        code, signals = run_program(command, environment)
    except OSError as e:
        fail(f"{file}: {command[0]} cannot be started ({e.strerror}); see command")
    if signals:
        print(f"stopped in trial {number}; the same command continues the sweep", file=sys.stderr)
        sys.exit(128 + signals[0])
    if code < 0 or code == 130:
        fail(f"trial {number} was stopped; the same command continues the sweep")
    if code:
        print(f"trial {number} failed with code {code}", flush=True)
        return None
    return best_value(sweep, compare.read_runs([folder / str(number)])[0])


def macros(values, path):
    """
    Return {name: words} of each ${name} in a command, as `wandb agent` expands them.
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
            "args_json": [json.dumps(values)], "args_no_boolean_flags": no_booleans,
            "args_no_equals": list(itertools.chain.from_iterable(pairs))}


def command_of(sweep, values):
    """Return the words of a trial's command, and the environment variables that the sweep sets."""
    known, words = macros(values, str(program(sweep))), []
    for word in map(str, sweep.get("command", COMMAND)):
        word = ENVIRONMENT_VARIABLE.sub(lambda match: os.environ[match[1]], word)
        words += known.get(word[2:-1], [word]) if is_macro(word) else [word]
    return words, {f"WANDB_{key.upper()}": sweep[key] for key in ("project", "entity")
                   if sweep.get(key)}


def varies(sweep, name):
    """Return whether a setting is a parameter of the sweep that has no fixed `value`."""
    return name in sweep["parameters"] and "value" not in sweep["parameters"][name]


def best_value(sweep, run):
    """Return the best value that the metric had in a run."""
    metric = sweep.get("metric", {"name": "loss/val"})
    _, values = run.line(metric["name"], "iter")
    if not len(values):
        fail(f"{file}: no run has the metric {metric['name']!r}; "
             f"expected one of {', '.join(run.columns)}")
    return float(values.max() if metric.get("goal") == "maximize" else values.min())


def reached(sweep, result):
    """Return whether a trial's result meets the metric's target, which ends a sweep as in W&B."""
    metric = sweep.get("metric", {})
    if result is None or "target" not in metric:
        return False
    sign = -1 if metric.get("goal") == "maximize" else 1
    if sign * result > sign * metric["target"]:
        return False
    print(f"{metric['name']} has reached its target of {metric['target']}: the sweep ends")
    return True


def bayes(sweep, folder, trials):
    """Run trials whose values Optuna chooses from the results of earlier trials."""
    try:
        import optuna
    except ImportError:
        fail(f"{file}: method bayes needs Optuna: pip install optuna")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed),
                                direction=sweep["metric"].get("goal", "minimize"))
    for number in range(trials):
        trial = study.ask()
        values = {name: suggest(name, spec, trial) for name, spec in sweep["parameters"].items()}
        result = run_trial(sweep, number, values, folder)
        study.tell(trial, result,
                   state=optuna.trial.TrialState.FAIL if result is None else None)
        if reached(sweep, result):
            break


def main():
    if not file:
        fail("no sweep; expected a file, as in: python sweep.py sweeps/random.yaml")
    if count < 0:
        fail(f"--count={count}: expected a number of trials, or 0 for run_cap or the whole grid")
    sweep = read_file(file)
    check(sweep)
    heading = [sweep[key] for key in ("name", "description") if sweep.get(key)]
    if heading:
        print(": ".join(heading), flush=True)
    parameters, method = sweep["parameters"], sweep["method"]
    folder = Path(str(out_dir or parameters.get("out_dir", {}).get("value") or "out/sweep"))
    default = None if method == "grid" else 20  # None: the whole grid
    limit = count or sweep.get("run_cap") or default
    if method == "bayes":
        bayes(sweep, folder, limit)
    else:
        rng = random.Random(seed)
        random_trials = ({name: draw(spec, rng) for name, spec in parameters.items()}
                         for _ in itertools.count())
        trials = grid(parameters) if method == "grid" else random_trials
        for number, values in enumerate(itertools.islice(trials, limit)):
            if reached(sweep, run_trial(sweep, number, values, folder)):
                break
    done = [path.parent for path in folder.glob("*/config.json")]
    if not done:
        fail(f"{file}: no trial logged a row; the messages above have the reason")
    done.sort(key=lambda path: (len(path.name), path.name))  # 2 before 10
    metric = sweep.get("metric", {}).get("name", "loss/val")
    try:
        print("\n".join(compare.lines_of(compare.table_of(compare.read_runs(done), metric))))
    except ValueError as e:
        fail(e)


if __name__ == "__main__":
    words = []
    configure(globals(), positional=words)
    if len(words) > 1:
        fail(f"{' and '.join(words)}: expected one sweep")
    file = words[0] if words else file
    outlast("stdout")  # the sweep goes on if stdout fails: its results are in files
    main()
