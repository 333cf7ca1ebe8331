"""PyTorch's tensor parallelism, with gradients added in the shards' tree."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.base.errors import LaunchError, ModelError
from lockstep.base.model_contracts import Batch, LossSum, MicroBatch, Model
from lockstep.core.distributed.collectives import all_reduce_each, raise_on_all_ranks
from lockstep.core.distributed.process_group import open_mesh
from lockstep.core.modules.buffers import copied_buffers
from lockstep.core.modules.dtensors import LocalParameters, local_tensor
from lockstep.core.numerics.precision import Precision
from lockstep.core.numerics.seeds import Randomness
from lockstep.core.reduction.all_reduce import AllReduce
from lockstep.core.reduction.gradient_norm import SplitNorm, gradients
from lockstep.core.reduction.tree import Shards, contiguous, contiguous_by_rank
from lockstep.parallel.accumulation import Accumulation
from lockstep.parallel.micro_batches import MicroBatches, WorldLoss
from lockstep.parallel.sharded import Sharded, round_robin_forward
from lockstep.parallel.strategies.tensor import Config
from lockstep.parallel.tensor_plan import is_split, planned, split_layers, summed_modules

RATES = ("p", "dropout_p")
"""Names of the operators' arguments for a dropout rate."""


class TensorParallel(Sharded):
    """PyTorch's tensor parallelism, with gradients added in the shards' tree over the replicas. Every rank of a
    tensor-parallel group runs the same shards. What is not split is computed by all of them, from the same bits."""

    def __init__(self, config: Config, randomness: Randomness, precision: Precision) -> None:
        super().__init__(randomness, precision)
        self.config = config

    def place(self, model: Model, sample: Callable[[], Batch]) -> nn.Module:
        """Split the model's layers; returns this rank's shards. Raises LaunchError and ModelError."""
        self.start_placing(model)
        with raise_on_all_ranks():
            size = self._size()
            styles = planned(model, size, dist.get_world_size())
            batch = sample()
            expected = self._random_ops(model, batch)
        mesh = open_mesh(self.device.type, (dist.get_world_size() // size, size), ("replicate", "tensor"))
        self.replica, self.across, self.within = mesh["replicate"].get_local_rank(), *mesh.get_all_groups()
        self.copies = tuple(dist.get_process_group_ranks(self.across))
        split_layers(model, mesh["tensor"], styles)
        split = self._random_ops(model, batch)
        with raise_on_all_ranks():
            self._check_random_ops(expected, split)
        self._set_parameters(summed_modules(model, styles))
        return LocalParameters(model, self.local)

    def _size(self) -> int:
        world = dist.get_world_size()
        size = world if self.config.size == "all" else self.config.size
        if world % size:
            raise LaunchError(
                f"parallel.size={size} does not divide the {world} processes: set launch.processes to a multiple of "
                f"{size}, or parallel.size to {' or '.join(str(n) for n in range(1, world + 1) if world % n == 0)}"
            )
        return size

    def _random_ops(self, model: Model, batch: Batch) -> list[str]:
        """Return the operators of a training pass that draw random numbers, with shapes: equal lists, equal draws."""
        with self.precision.autocast(), copied_buffers(model), torch.no_grad(), _RandomOps() as mode:
            model(batch)
        return mode.ops

    def _check_random_ops(self, whole: list[str], split: list[str]) -> None:
        """Raise ModelError where split tensors draw random numbers: all ranks draw the same, as replicas should."""
        first = next((pair for pair in zip(whole, split, strict=False) if pair[0] != pair[1]), None)
        if first is not None or len(whole) != len(split):
            where = f" ({first[0]} of the whole model, {first[1]} of a part)" if first else ""
            raise ModelError(
                f"the model drops out inside of what is split{where}, where the processes would all draw the same "
                "mask: set attention_dropout, and whatever else drops out inside of attention and MLP, to 0 in the "
                "model's config.json, or use parallel.kind=fsdp"
            )

    def _set_parameters(self, summed: set[str]) -> None:
        named = dict(self.model.named_parameters())
        self.parameters = {name: p if is_split(p) else local_tensor(p) for name, p in named.items()}
        self.local = {name: nn.Parameter(local_tensor(p), requires_grad=p.requires_grad) for name, p in named.items()}
        self.local_of = {parameter: self.local[name] for name, parameter in named.items()}
        self.summed = [self.local[name] for name in named if name in summed and named[name].requires_grad]
        split = [name for name, parameter in named.items() if is_split(parameter)]
        trained = {name: p for name, p in named.items() if p.requires_grad}
        self.sharded_norm = SplitNorm(trained, split, group=self.within, device=self.device)
        self.passes = MicroBatches(self.model, self.randomness, self.precision)
        self.accumulation = Accumulation(named.values(), self.passes, leaves_last=False)

    def owned(self, shards: int, present: Shards) -> Sequence[int | None]:
        """Return the shards of this rank's replica, the same on all of its ranks."""
        return contiguous(self.replica, self.across.size(), shards=shards, present=present) or [None]

    def forward_backward(self, micro_batches: Sequence[MicroBatch]) -> LossSum:
        """Run the replica's shards on all of its ranks together; then all-reduce over the replicas."""
        owned = contiguous_by_rank(self.across.size(), micro_batches[0].shards)
        all_reduce = AllReduce(owned, micro_batches[0].present, self.across)
        self.accumulation.start_step(all_reduce)
        self.passes.buffers.start_step(all_reduce)
        losses = self.passes.run(micro_batches, self.model)
        for parameter, total in self.accumulation.totals(all_reduce):
            self.local_of[parameter].grad = total
        if self.within.size() > 1:
            all_reduce_each(gradients(self.summed), self.within)
        self.passes.buffers.end_step()
        # Every rank of a replica has the losses of its shards; they are counted on the first.
        own = zip(micro_batches, losses, strict=True) if self.within.rank() == 0 else ()
        return WorldLoss(own, self.passes.sum_names, step=micro_batches[0], device=self.device).result()

    def outputs(self, batch: Batch) -> Tensor:
        """Return the model's outputs: the ranks of a replica run the batches of all of them together."""
        return round_robin_forward(batch, self._run_unchanged, group=self.within, device=self.device)

    def _run_unchanged(self, batch: Batch, _: int) -> Tensor:
        with self.passes.buffers.unchanged():
            return self.model(batch)


class _RandomOps(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, *arguments: Any) -> Any:
        args, kwargs = arguments[0], arguments[1] or {}
        outputs = func(*args, **kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags and _rate(func, args, kwargs) != 0:
            first = outputs[0] if isinstance(outputs, (tuple, list)) else outputs
            self.ops.append(f"{func.overloadpacket.__name__}{list(first.shape)}")
        return outputs


def _rate(operator: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return an operator call's dropout rate, 1 where it has none: attention is tagged as random even with rate 0."""
    for position, argument in enumerate(operator._schema.arguments):
        if argument.name in RATES:
            value = args[position] if position < len(args) else argument.default_value
            return kwargs.get(argument.name, value)
    return 1


def build(config: Config, *, randomness: Randomness, precision: Precision, exact: bool) -> TensorParallel:
    """Return the strategy for a run; gradients are added in the tree whether `exact` or not."""
    return TensorParallel(config, randomness, precision)
