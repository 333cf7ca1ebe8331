"""TensorBoard scalars, written as training runs: `tensorboard --logdir runs`."""

from pathlib import Path
from typing import Any

from lockstep.base.events import CheckpointSaved, Evaluated, RunEnded, RunStarted, SaveStarted, StepDone


class TensorBoard:
    """train/* for logged steps, test/* for evaluations, checkpoint/* for saves; repeated steps replace the old ones."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "tensorboard"
        self.writer: Any = None

    def notice(self, event: object) -> None:
        if isinstance(event, RunStarted):
            from torch.utils.tensorboard import SummaryWriter

            # also on a fresh start: the folder may hold steps of a run that was killed before its first checkpoint
            self.writer = SummaryWriter(str(self.folder), purge_step=event.resumed_step + 1, flush_secs=10)
        elif isinstance(event, StepDone) and event.values:
            self._write("train", event.step, event.values)
        elif isinstance(event, Evaluated):
            self._write("test", event.step, event.values)
        elif isinstance(event, CheckpointSaved):
            seconds = {"seconds": event.seconds, "stall_seconds": event.stall_seconds}
            self._write("checkpoint", event.step, seconds)
        if isinstance(event, Evaluated | SaveStarted | RunEnded) and self.writer:
            self.writer.flush()

    def close(self) -> None:
        """Flush and close the event file."""
        if self.writer:
            self.writer.close()

    def _write(self, group: str, step: int, values: Any) -> None:
        for name, value in values.items():
            self.writer.add_scalar(f"{group}/{name}", value, step)


def build(folder: Path) -> TensorBoard:
    """The sink for a run directory."""
    return TensorBoard(folder)
