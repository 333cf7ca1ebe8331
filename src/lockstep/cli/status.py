"""`lockstep status`."""

from lockstep.cli._common import RunArgument, console


def command(run: RunArgument) -> None:
    """Show the state of a run: its job and remaining time, its step, its newest checkpoint."""
    from lockstep.launch import run_control

    for line in run_control.status(run.absolute()):
        console.print(line, soft_wrap=True)
