"""Processes on this machine, or on several that are started by hand, through PyTorch's elastic agent."""

import os
import platform
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from lockstep.agent.meeting import Meeting
from lockstep.agent.node import Node, plan_of
from lockstep.agent.section import LaunchSection
from lockstep.contracts import Plan, Request
from lockstep.errors import LaunchError


class Config(LaunchSection):
    """Processes on this machine, or on several, each started by hand with --rendezvous and --node-rank."""


class Local:
    """This machine."""

    def __init__(self, config: Config, *, threads: int, shards: int) -> None:
        self.config, self.threads, self.shards = config, threads, shards

    def plan(self, request: Request) -> Plan:
        """The worker command and how many of it; raises LaunchError for more than there are GPUs, or machines."""
        if self.config.min_nodes > 1:
            raise LaunchError(
                f"launch.nodes={self.config.nodes}: run the same command on each machine with --node-rank 0 (1, ...) "
                f"and --rendezvous HOST:PORT, such as --rendezvous {platform.node()}:29400 where this one is node 0"
            )
        return plan_of(self.config, request, threads=self.threads, shards=self.shards, endpoint=None)

    def run(self, plan: Plan, logs: Path) -> int:
        """Run the plan to its end, over restarts, and return the exit code: 0, or the one of the first that failed.

        Rank 0 writes to the terminal, the others to logs/rank-N.log. Raises Interrupted after SIGINT or SIGTERM,
        once every process has ended.
        """
        with Meeting(None, 0, self.config) as meeting:
            meeting.settle(logs.parent)
            return Node(meeting, plan, logs).run()

    def note(self) -> dict[str, Any]:
        """This process, which looks after the others."""
        own = psutil.Process()
        return {"host": platform.node(), "process": own.pid, "began": own.create_time()}

    def status(self, note: Mapping[str, Any]) -> str:
        """Whether that process is alive, as far as can be seen from here."""
        if note["host"] != platform.node():
            return f"started on {note['host']} (process {note['process']}); ask there whether it still runs"
        alive = _alive(note)
        return f"runs here (process {note['process']})" if alive else "does not run"

    def cancel(self, note: Mapping[str, Any]) -> str:
        """Send it SIGTERM."""
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


def build(config: Config, *, threads: int, shards: int) -> Local:
    """The launcher; `threads` is how many each process may use, `shards` how many processes can find work."""
    return Local(config, threads=threads, shards=shards)
