"""`lockstep cancel`."""

from lockstep.cli._common import RunArgument, console


def command(run: RunArgument) -> None:
    """Have a run save after its current step and end; `lockstep train` resumes it."""
    from lockstep.launch import run_control

    console.print(run_control.cancel(run.absolute()), soft_wrap=True)
