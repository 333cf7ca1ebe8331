"""From what was typed to a measured model: what is meant, the processes that measure it, and what they have found."""

import json
import os
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout
from rich.console import Console

from lockstep.base import storage, trust
from lockstep.base.errors import ConfigError, nearest
from lockstep.inference.evaluate import evaluation_table
from lockstep.inference.evaluate.evaluation_request import SPLITS, EvaluationRequest
from lockstep.inference.evaluate.evaluation_samples import check_file
from lockstep.inference.export import export_facts as telling
from lockstep.inference.export import export_reader
from lockstep.launch import launch_run
from lockstep.launch.run_folder import is_run, run_of
from lockstep.run import recipe as recipes
from lockstep.run import recipe_trust
from lockstep.run.recipe import Recipe

TEXT, LABEL = "data.text_column", "data.label_column"
"""Settings that are the file's, where there is one, and not the recipe's, which may have no such setting."""
CARRIED = ("run", "data", "model", "train", "evaluate")
"""Sections that an export is measured by; as many processes as this machine has room for, unless it is told."""
NAME = "evaluate"


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions:
    """What was typed besides the target and its settings."""

    split: str = "test"
    file: Path | None = None
    worst: int = 20
    calibrates: bool = False
    to: Path | None = None
    trusts: bool = False
    """Whether the target's own code may be executed, whatever it is."""


def evaluate(target: Path, overrides: Sequence[str], wishes: EvaluateOptions, *, console: Console) -> int:
    """Measure a run, a checkpoint or an export, each sample once, and tell -> exit code. Raises UserError."""
    if wishes.split not in SPLITS:
        raise ConfigError(f"there is no split {wishes.split!r}{nearest(wishes.split, SPLITS)} (there is: test, train)")
    if wishes.file is not None:
        check_file(wishes.file)
    columns = {each.partition("=")[0]: each.partition("=")[2] for each in overrides if _is_column(each, wishes)}
    settings = [each for each in overrides if not _is_column(each, wishes)]
    with _place(target) as place:
        is_export = place is not None
        recipe, measured = _of_export(target, settings, place) if place else _of_run(target, settings)
        own = export_reader.code_of(measured, telling.read(measured)) if is_export else []
        trusts = trust.authorize([*own, *recipe_trust.executable_code(recipe)], trusts=wishes.trusts, folder=target)
        to = wishes.to or (measured if is_export else recipe.folder)
        task = EvaluationRequest(
            target=measured,
            is_export=is_export,
            split=wishes.split,
            file=wishes.file.absolute() if wishes.file else None,
            text_column=columns.get(TEXT) or recipe.data.table_columns[0],
            label_column=columns.get(LABEL) or recipe.data.table_columns[1],
            worst=wishes.worst,
            calibrates=wishes.calibrates,
            to=_writable(to.absolute()),
        )
        code = _launched(recipe, task, trusts=trusts)
    if code == 0:
        evaluation_table.show(json.loads((task.to / "evaluation.json").read_text(encoding="utf-8")), console)
        console.print(f"written to {task.to}: evaluation.html, evaluation.json", soft_wrap=True)
    return code


def _is_column(override: str, wishes: EvaluateOptions) -> bool:
    return wishes.file is not None and override.partition("=")[0] in (TEXT, LABEL)


def _place(target: Path) -> AbstractContextManager[str | None]:
    """A folder for the processes that measure an export, whose run may be far away; None for a run, which has one."""
    return tempfile.TemporaryDirectory(prefix="lockstep-") if export_reader.is_export(target) else nullcontext()


def _of_run(path: Path, overrides: Sequence[str]) -> tuple[Recipe, Path]:
    """A run's recipe, and the checkpoint that is meant."""
    if not is_run(path):
        raise ConfigError(
            f"{path} is no run, no checkpoint and no export: there is neither recipe.yaml (runs are folders such as "
            f"runs/NAME) nor {telling.FILE} in it"
        )
    return run_of(path, overrides)


def _of_export(folder: Path, overrides: Sequence[str], place: str) -> tuple[Recipe, Path]:
    """What of the recipe that an export carries does not belong to the machine that has trained it; its folder."""
    folder = Path(os.path.abspath(folder))
    carried = telling.read(folder).recipe
    sections = {name: dict(carried[name]) for name in CARRIED if name in carried}
    sections["run"] = {**sections.get("run", {}), "dir": place, "name": NAME}
    sections.get("data", {}).pop("cache", None)
    return recipes.of_sections(sections, overrides), folder


def _writable(folder: Path) -> Path:
    """The folder for what comes out, made where it is not there: better said now than when all has been measured."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error.strerror}; choose another with --to") from None


def _launched(recipe: Recipe, task: EvaluationRequest, *, trusts: bool) -> int:
    """Measure on processes of this machine, whatever it is that trains the run -> exit code."""
    asked = recipe.folder / f"{NAME}.json"
    arguments = ("--task", NAME, "--request", str(asked), *([trust.OPTION] if trusts else []))
    with _written(asked, task.model_dump_json(indent=1)):
        return launch_run.launch(launch_run.on_this_machine(recipe), arguments, name=NAME)


def _written(asked: Path, text: str) -> AbstractContextManager[object]:
    """Write a task where no other evaluation does so until this is left: their logs would mix. Raises ConfigError."""
    folder = asked.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / f".{NAME}.lock").acquire(timeout=0)
        storage.write(asked, text)
    except Timeout:
        raise ConfigError(f"{folder} is just being evaluated by another process: wait for its end") from None
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error.strerror}") from None
    return lock
