"""The base of launchers whose run lives in the launching process: local and spawn."""

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
    """Record of the launching process in job.json in the run's folder."""

    model_config = ConfigDict(strict=True)

    host: str = Field(max_length=1024)
    process: int = Field(gt=1, lt=2**31)
    began: float = Field(ge=0, allow_inf_nan=False)
    """Creation time, in seconds since 1970: process ids are reused."""


class OwnProcess:
    """The job is this process, which supervises the workers."""

    def note(self) -> dict[str, Any]:
        own = psutil.Process()
        return {"host": platform.node(), "process": own.pid, "began": own.create_time()}

    def status(self, note: Mapping[str, Any]) -> str:
        """Describe whether that process is alive, if it is on this machine."""
        if note["host"] != platform.node():
            return f"started on {note['host']} (process {note['process']}); run `lockstep status` there"
        alive = _alive(note)
        return f"runs here (process {note['process']})" if alive else "does not run"

    def is_over(self, note: Mapping[str, Any]) -> bool:
        if note["host"] != platform.node():
            raise LaunchError(f"the run was started on {note['host']}: ask there")
        return not _alive(note)

    def cancel(self, note: Mapping[str, Any]) -> str:
        if note["host"] != platform.node():
            raise LaunchError(f"the run was started on {note['host']}: cancel it there")
        if not _alive(note):
            raise LaunchError("the run has ended already")
        os.kill(note["process"], signal.SIGTERM)
        return f"signalled process {note['process']} to save and stop"

    def output(self, note: Mapping[str, Any], logs: Path) -> Path:
        """Return rank 0's log; what was on the terminal is not kept."""
        return logs / "rank-0.log"


def _alive(note: Mapping[str, Any]) -> bool:
    """Return whether the process still runs, and its id was not reused."""
    try:
        return psutil.Process(note["process"]).create_time() == note["began"]
    except psutil.Error:
        return False
