"""A replicated model whose passes may be run by somebody else, who says when steps and micro-batches begin and end.

Gradients are exchanged after the last backward pass of a step.
"""

from collections.abc import Sequence
from typing import ClassVar

import torch

from lockstep.base.model_contracts import LossSum, MicroBatch
from lockstep.core.distributed.process_group import world_group
from lockstep.core.host.activity import waiting_in
from lockstep.core.host.phases import phase
from lockstep.parallel.micro_batches import WorldLoss
from lockstep.parallel.replicated import Replicated


class Stepwise(Replicated):
    """A step is start_step, then start and backward for each of this rank's micro-batches, then end_step."""

    LEAVES_LAST: ClassVar[bool] = False

    def start_step(self, step: MicroBatch) -> None:
        """Begin the step that a micro-batch belongs to."""
        self.all_reduce = self.all_reduce_of(step.shards, step.present, world_group())
        self.accumulation.start_step(self.all_reduce)
        self.embedding_rows.start_step(self.all_reduce)
        self.passes.buffers.start_step(self.all_reduce)

    def start(self, micro_batch: MicroBatch) -> None:
        """Before a forward pass: its seeds, and the buffers of the step's start."""
        self.passes.at(micro_batch)
        self.passes.buffers.reset()

    def backward(self, loss: LossSum) -> None:
        """Add the gradients of the micro-batch that was started last."""
        micro_batch = self.passes.current
        assert micro_batch is not None and not micro_batch.ghost
        self.passes.buffers.end_shard(micro_batch.shard)
        with phase("backward"):
            self.precision.scaled(loss.total).backward()

    def end_step(self, step: MicroBatch, losses: Sequence[tuple[MicroBatch, LossSum]]) -> LossSum:
        """Sum gradients, buffers and losses over all ranks; `losses`: of this rank's micro-batches, perhaps none."""
        names = sorted(losses[0][1].sums) if losses else []
        world_loss = WorldLoss(losses, names, step=step, device=self.parameters[0].device)
        self.passes.buffers.end_step()
        with phase("exchange"), waiting_in("the gradient exchange"), torch.no_grad():
            for parameter, total in self.accumulation.totals(self.all_reduce):
                parameter.grad = total
            self.embedding_rows.reduce(self.all_reduce)
        return world_loss.result()

    def forward_backward(self, micro_batches: Sequence[MicroBatch]) -> LossSum:
        """Run a whole step."""
        step = micro_batches[0]
        self.start_step(step)
        losses = self.passes.run(micro_batches, self.model)
        return self.end_step(step, list(zip(micro_batches, losses, strict=True)))
