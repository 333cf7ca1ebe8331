"""The settings that a sweep varies, as typed: KEY=V1,V2,... for listed values, KEY=LOW..HIGH for a range."""

import json
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
