"""A model from the user's own Python file."""

from pathlib import Path
from typing import Any, ClassVar

from lockstep.base.config import LocalPath
from lockstep.models._model_config import ModelSection


class Config(ModelSection):
    """A Python file with `build(options, spec)`, and optionally `loss(outputs, batch)` and `metrics(spec)`."""

    MEASURES_ITSELF: ClassVar[bool] = True

    file: LocalPath
    """The Python file."""
    options: dict[str, Any] = {}
    """Passed unchanged to the file's functions."""

    @property
    def code(self) -> Path | None:
        """The Python file."""
        return self.file
