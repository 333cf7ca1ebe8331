"""Processors of transformers: they bring an image of any size to that which a model takes, a sound to its numbers."""

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from lockstep.base.errors import DataError
from lockstep.core.host.pretrained_files import load

PROBES = ((48, 64), (64, 48))
"""Heights and widths of blank images, which must come out with the same size."""
PROBE_SECONDS = (0.5, 1)
"""Seconds of silence: an extractor that gives the same shape for both makes all sounds equally long."""


class ImageProcessor:
    """Processor of a model, which changes the geometry of an image, such as to resize and crop it; the model itself
    scales the pixels to numbers. Raises DataError where it cannot be loaded, or gives images of different sizes."""

    def __init__(self, name: str) -> None:
        """`name`: a name on the hub, or a folder."""
        from transformers import AutoConfig, AutoImageProcessor

        try:
            settings: Any = load(AutoConfig, name)
            # not torchvision, which a machine may lack: its pixels differ
            self.processor: Any = load(AutoImageProcessor, name, backend="pil")
        except Exception as error:  # a damaged file can raise anything inside the libraries
            reason = next(iter(str(error).splitlines()), "") or type(error).__name__
            raise DataError(
                f"cannot load the image processor of {name}: {reason}; save it beside the model, with "
                "processor.save_pretrained(FOLDER), or set data.image_processor=none and data.image_size"
            ) from error
        self.channels = 1 if getattr(settings, "num_channels", 3) == 1 else 3
        shapes = {self._probe(name, size) for size in PROBES}
        if len(shapes) > 1:
            raise DataError(
                f"the image processor of {name} keeps the shape of an image, but a micro-batch holds images of one "
                "size: set data.image_processor=none and data.image_size"
            )
        self.shape: tuple[int, int, int] = shapes.pop()

    def _probe(self, name: str, size: tuple[int, int]) -> tuple[int, int, int]:
        try:
            channels, height, width = self(Image.new("RGB", size[::-1])).shape
        except Exception as error:
            what = f"the image processor of {name} does not give pixels ({error})"
            raise DataError(f"{what}: set data.image_processor=none and data.image_size") from error
        return channels, height, width

    def __call__(self, image: Image.Image) -> np.ndarray:
        """Process an image of any size -> pixels, uint8 [C, H, W]."""
        pixels = np.asarray(image.convert("L" if self.channels == 1 else "RGB"))
        given = pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
        options = {"do_rescale": False, "do_normalize": False, "return_tensors": "np"}
        found = self.processor(given, input_data_format="channels_first", **options)["pixel_values"][0]
        return np.asarray(found).astype(np.uint8, casting="safe")

    @property
    def normalization(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Factor of a pixel, and what is subtracted then, per channel."""
        processor, ones = self.processor, (1.0,) * self.channels
        rescale = float(processor.rescale_factor) if processor.do_rescale else 1.0
        is_normalized = bool(getattr(processor, "do_normalize", False))
        means, deviations = (processor.image_mean, processor.image_std) if is_normalized else ((0.0,) * len(ones), ones)
        pairs = [*zip(means, deviations, strict=True)][: self.channels]
        factors = tuple(rescale / deviation for _, deviation in pairs)
        return factors, tuple(mean / deviation for mean, deviation in pairs)

    def save(self, folder: Path) -> None:
        """Write its file, beside the model's."""
        self.processor.save_pretrained(folder)


class FeatureExtractor:
    """Feature extractor of a model for sounds, with their padding. Raises DataError for any other, or a damaged one."""

    def __init__(self, name: str) -> None:
        """`name`: a name on the hub, or a folder."""
        from transformers import AutoFeatureExtractor

        try:
            self.extractor: Any = load(AutoFeatureExtractor, name)
            self.rate = int(self.extractor.sampling_rate)
            self.column = str(self.extractor.model_input_names[0])
            probes = [self._answer(np.zeros(int(self.rate * each), np.float32)) for each in PROBE_SECONDS]
        except Exception as error:  # a damaged file can raise anything inside the libraries
            reason = next(iter(str(error).splitlines()), "") or type(error).__name__
            what = f"cannot load the feature extractor of {name}: {reason}; save it beside the model"
            raise DataError(f"{what}, with feature_extractor.save_pretrained(FOLDER)") from error
        self.has_mask = all("attention_mask" in probe for probe in probes)
        self.padding = float(getattr(self.extractor, "padding_value", 0.0))
        shapes = {probe[self.column][0].shape for probe in probes}
        self.is_fixed = len(shapes) == 1
        """Whether all sounds get the same length."""

    def __call__(self, wave: np.ndarray) -> np.ndarray:
        """Extract from a sound, float32 [T] at the model's rate -> features, float32 [T] or [frames, bands]."""
        return np.asarray(self._answer(wave)[self.column][0], dtype=np.float32)

    def _answer(self, wave: np.ndarray) -> Any:
        return self.extractor(wave, sampling_rate=self.rate, return_tensors="np")

    def save(self, folder: Path) -> None:
        """Write its file, beside the model's."""
        self.extractor.save_pretrained(folder)


class Waves:
    """Substitute for a feature extractor: the sound itself."""

    rate, column, has_mask, padding, is_fixed = 16_000, "input_values", True, 0.0, False

    def __call__(self, wave: np.ndarray) -> np.ndarray:
        return wave

    def save(self, folder: Path) -> None:
        """Write nothing: there is no file."""
