"""The subject of `lockstep doctor`: a config, this machine, and the other machines of the run."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol

from lockstep.base.errors import LaunchError, LockstepError
from lockstep.launch.launch_config import LaunchSection
from lockstep.launch.launch_run import NodeAddress
from lockstep.recipe.recipe import Recipe
from lockstep.recipe.splits import Splits
from lockstep.tools.doctor.diagnosis import Diagnosis, RankFacts
from lockstep.tools.trials import prepared


class NotExamined(LockstepError):
    """A check needs something that another check has reported as missing."""


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """A value, or the error that prevents it."""

    value: Any = None
    error: Exception | None = None

    @classmethod
    def of(cls, make: Callable[[], Any]) -> "Attempt":
        """Call `make` and keep its result, or any exception: it comes from the user's code, and is reported."""
        try:
            return cls(value=make())
        except Exception as error:
            return cls(error=error)

    def needed(self) -> Any:
        """Return the value. Raises NotExamined if there is none."""
        if self.error is not None:
            raise NotExamined(str(self.error))
        return self.value


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
    def opened(self) -> Attempt:
        """The prepared data, or the error."""
        return Attempt.of(lambda: prepared(self.recipe))

    @property
    def splits(self) -> Splits:
        """The prepared data. Raises NotExamined."""
        splits: Splits = self.opened.needed()
        return splits

    @cached_property
    def parameters(self) -> Attempt:
        """Number of the model's parameters, or the error."""
        from lockstep.recipe.build import build_model  # noqa: PLC0415 (torch and the model's library)

        return Attempt.of(
            lambda: sum(each.numel() for each in build_model(self.recipe, self.splits.train.spec).parameters())
        )


class Check(Protocol):
    """A module in tools/doctor/checks."""

    SCOPE: Literal["config", "machine", "processes", "training"]
    """Subject of the check: the config and what it names, each machine, the processes of a run, a few of its steps."""
    CODES: dict[str, str]
    """Code -> meaning."""

    def check(self, context: DoctorContext) -> Iterator[Diagnosis]:
        """Yield what is wrong. Raises NotExamined."""
