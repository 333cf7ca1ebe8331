"""Checksums of tensors, computed on their own device in little more time than reading them takes."""

import ctypes
import zlib
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lockstep.core.modules.dtensors import local_tensor

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
WIDTH = 256
"""Elements in a row, for checksums of the sums of rows and columns."""


def checksum(tensor: Tensor) -> Tensor:
    """Compute a checksum of dtype, shape and bits, int64, 0-dim.

    On a CPU the CRC-32 of the bytes (4 GB/s; sums of integers take nine times as long). Elsewhere rows and columns of
    the bits are summed as integers, so that the host does not wait for the device.
    """
    plain = local_tensor(tensor)
    if plain.layout != torch.strided or plain.is_quantized:
        plain = plain.to_dense() if plain.layout != torch.strided else plain.dequantize()
    kind = zlib.crc32(f"{plain.dtype} {tuple(plain.shape)}".encode())
    flat = plain.resolve_conj().resolve_neg().contiguous().view(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    bits = flat.view(WORDS[flat.element_size()])
    if bits.device.type == "cpu":
        return torch.tensor(zlib.crc32(bytes_of(bits), kind))
    whole = bits.numel() // WIDTH * WIDTH
    rows = bits[:whole].view(-1, WIDTH)
    total = torch.full((), kind, dtype=torch.int64, device=bits.device)
    for sums in (rows.sum(0, dtype=torch.int64), rows.sum(1, dtype=torch.int64), bits[whole:].to(torch.int64)):
        odd = torch.arange(1, 2 * len(sums) + 1, 2, device=bits.device)
        total = total * 1_000_003 + (sums * odd).sum()
    return total


def tensors_of(value: Any) -> list[Tensor]:
    """List the tensors in nested containers, and in the attributes of other objects, such as dataclasses."""
    tensors: list[Tensor] = []
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, Tensor):
            tensors.append(leaf)
        elif hasattr(leaf, "__dict__") and not callable(leaf):
            tensors += [value for value in pytree.tree_leaves(vars(leaf)) if isinstance(value, Tensor)]
    return tensors


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU, valid while the tensor lives.

    Not tensor.numpy(): the storage of a tensor that was one could not be resized again, as FSDP does with gathered
    weights, which modules may get as inputs.
    """
    assert tensor.device.type == "cpu" and tensor.is_contiguous()
    if not tensor.nbytes:
        return memoryview(b"")  # its address is NULL, for which zlib.crc32 forgets what came before
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")
