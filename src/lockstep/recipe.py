"""The whole run as one frozen, validated model, and the one place where its parts meet."""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, field_validator

from lockstep import config, files, optim, plugins
from lockstep.checkpoint.layout import CheckpointSection
from lockstep.config import Complaint, Kind, LocalPath, Section
from lockstep.contracts import Batch, DataSpec, MicroBatch, Model, Source, Strategy, Tokenizer
from lockstep.data.augment import augmented
from lockstep.data.collate import collate
from lockstep.data.dataset import open_source, with_tokens
from lockstep.data.loader import Loader
from lockstep.data.order import Order
from lockstep.data.sampler import EvaluationRequests, TrainingRequests
from lockstep.errors import ConfigError, nearest
from lockstep.evaluation import CONFUSION, METRICS, Evaluation, evaluate, metrics_for
from lockstep.export import ExportSection
from lockstep.observe.section import ObserveSection
from lockstep.optim import OptimSection, ScheduleSection
from lockstep.runtime.batchnorm import check_synchronised, has_batchnorm, synchronise
from lockstep.runtime.collectives import gathered, together
from lockstep.runtime.deferred import deferred
from lockstep.runtime.precision import Precision
from lockstep.runtime.seeds import Randomness, seed_all, seed_of
from lockstep.training.ema import MovingAverage
from lockstep.training.settings import EvaluateSection, TrainSection
from lockstep.training.state import TrainState, initialise
from lockstep.world import World


def plugin(family: str, default: str) -> Kind:
    """Marks a section as the Config of one of a family's plugins."""
    return Kind(default, lambda name: plugins.find(family, name).Config)


class RunSection(Section):
    """The run itself."""

    dir: LocalPath = Path("runs")
    """The folder of all runs."""
    name: str | None = None
    """This run's folder in it; by default the config file's name and the time. A name that exists is resumed."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Decides the order of the data, initial weights, dropout and augmentation."""
    reproducibility: Literal["exact", "fast"] = "exact"
    """exact: gradients are added in an order that belongs to the data; fast: by the backend's own all-reduce."""
    threads: int = Field(1, ge=1)
    """CPU threads per process; changes the last bits of the weights on a CPU, and is kept in the checkpoint."""

    @field_validator("name")
    @classmethod
    def _is_one_folder(cls, name: str | None) -> str | None:
        if name is not None and not re.fullmatch(r"[\w-][\w.-]*", name):
            raise ValueError("a run's name is one folder: letters, digits, '.', '-' and '_', not beginning with '.'")
        return name


class Recipe(Section):
    """A whole run."""

    run: RunSection = RunSection()
    data: Annotated[Any, plugin("data.sources", "digits")] = None
    model: Annotated[Any, plugin("models", "cnn")] = None
    optim: OptimSection = OptimSection()
    schedule: ScheduleSection = ScheduleSection()
    train: TrainSection = TrainSection()
    parallel: Annotated[Any, plugin("parallel", "ddp")] = None
    checkpoint: CheckpointSection = CheckpointSection()
    evaluate: EvaluateSection = EvaluateSection()
    observe: ObserveSection = ObserveSection()
    export: ExportSection = ExportSection()
    launch: Annotated[Any, plugin("launch", "local")] = None

    @property
    def folder(self) -> Path:
        """The run directory."""
        assert self.run.name is not None, "the run has no name yet: see named()"
        return self.run.dir / self.run.name


def contradictions(recipe: Recipe) -> list[Complaint]:
    """Settings that are right one by one and impossible together: (where, what)."""
    train, gives, takes = recipe.train, recipe.data.modality, recipe.model.modality
    found: list[Complaint] = []
    if train.micro_batch > train.global_batch:
        what = f"{train.micro_batch} is more than train.global_batch, and a step would never fill one"
        found.append((("train", "micro_batch"), f"{what}; set it to {train.global_batch} or less"))
    if train.epochs is not None and train.steps is not None:
        what = "give train.steps or train.epochs, not both (train.epochs=null takes back the file's)"
        found.append((("train", "steps"), what))
    if "any" not in (gives, takes) and gives != takes:
        what = f"{recipe.model.kind} takes {takes}s, but data.kind={recipe.data.kind} gives {gives}s"
        found.append((("model", "kind"), what))
    if recipe.parallel.kind == "single" and recipe.launch.processes not in ("auto", 1):
        what = f"{recipe.launch.processes} processes, but parallel.kind=single runs one"
        found.append((("launch", "processes"), f"{what}; set parallel.kind=ddp or launch.processes=1"))
    return found + _unknown_metrics(recipe)


def _unknown_metrics(recipe: Recipe) -> list[Complaint]:
    """Metrics to decide by that nobody measures; a user's file may measure anything."""
    named = {("checkpoint", "best"): recipe.checkpoint.best, ("train", "stop_metric"): recipe.train.stop_metric}
    return [
        (place, f"there is no metric {name!r}{nearest(name, METRICS)} (there is: {', '.join(METRICS)})")
        for place, name in named.items()
        if name is not None and name not in METRICS and recipe.model.kind != "user"
    ]


def load(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a config file; raises ConfigError with a line per complaint.

    A run's own recipe.yaml means the run that it lies in, which may have been moved since it was written.
    """
    if path.name == "recipe.yaml" and (path.parent / "checkpoints").is_dir():
        run = path.absolute().parent
        here = {"run.dir": str(run.parent), "run.name": run.name}
        overrides = [*(f"{k}={json.dumps(v, ensure_ascii=False)}" for k, v in here.items()), *overrides]
    recipe = config.load(Recipe, path, overrides, check=contradictions)
    if recipe.parallel.kind == "single" and recipe.launch.processes == "auto":
        launch = recipe.launch.model_copy(update={"processes": 1})
        recipe = recipe.model_copy(update={"launch": launch})
    return recipe


def named(recipe: Recipe, path: Path) -> Recipe:
    """The recipe with a run name: its own, else the config file's and the time."""
    if recipe.run.name is not None:
        return recipe
    stem = re.sub(r"[^\w-]+", "-", path.stem).strip("-") or "run"
    name = f"{stem}-{datetime.now():%Y%m%d-%H%M%S}"
    return recipe.model_copy(update={"run": recipe.run.model_copy(update={"name": name})})


def numeric(recipe: Recipe, facts: dict[str, Any], *, processes: int = 1) -> dict[str, Any]:
    """The numeric recipe: every setting and fact that may change a bit of the weights, by dotted name.

    The world is not in it, nor how often is looked, saved or evaluated; of the strategy only what it names itself.
    """
    is_open_ended = recipe.schedule.shape == "constant" and not 0 < recipe.schedule.warmup < 1
    total = {"train.epochs", "train.steps"} if is_open_ended else set()
    found: dict[str, Any] = {"run.seed": recipe.run.seed, "run.reproducibility": recipe.run.reproducibility}
    of_strategy = getattr(recipe.parallel, "numeric", None)
    if of_strategy is not None:
        found |= {f"parallel.{name}": value for name, value in of_strategy(processes).items()}
    for name in ("data", "model", "optim", "schedule", "train"):
        section: Section = getattr(recipe, name)
        values = section.model_dump(mode="json", exclude=set(section.incidental))
        found |= {f"{name}.{key}": value for key, value in values.items() if f"{name}.{key}" not in total}
        for own in ("file", "augment"):
            if isinstance(file := getattr(section, own, None), Path) and file.is_file():
                found[f"{name}.{own}_sha256"] = files.sha256(file)
    return found | facts


@dataclass(frozen=True)
class Data:
    """Both splits, and the tokenizer that made their tokens."""

    train: Source
    test: Source
    tokenizer: Tokenizer | None

    @property
    def pad_id(self) -> int:
        """What short rows of tokens are filled with."""
        return self.tokenizer.pad_id if self.tokenizer else 0


@dataclass(kw_only=True)
class Parts:
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
        """How the model is spread."""
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

    def evaluate(self) -> Evaluation:
        """Measure the model as it is on the whole test split."""
        requests = EvaluationRequests(
            samples=len(self.data.test),
            lengths=self.data.test.lengths,
            micro_batch=self.recipe.evaluate.micro_batch or self.recipe.train.micro_batch,
            rank=self.world.rank,
            world_size=self.world.size,
        )
        metrics = measured(self.recipe, self.data.test.spec)
        batches = loaded(self.recipe, self.data, requests, device=self.device, split="test")
        result = evaluate(self.strategy, self.model, batches, total=requests.total, metrics=metrics)
        assert result.samples == len(self.data.test), (result.samples, len(self.data.test))
        return result

    @property
    def is_synchronised(self) -> bool:
        """Whether a BatchNorm layer is to use what all processes hold; a lone one has nothing to synchronise."""
        return self.recipe.train.batchnorm == "sync" and self.world.size > 1 and has_batchnorm(self.model)

    @property
    def leaves_the_promise(self) -> str | None:
        """Why the weights depend on the number of processes, if they do."""
        if self.is_synchronised:
            return "batchnorm is sync: the weights depend on the number of processes"
        if reason := getattr(self.recipe.parallel, "leaves_the_promise", None):
            return str(reason)
        if self.recipe.run.reproducibility == "fast":
            return "reproducibility is fast: the last bits of the weights depend on the number of processes"
        return None

    def check_training(self) -> None:
        """Raise LaunchError, on all ranks, where this model can be evaluated but not trained."""
        if not self.is_synchronised:
            return
        shares = {}
        last = min(self.order.steps_per_epoch, self.total_steps) - 1
        for name, step in (("a step", 0), ("an epoch's last step", last)):
            own, present = self.owned(step)
            shares[name] = len(own), len(present)
        with together():
            check_synchronised(self.device, self.world.size, shares)

    def samples_at(self, step: int) -> int:
        """Training samples seen after so many steps."""
        epochs, place = divmod(step, self.order.steps_per_epoch)
        return epochs * self.order.samples + min(place * self.order.global_batch, self.order.samples)

    def describe(self, step: int, shard: int) -> str:
        """A shard of a step, for people: who ran it and which samples it held. Every rank has to ask."""
        rank = next(rank for rank, own in enumerate(gathered(self.owned(step)[0])) if shard in own)
        return f"rank {rank}, shard {shard}, samples {self.order.shards(step)[shard].tolist()}"


def open_data(recipe: Recipe, *, publish: Callable[[object], None] = lambda _: None, is_checked: bool = False) -> Data:
    """Open both splits, with their tokens made if need be. Raises DataError."""
    train, test = (open_source(recipe.data, split) for split in ("train", "test"))
    make = getattr(plugins.find("models", recipe.model.kind), "tokenizer", None)
    tokenizer = None
    if make is not None and train.spec.modality == "text":
        tokenizer = make(recipe.model)
        train, test = (
            with_tokens(source, recipe.data, tokenizer, publish=publish, is_checked=is_checked)
            for source in (train, test)
        )
    return Data(augmented(train, recipe.data, recipe.run.seed), test, tokenizer)


def prepare(recipe: Recipe, publish: Callable[[object], None]) -> Data:
    """Fetch and make what is missing, with progress, and check every byte of what was made before."""
    return open_data(recipe, publish=publish, is_checked=True)


def first_samples(data: Data, count: int = 16) -> Batch:
    """The first test samples as a batch."""
    return collate(data.test.__getitems__(range(min(count, len(data.test)))), data.pad_id)


def first_batch(recipe: Recipe, data: Data, *, order: Order, device: torch.device) -> Batch:
    """The batch of the run's first micro-batch. Raises SampleError."""
    requests = TrainingRequests(order=order, owned=lambda _, present: [min(present)], start=0, stop=1)
    return next(iter(loaded(recipe, data, requests, device=device))).batch


def loaded(recipe: Recipe, data: Data, requests: Any, *, device: torch.device, split: str = "training") -> Loader:
    """The micro-batches that are requested of the training or the test split."""
    is_training = split == "training"
    return Loader(
        data.train if is_training else data.test,
        requests,
        name=f"the {split} split of data.kind={recipe.data.kind}",
        seed=recipe.run.seed,
        pad_id=data.pad_id,
        workers=recipe.data.workers if is_training else 0,
        device=device,
    )


def starter(source: str) -> Recipe:
    """A recipe to start from for a source, with the model that fits it. Raises ConfigError for an unknown source."""
    module = plugins.find("data.sources", source)
    data = module.Config(kind=source, **getattr(module, "STARTER", {}))
    model = {"text": {"kind": "transformer"}, "any": {"kind": "user", "file": "my_model.py"}}.get(data.modality)
    return Recipe.model_validate({"data": data, "model": model or {"kind": "cnn"}, "train": {"epochs": 3}})


def measured(recipe: Recipe, spec: DataSpec) -> dict[str, Any]:
    """The metrics of an evaluation by name, the user's own among them.

    Raises ConfigError when the recipe decides by one that is not measured.
    """
    own = getattr(plugins.find("models", recipe.model.kind), "metrics", None)
    metrics = metrics_for(spec, own(recipe.model, spec) if own else {})
    known = ["loss", *(name for name in metrics if name != CONFUSION)]
    for setting, name in (("checkpoint.best", recipe.checkpoint.best), ("train.stop_metric", recipe.train.stop_metric)):
        if name is not None and name not in known:
            raise ConfigError(
                f"{setting}: there is no metric {name!r}{nearest(name, known)} (there is: {', '.join(known)})"
            )
    return metrics


def build_model(recipe: Recipe, spec: DataSpec) -> Model:
    """The model with its initial weights: the same on every rank and at every start."""
    seed_all(seed_of(recipe.run.seed, "weights"))
    return plugins.find("models", recipe.model.kind).build(recipe.model, spec)


def _unfilled_model(recipe: Recipe, spec: DataSpec) -> Model | None:
    """The same without memory for its weights, for strategies that fill only what a process holds. None where the
    model brings pretrained weights, or its construction looks at the numbers."""
    fills = getattr(plugins.find("parallel", recipe.parallel.kind), "FILLS", False)
    if not fills or getattr(plugins.find("models", recipe.model.kind), "PRETRAINED", False):
        return None
    return deferred(partial(build_model, recipe, spec))


def assemble(recipe: Recipe, world: World, device: torch.device) -> Parts:
    """Build every part for this process; the process group is open and the data has been prepared."""
    with together():
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
    return Parts(
        recipe=recipe,
        world=world,
        device=device,
        order=order,
        model=model,
        state=place(
            recipe,
            model,
            partial(first_batch, recipe, data, order=order, device=device),
            total_steps=total_steps,
            device=device,
        ),
        data=data,
        total_steps=total_steps,
    )


def place(
    recipe: Recipe, model: Model, sample: Callable[[], Batch], *, total_steps: int, device: torch.device
) -> TrainState:
    """Spread a model over the open process group, with its optimizer and all that a step needs. `sample` fetches a
    batch such as training will bring."""
    randomness = Randomness(seed_of(recipe.run.seed, "training"))
    randomness.watch(model.blocks(), recompute=recipe.train.recompute)
    precision = Precision(recipe.train.precision, device)
    exact = recipe.run.reproducibility == "exact"
    strategy = plugins.find("parallel", recipe.parallel.kind).build(
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
