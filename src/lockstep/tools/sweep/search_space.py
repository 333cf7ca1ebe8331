"""The settings that a sweep varies, as typed: KEY=V1,V2,... for listed values, KEY=LOW..HIGH for a range; and those of
its trials, as a grid or at random: pure functions of the keys and the seed."""

import itertools
import json
import math
import random
import re
from collections.abc import Sequence
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, model_validator

from lockstep.base.errors import ConfigError
from lockstep.base.yaml_text import scalar_or_text

NUMBER = r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?"
RANGE = re.compile(rf"({NUMBER})\.\.({NUMBER})")
LOG_FACTOR = 10
"""Factor between the positive ends of a range above which it is searched by its logarithm."""
NOT_LEARNED = ("launch.", "checkpoint.", "export.", "run.dir", "run.name")
"""Settings, or sections with a dot, that change nothing about what is learned."""
MOST_TRIALS = 1000
DIGITS = 4
"""Significant digits of a number from a range: few, so that it can be typed."""
MOST_REPEATS = 1000
"""Number of repeated draws in a row after which no other settings are assumed to exist."""


class SweptKey(BaseModel):
    """A setting that differs between trials."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    key: str
    values: tuple[Any, ...] = ()
    """The listed values; () for a range."""
    low: int | float | None = None
    high: int | float | None = None

    @model_validator(mode="after")
    def _is_one_kind(self) -> Self:
        is_range = self.low is not None and self.high is not None and self.low < self.high
        if bool(self.values) == is_range:
            raise ValueError(f"{self.key} should have values, or low < high")
        return self

    @property
    def ends(self) -> tuple[float, float] | None:
        """Ends of a range; None for listed values."""
        return None if self.low is None or self.high is None else (self.low, self.high)

    @property
    def is_integer(self) -> bool:
        return isinstance(self.low, int) and isinstance(self.high, int)

    @property
    def is_log(self) -> bool:
        return self.ends is not None and 0 < LOG_FACTOR * self.ends[0] < self.ends[1]

    def __str__(self) -> str:
        return f"{self.key}={','.join(map(override_text, self.values)) or f'{self.low}..{self.high}'}"


def parse(words: Sequence[str]) -> tuple[list[SweptKey], list[str]]:
    """Words of the form section.key=... -> what is swept, and settings that all trials share. Raises ConfigError."""
    swept, shared, seen = list[SweptKey](), list[str](), set[str]()
    for word in words:
        key, equals, text = word.partition("=")
        if equals and key in seen:
            raise ConfigError(f"{key} is given twice: list all its values in one word, {key}=V1,V2")
        seen.add(key)
        values = _parse_values(text, key)
        if equals and (match := RANGE.fullmatch(text)):
            swept.append(_range(key, match[1], match[2]))
        elif equals and len(values) > 1:
            swept.append(SweptKey(key=key, values=tuple(values)))
        else:
            shared.append(word)
    for each in swept:
        if each.key.startswith(NOT_LEARNED):
            raise ConfigError(f"{each.key} changes nothing about what is learned: give it one value, for all trials")
    return swept, shared


def _parse_values(text: str, key: str) -> list[Any]:
    """Return the different values of a list; a text that is no list of YAML values counts as one."""
    listed = scalar_or_text(f"[{text}]", tuple(key.split(".")))
    values = listed if isinstance(listed, list) else [text]
    return list({override_text(value): value for value in values}.values())


def _range(key: str, *texts: str) -> SweptKey:
    low, high = (int(text) if re.fullmatch(r"[-+]?[0-9]+", text) else float(text) for text in texts)
    if not low < high:
        raise ConfigError(f"{key}={texts[0]}..{texts[1]}: a range goes from the smaller number to the larger one")
    return SweptKey(key=key, low=low, high=high)


def override_text(value: Any) -> str:
    """Format a value as in an override, on one line: JSON is YAML."""
    return json.dumps(value, ensure_ascii=False, default=str)


def overrides(settings: dict[str, Any]) -> list[str]:
    return [f"{key}={override_text(value)}" for key, value in settings.items()]


def shown(value: Any) -> str:
    """Format a value for display: a text without quotes."""
    return value if isinstance(value, str) else override_text(value)


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
    source, found, repeats = random.Random(seed), dict[str, dict[str, Any]](), 0
    while len(found) < count and repeats < MOST_REPEATS:
        settings = {key.key: _draw(key, source) for key in keys}
        repeats = repeats + 1 if override_text(settings) in found else 0
        found[override_text(settings)] = settings
    return list(found.values())


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
