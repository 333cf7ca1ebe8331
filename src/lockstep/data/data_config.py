"""Settings that all sources share."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import platformdirs
from pydantic import Field, PositiveInt

from lockstep.base.config import MANY, LocalPath, PluginSection

TABLE_SUFFIXES = (".csv", ".tsv", ".jsonl", ".parquet")
"""Of files that hold one sample per row."""


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where samples come from, for an export's model card; unknown fields are left out."""

    name: str
    """Common name of the data set."""
    hub: str | None = None
    """Its name on the Hugging Face hub, such as fancyzhx/ag_news."""
    subset: str | None = None
    revision: str | None = None
    split: str = "test"
    """Split of the metrics."""
    language: tuple[str, ...] = ()
    """ISO 639 codes."""


class DataSection(PluginSection):
    """Training and test data."""

    STARTER: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Settings that `lockstep init` writes for it, by section."""
    TEMPLATE: ClassVar[Path | None] = None
    """Template of the Python file, for a source that is the user's own."""
    incidental: ClassVar[frozenset[str]] = frozenset({"root", "workers", "cache", "augment", "group_by_length"})

    limit: int | None = Field(None, ge=1, le=1000 * MANY)
    """Use only this many training samples, spread evenly over the file, for a quick try; the test split stays whole."""
    workers: int = Field(0, ge=0, le=1024)
    """Processes per rank that fetch data; 0 fetches in the training process. Any number gives the same weights."""
    group_by_length: int = Field(50, ge=1, le=MANY)
    """Training samples of different lengths, such as texts: those of this many steps are sorted by length and cut into
    steps, which are then visited in random order. Less padding, so more samples/s; 1 sorts within each step only."""
    augment: LocalPath | None = None
    """A Python file with `augment(sample)`: every training sample passes through it each time it is drawn, with random
    numbers that belong to the sample and the epoch."""
    on_bad_sample: Literal["stop", "skip"] = "stop"
    """What happens when a sample cannot be read: it ends the run, or it is left out of its micro-batch, alike on any
    number of processes. The run warns of each, and lists them in summary.json."""
    cache: LocalPath = platformdirs.user_cache_path("lockstep")
    """Cache folder, for tokens for example; may be deleted at any time."""

    @property
    def skips(self) -> bool:
        """Whether samples that cannot be read are left out."""
        return self.on_bad_sample == "skip"

    @property
    def code(self) -> Path | None:
        """The user's Python file, if the source comes from one."""
        return None

    @property
    def table_columns(self) -> tuple[str, str]:
        """Names of the text column and the label column of a table."""
        return "text", "label"

    def origin(self) -> Origin | None:
        """Where the samples come from; None if unknown."""
        return None

    @property
    def modality(self) -> str:
        """Kind of the samples, as far as the settings tell it: "image", "text", or "any"."""
        return "any"


class ImageSection(DataSection):
    """Settings of sources with image files."""

    image_size: tuple[PositiveInt, PositiveInt] | None = None
    """Height and width every image is scaled to; by default all images must have the size of the first."""
    channels: Literal[1, 3] = 3
    """1 makes all images grey, 3 makes them red, green, blue."""
