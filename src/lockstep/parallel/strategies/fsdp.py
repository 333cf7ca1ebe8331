"""Fully sharded data parallel: every rank holds some rows of every weight, and gathers a block when it is its turn.

Y. Zhao et al., PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel, VLDB 2023; the second version,
`fully_shard`, by rows of each parameter.
"""

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from lockstep.base.config import PluginSection
from lockstep.parallel.strategies._torch_version import require_torch

FILLS = True
"""A model may come without its weights: this strategy asks for them."""


class Config(PluginSection):
    """Every process holds a part of each weight, its gradient and its optimizer state: 1/W of the memory of ddp, for
    gathering the weights in every forward and backward pass."""

    reshard: bool = True
    """Give a block's weights back after its forward pass and gather them again for the backward pass; false keeps them
    in between: less traffic, more memory."""
    gather: Literal["fp32", "bf16"] = "fp32"
    """The format in which weights are gathered. bf16 halves the traffic; weights then differ from those of other
    strategies, though not with the number of processes."""
    replicas: int = Field(1, ge=1, le=2**16)
    """The processes form so many groups, each with the whole model between its members (hybrid sharding): one per
    machine keeps the gathering inside of it."""
    offload: bool = False
    """Keep weights and optimizer in the CPU's memory between their uses (GPUs only)."""

    @model_validator(mode="after")
    def _torch_is_new_enough(self) -> Self:
        require_torch("2.13", self.kind)
        return self

    def numeric(self, _: int) -> dict[str, Any]:
        """The settings that change bits, for so many processes."""
        return {} if self.gather == "fp32" else {"gather": self.gather}
