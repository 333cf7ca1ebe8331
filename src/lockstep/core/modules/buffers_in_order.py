"""Buffers that each shard of a step takes over from the one before it, on whichever rank that ran."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.core.distributed.collectives import receive, wait_for
from lockstep.core.host.activity import waiting_in
from lockstep.core.modules.tracked_buffer import TrackedBuffer
from lockstep.core.reduction.all_reduce import AllReduce

WAIT = "the buffers of an earlier micro-batch"


class BuffersInOrder:
    """Buffers with the rule in_order, through a step: `before` is the value that the previous shard has left."""

    all_reduce: AllReduce
    """The step's; none between steps, because the model's hooks would keep its process group for good."""

    def __init__(self, buffers: Sequence[TrackedBuffer]) -> None:
        self.buffers = buffers
        self.starts: dict[int, list[Tensor]] = {}
        """Shard -> the values with which its forward pass started, for recomputation in its backward pass."""
        self.sent: list[tuple[dist.Work | None, Tensor]] = []

    def start_step(self, all_reduce: AllReduce) -> None:
        """Start a step; `all_reduce` knows which rank runs which shard."""
        self.leave_step()
        self.all_reduce, self.shards = all_reduce, sorted(all_reduce.present)
        for buffer in self.buffers:
            buffer.previous = buffer.before

    def leave_step(self) -> None:
        """Forget a step that has ended, or has failed."""
        vars(self).pop("all_reduce", None)
        self.sent.clear()
        self.starts.clear()

    def start_shard(self, shard: int) -> None:
        """Wait for the values that the previous shard has left."""
        place = self.shards.index(shard)
        if place and (owner := self._owner(place - 1)) != self.all_reduce.rank:
            values = self._packed()
            with waiting_in(WAIT):
                receive(values, owner, self.all_reduce.group)
            self._unpack(values)
        self.starts[shard] = [buffer.before for buffer in self.buffers]

    def end_shard(self, shard: int) -> None:
        """Send the values that a shard has left to the rank of the next one."""
        for buffer in self.buffers:
            assert buffer.value is not None
            buffer.before = buffer.value.detach().clone()
        place = self.shards.index(shard) + 1
        if place < len(self.shards) and (owner := self._owner(place)) != self.all_reduce.rank:
            values = self._packed()
            self.sent.append((dist.isend(values, group=self.all_reduce.group, group_dst=owner), values))

    def restart(self, shard: int) -> None:
        """Put the values into the modules with which a shard's forward pass started."""
        for buffer, start in zip(self.buffers, self.starts[shard], strict=True):
            buffer.install(start.clone())

    def end_step(self) -> None:
        """Broadcast the values that the last shard has left. A collective."""
        with waiting_in(WAIT):
            for work, sent in self.sent:
                wait_for(work, sent, self.all_reduce.group)
            values = self._packed()
            if self.all_reduce.size > 1:
                dist.broadcast(values, group=self.all_reduce.group, group_src=self._owner(-1))
        self._unpack(values)
        self.leave_step()

    def _owner(self, place: int) -> int:
        return next(rank for rank, own in enumerate(self.all_reduce.owned) if self.shards[place] in own)

    def _packed(self) -> Tensor:
        """Return the bytes of all values, one after the other."""
        return torch.cat([buffer.before.flatten().view(torch.uint8) for buffer in self.buffers])

    def _unpack(self, values: Tensor) -> None:
        parts = values.split([buffer.before.nbytes for buffer in self.buffers])
        for buffer, part in zip(self.buffers, parts, strict=True):
            buffer.before = part.clone().view(buffer.before.dtype).view(buffer.before.shape)  # a copy is aligned
