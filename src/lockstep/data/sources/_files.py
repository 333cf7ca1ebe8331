"""The user's files: texts in CSV, JSON Lines or Parquet, or images in one folder per class."""

from functools import partial
from pathlib import Path

from lockstep.base.errors import DataError
from lockstep.data import tables, text_table
from lockstep.data.columns import require, rows_of
from lockstep.data.data_config import TABLE_SUFFIXES
from lockstep.data.images import decode
from lockstep.data.in_memory import Images, Texts
from lockstep.data.own_files import Found, read_class_folders, split_of
from lockstep.data.sources.files import Config, is_table
from lockstep.data.targets import COLUMNS, LabelColumn


def build(config: Config, split: str) -> Images | Texts:
    """Load the "train" or "test" split, as texts or as uint8 images [N, C, H, W]; the classes are those of `train`.
    Raises DataError for missing or damaged files, columns, texts, images and labels."""
    column = COLUMNS[config.labels]
    found = split_of(config, split, column=column, read=partial(_read_checked, config))
    samples, targets = found.samples, found.targets
    if config.modality == "text":
        texts = Texts(samples, targets)
        texts.cells = partial(tables.cells, config.train, found.rows) if split == "train" else None
        return texts
    images, unreadable = decode(
        samples, len(samples), config, like=found.train.samples, place=lambda n: str(samples[n])
    )
    source = Images(images, targets, unreadable=unreadable)
    source.remarks = found.remarks
    return source


def _read_checked(config: Config, path: Path) -> Found:
    if is_table(path) != (config.modality == "text"):
        raise DataError(f"{config.train} and {path} are a table and a folder of images: give two of one kind")
    return read(path, config.table_columns, COLUMNS[config.labels], cache=config.cache)


def read(path: Path, names: tuple[str, str], kind: LabelColumn, *, cache: Path | None = None) -> Found:
    """Read a table, by the names of its text and its label column, or the images of a folder of class folders. The
    texts of a large table are mapped into memory, if there is a folder for a cache. Raises DataError."""
    found = _table(path, names, kind, cache=cache) if path.is_file() else read_class_folders(path, "image")
    if not len(found.samples):
        raise DataError(f"{path} holds no sample: it has columns, but no row below them")
    return found


def _table(path: Path, names: tuple[str, str], kind: LabelColumn, *, cache: Path | None) -> Found:
    if path.suffix.lower() not in TABLE_SUFFIXES:
        raise DataError(
            f"{path} is of no known form: name it after its form ({', '.join(TABLE_SUFFIXES)}), or give a folder"
        )
    columns, place = [*names], rows_of(path)
    check = partial(require, columns)
    if cache is not None and path.stat().st_size > text_table.LARGE_BYTES:
        mapped, read = text_table.open_table(path, columns, kind, check=check, cache=cache)
        return Found(samples=mapped, labels=read, place=place)
    texts, labels = tables.read_columns(path, columns, check)
    read = kind.read(labels, place)
    return Found(samples=kind.read_texts(texts, read, place), labels=read, place=place)
