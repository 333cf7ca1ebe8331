"""FSDP2 with gradients that are added in the shards' tree."""

from collections import Counter
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from lockstep.base.errors import ModelError
from lockstep.base.model_contracts import Batch, LossSum, MicroBatch, Model
from lockstep.core.distributed.collectives import all_reduce_each, raise_on_all_ranks
from lockstep.core.distributed.process_group import open_mesh, world_group
from lockstep.core.host.malloc import return_large_tensors
from lockstep.core.modules.deferred_init import replace_fake
from lockstep.core.modules.dtensors import LocalParameters, global_offset, local_tensor
from lockstep.core.numerics.precision import Precision
from lockstep.core.numerics.seeds import Randomness
from lockstep.core.reduction.all_reduce import AllReduce
from lockstep.core.reduction.gradient_norm import RowwiseNorm, gradients
from lockstep.core.reduction.reduce_scatter import BackendReduceScatter, Rounds, TreeReduceScatter
from lockstep.core.reduction.topology import this_machine, topology
from lockstep.core.reduction.tree import Shards, alone, contiguous, strided
from lockstep.parallel.block_uses import block_uses
from lockstep.parallel.fsdp_units import (
    AllGather,
    GatheredWeights,
    OrderedUnits,
    clone_views,
    forget_pass,
    mark_waits,
    reduce_each_dtype,
    reduce_unused,
    set_process_group,
    use_multi_grad_hook,
)
from lockstep.parallel.micro_batches import MicroBatches
from lockstep.parallel.sharded import Sharded
from lockstep.parallel.strategies.fsdp import Config

MOST_WITHOUT_TABLE = 3
"""Number of ranks up to which there are no two machines of two ranks."""


class FullyShardedDataParallel(Sharded):
    """FSDP2 with gradients that are sums, added in the shards' tree; only sharded gradients are accumulated."""

    def __init__(self, config: Config, randomness: Randomness, precision: Precision, *, exact: bool) -> None:
        super().__init__(randomness, precision)
        self.config, self.exact = config, exact

    def place(self, model: Model, sample: Callable[[], Batch]) -> nn.Module:
        """Shard the model; returns this rank's shard of every parameter. Raises LaunchError and ModelError. The same
        model can be placed again: with other replicas, in which this rank has the same shards."""
        if self.placed is model:
            return self._place_again()
        self.start_placing(model)
        size = self.config.group_size(dist.get_world_size())
        _check_shapes(model)
        return_large_tensors()
        self.mesh = self._open_groups(size)
        with raise_on_all_ranks():
            uses = block_uses(model, model.blocks(), sample(), device=self.device, context=self.precision.autocast)
        units = [block for block in uses.alone() if block is not model and _shares_no_weights(block, model)]
        self.units = OrderedUnits(model, units)
        self.scatters = self._shard(model, units, self.mesh)
        self.units.register_hooks()
        self.parameters = dict(model.named_parameters())
        for parameter in self.parameters.values():
            if self.exact and parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._drop_gradient)
        named = self.parameters.items()
        self.local = {n: nn.Parameter(local_tensor(p), requires_grad=p.requires_grad) for n, p in named}
        trained = {name: p for name, p in self.parameters.items() if p.requires_grad}
        first_row = {name: global_offset(p)[0] for name, p in trained.items()}
        self.sharded_norm = RowwiseNorm(trained, first_row, group=self.within, device=self.device)
        self.gathered = GatheredWeights(model, self.parameters)
        self._start_passes()
        self.gathered.watch(lambda: self.passes.weights)
        model._lockstep_initial = None  # frees the recorded operations
        self.module = LocalParameters(model, self.local)
        return self.module

    def _start_passes(self) -> None:
        """Start passes in the same state on all ranks of a new process group."""
        self.passes = MicroBatches(
            self.model, self.randomness, self.precision, has_all_weights=False, weights=self.gathered
        )

    def _open_groups(self, size: int) -> DeviceMesh:
        """Open the groups of this rank, where `size` ranks share a model; return the mesh of these."""
        sizes, names = (dist.get_world_size() // size, size), ("replicate", "shard")
        mesh = open_mesh(self.device.type, sizes, names)
        self.replica, self.shard_rank = mesh["replicate"].get_local_rank(), mesh["shard"].get_local_rank()
        self.across, self.within = mesh["replicate"].get_group(), mesh["shard"].get_group()
        self.copies = tuple(dist.get_process_group_ranks(self.across))
        self.machines = None
        if self.exact and size > MOST_WITHOUT_TABLE and dist.get_backend() != "fake":
            sets = torch.arange(dist.get_world_size()).view(sizes).tolist()
            self.machines = topology(this_machine(), sets=sets, backend=None, has_single=False)
        return mesh["shard"]

    def _place_again(self) -> nn.Module:
        self._start_passes()  # before anything can fail: the old ones have the buffers of an earlier state
        mesh = self._open_groups(self.within.size())
        self.mesh._dim_group_names = mesh._dim_group_names
        self.mesh._get_root_mesh()._pg_registry = mesh._get_root_mesh()._pg_registry  # the old groups can be freed
        set_process_group(self.model, self.within)
        forget_pass(self.model)
        for scatter in self.scatters:
            scatter.reset()
        self.sharded_norm.group = self.within
        vars(self).pop("rounds", None)
        return self.module

    def _shard(self, model: Model, units: list[nn.Module], mesh: DeviceMesh) -> list[TreeReduceScatter]:
        """Apply FSDP to each unit, then to the model, for the remaining parameters."""
        offload = self.config.offload and self.device.type == "cuda"
        half, single = (torch.bfloat16, torch.float32) if self.config.gather == "bf16" else (None, None)
        precision = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=single, cast_forward_inputs=False)
        initial = model._lockstep_initial
        for module in (*units, model):
            if initial is not None:  # unit by unit, so that only one is held unsharded
                replace_fake(module, lambda fake: initial(fake).to(self.device))
            module.register_forward_hook(clone_views)  # before FSDP's own
            fully_shard(
                module,
                mesh=mesh,
                reshard_after_forward=self.config.reshard and module is not model,
                mp_policy=precision,
                offload_policy=CPUOffloadPolicy() if offload else OffloadPolicy(),
            )
        scatters = []
        for name, module in model.named_modules():
            if isinstance(module, FSDPModule):
                scatters.append(TreeReduceScatter(name) if self.exact else BackendReduceScatter(name))
                module.set_custom_reduce_scatter(scatters[-1])
                module.set_custom_all_gather(AllGather())
                module.set_all_reduce_hook(scatters[-1].finish)
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
                reduce_unused(module)
                use_multi_grad_hook(module)
                reduce_each_dtype(module)
                if self.device.type == "cuda":
                    mark_waits(module)
        return scatters

    def _assignment(self, shards: int, present: Shards) -> list[list[list[int | None]]]:
        """Return replica -> rank in it -> shards: contiguous ones for each replica, strided within it; one in each
        round where shards have to wait for each other's buffers."""
        replicas, size = self.across.size(), self.within.size()
        by_replica = [contiguous(replica, replicas, shards=shards, present=present) for replica in range(replicas)]
        spread = alone if self.passes.buffers.ordered.buffers else strided
        return [[spread(rank, size, own) for rank in range(size)] for own in by_replica]

    def owned(self, shards: int, present: Shards) -> Sequence[int | None]:
        return self._assignment(shards, present)[self.replica][self.shard_rank]

    def forward_backward(self, micro_batches: Sequence[MicroBatch]) -> LossSum:
        """Run this rank's shards, in rounds that all ranks of a replica run together."""
        model: FSDPModule = self.model  # type: ignore[assignment]
        present, shards = micro_batches[0].present, micro_batches[0].shards
        assignment = self._assignment(shards, present)
        of_rank = [[frozenset(s for s in own if s is not None) for own in replica] for replica in assignment]
        of_replica = [frozenset[int]().union(*replica) for replica in of_rank]
        by_round = list(zip(*assignment[self.replica], strict=True))
        rounds = Rounds(AllReduce(of_replica, present, self.across), by_round, self.machines)
        self.rounds = rounds
        for scatter in self.scatters:
            scatter.rounds = rounds
        of_world = [own for replica in of_rank for own in replica]
        self.passes.buffers.start_step(AllReduce(of_world, present, world_group()))
        losses = []
        for number, micro_batch in enumerate(micro_batches):
            rounds.number = number
            model.set_is_last_backward(rounds.is_last)
            self.units.start()
            losses += self.passes.run([micro_batch], self.model)
        self._move_gradients()
        self.passes.buffers.end_step()
        return self.passes.world_loss(micro_batches, losses).result()

    def _drop_gradient(self, parameter: Tensor) -> None:
        """Drop what FSDP makes of a round's gradient: before the last round the sums are in the TreeReduceScatter."""
        if not self.rounds.is_last:
            parameter.grad = None

    def _move_gradients(self) -> None:
        for name, parameter in self.parameters.items():
            gradient = parameter.grad
            if parameter.requires_grad and gradient is None:
                raise ModelError(f"{name} took no part in the loss of a step: leave it out of the model, or freeze it")
            self.local[name].grad = None if gradient is None else local_tensor(gradient)
        if not self.exact and self.across.size() > 1:
            all_reduce_each(gradients(list(self.local.values())), self.across)
        for parameter in self.parameters.values():
            parameter.grad = None

    def outputs(self, batch: Batch) -> Tensor:
        """Return the model's outputs; its blocks are gathered one after the other."""
        with self.passes.buffers.unchanged():
            outputs: Tensor = self.model(batch)
        self.passes.check_loss(outputs, batch)
        for module in self.model.modules():
            if isinstance(module, FSDPModule):  # the next forward pass must not use these weights after they change
                module.reshard()
        return outputs


def _check_shapes(model: Model) -> None:
    """Raise ModelError for a parameter that FSDP cannot shard by rows."""
    for name, parameter in model.named_parameters():
        if not parameter.ndim:
            raise ModelError(f"{name} is a number without axes, which cannot be sharded: give it the shape [1]")
        if not parameter.numel():
            raise ModelError(f"{name} {list(parameter.shape)} has no elements to be sharded: leave it out of the model")
        if not parameter.is_contiguous():
            raise ModelError(
                f"{name} is not contiguous (strides {parameter.stride()}), and FSDP shards rows as they lie in "
                "memory: leave weights as they are, and give channels-last images to the first layer instead"
            )


def _shares_no_weights(block: nn.Module, model: nn.Module) -> bool:
    """Return whether a block has weights, none of which is tied to the rest of the model."""
    inside = Counter(p for module in block.modules() for p in module._parameters.values() if p is not None)
    everywhere = Counter(p for module in model.modules() for p in module._parameters.values() if p is not None)
    return bool(inside) and all(everywhere[parameter] == count for parameter, count in inside.items())


def build(config: Config, *, randomness: Randomness, precision: Precision, exact: bool) -> FullyShardedDataParallel:
    return FullyShardedDataParallel(config, randomness, precision, exact=exact)
