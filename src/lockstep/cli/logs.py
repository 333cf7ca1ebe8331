"""`lockstep logs`."""

from typing import Annotated

import typer

from lockstep.cli._common import RunArgument, show_log


def command(
    run: RunArgument,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep showing new lines, until Ctrl-C.")] = False,
    rank: Annotated[int | None, typer.Option(help="The log of one process.", min=0)] = None,
) -> None:
    """Show the log of a run."""
    from lockstep.launch import run_control

    show_log(run_control.log_lines(run.absolute(), rank, follow=follow))
