"""Suggests the settings of a trial: a pure function of the seed, the swept keys, and the trials so far."""

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from typing import Any

from lockstep.base.errors import ConfigError
from lockstep.tools.sweep.search_space import SweptKey, override_text
from lockstep.tools.sweep.sweep_state import MOST_TRIALS

DIGITS = 4
"""Significant digits of a number from a range: few, so that it can be typed."""
MOST_REPEATS = 1000
"""Number of repeated draws in a row after which no other settings are assumed to exist."""


def grid(keys: Sequence[SweptKey]) -> list[dict[str, Any]]:
    """List every combination, the last key varying fastest. Raises ConfigError."""
    ranges = [key for key in keys if key.ends is not None]
    if ranges:
        raise ConfigError(f"{ranges[0]}: a grid tries listed values; list some, or add --search random --trials 20")
    count = math.prod(len(key.values) for key in keys)
    if count > MOST_TRIALS:
        raise ConfigError(f"a grid of {count:,} trials is more than {MOST_TRIALS:,}: add --search random --trials 20")
    names = [key.key for key in keys]
    return [dict(zip(names, values, strict=True)) for values in itertools.product(*(key.values for key in keys))]


def drawn(keys: Sequence[SweptKey], *, seed: int, count: int) -> list[dict[str, Any]]:
    """Draw settings at random, none twice; fewer than `count` where there are no others."""
    return list(itertools.islice(_draws(keys, random.Random(seed)), count))


def _draws(keys: Sequence[SweptKey], source: random.Random) -> Iterator[dict[str, Any]]:
    seen, repeats = set[str](), 0
    while repeats < MOST_REPEATS:
        settings = {key.key: _draw(key, source) for key in keys}
        repeats = repeats + 1 if override_text(settings) in seen else 0
        seen.add(override_text(settings))
        if not repeats:
            yield settings


def _draw(key: SweptKey, source: random.Random) -> Any:
    if key.ends is None:
        return source.choice(key.values)
    low, high = key.ends
    if key.is_log:
        return rounded(key, math.exp(source.uniform(math.log(low), math.log(high))))
    return rounded(key, source.uniform(low, high))


def rounded(key: SweptKey, number: float) -> int | float:
    """Round a number in a range to few digits, to an integer where both ends are."""
    assert key.low is not None and key.high is not None
    near = round(number) if key.is_integer else float(f"{number:.{DIGITS}g}")
    return min(max(near, key.low), key.high)
