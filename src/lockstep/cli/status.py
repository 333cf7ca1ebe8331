"""`lockstep status`."""

from lockstep.cli._common import RunArgument, console, honest


@honest
def command(run: RunArgument) -> None:
    """Tell where a run is: its job and the time that is left to it, its step, its newest checkpoint."""
    from lockstep.launch import run_control

    for line in run_control.status(run.absolute()):
        console.print(line, soft_wrap=True)
