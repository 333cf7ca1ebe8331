"""Strategies that replicate the model: their base class, and one whose passes the caller may run."""

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lockstep.base.model_contracts import Batch, LossSum, MicroBatch, Model, Outputs
from lockstep.core.distributed.process_group import world_group
from lockstep.core.host.activity import waiting_in
from lockstep.core.host.malloc import keep_freed_memory
from lockstep.core.host.phases import phase
from lockstep.core.modules.buffers import BufferUpdates
from lockstep.core.modules.outputs import widened
from lockstep.core.numerics.precision import Precision
from lockstep.core.numerics.seeds import Randomness
from lockstep.core.reduction.all_reduce import AllReduce
from lockstep.core.reduction.gradient_norm import gradients, row_squares
from lockstep.core.reduction.tree import Shards, contiguous, contiguous_by_rank
from lockstep.parallel.accumulation import Accumulation
from lockstep.parallel.embedding_rows import EmbeddingRows, large_embeddings
from lockstep.parallel.micro_batches import MicroBatches, WorldLoss


class Replicated:
    """Evaluation, gradient norm and state of a model that is replicated on every rank."""

    LEAVES_LAST: ClassVar[bool] = True
    """See Accumulation."""
    passes: MicroBatches
    accumulation: Accumulation
    """Without `exact` it has no parameters: gradients add up in p.grad."""
    embedding_rows: EmbeddingRows
    """Parameters that are neither in `accumulation` nor in DDP's buckets."""

    def __init__(self, randomness: Randomness, precision: Precision, *, exact: bool) -> None:
        self.randomness, self.precision, self.exact = randomness, precision, exact
        self.copies: tuple[int, ...] = ()
        self.hooks: list[RemovableHandle] = []
        """Hooks in the placed model."""
        self.runners: tuple[int, ...] | None = None
        """The ranks that run shards, in another order than usual, while a step is run once more."""
        self._all_reduces: dict[tuple[int, Shards, tuple[int, ...] | None], AllReduce] = {}

    def place(self, model: Model, sample: Callable[[], Batch]) -> nn.Module:
        """Prepare the model; its own parameters are optimised. May be called again."""
        self.release()
        self._all_reduces.clear()
        self.runners = None
        vars(self).pop("all_reduce", None)  # it would keep the process group of an earlier placing
        if self.precision.device.type == "cpu":
            keep_freed_memory()
        self.model = model
        self.copies = tuple(range(dist.get_world_size()))
        self.parameters = list(model.parameters())
        self.passes = MicroBatches(model, self.randomness, self.precision)
        rows = EmbeddingRows(() if self.randomness.compiles else large_embeddings(model), self.passes)
        accumulated = [p for p in self.parameters if p not in rows.gradients] if self.exact else []
        self.accumulation = Accumulation(accumulated, self.passes, leaves_last=self.LEAVES_LAST)
        self.embedding_rows, self.hooks = rows, self.accumulation.hooks + rows.hooks
        return model

    def release(self) -> None:
        while self.hooks:
            self.hooks.pop().remove()

    def owned(self, shards: int, present: Shards) -> Sequence[int | None]:
        return self.owned_by(None, shards, present)

    def owned_by(self, runners: Sequence[int] | None, shards: int, present: Shards) -> Sequence[int | None]:
        """Return what `owned` does, where the shards are shared out to `runners` in this order."""
        runners, rank = range(dist.get_world_size()) if runners is None else runners, dist.get_rank()
        if rank not in runners:
            return [None]
        return contiguous(runners.index(rank), len(runners), shards=shards, present=present) or [None]

    def all_reduce_of(self, shards: int, present: Shards, group: dist.ProcessGroup) -> AllReduce:
        """Return the all-reduce of a step; cached, since a run has two kinds of steps, full and ragged."""
        if (key := (shards, present, self.runners)) not in self._all_reduces:
            runners = range(group.size()) if self.runners is None else self.runners
            shares = contiguous_by_rank(len(runners), shards)
            own = dict(zip(runners, shares, strict=True))
            owned = [own.get(rank, frozenset[int]()) for rank in range(group.size())]
            self._all_reduces[key] = AllReduce(owned, present, group)
        return self._all_reduces[key]

    @property
    def buffer_updates(self) -> Sequence[BufferUpdates]:
        return [self.passes.buffers]

    @property
    def touched_rows(self) -> Mapping[Tensor, Tensor]:
        return self.embedding_rows.touched

    def forward(self, batch: Batch) -> Outputs:
        """Return the outputs, without gradients; fp32 where autocast gave half precision. Buffers stay as they are."""
        with torch.no_grad(), self.precision.autocast(), self.passes.buffers.unchanged():
            return widened(self.model(batch))

    def norm(self) -> Tensor:
        return row_squares(gradients(self.parameters), self.touched_rows).sum().sqrt()

    def state(self) -> dict[str, Tensor]:
        return self.model.state_dict()

    def sharded(self, name: str, part: Tensor) -> Tensor:
        return part


class Stepwise(Replicated):
    """The caller may run the passes, and starts and ends steps and micro-batches: a step is start_step, then start and
    backward for each of this rank's micro-batches, then end_step, which exchanges the gradients."""

    LEAVES_LAST: ClassVar[bool] = False

    def start_step(self, step: MicroBatch) -> None:
        self.all_reduce = self.all_reduce_of(step.shards, step.present, world_group())
        self.accumulation.start_step(self.all_reduce)
        self.embedding_rows.start_step(self.all_reduce)
        self.passes.buffers.start_step(self.all_reduce)

    def start(self, micro_batch: MicroBatch) -> None:
        """Prepare a forward pass: its seeds, and the buffers of the step's start."""
        self.passes.at(micro_batch)
        self.passes.buffers.start_shard(micro_batch.shard)

    def backward(self, loss: LossSum) -> None:
        """Add the gradients of the micro-batch that was started last."""
        micro_batch = self.passes.current
        self.passes.buffers.end_shard(micro_batch.shard, samples=micro_batch.samples)
        with phase("backward"):
            self.precision.scaled(loss.total).backward()

    def end_step(self, step: MicroBatch, losses: Sequence[tuple[MicroBatch, LossSum]]) -> LossSum:
        """Sum gradients, buffers and losses over all ranks; `losses`: of this rank's micro-batches, perhaps none."""
        world_loss = WorldLoss(losses, self.passes.sum_names, step=step, device=self.parameters[0].device)
        self.passes.buffers.end_step()
        with phase("exchange"), waiting_in("the gradient exchange"), torch.no_grad():
            for parameter, total in self.accumulation.totals(self.all_reduce):
                parameter.grad = total
            self.embedding_rows.reduce(self.all_reduce)
        return world_loss.result()

    def forward_backward(self, micro_batches: Sequence[MicroBatch]) -> LossSum:
        step = micro_batches[0]
        self.start_step(step)
        losses = self.passes.run(micro_batches, self.model)
        return self.end_step(step, list(zip(micro_batches, losses, strict=True)))
