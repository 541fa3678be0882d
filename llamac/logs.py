"""
Training logs as plain lists and dicts, for pandas, a notebook or a program:

    for row in llamac.runs("out").rows("loss/val"):
        print(row["run"], row["tokens"], row["loss/val"])
    pandas.DataFrame(llamac.runs("out/a", "out/b").results())
"""
from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llamac

Row = dict[str, Any]


class Runs:
    """The runs in folders, in the order of their names. Iterate to get the run of each folder."""

    def __init__(self, found):
        self.found = found

    def __iter__(self) -> Iterator[Any]:
        return iter(self.found)

    def __len__(self) -> int:
        return len(self.found)

    def settings(self) -> list[Row]:
        """Return [{"run": name, setting: value}], one for each run."""
        return [{"run": run.name, **run.config} for run in self.found]

    def results(self) -> list[Row]:
        """
        Return [{"run": name, "seed": seed or None, metric: value}], one for each run. A validation
        loss has its best value, any other metric its last one. The dicts also have compare.py's
        columns, such as "last loss/val" and "minutes".
        """
        return [{"run": run.name, "seed": run.seed, **run.results()} for run in self.found]

    def rows(self, *metrics: str) -> list[Row]:
        """
        Return [{"run": name, "iter": step, "tokens": tokens so far, "seconds": since the first row,
        without pauses, metric: value}], one for each logged row that has one of these metrics, or
        any metric if none are given. Metrics that a row lacks and tokens that a run does not log
        are None.
        """
        return [row for run in self.found for row in rows_of(run, metrics)]


def rows_of(run, metrics):
    """Yield the rows of a run, as Runs.rows returns them."""
    at = {"iter": run.column("iter"), "tokens": run.column("tokens"), "seconds": run.x("seconds")}
    names = metrics or [name for name in run.columns if name not in (*at, "time")]
    columns = [column.tolist() for column in (*at.values(), *map(run.column, names))]
    for values in zip(*columns):
        # NaN marks a value that the row lacks.
        step, tokens, seconds, *rest = [None if value != value else value for value in values]
        if any(value is not None for value in rest):
            counts = {"iter": whole(step), "tokens": whole(tokens), "seconds": seconds}
            yield {"run": run.name, **counts, **dict(zip(names, rest))}


def whole(value):
    """Return a float that holds a whole number as an int."""
    return int(value) if value is not None and value.is_integer() else value


def runs(*folders: str | Path) -> Runs:
    """
    Return the Runs in these folders, by default in out. A run is an out folder of train.py or
    track.py, or a folder of the W&B client. Any other folder is searched for runs. Folders without
    a readable run are skipped. Raises Error if no run remains.
    """
    hook = sys.excepthook
    try:  # imported here, because the rest of the library needs only numpy
        from engine.tracking.runs import read_run, run_folders
    except ModuleNotFoundError as e:
        raise llamac.Error(f"cannot import {e.name}, which reads logs; run this in the folder of "
                           "train.py, or add that folder to PYTHONPATH") from None
    sys.excepthook = hook  # the import replaced it, as is right only for the project's commands
    found, problems = [], []
    for folder in run_folders(folders or ["out"]):
        try:
            found.append(read_run(folder))
        except ValueError as e:
            problems.append(" ".join(str(e).split()))
    if not found:
        raise llamac.Error(problems[0] if problems else "no folders given, expected run folders")
    return Runs(found)
