"""Facts that the run publishes, and the bus that carries them to whoever watches."""

import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True, kw_only=True)
class Preparing:
    """Data or a pretrained model is being made ready; `done` of `total` units of it are."""

    what: str
    done: int
    total: int


@dataclass(frozen=True, kw_only=True)
class RunStarted:
    """Everything is assembled; the next event is the first step."""

    name: str
    folder: Path
    resumed_step: int
    """Steps already done by an earlier process (0 = a fresh run)."""
    total_steps: int
    steps_per_epoch: int
    world_size: int
    device: str
    parameters: int
    train_samples: int
    notes: tuple[str, ...] = ()
    """What the user should know before it starts, one sentence each."""


@dataclass(frozen=True, kw_only=True)
class StepDone:
    """One optimizer step is done; `values` is filled on logged steps only (reading it waits for the device)."""

    step: int
    """Steps done so far, this one included (the first step of a run publishes 1)."""
    epoch: int
    values: Mapping[str, float] = field(default_factory=dict)
    chain: str = ""
    """On logged steps: 16 hex digits that stand for loss, gradient norm and learning rate of every step so far."""


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """The model was measured on the test split."""

    step: int
    epoch: int
    samples: int
    values: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class EpochDone:
    """Every training sample has been seen once more."""

    epoch: int
    step: int


@dataclass(frozen=True, kw_only=True)
class SaveStarted:
    """The state of a step is about to be saved: what was observed up to it must not be lost any more."""

    step: int


@dataclass(frozen=True, kw_only=True)
class CheckpointSaved:
    """A checkpoint is complete on disk; training may be some steps further by now."""

    step: int
    folder: Path
    seconds: float
    """From the copy of the state to the end of writing."""
    stall_seconds: float
    """For how long training stood still."""


@dataclass(frozen=True, kw_only=True)
class Warned:
    """Something went wrong that does not stop the run."""

    message: str


@dataclass(frozen=True, kw_only=True)
class RunEnded:
    """The last event of a run, however it ended; `summary` is what summary.json holds."""

    status: str
    summary: Mapping[str, Any]


class Observer(Protocol):
    """Whoever wants to know: progress, TensorBoard, a user's own file."""

    def notice(self, event: object) -> None:
        """Take one event; unknown kinds are to be ignored."""

    def close(self) -> None:
        """Flush and let go; called once."""


class Bus:
    """Hands every published event to every subscriber, in the order of subscription."""

    def __init__(self) -> None:
        self.observers: list[Observer] = []

    def subscribe(self, observer: Observer) -> None:
        """Add an observer; it sees events published from now on."""
        self.observers.append(observer)

    def publish(self, event: object) -> None:
        """Tell every observer. One that fails is told no more, and the others hear of it: watching never ends a run."""
        for observer in list(self.observers):
            try:
                observer.notice(event)
            except Exception as error:
                self.observers.remove(observer)
                name = f"{type(observer).__module__}.{type(observer).__name__}"
                where = traceback.extract_tb(error.__traceback__)[-1]
                what = f"{type(error).__name__}: {error} ({where.filename}:{where.lineno})"
                self.publish(Warned(message=f"the observer {name} failed and is left out from here on: {what}"))

    def close(self) -> None:
        while self.observers:
            with suppress(OSError):  # a full disk; whatever was to be said has been
                self.observers.pop().close()
