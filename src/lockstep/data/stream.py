"""Samples of an iterable data set by their position, which is found by reading on, pass after pass."""

import os
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch.utils.data import Dataset, IterableDataset
from torch.utils.data._utils import worker

from lockstep.base import user_code
from lockstep.base.contracts import DataSpec
from lockstep.base.errors import DataError, LockstepError, SampleError
from lockstep.core.host.activity import progress
from lockstep.core.numerics.seeds import generators_restored, seed_all, seed_of

Convert = Callable[[Any, int], Any]
"""Row of the stream, and its position -> sample."""
_INHERITED: list[Any] = []
"""Readers of the process that this was forked from, kept open: closing them would run the user's code twice."""


def is_iterable_only(dataset: Any) -> bool:
    """Return whether a data set can only be read from its beginning."""
    if isinstance(dataset, IterableDataset):
        is_indexed = type(dataset).__getitem__ is not Dataset.__getitem__ and hasattr(dataset, "__len__")
        return not is_indexed
    has = [hasattr(dataset, name) for name in ("__getitem__", "__getitems__", "__len__", "__next__")]
    return hasattr(dataset, "__iter__") and not any(has)


class Stream:
    """A map-style data set over an iterable one. Positions count from the beginning of the training: those of the first
    pass over the data set come first, then those of the second.

    Each process reads every sample, and holds those of the last positions. So which process asks for which sample makes
    no difference, as long as reading gives the same samples in the same order everywhere.
    """

    def __init__(
        self, dataset: Any, where: str, *, spec: DataSpec | None = None, convert: Convert | None = None
    ) -> None:
        self.dataset, self.where, self.convert = dataset, where, convert
        self.spec = spec or getattr(dataset, "spec", None)
        self.length = _length(dataset, where)
        """Samples of a pass; None until it is known."""
        self.samples = sys.maxsize if self.length is None else self.length
        """Number of samples to give; of an epoch in training."""
        self.limit = sys.maxsize
        """Most samples of a pass."""
        self.seed, self.held_samples, self.repeats = 0, 1, True
        self.rewind()

    def __len__(self) -> int:
        return self.samples

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_rows": None, "_held": {}}

    def limit_to(self, samples: int) -> None:
        """End each pass after so many samples."""
        self.limit = samples
        if self.length is not None:
            self.length = self.samples = min(samples, self.length)

    def train(self, samples: int, *, seed: int, held_samples: int) -> None:
        """Prepare for a training with `samples` in an epoch, each at most `held_samples` before one already taken."""
        self.samples, self.seed, self.held_samples = samples, seed, held_samples
        self.rewind()

    def measure(self, limit: int | None) -> None:
        """Give the first samples only, once. Raises DataError where it is not known how many there are."""
        if limit is None and self.length is None:
            raise DataError(
                f"{self.where} is a stream without a length: set evaluate.limit to the number of samples to measure"
            )
        self.samples, self.repeats = min(limit or sys.maxsize, self.length or sys.maxsize), False

    def rewind(self) -> None:
        """Read from the data set anew."""
        self._rows: Iterator[Any] | None = None
        self._held: dict[int, Any] = {}
        self._first = self._next = 0
        self._process = os.getpid()

    def __getitems__(self, positions: Sequence[int]) -> list[Any]:
        """Return the samples at these positions; random generators are restored afterwards. Raises DataError where
        passes differ in length, and SampleError for what the data set raises."""
        missing = [position for position in positions if position not in self._held]
        if missing:
            with generators_restored(), _without_worker_info():
                self._read(min(missing), min(positions), max(positions))
        held = [self._held[position] for position in positions]
        if self.convert is None:
            return held
        return [self.convert(*each) for each in zip(held, positions, strict=True)]

    def _read(self, missing: int, low: int, high: int) -> None:
        """Read up to position `high`, and hold what is not far below it."""
        holds = max(self.held_samples, high - low + 1)
        if self._rows is not None and self._process != os.getpid():
            _INHERITED.append(self._rows)
            self._rows = None
        is_far = hasattr(self.dataset, "skip") and low - holds > self._next
        if self._rows is None or missing < self._next or is_far:
            self.rewind()
            self._first = self._next = max(0, low - holds)
            self._rows = self._read_from(self._next)
        while self._next <= high:
            self._held[self._next] = self._read_one(self._rows)
            self._next += 1
            while self._first < self._next - holds:
                del self._held[self._first]
                self._first += 1

    def _read_one(self, rows: Iterator[Any]) -> Any:
        try:
            return next(rows)
        except BaseException as error:
            position = self._next
            self.rewind()
            if isinstance(error, LockstepError) or not isinstance(error, Exception):
                raise
            text = user_code.format_traceback(error)
            raise SampleError(f"sample {position} of {self.where} could not be read:\n{text}") from None

    def _read_from(self, position: int) -> Iterator[Any]:
        """Yield the samples from a position on, through one pass after the other."""
        number, offset = (0, position) if self.length is None else divmod(position, self.length)
        while True:
            if number and not self.repeats:
                raise DataError(
                    f"{self.where} ended after {self.length:,} samples, and {self.samples:,} are to be measured: set "
                    f"evaluate.limit to {self.length} or less"
                )
            count = yield from self._pass(number, offset)
            if self.length is None:
                self.length = sum(1 for _ in self._pass(0, 0)) if count is None else count
                if not self.length:
                    raise DataError(f"{self.where} is a stream without a sample")
                number, offset = divmod(max(offset, self.length), self.length)
            else:
                self._check(number, count or 0)
                number, offset = number + 1, 0

    def _pass(self, number: int, offset: int) -> Generator[Any, None, int | None]:
        """Yield the samples of a pass from number `offset` on; returns how many the whole pass has, None if that is not
        known. Random numbers drawn by the data set belong to the pass and the sample."""
        rows, start = self._opened(number, offset)
        count = start
        while count < self.limit:
            seed_all(seed_of(self.seed, "stream", number, 0 if count == start else count))
            try:
                row = next(rows)
            except StopIteration:
                break
            count += 1
            progress()  # finding the place of a resumed run may take minutes
            if self.length is not None and count > self.length:
                return count
            if count > offset:
                yield row
        return None if count == start > 0 else count

    def _opened(self, number: int, offset: int) -> tuple[Iterator[Any], int]:
        """Return an iterator over a pass, and the number of its first sample: `offset` where the data set can skip."""
        set_epoch, skip = (getattr(self.dataset, name, None) for name in ("set_epoch", "skip"))
        if set_epoch is not None:
            set_epoch(number)
        if skip is None:
            return iter(self.dataset), 0
        rest: Iterable[Any] = skip(offset)  # also 0: what it returns is this process's own, unlike the data set's epoch
        if hasattr(rest, "set_epoch"):
            rest.set_epoch(number)
        return iter(rest), offset

    def _check(self, number: int, count: int) -> None:
        if count != self.length:
            raise DataError(
                f"pass {number + 1} over {self.where} gave {count:,} samples, but a pass has {self.length:,}: give as "
                "many in each pass, and as many as its __len__ says"
            )


def _length(dataset: Any, where: str) -> int | None:
    """Return the number of samples of a pass, if the data set has one."""
    try:
        length = len(dataset)
    except (TypeError, NotImplementedError):
        return None
    if not length:
        raise DataError(f"{where} is a stream without a sample")
    return length


@contextmanager
def _without_worker_info() -> Iterator[None]:
    """Hide that this may be a worker of a DataLoader: a data set would leave the samples of the other workers out."""
    info, worker._worker_info = worker._worker_info, None
    try:
        yield
    finally:
        worker._worker_info = info
