"""Threads and child processes that the user's code left running at the end of a run."""

import multiprocessing
import threading
import time

import psutil

from lockstep.base.escaping_console import escape_name

PATIENCE_SECONDS = 5.0
"""An upload started at the end of a run may take a while."""
POLL_SECONDS = 0.05
HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver", "_inductor")
"""Words in the command lines of processes that exit with this one by themselves."""


def end_leftovers(seconds: float) -> list[str]:
    """Wait for child processes and threads to end, then kill the processes; describe what did not end by itself.

    Python would wait for most of them forever, and so would readers of this process's output.
    """
    end = time.monotonic() + seconds
    while (left := _processes()) or threads():
        if time.monotonic() >= end:
            break
        psutil.wait_procs(left, timeout=POLL_SECONDS)
        time.sleep(0 if left else POLL_SECONDS)
    names = [_describe(process) for process in left]
    for process in left:
        process.kill()
    psutil.wait_procs(left, timeout=1)
    names += [f"thread {escape_name(thread.name)}" for thread in threads()]
    return names


def threads() -> list[threading.Thread]:
    """List the threads for which the interpreter would wait before it exits."""
    own = (threading.main_thread(), threading.current_thread())
    return [thread for thread in threading.enumerate() if not thread.daemon and thread not in own]


def _processes() -> list[psutil.Process]:
    """List child processes, except those that multiprocessing ends by itself."""
    daemons = {process.pid for process in multiprocessing.active_children() if process.daemon}
    processes = []
    for child in psutil.Process().children():
        try:
            is_own = child.pid in daemons or any(word in " ".join(child.cmdline()) for word in HELPERS)
            if not is_own and child.status() != psutil.STATUS_ZOMBIE:
                processes += [child, *child.children(recursive=True)]
        except psutil.Error:
            continue
    return processes


def _describe(process: psutil.Process) -> str:
    try:
        return f"process {process.pid} ({escape_name(' '.join(process.cmdline()))[:80]})"
    except psutil.Error:
        return f"process {process.pid}"
