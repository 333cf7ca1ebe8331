"""The inputs of a request: texts, images or sounds from its body."""

import base64
import binascii
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lockstep.base.errors import DataError
from lockstep.data.images import TooLarge
from lockstep.data.sounds import FORMATS as SOUND_FORMATS
from lockstep.data.sounds import TooLong
from lockstep.inference.predictor import Predictor, Sample
from lockstep.inference.serving.serving_config import MAX_INPUTS

FORMATS = {"image": ("PNG", "JPEG"), "audio": SOUND_FORMATS}
"""Formats of files, by the input of the model."""
FORMAT_NAMES = {"image": "PNG or JPEG", "audio": "WAV, FLAC, OGG or MP3"}
"""Names of the formats in messages."""
FILE_TYPES = {
    "image": ("image/png", "image/jpeg"),
    "audio": ("audio/wav", "audio/x-wav", "audio/flac", "audio/ogg", "audio/mpeg"),
}
"""Media types of a body that is a file."""
BASE64 = {"contentEncoding": "base64", "pattern": "^(data:[^,]*;base64,)?[A-Za-z0-9+/=\\s]+$"}
JSON, FORM = "application/json", "multipart/form-data"
MAX_FAULTS = 100
Filled = Annotated[str, Field(min_length=1)]


class InvalidInput(Exception):
    """Input that cannot be predicted: (field, reason) of each fault. `code`: that of OpenAI's protocol."""

    def __init__(self, faults: Sequence[tuple[str, str]], status: int = 422, *, code: str | None = None) -> None:
        super().__init__(faults)
        self.faults, self.status, self.code = faults, status, code


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
        json_schema_extra={**BASE64},
    )


class ImagesRequest(Body):
    """Several images."""

    images: list[Filled] = Field(
        min_length=1, max_length=MAX_INPUTS, description="PNG or JPEG files in base64 (data: URLs are fine)."
    )


class AudioRequest(Body):
    """A sound to be classified."""

    audio: Filled = Field(
        description="A WAV, FLAC, OGG or MP3 file in base64 (a data: URL is fine).", json_schema_extra={**BASE64}
    )


class AudiosRequest(Body):
    """Several sounds."""

    audios: list[Filled] = Field(
        min_length=1, max_length=MAX_INPUTS, description="WAV, FLAC, OGG or MP3 files in base64 (data: URLs are fine)."
    )


BODIES: dict[tuple[str, bool], type[Body]] = {
    ("text", False): TextRequest,
    ("text", True): TextsRequest,
    ("image", False): ImageRequest,
    ("image", True): ImagesRequest,
    ("audio", False): AudioRequest,
    ("audio", True): AudiosRequest,
}
"""(Input of the model, whether a batch) -> JSON body."""


def json_inputs(body: bytes, takes: str, *, several: bool) -> list[str]:
    """Return the texts, or files in base64, of a JSON body. Raises InvalidInput, which names the fields."""
    try:
        request = BODIES[takes, several].model_validate_json(body)
    except ValidationError as error:
        raise InvalidInput(faults_of(error)) from None
    (inputs,) = dict(request).values()
    return list(inputs) if several else [inputs]


def faults_of(error: ValidationError) -> list[tuple[str, str]]:
    """Return (field, reason) of the first faults of a body."""
    if error.error_count() > MAX_FAULTS:  # describing each takes longer than finding them
        return [("body", f"there are {error.error_count():,} faults in this")]
    return [(_path(fault["loc"]), _reason(fault)) for fault in error.errors()[:10]]


def encoded_texts(predictor: Predictor, texts: Sequence[str], field: str) -> list[Sample]:
    """Return the model's inputs for texts. Raises InvalidInput."""
    try:
        return predictor.encode(texts)
    except DataError as error:
        raise InvalidInput([(field, str(error))]) from None


def encoded_file(predictor: Predictor, given: str | bytes, field: str) -> Sample:
    """Return the model's input for the bytes of a file, or base64 of them. Raises InvalidInput."""
    read = predictor.reader
    assert read is not None
    formats = FORMATS[read.modality]
    try:
        file = _decode(given, FORMAT_NAMES[read.modality]) if isinstance(given, str) else given
        return read(file, "this", formats=formats)
    except (TooLarge, TooLong) as error:
        raise InvalidInput([(field, str(error))], status=413) from None
    except (DataError, binascii.Error) as error:
        raise InvalidInput([(field, str(error))]) from None
    except Exception as error:  # parsers raise anything for damaged files
        raise InvalidInput([(field, f"this cannot be read as {read.noun} ({type(error).__name__})")]) from None


def _decode(text: str, formats: str) -> bytes:
    head, comma, data = text.partition(",")
    if comma and head.startswith("data:"):
        text = data
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError):
        raise DataError(f"should be a {formats} file in base64") from None


def _path(location: Sequence[Any]) -> str:
    return ".".join(map(str, location)) or "body"


def _reason(fault: Any) -> str:
    message: str = fault["msg"]
    if fault["type"] == "json_invalid":
        return message.replace("Invalid JSON:", "this is not JSON:")
    return message[0].lower() + message[1:]
