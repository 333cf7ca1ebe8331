"""Folders of the repository that a wheel contains, too: lessons, examples."""

from pathlib import Path

from lockstep.base.errors import ConfigError


def folder(name: str) -> Path:
    """Where it is: in the installed package, or in the checkout that this is. Raises ConfigError."""
    package = Path(__file__).parents[1]
    places = (package / name, package.parents[1] / name)
    found = next((place for place in places if place.is_dir()), None)
    if found is None:
        raise ConfigError(f"the {name} are missing: this installation has none of {', '.join(map(str, places))}")
    return found
