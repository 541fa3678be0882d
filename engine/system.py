"""
One interface for what differs between POSIX and Windows: locks, signals, processes, memory.
"""
import ctypes
import os
import signal
import time

try:
    import fcntl
except ModuleNotFoundError:
    import msvcrt
    fcntl = None

IS_WINDOWS = fcntl is None
# Other processes cannot read a byte that is locked on Windows, so the lock is on one beyond the end
# of any file.
LOCKED_BYTE = 1 << 30
# Signals that ask a program to stop, beside Ctrl-C: SIGTERM comes from `kill` or a job queue,
# SIGHUP from a terminal that closes, SIGXCPU at the limit of `ulimit -t`, SIGBREAK from Ctrl-Break
# on Windows.
STOPS = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP", "SIGXCPU", "SIGBREAK")
         if hasattr(signal, name)]
SAVE = getattr(signal, "SIGUSR1", None)  # asks a training to save and continue; None on Windows
# Flags of os.open for reading bytes. It does not wait for the writer of a pipe, and no child
# process inherits the file.
READ = os.O_RDONLY | sum(getattr(os, name, 0) for name in ("O_BINARY", "O_NONBLOCK", "O_CLOEXEC"))


# ---- files ---------------------------------------------------------------------------------------

def lock(file, wait=False):
    """
    Lock an open file against other processes, until it is closed or this process ends. Raises
    BlockingIOError at once if another process holds the lock, unless `wait`; OSError if the file
    system has no locks.
    """
    if not IS_WINDOWS:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        return
    handle = file.fileno()
    before = os.lseek(handle, 0, os.SEEK_CUR)
    try:
        while True:
            os.lseek(handle, LOCKED_BYTE, os.SEEK_SET)
            try:
                msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
                return
            except PermissionError as e:
                if not wait:
                    raise BlockingIOError(e.errno, e.strerror) from None
            time.sleep(0.1)
    finally:
        os.lseek(handle, before, os.SEEK_SET)


def to_disk(path):
    """Force a file, or a folder's list of names, to disk. On Windows, do nothing for a folder."""
    if IS_WINDOWS and os.path.isdir(path):
        return
    handle = os.open(path, os.O_RDWR | os.O_BINARY if IS_WINDOWS else os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove_open(file):
    """Remove an open file and close it."""
    if IS_WINDOWS:  # it cannot remove an open file
        file.close()
    os.unlink(file.name)
    file.close()


# ---- processes -----------------------------------------------------------------------------------

def is_running(pid):
    """Return whether a process with this id runs on this machine."""
    if IS_WINDOWS:  # os.kill would end the process
        return is_running_on_windows(pid)
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass  # it exists, and belongs to another user
    return True


def is_running_on_windows(pid):
    """Implement is_running() on Windows."""
    query_limited_information, access_denied, still_active = 0x1000, 5, 259
    if not 0 < pid < 1 << 32:
        return False
    kernel = ctypes.WinDLL("kernel32", use_last_error=True)
    kernel.OpenProcess.restype = ctypes.c_void_p
    process = kernel.OpenProcess(query_limited_information, False, ctypes.c_uint32(pid))
    if not process:
        return ctypes.get_last_error() == access_denied  # it exists, and belongs to another user
    code = ctypes.c_uint32()
    kernel.GetExitCodeProcess(ctypes.c_void_p(process), ctypes.byref(code))
    kernel.CloseHandle(ctypes.c_void_p(process))
    return code.value == still_active


def kill(pid):
    """End a process at once."""
    # Windows has no SIGKILL, but there SIGTERM ends a process at once.
    os.kill(pid, getattr(signal, "SIGKILL", signal.SIGTERM))


def cores():
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


# ---- memory --------------------------------------------------------------------------------------

class MemoryCounters(ctypes.Structure):
    """PROCESS_MEMORY_COUNTERS of Windows."""
    _fields_ = [("size", ctypes.c_uint32), ("page_faults", ctypes.c_uint32)] + [
        (name, ctypes.c_size_t) for name in (
            "peak_working_set", "working_set", "peak_paged_pool", "paged_pool",
            "peak_nonpaged_pool", "nonpaged_pool", "pagefile", "peak_pagefile")]


def process_memory():
    """On Windows, return the memory (working set) of this process now and at its peak, in bytes."""
    kernel, counters = ctypes.WinDLL("kernel32"), MemoryCounters()
    kernel.GetCurrentProcess.restype = ctypes.c_void_p
    kernel.K32GetProcessMemoryInfo(ctypes.c_void_p(kernel.GetCurrentProcess()),
                                   ctypes.byref(counters), ctypes.sizeof(counters))
    return counters.working_set, counters.peak_working_set
