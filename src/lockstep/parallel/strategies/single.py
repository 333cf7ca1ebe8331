"""One process: the plain loop that every other strategy must equal."""

from typing import ClassVar

from lockstep.parallel.strategy_config import StrategySection


class Config(StrategySection):
    """One process runs every shard."""

    MOST_PROCESSES: ClassVar[int | None] = 1
    CAN_RECHECK: ClassVar[bool] = True
