"""
Test the package that `pip install .` builds: the library is inside and works from another folder,
and errors of the compiler are reported.
"""
import os
import subprocess
import sys
import zipfile

import pytest

from tests.conftest import ROOT
from tests.test_run import run, two_models

# A fast stand-in for a compiler: it copies a finished library to the output path of the command.
COMPILER = """
import pathlib, shutil, sys
assert "-shared" in sys.argv and "runtime/model.c" in sys.argv and "runtime/cpu/avx2.c" in sys.argv
shutil.copy(sys.argv[1], sys.argv[sys.argv.index("-o") + 1])
"""
PROGRAM = """
import sys, llamac
model = llamac.Model(sys.argv[1])
print("".join(model.generate("One", max_tokens=20, temperature=0)))
assert model.generate_batch(["One", "Two"], 20, temperature=0)[0] == \
"".join(model.generate("One", 20, temperature=0))
try:
    llamac.runs("out")
except llamac.Error as e:
    print(e, file=sys.stderr)
print(llamac.__file__, file=sys.stderr)
"""


def wheel(folder, **variables):
    """Run `pip wheel` for this checkout. Return what it printed and the wheel, if any."""
    environment = os.environ | {name: str(value) for name, value in variables.items()}
    done = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-v", "--no-deps", "--no-build-isolation", "-w",
         folder, ROOT],
        env=environment, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return done, next(iter(folder.glob("*.whl")), None)


def test_an_installed_package_runs_outside_the_checkout(tmp_path, library, run_bin):
    (tmp_path / "compiler.py").write_text(COMPILER)
    done, made = wheel(tmp_path, CC=f"{sys.executable} {tmp_path}/compiler.py '{library}'")
    assert done.returncode == 0, done.stdout
    assert (made.name.endswith("-py3-none-linux_x86_64.whl")
            or sys.platform != "linux" or os.uname().machine != "x86_64")
    assert made.stat().st_size < 2_000_000
    with zipfile.ZipFile(made) as f:
        f.extractall(tmp_path / "site")
        assert {name for name in f.namelist() if name.startswith("llamac/")} == {
            "llamac/__init__.py", "llamac/logs.py", "llamac/text.py", "llamac/py.typed",
            f"llamac/{library.name}"}
        metadata = f.read(next(name for name in f.namelist() if name.endswith("METADATA"))).decode()
    assert [line for line in metadata.splitlines()
            if line.startswith("Requires-Dist:")] == ["Requires-Dist: numpy>=1.23"]
    model = two_models(tmp_path)[0]
    done = subprocess.run([sys.executable, "-c", PROGRAM, model], cwd=tmp_path, capture_output=True,
                          text=True, env=os.environ | {"PYTHONPATH": str(tmp_path / "site")})
    assert done.returncode == 0, done.stderr
    assert "One" + done.stdout == run(run_bin, model, "-t", 0, "-n", 20 + len("One"), "--raw",
                                      "-i", "One").decode(errors="replace")
    advice, place = done.stderr.splitlines()
    assert "folder of train.py" in advice and place.startswith(str(tmp_path / "site"))


def test_a_compiler_that_fails_is_named(tmp_path):
    done, made = wheel(tmp_path, CC="no-such-compiler")
    assert done.returncode
    assert made is None
    assert "error: the C compiler no-such-compiler cannot be started" in done.stdout


@pytest.mark.slow
def test_sdist_and_wheel_of_a_clean_clone(tmp_path, run_bin):
    """
    Compile with the real compiler: `python -m build` builds the wheel from the sdist. numpy comes
    from this environment.
    """
    subprocess.run(["git", "clone", "-q", ROOT, tmp_path / "clone"], check=True)
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "-o", tmp_path, tmp_path / "clone"],
        check=True)
    (sdist,), (made,) = tmp_path.glob("*.tar.gz"), tmp_path.glob("*.whl")
    assert sdist.stat().st_size < 500_000 and made.stat().st_size < 2_000_000
    subprocess.run([sys.executable, "-m", "venv", "--system-site-packages", tmp_path / "venv"],
                   check=True)
    python = tmp_path / "venv/bin/python"
    subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", made], check=True)
    model = two_models(tmp_path)[0]
    done = subprocess.run([python, "-c", PROGRAM, model], cwd=tmp_path, capture_output=True,
                          text=True, env=os.environ | {"PYTHONPATH": ""})
    assert done.returncode == 0, done.stderr
    assert str(tmp_path / "venv") in done.stderr
    assert "One" + done.stdout == run(run_bin, model, "-t", 0, "-n", 23, "--raw",
                                      "-i", "One").decode(errors="replace")
