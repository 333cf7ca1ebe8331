"""How commands talk to a person: the console, arguments that several take, an honest end."""

import platform
from collections.abc import Callable
from functools import partial, wraps
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from lockstep.base import ctrl_c, user_code
from lockstep.base.errors import LockstepError, printable
from lockstep.base.escaping import EscapingConsole

if TYPE_CHECKING:
    from lockstep.run.recipe import Recipe

console = EscapingConsole()

ConfigFile = Annotated[Path, typer.Argument(help="A YAML file, or a run's recipe.yaml.", metavar="CONFIG")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="Settings that replace the file's.", metavar="section.key=value"),
]
RunArgument = Annotated[Path, typer.Argument(help="A run's folder, or one of its checkpoints.", metavar="RUN")]
Trained = Annotated[Path, typer.Argument(help="A run's folder, one of its checkpoints, or an export.", metavar="MODEL")]
DType = Annotated[
    Literal["fp32", "fp16", "bf16"] | None, typer.Option(help="What the weights become; default: as they are.")
]
TrustCode = Annotated[
    bool,
    typer.Option("--trust-code", help="Execute the code that lies in a folder which somebody else may have made."),
]


def versions() -> str:
    """Those of Lockstep, torch and Python, in one line; imports none of them."""
    return f"lockstep {version('lockstep-train')}, torch {version('torch')}, Python {platform.python_version()}"


def settled(path: Path, overrides: list[str] | None, *, trusts: bool) -> "Recipe":
    """The recipe of a config file whose code may be executed."""
    from lockstep.run import recipe as recipes

    recipe = recipes.load(path, overrides or [])
    recipes.settle_trust(recipe, path, trusts=trusts)
    return recipe


def honest(command: Callable[..., int | None]) -> Callable[..., None]:
    """A user's mistake becomes one message and an exit code; a bug of ours keeps its traceback."""

    @wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        with ctrl_c.raising():
            code = _answered(partial(command, *args, **kwargs))
        raise typer.Exit(code or 0)

    return run


def _answered(command: Callable[[], int | None]) -> int | None:
    """Its exit code, once what went wrong has been told; raises what is a bug of ours."""
    try:
        return command()
    except LockstepError as error:
        typer.echo(str(error), err=True)
        return error.exit_code
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        return ctrl_c.EXIT_CODE
    except Exception as error:
        if ctrl_c.was_pressed():  # the code that it came into may have made something else of it
            typer.echo("interrupted", err=True)
            return ctrl_c.EXIT_CODE
        if not user_code.is_users(error):
            raise
        typer.echo(printable(user_code.report(error)), err=True)
        return 1
