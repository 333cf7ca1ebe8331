"""Forward passes through a pipeline's stages, without gradients, for a batch of each rank in turn."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.base.model_contracts import Batch, Outputs
from lockstep.core.distributed.collectives import receive, receive_object, send, send_object
from lockstep.core.host.activity import waiting_in
from lockstep.core.modules.buffers import BufferUpdates
from lockstep.core.modules.outputs import moved
from lockstep.core.numerics.seeds import GeneratorStates, generators, set_generators
from lockstep.parallel.partition import PartitionedModel
from lockstep.parallel.sharded import round_robin_forward


@dataclass(frozen=True)
class StageForward:
    """Runs batches through stages that are on the ranks of `group` in turn. `bounds`: the first block of each stage,
    and the number of blocks. `buffers`: of this rank's stages; they do not change."""

    model: PartitionedModel
    bounds: Sequence[int]
    buffers: Sequence[BufferUpdates]
    group: dist.ProcessGroup
    device: torch.device

    def outputs(self, batch: Batch) -> Outputs:
        """Return the model's outputs for this rank's batch. Collective: every rank runs its stages for all batches."""
        return round_robin_forward(batch, self._run_unchanged, group=self.group, device=self.device)

    def _run_unchanged(self, batch: Batch, owner: int) -> Outputs | None:
        with ExitStack() as stack:
            for buffers in self.buffers:
                stack.enter_context(buffers.unchanged())
            return self._run(batch, owner)

    def _run(self, batch: Batch, owner: int) -> Outputs | None:
        """Run one batch through all stages; return its outputs on rank `owner` of the group, None on the others."""
        layouts, size = self.model.output_layouts(batch), self.group.size()
        outputs: Any = ()
        states: GeneratorStates | None = None
        final = len(self.bounds) - 2
        for number, (first, last) in enumerate(pairwise(self.bounds)):
            previous, rank, following = (number - 1) % size, number % size, (number + 1) % size
            if rank != self.group.rank():
                continue
            received = outputs
            if number and size > 1:
                states = self._receive_object(previous)
                received = tuple(self._receive(t.empty(self.device), previous) for t in layouts[first - 1].tensors)
            outputs = self.model.run(first, last, batch=batch, received=received, states=states)
            states = generators()
            if number < final and size > 1:
                send_object(states, following, self.group)
                for tensor in outputs:
                    send(tensor, following, self.group)
        return self._to_owner(outputs, final % size, owner)

    def _receive(self, buffer: Tensor, source: int) -> Tensor:
        with waiting_in("the stage before"):
            receive(buffer, source, self.group)
        return buffer

    def _to_owner(self, outputs: Any, last: int, owner: int) -> Outputs | None:
        """Send the last stage's outputs and generator states to the rank whose batch it is."""
        rank = self.group.rank()
        if last == owner:
            return outputs if rank == owner else None
        if rank == last:
            send_object((moved(outputs, "cpu"), generators()), owner, self.group)
        elif rank == owner:
            outputs, states = self._receive_object(last)
            set_generators(states)
            return moved(outputs, self.device)
        return None

    def _receive_object(self, source: int) -> Any:
        with waiting_in(f"the stage on rank {source}"):
            return receive_object(source, self.group)
