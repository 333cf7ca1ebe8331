"""Augmentation: a user's function of one training sample, with random numbers seeded by seed, epoch and sample."""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import numpy as np

from lockstep.base import plugins
from lockstep.base.contracts import Columns, Source
from lockstep.base.errors import DataError
from lockstep.core.numerics.seeds import seed_all
from lockstep.data.collate import Collated
from lockstep.data.data_config import DataSection
from lockstep.data.image_transforms import ImageTransforms
from lockstep.data.order import mix

Sample = Mapping[str, Any]
"""One row of a micro-batch's columns: column name -> array [...], number or string."""
Augment = Callable[[dict[str, Any]], Sample]


def keys_of(seed: int, epoch: int, indices: Sequence[int]) -> np.ndarray:
    """Random seeds for samples of an epoch, uint64 [m]."""
    keys = np.array([seed], dtype=np.uint64)
    for values in ([epoch], indices):
        keys = mix(keys ^ np.array(values, dtype=np.int64).view(np.uint64))
    return keys


class Augmented:
    """A training split whose samples pass through a function each time they are fetched."""

    def __init__(self, source: Source, augment: Augment, seed: int) -> None:
        self.source, self.augment, self.seed = source, augment, seed
        self.spec, self.lengths = source.spec, source.lengths

    def __len__(self) -> int:
        return len(self.source)

    def __getitems__(self, indices: Sequence[int]) -> Columns:
        """Return the samples without augmentation."""
        return self.source.__getitems__(list(indices))

    def drawn(self, indices: Sequence[int], epoch: int) -> Columns:
        """Return the samples of an epoch. The function gets a copy of each, which it may change in place; the overhead
        is 10 µs per sample."""
        columns = self.source.__getitems__(list(indices))
        if isinstance(columns, Collated):
            raise DataError(
                "collate() makes whole micro-batches, of which augment() cannot get single samples: augment in "
                "__getitem__, where all generators are seeded just the same"
            )
        rows = []
        for position, key in enumerate(
            mix(keys_of(self.seed, epoch, indices))
        ):  # other keys than the fetch itself uses
            seed_all(int(key))
            rows.append(self.augment({name: deepcopy(column[position]) for name, column in columns.items()}))
        return {name: _column([row[name] for row in rows], columns.get(name)) for name in rows[0]}


def _column(rows: list[Any], original: Any) -> Any:
    """Join rows: as a list if the source's column is one (texts, or arrays of different lengths)."""
    return rows if isinstance(original, list) else np.stack([np.asarray(row) for row in rows])


def augmented(source: Source, section: DataSection, seed: int) -> Source:
    """Apply the user's `augment(sample)` from data.augment, else from data.file, if there is one, and then
    data.transforms. Raises DataError when data.augment has none, and what ImageTransforms raises."""
    file = section.augment or section.code
    augment = getattr(plugins.load_file(file, "data.augment"), "augment", None) if file else None
    if augment is None and section.augment is not None:
        raise DataError(f"data.augment: {section.augment} has no function augment(sample)")
    steps: list[Augment] = [augment] if augment is not None else []
    if section.transforms:
        steps.append(ImageTransforms(section.transforms, source.spec))
    return Augmented(source, partial(_chained, steps), seed) if steps else source


def _chained(steps: Sequence[Augment], sample: dict[str, Any]) -> Sample:
    for step in steps:
        sample = dict(step(sample))
    return sample
