"""Training that goes on when a process is lost, and when one joins (launch.recovery=live)."""

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from filelock import Timeout
from pydantic import TypeAdapter

from lockstep.base.errors import Interrupted, LockstepError
from lockstep.base.events import EpochDone, Evaluated, Regrouped, Spiked, Steered, StepDone, TextSample, TextsGenerated
from lockstep.base.lifetime import name_process, rank_name
from lockstep.base.world import World, recovers_over_nccl
from lockstep.core.distributed.collectives import confirm_on_all_ranks
from lockstep.core.distributed.live_group import LiveGroup
from lockstep.core.host import activity
from lockstep.core.host.signals import SignalWatch
from lockstep.observe.run_history import RunHistory
from lockstep.observe.sinks.progress import ProgressSink
from lockstep.protocol.live_messages import Formation, Position, take_terminal
from lockstep.recipe.components import Components
from lockstep.recipe.recipe import Recipe
from lockstep.run.tasks.train import TrainTask
from lockstep.run.user_code_checks import UserCodeChecks
from lockstep.training.findings import Finding
from lockstep.training.loop import ProcessJoins
from lockstep.training.loop_state import Training
from lockstep.training.state_transfer import equalise
from lockstep.training.steering import FILE, Steering
from lockstep.training.step import undo
from lockstep.training.step_outcomes import publish_step, read_outcomes

NEEDS_GROUP = True
LOCK_SECONDS = 10.0
"""How long the lock of a process that was killed may last."""
BACKLOG_SECONDS = 15.0
"""How old events are that a new rank 0 writes again: TensorBoard's writer keeps the last 10 s in memory."""
KINDS = {kind.__name__: kind for kind in (StepDone, Evaluated, EpochDone, TextsGenerated, Steered, Spiked)}


class Backlog:
    """The events of the last steps, which every rank has, for the rank that takes over the files: those of a step are
    kept or dropped together, since the files are cut after whole steps."""

    def __init__(self, seconds: float = BACKLOG_SECONDS) -> None:
        self.seconds = seconds
        self.by_step: dict[int, list[Any]] = {}
        self._event_times: dict[int, float] = {}
        """Step -> time of its last event."""

    def notice(self, event: object) -> None:
        if not isinstance(event, StepDone | Evaluated | EpochDone | TextsGenerated | Steered | Spiked):
            return
        now = time.monotonic()
        if not isinstance(event, StepDone) or event.values:
            self.by_step.setdefault(event.step, []).append(event)
            self._event_times[event.step] = now
        for old in sorted(self.by_step):
            if old >= event.step - 1 or now - self._event_times[old] <= self.seconds:
                break
            del self.by_step[old], self._event_times[old]

    def close(self) -> None:
        """Release nothing."""

    @property
    def events(self) -> list[Any]:
        """Events in the order of steps."""
        return [event for step in sorted(self.by_step) for event in self.by_step[step]]

    @property
    def first_step(self) -> int | None:
        return min(self.by_step, default=None)

    def plain(self) -> list[list[Any]]:
        """Return the events as JSON values."""
        return [[type(event).__name__, asdict(event)] for event in self.events]

    def missed(self, plain: list[list[Any]]) -> list[Any]:
        """Return the events of another rank that this one has not published."""
        own = {(type(event), event.step) for event in self.events}
        events = [TypeAdapter[Any](KINDS[name]).validate_python(values) for name, values in plain]
        return [event for event in events if (type(event), event.step) not in own]


class LiveTrainTask(TrainTask):
    """A process of such a run: one of the first, which start together as always, or one that joins them later."""

    def __init__(self, recipe: Recipe, world: World, signals: SignalWatch, *, live: LiveGroup, began: float) -> None:
        super().__init__(recipe, world, signals, began=began)
        self.live, self.backlog, self.leave = live, Backlog(), live.end_for_good
        self.over_nccl = recovers_over_nccl()
        """Whether a collective may end with any values where a process is lost, and no error."""
        self.regrouped: list[dict[str, Any]] = []
        """Record of each change of the processes."""
        self.is_writer = False
        """Whether this process writes the run's files."""
        self.has_state = not live.joins
        """Whether it is at the same place as the others, or was."""
        self.stopped_at = time.monotonic()
        """Time of its last useful work before it left a process group."""
        self.digests: dict[str, str | None] | None = None
        """Digests of the weights at the end, where no process holds all of them."""

    def assemble(self) -> Components:
        """Build everything; the ranks of a replica, and those that exchange over NCCL, agree before each update."""
        parts = super().assemble()
        if self.is_sharded or self.over_nccl:
            parts.state.confirm = self._confirm
        return parts

    def _confirm(self) -> None:
        """Return once every rank has called it, and its GPU has done everything until then. Raises where a process is
        lost, also if NCCL's collectives have ended: the connections of Gloo are closed before they are aborted."""
        if self.over_nccl and self.device.type == "cuda":
            with activity.waiting_in("what its GPU computes"):
                torch.cuda.synchronize(self.device)
        confirm_on_all_ranks()

    def evaluate(self) -> tuple[int, dict[str, float], tuple[TextSample, ...]]:
        """Evaluate as always, unless a process is lost meanwhile."""
        found = super().evaluate()
        if self.over_nccl:
            self._confirm()
        return found

    def placing(self) -> AbstractContextManager[None]:
        """Return a context in which a process that joins builds its part of the training state."""
        return self.live.as_part()

    def run(self, resume: str, *, allow_drift: bool) -> None:
        """Train to the end, from the start or from where the others are."""
        self.bus.subscribe(self.backlog)
        if not self.live.joins:
            super().run(resume, allow_drift=allow_drift)
            return
        parts = self.parts = self.assemble()
        self.checks = UserCodeChecks(parts, self.warn)
        self.numeric |= parts.data.numeric(self.warn)
        if parts.warm_start is not None:
            self.numeric["model.init_digest"] = parts.warm_start.digest
        self.bus.subscribe(self.first_step)
        self.bus.subscribe(self.watch_thread)
        self.training = self.wired()
        self.signals.is_graceful = True
        self.complete(lambda: self._train_on(Position()))

    def train(self) -> tuple[str, dict[str, float]]:
        """Run the loop, and run it on with others after each loss of a process."""
        self.is_writer = self.world.is_main
        self.training.is_joined = lambda: self.live.is_wanted
        if self.is_writer:
            self.live.notes.start_training()
        try:
            return self._train_to_end()
        except (ProcessJoins, RuntimeError, LockstepError) as error:
            position = self._leave_group(error)
        return self._train_on(position)  # here, where no error holds on to what the old group needed

    def _train_on(self, position: Position) -> tuple[str, dict[str, float]]:
        while True:
            try:
                self._regroup(position)
                return self._train_to_end()
            except (ProcessJoins, RuntimeError, LockstepError) as error:
                position = self._leave_group(error)

    def _train_to_end(self) -> tuple[str, dict[str, float]]:
        try:
            ended = super().train()
        except Interrupted:  # on all ranks, after a save
            with suppress(RuntimeError):
                self._make_digests()
            raise
        self._make_digests()
        return ended

    def _make_digests(self) -> None:
        """Compute digests while the others are there."""
        if self.is_sharded:
            digests = self.parts.digests(is_collective=True)
            if self.over_nccl:
                self._confirm()
            self.digests = digests

    def final_digests(self, status: str) -> dict[str, str | None]:
        """Return digests without collectives: the others may be lost, or have exited."""
        return self.parts.digests(is_collective=False) if self.digests is None else self.digests

    @property
    def is_sharded(self) -> bool:
        """Whether weights are DTensors, of which a process holds a part, or by chance all."""
        return self.recipe.parallel.SPLITS_TENSORS

    def _leave_group(self, error: Exception) -> Position:
        """Undo what the present step has changed, and leave the process group -> this process's position. Raises the
        error unless a process that is lost, or one that joins, has caused it."""
        self.stopped_at = time.monotonic() - activity.seconds_without_progress()
        training, state, progress = self.training, self.parts.state, self.training.progress
        if not isinstance(error, ProcessJoins) and (state.is_applying or not self.live.explains(error)):
            raise error  # an optimizer that calls collectives may have changed a part of the weights
        self._give_up_save(training)
        self.live.leave()
        if state.ready_step is None:
            undo(state)
        if not self.has_state:
            return Position()
        if progress.settled is None:  # before the loop's first step
            return Position(step=state.step)
        self._publish()
        return Position(step=state.step, settled=progress.settled, is_ready=state.ready_step is not None)

    def _publish(self) -> None:
        """Publish what the last step has computed."""
        try:
            publish_step(self.training)
            read_outcomes(self.training)
        except LockstepError as error:
            error.is_shared = False  # there is no group in which the ranks could agree on who reports it
            raise

    def _drop_state(self) -> None:
        """Drop the state: the others go on without this process, until a whole replica needs it and it takes theirs."""
        self.has_state = False
        self.watch_thread.rest()
        undo(self.parts.state)

    def _finish_step(self, positions: Sequence[Position]) -> list[Position]:
        """Finish the step that this process is ready for if others have, else undo it -> the positions of all ranks."""
        training, state = self.training, self.parts.state
        furthest = max(position.step for position in positions)
        if state.ready_step is not None and state.step < furthest:
            training.outcome, state.ready_step = state.ready_step(), None
            training.unread.append((state.step, training.outcome))
            self._publish()
        else:
            undo(state)
        return [replace(each, step=furthest if each.is_ready else each.step, is_ready=False) for each in positions]

    def _give_up_save(self, training: Training) -> None:
        """Cancel a save that is being written, which cannot end; another one follows."""
        with suppress(Exception):  # of the thread that writes, to which the group is lost as well
            training.saving.poll()
        if training.saving.writer.pending is not None:
            training.saving.writer.cancel()  # first: without a group its thread would save as a single process
            training.progress.owes_save = True

    def _regroup(self, position: Position) -> None:
        """Wait for the next formation, take the state of its furthest process, and rebuild what depends on ranks."""
        formation = self.live.regroup(position, self._drop_state)
        if not self.has_state:
            self.stopped_at = time.monotonic()  # until now it has only started
        self.world = self.parts.world = self.live.world
        name_process(rank_name(str(self.world.rank)))
        self.watch_thread.move_to(self.world)
        if not self.has_state:
            self.list_faults()
        positions = self._finish_step(formation.positions)
        extras = equalise(self.parts.state, positions, self._extras, replica_size=formation.replica_size)
        if extras is not None:
            self._load_extras(extras)
        self.has_state = True
        parts = self.parts
        parts.strategy.place(parts.model.train(), lambda: parts.data.first_training_batch(parts.order, self.device))
        if self.world.is_main and not self.is_writer:
            self._take_over()
        self._rebuild_training()
        self.live.release()
        self._publish_regrouping(formation)

    def _rebuild_training(self) -> None:
        """Replace the loop by one at the same place, whose collectives are those of the new group."""
        before, training = self.training, self.wired()
        training.progress, training.metrics = before.progress, before.metrics
        training.outcome, training.unread = before.outcome, before.unread
        training.owes_evaluation = before.owes_evaluation
        training.is_joined, training.steps = (lambda: self.live.is_wanted), self.parts.steps
        saving, earlier = training.saving, before.saving
        saving.newest, saving.stalls, saving.failed = earlier.newest, earlier.stalls, earlier.failed
        saving.longest_seconds = earlier.longest_seconds
        self.training = training
        self.watch_thread.is_training = True

    def _take_over(self) -> None:
        """Become the process that writes to the terminal, and to the run's files after their certain part."""
        self.is_writer = True
        take_terminal()
        with suppress(Timeout):  # a file system may keep a lost machine's lock for longer
            self.lock.acquire(timeout=LOCK_SECONDS)
        step, first = self.parts.state.step, self.backlog.first_step
        own, self.bus.observers = self.bus.observers, []
        self.subscribe_writers()
        self.bus.publish(self.run_started(step if first is None else first - 1, (), goes_on=True))
        for observer in self.bus.observers:
            if isinstance(observer, RunHistory):
                observer.go_on(step)
            elif not isinstance(observer, ProgressSink):  # whose lines, too, are written at once
                for event in self.backlog.events:
                    observer.notice(event)
        self.bus.observers = own + self.bus.observers
        self._take_over_steering()
        self.mirror = self.mirror_here()
        if self.mirror is not None:
            self.mirror.start()
            self.bus.subscribe(self.mirror)
        if not self.lock.is_locked:
            self.warn(f"{self.lock.lock_file} is still locked by the lost rank 0: the run goes on without the lock")

    def _take_over_steering(self) -> None:
        """Propose again what the lost rank 0 has written down, but not agreed on with the others."""
        progress = self.training.progress
        settled = self.parts.state.step if progress.settled is None else progress.settled
        self.steering = Steering(self.bus, self.recipe.folder / FILE)
        self.steering.start(settled, repeats=True)
        progress.requests = None
        progress.flags = [*(progress.flags or [False] * 4)[:4], *self.steering.flags(settled)]

    def _extras(self) -> dict[str, Any]:
        progress = self.training.progress
        return {
            "settled": progress.settled,
            "is_over": progress.is_over,
            "published": {kind.__name__: step for kind, step in progress.published.items()},
            "owes_save": progress.owes_save,
            "owes_evaluation": self.training.owes_evaluation,
            "metrics": self.training.metrics,
            "events": self.backlog.plain(),
            "regrouped": self.regrouped,
            "findings": self.checks.findings and [asdict(finding) for finding in self.checks.findings],
        }

    def _load_extras(self, extras: Any) -> None:
        training, progress = self.training, self.training.progress
        progress.settled, progress.is_over = extras["settled"], extras["is_over"]
        progress.published = {KINDS[name]: step for name, step in extras["published"].items()}
        progress.owes_save, training.metrics = extras["owes_save"], extras["metrics"]
        progress.flags, progress.requests = [], None  # those of an earlier step
        training.owes_evaluation = extras["owes_evaluation"]
        training.outcome, training.unread = None, []
        self.regrouped, findings = extras["regrouped"], extras["findings"]
        self.checks.findings = findings and [Finding(**finding) for finding in findings]
        for event in self.backlog.missed(extras["events"]):
            self.bus.publish(event)

    def _publish_regrouping(self, formation: Formation) -> None:
        event = Regrouped(
            step=self.parts.state.step,
            losses=self.live.untold_losses(),
            joined=formation.positions.count(Position()),
            world_size=self.world.size,
            waiting=formation.num_waiting,
            seconds=round(time.monotonic() - self.stopped_at, 3),
        )
        self.regrouped.append(asdict(event))
        self.bus.publish(event)

    def facts_of_end(self) -> dict[str, Any]:
        return {"regrouped": self.regrouped}


def build(recipe: Recipe, world: World, signals: SignalWatch, *, request: Path, began: float) -> TrainTask:
    """Build the task; an ordinary one where the launcher does not recover live."""
    live = LiveGroup.from_environment(recipe.launch.collective_timeout_seconds)
    if live is None:
        return TrainTask(recipe, world, signals, began=began)
    if live.joins:  # it places the model alone, as if there were no other replica
        recipe = recipe.model_copy(update={"parallel": recipe.parallel.with_one_copy()})
    return LiveTrainTask(recipe, world, signals, live=live, began=began)
