"""Time of the training thread: seconds by phase. Each moment counts once, for the innermost phase.

On a GPU, where the host only enqueues work, it is that of the device: see stream_clock.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, get_args

Phase = Literal["data", "forward", "backward", "exchange", "optimizer", "other", "evaluation", "saving"]
"""exchange: waiting for other ranks; other: the loop itself, logs, observers."""
PHASES: tuple[Phase, ...] = get_args(Phase)
OF_STEPS = PHASES[:6]
BUSY: tuple[Phase, ...] = ("data", "forward", "backward", "optimizer", "other")
"""Phases of a step in which a rank does not wait for others."""
ABSORBING = ("evaluation", "saving")
"""Phases that include the time of phases inside them."""
SCHEDULER = Path("/proc/thread-self/schedstat")


@dataclass(frozen=True)
class PhaseSeconds:
    """Seconds measured up to a moment; the difference of two is the time between them."""

    phases: Mapping[Phase, float]
    background: float
    """Seconds in which gradients were exchanged beside the backward pass."""
    delayed: float
    """Seconds in which the thread could have run, but other processes had its core."""

    def __sub__(self, before: "PhaseSeconds") -> "PhaseSeconds":
        return PhaseSeconds(
            {name: seconds - before.phases[name] for name, seconds in self.phases.items()},
            self.background - before.background,
            self.delayed - before.delayed,
        )


class PhaseClock:
    """Clock of the thread that makes it: seconds by phase."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.background = 0.0
        """Seconds for which another thread, that of the gradient exchange, was in the phase `exchange`."""
        self.phase: Phase = "other"
        self.since = self.moment()
        """Moment when this phase began, and the one before it ended."""

    def moment(self, *, beside: bool = False) -> Any:
        """Return the present moment; with `beside`, for what happens beside the measured thread."""
        return time.perf_counter()

    def count(self, start: Any, end: Any, target: Phase | None, *, source: Phase | None = None) -> None:
        """Count the time between two moments for a phase, instead of for another; without one, for the background."""
        self.add(end - start, target, source)

    def add(self, seconds: float, target: Phase | None, source: Phase | None) -> None:
        if target is None:
            self.background += seconds
        else:
            self.seconds[target] += seconds
        if source is not None:
            self.seconds[source] -= seconds

    def measures(self, phase: Phase) -> bool:
        """Return whether a phase that begins in this thread takes the measured time."""
        return self.thread == threading.get_ident()

    def is_beside(self) -> bool:
        """Return whether work that begins in this thread runs beside the measured work."""
        return not self.measures("other")

    def switch(self, phase: Phase) -> Phase:
        """Count the time from here on for another phase -> the phase before."""
        now, before = self.moment(), self.phase
        self.count(self.since, now, before)
        self.phase, self.since = phase, now
        return before

    def so_far(self) -> "PhaseSeconds":
        """Return the seconds measured up to now; called by the measured thread."""
        self.switch(self.phase)
        return PhaseSeconds(dict(self.seconds), self.background, scheduling_delay())


_clocks: list[PhaseClock] = []
_annotations: list[Callable[[str], AbstractContextManager[None]]] = []


@contextmanager
def annotated(annotation: Callable[[str], AbstractContextManager[None]]) -> Iterator[None]:
    """Enter `annotation(name)` around each phase inside the block, for a profiler."""
    _annotations[:] = [annotation]
    try:
        yield
    finally:
        _annotations.clear()


def start(clock: PhaseClock | None = None) -> PhaseClock:
    """Measure this thread from here on, and no other; by a clock of its own if there is none."""
    _clocks[:] = [clock or PhaseClock()]
    return _clocks[0]


def running() -> PhaseClock:
    """Return the clock that `start` has set."""
    return _clocks[0]


def stop() -> None:
    _clocks.clear()


class phase:  # noqa: N801 (a context manager, several of them in a step: contextlib's takes four times as long)
    """Count a block for a phase, where the measured thread runs it."""

    __slots__ = ("annotation", "before", "clock", "name", "start")

    def __init__(self, name: Phase) -> None:
        self.name = name
        self.clock: PhaseClock | None = None
        self.annotation: AbstractContextManager[None] | None = None
        self.start: Any = None

    def __enter__(self) -> None:
        clock = _clocks[0] if _clocks else None
        if clock is None:
            return
        if _annotations:
            self.annotation = _annotations[0](self.name)
            self.annotation.__enter__()
        if self.name == "exchange" and clock.is_beside():
            self.start = clock.moment(beside=True)
        if clock.measures(self.name) and clock.phase not in ABSORBING:
            self.clock, self.before = clock, clock.switch(self.name)

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        if self.annotation is not None:
            self.annotation.__exit__(None, None, None)
        if self.clock is not None:
            self.clock.switch(self.before)
        if self.start is not None and _clocks:
            _clocks[0].count(self.start, _clocks[0].moment(beside=True), None)


def moment() -> Any:
    """Return the present moment, for `move_end`; None where nothing is measured."""
    return _clocks[0].moment() if _clocks else None


def move_end(moment: Any, source: Phase, target: Phase) -> None:
    """Count the phase that just ended for another one from a moment on, which was found out later."""
    if _clocks and moment is not None:
        _clocks[0].count(moment, _clocks[0].since, target, source=source)


def scheduling_delay() -> float:
    """Return the seconds for which this thread could have run, but other processes had its core; 0 where unknown."""
    with suppress(OSError, ValueError, IndexError):
        return int(SCHEDULER.read_text().split()[1]) / 1e9
    return 0.0
