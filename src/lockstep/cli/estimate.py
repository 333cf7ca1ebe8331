"""`lockstep estimate`."""

from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli._common import ConfigFile, Overrides, TrustCode, console, load_trusted


def command(
    path: ConfigFile,
    overrides: Overrides = None,
    world: Annotated[str, typer.Option(help="Numbers of processes.")] = "1,2,4,8",
    memory: Annotated[
        float | None, typer.Option(help="GB of a device; default: this machine's share, the GPU's.", max=1e9)
    ] = None,
    bandwidth: Annotated[
        float | None, typer.Option(help="GB/s of the network; default: measured on loopback.", max=1e9)
    ] = None,
    per_machine: Annotated[int | None, typer.Option(help="Processes of a machine; default: all on this one.")] = None,
    json: Annotated[Path | None, typer.Option("--json", help="Write all figures to this file as well.")] = None,
    trust_code: TrustCode = False,
) -> None:
    """Estimate memory, traffic and time of each strategy before the run, from a few steps measured on this machine."""
    recipe = load_trusted(path, overrides, trusts=trust_code)
    from lockstep.tools.estimate import estimation
    from lockstep.tools.estimate.machine_measurement import EstimateOptions
    from lockstep.tools.trials import world_sizes_of

    options = EstimateOptions(
        world_sizes=world_sizes_of(world),
        per_machine=per_machine,
        memory_bytes=None if memory is None else round(memory * 1e9),
        bandwidth=None if bandwidth is None else bandwidth * 1e9,
    )
    estimation.estimate(recipe, options, console=console, to=json)
