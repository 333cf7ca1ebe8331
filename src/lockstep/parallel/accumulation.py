"""Gradients of a rank's shards, added in the tree as they come.

V = shards of a step, W = processes.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from lockstep.core.modules.dtensors import gradient_of, part_of, views_of
from lockstep.core.reduction.all_reduce import AllReduce
from lockstep.core.reduction.tree import Node, TreeSum
from lockstep.parallel.micro_batches import MicroBatches


class Accumulation:
    """Keeps each parameter's gradients of a rank's shards as at most log2(V/W)+1 partial sums.

    With `leaves_last`, the last micro-batch leaves the first of them in p.grad, where that parameter took part in it:
    from there DDP, whose hook comes next, brings it to its bucket. `fill` and `take` give the others.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], passes: MicroBatches, *, leaves_last: bool = True) -> None:
        self.passes, self.leaves_last = passes, leaves_last
        self.parameters = [p for p in parameters if p.requires_grad]
        self.trees: dict[Tensor, TreeSum] = {}
        self.nodes: Sequence[Node] = ()
        """What this rank brings to the step's tree."""
        self.left: set[Tensor] = set()
        """Parameters whose first partial sum is in p.grad."""
        self.hooks = [p.register_post_accumulate_grad_hook(self._keep) for p in self.parameters]

    def start_step(self, exchange: AllReduce) -> None:
        """Forget the last step; take in what comes for the next."""
        self.nodes, self.left = exchange.nodes[exchange.rank], set()
        self.trees = {p: TreeSum(exchange.present, self.nodes) for p in self.parameters}

    def take(self, parameter: Tensor, node: Node) -> Tensor | None:
        """One of a parameter's partial sums, handed out once; None where no shard used it."""
        part = self.trees[parameter].take(node)
        if part is not None and part.is_cuda:  # it is freed here, and was made on another stream
            part.record_stream(torch.cuda.current_stream(part.device))
        return part

    def fill(self, parameters: Sequence[Tensor], slots: Sequence[Sequence[Tensor]]) -> None:
        """Write the partial sums of some parameters, zeros where no shard used one: slots[k][i] takes node k of
        parameter i. What `left` names lies in the first slot already.
        """
        for number, (node, slot) in enumerate(zip(self.nodes, slots, strict=False)):
            for parameter, target in zip(parameters, slot, strict=True):
                if number == 0 and parameter in self.left:
                    continue
                part = self.take(parameter, node)
                target.zero_() if part is None else target.copy_(part)

    def totals(self, exchange: AllReduce) -> list[tuple[nn.Parameter, Tensor]]:
        """Each parameter with the sum of its gradients over all shards of all ranks, zeros where no shard used it; of a
        parameter that is spread, the part that lies here."""
        parts = [part_of(parameter) for parameter in self.parameters]
        if exchange.size == 1:
            found = [self.take(parameter, exchange.nodes[0][0]) for parameter in self.parameters]
            totals = [torch.zeros_like(p) if t is None else t for p, t in zip(parts, found, strict=True)]
        else:
            slots = [parts[0].new_empty(sum(part.numel() for part in parts)) for _ in range(exchange.slots)]
            self.fill(self.parameters, [views_of(slot, parts) for slot in slots])
            totals = views_of(exchange.sum(slots), parts)
        return list(zip(self.parameters, totals, strict=True))

    def remove(self) -> None:
        while self.hooks:
            self.hooks.pop().remove()

    def _keep(self, parameter: Tensor) -> None:
        """Move a fresh gradient into the tree."""
        micro_batch = self.passes.current
        assert micro_batch is not None
        if micro_batch.ghost:
            if not self.leaves_last:
                parameter.grad = None
            return
        gradient = gradient_of(parameter)
        assert gradient is not None
        self.trees[parameter].add((micro_batch.shard, 1), gradient)
        parameter.grad = None
        if self.leaves_last and self.passes.is_last:
            part = self.trees[parameter].take(self.nodes[0])
            if part is not None and part.stride() != parameter.stride() and part.shape == parameter.shape:
                part = torch.empty_like(parameter).copy_(part)  # as DDP's bucket has it
            parameter.grad = part
            self.left.add(parameter)
