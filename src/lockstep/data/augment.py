"""Augmentation: a user's function of one training sample, and classes of kornia.augmentation for images (crops, flips,
RandAugment and others), with random numbers seeded by seed, epoch and sample."""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from torch import nn

from lockstep.base import plugins
from lockstep.base.contracts import Columns, DataSpec, Source
from lockstep.base.errors import ConfigError, DataError, nearest
from lockstep.core.numerics.seeds import seed_all
from lockstep.data.collate import Collated
from lockstep.data.data_config import DataSection
from lockstep.data.order import mix

Sample = Mapping[str, Any]
"""One row of a micro-batch's columns: column name -> array [...], number or string."""
Augment = Callable[[dict[str, Any]], Sample]
IMAGE = "image"


def keys_of(seed: int, epoch: int, indices: Sequence[int]) -> np.ndarray:
    """Random seeds for samples of an epoch, uint64 [m]."""
    keys = np.array([seed], dtype=np.uint64)
    for values in ([epoch], indices):
        keys = mix(keys ^ np.array(values, dtype=np.int64).view(np.uint64))
    return keys


class Augmented:
    """A training split whose samples pass through functions each time they are fetched."""

    def __init__(self, source: Source, *augments: Augment, seed: int) -> None:
        self.source, self.augments, self.seed = source, augments, seed
        self.spec, self.lengths = source.spec, source.lengths

    def __len__(self) -> int:
        return len(self.source)

    def __getitems__(self, indices: Sequence[int]) -> Columns:
        """Return the samples without augmentation."""
        return self.source.__getitems__(list(indices))

    def drawn(self, indices: Sequence[int], epoch: int) -> Columns:
        """Return the samples of an epoch. The functions get a copy of each, which they may change in place; the
        overhead is 10 µs per sample."""
        columns = self.source.__getitems__(list(indices))
        if isinstance(columns, Collated):
            raise DataError(
                "collate() makes whole micro-batches, of which augment() cannot get single samples: augment in "
                "__getitem__, where all generators are seeded just the same"
            )
        rows, keys = [], mix(keys_of(self.seed, epoch, indices))  # other keys than the fetch itself uses
        for position, key in enumerate(keys):
            seed_all(int(key))
            sample = {name: deepcopy(column[position]) for name, column in columns.items()}
            for augment in self.augments:
                sample = dict(augment(sample))
            rows.append(sample)
        return {name: _column([row[name] for row in rows], columns.get(name)) for name in rows[0]}


def _column(rows: list[Any], original: Any) -> Any:
    """Join rows: as a list if the source's column is one (texts, or arrays of different lengths)."""
    return rows if isinstance(original, list) else np.stack([np.asarray(row) for row in rows])


def augmented(source: Source, section: DataSection, seed: int) -> Source:
    """Apply the user's `augment(sample)` from data.augment, else from data.file, if there is one, and then
    data.transforms. Raises DataError when data.augment has none, and what ImageTransforms raises."""
    file = section.augment or section.code
    augment = getattr(plugins.load_file(file, "data.augment"), "augment", None) if file else None
    if augment is None and section.augment is not None:
        raise DataError(f"data.augment: {section.augment} has no function augment(sample)")
    steps: list[Augment] = [augment] if augment is not None else []
    if section.transforms:
        steps.append(ImageTransforms(section.transforms, source.spec))
    return Augmented(source, *steps, seed=seed) if steps else source


class ImageTransforms:
    """A function of one sample, for `Augmented`: it draws from torch's generator. Raises MissingExtra, and ConfigError
    for classes and options that kornia does not have, and for another size than before."""

    def __init__(self, transforms: Sequence[Mapping[str, Mapping[str, Any]]], spec: DataSpec) -> None:
        plugins.require("augment", "kornia", what="data.transforms")
        if spec.image_shape is None:
            raise ConfigError("data.transforms changes images, but these samples have none of one size: leave it out")
        self.steps, blank = list[nn.Module](), {IMAGE: np.zeros(spec.image_shape, dtype=np.uint8)}
        for name, options in (item for each in transforms for item in each.items()):
            made = _class_of(name)
            try:
                self.steps.append(made(**{key: tuple(v) if isinstance(v, list) else v for key, v in options.items()}))
                shape = self(blank)[IMAGE].shape
            except Exception as error:  # kornia raises anything for wrong options
                reason = next(iter(str(error).splitlines()), "") or type(error).__name__
                raise ConfigError(f"data.transforms: {name} cannot be used with {dict(options)}: {reason}") from error
        if shape != tuple(spec.image_shape):
            now, before = ("x".join(map(str, size[1:])) for size in (shape, spec.image_shape))
            raise ConfigError(
                f"data.transforms makes images of {now} pixels from those of {before}, but evaluations take these as "
                f"they are: let the size of a crop be [{before.replace('x', ', ')}]"
            )

    def __call__(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        """Return the sample with a changed image, uint8 [C, H, W]. Grey images have three equal channels meanwhile:
        kornia changes colours of RGB images only."""
        pixels = torch.from_numpy(np.ascontiguousarray(sample[IMAGE]))[None].float() / 255
        is_grey = pixels.shape[1] == 1
        with torch.no_grad():
            pixels = pixels.expand(-1, 3, -1, -1) if is_grey else pixels
            for step in self.steps:
                pixels = step(pixels)
            pixels = pixels.mean(1, keepdim=True) if is_grey else pixels
        return {**sample, IMAGE: (pixels[0] * 255).round().clamp(0, 255).to(torch.uint8).numpy()}


def _class_of(name: str) -> type[nn.Module]:
    """Return a class of kornia.augmentation. Raises ConfigError for an unknown one."""
    from kornia import augmentation
    from kornia.augmentation import auto

    classes = {
        key: value
        for module in (augmentation, auto)
        for key, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, nn.Module) and not key.startswith("_") and "3D" not in key
    }
    if name not in classes:
        raise ConfigError(f"data.transforms: kornia.augmentation has no {name!r}{nearest(name, list(classes))}")
    return classes[name]
