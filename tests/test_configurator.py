"""The configurator through a script of its own, as a user runs it."""
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

SCRIPT = '''"""What the script is for."""
import json
from configurator import configure, settings
out_dir = "out"     # where it goes
rate = 1e-3         # peak rate
steps = 10          # how many
log = False         # whether
name = "auto"       # may look like a number
PI, _hidden = 3, 4
if __name__ == "__main__":
    given = configure(globals(), positional="name")
    print(json.dumps([settings(globals()), sorted(given)]))
'''


@pytest.fixture
def script(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)

    def call(*args):
        done = subprocess.run([sys.executable, "script.py", *args], cwd=tmp_path, env={"PYTHONPATH": str(ROOT)},
                              capture_output=True, text=True)
        return done.returncode, done.stdout, done.stderr
    call.folder = tmp_path
    return call


def values(script, *args):
    code, out, err = script(*args)
    assert code == 0, err
    return json.loads(out)


def test_defaults(script):
    assert values(script) == [{"out_dir": "out", "rate": 1e-3, "steps": 10, "log": False, "name": "auto"}, []]


@pytest.mark.parametrize("arg, key, value", [
    ("--rate=1", "rate", 1.0), ("--rate=3e-4", "rate", 3e-4), ("--steps=1_000", "steps", 1000), ("--log=True", "log", True),
    ("--log=yes", "log", True), ("--log=1", "log", True), ("--log=no", "log", False), ("--name=a=b", "name", "a=b"),
    ("--name=123", "name", "123"), ("--name=", "name", ""), ("--name=ünï cödé", "name", "ünï cödé"), ("free", "name", "free"),
])
def test_override(script, arg, key, value):
    settings, given = values(script, arg)
    assert settings[key] == value and type(settings[key]) is type(value) and given == [key]


def test_files_and_arguments_apply_left_to_right(script):
    (script.folder / "a.py").write_text("_per_day = 5\nsteps = 4 * _per_day  # arithmetic\nrate = 1\n")
    (script.folder / "b.yaml").write_text("steps: 30\nrate: 1e-2\nlog: true\n")
    (script.folder / "c.json").write_text(json.dumps({"steps": 40, "name": "7"}))
    assert values(script, "a.py")[0]["steps"] == 20
    settings, given = values(script, "--steps=1", "a.py", "b.yaml", "--rate=0.5", "c.json", "--log=False")
    assert settings == {"out_dir": "out", "rate": 0.5, "steps": 40, "log": False, "name": "7"}
    assert given == ["log", "name", "rate", "steps"]


@pytest.mark.parametrize("args, words", [
    (["--stesp=3"], ["'stesp'", "did you mean 'steps'"]),
    (["--zzzzzz=3"], ["'zzzzzz'", "--help"]),
    (["--PI=3"], ["unknown key 'PI'"]),
    (["--_hidden=3"], ["unknown key"]),
    (["--json=3"], ["unknown key"]),
    (["--steps=ten"], ["steps is 'ten'", "expected int"]),
    (["--steps=1.5"], ["expected int"]),
    (["--steps="], ["expected int"]),
    (["--rate=nan"], ["expected float"]),
    (["--rate=inf"], ["expected float"]),
    (["--log=maybe"], ["expected bool"]),
    (["--log"], ["has no value", "--log=False"]),
    (["-x"], ["expected --key=value"]),
    (["missing.py"], ["missing.py", "cannot be read"]),
    (["broken.py"], ["broken.py", "SyntaxError"]),
    (["raises.py"], ["raises.py", "ZeroDivisionError"]),
    (["unknown.py"], ["unknown.py", "'stpes'", "did you mean 'steps'"]),
    (["typed.py"], ["typed.py", "steps is 3.5", "expected int"]),
    (["list.yaml"], ["list.yaml", "cannot be read"]),
    (["broken.json"], ["broken.json", "cannot be read"]),
])
def test_mistakes_are_one_line(script, args, words):
    files = {"broken.py": "steps = = 3", "raises.py": "steps = 1 / 0", "unknown.py": "stpes = 3", "typed.py": "steps = 3.5",
             "list.yaml": "- 1\n- 2\n", "broken.json": "{"}
    for name, text in files.items():
        (script.folder / name).write_text(text)
    code, out, err = script(*args)
    assert code == 2 and out == ""
    assert err.startswith("error: ") and err.count("\n") == 1
    for word in words:
        assert word in err


def test_help_lists_every_knob_with_default_type_and_comment(script):
    code, out, err = script("--help")
    assert code == 0 and err == "" and out.startswith("What the script is for.")
    lines = [line.split() for line in out.splitlines()]
    assert ["--rate=0.001", "float", "peak", "rate"] in lines
    assert ["--log=False", "bool", "whether"] in lines
    assert sum(line.startswith("  --") for line in out.splitlines()) == 5


def test_size_is_a_feature():
    assert len((ROOT / "configurator.py").read_text().splitlines()) < 100
