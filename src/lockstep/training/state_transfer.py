"""Bring all processes of a new process group to the training state of the one that is furthest: point to point, as raw
tensors and JSON. Nothing is loaded before all has arrived."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.base.errors import CheckpointError
from lockstep.launch.elastic.live_notes import Position
from lockstep.training.state import TrainState


def equalise(
    state: TrainState,
    positions: Sequence[Position],
    extras: Callable[[], Mapping[str, Any]],
) -> Mapping[str, Any] | None:
    """Give every rank the state of the furthest one; `positions` are those of all ranks. Collective.

    Returns what the furthest rank's `extras` gave (JSON), on ranks whose state has changed; None elsewhere.
    """
    rank, furthest = dist.get_rank(), max(positions)
    sources = [each for each, position in enumerate(positions) if position == furthest]
    others = [each for each, position in enumerate(positions) if position != furthest]
    pairs = [(sources[number % len(sources)], other) for number, other in enumerate(others)]
    for receiver in (other for source, other in pairs if source == rank):
        _send(state, extras(), receiver)
    return next((_receive(state, source) for source, other in pairs if other == rank), None)


def _send(state: TrainState, extras: Mapping[str, Any], receiver: int) -> None:
    tensors = state.tensors()
    header = {"state": state.state_dict(), "tensors": _shapes(tensors), "extras": extras}
    _send_bytes(json.dumps(header).encode(), receiver)
    for tensor in tensors.values():
        dist.send(_on_wire(tensor.detach().contiguous()), receiver)


def _receive(state: TrainState, source: int) -> Mapping[str, Any]:
    """Raises CheckpointError where the two do not train the same model."""
    header = json.loads(_receive_bytes(source))
    tensors = state.tensors()
    if header["tensors"] != _shapes(tensors):
        raise CheckpointError(f"rank {source} trains another model or optimizer: its tensors are not those of here")
    plain = torch.contiguous_format
    received = {name: torch.empty_like(tensor, memory_format=plain) for name, tensor in tensors.items()}
    for tensor in received.values():
        dist.recv(_on_wire(tensor), source)
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.detach().copy_(received[name])
    state.load_state_dict(header["state"])
    extras: Mapping[str, Any] = header["extras"]
    return extras


def _shapes(tensors: Mapping[str, Tensor]) -> list[list[Any]]:
    return [[name, str(tensor.dtype), list(tensor.shape)] for name, tensor in tensors.items()]


def _on_wire(tensor: Tensor) -> Tensor:
    """Its bytes: Gloo does not send every dtype."""
    return tensor.view(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)


def _send_bytes(data: bytes, receiver: int) -> None:
    dist.send(torch.tensor([len(data)]), receiver)
    dist.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), receiver)


def _receive_bytes(source: int) -> bytes:
    length = torch.zeros(1, dtype=torch.int64)
    dist.recv(length, source)
    data = torch.empty(int(length), dtype=torch.uint8)
    dist.recv(data, source)
    return data.numpy().tobytes()
