"""Build what a recipe describes: data, model, strategy and optimizer of one process."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from lockstep.base import plugins
from lockstep.base.contracts import DataSpec
from lockstep.base.errors import ConfigError, few
from lockstep.base.model_contracts import Batch, Model
from lockstep.base.name_patterns import matching
from lockstep.base.world import World
from lockstep.core.distributed.collectives import broadcast_object, raise_on_all_ranks
from lockstep.core.modules.deferred_init import deferred
from lockstep.core.numerics.batchnorm import synchronise
from lockstep.core.numerics.precision import Precision, prepare_compiler
from lockstep.core.numerics.seeds import Randomness, seed_all, seed_of
from lockstep.data.fingerprint import labels_of
from lockstep.models import _own_functions
from lockstep.models._adapter import attach
from lockstep.models.objectives._choice import objective_of_classes, with_objective
from lockstep.recipe.components import Components, requested_metrics, with_modes
from lockstep.recipe.recipe import Recipe
from lockstep.recipe.splits import Splits, open_splits
from lockstep.recipe.warm_start import warm_start
from lockstep.training import optim
from lockstep.training.learning_rate import learning_rate, own_schedule
from lockstep.training.optim import rules_of
from lockstep.training.optim_config import OWN
from lockstep.training.state import MovingAverage, TrainState, copies_of
from lockstep.training.trainable import make_trainable, unreached


def build_model(recipe: Recipe, spec: DataSpec) -> Model:
    """Build the model with its initial weights, which are the same on every rank and at every start."""
    seed_all(seed_of(recipe.run.seed, "weights"))
    model = _own_functions.build(recipe.model, with_objective(spec, recipe.model.objective))
    if recipe.model.adapter:
        seed_all(seed_of(recipe.run.seed, "adapter"))
        attach(model, recipe.model.adapter, has_new_head=recipe.model.HAS_NEW_HEAD)
    freeze(model, recipe.model.freeze)
    parameters = dict(model.named_parameters())
    for name in first_steps(model, recipe.model.unfreeze):
        parameters[name].requires_grad = True
    if recipe.train.label_smoothing:
        objective_of_classes(model, "train.label_smoothing").smoothing = recipe.train.label_smoothing
    make_trainable(model)
    return model


def initial_model(recipe: Recipe, spec: DataSpec) -> Model:
    """Return the model as training starts with it, also after a warm start; not for several processes."""
    model = build_model(recipe, spec)
    if recipe.model.init:
        warm_start(model, recipe.model.init)
    return model


def class_weights(setting: Literal["balanced"] | Sequence[float], data: Splits) -> list[float]:
    """Return the weight of each class, in the order of the data's labels; balanced: in inverse proportion to the number
    of its samples that are not excluded, with a mean of 1 over them. Raises ConfigError."""
    names, labels = data.train.spec.labels, labels_of(data.train)
    known = f"the classes are {few(names)}" if names else "the data has no classes"
    if setting != "balanced":
        if len(setting) != len(names):
            raise ConfigError(f"train.class_weights has {len(setting)} numbers: {known}, each of which gets one")
        return list(setting)
    if not names or labels is None or labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        raise ConfigError(
            f"train.class_weights=balanced has to count the samples of each class first: {known}; give a "
            "list of numbers, one for each"
        )
    labels = np.delete(labels, data.excluded)
    numbers = np.bincount(labels, minlength=len(names))
    if missing := [name for name, number in zip(names, numbers, strict=True) if not number]:
        raise ConfigError(f"train.class_weights=balanced, but no training sample is of {few(missing)}: give a list")
    return list(len(labels) / (len(names) * numbers))


def freeze(model: Model, patterns: Sequence[str]) -> None:
    """Exclude parameters from training. Raises ConfigError for a pattern that matches none."""
    parameters = dict(model.named_parameters())
    for name in matching(patterns, list(parameters), setting="model.freeze"):
        parameters[name].requires_grad = False


def first_steps(model: Model, unfreeze: Mapping[str, int]) -> dict[str, int]:
    """Return the first step, from 0, that trains each parameter. Raises ConfigError for a pattern that matches none."""
    names = [name for name, _ in model.named_parameters()]
    steps = unfreeze.items()
    return {name: step for key, step in steps for name in matching([key], names, setting="model.unfreeze")}


def freeze_unreached(model: Model, sample: Callable[[], Batch]) -> None:
    """Freeze weights of a pretrained model that its outputs do not depend on. A collective."""
    names = broadcast_object(unreached(model, sample) if dist.get_rank() == 0 else [])
    for name in names:
        model.get_parameter(name).requires_grad = False
    if names:
        model._lockstep_notes += (f"the outputs do not depend on {few(names)}: left as they are, not trained",)


def assemble(
    recipe: Recipe,
    world: World,
    device: torch.device,
    *,
    data: Splits | None = None,
    placing: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Components:
    """Build everything for this process; the process group is open and the data has been prepared. `data` is what this
    process has prepared itself, and `placing` the context in which the model is placed."""
    with raise_on_all_ranks():
        data = data or open_splits(recipe)
    data.check_streams()
    with raise_on_all_ranks():
        recipe = with_modes(recipe, requested_metrics(recipe, data.test.spec))
        model = None
        if recipe.parallel.FILLS and not (recipe.model.PRETRAINED or recipe.model.init or recipe.model.adapter):
            # The strategy materializes only its own shards. None where the model's constructor reads values.
            model = deferred(partial(build_model, recipe, data.train.spec))
        model = model or build_model(recipe, data.train.spec).to(device)
        if (objective := getattr(model, "objective", None)) is not None and getattr(model, "own_loss", None) is None:
            for faults in data.faults.values():
                faults.outside = objective.outside
        if (weights := recipe.train.class_weights) is not None:
            objective = objective_of_classes(model, "train.class_weights")
            objective.class_weights = torch.tensor(class_weights(weights, data), device=device)
    if recipe.train.batchnorm == "sync" and world.size > 1:
        synchronise(model, device)
    started = warm_start(model, recipe.model.init, data.train.spec.labels) if recipe.model.init else None
    flops = token_flops(model, recipe.data.context) if recipe.data.PACKS and world.is_main else None
    order = data.order()
    total_steps = recipe.train.total_steps(order.steps_per_epoch)
    sample = partial(data.first_training_batch, order, device, workers=0)
    with placing():
        state = distribute(recipe, model, sample, total_steps=total_steps, device=device)
    return Components(
        recipe=recipe,
        world=world,
        device=device,
        order=order,
        model=model,
        state=state,
        data=data,
        total_steps=total_steps,
        token_flops=flops,
        warm_start=started,
    )


def token_flops(model: Model, context: int) -> int:
    """Return operations per token of a sample of `context` tokens, forward and backward, of matrix products and
    attention: 6 for each weight, except of embeddings that are only looked up, and 12 T for each number of attention's
    width.

    What is recomputed does not count, and what a causal mask hides does. Of a mixture of experts, all count.
    Source: A. Chowdhery et al., PaLM, 2022, appendix B: model FLOPs utilization (MFU).
    """
    multiplied = {
        weight: weight.numel()
        for module in model.modules()
        for weight in module.parameters(recurse=False)
        if weight.ndim > 1 and not isinstance(module, nn.Embedding)
    }
    return 6 * sum(multiplied.values()) + 12 * context * model.attention_width


def distribute(
    recipe: Recipe, model: Model, sample: Callable[[], Batch], *, total_steps: int, device: torch.device
) -> TrainState:
    """Place a model by the recipe's strategy, and build the rest of the training state; `sample` loads some batch."""
    if recipe.model.PRETRAINED:
        freeze_unreached(model, sample)
    randomness = Randomness(seed_of(recipe.run.seed, "training"))
    targets = recipe.data.context if recipe.data.PACKS else 1
    precision, exact = Precision(recipe.train.precision, device, targets=targets), recipe.run.reproducibility == "exact"
    if recipe.train.compile:
        with raise_on_all_ranks():
            prepare_compiler(device, exact=exact)
    randomness.watch(model.blocks(), recompute=recipe.train.recompute, compiles=recipe.train.compile)
    strategy = plugins.implementation("parallel.strategies", recipe.parallel.kind).build(
        recipe.parallel, randomness=randomness, precision=precision, exact=exact
    )
    with raise_on_all_ranks():
        held, copied = first_steps(model, recipe.model.unfreeze), {each.copy for each in model._lockstep_averages}
        if both := sorted(held.keys() & copied):
            raise ConfigError(f"model.unfreeze: {both[0]} is a copy, which averages() updates; it cannot be trained")
        rules, own = rules_of(recipe.optim, model), own_schedule(recipe.schedule, recipe.model.code)
    module = strategy.place(model.train(), sample)
    with raise_on_all_ranks():
        copies = copies_of(module, model._lockstep_averages)
        if recipe.optim.kind == OWN:
            optimizer = optim.build_own(recipe.optim, module, recipe.model.code)
        else:
            optimizer = optim.build(recipe.optim, module, rules)
        optim.initialise(module, optimizer, is_split=len(strategy.copies) < dist.get_world_size())
    sizes = {"total_steps": total_steps, "global_batch": recipe.train.global_batch}
    return TrainState(
        strategy=strategy,
        module=module,
        optimizer=optimizer,
        precision=precision,
        rate=lambda step: learning_rate(recipe.optim, recipe.schedule, step=step, own=own, **sizes),
        clip_value=recipe.optim.clip_value,
        randomness=randomness,
        term_counts=model.term_counts,
        held=held,
        copies=copies,
        ema=MovingAverage(module, recipe.train.ema) if recipe.train.ema else None,
    )
