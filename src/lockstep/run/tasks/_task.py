"""The common part of a worker's tasks: recipe, rank, event bus and watchdog."""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import psutil
from pydantic import BaseModel

from lockstep.base.events import Bus, Warned
from lockstep.base.world import World
from lockstep.core.distributed import process_group
from lockstep.core.distributed.collectives import local_main_first
from lockstep.core.host.signals import SignalWatch
from lockstep.core.numerics.precision import fix_numerics
from lockstep.observe.diagnose.hang_watch import Limits, Watch
from lockstep.protocol import live_messages
from lockstep.recipe import build
from lockstep.recipe.components import Components
from lockstep.recipe.recipe import Recipe
from lockstep.recipe.splits import prepare_splits

Asked = TypeVar("Asked", bound=BaseModel)


class Task(ABC):
    """A task of a worker.

    `run/tasks/NAME.py` defines `build`, which is its class or has the same arguments, and NEEDS_GROUP: whether the
    worker opens the process group for it.
    """

    def __init__(
        self, recipe: Recipe, world: World, signals: SignalWatch, *, request: Path = Path(), began: float = 0.0
    ) -> None:
        """`request`: a file written by the task's command; `train` has none."""
        self.recipe, self.world, self.signals, self.request_file = recipe, world, signals, request
        self.began = began or psutil.Process().create_time()
        self.device = process_group.device_of(world)

    def asked(self, kind: type[Asked]) -> Asked:
        """Read the request of the task's command."""
        return kind.model_validate_json(self.request_file.read_bytes())

    @abstractmethod
    def run(self, resume: str, *, allow_drift: bool) -> None:
        """Run from `resume` ("auto", "never" or a checkpoint), with `allow_drift` even if the recipe has changed."""

    def watching(self) -> AbstractContextManager[object]:
        """Watch for hangs inside: by default nothing, where no process waits for another for long."""
        return nullcontext()

    def close(self) -> None:  # noqa: B027 (most hold nothing)
        """Release everything."""


class WatchedTask(Task):
    """A task in the process group of a run, with observers and a thread that detects hangs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        recipe, self.bus = self.recipe, Bus()
        exact, precision = recipe.run.reproducibility == "exact", recipe.train.precision
        self.facts = fix_numerics(threads=recipe.run.threads, exact=exact, precision=precision)
        self.facts["device_model"] = process_group.device_model(self.device)
        self.logs = recipe.folder / "logs"
        self.watch_thread = Watch(self.world, limits(recipe), self.logs)

    def assemble(self) -> Components:
        """Prepare the data, one process per machine first, then build every part."""
        prepared = local_main_first(
            lambda: prepare_splits(self.recipe, self.bus.publish), is_local_main=self.world.local_rank == 0
        )
        parts = build.assemble(self.recipe, self.world, self.device, data=prepared, placing=self.placing)
        self.recipe = parts.recipe
        return parts

    def placing(self) -> AbstractContextManager[None]:
        """Return the context in which the model is placed."""
        return nullcontext()

    def warn(self, message: str) -> None:
        self.bus.publish(Warned(message=message))

    def watching(self) -> AbstractContextManager[object]:
        return self.watch_thread.watching()

    def close(self) -> None:
        self.bus.close()


def limits(recipe: Recipe) -> Limits:
    """Return when a process counts as hung or silent."""
    hang = recipe.observe.hang_seconds
    return Limits(
        hang_seconds=None if hang == "auto" else hang,
        timeout_seconds=recipe.launch.collective_timeout_seconds,
        restarts=recipe.observe.on_hang == "restart",
        silent_seconds=recipe.launch.failure_timeout_seconds,
        recovers_live=live_messages.is_live_worker(),
    )
