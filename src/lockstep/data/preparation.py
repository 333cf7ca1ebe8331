"""Preparation of a file as in a user's source, by `prepare` or `prepare_image` in the source's Python file."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from lockstep.base import plugins, trust
from lockstep.base.contracts import DataSpec, Source
from lockstep.base.errors import DataError, ModelError
from lockstep.data.collate import pixels
from lockstep.data.images import ImageReader, Scaling

PREPARE, PREPARE_IMAGE = "prepare", "prepare_image"


@dataclass(frozen=True)
class Preparation:
    """The user's `prepare`: of an image's pixels, uint8 [C, H, W], or of a text, it makes what the source gives; or
    `prepare_image`, of a PIL image of any size."""

    file: Path
    prepare: Callable[[Any], Any]
    takes_image: bool = False

    def __call__(self, raw: Any, where: str) -> Any:
        """Apply the function. Raises DataError where it fails."""
        try:
            return self.prepare(raw)
        except Exception as error:
            name = PREPARE_IMAGE if self.takes_image else PREPARE
            raise DataError(f"{name}() in {self.file} fails for {where}: {type(error).__name__}: {error}") from error

    def texts(self, texts: Sequence[Any]) -> list[Any]:
        return [self(each, "a text") if isinstance(each, str) else each for each in texts]

    def save(self, folder: Path) -> None:
        """Copy the file into an export. Raises ModelError for another one of its name."""
        target = folder / self.file.name
        if target.exists() and target.read_bytes() != self.file.read_bytes():
            raise ModelError(f"the files of the data and of the model are both called {target.name}: rename one")
        trust.copy_with_imports(self.file, folder)


class PreparedReader(ImageReader):
    """Turns an image file into what `prepare` makes of it."""

    def __init__(self, shape: tuple[int, int, int], preparation: Preparation) -> None:
        super().__init__(Scaling(shape))
        self.preparation = preparation

    def input_of(self, image: Image.Image, where: str) -> np.ndarray:
        if not self.preparation.takes_image:
            return np.asarray(self.preparation(self.fit(image), where))
        made = self.preparation(image.convert("L" if self.fit.shape[0] == 1 else "RGB"), where)
        return np.asarray(pixels(made) if isinstance(made, Image.Image) else made)


def preparation_of(file: Path) -> Preparation | None:
    """Return the file's `prepare_image` or `prepare`, if it has one."""
    module = plugins.load_file(file, "data.file")
    for name in (PREPARE_IMAGE, PREPARE):
        if callable(prepare := getattr(module, name, None)):
            return Preparation(file, prepare, takes_image=name == PREPARE_IMAGE)
    return None


def with_inputs_known(source: Source, preparation: Preparation | None) -> Source:
    """Return the source; its spec says whether to prepare images. Raises DataError if `prepare` makes another form."""
    shape = source.spec.image_shape
    if shape is None:
        return source
    try:
        first = source.__getitems__([0])["image"][0]
        image = np.asarray(pixels(first) if isinstance(first, Image.Image) else first)
    except Exception:  # such as an unreadable sample, which training reports
        return source
    if preparation is not None:
        made = PreparedReader(shape, preparation).blank()
        if (made.dtype, made.shape) != (image.dtype, image.shape):
            raise DataError(
                f"prepare() in {preparation.file} makes {made.dtype} {list(made.shape)} of an image, but source() "
                f"gives {image.dtype} {list(image.shape)}: call prepare() in source() for every sample"
            )
    elif _is_as_in_a_file(image, shape):
        return source
    source.spec = replace(source.spec, prepared=True)
    return source


def needed(spec: DataSpec) -> str:
    """Return what to do where files have to be prepared, and nothing says how; empty where they have not."""
    if not spec.prepared:
        return ""
    return (
        "the images that the model is trained with are not what a file gives, pixels uint8 "
        f"{list(spec.image_shape or ())}: files cannot be predicted as they are. Write prepare(pixels) into the Python "
        "file of data.file, which makes the model's input of them, call it in source() as well, and train again"
    )


def _is_as_in_a_file(image: np.ndarray, shape: tuple[int, int, int]) -> bool:
    """Return whether an image has the pixels of a file, from 0 to 255, in this shape."""
    if image.shape != shape or image.dtype == np.uint8:
        return image.shape == shape
    return bool(image.max() > 1 and np.array_equal(image, image.clip(0, 255).astype(np.uint8)))
