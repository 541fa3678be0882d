"""
The state folder: where the page keeps its user's queue, and the notes, tags and colours of runs.

It is outside the folder of runs, because a folder of runs may come from another person.
"""
import contextlib
import errno
import hashlib
import json
import os
import re
from pathlib import Path

from engine.files import write_atomic
from engine.untrusted import read_json, reason

MAX_NOTES = 1 << 26  # max bytes of notes.json
MAX_LENGTHS = {"notes": 5000, "tags": 5000, "color": 7}  # max characters of a run's fields
COLOR = re.compile("#[0-9a-f]{6}")


def state_folder(root):
    """Return the path of the state folder for a folder of runs. It may not exist yet."""
    base = os.environ.get("XDG_STATE_HOME", "")
    if not os.path.isabs(base):
        base = os.path.expanduser("~/.local/state")
    key = hashlib.sha256(os.fsencode(os.path.realpath(root))).hexdigest()[:16]
    return Path(base, "llamac/page", key)


def make_state_folder(folder):
    """Create a state folder if it does not exist. Raises OSError, also if another user owns it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, "it belongs to another user", str(folder))


def read_notes(path):
    """Return {run: {"notes", "tags", "color": text}} of a notes.json, {} if it can't be read."""
    kept = {}
    with contextlib.suppress(OSError, ValueError, MemoryError):
        kept = read_json(path, MAX_NOTES)
    return {run: cut(notes) for run, notes in kept.items() if isinstance(notes, dict)}


def cut(notes):
    """Return a run's notes without unknown fields and invalid values, texts cut to MAX_LENGTHS."""
    texts = {name: notes[name][:length] for name, length in MAX_LENGTHS.items()
             if isinstance(notes.get(name), str)}
    if not COLOR.fullmatch(texts.get("color", "#000000")):
        del texts["color"]
    return texts


def write_notes(folder, notes):
    """
    Replace notes.json by the notes of all runs. Raises OSError, and ValueError if the existing file
    can't be read: replacing it would lose notes.
    """
    make_state_folder(folder)
    path = folder / "notes.json"
    try:
        read_json(path, MAX_NOTES)
    except FileNotFoundError:
        pass
    except ValueError as e:
        raise ValueError(f"{path}: cannot be read ({reason(e)}); repair it or move it") from e
    write_atomic(path, json.dumps(notes, indent=1))
