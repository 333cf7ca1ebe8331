"""Measurements of one process on this machine, from which strategies are forecast.

Block k reaches from the end of block k-1 to its own end, the last one to the loss.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from lockstep.core.distributed.bandwidth import Bandwidth


@dataclass(frozen=True, kw_only=True)
class Weight:
    name: str
    rows: int
    """Size of its first axis, along which FSDP shards."""
    bytes: int
    is_trained: bool
    block: int
    """The first block that uses it."""
    is_root: bool
    """Whether it is outside of all blocks, or used by several."""
    is_split: bool = False
    """Whether parallel.kind=tensor splits it."""
    is_added_by_row: bool = False
    """Whether it is a large embedding, of which ddp exchanges only the rows that a step has read."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """The cost of a block with one micro-batch."""

    saved_bytes: int
    """Activations that autograd keeps for the backward pass, without train.recompute."""
    handed_bytes: int
    """Its outputs, the last one's being the model's."""
    seconds: float
    """Time of its forward and backward pass, as a fraction of that of all blocks."""


@dataclass(frozen=True, kw_only=True)
class Seconds:
    fetch: float
    """Fetching and collating one micro-batch; 0 where data.workers do it."""
    passes: float
    """Forward and backward pass of one micro-batch."""
    update: float
    """Clipping, optimizer, moving average, for the whole model."""


@dataclass(frozen=True, kw_only=True)
class Measurements:
    device: str
    """"cpu" or "cuda"."""
    fixed_bytes: int
    """Memory of a process without a model: Python, torch, the data set."""
    build_bytes: int
    """Peak of building the model, the model included."""
    buffer_bytes: int
    weights: tuple[Weight, ...]
    blocks: tuple[Block, ...]
    optimizer_bytes: int
    """The optimizer's state for all trained weights."""
    pass_bytes: int
    """Peak of a forward and backward pass of the largest micro-batch, its gradients included."""
    step_bytes: int
    """Peak of whole steps of `step_shards` micro-batches, in one process without a copy for checkpoints."""
    step_shards: int
    recomputes: bool
    """Whether blocks keep only their inputs (train.recompute)."""
    working_bytes: int = 0
    """Memory of passes and steps beyond what can be computed: see calibrated()."""
    seconds: Seconds
    obstacles: dict[int, str]
    """Number of a block -> why a pipeline cannot cut before it."""
    uncuttable: str | None
    """Why a pipeline cannot cut this model at all."""
    split_counts: dict[str, int] = field(default_factory=dict)
    """Counts that parallel.kind=tensor has to divide, such as {"attention heads": 32}."""
    unsplittable: str | None = None
    """Why parallel.kind=tensor cannot split this model at all."""
    links: Bandwidth | None
    """Bandwidth between processes, if there are several."""

    def bytes_of(self, weights: Iterable[Weight], *, is_trained: bool = False) -> int:
        """Return the bytes of some weights, or of those among them that are trained."""
        return sum(w.bytes for w in weights if w.is_trained or not is_trained)

    @property
    def parameter_bytes(self) -> int:
        return self.bytes_of(self.weights)

    @property
    def gradient_bytes(self) -> int:
        return self.bytes_of(self.weights, is_trained=True)

    @property
    def bucket_bytes(self) -> int:
        """Bytes of the gradients in ddp's buckets."""
        return self.gradient_bytes - sum(w.bytes for w in self.weights if w.is_added_by_row)

    def kept_bytes(self, block: int) -> int:
        """Return the bytes of a block's activations that are kept until its backward pass."""
        if not self.recomputes:
            return self.blocks[block].saved_bytes
        return self.blocks[block - 1].handed_bytes if block else 0

    @property
    def optimizer_ratio(self) -> float:
        """Bytes of optimizer state per byte of a trained weight."""
        return self.optimizer_bytes / self.gradient_bytes if self.gradient_bytes else 0.0
