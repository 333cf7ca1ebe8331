"""Writes and reads checkpoints through DCP: each rank its part, then one rename that makes them exist."""

import secrets
import shutil
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep import files
from lockstep.checkpoint.layout import MANIFEST, Manifest, folder_of
from lockstep.errors import CheckpointError
from lockstep.runtime.collectives import decided


def save(root: Path, tensors: dict[str, Tensor], manifest: Manifest) -> Path:
    """Write one checkpoint, on all ranks together; returns its folder.

    Until the last rename the folder carries another name, so that a kill at any point leaves the older checkpoints
    and nothing that looks like a new one. Raises CheckpointError, on every rank alike, when it cannot be written.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    final, is_main = folder_of(root, manifest.step), dist.get_rank() == 0
    temporary = final.with_name(f"{final.name}.tmp-{secrets.token_hex(4)}")
    temporary, failure = decided((temporary, _made(root) if is_main else None))
    if failure is None:
        try:
            dcp.save(tensors, storage_writer=dcp.FileSystemWriter(temporary, sync_files=True))
            failure = _finish(temporary, final, manifest) if is_main else None
        except CheckpointException as error:
            failure = _reasons(root, error)
        except OSError as error:
            failure = str(error)
        failure = decided(failure)
    if failure is not None:
        if is_main:
            shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(f"cannot save a checkpoint in {root}: {failure}")
    return final


def _made(root: Path) -> str | None:
    """Make the folder of checkpoints; what is wrong where that cannot be done."""
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return str(error)
    return None


def _reasons(root: Path, error: Any) -> str:
    """What went wrong on which rank, in a line, and the free space: torch hides a full disk behind words of its own."""
    reasons = [
        f"{str(reason).splitlines()[0] if str(reason) else type(reason).__name__} (rank {rank})"
        for rank, (reason, _) in error.failures.items()
    ]
    return f"{'; '.join(reasons)}; {shutil.disk_usage(root).free / 1e9:.1f} GB are free there"


def _finish(temporary: Path, final: Path, manifest: Manifest) -> str | None:
    try:
        sums = {p.name: (p.stat().st_size, files.sha256(p)) for p in sorted(temporary.iterdir())}
        files.write(temporary / MANIFEST, replace(manifest, files=sums).text())
        if final.exists():  # a newer evaluation of the same step: the state is the same
            shutil.rmtree(final)
        temporary.replace(final)
        files.sync_folder(final.parent)
    except OSError as error:
        return str(error)
    return None


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
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # a single process, as intended
        dcp.load(tensors, storage_reader=dcp.FileSystemReader(folder), no_dist=not dist.is_initialized())
