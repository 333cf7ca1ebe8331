"""Paths in object stores, such as s3://bucket/folder/file.csv: settings and arguments that take one."""

import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import PlainSerializer, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from lockstep.base.errors import ConfigError, masked

URL = re.compile(r"[a-z][a-z0-9+.-]*://?[^/]", re.IGNORECASE)
"""Beginning of a URL, also with one slash, as pathlib writes it."""
ONLY_LOCAL = (
    "is a URL, but a path on this machine is needed here: object stores are for data, exports, and copies of "
    "checkpoints (docs/remote-storage.md)"
)


class RemotePath(type(Path())):  # type: ignore[misc]
    """A path in an object store: names, suffixes and joining as of any path; its text is the URL.

    No local file is ever at it: `exists()` and the like return False. core/host/remote_storage.py copies what is there.
    """

    def __str__(self) -> str:
        return super().__str__().replace(":/", "://", 1)


def is_url(text: str) -> bool:
    """Return whether a text names an object store rather than a local path; file:// does too, and C:/ does not."""
    return URL.match(text) is not None and not re.match(r"[a-z]:", text, re.IGNORECASE)


def parsed(text: str) -> Path:
    """Parse a path of either kind, from a command line or Python. Raises ConfigError for a URL with a password or a
    key, which would be in recipes and logs."""
    if is_url(text) and masked(text) != text:
        raise ConfigError(
            f"{text}: a URL may hold no password, key or token, as it is written into recipes, exports and logs: "
            "docs/remote-storage.md says where the store's client finds them"
        )
    return RemotePath(text) if is_url(text) else Path(text)


def local(path: Path) -> Path:
    """Return an absolute local path. Raises ValueError for a URL."""
    if is_url(str(path)):
        raise ValueError(f"{RemotePath(path)} {ONLY_LOCAL}")
    return path.expanduser().absolute()


def _parse_any(value: Any) -> Path:
    if isinstance(value, RemotePath):
        return value
    if not isinstance(value, str | Path):
        raise PydanticCustomError("path_type", "should be the path of a file or folder, or a URL")
    path = parsed(str(value))
    return path if isinstance(path, RemotePath) else path.expanduser().absolute()


DataPath = Annotated[
    Path, PlainValidator(_parse_any), PlainSerializer(str), WithJsonSchema({"type": "string", "format": "path"})
]
"""A path on this machine, made absolute from the working folder, or in an object store."""


def _parse_remote(value: Any) -> RemotePath:
    path = _parse_any(value)
    if not isinstance(path, RemotePath):
        raise ValueError(f"should be a URL such as s3://bucket/folder, not the local path {value}")
    return path


RemoteFolder = Annotated[
    RemotePath, PlainValidator(_parse_remote), PlainSerializer(str), WithJsonSchema({"type": "string", "format": "uri"})
]
"""A folder in an object store."""
