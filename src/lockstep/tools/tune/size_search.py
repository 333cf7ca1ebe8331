"""Which micro-batches to try: a search with few trials, since each of them is real training.

G = global batch, m = micro-batch.
"""

from collections.abc import Callable


def candidates(global_batch: int, samples: int) -> list[int]:
    """Divisors of G and powers of two, ascending, up to what a step can fill."""
    limit = min(global_batch, samples)
    powers = {1 << bit for bit in range(limit.bit_length())}
    return sorted(powers | {m for m in range(1, limit + 1) if global_batch % m == 0})


def largest(sizes: list[int], fits: Callable[[int], bool]) -> int | None:
    """The largest size that fits, by doubling up to the first that does not, then bisection; None if none fits.

    As long as none fits, larger ones are still tried: they keep fewer partial sums of gradients, and BatchNorm refuses
    single samples.
    """
    best, above = None, None
    for m in [m for m in sizes if m.bit_count() == 1 or m == sizes[-1]]:
        if fits(m):
            best = m
        elif best is not None:
            above = m
            break
    if best is None:
        return None
    between = [m for m in sizes if best < m < above] if above is not None else []
    while between:
        middle = len(between) // 2
        if fits(between[middle]):
            best, between = between[middle], between[middle + 1 :]
        else:
            between = between[:middle]
    return best
