"""Micro-batches, fetched whole: in the training process, or ahead of it by worker processes."""

import os
import signal
import sys
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from lockstep import plugins
from lockstep.contracts import Columns, MicroBatch, Source
from lockstep.data.augment import Augmented, keys_of
from lockstep.data.collate import collate
from lockstep.data.sampler import Request
from lockstep.errors import LockstepError, SampleError
from lockstep.runtime.loader_stacks import StackFiles
from lockstep.runtime.parent import end_with_parent
from lockstep.runtime.seeds import seed_all

OURS = str(plugins.ROOT) + os.sep
PREFETCH = 4
"""Micro-batches that each worker process keeps ready."""


class Fetched(Dataset[MicroBatch | LockstepError]):
    """A source that answers whole requests. A source's own randomness depends on the samples, not on the process."""

    def __init__(self, source: Source, name: str, *, seed: int, pad_id: int) -> None:
        self.source, self.name, self.seed, self.pad_id = source, name, seed, pad_id

    def __getitems__(self, request: Request) -> MicroBatch | LockstepError:
        """Fetch and collate one micro-batch; an error is returned, since a worker process would wrap it in its own."""
        try:
            columns = self.columns(request)
        except LockstepError as error:  # a source of ours that says itself what is wrong
            return error
        except Exception as error:
            return self.failed(request, error)
        return MicroBatch(
            step=request.step,
            shard=request.shard,
            indices=request.indices,
            batch=collate(columns, self.pad_id),
            ghost=request.ghost,
            shards=request.shards,
            present=request.present,
        )

    def failed(self, request: Request, error: Exception) -> SampleError:
        """What went wrong, with the one sample that it goes wrong for, where there is one, and the user's frames."""
        alone = next((i for i in request.indices if self._fails(replace(request, indices=(i,)))), None)
        what = f"samples {list(request.indices)} together" if alone is None else f"sample {alone}"
        where = f"step {request.step + 1}, shard {request.shard}" if request.step >= 0 else "evaluation"
        told = traceback.TracebackException.from_exception(error)
        told.stack = traceback.StackSummary.from_list([f for f in told.stack if not f.filename.startswith(OURS)])
        return SampleError(f"{what} of {self.name} could not be fetched ({where}):\n{''.join(told.format())}".rstrip())

    def _fails(self, request: Request) -> bool:
        try:
            self.columns(request)
        except Exception:
            return True
        return False

    def columns(self, request: Request) -> Columns:
        """The samples. What a source draws inside of __getitems__ belongs to the seed, the epoch and the first of them;
        what an augmentation draws, to its own sample."""
        seed_all(int(keys_of(self.seed, request.epoch, request.indices[:1])[0]))
        if isinstance(self.source, Augmented):
            return self.source.drawn(request.indices, request.epoch)
        return self.source.__getitems__(request.indices)


class Loader:
    """Iterates over MicroBatches on a device, in the order of the requests."""

    def __init__(
        self,
        source: Source,
        requests: Iterable[Request],
        *,
        name: str = "the data",
        seed: int,
        pad_id: int,
        workers: int,
        device: torch.device,
    ) -> None:
        self.device = device
        options: dict[str, Any] = {"prefetch_factor": PREFETCH, "worker_init_fn": _start_worker} if workers else {}
        if workers and sys.platform == "linux":
            options["multiprocessing_context"] = "fork"  # a user's source from a file could not be pickled
            options["worker_init_fn"] = partial(_start_worker, stacks=StackFiles(workers))
        self.batches = DataLoader(
            Fetched(source, name, seed=seed, pad_id=pad_id),
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
        stacks.answer(number)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _leave_at_the_next)
    if hasattr(signal, "SIGUSR1"):  # Slurm sends a warning to every process of a job
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def _leave_at_the_next(*_: Any) -> None:
    """A launcher's SIGTERM reaches the workers, too, who have to serve the last step; a second one is for them."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
