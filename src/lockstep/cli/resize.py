"""`lockstep resize`."""

from typing import Annotated

import typer

from lockstep.cli._common import RunArgument, console


def command(
    run: RunArgument,
    processes: Annotated[int, typer.Argument(min=1, metavar="N", help="how many processes are to train, per machine")],
) -> None:
    """Have a run with live recovery go on with another number of processes; the weights stay the same bits."""
    from lockstep.launch import run_control

    console.print(run_control.resize(run.absolute(), processes), soft_wrap=True)
