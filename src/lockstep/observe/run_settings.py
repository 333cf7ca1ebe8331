"""The settings of a run, as its folder shows them."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from lockstep.base.errors import ConfigError
from lockstep.base.yaml_text import KeyLocations, read, read_file


def settings_of(folder: Path) -> dict[str, Any]:
    """The sections of recipe.yaml. Raises ConfigError."""
    file = folder / "recipe.yaml"
    if file.is_symlink():
        raise ConfigError(f"{file} is a link, which is not followed: it may lead out of the run's folder")
    settings = read(read_file(file), KeyLocations(str(file)))
    if not isinstance(settings, dict) or not all(isinstance(section, dict) for section in settings.values()):
        raise ConfigError(f"{file} has no sections")
    return settings


def known_settings(folder: Path) -> dict[str, Any]:
    """The same; none where they cannot be read."""
    with suppress(ConfigError):
        return settings_of(folder)
    return {}


def flattened(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """{"train": {"steps": 3}} -> ("train.steps", 3)."""
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from flattened(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
