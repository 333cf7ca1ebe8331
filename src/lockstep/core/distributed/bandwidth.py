"""How fast the processes of the open group exchange tensors, on each of the paths that training takes."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from lockstep.core.distributed.process_group import world_group
from lockstep.core.reduction.all_reduce import AllReduce
from lockstep.core.reduction.transport import transport

NUMBERS = 1 << 22
"""Of a message: 16 MiB, about a bucket."""
ROUNDS = 5


@dataclass(frozen=True, kw_only=True)
class Bandwidth:
    """Bytes per second that each process sends while all of them do, and what any message costs besides."""

    gather: float
    """All-gather: FSDP's weights."""
    scatter: float
    """All-to-all: FSDP's gradients."""
    exchange: float
    """Bytes of gradients per second that the tree's exchange brings from partial sums to the whole, on each rank."""
    pair: float
    """From one process to the next: what a pipeline hands on."""
    latency_seconds: float
    """Of a message of one number."""
    together_seconds: float
    """Of the sum of one number over all: what it costs to wait for each other."""


def bandwidth(device: torch.device) -> Bandwidth:
    """Measure them; every rank of a world of at least two has to call it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    whole, part = torch.ones(NUMBERS, device=device), torch.ones(NUMBERS // size, device=device)
    gathered, received = torch.empty(part.numel() * size, device=device), torch.empty_like(whole)
    shards = frozenset(range(size))
    wire = transport(device)
    exchange = AllReduce([frozenset([each]) for each in range(size)], shards, wire.group)
    slots = wire.slots(0, whole.clone(), 1)
    number = torch.ones(1, device=device)

    def hand_on(tensor: torch.Tensor, room: torch.Tensor) -> None:
        work = dist.irecv(room, group_src=(rank - 1) % size, group=world_group())
        dist.send(tensor, group_dst=(rank + 1) % size, group=world_group())
        assert work is not None
        work.wait()

    gather = _seconds(lambda: dist.all_gather_into_tensor(gathered, part))
    scatter = _seconds(lambda: dist.all_to_all_single(received[: len(gathered)], gathered))
    whole_bytes, part_bytes = whole.nbytes, part.nbytes
    return Bandwidth(
        gather=part_bytes * (size - 1) / gather,
        scatter=part_bytes * (size - 1) / scatter,
        exchange=whole_bytes / _seconds(lambda: wire.sum(0, slots, exchange)),
        pair=whole_bytes / _seconds(lambda: hand_on(whole, received)),
        latency_seconds=_seconds(lambda: hand_on(number, torch.empty_like(number))),
        together_seconds=_seconds(lambda: dist.all_reduce(number)),
    )


def _seconds(task: Callable[[], object]) -> float:
    """The median, from all ranks' start to this one's end, without the first, which makes connections and pages."""
    found = []
    for _ in range(ROUNDS + 1):
        dist.barrier()
        begin = time.perf_counter()
        task()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        found.append(time.perf_counter() - begin)
    return statistics.median(found[1:])
