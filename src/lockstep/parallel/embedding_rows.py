"""Gradients of large embeddings, of which a step reads few rows: only these are added, exchanged and scaled.

PyTorch's backward pass fills a gradient of all rows with zeros, and DDP copies and exchanges it; of MiniLM's 30,522
rows, a step of 32 texts reads about 800. The bits are those of whole gradients: a row's tokens are added in the same
order, and adding zeros changes nothing.

n = rows of an embedding, d = their width, k = rows that were read.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.core.distributed.collectives import all_reduce_max
from lockstep.core.reduction.all_reduce import AllReduce
from lockstep.core.reduction.tree import TreeSum
from lockstep.parallel.micro_batches import MicroBatches

LARGE = 1 << 20
"""Least number of elements of such an embedding."""


@dataclass(frozen=True)
class RowSum:
    """The rows of a gradient [n, d] that are not zero."""

    rows: Tensor
    """Their numbers, ascending [k]."""
    values: Tensor
    """[k, d]"""

    def add_(self, other: "RowSum") -> "RowSum":
        """Return the sum; TreeSum calls this method of a tensor."""
        rows, places = torch.unique(torch.cat([self.rows, other.rows]), return_inverse=True)
        mine, theirs = places.split([len(self.rows), len(other.rows)])
        values = self.values.new_zeros(len(rows), self.values.size(1))
        values[mine] = self.values
        values[theirs] += other.values
        return RowSum(rows, values)


def row_sum(tokens: Tensor, gradients: Tensor, padding: int | None) -> RowSum:
    """Return the contribution of one call of an embedding: the sum of the gradients [..., d] of each token [...]."""
    rows, places = torch.unique(tokens, return_inverse=True)
    is_padding = rows == (-1 if padding is None else padding)
    place = int(is_padding.nonzero()) if is_padding.any() else -1
    backward = torch.ops.aten.embedding_dense_backward
    values = backward(gradients, places, num_weights=len(rows), padding_idx=place, scale_grad_by_freq=False)
    return RowSum(rows, values)


class _Lookup(torch.autograd.Function):
    """An embedding; its backward pass has the gradient recorded, and leaves none for the weights."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, call: tuple[Tensor, Callable[[Tensor], None]]) -> Tensor:
        tokens, ctx.record = call
        return F.embedding(tokens, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[None, None]:
        ctx.record(gradients[0])
        return None, None


class EmbeddingRows:
    """The large embeddings of a model, their partial sums of a step, and their gradients."""

    def __init__(self, modules: Sequence[nn.Embedding], passes: MicroBatches) -> None:
        self.passes = passes
        self.trees: dict[Tensor, TreeSum] = {}
        self.shard_sums: dict[Tensor, RowSum] = {}
        self.shard: int | None = None
        """The micro-batch of `shard_sums`, which runs or has run last."""
        self.is_active = False
        """Whether a step runs; other uses of the model are not changed."""
        self.touched: dict[Tensor, Tensor] = {}
        """Gradient -> numbers of the rows outside of which it is zero."""
        self.weights: list[Tensor] = [module.weight for module in modules]
        self.gradients = {weight: torch.zeros_like(weight) for weight in self.weights}
        """[n, d] each, zero between steps except in the rows `touched`."""
        hook = {"with_kwargs": True, "prepend": True}  # later hooks may change the output
        self.hooks = [module.register_forward_hook(self._watch, **hook) for module in modules]
        self.hooks += [weight.register_post_accumulate_grad_hook(self._add_whole) for weight in self.weights]

    def start_step(self, all_reduce: AllReduce) -> None:
        self.trees = {weight: TreeSum(all_reduce.present, all_reduce.local_nodes) for weight in self.weights}
        self.shard_sums.clear()
        self.shard, self.is_active = None, True
        for gradient, rows in self.touched.items():
            gradient[rows] = 0
        self.touched.clear()

    def reduce(self, all_reduce: AllReduce) -> None:
        """Set each weight's gradient to the sum over all shards of all ranks. A collective."""
        self._end_shard()
        self.is_active = False
        for weight, gradient in self.gradients.items():
            partials = [self.trees[weight].take(node) for node in all_reduce.local_nodes]
            rows, sums = reduced(partials, gradient, all_reduce)  # type: ignore[arg-type]
            gradient[rows] = sums
            weight.grad, self.touched[gradient] = gradient, rows

    def add(self, weight: Tensor, found: RowSum) -> None:
        """Add to the sums of the current micro-batch, in the order of arrival, as autograd does."""
        micro_batch = self.passes.current
        if micro_batch.ghost:
            return
        self.passes.note(weight, [found.rows, found.values])
        if micro_batch.shard != self.shard:
            self._end_shard()
            self.shard = micro_batch.shard
        before = self.shard_sums.get(weight)
        self.shard_sums[weight] = found if before is None else before.add_(found)

    def _end_shard(self) -> None:
        """Move the sums of the micro-batch into the tree."""
        for weight, found in self.shard_sums.items():
            assert self.shard is not None
            self.trees[weight].add((self.shard, 1), found)  # type: ignore[arg-type]
        self.shard_sums.clear()

    def _watch(self, module: nn.Module, *arguments: Any) -> Tensor | None:
        """Replace the output of an embedding; `arguments`: the call's, its named ones, and the output."""
        if not self.is_active or not torch.is_grad_enabled():
            return None
        assert isinstance(module, nn.Embedding)
        inputs, named, _ = arguments
        tokens, weight, padding = inputs[0] if inputs else named["input"], module.weight, module.padding_idx

        def record(gradients: Tensor) -> None:
            self.add(weight, row_sum(tokens, gradients, padding))

        found: Tensor = _Lookup.apply(weight, (tokens, record))
        return found

    def _add_whole(self, weight: Tensor) -> None:
        """Add a gradient of all rows, where other code than the embedding has used the weight."""
        if not self.is_active or weight.grad is None:
            return
        self.add(weight, RowSum(torch.arange(len(weight), device=weight.device), weight.grad))
        weight.grad = None


def large_embeddings(model: nn.Module) -> list[nn.Embedding]:
    """Return the plain, trained embeddings that share their weights with no other module, on a CPU: on a GPU, the host
    would have to wait for the number of rows. Empty where nothing else is trained."""
    uses: Counter[Tensor] = Counter(parameter for _, parameter in model.named_parameters(remove_duplicate=False))
    found = [
        module
        for module in model.modules()
        if isinstance(module, nn.Embedding)
        and type(module).forward is nn.Embedding.forward
        and not (module.sparse or module.scale_grad_by_freq or module.max_norm is not None)
        and module.weight.requires_grad
        and module.weight.device.type == "cpu"
        and module.weight.numel() >= LARGE
        and uses[module.weight] == 1
        and not module.weight._backward_hooks  # they expect a gradient of all rows
    ]
    others = {p for p in model.parameters() if p.requires_grad} - {module.weight for module in found}
    return found if others else []


def reduced(partials: Sequence[RowSum | None], like: Tensor, all_reduce: AllReduce) -> tuple[Tensor, Tensor]:
    """Return the rows that any rank has, and their sums; `partials`: of this rank, one per node. Collective."""
    has_row = torch.zeros(len(like), dtype=torch.uint8, device=like.device)
    for partial in partials:
        if partial is not None:
            has_row[partial.rows] = 1
    if all_reduce.size > 1:
        all_reduce_max(has_row)
    rows = has_row.nonzero().view(-1)
    place = has_row.cumsum(0) - 1
    flat = [like.new_zeros(len(rows) * like.size(1)) for _ in partials or [None]]
    for partial, target in zip(partials, flat, strict=False):
        if partial is not None:
            target.view(len(rows), -1)[place[partial.rows]] = partial.values
    return rows, all_reduce.sum(flat).view(len(rows), -1)
