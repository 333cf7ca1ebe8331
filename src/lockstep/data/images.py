"""Decode image files of any format into one array of one size."""

import math
import warnings
from collections.abc import Iterable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from PIL import Image, ImageOps, UnidentifiedImageError

from lockstep.base.errors import DataError
from lockstep.core.host.pretrained_processors import ImageProcessor
from lockstep.data.columns import Place
from lockstep.data.data_config import AUTO, NO_PROCESSOR, DataSection, ImageSection, PixelSection

MAX_PIXELS = 64_000_000
"""Limit per image: a small file may decompress to gigabytes."""
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)  # MAX_PIXELS is checked instead
ImageFile = Path | bytes | Image.Image | None
"""Path or contents of an image file, or an image of Pillow; None for an empty cell of a table."""


class TooLarge(DataError):
    """An image of more than MAX_PIXELS pixels."""


class Scaling:
    """Scales an image to (C, H, W), whatever its proportions, as uint8."""

    def __init__(self, shape: tuple[int, int, int]) -> None:
        self.shape = shape

    def __call__(self, image: Image.Image) -> np.ndarray:
        channels, height, width = self.shape
        image = image.convert("L" if channels == 1 else "RGB")
        if image.size != (width, height):
            image = image.resize((width, height), Image.Resampling.BILINEAR)
        pixels = np.array(image)  # a copy, which the user's `prepare` may write to
        return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


class ImageReader:
    """Turns an image file into a model's input, uint8 [C, H, W]."""

    modality, noun, column = "image", "an image", "image"
    """Modality of the files, noun for one with its article, column of a batch."""

    def __init__(self, fit: Scaling | ImageProcessor) -> None:
        self.fit = fit
        self.spec: dict[str, Any] = {"image_shape": fit.shape}

    def __call__(self, file: Any, where: str, *, formats: tuple[str, ...] | None = None) -> np.ndarray:
        """Return the pixels of a file; `formats` are those allowed, by default all of Pillow's. Raises DataError."""
        return self.input_of(open_image(file, where, formats), where)

    def input_of(self, image: Image.Image, where: str) -> np.ndarray:
        return self.fit(image)

    def blank(self) -> np.ndarray:
        """Return the input for a black image."""
        _, height, width = self.fit.shape
        return self.input_of(Image.new("RGB", (width, height)), "a black image")

    def lengths(self, files: Sequence[Path], *, skips: bool) -> np.ndarray | None:
        """Return None: all have the same length."""
        return None


def image_processor_of(section: DataSection) -> ImageProcessor | None:
    """Return the image processor that data.image_processor names, if the source gives images. Raises DataError."""
    if not isinstance(section, PixelSection) or section.modality != "image":
        return None
    return None if section.image_processor in (AUTO, NO_PROCESSOR) else ImageProcessor(section.image_processor)


def fitted(images: np.ndarray, section: PixelSection) -> np.ndarray:
    """Resize images, uint8 [N, C, H, W], with the processor of data.image_processor, if any. Raises DataError."""
    processor = image_processor_of(section)
    if processor is None:
        return images
    found = _empty((len(images), *processor.shape))
    for row, image in zip(found, images, strict=True):
        row[...] = processor(Image.fromarray(image[0] if len(image) == 1 else image.transpose(1, 2, 0)))
    return found


class SizedImages:
    """Decodes image files to one size: that of data.image_processor, or `image_size`, or that of the first of `like`,
    the training images, which all others must have then.

    Photos are rotated by their EXIF tag, transparency is dropped, 16-bit grey keeps its upper 8 bits.
    """

    def __init__(self, section: ImageSection, like: Iterable[ImageFile]) -> None:
        processor = image_processor_of(section)
        self.fit = processor or Scaling((section.channels, *(section.image_size or _size(like, section))))
        self.is_scaled = section.image_size is not None or isinstance(self.fit, ImageProcessor)

    def pixels(self, image: Image.Image, where: str) -> np.ndarray:
        """Return pixels, uint8 [C, H, W]. Raises DataError, where nothing scales images, for one of another size."""
        _, height, width = self.fit.shape
        if not self.is_scaled and image.size != (width, height):
            raise DataError(
                f"{where} is {image.height} x {image.width} (height x width), but the first training "
                f"image is {height} x {width}: set data.image_size='[{height},{width}]' to scale them all"
            )
        return self.fit(image)


def decode(
    files: Iterable[ImageFile], count: int, section: ImageSection, *, like: Iterable[ImageFile], place: Place
) -> tuple[np.ndarray, dict[int, str]]:
    """Decode `count` image files to uint8 [count, C, H, W]; returns also index -> reason of the unreadable ones.

    Raises DataError for an unreadable file, unless such are skipped, and for an image of another size than SizedImages
    allows.
    """
    if count == 0:
        raise DataError("there is no image in this split: check the folders or the splits named in `data`")
    sized = SizedImages(section, like)
    images, unreadable = _empty((count, *sized.fit.shape)), {}
    for number, file in enumerate(files):
        try:
            image = open_image(file, place(number))
        except DataError as error:
            if not section.skips:
                raise
            unreadable[number] = str(error)
            images[number] = 0  # sums over all samples include it
            continue
        images[number] = sized.pixels(image, place(number))
    return images, unreadable


def _size(files: Iterable[ImageFile], section: ImageSection) -> tuple[int, int]:
    """Return height and width of the first image that is not skipped. Raises DataError."""
    for file in files:
        try:
            width, height = open_image(file, str(file) if isinstance(file, Path) else "the first training image").size
        except DataError:
            if not section.skips:
                raise
        else:
            return height, width
    raise DataError("no training image can be read: check the files, or `data`")


def _empty(shape: tuple[int, int, int, int]) -> np.ndarray:
    """Allocate memory for images, uint8. Raises DataError if this machine has less."""
    count, _, height, width = shape
    what = f"{count} images of {height} x {width} (data.image_size)"
    if height * width > MAX_PIXELS:
        raise DataError(f"{what} have more than {MAX_PIXELS:,} pixels each: choose a smaller size")
    size, memory = math.prod(shape), psutil.virtual_memory().total
    if size > memory:
        raise DataError(
            f"{what} take {size / 2**30:.1f} GiB, but this machine has {memory / 2**30:.1f}: choose a smaller size, or "
            "data.limit"
        )
    return np.empty(shape, dtype=np.uint8)


def open_image(file: ImageFile, where: str, formats: tuple[str, ...] | None = None) -> Image.Image:
    """Load an image, rotated by its EXIF tag, in a mode that `convert` accepts. Raises DataError."""
    if file is None:
        raise DataError(f"{where} has no image: remove the row")
    if isinstance(file, Image.Image):
        return _plain(ImageOps.exif_transpose(file))
    if isinstance(file, Path) and file.exists() and not file.is_file():  # opening a pipe would block forever
        raise DataError(f"{where} is no file but a pipe, a device or a folder: remove it")
    try:
        with Image.open(BytesIO(file) if isinstance(file, bytes) else file, formats=formats) as opened:
            if opened.width * opened.height > MAX_PIXELS:  # before it is decompressed
                raise TooLarge(f"{where} has {opened.width} x {opened.height} pixels, more than {MAX_PIXELS:,}")
            image = ImageOps.exif_transpose(opened)
            image.load()
            if image.mode == "F" or (image.mode == "I" and opened.format != "PNG"):
                raise ValueError("its numbers have 32 bits and no known scale: save it with 8 or 16 bits")
    except Image.DecompressionBombError as error:
        raise TooLarge(f"{where} has more than {MAX_PIXELS:,} pixels") from error
    except (OSError, SyntaxError, ValueError) as error:
        reason = "no image of a known format" if isinstance(error, UnidentifiedImageError) else error
        raise DataError(f"{where} cannot be read as an image ({reason}): replace or remove it") from error
    return _plain(image)


def _plain(image: Image.Image) -> Image.Image:
    """Return an image in a mode that `convert` accepts."""
    if image.mode.startswith("I"):
        # Pillow would clip 16-bit grey at 255, which gives a white image
        return Image.fromarray((np.asarray(image).astype(np.uint32) >> 8).astype(np.uint8))
    if "transparency" in image.info:
        return image.convert("RGBA")
    return image
