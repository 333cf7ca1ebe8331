"""The folder of a script's own loop: claimed by one run, resumed from, saved to, with a summary at the end."""

import json
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from lockstep.base import plugins, storage
from lockstep.base.errors import CheckpointError, LaunchError
from lockstep.base.events import Bus, RunEnded, RunStarted, Spiked, Warned
from lockstep.base.world import World
from lockstep.checkpoint import layout, retention
from lockstep.checkpoint.writer import Writer
from lockstep.core.distributed.collectives import raise_on_all_ranks
from lockstep.data.order import Order
from lockstep.loop.loop_settings import LoopSettings
from lockstep.loop.script_optimizer import GROUPS, ScriptOptimizer
from lockstep.observe.run_folder import LOOP, RECIPE, SUMMARY
from lockstep.observe.run_history import RunHistory
from lockstep.recipe import run_paths
from lockstep.training.resume import NumericRecipe, resumed
from lockstep.training.saving import Saving
from lockstep.training.state import TrainState

SCRIPT = "script"
"""Key of the state of the script's optimizer, in the progress of a manifest."""
ADDED = (GROUPS, "optim.schedule", "optim.scheduler")
"""Parts of the numeric recipe that checkpoints of earlier versions lack."""
FOR_SCRIPTS = "For lockstep.Loop: another folder=..., or allow_drift=True"


class TerminalLines:
    """Prints warnings, resumes and the end on the script's terminal."""

    def notice(self, event: object) -> None:
        match event:
            case Warned():
                line = event.message
            case Spiked():
                line = f"step {event.step}: {event.text}"
            case RunStarted() if 0 < event.resumed_step < event.total_steps:
                line = f"{event.folder} goes on after step {event.resumed_step} of {event.total_steps}"
            case RunStarted() if event.resumed_step == event.total_steps:
                line = f"{event.folder} is finished: nothing is trained; another training needs another folder=..."
            case RunEnded() if event.summary:
                steps, digest = event.summary["steps"], str(event.summary["digest"])[:16]
                line = f"{event.status} after {steps} steps · digest {digest} · {event.summary['folder']}"
            case _:
                return
        sys.stderr.write(f"lockstep: {line}\n")

    def close(self) -> None:
        pass


class LoopFolder:
    """Everything on disk, and the observers."""

    def __init__(self, settings: LoopSettings, world: World, numeric: Mapping[str, Any]) -> None:
        self.settings, self.world, self.numeric = settings, world, dict(numeric)
        self.path, self.bus = settings.own.folder.absolute(), Bus()
        self.checkpoints = self.path / "checkpoints"
        self.lock = FileLock(self.path / ".lock", timeout=0)
        with raise_on_all_ranks():
            if world.is_main:
                self._claim()
        if world.is_main:
            self.bus.subscribe(TerminalLines())
            self.bus.subscribe(RunHistory(self.path))
            for sink in settings.observe.sinks:
                self.bus.subscribe(plugins.find("observe.sinks", sink).build(self.path))

    def warn(self, message: str) -> None:
        self.bus.publish(Warned(message=message))

    def resume(self, state: TrainState, optimizer: ScriptOptimizer) -> Path | None:
        """Load the newest checkpoint, if there is one. Raises CheckpointError."""
        try:
            checkpoint = resumed(
                state,
                self.checkpoints,
                "auto",
                numeric=NumericRecipe(self.numeric, [name for name in self.numeric if name.startswith(ADDED)]),
                allow_drift=self.settings.allow_drift,
                warn=self.warn,
                prepare=lambda folder: optimizer.prepare(folder, layout.read_manifest(folder).progress[SCRIPT]),
            )
        except CheckpointError as error:
            error.args = (f"{error}\n  {FOR_SCRIPTS}",)
            raise
        if checkpoint is not None:
            optimizer.load(layout.read_manifest(checkpoint).progress[SCRIPT])
        if self.world.is_main:
            (self.path / SUMMARY).unlink(missing_ok=True)
        return checkpoint

    def saving(self, state: TrainState, optimizer: ScriptOptimizer, order: Order) -> Saving:
        def manifest(metrics: dict[str, float]) -> layout.Manifest:
            return layout.Manifest(
                step=state.step,
                epoch=order.epoch(max(state.step - 1, 0)) + 1,
                world_size=self.world.size,
                saved_at=time.time(),
                numeric=self.numeric,
                progress=state.state_dict() | {"observers": [], SCRIPT: optimizer.state()},
                metrics=metrics,
            )

        tidy: Callable[[Path], None] = partial(retention.tidy, self.checkpoints, self.settings.checkpoint)
        writer = Writer(self.checkpoints, tidy, copies=state.strategy.copies)
        return Saving(writer=writer, state=state, manifest=manifest, bus=self.bus)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write summary.json on rank 0; on a full disk warn, since the training itself is done."""
        if self.world.is_main:
            try:
                storage.write(self.path / SUMMARY, json.dumps(summary, indent=1))
            except OSError as error:
                if (text := storage.full_disk(error)) is None:
                    raise
                self.warn(text)

    def close(self) -> None:
        self.bus.close()
        self.lock.release()

    def _claim(self) -> None:
        """Lock the folder: two runs in it would delete each other's checkpoints. Raises LaunchError, ConfigError."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            what = f"{self.path} cannot be made a folder ({error.strerror})"
            raise LaunchError(f"{what}: give lockstep.Loop another folder=...") from None
        run_paths.check_folder(self.path)
        if (self.path / RECIPE).exists():
            raise LaunchError(
                f"{self.path} is the folder of a run from a config: give lockstep.Loop another folder=..."
            )
        try:
            self.lock.acquire()
        except Timeout:
            raise LaunchError(
                f"{self.path} is being trained by another process, or another loop of this one: give lockstep.Loop "
                "another folder=..."
            ) from None
        storage.write(self.path / LOOP, self.settings.text())
