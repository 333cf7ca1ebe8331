"""A rank's share of a step: its micro-batches one after the other, their gradients and losses added in the tree.

V = shards of a step, W = processes.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from lockstep.contracts import Batch, LossSum, MicroBatch, Model
from lockstep.runtime.batchnorm import RunningStatistics
from lockstep.runtime.collectives import add_disjoint
from lockstep.runtime.exchange import Exchange
from lockstep.runtime.precision import Precision
from lockstep.runtime.seeds import Randomness
from lockstep.runtime.tree_reduce import Node, TreeSum, tree_sum
from lockstep.runtime.whereabouts import progress


def widened(outputs: Tensor) -> Tensor:
    """Half-precision outputs as fp32, in which losses and metrics are computed; others as they are."""
    return outputs.float() if outputs.dtype in (torch.bfloat16, torch.float16) else outputs


class Accumulation:
    """Keeps each parameter's gradients of a rank's shards as at most log2(V/W)+1 partial sums. The last micro-batch
    leaves the first of them in p.grad, where that parameter took part in it; `fill` gives the others. With `exact` off,
    gradients simply add up in p.grad, shard after shard.
    """

    def __init__(self, model: Model, randomness: Randomness, precision: Precision, *, exact: bool) -> None:
        self.model, self.randomness, self.precision, self.exact = model, randomness, precision, exact
        self.statistics = RunningStatistics(model)
        self.trees: dict[Tensor, TreeSum] = {}
        self.nodes: Sequence[Node] = ()
        """What this rank brings to the step's tree."""
        self.left: set[Tensor] = set()
        """Parameters whose first partial sum is in p.grad."""
        self.current: MicroBatch | None = None
        self.is_last = False
        self.hooks = [
            p.register_post_accumulate_grad_hook(self._take) for p in model.parameters() if p.requires_grad and exact
        ]

    def run(
        self,
        micro_batches: Sequence[MicroBatch],
        exchange: Exchange,
        call: Callable[[Batch], Tensor],
        *,
        no_sync: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> list[LossSum]:
        """Forward and backward of every micro-batch; gradients are exchanged, by `call`'s own hooks, in the last.

        Returns the loss of each. A ghost's loss and gradients count for nothing.
        """
        self.nodes, self.left = exchange.nodes[exchange.rank], set()
        self.trees = {p: TreeSum(exchange.present, self.nodes) for p in self.model.parameters() if p.requires_grad}
        self.statistics.start_step(exchange)
        losses = []
        for micro_batch in micro_batches:
            self.current, self.is_last = micro_batch, micro_batch is micro_batches[-1]
            self.randomness.at(micro_batch.step, micro_batch.shard)
            self.statistics.start_shard()
            with nullcontext() if self.is_last else no_sync():
                with self.precision.autocast():
                    outputs = call(micro_batch.batch)
                loss = self.model.loss(widened(outputs), micro_batch.batch)
                self.precision.backward(loss.total)
            if not micro_batch.ghost:
                self.statistics.end_shard(micro_batch.shard)
            losses.append(loss)
            progress()
        return losses

    def end_step(self, exchange: Exchange) -> None:
        """Finish what goes with the gradients: BatchNorm's running statistics, over the world."""
        self.statistics.end_step(exchange)

    def fill(self, parameters: Sequence[Tensor], slots: Sequence[Sequence[Tensor]]) -> None:
        """Write the partial sums of some parameters, zeros where no shard used one: slots[k][i] takes node k of
        parameter i. What `left` names lies in the first slot already. They are handed out once.
        """
        for number, (node, slot) in enumerate(zip(self.nodes, slots, strict=False)):
            for parameter, target in zip(parameters, slot, strict=True):
                if number == 0 and parameter in self.left:
                    continue
                part = self.trees[parameter].take(node)
                if part is not None and part.is_cuda:  # it is freed here, and was made on another stream
                    part.record_stream(torch.cuda.current_stream(part.device))
                target.zero_() if part is None else target.copy_(part)

    def remove(self) -> None:
        """Take the hooks off again."""
        while self.hooks:
            self.hooks.pop().remove()

    def _take(self, parameter: Tensor) -> None:
        """Move a fresh gradient into the tree. In the last pass the first partial sum takes its place in p.grad, from
        where DDP, whose hook comes next, brings it to its bucket."""
        assert self.current is not None
        if self.current.ghost:
            return
        assert parameter.grad is not None
        self.trees[parameter].add((self.current.shard, 1), parameter.grad)
        parameter.grad = None
        if self.is_last:
            parameter.grad = self.trees[parameter].take(self.nodes[0])
            self.left.add(parameter)


def world_loss(micro_batches: Sequence[MicroBatch], losses: Sequence[LossSum], exchange: Exchange) -> LossSum:
    """Add the shards' losses over the world: totals and counts as float64, in the tree's order."""
    names, device = sorted(losses[0].sums), losses[0].total.device
    table = torch.zeros(micro_batches[0].shards, 2 + len(names), dtype=torch.float64, device=device)
    for micro_batch, loss in zip(micro_batches, losses, strict=True):
        if not micro_batch.ghost:
            row = [loss.total, _number(loss.count, device), *(loss.sums[name] for name in names)]
            table[micro_batch.shard] = torch.stack([value.detach().to(torch.float64) for value in row])
    if exchange.size > 1:
        add_disjoint(table)
    total, count, *rest = tree_sum(table, exchange.present).unbind()
    return LossSum(total, count, dict(zip(names, rest, strict=True)), by_shard=table[:, 0])


def _number(value: Tensor | int, device: torch.device) -> Tensor:
    """0-dim float64 on the device; filling it there does not wait, as copying a number to it would."""
    if isinstance(value, Tensor):
        return value
    return torch.full((), value, dtype=torch.float64, device=device)
