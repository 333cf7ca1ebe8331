"""Forward passes of a model that a group of ranks can only run together, though each brings a batch of its own."""

from collections.abc import Callable

import torch
import torch.distributed as dist

from lockstep.contracts import Batch, Outputs
from lockstep.runtime.collectives import decided


def in_turn(
    batch: Batch, run: Callable[[Batch, int], Outputs | None], *, group: dist.ProcessGroup, device: torch.device
) -> Outputs:
    """What `run(batch, member)` gives for this rank's batch. Every rank of the group has to call it, and runs the
    batches of all members; it may give None for those of others."""
    sent, own = {name: column.cpu() for name, column in batch.items()}, None
    for member in range(group.size()):
        given = decided(sent, group, source=member)
        outputs = run({name: column.to(device) for name, column in given.items()}, member)
        own = outputs if member == group.rank() else own
    assert own is not None
    return own
