"""The base of launchers whose run lives in the launching process: local and spawn."""

import os
import platform
import signal
from collections.abc import Mapping
from typing import Any

import psutil
from pydantic import BaseModel, ConfigDict, Field

from lockstep.base.contracts import Launcher, Plan, Request
from lockstep.base.errors import LaunchError
from lockstep.launch.launch_config import LaunchSection


class Note(BaseModel):
    """Record of the launching process in job.json in the run's folder."""

    model_config = ConfigDict(strict=True)

    host: str = Field(max_length=1024)
    process: int = Field(gt=1, lt=2**31)
    began: float = Field(ge=0, allow_inf_nan=False)
    """Creation time, in seconds since 1970: process ids are reused."""


class OwnProcess(Launcher):
    """The job is this process, which supervises the workers: each with `threads` threads. By default no more than
    `shards` of them, as more would have no work."""

    def __init__(self, config: LaunchSection, *, threads: int, shards: int) -> None:
        self.config, self.threads, self.shards = config, threads, shards

    def plan(self, request: Request) -> Plan:
        """Plan the worker command and the number of workers. Raises LaunchError for more than GPUs."""
        from lockstep.launch.elastic.node import worker_plan  # noqa: PLC0415 (a config is checked without it)

        return worker_plan(self.config, request, threads=self.threads, shards=self.shards, endpoint=None)

    def note(self) -> dict[str, Any]:
        own = psutil.Process()
        return {"host": platform.node(), "process": own.pid, "began": own.create_time()}

    def status(self, note: Mapping[str, Any]) -> str:
        """Describe whether that process is alive, if it is on this machine."""
        if note["host"] != platform.node():
            return f"started on {note['host']} (process {note['process']}); run `lockstep status` there"
        return "does not run" if self.is_over(note) else f"runs here (process {note['process']})"

    def is_over(self, note: Mapping[str, Any], request: str = "ask") -> bool:
        """Return whether the process has ended; its id may have been reused. Raises LaunchError on another machine."""
        if note["host"] != platform.node():
            raise LaunchError(f"the run was started on {note['host']}: {request} there")
        try:
            return psutil.Process(note["process"]).create_time() != note["began"]
        except psutil.Error:
            return True

    def cancel(self, note: Mapping[str, Any]) -> str:
        if self.is_over(note, "cancel it"):
            raise LaunchError("the run has ended already")
        os.kill(note["process"], signal.SIGTERM)
        return f"signalled process {note['process']} to save and stop"
