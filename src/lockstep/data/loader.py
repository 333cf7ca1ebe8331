"""Micro-batches, fetched whole: in the training process, or ahead of it by worker processes."""

import signal
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch.utils.data import DataLoader

from lockstep.base.contracts import Source
from lockstep.base.errors import DataError, LockstepError
from lockstep.base.model_contracts import MicroBatch
from lockstep.core.host.lifetime import end_with_parent
from lockstep.core.host.loader_stacks import StackFiles
from lockstep.data.bad_samples import Faults
from lockstep.data.fetching import Fetched
from lockstep.data.sampler import ShardRequest

PREFETCH = 4
"""Micro-batches that each worker process keeps ready."""


class Loader:
    """Iterates over MicroBatches on a device, in the order of the requests."""

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
        self.dtypes: dict[str, torch.dtype] = {}
        options: dict[str, Any] = {"prefetch_factor": PREFETCH, "worker_init_fn": _start_worker} if workers else {}
        if workers and sys.platform == "linux":
            options["multiprocessing_context"] = "fork"  # a user's source from a file could not be pickled
            options["worker_init_fn"] = partial(_start_worker, stacks=StackFiles(workers))
        self.batches = DataLoader(
            Fetched(source, self.faults, seed=seed, pad_id=pad_id),
            batch_sampler=requests,  # type: ignore[arg-type]
            collate_fn=_as_it_is,  # type: ignore[arg-type]
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
                self._check_dtypes(micro_batch)
                yield self._moved(micro_batch)
        except Exception as error:
            if self.batches.num_workers == 0:
                raise
            # The worker's traceback is in the message. Ours holds the worker processes in a cycle: collected late and
            # out of order, they would not hear that they shall end, and be waited for, 5 s each.
            raise error.with_traceback(None) from error.__cause__

    def steps(self) -> Iterator[list[MicroBatch]]:
        """The micro-batches of one step at a time, as a list."""
        together: list[MicroBatch] = []
        for micro_batch in chain(self, [None]):
            if together and (micro_batch is None or micro_batch.step != together[0].step):
                yield together
                together = []
            if micro_batch is not None:
                together.append(micro_batch)

    def _check_dtypes(self, micro_batch: MicroBatch) -> None:
        """A model would fail on the odd one with a word of its own, or take it for something else."""
        for name, column in micro_batch.batch.items():
            usual = self.dtypes.setdefault(name, column.dtype)
            if column.dtype != usual:
                raise DataError(
                    f"the column {name!r} of samples {list(micro_batch.indices)} of {self.faults.name} is "
                    f"{column.dtype}, but was {usual} in the micro-batches before: a column has one dtype"
                )

    def _moved(self, micro_batch: MicroBatch) -> MicroBatch:
        if self.device.type == "cpu":
            return micro_batch
        batch = {name: t.pin_memory().to(self.device, non_blocking=True) for name, t in micro_batch.batch.items()}
        return replace(micro_batch, batch=batch)


def _as_it_is(micro_batch: MicroBatch | LockstepError) -> MicroBatch | LockstepError:
    return micro_batch


def _start_worker(number: int, stacks: StackFiles | None = None) -> None:
    """Ctrl-C reaches the whole terminal: the training process decides, its workers end with it."""
    signal.set_wakeup_fd(-1)  # inherited: what this worker gets would count as the parent's
    end_with_parent("SIGKILL")  # which a worker that hangs in the user's code would not notice
    if stacks is not None:
        stacks.register(number)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _leave_at_the_next)
    if hasattr(signal, "SIGUSR1"):  # Slurm sends a warning to every process of a job
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def _leave_at_the_next(*_: Any) -> None:
    """A launcher's SIGTERM reaches the workers, too, who have to serve the last step; a second one is for them."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
