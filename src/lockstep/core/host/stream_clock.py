"""Time of a GPU by phase; the clock of the host would only measure how long it takes to enqueue work."""

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.cuda import Event

from lockstep.core.host.phases import Phase, PhaseClock, PhaseSeconds

MOST_SPANS = 4096
"""Number of unread spans above which those that are over are read at once, without a wait."""


class StreamClock(PhaseClock):
    """Seconds by phase of the stream that computes, from events at the borders of phases; `background`: those of other
    streams. Waiting, for another stream or for the host, counts for the phase in which the stream waits.

    Time counts once the stream has passed it, so `so_far` may lag behind; the host waits for nothing.
    """

    def __init__(self, stream: Any, current: Callable[[], Any], event: Callable[[], Event]) -> None:
        """`stream`: the one that computes; `current`: returns the calling thread's; `event`: makes an event."""
        self.stream, self.current, self.event = stream, current, event
        self.spans: deque[tuple[Event, Event, Phase | None, Phase | None]] = deque()
        super().__init__()

    def moment(self, *, beside: bool = False) -> Event:
        event = self.event()
        event.record(self.current() if beside else self.stream)
        return event

    def count(self, start: Event, end: Event, target: Phase | None, *, source: Phase | None = None) -> None:
        self.spans.append((start, end, target, source))
        if len(self.spans) > MOST_SPANS:
            self._read()

    def measures(self, phase: Phase) -> bool:
        """Include a wait in autograd's thread, which runs the backward pass while the measured thread waits for it."""
        return phase == "exchange" or super().measures(phase)

    def is_beside(self) -> bool:
        return bool(self.current() != self.stream)

    def so_far(self) -> PhaseSeconds:
        self.switch(self.phase)
        self._read()
        return super().so_far()

    def _read(self) -> None:
        while self.spans and self.spans[0][1].query():
            start, end, target, source = self.spans.popleft()
            self.add(start.elapsed_time(end) / 1000, target, source)


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has done what is enqueued; nothing is on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def clock_of(device: torch.device) -> PhaseClock:
    """Return a clock for this thread's work on a device."""
    if device.type != "cuda":
        return PhaseClock()
    current = partial(torch.cuda.current_stream, device)
    return StreamClock(current(), current, partial(Event, enable_timing=True))
