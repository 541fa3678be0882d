"""
The runs below a folder: found every few seconds, and read on as their logs grow.

compare.py has the reader. Anyone may have written a run's log and settings, so either may be wrong
in any way.
"""
import contextlib
import math
import os
import threading
import time
from pathlib import Path

from compare import Run, encodable
from engine.untrusted import open_untrusted, reason
from page.locks import lock_holders
from page.state import state_folder
from track import parse_row

MAX_DEPTH = 3          # folders below the root whose own folders are searched, too
SEARCH_INTERVAL = 3    # seconds between two searches for new runs
CHECK_INTERVAL = 0.4   # seconds between two looks at the logs, however many clients watch
MIN_WINDOW = 1 << 13   # bytes for each place of a preview; a shorter log is read at once


def preview(run, places=24, window=1 << 15):
    """
    Return a Run of a few rows from all over a log, or None for a short log. It is drawn while the
    log is read. places: where rows are taken; window: bytes read at each place.
    """
    found = Run(run.folder, run.name)
    found.read_config()
    found.version = 0
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
    """All runs below a folder. A client names a run of this list; it never sends a path."""

    def __init__(self, root):
        self.root = Path(root)
        self.state = state_folder(root)
        self.lock = threading.RLock()
        self.runs = {}      # {name: Run}
        self.previews = {}  # {name: Run} of those that were not read to their ends yet
        self.unread = {}    # {name: Run} of those that may have more rows, the next first
        self.errors = {}    # {name: why the latest attempt to read it failed}
        self.lock_holders = {}
        self.searched = self.checked = -math.inf  # when, by time.monotonic()

    def search(self):
        """Find new runs, and drop those that are gone."""
        self.searched = time.monotonic()
        found = {}
        for folder, inside, files in os.walk(self.root):
            inside[:] = sorted(name for name in inside if not name.startswith(".")
                               and name not in ("checkpoints", "tensorboard"))
            if len(Path(folder).relative_to(self.root).parts) > MAX_DEPTH:
                inside.clear()
            if "log.jsonl" in files and "config.json" in files:
                name = encodable(folder)
                found[name] = self.runs.get(name) or Run(folder, name)
                if name not in self.runs:
                    first = self.attempt(found[name], preview, None)
                    if first:
                        self.previews[name] = first
        self.runs = found

    def attempt(self, run, function, default):
        """Return function(run), or `default` if it fails: then the error is shown with the run."""
        try:
            return function(run)
        except Exception as e:
            name = os.path.basename(str(getattr(e, "filename", None) or "this run"))
            self.errors[run.name] = f"{name}: {reason(e)}"
        return default

    def refresh(self, max_seconds=0.05):
        """Read new rows for at most `max_seconds`. Return whether there are more."""
        with self.lock:
            now = time.monotonic()
            if now - self.searched > SEARCH_INTERVAL:
                self.search()
            if now - self.checked >= CHECK_INTERVAL:
                self.checked = now
                self.lock_holders = lock_holders()
                # Runs that are being read come last, so that a long log delays no other.
                read = {name: run for name, run in self.runs.items() if name not in self.unread}
                unread = {name: run for name, run in self.unread.items() if name in self.runs}
                self.unread = read | unread
            while self.unread and time.monotonic() < now + max_seconds:
                name = next(iter(self.unread))
                run = self.unread.pop(name)
                self.errors.pop(name, None)
                if self.attempt(run, Run.read, False):
                    self.unread[name] = run  # the next piece comes after one of each other run
                else:
                    self.previews.pop(name, None)
            return bool(self.unread)

    def shown(self):
        """Return the runs as far as they were read, or their previews."""
        return [self.previews.get(name, run) for name, run in self.runs.items()]

    def run(self, name):
        """Return the run of this name. Raises ValueError."""
        self.refresh()
        if not isinstance(name, str) or name not in self.runs:
            raise ValueError(f"there is no run {str(name)[:200]!r}")
        return self.runs[name]

    def whole(self, names):
        """Return the runs of these names, read to their ends."""
        found = [self.run(name) for name in names]
        while self.refresh() and any(name in self.unread for name in names):
            pass
        return found
