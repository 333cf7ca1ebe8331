"""Processes that are of no use without their parent end with it: by themselves, or because it sees to it."""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress

import psutil

from lockstep.base import ctrl_c
from lockstep.base.errors import Interrupted, PeerLost

LAUNCHER = "--launcher"
"""Among a process's arguments, before the id of the one that has started it."""
LOST = PeerLost.exit_code
PR_SET_PDEATHSIG = 1
"""Of <sys/prctl.h>: the signal that a process gets when its parent ends."""


def end_with_parent(name: str, parent: int | None = None) -> None:
    """Get this signal as soon as the thread that has started this process ends (on Linux; elsewhere nothing); end at
    once where that was `parent`, and it has gone already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.Signals[name])
        if parent is not None and os.getppid() != parent:
            os._exit(LOST)


def begin(argv: Sequence[str]) -> None:
    """What a process that a launcher has started does first, before it reads anything that takes time: it ends with
    that one, and leaves it to it to answer Ctrl-C."""
    os.environ.pop("PYTHONSAFEPATH", None)  # of the command that has started it, and not of what the user's code starts
    if LAUNCHER in argv:
        ctrl_c.exit_silently(Interrupted.exit_code)
        end_with_parent("SIGKILL", int(argv[argv.index(LAUNCHER) + 1]))
    elif "RANK" in os.environ:
        ctrl_c.exit_silently(Interrupted.exit_code)
    else:
        ctrl_c.exit_at_once()


def end_family(parent: "subprocess.Popen[bytes]", *, grace_seconds: float) -> None:
    """Ask a process to end if it still goes on; after a while kill it and all that it has started."""
    if parent.poll() is not None:
        return
    with suppress(psutil.Error):
        family = psutil.Process(parent.pid).children(recursive=True)
        parent.terminate()
        with suppress(subprocess.TimeoutExpired):
            parent.wait(grace_seconds)
        for process in family:
            with suppress(psutil.Error):
                process.kill()
    parent.kill()
    parent.wait()
