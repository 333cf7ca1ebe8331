"""Line on the terminal while a command loads, before its first output. Imports nothing slow itself."""

import os
import signal
import sys
from types import FrameType

SECONDS = 0.7
TEXT = "loading ...\n"
_is_armed = [False]


def arm() -> None:
    """Write the line to stderr after SECONDS, where it is a terminal; a timer, since a thread would forbid forks."""
    if hasattr(signal, "setitimer") and sys.stderr.isatty():
        _is_armed[0] = True
        signal.signal(signal.SIGALRM, _write)
        signal.setitimer(signal.ITIMER_REAL, SECONDS)


def disarm() -> None:
    """Cancel the line, as there is other output now."""
    if _is_armed[0]:
        _is_armed[0] = False
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)


def _write(_: int, __: FrameType | None) -> None:
    if _is_armed[0]:
        disarm()
        os.write(2, TEXT.encode())
