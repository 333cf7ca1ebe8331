"""Evaluates a run, a checkpoint or an export: resolves the arguments, starts processes, shows the results."""

import json
import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from rich.console import Console

from lockstep.base import remote_path, storage, trust
from lockstep.base.errors import ConfigError, absence, nearest
from lockstep.core.host.remote_storage import here
from lockstep.inference.evaluate import evaluation_table
from lockstep.inference.evaluate.evaluation_request import SPLITS, EvaluateOptions, EvaluationRequest
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
class EvaluationResult:
    folder: Path
    """Folder of evaluation.json, evaluation.html and, for classes, confusion.svg."""
    metrics: dict[str, float]
    """Metrics by name: "loss" and those of the objective, such as "accuracy"."""
    samples: int
    step: int
    """Step of the checkpoint."""
    digest: str
    """Digest of the weights."""
    details: dict[str, Any]
    """Contents of evaluation.json: also the metrics of each class, the calibration, the worst samples."""

    @property
    def report(self) -> Path:
        """The page for a browser."""
        return self.folder / "evaluation.html"


def read(folder: Path) -> EvaluationResult:
    """Read the results that an evaluation has written into a folder."""
    found = json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))
    named = {name: found[name] for name in ("metrics", "samples", "step", "digest")}
    return EvaluationResult(folder=folder, details=found, **named)


def evaluate(target: Path, overrides: Sequence[str], options: EvaluateOptions, *, console: Console) -> int:
    """Evaluate a run, a checkpoint or an export, and print the results -> exit code. Raises UserError."""

    def launch(recipe: Recipe, arguments: tuple[str, ...]) -> int:
        return launch_run.launch(launch_run.on_this_machine(recipe), arguments, name=NAME)

    exit_code, folder = measure(target, overrides, options, launch=launch)
    if exit_code == 0:
        evaluation_table.show(read(folder).details, console)
        console.print(f"written to {folder}: evaluation.html, evaluation.json", soft_wrap=True)
    return exit_code


def measure(target: Path, overrides: Sequence[str], options: EvaluateOptions, *, launch: Launch) -> tuple[int, Path]:
    """Measure each sample once, in processes that `launch` starts -> exit code, folder of results. Raises UserError."""
    if options.split not in SPLITS:
        raise ConfigError(
            f"there is no split {options.split!r}{nearest(options.split, SPLITS)} (there is: test, train)"
        )
    if remote_path.is_url(str(target)) and options.to is None:
        raise ConfigError(f"name a folder of this machine for the results with --to: {target} is a URL")
    target, file = here(target), None if options.file is None else here(options.file)
    if file is not None:
        check_file(file)
    pairs = [each.partition("=") for each in overrides]
    columns = {key: value for key, _, value in pairs if file is not None and key in (TEXT, LABEL)}
    settings = ["".join(pair) for pair in pairs if pair[0] not in columns]
    is_export = export_reader.is_export(target)
    if not is_export and not is_run(target):
        raise ConfigError(
            f"{target} is no run, no checkpoint and no export: "
            f"{absence(target, f'there is neither recipe.yaml nor {export_facts.FILE} in it')} "
            "(runs are folders such as runs/NAME)"
        )
    with tempfile.TemporaryDirectory(prefix="lockstep-") if is_export else nullcontext("") as temporary:
        recipe, folder = _of_export(target, settings, temporary) if is_export else run_of(target, settings)
        code = export_reader.code_of(folder, export_facts.read(folder)) if is_export else []
        codes = [*code, *recipe_trust.executable_code(recipe)]
        allowed = trust.authorize(codes, trusts=options.trusts, folder=target)
        to = options.to or (folder if is_export else recipe.folder)
        given = options.model_dump() | {"to": _create_folder(to.absolute()), "file": file and file.absolute()}
        request = EvaluationRequest(
            **given,
            target=folder,
            is_export=is_export,
            text_column=columns.get(TEXT) or recipe.data.table_columns[0],
            label_column=columns.get(LABEL) or recipe.data.table_columns[1],
        )
        return _launch(recipe, request, allowed=allowed, launch=launch), request.to


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
    """Run the evaluation on this machine, whatever launcher the recipe names -> exit code. Raises ConfigError where
    another one runs in its folder, as the logs would mix."""
    folder = recipe.folder
    file = folder / f"{NAME}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / f".{NAME}.lock").acquire(timeout=0)
        storage.write(file, request.model_dump_json(indent=1))
    except Timeout:
        raise ConfigError(f"{folder} is just being evaluated by another process: wait for its end") from None
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error.strerror}") from None
    with lock:
        return launch(recipe, ("--task", NAME, "--request", str(file), *allowed))
