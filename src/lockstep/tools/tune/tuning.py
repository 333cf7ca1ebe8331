"""Finds values for a config by trying them; a run itself never changes them."""

import math
from pathlib import Path

from rich.console import Console

from lockstep.base.errors import ConfigError
from lockstep.base.world import World
from lockstep.core.distributed.process_group import device_of
from lockstep.core.host.signals import ended_by_sigterm
from lockstep.recipe.recipe import Recipe
from lockstep.tools.trials import check_writable, prepared
from lockstep.tools.tune import learning_rate_finder, micro_batch_finder


def tune(
    recipe: Recipe,
    *,
    micro_batch: bool,
    memory_gb: float | None,
    rates: tuple[float, ...],
    picture: Path | None,
    console: Console,
) -> int:
    """Find a micro-batch, of at most `memory_gb` for each process; then, where there is a file for the picture of its
    curve, a learning rate; and print them. Returns 0, or 1 where no learning rate can be suggested.

    Raises ConfigError for options that cannot be met, TrialFailed when the model or the data fails.
    """
    if not (micro_batch or picture):
        raise ConfigError("say what to look for: --micro-batch, --lr, or both")
    if memory_gb is not None and not 0 < memory_gb < math.inf:
        raise ConfigError(f"--memory {memory_gb:g}: give GB above 0, such as --memory 8, or leave it out")
    if memory_gb is not None and not micro_batch:
        raise ConfigError("--memory belongs to --micro-batch, which is not asked for")
    check_writable("--out", picture, suffix=".svg")
    lines = []
    with ended_by_sigterm():
        samples = len(prepared(recipe).train)
        if micro_batch:
            budget = micro_batch_finder.budget_of(recipe, memory_gb, on_gpu=device_of(World()).type == "cuda")
            m = micro_batch_finder.find(recipe, budget, samples=samples, console=console)
            lines.append(f"train:\n  micro_batch: {m}")
            recipe = recipe.model_copy(update={"train": recipe.train.model_copy(update={"micro_batch": m})})
        if picture:
            if micro_batch:
                console.print()
            rate = learning_rate_finder.find(recipe, rates, picture=picture, console=console)
            lines += [] if rate is None else [f"optim:\n  lr: {rate}"]
    if lines:
        console.print("\n".join(["\nLines for the config (a run itself never changes them):\n", *lines]))
    return int(len(lines) < bool(micro_batch) + bool(picture))
