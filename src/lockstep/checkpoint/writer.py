"""Writes checkpoints beside the training: one copy, then a thread that hands it to DCP, each rank its part.

W = processes.
"""

import secrets
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.base import storage
from lockstep.checkpoint.layout import MANIFEST, Manifest, folder_of, read_manifest
from lockstep.checkpoint.pieces import in_pieces
from lockstep.checkpoint.verify import problem
from lockstep.checkpoint.weights import MODEL
from lockstep.core.distributed.collectives import all_gather_object, broadcast_object
from lockstep.core.modules.dtensors import like, part_of
from lockstep.core.numerics.digest import digest_of, world_lines

TIMEOUT = timedelta(hours=2)
"""How long ranks wait for each other's disk."""
THREAD = "checkpoint"
"""The name of the threads that write."""


@dataclass(frozen=True, kw_only=True)
class Saved:
    """How a save ended; the same on every rank, but for the seconds."""

    step: int
    folder: Path
    failure: str | None
    """What went wrong, in a line, if something did: then there is no such folder."""
    seconds: float
    """From the copy to the last rename."""


def share(tensors: Mapping[str, Tensor], rank: int, size: int) -> list[str]:
    """The names that one of `size` ranks writes of tensors, or parts of them, that all of them hold: the largest first,
    each to whoever has least so far. The same everywhere, without asking."""
    load = [0] * size
    names = []
    bytes_of = {name: part_of(tensor).nbytes for name, tensor in tensors.items()}
    for name in sorted(tensors, key=lambda name: (-bytes_of[name], name)):
        owner = load.index(min(load))
        load[owner] += bytes_of[name] + 1  # a tensor of no bytes is work, too
        if owner == rank:
            names.append(name)
    return names


class Writer:
    """One save at a time, on all ranks together.

    Until the last rename a checkpoint's folder carries another name, so that a kill at any point leaves the older ones
    and nothing that looks like a new one. `copies`: the ranks that hold the same as this one, and share the work; all
    if not given. `saved` is called, on rank 0, with each folder that has been completed.
    """

    def __init__(
        self, root: Path, saved: Callable[[Path], None] = lambda _: None, *, copies: Sequence[int] | None = None
    ) -> None:
        self.root, self.saved = root, saved
        self.holders = copies or range(dist.get_world_size())
        self.group = dist.new_group(backend="gloo", timeout=TIMEOUT)
        self.copies: dict[str, Tensor] = {}
        """This rank's part of the last save, whose memory is used again."""
        self.warming: Future[Any] | None = None
        self.pending: Future[Saved] | None = None
        self._publishing = threading.Lock()
        self._is_cancelled = False

    @property
    def bytes(self) -> int:
        return sum(part_of(copy).nbytes for copy in self.copies.values())

    def cancel(self) -> None:
        """Let nothing that is still being written become a checkpoint; for good."""
        with self._publishing:
            self._is_cancelled = True

    def warm_up(self, tensors: Mapping[str, Tensor]) -> None:
        """Take the memory for copies before the first save needs it, beside the training: fresh pages cost 50 times as
        much as the copy itself."""
        self.copies = {name: _room(tensors[name]) for name in self._own(tensors)}
        rooms = [part_of(room) for room in self.copies.values()]
        self.warming = _beside(lambda: [room.zero_() for room in rooms])

    def start(
        self, tensors: Mapping[str, Tensor], manifest: Manifest, *, used: Mapping[str, str] | None = None
    ) -> None:
        """Copy this rank's part and begin to write it; the tensors may change as soon as this returns. `used`: what the
        digest is of, name -> name in `tensors`; all of model.* where it is not given."""
        assert self.pending is None, "the last save has not been looked at"
        begin, copies = time.monotonic(), {}
        if self.warming is not None:
            self.warming.result()
            self.warming = None
        for name in self._own(tensors):
            tensor, room = tensors[name].detach(), self.copies.get(name)
            if room is None or (room.shape, room.dtype) != (tensor.shape, tensor.dtype):
                room = _room(tensor)
            part_of(room).copy_(part_of(tensor))
            copies[name] = room
        self.copies = copies

        def write() -> Saved:
            named = used or {name.removeprefix(MODEL): name for name in copies if name.startswith(MODEL)}
            weights = {name: copies[source] for name, source in named.items() if source in copies}
            folder, failure = self._written(copies, weights, manifest)
            return Saved(step=manifest.step, folder=folder, failure=failure, seconds=time.monotonic() - begin)

        self.pending = _beside(write)

    def _own(self, tensors: Mapping[str, Tensor]) -> list[str]:
        return share(tensors, self.holders.index(dist.get_rank()), len(self.holders))

    @property
    def is_busy(self) -> bool:
        """Whether a save is being written."""
        return self.pending is not None and not self.pending.done()

    def finished(self, timeout_seconds: float | None = None) -> Saved | None:
        """How the last save ended, once; waits for it. None when there is none. Raises TimeoutError, and whatever
        is no fault of the disk, such as a lost process."""
        if self.pending is None:
            return None
        saved = self.pending.result(timeout_seconds)
        self.pending = None
        return saved

    def _written(
        self, copies: dict[str, Tensor], weights: dict[str, Tensor], manifest: Manifest
    ) -> tuple[Path, str | None]:
        """In the thread, on all ranks: folder, and what went wrong. `weights`: what the digest is of."""
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.api import CheckpointException

        final, is_main = folder_of(self.root, manifest.step), dist.get_rank() == 0
        temporary = final.with_name(f"{final.name}.tmp-{secrets.token_hex(4)}")
        temporary, failure = broadcast_object((temporary, self._prepared() if is_main else None), self.group)
        if failure is None:
            try:
                target = dcp.FileSystemWriter(temporary, sync_files=True, per_thread_copy_ahead=0)  # copied already
                pieces = {name: in_pieces(copy) for name, copy in copies.items()}
                dcp.save(pieces, storage_writer=target, process_group=self.group)
                failure = self._completed(temporary, weights, manifest)
            except CheckpointException as error:
                failure = self._reasons(error)
        if failure is not None and is_main:
            shutil.rmtree(temporary, ignore_errors=True)
        return final, failure

    def _prepared(self) -> str | None:
        """Make the folder of checkpoints; what is wrong where that cannot be done."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            return str(error)
        return None

    def _reasons(self, error: Any) -> str:
        """What went wrong on which rank, in a line: torch hides a full disk behind words of its own."""
        return self._with_room("; ".join(_reason(reason, rank) for rank, (reason, _) in error.failures.items()))

    def _with_room(self, reasons: str) -> str:
        """With the free space, where the folder is still there."""
        try:
            return f"{reasons}; {storage.free_space(self.root)}"
        except OSError:
            return reasons

    def _completed(self, temporary: Path, weights: dict[str, Tensor], manifest: Manifest) -> str | None:
        """Hash, each rank what it has written; then rank 0 writes the manifest and renames. What went wrong."""
        rank, sums, failure = dist.get_rank(), {}, None
        try:
            sums = _sums(temporary, f"__{rank}_*", *([".metadata"] if rank == 0 else []))
        except OSError as error:
            failure = _reason(error, rank)
        lines, everyone = world_lines(weights, self.group), all_gather_object((sums, failure), self.group)
        failures = [each for _, each in everyone if each]
        if not failures and rank == 0:
            parts = {name: entry for sums, _ in everyone for name, entry in sums.items()}
            whole = replace(manifest, digest=digest_of(lines), files=dict(sorted(parts.items())))
            final = folder_of(self.root, manifest.step)
            with self._publishing:
                try:
                    if self._is_cancelled:
                        failures = ["it was cancelled"]
                    else:
                        _publish(temporary, final, whole)
                except OSError as error:
                    failures = [_reason(error, rank)]
            if not failures:
                with suppress(OSError):  # old ones that cannot be looked at or deleted now are the next save's business
                    self.saved(final)
        return broadcast_object(self._with_room("; ".join(failures)) if failures else None, self.group)


def _room(tensor: Tensor) -> Tensor:
    part = part_of(tensor)
    room = torch.empty_like(part, device="cpu", pin_memory=part.is_cuda, memory_format=torch.contiguous_format)
    return like(tensor, room)


def _beside(task: Callable[[], Any]) -> Future[Any]:
    """Run a task in a thread of its own, which does not keep the process from ending."""
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


def _sums(folder: Path, *patterns: str) -> dict[str, tuple[int, str]]:
    """File name -> (size, sha256) of what matches."""
    found = sorted(path for pattern in patterns for path in folder.glob(pattern))
    return {path.name: (path.stat().st_size, storage.sha256(path)) for path in found}


def _publish(temporary: Path, final: Path, manifest: Manifest) -> None:
    """The manifest, then the name that makes a checkpoint exist. A whole one of the same step stays: the state is the
    same, and there would be none while one takes the other's place."""
    storage.write(temporary / MANIFEST, manifest.text())
    if not final.exists():
        temporary.replace(final)
    elif problem(final) is None:
        known = read_manifest(final)
        if manifest.metrics and not known.metrics:  # it has been evaluated since
            evaluated = replace(known, metrics=manifest.metrics, progress=manifest.progress)
            storage.write(final / MANIFEST, evaluated.text())
        shutil.rmtree(temporary)
    else:
        final.replace(temporary.with_name(f"{temporary.name}-damaged"))
        temporary.replace(final)
    storage.sync(final.parent)
