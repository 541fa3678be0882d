"""
Run a program as on Windows, as far as Linux can simulate it: `python tests/like_windows.py PROGRAM
ARGUMENTS`. The modules, functions and signals that Windows lacks are removed for the project's own
code, and those that Windows has instead are simulated with fcntl and /proc. Python's own modules
and torch stay those of Linux.
"""
import asyncio  # noqa: F401
import concurrent.futures.process  # noqa: F401
import ctypes
import fcntl
import os
import runpy
import select
import signal
import sys
import types
from pathlib import Path

MODULES = ("fcntl", "resource", "termios", "pwd", "grp", "pty", "tty", "syslog")
FUNCTIONS = ("fork", "forkpty", "getuid", "geteuid", "getgid", "getegid", "getpgid", "getpgrp",
             "setsid", "killpg", "nice", "pread", "pwrite", "sched_getaffinity", "sysconf", "uname",
             "statvfs", "mkfifo", "getloadavg", "initgroups", "wait3", "wait4")
FLAGS = ("O_NONBLOCK", "O_CLOEXEC", "O_DIRECTORY", "O_NOFOLLOW", "O_SYNC")
SIGNALS = ("SIGHUP", "SIGQUIT", "SIGKILL", "SIGUSR1", "SIGUSR2", "SIGXCPU", "SIGALRM", "SIGCHLD",
           "SIGPIPE", "SIGSTOP", "SIGTSTP")
real = types.SimpleNamespace(kill=os.kill, lockf=fcntl.lockf, open=os.open, isdir=os.path.isdir)


def locking(handle, mode, size):
    """msvcrt.locking: lock bytes from the file's position on, for this process alone."""
    try:
        real.lockf(handle, fcntl_flags, size, os.lseek(handle, 0, os.SEEK_CUR))
    except BlockingIOError as e:
        raise PermissionError(13, "Permission denied") from e


fcntl_flags = fcntl.LOCK_EX | fcntl.LOCK_NB


def kill(pid, number):
    """os.kill: end the process at any signal but Ctrl-C."""
    assert number == signal.SIGTERM, f"os.kill({pid}, {number})"
    real.kill(pid, number)


def in_use(path):
    """Return whether this process has path, or a file in it, open or mapped into memory."""
    held = [os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
    held += [line.split(maxsplit=5)[5]
             for line in Path("/proc/self/maps").read_text().splitlines() if "/" in line]
    path = os.path.realpath(path)
    return any(name == path or name.startswith(path + "/") for name in held)


def refusing(call):
    """os.unlink, os.rename and os.replace: refuse files that are open or mapped."""
    def checked(*paths, **options):
        for path in paths:
            if in_use(path):
                raise PermissionError(13, "it is open", str(path))
        return call(*paths, **options)
    return checked


def open_files(path, flags, *arguments, **options):
    """os.open: refuse folders."""
    if real.isdir(path) and not options:  # on Linux, shutil.rmtree opens folders with dir_fd
        raise PermissionError(13, "it is a folder", str(path))
    return real.open(path, flags, *arguments, **options)


class Kernel:
    """The functions of kernel32.dll that the project calls. The handle of a process is its id."""

    def __init__(self, *arguments, **options):
        def open_process(access, inherit, pid):
            return pid.value if Path(f"/proc/{pid.value}").exists() else 0

        def exit_code(process, code):
            code._obj.value = 259  # STILL_ACTIVE: the process runs
            return 1

        def memory(process, counters, size):
            assert size == 72
            counters._obj.working_set, counters._obj.peak_working_set = 5 << 20, 6 << 20
            return 1

        self.OpenProcess, self.GetExitCodeProcess, self.K32GetProcessMemoryInfo = (
            open_process, exit_code, memory)
        self.CloseHandle = lambda process: 1

        def current():
            return -1
        self.GetCurrentProcess = current


def become_windows():
    """Remove what Windows lacks, and add what Windows has instead."""
    for name in MODULES:
        sys.modules[name] = None
    for module, names in (os, FUNCTIONS + FLAGS), (signal, SIGNALS), (select, ("poll", "epoll")):
        for name in names:
            if hasattr(module, name):
                delattr(module, name)
    os.kill, os.open, os.O_BINARY = kill, open_files, 0
    os.unlink, os.rename, os.replace = map(refusing, (os.unlink, os.rename, os.replace))
    ctypes.WinDLL, ctypes.get_last_error = Kernel, lambda: 87
    sys.modules["msvcrt"] = types.SimpleNamespace(locking=locking, LK_NBLCK=2)


if __name__ == "__main__":
    import torch._dynamo  # noqa: F401 (it and its own imports stay as on Linux)
    become_windows()
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
