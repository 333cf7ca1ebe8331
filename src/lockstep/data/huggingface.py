"""Load a split of a Hugging Face data set: from a folder, the hub or, offline, its cache."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lockstep.base import plugins
from lockstep.base.errors import DataError
from lockstep.core.host.hub_access import hub_answers


def load_split(name: str, split: str, *, subset: str | None = None, revision: str | None = None) -> Any:
    """Load a split, or a slice such as "train[:10%]", of a hub name or local folder, as a `datasets.Dataset`.

    Raises DataError with the library's reason, and MissingExtra without the package datasets.
    """
    plugins.require("hub", "datasets", what=f"the data set {name!r}")
    import datasets

    folder = Path(name).expanduser().absolute()
    local = folder.is_dir()
    try:
        with _offline_mode(datasets.config, on=not local and not hub_answers()):
            return datasets.load_dataset(str(folder) if local else name, subset, split=split, revision=revision)
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


@contextmanager
def _offline_mode(settings: Any, *, on: bool) -> Iterator[None]:
    before = settings.HF_HUB_OFFLINE
    settings.HF_HUB_OFFLINE = before or on
    try:
        yield
    finally:
        settings.HF_HUB_OFFLINE = before
