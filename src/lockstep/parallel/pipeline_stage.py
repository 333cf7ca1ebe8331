"""A stage for PyTorch's pipeline schedules, for micro-batches of any shape, each with its shard's seeds."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.pipelining.stage import _RecvInfo

from lockstep.base.model_contracts import MicroBatch
from lockstep.core.distributed.collectives import receive_object, send_object
from lockstep.core.host.activity import progress, waiting_in
from lockstep.core.host.phases import phase
from lockstep.core.modules.outputs import tensors
from lockstep.core.reduction.all_reduce import AllReduce
from lockstep.parallel.accumulation import Accumulation
from lockstep.parallel.micro_batches import MicroBatches
from lockstep.parallel.partition import PartitionedModel, TensorLayout

_wait = schedules._wait_batch_p2p


def _marked_wait(work: list[dist.Work]) -> None:
    """The schedules' own wait for neighbouring stages, marked as one."""
    with waiting_in("a neighbouring stage"):
        _wait(work)


schedules._wait_batch_p2p = _marked_wait


class StageModule(nn.Module):
    """Blocks first..last-1 of a model; takes the outputs of block first-1 for the current micro-batch."""

    def __init__(self, model: PartitionedModel, first: int, last: int, *, passes: MicroBatches) -> None:
        super().__init__()
        self.partitioned, self.first, self.last, self.passes = model, first, last, passes

    def forward(self, *received: Tensor) -> Any:
        """See PartitionedModel.run."""
        assert self.passes.current is not None
        with self.passes.precision.autocast():
            return self.partitioned.run(self.first, self.last, batch=self.passes.current.batch, received=received)


class ReceiveBuffers(dict[int, tuple[_RecvInfo, ...]]):
    """Receive buffers by micro-batch, allocated at their first use."""

    def __init__(self, allocate: Callable[[int], tuple[_RecvInfo, ...]]) -> None:
        super().__init__()
        self.allocate = allocate

    def __missing__(self, number: int) -> tuple[_RecvInfo, ...]:
        self[number] = self.allocate(number)
        return self[number]


class SeededStage(PipelineStage):
    """A PipelineStage with seeds and shapes by micro-batch; the library's has one shape for a whole run.

    Number `number` of `count`; stages are on the ranks of `group` in turn. `trained`: the parameters of its blocks.
    """

    def __init__(
        self,
        module: StageModule,
        trained: Sequence[nn.Parameter],
        *,
        number: int,
        count: int,
        device: torch.device,
        group: dist.ProcessGroup,
    ) -> None:
        super().__init__(module, number, count, device, group=group)
        self.module, self.passes, self.micro_batches = module, module.passes, list[MicroBatch]()
        self.accumulation = Accumulation(trained, module.passes, leaves_last=False)
        self.args_recv_info = ReceiveBuffers(self._forward_buffers)
        self.grad_recv_info = ReceiveBuffers(self._backward_buffers)
        self.has_backward = True

    def start_step(self, micro_batches: Sequence[MicroBatch], all_reduce: AllReduce) -> None:
        """Set the step's micro-batches; `all_reduce` is over the replicas of this stage."""
        self.accumulation.start_step(all_reduce)
        self.passes.buffers.start_step(all_reduce)
        self.micro_batches = list(micro_batches)
        self.chunks = len(self.micro_batches)
        self.args_recv_info.clear()
        self.grad_recv_info.clear()
        self.clear_runtime_states()
        self.act_send_info = defaultdict(list)  # the last stage's outputs are sent nowhere
        if not self.is_last:
            indices = range(len(self._layouts(0, self.module.last)))
            self.act_send_info.update((index, [self.stage_index + 1]) for index in indices)
        inputs = 0 if self.is_first else len(self._layouts(0, self.module.first))
        self.grad_send_info = [self.stage_index - 1] * inputs

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """As PipelineStage, with the seeds and buffers of the micro-batch."""
        micro_batch = self.micro_batches[fwd_chunk_id]
        self.passes.at(micro_batch)
        self.passes.buffers.reset()
        with phase("forward"):
            outputs = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        if self.is_last:  # the library later detaches the cached outputs, which it expects to be tensors
            self.fwd_cache[fwd_chunk_id] = (tuple(tensors(outputs)), self.fwd_cache[fwd_chunk_id][1])
        if not micro_batch.ghost:
            self.passes.buffers.end_shard(micro_batch.shard)
        progress()
        return outputs

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        """As PipelineStage, with the seeds and shapes of the micro-batch."""
        self.passes.at(self.micro_batches[bwd_chunk_id], returns=True)
        self.passes.start_backward()
        layouts = [] if self.is_first else self._layouts(bwd_chunk_id, self.module.first)
        metas: tuple[Any, ...] = tuple(_meta(layout) for layout in layouts)
        self._stage_meta.inputs = self._stage_meta.input_grads = metas
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        gradients = self.bwd_cache[bwd_chunk_id]
        self.bwd_cache[bwd_chunk_id] = tuple(g if g is None else g.contiguous() for g in gradients)
        self.args_recv_info.pop(bwd_chunk_id, None)
        self.grad_recv_info.pop(bwd_chunk_id, None)
        progress()

    def _send_meta(self, meta: Any, dst_stage: int) -> None:
        """As PipelineStage, without pickle."""
        send_object(meta, self.stage_index_to_group_rank[dst_stage], self.group)

    def _recv_meta(self, src_stage: int) -> Any:
        """As PipelineStage, without pickle."""
        return receive_object(self.stage_index_to_group_rank[src_stage], self.group)

    def _layouts(self, number: int, block: int) -> list[TensorLayout]:
        """The layouts of what is sent before a block, for a micro-batch."""
        with self.passes.precision.autocast():
            return self.module.partitioned.output_layouts(self.micro_batches[number].batch)[block - 1].tensors

    def _forward_buffers(self, number: int) -> tuple[_RecvInfo, ...]:
        if self.is_first:
            return ()
        return self._buffers(number, self.module.first, self.stage_index - 1)

    def _backward_buffers(self, number: int) -> tuple[_RecvInfo, ...]:
        if self.is_last:
            return ()
        infos = self._buffers(number, self.module.last, self.stage_index + 1)
        return tuple(info if info.tensor_meta and info.tensor_meta.requires_grad else _no_recv(info) for info in infos)

    def _buffers(self, number: int, block: int, source: int) -> tuple[_RecvInfo, ...]:
        return tuple(
            _RecvInfo(f"{source}:{index}", source, layout.empty(self.device), _meta(layout))
            for index, layout in enumerate(self._layouts(number, block))
        )


def _meta(layout: TensorLayout) -> Any:
    from torch.distributed.pipelining._utils import _TensorMeta  # noqa: PLC0415 (since torch 2.13: see LEAST_TORCH)

    meta = layout.empty(torch.device("meta"))
    return _TensorMeta(meta.shape, meta.stride(), meta.dtype, layout.dtype.is_floating_point)


def _no_recv(info: _RecvInfo) -> _RecvInfo:
    """Integers have no gradient."""
    return _RecvInfo(info.input_name, info.source, None, None)
