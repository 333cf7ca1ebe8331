"""What a user's code has started and not ended, once the run is over: waited for a while, named, ended."""

import multiprocessing
import threading
import time

import psutil

from lockstep.base.escaping import named

PATIENCE_SECONDS = 5.0
"""An upload that was begun at the end of a run may need a while."""
LOOK_SECONDS = 0.05
HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver", "_inductor")
"""In the command lines of processes that end with this one by themselves."""
MOST_NAMED = 5


def ended(seconds: float) -> list[str]:
    """Wait so long for processes and threads that nobody has ended, then end the processes -> what had to be ended or
    cannot be. Python itself would wait for ever for most of them, and so would who waits for this process's output."""
    end = time.monotonic() + seconds
    while (left := _processes()) or _threads():
        if time.monotonic() >= end:
            break
        psutil.wait_procs(left, timeout=LOOK_SECONDS)
        time.sleep(0 if left else LOOK_SECONDS)
    words = [_words(process) for process in left]
    for process in left:
        process.kill()
    psutil.wait_procs(left, timeout=1)
    words += [f"thread {named(thread.name)}" for thread in _threads()]
    return [*words[:MOST_NAMED], *([f"{len(words) - MOST_NAMED} more"] if len(words) > MOST_NAMED else [])]


def has_threads() -> bool:
    """Whether the interpreter would wait for a thread before it ends."""
    return bool(_threads())


def _threads() -> list[threading.Thread]:
    own = (threading.main_thread(), threading.current_thread())
    return [thread for thread in threading.enumerate() if not thread.daemon and thread not in own]


def _processes() -> list[psutil.Process]:
    """Those below this one, but for those that multiprocessing ends by itself."""
    daemons = {process.pid for process in multiprocessing.active_children() if process.daemon}
    found = []
    for child in psutil.Process().children():
        try:
            is_own = child.pid in daemons or any(word in " ".join(child.cmdline()) for word in HELPERS)
            if not is_own and child.status() != psutil.STATUS_ZOMBIE:
                found += [child, *child.children(recursive=True)]
        except psutil.Error:
            continue
    return found


def _words(process: psutil.Process) -> str:
    try:
        return f"process {process.pid} ({named(' '.join(process.cmdline()))[:80]})"
    except psutil.Error:
        return f"process {process.pid}"
