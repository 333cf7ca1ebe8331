"""A stage for PyTorch's pipeline schedules, for micro-batches of any shape, each with its shard's seeds."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules

from lockstep.base.model_contracts import MicroBatch
from lockstep.core.distributed.process_group import world_group
from lockstep.core.host.activity import progress, waiting_in
from lockstep.core.host.phases import phase
from lockstep.core.reduction.all_reduce import AllReduce
from lockstep.parallel.accumulation import Accumulation
from lockstep.parallel.micro_batches import MicroBatches
from lockstep.parallel.partition import PartitionedModel

_wait = schedules._wait_batch_p2p


def _marked_wait(work: list[dist.Work]) -> None:
    """Wait for neighbouring stages as the schedules do, marked as a wait."""
    with waiting_in("a neighbouring stage"):
        _wait(work)


schedules._wait_batch_p2p = _marked_wait


class StageModule(nn.Module):
    """Blocks first..last-1 of a model; takes the outputs of block first-1 for the current micro-batch."""

    def __init__(self, model: PartitionedModel, first: int, last: int, *, passes: MicroBatches) -> None:
        super().__init__()
        self.partitioned, self.first, self.last, self.passes = model, first, last, passes

    def forward(self, *received: Tensor) -> Any:
        with self.passes.precision.autocast():
            return self.partitioned.run(self.first, self.last, batch=self.passes.current.batch, received=received)


ByMicroBatch = dict[int, Sequence[Tensor]]


class SeededStage(PipelineStage):
    """A stage for PyTorch's schedules, with the seeds and shapes of each micro-batch; PyTorch's has one shape for all.

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
        self.module, self.passes = module, module.passes
        self.accumulation = Accumulation(trained, module.passes, leaves_last=False)

    def start_step(self, micro_batches: Sequence[MicroBatch], all_reduce: AllReduce) -> None:
        """Set the step's micro-batches; `all_reduce` is over the replicas of this stage."""
        self.accumulation.start_step(all_reduce)
        self.passes.buffers.start_step(all_reduce)
        self.micro_batches = list(micro_batches)
        self.received, self.sent = ByMicroBatch(), ByMicroBatch()
        """Inputs from the stage before, and outputs to the next, by micro-batch."""
        self.received_gradients, self.sent_gradients = ByMicroBatch(), ByMicroBatch()
        """Gradients of those of them that are not integers."""

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Allocate the inputs of a micro-batch, and receive them."""
        if self.is_first:
            return []
        self.received[fwd_chunk_id] = self._buffers(fwd_chunk_id, self.module.first)
        return self._transfers(dist.irecv, self.received[fwd_chunk_id], self.stage_index - 1)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return [] if self.is_last else self._transfers(dist.isend, self.sent[fwd_chunk_id], self.stage_index + 1)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Allocate the gradients of a micro-batch's outputs, and receive them."""
        if self.is_last:
            return []
        self.received_gradients[bwd_chunk_id] = _floating(self._buffers(bwd_chunk_id, self.module.last))
        return self._transfers(dist.irecv, self.received_gradients[bwd_chunk_id], self.stage_index + 1)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_first:
            return []
        return self._transfers(dist.isend, self.sent_gradients.pop(bwd_chunk_id), self.stage_index - 1)

    def set_local_fwd_input(self, prev_stage_outputs: Sequence[Tensor], mb_index: int) -> None:
        """Set the outputs of the stage before, where this rank has that, too."""
        self.received[mb_index] = [output.detach() for output in prev_stage_outputs]

    def set_local_bwd_input(self, next_stage_bwd_outputs: Sequence[Tensor], mb_index: int) -> None:  # type: ignore[override]
        self.received_gradients[mb_index] = next_stage_bwd_outputs

    def get_local_bwd_output(self, mb_index: int) -> Sequence[Tensor]:
        return self.sent_gradients.pop(mb_index)

    def forward_one_chunk(self, fwd_chunk_id: int, *_: Any, **__: Any) -> Any:
        micro_batch = self.micro_batches[fwd_chunk_id]
        self.passes.at(micro_batch)
        inputs = self.received.get(fwd_chunk_id, ())
        for tensor in _floating(inputs):
            tensor.requires_grad_()
        with phase("forward"), self.passes.updating(micro_batch):
            outputs = self.module(*inputs)
        if not self.is_last:
            self.sent[fwd_chunk_id] = outputs
        progress()
        return outputs

    def backward_one_chunk(self, bwd_chunk_id: int, loss: Any = None, *_: Any, **__: Any) -> None:
        """Add up the gradients of a micro-batch, from its loss on the last stage."""
        self.passes.at(self.micro_batches[bwd_chunk_id], returns=True)
        self.passes.start_backward()
        if self.is_last:
            torch.autograd.backward(loss)
        else:
            outputs, gradients = _floating(self.sent.pop(bwd_chunk_id)), self.received_gradients.pop(bwd_chunk_id)
            pairs = [pair for pair in zip(outputs, gradients, strict=True) if pair[0].requires_grad]
            torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])
        inputs = _floating(self.received.pop(bwd_chunk_id, ()))
        to_send = [torch.zeros_like(t) if t.grad is None else t.grad.contiguous() for t in inputs]
        self.sent_gradients[bwd_chunk_id] = to_send
        progress()

    def _buffers(self, number: int, block: int) -> list[Tensor]:
        """Allocate what is received before a block, for a micro-batch."""
        with self.passes.precision.autocast():
            layouts = self.module.partitioned.output_layouts(self.micro_batches[number].batch)[block - 1].tensors
        return [layout.empty(self.device) for layout in layouts]

    def _transfers(self, kind: Callable[..., Any], tensors: Sequence[Tensor], stage: int) -> list[dist.P2POp]:
        """List the messages to or from a stage. On CPUs they go through the default group: PyTorch's schedules wait for
        those of another one as long as it took to open (see `wait_for`)."""
        peer, group = self.stage_index_to_group_rank[stage], self.group
        if group is not None and self.device.type == "cpu":
            peer, group = dist.get_global_rank(group, peer), world_group()
        return [dist.P2POp(kind, tensor, group=group, group_peer=peer) for tensor in tensors]


def _floating(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors that have gradients: integers have none."""
    return [tensor for tensor in tensors if tensor.is_floating_point()]
