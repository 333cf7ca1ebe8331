"""One line that stands for all weights, whoever holds which of them."""

import hashlib
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor


def line(name: str, tensor: Tensor) -> str:
    """A tensor's name, type, shape and hex sha256 of its bytes."""
    plain = tensor.detach().cpu().contiguous()
    sha256 = hashlib.sha256(plain.flatten().view(torch.uint8).numpy().data).hexdigest()
    return f"{name} {plain.dtype} {tuple(plain.shape)} {sha256}"


def digest_of(lines: Iterable[str]) -> str:
    """Hex sha256 over the lines of all tensors, sorted."""
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()


def digest(state: Mapping[str, Tensor]) -> str:
    """Hex sha256 over names, types, shapes and bytes of all weights and buffers."""
    return digest_of(line(name, tensor) for name, tensor in state.items())
