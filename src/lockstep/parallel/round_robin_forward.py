"""Forward passes of a model that the ranks of a group can only run together, for a batch of each rank in turn."""

from collections.abc import Callable

import torch
import torch.distributed as dist

from lockstep.base.model_contracts import Batch, Outputs
from lockstep.core.distributed.collectives import broadcast_object
from lockstep.core.numerics.seeds import generators, set_generators


def round_robin_forward(
    batch: Batch, run: Callable[[Batch, int], Outputs | None], *, group: dist.ProcessGroup, device: torch.device
) -> Outputs:
    """The outputs of `run(batch, rank)` for this rank's batch. A collective: every rank of the group runs the batches
    of all; `run` may return None for those of other ranks. Random numbers are drawn as if each rank had run its own
    batch alone: its generator states are sent with it."""
    columns, own = {name: column.cpu() for name, column in batch.items()}, None
    after = generators()
    sent = columns, after
    for rank in range(group.size()):
        received, states = broadcast_object(sent, group, source=rank)
        set_generators(states)
        outputs = run({name: column.to(device) for name, column in received.items()}, rank)
        if rank == group.rank():
            own, after = outputs, generators()
    assert own is not None
    set_generators(after)
    return own
