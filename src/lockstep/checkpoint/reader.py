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
from lockstep.checkpoint import dcp_metadata
from lockstep.core.distributed.collectives import raise_on_all_ranks


class DamagedError(CheckpointError):
    """A checkpoint whose tensors cannot be read although its files match the manifest."""


def contents(folder: Path) -> dict[str, Tensor]:
    """Return a checkpoint's tensors by name, on the meta device: dtype and shape, no data. Raises DamagedError."""
    try:
        stored = dcp_metadata.read(folder).tensors
    except (OSError, ValueError) as error:
        raise DamagedError(f"{folder} cannot be read: {error}") from None
    return {
        name: torch.empty(kind.size, dtype=getattr(torch, kind.dtype), device="meta") for name, kind in stored.items()
    }


@cache
def _safe_reader() -> Any:
    """Return DCP's FileSystemReader, changed: it does not unpickle the metadata, and refuses zip bombs."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.utils import _ReaderView

    class View(_ReaderView):
        def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
            return super().seek(-offset if whence == os.SEEK_END else offset, whence)  # torch 2.13 gets the sign wrong

    class SafeReader(dcp.FileSystemReader):
        def read_metadata(self, *_: Any, **__: Any) -> Any:
            return _as_dcp(dcp_metadata.read(Path(self.path)))

        def _slice_file(self, file: Any, info: Any) -> Any:
            view: Any = View(file, info.offset, info.length)
            storage.check_archive(view, info.length)
            return super()._slice_file(file, info)

    return SafeReader


def _as_dcp(table: dcp_metadata.TensorTable) -> Any:
    """Convert the table to DCP's Metadata."""
    from torch.distributed.checkpoint import metadata
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return metadata.Metadata(
        state_dict_metadata={
            name: metadata.TensorStorageMetadata(
                properties=metadata.TensorProperties(dtype=getattr(torch, kind.dtype)),
                size=torch.Size(kind.size),
                chunks=[
                    metadata.ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))
                    for offsets, sizes in kind.chunks
                ],
            )
            for name, kind in table.tensors.items()
        },
        planner_data={name: (name,) for name in table.tensors},
        storage_data={
            metadata.MetadataIndex(
                chunk.name, None if chunk.offset is None else torch.Size(chunk.offset), chunk.number
            ): _StorageInfo(relative_path=chunk.file, offset=chunk.start, length=chunk.length)
            for chunk in table.locations
        },
        storage_meta=metadata.StorageMeta(),
    )


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
