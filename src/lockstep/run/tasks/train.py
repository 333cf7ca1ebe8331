"""Training: one process's part of a run, from the recipe to the summary."""

import json
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from lockstep.base import config, devices, plugins, storage
from lockstep.base.errors import Desync, Interrupted, LaunchError
from lockstep.base.events import Evaluating, Observer, RunEnded, RunStarted, TextSample, TextsGenerated
from lockstep.base.model_contracts import MicroBatch
from lockstep.checkpoint import layout, retention
from lockstep.checkpoint.mirror import Mirror
from lockstep.checkpoint.writer import Writer
from lockstep.core.distributed.collectives import raise_on_all_ranks
from lockstep.core.host.memory_meter import device_peak_bytes
from lockstep.data import bad_samples
from lockstep.observe.diagnose.desync import RankComparison
from lockstep.observe.diagnose.stragglers import Stragglers
from lockstep.observe.run_folder import RECIPE, SUMMARY
from lockstep.observe.run_history import RunHistory
from lockstep.recipe import recipe as recipes
from lockstep.recipe import run_paths
from lockstep.recipe.components import Components, start_notes
from lockstep.run import forgetting
from lockstep.run.rechecking import Recheck
from lockstep.run.tasks._task import WatchedTask
from lockstep.run.text_samples import text_samples
from lockstep.run.training_summary import FirstStepTimer, token_seconds, training_summary
from lockstep.run.user_code_checks import UserCodeChecks
from lockstep.training.evaluation import Evaluation
from lockstep.training.loop import train
from lockstep.training.loop_state import Deadline, Training
from lockstep.training.resume import NumericRecipe, resumed, set_aside
from lockstep.training.saving import Saving
from lockstep.training.steering import FILE, Steering, observer_states, restore_observers

NEEDS_GROUP = True


class TrainTask(WatchedTask):
    """Claims the run folder, builds everything, resumes, trains, and always writes a summary."""

    parts: Components
    checks: UserCodeChecks
    training: Training

    IS_TRIAL = False
    """Whether it begins anew, also where the recipe goes on from another run."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        recipe, world, self.first_step = self.recipe, self.world, FirstStepTimer()
        self.parent = None if self.IS_TRIAL else recipe.run.parent
        """Checkpoint of another run to go on from."""
        self.numeric = recipes.numeric_recipe(recipe, self.facts, processes=world.size)
        self.last_evaluation: Evaluation | None = None
        self.own_observers: list[Observer] = []
        """Observers of the user's file, on rank 0."""
        self.steering = Steering(self.bus, recipe.folder / FILE if world.is_main else None)
        self.rechecked: dict[str, Any] = {}
        """Number of rechecked steps, and what was found."""
        self.leave: Callable[[], None] | None = None
        """Ends this process for good, while the others go on; None where they could not."""
        self.lock = FileLock(recipe.folder / ".lock", timeout=0)
        self.checkpoints = recipe.folder / "checkpoints"
        self.mirror = self.mirror_here() if world.is_main else None

    def mirror_here(self) -> Mirror | None:
        """Build the mirror of the checkpoints, for rank 0."""
        place = self.recipe.checkpoint.mirror
        return Mirror(self.checkpoints, place / self.recipe.folder.name, self.bus.publish) if place else None

    def run(self, resume: str, *, allow_drift: bool) -> None:
        """Train to the end and write the summary, however training ends."""
        self.claim()
        self.subscribe_observers()
        parts = self.parts = self.assembled(self.assemble())
        self.checks = UserCodeChecks(parts, self.warn)
        parts.check_training()
        self.numeric |= parts.data.common_numeric(self.warn)
        if parts.warm_start is not None:
            self.numeric["model.init_digest"] = parts.warm_start.digest
        checkpoint = self.load_checkpoint(resume, allow_drift=allow_drift)
        self.resume_observers(checkpoint, repeats=resume == "auto")
        owes_evaluation = checkpoint is not None and self.owes_evaluation(checkpoint)
        earlier_end = self.earlier_end() if checkpoint is not None and not owes_evaluation else None
        texts = self.first_look(is_fresh=checkpoint is None) if earlier_end is None else ()
        with raise_on_all_ranks():
            if checkpoint is None and self.world.is_main:
                bad_samples.forget(self.logs)  # those of an earlier run in its folder
        self.list_faults()
        if self.world.is_main:
            if resume not in ("auto", "never"):
                set_aside(self.checkpoints, parts.state.step, self.warn)
            self.prepare_folder()
        self.bus.publish(self.run_started(parts.state.step, start_notes(parts, self.world)))
        if texts:
            self.bus.publish(TextsGenerated(step=0, samples=texts))
        self.training = self.wired()
        self.starting(self.training)
        self.training.saving.newest, self.training.owes_evaluation = checkpoint, owes_evaluation
        if checkpoint is not None and earlier_end is not None:
            ended = earlier_end, dict(layout.read_manifest(checkpoint).metrics)
            self.complete(lambda: ended)
        else:
            self.complete(self.train)

    def assembled(self, parts: Components) -> Components:
        """Return the components to train with; called once they are built."""
        return parts

    def starting(self, training: Training) -> None:
        """Prepare the training, after resuming and before the first step."""

    def complete(self, train: Callable[[], tuple[str, dict[str, float]]]) -> None:
        """Train, and write the summary, however training ends."""
        status, metrics = "failed", dict[str, float]()
        try:
            status, metrics = train()
        except Interrupted:
            status = "interrupted"
            raise
        finally:
            self.watch_thread.is_training = False
            self.training.saving.settle()
            self.end(status, metrics)

    def load_checkpoint(self, resume: str, *, allow_drift: bool) -> Path | None:
        """Load the state of the checkpoint that `resume` selects, on disk or from its mirror."""
        with raise_on_all_ranks():
            if self.mirror is not None:
                self.mirror.prepare(resume)
        numeric = NumericRecipe(self.numeric, recipes.unset(self.recipe), self.parent)
        checkpoint = resumed(
            self.parts.state, self.checkpoints, resume, numeric=numeric, allow_drift=allow_drift, warn=self.warn
        )
        forgetting.settle_drift(self.parts, self.warn)
        return checkpoint

    def first_look(self, *, is_fresh: bool) -> tuple[TextSample, ...]:
        """Try an evaluation -> what a language model writes before training."""
        with self.parts.state.for_use():
            self.parts.try_evaluation()
            return text_samples(self.parts) if is_fresh else ()

    def prepare_folder(self) -> None:
        """Write the resolved recipe, and begin to mirror. A run that is killed leaves no old summary."""
        storage.write(self.recipe.folder / RECIPE, config.dump(self.recipe))
        for name in (SUMMARY, forgetting.FILE):
            (self.recipe.folder / name).unlink(missing_ok=True)
        if self.mirror is not None:
            self.mirror.start()
            self.bus.subscribe(self.mirror)

    def claim(self) -> None:
        """Lock the run folder: two runs in one would delete each other's checkpoints. Raises LaunchError."""
        with raise_on_all_ranks():
            if self.world.is_main:
                self.recipe.folder.mkdir(parents=True, exist_ok=True)
                run_paths.check_folder(self.recipe.folder)
                try:
                    self.lock.acquire()
                except Timeout:
                    raise LaunchError(
                        f"{self.recipe.folder} is being trained by another process; choose another run.name"
                    ) from None

    def subscribe_observers(self) -> None:
        """Subscribe the sinks and observers that the recipe names; only on rank 0."""
        self.bus.subscribe(self.first_step)
        self.bus.subscribe(self.watch_thread)
        if self.world.is_main:
            self.subscribe_writers()

    def subscribe_writers(self) -> None:
        """Subscribe the observers that write."""
        self.bus.subscribe(RunHistory(self.recipe.folder, began=self.began))
        if self.recipe.parallel.HAS_EQUAL_WORK:
            self.bus.subscribe(Stragglers(self.bus.publish))
        for sink in self.recipe.observe.sinks:
            self.bus.subscribe(plugins.find("observe.sinks", sink).build(self.recipe.folder))
        observe = self.recipe.observe
        if observe.file is not None:
            self.own_observers += plugins.load_file(observe.file, "observe.file").observers(observe.options)
            for observer in self.own_observers:
                self.bus.subscribe(observer)

    def resume_observers(self, checkpoint: Path | None, *, repeats: bool) -> None:
        """Restore observers from a checkpoint; `repeats`: what they asked for since is done again."""
        if checkpoint is not None:
            saved = layout.read_manifest(checkpoint).progress.get("observers", [])
            restore_observers(self.own_observers, saved, self.warn)
        with raise_on_all_ranks():
            if checkpoint is not None and checkpoint == self.parent:
                self.steering.inherit(checkpoint.parents[1] / FILE, self.parts.state.step)
            self.steering.start(self.parts.state.step, repeats=repeats and checkpoint is not None)

    def owes_evaluation(self, checkpoint: Path) -> bool:
        """Return whether the evaluation due at a checkpoint is missing from it, because it failed."""
        step = self.parts.state.step
        is_due = self.recipe.evaluate.is_due(step, self.parts.order.steps_per_epoch)
        return (is_due or step >= self.parts.total_steps) and not layout.read_manifest(checkpoint).metrics

    def earlier_end(self) -> str | None:
        """Return how the resumed run had already ended; None where training goes on."""
        if self.parts.state.step >= self.parts.total_steps:
            return "finished"
        is_stopped = self.parts.state.stopping.evaluations_since >= self.recipe.train.stop_patience
        is_stopped = bool(self.recipe.train.stop_metric) and is_stopped
        return "stopped early" if is_stopped or self.parts.state.is_stopped else None

    def list_faults(self) -> None:
        """Keep a list of skipped samples."""
        for faults in self.parts.data.faults.values():
            faults.record(bad_samples.file_of(self.logs, self.world.rank), self.warn)

    def run_started(self, step: int, notes: Sequence[str], *, goes_on: bool = False) -> RunStarted:
        parts = self.parts
        return RunStarted(
            name=self.recipe.folder.name,
            folder=self.recipe.folder,
            resumed_step=step,
            total_steps=parts.total_steps,
            steps_per_epoch=parts.order.steps_per_epoch,
            world_size=self.world.size,
            device=self.facts["device_model"],
            parameters=sum(p.numel() for p in parts.model.parameters()),
            train_samples=len(parts.data.train),
            notes=tuple(notes),
            goes_on=goes_on,
        )

    def wired(self) -> Training:
        """Build the training loop."""
        recipe, parts = self.recipe, self.parts
        if recipe.observe.recheck is not None:
            recheck = Recheck(parts, self.checks, self.warn, leave=self.leave, facts=self.rechecked)
            parts.state.recheck, parts.again = recheck, recheck.again
        ranks = RankComparison(parts.replicated_tensors(), parts.state.step, parts.strategy.copies)
        tidy = partial(retention.tidy, self.checkpoints, recipe.checkpoint)
        writer = Writer(self.checkpoints, tidy, copies=parts.strategy.copies)
        return Training(
            state=parts.state,
            train=recipe.train,
            evaluation=recipe.evaluate,
            checkpoint=recipe.checkpoint,
            steps=self.steps,
            evaluate=self.evaluate,
            saving=Saving(writer=writer, state=parts.state, manifest=self.manifest, bus=self.bus),
            compare_ranks=ranks.check,
            describe=parts.describe,
            bus=self.bus,
            total_steps=parts.total_steps,
            steps_per_epoch=parts.order.steps_per_epoch,
            samples_at=parts.order.samples_at,
            derived=parts.model.derived,
            clip=recipe.optim.clip,
            log_every=recipe.observe.log_every,
            desync_every=recipe.observe.desync_every,
            is_main=self.world.is_main,
            deadline=Deadline(recipe.train.max_minutes, self.began),
            interrupted=self.signals.requested,
            steering=self.steering,
            stopping=self.signals.cancel_timer,
            replayed=shlex.quote(storage.seen_from(Path.cwd(), recipe.folder)),
            token_seconds=token_seconds(parts, self.device),
        )

    def steps(self, start: int) -> Iterator[list[MicroBatch]]:
        """Return this rank's micro-batches, a list per step; some steps are traced (observe.profile_steps)."""
        steps = self.checks.steps(start)
        if self.recipe.observe.profile_steps is None:
            return steps
        from lockstep.observe.profile.step_trace import trace_file, tracing  # noqa: PLC0415 (the profiler takes long)

        first, last = self.recipe.observe.profile_steps
        file = trace_file(self.recipe.folder / "profile", self.world.rank)
        return tracing(steps, first=first, last=last, done=start, file=file)

    def manifest(self, metrics: dict[str, float]) -> layout.Manifest:
        """Return the manifest of a checkpoint of the current step."""
        state = self.parts.state
        return layout.Manifest(
            step=state.step,
            epoch=self.parts.order.epoch(max(state.step - 1, 0)) + 1,
            world_size=self.world.size,
            saved_at=time.time(),
            numeric=self.numeric,
            progress=state.state_dict() | {"observers": observer_states(self.own_observers, self.warn)},
            metrics=metrics,
        )

    def evaluate(self) -> tuple[int, dict[str, float], tuple[TextSample, ...]]:
        """Evaluate the current model; keep the whole result for the summary."""
        step, publish = self.parts.state.step, self.bus.publish
        evaluation = self.parts.evaluate(lambda done, total: publish(Evaluating(step=step, done=done, total=total)))
        self.last_evaluation = evaluation
        return evaluation.samples, evaluation.values, text_samples(self.parts)

    def train(self) -> tuple[str, dict[str, float]]:
        """Run the loop; return how it ended and the last metrics."""
        training = self.training
        self.signals.is_graceful = True
        training.saving.writer.warm_up(training.state.tensors())
        try:
            return train(training)
        except Desync as error:
            training.saving.settle()
            training.saving.writer.cancel()
            if self.world.is_main:  # later checkpoints may mix weights of ranks that no longer agree
                set_aside(self.checkpoints, error.equal_at, self.warn)
            if self.mirror is not None:
                self.mirror.remove_later(error.equal_at)
            raise

    def end(self, status: str, metrics: dict[str, float]) -> None:
        """Write summary.json and publish the end of the run."""
        summary: dict[str, Any] = {
            "status": status,
            "name": self.recipe.folder.name,
            "folder": str(self.recipe.folder),
            "world_size": self.world.size,
            "first_step_seconds": self.first_step.seconds,
            "seconds": round(time.time() - self.began, 3),
            **training_summary(self.parts, self.training, evaluation=self.last_evaluation, metrics=metrics),
            **self.final_digests(status),
            **self.checks.summary(),
            "bad_samples": self.skipped_samples(),
            "rechecked": self.rechecked,
            "torch_version": str(torch.__version__),
            "device": self.facts["device_model"],
            "shares_gpus": devices.are_shared(self.world),
            "peak_memory_bytes": device_peak_bytes(),
            "numeric_recipe": self.numeric,
            "checkpoints": [asdict(link) for link in layout.chain_of(self.checkpoints, self.parts.state.step)],
            **self.facts_of_end(),
        }
        unwritten = None
        if self.world.is_main:
            certificate = forgetting.certificate(self.parts, summary)
            try:
                if certificate is not None:
                    storage.write(self.recipe.folder / forgetting.FILE, json.dumps(certificate, indent=1))
                storage.write(self.recipe.folder / SUMMARY, json.dumps(summary, indent=1))
            except OSError as error:
                unwritten = error
        self.bus.publish(RunEnded(status=status, summary=summary))
        if unwritten is not None and status not in ("failed", "interrupted"):  # which have another error to report
            raise unwritten
        if self.world.is_main:
            self.write_report()

    def final_digests(self, status: str) -> dict[str, str | None]:
        """Return the weights' digests; None after a failure of a rank that does not hold them all."""
        return self.parts.digests(is_collective=status != "failed" or self.world.size == 1)

    def skipped_samples(self) -> dict[str, Any]:
        """Return the samples that were left out, by split, with a warning."""
        skipped = bad_samples.listed(self.logs)
        for split, samples in skipped.items():
            self.warn(
                f"{samples['count']} samples of the {split} split were left out ({bad_samples.PATTERN} in logs say why)"
            )
        return skipped

    def facts_of_end(self) -> dict[str, Any]:
        """Return further facts for the summary."""
        return {}

    def write_report(self) -> None:
        """Write report.html; warn where this fails, which is no reason to lose a run."""
        from lockstep.observe.report import report_page  # noqa: PLC0415 (a run ends without it where it cannot load)

        try:
            report_page.write(self.recipe.folder)
        except Exception as error:
            self.warn(f"report.html could not be written ({type(error).__name__}: {error}): see `lockstep report`")

    def close(self) -> None:
        """Close the observers and release the run folder."""
        super().close()
        self.lock.release()


build = TrainTask
