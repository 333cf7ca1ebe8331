"""Splits held in memory: images as one array, texts as one list, unless they are mapped."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np

from lockstep.base.contracts import Columns, DataSpec
from lockstep.base.errors import DataError
from lockstep.data.columns import Cells
from lockstep.data.targets import Targets


class Images:
    """Images of one size, uint8 [N, C, H, W], and their targets, or labels int64 [N] (indices into `names`);
    `unreadable`: index -> reason of the images that could not be decoded."""

    lengths: np.ndarray | None = None
    cells: Cells | None = None
    remarks: tuple[str, ...] = ()
    """Messages for the user about files that were left out."""

    def __init__(
        self,
        images: np.ndarray,
        labels: np.ndarray | Targets,
        names: Sequence[str] = (),
        *,
        unreadable: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        assert images.dtype == np.uint8, images.dtype
        assert images.ndim == 4, images.shape
        self.images, self.unreadable = images, unreadable
        targets = _checked(labels, len(images), names)
        self.labels = targets.values
        channels, height, width = images.shape[1:]
        self.spec = DataSpec(modality="image", image_shape=(channels, height, width), **targets.described)

    def __len__(self) -> int:
        return len(self.images)

    def __getitems__(self, indices: Sequence[int]) -> Columns:
        """Return {"image": uint8 [m, C, H, W], "label": [m] or [m, K]}. Raises DataError for an unreadable one."""
        bad = next((index for index in indices if index in self.unreadable), None) if self.unreadable else None
        if bad is not None:
            raise DataError(self.unreadable[bad])
        rows = np.asarray(indices, dtype=np.int64)
        return {"image": self.images[rows], "label": self.labels[rows]}


class Texts:
    """N texts and their targets, or labels int64 [N]; token_cache.py tokenizes them."""

    lengths: np.ndarray | None = None
    cells: Cells | None = None

    def __init__(self, texts: Sequence[str], labels: np.ndarray | Targets, names: Sequence[str] = ()) -> None:
        self.texts = texts
        targets = _checked(labels, len(texts), names)
        self.labels = targets.values
        self.spec = DataSpec(modality="text", **targets.described)

    def __len__(self) -> int:
        return len(self.texts)

    def __getitems__(self, indices: Sequence[int]) -> Columns:
        """Return {"text": m strings, "label": [m], [m, K] or, for each word, m arrays [W]}."""
        return {
            "text": [self.texts[i] for i in indices],
            "label": self.labels[np.asarray(indices, dtype=np.int64)],
        }


class PlainTexts:
    """Texts to learn a language from."""

    lengths: np.ndarray | None = None
    remarks: tuple[str, ...] = ()
    """Messages for the user about unused data."""
    spec = DataSpec(modality="tokens")

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = texts

    def __len__(self) -> int:
        return len(self.texts)

    def __getitems__(self, indices: Sequence[int]) -> Columns:
        """Return {"text": m strings}."""
        return {"text": [self.texts[index] for index in indices]}


def _checked(labels: np.ndarray | Targets, samples: int, names: Sequence[str]) -> Targets:
    targets = labels if isinstance(labels, Targets) else Targets(values=np.asarray(labels, np.int64), labels=(*names,))
    values = targets.values
    if len(values) != samples:
        raise DataError(f"{samples} samples but {len(values)} labels: the files do not belong together")
    if samples == 0:
        raise DataError("there is no sample in this split: check the path and the columns named in `data`")
    if values.dtype == np.int64 and (values.min() < 0 or values.max() >= len(targets.labels)):
        most = len(targets.labels)
        wrong = int(np.flatnonzero((values < 0) | (values >= most))[0])
        raise DataError(f"sample {wrong} has label {values[wrong]}, but labels run from 0 to {most - 1}")
    return targets
