"""sweep.json: the keys of a sweep, and the results of its trials."""

import math
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from lockstep.base import storage
from lockstep.base.errors import ConfigError
from lockstep.checkpoint.metric_modes import Mode, is_better
from lockstep.recipe.recipe_trust import SWEEP
from lockstep.tools.sweep.search_space import MOST_TRIALS, SweptKey

CONFIG = "sweep.yaml"
"""Copy of the config, made when the sweep began."""
Search = Literal["grid", "random", "optuna"]
Prune = Literal["median", "none"]
MOST = 1e100
"""Largest value: beyond it, matplotlib finds no ticks."""
Finite = Annotated[float, Field(allow_inf_nan=False, gt=-MOST, lt=MOST)]
TrialState = Literal["running", "finished", "pruned", "failed"]


class SweepPart(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Measured(SweepPart):
    """An evaluation of a trial; None for a value that was not finite."""

    step: int = Field(ge=0)
    value: Finite | None
    """Value of the metric that the sweep compares."""
    loss: Finite | None


class SweepTrial(SweepPart):
    number: int = Field(ge=1, le=MOST_TRIALS)
    settings: dict[str, Any]
    state: TrialState = "running"
    value: Finite | None = None
    """Metric of the checkpoint that `lockstep evaluate` takes; of a pruned trial, at the evaluation that ended it."""
    loss: Finite | None = None
    seconds: Finite = 0.0
    """Time of training and evaluation, over all starts."""
    digest: str | None = None
    evaluations: list[Measured] = []
    note: str = ""
    """Why it failed or was pruned."""

    @property
    def name(self) -> str:
        """Name of its run."""
        return f"trial-{self.number:03}"


class Sweep(SweepPart):
    keys: list[SweptKey] = Field(min_length=1)
    shared: list[str] = []
    """Settings that replace the config's, in all trials."""
    search: Search
    count: int = Field(ge=1, le=MOST_TRIALS)
    metric: str
    mode: Mode = "auto"
    prune: Prune
    working_folder: str
    """Folder in which relative paths of the config start."""
    best: str | None = None
    trials: list[SweepTrial] = []
    """Trials in the order in which they began; several may be running as jobs, else only the last one."""

    @model_validator(mode="after")
    def _has_places(self) -> Self:
        """Raise ValueError for a value of a trial that has no place in a figure."""
        for key, trial in product(self.keys, self.trials):
            value = trial.settings.get(key.key, key)
            if value not in key.values and (key.ends is None or not isinstance(value, int | float)):
                raise ValueError(f"{trial.name} has no value of {key.key}")
            for number in (value, *(key.ends or key.values)):
                if isinstance(number, int | float) and not abs(number) < MOST:
                    raise ValueError(f"{key.key} has a value that is too large")
        return self

    @property
    def ended(self) -> list[SweepTrial]:
        return [trial for trial in self.trials if trial.state != "running"]

    @property
    def lower_is_better(self) -> bool:
        return is_better(self.metric, 0.0, 1.0, mode=self.mode)

    def ranked(self) -> list[SweepTrial]:
        """Sort the trials: finished ones, the best first, then pruned ones, then the others. Of trials with equal
        values the one with the smaller loss is better, then the older one."""
        return sorted(self.trials, key=self._rank)

    def _rank(self, trial: SweepTrial) -> tuple[int, float, float]:
        group = ["finished", "pruned"].index(trial.state) if trial.state in ("finished", "pruned") else 2
        value = math.inf if trial.value is None else trial.value if self.lower_is_better else -trial.value
        return group, value, math.inf if trial.loss is None else trial.loss

    def save(self, folder: Path) -> None:
        """Write sweep.json with the best trial so far. Raises ConfigError where it cannot be written."""
        self.best = next((trial.name for trial in self.ranked() if trial.state == "finished"), None)
        try:
            storage.write(folder / SWEEP, self.model_dump_json(indent=1))
        except OSError as error:
            what = f"cannot write to {folder}: {error.strerror}; see that there is space"
            raise ConfigError(f"{what}, then go on with lockstep sweep {folder}") from None


def load(folder: Path) -> Sweep:
    """Read sweep.json. Raises ConfigError."""
    file = folder / SWEEP
    try:
        return Sweep.model_validate(storage.read_json(file))
    except (OSError, ValueError) as error:
        first = error.errors()[0] if isinstance(error, ValidationError) else None
        reason = f"{'.'.join(map(str, first['loc']))}: {first['msg']}" if first else str(error)
        raise ConfigError(f"{file} cannot be used ({reason}): begin a sweep of another --name") from None
