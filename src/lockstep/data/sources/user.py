"""Data from the user's own Python file."""

from pathlib import Path
from typing import Any, ClassVar

from lockstep.base import plugins
from lockstep.base.config import LocalPath
from lockstep.base.contracts import Source
from lockstep.base.errors import DataError
from lockstep.data.data_config import DataSection
from lockstep.data.torch_dataset import as_source


class Config(DataSection):
    """A Python file with `source(options, split)`, which returns a Source or a torch Dataset.

    `collate(samples)` may join a Dataset's samples (see docs: bring your own data)."""

    incidental: ClassVar[frozenset[str]] = DataSection.incidental | {"file"}

    file: LocalPath
    """The Python file."""
    options: dict[str, Any] = {}
    """Whatever the file's `source` wants; it gets it as it is."""

    @property
    def modality(self) -> str:
        """Known only to the user's code."""
        return "any"


TEMPLATE = Path(__file__).with_name("_template.py")
"""What `lockstep init user` writes beside the config: data and a model in one file."""
STARTER = {"train": {"epochs": 20, "global_batch": 32, "micro_batch": 8}}
"""What suits the template."""


def build(config: Config, split: str) -> Source:
    """Call the file's `source` for "train" or "test"; raises DataError when what it returns is no data set."""
    module = plugins.load_file(config.file, "data.file")
    if not hasattr(module, "source"):
        raise DataError(f"{config.file} has no function source(options, split)")
    collate = getattr(module, "collate", None)
    is_own = callable(collate) and not str(getattr(collate, "__module__", "")).startswith("lockstep.")
    where = f"the {split} split that source() in {config.file} returned"
    return as_source(module.source(config.options, split), collate if is_own else None, where)
