"""Splits held in memory: images as one array, texts as one list."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np

from lockstep.base.contracts import Columns, DataSpec
from lockstep.base.errors import DataError


class Images:
    """Images of one size, uint8 [N, C, H, W], and labels, int64 [N] (indices into `names`); `unreadable`: index ->
    reason of the images that could not be decoded."""

    lengths: np.ndarray | None = None

    def __init__(
        self,
        images: np.ndarray,
        labels: np.ndarray,
        names: Sequence[str],
        *,
        unreadable: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        assert images.dtype == np.uint8, images.dtype
        assert images.ndim == 4, images.shape
        self.images, self.unreadable = images, unreadable
        self.labels = _checked(labels, len(images), names)
        channels, height, width = images.shape[1:]
        self.spec = DataSpec(modality="image", labels=tuple(names), image_shape=(channels, height, width))

    def __len__(self) -> int:
        return len(self.images)

    def __getitems__(self, indices: Sequence[int]) -> Columns:
        """{"image": uint8 [m, C, H, W], "label": int64 [m]}. Raises DataError for an unreadable one."""
        bad = next((index for index in indices if index in self.unreadable), None) if self.unreadable else None
        if bad is not None:
            raise DataError(self.unreadable[bad])
        rows = np.asarray(indices, dtype=np.int64)
        return {"image": self.images[rows], "label": self.labels[rows]}


class Texts:
    """N texts and their labels, int64 [N]; token_cache.py tokenizes them."""

    lengths: np.ndarray | None = None

    def __init__(self, texts: Sequence[str], labels: np.ndarray, names: Sequence[str]) -> None:
        self.texts = texts
        self.labels = _checked(labels, len(texts), names)
        self.spec = DataSpec(modality="text", labels=tuple(names))

    def __len__(self) -> int:
        return len(self.texts)

    def __getitems__(self, indices: Sequence[int]) -> Columns:
        """{"text": m strings, "label": int64 [m]}."""
        return {
            "text": [self.texts[i] for i in indices],
            "label": self.labels[np.asarray(indices, dtype=np.int64)],
        }


def _checked(labels: np.ndarray, samples: int, names: Sequence[str]) -> np.ndarray:
    labels = np.asarray(labels, dtype=np.int64)
    if len(labels) != samples:
        raise DataError(f"{samples} samples but {len(labels)} labels: the files do not belong together")
    if samples == 0:
        raise DataError("there is no sample in this split: check the path and the columns named in `data`")
    if labels.min() < 0 or labels.max() >= len(names):
        wrong = int(np.flatnonzero((labels < 0) | (labels >= len(names)))[0])
        raise DataError(f"sample {wrong} has label {labels[wrong]}, but labels run from 0 to {len(names) - 1}")
    return labels
