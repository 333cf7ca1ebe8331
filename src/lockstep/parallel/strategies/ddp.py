"""Distributed data parallel: every rank holds the model and runs its own shards; DDP's buckets carry the sums.

S. Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training, VLDB 2020.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field

from lockstep.parallel.strategy_config import StrategySection


class Config(StrategySection):
    """Every process holds the whole model and runs its share of the shards."""

    CAN_RECHECK: ClassVar[bool] = True
    FOR_ANY_MODEL: ClassVar[Mapping[str, Any]] = {"find_unused": True}

    bucket_mb: float = Field(25.0, ge=1e-4, le=2**16)
    """Gradients are exchanged in buckets of about this many MiB."""
    find_unused: bool = False
    """Set when some parameters take no part in the loss (costs a walk over the graph per step)."""

    @property
    def state_copies(self) -> None:
        """Always None: each process holds a copy."""
        return None
