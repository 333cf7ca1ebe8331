"""Forward passes of a model that a group of ranks can only run together, though each brings a batch of its own."""

from collections.abc import Callable

import torch
import torch.distributed as dist

from lockstep.base.model_contracts import Batch, Outputs
from lockstep.core.distributed.collectives import broadcast_object
from lockstep.core.numerics.seeds import generators, set_generators


def in_turn(
    batch: Batch, run: Callable[[Batch, int], Outputs | None], *, group: dist.ProcessGroup, device: torch.device
) -> Outputs:
    """What `run(batch, member)` gives for this rank's batch. Every rank of the group has to call it, and runs the
    batches of all members; it may give None for those of others. Random numbers are drawn as if each rank had run its
    own batch alone: the states of its generators go with it."""
    columns, own = {name: column.cpu() for name, column in batch.items()}, None
    after = generators()
    sent = columns, after
    for member in range(group.size()):
        given, states = broadcast_object(sent, group, source=member)
        set_generators(states)
        outputs = run({name: column.to(device) for name, column in given.items()}, member)
        if member == group.rank():
            own, after = outputs, generators()
    assert own is not None
    set_generators(after)
    return own
