"""Load a split of a Hugging Face data set: from a folder, the hub or, offline, its cache."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lockstep.base import plugins
from lockstep.base.errors import DataError
from lockstep.core.host.hub_access import hub_answers

SAVED = ("dataset_dict.json", "state.json")
"""Files of which one is in a folder that save_to_disk wrote."""


def load_split(
    name: str, split: str, *, subset: str | None = None, revision: str | None = None, streams: bool = False
) -> Any:
    """Load a split, or a slice such as "train[:10%]", of a hub name or local folder, as a `datasets.Dataset`: a file
    that is mapped into memory. With `streams` as a `datasets.IterableDataset`, which takes no slices.

    Raises DataError with the library's reason, and MissingExtra without the package datasets.
    """
    plugins.require("hub", "datasets", what=f"the data set {name!r}")
    import datasets

    folder = Path(name).expanduser().absolute()
    local = folder.is_dir()
    try:
        if any((folder / file).is_file() for file in SAVED):
            if streams:
                raise DataError(
                    "save_to_disk has written it, as a file that is mapped into memory: leave out streaming"
                )
            return _saved_split(folder, split)
        with _offline_mode(datasets.config, on=not local and not hub_answers()):
            path, more = str(folder) if local else name, {"streaming": True} if streams else {}
            return datasets.load_dataset(path, subset, split=split, revision=revision, **more)
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


def _saved_split(folder: Path, split: str) -> Any:
    """A split of what save_to_disk wrote; data that was saved without one is "train"."""
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
