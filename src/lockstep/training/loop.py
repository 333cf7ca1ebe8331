"""The training loop. Every branch with a collective in it is taken by all ranks or by none."""

import time
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from lockstep.base import user_code
from lockstep.base.errors import CheckpointError, ConfigError, Interrupted, LockstepError
from lockstep.base.events import EpochDone, Evaluated, RankTimes, Steered, TextsGenerated
from lockstep.base.model_contracts import MicroBatch
from lockstep.checkpoint.metric_modes import Mode, is_better
from lockstep.core.distributed.collectives import Agreement, broadcast_object
from lockstep.core.host import gpu_meter, phases
from lockstep.core.host.activity import waiting_in
from lockstep.core.host.gpu_meter import GpuMeter
from lockstep.core.host.memory_meter import device_peak_bytes
from lockstep.core.host.phases import phase
from lockstep.core.host.stream_clock import clock_of
from lockstep.training.loop_state import Training
from lockstep.training.state import BestSoFar
from lockstep.training.steering import FLAGS, Decision
from lockstep.training.step import step
from lockstep.training.step_outcomes import publish_once, publish_step, read_outcomes

JOINS = 3
"""Index of the flag for joining processes among those that are agreed on after each step."""


class RankClock:
    """Times of each rank, gathered on every logged step beside the steps that follow: no rank waits for them."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self.clock = group, phases.start(clock_of(device))
        self.before, self.gpu = self.clock.so_far(), GpuMeter(device)
        self.steps = self.micro_batches = 0
        """Numbers since the last post."""
        self.posted: tuple[int, int, dist.Work | None, list[torch.Tensor]] | None = None
        """Step, number of steps, and the figures of each rank once the work is done."""

    def step_done(self, step: int, micro_batches: Sequence[MicroBatch], *, is_logged: bool) -> None:
        """Count a step; if it is logged, start to gather what was measured since the last such step. Collective."""
        self.steps, self.micro_batches = self.steps + 1, self.micro_batches + sum(not m.ghost for m in micro_batches)
        if not is_logged:
            return
        assert self.posted is None, "read the last figures first"
        now = self.clock.so_far()
        measured, self.before = now - self.before, now
        figures = [*measured.phases.values(), measured.delayed, float(self.micro_batches), float(device_peak_bytes())]
        figures += self.gpu.look()
        own = torch.tensor(figures, dtype=torch.float64)
        size, work, gathered = self.group.size(), None, [own]
        if size > 1:
            gathered = [torch.empty_like(own) for _ in range(size)]
            work = dist.all_gather(gathered, own, group=self.group, async_op=True)
        self.posted = step, self.steps, work, gathered
        self.steps = self.micro_batches = 0

    def read(self) -> RankTimes | None:
        """Return the figures of the last post, once. Collective."""
        if self.posted is None:
            return None
        step, steps, work, gathered = self.posted
        self.posted = None
        if work is not None:
            with waiting_in("the times of all ranks"):
                work.wait()
        found = torch.stack(gathered).T.tolist()
        seconds, (delayed, micro_batches, memory, *gpus) = found[: len(phases.PHASES)], found[len(phases.PHASES) :]
        return RankTimes(
            step=step,
            steps=steps,
            seconds={name: tuple(values) for name, values in zip(phases.PHASES, seconds, strict=True)},
            delayed_seconds=tuple(delayed),
            micro_batches=tuple(map(int, micro_batches)),
            memory_bytes=tuple(map(int, memory)),
            gpus=gpu_meter.known(dict(zip(self.gpu.figures, gpus, strict=True))),
        )


class ProcessJoins(Exception):  # noqa: N818 (no error)
    """Raised on all ranks after the same step: another process waits to join."""


def train(run: Training) -> tuple[str, dict[str, float]]:
    """Train from the state's step to the end -> how it ended, the last evaluation. Raises what `stepping` does."""
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
    ranks = RankClock(agreement.group, state.precision.device)
    progress.flags = progress.flags or [False, False, False, False, *run.steering.flags(state.step)]
    progress.flags[JOINS] = run.is_joined()  # an earlier one has joined
    agreement.post(progress.flags)
    if progress.settled is None:
        progress.settled = state.step
    elif progress.settled < state.step:  # a process was lost before all was done that was due after the step
        _end_step(run, agreement)
    for micro_batches in () if progress.is_over else _loaded(run.steps(state.step)):
        state.seed("start")  # a script draws before its micro-batches, too
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
        stop, save, out_of_time, joins, *requests = agreement.read()
        steered = run.steering.apply(requests, state)
        if steered.text:
            publish_once(run, Steered(step=state.step, what=steered.text))
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
    minutes = run.checkpoint.every_minutes
    is_save_time = run.is_main and minutes is not None and time.monotonic() - progress.last_save >= minutes * 60
    is_save_due = progress.owes_save or is_save_time
    progress.flags = [run.interrupted(), is_save_due, out_of_time, run.is_joined(), *_requests(run)]
    if joins and not run.is_over:
        raise ProcessJoins
    agreement.post(progress.flags)


def _settle(run: Training, steered: Decision, *, save: bool, is_last: bool) -> bool:
    """Evaluate, compare and save after a step, as far as that is due; return whether to stop early."""
    state, progress = run.state, run.progress
    run.metrics = {}
    is_due = run.is_over or run.evaluation.is_due(state.step, run.steps_per_epoch)
    if run.evaluate is not None and (is_due or steered.evaluate or steered.stop):
        run.metrics = _evaluate(run)
    improved, stop_early = _compare_metrics(run, run.metrics)
    stop_early = stop_early or (steered.stop and not run.is_over)
    if run.desync_every and state.step % run.desync_every == 0:
        run.compare_ranks(state.step)
    if state.step % run.steps_per_epoch == 0:
        publish_once(run, EpochDone(epoch=run.epoch, step=state.step))
    _requests(run)  # before a save: a resume from it repeats no event of this step
    is_last, every = is_last or stop_early, run.checkpoint.every_steps
    if save or improved or is_last or steered.save or (every is not None and state.step % every == 0):
        _save(run, run.metrics, is_last=is_last)
        progress.last_save, progress.owes_save = time.monotonic(), False
    run.saving.poll()
    return stop_early


def _requests(run: Training) -> list[int]:
    """Return the observers' requests of this step; they are asked once."""
    if run.progress.requests is None or run.progress.requests[0] != run.state.step:
        run.progress.requests = run.state.step, run.steering.flags(run.state.step)
    return run.progress.requests[1]


def _loaded(steps: Iterator[list[MicroBatch]]) -> Iterator[list[MicroBatch]]:
    """Yield the same steps; waiting for them counts as data."""
    while True:
        with phase("data"):
            micro_batches = next(steps, None)
        if micro_batches is None:
            return
        yield micro_batches


def _publish_times(run: Training, ranks: RankClock) -> None:
    if (times := ranks.read()) is not None:
        run.bus.publish(times)


def _repeat_evaluation(run: Training) -> bool:
    """Repeat an evaluation that failed before the resume; return whether to stop early."""
    if not run.owes_evaluation:
        return False
    before = run.state.decisions()
    try:
        run.metrics = _evaluate(run)
        _, stop_early = _compare_metrics(run, run.metrics)
        _save(run, run.metrics, is_last=stop_early or run.state.step >= run.total_steps)
    except BaseException:
        run.state.decide(before)
        raise
    run.owes_evaluation = False
    return stop_early


def _save(run: Training, metrics: dict[str, float], *, is_last: bool) -> None:
    """Start a save; wait for the last one, which must not fail."""
    read_outcomes(run)
    run.throughput.pause()
    if is_last:
        run.stopping()
    with phase("saving"):
        run.saving.start(metrics, is_last=is_last)
        if is_last:
            run.saving.finish()
    run.throughput.resume()


def _evaluate(run: Training) -> dict[str, float]:
    assert run.evaluate is not None
    read_outcomes(run)
    run.throughput.pause()
    try:
        with phase("evaluation"), run.state.for_use():
            samples, values, texts = run.evaluate()
        for setting, name in (("checkpoint.best", run.checkpoint.best), ("train.stop_metric", run.train.stop_metric)):
            if name is not None and name not in values:
                error = ConfigError(f"{setting}: {name!r} was not measured (there is: {', '.join(values)})")
                error.is_shared = True
                raise error
    except LockstepError as error:
        if error.is_shared:  # else the other ranks are in other collectives
            error.args = (f"{error}\n  {_save_after_failure(run)}",)
        raise
    run.throughput.resume()
    publish_once(run, Evaluated(step=run.state.step, epoch=run.epoch, samples=samples, values=values))
    if texts:
        publish_once(run, TextsGenerated(step=run.state.step, samples=texts))
    return values


def _save_after_failure(run: Training) -> str:
    """Save before a failed evaluation ends the run; returns a sentence on the outcome."""
    try:
        _save(run, {}, is_last=True)
    except CheckpointError as error:
        return str(error)
    step = run.state.step
    return f"Nothing is lost: the state after step {step} has been saved, and a resume begins with this evaluation"


def _compare_metrics(run: Training, metrics: dict[str, float]) -> tuple[bool, bool]:
    """Update the best values so far; return whether to save a new best checkpoint, and whether to stop early."""
    best, stop_metric, stopping = run.checkpoint.best, run.train.stop_metric, run.state.stopping
    improved = bool(best and metrics and _update_best(run.state.saving, best, metrics, mode=run.checkpoint.mode))
    if stop_metric is None or not metrics or run.state.step >= run.total_steps:
        return improved, False
    _update_best(stopping, stop_metric, metrics, mode=run.train.stop_mode)
    return improved, stopping.evaluations_since >= run.train.stop_patience


def _update_best(record: BestSoFar, metric: str, values: dict[str, float], *, mode: Mode) -> bool:
    """Compare rank 0's value with the best so far and keep the better; returns whether it improved."""
    value = broadcast_object(values[metric])
    improved = is_better(metric, value, record.best, mode=mode)
    if improved:
        record.best = value
    record.evaluations_since = 0 if improved else record.evaluations_since + 1
    return improved
