"""`lockstep prove`."""

from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli._common import ConfigFile, Overrides, TrustCode, console, load_trusted


def command(
    path: ConfigFile,
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option(help="Optimizer steps of each run.", min=4)] = 8,
    only: Annotated[
        list[str] | None, typer.Option(help="Parts: repeat, worlds, strategies, kill, evaluate; may be repeated.")
    ] = None,
    keep: Annotated[Path | None, typer.Option(help="Keep the runs in this new folder.")] = None,
    trust_code: TrustCode = False,
) -> int:
    """Show, on this config and machine, that the weights do not depend on the number of processes."""
    recipe = load_trusted(path, overrides, trusts=trust_code)
    from lockstep.tools.prove import proving

    return proving.prove(recipe, steps=steps, parts=only or proving.PARTS, keep=keep, console=console)
