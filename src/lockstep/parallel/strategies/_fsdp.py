"""FSDP2 with gradients that are added in the shards' tree."""

from collections import Counter
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from lockstep.base.errors import LaunchError, ModelError
from lockstep.base.model_contracts import Batch, LossSum, MicroBatch, Model
from lockstep.core.distributed.collectives import all_reduce_each, raise_on_all_ranks
from lockstep.core.distributed.process_group import world_group
from lockstep.core.host.malloc import return_large_tensors
from lockstep.core.modules.buffers import BufferUpdates
from lockstep.core.modules.deferred_init import replace_fake
from lockstep.core.modules.dtensors import Held, offset_of, part_of
from lockstep.core.numerics.precision import Precision
from lockstep.core.numerics.seeds import Randomness
from lockstep.core.reduction.all_reduce import AllReduce
from lockstep.core.reduction.gradient_norm import Rows, gradients, rows_of
from lockstep.core.reduction.reduce_scatter import BackendReduceScatter, Rounds, TreeReduceScatter
from lockstep.core.reduction.shard_assignment import contiguous, strided
from lockstep.core.reduction.tree import Shards
from lockstep.parallel.block_uses import block_uses
from lockstep.parallel.fsdp_units import OrderedUnits, announce_backward, own_memory
from lockstep.parallel.micro_batches import MicroBatches, world_loss
from lockstep.parallel.sharded import Sharded
from lockstep.parallel.strategies.fsdp import Config


class FullyShardedDataParallel(Sharded):
    """FSDP2 with gradients that are sums, added in the shards' tree, and kept in rows while they accumulate."""

    def __init__(self, config: Config, randomness: Randomness, precision: Precision, *, exact: bool) -> None:
        super().__init__(randomness, precision)
        self.config, self.exact = config, exact

    def place(self, model: Model, sample: Callable[[], Batch]) -> nn.Module:
        """Shard the model; returns this rank's rows of every parameter. Raises LaunchError and ModelError."""
        self.take(model)
        self._check(model)
        world, replicas = dist.get_world_size(), self.config.replicas
        return_large_tensors()
        mesh = init_device_mesh(self.device.type, (replicas, world // replicas), mesh_dim_names=("replicate", "shard"))
        self.replica, self.place_in_it = mesh["replicate"].get_local_rank(), mesh["shard"].get_local_rank()
        self.across, self.within = mesh["replicate"].get_group(), mesh["shard"].get_group()
        self.copies = tuple(dist.get_process_group_ranks(self.across))
        whole = {name: rows_of(p) for name, p in model.named_parameters() if p.requires_grad}
        with raise_on_all_ranks():
            uses = block_uses(model, model.blocks(), sample(), device=self.device, context=self.precision.autocast)
        units = [block for block in uses.alone() if block is not model and _is_alone(block, model)]
        self.units = OrderedUnits(model, units)
        self.scatters = self._shard(model, units, mesh["shard"])
        self.units.watch()
        self.whole = dict(model.named_parameters())
        for parameter in self.whole.values():
            if self.exact and parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._drop)
        self.parts = {n: nn.Parameter(part_of(p), requires_grad=p.requires_grad) for n, p in self.whole.items()}
        first = {name: offset_of(self.whole[name])[0] for name in whole}
        self.norm = Rows(whole, first, group=self.within, device=self.device)
        self.passes = MicroBatches(model, self.randomness, self.precision, is_whole=False)
        model._lockstep_initial = None  # and with it all that was written down
        return Held(model, self.parts)

    def _check(self, model: Model) -> None:
        world, replicas = dist.get_world_size(), self.config.replicas
        if world % replicas:
            raise LaunchError(f"parallel.replicas={replicas} does not divide the {world} processes")
        for name, parameter in model.named_parameters():
            if not parameter.ndim:
                raise ModelError(f"{name} is a number without axes, which cannot be sharded: give it the shape [1]")
            if not parameter.is_contiguous():
                raise ModelError(
                    f"{name} is not contiguous (strides {parameter.stride()}), and FSDP shards rows as they lie in "
                    "memory: leave weights as they are, and give channels-last images to the first layer instead"
                )

    def _shard(self, model: Model, units: list[nn.Module], mesh: DeviceMesh) -> list[TreeReduceScatter]:
        """Wrap each unit, then what is left: also blocks with weights that are used elsewhere, too."""
        offload = self.config.offload and self.device.type == "cuda"
        for module in (*units, model):
            if model._lockstep_initial is not None:  # what is not sharded yet is all that is ever whole
                replace_fake(module, self._filled(model._lockstep_initial))
            module.register_forward_hook(own_memory)  # before FSDP's own
            fully_shard(
                module,
                mesh=mesh,
                reshard_after_forward=self.config.reshard and module is not model,
                mp_policy=self._format(),
                offload_policy=CPUOffloadPolicy() if offload else OffloadPolicy(),
            )
        scatters = []
        for name, module in model.named_modules():
            if isinstance(module, FSDPModule):
                scatters.append(TreeReduceScatter(name) if self.exact else BackendReduceScatter(name, self.place_in_it))
                module.set_custom_reduce_scatter(scatters[-1])
                module.set_all_reduce_hook(scatters[-1].finish)
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
                module.set_reduce_scatter_unused_params(True)
                announce_backward(module)
        return scatters

    def _filled(self, initial: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda fake: initial(fake).to(self.device)

    def _format(self) -> MixedPrecisionPolicy:
        if self.config.gather == "fp32":
            return MixedPrecisionPolicy(cast_forward_inputs=False)
        return MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False, output_dtype=None
        )

    def _shares(self, shards: int, present: Shards) -> list[list[list[int | None]]]:
        """replica -> place in it -> shards: neighbours to a replica, dealt out within it."""
        replicas, size = self.config.replicas, self.within.size()
        lists = [contiguous(each, replicas, shards=shards, present=present) for each in range(replicas)]
        return [[strided(place, size, own) for place in range(size)] for own in lists]

    @property
    def buffer_updates(self) -> Sequence[BufferUpdates]:
        """All: every rank holds them whole."""
        return [self.passes.buffers]

    def owned(self, shards: int, present: Shards) -> Sequence[int | None]:
        return self._shares(shards, present)[self.replica][self.place_in_it]

    def forward_backward(self, micro_batches: Sequence[MicroBatch]) -> LossSum:
        """Run this rank's shards, all ranks of a replica in step; a round's gradients are added after each."""
        model: FSDPModule = self.model  # type: ignore[assignment]
        present, shards = micro_batches[0].present, micro_batches[0].shards
        shares = self._shares(shards, present)
        held = [frozenset(s for own in replica for s in own if s is not None) for replica in shares]
        rounds = Rounds(AllReduce(held, present, self.across), list(zip(*shares[self.replica], strict=True)))
        self.rounds = rounds
        for scatter in self.scatters:
            scatter.rounds = rounds
        everyone = AllReduce(
            [frozenset(s for s in own if s is not None) for replica in shares for own in replica],
            present,
            world_group(),
        )
        self.passes.buffers.start_step(everyone)
        losses = []
        for number, micro_batch in enumerate(micro_batches):
            rounds.number = number
            model.set_is_last_backward(rounds.is_last)
            self.units.start()
            losses += self.passes.run([micro_batch], self.model)
        self._take_over()
        self.passes.buffers.end_step()
        return world_loss(micro_batches, losses)

    def _drop(self, parameter: Tensor) -> None:
        """What FSDP makes of a round is nothing before the last one: the sums are with the scatters."""
        if not self.rounds.is_last:
            parameter.grad = None

    def _take_over(self) -> None:
        """The gradients of FSDP's parameters become those of the parts."""
        for name, parameter in self.whole.items():
            gradient = parameter.grad
            if parameter.requires_grad and gradient is None:
                raise ModelError(f"{name} took no part in the loss of a step: leave it out of the model, or freeze it")
            self.parts[name].grad = None if gradient is None else part_of(gradient)
        if not self.exact and self.across.size() > 1:
            all_reduce_each(gradients(list(self.parts.values())), self.across)
        for parameter in self.whole.values():
            parameter.grad = None

    def outputs(self, batch: Batch) -> Tensor:
        """The model's; its blocks are gathered one after the other."""
        with self.passes.buffers.unchanged():
            outputs: Tensor = self.model(batch)
        for module in self.model.modules():
            if isinstance(module, FSDPModule):  # or it would go on with these weights when they have changed
                module.reshard()
        return outputs


def _is_alone(block: nn.Module, model: nn.Module) -> bool:
    """Whether a block has weights, and shares none with the rest of the model."""
    inside = Counter(p for module in block.modules() for p in module._parameters.values() if p is not None)
    everywhere = Counter(p for module in model.modules() for p in module._parameters.values() if p is not None)
    return bool(inside) and all(everywhere[parameter] == count for parameter, count in inside.items())


def build(config: Config, *, randomness: Randomness, precision: Precision, exact: bool) -> FullyShardedDataParallel:
    return FullyShardedDataParallel(config, randomness, precision, exact=exact)
