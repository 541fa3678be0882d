"""
The trackers, a file each. Every file here is found by itself: to add a tracker, add a file with a
subclass of engine.tracking.destination.Destination. Its client is imported in its __init__, so
that a missing package costs a warning only where the tracker is on.
"""
import functools
import importlib
import pkgutil
import sys

from engine.streams import tell
from engine.tracking.destination import Destination, error_line


@functools.cache
def find_trackers():
    """Return {name of a file in this folder: its tracker}. A file that fails costs a warning."""
    found = {}
    for file in pkgutil.iter_modules(__path__):
        try:
            module = importlib.import_module(f"{__name__}.{file.name}")
        except Exception as e:
            tell(f"warning: the tracker in {file.name}.py cannot be loaded ({error_line(e)})",
                 sys.stderr)
            continue
        for value in vars(module).values():
            if isinstance(value, type) and issubclass(value, Destination):
                found[file.name] = value  # the last one: imported classes come before it
    return found
