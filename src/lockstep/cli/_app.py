"""The command line: every file in this folder is a command, which imports what it needs when it is called."""

import inspect
import re
import sys
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from lockstep.base import plugins
from lockstep.base.errors import nearest
from lockstep.cli._common import reports_errors, versions

FAMILY = "cli"
PANELS = {
    "Start": ["init", "data", "learn", "plugins"],
    "Train": ["train", "fork", "sweep", "cancel", "resize", "checkpoints"],
    "Watch": ["status", "watch", "logs", "report"],
    "Use a model": ["evaluate", "export", "predict", "serve"],
    "Understand": ["compare", "replay", "bisect", "prove", "verify", "gate", "profile"],
    "Plan": ["doctor", "estimate", "scale", "tune"],
}
"""Panels of the help, and their commands in order; others follow by name in the panel "More"."""


class Commands(TyperGroup):
    """Finds commands in the files of this folder."""

    def list_commands(self, ctx: Any) -> list[str]:
        """List the commands in the order of the help."""
        known = plugins.names(FAMILY)
        placed = [name for names in PANELS.values() for name in names if name in known]
        return [*placed, *(name for name in known if name not in placed)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Load the function `command` of a file; fail where there is no such file."""
        known = plugins.names(FAMILY)
        if cmd_name not in known:
            complaint = f"No such command {cmd_name!r}{nearest(cmd_name, known) or '.'}"
            return None if ctx.resilient_parsing else ctx.fail(complaint)
        single = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        function = plugins.find(FAMILY, cmd_name).command
        text = re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.getdoc(function) or "")  # else the help keeps our line breaks
        panel = next((title for title, names in PANELS.items() if cmd_name in names), "More")
        single.command(cmd_name, help=text, rich_help_panel=panel)(reports_errors(function))
        return typer.main.get_command(single)


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Distributed PyTorch training; the weights are a function of the config and the data, not of the cluster.",
)


def _show_versions(is_requested: bool) -> None:
    if is_requested:
        typer.echo(versions())
        raise typer.Exit


@app.callback()
def everywhere(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_versions, is_eager=True, help="Show versions, and end."),
    ] = False,
) -> None:
    """Do nothing before a command."""


def contexts() -> Iterator[tuple[str, typer.Context]]:
    """Yield every command's name and its context, from which its help is written."""
    group: Any = typer.main.get_command(app)
    top = typer.Context(group, info_name="lockstep")
    for name in group.list_commands(top):
        yield name, typer.Context(group.get_command(top, name), info_name=name, parent=top)


def main() -> None:
    """Run the command `lockstep`."""
    sys.exit(app())
