"""Local shards of DTensors, and names of a model's parameters and buffers."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor, nn

from lockstep.base.errors import ModelError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(tensor: object) -> TypeGuard["DTensor"]:
    """Return whether it is a DTensor, without an import of that class, which takes half a second."""
    known = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)  # a thread may be importing it
    return known is not None and isinstance(tensor, known)


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor, or a plain tensor itself: detached, on the same memory."""
    return tensor.to_local().detach() if is_dtensor(tensor) else tensor.detach()


def local_gradient(parameter: Tensor) -> Tensor:
    """Return this rank's shard of a parameter's gradient; zeros where there is none. Autograd may leave it with other
    placements than the parameter's, as for an embedding whose rows are split. Raises ModelError for a sparse one."""
    refuse_sparse(parameter)
    gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    if is_dtensor(parameter) and is_dtensor(gradient):
        return local_tensor(gradient.redistribute(placements=parameter.placements))
    return gradient


def refuse_sparse(parameter: Tensor) -> None:
    """Raise ModelError where a parameter's gradient is sparse."""
    if parameter.grad is not None and parameter.grad.is_sparse:
        raise ModelError(
            f"an operation gives a sparse gradient for a weight {list(parameter.shape)}, as F.embedding does with "
            "sparse=True: leave that out; of a large nn.Embedding only the rows that were read are exchanged anyway"
        )


def global_offset(tensor: Tensor) -> tuple[int, ...]:
    """Return the offset of this rank's shard of a DTensor in the full tensor, along each axis."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # noqa: PLC0415 (see is_dtensor)

    assert is_dtensor(tensor)
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(offset)


def sharded_like(tensor: Tensor, local: Tensor) -> Tensor:
    """Wrap a local shard, on any device, as a DTensor placed like `tensor`; return it as it is where that is plain."""
    if not is_dtensor(tensor):
        return local
    return type(tensor)(local, tensor._spec, requires_grad=False)  # from_local would move it to the mesh's device


class LocalParameters(nn.Module):
    """This rank's shards of a model's parameters, under the model's own names; train() and eval() reach the model."""

    def __init__(self, model: nn.Module, parameters: dict[str, nn.Parameter]) -> None:
        super().__init__()
        self.model, self._local = model, parameters

    def named_parameters(self, *_, **__):  # type: ignore[no-untyped-def]
        """Yield the shards by name; arguments are ignored."""
        yield from self._local.items()


def first_names(model: nn.Module) -> dict[str, str]:
    """Map every name of a parameter to the one that `named_parameters` gives it: a tied one has several."""
    first = {parameter: name for name, parameter in model.named_parameters()}
    return {name: first[p] for name, p in model.named_parameters(remove_duplicate=False)}


def persistent_buffers(model: nn.Module) -> set[str]:
    """Return the names of the buffers in the model's state dict."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {name for name, value in model.state_dict().items() if name not in parameters and torch.is_tensor(value)}


def parameter_views(flat: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return views of a flat tensor, one per parameter, laid out as in DDP's buckets: with the parameter's strides
    where it is dense, such as channels last. GradBucket.gradients() returns contiguous views instead."""
    views, offset = [], 0
    for parameter in parameters:
        view = flat[offset : offset + parameter.numel()]
        span = 1 + sum((size - 1) * stride for size, stride in zip(parameter.size(), parameter.stride(), strict=True))
        if span == parameter.numel():
            views.append(view.as_strided(parameter.size(), parameter.stride()))
        else:
            views.append(view.view(parameter.size()))
        offset += parameter.numel()
    return views
