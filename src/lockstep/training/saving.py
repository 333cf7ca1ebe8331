"""When training saves: it stands still for one copy; what became of the save is told at a later step."""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.base.errors import CheckpointError
from lockstep.base.events import Bus, CheckpointSaved, SaveStarted, Warned
from lockstep.checkpoint.layout import Manifest
from lockstep.checkpoint.writer import Saved, Writer
from lockstep.core.host.activity import SAVE, waiting_in
from lockstep.training.state import TrainState

WORTH_SAYING_SECONDS = 0.5
"""Waiting for the save before is part of the stall that is told with every save; longer than this it has a line."""

SLOW_DISK_BYTES_PER_SECOND = 50e6


@dataclass(kw_only=True)
class Saving:
    """A run's saves. All ranks call each method at the same step."""

    writer: Writer
    state: TrainState
    manifest: Callable[[dict[str, float]], Manifest]
    """What goes beside the tensors, with the metrics measured at this step."""
    bus: Bus
    newest: Path | None = None
    """The last checkpoint that this run is known to have saved, or was brought back from."""
    stalls: list[float] = field(default_factory=list)
    """Seconds for which training stood still, per save."""
    failed: int = 0
    longest_seconds: float = 0.0
    """The longest that a save took, from the copy to the last rename."""

    def start(self, metrics: dict[str, float]) -> None:
        """Copy the state and begin to write it; waits for the save before, and says so."""
        begin = time.monotonic()
        with waiting_in(SAVE):
            self._tell(self.writer.finished())
        waited = time.monotonic() - begin
        if waited > WORTH_SAYING_SECONDS:
            what = f"a save was due while the last one was still being written: training stood still for {waited:.1f} s"
            mend = (
                "Save less often (checkpoint.every_steps, checkpoint.every_minutes), or on a faster disk than that of"
            )
            self.bus.publish(Warned(message=f"{what}. {mend} {self.writer.root}"))
        self.bus.publish(SaveStarted(step=self.state.step))
        self.writer.start(self.state.tensors(), self.manifest(metrics), used=self.state.used())
        self.stalls.append(time.monotonic() - begin)

    def look(self) -> None:
        """Tell how the last save ended, if it has ended since the last look."""
        if not self.writer.is_busy:
            self._tell(self.writer.finished())

    def finish(self) -> None:
        """Wait for the last save. Raises CheckpointError, on every rank alike, when it failed."""
        with waiting_in(SAVE):
            saved = self.writer.finished()
        if saved is not None and saved.failure is not None:
            error = CheckpointError(
                f"the last checkpoint, of step {saved.step}, could not be saved in {self.writer.root}: {saved.failure}."
                f"\n  {self._left} Mend the disk and go on from there"
            )
            error.is_shared = True
            raise error
        self._tell(saved)

    def settle(self, timeout_seconds: float) -> None:
        """When training has failed: give the save that is being written a chance to end; its own end is no news now."""
        with suppress(Exception):
            self._tell(self.writer.finished(timeout_seconds))

    @property
    def expected_seconds(self) -> float:
        """How long a save may take: the longest so far, or what a slow disk needs where there was none."""
        return self.longest_seconds or self.writer.bytes / SLOW_DISK_BYTES_PER_SECOND

    def facts(self) -> dict[str, Any]:
        longest = max(self.stalls, default=0.0)
        return {
            "started": len(self.stalls),
            "failed": self.failed,
            "stall_seconds": round(sum(self.stalls), 4),
            "longest_stall_seconds": round(longest, 4),
            "longest_seconds": round(self.longest_seconds, 4),
        }

    @property
    def _left(self) -> str:
        return f"The newest one is {self.newest}." if self.newest else "There is none yet."

    def _tell(self, saved: Saved | None) -> None:
        if saved is None:
            return
        if saved.failure is not None:
            self.failed += 1
            what = f"THE CHECKPOINT OF STEP {saved.step} COULD NOT BE SAVED in {self.writer.root}: {saved.failure}."
            self.bus.publish(Warned(message=f"{what} Training goes on. {self._left}"))
            return
        self.newest = saved.folder
        self.longest_seconds = max(self.longest_seconds, saved.seconds)
        stall = self.stalls[-1]
        self.bus.publish(
            CheckpointSaved(step=saved.step, folder=saved.folder, seconds=saved.seconds, stall_seconds=stall)
        )
