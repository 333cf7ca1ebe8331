"""`lockstep scale`."""

from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli._common import ConfigFile, Overrides, TrustCode, console, load_trusted


def command(
    path: ConfigFile,
    overrides: Overrides = None,
    world: Annotated[str, typer.Option(help="Numbers of processes.")] = "1,2",
    steps: Annotated[int, typer.Option(help="Measured steps of each run.", min=1)] = 20,
    rounds: Annotated[int, typer.Option(help="How often each number is measured, in turns.", min=1)] = 3,
    weak: Annotated[bool, typer.Option("--weak", help="Let the global batch grow with the processes.")] = False,
    picture: Annotated[Path | None, typer.Option(help="Draw the throughput into this SVG file.")] = None,
    json: Annotated[Path | None, typer.Option("--json", help="Write all figures to this file.")] = None,
    trust_code: TrustCode = False,
) -> None:
    """Measure throughput and efficiency on different numbers of processes."""
    recipe = load_trusted(path, overrides, trusts=trust_code)
    from lockstep.tools.scale import scaling
    from lockstep.tools.trials import world_sizes_of

    options = scaling.ScaleOptions(
        world_sizes=world_sizes_of(world), steps=steps, rounds=rounds, is_weak=weak, picture=picture, json=json
    )
    scaling.scale(recipe, options, console=console)
