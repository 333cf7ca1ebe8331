"""Child processes end with their parent: by PR_SET_PDEATHSIG, or because the parent kills them."""

import ctypes
import faulthandler
import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

import psutil

from lockstep.base import ctrl_c
from lockstep.base.errors import Interrupted, PeerLost

LAUNCHER = "--launcher"
"""Worker option, followed by the launcher's process id."""
FORK_SERVER = "lockstep-fork"
"""The name of the process that workers are forked from."""
PR_SET_PDEATHSIG = 1
"""From <sys/prctl.h>: set the signal that this process gets when its parent ends."""
STDERR = 2
"""File descriptor to which a crash in native code writes the Python stacks."""
PR_SET_NAME = 15
"""From <sys/prctl.h>: set the name that `top` and `ps -o comm` show, of at most 15 bytes."""
began: float | None = None
"""Start time of this process (seconds since 1970), if it is a command or another process did a part of the start."""


def end_with_parent(name: str, parent: int | None = None) -> None:
    """Have this process get a signal when the thread that started it ends (Linux only); exit at once if `parent` has
    ended already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.Signals[name])
        if parent is not None and os.getppid() != parent:
            os._exit(PeerLost.exit_code)


def name_process(name: str) -> None:
    """Set the name of this process in `top` (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode())


def rank_name(rank: str) -> str:
    """Return the name of a worker's process, short enough for four digits."""
    return f"lockstep-r{rank}"


def worker_options() -> tuple[str, ...]:
    """Return the options that tell a worker when its run was launched, and by which process: this one. The first run
    of a command begins with the command."""
    global began
    first, began = began or time.time(), None
    return "--began", f"{first:.3f}", LAUNCHER, str(os.getpid())


def age_seconds() -> float:
    """Return the seconds since the start of this process, imports included."""
    return time.time() - (began or psutil.Process().create_time())


def begin(argv: Sequence[str]) -> None:
    """Prepare a worker before its slow imports: end it with its launcher, and leave messages about Ctrl-C to the
    launcher. See has_imported."""
    gc.disable()  # collections would take a tenth of the time of the imports
    faulthandler.enable(STDERR)
    name_process(rank_name(os.environ.get("RANK", "0")))
    os.environ.pop("PYTHONSAFEPATH", None)  # set for this process, not for those that the user's code starts
    if LAUNCHER in argv:
        ctrl_c.exit_silently(Interrupted.exit_code)
        end_with_parent("SIGKILL", int(argv[argv.index(LAUNCHER) + 1]))
    elif "RANK" in os.environ:
        ctrl_c.exit_silently(Interrupted.exit_code)
    else:
        ctrl_c.exit_at_once()


def has_imported() -> None:
    """Resume garbage collection, which skips what has been imported."""
    gc.freeze()
    gc.enable()


class Started(Protocol):
    """A process that was started here, with the methods of subprocess.Popen that are used."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def terminate(self) -> None: ...

    def kill(self) -> None: ...


def end_family(parent: Started, *, grace_seconds: float) -> None:
    """Terminate a running process; after the grace period kill it and all its descendants."""
    if parent.poll() is not None:
        return
    with suppress(psutil.Error):
        descendants = psutil.Process(parent.pid).children(recursive=True)
        parent.terminate()
        with suppress(subprocess.TimeoutExpired):
            parent.wait(grace_seconds)
        for process in descendants:
            with suppress(psutil.Error):
                process.kill()
    parent.kill()
    parent.wait()
