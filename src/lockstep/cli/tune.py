"""`lockstep tune`."""

from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli._common import ConfigFile, Overrides, TrustCode, console, load_trusted


def command(
    path: ConfigFile,
    overrides: Overrides = None,
    micro_batch: Annotated[bool, typer.Option("--micro-batch", help="Find the fastest that fits in memory.")] = False,
    lr: Annotated[bool, typer.Option("--lr", help="Find a learning rate by a range test, and draw the curve.")] = False,
    memory: Annotated[
        float | None,
        typer.Option(help="GB (of 10^9 bytes) for each process; default: its share of what is free.", metavar="GB"),
    ] = None,
    start: Annotated[float, typer.Option("--from", help="First learning rate of the sweep.")] = 1e-7,
    stop: Annotated[float, typer.Option("--to", help="Last one.")] = 10.0,
    steps: Annotated[int, typer.Option(help="Steps of the sweep.")] = 100,
    out: Annotated[Path | None, typer.Option(help="SVG file of the curve; default: CONFIG-lr.svg, here.")] = None,
    trust_code: TrustCode = False,
) -> int:
    """Find the fastest micro-batch that fits, or a good learning rate, to put into the config.

    Keeps no weights and changes no config.

    Ends with 0, or with 1 when no learning rate can be suggested.
    """
    recipe = load_trusted(path, overrides, trusts=trust_code)
    from lockstep.tools.tune import tuning
    from lockstep.tools.tune.loss_curve import rates_between

    return tuning.tune(
        recipe,
        micro_batch=micro_batch,
        memory_gb=memory,
        rates=rates_between(start, stop, steps),
        picture=(out or Path(f"{path.stem}-lr.svg")) if lr else None,
        console=console,
    )
