"""
The runs below a folder: search for new ones every few seconds, and read their logs as they grow.

compare.Run reads a log. Anyone may have written a run's log and settings, so either may be
malformed in any way.
"""
import contextlib
import math
import os
import threading
import time
from pathlib import Path

from compare import Run, encodable
from engine.untrusted import open_untrusted, reason
from page.locks import lock_holders, trainer_pid
from page.state import state_folder
from track import parse_row

MAX_DEPTH = 3          # subfolders of folders up to this depth below the root are searched
SEARCH_INTERVAL = 3    # min seconds between two searches for new runs
CHECK_INTERVAL = 0.4   # min seconds between two checks for new rows, however many clients watch
MIN_WINDOW = 1 << 13   # min bytes to read at each place of a preview; a shorter log has no preview


def preview(run, places=24, window=1 << 15):
    """
    Return a Run with a few rows from evenly spaced places of a log, to draw until the whole log is
    read; None for a short log. places: number of places; window: max bytes to read at each.
    """
    found = Run(run.folder, run.name)
    found.read_config()
    found.version = 0  # unlike any version of `run`, so that clients reload when `run` replaces it
    with contextlib.suppress(OSError), open_untrusted(run.folder / "log.jsonl") as f:
        size = f.seek(0, os.SEEK_END)
        window = min(window, size // places)
        if window < MIN_WINDOW:
            return None
        for n in range(places):
            is_last = n == places - 1
            f.seek(size - window if is_last else n * size // places)
            whole = f.read(window).split(b"\n")[1:-1]  # the first and last line may be cut off
            evaluated = [line for line in whole[1:] if b'"loss/val"' in line]
            for line in whole[:1] + evaluated[:1] + (whole[-1:] if is_last else []):
                row = parse_row(line)
                if row:
                    found.add_row(row)
    return found if found.count else None


class Runs:
    """All runs below a folder. A client sends the name of a run, never a path."""

    def __init__(self, root):
        self.root = Path(root)
        self.state = state_folder(root)
        self.lock = threading.RLock()
        self.runs = {}      # {name: Run}
        self.previews = {}  # {name: Run} of long logs that are not fully read yet
        self.unread = {}    # {name: Run} of runs that may have more rows, in reading order
        self.errors = {}    # {name: why the latest attempt to read the run failed}
        self.trainers = {}      # {name: process id of its trainer or None}, at the latest check
        # Times of the latest search and the latest check, by time.monotonic().
        self.searched = self.checked = -math.inf

    def search(self):
        """Find new runs, and drop those whose folders are gone."""
        self.searched = time.monotonic()
        found = {}
        for folder, subfolders, files in os.walk(self.root):
            # os.walk() visits only the subfolders that remain in this list.
            subfolders[:] = sorted(name for name in subfolders if not name.startswith(".")
                                   and name not in ("checkpoints", "tensorboard"))
            if len(Path(folder).relative_to(self.root).parts) > MAX_DEPTH:
                subfolders.clear()
            if "log.jsonl" in files and "config.json" in files:
                name = encodable(folder)
                found[name] = self.runs.get(name) or Run(folder, name)
                if name not in self.runs:
                    first = self.attempt(found[name], preview, None)
                    if first:
                        self.previews[name] = first
        self.runs = found

    def attempt(self, run, function, default):
        """Return function(run). If it fails, note the error beside the run and return `default`."""
        try:
            return function(run)
        except Exception as e:  # a malformed log may cause any exception
            name = os.path.basename(str(getattr(e, "filename", None) or "this run"))
            self.errors[run.name] = f"{name}: {reason(e)}"
        return default

    def refresh(self, max_seconds=0.05):
        """
        Search for runs and check for new rows if the intervals have passed, and read new rows for
        about `max_seconds`. Return whether there are more.
        """
        with self.lock:
            now = time.monotonic()
            if now - self.searched > SEARCH_INTERVAL:
                self.search()
            if now - self.checked >= CHECK_INTERVAL:
                self.checked = now
                holders = lock_holders()
                self.trainers = {name: trainer_pid(run.folder, holders)
                                 for name, run in self.runs.items()}
                # Check the fully read runs first, so that a long log does not delay the others.
                ended = {name: run for name, run in self.runs.items() if name not in self.unread}
                unread = {name: run for name, run in self.unread.items() if name in self.runs}
                self.unread = ended | unread
            deadline = time.monotonic() + max_seconds  # the search does not count
            while self.unread and time.monotonic() < deadline:
                name = next(iter(self.unread))
                run = self.unread.pop(name)
                self.errors.pop(name, None)
                if self.attempt(run, Run.read, False):
                    self.unread[name] = run  # at the end: runs take turns, one chunk each
                else:
                    self.previews.pop(name, None)
            return bool(self.unread)

    def shown(self):
        """Return each run's preview if it has one, otherwise its Run with the rows read so far."""
        return [self.previews.get(name, run) for name, run in self.runs.items()]

    def run(self, name):
        """Return the run with this name. Raises ValueError."""
        self.refresh()
        if not isinstance(name, str) or name not in self.runs:
            raise ValueError(f"there is no run {str(name)[:200]!r}")
        return self.runs[name]

    def whole(self, names):
        """Return the runs with these names after reading their logs to the end."""
        found = [self.run(name) for name in names]
        while self.refresh() and any(name in self.unread for name in names):
            pass
        return found
