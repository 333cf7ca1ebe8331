"""Targets in a label column: one class, several classes, a number, or a class for each word."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lockstep.base.errors import DataError
from lockstep.core.numerics.word_tokens import END, joined, words_of
from lockstep.data.columns import Place, labels_of, names_of, positions, texts_of

SEPARATOR = ";"
"""Separator of a sample's classes in one text."""
LARGEST = float(np.finfo(np.float32).max)
"""Largest number to predict."""


@dataclass(frozen=True, kw_only=True)
class Targets:
    """The encoded targets of N samples, and the fields of DataSpec that describe them."""

    values: np.ndarray
    """int64 [N], indices into `labels`; uint8 [N, K], 1 for each of the `labels`; float32 [N], a number; or an object
    array [N] of int64 [W], an index for each of a sample's W words."""
    labels: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ()
    objective: str = "auto"

    @property
    def described(self) -> dict[str, Any]:
        """The fields of DataSpec."""
        return {"labels": self.labels, "numbers": self.numbers, "objective": self.objective}


class LabelColumn:
    """Reader and encoder of a label column: of one class for each sample, unless a subclass reads others."""

    def read(self, cells: Iterable[Any], place: Place) -> list[Any]:
        """Check the cells. Raises DataError for the first one that is no target."""
        return labels_of(cells, place)

    def read_texts(self, texts: Iterable[Any], read: Sequence[Any], place: Place) -> list[str]:
        """Check the texts of the cells that were read. Raises DataError for the first one that is no text."""
        return texts_of(texts, place)

    def names(self, train: Sequence[Any], column: str) -> tuple[str, ...]:
        """Return the names of the classes or the number, from the training samples."""
        return names_of(train)

    def encode(self, read: Sequence[Any], names: tuple[str, ...], place: Place, *, known_to: str = "") -> Targets:
        """Encode targets. Raises DataError for a class without a name; `known_to`: owner of the names."""
        return Targets(values=positions(read, names, place, known_to=known_to), labels=names)


class ClassesColumn(LabelColumn):
    """Any number of classes: a list, or a text with a separator between them; none where it is empty."""

    def read(self, cells: Iterable[Any], place: Place) -> list[list[str]]:
        return [self._classes(cell, number, place) for number, cell in enumerate(cells)]

    def _classes(self, cell: Any, number: int, place: Place) -> list[str]:
        if cell is None or (isinstance(cell, float) and math.isnan(cell)):
            return []
        parts = [part.strip() for part in cell.split(SEPARATOR)] if isinstance(cell, str) else cell
        if not isinstance(parts, list | tuple | np.ndarray):
            parts = [parts]
        return labels_of([part for part in parts if part != ""], _at(place, number))

    def names(self, train: Sequence[Any], column: str) -> tuple[str, ...]:
        return names_of(name for row in train for name in row)

    def encode(self, read: Sequence[Any], names: tuple[str, ...], place: Place, *, known_to: str = "") -> Targets:
        if not names:
            raise DataError("no sample has a class: name the column that holds them with data.label_column")
        values = np.zeros((len(read), len(names)), dtype=np.uint8)
        for number, row in enumerate(read):
            values[number, positions(row, names, _at(place, number), known_to=known_to)] = 1
        return Targets(values=values, labels=names, objective="multilabel")


def _at(place: Place, number: int) -> Place:
    """Return a Place that names sample `number` for each of its parts."""
    return lambda _: place(number)


class NumberColumn(LabelColumn):
    """A number."""

    def read(self, cells: Iterable[Any], place: Place) -> list[float]:
        return [self._number(cell, number, place) for number, cell in enumerate(cells)]

    def _number(self, cell: Any, number: int, place: Place) -> float:
        try:
            found = float(cell)
        except (TypeError, ValueError):
            found = math.nan
        if not math.isfinite(found):
            what = "no label" if cell in (None, "") else f"the label {cell!r}, which is no finite number"
            raise DataError(f"{place(number)} has {what}: correct it, remove the row, or set data.labels=class")
        if abs(found) > LARGEST:
            what = f"the label {cell!r}, beyond what float32 can hold, {LARGEST:.1e}"
            raise DataError(f"{place(number)} has {what}: give all labels in a larger unit, or their logarithms")
        return found

    def names(self, train: Sequence[Any], column: str) -> tuple[str, ...]:
        return (column,)

    def encode(self, read: Sequence[Any], names: tuple[str, ...], place: Place, *, known_to: str = "") -> Targets:
        return Targets(values=np.array(read, dtype=np.float32), numbers=names)


class TagsColumn(ClassesColumn):
    """A class for each word of a text: both are lists, or texts that white space separates."""

    def read(self, cells: Iterable[Any], place: Place) -> list[list[str]]:
        found = [_listed(cell, place(number), "labels") for number, cell in enumerate(cells)]
        return [labels_of(row, _at(place, number)) for number, row in enumerate(found)]

    def read_texts(self, texts: Iterable[Any], read: Sequence[Any], place: Place) -> list[str]:
        """Return the joined words. Raises DataError where there are not as many as labels."""
        found = []
        for number, (cell, labels) in enumerate(zip(texts, read, strict=True)):
            words, where = _listed(cell, place(number), "words"), place(number)
            for word in words:
                if not isinstance(word, str) or not word.strip() or END in word:
                    raise DataError(f"{where} has {word!r} for a word: a word is a text that is not empty")
            if len(words) != len(labels):
                raise DataError(
                    f"{where} has {len(words)} words and {len(labels)} labels: give one label for each word"
                )
            if not words:
                raise DataError(f"{where} has no word: remove the row")
            found.append(joined(words))
        return found

    def encode(self, read: Sequence[Any], names: tuple[str, ...], place: Place, *, known_to: str = "") -> Targets:
        rows = (positions(row, names, _at(place, n), known_to=known_to) for n, row in enumerate(read))
        values = np.fromiter(rows, dtype=object, count=len(read))
        return Targets(values=values, labels=names, objective="token_classification")


def _listed(cell: Any, where: str, what: str) -> list[Any]:
    """Return a list of a cell's words or labels. Raises DataError for a cell that holds something else."""
    if isinstance(cell, str):
        return words_of(cell)
    if not isinstance(cell, list | tuple | np.ndarray):
        raise DataError(
            f"{where} has {cell!r} for {what}: data.labels=tags takes a list, or a text with spaces between"
        )
    return [*cell]


COLUMNS: dict[str, LabelColumn] = {
    "class": LabelColumn(),
    "classes": ClassesColumn(),
    "number": NumberColumn(),
    "tags": TagsColumn(),
}
