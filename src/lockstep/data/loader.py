"""Load micro-batches with a DataLoader, in the training process or ahead of it in worker processes."""

import gc
import signal
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader

from lockstep.base import socket_folder
from lockstep.base.contracts import Source
from lockstep.base.errors import DataError, LockstepError
from lockstep.base.lifetime import end_with_parent
from lockstep.base.model_contracts import MicroBatch
from lockstep.core.host.loader_stacks import StackFiles
from lockstep.data.bad_samples import Faults
from lockstep.data.fetching import MicroBatchDataset
from lockstep.data.sampler import ShardRequest
from lockstep.data.torch_dataset import Samples

PREFETCH = 4
"""Micro-batches that each worker process loads ahead."""


class Loader:
    """Iterates over micro-batches on a device, in the order of the requests."""

    def __init__(
        self,
        source: Source,
        requests: Iterable[ShardRequest],
        *,
        faults: Faults | None = None,
        seed: int,
        pad_id: int,
        workers: int,
        device: torch.device,
    ) -> None:
        self.device, self.faults = device, faults or Faults()
        self.copying = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.is_collated = isinstance(source, Samples)
        self.dtypes: dict[str, torch.dtype] = {}
        options: dict[str, Any] = {"prefetch_factor": PREFETCH, "worker_init_fn": _start_worker} if workers else {}
        if workers:
            socket_folder.ensure_short()
        if workers and sys.platform == "linux":
            options["multiprocessing_context"] = "fork"  # a user's source from a file could not be pickled
            options["worker_init_fn"] = partial(_start_worker, stacks=StackFiles(workers))
        self.batches = DataLoader(
            MicroBatchDataset(source, self.faults, seed=seed, pad_id=pad_id),
            sampler=requests,
            batch_size=None,  # the data set gives whole micro-batches
            num_workers=workers,
            pin_memory=False,
            **options,
        )

    def __iter__(self) -> Iterator[MicroBatch]:
        try:
            for micro_batch in self.batches:
                if isinstance(micro_batch, LockstepError):
                    raise micro_batch
                self.faults.note(micro_batch.left_out)
                if not self.is_collated:  # else the batch may be anything
                    self._check_dtypes(micro_batch)
                self.faults.refuse_outside(micro_batch)
                yield self._moved(micro_batch)
        except Exception as error:
            if self.batches.num_workers == 0:
                raise
            # The message holds the worker's traceback. Our own would keep the worker processes in a reference cycle,
            # whose late collection delays their shutdown by 5 s each.
            raise error.with_traceback(None) from error.__cause__

    def steps(self) -> Iterator[list[MicroBatch]]:
        """Yield the micro-batches of one step at a time, as a list."""
        for _, micro_batches in groupby(self, key=lambda micro_batch: micro_batch.step):
            yield list(micro_batches)

    def _check_dtypes(self, micro_batch: MicroBatch) -> None:
        """Raise DataError if a column's dtype changes, where a model's error would not name the data."""
        for name, column in micro_batch.batch.items():
            expected = self.dtypes.setdefault(name, column.dtype)
            if column.dtype != expected:
                raise DataError(
                    f"the column {name!r} of samples {list(micro_batch.indices)} of {self.faults.name} is "
                    f"{column.dtype}, but was {expected} in the micro-batches before: a column has one dtype"
                )

    def _moved(self, micro_batch: MicroBatch) -> MicroBatch:
        """Copy a micro-batch to the device: to a GPU while it still computes the step before."""
        if self.copying is None:
            return micro_batch
        computing = torch.cuda.current_stream(self.device)

        def copied(tensor: Tensor) -> Tensor:
            there = tensor.pin_memory().to(self.device, non_blocking=True)
            there.record_stream(computing)
            return there

        with torch.cuda.stream(self.copying):
            moved = replace(micro_batch, batch=tree_map_only(Tensor, copied, micro_batch.batch))
        computing.wait_stream(self.copying)
        return moved


def _start_worker(number: int, stacks: StackFiles | None = None) -> None:
    """Set a worker's signals: Ctrl-C reaches it too, but the training process decides when to stop."""
    gc.freeze()  # garbage of the training process is not a worker's to destroy: a lost process group would end it
    signal.set_wakeup_fd(-1)  # inherited: the parent would receive the worker's signals
    end_with_parent("SIGKILL")  # a worker stuck in the user's code would ignore SIGTERM
    if stacks is not None:
        stacks.register(number)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # one may be a launcher's while the last step still needs data; the next one ends the worker
    signal.signal(signal.SIGTERM, lambda *_: signal.signal(signal.SIGTERM, signal.SIG_DFL))
    if hasattr(signal, "SIGUSR1"):  # Slurm sends its warning to every process of a job
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def one_by_one(source: Source, rows: Iterable[int], *, pad_id: int = 0, workers: int) -> Iterator[object]:
    """Fetch samples as training does, without augmentation; yield an error's name in its place."""
    requests = (ShardRequest(step=-1, shard=0, epoch=-1, indices=(row,)) for row in rows)
    loader = Loader(source, requests, seed=0, pad_id=pad_id, workers=workers, device=torch.device("cpu"))
    for found in loader.batches:
        yield found.batch if isinstance(found, MicroBatch) else type(found).__name__
