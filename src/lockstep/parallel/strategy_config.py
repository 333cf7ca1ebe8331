"""The settings of a strategy, with what a recipe has to know of it: its own class overrides what is different."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Self

from lockstep.base.config import PluginSection


class StrategySection(PluginSection):
    """How the model is spread."""

    FILLS: ClassVar[bool] = False
    """Whether a model may come without its weights: the strategy asks for those that a process holds."""
    SHARES_SHARDS: ClassVar[bool] = False
    """Whether several processes run the same micro-batches together."""
    MOST_PROCESSES: ClassVar[int | None] = None
    """How many processes it can run at most."""
    HAS_COMMON_BITS: ClassVar[bool] = True
    """Whether it gives the weights that other strategies give."""
    FOR_ANY_MODEL: ClassVar[Mapping[str, Any]] = {}
    """Settings with which it takes models that it does not take by itself."""

    def numeric(self, processes: int) -> dict[str, Any]:
        """The settings that change bits, for so many processes."""
        return {}

    @property
    def leaves_the_promise(self) -> str | None:
        """Why the weights are not those of other strategies, if so."""
        return None

    def contradictions(self, precision: str) -> Iterator[tuple[str, str]]:
        """Setting, and why it cannot stand beside train.precision."""
        return iter(())

    def fitted(self, processes: int) -> Self:
        """The same with groups, which change no bit, that so many processes can form."""
        return self
