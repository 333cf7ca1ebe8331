"""Samples of a file, to evaluate a model on; and any sample in readable form."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.base.contracts import Columns, DataSpec, Source, samples_of
from lockstep.base.errors import DataError
from lockstep.data.augment import Augmented
from lockstep.data.columns import positions
from lockstep.data.data_config import TABLE_SUFFIXES
from lockstep.data.dataset import Subset
from lockstep.data.images import pixels_of
from lockstep.data.in_memory import Texts
from lockstep.data.sources import _files as files
from lockstep.data.token_cache import Tokens


class FileTexts(Texts):
    def __init__(self, found: files.Found, labels: np.ndarray, names: Sequence[str]) -> None:
        super().__init__(found.samples, labels, names)
        self.place = found.place


class FileImages:
    """Image files, opened on access and scaled to the model's input size."""

    lengths: np.ndarray | None = None

    def __init__(self, found: files.Found, labels: np.ndarray, spec: DataSpec) -> None:
        self.paths, self.labels, self.spec, self.place = found.samples, labels, spec, found.place

    def __len__(self) -> int:
        return len(self.paths)

    def __getitems__(self, indices: Sequence[int]) -> Columns:
        """{"image": uint8 [m, C, H, W], "label": int64 [m]}; raises DataError for a damaged image."""
        assert self.spec.image_shape is not None
        images = [pixels_of(self.paths[i], self.place(i), self.spec.image_shape) for i in indices]
        return {"image": np.stack(images), "label": self.labels[np.asarray(indices, dtype=np.int64)]}


def check_file(file: Path) -> None:
    """Raise DataError for a missing file or an unknown format, before any process is started."""
    if not file.exists():
        raise DataError(f"there is no file or folder {file}: correct --file")
    if file.is_file() and file.suffix.lower() not in TABLE_SUFFIXES:
        raise DataError(
            f"{file} is of no known form: --file takes a table ({', '.join(TABLE_SUFFIXES)}) or a folder with a "
            "folder of images for each class"
        )


def of_file(file: Path, spec: DataSpec, *, text_column: str, label_column: str, takes_tokens: bool) -> Source:
    """The samples of a table or of a folder of images.

    Raises DataError for a modality that the model does not take, for missing columns and unknown labels.
    """
    is_table = files.is_table(file)
    if is_table and not takes_tokens:
        raise DataError(f"{file} is a table of texts, but the model takes {_expected(spec)}")
    if not is_table and spec.image_shape is None:
        raise DataError(f"{file} is a folder of images, but the model takes {_expected(spec)}")
    found = files.read(file, text_column, label_column)
    labels = positions(found.labels, spec.labels, found.place, known_to="the model")
    return FileTexts(found, labels, spec.labels) if is_table else FileImages(found, labels, spec)


def _expected(spec: DataSpec) -> str:
    if spec.image_shape is not None:
        return "images: give a folder with a folder of them for each class"
    if spec.modality == "text":
        return "texts: give a table (.csv, .tsv, .jsonl, .parquet)"
    return f"{samples_of(spec.modality)}, which no file can hold: leave --file out"


def without_augmentation(source: Source) -> Source:
    """A training split without augmentation."""
    return source.source if isinstance(source, Augmented) else source


def readable(source: Source, index: int) -> tuple[str, dict[str, Any]]:
    """The origin of a sample, and its columns with texts instead of tokens."""
    while isinstance(source, Tokens | Subset):
        index = int(source.rows[index]) if isinstance(source, Subset) else index
        source = source.source
    place = getattr(source, "place", None)
    columns = source.__getitems__([index])
    return place(index) if place else f"sample {index}", {name: column[0] for name, column in columns.items()}
