"""The subject of `lockstep doctor`: a config, this machine, the other machines of the run; and its findings."""

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict

from lockstep.base.errors import LaunchError, LockstepError
from lockstep.launch.launch_config import LaunchSection
from lockstep.launch.launch_run import NodeAddress
from lockstep.recipe.recipe import Recipe
from lockstep.recipe.splits import Splits
from lockstep.tools.trials import prepared

MB = 1e6


class Diagnosis(BaseModel):
    """A finding: one line of cause, one of repair."""

    model_config = ConfigDict(frozen=True)

    code: str
    """Identifier such as LS-NET-03; listed in docs/troubleshooting.md."""
    severity: Literal["error", "warning", "note"]
    """error: the run will not start, or not end well; warning: it will be slow or fragile; note: worth knowing."""
    cause: str
    repair: str
    host: str = ""
    """Name of the machine, where several are examined."""

    @classmethod
    def error(cls, code: str, cause: str, repair: str) -> Self:
        return cls(code=code, severity="error", cause=cause, repair=repair)

    @classmethod
    def warning(cls, code: str, cause: str, repair: str) -> Self:
        return cls(code=code, severity="warning", cause=cause, repair=repair)

    @classmethod
    def note(cls, code: str, cause: str, repair: str) -> Self:
        return cls(code=code, severity="note", cause=cause, repair=repair)


class ExaminationRequest(BaseModel):
    findings: tuple[Diagnosis, ...] = ()
    """Findings on this machine, which the first of its processes passes on to node 0."""


class RankFacts(BaseModel):
    rank: int
    host: str
    processor: str
    flops: float
    """Operations per second, in a matrix product at the same time as the other ranks."""
    seconds: dict[str, float]
    """Duration of each collective, by name."""
    links: dict[int, list[float]]
    """Other rank -> [seconds of a round trip of one byte, bytes per second from this rank to the other]."""
    findings: tuple[Diagnosis, ...] = ()


class NotExamined(LockstepError):
    """A check needs something that another check has reported as missing."""


@dataclass(kw_only=True)
class DoctorContext:
    recipe: Recipe
    config: Path | None
    """Config file; None: only the machine is examined."""
    node: NodeAddress | None = None
    """This machine as one of several that are examined together."""
    of_this_machine: list[Diagnosis] = field(default_factory=list)
    """Findings of the machine's checks; node 0 shows those of all machines."""
    ranks: list[RankFacts] = field(default_factory=list)

    @property
    def launch(self) -> LaunchSection:
        return self.recipe.launch

    @cached_property
    def processes(self) -> int:
        """Number of processes on this machine."""
        launch, train = self.launch, self.recipe.train
        try:
            return launch.processes_here(self.recipe.run.threads, train.shards)
        except LaunchError:  # more than GPUs, which a check reports
            return int(launch.processes)

    @property
    def is_leading(self) -> bool:
        """Whether findings are shown here: of several machines, on node 0."""
        return self.node is None or self.node.is_leader

    @cached_property
    def opened(self) -> Splits | Exception:
        """The prepared data, or any exception: it comes from the user's code, and is reported."""
        try:
            return prepared(self.recipe)
        except Exception as error:
            return error

    @property
    def splits(self) -> Splits:
        """The prepared data. Raises NotExamined."""
        if isinstance(self.opened, Exception):
            raise NotExamined(str(self.opened))
        return self.opened

    @cached_property
    def built(self) -> int | Exception:
        """Number of the model's parameters, or any exception."""
        from lockstep.recipe.build import build_model  # noqa: PLC0415 (torch and the model's library)

        try:
            return sum(each.numel() for each in build_model(self.recipe, self.splits.train.spec).parameters())
        except Exception as error:
            return error

    @property
    def parameters(self) -> int:
        """Number of the model's parameters. Raises NotExamined."""
        if isinstance(self.built, Exception):
            raise NotExamined(str(self.built))
        return self.built
