"""One line that stands for all weights."""

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor


def digest(state: Mapping[str, Tensor]) -> str:
    """Hex sha256 over names, types, shapes and bytes of all weights and buffers, sorted by name."""
    sha = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name].detach().cpu().contiguous()
        sha.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        sha.update(tensor.flatten().view(torch.uint8).numpy().data)
    return sha.hexdigest()
