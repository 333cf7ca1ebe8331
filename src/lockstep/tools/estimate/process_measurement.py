"""Measures one process's part of a config: the real model, the real data, one process, a few micro-batches.

V = shards of a step, m = samples of a micro-batch.
"""

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice

import torch
from torch import Tensor

from lockstep.base import plugins
from lockstep.base.errors import ModelError
from lockstep.base.model_contracts import LossSum, MicroBatch, Model
from lockstep.core.host.memory_meter import Meter
from lockstep.core.modules.blocks import with_weights
from lockstep.data.order import Order
from lockstep.data.sampler import TrainingRequests
from lockstep.parallel.measurements import Block, Measurements, Seconds, Weight
from lockstep.parallel.module_profile import ModuleProfile, survey
from lockstep.parallel.partition import Cuttable
from lockstep.parallel.tensor_plan import splittable
from lockstep.run import build
from lockstep.run.components import requested_measures
from lockstep.run.recipe import Recipe
from lockstep.run.splits import Splits, open_splits
from lockstep.tools.estimate.saved_tensors import kept_by_block
from lockstep.training.state import TrainState
from lockstep.training.step import step

LOOK_STEPS = 1000
"""The largest micro-batch is looked for in so many steps."""
PASSES = 3
"""Of the largest micro-batch: freed memory is used again from the second on."""
LEAST_STEPS, MOST_STEPS = 4, 40
MOST_MICRO_BATCHES = 8
"""Of a step that is timed: the others are like these."""
WARM_UP = 2


@dataclass(kw_only=True)
class Measurement:
    """One process with a model of its own; the process group has this process alone."""

    recipe: Recipe
    device: torch.device
    seconds: float
    """How long steps are timed."""

    def facts(self) -> Measurements:
        recipe, meter = self.recipe, Meter(self.device)
        data = open_splits(recipe)
        requested_measures(recipe, data.test.spec)
        before = meter.forget()
        model = build.build_model(recipe, data.train.spec).to(self.device)
        highest = meter.peak()
        order = data.order()
        state = self.placed(model, data, order)
        held = sum(t.nbytes for t in state_of(model, state))
        # Weights that were read from a file lie there until they are first written to: by the optimizer, in placed().
        fixed = max(before, meter.now() - held)
        largest = self.largest(data, order, state)
        pass_bytes = passed(state, largest, meter)
        meter.forget()
        timed = self.timed(state, data, order)
        step_bytes = meter.peak() - fixed - held
        found, uncuttable = self.surveyed(model, largest, state)
        split, counts, unsplittable = split_of(model)
        return Measurements(
            device=self.device.type,
            fixed_bytes=fixed if self.device.type == "cpu" else context_bytes(self.device),
            build_bytes=max(highest - fixed, 0),
            buffer_bytes=sum(b.nbytes for b in model.buffers()),
            weights=weights_of(model, found, split),
            blocks=self.blocks(model, largest, state, found=found),
            optimizer_bytes=sum(tensor.nbytes for tensor in optimizer_tensors(state)),
            pass_bytes=pass_bytes,
            step_bytes=step_bytes,
            step_shards=min(recipe.train.shards, MOST_MICRO_BATCHES),
            recomputes=recipe.train.recompute,
            seconds=timed,
            obstacles=found.obstacles() if found else {},
            uncuttable=uncuttable,
            split_counts=counts,
            unsplittable=unsplittable,
            links=None,
        )

    def placed(self, model: Model, data: Splits, order: Order) -> TrainState:
        """The model under the strategy of one process, whatever the config's own is."""
        alone = plugins.find("parallel.strategies", "single").Config(kind="single")
        recipe = self.recipe.model_copy(update={"parallel": alone})
        sample = partial(data.first_training_batch, order, self.device)
        total = recipe.train.total_steps(order.steps_per_epoch)
        return build.distribute(recipe, model, sample, total_steps=total, device=self.device)

    def micro_batches(self, data: Splits, order: Order, state: TrainState, *, start: int) -> Iterator[list[MicroBatch]]:
        """Steps of the run from one on, for as long as they are asked for."""
        stop = start + MOST_STEPS + WARM_UP
        requests = TrainingRequests(order=order, owned=state.strategy.owned, start=start, stop=stop)
        return data.training_loader(requests, self.device).steps()

    def largest(self, data: Splits, order: Order, state: TrainState) -> MicroBatch:
        """The micro-batch with the most numbers: samples times the longest of them."""
        width = {}
        for number in range(min(order.steps_per_epoch, LOOK_STEPS)):
            for shard, rows in enumerate(order.shards(number)):
                longest = order.lengths[rows].max() if order.lengths is not None and len(rows) else 1
                width[number, shard] = len(rows) * int(longest)
        step, shard = max(width, key=lambda place: width[place])
        found = next(iter(self.micro_batches(data, order, state, start=step)))
        return next(each for each in found if each.shard == shard)

    def timed(self, state: TrainState, data: Splits, order: Order) -> Seconds:
        """Steps as they come, in turn with fetching what they need; each figure is the median over steps."""
        passes, updates, fetches = list[float](), list[float](), list[float]()
        clock = Clock(state)
        began, steps = time.perf_counter(), self.micro_batches(data, order, state, start=0)
        for number in range(MOST_STEPS):
            begin = time.perf_counter()
            some = list(islice(next(steps), MOST_MICRO_BATCHES))
            fetched = time.perf_counter()
            present = frozenset(each.shard for each in some)
            step(state, [replace(each, present=present) for each in some], clip=self.recipe.optim.clip)
            finish(self.device)
            if number >= WARM_UP:
                fetches.append((fetched - begin) / len(some))
                passes.append(clock.seconds / len(some))
                updates.append(time.perf_counter() - fetched - clock.seconds)
            if len(passes) >= LEAST_STEPS and time.perf_counter() - began > self.seconds:
                break
        clock.stop()
        with suppress(ValueError):  # the loader is in the middle of a step
            steps.close()  # type: ignore[attr-defined]
        return Seconds(
            fetch=0.0 if self.recipe.data.workers else statistics.median(fetches),
            passes=statistics.median(passes),
            update=statistics.median(updates),
        )

    def surveyed(self, model: Model, largest: MicroBatch, state: TrainState) -> tuple[ModuleProfile | None, str | None]:
        """What each block holds and costs; or why a pipeline could not cut the model."""
        try:
            return survey(Cuttable(model), largest.batch, state.precision.autocast), None
        except ModelError as error:
            return None, str(error)

    def blocks(
        self, model: Model, largest: MicroBatch, state: TrainState, *, found: ModuleProfile | None
    ) -> tuple[Block, ...]:
        """Each block's memory and share of the time."""
        kept = kept_by_block(model, largest.batch, state.precision.autocast)
        seconds = found.seconds if found else [1.0] * len(kept)
        total = sum(seconds)
        return tuple(
            Block(saved_bytes=saved, handed_bytes=handed, seconds=part / total)
            for (saved, handed), part in zip(kept, seconds, strict=True)
        )


class Clock:
    """Times a strategy's passes of the last step."""

    def __init__(self, state: TrainState) -> None:
        self.state, self.seconds = state, 0.0
        self.run = state.strategy.forward_backward
        state.strategy.forward_backward = self._timed  # type: ignore[method-assign]

    def _timed(self, micro_batches: Sequence[MicroBatch]) -> LossSum:
        begin = time.perf_counter()
        loss = self.run(micro_batches)
        finish(loss.total.device)
        self.seconds = time.perf_counter() - begin
        return loss

    def stop(self) -> None:
        """Leave the strategy as it was."""
        self.state.strategy.forward_backward = self.run  # type: ignore[method-assign]


def passed(state: TrainState, micro_batch: MicroBatch, meter: Meter) -> int:
    """The most bytes that a forward and backward pass takes beside what was there."""
    alone, found = replace(micro_batch, present=frozenset([micro_batch.shard])), 0
    for _ in range(PASSES):
        before = meter.forget()
        state.strategy.forward_backward([alone])
        found = max(found, meter.peak() - before)
        state.optimizer.zero_grad(set_to_none=True)
    return found


def optimizer_tensors(state: TrainState) -> list[Tensor]:
    return [value for values in state.optimizer.state.values() for value in values.values() if torch.is_tensor(value)]


def state_of(model: Model, state: TrainState) -> list[Tensor]:
    """Every tensor that a lone process holds between two steps."""
    average = list(state.ema.tensors().values()) if state.ema else []
    return [*model.parameters(), *model.buffers(), *optimizer_tensors(state), *average]


def split_of(model: Model) -> tuple[frozenset[str], dict[str, int], str | None]:
    """What parallel.kind=tensor would split of a model, what that has to divide, and why it cannot, if so."""
    try:
        return *splittable(model), None
    except ModelError as error:
        return frozenset(), {}, str(error)


def weights_of(model: Model, found: ModuleProfile | None, split: frozenset[str]) -> tuple[Weight, ...]:
    """The model's weights with their blocks."""
    holders: dict[str, list[int]] = {name: [] for name, _ in model.named_parameters()}
    first = {parameter: name for name, parameter in model.named_parameters()}
    for number, block in enumerate(with_weights(model.blocks())):
        for parameter in set(block.parameters()):
            holders[first[parameter]].append(number)
    return tuple(
        Weight(
            name=name,
            rows=parameter.shape[0] if parameter.ndim else 1,
            bytes=parameter.nbytes,
            is_trained=parameter.requires_grad,
            block=found.holders[name][0] if found else min(holders[name], default=0),
            is_root=len(holders[name]) != 1,
            is_split=name in split,
        )
        for name, parameter in model.named_parameters()
    )


def context_bytes(device: torch.device) -> int:
    """What a process holds on a GPU besides its tensors."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


def finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
