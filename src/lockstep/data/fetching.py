"""Fetch micro-batches: whole, or without the samples that cannot be read, or are not to be."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice

import torch
from torch.utils.data import Dataset, get_worker_info

from lockstep.base import user_code
from lockstep.base.contracts import Columns, Source
from lockstep.base.errors import DataError, LockstepError, SampleError
from lockstep.base.model_contracts import Batch, MicroBatch
from lockstep.core.numerics.seeds import seed_all
from lockstep.data.augment import Augmented, keys_of
from lockstep.data.bad_samples import Faults
from lockstep.data.collate import UnusableSample, collate
from lockstep.data.sampler import ShardRequest
from lockstep.data.torch_dataset import Samples

MAX_TRIES = 1000
"""Samples to try until one can be read, to learn the columns' dtypes."""
MAX_WINDOWS = 64
"""Micro-batches to try, one after the other, as a replacement for one without a readable sample."""


class MicroBatchDataset(Dataset[MicroBatch | LockstepError]):
    """Fetches and collates whole micro-batches; random numbers depend on the samples, not on the process."""

    def __init__(self, source: Source, faults: Faults, *, seed: int, pad_id: int) -> None:
        self.source, self.faults, self.seed, self.pad_id = source, faults, seed, pad_id
        self.dtypes: dict[str, torch.dtype] | None = None
        """Dtype of each column; None until needed."""

    def __getitem__(self, request: ShardRequest) -> MicroBatch | LockstepError:
        """Fetch one micro-batch. Errors are returned: a DataLoader worker would wrap what is raised."""
        try:
            is_whole = not self.faults.skips and self.faults.excluded.isdisjoint(request.indices)
            return self.fetch(request) if is_whole else self.fetch_readable(request)
        except LockstepError as error:
            return error

    def fetch(self, request: ShardRequest, left_out: Mapping[int, str] | None = None) -> MicroBatch:
        """Fetch all requested samples. Raises SampleError, DataError."""
        try:
            batch = self.batch(request)
        except LockstepError:
            raise
        except Exception as error:
            raise self.sample_error(request, error) from None
        place = {name: value for name, value in vars(request).items() if name != "epoch"}
        return MicroBatch(**place, batch=batch, left_out=left_out or {})

    def batch(self, request: ShardRequest) -> Batch:
        """Fetch the samples as tensors; raises whatever the user's code raises."""
        batch = self.collated(request)
        if self.faults.skips:
            for name, expected in self.expected_dtypes().items():
                if name in batch and batch[name].dtype != expected:
                    what = f"the column {name!r} of sample {request.indices[0]} is {batch[name].dtype}"
                    raise UnusableSample(f"{what}, but those of the first samples are {expected}", request.indices[0])
        return batch

    def expected_dtypes(self) -> dict[str, torch.dtype]:
        """Return the dtypes of the first readable sample, the same in every process."""
        if self.dtypes is None:
            self.dtypes = {}
            for index in range(min(len(self.source), MAX_TRIES)):
                with suppress(Exception):
                    first = self.collated(ShardRequest(step=-1, shard=0, epoch=-1, indices=(index,)))
                    self.dtypes = {name: column.dtype for name, column in first.items()}
                    break
        return self.dtypes

    def collated(self, request: ShardRequest) -> Batch:
        """Fetch the samples as tensors of any dtype; of `Samples`, what their collate function returns."""
        columns = self.columns(request)
        if isinstance(self.source, Samples):
            return columns
        if not isinstance(columns, Mapping):
            raise DataError(
                f"{self.faults.name} gave a {type(columns).__name__} for a micro-batch, not a dict of columns: "
                '__getitems__ returns {"image": array [m, ...], "label": array [m]}'
            )
        return collate(columns, self.pad_id, spec=self.source.spec, samples=request.indices)

    def columns(self, request: ShardRequest) -> Columns:
        """Fetch the samples. Random numbers drawn in __getitems__ depend on seed, epoch and the first sample; those of
        an augmentation, on its own sample."""
        seed_all(int(keys_of(self.seed, request.epoch, request.indices[:1])[0]))
        try:
            if isinstance(self.source, Augmented):
                return self.source.drawn(request.indices, request.epoch)
            return self.source.__getitems__(list(request.indices))  # a tuple would index an array by axis
        except (SystemExit, KeyboardInterrupt) as error:
            if isinstance(error, KeyboardInterrupt) and get_worker_info() is None:  # it may be Ctrl-C
                raise
            raise RuntimeError(f"{type(error).__name__} was raised") from error  # else the process would just exit

    def sample_error(self, request: ShardRequest, error: Exception) -> SampleError:
        """Describe the error with the first sample that fails alone, if one does, and the frames of the user's code."""
        alone = next(iter(self.failing(request, limit=1)), None)
        what = f"samples {list(request.indices)} together" if alone is None else f"sample {alone}"
        where = f"step {request.step + 1}, shard {request.shard}" if request.step >= 0 else "evaluation"
        text = user_code.format_traceback(error)
        return SampleError(f"{what} of {self.faults.name} could not be fetched ({where}):\n{text}")

    def failing(self, request: ShardRequest, *, limit: int | None = None) -> dict[int, str]:
        """Return the samples, at most `limit`, that cannot be fetched alone, with the reasons."""
        reasons: dict[int, str] = {}
        for index in request.indices:
            if len(reasons) == limit:
                break
            try:
                self.batch(replace(request, indices=(index,)))
            except Exception as error:
                reasons[index] = f"{type(error).__name__}: {error}".partition("\n")[0]
        return reasons

    def fetch_readable(self, request: ShardRequest) -> MicroBatch:
        """Fetch the samples that can be read and are not excluded, the same ones on any number of processes.

        If there is none, the micro-batch has other samples and counts for nothing. Raises SampleError or DataError when
        the cause is not single samples.
        """
        micro_batch = self._fetch_readable(request, request.indices)
        if micro_batch is not None:
            return micro_batch
        left_out = self.faults.excluded_of(request.indices)
        left_out |= self.failing(replace(request, indices=tuple(i for i in request.indices if i not in left_out)))
        samples, size = len(self.source), len(request.indices)
        start, stop = request.indices[0] + size, samples + (MAX_WINDOWS + 1) * size
        kept = (i % samples for i in range(start, start + stop) if i % samples not in self.faults.excluded)
        for _ in range(MAX_WINDOWS):
            others = tuple(dict.fromkeys(islice(kept, size)))
            if (micro_batch := self._fetch_readable(request, others)) is not None:
                is_ghost = request.ghost or request.step < 0
                return replace(micro_batch, indices=(), left_out=left_out, ghost=is_ghost)
        sample, reason = next(iter(left_out.items()))
        raise DataError(
            f"{MAX_WINDOWS * size} samples in a row of {self.faults.name} cannot be read, the first being "
            f"{sample}: {reason}"
        )

    def _fetch_readable(self, request: ShardRequest, indices: Sequence[int]) -> MicroBatch | None:
        """Fetch those of these samples that can be read; None if there is none."""
        left_out = self.faults.excluded_of(indices)
        while remaining := tuple(index for index in indices if index not in left_out):
            smaller = replace(request, indices=remaining)
            try:
                return self.fetch(smaller, left_out)
            except LockstepError as error:
                if not self.faults.skips:
                    raise
                bad = self.failing(smaller)
                if not bad and isinstance(error, UnusableSample) and error.sample is not None:
                    bad = {error.sample: str(error)}
                if not bad:
                    raise
                left_out |= bad
        return None
