"""Which micro-batches to try: a search that is made of few trials, since each of them is real training.

G = global batch, m = micro-batch.
"""

from collections.abc import Callable


def candidates(global_batch: int, samples: int) -> list[int]:
    """The micro-batches worth a try, rising: what divides G, and powers of two; none that no step would fill."""
    limit = min(global_batch, samples)
    powers = {1 << bit for bit in range(limit.bit_length())}
    return sorted(powers | {m for m in range(1, limit + 1) if global_batch % m == 0})


def largest(known: list[int], fits: Callable[[int], bool]) -> int | None:
    """The largest that fits: doubling up to the first that does not, then halving what lies between; None if none does.

    While none has fitted, larger ones are tried all the same: they keep fewer partial sums of gradients, and BatchNorm
    refuses single samples.
    """
    best, above = None, None
    for m in [m for m in known if m.bit_count() == 1 or m == known[-1]]:
        if fits(m):
            best = m
        elif best is not None:
            above = m
            break
    if best is None:
        return None
    between = [m for m in known if best < m < above] if above is not None else []
    while between:
        middle = len(between) // 2
        if fits(between[middle]):
            best, between = between[middle], between[middle + 1 :]
        else:
            between = between[:middle]
    return best
