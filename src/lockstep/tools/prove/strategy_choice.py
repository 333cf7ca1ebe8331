"""Which strategies a proof compares, each with settings that suit the model's recipe."""

from lockstep.base import plugins
from lockstep.base.config import PluginSection
from lockstep.base.errors import LockstepError
from lockstep.run.recipe import Recipe

KINDS = ("single", "ddp", "fsdp", "pipeline")
"""Those that give the same bits."""


def processes_of(kind: str) -> int:
    """How many a strategy is run on."""
    return 1 if kind == "single" else 2


def compared(recipe: Recipe) -> list[str]:
    """The strategies beside the first run, which is the recipe's own on one process."""
    return [kind for kind in KINDS if kind != recipe.parallel.kind or processes_of(kind) > 1]


def section(recipe: Recipe, kind: str) -> PluginSection | str:
    """The recipe's own settings of a strategy, else those it has by itself; or why it cannot be used here."""
    if recipe.parallel.kind == kind:
        return recipe.parallel
    try:
        config: PluginSection = plugins.find("parallel.strategies", kind).Config(
            kind=kind, **({"find_unused": True} if kind == "ddp" else {})
        )
    except (ValueError, LockstepError) as error:  # such as a torch that is too old
        return str(error)
    return config


def own_bits(recipe: Recipe) -> str | None:
    """Why the recipe's strategy gives other weights than others do, if so."""
    own, kind = recipe.parallel, recipe.parallel.kind
    numeric = getattr(own, "numeric", None)
    if reason := getattr(own, "leaves_the_promise", None):
        return str(reason)
    if numeric is not None and (settings := numeric(1)):
        told = ", ".join(f"parallel.{name}={value}" for name, value in settings.items())
        return f"{told}: with it {kind} has weights of its own"
    return None


def fitting(parallel: PluginSection, processes: int) -> PluginSection:
    """The same strategy on so many processes: with groups, which change no bit, that they can form."""
    own = parallel.model_dump()
    if parallel.kind == "pipeline":
        stages = own["stages"] if own["cut"] == "auto" else len(own["cut"]) + 1
        if stages != "auto" and processes % stages:
            return parallel.model_copy(update={"stages": "auto", "cut": "auto"})
    if parallel.kind == "fsdp" and processes % own["replicas"]:
        return parallel.model_copy(update={"replicas": 1})
    return parallel
