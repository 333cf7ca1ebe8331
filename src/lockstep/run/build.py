"""Build what a recipe describes: data, model, strategy and optimizer of one process."""

from collections.abc import Callable
from functools import partial

import torch

from lockstep.base import plugins
from lockstep.base.contracts import DataSpec
from lockstep.base.model_contracts import Batch, Model
from lockstep.base.world import World
from lockstep.core.distributed.collectives import raise_on_all_ranks
from lockstep.core.modules.deferred_init import deferred
from lockstep.core.numerics.batchnorm import synchronise
from lockstep.core.numerics.compiled import prepare_compiler
from lockstep.core.numerics.precision import Precision
from lockstep.core.numerics.seeds import Randomness, seed_all, seed_of
from lockstep.run.components import Components, requested_metrics
from lockstep.run.recipe import Recipe
from lockstep.run.splits import open_splits
from lockstep.training import optim
from lockstep.training.ema import MovingAverage
from lockstep.training.state import TrainState, initialise


def build_model(recipe: Recipe, spec: DataSpec) -> Model:
    """Build the model with its initial weights, which are the same on every rank and at every start."""
    seed_all(seed_of(recipe.run.seed, "weights"))
    return plugins.implementation("models", recipe.model.kind).build(recipe.model, spec)


def _deferred_model(recipe: Recipe, spec: DataSpec) -> Model | None:
    """Build the model without memory for its weights, for strategies that materialize only their own shards.

    None where the model loads pretrained weights, or its constructor reads values.
    """
    if not recipe.parallel.FILLS or recipe.model.PRETRAINED:
        return None
    return deferred(partial(build_model, recipe, spec))


def assemble(recipe: Recipe, world: World, device: torch.device) -> Components:
    """Build everything for this process; the process group is open and the data has been prepared."""
    with raise_on_all_ranks():
        data = open_splits(recipe)
        requested_metrics(recipe, data.test.spec)
        model = _deferred_model(recipe, data.train.spec) or build_model(recipe, data.train.spec).to(device)
        if recipe.train.batchnorm == "sync" and world.size > 1:
            synchronise(model, device)
    order = data.order()
    total_steps = recipe.train.total_steps(order.steps_per_epoch)
    sample = partial(data.first_training_batch, order, device)
    return Components(
        recipe=recipe,
        world=world,
        device=device,
        order=order,
        model=model,
        state=distribute(recipe, model, sample, total_steps=total_steps, device=device),
        data=data,
        total_steps=total_steps,
    )


def distribute(
    recipe: Recipe, model: Model, sample: Callable[[], Batch], *, total_steps: int, device: torch.device
) -> TrainState:
    """Place a model by the recipe's strategy, and build its optimizer and the rest of the training state.

    `sample` loads a batch like those of training.
    """
    randomness = Randomness(seed_of(recipe.run.seed, "training"))
    precision, exact = Precision(recipe.train.precision, device), recipe.run.reproducibility == "exact"
    if recipe.train.compile:
        with raise_on_all_ranks():
            prepare_compiler(device, exact=exact)
    randomness.watch(model.blocks(), recompute=recipe.train.recompute, compiles=recipe.train.compile)
    strategy = plugins.implementation("parallel.strategies", recipe.parallel.kind).build(
        recipe.parallel, randomness=randomness, precision=precision, exact=exact
    )
    module = strategy.place(model.train(), sample)
    optimizer = optim.build(recipe.optim, module)
    initialise(module, optimizer)
    sizes = {"total_steps": total_steps, "global_batch": recipe.train.global_batch}
    return TrainState(
        strategy=strategy,
        module=module,
        optimizer=optimizer,
        precision=precision,
        rate=lambda step: optim.learning_rate(recipe.optim, recipe.schedule, step=step, **sizes),
        randomness=randomness,
        term_counts=model.term_counts,
        ema=MovingAverage(module, recipe.train.ema) if recipe.train.ema else None,
    )
