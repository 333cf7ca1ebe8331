"""AG News: 120,000 training and 7,600 test news items in four classes; from CSV files or the hub."""

import csv
from pathlib import Path

import numpy as np

from lockstep.base.errors import DataError
from lockstep.data.huggingface import load_split
from lockstep.data.in_memory import Texts
from lockstep.data.sources.ag_news import HUB_NAME, Config

NAMES = ("World", "Sports", "Business", "Sci/Tech")


def build(config: Config, split: str) -> Texts:
    """Load the "train" or "test" split; a text is "title description", or whichever is not empty.

    Source: X. Zhang et al., Character-level convolutional networks for text classification, 2015.
    Raises DataError for damaged files, or without a file and a network.
    """
    for folder in (config.root / "ag_news", config.root):
        if (folder / f"{split}.csv").is_file():
            return _read(folder / f"{split}.csv")
    try:
        table = load_split(HUB_NAME, split, cache=config.cache)
    except DataError as error:
        raise DataError(
            f"AG News is not there: put train.csv and test.csv (class 1-4, title, description) into "
            f"{config.root / 'ag_news'}, or set data.root to their folder; {error}"
        ) from error
    return Texts(list(table["text"]), np.array(table["label"]), NAMES)


def _read(path: Path) -> Texts:
    texts: list[str] = []
    labels: list[int] = []
    try:
        _check_names(path.with_name("classes.txt"))
        with path.open(encoding="utf-8", newline="") as file:
            for number, row in enumerate(csv.reader(file, strict=True), 1):
                if len(row) != 3 or row[0] not in ("1", "2", "3", "4"):
                    raise DataError(
                        f"row {number} of {path} is {str(row):.100}, not a class 1-4, a title and a "
                        f"description: correct it, or get the file again"
                    )
                texts.append(" ".join(filter(None, row[1:])))
                labels.append(int(row[0]) - 1)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} is damaged after row {len(texts)} ({error}): get it again, as UTF-8 CSV") from error
    if not texts:
        raise DataError(f"{path} is empty: get it again")
    return Texts(texts, np.array(labels), NAMES)


def _check_names(path: Path) -> None:
    """Raise DataError if classes.txt has other classes than AG News."""
    if not path.is_file():
        return
    names = tuple(path.read_text(encoding="utf-8").split())
    if names != NAMES:
        raise DataError(
            f"{path} names the classes {', '.join(names)}, but those of AG News are {', '.join(NAMES)}: use "
            f"data.kind=files for other texts"
        )
