"""The loop: step, look, keep. Every branch that touches a collective is taken by all ranks or by none."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from lockstep.base import user_code
from lockstep.base.errors import CheckpointError, ConfigError, Interrupted, LockstepError, NonFiniteLoss
from lockstep.base.events import Bus, EpochDone, Evaluated, StepDone, Warned
from lockstep.base.model_contracts import MicroBatch
from lockstep.checkpoint.layout import CheckpointSection
from lockstep.checkpoint.retention import is_better
from lockstep.core.distributed.collectives import Agreement, broadcast_object
from lockstep.observe.meters import Throughput
from lockstep.training.deadline import Deadline
from lockstep.training.digest_chain import link
from lockstep.training.saving import Saving
from lockstep.training.state import StepRecord, TrainState
from lockstep.training.step import Outcome, step
from lockstep.training.training_config import EvaluateSection, TrainSection


@dataclass(kw_only=True)
class Training:
    """What the loop needs; assembled by the recipe, nothing in it knows of the strategy."""

    state: TrainState
    train: TrainSection
    evaluation: EvaluateSection
    steps: Callable[[int], Iterator[list[MicroBatch]]]
    """This rank's micro-batches from a given step on, a list per step."""
    evaluate: Callable[[], tuple[int, dict[str, float]]]
    """Measure the model as it is: (samples, name -> value)."""
    saving: Saving
    compare_ranks: Callable[[int], None]
    """Stop where the ranks' weights have come apart, which they should not; takes the step."""
    describe: Callable[[int, int], str]
    """(step, shard) -> rank and sample indices, for people."""
    bus: Bus
    total_steps: int
    steps_per_epoch: int
    samples_at: Callable[[int], int]
    """Training samples seen after so many steps."""
    clip: float | None
    log_every: int
    desync_every: int | None
    checkpoint: CheckpointSection
    is_main: bool
    """Whether this rank's clock counts."""
    deadline: Deadline
    interrupted: Callable[[], bool]
    """Whether this rank has been asked to stop."""
    stopping: Callable[[], None]
    """Told when it is about to: the last save takes as long as it takes."""
    owes_evaluation: bool = False
    """Whether the evaluation of the step that it begins after is still to be made."""
    throughput: Throughput = field(default_factory=Throughput)
    unread: list[tuple[int, Outcome]] = field(default_factory=list)
    """(step, outcome) since the last look, on the device: looking waits for it."""

    @property
    def epoch(self) -> int:
        """The epoch that the last finished step belongs to, from 1."""
        return (self.state.step - 1) // self.steps_per_epoch + 1


def train(run: Training) -> tuple[str, dict[str, float]]:
    """Train from where the state is to the end; returns how it ended and the last evaluation.

    Raises NonFiniteLoss (train.non_finite=stop), Desync, and Interrupted after a checkpoint when a signal came or
    train.max_minutes are over.
    """
    state, agreement, last_save = run.state, Agreement(flags=3), time.monotonic()
    metrics, enough = _caught_up(run)
    for micro_batches in () if enough else run.steps(state.step):
        is_logged = (state.step + 1) % run.log_every == 0 or state.step + 1 == run.total_steps
        with user_code.noting_step(state.step + 1):
            outcome = step(state, micro_batches, clip=run.clip, skip_non_finite=run.train.non_finite == "skip")
        _look(run, outcome, is_logged=is_logged)
        stop, save, late = agreement.read()
        metrics = {}
        if run.evaluation.is_due(state.step, run.steps_per_epoch) or state.step == run.total_steps:
            metrics = _evaluate(run)
        improved, enough = _judged(run, metrics)
        is_last = enough or stop or late or state.step == run.total_steps
        if run.desync_every and state.step % run.desync_every == 0:
            run.compare_ranks(state.step)
        if save or improved or is_last or _is_save_step(run):
            _save(run, metrics, is_last=is_last)
            last_save = time.monotonic()
        run.saving.look()
        if state.step % run.steps_per_epoch == 0:
            run.bus.publish(EpochDone(epoch=run.epoch, step=state.step))
        if enough:
            break
        if (stop or late) and state.step < run.total_steps:
            why = "by a signal" if stop else f"since train.max_minutes={run.train.max_minutes:g} are over"
            raise Interrupted(f"stopped {why} after step {state.step}")
        late = run.is_main and run.deadline.is_near(run.saving.expected_seconds)
        agreement.post([run.interrupted(), _is_time(run, last_save), late])
    agreement.read()
    return "stopped early" if enough else "finished", metrics


def _caught_up(run: Training) -> tuple[dict[str, float], bool]:
    """Make the evaluation that failed when this step was done, if one did: its values, and whether it is enough."""
    if not run.owes_evaluation:
        return {}, False
    metrics = _evaluate(run)
    _, enough = _judged(run, metrics)
    _save(run, metrics, is_last=enough or run.state.step >= run.total_steps)
    return metrics, enough


def _save(run: Training, metrics: dict[str, float], *, is_last: bool) -> None:
    """Begin to save; the last save is waited for, and must not fail."""
    _read(run)
    run.throughput.pause()
    if is_last:
        run.stopping()
    run.saving.start(metrics)
    if is_last:
        run.saving.finish()
    run.throughput.resume()


def _look(run: Training, outcome: Outcome, *, is_logged: bool) -> None:
    """Keep the losses on the device; on a logged step read them all and publish."""
    state, loss = run.state, outcome.loss
    run.unread.append((state.step, outcome))
    if not is_logged:
        run.bus.publish(StepDone(step=state.step, epoch=run.epoch))
        return
    mean, norm = _read(run)
    values = {**{name: float(outcome.mean(value)) for name, value in loss.sums.items()}, "loss": mean}
    values |= {"learning_rate": outcome.rate, "gradient_norm": norm}
    speed = run.throughput.look(run.samples_at(state.step))
    if speed is not None:
        values["samples_per_second"] = speed
    run.bus.publish(StepDone(step=state.step, epoch=run.epoch, values=values, chain=state.chain))


def _read(run: Training) -> tuple[float, float]:
    """Read the steps since the last look in one go, take each into the chain, then see whether all are finite.

    Returns the loss and the gradient norm of the last one; NaN when none was unread. The same on every rank.
    """
    unread, run.unread = run.unread, []
    if not unread:
        return math.nan, math.nan
    table = torch.stack([outcome.numbers() for _, outcome in unread]).tolist()
    for (number, outcome), (loss, norm, *_) in zip(unread, table, strict=True):
        run.state.chain = link(run.state.chain, number, loss=loss, norm=norm, rate=outcome.rate)
    for (number, _), (*_, is_empty) in zip(unread, table, strict=True):
        if is_empty:
            what = f"step {number} was skipped: its loss counts nothing (the count of each of its micro-batches is 0)"
            run.bus.publish(Warned(message=f"{what}; look at the labels, or masks, of its samples"))
    _check_finite(run, [step for step, (*_, is_finite, _) in zip(unread, table, strict=True) if not is_finite])
    return table[-1][0], table[-1][1]


def _check_finite(run: Training, failed: list[tuple[int, Outcome]]) -> None:
    """Say which samples the steps that are not finite come from."""
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
    _read(run)
    run.throughput.pause()
    try:
        with run.state.for_use():
            samples, values = run.evaluate()
        _check_measured(run, values)
    except LockstepError as error:
        if error.is_shared:  # else other ranks wait elsewhere
            error.args = (f"{error}\n  {_rescued(run)}",)
        raise
    run.throughput.resume()
    run.bus.publish(Evaluated(step=run.state.step, epoch=run.epoch, samples=samples, values=values))
    return values


def _rescued(run: Training) -> str:
    """Save before a failed evaluation ends the run; what became of it, in a sentence."""
    try:
        _save(run, {}, is_last=True)
    except CheckpointError as error:
        return str(error)
    step = run.state.step
    return f"Nothing is lost: the state after step {step} has been saved, and a resume begins with this evaluation"


def _check_measured(run: Training, values: dict[str, float]) -> None:
    """Raise ConfigError, on all ranks, where the run decides by a metric that has been shown no sample."""
    for setting, name in (("checkpoint.best", run.checkpoint.best), ("train.stop_metric", run.train.stop_metric)):
        if name is not None and name not in values:
            error = ConfigError(f"{setting}: {name!r} was not measured (there is: {', '.join(values)})")
            error.is_shared = True
            raise error


def _judged(run: Training, metrics: dict[str, float]) -> tuple[bool, bool]:
    """Whether an evaluation, if there was one, is the best so far, and whether it is enough."""
    best = run.checkpoint.best
    improved = bool(best and metrics and _note(run.state.saving, best, metrics))
    return improved, _is_enough(run, metrics)


def _note(record: StepRecord, metric: str, values: dict[str, float]) -> bool:
    """Compare with the best so far, by rank 0's numbers, and remember the better."""
    value = broadcast_object(values[metric])
    if is_better(metric, value, record.best):
        record.best, record.evaluations_since = value, 0
        return True
    record.evaluations_since += 1
    return False


def _is_enough(run: Training, metrics: dict[str, float]) -> bool:
    metric, record = run.train.stop_metric, run.state.stopping
    if metric is None or not metrics or run.state.step >= run.total_steps:
        return False
    _note(record, metric, metrics)
    return record.evaluations_since >= run.train.stop_patience


def _is_save_step(run: Training) -> bool:
    every = run.checkpoint.every_steps
    return every is not None and run.state.step % every == 0


def _is_time(run: Training, last_save: float) -> bool:
    minutes = run.checkpoint.every_minutes
    return run.is_main and minutes is not None and time.monotonic() - last_save >= minutes * 60
