"""A sha256 over all weights, whichever rank holds which of them."""

import hashlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.core.distributed.collectives import all_gather_object, gather_object
from lockstep.core.modules.dtensors import global_offset, is_dtensor
from lockstep.core.numerics.checksum import bytes_of

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def line(name: str, tensor: Tensor) -> str:
    """Return a tensor's name, dtype, shape and the hex sha256 of its bytes."""
    plain = tensor.detach().cpu().contiguous()
    sha256 = hashlib.sha256(bytes_of(plain)).hexdigest()
    return f"{name} {plain.dtype} {tuple(plain.shape)} {sha256}"


def digest_of(lines: Iterable[str]) -> str:
    """Return the hex sha256 over the distinct lines of all tensors, sorted."""
    return hashlib.sha256("\n".join(sorted(set(lines))).encode()).hexdigest()


def digest(state: Mapping[str, Tensor]) -> str:
    """Return the hex sha256 over names, dtypes, shapes and bytes of all weights and buffers."""
    return digest_of(line(name, tensor) for name, tensor in state.items())


def world_lines(state: Mapping[str, Tensor], group: dist.ProcessGroup) -> list[str]:
    """List the lines of all tensors that the ranks of a group hold together, on every rank. A collective."""
    lines = [line(name, tensor) for name, tensor in state.items() if not is_dtensor(tensor)]
    sharded = {name: tensor for name, tensor in state.items() if is_dtensor(tensor)}
    names = sorted({name for own in all_gather_object(list(sharded), group) for name in own})
    for number, name in enumerate(names):
        full = gathered(sharded.get(name), number % group.size(), group)
        if full is not None:
            lines.append(line(name, full))
    return [line for own in all_gather_object(lines, group) for line in own]


def gathered(tensor: "DTensor | None", rank: int, group: dist.ProcessGroup) -> Tensor | None:
    """Gather a sharded tensor in full, on the CPU of one rank of a group; None on the others. A collective. Not
    DTensor.full_tensor(), which needs a shard on every rank and puts the full tensor on all of them."""
    own = None if tensor is None else (tensor.shape, global_offset(tensor), tensor.to_local())
    box = gather_object(own, group, to=rank)
    if box is None:
        return None
    shards = [shard for shard in box if shard is not None]
    full = torch.empty(shards[0][0], dtype=shards[0][2].dtype)
    for _, offset, local in shards:
        full[tuple(slice(start, start + size) for start, size in zip(offset, local.shape, strict=True))] = local
    return full
