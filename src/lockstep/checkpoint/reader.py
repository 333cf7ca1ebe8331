"""Reads checkpoints through DCP, whatever world they were written by."""

import warnings
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.errors import CheckpointError
from lockstep.runtime.collectives import together


def contents(folder: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint by name, on the meta device: type and shape without a byte of data."""
    import torch.distributed.checkpoint as dcp

    stored = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    return {
        name: torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
        for name, entry in stored.items()
        if isinstance(entry, dcp.TensorStorageMetadata)
    }


def load(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Fill tensors in place from a checkpoint, whatever world it was written by.

    Raises CheckpointError naming the tensors that are not in it, or not of the same shape.
    """
    import torch.distributed.checkpoint as dcp

    with together() if dist.is_initialized() else nullcontext():
        _compare(folder, tensors)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # a single process, as intended
        dcp.load(tensors, storage_reader=dcp.FileSystemReader(folder), no_dist=not dist.is_initialized())


def _compare(folder: Path, tensors: dict[str, Tensor]) -> None:
    stored = contents(folder)
    missing = [name for name in tensors if name not in stored]
    other = [
        f"{name} is {tuple(stored[name].shape)} there and {tuple(tensor.shape)} here"
        for name, tensor in tensors.items()
        if name in stored and stored[name].shape != tensor.shape
    ]
    if missing or other:
        wrong = [f"{name} is not in it" for name in missing] + other
        more = f" (and {len(wrong) - 3} more)" if len(wrong) > 3 else ""
        raise CheckpointError(f"{folder} belongs to another model: {'; '.join(wrong[:3])}{more}")
