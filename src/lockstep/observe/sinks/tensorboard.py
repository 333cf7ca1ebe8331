"""TensorBoard scalars, written as training runs: `tensorboard --logdir runs`."""

import json
import statistics
from contextlib import suppress
from pathlib import Path
from typing import Any

from lockstep.base.events import CheckpointSaved, Evaluated, RankTimes, RunEnded, RunStarted, SaveStarted, StepDone
from lockstep.core.host.phases import OF_STEPS


class TensorBoard:
    """train/* for logged steps, test/* for evaluations, checkpoint/* for saves, time/* and memory/* for the ranks.

    Repeated steps replace the old ones. The config and the end of the run are texts.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "tensorboard"
        self.writer: Any = None

    def notice(self, event: object) -> None:
        if isinstance(event, RunStarted):
            from torch.utils.tensorboard import SummaryWriter

            # also on a fresh start: the folder may hold steps of a run that was killed before its first checkpoint
            self.writer = SummaryWriter(str(self.folder), purge_step=event.resumed_step + 1, flush_secs=10)
            self._write_text("config", (self.folder.parent / "recipe.yaml"), event.resumed_step)
        elif isinstance(event, StepDone) and event.values:
            self._write("train", event.step, {**event.values, "epoch": event.epoch})
        elif isinstance(event, Evaluated):
            self._write("test", event.step, event.values)
        elif isinstance(event, RankTimes):
            self._write("time", event.step, mean_milliseconds(event))
            self._write("memory", event.step, {"most_gigabytes": max(event.memory_bytes) / 1e9})
        elif isinstance(event, RunEnded) and self.writer:
            facts = {name: event.summary.get(name) for name in ("digest", "chain", "evaluation", "steps")}
            text = json.dumps({"status": event.status, **facts}, indent=1)
            self.writer.add_text("end", as_code(text), facts["steps"])
        elif isinstance(event, CheckpointSaved):
            seconds = {"seconds": event.seconds, "stall_seconds": event.stall_seconds}
            self._write("checkpoint", event.step, seconds)
        if isinstance(event, Evaluated | SaveStarted | RunEnded) and self.writer:
            self.writer.flush()

    def close(self) -> None:
        """Flush and close the event file."""
        if self.writer:
            self.writer.close()

    def _write_text(self, name: str, file: Path, step: int) -> None:
        """The contents of a file, where there is one."""
        with suppress(OSError):
            self.writer.add_text(name, as_code(file.read_text(encoding="utf-8")), step)

    def _write(self, group: str, step: int, values: Any) -> None:
        for name, value in values.items():
            self.writer.add_scalar(f"{group}/{name}", value, step)


def mean_milliseconds(times: RankTimes) -> dict[str, float]:
    """Phase -> milliseconds of a step, the mean over the ranks; `waits_most`: of the rank that waits most."""
    mean = {str(name): 1000 * statistics.mean(times.seconds[name]) / times.steps for name in OF_STEPS}
    return {**mean, "waits_most": 1000 * max(times.seconds["exchange"]) / times.steps}


def as_code(text: str) -> str:
    """Markdown that shows a text as it is."""
    return "".join(f"    {line}\n" for line in text.splitlines())


def build(folder: Path) -> TensorBoard:
    """The sink for a run directory."""
    return TensorBoard(folder)
