"""
Globals are the configuration.

    learning_rate = 1e-3  # peak learning rate
    configure(globals())

A knob is a lower-case global with a literal int, float, bool or str, overridden from the command line, left to right:
--key=value, --key value, --key alone for True, or a file of overrides (.py, .yaml, .json). Comments `# ---- name` in the
source group the knobs in --help.

Import this before packages that may be missing: it makes of a missing package, of Ctrl-C and of a pipe that nobody reads
what a user expects, rather than a traceback.
"""
import ast
import atexit
import builtins
import contextlib
import functools
import os
import runpy
import symtable
import sys
import time
import traceback
from pathlib import Path

from engine.advice import advice, elsewhere, slips
from engine.streams import flush_stdout, gone, one_line, open_streams
from engine.untrusted import MAX_SETTINGS, parse_json, read_untrusted

MAX_YAML = 10_000  # values in a configuration
STARTED = time.monotonic()  # when this program began, about
NO_STDOUT = "stdout cannot be written ({}); make room, or send the output elsewhere"
RANGES = {int: (1, (1 << 53) - 1, " below 2^53 in size"),  # of a knob's value, unless it is 0; JSON holds these exactly
          float: (1e-30, 1e12, ", 0 or between 1e-30 and 1e12 in size")}
BOOLS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


def fail(message):
    """End the program the way every user's mistake ends: one line on stderr, exit code 2."""
    flush_stdout()
    print("error: " + one_line(" ".join(str(message).split())), file=sys.stderr)
    sys.exit(2)


@atexit.register
def last_flush():
    """End with one line and exit code 2, rather than 0, where what was printed can't be written."""
    if why := flush_stdout():
        with contextlib.suppress(SystemExit):
            fail(NO_STDOUT.format(why))
        os._exit(2)  # an exit within atexit would change no exit code


def end(kind, error, trace):
    """sys.excepthook: a missing package, Ctrl-C and a pipe without a reader are no faults of the program."""
    if kind is ModuleNotFoundError and error.name:
        fail(f"{sys.executable} has no package {error.name}; {missing(error.name)}")
    if kind is KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    if kind is BrokenPipeError and gone(sys.stdout):
        sys.exit(141)  # as a shell reports SIGPIPE
    if issubclass(kind, OSError) and (why := flush_stdout("\n")):  # where nothing is buffered, only a write tells
        fail(NO_STDOUT.format(why))
    print("".join(traceback.format_exception(kind, error, trace)), end="", file=sys.stderr)


if sys.platform == "win32":
    fail("llamac runs on Linux and macOS; on Windows use it in WSL, the Windows Subsystem for Linux")
open_streams()
sys.excepthook = end


def missing(package):
    """What to do about a package that is not installed."""
    home = Path(__file__).absolute().parent / ".venv"
    folder = home.relative_to(Path.cwd()) if home.is_relative_to(Path.cwd()) else home
    if Path(sys.prefix).resolve() == home.resolve():
        return f"install it: {folder}/bin/python -m pip install {package}"
    if home.exists():
        return (f"use the project's: {folder}/bin/python {' '.join(sys.argv)}, or activate it first: "
                f"source {folder}/bin/activate")
    return "make demo sets up an environment, .venv, that has all; or here: pip install -r requirements.txt"


@functools.cache
def source_knobs(path):
    """
    {name: (value, section, comment)} of the knobs of a script, in the order of its source. Read once: a script that is
    edited while it runs goes on with the knobs it has.
    """
    source, found = Path(path).read_text(encoding="utf-8"), {}
    lines = source.splitlines()
    sections = {n: line[6:].strip(" -") for n, line in enumerate(lines, 1) if line.startswith("# ---- ")}
    for node in ast.parse(source).body:
        name = getattr(node.targets[0], "id", "_") if isinstance(node, ast.Assign) else "_"
        with contextlib.suppress(ValueError):  # not a literal
            value = ast.literal_eval(node.value) if name.islower() and not name.startswith("_") else None
            if type(value) in (int, float, bool, str):
                section = sections.get(max((n for n in sections if n < node.lineno), default=0), "")
                found[name] = value, section, lines[node.end_lineno - 1][node.end_col_offset:].strip(" #")
    return found


def settings(g):
    """{key: value} of all knobs as they stand now: the resolved configuration."""
    return {name: g[name] for name in source_knobs(g["__file__"])}


class Config:
    """
    The settings of a command, frozen: config.name reads one, config.changed(name=value) returns another Config.
    defaults: {name: value} that the source gives, whose types are the settings' types; given: {name: value before it was
    last given} of those that the command line or a file of overrides names.
    """

    def __init__(self, values, defaults, given):
        vars(self).update(values)
        vars(self).update(defaults=defaults, given=given)

    def __setattr__(self, name, value):
        raise AttributeError(f"settings are frozen: {name} can't be set; changed({name}=...) returns another Config")

    __delattr__ = __setattr__

    def changed(self, **values):
        """A Config with these settings in place of its own. Raises KeyError for a name that is no setting."""
        for name in values:
            self.defaults[name]
        return Config(self.as_dict() | values, self.defaults, self.given)

    def as_dict(self):
        """{name: value} of all settings, in the order of the source."""
        return {name: getattr(self, name) for name in self.defaults}


def freeze(g, given=()):
    """The Config of a command, from its globals as they stand now. given: as of Config."""
    known = source_knobs(g["__file__"])
    return Config({name: g[name] for name in known}, {name: value for name, (value, *_) in known.items()}, dict(given))


def whole(text):
    """The int that a text stands for, where 1e3 is one; other numbers as float."""
    try:
        return int(text)
    except ValueError:
        return float(text)


def short(value, most=80):
    """A value as an error message shows it."""
    text = str(value)
    return text if len(text) <= most else f"{text[:most // 2]}... ({len(text):,} characters)"


def convert(key, value, default, where, refuse=fail):
    """
    Return `value` as the type of `default`. Text is parsed, 1e3 is a whole number, an int a float, a number of numpy a
    number, a path a str. All else is refused, and a number beyond RANGES too.
    """
    kind, got = type(default), value
    with contextlib.suppress(ValueError, KeyError, OverflowError):
        if isinstance(value, str):
            got = BOOLS[value.lower()] if kind is bool else whole(value) if kind is int else kind(value)
        elif isinstance(value, os.PathLike):
            got = os.fspath(value)
        elif hasattr(value, "item"):
            got = value.item()
        if kind is int and type(got) is float and got.is_integer():
            got = int(got)
        if kind is float and type(got) is int:
            got = float(got)
    least, most, words = RANGES.get(kind, (0, 0, ""))
    if type(got) is not kind or words and got and not least <= abs(got) <= most:
        refuse(f"{short(where)}: {key} is {short(repr(value))}, expected {kind.__name__}{words}, such as {default!r}")
    return os.path.expanduser(got) if kind is str and got.startswith("~/") else got


def run_config(text, path, known):
    """
    Run a .py file of overrides as nanoGPT runs its own, and return {knob: value} of those it sets. The file may read the
    knobs as they stand in `known`, import, define functions, and have names of its own which it reads. It is not run where
    it sets no knob, or a name that is a slip or another program's (returned as {name: None}): it may be a program.
    """
    nodes, symbols = list(ast.walk(ast.parse(text, path))), symtable.symtable(text, path, "exec").get_symbols()
    read = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    star = any(isinstance(node, ast.ImportFrom) and node.names[0].name == "*" for node in nodes)
    set_ = [symbol.get_name() for symbol in symbols if symbol.is_assigned() or symbol.is_imported()]
    values = [symbol.get_name() for symbol in symbols if not symbol.is_namespace() and not symbol.is_imported()]
    odd = [name for name in set_ if name in values and name not in known and not name.startswith("_")
           and (name not in read or elsewhere(name, known) or slips(name, known))]
    if odd:
        return dict.fromkeys(odd)
    if symbols and not star and not any(name in known for name in set_):
        raise ValueError("it sets no knob")
    space = {"__name__": "config", "__file__": path, "__builtins__": vars(builtins) | known}
    exec(compile(text, path, "exec"), space)
    came = {name: space[name] for name in known if name in space}
    return {name: value for name, value in came.items() if name in set_ or not callable(value)}  # of import *


def read_yaml(text):
    """The value in a YAML text. ValueError: with the aliases in it (*name) written out it has more than MAX_YAML values."""
    import yaml  # comes with wandb

    sizes = {}  # {name of an anchor: values in what it names}

    class Loader(yaml.SafeLoader):
        count = 0  # values so far

        def compose_node(self, parent, index):
            event, before = self.peek_event(), self.count
            self.count += sizes.get(event.anchor, 0) if isinstance(event, yaml.AliasEvent) else 1
            if self.count > MAX_YAML:
                raise ValueError(f"more than {MAX_YAML:,} values")
            node = super().compose_node(parent, index)
            if event.anchor and not isinstance(event, yaml.AliasEvent):
                sizes[event.anchor] = self.count - before
            return node

    return yaml.load(text, Loader)


def read_file(path, known=None, hint=""):
    """
    {key: value} of a .py, .yaml or .json file of overrides. known: {knob: its value} for a .py file; None: all names that
    it sets count. hint: what else the file may be, for the line that refuses it.
    """
    try:
        text = read_untrusted(path, MAX_SETTINGS).decode()
        if path.endswith(".py") and known is None:
            return {k: v for k, v in runpy.run_path(path).items() if not k.startswith("_")}
        if path.endswith(".py"):
            return run_config(text, path, known)
        return dict((parse_json(text) if path.endswith(".json") else read_yaml(text)) or {})
    except (Exception, SystemExit) as e:  # whatever a user's file can do wrong ends in one line
        fail(f"{path}: cannot be read as a configuration ({type(e).__name__}: {e}); config/debug.py shows one{hint}")


def print_help(g, known, common, positional):
    def show(names):
        for name in names:
            value, _, comment = known[name]
            print(f"  {f'--{name}={value}':<34} {type(value).__name__:<5} {comment}")

    print((g.get("__doc__") or "").strip() + "\n\nKnobs, as --key=value or --key value"
          + (f"; a word by itself is {positional}" if isinstance(positional, str) else ""))
    if common:
        print("\nthe most used:")
        show(common)
    for section in dict.fromkeys(section for _, section, _ in known.values()):
        print(f"\n{section or 'all'}:")
        show(name for name in known if known[name][1] == section)


def options(argv, defaults):
    """(as written, key, value) of each word of a command line; key is None where it is no option."""
    words = list(argv)
    while words:
        word = words.pop(0)
        key, equals, value = word[2:].partition("=")
        key, follows = key.replace("-", "_"), bool(words) and not words[0].startswith("--")
        if not word.startswith("--"):
            key, value = None, word
        elif key in defaults and not equals:
            if type(defaults[key]) is bool:
                follows, value = follows and words[0].lower() in BOOLS, "True"
            elif not follows:
                fail(f"{word}: has no value, expected {word}={defaults[key]}")
            if follows:
                value = words.pop(0)
                word = f"{word} {value}"
        yield word, key, value


def configure(g, positional=None, argv=None, common=()):
    """
    Override the knobs in `g`, the caller's globals(), from `argv` (default: the command line); return the Config.
    positional: the knob that a word which is neither option nor configuration file is for, or a list that takes every
    word which is no option. common: the knobs that --help shows first.
    """
    argv, known = sys.argv[1:] if argv is None else argv, source_knobs(g["__file__"])
    defaults, typed, given = {name: g[name] for name in known}, {}, {}
    if "--help" in argv or "-h" in argv:
        print_help(g, known, common, positional)
        sys.exit(0)

    def meant(word):
        return f"; if it is the {positional} itself: --{positional}={word}" * bool(positional and Path(word).exists())

    def override(key, value, where, word=None):
        if key not in defaults:
            own = f"; a name of the file's own begins with an underscore: _{key}" * where.endswith(".py")
            fail(f"{short(where)}: unknown key {short(repr(key))}; {advice(str(key), defaults)}{own}{meant(where)}")
        value = convert(key, value, defaults[key], where)
        if not word and key in typed and g[key] != value and os.environ.get("RANK", "0") == "0":
            print(f"note: {where} sets {key}={value}, which overrides {typed[key]}; what comes last counts", file=sys.stderr)
        given[key], g[key] = g[key], value
        typed.pop(key, None)
        typed.update({key: word} if word else {})

    for word, key, value in options(argv, defaults):
        bare, is_file = word.lstrip("-"), word.endswith((".py", ".yaml", ".yml", ".json"))
        if key is not None:
            override(key, value, word, word)
        elif bare.partition("=")[0] in defaults and not Path(word).exists():
            fail(f"{word}: expected --{bare}")
        elif word.startswith("-") or not (positional or is_file or isinstance(positional, list)):
            fail(f"{word}: expected --key=value or a configuration file")
        elif isinstance(positional, list):
            positional.append(word)
        elif is_file:
            for key, value in read_file(word, {name: g[name] for name in known}, meant(word)).items():
                override(key, value, word)
        elif positional and not typed.get(positional, "--").startswith("--"):
            fail(f"{typed[positional]} and {word}: expected one {positional}")
        else:
            override(positional, word, word, word)
    return freeze(g, given)
