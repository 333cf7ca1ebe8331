"""Chooses the strategies that a proof compares, each with settings that suit the recipe's model."""

from lockstep.base import plugins
from lockstep.base.errors import LockstepError
from lockstep.parallel.strategy_config import StrategySection
from lockstep.recipe.recipe import Recipe
from lockstep.tools.trials import strategy


def processes_of(kind: str) -> int:
    """Return the number of processes that a strategy is run on."""
    return plugins.find("parallel.strategies", kind).Config.MOST_PROCESSES or 2


def compared(recipe: Recipe) -> list[str]:
    """List the strategies that give the same bits, except the first run: the recipe's own on one process."""
    kinds = sorted(plugins.names("parallel.strategies"), key=processes_of)
    same = [kind for kind in kinds if plugins.find("parallel.strategies", kind).Config.HAS_COMMON_BITS]
    return [kind for kind in same if kind != recipe.parallel.kind or processes_of(kind) > 1]


def section(recipe: Recipe, kind: str) -> StrategySection | str:
    """Return the recipe's settings of a strategy, else its defaults for any model; or why it cannot be used here."""
    if recipe.parallel.kind == kind:
        return recipe.parallel
    try:
        return strategy(kind, **plugins.find("parallel.strategies", kind).Config.FOR_ANY_MODEL)
    except (ValueError, LockstepError) as error:  # such as a torch that is too old
        return str(error)


def own_bits(recipe: Recipe) -> str | None:
    """Return why the recipe's strategy gives other weights than others do, if so."""
    own, kind = recipe.parallel, recipe.parallel.kind
    if own.breaks_reproducibility:
        return str(own.breaks_reproducibility)
    if settings := own.numeric(1):
        shown = ", ".join(f"parallel.{name}={value}" for name, value in settings.items())
        return f"{shown}: with it {kind} has weights of its own"
    return None
