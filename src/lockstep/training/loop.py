"""The training loop. Every branch with a collective in it is taken by all ranks or by none."""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch

from lockstep.base import user_code
from lockstep.base.errors import CheckpointError, ConfigError, Interrupted, LockstepError, NonFiniteLoss
from lockstep.base.events import Bus, EpochDone, Evaluated, StepDone, TextSample, TextsGenerated, Warned
from lockstep.base.model_contracts import SAMPLES, MicroBatch
from lockstep.checkpoint.layout import CheckpointSection
from lockstep.checkpoint.retention import is_better
from lockstep.core.distributed.collectives import Agreement, broadcast_object
from lockstep.core.host.phases import phase
from lockstep.core.numerics.loss import shown
from lockstep.observe.meters import Throughput
from lockstep.training.deadline import Deadline
from lockstep.training.digest_chain import link
from lockstep.training.rank_times import RankClock
from lockstep.training.saving import Saving
from lockstep.training.state import BestSoFar, TrainState
from lockstep.training.steering import FLAGS, Agreed, Steering
from lockstep.training.step import Outcome, step
from lockstep.training.training_config import EvaluateSection, TrainSection

JOINS = 3
"""The place of its flag among those that are agreed on after each step."""


class ProcessJoins(Exception):  # noqa: N818 (no error)
    """Raised on all ranks after the same step: another process waits to join."""


@dataclass(kw_only=True)
class LoopProgress:
    """How far the work after a step has come, which may be cut short by the loss of a process, and done again."""

    settled: int | None = None
    """The last step that was evaluated, saved and published, as far as that was due; None before the first."""
    is_over: bool = False
    """Whether training stops early after it."""
    published: dict[type, int] = field(default_factory=dict)
    """Kind of event -> the last step of one that was published."""
    flags: list[int] = field(default_factory=list)
    """What this rank posted after the last settled step."""
    requests: tuple[int, list[int]] | None = None
    """A step, and what observers have asked for in it."""
    last_save: float = field(default_factory=time.monotonic)
    owes_save: bool = False
    """Whether a save was given up."""


@dataclass(kw_only=True)
class Training:
    """What the loop needs; independent of the strategy."""

    state: TrainState
    train: TrainSection
    evaluation: EvaluateSection
    steps: Callable[[int], Iterator[list[MicroBatch]]]
    """Step to start at -> this rank's micro-batches, a list per step."""
    evaluate: Callable[[], tuple[int, dict[str, float], tuple[TextSample, ...]]] | None
    """Evaluate the model: (samples, name -> value, what a language model generates). None: somebody else does."""
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
    token_seconds: float | None = None
    """Of a language model, on the main rank: seconds that all processes would take for a token at their peak."""
    owes_evaluation: bool = False
    """Whether the evaluation due after the resumed step failed and has to be repeated."""
    throughput: Throughput = field(default_factory=Throughput)
    unread: list[tuple[int, Outcome]] = field(default_factory=list)
    """(step, outcome) since the last logged step, still on the device: reading them waits for it."""
    outcome: Outcome | None = None
    """Of the step that `stepping` has yielded last."""
    is_joined: Callable[[], bool] = lambda: False
    """Whether this rank knows of a process that waits to join the others."""
    progress: LoopProgress = field(default_factory=LoopProgress)
    metrics: dict[str, float] = field(default_factory=dict)
    """Of the last step, if it was evaluated."""
    ended: tuple[str, dict[str, float]] = ("failed", {})
    """How it ended, and the last evaluation."""

    @property
    def is_over(self) -> bool:
        """Whether this was the last step."""
        return self.state.step == self.total_steps

    @property
    def is_evaluation_due(self) -> bool:
        """Whether the settings ask for an evaluation after this step."""
        is_due = self.is_over or self.evaluation.is_due(self.state.step, self.steps_per_epoch)
        return is_due and self.evaluate is not None

    @property
    def is_logged(self) -> bool:
        """Whether the values of this step are published."""
        return self.state.step % self.log_every == 0 or self.is_over

    @property
    def epoch(self) -> int:
        """Epoch of the last finished step, from 1."""
        return (self.state.step - 1) // self.steps_per_epoch + 1


def train(run: Training) -> tuple[str, dict[str, float]]:
    """Train from the state's step to the end; returns how it ended and the last evaluation.

    Raises what `stepping` does.
    """
    for micro_batches in stepping(run):
        with user_code.noting_step(run.state.step + 1):
            run.outcome = step(run.state, micro_batches, clip=run.clip, skip_non_finite=run.train.non_finite == "skip")
    return run.ended


def stepping(run: Training) -> Iterator[list[MicroBatch]]:
    """Yield this rank's micro-batches of one step after the other, each to be run before the next is asked for, with
    the outcome in `run.outcome`.

    Raises NonFiniteLoss (train.non_finite=stop), Desync, ProcessJoins, and, after a checkpoint, Interrupted on a signal
    or at train.max_minutes.
    """
    state, progress, agreement = run.state, run.progress, Agreement(flags=4 + FLAGS)
    progress.is_over = progress.is_over or _repeat_evaluation(run)
    ranks = RankClock(agreement.group)
    progress.flags = progress.flags or [False, False, False, False, *run.steering.flags(state.step)]
    progress.flags[JOINS] = run.is_joined()  # an earlier one has joined
    agreement.post(progress.flags)
    if progress.settled is None:
        progress.settled = state.step
    elif progress.settled < state.step:  # a process was lost before all was done that was due after the step
        _end_step(run, agreement)
    for micro_batches in () if progress.is_over else _loaded(run.steps(state.step)):
        yield micro_batches
        assert run.outcome is not None
        run.unread.append((state.step, run.outcome))
        _publish_times(run, ranks)
        publish_step(run)
        ranks.step_done(state.step, micro_batches, is_logged=run.is_logged)
        try:
            _end_step(run, agreement)
        except Interrupted:
            _publish_times(run, ranks)
            raise
        if progress.is_over:
            break
    agreement.read()
    _publish_times(run, ranks)
    run.ended = "stopped early" if progress.is_over else "finished", run.metrics


def _end_step(run: Training, agreement: Agreement) -> None:
    """Do all that is due after a step, and agree on what is due after the next. If it fails, it can be done again."""
    state, progress = run.state, run.progress
    before = state.decisions()
    try:
        stop, save, out_of_time, joins, *asked = agreement.read()
        steered = run.steering.apply(asked, state, is_last=run.is_over)
        stop_early = _settle(run, steered, save=bool(save), is_last=bool(stop or out_of_time or run.is_over))
    except BaseException:
        state.decide(before)
        raise
    progress.settled, progress.is_over = state.step, stop_early
    if stop_early:
        return
    if (stop or out_of_time) and not run.is_over:
        why = "by a signal" if stop else f"since train.max_minutes={run.train.max_minutes:g} are over"
        raise Interrupted(f"stopped {why} after step {state.step}")
    out_of_time = run.is_main and run.deadline.is_near(run.saving.expected_seconds)
    is_save_due = progress.owes_save or _is_save_time(run, progress.last_save)
    progress.flags = [run.interrupted(), is_save_due, out_of_time, run.is_joined(), *_requests(run)]
    if joins and not run.is_over:
        raise ProcessJoins
    agreement.post(progress.flags)


def _settle(run: Training, steered: Agreed, *, save: bool, is_last: bool) -> bool:
    """Evaluate, compare and save after a step, as far as that is due -> whether to stop early."""
    state, progress = run.state, run.progress
    run.metrics = {}
    if run.is_evaluation_due or (steered.evaluate and run.evaluate is not None):
        run.metrics = _evaluate(run)
    improved, stop_early = _compare_metrics(run, run.metrics)
    stop_early = stop_early or steered.stop
    if run.desync_every and state.step % run.desync_every == 0:
        run.compare_ranks(state.step)
    if state.step % run.steps_per_epoch == 0:
        _publish_once(run, EpochDone(epoch=run.epoch, step=state.step))
    _requests(run)  # before a save: a resume from it meets no event of this step again
    is_last = is_last or stop_early
    if save or improved or is_last or steered.save or _is_save_step(run):
        _save(run, run.metrics, is_last=is_last)
        progress.last_save, progress.owes_save = time.monotonic(), False
    run.saving.poll()
    return stop_early


def _requests(run: Training) -> list[int]:
    """What observers have asked for in this step; asked once."""
    if run.progress.requests is None or run.progress.requests[0] != run.state.step:
        run.progress.requests = run.state.step, run.steering.flags(run.state.step)
    return run.progress.requests[1]


def _publish_once(run: Training, event: StepDone | EpochDone | Evaluated | TextsGenerated) -> None:
    """Publish an event of the present step, unless that was done before a process was lost."""
    if run.progress.published.get(type(event)) != event.step:
        run.progress.published[type(event)] = event.step
        run.bus.publish(event)


def _loaded(steps: Iterator[list[MicroBatch]]) -> Iterator[list[MicroBatch]]:
    """The same steps; waiting for them counts as data."""
    while True:
        with phase("data"):
            micro_batches = next(steps, None)
        if micro_batches is None:
            return
        yield micro_batches


def _publish_times(run: Training, ranks: RankClock) -> None:
    times = ranks.read()
    if times is not None:
        run.bus.publish(times)


def _repeat_evaluation(run: Training) -> bool:
    """Repeat an evaluation that failed before the resume -> whether to stop early."""
    if not run.owes_evaluation:
        return False
    run.metrics = _evaluate(run)
    _, stop_early = _compare_metrics(run, run.metrics)
    _save(run, run.metrics, is_last=stop_early or run.state.step >= run.total_steps)
    run.owes_evaluation = False
    return stop_early


def _save(run: Training, metrics: dict[str, float], *, is_last: bool) -> None:
    """Start a save; wait for the last one, which must not fail."""
    read_outcomes(run)
    run.throughput.pause()
    if is_last:
        run.stopping()
    with phase("saving"):
        run.saving.start(metrics)
        if is_last:
            run.saving.finish()
    run.throughput.resume()


def publish_step(run: Training) -> None:
    """Publish the last step; if it is logged, read all outcomes from the device and publish their values."""
    state, outcome = run.state, run.outcome
    if outcome is None or run.progress.published.get(StepDone) == state.step:
        return
    if not run.is_logged:
        _publish_once(run, StepDone(step=state.step, epoch=run.epoch))
        return
    loss = outcome.loss
    mean, norm = read_outcomes(run)
    means = {**{name: float(outcome.mean(value)) for name, value in loss.sums.items()}, "loss": mean}
    values = shown({**means, **run.derived(means)})
    values |= {"learning_rate": outcome.rate, "gradient_norm": norm}
    speed = run.throughput.look(run.samples_at(state.step))
    if speed is not None:
        values["samples_per_second"] = speed
        if samples_per_token := means.get(SAMPLES):
            values["tokens_per_second"] = speed / samples_per_token
            if run.token_seconds is not None:
                values["mfu"] = values["tokens_per_second"] * run.token_seconds
    _publish_once(run, StepDone(step=state.step, epoch=run.epoch, values=values, chain=state.chain))


def read_outcomes(run: Training) -> tuple[float, float]:
    """Copy the unread outcomes from the device at once, add them to the digest chain and check that they are finite.

    Returns loss and gradient norm of the last step, NaN if there was none to read; the same on every rank.
    """
    unread, run.unread = run.unread, []
    if not unread:
        return math.nan, math.nan
    table = torch.stack([outcome.numbers() for _, outcome in unread]).tolist()
    failed = []
    for (number, outcome), (loss, norm, is_finite, is_empty) in zip(unread, table, strict=True):
        run.state.chain = link(run.state.chain, number, loss=loss, norm=norm, rate=outcome.rate)
        if is_empty:
            what = f"step {number} was skipped: its loss counts nothing (the count of each of its micro-batches is 0)"
            run.bus.publish(Warned(message=f"{what}; look at the labels, or masks, of its samples"))
        if not is_finite:
            failed.append((number, outcome))
    _check_finite(run, failed)
    return table[-1][0], table[-1][1]


def _check_finite(run: Training, failed: list[tuple[int, Outcome]]) -> None:
    """Raise NonFiniteLoss, or warn, with the samples of each step whose loss or gradient is not finite."""
    for number, outcome in failed:
        assert outcome.loss.by_shard is not None
        bad = torch.nonzero(~torch.isfinite(outcome.loss.by_shard)).flatten().tolist()
        where = "; ".join(run.describe(number - 1, shard) for shard in bad[:3])
        what = f"the loss became NaN or infinite in step {number}: {where}"
        if not bad:
            what = f"the gradient became NaN or infinite in step {number}, though its loss is finite"
        if run.train.non_finite != "stop":
            run.bus.publish(Warned(message=f"{what} (train.non_finite={run.train.non_finite})"))
            continue
        raise NonFiniteLoss(
            f"{what}\n  Nothing was saved since. Look at these samples, lower optim.lr, add schedule.warmup or "
            "optim.clip;\n  or set train.non_finite=skip to leave such steps out."
        )


def _evaluate(run: Training) -> dict[str, float]:
    assert run.evaluate is not None
    read_outcomes(run)
    run.throughput.pause()
    try:
        with phase("evaluation"), run.state.for_use():
            samples, values, texts = run.evaluate()
        _check_measured(run, values)
    except LockstepError as error:
        if error.is_shared:  # else the other ranks are in other collectives
            error.args = (f"{error}\n  {_save_after_failure(run)}",)
        raise
    run.throughput.resume()
    _publish_once(run, Evaluated(step=run.state.step, epoch=run.epoch, samples=samples, values=values))
    if texts:
        _publish_once(run, TextsGenerated(step=run.state.step, samples=texts))
    return values


def _save_after_failure(run: Training) -> str:
    """Save before a failed evaluation ends the run; returns a sentence on the outcome."""
    try:
        _save(run, {}, is_last=True)
    except CheckpointError as error:
        return str(error)
    step = run.state.step
    return f"Nothing is lost: the state after step {step} has been saved, and a resume begins with this evaluation"


def _check_measured(run: Training, values: dict[str, float]) -> None:
    """Raise ConfigError, on all ranks, if checkpoint.best or train.stop_metric has no value."""
    for setting, name in (("checkpoint.best", run.checkpoint.best), ("train.stop_metric", run.train.stop_metric)):
        if name is not None and name not in values:
            error = ConfigError(f"{setting}: {name!r} was not measured (there is: {', '.join(values)})")
            error.is_shared = True
            raise error


def _compare_metrics(run: Training, metrics: dict[str, float]) -> tuple[bool, bool]:
    """Update the best values so far: whether to save a new best checkpoint, and whether to stop early."""
    best, stop_metric, stopping = run.checkpoint.best, run.train.stop_metric, run.state.stopping
    improved = bool(best and metrics and _update_best(run.state.saving, best, metrics))
    if stop_metric is None or not metrics or run.state.step >= run.total_steps:
        return improved, False
    _update_best(stopping, stop_metric, metrics)
    return improved, stopping.evaluations_since >= run.train.stop_patience


def _update_best(record: BestSoFar, metric: str, values: dict[str, float]) -> bool:
    """Compare rank 0's value with the best so far and keep the better; returns whether it improved."""
    value = broadcast_object(values[metric])
    improved = is_better(metric, value, record.best)
    if improved:
        record.best = value
    record.evaluations_since = 0 if improved else record.evaluations_since + 1
    return improved


def _is_save_step(run: Training) -> bool:
    every = run.checkpoint.every_steps
    return every is not None and run.state.step % every == 0


def _is_save_time(run: Training, last_save: float) -> bool:
    minutes = run.checkpoint.every_minutes
    return run.is_main and minutes is not None and time.monotonic() - last_save >= minutes * 60
