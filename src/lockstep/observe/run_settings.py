"""The settings of a run, as its folder shows them."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from lockstep.base.errors import ConfigError
from lockstep.base.yaml_text import KeyLocations, read, read_file


def settings_of(folder: Path) -> dict[str, Any]:
    """The sections of recipe.yaml; none where it cannot be read."""
    with suppress(ConfigError):
        return recipe_settings(folder / "recipe.yaml")
    return {}


def recipe_settings(file: Path) -> dict[str, Any]:
    """The sections of a recipe, within the limits of a config. Raises ConfigError."""
    settings = read(read_file(file), KeyLocations(str(file)))
    if not isinstance(settings, dict):
        raise ConfigError(f"{file} has no sections")
    return settings


def flattened(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """{"train": {"steps": 3}} -> ("train.steps", 3)."""
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from flattened(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
