"""Resolves a path on the command line to a run and one of its checkpoints."""

import os
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from lockstep.base.errors import CheckpointError, ConfigError, absence
from lockstep.checkpoint import layout, retention
from lockstep.checkpoint.layout import CheckpointSection, listed
from lockstep.observe.run_folder import LOOP, RECIPE, RunFolder
from lockstep.recipe import recipe as recipes
from lockstep.recipe import run_names
from lockstep.recipe.recipe import Recipe

FOLDERS = ("checkpoints", "logs", "profile", "tensorboard", "wandb")
LOGGED = ("history.jsonl", "metrics.csv", "metrics.jsonl", "report.html", "steering.jsonl", "summary.json")
TRACKED = ("mlflow.jsonl", "wandb.jsonl")
FILES = (".lock", "certificate.json", "job.json", "launch.yaml", "loop.yaml", "recipe.yaml", *LOGGED, *TRACKED)
"""Files that a run writes to its folder."""


def check_folder(folder: Path) -> None:
    """Raise ConfigError if a path that a run writes to is of another type, such as a FIFO or a link. `checkpoints` may
    link to another disk, but not into another run, which would lose its own."""
    for path in (folder / name for name in (*FOLDERS, *FILES)):
        is_folder, is_link = path.name in FOLDERS, path.is_symlink()
        if path.name == "checkpoints" and is_link:
            is_link = (path.resolve().parent / "recipe.yaml").exists()
        has_right_type = path.is_dir() if is_folder else path.is_file()
        if os.path.lexists(path) and (is_link or not has_right_type):
            what = "a link" if is_link else "no folder" if is_folder else "no regular file"
            raise ConfigError(f"{path} is {what}, but a run writes to it: remove it, or choose another run.name")


def is_run(path: Path) -> bool:
    """Return whether a path is a run's folder, its `checkpoints` folder, or a checkpoint; the recipe may be invalid."""
    folder = Path(os.path.abspath(path))
    return any(RunFolder(each).has_settings for each in (folder, *folder.parents[:2]))


def locate(path: Path, overrides: Sequence[str] | None = None) -> tuple[Recipe, Path, Path | None]:
    """Resolve a run's folder, its `checkpoints` folder, or a checkpoint -> recipe, `checkpoints` folder, checkpoint.
    Raises ConfigError."""
    root, checkpoint = _checkpoints_folder(path)
    if not (root.parent / RECIPE).is_file():
        what = absence(path, f"there is no {RECIPE} in it")
        if (root.parent / LOOP).is_file():
            what = "a script trained it with lockstep.Loop, and only that script knows its model and data"
        raise ConfigError(f"{path} is no run: {what} (runs are folders such as runs/NAME)")
    overrides = run_names.folder_overrides(root.parent, overrides or [])
    return recipes.load(root.parent / "recipe.yaml", overrides), root, checkpoint


def checkpoints_of(path: Path) -> tuple[CheckpointSection, Path, Path | None]:
    """Resolve like `locate`, also own loops -> settings, `checkpoints` folder, checkpoint. Raises ConfigError."""
    root, checkpoint = _checkpoints_folder(path)
    if not (root.parent / LOOP).is_file():
        return locate(path)[0].checkpoint, root, checkpoint
    try:
        return CheckpointSection.model_validate(RunFolder(root.parent).settings().get("checkpoint")), root, checkpoint
    except ValidationError as error:
        raise ConfigError(f"{root.parent / LOOP} cannot be read: {error.errors()[0]['msg']}") from None


def _checkpoints_folder(path: Path) -> tuple[Path, Path | None]:
    """Return the `checkpoints` folder of a path that `locate` resolves, and the checkpoint that it names."""
    folder = Path(os.path.abspath(path))  # without following links: checkpoints may lie on another disk
    if (folder / layout.MANIFEST).is_file():
        return folder.parent, folder
    is_root = folder.name == "checkpoints" and not RunFolder(folder).has_settings
    return (folder if is_root else folder / "checkpoints"), None


def run_of(path: Path, overrides: Sequence[str] | None = None) -> tuple[Recipe, Path]:
    """Resolve a path -> the run's recipe and a checkpoint: the named one, else the best, else the newest. Raises
    ConfigError, CheckpointError."""
    recipe, root, checkpoint = locate(path, overrides)
    checkpoint = checkpoint or retention.chosen(root, recipe.checkpoint)
    if checkpoint is None:
        if found := listed(root):
            raise CheckpointError(
                f"none of the {len(found)} checkpoints in {root} is whole; see why with: "
                f"lockstep checkpoints {root.parent} --verify"
            )
        raise CheckpointError(
            f"{path} has no finished checkpoint yet; train it further with: lockstep train {root.parent}/recipe.yaml"
        )
    return recipe, checkpoint
