"""A stage of a pipeline for PyTorch's schedules: micro-batches of any shape, each under its own shard's randomness."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.stage import _RecvInfo

from lockstep.base.model_contracts import MicroBatch
from lockstep.core.host.activity import progress
from lockstep.core.modules.outputs import tensors
from lockstep.core.reduction.all_reduce import AllReduce
from lockstep.parallel.accumulation import Accumulation
from lockstep.parallel.micro_batches import MicroBatches
from lockstep.parallel.partition import Cuttable, Travelling


class Segment(nn.Module):
    """Blocks first..last-1 of a model; takes what block first-1 gives for the present micro-batch."""

    def __init__(self, cut: Cuttable, first: int, last: int, *, passes: MicroBatches) -> None:
        super().__init__()
        self.cut, self.first, self.last, self.passes = cut, first, last, passes

    def forward(self, *received: Tensor) -> Any:
        """See Cuttable.run."""
        assert self.passes.current is not None
        with self.passes.precision.autocast():
            return self.cut.run(self.first, self.last, batch=self.passes.current.batch, received=received)


class Rooms(dict[int, tuple[_RecvInfo, ...]]):
    """Memory for what arrives, by micro-batch: taken when it is first asked for."""

    def __init__(self, make: Callable[[int], tuple[_RecvInfo, ...]]) -> None:
        super().__init__()
        self.make = make

    def __missing__(self, number: int) -> tuple[_RecvInfo, ...]:
        self[number] = self.make(number)
        return self[number]


class SeededStage(PipelineStage):
    """The library's stage knows one shape for a whole run, and no randomness.

    Number `number` of `count`; they lie on the ranks of `group` in turn. `trained`: the parameters of its blocks.
    """

    def __init__(
        self,
        segment: Segment,
        trained: Sequence[nn.Parameter],
        *,
        number: int,
        count: int,
        device: torch.device,
        group: dist.ProcessGroup,
    ) -> None:
        super().__init__(segment, number, count, device, group=group)
        self.segment, self.passes, self.micro_batches = segment, segment.passes, list[MicroBatch]()
        self.accumulation = Accumulation(trained, segment.passes, leaves_last=False)
        self.args_recv_info = Rooms(self._rooms_forward)
        self.grad_recv_info = Rooms(self._rooms_backward)
        self.has_backward = True

    def start_step(self, micro_batches: Sequence[MicroBatch], exchange: AllReduce) -> None:
        """These come next; `exchange` is how the replicas of this stage finish their tree."""
        self.accumulation.start_step(exchange)
        self.passes.buffers.start_step(exchange)
        self.micro_batches = list(micro_batches)
        self.chunks = len(self.micro_batches)
        self.args_recv_info.clear()
        self.grad_recv_info.clear()
        self.clear_runtime_states()
        self.act_send_info = defaultdict(list)  # the last one's outputs, however many, go nowhere
        if not self.is_last:
            places = range(len(self._ways(0, self.segment.last)))
            self.act_send_info.update((place, [self.stage_index + 1]) for place in places)
        inputs = 0 if self.is_first else len(self._ways(0, self.segment.first))
        self.grad_send_info = [self.stage_index - 1] * inputs

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Under the randomness of the micro-batch's shard."""
        micro_batch = self.micro_batches[fwd_chunk_id]
        self.passes.at(micro_batch)
        self.passes.buffers.reset()
        outputs = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        if self.is_last:  # the library detaches what it has kept of them, and takes it for tensors
            self.fwd_cache[fwd_chunk_id] = (tuple(tensors(outputs)), self.fwd_cache[fwd_chunk_id][1])
        if not micro_batch.ghost:
            self.passes.buffers.end_shard(micro_batch.shard)
        progress()
        return outputs

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        """Its gradients belong to the micro-batch's shard."""
        self.passes.at(self.micro_batches[bwd_chunk_id])
        self.passes.start_backward()
        ways = [] if self.is_first else self._ways(bwd_chunk_id, self.segment.first)
        metas: tuple[Any, ...] = tuple(_meta(way) for way in ways)
        self._stage_meta.inputs = self._stage_meta.input_grads = metas
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        gradients = self.bwd_cache[bwd_chunk_id]
        self.bwd_cache[bwd_chunk_id] = tuple(g if g is None else g.contiguous() for g in gradients)
        self.args_recv_info.pop(bwd_chunk_id, None)
        self.grad_recv_info.pop(bwd_chunk_id, None)
        progress()

    def _ways(self, number: int, block: int) -> list[Travelling]:
        """How what is handed over before a block travels, for a micro-batch."""
        with self.passes.precision.autocast():
            return self.segment.cut.wires(self.micro_batches[number].batch)[block - 1].tensors

    def _rooms_forward(self, number: int) -> tuple[_RecvInfo, ...]:
        if self.is_first:
            return ()
        return self._rooms(number, self.segment.first, self.stage_index - 1)

    def _rooms_backward(self, number: int) -> tuple[_RecvInfo, ...]:
        if self.is_last:
            return ()
        rooms = self._rooms(number, self.segment.last, self.stage_index + 1)
        return tuple(room if room.tensor_meta and room.tensor_meta.requires_grad else _nothing(room) for room in rooms)

    def _rooms(self, number: int, block: int, source: int) -> tuple[_RecvInfo, ...]:
        return tuple(
            _RecvInfo(f"{source}:{place}", source, way.room(self.device), _meta(way))
            for place, way in enumerate(self._ways(number, block))
        )


def _meta(way: Travelling) -> Any:
    from torch.distributed.pipelining._utils import _TensorMeta  # noqa: PLC0415 (since torch 2.13, see parallel/_torch)

    room = way.room(torch.device("meta"))
    return _TensorMeta(room.shape, room.stride(), room.dtype, way.dtype.is_floating_point)


def _nothing(room: _RecvInfo) -> _RecvInfo:
    """Integers have no gradient."""
    return _RecvInfo(room.input_name, room.source, None, None)
