"""A plain torch Dataset, one sample at a time, as a Source: columns, and what the model must know of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from lockstep.base.contracts import Columns, DataSpec, Source
from lockstep.base.errors import DataError
from lockstep.data.collate import Collated, pixels

Collate = Callable[[list[Any]], Any]
"""A user's own: a micro-batch's samples, as the data set gives them -> a dict of tensors."""
MEND = (
    "give the data set an attribute `classes` (their names), or `spec = DataSpec(modality=..., labels=...)` of "
    "lockstep, with labels=() where a label is no class"
)


def lengths_of(dataset: Any, where: str) -> np.ndarray | None:
    """The attribute `lengths` of a user's data set, a list or an array, as int64 [len]; None where it has none. Raises
    DataError for what is no length for each sample."""
    given = getattr(dataset, "lengths", None)
    if given is None:
        return None
    found = np.asarray(given)
    if found.shape != (len(dataset),) or found.dtype.kind not in "iu" or (found < 0).any():
        raise DataError(
            f"{where} has an attribute `lengths` that is not a length for each of its {len(dataset):,} samples: give "
            "whole numbers, such as [len(x) for x in samples], or call it something else"
        )
    return found.astype(np.int64)


class DatasetSource:
    """Any object with __len__ and __getitem__; `spec` is its own, or learnt from its first sample."""

    def __init__(self, dataset: Any, collate: Collate | None, where: str) -> None:
        self.dataset, self.collate, self.where = dataset, collate, where
        _check(dataset, where)
        self.lengths = lengths_of(dataset, where)
        spec = getattr(dataset, "spec", None)
        self.spec: DataSpec = spec if isinstance(spec, DataSpec) else self._learnt()

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, indices: Sequence[int]) -> Columns:
        """A column for each part of a sample: a dict's or dataclass's by their names, (input, label) by "input" (an
        image: "image") and "label", a lone one "input". With an own `collate`, whatever that makes of them."""
        found = self._several(indices)
        if isinstance(found, Mapping):
            return dict(found)
        if self.collate is not None:
            return Collated(named(self.collate(found), self.where))
        rows = [named(sample, self.where) for sample in found]
        for row, index in zip(rows, indices, strict=True):
            if row.keys() != rows[0].keys():
                raise DataError(
                    f"sample {index} of {self.where} has the columns {list(row)}, but sample {indices[0]} has "
                    f"{list(rows[0])}: give every sample the same ones"
                )
        return {name: [row[name] for row in rows] for name in rows[0]}

    def _several(self, indices: Sequence[int]) -> Any:
        """Samples, or columns where the data set gives whole micro-batches of them."""
        many = getattr(self.dataset, "__getitems__", None)
        if many is None:
            return [self.dataset[index] for index in indices]
        found = many(list(indices))
        return found if isinstance(found, Mapping) else list(found)

    def _learnt(self) -> DataSpec:
        """What the first sample tells, and the names of the classes. Raises DataError where they are not known."""
        if not len(self.dataset):
            return DataSpec(modality="any", labels=())  # open_source says that it is empty
        first = {name: column[0] for name, column in self._plain([0]).items() if len(column)}
        shape = image_shape(first.get("image"))
        return DataSpec(
            modality="text" if isinstance(first.get("text"), str) else "any" if shape is None else "image",
            labels=self._classes(first.get("label")),
            image_shape=shape,
        )

    def _plain(self, indices: Sequence[int]) -> Mapping[str, Any]:
        found = self._several(indices)
        if isinstance(found, Mapping):
            return found
        return {name: [value] for name, value in named(found[0], self.where).items()}

    def _classes(self, label: Any) -> tuple[str, ...]:
        """Names of the classes, also of the data set that a torch Subset is a part of."""
        dataset = self.dataset
        while (names := getattr(dataset, "classes", None)) is None and hasattr(dataset, "dataset"):
            dataset = dataset.dataset
        if names is not None:
            return tuple(map(str, names))
        if not is_class(label):
            return ()
        raise DataError(
            f"the labels of {self.where} are whole numbers, but nothing says how many classes there are: {MEND}"
        )


def as_source(found: Any, collate: Collate | None, where: str) -> Source:
    """What a user's `source` has returned, as it is where it is a Source. Raises DataError, naming `where`."""
    is_source = all(hasattr(found, name) for name in ("__len__", "__getitems__", "spec", "lengths"))
    if is_source and collate is None:
        _check(found, where)
        return found
    return DatasetSource(found, collate, where)


def named(sample: Any, where: str) -> dict[str, Any]:
    if isinstance(sample, Mapping):
        return dict(sample)
    if is_dataclass(sample) and not isinstance(sample, type):
        return {field.name: getattr(sample, field.name) for field in fields(sample)}
    if hasattr(sample, "_fields"):  # a named tuple
        return dict(zip(sample._fields, sample, strict=True))
    if not isinstance(sample, tuple):
        return {_first_name(sample): sample}
    if len(sample) not in (1, 2):
        raise DataError(
            f"{where} gives samples of {len(sample)} parts without names: give dicts ({{'image': ..., 'label': ...}}), "
            "or write `collate(samples)` in the same file, which makes a dict of tensors of them"
        )
    return dict(zip((_first_name(sample[0]), "label"), sample, strict=False))


def _first_name(value: Any) -> str:
    return "text" if isinstance(value, str) else "input" if image_shape(value) is None else "image"


def image_shape(value: Any) -> tuple[int, int, int] | None:
    """(C, H, W) of an image, a picture of Pillow's or an array [C, H, W] of 1, 3 or 4 channels; None for others."""
    if isinstance(value, Image.Image):
        value = pixels(value)
    is_image = isinstance(value, np.ndarray | Tensor) and value.ndim == 3 and value.shape[0] in (1, 3, 4)
    return (int(value.shape[0]), int(value.shape[1]), int(value.shape[2])) if is_image else None


def is_class(label: Any) -> bool:
    """Whether a label is one whole number."""
    if isinstance(label, Tensor):
        return label.ndim == 0 and not label.dtype.is_floating_point and not label.dtype.is_complex
    array = np.asarray(label) if isinstance(label, int | np.generic | np.ndarray) else None
    return array is not None and array.ndim == 0 and array.dtype.kind in "biu"


def _check(dataset: Any, where: str) -> None:
    """Raise DataError for what cannot be asked for a sample by its number."""
    try:
        len(dataset)
    except TypeError as error:
        raise DataError(
            f"{where} is a {type(dataset).__name__} without a length ({error}): give a map-style data set, with "
            "__len__ and __getitem__, whose samples can be asked for by number"
        ) from None
    if not hasattr(dataset, "__getitem__") and not hasattr(dataset, "__getitems__"):
        raise DataError(f"{where} is a {type(dataset).__name__} without __getitem__ and __getitems__: add one")
