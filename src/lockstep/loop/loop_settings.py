"""The settings of `lockstep.Loop`, checked by the sections that a config has for them."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import Field, ValidationError

from lockstep.base.config import Section, YamlDumper
from lockstep.base.errors import ConfigError
from lockstep.checkpoint.layout import CheckpointSection
from lockstep.data.order import Order
from lockstep.observe.observe_config import ObserveSection
from lockstep.training.training_config import TrainSection

S = TypeVar("S", bound=Section)
NAMES = {"every_steps": "save_steps", "every_minutes": "save_minutes"}
"""Setting of a section -> argument of Loop, where it has another name."""
Schedule = Callable[[int], float]
"""Function of a step, from 0 -> factor of the optimizer's learning rates."""


class OwnSection(Section):
    """Settings that belong to several sections of a config."""

    folder: Path
    seed: int = Field(ge=0, lt=2**63)
    threads: int = Field(ge=1, le=1024)
    workers: int = Field(ge=0, le=1024)
    clip: float | None = Field(gt=0)


@dataclass(frozen=True, kw_only=True)
class LoopSettings:
    """All settings of a loop. Raises ConfigError where they contradict each other."""

    own: OwnSection
    train: TrainSection
    checkpoint: CheckpointSection
    observe: ObserveSection
    schedule: Schedule | None
    allow_drift: bool

    def __post_init__(self) -> None:
        train = self.train
        if train.micro_batch > train.global_batch:
            raise ConfigError(
                f"lockstep.Loop: micro_batch={train.micro_batch} is more than global_batch={train.global_batch}, and a "
                "step would never fill one"
            )
        if train.epochs is not None and train.steps is not None:
            raise ConfigError("lockstep.Loop: give epochs or steps, not both")
        if (schedule := self.schedule) is not None and not callable(schedule):
            raise ConfigError(f"lockstep.Loop: {schedule=}: it is a function of the step, from 0, to a factor")

    def numeric(self) -> dict[str, Any]:
        """Return the settings that can change a bit of the weights, by their names in a config: the numeric recipe."""
        train = {f"train.{name}": getattr(self.train, name) for name in ("global_batch", "micro_batch", "precision")}
        own = {"run.seed": self.own.seed, "run.reproducibility": "exact", "optim.clip": self.own.clip}
        return {**own, **train, "optim.schedule": None if self.schedule is None else "a function of the step"}

    def order(self, samples: int) -> Order:
        return Order(
            seed=self.own.seed,
            samples=samples,
            global_batch=self.train.global_batch,
            micro_batch=self.train.micro_batch,
        )

    def text(self) -> str:
        """Return YAML in the sections of a config, for those who read the folder."""
        own, sections = self.own, {"train": self.train, "checkpoint": self.checkpoint, "observe": self.observe}
        plain = {
            "run": {"seed": own.seed, "threads": own.threads},
            "data": {"workers": own.workers},
            "optim": {"clip": own.clip},
            **{name: section.model_dump(mode="json", exclude_unset=True) for name, section in sections.items()},
        }
        return yaml.dump(plain, Dumper=YamlDumper, sort_keys=False, allow_unicode=True)


def checked(kind: type[S], **values: Any) -> S:
    """Build a section of these values. Raises ConfigError."""
    try:
        return kind(**values)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        message = str(first["msg"]).removeprefix("Value error, ")
        raise ConfigError(
            f"lockstep.Loop: {NAMES.get(name, name)}={first['input']!r}: {message[:1].lower() + message[1:]}"
        ) from None
