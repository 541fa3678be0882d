"""Find out which trainers and jobs of the page are alive: each holds a lock on a file."""
import fcntl
import os
import socket
import stat
from pathlib import Path

from engine.untrusted import open_untrusted, read_json


def lock_holders():
    """
    Return {inode: [process id]} of the locked files of this machine, from Linux's /proc/locks.
    Return None on other systems.
    """
    holders = {}
    try:
        for line in Path("/proc/locks").read_text(encoding="utf-8").splitlines():
            words = line.split()  # 1: FLOCK ADVISORY WRITE <pid> <major>:<minor>:<inode> 0 EOF
            if words[1] == "FLOCK":
                inode = int(words[5].split(":")[2])
                holders.setdefault(inode, []).append(int(words[4]))
    except (OSError, ValueError, IndexError):
        return None
    return holders


def is_locked(path):
    """Return whether a process holds the lock on a file; False if the file can't be opened."""
    try:
        with open_untrusted(path) as f:
            fcntl.flock(f, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    except OSError:
        return False


def trainer_pid(folder, holders):
    """
    Return the id of the process that trains in a folder on this machine, or None. holders: the
    result of lock_holders().

    A trainer writes its process id into trainer.json and holds the lock on that file. Both must
    agree, because the caller may stop this process, and anyone may have written the file.
    """
    path = os.path.join(folder, "trainer.json")
    try:
        found = os.lstat(path)
        # A link may point to another run's file, and the caller would stop that run's trainer.
        if stat.S_ISLNK(found.st_mode):
            return None
        # Processes with a lock on a file of this inode; None: unknown, so the lock is tried.
        pids = None if holders is None else holders.get(found.st_ino, [])
        if pids == [] or pids is None and not is_locked(path):
            return None
        found = read_json(path)
        pid = int(found["pid"])
        # kill() of 0 or a negative number would reach a group of processes.
        if found["host"] != socket.gethostname()[:64] or pid <= 1:
            return None
        return pid if pids is None or pid in pids else None
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None
