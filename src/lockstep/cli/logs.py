"""`lockstep logs`."""

from typing import Annotated

import typer

from lockstep.cli._common import RunArgument, honest


@honest
def command(
    run: RunArgument,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="And go on as it is written, until Ctrl-C.")] = False,
    rank: Annotated[int | None, typer.Option(help="That of one process.", min=0)] = None,
) -> None:
    """Show what a run has written."""
    from lockstep.base import closed_output
    from lockstep.base.errors import printable
    from lockstep.launch import run_control

    for line in run_control.log_lines(run.absolute(), rank, follow=follow):
        typer.echo(printable(line.replace("\r", "\n")), nl=False)
        if not closed_output.is_read():
            return
