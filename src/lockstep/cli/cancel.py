"""`lockstep cancel`."""

from lockstep.cli._common import RunArgument, console, honest


@honest
def command(run: RunArgument) -> None:
    """Have a run save after its step and end; `lockstep train` goes on with it."""
    from lockstep.launch import run_control

    console.print(run_control.cancel(run.absolute()), soft_wrap=True)
