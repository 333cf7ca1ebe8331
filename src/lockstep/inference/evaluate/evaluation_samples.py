"""Samples of a file, to evaluate a model on; and any sample in readable form."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from lockstep.base.contracts import DataSpec, Source, samples_of
from lockstep.base.errors import DataError
from lockstep.core.numerics.word_tokens import with_spaces
from lockstep.data.augment import Augmented
from lockstep.data.data_config import OBJECTIVES, TABLE_SUFFIXES
from lockstep.data.dataset import Subset
from lockstep.data.in_memory import Texts
from lockstep.data.own_files import Found, read_class_folders
from lockstep.data.preparation import Preparation
from lockstep.data.processors import FileReader, FileSamples, Processor, reader_of
from lockstep.data.sources import _files as files
from lockstep.data.targets import COLUMNS, Targets
from lockstep.data.token_cache import Tokens
from lockstep.models.objectives._choice import name_of

LABELS_OF = {objective: labels for labels, objective in OBJECTIVES.items()}
"""Objective -> kind of the values in its label column."""


class FileTexts(Texts):
    def __init__(self, found: Found, targets: Targets) -> None:
        super().__init__(found.samples, targets)
        self.place = found.place


def check_file(file: Path) -> None:
    """Raise DataError for a missing file or an unknown format, before any process is started."""
    if not file.exists():
        raise DataError(f"there is no file or folder {file}: correct --file")
    if file.is_file() and file.suffix.lower() not in TABLE_SUFFIXES:
        raise DataError(
            f"{file} is of no known form: --file takes a table ({', '.join(TABLE_SUFFIXES)}) or a folder with a "
            "folder of images, or sounds, for each class"
        )


def of_file(
    file: Path,
    spec: DataSpec,
    processor: Processor | None = None,
    *,
    text_column: str,
    label_column: str,
    takes_tokens: bool,
) -> Source:
    """Open the samples of a table, or of a folder of images or sounds. Raises DataError for a modality that the model
    does not take, for missing columns and unknown labels."""
    is_table, reader = files.is_table(file), reader_of(spec, processor)
    if is_table and not takes_tokens:
        raise DataError(f"{file} is a table of texts, but the model takes {_expected(spec, reader)}")
    if not is_table and reader is None:
        raise DataError(f"{file} is a folder of images, but the model takes {_expected(spec, reader)}")
    column = COLUMNS[LABELS_OF.get(name_of(spec), "class")]
    if reader is not None and not is_table:
        found = read_class_folders(file, reader.modality)
    else:
        found = files.read(file, (text_column, label_column), column)
    if is_table and isinstance(processor, Preparation):
        found = replace(found, samples=processor.texts(found.samples))
    targets = column.encode(found.labels, spec.labels or spec.numbers, found.place, known_to="the model")
    return FileTexts(found, targets) if is_table or reader is None else FileSamples(found.samples, targets, reader)


def _expected(spec: DataSpec, reader: FileReader | None) -> str:
    if reader is not None:
        return f"{samples_of(reader.modality)}: give a folder with a folder of them for each class"
    if spec.modality == "text":
        return "texts: give a table (.csv, .tsv, .jsonl, .parquet)"
    return f"{samples_of(spec.modality)}, which no file can hold: leave --file out"


def without_augmentation(source: Source) -> Source:
    return source.source if isinstance(source, Augmented) else source


def readable(source: Source, index: int) -> tuple[str, dict[str, Any]]:
    """Return the origin of a sample, and its columns with texts instead of tokens."""
    while isinstance(source, Tokens | Subset):
        index = int(source.rows[index]) if isinstance(source, Subset) else index
        source = source.source
    place = getattr(source, "place", None)
    columns = source.__getitems__([index])
    is_sound = source.spec.modality == "audio"  # nobody reads its numbers
    found = {name: column[0] for name, column in columns.items() if not is_sound or name == "label"}
    if isinstance(found.get("text"), str):
        found["text"] = with_spaces(found["text"])
    return place(index) if place else f"sample {index}", found
