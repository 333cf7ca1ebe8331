"""A process that is of no use without its parent ends with it, also when the parent is killed."""

import ctypes
import signal
import sys

PR_SET_PDEATHSIG = 1
"""Of <sys/prctl.h>: the signal that a process gets when its parent ends."""


def end_with_parent(name: str) -> None:
    """Get this signal as soon as the thread that has started this process ends (on Linux; elsewhere nothing)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.Signals[name])
