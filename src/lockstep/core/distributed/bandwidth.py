"""Measures the bandwidth and latency of the collectives that training uses."""

from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from lockstep.core.distributed.links import median_seconds
from lockstep.core.distributed.process_group import world_group
from lockstep.core.reduction.all_reduce import AllReduce
from lockstep.core.reduction.transport import transport

ELEMENTS = 1 << 22
"""Number of elements of a message: 16 MiB, about a bucket."""


@dataclass(frozen=True, kw_only=True)
class Bandwidth:
    """Bytes per second that each process sends while all send, and latencies."""

    gather: float
    """All-gather: FSDP's weights."""
    scatter: float
    """All-to-all: FSDP's gradients."""
    exchange: float
    """The tree's all-reduce: bytes of gradients per second on each rank."""
    pair: float
    """Point-to-point, to the next rank: a pipeline's activations."""
    latency_seconds: float
    """Latency of a point-to-point message of one element."""
    together_seconds: float
    """Latency of an all-reduce of one element."""


def bandwidth(device: torch.device) -> Bandwidth:
    """Measure on the default process group of at least two ranks. Collective."""
    rank, size = dist.get_rank(), dist.get_world_size()
    whole, shard = torch.ones(ELEMENTS, device=device), torch.ones(ELEMENTS // size, device=device)
    gathered, received = torch.empty(shard.numel() * size, device=device), torch.empty_like(whole)
    shards = frozenset(range(size))
    wire = transport(device)
    exchange = AllReduce([frozenset([each]) for each in range(size)], shards, wire.group)
    slots = wire.slots(0, whole.clone(), 1)
    element = torch.ones(1, device=device)

    def send_to_next(tensor: torch.Tensor, buffer: torch.Tensor) -> None:
        work = dist.irecv(buffer, group_src=(rank - 1) % size, group=world_group())
        dist.send(tensor, group_dst=(rank + 1) % size, group=world_group())
        assert work is not None
        work.wait()

    seconds = partial(median_seconds, device=device)
    gather = seconds(lambda: dist.all_gather_into_tensor(gathered, shard))
    scatter = seconds(lambda: dist.all_to_all_single(received[: len(gathered)], gathered))
    return Bandwidth(
        gather=shard.nbytes * (size - 1) / gather,
        scatter=shard.nbytes * (size - 1) / scatter,
        exchange=whole.nbytes / seconds(lambda: wire.sum(0, slots, exchange)),
        pair=whole.nbytes / seconds(lambda: send_to_next(whole, received)),
        latency_seconds=seconds(lambda: send_to_next(element, torch.empty_like(element))),
        together_seconds=seconds(lambda: dist.all_reduce(element)),
    )
