"""The inputs of a request: texts, images or sounds from its body."""

import base64
import binascii
from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from lockstep.base.errors import DataError
from lockstep.data.images import TooLarge
from lockstep.data.sounds import FORMATS as SOUND_FORMATS
from lockstep.data.sounds import TooLong
from lockstep.inference.predictor import Predictor, Sample

FORMATS = {"image": ("PNG", "JPEG"), "audio": SOUND_FORMATS}
"""Formats of files, by the input of the model."""
FORMAT_NAMES = {"image": "PNG or JPEG", "audio": "WAV, FLAC, OGG or MP3"}
"""Names of the formats in messages."""
FILE_TYPES = {
    "image": ("image/png", "image/jpeg"),
    "audio": ("audio/wav", "audio/x-wav", "audio/flac", "audio/ogg", "audio/mpeg"),
}
"""Media types of a body that is a file."""
BASE64: dict[str, Any] = {"contentEncoding": "base64", "pattern": "^(data:[^,]*;base64,)?[A-Za-z0-9+/=\\s]+$"}
JSON, FORM = "application/json", "multipart/form-data"
MAX_INPUTS = 256
"""Maximum number of inputs in one request to /predict/batch."""
MAX_FAULTS = 100
Filled = Annotated[str, Field(min_length=1)]
AnyBody = TypeVar("AnyBody", bound=BaseModel)


class InvalidInput(Exception):
    """Input that cannot be predicted: (field, reason) of each fault. `code`: that of OpenAI's protocol."""

    def __init__(self, faults: Sequence[tuple[str, str]], status: int = 422, *, code: str | None = None) -> None:
        super().__init__(faults)
        self.faults, self.status, self.code = faults, status, code


class Body(BaseModel):
    """A JSON body without unknown fields or type conversions."""

    model_config = ConfigDict(extra="forbid", strict=True)


def _bodies(takes: str, one: str, several: str) -> dict[tuple[str, bool], type[Body]]:
    """Return the JSON bodies for one input and for several, which are called so in descriptions."""
    formats = FORMAT_NAMES.get(takes)
    about = (
        f"A {formats} file in base64 (a data: URL is fine)."
        if formats
        else "Longer texts are cut to what the model reads."
    )
    more = f"{formats} files in base64 (data: URLs are fine)." if formats else None
    given: Any = (Filled, Field(description=about, json_schema_extra=BASE64 if formats else None))
    list_given: Any = (list[Filled], Field(min_length=1, max_length=MAX_INPUTS, description=more))
    name = takes.title()
    return {
        (takes, False): create_model(
            f"{name}Request", __doc__=f"{one} to be classified.", __base__=Body, **{takes: given}
        ),
        (takes, True): create_model(
            f"{name}sRequest", __doc__=f"Several {several}.", __base__=Body, **{f"{takes}s": list_given}
        ),
    }


BODIES = (
    _bodies("text", "A text", "texts") | _bodies("image", "An image", "images") | _bodies("audio", "A sound", "sounds")
)
"""(Input of the model, whether a batch) -> JSON body."""


def parsed(body: bytes, kind: type[AnyBody]) -> AnyBody:
    """Return a JSON body. Raises InvalidInput, which names the fields."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        if error.error_count() > MAX_FAULTS:  # describing each takes longer than finding them
            faults = [("body", f"there are {error.error_count():,} faults in this")]
        else:
            faults = [(".".join(map(str, each["loc"])) or "body", _reason(each)) for each in error.errors()[:10]]
        raise InvalidInput(faults) from None


def media_type_of(request: Any) -> str:
    return request.headers.get("content-type", JSON).partition(";")[0].strip().lower()


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


def _reason(fault: Any) -> str:
    message: str = fault["msg"]
    if fault["type"] == "json_invalid":
        return message.replace("Invalid JSON:", "this is not JSON:")
    return message[0].lower() + message[1:]
