"""Copies files from and to object stores (s3://, gs://, hf://, ...) through fsspec."""

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec
import platformdirs
from filelock import FileLock

from lockstep.base.errors import MissingExtra, RemoteStorageError, few
from lockstep.base.remote_path import RemotePath, parsed

VERSIONS = ("ETag", "etag", "md5Hash", "crc32c", "blob_id", "mtime", "LastModified", "last_modified")
"""Names that file systems give to what differs between two versions of a file."""
AT_ONCE = 64
"""Number of files that are copied together."""
Progress = Callable[[int, int], None]
"""(bytes done, bytes in all)"""


@dataclass(frozen=True)
class RemoteFile:
    name: str
    """Path below the listed place; "" for the place itself."""
    bytes: int
    version: str
    """Text that changes with its contents."""


def listed(place: RemotePath) -> dict[str, RemoteFile]:
    """Return the file at a place, or those below it, by name; {} where there is nothing. Raises RemoteStorageError."""
    with _opened(place) as (files, root):
        found = {}
        for path, entry in sorted(files.find(root, detail=True).items()):
            if path.endswith("/"):  # what consoles leave where a folder is made
                continue
            name = path.removeprefix(root).strip("/")
            version = next((str(entry[key]) for key in VERSIONS if entry.get(key)), "")
            found[name] = RemoteFile(name, int(entry["size"] or 0), version)
        return found


def local_copy(place: RemotePath, cache: Path, progress: Progress = lambda *_: None) -> Path:
    """Copy the file or folder at a place into a cache, unless the same version is there -> the copy. Processes of one
    machine wait for the first that copies. Raises RemoteStorageError."""
    found = listed(place)
    if not found:
        raise RemoteStorageError(f"there is nothing at {place}: check the URL")
    content = json.dumps([str(place), [[file.name, file.bytes, file.version] for file in found.values()]])
    folder = cache / "remote" / hashlib.sha256(content.encode()).hexdigest()[:20]
    target = folder / place.name
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".lock"):
        if not target.exists():
            _download(place, found, target=folder / "unfinished", progress=progress)
            (folder / "unfinished" if "" not in found else folder / "unfinished" / place.name).replace(target)
            shutil.rmtree(folder / "unfinished", ignore_errors=True)
    return target


def here(path: Path, cache: Path | None = None, progress: Progress = lambda *_: None) -> Path:
    """Return a local path as it is, and the local copy of a remote one. Raises RemoteStorageError."""
    place = parsed(str(path))  # an argument of the command line is a plain Path
    if not isinstance(place, RemotePath):
        return path
    return local_copy(place, cache or platformdirs.user_cache_path("lockstep"), progress)


def download(place: RemotePath, target: Path) -> None:
    """Copy the files below a place into a folder. Raises RemoteStorageError."""
    _download(place, listed(place), target=target, progress=lambda *_: None)


def _download(place: RemotePath, found: Mapping[str, RemoteFile], *, target: Path, progress: Progress) -> None:
    """Download the missing files; one that is there is complete, since each gets its name once it is."""
    names = Counter(PurePosixPath(name) for name in found)
    folders = {folder for name in names for folder in name.parents}
    if twice := sorted(str(name) for name, count in names.items() if count > 1 or name in folders):
        what = f"{place} holds {few(twice)} more than once, or as a file beside a folder of that name"
        raise RemoteStorageError(f"{what}, which no disk can: rename or remove one of them in the store")
    total = sum(file.bytes for file in found.values())
    missing = [file for file in found.values() if not (target / (file.name or place.name)).is_file()]
    done = total - sum(file.bytes for file in missing)
    for start in range(0, len(missing), AT_ONCE):
        some = missing[start : start + AT_ONCE]
        progress(done, total)
        paths = [target / (file.name or place.name) for file in some]
        for path in paths:
            if not path.resolve().is_relative_to(target.resolve()):
                raise RemoteStorageError(f"{place} holds the name {path.name!r}, which leads out of its folder")
            path.parent.mkdir(parents=True, exist_ok=True)
        parts = [path.with_name(f"{path.name}.part") for path in paths]
        with _opened(place) as (files, root):
            files.get([f"{root}/{file.name}" if file.name else root for file in some], [*map(str, parts)])
        for file, part, path in zip(some, parts, paths, strict=True):
            if part.stat().st_size != file.bytes:
                raise RemoteStorageError(f"{place} has changed while it was copied: start again")
            part.replace(path)
            done += file.bytes
    progress(total, total)


def upload(folder: Path, place: RemotePath, names: Sequence[str]) -> None:
    """Copy files of a folder to a place. Raises RemoteStorageError, and OSError for a file that cannot be read."""
    for start in range(0, len(names), AT_ONCE):
        some = names[start : start + AT_ONCE]
        for name in some:
            (folder / name).stat()
        with _opened(place) as (files, root):
            files.put([str(folder / name) for name in some], [f"{root}/{name}" for name in some])


def write(place: RemotePath, contents: bytes) -> None:
    """Write a small file. Raises RemoteStorageError."""
    with _opened(place) as (files, root):
        files.pipe_file(root, contents)


def remove(place: RemotePath, names: Sequence[str]) -> None:
    """Delete files below a place; missing ones are no error. Raises RemoteStorageError."""
    if names:
        with _opened(place) as (files, root):
            files.rm([f"{root}/{name}" for name in names])


def read(place: RemotePath) -> bytes:
    """Read a small file. Raises RemoteStorageError."""
    with _opened(place) as (files, root):
        return files.cat_file(root)


@contextmanager
def _opened(place: RemotePath) -> Iterator[tuple[Any, str]]:
    """Yield the file system of a URL, uncached, and the path in it. Its errors become RemoteStorageErrors."""
    scheme = str(place).partition("://")[0]
    try:
        files, root = fsspec.core.url_to_fs(str(place), use_listings_cache=False)
        files.invalidate_cache()
        yield files, root.rstrip("/")
    except RemoteStorageError:
        raise
    except ImportError as error:
        extra = "pip install 'lockstep-train[remote]' (s3://), " if scheme == "s3" else ""
        raise MissingExtra(f"{place} needs a package that is not installed: {extra}{_reason(error)}") from None
    except FileNotFoundError:
        raise RemoteStorageError(f"there is nothing at {place}: check the URL") from None
    except PermissionError as error:
        raise RemoteStorageError(
            f"{place}: the store does not allow this ({_reason(error)}): check the credentials "
            "(docs/remote-storage.md says where they come from)"
        ) from None
    except Exception as error:  # each store's client has its own
        if isinstance(error, ValueError) and "rotocol" in str(error):
            known = ", ".join(f"{name}://" for name in ("s3", "gs", "hf"))
            raise RemoteStorageError(f"{place}: there is no store of this kind: use {known}, ...") from None
        kind = type(error).__name__
        advice = ": check the credentials" if "Credential" in kind else ""
        raise RemoteStorageError(f"{place} cannot be used ({kind}: {_reason(error)}){advice}") from error


def _reason(error: BaseException) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
