"""Names that the folder of a run can have."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

from lockstep.base.errors import ConfigError

LONGEST_NAME = 200
"""Limit in bytes; file systems allow 255, and names of temporary files are longer."""
DEVICES = {"CON", "PRN", "AUX", "NUL", *(f"{port}{i}" for port in ("COM", "LPT") for i in range(1, 10))}


def check(name: str) -> None:
    """Raise ValueError for a name that no run can have."""
    if not re.fullmatch(r"[\w-][\w.-]*", name):
        raise ValueError("a run's name is one folder: letters, digits, '.', '-' and '_', not beginning with '.'")
    if len(name.encode()) > LONGEST_NAME:
        raise ValueError(f"a run's name is at most {LONGEST_NAME} bytes long")
    if name.split(".")[0].upper() in DEVICES:
        raise ValueError("to Windows this is a device, not a folder: choose another name")


def folder_overrides(run: Path, overrides: Sequence[str]) -> list[str]:
    """Return overrides that make a recipe stand for the run in this folder, an absolute path, then those given. Raises
    ConfigError for a folder that has been given a name that no run can have."""
    settings = {"run.dir": str(run.parent), "run.name": run.name}
    if not any(each.startswith("run.name=") for each in overrides):
        try:
            check(run.name)
        except ValueError as error:
            raise ConfigError(f"{run}: rename this folder, such as to {run.parent / 'NAME'}: {error}") from None
    return [*(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in settings.items()), *overrides]
