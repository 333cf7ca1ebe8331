"""The inputs of a request: texts or images from its body."""

import base64
import binascii
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lockstep.base.errors import DataError
from lockstep.data.images import TooLarge, pixels_of
from lockstep.inference.predictor import Predictor, Sample
from lockstep.inference.serving.serving_config import MAX_INPUTS

IMAGE_FORMATS = ("PNG", "JPEG")
IMAGE_TYPES = ("image/png", "image/jpeg")
JSON, FORM = "application/json", "multipart/form-data"
MAX_FAULTS = 100
Filled = Annotated[str, Field(min_length=1)]


class InvalidInput(Exception):
    """Input that cannot be predicted: (field, reason) of each fault."""

    def __init__(self, faults: Sequence[tuple[str, str]], status: int = 422) -> None:
        super().__init__(faults)
        self.faults, self.status = faults, status


class Body(BaseModel):
    """A JSON body without unknown fields or type conversions."""

    model_config = ConfigDict(extra="forbid", strict=True)


class TextRequest(Body):
    """A text to be classified."""

    text: Filled = Field(description="Longer texts are cut to what the model reads.")


class TextsRequest(Body):
    """Several texts."""

    texts: list[Filled] = Field(min_length=1, max_length=MAX_INPUTS)


class ImageRequest(Body):
    """An image to be classified."""

    image: Filled = Field(
        description="A PNG or JPEG file in base64 (a data: URL is fine).",
        json_schema_extra={"contentEncoding": "base64", "pattern": "^(data:[^,]*;base64,)?[A-Za-z0-9+/=\\s]+$"},
    )


class ImagesRequest(Body):
    """Several images."""

    images: list[Filled] = Field(
        min_length=1, max_length=MAX_INPUTS, description="PNG or JPEG files in base64 (data: URLs are fine)."
    )


BODIES: dict[tuple[str, bool], type[Body]] = {
    ("text", False): TextRequest,
    ("text", True): TextsRequest,
    ("image", False): ImageRequest,
    ("image", True): ImagesRequest,
}
"""(Input of the model, whether a batch) -> JSON body."""


def json_inputs(body: bytes, takes: str, *, several: bool) -> list[str]:
    """The texts, or base64 images, of a JSON body; raises InvalidInput, which names the fields."""
    try:
        request = BODIES[takes, several].model_validate_json(body)
    except ValidationError as error:
        if error.error_count() > MAX_FAULTS:  # describing each takes longer than finding them
            raise InvalidInput([("body", f"there are {error.error_count():,} faults in this")]) from None
        raise InvalidInput([(_path(fault["loc"]), _reason(fault)) for fault in error.errors()[:10]]) from None
    (inputs,) = dict(request).values()
    return list(inputs) if several else [inputs]


def encoded_texts(predictor: Predictor, texts: Sequence[str], field: str) -> list[Sample]:
    """The model's inputs for texts; raises InvalidInput."""
    try:
        return predictor.encode(texts)
    except DataError as error:
        raise InvalidInput([(field, str(error))]) from None


def encoded_image(predictor: Predictor, image: str | bytes, field: str) -> Sample:
    """The model's input for a base64 image, or the bytes of an image file; raises InvalidInput."""
    shape = predictor.facts.image_shape
    assert shape is not None
    try:
        file = _decoded(image) if isinstance(image, str) else image
        return pixels_of(file, "this", shape, formats=IMAGE_FORMATS)
    except TooLarge as error:
        raise InvalidInput([(field, str(error))], status=413) from None
    except (DataError, binascii.Error) as error:
        raise InvalidInput([(field, str(error))]) from None
    except Exception as error:  # Pillow's parsers raise anything for damaged files
        raise InvalidInput([(field, f"this cannot be read as an image ({type(error).__name__})")]) from None


def _decoded(text: str) -> bytes:
    head, comma, data = text.partition(",")
    if comma and head.startswith("data:"):
        text = data
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError):
        raise DataError("should be a PNG or JPEG file in base64") from None


def _path(location: Sequence[Any]) -> str:
    return ".".join(map(str, location)) or "body"


def _reason(fault: Any) -> str:
    message: str = fault["msg"]
    if fault["type"] == "json_invalid":
        return message.replace("Invalid JSON:", "this is not JSON:")
    return message[0].lower() + message[1:]
