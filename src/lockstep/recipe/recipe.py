"""The config of a whole run as one frozen, validated model."""

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import date, datetime
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import Field, field_validator

from lockstep.base import config, plugins, trust
from lockstep.base.config import Complaint, Kind, LocalPath, Section
from lockstep.base.contracts import samples_of
from lockstep.base.errors import ConfigError, nearest
from lockstep.checkpoint.layout import CheckpointSection
from lockstep.data.data_config import AUTO, BYTES, NO_PROCESSOR, AudioSection, PixelSection
from lockstep.observe.observe_config import ObserveSection
from lockstep.observe.run_folder import RunFolder
from lockstep.recipe import run_names
from lockstep.recipe.export_config import ExportSection
from lockstep.training.optim_config import WHOLE_TENSORS, OptimSection, ScheduleSection
from lockstep.training.training_config import EvaluateSection, TrainSection


def plugin(family: str, default: str) -> Kind:
    """Annotate a section whose model is the Config of a plugin, chosen by its `kind`."""
    return Kind(default, lambda name: plugins.find(family, name).Config, lambda: plugins.names(family))


PROCESSORS = {"tokenizer": BYTES, "image_processor": NO_PROCESSOR, "feature_extractor": NO_PROCESSOR}
"""Setting of the data -> what its default, auto, stands for with a model that has none of its own."""
MOST_SHARDS = 2**16
"""Limit of micro-batches of one step; each is a forward and a backward pass."""


class RunSection(Section):
    """The run itself."""

    dir: LocalPath = Path("runs")
    """The folder of all runs."""
    name: str | None = None
    """This run's folder in it; by default the config file's name and the time. A name that exists is resumed."""
    parent: LocalPath | None = None
    """Checkpoint of another run, from which this one goes on while it has none of its own; `lockstep fork` sets it."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Decides the order of the data, initial weights, dropout and augmentation."""
    reproducibility: Literal["exact", "fast"] = "exact"
    """exact: gradients are added in an order that belongs to the data; fast: by the backend's own all-reduce."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: GPUs where there are any. cuda: refuse to run without them. cpu: leave them alone."""
    threads: int = Field(1, ge=1, le=1024)
    """CPU threads per process; changes the last bits of the weights on a CPU, and is kept in the checkpoint."""

    @field_validator("name")
    @classmethod
    def _is_one_folder(cls, name: str | None) -> str | None:
        if name is not None:
            run_names.check(name)
        return name


class Recipe(Section):
    """A whole run."""

    run: RunSection = Field(default_factory=RunSection)  # its folder is relative to that of the moment
    data: Annotated[Any, plugin("data.sources", "digits")] = None
    model: Annotated[Any, plugin("models", "cnn")] = None
    optim: OptimSection = OptimSection()
    schedule: ScheduleSection = ScheduleSection()
    train: TrainSection = TrainSection()
    parallel: Annotated[Any, plugin("parallel.strategies", "ddp")] = None
    checkpoint: CheckpointSection = CheckpointSection()
    evaluate: EvaluateSection = EvaluateSection()
    observe: ObserveSection = ObserveSection()
    export: ExportSection = ExportSection()
    launch: Annotated[Any, plugin("launch.launchers", "local")] = None

    @property
    def folder(self) -> Path:
        assert self.run.name is not None, "the run has no name yet: see begun()"
        return self.run.dir / self.run.name

    def changed(self, section: str, **settings: Any) -> "Recipe":
        """Return the recipe with other settings in a section; they are not validated."""
        return self.model_copy(update={section: getattr(self, section).model_copy(update=settings)})


def contradictions(recipe: Recipe) -> list[Complaint]:
    """List settings that are valid one by one but not together."""
    checks = (_length, _modality, _processor, _parallelism, _recheck, _unknown_metrics, _optimizer, _adapter)
    return [complaint for check in checks for complaint in check(recipe)]


def _length(recipe: Recipe) -> Iterator[Complaint]:
    train = recipe.train
    if train.micro_batch > train.global_batch:
        what = f"{train.micro_batch} is more than train.global_batch, and a step would never fill one"
        yield ("train", "micro_batch"), f"{what}; set it to {train.global_batch} or less"
    if train.shards > MOST_SHARDS:
        what = f"a step would have {train.shards:,} micro-batches of {train.micro_batch}, more than {MOST_SHARDS:,}"
        yield ("train", "global_batch"), f"{what}; raise train.micro_batch or lower train.global_batch"
    if train.epochs is not None and train.steps is not None:
        what = "give train.steps or train.epochs, not both (train.epochs=null takes back the file's)"
        yield ("train", "steps"), what
    if train.steps is not None and recipe.schedule.warmup_steps(train.steps) > train.steps:
        what = f"{recipe.schedule.warmup:g} steps are more than the run has (train.steps={train.steps})"
        yield ("schedule", "warmup"), f"{what}; below 1 it is a fraction of the run, such as 0.05"


def _modality(recipe: Recipe) -> Iterator[Complaint]:
    gives, takes = recipe.data.modality, recipe.model.modality
    if "any" not in (gives, takes) and gives != takes:
        given = f"data.kind={recipe.data.kind} gives {samples_of(gives)}"
        yield ("model", "kind"), f"{recipe.model.kind} takes {samples_of(takes)}, but {given}"


def _processor(recipe: Recipe) -> Iterator[Complaint]:
    """Check the processor, also of the recipe that a run keeps, which names the model's own."""
    asked = recipe.data.image_processor if isinstance(recipe.data, PixelSection) else AUTO
    if asked not in (AUTO, NO_PROCESSOR, recipe.model.own("image_processor")):
        what = "auto, that of a model of transformers, and none"
        yield ("data", "image_processor"), f"it is {asked}, which is not saved with the model; there is: {what}"
    own = recipe.model.own("feature_extractor")
    if isinstance(recipe.data, AudioSection) and recipe.data.feature_extractor not in (AUTO, own or NO_PROCESSOR):
        why = f"it is {recipe.data.feature_extractor}, but model.kind={recipe.model.kind} takes what "
        why += "its own gives: leave it out" if own else "a sound itself is: set it to none"
        yield ("data", "feature_extractor"), why


def _parallelism(recipe: Recipe) -> Iterator[Complaint]:
    train, launch, parallel = recipe.train, recipe.launch, recipe.parallel
    if parallel.MOST_PROCESSES == 1 and launch.max_nodes > 1:
        what = f"{launch.nodes} machines, but parallel.kind={parallel.kind} runs one process"
        yield ("launch", "nodes"), f"{what}; set parallel.kind=ddp or launch.nodes=1"
    if parallel.MOST_PROCESSES == 1 and launch.processes not in ("auto", 1):
        what = f"{launch.processes} processes, but parallel.kind={parallel.kind} runs one"
        yield ("launch", "processes"), f"{what}; set parallel.kind=ddp or launch.processes=1"
    if launch.recovers_live and parallel.state_copies == 1:
        what = f"live needs a second copy of the state, and parallel.kind={parallel.kind} shares one out"
        yield ("launch", "recovery"), f"{what}; set it to restart, or parallel.kind=ddp, or fsdp with replicas"
    if launch.recovers_live and train.batchnorm == "sync":
        yield ("launch", "recovery"), "live changes the number of processes, on which train.batchnorm=sync depends"
    for setting, why in parallel.contradictions(train.precision):
        yield ("parallel", setting), why
    if train.compile and parallel.SHARES_SHARDS:
        what = f"blocks are not compiled where processes share a model, as with parallel.kind={parallel.kind}"
        yield ("train", "compile"), f"{what}; set train.compile=false or parallel.kind=fsdp"
    if train.batchnorm == "sync" and parallel.SHARES_SHARDS:
        what = f"processes that share a model run the same samples, but parallel.kind={parallel.kind}"
        yield ("train", "batchnorm"), f"sync counts what all processes hold; {what}; set it to shard"


def _recheck(recipe: Recipe) -> Iterator[Complaint]:
    kind, why = recipe.parallel.kind, None
    if not recipe.parallel.CAN_RECHECK:
        why = f"processes share a model with parallel.kind={kind}, and none could run a shard alone; set it to ddp"
    elif recipe.run.reproducibility == "fast":
        why = "run.reproducibility=fast gives other bits when a step is run again; set it to exact"
    elif recipe.train.batchnorm == "sync":
        why = "train.batchnorm=sync makes a shard depend on those of other processes; set it to shard"
    if why is not None and recipe.observe.recheck is not None:
        yield ("observe", "recheck"), f"{why}, or observe.recheck=null"


def _optimizer(recipe: Recipe) -> Iterator[Complaint]:
    parallel, needs = recipe.parallel, sorted(recipe.optim.kinds & set(WHOLE_TENSORS))
    if needs and parallel.SPLITS_TENSORS:
        what = f"{needs[0]} needs whole parameters, and with parallel.kind={parallel.kind} a process holds parts"
        yield ("optim", "kind"), f"{what}; set parallel.kind=ddp or pipeline, or take another optimizer"
    schedule, steps = recipe.schedule, recipe.train.steps
    if steps is not None and schedule.shape == "wsd":
        both = schedule.warmup_steps(steps) + schedule.decay_steps(steps)
        if both > steps:
            what = f"warm-up and decay are {both} steps, more than the run has"
            yield ("schedule", "decay"), f"{what} (train.steps={steps})"


def _adapter(recipe: Recipe) -> Iterator[Complaint]:
    adapter, parallel = recipe.model.adapter, recipe.parallel
    if adapter is not None and parallel.SPLITS_TENSORS and parallel.SHARES_SHARDS:
        what = f"layers with an adapter are not split as parallel.kind={parallel.kind} splits layers"
        yield ("model", "adapter"), f"{what}; set parallel.kind=ddp, fsdp or pipeline"
    if adapter is None and recipe.export.kind == "adapter":
        yield ("export", "kind"), "adapter writes an adapter alone, but the model has none: set model.adapter={rank: 8}"


def _unknown_metrics(recipe: Recipe) -> Iterator[Complaint]:
    """Check metrics that decide something; a model of the user's may measure any."""
    settings = {("checkpoint", "best"): recipe.checkpoint.best, ("train", "stop_metric"): recipe.train.stop_metric}
    known = metric_names(recipe)
    for path, name in settings.items():
        if name is not None and name not in known and recipe.model.code is None:
            yield path, f"there is no metric {name!r}{nearest(name, known)} (there is: {', '.join(known)})"


def metric_names(recipe: Recipe) -> list[str]:
    """List the metrics of the objective, or of all where the settings do not name one."""
    named = [name for name in (recipe.model.objective, recipe.data.objective) if name != "auto"]
    objectives = named[:1] or plugins.names("models.objectives")
    return ["loss", *(name for each in objectives for name in plugins.find("models.objectives", each).METRICS)]


def load(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a config file. Raises ConfigError, with a line per mistake. The recipe.yaml of a run stands for the folder
    that it is in, even if that has been moved since."""
    if path.name == "recipe.yaml" and (path.parent / "checkpoints").is_dir():
        overrides = run_names.folder_overrides(path.absolute().parent, overrides)
    return _with_defaults(config.load(Recipe, path, overrides, check=contradictions))


def parse(text: str, *, file: str, overrides: Sequence[str] = ()) -> Recipe:
    """Read a config in memory; `file` names it in messages. Raises ConfigError."""
    return _with_defaults(config.parse(Recipe, text, file=file, overrides=overrides, check=contradictions))


def of_sections(sections: Mapping[str, Any], overrides: Sequence[str] = ()) -> Recipe:
    """Validate sections given in memory, such as {"train": {"epochs": 3}}. Raises ConfigError."""
    try:
        text = json.dumps(sections, default=str, ensure_ascii=False, allow_nan=False)  # JSON is YAML
    except (TypeError, ValueError) as error:
        raise ConfigError(f"a config holds numbers, texts, lists and sections: {error}") from None
    try:
        return parse(text, file="config", overrides=overrides)
    except ConfigError as error:
        raise ConfigError(re.sub(r"^config:1: ", "config: ", str(error), flags=re.MULTILINE)) from None


def _with_defaults(recipe: Recipe) -> Recipe:
    """Limit launch.processes=auto to the most processes that the strategy can use; name the tokenizer, the image
    processor or the feature extractor that auto stands for, as an export needs its name."""
    asked = {key: other for key, other in PROCESSORS.items() if getattr(recipe.data, key, None) == AUTO}
    named = {key: recipe.model.own(key) or other for key, other in asked.items()}
    recipe = recipe.changed("data", **named) if named else recipe
    if recipe.parallel.MOST_PROCESSES is not None and recipe.launch.processes == "auto":
        return recipe.changed("launch", processes=recipe.parallel.MOST_PROCESSES)
    return recipe


def in_use(recipe: Recipe) -> Recipe:
    """Return the recipe as a trained model is used: without documents that are kept apart, and excluded samples."""
    return recipe.changed("data", exclude=(), **({"documents": "joined"} if recipe.data.PACKS else {}))


def name_part(file: Path) -> str:
    """Return a part for a run's name, from that of a file."""
    return re.sub(r"[^\w-]+", "-", file.stem).strip("-") or "run"


def begun(recipe: Recipe, path: Path) -> Recipe:
    """Return the recipe with what the first start of a run decides, where its settings do not: its name, from the
    config file's and the time, and the date for chat templates."""
    if recipe.run.name is None:
        recipe = recipe.changed("run", name=f"{name_part(path)}-{datetime.now():%Y%m%d-%H%M%S}")
    if recipe.data.CHATS and recipe.data.date is None:
        day = date.today()
        with suppress(ValueError, TypeError):  # no run yet, or of an earlier version
            day = date.fromisoformat(RunFolder(recipe.folder).known_settings().get("data", {}).get("date"))
        recipe = recipe.changed("data", date=day)
    return recipe


def numeric_recipe(recipe: Recipe, facts: dict[str, Any], *, processes: int = 1) -> dict[str, Any]:
    """Return every setting and fact that can change a bit of the weights, by dotted name: not the world size, nor how
    often a run logs, saves and evaluates; of the strategy, what it names itself (StrategySection.numeric)."""
    total = {"train.epochs", "train.steps"} if recipe.schedule.is_open_ended else set()
    numeric: dict[str, Any] = {"run.seed": recipe.run.seed, "run.reproducibility": recipe.run.reproducibility}
    numeric |= {f"parallel.{name}": value for name, value in recipe.parallel.numeric(processes).items()}
    for name in ("data", "model", "optim", "schedule", "train"):
        section: Section = getattr(recipe, name)
        values = section.numeric_settings()
        numeric |= {f"{name}.{key}": value for key, value in values.items() if f"{name}.{key}" not in total}
    for setting, file in (
        ("model.file", recipe.model.code),
        ("data.file", recipe.data.code),
        ("data.augment", recipe.data.augment),
        ("optim.file", recipe.optim.file),
        ("schedule.file", recipe.schedule.file),
    ):
        if file is not None and file.is_file():
            codes = {os.path.relpath(code.name, file.parent): code.digest for code in trust.code_with_imports(file)}
            numeric[f"{setting}_sha256"] = codes.pop(file.name)
            numeric[f"{setting}_imports"] = codes
    return numeric | facts


def unset(recipe: Recipe) -> set[str]:
    """List the settings that have their default, by dotted name: a checkpoint of an earlier version may lack them."""
    found = set()
    for name in ("data", "model", "optim", "schedule", "train"):
        section: Section = getattr(recipe, name)
        for key, field in type(section).model_fields.items():
            defaults = (field.get_default(call_default_factory=True), NO_PROCESSOR)
            if getattr(section, key) in (defaults if PROCESSORS.get(key) == NO_PROCESSOR else defaults[:1]):
                found.add(f"{name}.{key}")
    return found


def kind_of(section: str) -> Kind | None:
    """Return the plugins among which a section's `kind` chooses; None for a section that is no plugin's."""
    return next((each for each in Recipe.model_fields[section].metadata if isinstance(each, Kind)), None)


def settings() -> list[str]:
    """List every section.key that a config can have, with those of all plugins."""
    found = set()
    for name, field in Recipe.model_fields.items():
        kind = kind_of(name)
        sections = [kind.find(each) for each in kind.names()] if kind else [cast("type[Section]", field.annotation)]
        found |= {f"{name}.{key}" for section in sections for key in section.model_fields}
    return sorted(found)


def tasks() -> list[str]:
    """List what a recipe can start from: data sources, and models that name data to start with."""
    models = (name for name in plugins.names("models") if "data" in plugins.find("models", name).Config.STARTER)
    return sorted([*plugins.names("data.sources"), *models])


def starter(task: str, code: Path = Path("user.py")) -> Recipe:
    """Return a recipe to start from, of a data source or a model, with what suits it; `code` is the user's Python file,
    for a source that has a template of one. Raises ConfigError for an unknown task."""
    source = _source_of(task)
    module = plugins.find("data.sources", source)
    own = module.Config.STARTER
    file = {} if module.Config.TEMPLATE is None else {"file": str(code)}
    suits = {"text": "transformer", "audio": "audio_classifier", "tokens": "gpt", "any": "user"}
    data = module.Config.model_validate({"kind": source, **own.get("data", {}), **file})
    model = {"kind": suits.get(data.modality, "cnn") if task == source else task}
    suited = plugins.find("models", model["kind"]).Config.STARTER
    if suited.get("data", {}).get("kind") == source:
        data = module.Config.model_validate(data.model_dump(exclude_unset=True) | dict(suited["data"]))
    rest = {name: {**suited.get(name, {}), **own.get(name, {})} for name in ("train", "optim", "schedule")}
    recipe = Recipe.model_validate({"data": data, "model": model | file, **{k: v for k, v in rest.items() if v}})
    return _with_defaults(recipe)


def with_auto(recipe: Recipe) -> Recipe:
    """Return the recipe with auto in place of the model's own tokenizer and processors, which suits any model.name."""
    settings = [key for key, name in recipe.data if name is not None and name == recipe.model.own(key)]
    return recipe.changed("data", **dict.fromkeys(settings, AUTO))


def _source_of(task: str) -> str:
    """Return the data source of a task. Raises ConfigError for an unknown one."""
    if task in plugins.names("data.sources"):
        return task
    if task not in (known := tasks()):
        raise ConfigError(f"there is no {task!r}{nearest(task, known)} (there is: {', '.join(known)})")
    return str(plugins.find("models", task).Config.STARTER["data"]["kind"])


def template(task: str) -> Path | None:
    """Return the Python file that `lockstep init` copies for a task, if any. Raises ConfigError for an unknown task."""
    return plugins.find("data.sources", _source_of(task)).Config.TEMPLATE
