"""Processes on this machine, or on several that are started by hand."""

from lockstep.launch.launch_config import LiveLaunchSection
from lockstep.launch.launchers._own_process import Note as Note


class Config(LiveLaunchSection):
    """Processes on this machine, or on several, each started by hand with --rendezvous and --node-rank."""
