"""Slots for the processes of a machine with launch.recovery=live: when each is started, and started again."""

import math
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.base import storage

BACK_OFF_SECONDS = 0.5
"""Delay of a process's start after FREE_STARTS within an hour; twice as long before each further one."""
MOST_BACK_OFF_SECONDS = 30.0
HOUR_SECONDS = 3600.0
MOST_STARTS = 100
"""Limit of a process's starts within an hour; after it the others go on without it."""
FREE_STARTS = 20
"""Number of a process's starts within an hour that are not delayed."""
RESIZE = "resize"
"""File in a run's folder with the requested number of processes per machine."""


@dataclass(kw_only=True)
class Slot:
    """The place of one process; one that is started again has the slot of the lost one."""

    starts: deque[float] = field(default_factory=deque)
    """Times of the starts within the last hour."""
    total: int = 0
    due: float | None = None
    """Time of the next start, if any."""
    is_closed: bool = False
    """Whether `lockstep resize` has removed it."""
    is_spare: bool = False
    """Whether its process waits to take the place of a lost one."""

    def begin(self) -> int:
        """Note a start -> its number."""
        self.total += 1
        self.due = None
        self.starts.append(time.monotonic())
        return self.total

    def is_due(self) -> bool:
        return self.due is not None and time.monotonic() >= self.due

    def schedule(self, *, has_failed: bool = False) -> None:
        """Schedule the next start: at once, or later after a failure or many starts."""
        now = time.monotonic()
        while self.starts and now - self.starts[0] > HOUR_SECONDS:
            self.starts.popleft()
        often = len(self.starts) - FREE_STARTS
        if len(self.starts) < MOST_STARTS and not self.is_closed:
            wait = min(BACK_OFF_SECONDS * 2**often, MOST_BACK_OFF_SECONDS) if often >= 0 else 0.0
            self.due = now + (MOST_BACK_OFF_SECONDS if has_failed else wait)


def requested_size(folder: Path) -> int | None:
    """Return the number of processes per machine that `lockstep resize` asks for, if any."""
    with suppress(OSError, ValueError):
        return max(1, int(storage.read_regular(folder / RESIZE, 32)))
    return None


def in_whole_replicas(wanted: int, replica_size: int, machines: int) -> int:
    """Round up to a number of processes on each of so many machines that form whole replicas together."""
    multiple = replica_size // math.gcd(replica_size, machines)
    return -(-wanted // multiple) * multiple


def resize(slots: list[Slot], wanted: int, ranked: Sequence[int]) -> None:
    """Open or close slots until so many are open, spares not counted. Those that train, in the order of their ranks,
    are `ranked`: the last of them close first."""
    active = [number for number, slot in enumerate(slots) if not slot.is_spare]
    order = [*(number for number in ranked if number in active), *(n for n in active if n not in ranked)]
    while len(order) < wanted:
        order.append(len(slots))
        slots.append(Slot(is_closed=True))
    for place, number in enumerate(order):
        slot, is_closed = slots[number], place >= wanted
        if slot.is_closed != is_closed:
            slot.is_closed, slot.due = is_closed, None if is_closed else time.monotonic()
