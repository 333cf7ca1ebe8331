"""Writes checkpoints beside the training: each rank copies its share, which a thread then writes through DCP.

Not dcp.async_save: a save has to be hashed, published by one rename, and cancellable.
"""

import secrets
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.base import storage
from lockstep.base.errors import LockstepError
from lockstep.base.world import World
from lockstep.checkpoint import tensor_table
from lockstep.checkpoint.layout import MANIFEST, Manifest, chain_of, folder_of, read_manifest
from lockstep.checkpoint.verify import problem
from lockstep.checkpoint.weights import MODEL
from lockstep.core.distributed.collectives import broadcast_object, gather_object
from lockstep.core.distributed.process_group import further_group
from lockstep.core.host.memory_meter import available_bytes
from lockstep.core.modules.dtensors import global_offset, is_dtensor, local_tensor, sharded_like
from lockstep.core.numerics.digest import digest_of, world_lines

CHUNK_BYTES = 8 << 20
"""Size of a chunk, as far as whole rows allow. Reading takes this much memory besides the target."""


class RowChunks(Tensor):
    """A tensor that DCP writes in chunks of rows: see torch.distributed._checkpointable."""

    offset: torch.Size
    """Index of its first element in the full tensor."""
    full_size: torch.Size

    @property
    def _rows_per_chunk(self) -> int:
        return max(1, CHUNK_BYTES * len(self) // self.nbytes)

    def __create_write_items__(self, fqn: str, _: object) -> list[Any]:
        rows = self._rows_per_chunk
        return [self._item(fqn, first, min(rows, len(self) - first)) for first in range(0, len(self), rows)]

    def _item(self, fqn: str, first: int, rows: int) -> Any:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        offset = torch.Size([self.offset[0] + first, *self.offset[1:]])
        chunk = ChunkStorageMetadata(offsets=offset, sizes=torch.Size([rows, *self.shape[1:]]))
        data = TensorWriteData(chunk=chunk, properties=TensorProperties(dtype=self.dtype), size=self.full_size)
        return WriteItem(index=MetadataIndex(fqn, offset), type=WriteItemType.SHARD, tensor_data=data)

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        first = index.offset[0] - self.offset[0]
        return self.as_subclass(Tensor)[first : first + self._rows_per_chunk]


def in_row_chunks(tensor: Tensor) -> Tensor:
    """Prepare a tensor, or this rank's shard of a DTensor, for DCP to write in chunks if it is large."""
    local = local_tensor(tensor)
    if local.nbytes <= CHUNK_BYTES or not local.ndim:
        return tensor
    chunks: Any = local.as_subclass(RowChunks)
    chunks.offset = torch.Size(global_offset(tensor) if is_dtensor(tensor) else [0] * local.ndim)
    chunks.full_size = tensor.shape
    return chunks


TIMEOUT = timedelta(hours=2)
"""Time for which ranks wait for each other's disks."""
THREAD = "checkpoint"


@dataclass(frozen=True, kw_only=True)
class Saved:
    """Result of a save; the same on every rank, except for the seconds."""

    step: int
    folder: Path
    failure: str | None
    """Reason of a failure, in one line; then there is no such folder."""
    seconds: float
    """Seconds from the copy to the last rename."""


def assigned_names(tensors: Mapping[str, Tensor], rank: int, size: int) -> list[str]:
    """List the tensors, or shards, that one of `size` ranks with the same ones writes. The largest are assigned first,
    each to the rank with the fewest bytes so far."""
    load = [0] * size
    names = []
    bytes_of = {name: local_tensor(tensor).nbytes for name, tensor in tensors.items()}
    for name in sorted(tensors, key=lambda name: (-bytes_of[name], name)):
        owner = load.index(min(load))
        load[owner] += bytes_of[name] + 1  # empty tensors are shared out, too
        if owner == rank:
            names.append(name)
    return names


class Writer:
    """Writes one save at a time, on all ranks together.

    Until the last rename a checkpoint's folder has a temporary name, so that a kill at any point leaves the older
    checkpoints and no incomplete one. `copies`: the ranks that hold the same tensors as this one, and share the work;
    all if not given. `saved` is called on rank 0 with each completed folder.
    """

    def __init__(
        self, root: Path, saved: Callable[[Path], None] = lambda _: None, *, copies: Sequence[int] | None = None
    ) -> None:
        self.root, self.saved = root, saved
        self.replicas = copies or range(dist.get_world_size())
        self.group = further_group(TIMEOUT)
        self.copies: dict[str, Tensor] = {}
        """This rank's share of the last save; the next save reuses the memory."""
        self.bytes = 0
        self.warming: Future[Any] | None = None
        self.pending: Future[Saved] | None = None
        self._publishing = threading.Lock()
        self._is_cancelled = False

    def cancel(self) -> None:
        """Discard the save that is being written, and all later ones."""
        with self._publishing:
            self._is_cancelled = True

    def warm_up(self, tensors: Mapping[str, Tensor]) -> None:
        """Allocate the copies beside the training, before the first save: page faults take 50 times a copy's time."""
        share = {name: tensors[name] for name in self._assigned(tensors)}
        self.bytes = sum(local_tensor(tensor).nbytes for tensor in share.values())

        def allocate() -> None:
            self.copies = _allocate_copies(share, {})
            for copy in self.copies.values():
                local_tensor(copy).zero_()

        self.warming = _in_thread(allocate)

    def start(
        self,
        tensors: Mapping[str, Tensor],
        manifest: Manifest,
        *,
        used: Mapping[str, str] | None = None,
        is_last: bool = False,
    ) -> None:
        """Copy this rank's share and start to write it; the tensors may change as soon as this returns. With `is_last`
        they must stay as they are until it is written: only GPU and non-contiguous tensors are copied then. `used`: the
        weights of the digest, name -> name in `tensors`; all of model.* if not given."""
        assert self.pending is None, "call finished() first"
        begin = time.monotonic()
        if self.warming is not None:
            self.warming.result()
            self.warming = None
        share = {name: tensors[name] for name in self._assigned(tensors)}
        stay = {name: tensor.detach() for name, tensor in share.items() if is_last and _can_be_written(tensor)}
        changing = {name: tensor for name, tensor in share.items() if name not in stay}
        self.copies = _allocate_copies(changing, self.copies)
        for name, copy in self.copies.items():
            local_tensor(copy).copy_(local_tensor(share[name]), non_blocking=True)
        copies = {name: stay[name] if name in stay else self.copies[name] for name in share}
        copied = torch.cuda.Event(blocking=True) if torch.cuda.is_initialized() else None
        if copied is not None:
            copied.record()  # a GPU changes no tensor before it has copied it

        def write() -> Saved:
            if copied is not None:
                copied.synchronize()
            named = used or {name.removeprefix(MODEL): name for name in copies if name.startswith(MODEL)}
            weights = {name: copies[source] for name, source in named.items() if source in copies}
            folder, failure = self._write(copies, weights, manifest)
            return Saved(step=manifest.step, folder=folder, failure=failure, seconds=time.monotonic() - begin)

        self.pending = _in_thread(write)

    def _assigned(self, tensors: Mapping[str, Tensor]) -> list[str]:
        return assigned_names(tensors, self.replicas.index(dist.get_rank()), len(self.replicas))

    @property
    def is_busy(self) -> bool:
        """Whether a save is being written."""
        return self.pending is not None and not self.pending.done()

    def finished(self, timeout_seconds: float | None = None) -> Saved | None:
        """Wait for the last save -> its result, once; None without one. Raises errors that are not the disk's."""
        if self.pending is None:
            return None
        saved = self.pending.result(timeout_seconds)
        self.pending = None
        return saved

    def _write(
        self, copies: dict[str, Tensor], weights: dict[str, Tensor], manifest: Manifest
    ) -> tuple[Path, str | None]:
        """Write on all ranks, in the thread; return the folder, and what went wrong. `weights`: of the digest."""
        final, is_main = folder_of(self.root, manifest.step), dist.get_rank() == 0
        temporary = final.with_name(f"{final.name}.tmp-{secrets.token_hex(4)}")
        failure: str | None = None
        try:
            if is_main:
                self.root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            failure = storage.full_disk(error) or str(error)
        temporary, failure = broadcast_object((temporary, failure), self.group)
        if failure is None:
            failure = self._complete(_write_share(temporary, copies), weights, manifest)
        if failure is not None and is_main:
            shutil.rmtree(temporary, ignore_errors=True)
        return final, failure

    def _with_free_space(self, reasons: str) -> str:
        """Add the free disk space, if the folder exists."""
        try:
            return f"{reasons}; {storage.free_space(self.root)}"
        except OSError:
            return reasons

    def _complete(self, share: "Share", weights: dict[str, Tensor], manifest: Manifest) -> str | None:
        """Send rank 0 what each rank has written; it writes table and manifest, and renames -> what went wrong."""
        lines, failures = world_lines(weights, self.group), list[str]()
        try:
            everyone = gather_object(share, self.group)
            failures = [each.failure for each in everyone or () if each.failure]
            if everyone and not failures:
                files = sorted(item for each in everyone for item in each.hashes.items())
                tensor_table.write(share.folder, [each.table for each in everyone])
                files += _hashes(share.folder, tensor_table.FILE, tensor_table.OF_TORCH).items()
                complete = replace(manifest, digest=digest_of(lines), files=dict(files))
                failures = self._publish(share.folder, complete.after(chain_of(self.root, manifest.step - 1)))
        except (OSError, ValueError, LockstepError) as error:  # of rank 0, for which the others wait
            failures = [_reason(error, 0)]
        return broadcast_object(self._with_free_space("; ".join(failures)) if failures else None, self.group)

    def _publish(self, temporary: Path, manifest: Manifest) -> list[str]:
        """Rename a complete checkpoint, unless the save was cancelled; return what went wrong. Raises OSError.

        An intact one of the same step stays: its state is the same, and replacing it would leave a moment with none.
        """
        final = folder_of(self.root, manifest.step)
        with self._publishing:
            if self._is_cancelled:
                return ["it was cancelled"]
            storage.write(temporary / MANIFEST, manifest.text())
            if not final.exists():
                temporary.replace(final)
            elif problem(final) is None:
                existing = read_manifest(final)
                if manifest.metrics and not existing.metrics:  # it has been evaluated since
                    evaluated = replace(existing, metrics=manifest.metrics, progress=manifest.progress)
                    storage.write(final / MANIFEST, evaluated.after(manifest.checkpoints[:-1]).text())
                shutil.rmtree(temporary)
            else:
                final.replace(temporary.with_name(f"{temporary.name}-damaged"))
                temporary.replace(final)
            storage.sync(final.parent)
        with suppress(OSError):  # the next save tries again to delete old ones
            self.saved(final)
        return []


@dataclass(frozen=True, kw_only=True)
class Share:
    """Part of a checkpoint that one rank has written."""

    folder: Path
    table: tensor_table.Table = field(default_factory=dict)
    hashes: dict[str, tuple[int, str]] = field(default_factory=dict)
    failure: str | None = None


def _write_share(folder: Path, copies: dict[str, Tensor]) -> Share:
    """Write this rank's share through DCP. Not by dcp.save, which unpickles what other processes send; each rank plans
    by itself, since no two write the same."""
    import torch.distributed.checkpoint as dcp

    rank = dist.get_rank()
    try:
        target = dcp.FileSystemWriter(folder, sync_files=True, per_thread_copy_ahead=0)  # copied already
        planner = dcp.DefaultSavePlanner()
        planner.set_up_planner({name: in_row_chunks(copy) for name, copy in copies.items()}, is_coordinator=rank == 0)
        target.set_up_storage_writer(rank == 0)
        local = target.prepare_local_plan(planner.create_local_plan())
        plan = target.prepare_global_plan([local] * (rank + 1))[rank]  # names its files after the rank
        results = target.write_data(planner.finish_plan(plan), planner).wait()
        table = tensor_table.written_chunks(plan, results)
        return Share(folder=folder, table=table, hashes=_hashes(folder, f"__{rank}_*"))
    except Exception as error:  # DCP's threads raise many kinds for a full disk
        return Share(folder=folder, failure=_reason(error, rank))


def _can_be_written(tensor: Tensor) -> bool:
    """Return whether a tensor can be written without a copy of it."""
    local = local_tensor(tensor)
    return local.device.type == "cpu" and local.is_contiguous()


def _allocate_copies(tensors: Mapping[str, Tensor], old: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Allocate CPU memory for a copy of each tensor, or local shard of a DTensor, uninitialised; reuse old copies that
    fit. It is pinned for tensors of a GPU, up to half of what the processes here can get: so much the GPU copies while
    the host goes on."""
    left, copies = available_bytes() // (2 * World.from_environment().local_size), {}
    for name, tensor in tensors.items():
        local, copy = local_tensor(tensor), old.get(name)
        if copy is None or (copy.shape, copy.dtype) != (tensor.shape, tensor.dtype):
            size = 1 << max(0, local.nbytes - 1).bit_length()  # as torch rounds it
            is_pinned = local.is_cuda and size <= left
            left -= size * is_pinned
            empty = torch.empty_like(local, device="cpu", pin_memory=is_pinned, memory_format=torch.contiguous_format)
            copy = sharded_like(tensor, empty)
        copies[name] = copy
    return copies


def _in_thread(task: Callable[[], Any]) -> Future[Any]:
    """Run a task in a daemon thread: Python waits for those of a ThreadPoolExecutor when it exits."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(task())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=THREAD, daemon=True).start()
    return future


def _reason(error: BaseException, rank: int) -> str:
    return f"{str(error).splitlines()[0] if str(error) else type(error).__name__} (rank {rank})"


def _hashes(folder: Path, *patterns: str) -> dict[str, tuple[int, str]]:
    """Return file name -> (size, sha256) of the matching files."""
    paths = [path for pattern in patterns for path in folder.glob(pattern)]
    return {path.name: (path.stat().st_size, storage.sha256(path)) for path in paths}
