"""Folder for the Unix sockets of multiprocessing, with a path that is short enough for them."""

import sys
import tempfile
from multiprocessing import util
from pathlib import Path

MAX_BYTES = 107 if sys.platform == "linux" else 103
"""Length limit of a socket's path (`sun_path` in unix(7), without the NUL)."""
NAME_BYTES = len("/pymp-xxxxxxxx/listener-xxxxxxxx")
SHORT = "/tmp"  # noqa: S108 (multiprocessing makes a folder in it that only this user can read)


def ensure_short() -> None:
    """Use /tmp for sockets where the path in TMPDIR is too long for them.

    Otherwise a DataLoader's workers fail one after the other at their first batch, and training waits for them.
    Must be called before the first process is started; multiprocessing keeps the folder for the life of the process.
    """
    configured = tempfile.tempdir
    if len(tempfile.gettempdir().encode()) + NAME_BYTES > MAX_BYTES and Path(SHORT).is_dir():
        tempfile.tempdir = SHORT
    try:
        util.get_temp_dir()
    finally:
        tempfile.tempdir = configured
