"""Whether the code that a recipe names may be executed."""

import json
from pathlib import Path

from lockstep.base import trust
from lockstep.recipe.recipe import Recipe

SWEEP = "sweep.json"
"""File in the folder of a sweep, beside a copy of its config."""


def executable_code(recipe: Recipe) -> list[trust.Code]:
    """List the code that a run of this recipe adds: Python files, and launch settings that name programs."""
    codes = code_of_files(recipe)
    harmless = {"kind", "nodes", "processes", "interface"}
    changed = recipe.launch.model_dump(mode="json", exclude=harmless, exclude_defaults=True)
    programs = {name: value for name, value in changed.items() if isinstance(value, str | list | dict)}
    if programs:
        names = ", ".join(f"launch.{name}" for name in programs)
        codes.append(trust.Code.of(f"{names} of the recipe", json.dumps(programs, sort_keys=True).encode()))
    return codes


def code_of_files(recipe: Recipe) -> list[trust.Code]:
    """List the Python files that a recipe names, which a worker executes."""
    own = (recipe.optim.file, recipe.schedule.file)
    files = (recipe.model.code, recipe.data.code, recipe.observe.file, recipe.data.augment, *own)
    return [code for file in dict.fromkeys(files) if file is not None for code in trust.code_with_imports(file)]


def is_in_run_folder(path: Path) -> bool:
    """Return whether Lockstep wrote a config file, into the folder of a run or a sweep, instead of the user."""
    return (path.parent / "checkpoints").is_dir() or any(
        (path.parent / name).is_file() for name in ("recipe.yaml", SWEEP)
    )


def authorize(recipe: Recipe, path: Path, *, trusts: bool, asks: bool = True, known: str = "") -> tuple[str, ...]:
    """Allow a recipe's code to be executed; return the arguments that pass this on to the worker processes.

    The user's own config is trusted. That of a run folder is not: its code has to be known, or the user has to agree.
    Where a command has started this one, `known` are the sums of the code that it knew. Raises UntrustedCode.
    """
    codes = executable_code(recipe)
    if known:
        trust.accept((trust.KNOWN, known))
    if known or is_in_run_folder(path):
        return trust.authorize(codes, trusts=trusts, folder=path.parent, asks=asks)
    return trust.own(codes)
