"""
Notes which tests reach which changes. tests/mutations.py writes calls of `at` into a copy of the
program, and runs the tests there with this module as a plugin of pytest.

Notes go to files at once, so a process that is killed leaves its own, too. They hold pytest's own
words, "tests/test_data.py::test_name (call)": it keeps the running test in the environment, which
processes inherit.
"""
import contextlib
import json
import os
import sys
from pathlib import Path

FOLDER = Path(__file__).parent / "reached_by"  # a file per change
write = open                                   # before a test replaces it
seen = set()
tests = {}                                     # test -> its seconds; whether it passed


def at(change):
    """Note that the running test reaches a change, once for each process and test."""
    torch = sys.modules.get("torch")
    if torch and torch.compiler.is_compiling():  # the compiler traces this call: it vanishes
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
