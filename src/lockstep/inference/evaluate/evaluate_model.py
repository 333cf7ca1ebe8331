"""Evaluates a run, a checkpoint or an export: resolves the arguments, starts processes, shows the results."""

import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout
from rich.console import Console

from lockstep.base import remote_path, storage, trust
from lockstep.base.errors import ConfigError, absence, nearest
from lockstep.core.host.remote_storage import here
from lockstep.inference.evaluate import evaluation_result, evaluation_table
from lockstep.inference.evaluate.evaluation_request import SPLITS, EvaluationRequest
from lockstep.inference.evaluate.evaluation_samples import check_file
from lockstep.inference.export import export_facts, export_reader
from lockstep.launch import launch_run
from lockstep.recipe import recipe as recipes
from lockstep.recipe import recipe_trust
from lockstep.recipe.recipe import Recipe
from lockstep.recipe.run_paths import is_run, run_of

TEXT, LABEL = "data.text_column", "data.label_column"
"""Settings that name the columns of --file, in place of those of the recipe, which may lack them."""
EXPORT_SECTIONS = ("run", "data", "model", "train", "evaluate")
"""Sections of an export's recipe that are used: the others belong to the machine that trained it."""
NAME = "evaluate"
Launch = Callable[[Recipe, tuple[str, ...]], int]
"""Function that starts the processes of a recipe with these arguments, on this machine -> exit code."""


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions:
    """Options of `lockstep evaluate`."""

    split: str = "test"
    file: Path | None = None
    worst: int = 20
    calibrates: bool = False
    to: Path | None = None
    base: str | None = None
    """Current place of the model of an exported adapter, a folder or a name on the hub."""
    trusts: bool = False
    """Whether to execute the target's own code even if it is unknown."""


def evaluate(target: Path, overrides: Sequence[str], options: EvaluateOptions, *, console: Console) -> int:
    """Evaluate a run, a checkpoint or an export, and print the results -> exit code. Raises UserError."""

    def launch(recipe: Recipe, arguments: tuple[str, ...]) -> int:
        return launch_run.launch(launch_run.on_this_machine(recipe), arguments, name=NAME)

    exit_code, folder = measure(target, overrides, options, launch=launch)
    if exit_code == 0:
        evaluation_table.show(evaluation_result.read(folder).details, console)
        console.print(f"written to {folder}: evaluation.html, evaluation.json", soft_wrap=True)
    return exit_code


def measure(target: Path, overrides: Sequence[str], options: EvaluateOptions, *, launch: Launch) -> tuple[int, Path]:
    """Measure each sample once, by processes that `launch` starts -> its exit code, the folder of the results. Raises
    UserError."""
    if options.split not in SPLITS:
        raise ConfigError(
            f"there is no split {options.split!r}{nearest(options.split, SPLITS)} (there is: test, train)"
        )
    if remote_path.is_url(str(target)) and options.to is None:
        raise ConfigError(f"name a folder of this machine for the results with --to: {target} is a URL")
    target, file = here(target), None if options.file is None else here(options.file)
    if file is not None:
        check_file(file)
    columns = {each.partition("=")[0]: each.partition("=")[2] for each in overrides if _is_column(each, options)}
    settings = [each for each in overrides if not _is_column(each, options)]
    is_export = export_reader.is_export(target)
    with tempfile.TemporaryDirectory(prefix="lockstep-") if is_export else nullcontext("") as temporary:
        recipe, folder = _of_export(target, settings, temporary) if is_export else _of_run(target, settings)
        code = export_reader.code_of(folder, export_facts.read(folder)) if is_export else []
        codes = [*code, *recipe_trust.executable_code(recipe)]
        allowed = trust.authorize(codes, trusts=options.trusts, folder=target)
        to = options.to or (folder if is_export else recipe.folder)
        request = EvaluationRequest(
            target=folder,
            is_export=is_export,
            split=options.split,
            file=None if file is None else file.absolute(),
            text_column=columns.get(TEXT) or recipe.data.table_columns[0],
            label_column=columns.get(LABEL) or recipe.data.table_columns[1],
            worst=options.worst,
            calibrates=options.calibrates,
            base=options.base,
            to=_create_folder(to.absolute()),
        )
        return _launch(recipe, request, allowed=allowed, launch=launch), request.to


def _is_column(override: str, options: EvaluateOptions) -> bool:
    return options.file is not None and override.partition("=")[0] in (TEXT, LABEL)


def _of_run(path: Path, overrides: Sequence[str]) -> tuple[Recipe, Path]:
    if not is_run(path):
        raise ConfigError(
            f"{path} is no run, no checkpoint and no export: "
            f"{absence(path, f'there is neither recipe.yaml nor {export_facts.FILE} in it')} "
            "(runs are folders such as runs/NAME)"
        )
    return run_of(path, overrides)


def _of_export(folder: Path, overrides: Sequence[str], run_dir: str) -> tuple[Recipe, Path]:
    """Return the recipe to evaluate an export with, and the export's folder."""
    folder = Path(os.path.abspath(folder))
    stored = export_facts.read(folder).recipe
    sections = {name: dict(stored[name]) for name in EXPORT_SECTIONS if name in stored}
    sections["run"] = {**sections.get("run", {}), "dir": run_dir, "name": NAME}
    sections.get("data", {}).pop("cache", None)
    return recipes.of_sections(sections, overrides), folder


def _create_folder(folder: Path) -> Path:
    """Create the output folder if necessary. Raises ConfigError, before the evaluation and not after it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error.strerror}; choose another with --to") from None


def _launch(recipe: Recipe, request: EvaluationRequest, *, allowed: tuple[str, ...], launch: Launch) -> int:
    """Run the evaluation on this machine, whatever launcher the recipe names -> exit code."""
    file = recipe.folder / f"{NAME}.json"
    arguments = ("--task", NAME, "--request", str(file), *allowed)
    with _locked_request(file, request.model_dump_json(indent=1)):
        return launch(recipe, arguments)


def _locked_request(file: Path, text: str) -> AbstractContextManager[object]:
    """Write the request, and lock its folder until the context is left: logs of two evaluations would mix. Raises
    ConfigError."""
    folder = file.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / f".{NAME}.lock").acquire(timeout=0)
        storage.write(file, text)
    except Timeout:
        raise ConfigError(f"{folder} is just being evaluated by another process: wait for its end") from None
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error.strerror}") from None
    return lock
