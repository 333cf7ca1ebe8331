"""What the process of a trial is asked, and what it answers."""

from dataclasses import dataclass

from lockstep.run.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class TrialRequest:
    """Measure a few steps of a recipe or, with `rates`, sweep the learning rate."""

    recipe: Recipe
    """For one process."""
    rates: tuple[float, ...] = ()
    """The learning rate of each step."""
    processes: int = 1
    """How many the run will have: they share a checkpoint's copy of the state."""
    copies: int = 0
    """So many more copies of the gradients than these steps hold will be held in the run's."""
    device_bytes: int | None = None
    """The most that may be used of a GPU; None: all of it."""


@dataclass(frozen=True, kw_only=True)
class TrialResult:
    """What became of it; said in parts, so that one who is killed has said the first."""

    began: bool = False
    """The data is open, the model and its optimizer are built: what follows depends on the micro-batch."""
    out_of_memory: bool = False
    peak_bytes: int = 0
    """Of the device: the process's own memory on a CPU, what tensors took on a GPU."""
    samples_per_second: float = 0.0
    losses: tuple[float, ...] = ()
    """Of a sweep, a loss a step, until it ended or went wrong; the last may be NaN."""
