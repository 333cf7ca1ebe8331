"""Events that a run publishes, and the bus that delivers them to observers."""

import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True, kw_only=True)
class Preparing:
    """Data or a pretrained model is being prepared; `done` of `total` units are."""

    what: str
    done: int
    total: int


@dataclass(frozen=True, kw_only=True)
class RunStarted:
    """Everything is built; the first step follows."""

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
    """An optimizer step is done; `values` is set on logged steps only (reading it waits for the device)."""

    step: int
    """Steps done so far, including this one."""
    epoch: int
    values: Mapping[str, float] = field(default_factory=dict)
    chain: str = ""
    """On logged steps: digest of loss, gradient norm and learning rate of all steps so far, 16 hex digits."""


@dataclass(frozen=True, kw_only=True)
class Evaluating:
    """An evaluation in training has measured `done` of `total` micro-batches."""

    step: int
    done: int
    total: int


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
    """The state of a step is about to be saved: observers must flush what they observed up to it."""

    step: int


@dataclass(frozen=True, kw_only=True)
class CheckpointSaved:
    """A checkpoint is complete on disk; training may be some steps ahead by now."""

    step: int
    folder: Path
    seconds: float
    """From copying the state to the end of writing."""
    stall_seconds: float
    """How long training was blocked."""


@dataclass(frozen=True, kw_only=True)
class Warned:
    """Something that does not stop the run but that the user should know."""

    message: str


@dataclass(frozen=True, kw_only=True)
class RunEnded:
    """The last event of a run, however it ended; `summary` is what summary.json holds."""

    status: str
    summary: Mapping[str, Any]


class Observer(Protocol):
    """A subscriber: progress, TensorBoard, a class of the user's."""

    def notice(self, event: object) -> None:
        """Handle an event; unknown types must be ignored."""

    def close(self) -> None:
        """Flush and release everything; called once."""


class Bus:
    """Delivers every published event to every observer, in the order of subscription."""

    def __init__(self) -> None:
        self.observers: list[Observer] = []

    def subscribe(self, observer: Observer) -> None:
        """Add an observer; it receives events published from now on."""
        self.observers.append(observer)

    def publish(self, event: object) -> None:
        """Deliver an event. An observer that fails is removed with a warning: observing never ends a run."""
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
            with suppress(OSError):  # a full disk; nothing is left to be written
                self.observers.pop().close()
