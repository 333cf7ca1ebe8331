"""Data from the user's own Python file."""

from typing import Any, ClassVar

from lockstep import plugins
from lockstep.config import LocalPath
from lockstep.contracts import Source
from lockstep.data.section import DataSection
from lockstep.errors import DataError


class Config(DataSection):
    """A Python file with `source(options, split)`, which returns a Source (see docs: bring your own data)."""

    incidental: ClassVar[frozenset[str]] = DataSection.incidental | {"file"}

    file: LocalPath
    """The Python file."""
    options: dict[str, Any] = {}
    """Whatever the file's `source` wants; it gets it as it is."""

    @property
    def modality(self) -> str:
        """Known only to the user's code."""
        return "any"


STARTER = {"file": "my_data.py"}
"""What `lockstep init user` writes for fields without a default."""


def build(config: Config, split: str) -> Source:
    """Call the file's `source` for "train" or "test"; raises DataError when it does not return a Source."""
    module = plugins.load_file(config.file)
    if not hasattr(module, "source"):
        raise DataError(f"{config.file} has no function source(options, split)")
    source = module.source(config.options, split)
    missing = [name for name in ("__len__", "__getitems__", "spec", "lengths") if not hasattr(source, name)]
    if missing:
        raise DataError(f"source() in {config.file} returned an object without {', '.join(missing)}")
    return source
