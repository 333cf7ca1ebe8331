"""Texts as they were approved: kept in files under golden/, compared character by character, written anew on request."""

import os
import pathlib

ROOT = pathlib.Path(__file__).parent / "golden"
RENEW = "LOCKSTEP_GOLDEN"
"""Set to `write`, the files are written as the texts are now; look at `git diff tests/golden` before you commit."""


def matches(text, name):
    """Whether a text is the one in golden/NAME; else fails with what differs, line by line."""
    file = ROOT / name
    if os.environ.get(RENEW) == "write":
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    assert file.is_file(), f"there is no {file}: {RENEW}=write pytest ... writes it"
    assert text.splitlines() == file.read_text(encoding="utf-8").splitlines(), f"{RENEW}=write pytest ... renews {file}"
    return True
