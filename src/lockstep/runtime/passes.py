"""Forward and backward passes of micro-batches, each under its own shard's randomness and BatchNorm statistics."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.contracts import Batch, LossSum, MicroBatch, Model
from lockstep.errors import ModelError
from lockstep.runtime.batchnorm import RunningStatistics
from lockstep.runtime.collectives import add_disjoint
from lockstep.runtime.precision import Precision
from lockstep.runtime.seeds import Randomness
from lockstep.runtime.tree_reduce import tree_sum
from lockstep.runtime.whereabouts import progress


def widened(outputs: Tensor) -> Tensor:
    """Half-precision outputs as fp32, in which losses and metrics are computed; others as they are."""
    return outputs.float() if outputs.dtype in (torch.bfloat16, torch.float16) else outputs


class Passes:
    """A rank's share of a step, one micro-batch after the other.

    `norms`: the modules among which BatchNorm layers are looked for, all of the model's if not given. `is_whole`:
    whether this rank holds all weights, so that the loss may have some of its own.
    """

    def __init__(
        self,
        model: Model,
        randomness: Randomness,
        precision: Precision,
        *,
        norms: Sequence[nn.Module] | None = None,
        is_whole: bool = True,
    ) -> None:
        self.model, self.randomness, self.precision, self.is_whole = model, randomness, precision, is_whole
        self.statistics = RunningStatistics(list(model.modules()) if norms is None else norms)
        self.current: MicroBatch | None = None
        """Whose gradients arrive just now."""
        self.is_last = False
        """Whether no other micro-batch follows in this step."""

    def at(self, micro_batch: MicroBatch) -> None:
        """Say whose pass begins: before every forward, and before a backward that does not follow it at once."""
        self.current = micro_batch
        self.randomness.at(micro_batch.step, micro_batch.shard)

    def outputs(self, micro_batch: MicroBatch, call: Callable[[Batch], Tensor]) -> Tensor:
        """The forward pass. A ghost leaves no statistics behind."""
        self.at(micro_batch)
        self.statistics.start_shard()
        with self.precision.autocast():
            outputs = call(micro_batch.batch)
        if not micro_batch.ghost:
            self.statistics.end_shard(micro_batch.shard)
        return outputs

    def loss(self, micro_batch: MicroBatch, outputs: Tensor) -> LossSum:
        """The loss of outputs. Raises ModelError."""
        if not self.is_whole:
            refuse_weights_in_loss(self.model, outputs, micro_batch.batch)
            self.is_whole = True  # asked and answered
        return self.model.loss(widened(outputs), micro_batch.batch)

    def run(
        self,
        micro_batches: Sequence[MicroBatch],
        call: Callable[[Batch], Tensor],
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
                self.precision.scaled(loss.total).backward()
            losses.append(loss)
            progress()
        return losses


def refuse_weights_in_loss(model: Model, outputs: Tensor, batch: Batch) -> None:
    """Raise ModelError where a model's loss uses weights: where they are spread, evaluation does not have them."""
    with torch.enable_grad():
        if model.loss(widened(outputs.detach()), batch).total.requires_grad:
            raise ModelError(
                "the loss uses weights of its own, which a process that holds only a part of the model does not have: "
                "use them in forward() instead, or use parallel.kind=ddp"
            )


def world_loss(micro_batches: Sequence[MicroBatch], losses: Sequence[LossSum]) -> LossSum:
    """The loss over all shards, of which each rank tells those that it ran alone."""
    pairs = zip(micro_batches, losses, strict=True)
    return told_loss(pairs, sorted(losses[0].sums), step=micro_batches[0], device=losses[0].total.device)


def told_loss(
    losses: Iterable[tuple[MicroBatch, LossSum]], names: Sequence[str], *, step: MicroBatch, device: torch.device
) -> LossSum:
    """Add the shards' losses over the world, each told by one rank: totals and counts as float64, in the tree's order.

    `names`: those of further sums; `step`: any micro-batch of the step. All ranks have to call it.
    """
    table = loss_table(losses, names, shards=step.shards, device=device)
    if dist.get_world_size() > 1:
        add_disjoint(table)
    return summed(table, names, step)


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
