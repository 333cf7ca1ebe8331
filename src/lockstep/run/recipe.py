"""The config of a whole run as one frozen, validated model."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import Field, field_validator

from lockstep.base import config, plugins, storage
from lockstep.base.config import Complaint, Kind, LocalPath, Section
from lockstep.base.contracts import samples_of
from lockstep.base.errors import ConfigError, nearest
from lockstep.checkpoint.layout import CheckpointSection
from lockstep.inference.export.export_config import ExportSection
from lockstep.observe.observe_config import ObserveSection
from lockstep.training.optim_config import OptimSection, ScheduleSection
from lockstep.training.training_config import METRICS, EvaluateSection, TrainSection


def plugin(family: str, default: str) -> Kind:
    """Annotate a section whose model is the Config of a plugin, chosen by its `kind`."""
    return Kind(default, lambda name: plugins.find(family, name).Config, lambda: plugins.names(family))


LONGEST_NAME = 200
"""Bytes; file systems allow 255, and names of temporary files are longer."""
DEVICES = {"CON", "PRN", "AUX", "NUL", *(f"{port}{i}" for port in ("COM", "LPT") for i in range(1, 10))}
MOST_SHARDS = 2**16
"""Micro-batches of one step; each is a forward and a backward pass."""


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
    threads: int = Field(1, ge=1, le=1024)
    """CPU threads per process; changes the last bits of the weights on a CPU, and is kept in the checkpoint."""

    @field_validator("name")
    @classmethod
    def _is_one_folder(cls, name: str | None) -> str | None:
        if name is None:
            return None
        if not re.fullmatch(r"[\w-][\w.-]*", name):
            raise ValueError("a run's name is one folder: letters, digits, '.', '-' and '_', not beginning with '.'")
        if len(name.encode()) > LONGEST_NAME:
            raise ValueError(f"a run's name is at most {LONGEST_NAME} bytes long")
        if name.split(".")[0].upper() in DEVICES:
            raise ValueError("to Windows this is a device, not a folder: choose another name")
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
        assert self.run.name is not None, "the run has no name yet: see with_run_name()"
        return self.run.dir / self.run.name


def contradictions(recipe: Recipe) -> list[Complaint]:
    """Settings that are valid one by one but not together."""
    return [*_length(recipe), *_modality(recipe), *_parallelism(recipe), *_unknown_metrics(recipe)]


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


def _parallelism(recipe: Recipe) -> Iterator[Complaint]:
    train, launch, parallel = recipe.train, recipe.launch, recipe.parallel
    if parallel.MOST_PROCESSES == 1 and launch.max_nodes > 1:
        what = f"{launch.nodes} machines, but parallel.kind={parallel.kind} runs one process"
        yield ("launch", "nodes"), f"{what}; set parallel.kind=ddp or launch.nodes=1"
    if parallel.MOST_PROCESSES == 1 and launch.processes not in ("auto", 1):
        what = f"{launch.processes} processes, but parallel.kind={parallel.kind} runs one"
        yield ("launch", "processes"), f"{what}; set parallel.kind=ddp or launch.processes=1"
    for setting, why in parallel.contradictions(train.precision):
        yield ("parallel", setting), why
    if train.compile and parallel.SHARES_SHARDS:
        what = f"blocks are not compiled where processes share a model, as with parallel.kind={parallel.kind}"
        yield ("train", "compile"), f"{what}; set train.compile=false or parallel.kind=fsdp"
    if train.batchnorm == "sync" and parallel.SHARES_SHARDS:
        what = f"processes that share a model run the same samples, but parallel.kind={parallel.kind}"
        yield ("train", "batchnorm"), f"sync counts what all processes hold; {what}; set it to shard"


def _unknown_metrics(recipe: Recipe) -> list[Complaint]:
    """Metrics that decide something but are not measured; a model of the user's may measure any."""
    settings = {("checkpoint", "best"): recipe.checkpoint.best, ("train", "stop_metric"): recipe.train.stop_metric}
    return [
        (path, f"there is no metric {name!r}{nearest(name, METRICS)} (there is: {', '.join(METRICS)})")
        for path, name in settings.items()
        if name is not None and name not in METRICS and not recipe.model.MEASURES_ITSELF
    ]


def load(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a config file. Raises ConfigError, with a line per mistake.

    The recipe.yaml of a run stands for the run folder it is in, even if that folder has been moved since.
    """
    if path.name == "recipe.yaml" and (path.parent / "checkpoints").is_dir():
        overrides = [*run_folder_overrides(path.absolute().parent), *overrides]
    return _with_strategy_defaults(config.load(Recipe, path, overrides, check=contradictions))


def run_folder_overrides(run: Path) -> list[str]:
    """Overrides that make a recipe stand for the run in this folder, an absolute path."""
    settings = {"run.dir": str(run.parent), "run.name": run.name}
    return [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in settings.items()]


def of_sections(sections: Mapping[str, Any], overrides: Sequence[str] = ()) -> Recipe:
    """Validate sections given in memory, such as {"train": {"epochs": 3}}. Raises ConfigError."""
    try:
        text = json.dumps(sections, default=str, ensure_ascii=False, allow_nan=False)  # JSON is YAML
    except (TypeError, ValueError) as error:
        raise ConfigError(f"a config holds numbers, texts, lists and sections: {error}") from None
    try:
        return _with_strategy_defaults(
            config.parse(Recipe, text, file="config", overrides=overrides, check=contradictions)
        )
    except ConfigError as error:
        raise ConfigError(re.sub(r"^config:1: ", "config: ", str(error), flags=re.MULTILINE)) from None


def _with_strategy_defaults(recipe: Recipe) -> Recipe:
    """Limit launch.processes=auto to the most processes that the strategy can use."""
    if recipe.parallel.MOST_PROCESSES is not None and recipe.launch.processes == "auto":
        launch = recipe.launch.model_copy(update={"processes": recipe.parallel.MOST_PROCESSES})
        recipe = recipe.model_copy(update={"launch": launch})
    return recipe


def with_run_name(recipe: Recipe, path: Path) -> Recipe:
    """The recipe with a run name: its own or, by default, the config file's name and the time."""
    if recipe.run.name is not None:
        return recipe
    stem = re.sub(r"[^\w-]+", "-", path.stem).strip("-") or "run"
    name = f"{stem}-{datetime.now():%Y%m%d-%H%M%S}"
    return recipe.model_copy(update={"run": recipe.run.model_copy(update={"name": name})})


def numeric_recipe(recipe: Recipe, facts: dict[str, Any], *, processes: int = 1) -> dict[str, Any]:
    """Every setting and fact that can change a bit of the weights, by dotted name.

    Not in it: the world size, and how often a run logs, saves and evaluates. Of the strategy, only what it names
    itself (StrategySection.numeric).
    """
    is_open_ended = recipe.schedule.shape == "constant" and not 0 < recipe.schedule.warmup < 1
    total = {"train.epochs", "train.steps"} if is_open_ended else set()
    numeric: dict[str, Any] = {"run.seed": recipe.run.seed, "run.reproducibility": recipe.run.reproducibility}
    numeric |= {f"parallel.{name}": value for name, value in recipe.parallel.numeric(processes).items()}
    for name in ("data", "model", "optim", "schedule", "train"):
        section: Section = getattr(recipe, name)
        values = section.model_dump(mode="json", exclude=set(section.incidental))
        numeric |= {f"{name}.{key}": value for key, value in values.items() if f"{name}.{key}" not in total}
    for setting, file in (
        ("model.file", recipe.model.code),
        ("data.file", recipe.data.code),
        ("data.augment", recipe.data.augment),
    ):
        if file is not None and file.is_file():
            numeric[f"{setting}_sha256"] = storage.sha256(file)
    return numeric | facts


def kind_of(section: str) -> Kind | None:
    """What a section's `kind` chooses among; None for a section that is no plugin's."""
    return next((each for each in Recipe.model_fields[section].metadata if isinstance(each, Kind)), None)


def settings() -> list[str]:
    """Every section.key that a config can have, with those of all plugins."""
    found = set()
    for name, field in Recipe.model_fields.items():
        kind = kind_of(name)
        sections = [kind.find(each) for each in kind.names()] if kind else [cast("type[Section]", field.annotation)]
        found |= {f"{name}.{key}" for section in sections for key in section.model_fields}
    return sorted(found)


def starter(source: str, code: Path = Path("user.py")) -> Recipe:
    """A recipe to start from for a data source, with a model and settings that suit it.

    `code` is the user's Python file, for a source that has a template of one. Raises ConfigError for an unknown source.
    """
    module = plugins.find("data.sources", source)
    own = module.Config.STARTER
    file = {} if module.Config.TEMPLATE is None else {"file": str(code)}
    data = module.Config.model_validate({"kind": source, **own.get("data", {}), **file})
    model = {"kind": {"text": "transformer", "any": "user"}.get(data.modality, "cnn")}
    suited = plugins.find("models", model["kind"]).Config.STARTER
    rest = {name: {**suited.get(name, {}), **own.get(name, {})} for name in ("train", "optim", "schedule")}
    return Recipe.model_validate({"data": data, "model": model | file, **{k: v for k, v in rest.items() if v}})


def template(source: str) -> Path | None:
    """The Python file that `lockstep init` copies for a source, if any. Raises ConfigError for an unknown source."""
    file: Path | None = plugins.find("data.sources", source).Config.TEMPLATE
    return file
