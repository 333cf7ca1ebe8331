"""What happened in the last steps, for a process that takes over a run's files in the middle of it."""

import time
from dataclasses import asdict
from typing import Any

from lockstep.base.events import EpochDone, Evaluated, Steered, StepDone, TextSample, TextsGenerated

BACKLOG_SECONDS = 15.0
"""How old events are that a new rank 0 writes again: TensorBoard's writer keeps the last 10 s in memory."""
KINDS = {kind.__name__: kind for kind in (StepDone, Evaluated, EpochDone, TextsGenerated, Steered)}


class Backlog:
    """The events of the last steps, which every rank has, for the rank that takes over the files: those of a step are
    kept or dropped together, since the files are cut after whole steps."""

    def __init__(self, seconds: float = BACKLOG_SECONDS) -> None:
        self.seconds = seconds
        self.by_step: dict[int, list[Any]] = {}
        self._heard: dict[int, float] = {}
        """Step -> when its last event came."""

    def notice(self, event: object) -> None:
        if not isinstance(event, StepDone | Evaluated | EpochDone | TextsGenerated | Steered):
            return
        now = time.monotonic()
        if not isinstance(event, StepDone) or event.values:
            self.by_step.setdefault(event.step, []).append(event)
            self._heard[event.step] = now
        for old in sorted(self.by_step):
            if old >= event.step - 1 or now - self._heard[old] <= self.seconds:
                break
            del self.by_step[old], self._heard[old]

    def close(self) -> None:
        """Nothing is kept open."""

    @property
    def events(self) -> list[Any]:
        """In the order of steps."""
        return [event for step in sorted(self.by_step) for event in self.by_step[step]]

    @property
    def first_step(self) -> int | None:
        return min(self.by_step, default=None)

    def plain(self) -> list[list[Any]]:
        """As JSON."""
        return [[type(event).__name__, asdict(event)] for event in self.events]

    def missed(self, plain: list[list[Any]]) -> list[Any]:
        """Those of another rank that this one has not published."""
        own = {(type(event), event.step) for event in self.events}
        events = [_event(name, values) for name, values in plain]
        return [event for event in events if (type(event), event.step) not in own]


def _event(name: str, values: dict[str, Any]) -> Any:
    if name == TextsGenerated.__name__:
        values["samples"] = tuple(TextSample(**sample) for sample in values["samples"])
    return KINDS[name](**values)
