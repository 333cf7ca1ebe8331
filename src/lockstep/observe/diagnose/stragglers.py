"""Names a rank that keeps the others waiting over many steps, once, with its likely reason."""

import statistics
from collections.abc import Callable, Sequence

from lockstep.base.events import Observer, RankTimes, Regrouped, Warned
from lockstep.core.host.phases import BUSY

WINDOW_SECONDS = 5.0
"""Duration of steps that are compared together: shorter ones differ by chance."""
WINDOWS = 3
"""A rank is named when it was the slowest in so many windows, one after the other."""
FACTOR = 1.25
"""A rank counts as slow from so many times the median of the others' time per micro-batch."""
DELAYED = 0.1
"""A share of time for which a process waits for a core that is more than chance."""


class Stragglers(Observer):
    """Compares what ranks take per micro-batch, since some may have more of them than others."""

    def __init__(self, publish: Callable[[object], None], window_seconds: float = WINDOW_SECONDS) -> None:
        self.publish, self.window_seconds = publish, window_seconds
        self.window: list[RankTimes] = []
        self.slow, self.times = -1, 0
        """The slowest rank of the last windows, and in how many of them."""
        self.named: set[int] = set()

    def notice(self, event: object) -> None:
        if isinstance(event, Regrouped):  # ranks are other processes now
            self.window, self.slow, self.times, self.named = [], -1, 0, set()
        if not isinstance(event, RankTimes) or len(event.micro_batches) < 2:
            return
        self.window.append(event)
        if sum(max(_each(times, BUSY)) for times in self.window) < self.window_seconds:
            return
        window, self.window = self.window, []
        rank = slowest(window)
        self.slow, self.times = rank, self.times + 1 if rank == self.slow else 1
        if rank >= 0 and self.times >= WINDOWS and rank not in self.named:
            self.named.add(rank)
            self.publish(Warned(message=description(rank, window)))


def slowest(window: Sequence[RankTimes]) -> int:
    """Return the rank that is slower than the others by FACTOR; -1 if none is."""
    seconds = _per_micro_batch(window, BUSY)
    rank = max(range(len(seconds)), key=seconds.__getitem__)
    return rank if seconds[rank] > FACTOR * statistics.median(_others(seconds, rank)) else -1


def description(rank: int, window: Sequence[RankTimes]) -> str:
    """Describe a slow rank in a sentence: how slow, how long the others wait for it, and why."""
    seconds = _per_micro_batch(window, BUSY)
    own, usual = seconds[rank], statistics.median(_others(seconds, rank))
    steps = sum(times.steps for times in window)
    waits = [sum(values) / steps for values in zip(*(times.seconds["exchange"] for times in window), strict=True)]
    return (
        f"rank {rank} is the slowest for {WINDOWS} times: {1000 * own:.1f} ms for a micro-batch, the others "
        f"{1000 * usual:.1f} ms, and they wait {1000 * statistics.median(_others(waits, rank)):.1f} ms in each step. "
        f"{reason(rank, window)}"
    )


def reason(rank: int, window: Sequence[RankTimes]) -> str:
    """Explain most of a slow rank's additional time."""
    each = {name: _per_micro_batch(window, (name,)) for name in BUSY}
    more = {name: seconds[rank] - statistics.median(_others(seconds, rank)) for name, seconds in each.items()}
    if more["data"] > sum(more.values()) / 2:
        return "It waits for its data: raise data.workers, or look at its disk"
    busy = sum(_each(times, BUSY)[rank] for times in window)
    delayed = sum(times.delayed_seconds[rank] for times in window) / max(busy, 1e-9)
    if delayed > DELAYED:
        return f"Its core is shared: for {delayed:.0%} of the time other processes ran on it"
    return "Its processor is slower: another model, a lower clock rate (heat, power saving), or slower memory"


def _each(times: RankTimes, phases: Sequence[str]) -> list[float]:
    return [sum(values) for values in zip(*(times.seconds[name] for name in phases), strict=True)]


def _per_micro_batch(window: Sequence[RankTimes], phases: Sequence[str]) -> list[float]:
    """Return the seconds in these phases per micro-batch, by rank; 0 for a rank without any."""
    seconds = [sum(values) for values in zip(*(_each(times, phases) for times in window), strict=True)]
    counts = [sum(values) for values in zip(*(times.micro_batches for times in window), strict=True)]
    return [total / count if count else 0.0 for total, count in zip(seconds, counts, strict=True)]


def _others(values: Sequence[float], rank: int) -> list[float]:
    return [value for other, value in enumerate(values) if other != rank]
