"""Micro-batches of a data set of the user's, in the form that a script's own DataLoader would give them."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, default_collate

from lockstep.base.contracts import Columns, DataSpec, Source
from lockstep.base.errors import DataError
from lockstep.base.model_contracts import Batch, MicroBatch
from lockstep.data.fetching import MicroBatchDataset
from lockstep.data.loader import Loader
from lockstep.data.sampler import ShardRequest
from lockstep.data.torch_dataset import check_indexed

Together = Callable[[list[Any]], Any]
"""The samples of a micro-batch -> tensors, in tuples, lists, dicts or anything else: DataLoader's collate_fn."""


class Samples:
    """A data set as a Source whose micro-batches are made by a collate function. Raises DataError."""

    spec = DataSpec(modality="any")
    lengths: np.ndarray | None = None

    def __init__(self, dataset: Any, together: Together | None, where: str) -> None:
        if isinstance(dataset, DataLoader):
            raise DataError(f"{where} is a DataLoader: give the data set itself, loader.dataset")
        check_indexed(dataset, where)
        if not len(dataset):
            raise DataError(f"{where} holds no sample")
        self.dataset, self.together = dataset, together or default_collate

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, indices: Sequence[int]) -> Columns:
        getitems = getattr(self.dataset, "__getitems__", None)
        samples = [self.dataset[index] for index in indices] if getitems is None else getitems(list(indices))
        return cast(Columns, self.together(samples))


class _MicroBatches(MicroBatchDataset):
    def collated(self, request: ShardRequest) -> Batch:
        """What the collate function has returned, which need not be a dict of tensors."""
        return self.columns(request)


class SampleLoader(Loader):
    """Loads the micro-batches of `Samples`."""

    def micro_batches(self, source: Source, *, seed: int, pad_id: int) -> MicroBatchDataset:
        return _MicroBatches(source, self.faults, seed=seed, pad_id=pad_id)

    def _check_dtypes(self, micro_batch: MicroBatch) -> None:
        """A collate function may return what it likes."""

    def _moved(self, micro_batch: MicroBatch) -> MicroBatch:
        if self.device.type == "cpu":
            return micro_batch
        return replace(micro_batch, batch=tree_map_only(Tensor, self._copied, micro_batch.batch))

    def _copied(self, tensor: Tensor) -> torch.Tensor:
        return tensor.pin_memory().to(self.device, non_blocking=True)
