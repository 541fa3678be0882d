"""
The folder of a run: its mark and lock, the files in it that are ours, recovery after a crash, an old run set aside.

`trainer.json` marks a folder as a run's and names the process that trains in it; that process holds a lock on the file.
Without the mark, or under a name that is not in OURS, nothing is removed, renamed or overwritten: it belongs to the user.
"""
import atexit
import contextlib
import errno
import fcntl
import json
import os
import socket
import time
from pathlib import Path

from configurator import fail
from engine.training import checkpoint, distributed
from engine.untrusted import read_json

MARK = "trainer.json"


# what a trainer writes into its out_dir, and into a checkpoint's folder
OURS = ("log.jsonl", "config.json", "wandb.json", "diff.patch", "evaluation.json", "tensorboard", "swanlab", "model.gguf",
        "last.gguf", "latest", "best")
held = None  # the open MARK of the folder that this process trains in


def recover(out_dir):
    """
    (the newest intact step folder, None where there is none; lines that name the damaged ones). Those that are newer
    than it are renamed. For the process that has claimed out_dir.
    """
    finish(out_dir)
    lines = []
    for folder in reversed([p for p in checkpoint.all_steps(out_dir) if not p.suffix]):
        wrong = checkpoint.damage(folder)
        if not wrong:
            return folder, lines
        aside = unused(f"{folder}.damaged")
        os.rename(folder, aside)
        lines.append(f"{folder} is damaged ({wrong}) and was set aside as {aside.name}")
    return None, lines or [f"{p} is damaged" for p in checkpoint.all_steps(out_dir)]


def finish(out_dir):
    """Publish the checkpoints whose writers were killed in the last moment, remove what others have left."""
    for folder in Path(out_dir, "checkpoints").glob(".tmp_*"):
        final = folder.with_name(f"step_{folder.name[5:]}")
        if checkpoint.STEP.fullmatch(final.name) and not final.exists() and checkpoint.damage(folder) is None:
            os.rename(folder, final)
    checkpoint.clean(out_dir)
    for path in unfinished(out_dir):
        path.unlink(missing_ok=True)


def unfinished(out_dir):
    """Files that their writers, who name them NAME.PID.tmp until they are whole, won't finish: those processes are gone."""
    found = [(path, path.name[len(name) + 1:-4]) for name in OURS for path in Path(out_dir).glob(f"{name}.*.tmp")]
    return [path for path, number in found if number.isdecimal() and not lives(int(number))]


def lives(pid):
    """Whether there is a process of this number here."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass  # somebody else's
    return True


def unused(name):
    """`name`, or `name` with the first number behind it that nothing has yet."""
    path, number = Path(name), 1
    while path.exists():
        path, number = Path(f"{name}{number}"), number + 1
    return path


def is_run(out_dir):
    """Whether a trainer has worked in this folder: it left its mark there, or, before it set marks, checkpoints."""
    made_by = read_json(Path(out_dir, MARK), default={}).get("made_by")
    return made_by == "llamac" if made_by is not None else any(map(checkpoint.manifest, checkpoint.all_steps(out_dir)))


class Refused(OSError):
    """The reason why this process may not train in a folder, in a line."""


def refuse_foreign(out_dir):
    """Raise Refused if something in out_dir has a name of ours and isn't known to be ours."""
    known = is_run(out_dir)
    found = [folder for folder in checkpoint.all_steps(out_dir) if not (known and (folder / "checkpoint.json").exists())]
    if not known:
        found += checkpoint.leftovers(out_dir) + unfinished(out_dir)
        found += [path for name in OURS if (path := Path(out_dir, name)).exists()]
        found += [path for path in [Path(out_dir, MARK)] if path.exists() and path.stat().st_size]
    if found:
        raise Refused(f"--out_dir={out_dir}: holds {found[0].relative_to(out_dir)}, which is not known to be a trainer's and "
                      f"would be in the way; move it elsewhere or choose another folder")


def claim(out_dir):
    """
    Make a run's folder, or go on in one, and lock it for as long as this process lives: the system drops the lock of a
    dead process. One line refuses a folder in which another process trains, or which holds what no trainer wrote.
    Raises OSError when it can't be written.
    """
    new = not Path(out_dir).exists()
    try:
        take(out_dir)
    except Refused as e:
        fail(e)
    if new:
        atexit.register(tidy, out_dir)


def take(out_dir):
    """What `claim` does, but for Refused, which is raised."""
    global held
    file, is_new = lock(out_dir)
    try:
        refuse_foreign(out_dir)
    except Refused:
        if is_new:
            os.unlink(file.name)
        file.close()
        raise
    mark(file)
    held = file


def lock(out_dir):
    """
    Return (the open and locked MARK of a folder, whether this call made it), or raise Refused where another process has
    locked it. The folder and an empty MARK are made where there are none. Everything else about the folder is looked at under
    this lock, so that of two trainings begun together the second sees a finished claim.
    """
    path = Path(out_dir, MARK)
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            file, is_new = open(path, "x+", encoding="utf-8"), True
        except FileExistsError:
            try:
                file, is_new = open(path, "r+", encoding="utf-8"), False
            except FileNotFoundError:  # its owner has removed it in between
                if path.is_symlink():
                    raise Refused(f"--out_dir={out_dir}: {MARK} is a link to nothing, expected a file; remove the link, or "
                                  f"choose another folder") from None
                continue
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with file:
                raise Refused(f"--out_dir={out_dir}: another process trains there{described(file.read())}; wait for it, stop "
                              f"it, or choose another folder") from None
        except OSError as e:  # some network file systems have no locks
            print(f"warning: {out_dir} cannot be locked ({e.strerror}); see to it that nobody else trains there", flush=True)
        if is_file_at(file, path):
            return file, is_new
        file.close()  # its owner has removed it between the opening and the locking


def keep_claim(out_dir):
    """
    Claim out_dir again where it was deleted or moved away while this process trains in it; other folders stay as they are.
    Raises OSError where another process trains there by now.
    """
    if not held or Path(held.name) != Path(out_dir, MARK) or is_file_at(held, Path(out_dir, MARK)):
        return
    before = held
    take(out_dir)
    before.close()
    distributed.say(f"warning: {out_dir} was deleted or moved while this process trains in it; the run goes on in a new one, "
                 f"without what was there")


def is_file_at(file, path):
    """Return whether an open file is the one that this path names now."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except OSError:
        return False


def tidy(out_dir):
    """Take away a folder that this process has made for a run that was then refused: nothing but this process's mark is in it."""
    mine = Path(out_dir, MARK)
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        if held and os.listdir(out_dir) == [MARK] and json.loads(mine.read_text(encoding="utf-8"))["pid"] == os.getpid():
            mine.unlink()
            os.rmdir(out_dir)


def described(text):
    """" (process 12 on HOST since TIME)" from a MARK's text."""
    try:
        found = json.loads(text)
        return f" (process {found['pid']} on {found['host']} since {found['since']})"
    except (ValueError, KeyError, TypeError):  # being written
        return ""


def mark(file):
    """Write a MARK: in place, since a lock is on the file, and in one write, so that a kill leaves the old or the new."""
    text = json.dumps({"made_by": "llamac", "pid": os.getpid(), "host": socket.gethostname()[:64],
                       "since": time.strftime("%Y-%m-%d %H:%M:%S")}) + "\n"
    new = not os.fstat(file.fileno()).st_size
    try:
        if os.pwrite(file.fileno(), text.encode().ljust(256), 0) < 256:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError:
        if new:
            os.unlink(file.name)
        raise


def release():
    """Let others train in the folder that this process has claimed."""
    global held
    held = held and held.close()


def set_aside(out_dir):
    """
    Move what a run has written, and nothing else, to out_dir.old1 (.old2 ...), to make place for a new run in the folder
    this process has claimed. Returns the new folder's name, None when there was no run. Checkpoints go last: were it
    interrupted before, they could still be resumed.
    """
    finish(out_dir)
    mine = [path for name in OURS if (path := Path(out_dir, name)).exists()] + checkpoint.all_steps(out_dir)
    if not any(path.name != "log.jsonl" or path.stat().st_size for path in mine):
        return None
    number = 1
    while (aside := Path(f"{str(out_dir).rstrip('/')}.old{number}")).exists():
        number += 1
    (aside / "checkpoints").mkdir(parents=True)
    with open(aside / MARK, "w", encoding="utf-8") as f:
        mark(f)
    for path in mine:
        os.rename(path, aside / path.relative_to(out_dir))
    return aside
