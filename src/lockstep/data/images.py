"""Image files of any form become one array of one size."""

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

MOST_PIXELS = 64_000_000
"""Of one image: a small file may unpack to gigabytes."""
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)  # told by MOST_PIXELS
ImageFile = Path | bytes | None
"""An image file or its contents; None where a table has an empty cell."""


class TooLarge(DataError):
    """An image of more pixels than may be unpacked."""


def decode(
    files: Iterable[ImageFile], count: int, section: ImageSection, *, like: Iterable[ImageFile], place: Place
) -> tuple[np.ndarray, dict[int, str]]:
    """`count` image files as uint8 [count, C, H, W], by default as large as the first of `like`, the training ones; and
    those that cannot be read, with the reasons, where they are to be skipped.

    Photos are turned upright by their EXIF tag, transparency is dropped, 16-bit grey keeps its upper 8 bits.
    Raises DataError for a file that is no image, if it is not to be skipped, or, without `image_size`, for the first of
    another size.
    """
    if count == 0:
        raise DataError("there is no image in this split: check the folders or the splits named in `data`")
    height, width = section.image_size or _size(like, section)
    images, unreadable = _room((count, section.channels, height, width)), {}
    for number, file in enumerate(files):
        try:
            image = _coloured(_open(file, place(number)), section.channels)
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
        if image.size != (width, height):
            image = image.resize((width, height), Image.Resampling.BILINEAR)
        images[number] = _channels_first(image)
    return images, unreadable


def _size(files: Iterable[ImageFile], section: ImageSection) -> tuple[int, int]:
    """Height and width of the first image that is not to be skipped. Raises DataError."""
    for file in files:
        try:
            width, height = _open(file, str(file) if isinstance(file, Path) else "the first training image").size
        except DataError:
            if not section.skips:
                raise
        else:
            return height, width
    raise DataError("no training image can be read: check the files, or `data`")


def _room(shape: tuple[int, int, int, int]) -> np.ndarray:
    """Memory for images, uint8. Raises DataError where this machine has less."""
    count, _, height, width = shape
    what = f"{count} images of {height} x {width} (data.image_size)"
    if height * width > MOST_PIXELS:
        raise DataError(f"{what} have more than {MOST_PIXELS:,} pixels each: choose a smaller size")
    size, there = math.prod(shape), psutil.virtual_memory().total
    if size > there:
        raise DataError(
            f"{what} take {size / 2**30:.1f} GiB, but this machine has {there / 2**30:.1f}: choose a smaller size, or "
            "data.limit"
        )
    return np.empty(shape, dtype=np.uint8)


def pixels_of(
    file: ImageFile, where: str, shape: tuple[int, int, int], *, formats: tuple[str, ...] | None = None
) -> np.ndarray:
    """One image file, scaled to what a model takes, as uint8 [C, H, W]; `formats` are those that may be opened, by
    default all that Pillow knows. Raises DataError."""
    channels, height, width = shape
    image = _coloured(_open(file, where, formats), channels)
    if image.size != (width, height):
        image = image.resize((width, height), Image.Resampling.BILINEAR)
    return _channels_first(image)


def _coloured(image: Image.Image, channels: int) -> Image.Image:
    return image.convert("L" if channels == 1 else "RGB")


def _channels_first(image: Image.Image) -> np.ndarray:
    pixels = np.asarray(image)
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def _open(file: ImageFile, where: str, formats: tuple[str, ...] | None = None) -> Image.Image:
    """An upright image in memory, of a mode that `convert` understands."""
    if file is None:
        raise DataError(f"{where} has no image: remove the row")
    if isinstance(file, Path) and file.exists() and not file.is_file():  # to open a pipe would wait for ever
        raise DataError(f"{where} is no file but a pipe, a device or a folder: remove it")
    try:
        with Image.open(BytesIO(file) if isinstance(file, bytes) else file, formats=formats) as opened:
            if opened.width * opened.height > MOST_PIXELS:  # before a byte of it is unpacked
                raise TooLarge(f"{where} has {opened.width} x {opened.height} pixels, more than {MOST_PIXELS:,}")
            image = ImageOps.exif_transpose(opened)
            image.load()
    except Image.DecompressionBombError as error:
        raise TooLarge(f"{where} has more than {MOST_PIXELS:,} pixels") from error
    except (OSError, SyntaxError, ValueError) as error:
        raise DataError(f"{where} cannot be read as an image ({error}): replace or remove it") from error
    if image.mode.startswith("I"):
        # Pillow would clip 16-bit grey at 255, which leaves a white image.
        return Image.fromarray((np.asarray(image).astype(np.uint32) >> 8).astype(np.uint8))
    if "transparency" in image.info:
        return image.convert("RGBA")
    return image
