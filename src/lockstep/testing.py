"""Assertions for the tests of a project that trains with Lockstep: `from lockstep.testing import same_bits`."""

import os
import subprocess
import sys

from lockstep.base.errors import RunFailed


def same_bits(golden: str | os.PathLike[str], *, within: int | None = None) -> None:
    """Call `lockstep gate` with a golden file, and trust the code that it names; `within`: ULPs of float32.

    Raises AssertionError with the explanation where bits differ. A file that cannot be compared on this machine skips
    the test of pytest that calls this; elsewhere, and for other mistakes, it raises RunFailed.
    """
    options = [] if within is None else ["--within", str(within)]
    command = [sys.executable, "-P", "-m", "lockstep", "gate", os.fspath(golden), "--trust-code", *options]
    done = subprocess.run(command, capture_output=True, text=True)
    text = (done.stdout + done.stderr).strip()
    if done.returncode == 1:
        raise AssertionError(text)
    if done.returncode and "cannot be compared" in text and (pytest := sys.modules.get("pytest")) is not None:
        pytest.skip(text)
    if done.returncode:
        raise RunFailed(text, done.returncode)
