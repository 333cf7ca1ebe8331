"""Inputs and progress of the training loop."""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from lockstep.base.events import Bus, TextSample
from lockstep.base.model_contracts import MicroBatch
from lockstep.checkpoint.layout import CheckpointSection
from lockstep.observe.meters import Throughput
from lockstep.training.saving import Saving
from lockstep.training.state import TrainState
from lockstep.training.steering import Steering
from lockstep.training.step import Outcome
from lockstep.training.training_config import EvaluateSection, TrainSection

SPARE_SECONDS = 2.0
"""Reserve for the end of the run: summary, observers, process group."""


class Deadline:
    """A limit in minutes from the start of the process, before which the run saves and stops; only rank 0's counts."""

    def __init__(self, minutes: float | None, began: float) -> None:
        self.end = None if minutes is None else began + minutes * 60
        """Unix time, like `began`."""
        self._longest = 0.0
        self._last: float | None = None

    def is_near(self, save_seconds: float) -> bool:
        """Return whether to stop now; called once per step. Allows for two more steps, each as long as the longest so
        far (which may include an evaluation), and a save of twice the expected duration."""
        if self.end is None:
            return False
        now = time.time()
        if self._last is not None:
            self._longest = max(self._longest, now - self._last)
        self._last = now
        return now + 3 * self._longest + 2 * save_seconds + SPARE_SECONDS >= self.end


@dataclass(kw_only=True)
class LoopProgress:
    """Progress of the work after a step, which the loss of a process may cut short, and which is then done again."""

    settled: int | None = None
    """The last step that was evaluated, saved and published, as far as that was due; None before the first."""
    is_over: bool = False
    """Whether training stops early after it."""
    published: dict[type, int] = field(default_factory=dict)
    """Kind of event -> the last step of one that was published."""
    flags: list[int] = field(default_factory=list)
    """Flags that this rank posted after the last settled step."""
    requests: tuple[int, list[int]] | None = None
    """A step, and the observers' requests in it."""
    last_save: float = field(default_factory=time.monotonic)
    owes_save: bool = False
    """Whether a save was given up."""


@dataclass(kw_only=True)
class Training:
    """Inputs and state of the loop, independent of the strategy."""

    state: TrainState
    train: TrainSection
    evaluation: EvaluateSection
    steps: Callable[[int], Iterator[list[MicroBatch]]]
    """Step to start at -> this rank's micro-batches, a list per step."""
    evaluate: Callable[[], tuple[int, dict[str, float], tuple[TextSample, ...]]] | None
    """Evaluate the model: (samples, name -> value, what a language model generates). None: the caller does."""
    saving: Saving
    compare_ranks: Callable[[int], None]
    """Raise Desync if the ranks' weights differ; takes the step."""
    describe: Callable[[int, int], str]
    """(step, shard) -> rank and sample indices, for messages."""
    bus: Bus
    total_steps: int
    steps_per_epoch: int
    samples_at: Callable[[int], int]
    """Number of steps -> training samples seen."""
    derived: Callable[[Mapping[str, float]], Mapping[str, float]]
    """Model.derived."""
    clip: float | None
    log_every: int
    desync_every: int | None
    checkpoint: CheckpointSection
    is_main: bool
    """Whether this rank's clock decides."""
    deadline: Deadline
    interrupted: Callable[[], bool]
    """Whether this rank has received a signal to stop."""
    steering: Steering
    stopping: Callable[[], None]
    """Called before the last save, which has no time limit."""
    replayed: str = ""
    """Path of the run, for `lockstep replay`; empty for a script's own loop."""
    token_seconds: float | None = None
    """Seconds that all processes would take for a token of a language model at their peak; on the main rank."""
    owes_evaluation: bool = False
    """Whether the evaluation due after the resumed step failed and has to be repeated."""
    throughput: Throughput = field(default_factory=Throughput)
    unread: list[tuple[int, Outcome]] = field(default_factory=list)
    """(step, outcome) since the last logged step, still on the device: reading them waits for it."""
    outcome: Outcome | None = None
    """Outcome of the step that `stepping` has yielded last."""
    is_joined: Callable[[], bool] = lambda: False
    """Whether this rank knows of a process that waits to join the others."""
    progress: LoopProgress = field(default_factory=LoopProgress)
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the last step, if it was evaluated."""
    ended: tuple[str, dict[str, float]] = ("failed", {})
    """How it ended, and the last evaluation."""

    @property
    def is_over(self) -> bool:
        """Whether this was the last step."""
        return self.state.step == self.total_steps

    @property
    def is_logged(self) -> bool:
        """Whether the values of this step are published."""
        return self.state.step % self.log_every == 0 or self.is_over

    @property
    def epoch(self) -> int:
        """Epoch of the last finished step, from 1."""
        return (self.state.step - 1) // self.steps_per_epoch + 1
