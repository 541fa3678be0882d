"""
A W&B sweep file, run here without a server.

    python sweep.py sweeps/random.yaml [--count=12] [--out_dir=out/sweep]

The same file runs with `wandb sweep FILE` and `wandb agent ID`. Grid and random search need nothing else, bayes needs
`pip install optuna`. Trial N trains in out_dir/N; what N tries is settled by the file and the seed, so the same command
continues a sweep that was interrupted; trials of another sweep are refused there. At the end all trials stand in one table,
as compare.py prints it.
"""
import contextlib
import itertools
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path

import compare
from configurator import advice, configure, convert, fail, read_file, source_knobs
from engine.untrusted import MAX_JSON, read_json
from engine.streams import one_line, outlast

file = ""       # the sweep, a .yaml file as W&B has them
count = 0       # trials; 0: the file's run_cap, or the whole grid
out_dir = ""    # the trials' folders go here; "": what the file says, else out/sweep
seed = 1337     # of random and bayes

UNIFORM = ("uniform", "int_uniform", "q_uniform", "log_uniform_values", "q_log_uniform_values", "int_log_uniform_values")
METRIC = "metric: {name: loss/val, goal: minimize}"
KNOWN = ("program", "method", "metric", "parameters", "run_cap", "name", "description", "project", "entity", "command")
COMMAND = ["${env}", "${interpreter}", "${program}", "${args}"]  # W&B's, where a sweep has no command
ENVIRONMENT_VARIABLE = re.compile(r"\$\{envvar:([A-Z0-9_]*)\}")
OWN = ("out_dir", "init_from")  # the sweep sets these for each trial
FOUND = ("batch_size", "gradient_accumulation_steps")  # what the trainer finds where it is to have the largest batch, 0


def check(sweep):
    """Refuse what cannot be run, or what this program would otherwise do differently from W&B; take numbers as numbers."""
    if not isinstance(sweep.get("parameters"), dict) or not sweep["parameters"]:
        fail(f"{file}: has no parameters; sweeps/grid.yaml shows a sweep")
    if sweep.get("method") not in ("grid", "random", "bayes"):
        fail(f"{file}: method is {sweep.get('method')!r}, expected grid, random or bayes")
    for key in sweep.keys() - set(KNOWN):
        fail(f"{file}: {key!r} is not known here; run this sweep with wandb sweep, or remove it")
    if sweep["method"] == "bayes" and "metric" not in sweep:
        fail(f"{file}: bayes needs a metric; expected {METRIC}")
    if not is_metric(sweep.get("metric", {"name": "loss/val"})):
        fail(f"{file}: metric is {sweep['metric']!r}, expected {METRIC}, or maximize")
    for key in sweep.get("metric", {}).keys() - {"name", "goal", "target"}:
        fail(f"{file}: metric has {key!r}, which is not known here; run this sweep with wandb sweep, "
             f"or remove it")
    for key in ("name", "description", "project", "entity"):
        if not isinstance(sweep.get(key, ""), str):
            fail(f"{file}: {key} is {sweep[key]!r}, expected a text")
    check_command(sweep.get("command", COMMAND))
    if type(sweep.get("run_cap", 1)) is not int or sweep.get("run_cap", 1) < 1:
        fail(f"{file}: run_cap is {sweep['run_cap']!r}, expected a whole number from 1 on")
    known = knobs_of(program(sweep)) if "${program}" in sweep.get("command", COMMAND) else {}
    for name, spec in sweep["parameters"].items():
        check_parameter(name, spec, sweep["method"])
        if name == "out_dir" and "value" not in spec:
            fail(f"{file}: out_dir is {spec!r}, expected value: the folder for all trials; trial N "
                 f"trains in out_dir/N")
        if known and name not in known:
            fail(f"{file}: {program(sweep)} has no knob {name!r}; {advice(str(name), known)}")
        if known and "values" in spec and type(known[name][0]) in (int, float):
            spec["values"] = [convert(name, str(value), known[name][0], file) for value in spec["values"]]


def is_metric(metric):
    named = isinstance(metric, dict) and isinstance(metric.get("name"), str)
    target = type(metric.get("target", 0)) in (int, float) if named else False
    return named and target and metric.get("goal", "minimize") in ("minimize", "maximize")


def check_command(command):
    """Refuse a command that would not do here what it does under `wandb agent`."""
    is_words = isinstance(command, list) and all(isinstance(w, (str, int, float)) for w in command)
    if not is_words or not command:
        fail(f"{file}: command is {command!r}, expected a list of words such as "
             f"{json.dumps(COMMAND)}")
    words, known = [str(word) for word in command], forms({}, "")
    for word in words:
        inside = ENVIRONMENT_VARIABLE.sub("", word)
        if inside.startswith("${") and inside.endswith("}") and inside[2:-1] not in known:
            expected = ", ".join(f"${{{name}}}" for name in known)
            fail(f"{file}: command has {word}, expected one of {expected}")
        for name in ENVIRONMENT_VARIABLE.findall(word):
            if name not in os.environ:
                fail(f"{file}: command has {word}, but the environment has no {name}")
        if (key := word.lstrip("-+").partition("=")[0].replace("-", "_")) in OWN and word != key:
            fail(f"{file}: command sets {word}, but the sweep gives each trial its own {key}; set it "
                 f"under parameters")
    if not any(word.startswith("${args") for word in words):
        fail(f"{file}: command has no ${{args}}, so that a trial would not get its values")


def program(sweep):
    """The path of what is to be run: as the file says, else of that name beside this program."""
    path = Path(str(sweep.get("program", "train.py")))
    path = path if path.is_file() else Path(__file__).parent / path.name
    return path if path.is_file() else fail(f"{file}: no program {sweep['program']}")


def knobs_of(path):
    """The names a program takes; none where they cannot be known, since it does not use configurator.py."""
    return source_knobs(path) if "configure(globals()" in path.read_text(encoding="utf-8", errors="replace") else {}


def check_parameter(name, spec, method):
    if not isinstance(spec, dict) or not spec.keys() & {"value", "values", "min"}:
        fail(f"{file}: {name} is {spec!r}, expected value: ..., values: [...], or min: ... and max: ...")
    refuse_unused(name, spec, method)
    if "min" in spec:
        check_range(name, spec, method)
    if "values" not in spec:
        return
    if not isinstance(spec["values"], list) or not spec["values"]:
        fail(f"{file}: {name} has values {spec['values']!r}, expected a list such as [1, 2]")
    weights, n = spec.get("probabilities"), len(spec["values"])
    if weights is not None and not is_weights(weights, n):
        fail(f"{file}: {name} has probabilities {weights!r}, expected {n} numbers from 0 on")


def refuse_unused(name, spec, method):
    """Refuse what a parameter says and nothing here would do."""
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
             f"remove it")
    if kinds and spec.get("distribution", kinds[0]) not in kinds:
        fail(f"{file}: {name} has {what} and distribution {spec['distribution']!r}, expected "
             f"{kinds[0]}")


def check_range(name, spec, method):
    """A range's min, max and q, which are taken as numbers: YAML reads 1e-4, without a point, as a text."""
    if method == "grid":
        fail(f"{file}: {name} is a range, but a grid needs values: [...]")
    if "max" not in spec:
        fail(f"{file}: {name} has no max, expected min <= max")
    for key in spec.keys() & {"min", "max", "q"}:
        spec[key] = number(name, key, spec[key])
    kind = distribution(spec)
    if kind not in UNIFORM:
        fail(f"{file}: {name} has distribution {kind!r}, expected one of {', '.join(UNIFORM)}")
    for key in ("min", "max") if kind.startswith("int") else ():
        if spec[key] != int(spec[key]):
            fail(f"{file}: {name} has {key} {spec[key]}, expected a whole number for {kind}")
        spec[key] = int(spec[key])
    if not spec["min"] <= spec["max"]:
        fail(f"{file}: {name} goes from {spec['min']} to {spec['max']}, expected min <= max")
    if "log" in kind and spec["min"] <= 0:
        fail(f"{file}: {name} has min {spec['min']}, expected above 0 for {kind}")
    if spec.get("q", 1) <= 0:
        fail(f"{file}: {name} has q {spec['q']}, expected above 0")


def number(name, key, value):
    """An int as it is, all else as a float."""
    with contextlib.suppress(TypeError, ValueError):
        found = value if type(value) is int else float(value)
        if math.isfinite(found):
            return found
    return fail(f"{file}: {name} has {key} {value!r}, expected a number")


def is_weights(weights, n):
    """Whether these are n numbers by which one can draw."""
    numbers = isinstance(weights, list) and len(weights) == n and all(type(w) in (int, float) and w >= 0 for w in weights)
    return numbers and 0 < sum(weights) < math.inf


def distribution(spec):
    """That of a range; as in W&B two ints mean ints."""
    ints = type(spec["min"]) is int and type(spec.get("max")) is int
    return spec.get("distribution", "int_uniform" if ints else "uniform")


def grid(parameters):
    """Every combination, the last parameter the fastest."""
    choices = [spec["values"] if "values" in spec else [spec["value"]] for spec in parameters.values()]
    for values in itertools.product(*choices):
        yield dict(zip(parameters, values))


def draw(spec, rng):
    """One random value of a parameter."""
    if "value" in spec:
        return spec["value"]
    if "values" in spec:
        return rng.choices(spec["values"], spec.get("probabilities"))[0]
    kind, low, high = distribution(spec), spec["min"], spec["max"]
    if kind == "int_uniform":
        return rng.randint(low, high)
    x = math.exp(rng.uniform(math.log(low), math.log(high))) if "log" in kind else rng.uniform(low, high)
    return quantize(x, spec, kind)


def quantize(x, spec, kind):
    """To a multiple of q, where the distribution says so; a whole number is an int, as many knobs need it."""
    if kind.startswith("int"):
        return round(x)
    if kind.startswith("q_"):
        q = spec.get("q", 1)
        x = round(x / q) * q
        return int(x) if float(q).is_integer() else x
    return x


def suggest(name, spec, trial):
    """One value of a parameter as Optuna proposes it."""
    if "value" in spec:
        return spec["value"]
    if "values" in spec:
        return trial.suggest_categorical(name, spec["values"])
    kind, low, high = distribution(spec), spec["min"], spec["max"]
    if kind.startswith("int"):
        return trial.suggest_int(name, low, high, log="log" in kind)
    return quantize(trial.suggest_float(name, low, high, log="log" in kind), spec, kind)


def refuse_other(sweep, values, folder):
    """One line where a trial's folder holds one with other values, which resuming it would take for these."""
    stored, known = read_json(folder / "config.json", MAX_JSON, {}), knobs_of(program(sweep))
    found = FOUND if values.get("batch_size") == 0 else ()
    for name in stored.keys() & values.keys() - set(found):
        new = convert(name, str(values[name]), known[name][0], file) if name in known else values[name]
        if sweep_varies(sweep, name) and new != stored[name] and str(new) != str(stored[name]):
            fail(f"{folder}: holds a trial with {name}={stored[name]}, this sweep's has {name}={new}; give another --out_dir")


def run_trial(sweep, number, values, folder):
    """Train with these values in folder/number; the best value of the metric, or None if the training failed."""
    origin = values.get("init_from", "scratch")  # a trial that was interrupted is resumed
    origin = "auto" if origin == "scratch" else origin
    values = values | {"out_dir": str(folder / str(number)), "init_from": origin}
    refuse_other(sweep, values, folder / str(number))
    print(f"trial {number}: " + ", ".join(one_line(f"{k}={v}") for k, v in values.items() if sweep_varies(sweep, k)), flush=True)
    code, stopped = run_program(*command_of(sweep, values))
    if stopped:
        print(f"stopped in trial {number}; the same command continues the sweep", file=sys.stderr)
        sys.exit(128 + stopped[0])
    if code < 0 or code == 130:
        fail(f"trial {number} was stopped; the same command continues the sweep")
    if code:
        print(f"trial {number} failed with code {code}", flush=True)
        return None
    return best(sweep, compare.read_runs([folder / str(number)])[0])


def forms(values, path):
    """
    Return {name: words} for each ${name} that a command may hold, as `wandb agent` has them.
    Source: wandb/sdk/launch/sweeps/utils.py
    """
    flags = [f"{name}={value}" for name, value in values.items()]
    pairs = [(f"--{name}", str(value)) for name, value in values.items()]
    no_booleans = []
    for name, value in values.items():
        if not isinstance(value, bool):
            no_booleans.append(f"--{name}={value}")
        elif value:
            no_booleans.append(f"--{name}")
    return {"env": ["/usr/bin/env"], "interpreter": [sys.executable], "program": [path],
            "args": [f"--{flag}" for flag in flags], "args_no_hyphens": flags,
            "args_append_hydra": [f"+{flag}" for flag in flags],
            "args_override_hydra": [f"++{flag}" for flag in flags],
            "args_json": [json.dumps(values)], "args_no_boolean_flags": no_booleans,
            "args_no_equals": list(itertools.chain.from_iterable(pairs))}


def command_of(sweep, values):
    """Return the words of a trial's command, and the environment variables that the sweep sets."""
    known, words = forms(values, str(program(sweep))), []
    for word in map(str, sweep.get("command", COMMAND)):
        word = ENVIRONMENT_VARIABLE.sub(lambda match: os.environ[match[1]], word)
        words += known[word[2:-1]] if word.startswith("${") and word.endswith("}") else [word]
    said = {key: sweep[key] for key in ("project", "entity") if sweep.get(key)}
    return words, {f"WANDB_{key.upper()}": value for key, value in said.items()}


def run_program(command, environment):
    """
    (the exit code of a program, the signals that were to end the sweep in the meantime). The program ends in its own time,
    as a training saves first: Ctrl-C has reached it from the terminal, SIGTERM and SIGHUP are passed on.
    environment: variables besides those of this process.
    """
    stopped, children = [], []

    def stop(signum, frame):
        stopped.append(signum)
        for child in children if signum != signal.SIGINT else ():
            child.send_signal(signum)

    hung_up = [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN else []  # as under nohup
    before = {signum: signal.signal(signum, stop) for signum in (signal.SIGINT, signal.SIGTERM, *hung_up)}
    try:
        children.append(subprocess.Popen(command, env=os.environ | environment))
    except OSError as e:
        fail(f"{file}: {command[0]} cannot be started ({e.strerror}); see command")
    code = children[0].wait()
    for signum, handler in before.items():
        signal.signal(signum, handler)
    return code, stopped


def sweep_varies(sweep, name):
    return "value" not in sweep["parameters"].get(name, {"value": 0})


def best(sweep, run):
    """The best value that the metric had in a run."""
    metric = sweep.get("metric", {"name": "loss/val"})
    _, values = run.line(metric["name"], "iter")
    if not len(values):
        fail(f"{file}: no run has the metric {metric['name']!r}; expected one of {', '.join(run.columns)}")
    return float(values.max() if metric.get("goal") == "maximize" else values.min())


def reached(sweep, result):
    """Return whether a trial's result meets the metric's target, which ends a sweep as under W&B."""
    metric = sweep.get("metric", {})
    if result is None or "target" not in metric:
        return False
    sign = -1 if metric.get("goal") == "maximize" else 1
    if sign * result > sign * metric["target"]:
        return False
    print(f"{metric['name']} has reached its target of {metric['target']}: the sweep ends")
    return True


def bayes(sweep, folder, trials):
    try:
        import optuna
    except ImportError:
        fail(f"{file}: method bayes needs Optuna: pip install optuna")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    direction = sweep["metric"].get("goal", "minimize")
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed), direction=direction)
    for number in range(trials):
        trial = study.ask()
        values = {name: suggest(name, spec, trial) for name, spec in sweep["parameters"].items()}
        result = run_trial(sweep, number, values, folder)
        failed = optuna.trial.TrialState.FAIL if result is None else None
        study.tell(trial, result, state=failed)
        if reached(sweep, result):
            break


def main():
    if not file:
        fail("no sweep; expected a file, as in: python sweep.py sweeps/random.yaml")
    if count < 0:
        fail(f"--count={count}: expected a number of trials, or 0 for run_cap or the whole grid")
    sweep = read_file(file)
    check(sweep)
    if sweep.get("name") or sweep.get("description"):
        named = [sweep[key] for key in ("name", "description") if sweep.get(key)]
        print(": ".join(named), flush=True)
    folder = Path(str(out_dir or sweep["parameters"].get("out_dir", {}).get("value") or "out/sweep"))
    if sweep["method"] == "bayes":
        bayes(sweep, folder, count or sweep.get("run_cap", 20))
    else:
        rng = random.Random(seed)
        endless = ({name: draw(spec, rng) for name, spec in sweep["parameters"].items()} for _ in itertools.count())
        trials = grid(sweep["parameters"]) if sweep["method"] == "grid" else endless
        most = count or sweep.get("run_cap") or (None if sweep["method"] == "grid" else 20)
        for number, values in enumerate(itertools.islice(trials, most)):
            if reached(sweep, run_trial(sweep, number, values, folder)):
                break
    done = sorted((path.parent for path in folder.glob("*/config.json")), key=lambda p: (len(p.name), p.name))
    if not done:
        fail(f"{file}: no trial came to its first row; why is said above")
    compare.sort = sweep.get("metric", {}).get("name", "loss/val")
    try:
        print("\n".join(compare.lines(compare.cells(compare.read_runs(done)))))
    except ValueError as e:
        fail(e)


if __name__ == "__main__":
    words = []
    configure(globals(), positional=words)
    if len(words) > 1:
        fail(f"{' and '.join(words)}: expected one sweep")
    file = words[0] if words else file
    outlast("stdout")
    main()
