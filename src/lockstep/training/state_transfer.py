"""Bring all processes of a new process group to the training state of the one that is furthest: point to point, as raw
tensors and JSON. Nothing is loaded before all has arrived."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.base.errors import CheckpointError
from lockstep.core.distributed.collectives import receive, receive_object, send, send_object
from lockstep.core.modules.dtensors import local_tensor
from lockstep.protocol.live_messages import Position
from lockstep.training.state import TrainState


def equalise(
    state: TrainState, positions: Sequence[Position], extras: Callable[[], Mapping[str, Any]], *, replica_size: int = 1
) -> Mapping[str, Any] | None:
    """Give every rank the state of the furthest one; `positions` are those of all ranks, of which each `replica_size`
    in a row hold a state together. Collective. Raises CheckpointError where they do not train the same model.

    Returns what the furthest rank's `extras` gave (JSON), on ranks that were at another position; None elsewhere.
    """
    rank, furthest = dist.get_rank(), max(positions)
    for source, other in _pairs([position == furthest for position in positions]):
        if rank == source:
            send_object({"state": state.state_dict(), "extras": extras()}, other, None)
        if rank == other:
            header = receive_object(source, None)
    for part in range(replica_size):
        for source, other in _pairs([position.step == furthest.step for position in positions[part::replica_size]]):
            ranks = [part + replica_size * each for each in (source, other)]
            if rank in ranks:
                (_send if rank == ranks[0] else _receive)(state, *(each for each in ranks if each != rank))
    if positions[rank] == furthest:
        return None
    state.load_state_dict(header["state"])
    received: Mapping[str, Any] = header["extras"]
    return received


def _pairs(have: Sequence[bool]) -> list[tuple[int, int]]:
    """Return (source, receiver) for each that does not have something, from those that have it."""
    sources = [number for number, has in enumerate(have) if has]
    others = [number for number, has in enumerate(have) if not has]
    return [(sources[number % len(sources)], other) for number, other in enumerate(others)]


def _send(state: TrainState, receiver: int) -> None:
    tensors = state.tensors()
    send_object(_shapes(tensors), receiver, None)
    for tensor in tensors.values():
        send(_as_bytes(local_tensor(tensor).contiguous().cpu()), receiver, None)  # over Gloo, which reports a loss


def _receive(state: TrainState, source: int) -> None:
    tensors = state.tensors()
    if receive_object(source, None) != _shapes(tensors):
        raise CheckpointError(f"rank {source} trains another model or optimizer: its tensors are not those of here")
    plain = torch.contiguous_format
    received = {
        name: torch.empty_like(local_tensor(tensor), memory_format=plain, device="cpu")
        for name, tensor in tensors.items()
    }
    for tensor in received.values():
        receive(_as_bytes(tensor), source, None)
    with torch.no_grad():
        for name, tensor in tensors.items():
            local_tensor(tensor).copy_(received[name])


def _shapes(tensors: Mapping[str, Tensor]) -> list[list[Any]]:
    return [[name, str(tensor.dtype), list(local_tensor(tensor).shape)] for name, tensor in tensors.items()]


def _as_bytes(tensor: Tensor) -> Tensor:
    """Return a view of its bytes: Gloo does not send every dtype."""
    return tensor.view(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)
