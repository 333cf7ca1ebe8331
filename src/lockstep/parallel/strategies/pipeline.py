"""Pipeline parallelism: every process holds some of the model's blocks, and micro-batches run through all of them.

Y. Huang et al., GPipe, NeurIPS 2019; D. Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters
Using Megatron-LM, SC 2021 (1F1B, interleaved).
"""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field

from lockstep.base.errors import LaunchError
from lockstep.parallel.strategy_config import StrategySection


class Config(StrategySection):
    """Every process holds some of the model's blocks: weights never travel, only what one block gives the next."""

    FILLS: ClassVar[bool] = True
    SHARES_SHARDS: ClassVar[bool] = True
    HAS_EQUAL_WORK: ClassVar[bool] = False

    stages: Annotated[int, Field(ge=1, le=2**16)] | Literal["auto"] = "auto"
    """Processes that share a model; the others form replicas of it. auto: as many of the processes as the model has
    blocks for."""
    schedule: Literal["1f1b", "gpipe", "interleaved"] = "1f1b"
    """gpipe: all forward passes, then all backward passes; 1f1b: a backward pass as soon as it can be, so that fewer
    activations are held; interleaved: each process holds `chunks` runs of blocks, and waits less."""
    chunks: int = Field(2, ge=1, le=2**10)
    """Runs of blocks per process of the interleaved schedule."""
    cut: tuple[int, ...] | Literal["auto"] = "auto"
    """The numbers of the blocks, from 0, before which the model is cut. auto: by measured time."""

    @property
    def stages_per_process(self) -> int:
        return self.chunks if self.schedule == "interleaved" else 1

    def group_size(self, processes: int, blocks: int) -> int:
        """Return the number of processes that share a model of so many blocks. Raises LaunchError."""
        if self.stages == "auto":
            most = max(1, blocks // self.stages_per_process)
            return max(size for size in range(1, most + 1) if processes % size == 0)
        if processes % self.stages:
            raise LaunchError(f"parallel.stages={self.stages} does not divide the {processes} processes")
        return self.stages

    def num_micro_batches(self, shards: int, group_size: int) -> int:
        """Return the number of micro-batches that a replica with so many shards runs, ghosts included: the schedules
        need at least one for each stage, and interleaved a multiple."""
        count = max(shards, group_size)
        return -(-count // group_size) * group_size if self.schedule == "interleaved" else count

    @property
    def process_multiple(self) -> int:
        stages = self.stages if self.cut == "auto" else len(self.cut) + 1
        return 1 if stages == "auto" else stages

    def fitted(self, processes: int) -> Self:
        """Use automatic stages where those of the config do not divide the number of processes."""
        is_odd = processes % self.process_multiple
        return self.model_copy(update={"stages": "auto", "cut": "auto"}) if is_odd else self
