"""Settings of data.kind=files: tables and image folders."""

from pathlib import Path
from typing import Self

from pydantic import model_validator

from lockstep.base.remote_path import DataPath
from lockstep.data.data_config import TABLE_SUFFIXES, ImageSection, OwnFilesSection


class Config(ImageSection, OwnFilesSection):
    """Your own files: a folder holds images (FOLDER/CLASS/*.png), a file is a table with a text column."""

    STARTER = {"data": {"train": "data/train.csv"}}

    train: DataPath
    """Training data: a .csv, .tsv, .jsonl or .parquet file, or a folder with a folder for each class."""
    text_column: str = "text"
    """The column of texts, in a table."""
    label_column: str = "label"
    """The column of labels, in a table."""

    @model_validator(mode="after")
    def _folders_are_classes(self) -> Self:
        if self.labels != "class" and not is_table(self.train):
            raise ValueError(
                f"labels={self.labels} needs a table, but {self.train} is a folder, with one for each class"
            )
        return self

    @property
    def modality(self) -> str:  # type: ignore[override]
        """Image for a folder, text for a file; the suffix decides for a path that does not exist yet."""
        return "text" if is_table(self.train) else "image"


def is_table(path: Path) -> bool:
    """Return whether a path is a table or, if it does not exist, has the suffix of one."""
    return path.is_file() or (not path.is_dir() and path.suffix.lower() in TABLE_SUFFIXES)
