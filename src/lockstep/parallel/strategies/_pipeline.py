"""PyTorch's pipeline schedules, with gradients added in the shards' tree."""

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from lockstep.base.errors import LaunchError, LockstepError, ModelError
from lockstep.base.model_contracts import Batch, LossSum, MicroBatch, Model
from lockstep.core.distributed.collectives import all_gather_object, broadcast_object, raise_on_all_ranks
from lockstep.core.host.malloc import return_large_tensors
from lockstep.core.modules.buffers import BufferUpdates
from lockstep.core.modules.deferred_init import replace_fake
from lockstep.core.modules.dtensors import Held
from lockstep.core.numerics.precision import Precision
from lockstep.core.numerics.seeds import Randomness
from lockstep.core.reduction.all_reduce import AllReduce
from lockstep.core.reduction.gradient_norm import Rows, rows_of
from lockstep.core.reduction.shard_assignment import contiguous
from lockstep.core.reduction.tree import Shards
from lockstep.parallel.micro_batches import MicroBatches, reduced_loss
from lockstep.parallel.module_profile import ModuleProfile, balanced, survey
from lockstep.parallel.partition import Cuttable
from lockstep.parallel.pipeline_stage import SeededStage, Segment
from lockstep.parallel.sharded import Sharded
from lockstep.parallel.stage_forward import StageForward
from lockstep.parallel.strategies.pipeline import Config

SCHEDULES: dict[str, Any] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B}


class Pipeline(Sharded):
    """PyTorch's schedules over stages of any model, with gradients added in the shards' tree."""

    def __init__(self, config: Config, randomness: Randomness, precision: Precision, *, exact: bool) -> None:
        super().__init__(randomness, precision)
        self.config = config
        self.schedules: dict[int, Any] = {}
        self.losses: dict[int, LossSum] = {}
        """This step's, by micro-batch, where the last stage is this rank's."""
        self.loss_names: list[str] | None = None

    def place(self, model: Model, sample: Callable[[], Batch]) -> nn.Module:
        """Cut the model, keep this rank's stages, let go of the rest. Raises LaunchError, ModelError."""
        self.take(model)
        return_large_tensors()
        unfilled = dict(model.named_parameters()) if model._lockstep_initial is not None else {}
        self._fill_with_nothing(model)
        self.schedules, self.loss_names = {}, None
        self.cut = Cuttable(model)
        with raise_on_all_ranks():
            size = self._stages(len(self.cut.blocks))
            batch = sample()
            with _no_weight_written_to():
                found = survey(self.cut, batch, self.precision.autocast)
            bounds = self._bounds(found, size)
        bounds = broadcast_object(bounds)
        with raise_on_all_ranks(), self.precision.autocast():
            self.cut.check(bounds, batch)
        mesh = init_device_mesh(
            self.device.type, (dist.get_world_size() // size, size), mesh_dim_names=("replica", "stage")
        )
        self.replica, (self.across, self.along) = mesh["replica"].get_local_rank(), mesh.get_all_groups()
        self.copies = tuple(dist.get_process_group_ranks(self.across))
        self.bounds = bounds
        self._hold(found, unfilled)
        self.relay = StageForward(self.cut, bounds, self.buffer_updates, group=self.along, device=self.device)
        model._lockstep_initial = None  # and with it all that was written down
        return Held(model, self.parts)

    def _hold(self, found: ModuleProfile, unfilled: Mapping[str, Tensor]) -> None:
        """Keep this rank's stages. `unfilled`: the weights that have to be made first, as they were before."""
        whole = {name: rows_of(p) for name, p in self.model.named_parameters() if p.requires_grad}
        named = dict(self.model.named_parameters())
        numbers = range(self.along.rank(), len(self.bounds) - 1, self.along.size())
        self.stages = [self._stage(number, found) for number in numbers]
        units = {unit for stage in self.stages for unit in range(stage.segment.first, stage.segment.last)}
        self.parts = {name: p for name, p in named.items() if found.holders[name][0] in units}
        self.whole = dict(self.parts)
        self.buffers = {name for name in self.buffers if found.modules[name.rpartition(".")[0]] in units}
        first = dict.fromkeys(whole.keys() & self.parts.keys(), 0)
        self.norm = Rows(whole, first, group=self.along, device=self.device)
        for name, parameter in named.items():
            if name not in self.parts:
                _let_go(parameter)
            elif self.model._lockstep_initial is not None:
                parameter.data = self.model._lockstep_initial(unfilled[name]).to(self.device)

    def _fill_with_nothing(self, model: Model) -> None:
        """Buffers get their values; weights, of which most will not stay, a number that takes no memory."""
        initial = model._lockstep_initial
        if initial is None:
            return
        parameters = set(model.parameters())

        def value(fake: Tensor) -> Tensor:
            return _nothing_like(fake, self.device) if fake in parameters else initial(fake).to(self.device)

        replace_fake(model, value)

    def _stages(self, blocks: int) -> int:
        world = dist.get_world_size()
        if self.config.stages == "auto":
            most = max(1, blocks // self._chunks)
            return max(size for size in range(1, most + 1) if world % size == 0)
        if world % self.config.stages:
            raise LaunchError(f"parallel.stages={self.config.stages} does not divide the {world} processes")
        return self.config.stages

    @property
    def _chunks(self) -> int:
        return self.config.chunks if self.config.schedule == "interleaved" else 1

    def _bounds(self, found: ModuleProfile, size: int) -> list[int]:
        """The block with which each stage begins, and the number of blocks. Raises ModelError."""
        count, blocks, obstacles = size * self._chunks, len(self.cut.blocks), found.obstacles()
        trained = {found.holders[name][0] for name, p in self.model.named_parameters() if p.requires_grad}

        def possible(start: int, end: int) -> bool:
            return start not in obstacles and bool(trained.intersection(range(start, end)))

        if self.config.cut == "auto":
            bounds = balanced(found.seconds, count, possible)
            if bounds is None:
                why = "".join(f"\n  no cut before block {place}: {reason}" for place, reason in obstacles.items())
                raise ModelError(
                    f"the model's {blocks} blocks cannot be cut into {count} stages that train something each{why}\n"
                    "  Set parallel.stages to fewer, or use parallel.kind=fsdp"
                )
            return bounds
        bounds = [0, *self.config.cut, blocks]
        if len(bounds) != count + 1 or any(a >= b for a, b in zip(bounds, bounds[1:], strict=False)):
            raise LaunchError(
                f"parallel.cut={list(self.config.cut)} does not cut {blocks} blocks into {count} stages: give "
                f"{count - 1} rising numbers between 1 and {blocks - 1}, or auto"
            )
        for start, end in zip(bounds, bounds[1:], strict=False):
            if start in obstacles:
                raise ModelError(f"parallel.cut: no cut can be before block {start}: {obstacles[start]}")
            if not possible(start, end):
                raise ModelError(f"parallel.cut: there is nothing to train in blocks {start} to {end - 1}")
        return bounds

    def _stage(self, number: int, found: ModuleProfile) -> SeededStage:
        first, last = self.bounds[number], self.bounds[number + 1]
        named = dict(self.model.named_modules())
        modules = {name: named[name] for name, unit in found.modules.items() if first <= unit < last}
        passes = MicroBatches(self.model, self.randomness, self.precision, modules=modules)
        trained = [p for n, p in self.model.named_parameters() if first <= found.holders[n][0] < last]
        return SeededStage(
            Segment(self.cut, first, last, passes=passes),
            trained,
            number=number,
            count=len(self.bounds) - 1,
            device=self.device,
            group=self.along,
        )

    @property
    def buffer_updates(self) -> Sequence[BufferUpdates]:
        return [stage.passes.buffers for stage in self.stages]

    def owned(self, shards: int, present: Shards) -> Sequence[int | None]:
        """This rank's replica's: the same on all of its stages; at least as many as there are stages, as the schedules
        want it."""
        size, replicas = self.along.size(), self.across.size()
        own = contiguous(self.replica, replicas, shards=shards, present=present)
        rounds = max(len(own), size)
        if self.config.schedule == "interleaved":
            rounds = -(-rounds // size) * size
        return [*own, *[None] * (rounds - len(own))]

    def forward_backward(self, micro_batches: Sequence[MicroBatch]) -> LossSum:
        """Run the replica's shards through all of its stages; then the replicas add up their sums."""
        present, shards = micro_batches[0].present, micro_batches[0].shards
        replicas, every = self.across.size(), frozenset(range(shards))
        owners = [frozenset(contiguous(r, replicas, shards=shards, present=every)) for r in range(replicas)]
        exchange = AllReduce(owners, present, self.across)
        self.step = list(micro_batches)
        self.losses.clear()
        for stage in self.stages:
            stage.start_step(micro_batches, exchange)
        self._run(len(micro_batches))
        for stage in self.stages:
            for parameter, total in stage.accumulation.totals(exchange):
                parameter.grad = total
            stage.passes.buffers.end_step()
        return self._world_loss()

    def _run(self, count: int) -> None:
        """One pass of the schedule, which is made once for each number of micro-batches."""
        if count not in self.schedules:
            stages: Any = self.stages if self.config.schedule == "interleaved" else self.stages[0]
            schedule = SCHEDULES[self.config.schedule](stages, count, loss_fn=self._loss, scale_grads=False)
            for name in ("stage", "stages"):  # the stages are ready: the library would send shapes of its own around
                setattr(schedule, f"_{name}_forward_initialized", True)
                setattr(schedule, f"_{name}_backward_initialized", True)
            self.schedules[count] = schedule
        try:
            self.schedules[count]._step_microbatches(
                [()] * count, [{}] * count, list(range(count)), return_outputs=False
            )
        except RuntimeError as error:
            if isinstance(error.__cause__, LockstepError):
                raise error.__cause__ from None
            raise

    def _loss(self, outputs: Tensor, number: int) -> Tensor:
        """The last stage's: the loss of a micro-batch, scaled where the format needs it."""
        loss = self.stages[-1].passes.loss(self.step[number], outputs)
        self.losses[number] = loss
        return self.precision.scaled(loss.total)

    def _world_loss(self) -> LossSum:
        """The loss over all shards, on every rank, though only the last stages know any."""
        if self.loss_names is None:
            own = sorted(self.losses[0].sums) if self.losses else None
            self.loss_names = next(names for names in all_gather_object(own) if names is not None)
        pairs = [(self.step[number], loss) for number, loss in self.losses.items()]
        return reduced_loss(pairs, self.loss_names, step=self.step[0], device=self.device)

    def outputs(self, batch: Batch) -> Tensor:
        """The model's: the stages of a replica run the batches of all of its ranks."""
        return self.relay.outputs(batch)


def _let_go(parameter: nn.Parameter) -> None:
    """A parameter of another stage's: a number that takes no memory, for the model's code that asks for its shape."""
    parameter.requires_grad = False
    parameter.data = _nothing_like(parameter, parameter.device)


@contextmanager
def _no_weight_written_to() -> Iterator[None]:
    """A forward pass that writes to a weight that takes no memory becomes a ModelError with the line that does."""
    try:
        yield
    except RuntimeError as error:
        if "element of the written-to tensor" not in str(error):
            raise
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise ModelError(
            f"the forward pass changes a parameter in place ({last.filename}:{last.lineno}), by the samples that a "
            "process runs itself, and a pipeline runs it on weights that are not there yet: constrain it where it is "
            "used instead, or use parallel.kind=ddp"
        ) from None


def _nothing_like(tensor: Tensor, device: torch.device) -> Tensor:
    return torch.full((), 0.01, device=device).to(tensor.dtype).expand(tensor.shape)


def build(config: Config, *, randomness: Randomness, precision: Precision, exact: bool) -> Pipeline:
    return Pipeline(config, randomness, precision, exact=exact)
