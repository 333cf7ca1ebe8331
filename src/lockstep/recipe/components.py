"""The components of one process of a run: data, model, optimizer state, and questions about all of them together."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lockstep.base import devices
from lockstep.base.config import MANY
from lockstep.base.contracts import DataSpec, Source
from lockstep.base.errors import ConfigError, DataError
from lockstep.base.model_contracts import MicroBatch, Model, Strategy
from lockstep.base.world import World
from lockstep.checkpoint.metric_modes import mode_by_name
from lockstep.core.distributed import process_group
from lockstep.core.distributed.collectives import all_gather_object, broadcast_object, raise_on_all_ranks
from lockstep.core.host.matmul_speed import faster_precision
from lockstep.core.modules.dtensors import is_dtensor
from lockstep.core.numerics.batchnorm import check_synchronised, has_batchnorm
from lockstep.core.numerics.digest import digest, digest_of, world_lines
from lockstep.core.numerics.precision import check_format
from lockstep.data.bad_samples import Faults
from lockstep.data.chat import ChatTokenizer
from lockstep.data.dataset import spread_evenly
from lockstep.data.loader import Loader
from lockstep.data.order import Order
from lockstep.data.preparation import Preparation, needed
from lockstep.data.sampler import EvaluationRequests, Owned, TrainingRequests
from lockstep.models._own_functions import own_metrics
from lockstep.models.metrics.declared_metrics import DeclaredMetric, check, declared_metrics, is_requested, mode_of
from lockstep.models.objectives._choice import objective_of, with_objective
from lockstep.models.objectives._objective import PredictingObjective
from lockstep.protocol import live_messages
from lockstep.recipe.recipe import Recipe
from lockstep.recipe.splits import Splits
from lockstep.recipe.warm_start import WarmStart
from lockstep.training.evaluation import Evaluation, EvaluationTarget, Predictions, evaluate, trial_evaluation
from lockstep.training.findings import LOSS_IS, Finding
from lockstep.training.model_checks import ModelCheck, check_lone_sample
from lockstep.training.state import TrainState


@dataclass(kw_only=True)
class Components:
    """Everything that is built from a recipe for one process."""

    recipe: Recipe
    world: World
    device: torch.device
    order: Order
    model: Model
    state: TrainState
    data: Splits
    total_steps: int
    warm_start: WarmStart | None = None
    token_flops: int | None = None
    """Floating-point operations per token of a language model, on the main rank."""
    again: Callable[[int], Owned | None] = lambda _: None
    """See TrainingRequests."""

    @property
    def strategy(self) -> Strategy:
        return self.state.strategy

    def steps(self, start: int) -> Iterator[list[MicroBatch]]:
        """Yield this rank's micro-batches, a list per step, from step `start` on."""
        owned, stop = self.strategy.owned, self.total_steps
        requests = TrainingRequests(order=self.order, owned=owned, start=start, stop=stop, again=self.again)
        return self.data.training_loader(requests, self.device).steps()

    def micro_batches(self, step: int, owned: Owned) -> list[MicroBatch]:
        """Load micro-batches of one step. Raises SampleError."""
        requests = TrainingRequests(order=self.order, owned=owned, start=step, stop=step + 1)
        return next(self.data.training_loader(requests, self.device, workers=0).steps())

    def owned(self, step: int) -> tuple[list[int], frozenset[int]]:
        """Return the non-empty shards of a step: those of this rank, and all of them."""
        present = frozenset(shard for shard, rows in enumerate(self.order.shards(step)) if len(rows))
        own = self.strategy.owned(self.order.shards_per_step, present)
        return [shard for shard in own if shard is not None], present

    @property
    def least_samples(self) -> int:
        """Size of the smallest micro-batch of the run: the last ones of an epoch may have fewer samples than others."""
        last = min(self.order.steps_per_epoch, self.total_steps) - 1
        return min(len(rows) for step in (0, last) for rows in self.order.shards(step) if len(rows))

    def describe(self, step: int, shard: int) -> str:
        """Name the rank that ran a shard and its samples, for a message. Collective."""
        rank = next(rank for rank, own in enumerate(all_gather_object(self.owned(step)[0])) if shard in own)
        return f"rank {rank}, shard {shard}, samples {self.order.shards(step)[shard].tolist()}"

    @property
    def subject(self) -> EvaluationTarget:
        """Current model, ready to be evaluated."""
        return EvaluationTarget(
            forward=self.strategy.forward,
            loss=self.model.loss,
            derived=self.model.derived,
            metrics=requested_metrics(self.recipe, self.data.test.spec),
            requested=self.recipe.evaluate.metrics,
            device=self.device,
            is_local=len(self.strategy.copies) == self.world.size,
        )

    def evaluate(self, notice: Callable[[int, int], None] = lambda _done, _total: None) -> Evaluation:
        """Measure the current model on the test split, or the part of it that evaluate.limit names; `notice` is called
        with the number of micro-batches that are measured, and of all."""
        data, limit = self.data, self.recipe.evaluate.limit
        return evaluate_source(
            self.recipe,
            replace(self.subject, notice=notice),
            data.test if limit is None else spread_evenly(data.test, limit),
            world=self.world,
            pad_id=data.pad_id,
            faults=data.faults["test"],
        )

    def try_evaluation(self) -> None:
        """Evaluate one micro-batch before training starts. Raises, on all ranks, what an evaluation would, and
        ConfigError where a setting names a metric that is not measured."""
        with raise_on_all_ranks():
            requests = evaluation_requests(self.recipe, self.data.test, World())
            first = next(iter(self.data.test_loader(requests, self.device)))
        recipe, asked = self.recipe, self.recipe.evaluate.metrics
        try:
            measured, are_all = trial_evaluation(replace(self.subject, requested="auto"), first)
        except DataError:
            with raise_on_all_ranks():
                self.data.faults["test"].refuse_outside(first)  # which names the sample
            raise
        known = [name for name in measured if name == "loss" or is_requested(name.partition(".")[0], asked)]
        check("checkpoint.best", recipe.checkpoint.best, known, are_all=are_all)
        check("train.stop_metric", recipe.train.stop_metric, known, are_all=are_all)
        check_modes(recipe)
        if asked != "auto":
            every = recipe.changed("evaluate", metrics="auto")
            measured = [*dict.fromkeys((*measured, *requested_metrics(every, self.data.test.spec)))]
            for name in asked:
                check("evaluate.metrics", name, measured, are_all=are_all)

    def replicated_tensors(self) -> list[tuple[str, Tensor]]:
        """Return this rank's weights and buffers, which must be equal on all ranks of `strategy.copies`."""
        weights = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        buffers = {name: tensor for name, tensor in self.strategy.state().items() if name not in weights}
        tensors = [(name, tensor) for name, tensor in buffers.items() if isinstance(tensor, Tensor)]
        return [*self.state.module.named_parameters(), *tensors]

    @property
    def uses_sync_batchnorm(self) -> bool:
        """Whether BatchNorm statistics are taken over all processes; a single process has nothing to synchronise."""
        return self.recipe.train.batchnorm == "sync" and self.world.size > 1 and has_batchnorm(self.model)

    @property
    def world_size_dependence(self) -> str | None:
        """Why the weights depend on the number of processes; None where they do not."""
        if self.uses_sync_batchnorm:
            return "batchnorm is sync: the weights depend on the number of processes"
        if reason := self.recipe.parallel.breaks_reproducibility:
            return str(reason)
        if self.recipe.run.reproducibility == "fast":
            return "reproducibility is fast: the last bits of the weights depend on the number of processes"
        return None

    def check_training(self) -> None:
        """Raise, on all ranks, what rules out training: ConfigError where the run would be too long, too short for its
        warm-up, or in a format that this device does not have; LaunchError where BatchNorm cannot be synchronised over
        this number of processes."""
        total, train, schedule = self.total_steps, self.recipe.train, self.recipe.schedule
        with raise_on_all_ranks():
            check_format(train.precision, self.device)
            if total > MANY:
                raise ConfigError(f"train.epochs={train.epochs:g} are {total:,} steps, more than {MANY:,}: lower it")
            if schedule.warmup_steps(total) > total:
                raise ConfigError(
                    f"schedule.warmup={schedule.warmup:g} steps are more than the {total} of the run; below 1 it is a "
                    "fraction of the run, such as 0.05"
                )
        if not self.uses_sync_batchnorm:
            return
        last = min(self.order.steps_per_epoch, total) - 1
        shards = {name: self.owned(step) for name, step in (("a step", 0), ("an epoch's last step", last))}
        with raise_on_all_ranks():
            counts = {name: (len(own), len(present)) for name, (own, present) in shards.items()}
            check_synchronised(self.world.size, counts)

    def check_user_code(self, micro_batch: MicroBatch) -> list[Finding] | None:
        """Check the user's code on a step's first micro-batch. Collective. Raises SampleError."""
        assert self.state.randomness is not None
        check = ModelCheck(
            model=self.model,
            module=self.state.module,
            strategy=self.strategy,
            randomness=self.state.randomness,
            loss_is=self.recipe.train.loss_is,
            peer=self.strategy.copies[0] if self.recipe.parallel.SHARES_SHARDS else 0,
        )
        again = self.data.first_training_batch(self.order, self.device, step=micro_batch.step, workers=0)
        if has_batchnorm(self.model) and not self.uses_sync_batchnorm and self.least_samples == 1:
            check_lone_sample(self.strategy, again)
        return check.findings(micro_batch, again=again)

    def digests(self, *, is_collective: bool) -> dict[str, str | None]:
        """Return digests of weights and buffers as they are used and, with a moving average, of those being trained;
        without collectives, None where this rank does not hold all weights."""
        tensors = self.state.tensors()
        digests = {"digest": {name: tensors[source] for name, source in self.state.used().items()}}
        if self.state.ema:
            digests["training_digest"] = self.strategy.state()
        if is_collective:
            group = process_group.world_group()
            return {name: digest_of(world_lines(state, group)) for name, state in digests.items()}
        is_whole = len(self.strategy.copies) == self.world.size
        return {
            name: digest(state) if is_whole and not any(map(is_dtensor, state.values())) else None
            for name, state in digests.items()
        }


def start_notes(parts: Components, world: World) -> list[str]:
    """Return sentences that the user should know before training starts, the same on every rank. Collective."""
    notes = list[str]()
    idle = all_gather_object(not parts.owned(0)[0]).count(True)
    if idle:
        notes.append(
            f"a step has {parts.order.shards_per_step} micro-batches, too few for {world.size} processes: "
            f"{idle} of them idle; launch.processes={world.size - idle} is as fast"
        )
    if devices.are_shared(world):
        notes.append(
            f"launch.share_gpus: {world.local_size} processes on {devices.count_gpus()} GPU(s), for trying and "
            "proving; one on each is faster"
        )
    if parts.state.step > parts.total_steps:
        what = f"the checkpoint is one of step {parts.state.step:,}, but the run has {parts.total_steps:,} steps"
        notes.append(f"{what}: there is nothing left to train")
    notes += [*_model_notes(parts), *_prediction_note(parts), *_template_notes(parts), *parts.model._lockstep_notes]
    notes += parts.warm_start.notes if parts.warm_start else ()
    kind, launch = parts.recipe.parallel.kind, parts.recipe.launch
    is_open = launch.decides_recovery and launch.max_restarts > 0
    if world.has_agent and world.size > 1 and is_open and parts.recipe.parallel.state_copies == 1:
        notes.append(
            f"if a process is lost, all start again from the newest checkpoint: with parallel.kind={kind} they hold "
            "one copy of the training state together"
        )
    if live_messages.is_live_worker() and parts.recipe.observe.file is not None:
        notes.append(
            "if rank 0 is lost, the observers of observe.file begin anew on another process: one that steers by what "
            "it remembers may then ask for something else; launch.recovery=restart keeps that"
        )
    if parts.world_size_dependence:
        notes.append(parts.world_size_dependence)
    if parts.recipe.train.loss_is == "batch_wise":
        notes.append(LOSS_IS)
    return notes


def _model_notes(parts: Components) -> Iterator[str]:
    """Note what is left out, a precision that is much faster here, and outputs without a class. Collective."""
    if excluded := len(parts.data.excluded):
        yield f"data.exclude leaves {excluded:,} of {len(parts.data.train):,} training samples out"
    parameters = sum(each.numel() for each in parts.model.parameters())
    if note := broadcast_object(faster_precision(parts.recipe.train.precision, parts.device, parameters=parameters)):
        yield note
    classes, outputs = len(parts.data.train.spec.labels), getattr(getattr(parts.model, "objective", None), "classes", 0)
    if (outputs or 0) > classes:
        what = f"the model gives {outputs:,} outputs for the {classes} classes of the data"
        yield f"{what}: F1, the confusion matrix, predict and serve need one for each class"


def _prediction_note(parts: Components) -> tuple[str, ...]:
    """Note why files cannot be predicted, if so."""
    spec = parts.data.train.spec
    if spec.modality == "text" and parts.data.tokenizer is None:
        return ("predict and serve cannot use this model: for texts they need the tokenizer of model.kind=transformer",)
    objective = objective_of(spec)
    if spec.image_shape and not objective.GENERATES and not isinstance(objective, PredictingObjective):
        return ("predict and serve cannot use this model: its data has neither labels nor numbers for each sample",)
    message = needed(parts.data.test.spec)
    return (message,) if message and not isinstance(parts.data.processor, Preparation) else ()


def _template_notes(parts: Components) -> tuple[str, ...]:
    """Note that a tokenizer has no chat template, or the date that the template writes, if it writes one."""
    if not isinstance(tokenizer := parts.data.tokenizer, ChatTokenizer):
        return ()
    origin = getattr(tokenizer.inner, "origin", None)
    if origin is not None and not getattr(origin, "chat_template", None):
        return ("the tokenizer has no chat template: a plain one is used, in training, in use and in exports",)
    if tokenizer.day is None:
        return ()
    return (f"the chat template writes the date: chats are learned with data.date={tokenizer.day}, on any day",)


def evaluate_source(
    recipe: Recipe,
    subject: EvaluationTarget,
    source: Source,
    *,
    world: World,
    pad_id: int,
    faults: Faults,
    predictions: Predictions | None = None,
) -> Evaluation:
    """Measure a model on every sample of a source once, except unreadable ones that may be skipped."""
    requests = evaluation_requests(recipe, source, world)
    seed, device = recipe.run.seed, subject.device
    batches = Loader(source, requests, faults=faults, seed=seed, pad_id=pad_id, workers=0, device=device)
    result = evaluate(subject, batches, total=requests.total, predictions=predictions)
    assert faults.skips or result.samples == len(source), (result.samples, len(source))
    return result


def evaluation_requests(recipe: Recipe, source: Source, world: World) -> EvaluationRequests:
    """Return the micro-batches of a source that this rank evaluates."""
    return EvaluationRequests(
        samples=len(source),
        lengths=source.lengths,
        micro_batch=recipe.evaluate.micro_batch or recipe.train.micro_batch,
        rank=world.rank,
        world_size=world.size,
    )


def requested_metrics(recipe: Recipe, spec: DataSpec) -> dict[str, DeclaredMetric]:
    """Return the metrics of an evaluation by name, including those of the user's code. Raises ModelError."""
    spec = with_objective(spec, recipe.model.objective)
    known = declared_metrics(objective_of(spec).metrics(spec), own_metrics(recipe.model, spec))
    return {name: metric for name, metric in known.items() if is_requested(name, recipe.evaluate.metrics)}


def with_modes(recipe: Recipe, metrics: Mapping[str, DeclaredMetric]) -> Recipe:
    """Return the recipe with checkpoint.mode and train.stop_mode decided: by the metric itself, else by its name; left
    open where neither says whether smaller or larger values are better."""
    for section, _, name, mode in open_modes(recipe):
        recipe = recipe.changed(section, **{mode: mode_of(name, metrics) or mode_by_name(name) or "auto"})
    return recipe


def open_modes(recipe: Recipe) -> Iterator[tuple[str, str, str, str]]:
    """Yield section, setting, metric and mode setting of each metric that decides something while its mode is open."""
    for section, key, mode in (("checkpoint", "best", "mode"), ("train", "stop_metric", "stop_mode")):
        settings = getattr(recipe, section)
        if getattr(settings, key) is not None and getattr(settings, mode) == "auto":
            yield section, key, getattr(settings, key), mode


def check_modes(recipe: Recipe) -> None:
    """Raise ConfigError where nothing has decided a mode."""
    for section, key, name, _ in open_modes(recipe):
        raise ConfigError(
            f"{section}.{key}={name}: nothing says whether smaller or larger values of it are better; set "
            f"{section}.{key}=-{name} or +{name}"
        )
