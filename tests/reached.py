"""
Note which tests reach which changes. tests/mutations.py writes calls of `at` into a copy of the
program, and runs the tests there with this module as a pytest plugin.

Notes are written to files at once, so those of a killed process are kept. They hold the name that
pytest itself gives the running test, such as "tests/test_data.py::test_name (call)", in an
environment variable that child processes inherit.
"""
import contextlib
import json
import os
import sys
from pathlib import Path

FOLDER = Path(__file__).parent / "reached_by"  # has one file per change
write = open                                   # kept here, as a test may replace open
seen = set()                                   # (change, test) that this process has noted
tests = {}                                     # test -> {"seconds": ..., "passed": ...}


def at(change):
    """Note that the running test reaches a change, once for each process and test."""
    torch = sys.modules.get("torch")
    if torch and torch.compiler.is_compiling():  # compiled code omits this call
        return
    test = os.environ.get("PYTEST_CURRENT_TEST", "")
    if (change, test) not in seen:
        seen.add((change, test))
        with contextlib.suppress(OSError), write(FOLDER / change, "a", encoding="utf-8") as f:
            f.write(test + "\n")


def pytest_runtest_logreport(report):
    test = tests.setdefault(report.nodeid, {"seconds": 0, "passed": True})
    test["seconds"] += report.duration if report.when == "call" else 0
    test["passed"] &= report.outcome == "passed"


def pytest_sessionfinish():
    if "PYTEST_XDIST_WORKER" not in os.environ:
        (FOLDER / "tests.json").write_text(json.dumps(tests))
