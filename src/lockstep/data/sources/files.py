"""Settings of data.kind=files: tables and image folders."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from lockstep.base.config import LocalPath
from lockstep.data.data_config import TABLE_SUFFIXES, ImageSection, Origin


class Config(ImageSection):
    """Your own files: a folder holds images (FOLDER/CLASS/*.png), a file is a table with a text column."""

    STARTER: ClassVar[Mapping[str, Mapping[str, Any]]] = {"data": {"train": "data/train.csv"}}

    incidental: ClassVar[frozenset[str]] = ImageSection.incidental | {"train", "test"}

    train: LocalPath
    """What to learn from: a .csv, .tsv, .jsonl or .parquet file, or a folder with a folder for each class."""
    test: LocalPath | None = None
    """What to test on, in the same form; without it a part of `train` is held out."""
    test_fraction: float = Field(0.1, gt=0, lt=1)
    """How much of `train` is held out when there is no `test`: always the same samples, whatever the seed."""
    text_column: str = "text"
    """The column of texts, in a table."""
    label_column: str = "label"
    """The column of labels, in a table."""

    @property
    def modality(self) -> str:
        """Image for a folder, text for a file; a path that does not exist yet is judged by its suffix."""
        return "text" if is_table(self.train) else "image"

    def origin(self) -> Origin:
        """Only the name of the file or folder is known."""
        return Origin(name=self.train.stem or self.train.name)

    @property
    def table_columns(self) -> tuple[str, str]:
        return self.text_column, self.label_column


def is_table(path: Path) -> bool:
    """Whether a path is a table or, if it does not exist, has the suffix of one."""
    return path.is_file() or (not path.is_dir() and path.suffix.lower() in TABLE_SUFFIXES)
