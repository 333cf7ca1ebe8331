"""Gradient accumulation of a rank's shards in the tree."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from lockstep.core.modules.dtensors import local_gradient, local_tensor, parameter_views
from lockstep.core.reduction.all_reduce import AllReduce
from lockstep.core.reduction.tree import Node, TreeSum
from lockstep.parallel.micro_batches import MicroBatches


class Accumulation:
    """Accumulates each parameter's gradients as few partial sums: see TreeSum.

    With `leaves_last`, the last micro-batch leaves the first partial sum in p.grad, where the parameter took part in
    it: DDP's hook runs next and copies it to its bucket. `fill` and `take` give the other partial sums.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], passes: MicroBatches, *, leaves_last: bool = True) -> None:
        self.passes, self.leaves_last = passes, leaves_last
        self.parameters = [p for p in parameters if p.requires_grad]
        self.trees: dict[Tensor, TreeSum] = {}
        self.nodes: Sequence[Node] = ()
        """The nodes of this rank in the step's tree."""
        self.left: set[Tensor] = set()
        """Parameters whose first partial sum is in p.grad."""
        self.hooks = [p.register_post_accumulate_grad_hook(self._accumulate) for p in self.parameters]

    def start_step(self, all_reduce: AllReduce) -> None:
        self.nodes, self.left = all_reduce.local_nodes, set()
        self.trees = {p: TreeSum(all_reduce.present, self.nodes) for p in self.parameters}

    def take(self, parameter: Tensor, node: Node) -> Tensor | None:
        """Remove and return one of a parameter's partial sums; None where no shard used the parameter."""
        partial = self.trees[parameter].take(node)
        if partial is not None and partial.is_cuda:  # allocated on another stream than the one that frees it
            partial.record_stream(torch.cuda.current_stream(partial.device))
        return partial

    def fill(self, parameters: Sequence[Tensor], slots: Sequence[Sequence[Tensor]]) -> None:
        """Write partial sums, zeros where no shard used a parameter: slots[k][i] gets node k of parameter i. Those of
        parameters in `left` are in the first slot already."""
        for number, (node, slot) in enumerate(zip(self.nodes, slots, strict=False)):
            for parameter, target in zip(parameters, slot, strict=True):
                if number == 0 and parameter in self.left:
                    continue
                partial = self.take(parameter, node)
                target.zero_() if partial is None else target.copy_(partial)

    def totals(self, all_reduce: AllReduce) -> list[tuple[nn.Parameter, Tensor]]:
        """Return each parameter with its gradients' sum over all shards of all ranks, or zeros; of DTensors shards."""
        totals: dict[Tensor, Tensor] = {}
        for dtype in {p.dtype: None for p in self.parameters}:  # all ranks in this order
            alike = [p for p in self.parameters if p.dtype == dtype]
            totals |= zip(alike, self._totals(alike, all_reduce), strict=True)
        return [(p, totals[p]) for p in self.parameters]

    def _totals(self, parameters: Sequence[Tensor], all_reduce: AllReduce) -> list[Tensor]:
        """Return the totals of parameters of one dtype."""
        local = [local_tensor(parameter) for parameter in parameters]
        if all_reduce.size == 1:
            sums = [self.take(parameter, all_reduce.local_nodes[0]) for parameter in parameters]
            return [torch.zeros_like(p) if s is None else s for p, s in zip(local, sums, strict=True)]
        slots = [local[0].new_empty(sum(p.numel() for p in local)) for _ in range(all_reduce.max_nodes)]
        self.fill(parameters, [parameter_views(slot, local) for slot in slots])
        return parameter_views(all_reduce.sum(slots), local)

    def _accumulate(self, parameter: Tensor) -> None:
        """Move a new gradient from p.grad into the tree."""
        micro_batch = self.passes.current
        gradient = local_gradient(parameter)
        if micro_batch.ghost:
            if not self.leaves_last:
                parameter.grad = None
            elif gradient.stride() != parameter.stride():  # DDP warns of another layout than its bucket's
                parameter.grad = torch.zeros_like(parameter)
            return
        self.passes.note(parameter, [gradient])
        self.trees[parameter].add((micro_batch.shard, 1), gradient)
        parameter.grad = None
        if self.leaves_last and self.passes.is_last:
            partial = self.trees[parameter].take(self.nodes[0])
            if partial is not None and partial.stride() != parameter.stride() and partial.shape == parameter.shape:
                partial = torch.empty_like(parameter).copy_(partial)  # the layout of DDP's bucket
            parameter.grad = partial
            self.left.add(parameter)
