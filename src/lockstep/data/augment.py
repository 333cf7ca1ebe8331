"""Augmentation: a user's function over one training sample, whose random numbers belong to seed, epoch and sample."""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import numpy as np

from lockstep.base import plugins
from lockstep.base.contracts import Columns, Source
from lockstep.base.errors import DataError
from lockstep.core.numerics.seeds import seed_all
from lockstep.data.collate import Collated
from lockstep.data.data_config import DataSection
from lockstep.data.order import mix

Sample = Mapping[str, Any]
"""One row of a micro-batch's columns: column name -> array [...], number or string."""
Augment = Callable[[dict[str, Any]], Sample]


def keys_of(seed: int, epoch: int, indices: Sequence[int]) -> np.ndarray:
    """A number for each sample in an epoch, uint64 [m]; unrelated for any two."""
    keys = np.array([seed], dtype=np.uint64)
    for part in ([epoch], indices):
        keys = mix(keys ^ np.array(part, dtype=np.int64).view(np.uint64))
    return keys


class Augmented:
    """A training split whose samples pass through a function each time they are drawn."""

    def __init__(self, source: Source, augment: Augment, seed: int) -> None:
        self.source, self.augment, self.seed = source, augment, seed
        self.spec, self.lengths = source.spec, source.lengths

    def __len__(self) -> int:
        return len(self.source)

    def __getitems__(self, indices: Sequence[int]) -> Columns:
        """The samples as they are in the source."""
        return self.source.__getitems__(list(indices))

    def drawn(self, indices: Sequence[int], epoch: int) -> Columns:
        """The samples as an epoch sees them; the function gets a copy of each, and may change it in place.

        Costs 10 µs a sample beside the function's own time.
        """
        columns = self.source.__getitems__(list(indices))
        if isinstance(columns, Collated):
            raise DataError(
                "collate() makes whole micro-batches, of which augment() cannot get single samples: augment in "
                "__getitem__, where all generators are seeded just the same"
            )
        rows = []
        for place, key in enumerate(mix(keys_of(self.seed, epoch, indices))):  # mixed again: not the fetch's own key
            seed_all(int(key))
            rows.append(self.augment({name: deepcopy(column[place]) for name, column in columns.items()}))
        return {name: _joined([row[name] for row in rows], columns.get(name)) for name in rows[0]}


def _joined(rows: list[Any], like: Any) -> Any:
    """Rows -> a column: a list where the source gave one (of texts, or of arrays that differ in length)."""
    return rows if isinstance(like, list) else np.stack([np.asarray(row) for row in rows])


def augmented(source: Source, section: DataSection, seed: int) -> Source:
    """The training split with the user's `augment(sample)`, if there is one: in the file that data.augment names, else
    in data.file. Raises DataError when the named file has none."""
    file = section.augment or section.code
    augment = getattr(plugins.load_file(file, "data.augment"), "augment", None) if file else None
    if augment is None and section.augment is not None:
        raise DataError(f"data.augment: {section.augment} has no function augment(sample)")
    return source if augment is None else Augmented(source, augment, seed)
