"""
The trackers, one file each. To add a tracker, add a file here with a subclass of
engine.tracking.destination.Destination: find_trackers() finds it. The method __init__ of the class
imports the tracker's package, so that a missing package affects only runs that use the tracker.
"""
import functools
import importlib
import pkgutil
import sys

from engine.streams import tell
from engine.tracking.destination import Destination, error_line


@functools.cache
def find_trackers():
    """
    Return {name of a file in this folder: its subclass of Destination}. Leave out a file that
    cannot be loaded, with a warning.
    """
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
                found[file.name] = value  # keep the last one: the imported Destination comes first
    return found
