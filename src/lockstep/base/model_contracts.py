"""Interfaces of models and strategies.

m = samples in a micro-batch, V = shards in a step, W = processes, C x H x W = channels, height, width.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from torch import Tensor, nn

Batch = dict[str, Tensor]
"""Column name -> tensor [m, ...]; "label" is int64 [m], images are uint8 [m, C, H, W], tokens int64 [m, T]."""

Outputs = Any
"""Output of a model: a tensor, such as logits [m, classes], or a tuple, list, dict or dataclass of outputs; leaves may
also be None or numbers."""

Cache = list[tuple[Tensor, Tensor]]
"""Keys and values of each layer of a decoder, [m, H, T, D]."""

Forward = Callable[[Batch], Outputs]
"""A model in inference: batch -> outputs."""


SAMPLES = "_samples"
"""Name of the number of samples in LossSum.sums, for a loss that counts tokens; tokens/s follow from it."""


@dataclass(frozen=True)
class LossSum:
    """A loss as a sum over samples or tokens, never a mean: the sums of micro-batches can be added, means cannot."""

    total: Tensor
    """Sum of the losses, 0-dim."""
    count: Tensor | int
    """Number of losses in `total`: samples, or tokens that are not ignored."""
    sums: Mapping[str, Tensor] = field(default_factory=dict)
    """Further sums over the same samples, such as {"accuracy": number correct}; logged as sum / count. Names that begin
    with _ are not logged: they are for Model.derived."""
    terms: Mapping[str, "LossSum"] = field(default_factory=dict)
    """Terms of the loss with their own counts, such as {"boxes": LossSum(total, boxes)}: the loss is total / count plus
    total / count of each term. `count` is then the number of samples, and Model.term_counts gives those of the terms
    before the forward pass."""
    by_shard: Tensor | None = None
    """On a step's result only: totals per shard [V], to find the shard that a NaN came from."""
    is_counted: bool = False
    """On a step's result only: whether a count of this rank is not 0; else another rank's may be."""


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """The samples of one forward and backward pass: a shard of a step."""

    step: int
    shard: int
    indices: tuple[int, ...]
    """Indices of its samples in the split, [<= m]; empty only for a shard without samples."""
    batch: Batch
    ghost: bool = False
    """True on a rank without a shard, which runs samples of another to join collectives; the result is discarded."""
    shards: int = 1
    """V, the same in every step."""
    present: frozenset[int] = frozenset()
    """The non-empty shards of this step on all ranks (all V, except in the last step of an epoch)."""
    left_out: Mapping[int, str] = field(default_factory=dict)
    """Samples that could not be read (data.on_bad_sample=skip) or are not to be (data.exclude), and why; not among
    `indices`."""
    weights: Mapping[str, float] | None = None
    """Per term of the loss: samples of the step / the term's count in the step. None stands for 1."""
    term_counts: Mapping[str, float] = field(default_factory=dict)
    """The terms' counts in this micro-batch, from Model.term_counts."""

    @property
    def samples(self) -> int:
        """Number of samples that run, also where none of them counts."""
        columns = self.batch.values() if isinstance(self.batch, Mapping) else ()
        return next((len(column) for column in columns if isinstance(column, Tensor)), len(self.indices))

    @property
    def is_void(self) -> bool:
        """Whether none of its samples could be read: it runs others instead and counts for nothing."""
        return bool(self.left_out) and not self.indices


@dataclass(frozen=True, kw_only=True)
class TensorPlan:
    """How the layers of a model can be split by tensor parallelism."""

    styles: Mapping[str, str]
    """Name of a module, "*" matching any number in it -> how it is split, in the terms of transformers' tp_plan:
    colwise (by outputs), rowwise (by inputs), ..."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """Further numbers that the number of processes has to divide: {"attention heads": 32}."""


@dataclass(frozen=True, kw_only=True)
class Averaged:
    """A parameter that follows another one, as the model's file declares."""

    copy: str
    source: str
    momentum: float
    """copy = momentum * copy + (1 - momentum) * source, ..."""
    every: int = 1
    """... after every so many steps."""


class Model(nn.Module, ABC):
    """A torch module whose forward takes a Batch and returns outputs such as logits [m, classes].

    `models/NAME.py` defines `Config` and `build(config, spec) -> Model`, and optionally the functions in
    `contracts.HOOKS`.
    """

    _lockstep_initial: Callable[[Tensor], Tensor] | None = None
    """Gives a parameter or buffer without memory its initial value; None where all have theirs."""

    _lockstep_averages: tuple[Averaged, ...] = ()
    """Parameters that follow others; they are not trained."""

    _lockstep_notes: tuple[str, ...] = ()
    """Sentences about the model that are shown when a run starts."""

    term_counts: Callable[[Batch], Mapping[str, float]] | None = None
    """The count of each of LossSum.terms in a batch; None for a loss without terms."""

    attention_width: int = 0
    """Heads of a language model times the width of one, summed over its layers, as far as known."""
    CACHES: ClassVar[bool] = False
    """Whether it is a language model that has `decode`."""
    SLIDES: ClassVar[bool] = False
    """Whether it goes on beyond the tokens that it was trained with: the last ones of these are then read anew."""
    longest: int | None = None
    """Number of tokens that a language model has positions for; None where unknown."""

    @abstractmethod
    def loss(self, outputs: Outputs, batch: Batch) -> LossSum:
        """Sum the losses over the samples of `batch`, differentiably."""

    @abstractmethod
    def blocks(self) -> list[nn.Module]:
        """List the modules that run in sequence, each entered once per forward pass: random generators are reseeded
        there, FSDP wraps them, and the pipeline cuts between them."""

    def derived(self, means: Mapping[str, float]) -> Mapping[str, float]:
        """Compute further values from the means over a split ("loss" and LossSum.sums), such as a perplexity."""
        return {}

    def renamed(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Convert weights of another implementation to this one's names and layout; leave others as they are."""
        return weights

    def decode(self, tokens: Tensor, mask: Tensor, cache: Cache | None) -> tuple[Tensor, Cache]:
        """Read further tokens int64 [m, t] -> logits of those that follow the last ones [m, V], and the new cache. Only
        models with CACHES have it.

        `mask`, bool [m, T], tells which of all T tokens that were read, these included, are real; others are padding
        before a row's first token.
        """
        raise NotImplementedError

    def tensor_plan(self) -> TensorPlan | None:
        """Return how parallel.kind=tensor can split the layers; None where it cannot."""
        return None


class BufferNotes(Protocol):
    """Buffers that a forward pass changes."""

    @property
    def notes(self) -> list[str]:
        """Sentences on why changed buffers depend on the number of processes, or differ after a resume."""

    def keep_step(self) -> None:
        """Keep the values of a step that is complete."""

    def undo_step(self) -> None:
        """Restore the values of the start of a step that has failed."""


class Strategy(Protocol):
    """How a model is spread over processes; `parallel/strategies/_NAME.py` defines `build` (docs/architecture.md)."""

    copies: tuple[int, ...]
    """The ranks that hold the same weights as this one, including itself; set by `place`."""
    buffer_updates: Sequence[BufferNotes]
    """Records of the changed buffers on this rank in the steps so far; set by `place`."""

    touched_rows: Mapping[Tensor, Tensor]
    """Gradient -> numbers of the rows outside of which it is zero in this step; not for other gradients."""

    def place(self, model: Model, sample: Callable[[], Batch]) -> nn.Module:
        """Spread a model that has the same weights on every rank; return a module with the parameters that this rank
        optimises.

        They are plain tensors under their names in the model: all of them, some, or this rank's rows of them. `sample`
        loads a batch like those of training, to measure shapes and costs. May be called again with another model and,
        by strategies that leave the model whole, with another process group.
        """

    def owned(self, shards: int, present: frozenset[int]) -> Sequence[int | None]:
        """List the shards that this rank runs in a step whose non-empty shards, out of 0..shards-1, are `present`.
        Never empty: None stands for a ghost (see MicroBatch.ghost)."""

    def forward_backward(self, micro_batches: Sequence[MicroBatch]) -> LossSum:
        """Run this rank's micro-batches of a step, at least one. On return gradients and loss are sums over the step's
        samples on all ranks."""

    def forward(self, batch: Batch) -> Outputs:
        """Run a batch of this rank in evaluation; every rank calls it equally often."""

    def norm(self) -> Tensor:
        """Return the global norm of the step's gradients, 0-dim; every rank calls it."""

    def state(self) -> dict[str, Tensor]:
        """Return the live weights and buffers of this rank, by their names in the model before `place`; a shard is a
        DTensor."""

    def sharded(self, name: str, part: Tensor) -> Tensor:
        """Wrap a tensor that belongs to the placed module's parameter `name`, such as its moving average, as the shard
        that it is: a DTensor on the same memory, or the tensor itself where the parameter is whole."""
