"""Events that a run publishes, and the bus that delivers them to observers."""

import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from lockstep.base.errors import masked
from lockstep.base.steering_requests import Request


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
    """Sentences that the user should read before the start."""
    goes_on: bool = False
    """Whether this process takes the place of another one in a run that has started already."""


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
class RankTimes:
    """Time that each rank spent in the `steps` steps up to a logged one; every tuple has a value per rank."""

    step: int
    steps: int
    seconds: Mapping[str, tuple[float, ...]]
    """Seconds by phase: data, forward, backward, exchange, optimizer, other. Evaluations and saves are not included."""
    delayed_seconds: tuple[float, ...]
    """Seconds in which the training thread could have run, but other processes had its core."""
    micro_batches: tuple[int, ...]
    memory_bytes: tuple[int, ...]
    """Peak memory of the process, or of its GPU."""
    gpus: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Figures of the ranks' GPUs from the driver, as far as it reports them for all: utilization_percent, watts, ..."""


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
class TextSample:
    """The beginning of a text, and what a language model generated after it."""

    prompt: str
    text: str


@dataclass(frozen=True, kw_only=True)
class TextsGenerated:
    """A language model has completed some beginnings of test samples: before the first step, and after evaluations."""

    step: int
    samples: tuple[TextSample, ...]


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
    """Seconds from copying the state to the end of writing."""
    stall_seconds: float
    """Seconds for which training was blocked."""


@dataclass(frozen=True, kw_only=True)
class Steered:
    """All ranks do what an observer has asked for (lockstep.Stop and the others); `step` is the last one before it."""

    step: int
    what: str


@dataclass(frozen=True, kw_only=True)
class Spiked:
    """The loss or the gradient norm of a step is far above those of the steps before."""

    step: int
    values: Mapping[str, tuple[float, float]]
    """loss or gradient_norm -> its value, and the median of the steps before."""
    run: str = ""
    """The run, for `lockstep replay`; empty for a script's own loop."""

    @property
    def text(self) -> str:
        """One line, with the command that shows the samples."""
        jumps = [
            f"the {name.replace('_', ' ')} jumped to {new:.4g} ({old:.4g} before)"
            for name, (new, old) in self.values.items()
        ]
        shows = f"; `lockstep replay {self.run} --step {self.step}` shows its samples" if self.run else ""
        return " and ".join(jumps) + shows


@dataclass(frozen=True, kw_only=True)
class Regrouped:
    """Training goes on with other processes: some were lost, or have joined."""

    step: int
    """Number of finished steps."""
    losses: Sequence[str]
    """Sentences for the user, one for each lost process."""
    joined: int
    world_size: int
    waiting: int = 0
    """Further processes, which do not train until there are enough for another replica."""
    seconds: float
    """Seconds for which training stood still."""

    @property
    def text(self) -> str:
        """A line for each loss, and one on how training goes on."""
        size = f"{self.world_size} process{'es' if self.world_size > 1 else ''} now"
        if self.waiting:
            size += f", {self.waiting} wait{'' if self.waiting > 1 else 's'} for the rest of a replica"
        joined = f"{self.joined} process{'es' if self.joined > 1 else ''} joined" if self.joined else ""
        left = "training goes on" if self.losses or not joined else ""
        what = " and ".join(part for part in (left, joined) if part)
        return "\n".join([*self.losses, f"after step {self.step}: {what}; {size}, {self.seconds:.2f} s lost"])


@dataclass(frozen=True, kw_only=True)
class Warned:
    """Something that does not stop the run but that the user should know."""

    message: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "message", masked(self.message))  # it is written into files


@dataclass(frozen=True, kw_only=True)
class RunEnded:
    """The last event of a run, however it ended; `summary` is what summary.json holds."""

    status: str
    summary: Mapping[str, Any]


class Observer(Protocol):
    """A subscriber: progress, TensorBoard, a class of the user's."""

    def notice(self, event: object) -> Request | Sequence[Request] | None:
        """Handle an event; unknown types must be ignored. What it returns is asked of the run."""

    def close(self) -> None:
        """Flush and release everything; called once. Subclasses that keep nothing open inherit this."""
        return  # a body of a docstring alone would be abstract to type checkers


class Bus:
    """Delivers every published event to every observer, in the order of subscription."""

    def __init__(self) -> None:
        self.observers: list[Observer] = []
        self.requests: list[tuple[str, Request]] = []
        """Requests since the run last read them, each with the name of its observer."""

    def subscribe(self, observer: Observer) -> None:
        """Add an observer; it receives events published from now on."""
        self.observers.append(observer)

    def publish(self, event: object) -> None:
        """Deliver an event. An observer that fails is removed with a warning: observing never ends a run."""
        for observer in list(self.observers):
            name = _name(observer)
            try:
                self._ask(name, observer.notice(event))
            except (Exception, KeyboardInterrupt, SystemExit) as error:  # signals are handled elsewhere
                self.observers.remove(observer)
                self._warn(f"the observer {name} failed and is left out from here on", error)

    def _warn(self, what: str, error: BaseException) -> None:
        where = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{where.filename}:{where.lineno}"
        self.publish(Warned(message=f"{what}: {type(error).__name__}: {error} ({place})"))

    def _ask(self, name: str, asked: Request | Sequence[Request] | None) -> None:
        """Keep what an observer has returned. Raises TypeError for anything but requests."""
        requests: list[Request] = []
        for request in [] if asked is None else asked if isinstance(asked, list | tuple) else [asked]:
            if not isinstance(request, Request):
                raise TypeError(
                    f"notice() returned {request!r}: it may return lockstep.Stop(), Save(), Evaluate(), "
                    "ScaleLearningRate(factor), a list of these, or None"
                )
            requests.append(request)
        self.requests += [(name, request) for request in requests]

    def close(self) -> None:
        """Close the observers. One that fails is named in a warning: the run has ended well without it."""
        while self.observers:
            observer = self.observers.pop()
            try:
                with suppress(OSError):  # a full disk; nothing is left to be written
                    observer.close()
            except (Exception, KeyboardInterrupt, SystemExit) as error:
                self._warn(f"the observer {_name(observer)} failed in close()", error)


def _name(observer: Observer) -> str:
    return f"{type(observer).__module__}.{type(observer).__name__}"
