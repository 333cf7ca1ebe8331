"""Reads checkpoints through DCP, whatever world they were written by."""

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
from lockstep.checkpoint import dcp_metadata
from lockstep.core.distributed.collectives import raise_on_all_ranks


class DamagedError(CheckpointError):
    """A checkpoint whose tensors cannot be read although its bytes are those that its manifest names."""


def contents(folder: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint by name, on the meta device: type and shape without a byte of data.

    Raises DamagedError.
    """
    try:
        stored = dcp_metadata.read(folder).tensors
    except (OSError, ValueError) as error:
        raise DamagedError(f"{folder} cannot be read: {error}") from None
    return {
        name: torch.empty(kind.size, dtype=getattr(torch, kind.dtype), device="meta") for name, kind in stored.items()
    }


@cache
def _careful() -> Any:
    """DCP's reader, but for the table, which it would unpickle, and for archives that unpack to more than they are."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.utils import _ReaderView

    class View(_ReaderView):
        def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
            return super().seek(-offset if whence == os.SEEK_END else offset, whence)  # as torch 2.13 counts backwards

    class Careful(dcp.FileSystemReader):
        def read_metadata(self, *_: Any, **__: Any) -> Any:
            return _metadata(dcp_metadata.read(Path(self.path)))

        def _slice_file(self, file: Any, place: Any) -> Any:
            view: Any = View(file, place.offset, place.length)
            storage.check_archive(view, place.length)
            return super()._slice_file(file, place)

    return Careful


def _metadata(found: dcp_metadata.TensorTable) -> Any:
    """The same as DCP has it."""
    from torch.distributed.checkpoint import metadata
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return metadata.Metadata(
        state_dict_metadata={
            name: metadata.TensorStorageMetadata(
                properties=metadata.TensorProperties(dtype=getattr(torch, kind.dtype)),
                size=torch.Size(kind.size),
                chunks=[
                    metadata.ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))
                    for offsets, sizes in kind.pieces
                ],
            )
            for name, kind in found.tensors.items()
        },
        planner_data={name: (name,) for name in found.tensors},
        storage_data={
            metadata.MetadataIndex(
                place.name, None if place.offset is None else torch.Size(place.offset), place.number
            ): _StorageInfo(relative_path=place.file, offset=place.start, length=place.length)
            for place in found.places
        },
        storage_meta=metadata.StorageMeta(),
    )


def load(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Fill tensors in place from a checkpoint, whatever world it was written by.

    Raises CheckpointError naming the tensors that are not in it, or not of the same shape; DamagedError, on every rank,
    where their bytes cannot be read.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    with raise_on_all_ranks() if dist.is_initialized() else nullcontext():
        _compare(folder, tensors)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # a single process, as intended
        try:
            dcp.load(tensors, storage_reader=_careful()(folder), no_dist=not dist.is_initialized())
        except CheckpointException as error:
            reasons = [f"{type(reason).__name__}: {reason}".splitlines()[0] for reason, _ in error.failures.values()]
            raise DamagedError(f"{folder} cannot be read: {reasons[0]}") from None


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
