"""The network between ranks, measured: collectives of all ranks, and messages in pairs."""

import statistics
import time
from collections.abc import Callable, Iterator
from itertools import combinations
from typing import TypeVar

import torch
import torch.distributed as dist

from lockstep.core.host.stream_clock import synchronize

BYTES = 4 << 20
"""Bytes of a collective, and of a message whose speed is measured."""
ROUNDS = 5
TRIPS = 20
MOST_IN_FULL = 16
"""Ranks of which every pair is measured; of more, each rank and its next: a ring, as an all-reduce uses it."""
T = TypeVar("T")


def together(task: Callable[[], T]) -> T:
    """Run a task on all ranks at the same time."""
    dist.barrier()
    return task()


def collective_seconds(device: torch.device) -> dict[str, float]:
    """Return the median seconds of each collective on BYTES of every rank, the barrier's of none. Collective."""
    size = dist.get_world_size()
    tensor = torch.zeros(BYTES, dtype=torch.uint8, device=device)
    gathered = torch.empty(size * BYTES, dtype=torch.uint8, device=device)
    floats = torch.zeros(BYTES // 4, device=device)
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # its name before torch 2.13
    return {
        "barrier": median_seconds(dist.barrier, device),
        "broadcast": median_seconds(lambda: dist.broadcast(tensor, 0), device),
        "all-gather": median_seconds(lambda: gather(gathered, tensor), device),
        "all-reduce": median_seconds(lambda: dist.all_reduce(floats), device),
    }


def pairs(size: int) -> Iterator[tuple[int, int]]:
    if size <= MOST_IN_FULL:
        return combinations(range(size), 2)
    return ((rank, (rank + 1) % size) for rank in range(size))


def by_pair(device: torch.device) -> dict[int, list[float]]:
    """Measure other rank -> [seconds of a round trip of one byte, bytes per second to it], at best. Collective."""
    rank, found = dist.get_rank(), dict[int, list[float]]()
    for one, other in pairs(dist.get_world_size()):
        for sender, receiver in ((one, other), (other, one)):  # a cable or a queue may be slow in one direction
            if rank == sender:
                found[receiver] = _ping(receiver, device)
            elif rank == receiver:
                _answered(sender, device)
        dist.barrier()
    return found


def _ping(receiver: int, device: torch.device) -> list[float]:
    byte, large = _messages(device)

    def trip(message: torch.Tensor) -> float:
        start = time.perf_counter()
        dist.send(message, receiver)
        dist.recv(byte, receiver)
        synchronize(device)
        return time.perf_counter() - start

    trip(byte)
    latency = min(trip(byte) for _ in range(TRIPS))  # what other processes add is not the network's
    seconds = min(trip(large) for _ in range(ROUNDS))
    return [latency, len(large) / max(seconds - latency, 1e-9)]


def _answered(sender: int, device: torch.device) -> None:
    """Answer each message of `_ping` with a byte."""
    byte, large = _messages(device)
    for message in (*[byte] * (1 + TRIPS), *[large] * ROUNDS):
        dist.recv(message, sender)
        dist.send(byte, sender)
    synchronize(device)


def _messages(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    byte, large = (torch.zeros(size, dtype=torch.uint8, device=device) for size in (1, BYTES))
    return byte, large


def median_seconds(task: Callable[[], object], device: torch.device) -> float:
    """Return the median time of a collective on this rank, without the first round, which opens connections."""
    task()
    seconds = []
    for _ in range(ROUNDS):
        dist.barrier()
        start = time.perf_counter()
        task()
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)
