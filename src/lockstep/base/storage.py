"""Atomic writes, checksums and fsync: files are either complete or absent."""

import errno
import hashlib
import io
import os
import secrets
import shutil
import stat
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, TextIO

import pydantic_core

from lockstep.base.errors import DataError

MOST_JSON_BYTES = 32 << 20
"""The largest JSON file that is read: in memory it may take 30 times as much."""
TAIL_BYTES = 1 << 16
KINDS = {stat.S_IFIFO: "a pipe", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device", stat.S_IFSOCK: "a socket"}
"""Names of kinds of files, besides regular ones and folders."""
TEXTS, MOST_TEXT_BYTES = (".json", ".jinja", ".txt"), 256 << 20
"""Suffixes and size limit of files that libraries read whole: settings, tokenizers, templates."""
FEW_INODES = 100
"""Number of free inodes below which a disk counts as full; a checkpoint has fewer files."""
FULL = (errno.ENOSPC, errno.EDQUOT)


def write(path: Path, text: str | bytes) -> None:
    """Replace a file as `replacing` does."""
    with replacing(path) as file:
        file.write(text.encode() if isinstance(text, str) else text)


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Open a file that replaces `path` at the end, atomically and synced, unless an error is raised; a reader sees the
    old or the new contents, never a mixture."""
    temporary = path.with_name(f"{path.name}.tmp-{secrets.token_hex(4)}")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        if error.filename in (None, str(temporary)):  # not of a file that is read meanwhile
            error.filename = str(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.parent)


def read_regular(path: Path, most_bytes: int, *, follows_links: bool = True) -> bytes:
    """Read a regular file of at most `most_bytes`; a FIFO or /dev/zero would never end.

    Raises OSError, with a `strerror` for the user.
    """
    with regular(path, follows_links=follows_links) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most_bytes:
            raise OSError(errno.EFBIG, f"it has {size:,} bytes, more than {most_bytes:,}", str(path))
        return file.read(most_bytes)


def seen_from(folder: Path, path: Path) -> str:
    """Return a path as seen from a folder; the absolute path where that is on another drive of Windows."""
    try:
        return os.path.relpath(path, folder)
    except ValueError:
        return str(path.absolute())


def read_json(path: Path) -> Any:
    """Parse a JSON file. Raises OSError, and ValueError for invalid or too deeply nested JSON (on which `json` would
    raise RecursionError)."""
    return pydantic_core.from_json(read_regular(path, MOST_JSON_BYTES))


def regular(path: Path, *, follows_links: bool = True) -> io.BufferedReader:
    """Open a regular file for reading. Raises OSError for any other kind of file."""
    flags = os.O_RDONLY | getattr(os, "O_BINARY", 0) | (0 if follows_links else getattr(os, "O_NOFOLLOW", 0))
    return open(_open_regular(path, flags), "rb")


def tail(path: Path) -> str:
    """Return the end of a log; empty where it cannot be read."""
    try:
        with regular(path) as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - TAIL_BYTES))
            return log.read(TAIL_BYTES).decode(errors="replace")
    except OSError:
        return ""


def require_inside(paths: Iterable[Path], *folders: Path) -> None:
    """Raise DataError unless these paths, with all links followed, lie in folders that somebody else may have written.

    A snapshot of the Hugging Face cache may link to the blobs of its own repository.
    """
    roots = [folder.resolve() for folder in folders]
    snapshots = [each for root in roots for each in (root, *root.parents) if each.parent.name == "snapshots"]
    roots += [each.parents[1] / "blobs" for each in snapshots]
    known: set[Path] = set()
    for path in paths:
        if path.is_symlink() or path.parent not in known:
            if not any((found := path.resolve()).is_relative_to(root) for root in roots):
                raise DataError(
                    f"{path} leads to {found}, outside of {folders[0]}: what a folder names has to lie inside it; "
                    "copy it there (links by `cp -rL`)"
                )
            known |= set() if path.is_symlink() else {path.parent}


def require_own_files(folder: Path) -> None:
    """Raise DataError for files in a folder, or shards of an index, that lie outside of it, and where `check_files`
    objects."""
    try:
        check_files(folder)
    except OSError as error:
        raise DataError(f"{error.filename} cannot be read: {error.strerror}") from None
    require_inside((path for path in folder.glob("*") if not path.is_dir()), folder)
    for path in folder.glob("*.index.json"):
        try:
            shards = [folder / name for name in set(read_json(path)["weight_map"].values())]
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise DataError(f"{path} cannot be read: {error}") from error
        require_inside(shards, folder)


def check_files(folder: Path) -> None:
    """Raise OSError where a folder of a model has a pipe or a device, or a text that is too large: libraries would read
    it without an end. Other folders in it, except that of templates, are not checked."""
    for path in (*folder.glob("*"), *folder.glob("additional_chat_templates/*")):
        with suppress(FileNotFoundError):  # a link to nothing
            found = path.stat()
            kind = KINDS.get(stat.S_IFMT(found.st_mode))
            if kind and not stat.S_ISSOCK(found.st_mode):  # which nothing can open
                raise OSError(errno.EINVAL, f"it is {kind}, not a regular file", str(path))
            if path.suffix in TEXTS and (size := found.st_size) > MOST_TEXT_BYTES and path.parent == folder:
                raise OSError(errno.EFBIG, f"it has {size:,} bytes, more than {MOST_TEXT_BYTES:,}", str(path))


def append(path: Path) -> TextIO:
    """Open a regular file for appending. Raises OSError for other kinds of files and for links."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0)
    return open(_open_regular(path, flags), "a", encoding="utf-8", buffering=1)


def _open_regular(path: Path, flags: int) -> int:
    try:
        handle = os.open(path, flags | getattr(os, "O_NONBLOCK", 0), 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP and flags & getattr(os, "O_NOFOLLOW", 0):
            raise OSError(errno.ELOOP, "it is a link, which is not followed", str(path)) from None
        raise
    if not stat.S_ISREG(mode := os.fstat(handle).st_mode):
        os.close(handle)
        kind = KINDS.get(stat.S_IFMT(mode), "a folder")
        raise OSError(errno.EINVAL, f"it is {kind}, not a regular file", str(path))
    return handle


def free_space(folder: Path) -> str:
    """Say how much disk space is free, and what to do where inodes have run out. Raises OSError."""
    free = shutil.disk_usage(folder).free
    if hasattr(os, "statvfs"):
        disk = os.statvfs(folder)
        if disk.f_files and disk.f_favail < FEW_INODES:  # without a limit, f_files is 0
            return (
                f"{free / 1e9:.1f} GB are free there, but only {disk.f_favail:,} of {disk.f_files:,} inodes, and "
                "every file takes one: delete files there, or choose another folder with run.dir"
            )
    return f"{free / 1e9:.1f} GB are free there"


def full_disk(error: BaseException) -> str | None:
    """Describe, for the user, what could not be written on a disk without space or inodes; None for another error."""
    if not isinstance(error, OSError) or error.errno not in FULL:
        return None
    folder = Path(os.fsdecode(error.filename)).parent if error.filename else Path.cwd()
    what = f"{error.filename or 'a file'} could not be written: {error.strerror}"
    with suppress(OSError):
        what += f" ({free_space(folder)})"
    return f"{what}: make room, and give the same command again"


def check_archive(file: IO[bytes], size: int) -> None:
    """Raise ValueError unless a file of `size` bytes is an uncompressed archive, as torch.save writes it.

    A compressed one could unpack to any amount of memory.
    """
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
    """Hash a regular file; returns hex digits. Raises OSError."""
    with regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Make a file's contents, or the renames in a folder, survive a power cut. Does nothing on Windows."""
    if os.name == "nt":
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
