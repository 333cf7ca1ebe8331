"""The whole run as one frozen, validated model."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from lockstep.base import config, plugins, storage, trust
from lockstep.base.config import Complaint, Kind, LocalPath, Section
from lockstep.base.contracts import samples_of
from lockstep.base.errors import ConfigError, nearest
from lockstep.checkpoint.layout import CheckpointSection
from lockstep.inference.export.export_config import ExportSection
from lockstep.observe.observe_config import ObserveSection
from lockstep.training.optim_config import OptimSection, ScheduleSection
from lockstep.training.training_config import METRICS, EvaluateSection, TrainSection


def plugin(family: str, default: str) -> Kind:
    """Marks a section as the Config of one of a family's plugins."""
    return Kind(default, lambda name: plugins.find(family, name).Config)


LONGEST_NAME = 200
"""Bytes; a file system takes 255, and temporary names are longer."""
DEVICES = {"CON", "PRN", "AUX", "NUL", *(f"{port}{i}" for port in ("COM", "LPT") for i in range(1, 10))}
MOST_SHARDS = 2**16
"""Micro-batches of a step: a forward and a backward pass each."""


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

    run: RunSection = RunSection()
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
        assert self.run.name is not None, "the run has no name yet: see named()"
        return self.run.dir / self.run.name


def contradictions(recipe: Recipe) -> list[Complaint]:
    """Settings that are right one by one and impossible together: (where, what)."""
    return [*_of_length(recipe), *_of_parts(recipe), *_of_spreading(recipe), *_unknown_metrics(recipe)]


def _of_length(recipe: Recipe) -> Iterator[Complaint]:
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


def _of_parts(recipe: Recipe) -> Iterator[Complaint]:
    gives, takes = recipe.data.modality, recipe.model.modality
    if "any" not in (gives, takes) and gives != takes:
        given = f"data.kind={recipe.data.kind} gives {samples_of(gives)}"
        yield ("model", "kind"), f"{recipe.model.kind} takes {samples_of(takes)}, but {given}"


def _of_spreading(recipe: Recipe) -> Iterator[Complaint]:
    train, launch, parallel = recipe.train, recipe.launch, recipe.parallel
    if parallel.MOST_PROCESSES == 1 and launch.max_nodes > 1:
        what = f"{launch.nodes} machines, but parallel.kind={parallel.kind} runs one process"
        yield ("launch", "nodes"), f"{what}; set parallel.kind=ddp or launch.nodes=1"
    if parallel.MOST_PROCESSES == 1 and launch.processes not in ("auto", 1):
        what = f"{launch.processes} processes, but parallel.kind={parallel.kind} runs one"
        yield ("launch", "processes"), f"{what}; set parallel.kind=ddp or launch.processes=1"
    for setting, why in parallel.contradictions(train.precision):
        yield ("parallel", setting), why
    if train.batchnorm == "sync" and parallel.SHARES_SHARDS:
        what = f"processes that share a model run the same samples, but parallel.kind={parallel.kind}"
        yield ("train", "batchnorm"), f"sync counts what all processes hold; {what}; set it to shard"


def _unknown_metrics(recipe: Recipe) -> list[Complaint]:
    """Metrics to decide by that nobody measures; a user's file may measure anything."""
    named = {("checkpoint", "best"): recipe.checkpoint.best, ("train", "stop_metric"): recipe.train.stop_metric}
    return [
        (place, f"there is no metric {name!r}{nearest(name, METRICS)} (there is: {', '.join(METRICS)})")
        for place, name in named.items()
        if name is not None and name not in METRICS and not recipe.model.MEASURES_ITSELF
    ]


def load(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a config file; raises ConfigError with a line per complaint.

    A run's own recipe.yaml means the run that it lies in, which may have been moved since it was written.
    """
    if path.name == "recipe.yaml" and (path.parent / "checkpoints").is_dir():
        overrides = [*lying_in(path.absolute().parent), *overrides]
    return _completed(config.load(Recipe, path, overrides, check=contradictions))


def lying_in(run: Path) -> list[str]:
    """The overrides by which a recipe means the run of this absolute path, whatever it says itself."""
    here = {"run.dir": str(run.parent), "run.name": run.name}
    return [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in here.items()]


def of_sections(sections: Mapping[str, Any], overrides: Sequence[str] = ()) -> Recipe:
    """The same for sections in memory, such as {"train": {"epochs": 3}}."""
    try:
        text = json.dumps(sections, default=str, ensure_ascii=False, allow_nan=False)  # YAML, too, in one line
    except (TypeError, ValueError) as error:
        raise ConfigError(f"a config holds numbers, texts, lists and sections: {error}") from None
    try:
        return _completed(config.parse(Recipe, text, file="config", overrides=overrides, check=contradictions))
    except ConfigError as error:
        raise ConfigError(re.sub(r"^config:1: ", "config: ", str(error), flags=re.MULTILINE)) from None


def _completed(recipe: Recipe) -> Recipe:
    """With what follows from the strategy."""
    if recipe.parallel.MOST_PROCESSES is not None and recipe.launch.processes == "auto":
        launch = recipe.launch.model_copy(update={"processes": recipe.parallel.MOST_PROCESSES})
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
    found |= {f"parallel.{name}": value for name, value in recipe.parallel.numeric(processes).items()}
    for name in ("data", "model", "optim", "schedule", "train"):
        section: Section = getattr(recipe, name)
        values = section.model_dump(mode="json", exclude=set(section.incidental))
        found |= {f"{name}.{key}": value for key, value in values.items() if f"{name}.{key}" not in total}
    for setting, file in (
        ("model.file", recipe.model.code),
        ("data.file", recipe.data.code),
        ("data.augment", recipe.data.augment),
    ):
        if file is not None and file.is_file():
            found[f"{setting}_sha256"] = storage.sha256(file)
    return found | facts


def code_of(recipe: Recipe) -> list[trust.Code]:
    """What a run of this recipe would execute beside Lockstep: Python files, and settings that name programs."""
    codes = [code for file in files_of(recipe) for code in trust.of_file(file)]
    launch: Section = recipe.launch
    told = launch.model_dump(mode="json", exclude={"kind", "nodes", "processes", "interface"})
    defaults = {name: field.get_default(call_default_factory=True) for name, field in type(launch).model_fields.items()}
    chosen = {name: value for name, value in told.items() if getattr(launch, name) != defaults[name]}
    programs = {name: value for name, value in chosen.items() if isinstance(value, str | list | dict)}
    if programs:
        names = ", ".join(f"launch.{name}" for name in programs)
        codes.append(trust.Code.of(f"{names} of the recipe", json.dumps(programs, sort_keys=True).encode()))
    return codes


def files_of(recipe: Recipe) -> list[Path]:
    """The Python files that a recipe names."""
    every = (recipe.model.code, recipe.data.code, recipe.observe.file, recipe.data.augment)
    return [file for file in dict.fromkeys(every) if file is not None]


def is_written(path: Path) -> bool:
    """Whether a config lies in a run's folder, where Lockstep has written it and not a person."""
    return (path.parent / "checkpoints").is_dir() or (path.parent / "recipe.yaml").is_file()


def settle_trust(recipe: Recipe, path: Path, *, trusts: bool) -> tuple[str, ...]:
    """Let all that a recipe would execute be executed where a person has written it; where it lies in a run's folder,
    it has to be known, or the user has to say so -> what a launcher passes on to its processes. Raises UntrustedCode.
    """
    codes = code_of(recipe)
    if not is_written(path):
        trust.remember(codes)
    elif not trust.settle(codes, trusts=trusts, of=path.parent):
        guard(recipe)
        return (trust.KNOWN, ",".join(code.digest for code in codes)) if codes else ()
    return passed_on(recipe)


def passed_on(recipe: Recipe) -> tuple[str, ...]:
    """What a launcher passes on to its processes where the user has said that the recipe's code may be executed."""
    return (trust.OPTION,) if code_of(recipe) else ()


def guard(recipe: Recipe) -> None:
    """From now on execute in this process only what is known of what lies beside a recipe's files."""
    for file in files_of(recipe):
        trust.guard(file.parent)


def starter(source: str, code: Path = Path("user.py")) -> Recipe:
    """A recipe to start from for a source, with the model that fits it and settings that suit both; `code` is the
    user's own file, for a source that has a template of one. Raises ConfigError for an unknown source."""
    module = plugins.find("data.sources", source)
    own = module.Config.STARTER
    file = {} if module.Config.TEMPLATE is None else {"file": str(code)}
    data = module.Config.model_validate({"kind": source, **own.get("data", {}), **file})
    model = {"kind": {"text": "transformer", "any": "user"}.get(data.modality, "cnn")}
    suited = plugins.find("models", model["kind"]).Config.STARTER
    rest = {name: {**suited.get(name, {}), **own.get(name, {})} for name in ("train", "optim", "schedule")}
    return Recipe.model_validate({"data": data, "model": model | file, **{k: v for k, v in rest.items() if v}})


def template(source: str) -> Path | None:
    """A file of code to start from, for a source that is the user's own; raises ConfigError for an unknown source."""
    found: Path | None = plugins.find("data.sources", source).Config.TEMPLATE
    return found
