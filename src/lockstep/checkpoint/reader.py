"""Reads checkpoints through DCP, written by any number of processes."""

import os
import warnings
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.base import storage
from lockstep.base.errors import CheckpointError
from lockstep.checkpoint import tensor_table
from lockstep.core.distributed.collectives import raise_on_all_ranks


class DamagedError(CheckpointError):
    """A checkpoint whose tensors cannot be read although its files match the manifest."""


def contents(folder: Path) -> dict[str, Tensor]:
    """Return a checkpoint's tensors by name, on the meta device: dtype and shape, no data. Raises DamagedError."""
    try:
        stored = tensor_table.read(folder)
    except (OSError, ValueError) as error:
        raise DamagedError(f"{folder} cannot be read: {error}") from None
    return {
        name: torch.empty(kind.shape, dtype=getattr(torch, kind.dtype), device="meta") for name, kind in stored.items()
    }


@cache
def _safe_reader() -> Any:
    """Return DCP's FileSystemReader, changed: it reads the table instead of a pickle, and refuses zip bombs."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.utils import _ReaderView

    class View(_ReaderView):
        def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
            return super().seek(-offset if whence == os.SEEK_END else offset, whence)  # torch 2.13 gets the sign wrong

    class SafeReader(dcp.FileSystemReader):
        def read_metadata(self, *_: Any, **__: Any) -> Any:
            return tensor_table.as_dcp(tensor_table.read(Path(self.path)))

        def _slice_file(self, file: Any, info: Any) -> Any:
            view: Any = View(file, info.offset, info.length)
            storage.check_archive(view, info.length)
            return super()._slice_file(file, info)

    return SafeReader


def load(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Fill tensors in place from a checkpoint, written by any number of processes.

    Raises CheckpointError, with names, for tensors that are not in it or have another shape; DamagedError, on every
    rank, where bytes cannot be read.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    with raise_on_all_ranks() if dist.is_initialized() else nullcontext(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        _check_names_and_shapes(folder, tensors)
        try:  # each rank plans by itself: DCP would unpickle what the others send
            dcp.load(tensors, storage_reader=_safe_reader()(folder), no_dist=True)
        except CheckpointException as error:
            reasons = [f"{type(reason).__name__}: {reason}".splitlines()[0] for reason, _ in error.failures.values()]
            raise DamagedError(f"{folder} cannot be read: {reasons[0]}") from None


def _check_names_and_shapes(folder: Path, tensors: dict[str, Tensor]) -> None:
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
