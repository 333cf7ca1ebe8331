"""Distributed data parallel: every rank holds the model and runs its own shards; DDP's buckets carry the sums.

S. Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training, VLDB 2020.
"""

from pydantic import Field

from lockstep.base.config import PluginSection


class Config(PluginSection):
    """Every process holds the whole model and runs its share of the shards."""

    bucket_mb: float = Field(25.0, ge=1e-4, le=2**16)
    """Gradients are exchanged in buckets of about this many MiB."""
    find_unused: bool = False
    """Set when some parameters take no part in the loss (costs a walk over the graph per step)."""
