"""One process: the plain loop that every other strategy must equal."""

from lockstep.base.config import PluginSection


class Config(PluginSection):
    """One process runs every shard."""
