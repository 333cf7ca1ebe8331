"""The settings of a run, as its folder shows them."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml


def settings_of(folder: Path) -> dict[str, Any]:
    """The sections of recipe.yaml; none where it cannot be read."""
    with suppress(OSError, ValueError, yaml.YAMLError):
        settings = yaml.safe_load((folder / "recipe.yaml").read_text(encoding="utf-8"))
        return settings if isinstance(settings, dict) else {}
    return {}


def flattened(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """{"train": {"steps": 3}} -> ("train.steps", 3)."""
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from flattened(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
