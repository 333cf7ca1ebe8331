"""Forward and backward passes of micro-batches, each with its shard's seeds and the buffers of the step's start."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from lockstep.base.errors import ModelError
from lockstep.base.model_contracts import Batch, LossSum, MicroBatch, Model, Outputs
from lockstep.core.distributed.collectives import DisjointSum, all_gather_object
from lockstep.core.host.activity import progress
from lockstep.core.host.phases import phase
from lockstep.core.modules.buffers import BufferUpdates
from lockstep.core.modules.outputs import each, widened
from lockstep.core.modules.weight_watch import WeightWatch
from lockstep.core.numerics.checksum import checksum
from lockstep.core.numerics.loss import unweighted, weighted, with_gradient
from lockstep.core.numerics.precision import Precision
from lockstep.core.numerics.seeds import Randomness
from lockstep.core.reduction.tree import tree_sum

LOSS = "loss"
"""Key of a loss among checksums by parameter."""


class MicroBatches:
    """Runs a rank's micro-batches of a step, one after the other.

    `modules`: those whose buffers this rank updates, by name; all of the model's if not given. `has_all_weights`:
    whether this rank holds all of them, so that the loss may use some. `weights`: what a forward pass must not change;
    the model's parameters if not given.
    """

    current: MicroBatch
    """The micro-batch whose gradients arrive now."""

    def __init__(
        self,
        model: Model,
        randomness: Randomness,
        precision: Precision,
        *,
        modules: Mapping[str, nn.Module] | None = None,
        has_all_weights: bool = True,
        weights: Callable[[], Iterable[tuple[str, Tensor]]] | None = None,
    ) -> None:
        self.model, self.randomness, self.precision = model, randomness, precision
        self.has_all_weights = has_all_weights
        self.buffers = BufferUpdates(dict(model.named_modules()) if modules is None else modules)
        named = list(model.named_parameters())
        self.weights = WeightWatch((lambda: named) if weights is None else weights)
        self.sum_names: set[str] = set()
        """Names of the losses' further sums, as all ranks know them."""
        self.is_last = False
        """Whether it is the last one of this rank in the step."""
        self.checksums: dict[int, dict[object, list[Tensor]]] | None = None
        """Shard -> parameter, or LOSS -> checksums of what it gives; None where these are not wanted."""

    def note(self, key: object, tensors: Iterable[Tensor]) -> None:
        """Keep checksums of what the current micro-batch gives, if they are wanted."""
        if self.checksums is not None and not self.current.ghost:
            of_shard = self.checksums.setdefault(self.current.shard, {})
            of_shard.setdefault(key, []).extend(checksum(tensor.detach()) for tensor in tensors)

    def at(self, micro_batch: MicroBatch, *, returns: bool = False) -> None:
        """Set the current micro-batch, before its forward pass, and a backward pass that `returns` to it."""
        self.current = micro_batch
        self.randomness.at(micro_batch.step, micro_batch.shard, returns=returns)

    def outputs(self, micro_batch: MicroBatch, call: Callable[[Batch], Outputs]) -> Outputs:
        """Run the forward pass. A ghost changes nothing."""
        self.at(micro_batch)
        with phase("forward"), self.updating(micro_batch), self.precision.autocast():
            return call(micro_batch.batch)

    @contextmanager
    def updating(self, micro_batch: MicroBatch) -> Iterator[None]:
        """Surround a forward pass: it starts from the buffers of the step's start, and its updates are kept."""
        self.buffers.start_shard(None if micro_batch.ghost else micro_batch.shard)
        with self.weights.watching(micro_batch.step):
            yield
        if not micro_batch.ghost:
            self.buffers.end_shard(micro_batch.shard, samples=micro_batch.samples)

    def start_backward(self) -> None:
        """Reset buffers for recomputation, which has to read what the forward pass read."""
        if self.randomness.recomputes:
            self.buffers.restart(None if self.current.ghost else self.current.shard)

    def loss(self, micro_batch: MicroBatch, outputs: Outputs) -> LossSum:
        """Return the loss of outputs. Raises ModelError."""
        self.check_loss(outputs, micro_batch.batch)
        with phase("forward"):
            loss = weighted(self.model.loss(widened(outputs), micro_batch.batch), micro_batch)
            loss = with_gradient(loss, outputs)
        if not micro_batch.is_void:
            return loss
        # of no samples, with zero gradients for the same parameters
        return LossSum(loss.total * 0, loss.count * 0, {name: value * 0 for name, value in loss.sums.items()})

    def check_loss(self, outputs: Outputs, batch: Batch) -> None:
        """Raise ModelError where the loss uses weights that are split. Checks once, while weights are gathered."""
        if not self.has_all_weights:
            refuse_weights_in_loss(self.model, outputs, batch)
            self.has_all_weights = True

    def run(
        self,
        micro_batches: Sequence[MicroBatch],
        call: Callable[[Batch], Outputs],
        *,
        no_sync: Callable[[], AbstractContextManager[None]] = nullcontext,
        before_last_backward: Callable[[list[LossSum]], None] = lambda _: None,
    ) -> list[LossSum]:
        """Run forward and backward of each, all but the last inside `no_sync`. Returns the loss of each, which
        `before_last_backward` gets earlier; ignore a ghost's."""
        losses = []
        for micro_batch in micro_batches:
            self.is_last = micro_batch is micro_batches[-1]
            with nullcontext() if self.is_last else no_sync():
                loss = self.loss(micro_batch, self.outputs(micro_batch, call))
                losses.append(loss)
                self.note(LOSS, [loss.total, *(loss.sums[name] for name in sorted(loss.sums))])
                if self.is_last:
                    before_last_backward(losses)
                self.start_backward()
                with phase("backward"):
                    self.precision.scaled(loss.total).backward()
            progress()
        return losses

    def world_loss(self, micro_batches: Sequence[MicroBatch], losses: Sequence[LossSum]) -> "WorldLoss":
        """Start the sum of the losses over all shards, of which this rank has these."""
        pairs = zip(micro_batches, losses, strict=True)
        return WorldLoss(pairs, self.sum_names, step=micro_batches[0], device=losses[0].total.device)


def refuse_weights_in_loss(model: Model, outputs: Outputs, batch: Batch) -> None:
    """Raise ModelError where a model's loss uses weights, which evaluation of a sharded model does not gather."""
    with torch.enable_grad():
        if unweighted(model.loss(widened(each(Tensor.detach, outputs)), batch)).total.requires_grad:
            what = "the loss uses weights of its own, which a process that holds only a part of the model does not have"
            raise ModelError(f"{what}: use them in forward() instead, or use parallel.kind=ddp")


class DeviceNumber:
    """A number that a device computes, to be read without waiting for what is enqueued behind it."""

    def __init__(self, value: Tensor | float) -> None:
        self.value, self.is_copied = value, None
        if isinstance(value, Tensor):
            self.value = torch.empty_like(value, dtype=torch.float64, device="cpu", pin_memory=value.is_cuda)
            self.value.copy_(value.detach(), non_blocking=True)
        if isinstance(value, Tensor) and value.is_cuda:
            self.is_copied = torch.cuda.Event()
            self.is_copied.record()

    def read(self) -> float:
        if self.is_copied is not None:
            self.is_copied.synchronize()
        return float(self.value.numpy() if isinstance(self.value, Tensor) else self.value)


class WorldLoss:
    """The loss over all shards, each of which ran on one rank: totals and counts as float64, in the tree's order.

    Creating it starts the collective, which runs beside the backward pass; `result` waits for it. `names`: of further
    sums, as all ranks know them, to which those are added that a shard is the first to have. `step`: any micro-batch.
    """

    def __init__(
        self, losses: Iterable[tuple[MicroBatch, LossSum]], names: set[str], *, step: MicroBatch, device: torch.device
    ) -> None:
        self.own = [(each, loss) for each, loss in losses if not each.ghost]
        self.names, self.step, self.device = names, step, device
        self.counts = [DeviceNumber(loss.count) for _, loss in self.own]
        self.further = {name for _, loss in self.own for name in loss.sums} - names
        self.table = self._start()
        # on a CPU the table says whether a rank has further names; a device would have to be waited for to read it
        flag = torch.full((1,), float(bool(self.further)))
        self.flag = DisjointSum(flag) if device.type != "cpu" else None

    def _start(self) -> DisjointSum:
        """Start the sum of the table: total, count and further sums of each shard, 0 for those of other ranks; below
        them, a row that says whether a rank has further names."""
        table = torch.zeros(self.step.shards + 1, 2 + len(self.names), dtype=torch.float64, device=self.device)
        if self.device.type == "cpu":
            table[-1].fill_(float(bool(self.further)))
        zero = torch.zeros((), dtype=torch.float64, device=self.device)
        for micro_batch, loss in self.own:
            count = loss.count
            if not isinstance(count, Tensor):  # filled on the device: a copy of a number would synchronise
                count = torch.full((), count, dtype=torch.float64, device=self.device)
            row = [loss.total, count, *(loss.sums.get(name, zero) for name in sorted(self.names))]
            table[micro_batch.shard] = torch.stack([value.detach().to(torch.float64) for value in row])
        return DisjointSum(table)

    def result(self) -> LossSum:
        is_counted = any(count.read() > 0 for count in self.counts)
        table = self.table.result()
        if (table[-1] if self.flag is None else self.flag.result()).numpy()[0] > 0:
            self.names.update(*all_gather_object(sorted(self.further)))
            self.further = set()
            table = self._start().result()
        total, count, *rest = tree_sum(table, self.step.present).unbind()
        sums = dict(zip(sorted(self.names), rest, strict=True))
        return LossSum(total, count, sums, by_shard=table[:-1, 0], is_counted=is_counted)
