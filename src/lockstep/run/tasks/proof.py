"""A process of a proof: what every process runs, on part of the data, with a trace, a halt or a look inside if asked.

python -m lockstep.run.tasks.proof TASK.json CONFIG.yaml [the worker's own arguments]
"""

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from torch import nn

from lockstep.base import storage
from lockstep.base.errors import UserError
from lockstep.base.events import RunStarted, StepDone
from lockstep.base.model_contracts import MicroBatch
from lockstep.core.modules.module_trace import Line, Trace
from lockstep.run import worker
from lockstep.run.build import Components
from lockstep.run.tasks.train import TrainTask
from lockstep.tools.prove.proof_request import REFUSED, ProofRequest, some
from lockstep.tools.prove.single_process_checks import inspected
from lockstep.training.loop import Training

HALT_SECONDS = 60.0
"""How long a process that waits to be killed waits: should nobody kill it, it ends by itself."""


class ProofTask(TrainTask):
    """A process's part of a run, as always, but for what its task says."""

    def __init__(self, task: ProofRequest, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.task = task

    def assemble(self) -> Components:
        """Build every part, then leave out all samples but the task's."""
        parts = super().assemble()
        train = some(parts.data.train, self.task.train_samples)
        data = replace(parts.data, train=train, test=some(parts.data.test, self.task.test_samples))
        order = replace(parts.order, samples=len(train), lengths=train.lengths)
        return replace(parts, data=data, order=order)

    def train(self, how: str, *, allow_drift: bool) -> None:
        """Train, or look into single micro-batches."""
        if not self.task.inspect:
            try:
                super().train(how, allow_drift=allow_drift)
            except UserError as error:
                storage.write(self.recipe.folder / REFUSED, json.dumps({"reason": str(error)}))
                raise
            return
        self.claim()
        parts = self.assemble()
        rows = [asdict(row) for row in inspected(parts)]
        storage.write(self.recipe.folder / "rows.json", json.dumps(rows))

    def started(self, parts: Components) -> RunStarted:
        """Leave a note of where the run went on."""
        if self.world.is_main:
            facts = {"resumed_step": parts.state.step, "steps_per_epoch": parts.order.steps_per_epoch}
            storage.write(self.recipe.folder / "started.json", json.dumps(facts))
        return super().started(parts)

    def training(self, parts: Components) -> Training:
        """The loop's view of the parts, with hooks."""
        run = super().training(parts)
        if self.task.is_traced:
            self.trace(parts, run)
        if self.task.pause_after is not None and self.world.rank == self.world.size - 1:
            halt = Halt(self.recipe.folder / "paused.json", self.task.pause_after)
            self.bus.subscribe(halt)
            parts.model.register_forward_pre_hook(halt.enter)
        return run

    def trace(self, parts: Components, run: Training) -> None:
        """Write every rank's trace beside the run's logs; what all ranks share is rank 0's to write."""
        file = (self.recipe.folder / f"trace-{self.world.rank}.jsonl").open("w", encoding="utf-8")

        def write(line: Line) -> None:
            file.write(json.dumps(line) + "\n")

        trace = Trace(parts.model, write)
        steps, optimizer = run.steps, parts.state.optimizer

        def traced(start: int) -> Iterator[list[MicroBatch]]:
            for micro_batches in steps(start):
                if self.world.is_main:
                    trace.tensors("weights", micro_batches[0].step, parts.strategy.state().items())
                trace.expect(micro_batches)
                yield micro_batches
            file.close()

        def summed(*_: Any) -> None:
            if self.world.is_main:
                named = ((name, p.grad) for name, p in parts.state.module.named_parameters())
                trace.tensors("sum", parts.state.step, named)

        run.steps = traced
        optimizer.register_step_pre_hook(summed)


class Halt:
    """Stops its process in the middle of a step, for someone to kill it there."""

    def __init__(self, note: Path, after: int) -> None:
        self.note, self.after, self.is_armed = note, after, False

    def notice(self, event: object) -> None:
        """The step before it is done."""
        if isinstance(event, StepDone) and event.step == self.after:
            self.is_armed = True

    def close(self) -> None:
        """Nothing is kept open."""

    def enter(self, model: nn.Module, _: Any) -> None:
        """The forward pass begins: say so and wait."""
        if self.is_armed and model.training:
            storage.write(self.note, json.dumps({"process": psutil.Process().pid}))
            time.sleep(HALT_SECONDS)


if __name__ == "__main__":
    sys.exit(worker.main(sys.argv[2:], partial(ProofTask, ProofRequest.read(Path(sys.argv[1])))))
