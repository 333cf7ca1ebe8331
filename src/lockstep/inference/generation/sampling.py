"""Sampling of the next token."""

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.base.errors import ConfigError

LEAST_TEMPERATURE = 1e-4
"""Temperature below which the most probable token is taken."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    max_tokens: int = 128
    temperature: float = 0.8
    """Divisor of the logits; 0 takes the most probable token."""
    top_p: float = 1.0
    """Total probability of the most probable tokens, which alone are drawn. Source: A. Holtzman et al., 2020."""
    seed: int = 0
    stop: Sequence[str] = ()
    """Texts before which a completion ends."""
    date: datetime.date | None = None
    """Date for a chat template; by default today."""
    tools: Sequence[Mapping[str, Any]] | None = None
    """Tool schemas, for a chat template that writes them."""
    is_raw: bool = False
    """Whether a text is continued as it is, also by a model of chats."""
    truncate: bool = False
    """Whether the beginning of a prompt is left out where it is longer than the model reads, instead of an error."""

    def __post_init__(self) -> None:
        bounds = {
            "max_tokens": (self.max_tokens >= 1, "at least 1"),
            "temperature": (self.temperature >= 0, "at least 0"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1"),
            "seed": (self.seed >= 0, "at least 0"),
            "stop": (not isinstance(self.stop, str) and all(self.stop), 'several texts, such as ("\\n",)'),
        }
        for name, (is_valid, should) in bounds.items():
            if not is_valid:
                raise ConfigError(f"{name} is {getattr(self, name)!r}, and should be {should}")


def next_token(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Draw a token from logits [V]."""
    if sampling.temperature < LEAST_TEMPERATURE:
        return int(logits.argmax())
    probabilities = (logits.float() / sampling.temperature).softmax(-1)
    if sampling.top_p < 1:
        ordered, tokens = probabilities.sort(descending=True, stable=True)
        before = ordered.cumsum(0) - ordered
        kept = torch.where(before < sampling.top_p, ordered, 0.0)  # at least the first one
        return int(tokens[torch.multinomial(kept, 1, generator=generator)])
    return int(torch.multinomial(probabilities, 1, generator=generator))
