"""The base class of strategies' settings, with the properties of a strategy that a recipe uses."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Self

from lockstep.base.config import PluginSection


class StrategySection(PluginSection):
    """How the model is distributed."""

    FILLS: ClassVar[bool] = False
    """Whether it takes a model without weights (deferred_init) and initialises those that a process holds."""
    SPLITS_TENSORS: ClassVar[bool] = False
    """Whether a process holds parts of parameters."""
    SHARES_SHARDS: ClassVar[bool] = False
    """Whether several processes share micro-batches."""
    MOST_PROCESSES: ClassVar[int | None] = None
    """Most processes that it can run."""
    HAS_EQUAL_WORK: ClassVar[bool] = True
    """Whether a micro-batch is as much work for one process as for another."""
    HAS_COMMON_BITS: ClassVar[bool] = True
    """Whether it gives the weights that other strategies give."""
    CAN_RECHECK: ClassVar[bool] = False
    """Whether a process can run the shards of another one (observe.recheck)."""
    FOR_ANY_MODEL: ClassVar[Mapping[str, Any]] = {}
    """Settings with which it accepts models that it does not accept by default."""

    def numeric(self, processes: int) -> dict[str, Any]:
        """Return the settings that change bits, for a number of processes."""
        return {}

    @property
    def breaks_reproducibility(self) -> str | None:
        """Reason why the weights differ from those of other strategies, if they do."""
        return None

    def contradictions(self, precision: str) -> Iterator[tuple[str, str]]:
        """Yield each setting that contradicts train.precision, with the reason."""
        return iter(())

    @property
    def state_copies(self) -> int | None:
        """Number of copies of the training state that all processes hold: with more than one, training can go on where
        processes are lost. None: each process holds a copy."""
        return 1

    @property
    def process_multiple(self) -> int:
        """The number of processes may be changed to a multiple of it; 0: not at all."""
        return 1

    def with_one_copy(self) -> Self:
        """Return the section for so few processes that they hold one copy of the training state together."""
        return self

    def fitted(self, processes: int) -> Self:
        """Return the section with group sizes that divide the number of processes; they change no bit."""
        return self
