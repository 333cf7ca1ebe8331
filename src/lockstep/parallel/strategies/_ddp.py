"""DDP with gradients that are sums, added in the shards' tree."""

import inspect
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.base.errors import ModelError
from lockstep.base.model_contracts import Batch, LossSum, MicroBatch, Model
from lockstep.core.distributed.collectives import all_reduce_async
from lockstep.core.host.activity import waiting_in
from lockstep.core.modules.dtensors import views_of
from lockstep.core.numerics.precision import Precision
from lockstep.core.numerics.seeds import Randomness
from lockstep.core.reduction.all_reduce import AllReduce
from lockstep.core.reduction.shard_assignment import contiguous
from lockstep.core.reduction.transport import transport
from lockstep.core.reduction.tree import Shards
from lockstep.parallel.comm_thread import Future, Stream, Thread, beside
from lockstep.parallel.micro_batches import world_loss
from lockstep.parallel.replicated import Replicated
from lockstep.parallel.strategies.ddp import Config

SYNCING = "forward_sync_buffers", "broadcast_buffers"
"""What torch calls it, and called it before 2.13."""

UNSYNCED: dict[str, Any] = {
    next(name for name in SYNCING if name in inspect.signature(DistributedDataParallel).parameters): False
}

NAMED = 3
"""Of many unused parameters so many are named."""


class DataParallel(Replicated):
    """DDP with gradients that are sums, not means, and whose order of addition belongs to the shards."""

    def __init__(self, config: Config, randomness: Randomness, precision: Precision, *, exact: bool) -> None:
        super().__init__(randomness, precision, exact=exact)
        self.config = config
        self.summed: list[tuple[Tensor, Tensor]] = []
        self.handed_in = 0
        """Parameters whose gradients this step's buckets hold."""
        self.exchanges: dict[tuple[Shards, int], AllReduce] = {}
        self.background: Thread | Stream | None = None

    def place(self, model: Model, sample: Callable[[], Batch]) -> nn.Module:
        """Wrap the model for the present process group."""
        super().place(model, sample)
        self.exchanges.clear()
        if self.background is not None:
            self.background.close()
        self.trainable = sum(parameter.requires_grad for parameter in self.parameters)
        device = self.parameters[0].device
        self.background, self.transport = beside(device), transport(device)
        self.wrapped = DistributedDataParallel(
            model,
            **UNSYNCED,
            bucket_cap_mb=self.config.bucket_mb,
            find_unused_parameters=self.config.find_unused,
            gradient_as_bucket_view=True,
        )
        # A hook that held this strategy would hold it for good: DDP's C++ side, which holds the hook, is ours.
        self.wrapped.register_comm_hook(weakref.ref(self), _exchanged)
        return model

    def owned(self, shards: int, present: frozenset[int]) -> Sequence[int | None]:
        return contiguous(dist.get_rank(), dist.get_world_size(), shards=shards, present=present) or [None]

    def forward_backward(self, micro_batches: Sequence[MicroBatch]) -> LossSum:
        """Run this rank's shards; the backward pass of the last one exchanges the gradients."""
        shards, present = micro_batches[0].shards, micro_batches[0].present
        self.is_ghost = micro_batches[0].ghost
        self.exchange, self.summed, self.handed_in = self._exchange(present, shards), [], 0
        self.accumulation.start_step(self.exchange)
        self.passes.buffers.start_step(self.exchange)
        try:
            losses = self.passes.run(micro_batches, self.wrapped, no_sync=self.wrapped.no_sync)
        except RuntimeError:
            if self.background is not None:
                self.background.check()
            raise
        self._check_all_used()
        self.passes.buffers.end_step()
        for parameter, gradient in self.summed:
            if parameter.grad is None:  # DDP leaves out what the last micro-batch did not use; others may have
                parameter.grad = gradient
        return world_loss(micro_batches, losses)

    def _check_all_used(self) -> None:
        """DDP hands in no bucket from the first on that waits for an unused parameter, and says so a step too late."""
        if self.handed_in == self.trainable:
            return
        unused = [name for name, p in self.model.named_parameters() if p.requires_grad and p.grad is None]
        more = f" and {len(unused) - NAMED} more" if len(unused) > NAMED else ""
        raise ModelError(
            f"some parameters took no part in the loss of a step ({', '.join(unused[:NAMED])}{more}): set "
            "parallel.find_unused=true, or leave them out of the model"
        )

    def _exchange(self, present: Shards, shards: int) -> AllReduce:
        """Two kinds of step are met in a run, whole and ragged: keep their plans."""
        if (present, shards) not in self.exchanges:
            world, every = dist.get_world_size(), frozenset(range(shards))
            owners = [frozenset(contiguous(rank, world, shards=shards, present=every)) for rank in range(world)]
            self.exchanges[present, shards] = AllReduce(owners, present, self.transport.group)
        return self.exchanges[present, shards]

    def sum_in_tree(self, bucket: dist.GradBucket) -> Future:
        """The bucket's partial sums of every rank -> the whole tree's sum, while the backward pass goes on."""
        assert self.background is not None
        number, buffer, parameters = bucket.index(), bucket.buffer(), bucket.parameters()
        self.handed_in += len(parameters)
        self.summed += zip(parameters, views_of(buffer, parameters), strict=True)
        return self.background.run(lambda: self._finish(number, buffer, parameters))

    def _finish(self, bucket: int, buffer: Tensor, parameters: list[Tensor]) -> Tensor:
        slots = self.transport.slots(bucket, buffer, self.exchange.slots)
        self.accumulation.fill(parameters, [views_of(slot, parameters) for slot in slots])
        with waiting_in("the gradient exchange"):
            return self.transport.sum(bucket, slots, self.exchange)

    def sum_by_backend(self, bucket: dist.GradBucket) -> Future:
        """The backend's own all-reduce: as fast as it gets, in an order that depends on the world."""
        self.handed_in += len(bucket.parameters())
        buffer = bucket.buffer()
        if self.is_ghost:
            buffer.zero_()
        return all_reduce_async(buffer)


def _exchanged(strategy: weakref.ref[DataParallel], bucket: dist.GradBucket) -> Future:
    own = strategy()
    assert own is not None
    return own.sum_in_tree(bucket) if own.exact else own.sum_by_backend(bucket)


def build(config: Config, *, randomness: Randomness, precision: Precision, exact: bool) -> DataParallel:
    return DataParallel(config, randomness, precision, exact=exact)
