"""Files that are either whole or not there: atomic writes, checksums, synced folders."""

import errno
import hashlib
import io
import os
import secrets
import shutil
import stat
import zipfile
from pathlib import Path
from typing import IO, Any, TextIO

import pydantic_core

MOST_JSON_BYTES = 64 << 20
"""Of a file of facts."""
FEW_INODES = 100
"""A checkpoint has fewer files."""


def write(path: Path, text: str | bytes) -> None:
    """Replace a file's contents in one atomic, synced step; a reader sees the old or the new, never a part."""
    temporary = path.with_name(f"{path.name}.tmp-{secrets.token_hex(4)}")
    try:
        with temporary.open("wb") as file:
            file.write(text.encode() if isinstance(text, str) else text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.parent)


def read(path: Path, most: int) -> bytes:
    """The bytes of a regular file that has at most so many: a FIFO would never end, /dev/zero neither.

    Raises OSError, its `strerror` in words for people.
    """
    with regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise OSError(errno.EFBIG, f"it has {size:,} bytes, more than {most:,}", str(path))
        return file.read(most)


def read_json(path: Path) -> Any:
    """What a JSON file holds. Raises OSError; ValueError where it is none, or nested without end, which json follows
    into a RecursionError."""
    return pydantic_core.from_json(read(path, MOST_JSON_BYTES))


def regular(path: Path) -> io.BufferedReader:
    """A file, open to be read, if it is a regular one. Raises OSError."""
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return open(handle, "rb")


def append(path: Path) -> TextIO:
    """A file, open to be written at its end: a regular one, and not a link to one elsewhere. Raises OSError."""
    extra = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | extra, 0o666)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return open(handle, "a", encoding="utf-8", buffering=1)


def room(folder: Path) -> str:
    """How much is free where a folder is, and what to do where that is nothing. Raises OSError."""
    free = shutil.disk_usage(folder).free
    if hasattr(os, "statvfs"):
        found = os.statvfs(folder)
        if found.f_files and found.f_favail < FEW_INODES:  # a file system that knows no such limit says 0 files
            return (
                f"{free / 1e9:.1f} GB are free there, but only {found.f_favail:,} of {found.f_files:,} inodes, and "
                "every file takes one: delete files there, or choose another folder with run.dir"
            )
    return f"{free / 1e9:.1f} GB are free there"


def check_archive(file: IO[bytes], size: int) -> None:
    """Raise ValueError for what is no archive of torch.save: what it unpacks to has to be there uncompressed, so that
    nothing of `size` bytes can ask for more memory than that."""
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, OSError, NotImplementedError, UnicodeDecodeError) as error:
        raise ValueError(f"it is no archive of torch.save ({error})") from None
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise ValueError("it holds compressed parts, which torch.save does not write")
    if sum(entry.file_size for entry in entries) > size:
        raise ValueError("its parts are larger than the whole")
    file.seek(0)


def sha256(path: Path) -> str:
    """Hex digest of a regular file's bytes. Raises OSError."""
    with regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Make a file's bytes, or the renames in a folder, survive a power cut, where the system can (not on Windows)."""
    if os.name == "nt":
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
