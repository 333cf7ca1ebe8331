"""Columns to tensors: dtypes are kept, rows that differ in length are padded, what is no number is refused by name."""

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
"""Lengths are rounded up to this, so that kernels meet few shapes (and tensor cores whole tiles)."""
TOKENS = "input_ids"
TOKEN_DTYPES = (torch.int16, torch.int32, torch.uint16, torch.uint32, torch.uint64)
"""Of rows [T_i] these become int64, as embeddings want them; uint8 and bool are kept, as all other dtypes are."""

SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


class Collated(dict[str, Any]):
    """A micro-batch as the user's own `collate` has made it: its tensors need not have a row for each sample."""


class Unfit(DataError):
    """A sample that no tensor can hold, or that does not fit those beside it."""

    def __init__(self, message: str, sample: int | None) -> None:
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
    """Array [m, ...] -> tensor [m, ...]; a list of m numbers, arrays, tensors or images -> tensor [m, ...], its rows
    padded at the end of their first axis where they differ there.

    To a multiple of `multiple` are padded: rows that differ in length, "input_ids" (with `pad_id`), the columns of
    spec.pad and spec.masks, and whatever has rows of the same lengths as one of these. "input_ids" comes with
    "attention_mask", a column of spec.masks with "COLUMN_mask", int64 [m, T]: 1 where there is something. Dicts within
    columns are flattened: "a.b". Python's floats become float32. Raises DataError, which names the column and, by its
    number in `samples`, the sample.
    """
    rows, batch = dict[str, list[Tensor]](), dict[str, Tensor | None]()
    for name, column in _flat(columns, samples):
        if name in batch:
            raise DataError(f"there are two columns {name!r}: rename one")
        batch[name] = None if isinstance(column, list) else _whole(name, column)
        if isinstance(column, list):
            rows[name] = _rows(name, column, samples)
    counts = {name: len(rows[name]) if column is None else len(column) for name, column in batch.items()}
    _check_counts(counts, columns, samples)
    return _joined(batch, rows, _Filling(pad_id, multiple, spec))


class _Filling:
    """What short rows are filled with."""

    def __init__(self, pad_id: int, multiple: int, spec: DataSpec | None) -> None:
        self.multiple = multiple
        self.pad = {TOKENS: pad_id, **(spec.pad if spec else {})}
        self.masks = {TOKENS: "attention_mask", **{name: f"{name}_mask" for name in (spec.masks if spec else ())}}

    def is_ragged(self, name: str, lengths: Sequence[int]) -> bool:
        return name in self.pad or name in self.masks or len(set(lengths)) > 1

    def value(self, name: str, dtype: torch.dtype) -> float:
        fill = self.pad.get(name, 0)
        if fill == 0:
            return fill
        held = torch.tensor(fill).to(dtype)
        if held.item() != fill and not (held.is_floating_point() and (fill != fill or held.isfinite())):
            raise DataError(f"spec.pad[{name!r}] = {fill!r} cannot be held by a column of {_word(dtype)}: correct it")
        return fill


def _joined(batch: Mapping[str, Tensor | None], rows: Mapping[str, list[Tensor]], filling: _Filling) -> Batch:
    lengths = {name: tuple(map(len, parts)) for name, parts in rows.items() if parts and parts[0].ndim}
    ragged = {lengths[name] for name in lengths if filling.is_ragged(name, lengths[name])}
    out: Batch = {}
    for name, whole in batch.items():
        is_padded = name in lengths and lengths[name] in ragged
        if is_padded:
            filled = _filled(lengths[name], filling.multiple)
            out[name] = _padded(rows[name], filled, filling.value(name, rows[name][0].dtype))
        else:
            out[name] = torch.stack(rows[name]) if whole is None else whole
            filled = torch.ones(out[name].shape[:2], dtype=torch.bool)
        mask = filling.masks.get(name)
        if mask is not None and mask not in batch and out[name].ndim > 1 and (is_padded or name != TOKENS):
            out[mask] = filled.to(torch.int64)
    return out


def _filled(lengths: Sequence[int], multiple: int) -> Tensor:
    """Where there is something: bool [m, T], T being a multiple."""
    width = -(-max(lengths) // multiple) * multiple
    return torch.arange(width) < torch.tensor(lengths)[:, None]


def _padded(rows: Sequence[Tensor], filled: Tensor, fill: float) -> Tensor:
    padded = torch.full((*filled.shape, *rows[0].shape[1:]), fill, dtype=rows[0].dtype)
    known = SIGNED.get(padded.dtype, padded.dtype)  # the same bits, of a dtype that torch can index
    padded.view(known)[filled] = torch.cat([row.view(known) for row in rows])  # a fifth of pad_sequence's time
    return padded


def _flat(columns: Mapping[Any, Any], samples: Sequence[int], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every column that is no dict, under the names on the way to it; object arrays and tuples as lists."""
    for key, column in columns.items():
        if not isinstance(key, str):
            raise DataError(f"a column is named {prefix}{key!r}, a {type(key).__name__}: names are strings")
        name = prefix + key
        if isinstance(column, tuple) or (isinstance(column, np.ndarray) and column.dtype == object and column.ndim):
            column = list(column)
        if isinstance(column, list) and column and all(isinstance(row, Mapping) for row in column):
            _check_entries(name, column, samples)
            column = {part: [row[part] for row in column] for part in column[0]}
        if isinstance(column, Mapping):
            yield from _flat(column, samples, f"{name}.")
        else:
            yield name, column


def _check_entries(name: str, rows: Sequence[Mapping[Any, Any]], samples: Sequence[int]) -> None:
    for place, row in enumerate(rows):
        if row.keys() != rows[0].keys():
            here, first = _number(samples, place), _number(samples, 0)
            raise Unfit(
                f"the column {name!r} of {_told(here)} has the entries {sorted(map(str, row))}, but that of "
                f"{_told(first)} has {sorted(map(str, rows[0]))}: give every sample the same ones",
                here,
            )


def _whole(name: str, column: Any) -> Tensor:
    """A column that comes as one array."""
    if isinstance(column, Tensor):
        found: Tensor | None = column.detach()
    else:
        found = _tensor(column) if isinstance(column, np.ndarray) else None
    if found is None or found.ndim == 0:
        what = f"an array of {column.dtype}" if isinstance(column, np.ndarray) else _described(column)
        raise DataError(
            f"the column {name!r} is {what}: a column is an array or a tensor with a row of numbers for each sample, "
            "or a list of as many"
        )
    return found


def _rows(name: str, values: Sequence[Any], samples: Sequence[int]) -> list[Tensor]:
    """A column's rows, all of one dtype and, but for their first axis, of one shape."""
    if all(type(value) is np.ndarray and value.ndim == 1 and value.dtype == values[0].dtype for value in values):
        whole = _row(name, np.concatenate(values), _number(samples, 0)) if values else torch.empty(0)
        return list(whole.split(list(map(len, values)))) if values else []  # a tenth of the time for tokens
    rows = [_row(name, value, _number(samples, place)) for place, value in enumerate(values)]
    kinds = [(row.dtype, row.ndim, row.shape[1:]) for row in rows]
    if len(set(kinds)) <= 1:
        return rows
    counted = Counter(kind for kind, value in zip(kinds, values, strict=True) if not _is_empty_list(value))
    usual = max(counted, key=lambda kind: counted[kind])  # the first of those that are equally often
    for place, (kind, value) in enumerate(zip(kinds, values, strict=True)):
        if kind != usual and not (_is_empty_list(value) and usual[1] == 1):
            here, other = _number(samples, place), _number(samples, kinds.index(usual))
            what, beside = _kind(rows[place]), _kind(rows[kinds.index(usual)])
            raise Unfit(
                f"the column {name!r} of {_told(here)} is {what}, but that of {_told(other)} is {beside}: a column has "
                "one dtype, and rows that differ in their first axis at most",
                here,
            )
    return [row.to(usual[0]) for row in rows]


def _row(name: str, value: Any, sample: int | None) -> Tensor:
    found = value.detach() if isinstance(value, Tensor) else _tensor(value)
    if found is None:
        raise Unfit(
            f"the column {name!r} of {_told(sample)} is {_described(value)}, which no tensor can hold: give numbers or "
            "arrays of them, or leave the column out",
            sample,
        )
    return found.to(torch.int64) if found.ndim == 1 and found.dtype in TOKEN_DTYPES else found


def _tensor(value: Any) -> Tensor | None:
    """An array, a number, a list of numbers or an image as a tensor; None for anything else."""
    if isinstance(value, Image.Image):
        return torch.from_numpy(pixels(value))
    is_own = isinstance(value, np.ndarray | np.generic)
    try:
        array = np.asarray(value)
    except ValueError:  # a list of lists that differ in length
        return None
    if array.dtype.kind not in "biufc":
        return None
    if not is_own and array.dtype == np.float64:
        array = array.astype(np.float32)
    if not array.dtype.isnative or not array.flags.writeable or min(array.strides, default=0) < 0:
        array = np.array(array, dtype=array.dtype.newbyteorder("="), order="C")
    try:
        return torch.from_numpy(array)
    except TypeError:  # numbers of 16 bytes
        return None


def pixels(image: Image.Image) -> np.ndarray:
    """An image as an array of its own dtype, [C, H, W]; grey ones have one channel, palettes become colours."""
    if image.mode == "P":
        image = image.convert("RGB")
    array = np.array(image)
    return array[None] if array.ndim == 2 else np.ascontiguousarray(array.transpose(2, 0, 1))


def _check_counts(counts: Mapping[str, int], columns: Columns, samples: Sequence[int]) -> None:
    if isinstance(columns, Collated) or not samples:
        return
    for name, count in counts.items():
        if count != len(samples):
            raise DataError(f"the column {name!r} has {count} rows for {len(samples)} samples: give one for each")


def _is_empty_list(value: Any) -> bool:
    return isinstance(value, list | tuple) and not value


def _number(samples: Sequence[int], place: int) -> int | None:
    return int(samples[place]) if place < len(samples) else None


def _told(sample: int | None) -> str:
    return "a sample" if sample is None else f"sample {sample}"


def _kind(row: Tensor) -> str:
    return f"{_word(row.dtype)} of shape {list(row.shape)}"


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _described(value: Any) -> str:
    if value is None:
        return "None"
    if isinstance(value, str):
        return f"the text {value[:40]!r}"
    return f"an array of {value.dtype}" if isinstance(value, np.ndarray) else f"a {type(value).__name__}"
