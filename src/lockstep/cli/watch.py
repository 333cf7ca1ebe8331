"""`lockstep watch`."""

import time
from contextlib import suppress
from typing import Annotated

import typer

from lockstep.cli._common import RunArgument, console

REFRESH_SECONDS = 1.0


def command(
    run: RunArgument,
    once: Annotated[
        bool, typer.Option("--once", help="Show it once, and end; so it is where this is no terminal.")
    ] = False,
) -> None:
    """Show a run while it trains, from any terminal: progress, last values, time of each rank, memory, events.

    It reads the run's folder, whoever has started the run; Ctrl-C ends the watching, not the run.
    """
    from rich.live import Live

    from lockstep.observe.watch.run_state import RunReader
    from lockstep.observe.watch.screen import screen

    reader = RunReader(run.absolute())
    state = reader.state()
    if once or not console.is_terminal:
        console.print(screen(state, width=console.width))
        return
    with suppress(KeyboardInterrupt), Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            live.update(screen(state, width=console.width), refresh=True)
            if state.start is not None and state.start.status is not None:
                return
            time.sleep(REFRESH_SECONDS)
            state = reader.state()
