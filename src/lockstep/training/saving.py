"""Save checkpoints during training: the loop stalls for one copy, the outcome is reported at a later step."""

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

WARN_SECONDS = 0.5
"""A longer wait for the previous save is reported by itself, not only as part of the stall."""

SETTLE_SECONDS = 10.0
"""Time for the save in progress to end after training has failed, or a script has left its loop."""

SLOW_DISK_BYTES_PER_SECOND = 50e6


@dataclass(kw_only=True)
class Saving:
    """The saves of a run. All ranks call each method at the same step."""

    writer: Writer
    state: TrainState
    manifest: Callable[[dict[str, float]], Manifest]
    """Metrics of this step -> the manifest to save with the tensors."""
    bus: Bus
    newest: Path | None = None
    """The last checkpoint that this run saved, or was resumed from."""
    stalls: list[float] = field(default_factory=list)
    """Seconds for which training stalled, per save."""
    failed: int = 0
    longest_seconds: float = 0.0
    """Duration of the longest save, from the copy to the last rename."""

    def start(self, metrics: dict[str, float], *, is_last: bool = False) -> None:
        """Copy the state and start to write it, after the previous save. `is_last`: the state stays as it is."""
        start = time.monotonic()
        with waiting_in(SAVE):
            self._report(self.writer.finished())
        waited = time.monotonic() - start
        if waited > WARN_SECONDS:
            what = f"a save was due while the last one was still being written: training stood still for {waited:.1f} s"
            advice = "Save less often (checkpoint.every_steps, checkpoint.every_minutes), or on a faster disk than that"
            self.bus.publish(Warned(message=f"{what}. {advice} of {self.writer.root}"))
        self.bus.publish(SaveStarted(step=self.state.step))
        manifest, used = self.manifest(metrics), self.state.used()
        self.writer.start(self.state.tensors(), manifest, used=used, is_last=is_last)
        self.stalls.append(time.monotonic() - start)

    def poll(self) -> None:
        if not self.writer.is_busy:
            self._report(self.writer.finished())

    def finish(self) -> None:
        """Wait for the last save. Raises CheckpointError on every rank if it failed."""
        with waiting_in(SAVE):
            saved = self.writer.finished()
        if saved is not None and saved.failure is not None:
            error = CheckpointError(
                f"the last checkpoint, of step {saved.step}, could not be saved in {self.writer.root}: {saved.failure}."
                f"\n  {self._newest_message} Mend the disk and go on from there"
            )
            error.is_shared = True
            raise error
        self._report(saved)

    def settle(self) -> None:
        """Wait for the save in progress after a failure in training, ignoring its errors."""
        with suppress(Exception):
            self._report(self.writer.finished(SETTLE_SECONDS))

    @property
    def expected_seconds(self) -> float:
        """Expected duration of a save: the longest so far, or what a slow disk needs if there was none."""
        return self.longest_seconds or self.writer.bytes / SLOW_DISK_BYTES_PER_SECOND

    def facts(self) -> dict[str, Any]:
        return {
            "started": len(self.stalls),
            "failed": self.failed,
            "stall_seconds": round(sum(self.stalls), 4),
            "longest_stall_seconds": round(max(self.stalls, default=0.0), 4),
            "longest_seconds": round(self.longest_seconds, 4),
        }

    @property
    def _newest_message(self) -> str:
        return f"The newest one is {self.newest}." if self.newest else "There is none yet."

    def _report(self, saved: Saved | None) -> None:
        if saved is None:
            return
        if saved.failure is not None:
            self.failed += 1
            what = f"THE CHECKPOINT OF STEP {saved.step} COULD NOT BE SAVED in {self.writer.root}: {saved.failure}."
            self.bus.publish(Warned(message=f"{what} Training goes on. {self._newest_message}"))
            return
        self.newest = saved.folder
        self.longest_seconds = max(self.longest_seconds, saved.seconds)
        stall = self.stalls[-1]
        event = CheckpointSaved(step=saved.step, folder=saved.folder, seconds=saved.seconds, stall_seconds=stall)
        self.bus.publish(event)
