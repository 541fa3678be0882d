"""
The folder of a run: its mark and lock, the trainer's files in it, recovery after a crash, setting
an old run aside.

The mark, `trainer.json`, shows that the folder belongs to a run. It names the process that trains
there, which holds a lock on that file. Only checkpoints and the names in OURS are removed, renamed
or overwritten, and only in a folder that a trainer has marked: all else belongs to the user.
"""
import atexit
import contextlib
import errno
import json
import os
import shutil
import socket
import time
from pathlib import Path

from configurator import fail
from engine import system
from engine.tracking.runs import first_prompt
from engine.training import checkpoint, distributed
from engine.untrusted import read_json

MARK = "trainer.json"
# What a trainer writes into its out_dir besides checkpoints.
OURS = ("log.jsonl", "config.json", "result.json", "wandb.json", "diff.patch", "evaluation.json",
        "confusion.svg", "tensorboard", "swanlab", "model.gguf", "last.gguf", "latest", "best")
held = None  # the open and locked MARK of the folder that this process trains in


class Refused(OSError):
    """An error whose message says in one line why this process may not train in a folder."""


def sample_prompt(model):
    """
    Return the first prompt of a run's samples. model: path of the run, or of a checkpoint or a
    model file in it. Return "" if it belongs to no run.
    """
    path = Path(model)
    folder = path if path.is_dir() else path.parent
    return first_prompt(read_json(folder / "config.json", default={}))


# ---- recovery ------------------------------------------------------------------------------------

def recover(out_dir):
    """
    Return (the newest intact step folder or None, lines about damaged ones). Step folders that are
    damaged and newer than it are renamed to NAME.damaged. The caller must have claimed out_dir.
    """
    finish(out_dir)
    lines = []
    # A folder with a suffix, NAME.damaged, was set aside before: skip it.
    for folder in reversed([p for p in checkpoint.all_steps(out_dir) if not p.suffix]):
        wrong = checkpoint.damage(folder)
        if not wrong:
            return folder, lines
        aside = unused(f"{folder}.damaged")
        os.rename(folder, aside)
        lines.append(f"{folder} is damaged ({wrong}) and was set aside as {aside.name}")
    # No folder is intact. If this call renamed none, report those that earlier calls renamed.
    return None, lines or [f"{p} is damaged" for p in checkpoint.all_steps(out_dir)]


def finish(out_dir):
    """Publish complete checkpoints of killed writers, and remove their other leftovers."""
    for folder in Path(out_dir, "checkpoints").glob(".tmp_*"):
        final = folder.with_name(folder.name.replace(".tmp_", "step_"))
        is_step = checkpoint.STEP.fullmatch(final.name)
        if is_step and not final.exists() and checkpoint.damage(folder) is None:
            os.rename(folder, final)
    checkpoint.clean(out_dir)
    for path in unfinished(out_dir):
        path.unlink(missing_ok=True)


def unfinished(out_dir):
    """
    Return the unfinished files of dead writers. A writer names a file NAME.PID.tmp until it is
    complete.
    """
    found = []
    for name in OURS:
        for path in Path(out_dir).glob(f"{name}.*.tmp"):
            pid = path.name[len(name) + 1:-4]
            if pid.isdecimal() and not system.is_running(int(pid)):
                found.append(path)
    return found


def unused(name):
    """Return the first path that does not exist of `name`, name1, name2 ..."""
    path, number = Path(name), 1
    while path.exists():
        path, number = Path(f"{name}{number}"), number + 1
    return path


# ---- claim ---------------------------------------------------------------------------------------

def is_run(out_dir):
    """
    Return whether a trainer has worked in this folder: it holds a mark or, if written by a version
    that had no marks, a checkpoint.
    """
    made_by = read_json(Path(out_dir, MARK), default={}).get("made_by")
    if made_by is not None:
        return made_by == "llamac"
    return any(map(checkpoint.manifest, checkpoint.all_steps(out_dir)))


def refuse_foreign(out_dir):
    """
    Raise Refused if a file or folder in out_dir has a name that a trainer uses, but may be the
    user's. In a run this is a step folder without checkpoint.json, elsewhere any such name.
    """
    known = is_run(out_dir)
    found = [folder for folder in checkpoint.all_steps(out_dir)
             if not (known and (folder / "checkpoint.json").exists())]
    if not known:
        found += checkpoint.leftovers(out_dir) + unfinished(out_dir)
        found += existing(out_dir)
        mark = Path(out_dir, MARK)  # an empty one is from `lock`
        found += [mark] if mark.exists() and mark.stat().st_size else []
    if found:
        raise Refused(f"--out_dir={out_dir}: holds {found[0].relative_to(out_dir)}, which "
                      f"train.py may overwrite and no training is known to have written; move it "
                      f"elsewhere or choose another folder")


def existing(out_dir):
    """Return the paths in out_dir under the names of OURS."""
    return [path for name in OURS if (path := Path(out_dir, name)).exists()]


def has_results(out_dir):
    """Return whether a run in out_dir has left a model or a result."""
    return any(Path(out_dir, name).exists() for name in ("model.gguf", "result.json"))


def claim(out_dir):
    """
    Lock and mark the folder of a run, and make it if it is missing. The lock lasts until `release`
    or the end of this process. Ends the program if another process trains there, or if the folder
    holds the user's files under names that a trainer uses. Raises OSError if it can't be written.
    """
    new = not Path(out_dir).exists()
    try:
        take(out_dir)
    except Refused as e:
        fail(e)
    if new:
        atexit.register(tidy, out_dir)


def take(out_dir):
    """Claim a folder as `claim` does, but raise Refused instead of ending the program."""
    global held
    file, is_new = lock(out_dir)
    try:
        refuse_foreign(out_dir)
    except Refused:
        if is_new:
            system.remove_open(file)
        file.close()
        raise
    write_mark(file)
    held = file


def lock(out_dir):
    """
    Return (the open and locked MARK of a folder, whether this call made it). Make the folder and an
    empty MARK if they are missing. Raises Refused if another process holds the lock.

    The caller examines the folder only under this lock, so it never sees a claim that another
    training has only half made.
    """
    path = Path(out_dir, MARK)
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            file, is_new = open(path, "x+", encoding="utf-8"), True
        except FileExistsError:
            try:
                file, is_new = open(path, "r+", encoding="utf-8"), False
            except FileNotFoundError:  # its owner removed it in between
                if path.is_symlink():
                    raise Refused(f"--out_dir={out_dir}: {MARK} is a link to nothing, expected a "
                                  f"file; remove the link, or choose another folder") from None
                continue
        try:
            system.lock(file)
        except BlockingIOError:
            with file:  # closes it
                raise Refused(f"--out_dir={out_dir}: another process trains there"
                              f"{describe_owner(file.read())}; wait for it, stop it, or choose "
                              f"another folder") from None
        except OSError as e:  # some network file systems have no locks
            print(f"warning: {out_dir} cannot be locked ({e.strerror}); make sure that no other "
                  f"process trains there", flush=True)
        if is_file_at(file, path):
            return file, is_new
        file.close()  # its owner removed it between opening and locking


def describe_owner(text):
    """Return " (process 12 on HOST since TIME)" from the text of a MARK; "" if incomplete."""
    try:
        owner = json.loads(text)
        return f" (process {owner['pid']} on {owner['host']} since {owner['since']})"
    except (ValueError, KeyError, TypeError):  # its owner has not written it yet
        return ""


def write_mark(file):
    """
    Write the text of an open MARK. Raises OSError if the disk is full.

    The file is not replaced by a rename, as the lock is on this file. A single write of a fixed
    256 bytes overwrites the old text whole, so that a kill leaves either the old or the new one.
    """
    text = json.dumps({"made_by": "llamac", "pid": os.getpid(), "host": socket.gethostname()[:64],
                       "since": time.strftime("%Y-%m-%d %H:%M:%S")}) + "\n"
    is_new = not os.fstat(file.fileno()).st_size
    try:
        os.lseek(file.fileno(), 0, os.SEEK_SET)
        if os.write(file.fileno(), text.encode().ljust(256)) < 256:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError:
        if is_new:
            system.remove_open(file)
        raise


def keep_claim(out_dir):
    """
    Claim out_dir again if it was deleted or moved while this process trains in it. Do nothing for a
    folder that this process does not train in. Raises OSError if another process trains there now.
    """
    path = Path(out_dir, MARK)
    if not held or Path(held.name) != path or is_file_at(held, path):
        return
    before = held
    take(out_dir)
    before.close()
    distributed.say(f"warning: {out_dir} was deleted or moved while this process trains in it; the "
                    f"run continues in a new one, without its earlier files")


def is_file_at(file, path):
    """Return whether an open file is still the one at this path."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except OSError:
        return False


def tidy(out_dir):
    """
    Remove, at exit, a folder that `claim` made, if it holds nothing except this process's mark: the
    run ended before it wrote anything.
    """
    global held
    path = Path(out_dir, MARK)
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        if not held or os.listdir(out_dir) != [MARK]:
            return
        if json.loads(path.read_text(encoding="utf-8"))["pid"] == os.getpid():
            system.remove_open(held)
            held = None
            os.rmdir(out_dir)


def release():
    """Let other processes train in the folder that this process has claimed."""
    global held
    if held:
        held.close()  # which unlocks it
    held = None


def set_aside(out_dir):
    """
    Move what a run has written, and nothing else, to out_dir.old1 (.old2 ...), to make room for a
    new run. Return the new folder, or None if there was no run. The caller must have claimed
    out_dir.

    Checkpoints are moved last, so that after an interruption the run can still be resumed. The new
    folder is beside the one that a link leads to, and may be on another disk if out_dir is the root
    of one: the files are then copied.
    """
    finish(out_dir)
    ours = existing(out_dir) + checkpoint.all_steps(out_dir)
    # An empty log alone is not a run.
    if not any(path.name != "log.jsonl" or path.stat().st_size for path in ours):
        return None
    number = 1
    named = str(out_dir).rstrip("/")
    named = os.path.realpath(named) if os.path.islink(named) else named
    while (aside := Path(f"{named}.old{number}")).exists():
        number += 1
    (aside / "checkpoints").mkdir(parents=True)
    with open(aside / MARK, "w", encoding="utf-8") as f:
        write_mark(f)
    for path in ours:
        shutil.move(path, aside / path.relative_to(out_dir))
    return aside
