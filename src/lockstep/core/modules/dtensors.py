"""A rank's part of a tensor that is spread over several."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def part_of(tensor: Tensor) -> Tensor:
    """The numbers that lie on this rank, in the same memory; of a plain tensor, itself."""
    return tensor.to_local().detach() if is_spread(tensor) else tensor.detach()


def is_spread(tensor: object) -> TypeGuard["DTensor"]:
    """Whether it is a DTensor: a part, or what may be one, of something larger. Importing DTensor takes half a second;
    where nobody has, there is none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def gradient_of(parameter: Tensor) -> Tensor | None:
    """This rank's part of a parameter's gradient, spread as the parameter is: autograd may leave it whole, as it does
    for an embedding whose rows are split."""
    gradient = parameter.grad
    if is_spread(parameter) and is_spread(gradient):
        return part_of(gradient.redistribute(placements=parameter.placements))
    return gradient


def offset_of(tensor: Tensor) -> tuple[int, ...]:
    """Where this rank's part of a spread tensor begins in the whole, along each axis."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # noqa: PLC0415 (see is_spread)

    assert is_spread(tensor)
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(offset)


def like(tensor: Tensor, part: Tensor) -> Tensor:
    """A part, on any device, as a tensor that is spread like another one."""
    if not is_spread(tensor):
        return part
    return type(tensor)(part, tensor._spec, requires_grad=False)  # from_local would move it to the mesh's device


class Held(nn.Module):
    """What a rank holds of a model, under the model's own names; in training and evaluation mode together with it."""

    def __init__(self, model: nn.Module, parts: dict[str, nn.Parameter]) -> None:
        super().__init__()
        self.model, self._parts = model, parts

    def named_parameters(self, *_, **__):  # type: ignore[no-untyped-def]
        """The parts by name, whatever is asked for besides."""
        yield from self._parts.items()


def tied(model: nn.Module) -> dict[str, str]:
    """Every name of every parameter -> the name that `named_parameters` gives it: a tied one has several."""
    first = {parameter: name for name, parameter in model.named_parameters()}
    return {name: first[p] for name, p in model.named_parameters(remove_duplicate=False)}


def kept_buffers(model: nn.Module) -> set[str]:
    """The names of the buffers that belong to the model's state."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {name for name, value in model.state_dict().items() if name not in parameters and torch.is_tensor(value)}


def views_of(buffer: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Views of a flat buffer, one per parameter, laid out as DDP lays them in its buckets: with the parameter's strides
    where it is dense (channels last stays so). GradBucket.gradients() gives contiguous views instead, which mix them
    up."""
    views, offset = [], 0
    for parameter in parameters:
        flat = buffer[offset : offset + parameter.numel()]
        span = 1 + sum((size - 1) * stride for size, stride in zip(parameter.size(), parameter.stride(), strict=True))
        if span == parameter.numel():
            views.append(flat.as_strided(parameter.size(), parameter.stride()))
        else:
            views.append(flat.view(parameter.size()))
        offset += parameter.numel()
    return views
