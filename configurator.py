"""
Globals are the configuration.

    learning_rate = 1e-3  # peak learning rate
    configure(globals())

A knob is a lower-case global of type int, float, bool or str, overridden from the command line, left to right:
--key=value, or a file of overrides (.py, .yaml, .json; names with an underscore in front are its own business).
"""
import ast
import contextlib
import difflib
import math
import runpy
import sys
from pathlib import Path

BOOLS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


def fail(message):
    """End the program the way every user's mistake ends: one line on stderr, exit code 2."""
    sys.stdout.flush()
    print("error: " + " ".join(str(message).split()), file=sys.stderr)
    sys.exit(2)


def knobs(g):
    """{name: comment} of the knobs of the script whose globals are `g`, in the order of its source."""
    source, found = Path(g["__file__"]).read_text(encoding="utf-8"), {}
    for node in ast.parse(source).body:
        name = getattr(node.targets[0], "id", "_") if isinstance(node, ast.Assign) else "_"
        if name.islower() and not name.startswith("_") and type(g.get(name)) in (int, float, bool, str):
            found[name] = source.splitlines()[node.end_lineno - 1][node.end_col_offset:].strip(" #")
    return found


def settings(g):
    """{key: value} of all knobs as they stand now: the resolved configuration."""
    return {name: g[name] for name in knobs(g)}


def convert(key, value, default, where):
    """`value` as the type of `default`: text is parsed, an int is fine for a float, all else is refused."""
    kind, got = type(default), value
    with contextlib.suppress(ValueError, KeyError):
        if isinstance(value, str):
            got = BOOLS[value.lower()] if kind is bool else kind(value)
    if kind is float and type(got) is int:
        got = float(got)
    if type(got) is not kind or (kind is float and not math.isfinite(got)):
        fail(f"{where}: {key} is {value!r}, expected {kind.__name__}, such as {default!r}")
    return got


def read_file(path):
    """{key: value} of a .py, .yaml or .json file of overrides."""
    try:
        if path.endswith(".py"):
            return {k: v for k, v in runpy.run_path(path).items() if not k.startswith("_")}
        import yaml  # comes with wandb; JSON is YAML too
        return dict(yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {})
    except Exception as e:  # whatever a user's file can do wrong ends in one line
        fail(f"{path}: cannot be read as a configuration ({type(e).__name__}: {e}); config/debug.py shows one")


def configure(g, positional=None, argv=None):
    """
    Override the knobs in `g`, the caller's globals(), from `argv` (default: the command line); return the keys given.
    A word that is neither --key=value nor a configuration file is the value of the knob named by `positional`.
    """
    argv, comments, defaults, given = sys.argv[1:] if argv is None else argv, knobs(g), settings(g), set()
    if "--help" in argv or "-h" in argv:
        print((g.get("__doc__") or "").strip() + "\n\nEvery knob, with default, type and meaning:\n")
        for key, comment in comments.items():
            print(f"  --{key}={defaults[key]!s:<12} {type(defaults[key]).__name__:<6} {comment}")
        sys.exit(0)

    def override(key, value, where):
        if key not in defaults:
            near = difflib.get_close_matches(key, defaults, 1, 0.5)
            fail(f"{where}: unknown key {key!r}; " + (f"did you mean {near[0]!r}?" if near else "--help lists all"))
        g[key] = convert(key, value, defaults[key], where)
        given.add(key)

    for word in argv:
        if word.startswith("--"):
            key, equals, value = word[2:].partition("=")
            if key in defaults and not equals:
                fail(f"{word}: has no value, expected {word}={defaults[key]}")
            override(key, value, word)
        elif word.endswith((".py", ".yaml", ".yml", ".json")):
            for key, value in read_file(word).items():
                override(key, value, word)
        elif positional and not word.startswith("-"):
            override(positional, word, word)
        else:
            fail(f"{word}: expected --key=value or a configuration file")
    return given
