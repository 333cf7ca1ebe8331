"""What every process runs: world, recipe, assemble, train or evaluate, leave with an honest exit code.

    python -m lockstep.worker CONFIG.yaml [section.key=value ...] [--resume HOW] [--evaluate CHECKPOINT]

One process by itself, or one of many under torchrun or any launcher that sets torchrun's variables.
"""

import argparse
import json
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import psutil
import torch
from filelock import FileLock, Timeout
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from lockstep import config, files, plugins
from lockstep import recipe as recipes
from lockstep.checkpoint import keeper, layout
from lockstep.checkpoint.weights import restore
from lockstep.checkpoint.writer import THREAD, Writer
from lockstep.diagnose.desync import Comparison
from lockstep.diagnose.watch import Limits, Watch
from lockstep.errors import Desync, Interrupted, LaunchError, LockstepError, PeerLost
from lockstep.evaluation import Evaluation
from lockstep.events import Bus, Evaluated, RunEnded, RunStarted, StepDone, Warned
from lockstep.recipe import Parts, Recipe
from lockstep.runtime import process_group
from lockstep.runtime.collectives import decided, local_main_first, said_once, together
from lockstep.runtime.digest import digest
from lockstep.runtime.interruption import Interruption
from lockstep.runtime.precision import fix_numerics
from lockstep.training.deadline import Deadline
from lockstep.training.loop import Training, train
from lockstep.training.resume import checkpoint_for, resume, set_aside
from lockstep.training.saving import Saving
from lockstep.world import World

if os.name != "nt":
    import fcntl

SETTLE_SECONDS = 10.0
"""After an error, how long a save that is being written may take to end."""


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


class Job:
    """One process's part of a run, from the recipe to the summary."""

    def __init__(self, recipe: Recipe, world: World, interruption: Interruption, *, began: float = 0.0) -> None:
        self.recipe, self.world, self.interruption = recipe, world, interruption
        self.began = began or psutil.Process().create_time()
        self.bus, self.first_step = Bus(), FirstStep()
        self.device = process_group.device_of(world)
        self.facts = fix_numerics(threads=recipe.run.threads, exact=recipe.run.reproducibility == "exact")
        self.facts["device_model"] = device_model(self.device)
        self.numeric = recipes.numeric(recipe, self.facts)
        self.last: Evaluation | None = None
        self.lock = FileLock(recipe.folder / ".lock", timeout=0)
        self.logs = recipe.folder / "logs"
        self.watch_thread = Watch(world, limits(recipe), self.logs)

    @property
    def checkpoints(self) -> Path:
        """The folder of this run's checkpoints."""
        return self.recipe.folder / "checkpoints"

    def assemble(self) -> Parts:
        """Prepare the data, one process per machine first, then build every part."""
        local_main_first(
            lambda: recipes.prepare(self.recipe, self.bus.publish), is_local_main=self.world.local_rank == 0
        )
        return recipes.assemble(self.recipe, self.world, self.device)

    def warn(self, message: str) -> None:
        """Tell the user."""
        self.bus.publish(Warned(message=message))

    def claim(self) -> None:
        """Take the run's folder: two runs in one would delete each other's checkpoints. Raises LaunchError."""
        with together():
            if self.world.is_main:
                self.recipe.folder.mkdir(parents=True, exist_ok=True)
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
        if self.recipe.observe.file is not None:
            for observer in plugins.load_file(self.recipe.observe.file).observers(self.recipe.observe.options):
                self.bus.subscribe(observer)

    def train(self, how: str, *, allow_drift: bool) -> None:
        """Train to the end and write the summary, whatever the end is."""
        self.claim()
        self.watch()
        parts = self.assemble()
        parts.check_training()
        self.numeric["data.samples"] = len(parts.data.train)
        found = checkpoint_for(self.checkpoints, how, self.warn)
        if found is not None:
            resume(parts.state, found, self.numeric, allow_drift=allow_drift, warn=self.warn)
        if self.world.is_main:
            if how not in ("auto", "never"):
                set_aside(self.checkpoints, parts.state.step, self.warn)
            files.write(self.recipe.folder / "recipe.yaml", config.dump(self.recipe))
            (self.recipe.folder / "summary.json").unlink(missing_ok=True)  # an earlier end's; a kill now leaves none
        self.bus.publish(self.started(parts))
        run = self.training(parts)
        run.saving.newest = found
        status: str = "failed"
        metrics: dict[str, float] = {}
        try:
            if found is not None and (ended := self.ended(parts)):
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

    def trained(self, run: Training) -> tuple[str, dict[str, float]]:
        """Train: how it ended, and the last evaluation."""
        self.interruption.is_graceful = True
        run.saving.writer.warm_up(run.state.tensors())
        try:
            return train(run)
        except Desync as error:
            run.saving.settle(SETTLE_SECONDS)
            run.saving.writer.cancel()
            if self.world.is_main:  # they may hold weights of several ranks that do not belong together
                set_aside(self.checkpoints, error.equal_at, self.warn)
            raise

    def ended(self, parts: Parts) -> str | None:
        """How a run that has been brought back had ended already, if it had."""
        if parts.state.step >= parts.total_steps:
            return "finished"
        is_stopped = parts.state.stopping.evaluations_since >= self.recipe.train.stop_patience
        return "stopped early" if self.recipe.train.stop_metric and is_stopped else None

    def evaluate(self, parts: Parts) -> tuple[int, dict[str, float]]:
        """Measure the model as it is; the whole result is kept for the summary."""
        self.last = parts.evaluate()
        return self.last.samples, self.last.values

    def started(self, parts: Parts) -> RunStarted:
        """What is about to run."""
        shards, notes = parts.order.shards_per_step, []
        if self.world.size > shards:
            notes.append(
                f"a step has {shards} micro-batches but there are {self.world.size} processes: "
                f"{self.world.size - shards} of them idle; launch.processes={shards} is as fast"
            )
        if parts.leaves_the_promise:
            notes.append(parts.leaves_the_promise)
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

    def training(self, parts: Parts) -> Training:
        """The loop's view of the parts."""
        recipe, state = self.recipe, parts.state
        compared = Comparison(state.module.named_parameters(), state.step)
        return Training(
            state=state,
            train=recipe.train,
            evaluation=recipe.evaluate,
            checkpoint=recipe.checkpoint,
            steps=parts.steps,
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
            interrupted=self.interruption.requested,
            stopping=self.interruption.accepted,
        )

    def saving(self, parts: Parts) -> Saving:
        """How this run saves."""
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

        writer = Writer(self.checkpoints, lambda folder: keeper.tidy(self.checkpoints, section, folder))
        return Saving(writer=writer, state=state, manifest=manifest, bus=self.bus)

    def close(self) -> None:
        """Let go of the observers and of the run's folder."""
        self.bus.close()
        self.lock.release()

    def end(self, parts: Parts, run: Training, *, status: str, metrics: dict[str, float]) -> None:
        """Write summary.json and say goodbye."""
        state = parts.state
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
            "digest": digest(parts.strategy.state()),
            "digest_depends_on_world": parts.leaves_the_promise,
            "chain": state.chain,
            "skipped_steps": state.skipped,
            "saves": run.saving.facts(),
            "drift": [change for change in state.drift if change["step"] < state.step],  # a step was trained with it
            "torch_version": str(torch.__version__),
            "device": self.facts["device_model"],
            "numeric_recipe": self.numeric,
        }
        if self.world.is_main:
            files.write(self.recipe.folder / "summary.json", json.dumps(summary, indent=1))
        self.bus.publish(RunEnded(status=status, summary=summary))

    def measure(self, checkpoint: Path) -> None:
        """Evaluate a checkpoint and write evaluation.json."""
        if self.world.is_main:
            self.bus.subscribe(plugins.find("observe.sinks", "progress").terminal())
        parts = self.assemble()
        restore(parts.model, checkpoint)
        manifest = layout.read_manifest(checkpoint)
        parts.model.eval()
        result = parts.evaluate()
        self.bus.publish(
            Evaluated(step=manifest.step, epoch=manifest.epoch, samples=result.samples, values=result.values)
        )
        if self.world.is_main:
            facts = {"checkpoint": str(checkpoint), "samples": result.samples, **result.values}
            text = json.dumps({**facts, "confusion_matrix": result.confusion}, indent=1)
            files.write(self.recipe.folder / "evaluation.json", text)


def limits(recipe: Recipe) -> Limits:
    """When the recipe calls a process stuck or silent."""
    hang = recipe.observe.hang_seconds
    return Limits(
        hang_seconds=None if hang == "auto" else hang,
        restarts=recipe.observe.on_hang == "restart",
        silent_seconds=recipe.launch.failure_timeout_seconds,
    )


def device_model(device: torch.device) -> str:
    """The name of the chip: bits may differ between two of them."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "CPU")


def arguments(argv: list[str]) -> argparse.Namespace:
    """The command line of a worker."""
    parser = argparse.ArgumentParser(prog="lockstep.worker", description="One process of a Lockstep run.")
    parser.add_argument("config", type=Path, help="a YAML file, or a run's recipe.yaml")
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    parser.add_argument("--resume", default="auto", help="auto, never, or a checkpoint's folder")
    parser.add_argument("--allow-drift", action="store_true", help="resume although the numeric recipe has changed")
    parser.add_argument(
        "--began", type=float, default=0.0, help="when the run was launched (seconds since 1970): for max_minutes"
    )
    parser.add_argument("--evaluate", type=Path, help="evaluate this checkpoint instead of training")
    return parser.parse_args(argv)


def main(argv: list[str], make: Callable[..., Job] = Job) -> int:
    """Run one process to its end; returns its exit code. `make` gives the job, for a run that is watched closely."""
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    options, world, interruption = arguments(argv), World.from_environment(), Interruption()
    append_to_logs()
    with interruption.watching():
        try:
            recipe = recipes.named(recipes.load(options.config, options.overrides), options.config)
            with process_group.opened(world, process_group.device_of(world)), said_once(sys.stderr):
                job = make(decided(recipe), world, interruption, began=options.began)
                try:
                    with job.watch_thread.watching():
                        if options.evaluate:
                            job.measure(options.evaluate)
                        else:
                            job.train(options.resume, allow_drift=options.allow_drift)
                finally:
                    job.close()
        except LockstepError as error:
            if not error.is_shared:
                get_error_handler().record_exception(error)
                sys.stderr.write(f"{error}\n")
            return error.exit_code
        except Exception as error:
            if process_group.is_lost_peer(error):
                return left_alone(world, error)
            get_error_handler().record_exception(error)  # for the agent, which names the first that failed
            traceback.print_exc()
            return 1
    return 0


def append_to_logs() -> None:
    """Both output streams may be one file that was opened twice: without this, each would write over the other."""
    if os.name == "nt":
        return
    for stream in (1, 2):
        with suppress(OSError):
            fcntl.fcntl(stream, fcntl.F_SETFL, fcntl.fcntl(stream, fcntl.F_GETFL) | os.O_APPEND)


def left_alone(world: World, error: Exception) -> int:
    """Another process has gone, and says why itself: this one only adds that it noticed."""
    if not (world.is_main and world.has_agent):  # the agent, on the same terminal, will tell who went
        sys.stderr.write(f"rank {world.rank} lost the connection to another process: {str(error).splitlines()[0]}\n")
    return PeerLost.exit_code


def leave(code: int) -> NoReturn:
    """End the process. A save that hangs has a thread in native code, which would abort an interpreter that ends."""
    if any(thread.name == THREAD for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
