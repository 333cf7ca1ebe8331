"""One line that stands for all weights, whoever holds which of them."""

import hashlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.core.distributed.collectives import all_gather_object
from lockstep.core.modules.dtensors import is_spread, offset_of

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def line(name: str, tensor: Tensor) -> str:
    """A tensor's name, type, shape and hex sha256 of its bytes."""
    plain = tensor.detach().cpu().contiguous()
    sha256 = hashlib.sha256(plain.flatten().view(torch.uint8).numpy().data).hexdigest()
    return f"{name} {plain.dtype} {tuple(plain.shape)} {sha256}"


def digest_of(lines: Iterable[str]) -> str:
    """Hex sha256 over the lines of all tensors, sorted, each taken once."""
    return hashlib.sha256("\n".join(sorted(set(lines))).encode()).hexdigest()


def digest(state: Mapping[str, Tensor]) -> str:
    """Hex sha256 over names, types, shapes and bytes of all weights and buffers."""
    return digest_of(line(name, tensor) for name, tensor in state.items())


def world_lines(state: Mapping[str, Tensor], group: dist.ProcessGroup) -> list[str]:
    """The lines of all tensors that the ranks of a group hold together, on every rank. Every rank has to call it."""
    lines = [line(name, tensor) for name, tensor in state.items() if not is_spread(tensor)]
    parts = {name: tensor for name, tensor in state.items() if is_spread(tensor)}
    names = sorted({name for own in all_gather_object(list(parts), group) for name in own})
    for number, name in enumerate(names):
        whole = joined(parts.get(name), number % group.size(), group)
        if whole is not None:
            lines.append(line(name, whole))
    return [each for own in all_gather_object(lines, group) for each in own]


def joined(tensor: "DTensor | None", place: int, group: dist.ProcessGroup) -> Tensor | None:
    """A sharded tensor as a whole, on the CPU of one rank of a group whose ranks bring their parts of it, if they have
    one; None on the others. It is the largest thing that is ever held whole."""
    box: list[Any] | None = [None] * group.size() if group.rank() == place else None
    own = None if tensor is None else (tensor.shape, offset_of(tensor), tensor.to_local().detach().cpu())
    dist.gather_object(own, box, group=group, group_dst=place)
    if box is None:
        return None
    found = [each for each in box if each is not None]
    whole = torch.empty(found[0][0], dtype=found[0][2].dtype)
    for _, offset, part in found:
        whole[tuple(slice(start, start + size) for start, size in zip(offset, part.shape, strict=True))] = part
    return whole
