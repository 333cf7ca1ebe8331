"""`lockstep.Loop`: the core of Lockstep for a script that keeps its own training loop."""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from lockstep.base.contracts import Format
from lockstep.base.errors import Interrupted, ModelError
from lockstep.base.events import RunEnded, RunStarted
from lockstep.base.model_contracts import LossSum, MicroBatch, Strategy
from lockstep.base.steering_requests import Request, Save, Stop
from lockstep.checkpoint.layout import CheckpointSection
from lockstep.core.distributed import process_group
from lockstep.core.host.signals import SignalWatch
from lockstep.core.numerics.digest import digest
from lockstep.core.numerics.exact_sum import exact_sum
from lockstep.core.numerics.precision import Precision, check_format, fix_numerics
from lockstep.core.numerics.seeds import Randomness, seed_all, seed_of
from lockstep.data.bad_samples import Faults
from lockstep.data.loader import Loader
from lockstep.data.sampler import EvaluationRequests, TrainingRequests
from lockstep.data.torch_dataset import Samples, Together
from lockstep.loop.loop_folder import LoopFolder
from lockstep.loop.loop_settings import LoopSettings, OwnSection, Schedule, checked
from lockstep.loop.loop_sums import contents, measured, world_sums
from lockstep.loop.own_step import OwnStep, ScriptGuard
from lockstep.loop.script_model import AutocastForward, made_equal, wrapped
from lockstep.loop.script_optimizer import ScriptOptimizer, made_scheduler
from lockstep.observe.diagnose.desync import RankComparison
from lockstep.observe.observe_config import ObserveSection
from lockstep.parallel.replicated import Stepwise
from lockstep.training import optim
from lockstep.training.learning_rate import checked_factor
from lockstep.training.loop import stepping
from lockstep.training.loop_state import Deadline, Training
from lockstep.training.state import TrainState
from lockstep.training.steering import FILE, Steering
from lockstep.training.step import Outcome, update
from lockstep.training.training_config import EvaluateSection, TrainSection


def seed(number: int, *, threads: int = 1) -> None:
    """Seed torch, NumPy and Python before a model is made, so that its initial weights are the same at every start:
    those of a run from a config with run.seed=number. `threads`: as in `Loop`."""
    fix_numerics(threads=threads, exact=True)
    seed_all(seed_of(number, "weights"))


class Loop:
    """The steps of a training, each with this process's share of its samples.

        loop = lockstep.Loop(model, optimizer, dataset, folder="runs/mine", global_batch=64, micro_batch=16, epochs=3)
        for step in loop:
            for x, y in step:
                step.backward(F.cross_entropy(model(x), y, reduction="sum"))

    The weights are the same bits on any number of processes, which torchrun, any other launcher or the script itself
    has started. A loop whose folder has checkpoints goes on from the newest one. `collate`, `workers`: as of a
    DataLoader; `buffers`: their rules (docs/your-own.md); `scheduler`: of torch, which the script steps, or a function
    of the optimizer and the number of steps that makes one (`loop.scheduler`); `schedule(step)` gives a factor of the
    learning rates instead; `save_steps`, `save_minutes`, `keep`: when checkpoints are saved, and how many of them are
    kept; `threads`: of each process. Raises UserError.
    """

    def __init__(  # noqa: PLR0913 (each is a setting that a script may have)
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        dataset: Any,
        *,
        folder: str | os.PathLike[str],
        global_batch: int,
        micro_batch: int,
        epochs: float | None = None,
        steps: int | None = None,
        seed: int = 0,
        precision: Format = "fp32",
        clip: float | None = None,
        scheduler: Any = None,
        schedule: Schedule | None = None,
        collate: Together | None = None,
        buffers: Mapping[str, str] | None = None,
        workers: int = 0,
        threads: int = 1,
        save_steps: int | None = None,
        save_minutes: float | None = 10.0,
        keep: int = 3,
        log_every: int = 10,
        sinks: tuple[str, ...] = ("jsonl",),
        allow_drift: bool = False,
    ) -> None:
        length = {"epochs": epochs, "steps": steps, "global_batch": global_batch, "micro_batch": micro_batch}
        self._settings = settings = LoopSettings(
            own=checked(OwnSection, folder=folder, seed=seed, threads=threads, workers=workers, clip=clip),
            train=checked(TrainSection, **length, precision=precision),
            checkpoint=checked(CheckpointSection, every_steps=save_steps, every_minutes=save_minutes, keep=keep),
            observe=checked(ObserveSection, log_every=log_every, sinks=sinks),
            schedule=schedule,
            allow_drift=allow_drift,
        )
        self._samples, self._collate = Samples(dataset, collate, "the data set of lockstep.Loop"), collate
        self._world = process_group.joined()
        self.device = process_group.device_of(self._world)
        check_format(precision, self.device)
        facts = fix_numerics(threads=threads, exact=True, precision=precision)
        own = wrapped(model, buffers or {}).to(self.device)
        self._order = settings.order(len(self._samples))
        self.scheduler = made_scheduler(scheduler, schedule, optimizer=optimizer, steps=self.total_steps)
        self._model, self._memory = model, ScriptOptimizer(own, optimizer, self.scheduler)
        differed = made_equal(own)
        facts |= {"device_model": process_group.device_model(self.device), "data.samples": len(self._samples)}
        numeric = settings.numeric() | self._memory.numeric() | facts
        self._folder = LoopFolder(settings, self._world, numeric)
        if differed:
            self._folder.warn(
                "the initial weights differed between the processes: all have those of rank 0 now. With "
                "lockstep.seed(0) before the model is made, they are the same at every start"
            )
        self._place(own, optimizer)
        try:
            self._folder.numeric |= contents(dataset, workers=workers, warn=self._folder.warn)
            self._checkpoint = self._folder.resume(self._state, self._memory)
            self._place_again()  # a checkpoint knows which parameters are trained
        except BaseException:
            self._folder.close()
            raise

    def _place(self, own: Any, optimizer: torch.optim.Optimizer) -> None:
        """Prepare the model, and build what changes in training."""
        settings, train = self._settings, self._settings.train
        self._rates = [group["lr"] for group in optimizer.param_groups]
        self._randomness = Randomness(seed_of(settings.own.seed, "training"))
        self._randomness.watch(own.blocks())
        precision = Precision(train.precision, self.device)
        self._own, self._forward = own, AutocastForward(self._model, precision)
        self._strategy = Stepwise(self._randomness, precision, exact=True)
        module = self._strategy.place(own, dict)
        if precision.is_scaled and isinstance(optimizer, torch.optim.SGD) and optimizer.defaults["fused"]:
            optim.initialise(module, optimizer)  # an overflow in its first step would leave momentum uninitialised
        self._state = TrainState(
            strategy=cast(Strategy, self._strategy),  # whose attributes are properties
            module=module,
            optimizer=optimizer,
            precision=precision,
            rate=None,
            randomness=self._randomness,
        )
        self._began = time.time()
        self._has_begun = False

    @property
    def is_main(self) -> bool:
        """Whether this is the process that writes files and should print."""
        return self._world.is_main

    @property
    def rank(self) -> int:
        """Number of this process."""
        return self._world.rank

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self._world.size

    @property
    def done(self) -> int:
        """Finished steps, over all starts."""
        return self._state.step

    @property
    def variables(self) -> dict[str, Any]:
        """Values of the script's own, such as the best accuracy so far, that checkpoints keep and resumes restore:
        numbers, texts, tensors, and lists and dicts of them. They have to be the same on every process."""
        return self._memory.variables

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps of an epoch, of which the last one may have fewer samples."""
        return self._order.steps_per_epoch

    @property
    def total_steps(self) -> int:
        """Steps of the whole training."""
        return self._settings.train.total_steps(self.steps_per_epoch)

    @property
    def digest(self) -> str:
        """sha256 over the weights and buffers as they are now, the same on every process."""
        return digest(self._strategy.state())

    def print(self, *values: object) -> None:
        """Print on one process only."""
        if self.is_main:
            sys.stdout.write(" ".join(map(str, values)) + "\n")
            sys.stdout.flush()

    def sum(self, values: Any) -> float | int:
        """Return the sum over all processes, without rounding errors, of numbers, tensors, or lists of them. Every
        process has to call it. Give floats one by one, such as the losses of the samples, since their sums would be
        rounded on each process before."""
        return world_sums({"": exact_sum(values)})[""]

    def evaluate(
        self, dataset: Any, measure: Callable[[Any], Mapping[str, Any]], *, micro_batch: int | None = None
    ) -> dict[str, float | int]:
        """Sum what `measure(batch)` returns, such as {"right": tensor of bools, "loss": losses of the samples}, over a
        data set of which each process takes its share. Without rounding errors, in evaluation mode, without gradients,
        in the precision of the training. Every process has to call it."""
        source = Samples(dataset, self._collate, "the data set of loop.evaluate")
        size = self._settings.train.micro_batch if micro_batch is None else micro_batch
        requests = EvaluationRequests(
            samples=len(source),
            lengths=None,
            micro_batch=checked(TrainSection, micro_batch=size).micro_batch,
            rank=self.rank,
            world_size=self.world_size,
        )
        own = [request for request in requests if not request.ghost]
        with self._evaluating():
            loader = Loader(source, own, seed=self._settings.own.seed, **self._loading(0))
            return measured(loader, measure)

    def save(self) -> None:
        """Save a checkpoint after the next step; what rank 0 asks for counts."""
        self._ask(Save())

    def stop(self) -> None:
        """End the loop after the next step, with a checkpoint; what rank 0 asks for counts."""
        self._ask(Stop())

    def __iter__(self) -> Iterator[OwnStep]:
        """Yield the remaining steps. After SIGTERM or Ctrl-C the state is saved at the end of the step, and the script
        ends with exit code 75."""
        if self._has_begun:
            raise ModelError("the steps of a loop are run once: make another lockstep.Loop with another folder")
        self._has_begun = True
        try:
            with self._training() as training:
                for micro_batches in () if self._state.is_stopped else stepping(training):
                    step = self._step(micro_batches)
                    yield step
                    if step.outcome is None:
                        raise ModelError(f"step {step.number} was left before the end of `for ... in step`")
                    training.outcome = step.outcome
                self._end(training)
        except Interrupted as error:
            sys.stderr.write(f"lockstep: {error}; start the script again to go on\n" if self.is_main else "")
            raise SystemExit(error.exit_code) from None

    def _step(self, micro_batches: list[MicroBatch]) -> OwnStep:
        if not self._model.training:
            raise ModelError("the model is in evaluation mode: call model.train() before the next step")
        position = getattr(self.scheduler, "last_epoch", None)

        def commit(loss: LossSum) -> Outcome:
            if getattr(self.scheduler, "last_epoch", None) != position:
                raise ModelError("scheduler.step() was called in `for ... in step`: call it after that, once in a step")
            if self._settings.schedule is not None:
                returned = self._settings.schedule(self._state.step)
                factor = checked_factor(returned, f"schedule({self._state.step})")
                for group, rate in zip(self._state.optimizer.param_groups, self._rates, strict=True):
                    group["lr"] = rate * factor
            with self._guard.inside("update"):
                return update(self._state, loss, clip=self._settings.own.clip, skip_non_finite=False)

        return OwnStep(
            micro_batches,
            epoch=self._order.epoch(self.done),
            ends_epoch=(self.done + 1) % self.steps_per_epoch == 0,
            strategy=self._strategy,
            guard=self._guard,
            begin=partial(self._guard.start_step, self._place_again),
            commit=commit,
        )

    def _place_again(self) -> None:
        """Place the model with other trained parameters. Raises ModelError for those that the optimizer lacks."""
        self._memory.check_parameters()
        self._strategy.place(self._own, dict)

    def _ask(self, request: Request) -> None:
        if self.is_main:
            self._folder.bus.requests.append(("the script", request))

    def _loading(self, workers: int) -> dict[str, Any]:
        return {"pad_id": 0, "workers": workers, "device": self.device, "faults": Faults(name="the data set")}

    def _steps(self, start: int) -> Iterator[list[MicroBatch]]:
        requests = TrainingRequests(order=self._order, owned=self._strategy.owned, start=start, stop=self.total_steps)
        loading = self._loading(self._settings.own.workers)
        return Loader(self._samples, requests, seed=self._settings.own.seed, **loading).steps()

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        modes = {module: module.training for module in self._model.modules()}
        self._model.eval()
        try:
            with torch.no_grad(), self._forward.inside(), self._strategy.passes.buffers.unchanged():
                yield
        finally:
            for module, mode in modes.items():
                module.training = mode

    @contextmanager
    def _training(self) -> Iterator[Training]:
        """Yield what `stepping` needs; inside, the model belongs to the loop, and signals are handled."""
        with ExitStack() as stack:
            stack.callback(self._folder.close)
            stack.callback(self._strategy.release)
            stack.callback(self._randomness.unwatch)
            stack.enter_context(self._forward.inside())
            self._guard = ScriptGuard(self._model, self._state.optimizer)
            stack.callback(self._guard.remove)
            signals = SignalWatch()
            if threading.current_thread() is threading.main_thread():
                stack.enter_context(signals.watching())
            signals.is_graceful = True
            training = self._build_training(signals)
            stack.callback(training.saving.settle)
            try:
                yield training
            except BaseException as error:
                status = "interrupted" if isinstance(error, Interrupted | GeneratorExit) else "failed"
                self._folder.bus.publish(RunEnded(status=status, summary={}))
                raise

    def _build_training(self, signals: SignalWatch) -> Training:
        state, folder, observe = self._state, self._folder, self._settings.observe
        saving = folder.saving(state, self._memory, self._order)
        saving.newest = self._checkpoint
        requests = Steering(folder.bus, folder.path / FILE if self.is_main else None)
        requests.start(state.step, repeats=self._checkpoint is not None)
        ranks = RankComparison(self._strategy.state().items(), state.step, self._strategy.copies)
        folder.bus.publish(
            RunStarted(
                name=folder.path.name,
                folder=folder.path,
                resumed_step=self.done,
                total_steps=self.total_steps,
                steps_per_epoch=self.steps_per_epoch,
                world_size=self.world_size,
                device=str(folder.numeric["device_model"]),
                parameters=sum(parameter.numel() for parameter in self._model.parameters()),
                train_samples=len(self._samples),
            )
        )
        saving.writer.warm_up(state.tensors())
        return Training(
            state=state,
            train=self._settings.train,
            evaluation=EvaluateSection(),
            checkpoint=self._settings.checkpoint,
            steps=self._steps,
            evaluate=None,
            saving=saving,
            compare_ranks=ranks.check,
            describe=lambda step, shard: f"shard {shard}, samples {self._order.shards(step)[shard].tolist()}",
            bus=folder.bus,
            total_steps=self.total_steps,
            steps_per_epoch=self.steps_per_epoch,
            samples_at=self._order.samples_at,
            derived=lambda _: {},
            clip=self._settings.own.clip,
            log_every=observe.log_every,
            desync_every=observe.desync_every,
            is_main=self.is_main,
            deadline=Deadline(None, self._began),
            interrupted=signals.requested,
            steering=requests,
            stopping=signals.cancel_timer,
        )

    def _end(self, training: Training) -> None:
        state, speed = self._state, training.throughput.steady
        summary = {
            "status": training.ended[0] if not state.is_stopped else "stopped early",
            "steps": state.step,
            "world_size": self.world_size,
            "samples_seen": self._order.samples_at(state.step),
            "train_samples_per_second": round(speed, 2) if speed else None,
            "digest": self.digest,
            "chain": state.chain,
            "skipped_steps": state.skipped,
            "drift": state.drift,
            "folder": str(self._folder.path),
            "saves": training.saving.facts(),
            "numeric_recipe": self._folder.numeric,
        }
        self._folder.write_summary(summary)
        self._folder.bus.publish(RunEnded(status=str(summary["status"]), summary=summary))
