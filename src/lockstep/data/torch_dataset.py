"""Adapter from a torch Dataset, map-style or iterable, to a Source."""

from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import fields, is_dataclass
from typing import Any, cast

import numpy as np
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

from lockstep.base.contracts import Columns, DataSpec, Source
from lockstep.base.errors import DataError
from lockstep.data.collate import Collated, pixels
from lockstep.data.stream import Stream, is_iterable_only

Collate = Callable[[list[Any]], Any]
"""The user's collate function: samples of a micro-batch -> a dict of tensors."""
Together = Callable[[list[Any]], Any]
"""The samples of a micro-batch -> tensors, in tuples, lists, dicts or anything else: DataLoader's collate_fn."""


def lengths_of(dataset: Any, where: str) -> np.ndarray | None:
    """Return the attribute `lengths` as int64 [len], None without one. Raises DataError unless each sample has one."""
    attribute = getattr(dataset, "lengths", None)
    if attribute is None:
        return None
    lengths = np.asarray(attribute)
    if lengths.shape != (len(dataset),) or lengths.dtype.kind not in "iu" or (lengths < 0).any():
        raise DataError(
            f"{where} has an attribute `lengths` that is not a length for each of its {len(dataset):,} samples: give "
            "whole numbers, such as [len(x) for x in samples], or call it something else"
        )
    return lengths.astype(np.int64)


def fetched(dataset: Any, indices: Sequence[int]) -> Any:
    """Fetch samples as a DataLoader does: together where the data set can. Raises DataError for too few, or more."""
    getitems = getattr(dataset, "__getitems__", None)
    if getitems is None:
        return [dataset[index] for index in indices]
    samples = getitems(list(indices))
    if isinstance(samples, Sized) and not isinstance(samples, Mapping) and len(samples) != len(indices):
        what = f"__getitems__ of {type(dataset).__name__} returned {len(samples)} samples for {len(indices)} indices"
        raise DataError(f"{what}: return one for each, in their order")
    return samples


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
        return cast(Columns, self.together(fetched(self.dataset, indices)))


class DatasetSource:
    """Any object with __len__ and __getitem__; `spec` is its own, or inferred from the first sample."""

    def __init__(self, dataset: Any, collate: Collate | None, where: str) -> None:
        self.dataset, self.collate, self.where = dataset, collate, where
        check_indexed(dataset, where)
        self.lengths = lengths_of(dataset, where)
        spec = getattr(dataset, "spec", None)
        self.spec: DataSpec = spec if isinstance(spec, DataSpec) else self._inferred_spec()

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, indices: Sequence[int]) -> Columns:
        """Return one column per field of a sample: the fields of a dict or dataclass, "input" and "label" of a pair,
        "input" for a single value ("image" and "text" if it is one). With `collate`, what that returns."""
        samples = self._fetch(indices)
        if isinstance(samples, Mapping):
            return dict(samples)
        if self.collate is not None:
            return Collated(_named(self.collate(samples), self.where))
        rows = [_named(sample, self.where) for sample in samples]
        for row, index in zip(rows, indices, strict=True):
            if row.keys() != rows[0].keys():
                raise DataError(
                    f"sample {index} of {self.where} has the columns {list(row)}, but sample {indices[0]} has "
                    f"{list(rows[0])}: give every sample the same ones"
                )
        return {name: [row[name] for row in rows] for name in rows[0]}

    def _fetch(self, indices: Sequence[int]) -> Any:
        """Fetch a list of samples, or a dict of columns if the data set's __getitems__ returns one."""
        samples = fetched(self.dataset, indices)
        return samples if isinstance(samples, Mapping) else list(samples)

    def _inferred_spec(self) -> DataSpec:
        """Infer the spec from the first sample and the names of the classes. Raises DataError if they are unknown."""
        if not len(self.dataset):
            return DataSpec(modality="any", labels=())  # open_source reports that it is empty
        samples = self._fetch([0])
        if isinstance(samples, Mapping):
            first = {name: column[0] for name, column in samples.items() if len(column)}
        else:
            first = _named(samples[0], self.where)
        shape = _image_shape(first.get("image"))
        return DataSpec(
            modality="text" if isinstance(first.get("text"), str) else "any" if shape is None else "image",
            labels=self._classes(first.get("label")),
            image_shape=shape,
        )

    def _classes(self, label: Any) -> tuple[str, ...]:
        """Return the names of the classes, also those of the data set behind a torch Subset."""
        dataset = self.dataset
        while (names := getattr(dataset, "classes", None)) is None and hasattr(dataset, "dataset"):
            dataset = dataset.dataset
        if names is not None:
            return class_names(names, self.where)
        if not _is_class(label):
            return ()
        raise DataError(
            f"the labels of {self.where} are whole numbers, but nothing says how many classes there are: give the data "
            "set an attribute `classes` (their names), or `spec = DataSpec(modality=..., labels=...)` of lockstep, "
            "with labels=() where a label is no class"
        )


def class_names(classes: Any, where: str) -> tuple[str, ...]:
    """Return the names of a data set's `classes`: a list, a text of one character for each, {index: name}, or {name:
    index}. Raises DataError."""
    if isinstance(classes, Mapping):
        is_numbered = all(isinstance(key, int) for key in classes)
        by_index = dict(classes) if is_numbered else {index: name for name, index in classes.items()}
        classes = [by_index.get(index) for index in range(len(classes))]
    if isinstance(classes, set | frozenset) or not isinstance(classes, Iterable) or None in (found := [*classes]):
        raise DataError(
            f"{where} has an attribute `classes` that does not name its classes in the order of their indices: give a "
            'list, such as ["cat", "dog"], or {"cat": 0, "dog": 1}, or call it something else'
        )
    return tuple(map(str, found))


def as_source(dataset: Any, collate: Collate | None, where: str) -> Source:
    """Adapt what a user's `source` returned; a Source is returned unchanged. Raises DataError, naming `where`."""
    if is_iterable_only(dataset):
        return DatasetSource(Stream(dataset, where), collate, where)
    is_source = all(hasattr(dataset, name) for name in ("__len__", "__getitems__", "lengths"))
    if is_source and isinstance(getattr(dataset, "spec", None), DataSpec) and collate is None:
        check_indexed(dataset, where)
        return dataset
    return DatasetSource(dataset, collate, where)


def _named(sample: Any, where: str) -> dict[str, Any]:
    if isinstance(sample, Mapping):
        return dict(sample)
    if is_dataclass(sample) and not isinstance(sample, type):
        return {field.name: getattr(sample, field.name) for field in fields(sample)}
    if hasattr(sample, "_asdict"):  # a named tuple
        return dict(sample._asdict())
    if not isinstance(sample, tuple):
        return {_input_name(sample): sample}
    if len(sample) not in (1, 2):
        raise DataError(
            f"{where} gives samples of {len(sample)} parts without names: give dicts ({{'image': ..., 'label': ...}}), "
            "or write `collate(samples)` in the same file, which makes a dict of tensors of them"
        )
    return dict(zip((_input_name(sample[0]), "label"), sample, strict=False))


def _input_name(value: Any) -> str:
    return "text" if isinstance(value, str) else "input" if _image_shape(value) is None else "image"


def _image_shape(value: Any) -> tuple[int, int, int] | None:
    """Return (C, H, W) of a Pillow image or an array [C, H, W] with 1, 3 or 4 channels; None for anything else."""
    if isinstance(value, Image.Image):
        value = pixels(value)
    is_image = isinstance(value, np.ndarray | Tensor) and value.ndim == 3 and value.shape[0] in (1, 3, 4)
    return (int(value.shape[0]), int(value.shape[1]), int(value.shape[2])) if is_image else None


def _is_class(label: Any) -> bool:
    """Return whether a label is a single integer."""
    if isinstance(label, Tensor):
        return label.ndim == 0 and not label.dtype.is_floating_point and not label.dtype.is_complex
    array = np.asarray(label) if isinstance(label, int | np.generic | np.ndarray) else None
    return array is not None and array.ndim == 0 and array.dtype.kind in "biu"


def check_indexed(dataset: Any, where: str) -> None:
    """Raise DataError unless samples can be fetched by index."""
    try:
        len(dataset)
    except TypeError as error:
        raise DataError(
            f"{where} is a {type(dataset).__name__} without a length ({error}): give a map-style data set, with "
            "__len__ and __getitem__, whose samples can be asked for by number"
        ) from None
    if not hasattr(dataset, "__getitem__") and not hasattr(dataset, "__getitems__"):
        raise DataError(
            f"{where} is a {type(dataset).__name__} without __getitem__ and __getitems__: add one, or return the data "
            "set of a DataLoader (its .dataset)"
        )
