"""Forward and backward passes of micro-batches, each under its own shard's randomness, from the step's buffers."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.base.errors import ModelError
from lockstep.base.model_contracts import Batch, LossSum, MicroBatch, Model, Outputs
from lockstep.core.distributed.collectives import add_disjoint
from lockstep.core.host.activity import progress
from lockstep.core.modules.buffers import BufferUpdates
from lockstep.core.modules.outputs import detached, widened
from lockstep.core.numerics.loss import unweighted, weighted
from lockstep.core.numerics.precision import Precision
from lockstep.core.numerics.seeds import Randomness
from lockstep.core.reduction.tree import tree_sum


class MicroBatches:
    """A rank's share of a step, one micro-batch after the other.

    `modules`: those whose buffers advance here, by name, all of the model's if not given. `is_whole`: whether this rank
    holds all weights, so that the loss may have some of its own.
    """

    def __init__(
        self,
        model: Model,
        randomness: Randomness,
        precision: Precision,
        *,
        modules: Mapping[str, nn.Module] | None = None,
        is_whole: bool = True,
    ) -> None:
        self.model, self.randomness, self.precision, self.is_whole = model, randomness, precision, is_whole
        self.buffers = BufferUpdates(dict(model.named_modules()) if modules is None else modules)
        self.current: MicroBatch | None = None
        """Whose gradients arrive just now."""
        self.is_last = False
        """Whether no other micro-batch follows in this step."""

    def at(self, micro_batch: MicroBatch) -> None:
        """Say whose pass begins: before every forward, and before a backward that does not follow it at once."""
        self.current = micro_batch
        self.randomness.at(micro_batch.step, micro_batch.shard)

    def outputs(self, micro_batch: MicroBatch, call: Callable[[Batch], Outputs]) -> Outputs:
        """The forward pass. A ghost leaves nothing behind."""
        self.at(micro_batch)
        self.buffers.reset()
        with self.precision.autocast():
            outputs = call(micro_batch.batch)
        if not micro_batch.ghost:
            self.buffers.end_shard(micro_batch.shard)
        return outputs

    def start_backward(self) -> None:
        """Blocks that run again in the backward pass find the buffers that they found before."""
        if self.randomness.recomputes:
            self.buffers.reset()

    def loss(self, micro_batch: MicroBatch, outputs: Outputs) -> LossSum:
        """The loss of outputs. Raises ModelError."""
        if not self.is_whole:
            refuse_weights_in_loss(self.model, outputs, micro_batch.batch)
            self.is_whole = True  # asked and answered
        found = self.model.loss(widened(outputs), micro_batch.batch)
        found = weighted(found, micro_batch)
        return nothing_of(found) if micro_batch.is_void else found

    def run(
        self,
        micro_batches: Sequence[MicroBatch],
        call: Callable[[Batch], Outputs],
        *,
        no_sync: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> list[LossSum]:
        """Forward and backward of each, the last one outside of `no_sync`. Returns the loss of each; a ghost's counts
        for nothing."""
        losses = []
        for micro_batch in micro_batches:
            self.is_last = micro_batch is micro_batches[-1]
            with nullcontext() if self.is_last else no_sync():
                loss = self.loss(micro_batch, self.outputs(micro_batch, call))
                self.start_backward()
                self.precision.scaled(loss.total).backward()
            losses.append(loss)
            progress()
        return losses


def nothing_of(loss: LossSum) -> LossSum:
    """The loss of no samples at all, whose gradients are zeros in the same places."""
    sums = {name: value * 0 for name, value in loss.sums.items()}
    return LossSum(loss.total * 0, loss.count * 0, sums)


def refuse_weights_in_loss(model: Model, outputs: Outputs, batch: Batch) -> None:
    """Raise ModelError where a model's loss uses weights: where they are spread, evaluation does not have them."""
    with torch.enable_grad():
        if unweighted(model.loss(widened(detached(outputs)), batch)).total.requires_grad:
            raise ModelError(
                "the loss uses weights of its own, which a process that holds only a part of the model does not have: "
                "use them in forward() instead, or use parallel.kind=ddp"
            )


def world_loss(micro_batches: Sequence[MicroBatch], losses: Sequence[LossSum]) -> LossSum:
    """The loss over all shards, of which each rank tells those that it ran alone."""
    pairs = zip(micro_batches, losses, strict=True)
    return reduced_loss(pairs, sorted(losses[0].sums), step=micro_batches[0], device=losses[0].total.device)


def reduced_loss(
    losses: Iterable[tuple[MicroBatch, LossSum]], names: Sequence[str], *, step: MicroBatch, device: torch.device
) -> LossSum:
    """Add the shards' losses over the world, each told by one rank: totals and counts as float64, in the tree's order.

    `names`: those of further sums; `step`: any micro-batch of the step. All ranks have to call it.
    """
    own = list(losses)
    table = loss_table(own, names, shards=step.shards, device=device)
    if dist.get_world_size() > 1:
        add_disjoint(table)
    is_counted = any(not each.ghost and isinstance(loss.count, int) and loss.count > 0 for each, loss in own)
    return replace(summed(table, names, step), is_counted=is_counted)


def loss_table(
    losses: Iterable[tuple[MicroBatch, LossSum]], names: Sequence[str], *, shards: int, device: torch.device
) -> Tensor:
    """Total, count and further sums of a rank's shards, float64 [V, 2 + names]; zeros for others' and for ghosts."""
    table = torch.zeros(shards, 2 + len(names), dtype=torch.float64, device=device)
    for micro_batch, loss in losses:
        if not micro_batch.ghost:
            row = [loss.total, _number(loss.count, device), *(loss.sums[name] for name in names)]
            table[micro_batch.shard] = torch.stack([value.detach().to(torch.float64) for value in row])
    return table


def summed(table: Tensor, names: Sequence[str], step: MicroBatch) -> LossSum:
    """The loss of a whole step, from the table [V, 2 + names] of all its shards."""
    total, count, *rest = tree_sum(table, step.present).unbind()
    return LossSum(total, count, dict(zip(names, rest, strict=True)), by_shard=table[:, 0])


def _number(value: Tensor | int, device: torch.device) -> Tensor:
    """0-dim float64 on the device; filling it there does not wait, as copying a number to it would."""
    if isinstance(value, Tensor):
        return value
    return torch.full((), value, dtype=torch.float64, device=device)
