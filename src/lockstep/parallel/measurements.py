"""What a strategy can know of a config before it runs: what one process on this machine has measured.

m = samples of a micro-batch; block k goes from the end of block k-1 to its own end, the last one to the loss.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from lockstep.base import storage
from lockstep.core.distributed.bandwidth import Bandwidth


@dataclass(frozen=True, kw_only=True)
class Weight:
    name: str
    rows: int
    """Along its first axis, by which FSDP cuts."""
    bytes: int
    is_trained: bool
    block: int
    """The first block that uses it."""
    is_root: bool
    """Whether it lies outside of all blocks, or is shared by several."""
    is_split: bool = False
    """Whether parallel.kind=tensor leaves each process a part of it."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """What a block costs with one micro-batch."""

    saved_bytes: int
    """What autograd keeps of it for the backward pass, without train.recompute."""
    handed_bytes: int
    """What it hands to the next one; of the last one the outputs."""
    seconds: float
    """Its forward and backward pass's part of those of all blocks together, which is 1."""


@dataclass(frozen=True, kw_only=True)
class Seconds:
    fetch: float
    """Of one micro-batch, from the data to a batch; 0 where data.workers do it."""
    passes: float
    """Forward and backward pass of one micro-batch."""
    update: float
    """Clipping, optimizer, moving average, for the whole model."""


@dataclass(frozen=True, kw_only=True)
class Measurements:
    """All that one process has measured."""

    device: str
    """"cpu" or "cuda"."""
    fixed_bytes: int
    """Python, torch, the data set: what a process holds before it has a model."""
    build_bytes: int
    """The most that building the model takes, the model included."""
    buffer_bytes: int
    weights: tuple[Weight, ...]
    blocks: tuple[Block, ...]
    optimizer_bytes: int
    """The optimizer's state for all trained weights, as it lies there."""
    pass_bytes: int
    """The most that a forward and backward pass of the largest micro-batch takes, with all the gradients it leaves."""
    step_bytes: int
    """The most that whole steps take, in one process that holds no copy for checkpoints, ..."""
    step_shards: int
    """... with so many micro-batches."""
    recomputes: bool
    """Whether blocks keep only what they are given (train.recompute)."""
    working_bytes: int = 0
    """What passes and steps need beyond the parts that can be counted: see calibrated()."""
    seconds: Seconds
    obstacles: dict[int, str]
    """Place of a cut (before block 1..) -> why a pipeline cannot cut there."""
    uncuttable: str | None
    """Why a pipeline cannot cut this model at all."""
    split_counts: dict[str, int] = field(default_factory=dict)
    """What parallel.kind=tensor has to divide, such as {"attention heads": 32}."""
    unsplittable: str | None = None
    """Why it cannot split this model at all."""
    links: Bandwidth | None
    """Where other processes took part."""

    def bytes_of(self, weights: Iterable[Weight], *, is_trained: bool = False) -> int:
        """Bytes of some weights, or of those among them that are trained."""
        return sum(w.bytes for w in weights if w.is_trained or not is_trained)

    @property
    def parameter_bytes(self) -> int:
        return self.bytes_of(self.weights)

    @property
    def gradient_bytes(self) -> int:
        """A gradient of every weight that is trained."""
        return self.bytes_of(self.weights, is_trained=True)

    def kept_bytes(self, block: int) -> int:
        """What is kept of a block until its backward pass."""
        if not self.recomputes:
            return self.blocks[block].saved_bytes
        return self.blocks[block - 1].handed_bytes if block else 0

    def inner_bytes(self, block: int) -> int:
        """What comes to it while its backward pass runs."""
        return self.blocks[block].saved_bytes if self.recomputes else 0

    @property
    def optimizer_ratio(self) -> float:
        """Bytes of optimizer state per byte of a trained weight."""
        return self.optimizer_bytes / self.gradient_bytes if self.gradient_bytes else 0.0

    def write(self, path: Path) -> None:
        storage.write(path, json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> "Measurements":
        found = json.loads(path.read_text(encoding="utf-8"))
        return cls(
            **{
                **found,
                "weights": tuple(Weight(**each) for each in found["weights"]),
                "blocks": tuple(Block(**each) for each in found["blocks"]),
                "seconds": Seconds(**found["seconds"]),
                "obstacles": {int(place): why for place, why in found["obstacles"].items()},
                "links": Bandwidth(**found["links"]) if found["links"] else None,
            }
        )
