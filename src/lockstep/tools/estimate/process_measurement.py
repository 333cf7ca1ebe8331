"""Measures the real model on real data: in one process, with a few micro-batches, and in short trainings with each
strategy on the processes at hand, for the part of a step's time that cannot be computed.

V = shards of a step, m = samples of a micro-batch.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree

from lockstep.base import plugins
from lockstep.base.errors import LockstepError, ModelError
from lockstep.base.model_contracts import Batch, LossSum, MicroBatch, Model
from lockstep.base.world import World
from lockstep.core.distributed.collectives import Agreement, broadcast_object
from lockstep.core.host.memory_meter import Meter
from lockstep.core.host.stream_clock import synchronize
from lockstep.core.modules.blocks import with_weights
from lockstep.core.modules.outputs import widened
from lockstep.core.numerics.loss import unweighted
from lockstep.data.sampler import TrainingRequests
from lockstep.parallel.embedding_rows import large_embeddings
from lockstep.parallel.measurements import Block, Measurements, Seconds, Weight
from lockstep.parallel.module_profile import ModuleProfile, profile_modules
from lockstep.parallel.partition import PartitionedModel
from lockstep.parallel.tensor_plan import splittable
from lockstep.recipe import build
from lockstep.recipe.components import requested_metrics
from lockstep.recipe.recipe import Recipe
from lockstep.recipe.splits import open_splits
from lockstep.tools.trials import strategy, strategy_of
from lockstep.training.state import TrainState
from lockstep.training.step import step

T = TypeVar("T")
LOOK_STEPS = 1000
"""Number of steps in which the largest micro-batch is searched."""
PASSES = 3
"""Passes of the largest micro-batch: freed memory is used again from the second on."""
LEAST_STEPS, LEAST_TRIED, MOST_STEPS = 4, 3, 40
"""Timed steps: at least, of one process; at least, with a strategy; at most."""
MOST_MICRO_BATCHES = 8
"""Micro-batches of a timed step: further ones are like these."""
WARM_UP = 2


class Measurement:
    """One process with a model of its own, alone in its process group; steps are timed for `seconds`. `report` gets the
    name of each part that begins."""

    def __init__(self, *, recipe: Recipe, device: torch.device, seconds: float, report: Callable[[str], None]) -> None:
        self.recipe, self.device, self.seconds, self.report = recipe, device, seconds, report
        self.meter = Meter(device)
        self.data = open_splits(recipe)
        requested_metrics(recipe, self.data.test.spec)
        self.order = self.data.order()

    def facts(self) -> Measurements:
        import torch.distributed.checkpoint  # noqa: F401, PLC0415 (held by every process that saves)

        self.report("building the model")
        before = self.meter.reset()
        model = build.build_model(self.recipe, self.data.train.spec).to(self.device)
        build_peak = self.meter.peak()
        state = self.placed(model)
        average = state.ema.average.values() if state.ema else ()
        held = sum(t.nbytes for t in (*model.parameters(), *model.buffers(), *optimizer_tensors(state), *average))
        # Weights read from a file take memory only once they are written to: by the optimizer, in placed().
        fixed = max(before, self.meter.now() - held)
        self.report("passes of the largest micro-batch")
        largest = self.largest_micro_batch(state)
        pass_bytes = self.pass_bytes(state, largest)
        self.report("steps")
        self.meter.reset()
        seconds = self.timed(state)
        step_bytes = self.meter.peak() - fixed - held
        self.report("each block of the model")
        batch, autocast = largest.batch, state.precision.autocast
        profile, uncuttable = attempted(lambda: profile_modules(PartitionedModel(model), batch, autocast))
        plan, unsplittable = attempted(lambda: splittable(model))
        split, split_counts = plan or (frozenset(), {})
        return Measurements(
            device=self.device.type,
            fixed_bytes=fixed if self.device.type == "cpu" else context_bytes(self.device),
            build_bytes=max(build_peak - fixed, 0),
            buffer_bytes=sum(b.nbytes for b in model.buffers()),
            weights=weights_of(model, profile, split),
            blocks=blocks_of(model, batch, autocast, profile=profile),
            optimizer_bytes=sum(tensor.nbytes for tensor in optimizer_tensors(state)),
            pass_bytes=pass_bytes,
            step_bytes=step_bytes,
            step_shards=min(self.recipe.train.shards, MOST_MICRO_BATCHES),
            recomputes=self.recipe.train.recompute,
            seconds=seconds,
            obstacles=profile.obstacles() if profile else {},
            uncuttable=uncuttable,
            split_counts=split_counts,
            unsplittable=unsplittable,
            links=None,
        )

    def placed(self, model: Model) -> TrainState:
        """Place the model with the strategy of one process, not the recipe's own."""
        recipe = self.recipe.model_copy(update={"parallel": strategy("single")})
        sample = partial(self.data.first_training_batch, self.order, self.device)
        total = recipe.train.total_steps(self.order.steps_per_epoch)
        return build.distribute(recipe, model, sample, total_steps=total, device=self.device)

    def steps(self, state: TrainState, *, start: int) -> Iterator[list[MicroBatch]]:
        """Iterate over the micro-batches of the run's steps, from step `start` on."""
        stop = start + MOST_STEPS + WARM_UP
        requests = TrainingRequests(order=self.order, owned=state.strategy.owned, start=start, stop=stop)
        return self.data.training_loader(requests, self.device).steps()

    def largest_micro_batch(self, state: TrainState) -> MicroBatch:
        """Find the micro-batch with the most numbers: samples times the longest of them."""
        lengths, sizes = self.order.lengths, {}
        for number in range(min(self.order.steps_per_epoch, LOOK_STEPS)):
            for shard, rows in enumerate(self.order.shards(number)):
                longest = lengths[rows].max() if lengths is not None and len(rows) else 1
                sizes[number, shard] = len(rows) * int(longest)
        number, shard = max(sizes, key=lambda key: sizes[key])
        return next(each for each in next(iter(self.steps(state, start=number))) if each.shard == shard)

    def pass_bytes(self, state: TrainState, micro_batch: MicroBatch) -> int:
        """Measure the peak memory of a forward and backward pass beyond what was held before."""
        alone, most = replace(micro_batch, present=frozenset([micro_batch.shard])), 0
        for _ in range(PASSES):
            before = self.meter.reset()
            state.strategy.forward_backward([alone])
            most = max(most, self.meter.peak() - before)
            state.optimizer.zero_grad(set_to_none=True)
        return most

    def timed(self, state: TrainState) -> Seconds:
        """Time the run's steps and the fetching of their micro-batches, each the median over steps."""
        passes, updates, fetches = list[float](), list[float](), list[float]()
        start, steps = time.perf_counter(), self.steps(state, start=0)
        with timed_passes(state) as pass_seconds:
            for number in range(MOST_STEPS):
                begin = time.perf_counter()
                micro_batches = list(islice(next(steps), MOST_MICRO_BATCHES))
                fetched = time.perf_counter()
                present = frozenset(each.shard for each in micro_batches)
                ready = [replace(each, present=present) for each in micro_batches]
                step(state, ready, clip=self.recipe.optim.clip)
                synchronize(self.device)
                if number >= WARM_UP:
                    fetches.append((fetched - begin) / len(micro_batches))
                    passes.append(pass_seconds[-1] / len(micro_batches))
                    updates.append(time.perf_counter() - fetched - pass_seconds[-1])
                if len(passes) >= LEAST_STEPS and time.perf_counter() - start > self.seconds:
                    break
        with suppress(ValueError):  # the loader is in the middle of a step
            steps.close()  # type: ignore[attr-defined]
        return Seconds(
            fetch=0.0 if self.recipe.data.workers else statistics.median(fetches),
            passes=statistics.median(passes),
            update=statistics.median(updates),
        )


@contextmanager
def timed_passes(state: TrainState) -> Iterator[list[float]]:
    """Collect the seconds of the strategy's forward and backward passes, one entry per step run in the context."""
    seconds, run = list[float](), state.strategy.forward_backward

    def timed(micro_batches: Sequence[MicroBatch]) -> LossSum:
        begin = time.perf_counter()
        loss = run(micro_batches)
        synchronize(loss.total.device)
        seconds.append(time.perf_counter() - begin)
        return loss

    state.strategy.forward_backward = timed  # type: ignore[method-assign]
    try:
        yield seconds
    finally:
        state.strategy.forward_backward = run  # type: ignore[method-assign]


def attempted(make: Callable[[], T]) -> tuple[T | None, str | None]:
    """Return what is made of the model; or why a strategy cannot take it."""
    try:
        return make(), None
    except ModelError as error:
        return None, str(error)


def blocks_of(
    model: Model, batch: Batch, autocast: Callable[[], Any], *, profile: ModuleProfile | None
) -> tuple[Block, ...]:
    """Return each block's memory and share of the time."""
    kept = kept_by_block(model, batch, autocast)
    seconds = profile.seconds if profile else [1.0] * len(kept)
    total = sum(seconds)
    return tuple(
        Block(saved_bytes=saved, handed_bytes=passed_on, seconds=each / total)
        for (saved, passed_on), each in zip(kept, seconds, strict=True)
    )


def weights_of(model: Model, profile: ModuleProfile | None, split: frozenset[str]) -> tuple[Weight, ...]:
    """Return the model's weights with their blocks."""
    holders: dict[str, list[int]] = {name: [] for name, _ in model.named_parameters()}
    first = {parameter: name for name, parameter in model.named_parameters()}
    for number, block in enumerate(with_weights(model.blocks())):
        for parameter in set(block.parameters()):
            holders[first[parameter]].append(number)
    by_row = {embedding.weight for embedding in large_embeddings(model)}
    return tuple(
        Weight(
            name=name,
            rows=parameter.shape[0] if parameter.ndim else 1,
            bytes=parameter.nbytes,
            is_trained=parameter.requires_grad,
            block=profile.holders[name][0] if profile else min(holders[name], default=0),
            is_root=len(holders[name]) != 1,
            is_split=name in split,
            is_added_by_row=parameter in by_row,
        )
        for name, parameter in model.named_parameters()
    )


def optimizer_tensors(state: TrainState) -> list[Tensor]:
    return [value for values in state.optimizer.state.values() for value in values.values() if torch.is_tensor(value)]


def context_bytes(device: torch.device) -> int:
    """Return the bytes that a process holds on a GPU besides its tensors."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


def kept_by_block(model: Model, batch: Batch, autocast: Callable[[], Any]) -> list[tuple[int, int]]:
    """Run a forward pass -> for each block with weights the bytes kept since the end of the block before, and the bytes
    of its outputs.

    Storage that several operations keep counts once; weights do not count. With train.recompute, what blocks would keep
    without it is counted: a block in evaluation mode is not recomputed (its submodules stay in training mode, for
    their dropout).
    """
    blocks = with_weights(model.blocks())
    known = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    known |= {column.untyped_storage().data_ptr() for column in batch.values()}
    kept, passed_on = [0] * len(blocks), [0] * len(blocks)
    done = 0

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            known.add(storage.data_ptr())
            kept[min(done, len(blocks) - 1)] += storage.nbytes()
        return tensor

    def left(_: Any, __: Any, outputs: Any) -> None:
        nonlocal done
        leaves = pytree.tree_leaves(outputs)
        passed_on[min(done, len(blocks) - 1)] = sum(each.nbytes for each in leaves if isinstance(each, Tensor))
        done += 1

    handles = [block.register_forward_hook(left) for block in blocks]
    try:
        for block in blocks:
            block.training = False  # not its submodules: see above
        with saved_tensors_hooks(pack, lambda tensor: tensor), autocast():
            outputs = model(batch)
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            total = unweighted(model.loss(widened(outputs), batch)).total
        assert torch.is_tensor(total)  # the graph has to live until here
    finally:
        for handle in handles:
            handle.remove()
        model.train()
    return list(zip(kept, passed_on, strict=True))


def timed_strategies(
    recipe: Recipe,
    names: list[str],
    *,
    world: World,
    device: torch.device,
    seconds: float,
    report: Callable[[str], None],
) -> dict[str, float]:
    """Time strategies -> name -> seconds of a steady step of `shortened(recipe)`, without those that cannot run here.

    Collective: all ranks call it in the open process group. `seconds`: minimum duration of each trial. `report` gets
    the name of each that begins. Strategies that return memory to the system come first, since the others keep it.
    """
    times = {}
    for name in sorted(names, key=lambda name: not plugins.find("parallel.strategies", name).Config.FILLS):
        trial = shortened(recipe).model_copy(update={"parallel": strategy_of(recipe, name)})
        report(f"steps with {name}")
        with suppress(LockstepError):  # its forecast says why
            times[name] = step_seconds(trial, world, device, seconds=seconds)
    return times


def shortened(recipe: Recipe) -> Recipe:
    """Return the recipe with at most MOST_MICRO_BATCHES micro-batches in a step."""
    train = recipe.train
    batch = min(train.global_batch, MOST_MICRO_BATCHES * train.micro_batch)
    return recipe.model_copy(update={"train": train.model_copy(update={"global_batch": batch})})


def step_seconds(recipe: Recipe, world: World, device: torch.device, *, seconds: float) -> float:
    """Time steps as the training loop runs them -> the median. Raises LaunchError, ModelError."""
    components = build.assemble(recipe, world, device)
    agreement, steps, times, count = Agreement(flags=3), components.steps(0), list[float](), MOST_STEPS
    while len(times) < min(count, components.total_steps):
        begin = time.perf_counter()
        outcome = step(components.state, next(steps), clip=recipe.optim.clip)
        outcome.numbers().tolist()
        agreement.read()
        agreement.post([False] * 3)
        times.append(time.perf_counter() - begin)
        if len(times) == WARM_UP:
            count = broadcast_object(WARM_UP + max(LEAST_TRIED, min(MOST_STEPS, round(seconds / times[-1]))))
    agreement.read()
    with suppress(ValueError):  # the loader is in the middle of a step
        steps.close()  # type: ignore[attr-defined]
    return statistics.median(times[WARM_UP:] or times)
