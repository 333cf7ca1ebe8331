"""Processes of this machine, without restarts: from a terminal, a script or a notebook."""

from pydantic import Field, field_validator

from lockstep.launch.launch_config import LaunchSection
from lockstep.launch.launchers._own_process import Note as Note


class Config(LaunchSection):
    """Processes on this machine, without restarts: what lockstep.train() uses."""

    max_restarts: int = Field(0, ge=0)
    """Always 0: the caller handles failures; launch.kind=local restarts."""

    @field_validator("nodes")
    @classmethod
    def _is_one(cls, nodes: int | str) -> int | str:
        if str(nodes) != "1":
            raise ValueError("should be 1: several machines need launch.kind=local or a scheduler's")
        return nodes

    @field_validator("max_restarts")
    @classmethod
    def _is_none(cls, restarts: int) -> int:
        if restarts:
            raise ValueError("should be 0: only launch.kind=local restarts processes")
        return restarts
