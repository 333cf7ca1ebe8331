"""PyTorch's pipeline schedules, with gradients added in the shards' tree."""

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from lockstep.base.errors import LaunchError, ModelError
from lockstep.base.model_contracts import Batch, LossSum, MicroBatch, Model
from lockstep.core.distributed.collectives import broadcast_object, raise_on_all_ranks
from lockstep.core.distributed.process_group import open_mesh
from lockstep.core.host.malloc import return_large_tensors
from lockstep.core.host.phases import phase
from lockstep.core.modules.buffers import BufferUpdates
from lockstep.core.modules.deferred_init import replace_fake
from lockstep.core.modules.dtensors import LocalParameters
from lockstep.core.numerics.precision import Precision
from lockstep.core.numerics.seeds import Randomness
from lockstep.core.reduction.all_reduce import AllReduce
from lockstep.core.reduction.gradient_norm import RowwiseNorm
from lockstep.core.reduction.tree import Shards, contiguous, contiguous_by_rank
from lockstep.parallel.micro_batches import MicroBatches, WorldLoss
from lockstep.parallel.module_profile import ModuleProfile, balanced_bounds, profile_modules
from lockstep.parallel.partition import DIFFERENTIATES, PartitionedModel
from lockstep.parallel.pipeline_stage import SeededStage, StageModule
from lockstep.parallel.sharded import Sharded
from lockstep.parallel.stage_forward import StageForward
from lockstep.parallel.strategies.pipeline import Config

SCHEDULES: dict[str, Any] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B}


class Pipeline(Sharded):
    """PyTorch's schedules over stages of any model, with gradients added in the shards' tree."""

    def __init__(self, config: Config, randomness: Randomness, precision: Precision, *, exact: bool) -> None:
        super().__init__(randomness, precision)
        self.config = config
        self.losses: dict[int, LossSum] = {}
        """Losses of this step by micro-batch, on the rank of the last stage."""

    def place(self, model: Model, sample: Callable[[], Batch]) -> nn.Module:
        """Partition the model, and free the parameters of other ranks' stages. Raises LaunchError, ModelError."""
        self.start_placing(model)
        return_large_tensors()
        fake = dict(model.named_parameters()) if model._lockstep_initial is not None else {}
        if (initial := model._lockstep_initial) is not None:
            own, device = set(model.parameters()), self.device  # parameters take no memory yet
            replace_fake(model, lambda t: _placeholder(t, device) if t in own else initial(t).to(device))
        self.schedules, self.sum_names = dict[int, Any](), set[str]()
        self.partitioned = PartitionedModel(model)
        with raise_on_all_ranks():
            size = self.config.group_size(dist.get_world_size(), len(self.partitioned.blocks))
            batch = sample()
            with _refuse_unsplittable():
                profile = profile_modules(self.partitioned, batch, self.precision.autocast)
            bounds = self._bounds(profile, size)
        bounds = broadcast_object(bounds)  # measured times differ between ranks
        with raise_on_all_ranks(), self.precision.autocast():
            self.partitioned.check(bounds, batch)
        mesh = open_mesh(self.device.type, (dist.get_world_size() // size, size), ("replica", "stage"))
        self.replica, (self.across, self.along) = mesh["replica"].get_local_rank(), mesh.get_all_groups()
        self.copies = tuple(dist.get_process_group_ranks(self.across))
        self.bounds = bounds
        self._set_stages(profile, fake)
        stages = StageForward(self.partitioned, bounds, self.buffer_updates, group=self.along, device=self.device)
        self.outputs = stages.outputs
        model._lockstep_initial = None  # frees the recorded operations
        return LocalParameters(model, self.local)

    def _set_stages(self, profile: ModuleProfile, fake: Mapping[str, Tensor]) -> None:
        """Set this rank's stages and parameters. `fake`: the fake tensors of parameters that have no values yet."""
        named = dict(self.model.named_parameters())
        trained = {name: p for name, p in named.items() if p.requires_grad}
        numbers = range(self.along.rank(), len(self.bounds) - 1, self.along.size())
        self.stages = [self._stage(number, profile) for number in numbers]
        units = {unit for stage in self.stages for unit in range(stage.module.first, stage.module.last)}
        self.local = {name: p for name, p in named.items() if profile.holders[name][0] in units}
        self.parameters = dict(self.local)
        self.buffers = {name for name in self.buffers if profile.modules[name.rpartition(".")[0]] in units}
        first_row = dict.fromkeys(trained.keys() & self.local.keys(), 0)
        self.sharded_norm = RowwiseNorm(trained, first_row, group=self.along, device=self.device)
        for name, parameter in named.items():
            if name not in self.local:
                parameter.requires_grad = False  # the placeholder keeps its shape for the model's code
                parameter.data = _placeholder(parameter, parameter.device)
            elif self.model._lockstep_initial is not None:
                parameter.data = self.model._lockstep_initial(fake[name]).to(self.device)

    def _bounds(self, profile: ModuleProfile, size: int) -> list[int]:
        """Return the first block of each stage, and the number of blocks. Raises LaunchError, ModelError."""
        count, blocks = size * self.config.stages_per_process, len(self.partitioned.blocks)
        obstacles = profile.obstacles()
        trained = {profile.holders[name][0] for name, p in self.model.named_parameters() if p.requires_grad}
        if self.config.cut == "auto":
            bounds = balanced_bounds(profile.seconds, count, obstacles=obstacles, trained=trained)
            if bounds is None:
                why = "".join(f"\n  no cut before block {place}: {reason}" for place, reason in obstacles.items())
                raise ModelError(
                    f"the model's {blocks} blocks cannot be cut into {count} stages that train something each{why}\n"
                    "  Set parallel.stages to fewer, or use parallel.kind=fsdp"
                )
            return bounds
        bounds = [0, *self.config.cut, blocks]
        if len(bounds) != count + 1 or any(a >= b for a, b in pairwise(bounds)):
            what = f"parallel.cut={list(self.config.cut)} does not cut {blocks} blocks into {count} stages"
            raise LaunchError(f"{what}: give {count - 1} rising numbers between 1 and {blocks - 1}, or auto")
        for start, end in pairwise(bounds):
            if start in obstacles:
                raise ModelError(f"parallel.cut: no cut can be before block {start}: {obstacles[start]}")
            if trained.isdisjoint(range(start, end)):
                raise ModelError(f"parallel.cut: there is nothing to train in blocks {start} to {end - 1}")
        return bounds

    def _stage(self, number: int, profile: ModuleProfile) -> SeededStage:
        first, last = self.bounds[number], self.bounds[number + 1]
        named = dict(self.model.named_modules())
        modules = {name: named[name] for name, unit in profile.modules.items() if first <= unit < last}
        passes = MicroBatches(self.model, self.randomness, self.precision, modules=modules)
        trained = [p for n, p in self.model.named_parameters() if first <= profile.holders[n][0] < last]
        module, count = StageModule(self.partitioned, first, last, passes=passes), len(self.bounds) - 1
        return SeededStage(module, trained, number=number, count=count, device=self.device, group=self.along)

    @property
    def buffer_updates(self) -> Sequence[BufferUpdates]:
        return [stage.passes.buffers for stage in self.stages]

    def owned(self, shards: int, present: Shards) -> Sequence[int | None]:
        """Return the shards of this rank's replica, the same on all of its ranks."""
        own = contiguous(self.replica, self.across.size(), shards=shards, present=present)
        return [*own, *[None] * (self.config.num_micro_batches(len(own), self.along.size()) - len(own))]

    def forward_backward(self, micro_batches: Sequence[MicroBatch]) -> LossSum:
        """Run the replica's shards through all of its stages; then all-reduce over the replicas."""
        present, shards = micro_batches[0].present, micro_batches[0].shards
        all_reduce = AllReduce(contiguous_by_rank(self.across.size(), shards), present, self.across)
        self.step = list(micro_batches)
        self.losses.clear()
        for stage in self.stages:
            stage.start_step(micro_batches, all_reduce)
        with phase("backward"):  # forward passes and waits in it count for themselves
            self._run(len(micro_batches))
        for stage in self.stages:
            for parameter, total in stage.accumulation.totals(all_reduce):
                parameter.grad = total
            stage.passes.buffers.end_step()
        pairs = [(self.step[number], loss) for number, loss in self.losses.items()]  # on the last stages only
        return WorldLoss(pairs, self.sum_names, step=self.step[0], device=self.device).result()

    def _run(self, count: int) -> None:
        """Run the schedule, which is created once for each number of micro-batches."""
        if count not in self.schedules:
            stages: Any = self.stages if self.config.schedule == "interleaved" else self.stages[0]
            schedule = SCHEDULES[self.config.schedule](stages, count, loss_fn=self._loss, scale_grads=False)
            for name in ("stage", "stages"):  # the stages know their shapes: the library would exchange them once
                setattr(schedule, f"_{name}_forward_initialized", True)
                setattr(schedule, f"_{name}_backward_initialized", True)
            self.schedules[count] = schedule
        self.schedules[count]._step_microbatches([()] * count, [{}] * count, list(range(count)), return_outputs=False)

    def _loss(self, outputs: Tensor, number: int) -> Tensor:
        """Return the loss of a micro-batch on the last stage, scaled where the precision needs it."""
        loss = self.stages[-1].passes.loss(self.step[number], outputs)
        self.losses[number] = loss
        return self.precision.scaled(loss.total)


@contextmanager
def _refuse_unsplittable() -> Iterator[None]:
    """Raise ModelError where a forward pass differentiates, or, with the line of code, writes to a placeholder."""
    try:
        yield
    except RuntimeError as error:
        if any(frame.f_code is torch.autograd.grad.__code__ for frame, _ in traceback.walk_tb(error.__traceback__)):
            raise ModelError(DIFFERENTIATES) from None
        if "element of the written-to tensor" not in str(error):
            raise
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise ModelError(
            f"the forward pass changes a parameter in place ({last.filename}:{last.lineno}), by the samples that a "
            "process runs itself, and a pipeline runs it on weights that are not there yet: constrain it where it is "
            "used instead, or use parallel.kind=ddp"
        ) from None


def _placeholder(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the same shape and dtype that takes no memory."""
    return torch.full((), 0.01, device=device).to(tensor.dtype).expand(tensor.shape)


def build(config: Config, *, randomness: Randomness, precision: Precision, exact: bool) -> Pipeline:
    return Pipeline(config, randomness, precision, exact=exact)
