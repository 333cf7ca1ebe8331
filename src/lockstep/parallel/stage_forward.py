"""Forward passes without gradients through a pipeline's stages, one batch of every rank after the other."""

from collections.abc import Sequence
from contextlib import ExitStack
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.base.model_contracts import Batch, Outputs
from lockstep.core.host.activity import waiting_in
from lockstep.core.modules.buffers import BufferUpdates
from lockstep.core.modules.outputs import moved
from lockstep.core.numerics.seeds import generators, set_generators
from lockstep.parallel.partition import Cuttable
from lockstep.parallel.round_robin_forward import in_turn


class StageForward:
    """`bounds`: the block with which each stage begins, and the number of blocks. The stages lie on the ranks of
    `group` in turn, and each rank brings batches of its own. `buffers`: this rank's stages'; no batch changes them."""

    def __init__(
        self,
        cut: Cuttable,
        bounds: Sequence[int],
        buffers: Sequence[BufferUpdates],
        *,
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        self.cut, self.buffers, self.group, self.device = cut, buffers, group, device
        self.stages = list(pairwise(bounds))

    def outputs(self, batch: Batch) -> Outputs:
        """The model's outputs for this rank's batch. Every rank calls it, and runs its stages for all of them."""
        return in_turn(batch, self._leaving_no_trace, group=self.group, device=self.device)

    def _leaving_no_trace(self, batch: Batch, member: int) -> Outputs | None:
        with ExitStack() as stack:
            for buffers in self.buffers:
                stack.enter_context(buffers.unchanged())
            return self._through(batch, member)

    def _through(self, batch: Batch, member: int) -> Outputs | None:
        """One batch through all stages; its outputs on rank `member` of the group, to which it belongs."""
        wires, size = self.cut.wires(batch), self.group.size()
        held: Any = ()
        states = None
        for number, (first, last) in enumerate(self.stages):
            before, here, after = (number - 1) % size, number % size, (number + 1) % size
            if here != self.group.rank():
                continue
            received = held
            if number and size > 1:
                states = self._handed(None, before, here)
                received = tuple(self._received(way.room(self.device), before) for way in wires[first - 1].tensors)
            held = self.cut.run(first, last, batch=batch, received=received, states=states)
            states = generators()
            if number < len(self.stages) - 1 and size > 1:
                self._handed(states, here, after)
                for tensor in held:
                    dist.send(tensor, group=self.group, group_dst=after)
        return self._outputs(held, (len(self.stages) - 1) % size, member)

    def _received(self, room: Tensor, source: int) -> Tensor:
        with waiting_in("the stage before"):
            dist.recv(room, group=self.group, group_src=source)
        return room

    def _outputs(self, held: Any, last: int, member: int) -> Outputs | None:
        """The last stage's outputs on the rank whose batch it was, and its generators where they left them."""
        here = self.group.rank()
        if last == member:
            return held if here == member else None
        if here == last:
            self._handed((moved(held, "cpu"), generators()), last, member)
        elif here == member:
            outputs, states = self._handed(None, last, member)
            set_generators(states)
            return moved(outputs, self.device)
        return None

    def _handed(self, given: Any, source: int, target: int) -> Any:
        """An object of one rank on another; both call it."""
        box = [given]
        if self.group.rank() == source:
            dist.send_object_list(box, group=self.group, group_dst=target)
        else:
            with waiting_in(f"the stage on rank {source}"):
                dist.recv_object_list(box, group=self.group, group_src=source)
        return box[0]
