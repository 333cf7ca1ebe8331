"""A model from the user's own Python file."""

from typing import Any

from lockstep.base.config import LocalPath, PluginSection


class Config(PluginSection):
    """A Python file with `build(options, spec)`, and optionally `loss(outputs, batch)` and `metrics(spec)`."""

    file: LocalPath
    """The Python file."""
    options: dict[str, Any] = {}
    """Whatever the file's functions want; they get it as it is."""

    @property
    def modality(self) -> str:
        """Takes whatever the user's code takes."""
        return "any"
