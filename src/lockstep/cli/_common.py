"""Shared parts of the commands: the console, arguments, the loading of configs, the reporting of errors."""

import os
import platform
from collections.abc import Callable, Iterable
from functools import partial, wraps
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import platformdirs
import typer

from lockstep.base import ctrl_c, loading, remote_path, storage, user_code
from lockstep.base.errors import ConfigError, LaunchError, LockstepError, UserError, absence, printable
from lockstep.base.escaping_console import EscapingConsole

if TYPE_CHECKING:
    from lockstep.recipe.recipe import Recipe

console = EscapingConsole()
RECORDS = ("recipe.yaml", "lockstep.json", "loop.yaml", "job.json", "launch.yaml", "manifest.json")
"""Files of which one is in every folder of a run, an export or a checkpoint."""

ConfigFile = Annotated[Path, typer.Argument(help="A YAML file, or a run's recipe.yaml.", metavar="CONFIG")]


def setting_names(incomplete: str) -> list[str]:
    """Complete the beginning of a setting in a shell."""
    from lockstep.recipe import recipe as recipes

    return [f"{name}=" for name in recipes.settings() if name.startswith(incomplete)]


Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="Settings that replace the file's.", metavar="section.key=value", autocompletion=setting_names),
]


def recorded(paths: Path | list[Path]) -> Path | list[Path]:
    """Check that there is a run, checkpoint or export before a command imports torch, which takes seconds."""
    check = partial(_check_recorded, paths if isinstance(paths, list) else [paths])
    if code := _exit_code(check):
        raise typer.Exit(code)
    return paths


def _check_recorded(paths: list[Path]) -> None:
    for path in paths:
        folder = Path(os.path.abspath(path))  # without following links: checkpoints may lie on another disk
        places = (each / name for each in (folder, folder.parent, folder.parent.parent) for name in RECORDS)
        if not remote_path.is_url(str(path)) and not any(map(os.path.isfile, places)):
            missing = absence(path, f"there is no {' and no '.join(RECORDS[:2])} in it")
            what = f"{path} is no run, no checkpoint and no export"
            raise ConfigError(f"{what}: {missing} (runs are folders such as runs/NAME)")


RunArgument = Annotated[
    Path, typer.Argument(help="A run's folder, or one of its checkpoints.", metavar="RUN", callback=recorded)
]
Trained = Annotated[
    Path,
    typer.Argument(help="A run's folder, one of its checkpoints, or an export.", metavar="MODEL", callback=recorded),
]
Rendezvous = Annotated[
    str | None,
    typer.Option(help="Where this and other machines meet: node 0's name or address.", metavar="HOST:PORT"),
]
NodeRank = Annotated[
    int | None, typer.Option(help="Which of the machines this is; default: 0 where HOST is this one.", min=0)
]
DType = Annotated[
    Literal["fp32", "fp16", "bf16"] | None, typer.Option(help="Convert the weights; default: as they are.")
]
Base = Annotated[
    str | None, typer.Option(help="Folder, or hub name, of the model that an exported adapter belongs to, if it moved.")
]
TrustCode = Annotated[
    bool,
    typer.Option("--trust-code", help="Execute the code that lies in a folder which somebody else may have made."),
]


def versions() -> str:
    """Return the versions of Lockstep, torch and Python in one line, without importing torch."""
    return f"lockstep {version('lockstep-train')}, torch {version('torch')}, Python {platform.python_version()}"


def shipped_folder(name: str) -> Path:
    """Find `lessons` or `examples` in the installed package or in this checkout. Raises ConfigError."""
    package = Path(__file__).parents[1]
    places = (package / name, package.parents[1] / name)
    found = next((place for place in places if place.is_dir()), None)
    if found is None:
        raise ConfigError(f"the {name} are missing: this installation has none of {', '.join(map(str, places))}")
    return found


def load_trusted(path: Path, overrides: list[str] | None, *, trusts: bool) -> "Recipe":
    """Load a config file, get the user's permission to execute its code, and choose devices and threads for what the
    command measures itself. Raises UserError."""
    from lockstep.base import devices
    from lockstep.protocol import environment
    from lockstep.recipe import recipe as recipes
    from lockstep.recipe import recipe_trust

    recipe = recipes.load(path, overrides or [])
    recipe_trust.authorize(recipe, path, trusts=trusts)
    devices.choose(recipe.run.device, shares_gpus=recipe.launch.share_gpus)
    environment.set_threads(recipe.run.threads)
    return recipe


def reports_errors(command: Callable[..., int | None]) -> Callable[..., None]:
    """Decorate a command: a user's mistake becomes a message and an exit code; a bug of ours keeps its traceback."""

    @wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        with ctrl_c.raising():
            code = _exit_code(partial(command, *args, **kwargs))
        loading.end()
        raise typer.Exit(code or 0)

    return run


def _check_folders() -> None:
    """Raise LaunchError where there is no working folder, or none of this user's for caches and what is trusted."""
    try:
        Path.cwd()
    except FileNotFoundError:
        raise LaunchError("the working folder has been deleted: change to another one (cd)") from None
    try:
        platformdirs.user_cache_path(), platformdirs.user_state_path()
    except RuntimeError:
        raise LaunchError(
            "this user has no home folder (no HOME, no entry in /etc/passwd): set HOME to a folder that belongs to it"
        ) from None


def _exit_code(command: Callable[[], int | None]) -> int | None:
    """Run a command, print its error if it has one, and return its exit code. A bug of ours is raised."""
    try:
        try:
            _check_folders()
            return command()
        except BaseException:
            loading.end()
            raise
    except LockstepError as error:
        typer.echo(str(error), err=True)
        return error.exit_code
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        return ctrl_c.EXIT_CODE
    except Exception as error:
        if ctrl_c.was_pressed():  # interrupted code may have replaced KeyboardInterrupt
            typer.echo("interrupted", err=True)
            return ctrl_c.EXIT_CODE
        if user_code.is_from_user(error):
            typer.echo(printable(user_code.report(error)), err=True)
            return 1
        if (text := storage.full_disk(error)) is None:
            raise
        typer.echo(printable(text), err=True)
        return UserError.exit_code


def show_log(lines: Iterable[str]) -> None:
    """Print lines of a log as they come, as long as somebody reads them."""
    from lockstep.base import closed_output

    for line in lines:
        typer.echo(printable(line.replace("\r", "\n")), nl=False)
        if not closed_output.has_reader():
            return
