"""Training samples to leave out (data.exclude): by number, or by the values of columns of the data's table."""

import csv
import hashlib
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np

from lockstep.base.contracts import Source
from lockstep.base.errors import DataError
from lockstep.data.augment import Augmented
from lockstep.data.dataset import Subset
from lockstep.data.mixture import Joined
from lockstep.data.packing import Windows
from lockstep.data.token_cache import Tokens

Values = tuple[str, ...]
MOST_DIGITS = 18


def excluded_samples(files: Sequence[Path], source: Source) -> np.ndarray:
    """Return the numbers of the training samples that these files name, sorted, int64. Raises DataError."""
    found = [_named_in(file, source) for file in files]
    excluded = np.unique(np.concatenate(found)) if found else np.empty(0, dtype=np.int64)
    if len(excluded) == len(source):
        raise DataError("data.exclude leaves no training sample: name fewer")
    return excluded


def summed(excluded: np.ndarray, source: Source) -> str | None:
    """Describe excluded samples for the numeric recipe: their number, and a sum over their numbers; None for none."""
    if not len(excluded):
        return None
    digest = hashlib.sha256(excluded.astype("<i8").tobytes()).hexdigest()[:32]
    return f"{len(excluded):,} of {len(source):,} samples, sha256 {digest}"


def _named_in(file: Path, source: Source) -> np.ndarray:
    """Return the numbers of the samples that a file names. Raises DataError, with the line."""
    if not file.is_file():
        raise DataError(f"data.exclude: there is no file {file}")
    from lockstep.data import tables  # noqa: PLC0415 (imports pyarrow, which a server does without)

    with tables.read_errors(file):
        names, lines = _read(file)
    if not lines:
        raise DataError(f"data.exclude: {file} names no training sample")
    if not names:
        return np.array([_number(text, source, f"{file}, line {line}") for (text,), line in lines.items()], np.int64)
    samples, known = _matching(source, names, lines)
    if other := next((values for values in lines if values not in known), None):
        what = " and ".join(f"{name} {value!r}" for name, value in zip(names, other, strict=True))
        raise DataError(f"{file}, line {lines[other]}: no training sample has {what}; remove the line")
    return samples


def _number(text: str, source: Source, place: str) -> int:
    if not text.isdecimal() or len(text) > MOST_DIGITS:
        raise DataError(f"{place}: {text!r:.80} is no number of a sample; each line holds one, such as 17")
    if int(text) >= len(source):
        raise DataError(f"{place}: there is no training sample {text}: they are numbered 0 to {len(source) - 1}")
    return int(text)


def _read(file: Path) -> tuple[Values, dict[Values, int]]:
    """Return the names of the columns, none of a file of numbers, and the values of each line -> its number. Raises
    ValueError, which names the line."""
    from lockstep.data.tables import form_of, open_text  # noqa: PLC0415 (see above)

    with open_text(file) as opened:
        lines = [(number, line.rstrip("\r\n")) for number, line in enumerate(opened, 1) if line.strip()]
    if lines and lines[0][1].strip().isdecimal():
        return (), {(line.strip(),): number for number, line in lines}
    rows = csv.reader((line for _, line in lines), delimiter="\t" if form_of(file) == ".tsv" else ",")
    names, found = (*next(rows, ()),), dict[Values, int]()
    for (number, _), cells in zip(lines[1:], rows, strict=False):
        if len(cells) != len(names):
            raise ValueError(f"line {number} has {len(cells)} values for the columns {', '.join(names)}")
        found[*cells,] = number
    return names, found


def _matching(source: Source, names: Values, wanted: Collection[Values]) -> tuple[np.ndarray, set[Values]]:
    """Return the samples whose rows have wanted values in these columns, and which of the values there are. Raises
    DataError for a source without such columns."""
    if isinstance(source, Augmented | Tokens):
        return _matching(source.source, names, wanted)
    if isinstance(source, Windows):
        if len(source.tokens) != len(source.tokens.source):
            what = "data.exclude names chats by columns, but the chat template makes several samples of some chats"
            raise DataError(f"{what}: name the samples by number, or set data.turns=last")
        texts, known = _matching(source.tokens, names, wanted)
        return source.holding(texts), known
    if isinstance(source, Subset):
        samples, known = _matching(source.source, names, wanted)
        return np.flatnonzero(np.isin(source.rows[np.arange(len(source))], samples)), known
    if isinstance(source, Joined):
        parts = [_matching(part, names, wanted) for part in source.parts]
        moved = [samples + first for (samples, _), first in zip(parts, source.firsts, strict=False)]
        return np.concatenate(moved), set().union(*(known for _, known in parts))
    if (cells := getattr(source, "cells", None)) is None:
        what = f"data.exclude names samples by {' and '.join(names)}, but this data has no table with columns"
        raise DataError(f"{what}: name them by number, one on each line")
    rows = [(*("" if value is None else str(value) for value in row),) for row in zip(*cells(names), strict=True)]
    return np.array([n for n, row in enumerate(rows) if row in wanted], dtype=np.int64), {*rows} & {*wanted}
