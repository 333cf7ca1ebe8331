"""Load a split of a Hugging Face data set: from a folder, the hub or, offline, its cache."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from lockstep.base import plugins, storage
from lockstep.base.errors import DataError, UserError
from lockstep.core.host.hub_access import hub_answers


def load_split(
    name: str, split: str, *, cache: Path, subset: str | None = None, revision: str | None = None, streams: bool = False
) -> Any:
    """Load a split, or a slice such as "train[:10%]", of a hub name or local folder, as a `datasets.Dataset`: a file
    that is mapped into memory. With `streams` as a `datasets.IterableDataset`, which takes no slices. Images and the
    like stay files, which their cells name. `cache`: folder for the results of checks of files.

    Raises DataError with the library's reason, and MissingExtra without the package datasets.
    """
    plugins.require("hub", "datasets", what=f"the data set {name!r}")
    import datasets

    from lockstep.data import data_folder  # noqa: PLC0415 (pyarrow)

    folder = Path(name).expanduser().absolute()
    local = folder.is_dir()
    try:
        if any((folder / file).is_file() for file in data_folder.SAVED):
            if streams:
                raise DataError(f"{folder} is a file of save_to_disk that is mapped into memory: leave out streaming")
            data_folder.check_saved(folder, cache)
            table = _saved_split(folder, split)
        else:
            with _offline_mode(datasets.config, on=not local and not hub_answers()):
                builder = data_folder.builder_of(folder, subset, cache) if local else None
                builder = builder or datasets.load_dataset_builder(name, subset, revision=revision)
                if streams:
                    table = builder.as_streaming_dataset(split=split)
                    return table.decode(enable=False) if table.features else table
                builder.download_and_prepare()
                table = builder.as_dataset(split=split)
        data_folder.check_mapped(table, cache)
        return _undecoded(table)
    except UserError:
        raise
    except ConnectionError as error:
        raise DataError(
            f"the Hugging Face hub cannot be reached for the data set {name!r}, and its cache has no copy: "
            f"load it once where there is a network (there is no folder {folder} either)"
        ) from error
    except Exception as error:  # datasets passes on any error of its readers, the hub and the file system
        reason = str(error.__cause__ or error).strip().partition("\n")[0] or type(error).__name__
        raise DataError(
            f"cannot load the split {split!r} of the data set {name!r}: {reason.rstrip('.')} (check its name "
            f"or folder, subset, revision and splits; a slice such as 'train[:10%]' is a split too)"
        ) from error


def image_of(cell: Any, name: str) -> Any:
    """Return the contents or the path of the image that a cell of the data set `name` holds, or what the hub has at its
    URL; None for an empty cell. Raises DataError for one outside of the data set."""
    from datasets import Image, config
    from huggingface_hub.constants import HF_HUB_CACHE

    if cell is None or cell["bytes"]:
        return cell and cell["bytes"]
    folder, place = Path(name).expanduser(), str(cell["path"])
    if not folder.is_dir() and re.match(rf"(zip://[^:]*::)?hf://datasets/{re.escape(name)}[@/]", place):
        return Image().decode_example(cell)
    folders = [folder] if folder.is_dir() else [Path(config.HF_DATASETS_CACHE), Path(HF_HUB_CACHE)]
    storage.require_inside([Path(place)], *folders)
    return Path(place)


def _undecoded(table: Any) -> Any:
    """Return the table without decoding files, of images for example: a cell may name any file."""
    from datasets.features.features import require_decoding

    for name, kind in table.features.items():
        if require_decoding(kind):  # a list of images is no column that could be learned from
            is_list = not hasattr(kind, "decode")
            table = table.remove_columns(name) if is_list else table.cast_column(name, replace(kind, decode=False))
    return table


def _saved_split(folder: Path, split: str) -> Any:
    """Return a split of what save_to_disk wrote; data that was saved without one is "train"."""
    import datasets

    found = datasets.load_from_disk(str(folder))
    splits = found if isinstance(found, datasets.DatasetDict) else {str(found.split or "train"): found}
    parts = datasets.ReadInstruction.from_spec(split).to_absolute({name: len(each) for name, each in splits.items()})
    return datasets.concatenate_datasets([splits[part.splitname].select(range(part.from_, part.to)) for part in parts])


@contextmanager
def _offline_mode(settings: Any, *, on: bool) -> Iterator[None]:
    before = settings.HF_HUB_OFFLINE
    settings.HF_HUB_OFFLINE = before or on
    try:
        yield
    finally:
        settings.HF_HUB_OFFLINE = before
