"""A model's outputs: a tensor, or tuples, lists, dicts and dataclasses of tensors, as a pytree."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lockstep.base.model_contracts import Outputs


def register(outputs: Outputs) -> None:
    """Register the dataclasses in a model's outputs with pytree, so that FSDP, DDP and pipelines find their tensors."""
    if isinstance(outputs, Tensor):
        return
    while unknown := {type(leaf) for leaf in pytree.tree_leaves(outputs) if is_dataclass(type(leaf))}:
        for kind in unknown:
            pytree.register_dataclass(kind)


def each(change: Callable[[Tensor], Any], outputs: Outputs) -> Outputs:
    """Return the pytree with `change` applied to every tensor; other leaves stay as they are."""
    register(outputs)
    return pytree.tree_map_only(Tensor, change, outputs)


def tensors(outputs: Outputs) -> list[Tensor]:
    """List the tensors of a pytree, in its order."""
    register(outputs)
    return [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)]


def graph_leaves(outputs: Iterable[Tensor]) -> set[Tensor]:
    """Return the leaves of the autograd graph of tensors, such as the parameters that they depend on."""
    leaves, seen, waiting = set[Tensor](), set(), [each.grad_fn for each in outputs]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaves |= {node.variable} if hasattr(node, "variable") else set()
        waiting += [each for each, _ in node.next_functions]
    return leaves


def logits_of(outputs: Outputs) -> Tensor | None:
    """Return outputs that are one tensor, else their `logits`, as transformers names them; None without such."""
    if isinstance(outputs, Tensor):
        return outputs
    logits = outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", None)
    return logits if isinstance(logits, Tensor) else None


def widened(outputs: Outputs) -> Outputs:
    """Convert half-precision tensors to fp32, in which losses and metrics are computed."""
    return each(lambda t: t.float() if t.dtype in (torch.bfloat16, torch.float16) else t, outputs)


def moved(outputs: Outputs, device: torch.device | str) -> Outputs:
    """Detach the tensors, and move them to a device."""
    return each(lambda t: t.detach().to(device), outputs)


def are_equal(outputs: Outputs, others: Outputs) -> bool:
    """Return whether two pytrees have the same structure and equal tensors; NaN equals NaN."""
    register(outputs)
    register(others)
    leaves, spec = pytree.tree_flatten(outputs)
    other_leaves, other_spec = pytree.tree_flatten(others)
    return spec == other_spec and all(map(_is_same, leaves, other_leaves))


def _is_same(leaf: Any, other: Any) -> bool:
    if isinstance(leaf, Tensor) and isinstance(other, Tensor):
        return torch.equal(leaf.nan_to_num(), other.nan_to_num())
    return type(leaf) is type(other) and bool(leaf == other)
