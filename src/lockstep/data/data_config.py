"""The settings that every source shares."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import platformdirs
from pydantic import Field, PositiveInt

from lockstep.base.config import MANY, LocalPath, PluginSection


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where samples come from, for those who read an export's card; what is not known is left out."""

    name: str
    """The data set's, as people know it."""
    hub: str | None = None
    """Its name on the Hugging Face hub, such as fancyzhx/ag_news."""
    subset: str | None = None
    revision: str | None = None
    split: str = "test"
    """The one that metrics are of."""
    language: tuple[str, ...] = ()
    """ISO 639 codes."""


class DataSection(PluginSection):
    """What the model learns from."""

    STARTER: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """What `lockstep init` writes with it, by section."""
    TEMPLATE: ClassVar[Path | None] = None
    """A file of code to start from, for a source that is the user's own."""
    incidental: ClassVar[frozenset[str]] = frozenset({"root", "workers", "cache", "augment"})

    limit: int | None = Field(None, ge=1, le=1000 * MANY)
    """Use only this many training samples, spread evenly over the file, for a quick try; the test split stays whole."""
    workers: int = Field(0, ge=0, le=1024)
    """Processes per rank that fetch data; 0 fetches in the training process. Any number gives the same weights."""
    augment: LocalPath | None = None
    """A Python file with `augment(sample)`: every training sample passes through it each time it is drawn, with random
    numbers that belong to the sample and the epoch."""
    on_bad_sample: Literal["stop", "skip"] = "stop"
    """What becomes of a sample that cannot be read: it ends the run, or is left out of its micro-batch, the same one on
    any number of processes. The run warns of each, and lists them in summary.json."""
    cache: LocalPath = platformdirs.user_cache_path("lockstep")
    """Folder for tokens and other things that can be made again; may be deleted at any time."""

    @property
    def skips(self) -> bool:
        """Whether samples that cannot be read are left out."""
        return self.on_bad_sample == "skip"

    @property
    def code(self) -> Path | None:
        """The user's own Python file, if it is one."""
        return None

    @property
    def table_columns(self) -> tuple[str, str]:
        """The columns of texts and of labels, in a table."""
        return "text", "label"

    def origin(self) -> Origin | None:
        """Where its samples come from; None where nobody knows."""
        return None

    @property
    def modality(self) -> str:
        """What a sample is, as far as the settings tell before any data is read: "image", "text", or "any"."""
        return "any"


class ImageSection(DataSection):
    """The settings of sources whose images come as files."""

    image_size: tuple[PositiveInt, PositiveInt] | None = None
    """Height and width every image is scaled to; by default all images must have the size of the first."""
    channels: Literal[1, 3] = 3
    """1 makes all images grey, 3 makes them red, green, blue."""
