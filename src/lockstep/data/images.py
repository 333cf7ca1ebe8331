"""Decode image files of any format into one array of one size."""

import math
import warnings
from collections.abc import Iterable
from io import BytesIO
from pathlib import Path

import numpy as np
import psutil
from PIL import Image, ImageOps

from lockstep.base.errors import DataError
from lockstep.data.columns import Place
from lockstep.data.data_config import ImageSection

MAX_PIXELS = 64_000_000
"""Per image: a small file may decompress to gigabytes."""
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)  # MAX_PIXELS is checked instead
ImageFile = Path | bytes | None
"""Path or contents of an image file; None for an empty cell of a table."""


class TooLarge(DataError):
    """An image of more than MAX_PIXELS pixels."""


def decode(
    files: Iterable[ImageFile], count: int, section: ImageSection, *, like: Iterable[ImageFile], place: Place
) -> tuple[np.ndarray, dict[int, str]]:
    """Decode `count` image files to uint8 [count, C, H, W]; returns also index -> reason of the unreadable ones.

    Without `image_size`, the size is that of the first of `like`, the training images. Photos are rotated by their EXIF
    tag, transparency is dropped, 16-bit grey keeps its upper 8 bits. Raises DataError for an unreadable file, unless
    such are skipped, and, without `image_size`, for an image of another size.
    """
    if count == 0:
        raise DataError("there is no image in this split: check the folders or the splits named in `data`")
    height, width = section.image_size or _size(like, section)
    images, unreadable = _empty((count, section.channels, height, width)), {}
    for number, file in enumerate(files):
        try:
            image = _converted(_open(file, place(number)), section.channels)
        except DataError as error:
            if not section.skips:
                raise
            unreadable[number] = str(error)
            continue
        if section.image_size is None and image.size != (width, height):
            raise DataError(
                f"{place(number)} is {image.height} x {image.width} (height x width), but the first training "
                f"image is {height} x {width}: set data.image_size='[{height},{width}]' to scale them all"
            )
        images[number] = _pixels(image, height, width)
    return images, unreadable


def _size(files: Iterable[ImageFile], section: ImageSection) -> tuple[int, int]:
    """Height and width of the first image that is not skipped. Raises DataError."""
    for file in files:
        try:
            width, height = _open(file, str(file) if isinstance(file, Path) else "the first training image").size
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


def pixels_of(
    file: ImageFile, where: str, shape: tuple[int, int, int], *, formats: tuple[str, ...] | None = None
) -> np.ndarray:
    """Decode one image file and scale it to uint8 [C, H, W] for a model; `formats` are those allowed, by default all of
    Pillow's. Raises DataError."""
    channels, height, width = shape
    return _pixels(_converted(_open(file, where, formats), channels), height, width)


def _converted(image: Image.Image, channels: int) -> Image.Image:
    return image.convert("L" if channels == 1 else "RGB")


def _pixels(image: Image.Image, height: int, width: int) -> np.ndarray:
    """Scale to [C, H, W]."""
    if image.size != (width, height):
        image = image.resize((width, height), Image.Resampling.BILINEAR)
    pixels = np.asarray(image)
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def _open(file: ImageFile, where: str, formats: tuple[str, ...] | None = None) -> Image.Image:
    """Load an image, rotated by its EXIF tag, in a mode that `convert` accepts."""
    if file is None:
        raise DataError(f"{where} has no image: remove the row")
    if isinstance(file, Path) and file.exists() and not file.is_file():  # opening a pipe would block forever
        raise DataError(f"{where} is no file but a pipe, a device or a folder: remove it")
    try:
        with Image.open(BytesIO(file) if isinstance(file, bytes) else file, formats=formats) as opened:
            if opened.width * opened.height > MAX_PIXELS:  # before it is decompressed
                raise TooLarge(f"{where} has {opened.width} x {opened.height} pixels, more than {MAX_PIXELS:,}")
            image = ImageOps.exif_transpose(opened)
            image.load()
    except Image.DecompressionBombError as error:
        raise TooLarge(f"{where} has more than {MAX_PIXELS:,} pixels") from error
    except (OSError, SyntaxError, ValueError) as error:
        raise DataError(f"{where} cannot be read as an image ({error}): replace or remove it") from error
    if image.mode.startswith("I"):
        # Pillow would clip 16-bit grey at 255, which gives a white image
        return Image.fromarray((np.asarray(image).astype(np.uint32) >> 8).astype(np.uint8))
    if "transparency" in image.info:
        return image.convert("RGBA")
    return image
