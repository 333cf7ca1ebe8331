"""A model from the user's own Python file."""

from typing import Any

from lockstep.base.config import LocalPath
from lockstep.models._model_config import ModelSection


class Config(ModelSection):
    """A Python file with `build(options, spec)`, and optionally `loss(outputs, batch)` and `metrics(spec)`."""

    file: LocalPath
    """The Python file."""
    options: dict[str, Any] = {}
    """Passed unchanged to the file's functions."""
