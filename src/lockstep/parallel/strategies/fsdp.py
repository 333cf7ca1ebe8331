"""Fully sharded data parallel: every rank holds some rows of every weight, and blocks are gathered when they run.

Y. Zhao et al., PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel, VLDB 2023; the second version,
`fully_shard`, by rows of each parameter.
"""

from collections.abc import Iterator
from typing import Any, ClassVar, Literal, Self

from pydantic import Field

from lockstep.base.errors import LaunchError
from lockstep.parallel.strategy_config import StrategySection


class Config(StrategySection):
    """Every process holds a part of each weight, its gradient and its optimizer state: 1/W of the memory of ddp, for
    gathering the weights in every forward and backward pass."""

    SPLITS_TENSORS: ClassVar[bool] = True
    FILLS: ClassVar[bool] = True

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

    def numeric(self, processes: int) -> dict[str, Any]:
        return {} if self.gather == "fp32" else {"gather": self.gather}

    def contradictions(self, precision: str) -> Iterator[tuple[str, str]]:
        if self.gather == "bf16" and precision != "bf16":
            what = f"weights gathered in bf16 are computed with in bf16, but train.precision={precision}"
            yield "gather", f"{what}; set train.precision=bf16 or parallel.gather=fp32"

    def group_size(self, processes: int) -> int:
        """Return the number of processes that share a model. Raises LaunchError."""
        if processes % self.replicas:
            raise LaunchError(f"parallel.replicas={self.replicas} does not divide the {processes} processes")
        return processes // self.replicas

    @property
    def state_copies(self) -> int:
        return self.replicas

    @property
    def process_multiple(self) -> int:
        return self.replicas

    def with_one_copy(self) -> Self:
        return self.model_copy(update={"replicas": 1})

    def fitted(self, processes: int) -> Self:
        """Leave out replicas that do not divide the number of processes."""
        return self.model_copy(update={"replicas": 1}) if processes % self.replicas else self
