"""Settings of data from the user's Python file."""

from pathlib import Path
from typing import Any

from lockstep.base.config import LocalPath
from lockstep.data.data_config import StreamSection


class Config(StreamSection):
    """A Python file with `source(options, split)`, which returns a Source or a torch Dataset.

    `collate(samples)` may join a Dataset's samples; `prepare(pixels)` may make a sample's image of a file's pixels, or
    its text of a text, for predictions (see docs: bring your own data)."""

    STARTER = {"train": {"epochs": 20, "global_batch": 32, "micro_batch": 8}}
    TEMPLATE = Path(__file__).with_name("_template.py")

    incidental = StreamSection.incidental | {"file"}

    file: LocalPath
    """The Python file."""
    options: dict[str, Any] = {}
    """Passed unchanged to the file's `source`."""

    @property
    def code(self) -> Path | None:
        return self.file
