"""What models and strategies promise; a new one answers one of these.

m = samples in a micro-batch, V = shards in a step, W = processes, C x H x W = channels, height, width.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn

Batch = dict[str, Tensor]
"""Column name -> tensor [m, ...]; "label" is int64 [m], images are uint8 [m, C, H, W], tokens int64 [m, T]."""

Outputs = Any
"""What a model returns: a tensor, such as logits [m, classes], or a tuple, list, dict or dataclass of outputs; a leaf
may also be None or a number."""

Forward = Callable[[Batch], Outputs]
"""A model without its training side: a batch -> outputs."""


@dataclass(frozen=True)
class LossSum:
    """A sum over samples (or tokens), never a mean: sums can be added in any split, means cannot."""

    total: Tensor
    """Sum of the losses, 0-dim."""
    count: Tensor | int
    """How many it is the sum of: samples, or tokens that count."""
    sums: Mapping[str, Tensor] = field(default_factory=dict)
    """Further sums over the same samples, such as {"accuracy": number right}; logged as sum / count."""
    terms: Mapping[str, "LossSum"] = field(default_factory=dict)
    """Parts of the loss with counts of their own, such as {"boxes": LossSum(total, boxes)}: the loss is total / count
    and total / count of each, added up. `count` is then the number of samples, and Model.term_counts gives the terms'
    before the forward pass."""
    by_shard: Tensor | None = None
    """Totals per shard [V], on a step's result only; tells which shard a NaN came from."""
    is_counted: bool = False
    """On a step's result only: whether this process knows, without waiting for the device, that the count is not 0."""


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """What one forward and backward pass takes: a shard of a step, with the samples it holds."""

    step: int
    shard: int
    indices: tuple[int, ...]
    """Positions of its samples in the training split, [<= m]; empty only for a shard without samples."""
    batch: Batch
    ghost: bool = False
    """True on a rank without a shard in this step: it runs another's samples, and its result is discarded."""
    shards: int = 1
    """V, the same in every step."""
    present: frozenset[int] = frozenset()
    """The shards of this step, on all ranks, that hold samples (all V, but for the last step of an epoch)."""
    left_out: Mapping[int, str] = field(default_factory=dict)
    """Samples that could not be read, and why (data.on_bad_sample=skip); not among `indices`."""
    weights: Mapping[str, float] | None = None
    """Of the terms of the loss: samples of the step / what the term counts in it. None stands for 1."""
    term_counts: Mapping[str, float] = field(default_factory=dict)
    """What the terms count in this micro-batch, as Model.term_counts has told."""

    @property
    def is_void(self) -> bool:
        """Whether none of its samples could be read: it runs others in their place, and counts for nothing."""
        return bool(self.left_out) and not self.indices


@dataclass(frozen=True, kw_only=True)
class TensorPlan:
    """How the layers of a model may be split over processes that run it together."""

    styles: Mapping[str, str]
    """Name of a module, "*" standing for any number in it -> how it is split, in the words of transformers' tp_plan:
    colwise (by outputs), rowwise (by inputs), ..."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """What else must be dealt out evenly: {"attention heads": 32}."""


class Model(nn.Module, ABC):
    """A torch module whose forward takes a Batch and returns outputs such as logits [m, classes].

    A module `models/NAME.py` has `Config` and `build(config, spec) -> Model`; where it has them, also
    `tokenizer(config) -> Tokenizer`, `metrics(config, spec)`, and its own format: `save`, `read_back`.
    """

    _lockstep_initial: Callable[[Tensor], Tensor] | None = None
    """How a parameter or buffer that has no memory yet gets its first value; None where all have theirs."""

    _lockstep_notes: tuple[str, ...] = ()
    """What is said of the model when a run starts, a sentence each."""

    term_counts: Callable[[Batch], Mapping[str, float]] | None = None
    """What each of LossSum.terms counts in a batch; None for a loss without terms."""

    @abstractmethod
    def loss(self, outputs: Outputs, batch: Batch) -> LossSum:
        """Sum of the losses over the samples of `batch`, differentiable."""

    @abstractmethod
    def blocks(self) -> list[nn.Module]:
        """The parts that run one after the other, each entered once per forward pass: where randomness is
        reseeded, FSDP wraps and the pipeline cuts."""

    def tensor_plan(self) -> TensorPlan | None:
        """How its layers may be split by parallel.kind=tensor; None where they may not."""
        return None


class BufferNotes(Protocol):
    """Buffers that a forward pass changes."""

    @property
    def notes(self) -> list[str]:
        """Why those that change cannot be the same on any number of processes, or after a resume; a sentence each."""


class Strategy(Protocol):
    """How a model is spread; a module `parallel/NAME.py` has `Config` and `build(config, setting) -> Strategy`."""

    copies: tuple[int, ...]
    """The ranks that hold the same part of the model as this one, itself among them; known once it is placed."""
    buffer_updates: Sequence[BufferNotes]
    """What the steps so far have shown of the buffers that lie here; known once it is placed."""

    def place(self, model: Model, sample: Callable[[], Batch]) -> nn.Module:
        """Take a model, on every rank with the same weights, and return a module whose parameters are those that this
        rank optimises, as plain tensors under their names in the model: all of them, some of them, or their rows that
        lie here. `sample` fetches a batch such as training will bring, to learn shapes and costs from. May be called
        again with another model; where the model itself is not taken apart, also with another process group."""

    def owned(self, shards: int, present: frozenset[int]) -> Sequence[int | None]:
        """The shards that this rank runs in a step of which `present`, out of 0..shards-1, hold samples; None where it
        has none left but has to run along with others (see MicroBatch.ghost). Never empty."""

    def forward_backward(self, micro_batches: Sequence[MicroBatch]) -> LossSum:
        """Run a step's micro-batches of this rank (never none: see MicroBatch.ghost); on return every gradient
        is the sum over all of the step's samples in the whole world, and so is the loss."""

    def forward(self, batch: Batch) -> Outputs:
        """Outputs for a batch of this rank's own, in evaluation; every rank calls it equally often."""

    def clip(self, max_norm: float | None) -> Tensor:
        """The global gradient norm, 0-dim, scaled down to max_norm where it is larger; None only measures it."""

    def state(self) -> dict[str, Tensor]:
        """The weights and buffers that this rank holds, by their names in the model as it was before `place`: the
        live ones, to be read or written in place. Where it holds a part of a tensor, that is a DTensor."""

    def sharded(self, name: str, part: Tensor) -> Tensor:
        """What belongs to the placed module's parameter `name`, element by element (its moving average, its momentum),
        as the part of a whole that it is: a DTensor on the same memory, or the tensor itself where it is whole."""
