"""A line on stderr while a command loads what it needs and has said nothing yet. Imports nothing slow itself."""

import os
import signal
from types import FrameType

SECONDS = 0.7
TEXT = "loading ...\n"
OF_A_GROUP = ("LOCAL_RANK", "SLURM_PROCID")
"""Variables of a process that is one of many with the same command."""
_is_armed = [False]


def arm() -> None:
    """Write the line after SECONDS; a timer, since a thread would forbid forks."""
    is_first = all(os.environ.get(name, "0") == "0" for name in OF_A_GROUP)  # noqa: TID251 (before anything is loaded)
    if hasattr(signal, "setitimer") and is_first:
        _is_armed[0] = True
        signal.signal(signal.SIGALRM, _write)
        signal.setitimer(signal.ITIMER_REAL, SECONDS)


def disarm() -> None:
    """There is something else to read now."""
    if _is_armed[0]:
        _is_armed[0] = False
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)


def _write(_: int, __: FrameType | None) -> None:
    if _is_armed[0]:
        disarm()
        os.write(2, TEXT.encode())
