"""
Globals are the configuration.

    learning_rate = 1e-3  # peak learning rate
    config = configure(globals())

`configure` finds every knob of the calling script (a lower-case global of type int, float, bool or str that the
script assigns above the call), and overrides it from the command line, left to right:

    python train.py config/debug.py --learning_rate=3e-4 --wandb_log=True

A word that ends in .py, .yaml, .yml or .json is a file of overrides; names that start with an underscore are the
file's own business. Types follow the default value. A key nobody knows is an error that names the nearest one.
"""
import ast
import difflib
import json
import math
import os
import runpy
import sys

BOOLS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


def fail(message):
    """End the program the way every user's mistake ends: one line on stderr, exit code 2."""
    sys.stdout.flush()
    print("error: " + " ".join(str(message).split()), file=sys.stderr)
    sys.exit(2)


def knobs(source):
    """{name: comment} of the assignments above the call of `configure` in a script's source, in order."""
    lines, found = source.splitlines(), {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign):
            if isinstance(node.value, ast.Call) and getattr(node.value.func, "id", "") == "configure":
                break
            name = getattr(node.targets[0], "id", "_")
            if name.islower() and not name.startswith("_"):
                found[name] = lines[node.end_lineno - 1][node.end_col_offset:].strip(" #")
    return found


def convert(key, value, default, where):
    """`value` as the type of `default`; text is parsed, an int is fine for a float, all else is refused."""
    kind, got = type(default), value
    if isinstance(got, str) and kind is bool:
        got = BOOLS.get(got.lower(), got)
    elif isinstance(got, str) and kind in (int, float):
        try:
            got = kind(got)
        except ValueError:
            pass
    if kind is float and type(got) is int:
        got = float(got)
    if type(got) is not kind or (kind is float and not math.isfinite(got)):
        hint = " (True or False)" if kind is bool else f", such as {default!r}"
        fail(f"{where}: {key} is {value!r}, expected {kind.__name__}{hint}")
    return got


def read_file(path):
    """{key: value} of a .py, .yaml or .json file of overrides."""
    try:
        if path.endswith(".py"):
            values = runpy.run_path(path)
            return {k: v for k, v in values.items() if not k.startswith("_") and not hasattr(v, "__loader__")}
        with open(path, encoding="utf-8") as f:
            if path.endswith(".json"):
                values = json.load(f)
            else:
                import yaml  # comes with wandb
                values = yaml.safe_load(f) or {}
    except Exception as e:  # whatever a user's file can do wrong ends in one line
        fail(f"{path}: cannot be read as a configuration ({type(e).__name__}: {e}); see config/debug.py for one")
    if not isinstance(values, dict):
        fail(f"{path}: holds a {type(values).__name__}, expected key: value pairs")
    return values


def configure(g, positional=None, argv=None):
    """
    Override the knobs in `g`, the caller's globals(), from `argv` (default: the command line); return {key: value}.
    A word that is neither --key=value nor a configuration file goes to the knob named by `positional`.
    """
    argv = sys.argv[1:] if argv is None else argv
    with open(g["__file__"], encoding="utf-8") as f:
        comments = {k: c for k, c in knobs(f.read()).items() if type(g.get(k)) in (int, float, bool, str)}
    defaults = {k: g[k] for k in comments}

    def override(key, value, where):
        if key not in defaults:
            near = difflib.get_close_matches(key, defaults, 1, 0.5)
            fail(f"{where}: unknown key {key!r}" + (f", did you mean {near[0]!r}?" if near else "; --help lists all"))
        g[key] = convert(key, value, defaults[key], where)

    if any(word in ("--help", "-h") for word in argv):
        print((g.get("__doc__") or "").strip() + "\n\nEvery knob, as --key=value:\n")
        for key, comment in comments.items():
            print(f"  --{key}={defaults[key]!s:<12} {type(defaults[key]).__name__:<6} {comment}")
        sys.exit(0)
    for word in argv:
        if word.startswith("--"):
            key, equals, value = word[2:].partition("=")
            if not equals and key in defaults:
                fail(f"{word}: has no value, expected --{key}=value")
            override(key, value, word)
        elif word.endswith((".py", ".yaml", ".yml", ".json")) and not os.path.isdir(word):
            for key, value in read_file(word).items():
                override(key, value, word)
        elif positional and not word.startswith("-"):
            override(positional, word, word)
        else:
            fail(f"{word}: expected --key=value or a configuration file")
    return {k: g[k] for k in defaults}
