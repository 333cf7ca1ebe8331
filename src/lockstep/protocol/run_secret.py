"""The secret of a run, which a process has to know to take part. It is a file in the run's folder that only its owner
may read, and is never in a command, in the environment or in a log."""

import errno
import os
import secrets
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path

from lockstep.base import storage, trust
from lockstep.base.errors import LaunchError
from lockstep.base.world import World

FILE = ".secret"
VARIABLE = "LOCKSTEP_SECRET"
"""Variable that names the folder with a run's secret. Lockstep's launchers set it; with torchrun a user can."""
BYTES = 32


class _Exposed(OSError):
    """Another user could have written or read the file."""


def create(folder: Path) -> bytes:
    """Return the secret of the run in this folder, creating it where there is none. One that another user could have
    written or read is replaced, with a message. Raises LaunchError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _ensure(folder)
        return read(folder)
    except OSError as error:
        raise LaunchError(f"{folder} cannot keep the run's secret ({error}): choose another run.dir") from None


def read(folder: Path) -> bytes:
    """Return the secret of the run in this folder; on a file system without permissions, this user's. Raises OSError
    where there is none, or this user may not read it."""
    try:
        return _read(folder)
    except _Exposed:
        if (own := _of_user()) is None:
            raise
        return own


def of_process(world: World) -> bytes | None:
    """Return the secret that the processes of this one's run share: that of its launcher or, where torchrun or a script
    has started all of them on one machine, this user's. None where there is neither. Raises LaunchError."""
    if folder := os.environ.get(VARIABLE):
        try:
            return read(Path(folder))
        except OSError as error:
            raise LaunchError(f"{error}: start all processes of a run as the same user ({VARIABLE})") from None
    return _of_user() if world.local_size == world.size else None


@cache
def _of_user() -> bytes | None:
    """Return this user's own secret; None where the user has no home."""
    folder = trust.state_folder()
    with suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _ensure(folder)
        return _read(folder)
    return None


def _read(folder: Path) -> bytes:
    file = folder / FILE
    with storage.regular(file, follows_links=False) as opened:
        facts = os.fstat(opened.fileno())
        if facts.st_size != BYTES:
            raise OSError(errno.EINVAL, f"it has {facts.st_size:,} bytes, not {BYTES}", str(file))
        if os.name != "nt" and (facts.st_uid != os.geteuid() or facts.st_mode & 0o077):
            raise _Exposed(errno.EPERM, "it is not this user's alone", str(file))
        return opened.read(BYTES)


def _ensure(folder: Path) -> None:
    """Create the secret where it is missing; of two processes at once, both keep what the first has written."""
    file, own = folder / FILE, folder / f"{FILE}.{secrets.token_hex(4)}"
    read_inode = file.lstat().st_ino if os.path.lexists(file) else None
    try:
        _read(folder)
        return
    except FileNotFoundError:
        pass
    except OSError as error:
        sys.stderr.write(f"{error}; another secret takes its place\n")
        if file.is_dir():
            raise
        file.replace(own)
        if own.lstat().st_ino != read_inode:  # that of a process that was faster
            os.link(own, file)
        own.unlink()
    with open(os.open(own, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as new:
        new.write(secrets.token_bytes(BYTES))
    try:
        with suppress(FileExistsError):
            os.link(own, file)
    except OSError:  # a file system without links
        own.replace(file)
    own.unlink(missing_ok=True)
