"""A run of `lockstep prove`: training on part of the data, traced or paused, or an inspection of micro-batches."""

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from torch import Tensor, nn

from lockstep.base import storage
from lockstep.base.errors import UserError
from lockstep.base.events import Observer, StepDone
from lockstep.base.model_contracts import MicroBatch
from lockstep.core.modules.module_trace import Line, Selects, Trace
from lockstep.data.dataset import EvenRows, spread_evenly
from lockstep.recipe.components import Components
from lockstep.run.tasks.train import TrainTask
from lockstep.tools.prove.proof_runs import REFUSED, ProofRequest
from lockstep.tools.prove.single_process_checks import checked
from lockstep.training.loop_state import Training

NEEDS_GROUP = True
HALT_SECONDS = 60.0
"""How long a process waits to be killed before it goes on."""


class ProofTask(TrainTask):
    """Trains as a proof asks for, or inspects single micro-batches."""

    IS_TRIAL = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.request = self.asked(ProofRequest)

    def run(self, resume: str, *, allow_drift: bool) -> None:
        folder = self.recipe.folder
        if self.request.inspect:
            self.claim()
            rows = [asdict(row) for row in checked(self.assembled(self.assemble()))]
            storage.write(folder / "rows.json", json.dumps(rows))
            return
        try:
            super().run(resume, allow_drift=allow_drift)
        except UserError as error:
            storage.write(folder / REFUSED, json.dumps({"reason": str(error)}))
            raise

    def assembled(self, parts: Components) -> Components:
        """Keep only as many samples as requested."""
        data, samples = parts.data, self.request.train_samples
        mixture = data.mixture and data.mixture.spread(samples)
        blocks = data.blocks and replace(data.blocks, samples=samples, is_endless=False)
        train, test = spread_evenly(data.train, samples), spread_evenly(data.test, self.request.test_samples)
        if len(data.excluded):
            data = data.renumbered(EvenRows(len(train), len(data.train))[np.arange(len(train))])
        data = replace(data, train=train, test=test, mixture=mixture, blocks=blocks)
        return replace(parts, data=data, order=data.order())

    def starting(self, training: Training) -> None:
        """Write down the step the run resumes from; trace it, or pause it, as requested."""
        parts, folder, world = self.parts, self.recipe.folder, self.world
        if world.is_main:
            facts = {"resumed_step": parts.state.step, "steps_per_epoch": parts.order.steps_per_epoch}
            storage.write(folder / "started.json", json.dumps(facts))
        if self.request.is_traced:
            write_trace(folder / f"trace-{world.rank}.jsonl", parts, training, is_main=world.is_main)
        if self.request.pause_after is not None and world.rank == world.size - 1:
            halt = Halt(folder / "paused.json", self.request.pause_after)
            self.bus.subscribe(halt)
            parts.model.register_forward_pre_hook(halt.enter)


def write_trace(
    path: Path,
    parts: Components,
    training: Training,
    *,
    is_main: bool,
    since: int = 0,
    selects: Selects | None = None,
) -> None:
    """Trace this rank in a file, from a step on; weights and summed gradients, equal on all ranks, only on rank 0.

    With `selects`, calls and gradients of such micro-batches only, and the weights after the last step.
    """
    file = path.open("w", encoding="utf-8")

    def write(line: Line) -> None:
        file.write(json.dumps(line) + "\n")

    trace = Trace(parts.model, write, selects)
    steps, optimizer = training.steps, parts.state.optimizer

    def traced(start: int) -> Iterator[list[MicroBatch]]:
        for micro_batches in steps(start):
            is_traced = micro_batches[0].step >= since
            if is_main and is_traced:
                trace.tensors("weights", micro_batches[0].step, weights(parts))
            trace.expect(micro_batches if is_traced else ())
            yield micro_batches
        if selects is not None:
            trace.tensors("weights", parts.state.step, weights(parts))
        file.close()

    def summed(*_: Any) -> None:
        if is_main and parts.state.step >= since:
            gradients = ((name, p.grad) for name, p in parts.state.module.named_parameters())
            trace.tensors("sum", parts.state.step, gradients)

    training.steps = traced
    getattr(optimizer, "parts", [optimizer])[0].register_step_pre_hook(summed)  # of several optimizers, the first


def weights(parts: Components) -> list[tuple[str, Tensor]]:
    """List weights, buffers and moving averages by name."""
    named = parts.state.tensors().items()
    return [(name.removeprefix("model."), tensor) for name, tensor in named if not name.startswith("optimizer.")]


class Halt(Observer):
    """Pauses its process in the middle of a step, for the kill that follows."""

    def __init__(self, note: Path, after: int) -> None:
        self.note, self.after, self.is_armed = note, after, False

    def notice(self, event: object) -> None:
        """Arm after the step before."""
        if isinstance(event, StepDone) and event.step == self.after:
            self.is_armed = True

    def enter(self, model: nn.Module, _: Any) -> None:
        """Forward hook: announce the pause and wait."""
        if self.is_armed and model.training:
            storage.write(self.note, json.dumps({"process": psutil.Process().pid}))
            time.sleep(HALT_SECONDS)


build = ProofTask
