"""Several sources as one, of which each epoch draws samples by weights: a pure function of seed, epoch and position."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np

from lockstep.base.contracts import Columns, DataSpec, Source
from lockstep.base.errors import DataError
from lockstep.data.collate import Collated
from lockstep.data.dataset import EvenRows
from lockstep.data.order import mix, permuted


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """How many samples of each source an epoch draws, and which."""

    seed: int
    sizes: tuple[int, ...]
    weights: tuple[float, ...]
    samples_per_epoch: int | None = None

    @property
    def samples(self) -> int:
        """Draws of an epoch: by default so many that each source has been seen once, and one of them exactly once."""
        if self.samples_per_epoch is not None:
            return self.samples_per_epoch
        return max(-int(-size // share) for size, share in zip(self.sizes, self._shares(), strict=True))

    @property
    def counts(self) -> tuple[int, ...]:
        """Draws from each source in an epoch: its share of them, rounded."""
        return tuple(stop - start for start, stop in pairwise(self._bounds()))

    def rows(self, epoch: int, draws: np.ndarray) -> np.ndarray:
        """Return the samples, numbered through all sources, of these draws of an epoch, int64 [n].

        A source is gone through in passes, each in its own order: a pass goes on in the next epoch, so that its samples
        are seen equally often.
        """
        bounds, firsts = np.array(self._bounds()), np.cumsum([0, *self.sizes])
        parts = np.searchsorted(bounds, draws, side="right") - 1
        out = np.empty(len(draws), dtype=np.int64)
        for part in np.unique(parts).tolist():
            mine, size = parts == part, self.sizes[part]
            passes, places = np.divmod(epoch * self.counts[part] + draws[mine] - bounds[part], size)
            rows = np.empty(len(places), dtype=np.int64)
            for number in np.unique(passes).tolist():
                chosen = passes == number
                rows[chosen] = permuted(places[chosen], seed=self._seed(part), epoch=number, samples=size)
            out[mine] = firsts[part] + rows
        return out

    def spread(self, count: int) -> "Mixture | None":
        """Return the mixture of what spread_evenly leaves, in epochs of `count`; None where a source has none left."""
        if count >= sum(self.sizes):
            return self
        rows = EvenRows(count, sum(self.sizes))[np.arange(count)]
        sizes = np.histogram(rows, bins=np.cumsum([0, *self.sizes]))[0].tolist()
        return replace(self, sizes=tuple(sizes), samples_per_epoch=count) if min(sizes) else None

    def _seed(self, part: int) -> int:
        return int(mix(mix(np.array([self.seed], dtype=np.uint64)) ^ np.uint64(part + 1))[0])

    def _shares(self) -> list[Fraction]:
        weights = [Fraction(str(weight)) for weight in self.weights]
        return [weight / sum(weights) for weight in weights]

    def _bounds(self) -> list[int]:
        """Return the first draw of each source, and the number of all."""
        shares, samples = self._shares(), self.samples
        return [int(samples * sum(shares[:part]) + Fraction(1, 2)) for part in range(len(shares) + 1)]


class Joined:
    """Sources with samples of the same kind, one after the other."""

    def __init__(self, parts: Sequence[Source], names: Sequence[str]) -> None:
        """Raises DataError where the DataSpecs of `parts` differ, or only some give lengths; `names` are theirs."""
        self.parts, self.names, self.spec = parts, names, parts[0].spec
        self.remarks = tuple(remark for part in parts for remark in getattr(part, "remarks", ()))
        for part, name in zip(parts[1:], names[1:], strict=True):
            _check_alike((self.spec, names[0]), (part.spec, name))
        self.sizes = tuple(map(len, parts))
        self.firsts = np.cumsum([0, *self.sizes])
        known = [part.lengths for part in parts]
        lengths = [each for each in known if each is not None]
        if 0 < len(lengths) < len(parts):
            has, lacks = (
                next(n for n, each in zip(names, known, strict=True) if (each is None) == no) for no in (0, 1)
            )
            raise DataError(
                f"{has} gives the lengths of its samples and {lacks} does not: give them for all, or for none"
            )
        self.lengths = np.concatenate(lengths) if lengths else None

    def __len__(self) -> int:
        return int(self.firsts[-1])

    def __getitems__(self, indices: Sequence[int]) -> Columns:
        """Return the columns of these samples. Raises DataError where those of the sources do not fit together."""
        wanted = np.asarray(indices, dtype=np.int64)
        parts = np.searchsorted(self.firsts, wanted, side="right") - 1
        found: list[Columns] = []
        places: list[np.ndarray] = []
        for part in np.unique(parts).tolist():
            mine = np.flatnonzero(parts == part)
            columns = self.parts[part].__getitems__((wanted[mine] - self.firsts[part]).tolist())
            self._check_columns(columns, part, found)
            found.append(columns)
            places.append(mine)
        if len(found) == 1:
            return found[0]
        order = np.argsort(np.concatenate(places))
        return {name: _column([each[name] for each in found], order, name) for name in found[0]}

    def _check_columns(self, columns: Columns, part: int, before: Sequence[Columns]) -> None:
        if isinstance(columns, Collated) or not isinstance(columns, Mapping):
            raise DataError(
                f"{self.names[part]} gives whole micro-batches, of which a mix cannot take single samples: leave out "
                "collate(), and return columns"
            )
        if before and columns.keys() != before[0].keys():
            raise DataError(
                f"{self.names[part]} gives the columns {list(columns)}, but another source of the mix "
                f"{list(before[0])}: give all the same ones"
            )


def _check_alike(first: tuple[DataSpec, str], other: tuple[DataSpec, str]) -> None:
    for field in fields(DataSpec):
        values = [getattr(spec, field.name) for spec, _ in (first, other)]
        if values[0] != values[1]:
            raise DataError(
                f"{first[1]} and {other[1]} cannot be mixed: `{field.name}` of their samples is {values[0]!r:.200} and "
                f"{values[1]!r:.200}"
            )


def _column(parts: Sequence[Any], order: np.ndarray, name: str) -> Any:
    """Join a column of several sources: an array where all are arrays with rows of one form, else a list of rows."""
    if all(isinstance(part, np.ndarray) for part in parts) and len({part.shape[1:] for part in parts}) == 1:
        if len(types := {str(part.dtype) for part in parts}) > 1:
            raise DataError(f"the column {name!r} is {' and '.join(sorted(types))} in sources that are mixed: use one")
        return np.concatenate(parts)[order]
    rows = [row for part in parts for row in part]
    return [rows[place] for place in order.tolist()]
