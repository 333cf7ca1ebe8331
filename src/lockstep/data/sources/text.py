"""Settings of plain text for language models."""

from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from lockstep.base import storage
from lockstep.base.remote_path import DataPath
from lockstep.data.data_config import Origin, PackedSection, hub_origin


class Config(PackedSection):
    """Plain text to learn a language model from: your files, a data set of the Hugging Face hub, or the help texts that
    come with Python."""

    incidental = PackedSection.incidental | {"train", "test"}

    train: DataPath | None = None
    """A text file, or a folder with text files (.txt, .md, .rst, .py, ...); without it the texts of Python's help()."""
    test: DataPath | None = None
    """Test data, in the same form, and not to train on; without it a part of `train` is held out."""
    test_fraction: float = Field(0.1, gt=0, lt=1)
    """How much of `train` is held out when there is no `test`: always the same parts, whatever the seed."""
    name: str | None = None
    """A data set with a column of texts, in place of `train`: its name on the hub (roneneldan/TinyStories), or a local
    folder of Parquet, JSON or CSV files, or one that the library `datasets` has saved (save_to_disk)."""
    subset: str | None = None
    """Name of its configuration, where it has several."""
    revision: str | None = None
    """Branch, tag or commit of it; by default the newest. Only a commit keeps runs equal for ever."""
    train_split: str = "train"
    """The split of it to learn from; a slice such as train[10%:] is one too."""
    test_split: str | None = None
    """The split of it to test on; without it a part of `train_split` is held out."""
    text_column: str = "text"
    """The column of texts in it; each row is a text of its own."""

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if self.name is not None and (self.train is not None or self.test is not None):
            raise ValueError("name is a data set, train and test are files: give either name or train")
        given = [key for key in ("subset", "revision", "test_split") if getattr(self, key) is not None]
        if self.name is None and given:
            raise ValueError(f"{given[0]} belongs to a data set: give its name, too")
        return self

    def origin(self) -> Origin:
        if self.name is not None:
            split = self.test_split or self.train_split
            return hub_origin(self.name, subset=self.subset, revision=self.revision, split=split)
        if self.train is None:
            return Origin(name="Python's help texts (pydoc_data.topics)", language=("en",))
        return Origin(name=self.train.stem or self.train.name)


SUFFIXES = (".txt", ".text", ".md", ".rst", ".py", ".c", ".h", ".cpp", ".js", ".java", ".go", ".rs", ".tex", ".html")
"""Suffixes of files that are read in a folder."""


def text_files(path: Path) -> list[Path]:
    """Return the file itself, or the text files in a folder and its subfolders, without hidden ones, in the order of
    their names. Raises DataError for links out of it."""
    if not path.is_dir():
        return [path]
    found = sorted(
        file
        for file in path.rglob("*")
        if file.suffix.lower() in SUFFIXES
        and file.is_file()
        and not any(part.startswith(".") for part in file.relative_to(path).parts)
    )
    storage.require_inside(found, path)
    return found
