"""Requests of observers: decided on rank 0, written down, agreed by all ranks at the same step, repeated on a resume.

A request made in step s takes effect after step s + 1, on any number of processes. What was decided once is in
`steering.jsonl`: a run that goes back to a checkpoint repeats it at the same steps, and asks no observer again there.
Checkpoints hold the state of observers that have state_dict() and load_state_dict(state).
"""

import json
import math
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field

from lockstep.base import storage
from lockstep.base.errors import CheckpointError
from lockstep.base.events import Bus, Observer, Warned
from lockstep.base.steering_requests import Evaluate, Request, Save, ScaleLearningRate, Stop
from lockstep.training.state import TrainState

FILE = "steering.jsonl"
FLAGS = 4
"""Stop, save, evaluate, and the bits of a factor of the learning rate."""
NO_REQUEST = [0] * FLAGS


class Decision(BaseModel):
    """Line of the file: the requests of a step."""

    step: Annotated[int, Field(ge=0, le=10**12)]
    by: str = ""
    """Names of the observers."""
    stop: bool = False
    save: bool = False
    evaluate: bool = False
    factor: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0

    def flags(self) -> list[int]:
        """Return flags to all-reduce to the largest: the bits of positive floats are in their order, above 0."""
        bits = struct.unpack("<q", struct.pack("<d", self.factor))[0] if self.factor != 1.0 else 0
        return [self.stop, self.save, self.evaluate, bits]

    @property
    def text(self) -> str:
        """Text of the requests, for the user; empty without any."""
        asked = [name for name in ("stop", "save", "evaluate") if getattr(self, name)]
        return ", ".join(asked + ([f"learning rate x {self.factor:g}"] if self.factor != 1.0 else []))


@dataclass
class Steering:
    """Takes the requests from the bus, on rank 0; the other ranks have none."""

    bus: Bus
    file: Path | None
    """None on other ranks than 0."""
    recorded: dict[int, Decision] = field(default_factory=dict)
    """Step -> what was decided there before this start."""

    def start(self, step: int, *, repeats: bool) -> None:
        """Read what was decided from this step on, or drop it unless it `repeats`. Raises CheckpointError."""
        if self.file is None or not self.file.exists():
            return
        decisions = _read(self.file)
        if not repeats:
            decisions = [decision for decision in decisions if decision.step < step]
            storage.write(self.file, "".join(map(_line, decisions)))
        self.recorded = {decision.step: decision for decision in decisions if decision.step >= step}

    def inherit(self, file: Path, step: int) -> None:
        """Take over what another run has decided at a step, for the next one, unless this run has decisions already."""
        if self.file is not None and not self.file.exists() and file.exists():
            decisions = [decision for decision in _read(file, mends=False) if decision.step == step]
            storage.write(self.file, "".join(map(_line, decisions)))

    def flags(self, step: int) -> list[int]:
        """Return what to propose to the other ranks at the end of a step: what was decided then, else new requests."""
        requests, self.bus.requests = self.bus.requests, []
        if step <= max(self.recorded, default=-1):
            decision = self.recorded.get(step)
            return decision.flags() if decision else NO_REQUEST
        if not requests:
            return NO_REQUEST
        decision = _decision(step, requests)
        if self.file is not None:
            try:
                with storage.append(self.file) as file:
                    file.write(_line(decision))
            except OSError as error:  # a resume could not repeat it
                what = f"what {decision.by} asked for is left out ({decision.text})"
                self.bus.publish(Warned(message=f"{what}: {self.file} cannot be written: {error.strerror}"))
                return NO_REQUEST
        return decision.flags()

    def apply(self, flags: Sequence[int], state: TrainState) -> Decision:
        """Return what all ranks have agreed on; sets the learning rate's factor."""
        stop, save, evaluate, bits = flags
        factor = struct.unpack("<d", struct.pack("<q", bits))[0] if bits else 1.0
        state.rate_factor *= factor
        state.is_stopped = state.is_stopped or bool(stop)
        return Decision(step=state.step, stop=stop, save=save, evaluate=evaluate, factor=factor)


def observer_states(observers: Sequence[Observer], warn: Callable[[str], None]) -> list[Any]:
    """Return the state of each observer, None where it has none, or one that JSON cannot hold."""
    states: list[Any] = [None] * len(observers)
    for place, observer in enumerate(observers):
        try:
            if hasattr(observer, "state_dict"):
                states[place] = json.loads(json.dumps(observer.state_dict(), allow_nan=False))
        except Exception as error:
            warn(f"the state of the observer {type(observer).__name__} is not saved: {type(error).__name__}: {error}")
    return states


def restore_observers(observers: Sequence[Observer], saved: Sequence[Any], warn: Callable[[str], None]) -> None:
    """Hand each observer the state that was saved for the one at its place."""
    for observer, state in zip(observers, saved, strict=False):
        if state is None or not hasattr(observer, "load_state_dict"):
            continue
        try:
            observer.load_state_dict(state)
        except Exception as error:
            name = type(observer).__name__
            warn(f"the observer {name} goes on without its saved state: {type(error).__name__}: {error}")


def _decision(step: int, requests: Sequence[tuple[str, Request]]) -> Decision:
    """Return all requests of a step as one; factors are multiplied."""
    asked = [request for _, request in requests]
    return Decision(
        step=step,
        by=", ".join(dict.fromkeys(name for name, _ in requests)),
        stop=any(isinstance(request, Stop) for request in asked),
        save=any(isinstance(request, Save) for request in asked),
        evaluate=any(isinstance(request, Evaluate) for request in asked),
        factor=math.prod((each.factor for each in asked if isinstance(each, ScaleLearningRate)), start=1.0),
    )


def _line(decision: Decision) -> str:
    return decision.model_dump_json(exclude_defaults=True) + "\n"


def _read(file: Path, *, mends: bool = True) -> list[Decision]:
    """Read all decisions. Raises CheckpointError; a line that a kill has cut short was never agreed on, and is removed
    unless the file is another run's."""
    found = []
    try:
        lines = storage.read_regular(file, storage.MOST_JSON_BYTES).split(b"\n")
        for line in lines[:-1]:
            found.append(Decision.model_validate_json(line))
    except (OSError, ValueError) as error:
        what = f"{file}, which says what observers asked of this run, cannot be read ({str(error).splitlines()[0]})"
        raise CheckpointError(f"{what}: remove it to go on without") from None
    with suppress(OSError):
        if lines[-1] and mends:  # the next line begins on its own
            storage.write(file, b"\n".join([*lines[:-1], b""]))
    return found
