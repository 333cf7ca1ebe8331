"""Forward passes without gradients through a pipeline's stages, one batch of every rank after the other."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.contracts import Batch
from lockstep.runtime.cut import Cuttable
from lockstep.runtime.turns import in_turn
from lockstep.runtime.whereabouts import waiting_in


class Relay:
    """`bounds`: the block with which each stage begins, and the number of blocks. The stages lie on the ranks of
    `group` in turn, and each rank brings batches of its own."""

    def __init__(self, cut: Cuttable, bounds: Sequence[int], *, group: dist.ProcessGroup, device: torch.device) -> None:
        self.cut, self.group, self.device = cut, group, device
        self.stages = list(pairwise(bounds))

    def outputs(self, batch: Batch) -> Tensor:
        """The model's outputs for this rank's batch. Every rank calls it, and runs its stages for all of them."""
        return in_turn(batch, self._through, group=self.group, device=self.device)

    def _through(self, batch: Batch, member: int) -> Tensor | None:
        """One batch through all stages; its outputs on rank `member` of the group, to which it belongs."""
        wires, size = self.cut.wires(batch), self.group.size()
        held: Any = ()
        for number, (first, last) in enumerate(self.stages):
            if number % size != self.group.rank():
                continue
            received = held
            if number and size > 1:
                received = tuple(
                    self._received(way.room(self.device), (number - 1) % size) for way in wires[first - 1].tensors
                )
            held = self.cut.run(first, last, batch=batch, received=received)
            if number < len(self.stages) - 1 and size > 1:
                for tensor in held:
                    dist.send(tensor, group=self.group, group_dst=(number + 1) % size)
        return self._handed(held, (len(self.stages) - 1) % size, member)

    def _received(self, room: Tensor, source: int) -> Tensor:
        with waiting_in("the stage before"):
            dist.recv(room, group=self.group, group_src=source)
        return room

    def _handed(self, outputs: Any, last: int, member: int) -> Tensor | None:
        """The last stage's outputs to the rank whose batch it was."""
        box = [outputs.cpu() if isinstance(outputs, Tensor) else outputs]
        if last == self.group.rank() != member:
            dist.send_object_list(box, group=self.group, group_dst=member)
        if last != self.group.rank() == member:
            with waiting_in("the last stage"):
                dist.recv_object_list(box, group=self.group, group_src=last)
        (handed,) = box
        return handed.to(self.device) if isinstance(handed, Tensor) else None
