"""Image processors of transformers: they bring an image of any size to the size that a model takes."""

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from lockstep.base import storage
from lockstep.base.errors import DataError
from lockstep.core.host.hub_access import hub_answers

PROBES = ((48, 64), (64, 48))
"""Heights and widths of blank images, which must come out with the same size."""


class ImageProcessor:
    """What a model's processor does to the geometry of an image, such as to resize and crop it; a model itself does
    what is left, to scale the pixels to numbers.

    Raises DataError where it cannot be loaded, or gives images of different sizes.
    """

    def __init__(self, name: str) -> None:
        """`name`: a name on the hub, or a folder."""
        from transformers import AutoConfig, AutoImageProcessor

        origin = {"local_files_only": Path(name).is_dir() or not hub_answers(), "trust_remote_code": False}
        try:
            storage.check_files(Path(name))
            settings: Any = AutoConfig.from_pretrained(name, **origin)
            # not torchvision, which a machine may lack: its pixels differ
            self.processor: Any = AutoImageProcessor.from_pretrained(name, backend="pil", **origin)
        except Exception as error:  # a damaged file can raise anything inside the libraries
            reason = next(iter(str(error).splitlines()), "") or type(error).__name__
            raise DataError(
                f"cannot load the image processor of {name}: {reason}; save it beside the model, with "
                "processor.save_pretrained(FOLDER), or set data.image_processor=none and data.image_size"
            ) from error
        self.channels = 1 if getattr(settings, "num_channels", 3) == 1 else 3
        shapes = {self._probed(name, size) for size in PROBES}
        if len(shapes) > 1:
            raise DataError(
                f"the image processor of {name} keeps the shape of an image, but a micro-batch holds images of one "
                "size: set data.image_processor=none and data.image_size"
            )
        self.shape: tuple[int, int, int] = shapes.pop()

    def _probed(self, name: str, size: tuple[int, int]) -> tuple[int, int, int]:
        try:
            channels, height, width = self(Image.new("RGB", size[::-1])).shape
        except Exception as error:
            raise DataError(
                f"the image processor of {name} does not give pixels ({error}): set data.image_processor=none and "
                "data.image_size"
            ) from error
        return channels, height, width

    def __call__(self, image: Image.Image) -> np.ndarray:
        """Image of any size -> pixels, uint8 [C, H, W]."""
        pixels = np.asarray(image.convert("L" if self.channels == 1 else "RGB"))
        given = pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
        options = {"do_rescale": False, "do_normalize": False, "return_tensors": "np"}
        found = self.processor(given, input_data_format="channels_first", **options)["pixel_values"][0]
        return np.asarray(found).astype(np.uint8, casting="safe")

    @property
    def normalization(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Per channel: factor of a pixel, and what is subtracted then."""
        processor, ones = self.processor, (1.0,) * self.channels
        rescale = float(processor.rescale_factor) if processor.do_rescale else 1.0
        is_normalized = bool(getattr(processor, "do_normalize", False))
        means, deviations = (processor.image_mean, processor.image_std) if is_normalized else ((0.0,) * len(ones), ones)
        pairs = [*zip(means, deviations, strict=True)][: self.channels]
        return tuple(rescale / deviation for _, deviation in pairs), tuple(
            mean / deviation for mean, deviation in pairs
        )

    def save(self, folder: Path) -> None:
        """Write its file, beside the model's."""
        self.processor.save_pretrained(folder)
