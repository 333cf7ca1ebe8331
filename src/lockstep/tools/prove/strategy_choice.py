"""Which strategies a proof compares, each with settings that suit the model's recipe."""

from lockstep.base import plugins
from lockstep.base.errors import LockstepError
from lockstep.parallel.strategy_config import StrategySection
from lockstep.run.recipe import Recipe


def processes_of(kind: str) -> int:
    """How many a strategy is run on."""
    return plugins.find("parallel.strategies", kind).Config.MOST_PROCESSES or 2


def compared(recipe: Recipe) -> list[str]:
    """The strategies that give the same bits, beside the first run, which is the recipe's own on one process."""
    found = sorted(plugins.names("parallel.strategies"), key=processes_of)
    same = [kind for kind in found if plugins.find("parallel.strategies", kind).Config.HAS_COMMON_BITS]
    return [kind for kind in same if kind != recipe.parallel.kind or processes_of(kind) > 1]


def section(recipe: Recipe, kind: str) -> StrategySection | str:
    """The recipe's own settings of a strategy, else those it has by itself; or why it cannot be used here."""
    if recipe.parallel.kind == kind:
        return recipe.parallel
    try:
        made = plugins.find("parallel.strategies", kind).Config
        config: StrategySection = made(kind=kind, **made.FOR_ANY_MODEL)
    except (ValueError, LockstepError) as error:  # such as a torch that is too old
        return str(error)
    return config


def own_bits(recipe: Recipe) -> str | None:
    """Why the recipe's strategy gives other weights than others do, if so."""
    own, kind = recipe.parallel, recipe.parallel.kind
    if own.leaves_the_promise:
        return str(own.leaves_the_promise)
    if settings := own.numeric(1):
        told = ", ".join(f"parallel.{name}={value}" for name, value in settings.items())
        return f"{told}: with it {kind} has weights of its own"
    return None
