"""Check text and label columns, map texts into memory, turn labels into class names and indices."""

import math
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from lockstep.base.errors import DataError

Place = Callable[[int], str]
"""Sample number, from 0 -> its location for messages ("row 1 of /data/train.csv")."""
Cells = Callable[[Sequence[str]], list[Any]]
"""Names of columns of a table -> for each, the values of all samples. Raises DataError for one that is not there."""


def rows_of(where: object) -> Place:
    """Return the locations of samples in a table: the first is row 1."""
    return lambda number: f"row {number + 1} of {where}"


def require(columns: Sequence[str], there: Sequence[str], where: object, *, kind: str = "text") -> None:
    """Raise DataError unless each of `columns`, of samples and perhaps of labels, occurs exactly once; `kind` ("text",
    "image") selects the setting that the message names."""
    settings = " or ".join([f"data.{kind}_column", "data.label_column"][: len(columns)])
    for column in columns:
        count = list(there).count(column)
        if count > 1:
            raise DataError(f"{where} has {count} columns named {column!r}: rename all but one")
        if count == 0:
            raise DataError(
                f"{where} has no column {column!r}: set {settings} to one that is there "
                f"({', '.join(map(str, there)) or 'no column at all'})"
            )


def check_named(names: Sequence[str], there: Sequence[str], where: object) -> None:
    """Raise DataError unless each column that data.exclude names is there."""
    for name in names:
        if name not in there:
            raise DataError(f"data.exclude: {where} has no column {name!r} (there is: {', '.join(map(str, there))})")


def texts_of(values: Iterable[Any], place: Place) -> list[str]:
    """Check a text column. Raises DataError for the first value that is missing or not a string."""
    texts = list(values)
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            what = "no text" if text is None else f"{text!r} for a text"
            raise DataError(f"{place(number)} has {what}: remove the row, or name another data.text_column")
    return texts


def labels_of(values: Iterable[Any], place: Place) -> list[str]:
    """Convert labels to strings (3 and 3.0 become "3"). Raises DataError for the first missing or not scalar."""
    labels = []
    for number, value in enumerate(values):
        if value is None or value == "" or (isinstance(value, float) and math.isnan(value)):
            raise DataError(f"{place(number)} has no label: label it or remove it")
        if not isinstance(value, str | int | float):
            raise DataError(f"{place(number)} has the label {value!r}: a label is one text or one number")
        labels.append(str(int(value)) if isinstance(value, float) and value.is_integer() else str(value))
    return labels


def names_of(labels: Iterable[str]) -> tuple[str, ...]:
    """Return the distinct labels, in numeric order if all are finite numbers, else in alphabetic order. Raises
    DataError for two that differ only in how they are written."""
    names, known = sorted(set(labels)), dict[object, str]()
    for name in names:
        if (other := known.setdefault(_canonical(name), name)) != name:
            what = "white space, accents or the form of a number"
            raise DataError(f"the labels {other!r} and {name!r} differ in nothing but {what}: write them alike")
    with suppress(ValueError):
        numbers = {name: float(name) for name in names}
        if all(map(math.isfinite, numbers.values())):
            names.sort(key=numbers.__getitem__)  # stable: equal numbers stay in alphabetic order
    return tuple(names)


def _canonical(name: str) -> object:
    """Return a key equal for labels that differ only in white space, encoding of accents or form of a number."""
    with suppress(ValueError):
        if math.isfinite(number := float(name)):
            return number
    return " ".join(unicodedata.normalize("NFC", name).split())


def positions(labels: Sequence[str], names: Sequence[str], place: Place, *, known_to: str = "") -> np.ndarray:
    """Return the index of each label in `names`, int64 [N]. Raises DataError for the first that is not in it;
    `known_to`: owner of the names, by default the training samples."""
    index = {name: number for number, name in enumerate(names)}
    for number, label in enumerate(labels):
        if label not in index:
            known = ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")
            if known_to:
                what = f"has the label {label!r}, which {known_to} does not know ({known})"
                raise DataError(f"{place(number)} {what}: correct it, or leave it out")
            raise DataError(
                f"{place(number)} has the label {label!r}, which no training sample has ({known}): "
                f"correct it, or add training samples of it"
            )
    return np.array([index[label] for label in labels], dtype=np.int64)


class MappedTexts(Sequence[str]):
    """Some rows of an Arrow column that is mapped into memory; each text is read when it is asked for."""

    def __init__(self, column: Any, rows: np.ndarray | None = None) -> None:
        """`column` holds strings, or bytes of UTF-8 in which there may be lone surrogates; by default all rows."""
        self.column = column
        self.rows = np.arange(len(column)) if rows is None else rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        """Return the text with this number, or some texts."""
        row = self.rows[index]
        if isinstance(row, np.ndarray):
            return MappedTexts(self.column, row)
        text = self.column[int(row)].as_py()
        return text.decode("utf-8", "surrogatepass") if isinstance(text, bytes) else text
