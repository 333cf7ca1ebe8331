"""The settings that every source shares."""

from typing import ClassVar

import pooch
from pydantic import Field

from lockstep.config import LocalPath, PluginSection


class DataSection(PluginSection):
    """What the model learns from."""

    incidental: ClassVar[frozenset[str]] = frozenset({"root", "workers", "cache", "augment"})

    limit: int | None = Field(None, ge=1)
    """Use only this many training samples, spread evenly over the file, for a quick try; the test split stays whole."""
    workers: int = Field(0, ge=0)
    """Processes per rank that fetch data; 0 fetches in the training process. Any number gives the same weights."""
    augment: LocalPath | None = None
    """A Python file with `augment(sample)`: every training sample passes through it each time it is drawn, with random
    numbers that belong to the sample and the epoch."""
    cache: LocalPath = pooch.os_cache("lockstep")
    """Folder for tokens and other things that can be made again; may be deleted at any time."""

    @property
    def modality(self) -> str:
        """What a sample is, as far as the settings tell before any data is read: "image", "text", or "any"."""
        return "any"
