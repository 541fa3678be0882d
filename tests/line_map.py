"""
Which tests run which lines. tests/mutations.py puts a copy of this file into a copy of the program, as sitecustomize.py, so that
every Python process of a test loads it at its start; pytest loads the same module as a plugin, which says which test runs now.

Lines go to files as they are first met, so a process that is killed leaves its own, too. What a fixture of a module or a
session runs counts for every test that uses that fixture.
"""
import contextlib
import json
import os
import sys
import threading
from pathlib import Path

HERE = os.path.dirname(os.path.realpath(__file__))
FOLDER = Path(HERE, "line_map")       # files of lines: number of the test or fixture . process
NOW = FOLDER / "now"                  # which number runs now
names = {}                            # file as Python names it -> as we do, or None: not ours
seen = set()
note = open                           # before a test replaces it
number = count = 0
tests = {}                            # test -> its numbers, seconds, outcome


def ours(filename):
    if filename not in names:
        path = os.path.relpath(os.path.realpath(filename), HERE)
        names[filename] = path if path.count("/") <= 1 and not path.startswith(("..", "tests/", "site")) else None
    return names[filename]


def meet(frame, event, argument):
    here = frame.f_code.co_filename, frame.f_lineno
    if here not in seen:
        seen.add(here)
        with contextlib.suppress(OSError), note(FOLDER / f"{number}.{os.getpid()}", "a") as f:  # a test may fill the disk
            f.write(f"{ours(here[0])}:{here[1]}\n")
    return meet


def enter(frame, event, argument):
    return meet(frame, event, argument) if ours(frame.f_code.co_filename) else None


def switch(to):
    """From here on lines belong to this number."""
    global number
    number = to
    NOW.write_text(str(to))
    seen.clear()
    sys.settrace(enter)  # torch.compile, or a debugger of the tests, may have taken its place


def fresh():
    global count
    count += 1
    return count


def pytest_runtest_logstart(nodeid, location):
    tests[nodeid] = {"numbers": [fresh()], "seconds": 0, "passed": True}
    switch(count)


def pytest_fixture_setup(fixturedef, request):
    if fixturedef.scope == "function":
        return None
    before, fixturedef.number = number, fresh()
    switch(count)
    try:
        from _pytest.fixtures import pytest_fixture_setup as set_up
        return set_up(fixturedef, request)
    finally:
        switch(before)


def pytest_runtest_call(item):
    for definitions in item._fixtureinfo.name2fixturedefs.values():
        tests[item.nodeid]["numbers"] += [d.number for d in definitions if hasattr(d, "number")]


def pytest_runtest_logreport(report):
    test = tests[report.nodeid]
    test["seconds"] += report.duration if report.when == "call" else 0
    test["passed"] &= report.outcome == "passed"


def pytest_sessionfinish():
    sys.settrace(None)
    lines = {}
    for path in FOLDER.glob("*.*"):
        lines.setdefault(int(path.stem), set()).update(path.read_text().split())
    for test in tests.values():
        test["lines"] = sorted(set().union(*(lines.get(n, ()) for n in test.pop("numbers"))))
    Path(HERE, "line_map.json").write_text(json.dumps(tests))


if __name__ == "sitecustomize" and FOLDER.exists():
    number = int(NOW.read_text() or 0) if NOW.exists() else 0
    threading.settrace(enter)
    sys.settrace(enter)
