"""Training: one process's part of a run, from the recipe to the summary."""

import json
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from filelock import FileLock, Timeout
from torch import Tensor

from lockstep.base import config, plugins, storage
from lockstep.base.errors import Desync, Interrupted, LaunchError
from lockstep.base.events import RunEnded, RunStarted, StepDone
from lockstep.base.model_contracts import MicroBatch
from lockstep.base.world import World
from lockstep.checkpoint import layout, retention
from lockstep.checkpoint.writer import Writer
from lockstep.core.distributed import process_group
from lockstep.core.distributed.collectives import all_gather_object, raise_on_all_ranks
from lockstep.core.host.signals import SignalWatch
from lockstep.core.modules.buffers import WATCHED_STEPS
from lockstep.core.modules.dtensors import is_dtensor
from lockstep.core.numerics.digest import digest, digest_of, world_lines
from lockstep.data import bad_samples
from lockstep.launch import run_folder
from lockstep.observe.diagnose.desync import RankComparison
from lockstep.run import recipe as recipes
from lockstep.run.build import Components
from lockstep.run.recipe import Recipe
from lockstep.run.tasks._task import WatchedTask
from lockstep.training.deadline import Deadline
from lockstep.training.evaluation import Evaluation
from lockstep.training.findings import LOSS_IS, Finding
from lockstep.training.loop import Training, train
from lockstep.training.resume import resumed, set_aside
from lockstep.training.saving import Saving

SETTLE_SECONDS = 10.0
"""After an error, how long a save that is being written may take to end."""

NEEDS_GROUP = True


class FirstStep:
    """Remembers when the first step was finished."""

    def __init__(self) -> None:
        self.seconds: float | None = None

    def notice(self, event: object) -> None:
        """Seconds from the process's start to its first finished step."""
        if self.seconds is None and isinstance(event, StepDone):
            self.seconds = round(time.time() - psutil.Process().create_time(), 3)

    def close(self) -> None:
        """Nothing is kept open."""


class Hooks:
    """What another task may change of a training run; this one changes nothing."""

    def assembled(self, parts: Components) -> Components:
        """What is trained, once all parts are built."""
        return parts

    def starting(self, task: "TrainTask", parts: Components, training: Training) -> None:
        """The run has been brought back, or begins; no step has been done."""


class TrainTask(WatchedTask):
    """Claims the run's folder, builds every part, resumes, trains, and writes the summary, whatever the end is."""

    def __init__(
        self,
        recipe: Recipe,
        world: World,
        signals: SignalWatch,
        *,
        began: float = 0.0,
        hooks: Hooks | None = None,
    ) -> None:
        super().__init__(recipe, world, signals, began=began)
        self.hooks, self.first_step = hooks or Hooks(), FirstStep()
        self.numeric = recipes.numeric(recipe, self.facts, processes=world.size)
        self.last: Evaluation | None = None
        self.findings: list[Finding] | None = None
        """What was noticed of the user's code, the same on every rank; None where nobody has looked."""
        self.lock = FileLock(recipe.folder / ".lock", timeout=0)

    @property
    def checkpoints(self) -> Path:
        """The folder of this run's checkpoints."""
        return self.recipe.folder / "checkpoints"

    def claim(self) -> None:
        """Take the run's folder: two runs in one would delete each other's checkpoints. Raises LaunchError."""
        with raise_on_all_ranks():
            if self.world.is_main:
                self.recipe.folder.mkdir(parents=True, exist_ok=True)
                run_folder.check_folder(self.recipe.folder)
                try:
                    self.lock.acquire()
                except Timeout:
                    raise LaunchError(
                        f"{self.recipe.folder} is being trained by another process; choose another run.name"
                    ) from None

    def watch(self) -> None:
        """Subscribe whoever the recipe names; only rank 0 has any."""
        self.bus.subscribe(self.first_step)
        self.bus.subscribe(self.watch_thread)
        if not self.world.is_main:
            return
        self.recipe.folder.mkdir(parents=True, exist_ok=True)
        for sink in self.recipe.observe.sinks:
            self.bus.subscribe(plugins.find("observe.sinks", sink).build(self.recipe.folder))
        observe = self.recipe.observe
        if observe.file is not None:
            for observer in plugins.load_file(observe.file, "observe.file").observers(observe.options):
                self.bus.subscribe(observer)

    def run(self, resume: str, *, allow_drift: bool) -> None:
        """Train to the end and write the summary, whatever the end is."""
        self.claim()
        self.watch()
        parts = self.hooks.assembled(self.assemble())
        parts.check_training()
        self.numeric["data.samples"] = len(parts.data.train)
        found = resumed(
            parts.state, self.checkpoints, resume, numeric=self.numeric, allow_drift=allow_drift, warn=self.warn
        )
        owes = found is not None and self.owes_evaluation(parts, found)
        ended = self.ended(parts) if found is not None and not owes else None
        if not ended:
            with parts.state.for_use():
                parts.try_evaluation()
        self.record_faults(parts, is_fresh=found is None)
        if self.world.is_main:
            if resume not in ("auto", "never"):
                set_aside(self.checkpoints, parts.state.step, self.warn)
            storage.write(self.recipe.folder / "recipe.yaml", config.dump(self.recipe))
            (self.recipe.folder / "summary.json").unlink(missing_ok=True)  # an earlier end's; a kill now leaves none
        self.bus.publish(self.started(parts))
        run = self.training(parts)
        self.hooks.starting(self, parts, run)
        run.saving.newest, run.owes_evaluation = found, owes
        status: str = "failed"
        metrics: dict[str, float] = {}
        try:
            if found is not None and ended:
                status, metrics = ended, dict(layout.read_manifest(found).metrics)
            else:
                status, metrics = self.trained(run)
        except Interrupted:
            status = "interrupted"
            raise
        finally:
            self.watch_thread.is_training = False
            run.saving.settle(SETTLE_SECONDS)
            self.end(parts, run, status=status, metrics=metrics)

    def record_faults(self, parts: Components, *, is_fresh: bool) -> None:
        """List the samples that are left out; a fresh run forgets those of an earlier one in its folder."""
        with raise_on_all_ranks():
            if is_fresh and self.world.is_main:
                bad_samples.forget(self.logs)
        for split in parts.data.faults.values():
            split.record(bad_samples.file_of(self.logs, self.world.rank), self.warn)

    def trained(self, run: Training) -> tuple[str, dict[str, float]]:
        """Train: how it ended, and the last evaluation."""
        self.signals.is_graceful = True
        run.saving.writer.warm_up(run.state.tensors())
        try:
            return train(run)
        except Desync as error:
            run.saving.settle(SETTLE_SECONDS)
            run.saving.writer.cancel()
            if self.world.is_main:  # they may hold weights of several ranks that do not belong together
                set_aside(self.checkpoints, error.equal_at, self.warn)
            raise

    def owes_evaluation(self, parts: Components, found: Path) -> bool:
        """Whether a checkpoint that a run was brought back from lacks the evaluation that was due there: it failed."""
        step = parts.state.step
        is_due = step >= parts.total_steps or self.recipe.evaluate.is_due(step, parts.order.steps_per_epoch)
        return is_due and not layout.read_manifest(found).metrics

    def ended(self, parts: Components) -> str | None:
        """How a run that has been brought back had ended already, if it had."""
        if parts.state.step >= parts.total_steps:
            return "finished"
        is_stopped = parts.state.stopping.evaluations_since >= self.recipe.train.stop_patience
        return "stopped early" if self.recipe.train.stop_metric and is_stopped else None

    def evaluate(self, parts: Components) -> tuple[int, dict[str, float]]:
        """Measure the model as it is; the whole result is kept for the summary."""
        self.last = parts.evaluate()
        return self.last.samples, self.last.values

    def started(self, parts: Components) -> RunStarted:
        shards, notes = parts.order.shards_per_step, []
        idle = all_gather_object(not parts.owned(0)[0]).count(True)
        if idle:
            notes.append(
                f"a step has {shards} micro-batches, too few for {self.world.size} processes: {idle} of them idle; "
                f"launch.processes={self.world.size - idle} is as fast"
            )
        if parts.state.step > parts.total_steps:
            what = f"the checkpoint is one of step {parts.state.step:,}, but the run has {parts.total_steps:,} steps"
            notes.append(f"{what}: there is nothing left to train")
        notes += parts.model._lockstep_notes
        if parts.leaves_the_promise:
            notes.append(parts.leaves_the_promise)
        if self.recipe.train.loss_is == "batch_wise":
            notes.append(LOSS_IS)
        return RunStarted(
            name=self.recipe.folder.name,
            folder=self.recipe.folder,
            resumed_step=parts.state.step,
            total_steps=parts.total_steps,
            steps_per_epoch=parts.order.steps_per_epoch,
            world_size=self.world.size,
            device=self.facts["device_model"],
            parameters=sum(p.numel() for p in parts.model.parameters()),
            train_samples=len(parts.data.train),
            notes=tuple(notes),
        )

    def noticing(self, parts: Components, start: int) -> Iterator[list[MicroBatch]]:
        """The steps' micro-batches, after a look at what the first of them shows of the user's code."""
        for number, micro_batches in enumerate(parts.steps(start)):
            if number == 0:
                self.findings = parts.noticed(micro_batches[0])
                for finding in self.findings or ():
                    self.warn(finding.message)
                if self.leaves_the_promise(parts) and not parts.leaves_the_promise:
                    self.warn("so the weights may depend on the number of processes: lockstep prove looks further")
            if number == WATCHED_STEPS:
                self.notice_buffers(parts)
            yield micro_batches

    def notice_buffers(self, parts: Components) -> None:
        """Say which buffers the first steps have changed in a way that cannot be the same everywhere; all ranks do."""
        own = [note for each in parts.strategy.buffer_updates for note in each.notes]
        for sentence in dict.fromkeys(note for rank in all_gather_object(own) for note in rank):
            self.findings = [*(self.findings or ()), Finding(kind="buffer", where="a buffer", message=sentence)]
            self.warn(sentence)

    def leaves_the_promise(self, parts: Components) -> str | None:
        """Why the weights depend on the number of processes, or may, if so."""
        own = (finding.message for finding in self.findings or () if finding.leaves_promise)
        return parts.leaves_the_promise or next(own, None)

    def training(self, parts: Components) -> Training:
        """The loop's view of the parts."""
        recipe, state = self.recipe, parts.state
        compared = RankComparison(parts.held(), state.step, parts.strategy.copies)
        return Training(
            state=state,
            train=recipe.train,
            evaluation=recipe.evaluate,
            checkpoint=recipe.checkpoint,
            steps=partial(self.noticing, parts),
            evaluate=lambda: self.evaluate(parts),
            saving=self.saving(parts),
            compare_ranks=compared.check,
            describe=parts.describe,
            bus=self.bus,
            total_steps=parts.total_steps,
            steps_per_epoch=parts.order.steps_per_epoch,
            samples_at=parts.samples_at,
            clip=recipe.optim.clip,
            log_every=recipe.observe.log_every,
            desync_every=recipe.observe.desync_every,
            is_main=self.world.is_main,
            deadline=Deadline(recipe.train.max_minutes, self.began),
            interrupted=self.signals.requested,
            stopping=self.signals.cancel_timer,
        )

    def saving(self, parts: Components) -> Saving:
        state, section = parts.state, self.recipe.checkpoint

        def manifest(metrics: dict[str, float]) -> layout.Manifest:
            return layout.Manifest(
                step=state.step,
                epoch=parts.order.epoch(max(state.step - 1, 0)) + 1,
                world_size=self.world.size,
                saved_at=time.time(),
                numeric=self.numeric,
                progress=state.state_dict(),
                metrics=metrics,
            )

        writer = Writer(
            self.checkpoints,
            lambda folder: retention.tidy(self.checkpoints, section, folder),
            copies=parts.strategy.copies,
        )
        return Saving(writer=writer, state=state, manifest=manifest, bus=self.bus)

    def close(self) -> None:
        """Let go of the observers and of the run's folder."""
        super().close()
        self.lock.release()

    def end(self, parts: Components, run: Training, *, status: str, metrics: dict[str, float]) -> None:
        state, left_out = parts.state, bad_samples.listed(self.logs)
        for split, found in left_out.items():
            self.warn(
                f"{found['count']} samples of the {split} split were left out ({bad_samples.PATTERN} in logs say why)"
            )
        summary: dict[str, Any] = {
            "status": status,
            "name": self.recipe.folder.name,
            "folder": str(self.recipe.folder),
            "steps": state.step,
            "epochs": round(parts.samples_at(state.step) / parts.order.samples, 4),
            "world_size": self.world.size,
            "samples_seen": parts.samples_at(state.step),
            "train_samples_per_second": round(run.throughput.steady, 2) if run.throughput.steady else None,
            "first_step_seconds": self.first_step.seconds,
            "evaluation": metrics,
            "confusion_matrix": self.last.confusion if self.last and metrics else None,
            **self.digests(parts, status),
            "digest_depends_on_world": self.leaves_the_promise(parts),
            "findings": None if self.findings is None else [finding.plain() for finding in self.findings],
            "chain": state.chain,
            "skipped_steps": state.skipped,
            "bad_samples": left_out,
            "saves": run.saving.facts(),
            "drift": [change for change in state.drift if change["step"] < state.step],  # a step was trained with it
            "torch_version": str(torch.__version__),
            "device": self.facts["device_model"],
            "numeric_recipe": self.numeric,
        }
        if self.world.is_main:
            storage.write(self.recipe.folder / "summary.json", json.dumps(summary, indent=1))
        self.bus.publish(RunEnded(status=status, summary=summary))

    def digests(self, parts: Components, status: str) -> dict[str, str | None]:
        """Of the weights and buffers as they are used; with a moving average also of those that were trained."""
        state, tensors = parts.state, parts.state.tensors()
        used = {name: tensors[source] for name, source in state.used().items()}
        trained = {"training_digest": self.digest(parts, parts.strategy.state(), status)} if state.ema else {}
        return {"digest": self.digest(parts, used, status), **trained}

    def digest(self, parts: Components, state: Mapping[str, Tensor], status: str) -> str | None:
        """Over all weights; where a run failed, other ranks may have gone, with whatever only they held: None then."""
        if status != "failed" or self.world.size == 1:
            return digest_of(world_lines(state, process_group.world_group()))
        is_whole = len(parts.strategy.copies) == self.world.size and not any(map(is_dtensor, state.values()))
        return digest(state) if is_whole else None


def build(
    recipe: Recipe, world: World, signals: SignalWatch, *, request: Path | None = None, began: float = 0.0
) -> TrainTask:
    """The task; nothing is asked of it that its recipe does not say."""
    return TrainTask(recipe, world, signals, began=began)
