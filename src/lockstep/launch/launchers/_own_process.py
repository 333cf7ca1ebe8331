"""What launchers share whose run lives and ends with the process that has launched it."""

import os
import platform
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
from pydantic import BaseModel, ConfigDict, Field

from lockstep.base.errors import LaunchError


class Note(BaseModel):
    """What is noted of it in the run's folder."""

    model_config = ConfigDict(strict=True)

    host: str = Field(max_length=1024)
    process: int = Field(gt=1, lt=2**31)
    began: float = Field(ge=0, allow_inf_nan=False)
    """Seconds since 1970: another process may get the same number later."""


class OwnProcess:
    """The job is this process, which looks after the others."""

    def note(self) -> dict[str, Any]:
        """This process, so that another of the same number is not taken for it."""
        own = psutil.Process()
        return {"host": platform.node(), "process": own.pid, "began": own.create_time()}

    def status(self, note: Mapping[str, Any]) -> str:
        """Whether that process is alive, as far as can be seen from here."""
        if note["host"] != platform.node():
            return f"started on {note['host']} (process {note['process']}); ask there whether it still runs"
        alive = _alive(note)
        return f"runs here (process {note['process']})" if alive else "does not run"

    def cancel(self, note: Mapping[str, Any]) -> str:
        if note["host"] != platform.node():
            raise LaunchError(f"the run was started on {note['host']}: cancel it there")
        if not _alive(note):
            raise LaunchError("the run has ended already")
        os.kill(note["process"], signal.SIGTERM)
        return f"asked process {note['process']} to save and end"

    def output(self, note: Mapping[str, Any], logs: Path) -> Path:
        """What rank 0 has said: the terminal itself is not kept."""
        return logs / "rank-0.log"


def _alive(note: Mapping[str, Any]) -> bool:
    """Whether the process is still the one that was noted, and not another of the same number."""
    try:
        return psutil.Process(note["process"]).create_time() == note["began"]
    except psutil.Error:
        return False
