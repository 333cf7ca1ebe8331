"""The strategy of parallel.kind=single."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from lockstep.base.errors import LaunchError
from lockstep.base.model_contracts import Batch, LossSum, MicroBatch, Model
from lockstep.core.distributed.process_group import world_group
from lockstep.core.numerics.precision import Precision
from lockstep.core.numerics.seeds import Randomness
from lockstep.core.reduction.all_reduce import AllReduce
from lockstep.core.reduction.gradient_norm import gradients
from lockstep.parallel.micro_batches import world_loss
from lockstep.parallel.replicated import Replicated
from lockstep.parallel.strategies.single import Config


class Single(Replicated):
    """The whole model, every shard, no communication."""

    def place(self, model: Model, sample: Callable[[], Batch]) -> nn.Module:
        """Keep the model as it is; raises LaunchError when there is more than one process."""
        if dist.get_world_size() > 1:
            raise LaunchError(
                f"parallel.kind=single runs one process, but there are {dist.get_world_size()}: "
                "set parallel.kind=ddp or launch.processes=1"
            )
        return super().place(model, sample)

    def owned(self, shards: int, present: frozenset[int]) -> Sequence[int | None]:
        return sorted(present)

    def forward_backward(self, micro_batches: Sequence[MicroBatch]) -> LossSum:
        """Run every shard; gradients are their sum."""
        present = micro_batches[0].present
        all_reduce = AllReduce([present], present, world_group())
        self.accumulation.start_step(all_reduce)
        self.embedding_rows.start_step(all_reduce)
        self.passes.buffers.start_step(all_reduce)
        losses = self.passes.run(micro_batches, self.model)
        self.passes.buffers.end_step()
        unused = [p for p in self.accumulation.parameters if p not in self.accumulation.left]  # by the last micro-batch
        for parameter in unused:
            parameter.grad = torch.empty_like(parameter)
        self.accumulation.fill(unused, [gradients(unused)])
        self.embedding_rows.reduce(all_reduce)
        return world_loss(micro_batches, losses).result()


def build(config: Config, *, randomness: Randomness, precision: Precision, exact: bool) -> Single:
    return Single(randomness, precision, exact=exact)
