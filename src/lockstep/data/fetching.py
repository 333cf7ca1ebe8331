"""Micro-batches as they are fetched: whole, or without the samples that cannot be read."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch.utils.data import Dataset, get_worker_info

from lockstep.base import user_code
from lockstep.base.contracts import Columns, Source
from lockstep.base.errors import DataError, LockstepError, SampleError
from lockstep.base.model_contracts import Batch, MicroBatch
from lockstep.core.numerics.seeds import seed_all
from lockstep.data.augment import Augmented, keys_of
from lockstep.data.bad_samples import Faults
from lockstep.data.collate import Unfit, collate
from lockstep.data.sampler import ShardRequest

MOST_TRIED = 1000
"""Samples that are tried, at most, to learn the columns' dtypes from."""
WINDOWS = 64
"""Where no sample of a micro-batch can be read, so many micro-batches after it are looked through for one that can."""


class Fetched(Dataset[MicroBatch | LockstepError]):
    """A source that answers whole requests. A source's own randomness depends on the samples, not on the process."""

    def __init__(self, source: Source, faults: Faults, *, seed: int, pad_id: int) -> None:
        self.source, self.faults, self.seed, self.pad_id = source, faults, seed, pad_id
        self.dtypes: dict[str, torch.dtype] | None = None
        """Of each column, once they are known."""

    def __getitems__(self, request: ShardRequest) -> MicroBatch | LockstepError:
        """Fetch and collate one micro-batch; an error is returned, since a worker process would wrap it in its own."""
        try:
            return self.readable(request) if self.faults.skips else self.whole(request)
        except LockstepError as error:  # which says itself what is wrong
            return error

    def whole(self, request: ShardRequest, left_out: Mapping[int, str] | None = None) -> MicroBatch:
        """A micro-batch of all samples that are requested. Raises SampleError, DataError."""
        try:
            batch = self.batch(request)
        except LockstepError:
            raise
        except Exception as error:
            raise self.failed(request, error) from None
        return MicroBatch(
            step=request.step,
            shard=request.shard,
            indices=request.indices,
            batch=batch,
            ghost=request.ghost,
            shards=request.shards,
            present=request.present,
            left_out=left_out or {},
        )

    def batch(self, request: ShardRequest) -> Batch:
        """The samples as tensors; raises whatever the user's code raises."""
        batch = self.collated(request)
        if self.faults.skips:
            for name, usual in self.usual().items():
                if name in batch and batch[name].dtype != usual:
                    what = f"the column {name!r} of sample {request.indices[0]} is {batch[name].dtype}"
                    raise Unfit(f"{what}, but those of the first samples are {usual}", request.indices[0])
        return batch

    def usual(self) -> dict[str, torch.dtype]:
        """The dtypes of the first sample that can be read, the same for whoever asks."""
        if self.dtypes is None:
            self.dtypes = {}
            for index in range(min(len(self.source), MOST_TRIED)):
                try:
                    first = self.collated(ShardRequest(step=-1, shard=0, epoch=-1, indices=(index,)))
                except Exception:
                    continue
                self.dtypes = {name: column.dtype for name, column in first.items()}
                break
        return self.dtypes

    def collated(self, request: ShardRequest) -> Batch:
        """The same, whatever its dtypes are."""
        columns = self.columns(request)
        if not isinstance(columns, Mapping):
            raise DataError(
                f"{self.faults.name} gave a {type(columns).__name__} for a micro-batch, not a dict of columns: "
                '__getitems__ returns {"image": array [m, ...], "label": array [m]}'
            )
        return collate(columns, self.pad_id, spec=self.source.spec, samples=request.indices)

    def columns(self, request: ShardRequest) -> Columns:
        """The samples. What a source draws inside of __getitems__ belongs to the seed, the epoch and the first of them;
        what an augmentation draws, to its own sample."""
        seed_all(int(keys_of(self.seed, request.epoch, request.indices[:1])[0]))
        try:
            if isinstance(self.source, Augmented):
                return self.source.drawn(request.indices, request.epoch)
            return self.source.__getitems__(list(request.indices))  # with a tuple, an array would be indexed by axis
        except (SystemExit, KeyboardInterrupt) as error:
            if isinstance(error, KeyboardInterrupt) and get_worker_info() is None:  # it may be Ctrl-C
                raise
            raise RuntimeError(f"{type(error).__name__} was raised") from error  # else the process would just end

    def failed(self, request: ShardRequest, error: Exception) -> SampleError:
        """What went wrong, with the one sample that it goes wrong for, where there is one, and the user's frames."""
        alone = next(iter(self.failing(request, most=1)), None)
        what = f"samples {list(request.indices)} together" if alone is None else f"sample {alone}"
        where = f"step {request.step + 1}, shard {request.shard}" if request.step >= 0 else "evaluation"
        text = user_code.format_traceback(error)
        return SampleError(f"{what} of {self.faults.name} could not be fetched ({where}):\n{text}")

    def failing(self, request: ShardRequest, *, most: int | None = None) -> dict[int, str]:
        """The samples that cannot be fetched alone, at most so many, and why."""
        found: dict[int, str] = {}
        for index in request.indices:
            if len(found) == most:
                break
            try:
                self.batch(replace(request, indices=(index,)))
            except Exception as error:
                found[index] = f"{type(error).__name__}: {error}".partition("\n")[0]
        return found

    def readable(self, request: ShardRequest) -> MicroBatch:
        """A micro-batch of the samples that can be read. A function of the data alone: whoever fetches it, on however
        many processes, leaves out the same. Raises SampleError, DataError where it is not the fault of single ones."""
        micro_batch = self.rest(request, request.indices)
        if micro_batch is not None:
            return micro_batch
        left_out = self.failing(request)
        samples, size = len(self.source), len(request.indices)
        for window in range(1, WINDOWS + 1):
            start = request.indices[0] + window * size
            others = tuple(dict.fromkeys((start + place) % samples for place in range(size)))
            if (micro_batch := self.rest(request, others)) is not None:
                is_ghost = request.ghost or request.step < 0
                return replace(micro_batch, indices=(), left_out=left_out, ghost=is_ghost)
        raise DataError(
            f"{WINDOWS * size} samples in a row of {self.faults.name} cannot be read, the first being "
            f"{next(f'{sample}: {reason}' for sample, reason in left_out.items())}"
        )

    def rest(self, request: ShardRequest, indices: Sequence[int]) -> MicroBatch | None:
        """The micro-batch without those of these samples that cannot be read; None where none is left."""
        left_out: dict[int, str] = {}
        while remaining := tuple(index for index in indices if index not in left_out):
            asked = replace(request, indices=remaining)
            try:
                return self.whole(asked, left_out)
            except LockstepError as error:
                bad = self.failing(asked)
                if not bad and isinstance(error, Unfit) and error.sample is not None:
                    bad = {error.sample: str(error)}
                if not bad:
                    raise
                left_out |= bad
        return None
