"""Where the training thread's time goes: seconds by phase. Each moment counts once, for the innermost phase.

On a GPU this is the time of the host, which only enqueues work: waiting for the device counts where it happens.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, get_args

Phase = Literal["data", "forward", "backward", "exchange", "optimizer", "other", "evaluation", "saving"]
"""exchange: waiting for other ranks; other: the loop itself, logs, observers."""
PHASES: tuple[Phase, ...] = get_args(Phase)
OF_STEPS = PHASES[:6]
"""Those that make up a step."""
BUSY: tuple[Phase, ...] = ("data", "forward", "backward", "optimizer", "other")
"""Those of a step in which a rank does not wait for others."""
ABSORBING = ("evaluation", "saving")
"""What happens in them counts for them."""
SCHEDULER = Path("/proc/thread-self/schedstat")


@dataclass(frozen=True)
class PhaseSeconds:
    """What was measured up to a moment; two of them give what was measured between."""

    phases: Mapping[Phase, float]
    background: float
    """In which gradients were exchanged beside the backward pass."""
    delayed: float
    """In which the thread could have run, but other processes had its core."""

    def __sub__(self, before: "PhaseSeconds") -> "PhaseSeconds":
        return PhaseSeconds(
            {name: seconds - before.phases[name] for name, seconds in self.phases.items()},
            self.background - before.background,
            self.delayed - before.delayed,
        )


class PhaseClock:
    """Seconds by phase of the thread that made it."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.background = 0.0
        """Seconds for which another thread, that of the gradient exchange, was in the phase `exchange`."""
        self.phase: Phase = "other"
        self.since = time.perf_counter()
        """When this phase began, and the one before it ended."""

    def switch(self, phase: Phase) -> Phase:
        """Count the time from here on for another phase -> the phase before."""
        now, before = time.perf_counter(), self.phase
        self.seconds[before] += now - self.since
        self.phase, self.since = phase, now
        return before

    def so_far(self) -> "PhaseSeconds":
        """What was measured up to now; to be called by the measured thread."""
        self.switch(self.phase)
        return PhaseSeconds(dict(self.seconds), self.background, scheduling_delay())


_clocks: list[PhaseClock] = []
_annotations: list[Callable[[str], AbstractContextManager[None]]] = []


@contextmanager
def annotated(annotation: Callable[[str], AbstractContextManager[None]]) -> Iterator[None]:
    """Enter `annotation(name)` around each phase meanwhile, for a profiler."""
    _annotations[:] = [annotation]
    try:
        yield
    finally:
        _annotations.clear()


def start() -> PhaseClock:
    """Measure this thread from here on, and no other."""
    _clocks[:] = [PhaseClock()]
    return _clocks[0]


def running() -> PhaseClock:
    """The clock that was started."""
    return _clocks[0]


def stop() -> None:
    """Measure nothing any more."""
    _clocks.clear()


class phase:  # noqa: N801 (a context manager, several of them in a step: contextlib's takes four times as long)
    """Count a block for a phase, where the measured thread runs it."""

    __slots__ = ("annotation", "before", "clock", "name", "start")

    def __init__(self, name: Phase) -> None:
        self.name = name
        self.clock: PhaseClock | None = None
        self.annotation: AbstractContextManager[None] | None = None
        self.start = 0.0

    def __enter__(self) -> None:
        clock = _clocks[0] if _clocks else None
        if clock is None:
            return
        if _annotations:
            self.annotation = _annotations[0](self.name)
            self.annotation.__enter__()
        if clock.thread != threading.get_ident():
            self.start = time.perf_counter()
        elif clock.phase not in ABSORBING:
            self.clock, self.before = clock, clock.switch(self.name)

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        if self.annotation is not None:
            self.annotation.__exit__(None, None, None)
        if self.clock is not None:
            self.clock.switch(self.before)
        elif self.start and self.name == "exchange" and _clocks:
            _clocks[0].background += time.perf_counter() - self.start


def move_end(moment: float, source: Phase, target: Phase) -> None:
    """Count the phase that just ended for another one from a moment on, which was found out later."""
    if _clocks and (seconds := _clocks[0].since - moment) > 0:
        _clocks[0].seconds[source] -= seconds
        _clocks[0].seconds[target] += seconds


def scheduling_delay() -> float:
    """Seconds for which this thread could have run, but other processes had its core; 0 where the system tells none."""
    with suppress(OSError, ValueError, IndexError):
        return int(SCHEDULER.read_text().split()[1]) / 1e9
    return 0.0
