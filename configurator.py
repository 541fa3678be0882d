"""
Globals are the configuration.

    learning_rate = 1e-3  # peak learning rate
    configure(globals())

A knob is a lower-case global with a literal int, float, bool or str. The command line overrides
knobs, from left to right: --key=value, --key value, --key alone for True, or a file of overrides
(.py, .yaml, .json). Comments `# ---- name` in the source group the knobs in --help.

Import this before packages that may be missing: a missing package, Ctrl-C and a pipe whose reader
is gone then end the program as a user expects, without a traceback.
"""
import ast
import atexit
import builtins
import contextlib
import functools
import itertools
import os
import re
import runpy
import symtable
import sys
import time
import traceback
from pathlib import Path

from engine.advice import advice, misspelled, translate
from engine.streams import flush_stdout, one_line, open_streams, reader_exited
from engine.untrusted import MAX_JSON, MAX_SETTINGS, parse_json, read_untrusted

MAX_YAML = 10_000  # values in a configuration
STARTED = time.monotonic()  # a run's time budget counts from here, so it includes importing torch
NO_STDOUT = "stdout cannot be written ({}); free disk space, or send the output elsewhere"
# {type: (min, max, words for a message)} of a knob's absolute value; 0 is always allowed. JSON
# holds integers below 2^53 exactly.
RANGES = {int: (1, (1 << 53) - 1, " below 2^53 in size"),
          float: (1e-30, 1e12, ", 0 or between 1e-30 and 1e12 in size")}
POSIX_MODULES = ("fcntl", "resource", "termios")  # Python modules that Windows lacks
BOOLS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


# ---- how a program ends --------------------------------------------------------------------------

def fail(message):
    """End the program after a user's mistake: one line on stderr, exit code 2."""
    flush_stdout()
    print("error: " + one_line(" ".join(str(message).split())), file=sys.stderr)
    sys.exit(2)


@atexit.register
def last_flush():
    """End with one line and exit code 2, rather than 0, if buffered output can't be written."""
    if why := flush_stdout():
        with contextlib.suppress(SystemExit):
            fail(NO_STDOUT.format(why))
        os._exit(2)  # a SystemExit within atexit would not change the exit code


def end(kind, error, trace):
    """
    Report an uncaught exception, as sys.excepthook. A missing package, Ctrl-C, a pipe whose reader
    is gone and a full disk behind stdout are reported without a traceback.
    """
    if kind is ModuleNotFoundError and error.name in POSIX_MODULES:
        fail(f"{Path(sys.argv[0]).name} {needs_posix(error.name)}")
    if kind is ModuleNotFoundError and error.name:
        fail(f"{sys.executable} has no package {error.name}; {missing(error.name)}")
    if kind is KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    if kind is BrokenPipeError and reader_exited(sys.stdout):
        sys.exit(141)  # as a shell reports SIGPIPE
    # Did stdout cause this OSError? The buffer may be empty by now, so write a newline to see.
    if issubclass(kind, OSError) and (why := flush_stdout("\n")):
        fail(NO_STDOUT.format(why))
    print("".join(traceback.format_exception(kind, error, trace)), end="", file=sys.stderr)


open_streams()
sys.excepthook = end


def needs_posix(what):
    """Return the message that a program does not run on Windows, which lacks `what`."""
    return (f"needs Linux or macOS, because Windows lacks {what}; on Windows, run it in WSL "
            "(Windows Subsystem for Linux); train.py and its files work without WSL")


def missing(package):
    """Return advice on how to get a package that is not installed."""
    home = Path(__file__).absolute().parent / ".venv"
    folder = home.relative_to(Path.cwd()) if home.is_relative_to(Path.cwd()) else home
    python, activate = folder / "bin/python", f"source {folder}/bin/activate"
    if sys.platform == "win32":
        python, activate = folder / "Scripts/python", folder / "Scripts/activate"
    if Path(sys.prefix).resolve() == home.resolve():
        return f"install it: {python} -m pip install {package}"
    if home.exists():
        return (f"use the project's: {python} {' '.join(sys.argv)}, or activate it first: "
                f"{activate}")
    return ("make demo sets up an environment, .venv, with all packages; or here: pip install -r "
            "requirements.txt")


# ---- settings ------------------------------------------------------------------------------------

@functools.cache
def source_knobs(path):
    """
    Return {name: (value, section, comment)} of the knobs of a script, in the order of its source.
    The file is read once, so a script that is edited while it runs keeps its knobs.
    """
    source, knobs = Path(path).read_text(encoding="utf-8"), {}
    lines = source.splitlines()
    sections = {number: line[6:].strip(" -") for number, line in enumerate(lines, 1)
                if line.startswith("# ---- ")}
    for node in ast.parse(source).body:
        if not isinstance(node, ast.Assign):
            continue
        name = getattr(node.targets[0], "id", "_")  # a tuple or an attribute has no id
        if not name.islower() or name.startswith("_"):
            continue
        with contextlib.suppress(ValueError):  # raised by literal_eval for other expressions
            value = ast.literal_eval(node.value)
            if type(value) in (int, float, bool, str):
                above = [number for number in sections if number < node.lineno]
                section = sections[max(above)] if above else ""
                comments = [lines[node.end_lineno - 1][node.end_col_offset:]]
                # An indented comment on the lines below continues it.
                below = lines[node.end_lineno:]
                comments += itertools.takewhile(re.compile(" +#").match, below)
                comment = " ".join(line.strip(" #") for line in comments)
                knobs[name] = value, section, comment
    return knobs


def settings(g):
    """Return {name: value} of all knobs in `g`, a script's globals(), as they are now."""
    return {name: g[name] for name in source_knobs(g["__file__"])}


class Config:
    """
    The settings of a command, frozen: config.name reads one, config.changed(name=value) returns
    another Config.

    defaults: {name: value} of the source, whose types are the settings' types. given: {name: the
    value just before its last override} of the settings that the command line or a file of
    overrides set. files: paths of the files of overrides, in their order.
    """

    def __init__(self, values, defaults, given, files=()):
        vars(self).update(values)
        vars(self).update(defaults=defaults, given=given, files=files)

    def __setattr__(self, name, value):
        raise AttributeError(f"settings are frozen: {name} can't be set; changed({name}=...) "
                             f"returns another Config")

    __delattr__ = __setattr__

    def changed(self, **values):
        """Return a Config with these settings replaced. Raises KeyError for an unknown name."""
        for name in values:
            self.defaults[name]
        return Config(self.as_dict() | values, self.defaults, self.given, self.files)

    def as_dict(self):
        """Return {name: value} of all settings, in the order of the source."""
        return {name: getattr(self, name) for name in self.defaults}


def freeze(g, given=(), files=()):
    """Return the Config of a script's globals() as they are now. given, files: as in Config."""
    defaults = {name: value for name, (value, *_) in source_knobs(g["__file__"]).items()}
    return Config(settings(g), defaults, dict(given), tuple(files))


# ---- values --------------------------------------------------------------------------------------

def number(text):
    """Return a text as an int, or else as a float. Raises ValueError."""
    try:
        return int(text)
    except ValueError:
        return float(text)


def short(value, limit=80):
    """Return a value as an error message shows it, cut if it has more than `limit` characters."""
    text = str(value)
    if len(text) <= limit:
        return text
    return f"{text[:limit // 2]}... ({len(text):,} characters)"


def convert(key, value, default, where, refuse=fail):
    """
    Return `value` as the type of `default`. Text is parsed. 1e3 counts as an int and an int as a
    float; NumPy numbers and paths are converted. Calls refuse(message) for any other value, and for
    a number beyond RANGES. where: the source of the value, for the message.
    """
    kind, got = type(default), value
    with contextlib.suppress(ValueError, KeyError, OverflowError):
        if isinstance(value, str):
            parse = {bool: lambda text: BOOLS[text.lower()], int: number}.get(kind, kind)
            got = parse(value)
        elif isinstance(value, os.PathLike):
            got = os.fspath(value)
        elif hasattr(value, "item"):
            got = value.item()
        if kind is int and type(got) is float and got.is_integer():
            got = int(got)
        if kind is float and type(got) is int:
            got = float(got)
    low, high, words = RANGES.get(kind, (0, 0, ""))  # "": bool and str have no range
    if type(got) is not kind or (words and got and not low <= abs(got) <= high):
        refuse(f"{short(where)}: {key} is {short(repr(value))}, expected {kind.__name__}{words}, "
               f"such as {default!r}")
    return os.path.expanduser(got) if kind is str and got.startswith("~/") else got


# ---- files of overrides --------------------------------------------------------------------------

def run_config(text, path, known):
    """
    Run a .py file of overrides as nanoGPT does, and return {knob: value} of those that it sets.

    The file may read the knobs in `known`, {knob: value}, import, define functions, and use names
    of its own. Such a name is odd if the file never reads it, if it resembles a knob (see
    misspelled), or if it is another program's word for one (see translate). A file with odd names
    is not run: only these names are returned, as {name: None}, and the caller reports them as
    unknown keys. Raises ValueError if the file sets no knob: it may be a program.
    """
    nodes = list(ast.walk(ast.parse(text, path)))
    symbols = symtable.symtable(text, path, "exec").get_symbols()
    read = {node.id for node in nodes
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    assigned = {symbol.get_name() for symbol in symbols
                if symbol.is_assigned() or symbol.is_imported()}
    odd = []
    for symbol in symbols:
        name = symbol.get_name()
        is_value = symbol.is_assigned() and not symbol.is_namespace() and not symbol.is_imported()
        if is_value and name not in known and not name.startswith("_"):
            if name not in read or translate(name, known) or misspelled(name, known):
                odd.append(name)
    if odd:
        return dict.fromkeys(odd)
    imports_all = any(isinstance(node, ast.ImportFrom) and node.names[0].name == "*"
                      for node in nodes)
    # An empty file, or one of comments alone, uses no names and is accepted.
    if symbols and not imports_all and assigned.isdisjoint(known):
        raise ValueError("it contains no setting")
    # As builtins, the knobs can be read, but only names that the file itself sets are in `space`.
    space = {"__name__": "config", "__file__": path, "__builtins__": vars(builtins) | known}
    exec(compile(text, path, "exec"), space)
    # `from module import *` may bring functions under a knob's name.
    return {name: space[name] for name in known if name in space
            and (name in assigned or not callable(space[name]))}


def read_yaml(text):
    """
    Return the value in a YAML text. Raises ValueError if it has more than MAX_YAML values when its
    aliases (*name) are expanded.
    """
    import yaml  # requirements.txt does not name it: wandb requires it

    sizes = {}  # {anchor: number of values in it}

    class Loader(yaml.SafeLoader):
        count = 0  # values so far

        def compose_node(self, parent, index):
            event, before = self.peek_event(), self.count
            is_alias = isinstance(event, yaml.AliasEvent)
            self.count += sizes.get(event.anchor, 0) if is_alias else 1
            if self.count > MAX_YAML:
                raise ValueError(f"more than {MAX_YAML:,} values")
            node = super().compose_node(parent, index)
            if event.anchor and not is_alias:
                sizes[event.anchor] = self.count - before
            return node

    return yaml.load(text, Loader)


def read_file(path, known=None, hint=""):
    """
    Return {key: value} of a .py, .yaml or .json file of overrides. Ends the program if it can't be
    read.

    known: {knob: value} of the knobs that a .py file may set; if it is None, every name that the
    file sets is returned. hint: what else the file may be, for the error message.
    """
    try:
        # A run's config.json lists the files of its data.
        limit = MAX_JSON if path.endswith(".json") else MAX_SETTINGS
        text = read_untrusted(path, limit).decode()
        if path.endswith(".py") and known is None:
            names = runpy.run_path(path)
            return {name: value for name, value in names.items() if not name.startswith("_")}
        if path.endswith(".py"):
            return run_config(text, path, known)
        return dict((parse_json(text) if path.endswith(".json") else read_yaml(text)) or {})
    except (Exception, SystemExit) as e:  # a user's file may raise anything
        fail(f"{path}: cannot be read as a configuration ({type(e).__name__}: {e}); "
             f"config/debug.py shows one{hint}")


# ---- the command line ----------------------------------------------------------------------------

def print_help(g, common, positional):
    """Print a script's docstring and its knobs, those of `common` first."""
    knobs = source_knobs(g["__file__"])

    def show(title, names):
        print(f"\n{title}:")
        for name in names:
            value, _, comment = knobs[name]
            print(f"  {f'--{name}={value}':<34} {type(value).__name__:<5} {comment}")

    word = f"; a value without --key sets {positional}" if isinstance(positional, str) else ""
    print(f"{(g.get('__doc__') or '').strip()}\n\nSettings, as --key=value or --key value{word}")
    if common:
        show("the most used", common)
    for section in dict.fromkeys(section for _, section, _ in knobs.values()):
        show(section or "all", [name for name in knobs if knobs[name][1] == section])


def options(argv, defaults):
    """
    Yield (the option as written, key, value) for each option of a command line, and (word, None,
    word) for any other word. defaults: {key: value}, whose types decide whether a value follows.
    """
    words = list(argv)
    while words:
        word = words.pop(0)
        key, equals, value = word[2:].partition("=")
        key = key.replace("-", "_")
        if not word.startswith("--"):
            key, value = None, word
        elif key in defaults and not equals:
            has_value = bool(words) and not words[0].startswith("--")
            if type(defaults[key]) is bool:
                has_value, value = has_value and words[0].lower() in BOOLS, "True"
            elif not has_value:
                fail(f"{word}: has no value, expected {word}={defaults[key]}")
            if has_value:
                value = words.pop(0)
                word = f"{word} {value}"
        yield word, key, value


class Overrides:
    """
    The knobs in `g`, a script's globals(), while a command line overrides them. positional, adapt:
    as in configure; typed: {knob: option as written} of the knobs whose present value was typed,
    rather than read from a file; files: paths of the files that were read.
    """

    def __init__(self, g, positional, adapt):
        self.g, self.positional, self.adapt, self.defaults = g, positional, adapt, settings(g)
        self.typed, self.given, self.files = {}, {}, []

    def hint(self, word):
        """
        Return a hint on how to pass a word as the positional if it was read as a configuration.
        """
        if not self.positional or not Path(word).exists():
            return ""
        return f"; if it is the {self.positional} itself: --{self.positional}={word}"

    def set(self, key, value, where, word=None):
        """
        Override one knob. Ends the program if the key is unknown or the value is of another type.

        where: the option, word or file that sets the knob, for messages. word: the option or word
        as typed; None if a file sets the knob.
        """
        if key not in self.defaults:
            text = f"{short(where)}: unknown key {short(repr(key))}; "
            text += advice(str(key), self.defaults)
            if where.endswith(".py"):
                text += f"; a name of the file's own begins with an underscore: _{key}"
            fail(text + self.hint(where))
        value = convert(key, value, self.defaults[key], where)
        is_changed = key in self.typed and self.g[key] != value
        if is_changed and not word and os.environ.get("RANK", "0") == "0":
            print(f"note: {where} sets {key}={value}, which overrides {self.typed[key]}; the "
                  f"last one counts", file=sys.stderr)
        self.given[key], self.g[key] = self.g[key], value
        self.typed.pop(key, None)
        if word:
            self.typed[key] = word

    def add_word(self, word):
        """Use a word that is not an option: a file of overrides, or the positional."""
        name, positional = word.lstrip("-"), self.positional
        is_file = word.endswith((".py", ".yaml", ".yml", ".json"))
        if name.partition("=")[0] in self.defaults and not Path(word).exists():
            fail(f"{word}: expected --{name}")
        if word.startswith("-") or not (positional or is_file or isinstance(positional, list)):
            fail(f"{word}: expected --key=value or a configuration file")
        if isinstance(positional, list):
            positional.append(word)
        elif is_file:
            values = read_file(word, settings(self.g), self.hint(word))
            self.files.append(word)
            for key, value in self.adapt(values, self.defaults).items():
                self.set(key, value, word)
        elif not self.typed.get(positional, "--").startswith("--"):
            # It was typed before, as a word: the text of an option would begin with --.
            fail(f"{self.typed[positional]} and {word}: expected one {positional}")
        else:
            self.set(positional, word, word, word)


def configure(g, positional=None, argv=None, common=(), adapt=lambda values, defaults: values):
    """
    Override the knobs in `g`, the caller's globals(), from `argv` (default: the command line), and
    return the Config. Ends the program after --help, or with one line after a mistake.

    positional: the knob that is set by a word that is neither an option nor a file of overrides; or
    a list, to which every word that is not an option is appended. common: the knobs that --help
    shows first. adapt(values, defaults): converts the values in a file of overrides to knobs, {key:
    value}.
    """
    argv = sys.argv[1:] if argv is None else argv
    if "--help" in argv or "-h" in argv:
        print_help(g, common, positional)
        sys.exit(0)
    overrides = Overrides(g, positional, adapt)
    for word, key, value in options(argv, overrides.defaults):
        if key is None:
            overrides.add_word(word)
        else:
            overrides.set(key, value, word, word)
    return freeze(g, overrides.given, overrides.files)
