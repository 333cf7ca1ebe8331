"""PyTorch's tensor parallelism, with gradients added in the shards' tree."""

from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from lockstep.base.errors import LaunchError, ModelError
from lockstep.base.model_contracts import Batch, LossSum, MicroBatch, Model
from lockstep.core.distributed.collectives import all_reduce_each, raise_on_all_ranks
from lockstep.core.modules.buffers import BufferUpdates, borrowed
from lockstep.core.modules.dtensors import Held, part_of
from lockstep.core.numerics.precision import Precision
from lockstep.core.numerics.seeds import Randomness
from lockstep.core.reduction.all_reduce import AllReduce
from lockstep.core.reduction.gradient_norm import GradientPieces
from lockstep.core.reduction.shard_assignment import contiguous
from lockstep.core.reduction.tree import Shards
from lockstep.parallel.accumulation import Accumulation
from lockstep.parallel.micro_batches import MicroBatches, reduced_loss
from lockstep.parallel.random_ops import draws
from lockstep.parallel.round_robin_forward import in_turn
from lockstep.parallel.sharded import Sharded
from lockstep.parallel.strategies.tensor import Config
from lockstep.parallel.tensor_plan import is_split, planned, split_layers, summed_modules


class TensorParallel(Sharded):
    """PyTorch's tensor parallelism, with gradients added in the shards' tree over the replicas.

    Every rank of a group runs the same shards. What is not split is computed by all of them, from the same bits.
    """

    def __init__(self, config: Config, randomness: Randomness, precision: Precision) -> None:
        super().__init__(randomness, precision)
        self.config = config

    def place(self, model: Model, sample: Callable[[], Batch]) -> nn.Module:
        """Split the model's layers; returns this rank's parts. Raises LaunchError and ModelError."""
        self.take(model)
        with raise_on_all_ranks():
            size = self._size()
            styles = planned(model, size, dist.get_world_size())
            batch = sample()
            drawn = self._draws(model, batch)
        mesh = init_device_mesh(
            self.device.type, (dist.get_world_size() // size, size), mesh_dim_names=("replicate", "tensor")
        )
        self.replica, self.across, self.within = mesh["replicate"].get_local_rank(), *mesh.get_all_groups()
        self.copies = tuple(dist.get_process_group_ranks(self.across))
        split_layers(model, mesh["tensor"], styles)
        parts = self._draws(model, batch)
        with raise_on_all_ranks():
            self._check_draws(drawn, parts)
        self._hold(summed_modules(model, styles))
        return Held(model, self.parts)

    def _size(self) -> int:
        world = dist.get_world_size()
        size = world if self.config.size == "all" else self.config.size
        if world % size:
            raise LaunchError(
                f"parallel.size={size} does not divide the {world} processes: set launch.processes to a multiple of "
                f"{size}, or parallel.size to {' or '.join(str(n) for n in range(1, world + 1) if world % n == 0)}"
            )
        return size

    def _draws(self, model: Model, batch: Batch) -> list[str]:
        """What a forward pass in training draws at random."""
        with self.precision.autocast(), borrowed(model):
            return draws(lambda: model(batch))

    def _check_draws(self, whole: list[str], parts: list[str]) -> None:
        """Ranks draw the same numbers: right where all hold the same, wrong where each has heads of its own."""
        first = next((pair for pair in zip(whole, parts, strict=False) if pair[0] != pair[1]), None)
        if first is not None or len(whole) != len(parts):
            where = f" ({first[0]} of the whole model, {first[1]} of a part)" if first else ""
            raise ModelError(
                f"the model drops out inside of what is split{where}, where the processes would all draw the same "
                "mask: set attention_dropout, and whatever else drops out inside of attention and MLP, to 0 in the "
                "model's config.json, or use parallel.kind=fsdp"
            )

    def _hold(self, summed: set[str]) -> None:
        """Take this rank's parts of the split model."""
        held = dict(self.model.named_parameters())
        self.whole = {name: p if is_split(p) else part_of(p) for name, p in held.items()}
        self.parts = {name: nn.Parameter(part_of(p), requires_grad=p.requires_grad) for name, p in held.items()}
        self.part_of = {parameter: self.parts[name] for name, parameter in held.items()}
        self.summed = [self.parts[name] for name in held if name in summed and held[name].requires_grad]
        cut = [name for name, parameter in held.items() if is_split(parameter)]
        self.norm = GradientPieces(cut, group=self.within, device=self.device)
        self.passes = MicroBatches(self.model, self.randomness, self.precision)
        self.accumulation = Accumulation(held.values(), self.passes, leaves_last=False)

    @property
    def buffer_updates(self) -> Sequence[BufferUpdates]:
        """All: every rank holds them whole."""
        return [self.passes.buffers]

    def owned(self, shards: int, present: Shards) -> Sequence[int | None]:
        """This rank's replica's: the same on all of its processes."""
        return contiguous(self.replica, self.across.size(), shards=shards, present=present) or [None]

    def forward_backward(self, micro_batches: Sequence[MicroBatch]) -> LossSum:
        """Run the replica's shards, all of its ranks in step; then the replicas add up their sums."""
        present, shards, replicas = micro_batches[0].present, micro_batches[0].shards, self.across.size()
        every = frozenset(range(shards))
        owners = [frozenset(contiguous(r, replicas, shards=shards, present=every)) for r in range(replicas)]
        exchange = AllReduce(owners, present, self.across)
        self.accumulation.start_step(exchange)
        self.passes.buffers.start_step(exchange)
        losses = self.passes.run(micro_batches, self.model)
        for parameter, total in self.accumulation.totals(exchange):
            self.part_of[parameter].grad = total
        if self.within.size() > 1:
            all_reduce_each([part.grad for part in self.summed if part.grad is not None], self.within)
        self.passes.buffers.end_step()
        # Every rank of a replica knows the losses of its shards, and the first one tells them.
        own = zip(micro_batches, losses, strict=True) if self.within.rank() == 0 else ()
        return reduced_loss(own, sorted(losses[0].sums), step=micro_batches[0], device=self.device)

    def outputs(self, batch: Batch) -> Tensor:
        """The model's: the ranks of a replica run the batches of all of them."""
        return in_turn(batch, self._leaving_no_trace, group=self.within, device=self.device)

    def _leaving_no_trace(self, batch: Batch, _: int) -> Tensor:
        with self.passes.buffers.unchanged():
            return self.model(batch)


def build(config: Config, *, randomness: Randomness, precision: Precision, exact: bool) -> TensorParallel:
    """The strategy for a run; gradients are added in the tree whether `exact` or not."""
    return TensorParallel(config, randomness, precision)
