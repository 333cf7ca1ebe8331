"""Collate columns into tensors: keep dtypes, pad rows of different lengths, reject what is not numeric."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from lockstep.base.contracts import Columns, DataSpec
from lockstep.base.errors import DataError
from lockstep.base.model_contracts import Batch

MULTIPLE = 8
"""Lengths are rounded up to a multiple of this: few shapes for kernels, and full tiles for tensor cores."""
TOKENS = "input_ids"
TOKEN_DTYPES = (torch.int16, torch.int32, torch.uint16, torch.uint32, torch.uint64)
"""Dtypes that become int64 in rows [T_i], as embeddings need; all others, also uint8 and bool, are kept."""
SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


class Collated(dict[str, Any]):
    """Result of the user's own `collate`, whose tensors need not have one row per sample."""


class UnusableSample(DataError):
    """A sample that cannot become a tensor, or does not match the others of its micro-batch."""

    def __init__(self, message: str, sample: int | None = None) -> None:  # None while it is unpickled
        super().__init__(message)
        self.sample = sample


def collate(
    columns: Columns,
    pad_id: int = 0,
    *,
    multiple: int = MULTIPLE,
    spec: DataSpec | None = None,
    samples: Sequence[int] = (),
) -> Batch:
    """Array [m, ...] -> tensor [m, ...]; list of m numbers, arrays, tensors or images -> tensor [m, ...].

    Padded at the end of dim 1, to a multiple of `multiple`: rows of different lengths, "input_ids" (with `pad_id`), the
    columns of spec.pad and spec.masks, and any column whose rows have the same lengths as one of these. "input_ids"
    gets an "attention_mask", each column of spec.masks a "COLUMN_mask": int64 [m, T], 0 for padding. Dicts within
    columns are flattened: "a.b". Python floats become float32. Raises DataError with the column and, by its number in
    `samples`, the sample.
    """
    flat: dict[str, Tensor | list[Tensor]] = {}
    for name, column in _flatten(columns, samples):
        if name in flat:
            raise DataError(f"there are two columns {name!r}: rename one")
        is_list = isinstance(column, list)
        flat[name] = _list_column(name, column, samples) if is_list else _array_column(name, column)
    if samples and not isinstance(columns, Collated):
        for name, rows in flat.items():
            if len(rows) != len(samples):
                raise DataError(
                    f"the column {name!r} has {len(rows)} rows for {len(samples)} samples: give one for each"
                )
    return _to_batch(flat, _Padding(pad_id, multiple, spec))


class _Padding:
    """Columns to pad, and the values to pad them with."""

    def __init__(self, pad_id: int, multiple: int, spec: DataSpec | None) -> None:
        self.multiple = multiple
        self.pad = {TOKENS: pad_id, **(spec.pad if spec else {})}
        self.masks = {TOKENS: "attention_mask", **{name: f"{name}_mask" for name in (spec.masks if spec else ())}}

    def applies(self, name: str, lengths: Sequence[int]) -> bool:
        return name in self.pad or name in self.masks or len(set(lengths)) > 1

    def value(self, name: str, dtype: torch.dtype) -> float:
        fill = self.pad.get(name, 0)
        if fill == 0:
            return fill
        cast = torch.tensor(fill).to(dtype)
        if cast.item() != fill and not (cast.is_floating_point() and (fill != fill or cast.isfinite())):
            raise DataError(
                f"spec.pad[{name!r}] = {fill!r} cannot be held by a column of {_dtype_name(dtype)}: correct it"
            )
        return fill


def _to_batch(columns: Mapping[str, Tensor | list[Tensor]], padding: _Padding) -> Batch:
    lists = {name: rows for name, rows in columns.items() if isinstance(rows, list) and rows and rows[0].ndim}
    lengths = {name: tuple(map(len, rows)) for name, rows in lists.items()}
    padded_lengths = {lengths[name] for name in lists if padding.applies(name, lengths[name])}
    batch: Batch = {}
    for name, column in columns.items():
        is_padded = lengths.get(name) in padded_lengths
        if is_padded:
            width = -(-max(lengths[name]) // padding.multiple) * padding.multiple
            is_filled = torch.arange(width) < torch.tensor(lengths[name])[:, None]  # bool [m, T]
            batch[name] = _pad(lists[name], is_filled, padding.value(name, lists[name][0].dtype))
        else:
            batch[name] = torch.stack(column) if isinstance(column, list) else column
            is_filled = torch.ones(batch[name].shape[:2], dtype=torch.bool)
        mask = padding.masks.get(name)
        if mask is not None and mask not in columns and batch[name].ndim > 1 and (is_padded or name != TOKENS):
            batch[mask] = is_filled.to(torch.int64)
    return batch


def _pad(rows: Sequence[Tensor], is_filled: Tensor, fill: float) -> Tensor:
    padded = torch.full((*is_filled.shape, *rows[0].shape[1:]), fill, dtype=rows[0].dtype)
    indexable = SIGNED.get(padded.dtype, padded.dtype)  # torch cannot index unsigned ones
    padded.view(indexable)[is_filled] = torch.cat([row.view(indexable) for row in rows])  # 5x faster than pad_sequence
    return padded


def _flatten(columns: Mapping[Any, Any], samples: Sequence[int], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every column that is not a dict, named by its path; object arrays and tuples become lists."""
    for key, column in columns.items():
        if not isinstance(key, str):
            raise DataError(f"a column is named {prefix}{key!r}, a {type(key).__name__}: names are strings")
        name = prefix + key
        if isinstance(column, tuple) or (isinstance(column, np.ndarray) and column.dtype == object and column.ndim):
            column = list(column)
        if isinstance(column, list) and column and all(isinstance(row, Mapping) for row in column):
            _check_same_keys(name, column, samples)
            column = {entry: [row[entry] for row in column] for entry in column[0]}
        if isinstance(column, Mapping):
            yield from _flatten(column, samples, f"{name}.")
        else:
            yield name, column


def _check_same_keys(name: str, rows: Sequence[Mapping[Any, Any]], samples: Sequence[int]) -> None:
    for position, row in enumerate(rows):
        if row.keys() != rows[0].keys():
            here, first = _sample_number(samples, position), _sample_number(samples, 0)
            raise UnusableSample(
                f"the column {name!r} of {_sample_name(here)} has the entries {sorted(map(str, row))}, but that of "
                f"{_sample_name(first)} has {sorted(map(str, rows[0]))}: give every sample the same ones",
                here,
            )


def _array_column(name: str, column: Any) -> Tensor:
    tensor = _tensor(column) if isinstance(column, np.ndarray | Tensor) else None
    if tensor is None or tensor.ndim == 0:
        raise DataError(
            f"the column {name!r} is {_type_name(column)}: a column is an array or a tensor with a row "
            "of numbers for each sample, or a list of as many"
        )
    return tensor


def _list_column(name: str, values: Sequence[Any], samples: Sequence[int]) -> list[Tensor]:
    """Convert a column's rows to tensors of one dtype and, except for dim 0, one shape."""
    if all(type(value) is np.ndarray and value.ndim == 1 and value.dtype == values[0].dtype for value in values):
        if not values:
            return []
        joined = _row_tensor(name, np.concatenate(values), _sample_number(samples, 0))  # 10x faster than row by row
        return list(joined.split(list(map(len, values))))
    rows = [_row_tensor(name, value, _sample_number(samples, position)) for position, value in enumerate(values)]
    kinds = [(row.dtype, row.ndim, row.shape[1:]) for row in rows]
    if len(set(kinds)) <= 1:
        return rows
    counted = Counter(kind for kind, value in zip(kinds, values, strict=True) if not _is_empty_list(value))
    usual = max(counted, key=lambda kind: counted[kind])  # the first one on a tie
    for position, (kind, value) in enumerate(zip(kinds, values, strict=True)):
        if kind != usual and not (_is_empty_list(value) and usual[1] == 1):
            here, other = _sample_number(samples, position), _sample_number(samples, kinds.index(usual))
            what, beside = _row_type(rows[position]), _row_type(rows[kinds.index(usual)])
            raise UnusableSample(
                f"the column {name!r} of {_sample_name(here)} is {what}, but that of {_sample_name(other)} is "
                f"{beside}: a column has one dtype, and rows that differ in their first axis at most",
                here,
            )
    return [row.to(usual[0]) for row in rows]


def _row_tensor(name: str, value: Any, sample: int | None) -> Tensor:
    tensor = _tensor(value)
    if tensor is None:
        raise UnusableSample(
            f"the column {name!r} of {_sample_name(sample)} is {_type_name(value)}, which no tensor can hold: give "
            "numbers or arrays of them, leave the column out, or make numbers of it in collate(samples) of your file",
            sample,
        )
    return tensor.to(torch.int64) if tensor.ndim == 1 and tensor.dtype in TOKEN_DTYPES else tensor


def _tensor(value: Any) -> Tensor | None:
    """Convert an array, a number, a list of numbers or an image; None for anything else."""
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, Image.Image):
        return torch.from_numpy(pixels(value))
    is_numpy = isinstance(value, np.ndarray | np.generic)
    try:
        array = np.asarray(value)
    except ValueError:  # a list of lists of different lengths
        return None
    if array.dtype.kind not in "biufc":
        return None
    if not is_numpy and array.dtype == np.float64:
        array = array.astype(np.float32)
    if not array.dtype.isnative or not array.flags.writeable or min(array.strides, default=0) < 0:
        array = np.array(array, dtype=array.dtype.newbyteorder("="), order="C")
    try:
        return torch.from_numpy(array)
    except TypeError:  # 16-byte numbers
        return None


def pixels(image: Image.Image) -> np.ndarray:
    """Convert an image to [C, H, W], keeping its dtype; grey images have one channel, palettes become RGB."""
    if image.mode == "P":
        image = image.convert("RGB")
    array = np.array(image)
    return array[None] if array.ndim == 2 else np.ascontiguousarray(array.transpose(2, 0, 1))


def _is_empty_list(value: Any) -> bool:
    return isinstance(value, list | tuple) and not value


def _sample_number(samples: Sequence[int], position: int) -> int | None:
    return int(samples[position]) if position < len(samples) else None


def _sample_name(sample: int | None) -> str:
    return "a sample" if sample is None else f"sample {sample}"


def _row_type(row: Tensor) -> str:
    return f"{_dtype_name(row.dtype)} of shape {list(row.shape)}"


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _type_name(value: Any) -> str:
    if value is None:
        return "None"
    if isinstance(value, str):
        return f"the text {value[:40]!r}"
    return f"an array of {value.dtype}" if isinstance(value, np.ndarray) else f"a {type(value).__name__}"
