"""The secret of a run: who cannot read it is no part of the run. It is a file in the run's folder that only its owner
may read, and is never in a command, in the environment or in a log."""

import os
import secrets
from contextlib import suppress
from pathlib import Path

from lockstep.base import storage

FILE = ".secret"
BYTES = 32


def create(folder: Path) -> bytes:
    """The secret of the run in this folder, which gets one unless it has one already."""
    with suppress(OSError):
        return read(folder)
    own = folder / f"{FILE}.{secrets.token_hex(4)}"
    folder.mkdir(parents=True, exist_ok=True)
    with open(os.open(own, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(secrets.token_bytes(BYTES))
    os.replace(own, folder / FILE)  # one that exists is damaged, or somebody else's
    return read(folder)


def read(folder: Path) -> bytes:
    """Raises OSError where there is none, or this user may not read it."""
    secret = storage.read_regular(folder / FILE, BYTES)
    if len(secret) != BYTES:
        raise OSError(f"{folder / FILE} is damaged")
    return secret
