"""Processes on this machine, or on several that are started by hand, through PyTorch's elastic agent."""

from typing import Literal, Self

from pydantic import Field, model_validator

from lockstep.base.config import MANY
from lockstep.launch.launch_config import LaunchSection
from lockstep.launch.launchers._own_process import Note as Note


class Config(LaunchSection):
    """Processes on this machine, or on several, each started by hand with --rendezvous and --node-rank."""

    recovery: Literal["restart", "live"] = "restart"
    """After the loss of a process: restart all from the newest checkpoint; or live: the others redo the step without
    it and go on, until it is back (one machine, parallel.kind=ddp)."""
    heartbeat_seconds: float = Field(1.0, ge=0.2, le=MANY)
    """With live recovery, a process that is stopped for this long counts as lost."""

    @model_validator(mode="after")
    def _is_on_one_machine(self) -> Self:
        if self.recovers_live and str(self.nodes) != "1":
            raise ValueError(f"recovery=live is for one machine so far: set recovery=restart for nodes={self.nodes}")
        return self

    @property
    def recovers_live(self) -> bool:
        """Whether training goes on where a process is lost."""
        return self.recovery == "live"
