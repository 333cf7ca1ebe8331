"""The settings of a run, as its folder shows them."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from lockstep.base.errors import ConfigError, absence
from lockstep.base.yaml_text import KeyLocations, read, read_file

RECIPE, LOOP = "recipe.yaml", "loop.yaml"
"""Settings of a run from a config, and of a script's own loop (`lockstep.Loop`), in the sections of a config."""


def has_settings(folder: Path) -> bool:
    """Return whether a folder is that of a run, or of a script's own loop."""
    return any((folder / name).is_file() for name in (RECIPE, LOOP))


def settings_file(folder: Path) -> Path:
    """Return the file with the settings of a run. Raises ConfigError for a folder that is no run's."""
    for name in (RECIPE, LOOP):
        if (folder / name).is_file():
            return folder / name
    what = absence(folder, f"there is no {RECIPE} in it")
    raise ConfigError(f"{folder} is no run: {what} (runs are folders such as runs/NAME)")


def settings_of(folder: Path) -> dict[str, Any]:
    """Return the sections of a run's settings. Raises ConfigError."""
    file = settings_file(folder)
    if file.is_symlink():
        raise ConfigError(f"{file} is a link, which is not followed: it may lead out of the run's folder")
    settings = read(read_file(file), KeyLocations(str(file)))
    if not isinstance(settings, dict) or not all(isinstance(section, dict) for section in settings.values()):
        raise ConfigError(f"{file} has no sections")
    return settings


def known_settings(folder: Path) -> dict[str, Any]:
    """Return the sections of a run's settings; none where they cannot be read."""
    with suppress(ConfigError):
        return settings_of(folder)
    return {}


def flattened(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield ("train.steps", 3) for {"train": {"steps": 3}}."""
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from flattened(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
