"""The one place where a recipe's parts meet: data, model, strategy, optimizer, built for one process."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor

from lockstep.base import plugins
from lockstep.base.config import MANY
from lockstep.base.contracts import DataSpec, Source, Tokenizer
from lockstep.base.errors import ConfigError
from lockstep.base.events import Warned
from lockstep.base.model_contracts import Batch, MicroBatch, Model, Strategy
from lockstep.base.world import World
from lockstep.core.distributed.collectives import all_gather_object, raise_on_all_ranks
from lockstep.core.modules.deferred_init import deferred
from lockstep.core.numerics.batchnorm import check_synchronised, has_batchnorm, synchronise
from lockstep.core.numerics.precision import Precision
from lockstep.core.numerics.seeds import Randomness, seed_all, seed_of
from lockstep.data.augment import augmented
from lockstep.data.bad_samples import Faults
from lockstep.data.dataset import open_source, with_tokens
from lockstep.data.loader import Loader
from lockstep.data.order import Order
from lockstep.data.sampler import EvaluationRequests, ShardRequest, TrainingRequests
from lockstep.run.recipe import Recipe
from lockstep.training import optim
from lockstep.training.ema import MovingAverage
from lockstep.training.evaluation import Evaluation, EvaluationTarget, Predictions, evaluate, trial_evaluation
from lockstep.training.findings import Finding
from lockstep.training.metrics.declared_metrics import DeclaredMetric, declared_metrics
from lockstep.training.metrics.requested_metrics import check, is_requested
from lockstep.training.model_checks import ModelCheck
from lockstep.training.state import TrainState, initialise


@dataclass(frozen=True)
class Data:
    """Both splits, and the tokenizer that made their tokens."""

    train: Source
    test: Source
    tokenizer: Tokenizer | None
    faults: Mapping[str, Faults] = field(default_factory=lambda: {"train": Faults(), "test": Faults()})
    """What becomes of samples that cannot be read, by split."""

    @property
    def pad_id(self) -> int:
        """What short rows of tokens are filled with."""
        return self.tokenizer.pad_id if self.tokenizer else 0


@dataclass(kw_only=True)
class Components:
    """A recipe's parts, built for one process."""

    recipe: Recipe
    world: World
    device: torch.device
    order: Order
    model: Model
    state: TrainState
    data: Data
    total_steps: int

    @property
    def strategy(self) -> Strategy:
        return self.state.strategy

    def steps(self, start: int) -> Iterator[list[MicroBatch]]:
        """This rank's micro-batches of each step from `start` on."""
        requests = TrainingRequests(order=self.order, owned=self.strategy.owned, start=start, stop=self.total_steps)
        return loaded(self.recipe, self.data, requests, device=self.device).steps()

    def owned(self, step: int) -> tuple[list[int], frozenset[int]]:
        """The shards of a step that hold samples: this rank's, and all of them."""
        present = frozenset(shard for shard, rows in enumerate(self.order.shards(step)) if len(rows))
        own = self.strategy.owned(self.order.shards_per_step, present)
        return [shard for shard in own if shard is not None], present

    @property
    def subject(self) -> EvaluationTarget:
        """The model, to be measured as it is."""
        return EvaluationTarget(
            forward=self.strategy.forward,
            loss=self.model.loss,
            metrics=measured(self.recipe, self.data.test.spec),
            requested=self.recipe.evaluate.metrics,
            device=self.device,
            is_local=len(self.strategy.copies) == self.world.size,
        )

    def try_evaluation(self) -> None:
        """Measure the first test samples, before any time has been spent on training: raises, on all ranks, what an
        evaluation would, and ConfigError where the run decides by something that is not measured."""
        with raise_on_all_ranks():
            requests = evaluation_requests(self.recipe, self.data.test, rank=0, world_size=1)
            loader = evaluation_loader(
                self.recipe,
                self.data.test,
                requests,
                faults=self.data.faults["test"],
                pad_id=self.data.pad_id,
                device=self.device,
            )
            first = next(iter(loader))
        recipe, asked = self.recipe, self.recipe.evaluate.metrics
        found, are_all = trial_evaluation(replace(self.subject, requested="auto"), first)
        known = [name for name in found if name == "loss" or is_requested(name.partition(".")[0], asked)]
        check("checkpoint.best", recipe.checkpoint.best, known, are_all=are_all)
        check("train.stop_metric", recipe.train.stop_metric, known, are_all=are_all)
        for name in asked if asked != "auto" else ():
            check("evaluate.metrics", name, found, are_all=are_all)

    def held(self) -> list[tuple[str, Tensor]]:
        """What has to be alike on the ranks that hold copies: this rank's part of the weights, and buffers."""
        weights = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        buffers = {name: tensor for name, tensor in self.strategy.state().items() if name not in weights}
        tensors = [(name, tensor) for name, tensor in buffers.items() if isinstance(tensor, Tensor)]
        return [*self.state.module.named_parameters(), *tensors]

    def evaluate(self) -> Evaluation:
        """Measure the model as it is on the whole test split."""
        return evaluated(
            self.recipe,
            self.subject,
            self.data.test,
            world=self.world,
            pad_id=self.data.pad_id,
            faults=self.data.faults["test"],
        )

    @property
    def is_synchronised(self) -> bool:
        """Whether a BatchNorm layer is to use what all processes hold; a lone one has nothing to synchronise."""
        return self.recipe.train.batchnorm == "sync" and self.world.size > 1 and has_batchnorm(self.model)

    @property
    def leaves_the_promise(self) -> str | None:
        """Why the weights depend on the number of processes, if they do."""
        if self.is_synchronised:
            return "batchnorm is sync: the weights depend on the number of processes"
        if reason := self.recipe.parallel.leaves_the_promise:
            return str(reason)
        if self.recipe.run.reproducibility == "fast":
            return "reproducibility is fast: the last bits of the weights depend on the number of processes"
        return None

    def check_training(self) -> None:
        """Raise LaunchError, on all ranks, where this model can be evaluated but not trained; ConfigError, where the
        run would be too long, or too short for its warm-up."""
        with raise_on_all_ranks():
            self._check_length()
        if not self.is_synchronised:
            return
        shares = {}
        last = min(self.order.steps_per_epoch, self.total_steps) - 1
        for name, step in (("a step", 0), ("an epoch's last step", last)):
            own, present = self.owned(step)
            shares[name] = len(own), len(present)
        with raise_on_all_ranks():
            check_synchronised(self.device, self.world.size, shares)

    def _check_length(self) -> None:
        total, train, schedule = self.total_steps, self.recipe.train, self.recipe.schedule
        if total > MANY:
            raise ConfigError(f"train.epochs={train.epochs:g} are {total:,} steps, more than {MANY:,}: lower it")
        if schedule.warmup_steps(total) > total:
            raise ConfigError(
                f"schedule.warmup={schedule.warmup:g} steps are more than the {total} of the run; below 1 it is a "
                "fraction of the run, such as 0.05"
            )

    def noticed(self, micro_batch: MicroBatch) -> list[Finding] | None:
        """What a step's first micro-batch shows of the user's code; all ranks have to ask. Raises SampleError."""
        assert self.state.randomness is not None
        check = ModelCheck(
            model=self.model,
            module=self.state.module,
            strategy=self.strategy,
            randomness=self.state.randomness,
            loss_is=self.recipe.train.loss_is,
            peer=self.strategy.copies[0] if self.recipe.parallel.SHARES_SHARDS else 0,
        )
        return check.findings(micro_batch, again=self.fetched_again(micro_batch.step))

    def fetched_again(self, step: int) -> Batch:
        """A step's first shard with samples, fetched in this process."""
        requests = TrainingRequests(order=self.order, owned=lambda _, own: [min(own)], start=step, stop=step + 1)
        return next(iter(loaded(self.recipe, self.data, requests, device=self.device, workers=0))).batch

    def samples_at(self, step: int) -> int:
        """Training samples seen after so many steps."""
        epochs, place = divmod(step, self.order.steps_per_epoch)
        return epochs * self.order.samples + min(place * self.order.global_batch, self.order.samples)

    def describe(self, step: int, shard: int) -> str:
        """A shard of a step, for people: who ran it and which samples it held. Every rank has to ask."""
        rank = next(rank for rank, own in enumerate(all_gather_object(self.owned(step)[0])) if shard in own)
        return f"rank {rank}, shard {shard}, samples {self.order.shards(step)[shard].tolist()}"


def open_data(recipe: Recipe, *, publish: Callable[[object], None] = lambda _: None, is_checked: bool = False) -> Data:
    """Open both splits, with their tokens made if need be. Raises DataError."""
    train, test = (open_source(recipe.data, split) for split in ("train", "test"))
    tokenizer = None
    if recipe.model.TAKES_TOKENS and train.spec.modality == "text":
        tokenizer = plugins.implementation("models", recipe.model.kind).tokenizer(recipe.model)
        train, test = (
            with_tokens(source, recipe.data, tokenizer, publish=publish, is_checked=is_checked)
            for source in (train, test)
        )
    names = {"train": f"the training split of data.kind={recipe.data.kind}", "test": "the test split"}
    skips = recipe.data.skips
    faults = {split: Faults(name=name, split=split, skips=skips) for split, name in names.items()}
    return Data(augmented(train, recipe.data, recipe.run.seed), test, tokenizer, faults)


def prepare(recipe: Recipe, publish: Callable[[object], None]) -> Data:
    """Fetch and make what is missing, with progress, and check every byte of what was made before."""
    data = open_data(recipe, publish=publish, is_checked=True)
    if len(data.train.spec.labels) == 1:
        label = data.train.spec.labels[0]
        publish(Warned(message=f"all training samples are of one class, {label!r}: a model learns nothing from them"))
    return data


def first_samples(recipe: Recipe, data: Data, sizes: Sequence[int]) -> list[Batch]:
    """The first test samples, in batches of these sizes; where there are fewer, some of them come again."""
    numbers = cycle(range(len(data.test)))
    return list(test_batches(recipe, data, ([*islice(numbers, size)] for size in sizes)))


def test_batches(recipe: Recipe, data: Data, parts: Iterable[Sequence[int]]) -> Iterator[Batch]:
    """Test samples by their numbers, as batches on the CPU. Raises SampleError, DataError."""
    requests = (ShardRequest(step=-1, shard=0, epoch=-1, indices=tuple(part)) for part in parts)
    batches = Loader(
        data.test,
        requests,
        faults=data.faults["test"],
        seed=recipe.run.seed,
        pad_id=data.pad_id,
        workers=0,
        device=torch.device("cpu"),
    )
    for found in batches:
        yield found.batch


def first_batch(recipe: Recipe, data: Data, *, order: Order, device: torch.device) -> Batch:
    """The batch of the run's first micro-batch. Raises SampleError."""
    requests = TrainingRequests(order=order, owned=lambda _, present: [min(present)], start=0, stop=1)
    return next(iter(loaded(recipe, data, requests, device=device))).batch


def loaded(recipe: Recipe, data: Data, requests: Any, *, device: torch.device, workers: int | None = None) -> Loader:
    """The micro-batches that are requested of the training split, by data.workers processes if not told otherwise."""
    return Loader(
        data.train,
        requests,
        faults=data.faults["train"],
        seed=recipe.run.seed,
        pad_id=data.pad_id,
        workers=recipe.data.workers if workers is None else workers,
        device=device,
    )


def evaluated(
    recipe: Recipe,
    subject: EvaluationTarget,
    source: Source,
    *,
    world: World,
    pad_id: int,
    faults: Faults,
    predictions: Predictions | None = None,
) -> Evaluation:
    """Measure a model on each sample of a source once, but for those that cannot be read and may be left out."""
    requests = evaluation_requests(recipe, source, rank=world.rank, world_size=world.size)
    batches = evaluation_loader(recipe, source, requests, faults=faults, pad_id=pad_id, device=subject.device)
    result = evaluate(subject, batches, total=requests.total, predictions=predictions)
    assert faults.skips or result.samples == len(source), (result.samples, len(source))
    return result


def evaluation_requests(recipe: Recipe, source: Source, *, rank: int, world_size: int) -> EvaluationRequests:
    """Which samples a rank measures at once, and in which order."""
    return EvaluationRequests(
        samples=len(source),
        lengths=source.lengths,
        micro_batch=recipe.evaluate.micro_batch or recipe.train.micro_batch,
        rank=rank,
        world_size=world_size,
    )


def evaluation_loader(
    recipe: Recipe,
    source: Source,
    requests: EvaluationRequests,
    *,
    faults: Faults,
    pad_id: int,
    device: torch.device,
) -> Loader:
    """The micro-batches that are requested of a source, as it is."""
    return Loader(source, requests, faults=faults, seed=recipe.run.seed, pad_id=pad_id, workers=0, device=device)


def measured(recipe: Recipe, spec: DataSpec) -> dict[str, DeclaredMetric]:
    """The metrics of an evaluation by name, the user's own among them. Raises ModelError."""
    own = plugins.hook("models", recipe.model.kind, "metrics")
    found = declared_metrics(spec, own(recipe.model, spec) if own else {})
    return {name: each for name, each in found.items() if is_requested(name, recipe.evaluate.metrics)}


def build_model(recipe: Recipe, spec: DataSpec) -> Model:
    """The model with its initial weights: the same on every rank and at every start."""
    seed_all(seed_of(recipe.run.seed, "weights"))
    return plugins.implementation("models", recipe.model.kind).build(recipe.model, spec)


def _unfilled_model(recipe: Recipe, spec: DataSpec) -> Model | None:
    """The same without memory for its weights, for strategies that fill only what a process holds. None where the
    model brings pretrained weights, or its construction looks at the numbers."""
    if not recipe.parallel.FILLS or recipe.model.PRETRAINED:
        return None
    return deferred(partial(build_model, recipe, spec))


def assemble(recipe: Recipe, world: World, device: torch.device) -> Components:
    """Build every part for this process; the process group is open and the data has been prepared."""
    with raise_on_all_ranks():
        data = open_data(recipe)
        measured(recipe, data.test.spec)
        model = _unfilled_model(recipe, data.train.spec) or build_model(recipe, data.train.spec).to(device)
        if recipe.train.batchnorm == "sync" and world.size > 1:
            synchronise(model, device)
    order = Order(
        seed=recipe.run.seed,
        samples=len(data.train),
        global_batch=recipe.train.global_batch,
        micro_batch=recipe.train.micro_batch,
        lengths=data.train.lengths,
    )
    total_steps = recipe.train.total_steps(order.steps_per_epoch)
    return Components(
        recipe=recipe,
        world=world,
        device=device,
        order=order,
        model=model,
        state=distribute(
            recipe,
            model,
            partial(first_batch, recipe, data, order=order, device=device),
            total_steps=total_steps,
            device=device,
        ),
        data=data,
        total_steps=total_steps,
    )


def distribute(
    recipe: Recipe, model: Model, sample: Callable[[], Batch], *, total_steps: int, device: torch.device
) -> TrainState:
    """Spread a model over the open process group, with its optimizer and all that a step needs. `sample` fetches a
    batch such as training will bring."""
    randomness = Randomness(seed_of(recipe.run.seed, "training"))
    randomness.watch(model.blocks(), recompute=recipe.train.recompute)
    precision = Precision(recipe.train.precision, device)
    exact = recipe.run.reproducibility == "exact"
    strategy = plugins.implementation("parallel.strategies", recipe.parallel.kind).build(
        recipe.parallel, randomness=randomness, precision=precision, exact=exact
    )
    module = strategy.place(model.train(), sample)
    optimizer = optim.build(recipe.optim, module)
    initialise(module, optimizer)
    rate = partial(_rate, recipe, total_steps)
    return TrainState(
        strategy=strategy,
        module=module,
        optimizer=optimizer,
        precision=precision,
        rate=rate,
        randomness=randomness,
        term_counts=model.term_counts,
        ema=MovingAverage(module, recipe.train.ema) if recipe.train.ema else None,
    )


def _rate(recipe: Recipe, total_steps: int, step: int) -> float:
    return optim.learning_rate(
        recipe.optim,
        recipe.schedule,
        step=step,
        total_steps=total_steps,
        global_batch=recipe.train.global_batch,
    )
