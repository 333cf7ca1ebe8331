"""Columns as people write them: texts that are texts, labels that become positions in a list of names."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from lockstep.base.errors import DataError

Place = Callable[[int], str]
"""Sample number, from 0 -> where a person finds it ("row 1 of /data/train.csv")."""


def rows_of(where: object) -> Place:
    """Places in a table: the first sample is row 1."""
    return lambda number: f"row {number + 1} of {where}"


def require(columns: Sequence[str], there: Sequence[str], where: object, *, kind: str = "text") -> None:
    """Raise DataError, naming the columns there are and the settings of samples of a `kind`, unless each of `columns`
    is there exactly once."""
    for column in columns:
        count = list(there).count(column)
        if count > 1:
            raise DataError(f"{where} has {count} columns named {column!r}: rename all but one")
        if count == 0:
            raise DataError(
                f"{where} has no column {column!r}: set data.{kind}_column or data.label_column to one "
                f"that is there ({', '.join(map(str, there)) or 'no column at all'})"
            )


def texts_of(values: Iterable[Any], place: Place) -> list[str]:
    """The values of a text column; raises DataError for the first that is missing or not a text."""
    texts = list(values)
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            found = "no text" if text is None else f"{text!r} for a text"
            raise DataError(f"{place(number)} has {found}: remove the row, or name another data.text_column")
    return texts


def labels_of(values: Iterable[Any], place: Place) -> list[str]:
    """Labels as names (3 and 3.0 become "3"); raises DataError for the first that is none."""
    labels = []
    for number, value in enumerate(values):
        if value is None or value == "" or (isinstance(value, float) and math.isnan(value)):
            raise DataError(f"{place(number)} has no label: label it or remove it")
        if not isinstance(value, str | int | float):
            raise DataError(f"{place(number)} has the label {value!r}: a label is one text or one number")
        whole = isinstance(value, float) and value.is_integer()
        labels.append(str(int(value)) if whole else str(value))
    return labels


def names_of(labels: Iterable[str]) -> tuple[str, ...]:
    """The classes: each label once, in the order of numbers if all are numbers, else of the alphabet."""
    names = sorted(set(labels))
    try:
        numbers = {name: float(name) for name in names}
    except ValueError:
        return tuple(names)
    if not all(map(math.isfinite, numbers.values())):
        return tuple(names)
    return tuple(sorted(names, key=lambda name: (numbers[name], name)))


def positions(labels: Sequence[str], names: Sequence[str], place: Place, *, known_to: str = "") -> np.ndarray:
    """Position of each label in `names`, int64 [N]; raises DataError for the first that is not there. `known_to` says
    whose the names are, by default the training samples'."""
    position = {name: number for number, name in enumerate(names)}
    for number, label in enumerate(labels):
        if label not in position:
            known = ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")
            if known_to:
                what = f"has the label {label!r}, which {known_to} does not know ({known})"
                raise DataError(f"{place(number)} {what}: correct it, or leave it out")
            raise DataError(
                f"{place(number)} has the label {label!r}, which no training sample has ({known}): "
                f"correct it, or add training samples of it"
            )
    return np.array([position[label] for label in labels], dtype=np.int64)
