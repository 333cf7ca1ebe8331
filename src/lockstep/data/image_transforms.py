"""Random changes of training images by classes of kornia.augmentation: crops, flips, RandAugment and others."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from lockstep.base import plugins
from lockstep.base.contracts import DataSpec
from lockstep.base.errors import ConfigError, nearest

IMAGE = "image"


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
        """The sample with a changed image, uint8 [C, H, W]. Grey images have three equal channels meanwhile, as kornia
        changes colours of such only."""
        pixels = torch.from_numpy(np.ascontiguousarray(sample[IMAGE]))[None].float() / 255
        is_grey = pixels.shape[1] == 1
        with torch.no_grad():
            pixels = pixels.expand(-1, 3, -1, -1) if is_grey else pixels
            for step in self.steps:
                pixels = step(pixels)
            pixels = pixels.mean(1, keepdim=True) if is_grey else pixels
        return {**sample, IMAGE: (pixels[0] * 255).round().clamp(0, 255).to(torch.uint8).numpy()}


def _class_of(name: str) -> type[nn.Module]:
    """Raises ConfigError for a class that kornia does not have."""
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
