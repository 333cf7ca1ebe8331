"""`lockstep profile`."""

from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli._common import ConfigFile, Overrides, TrustCode, console, load_trusted


def command(
    path: ConfigFile,
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option(help="Steps that are measured by phase.", min=1)] = 20,
    traced: Annotated[int, typer.Option(help="Steps under the PyTorch profiler.", min=1)] = 3,
    to: Annotated[Path, typer.Option(help="Folder for the traces and profile.json.")] = Path("profile"),
    trust_code: TrustCode = False,
) -> None:
    """Measure where the time of a step goes, on the processes that a training would use, and say what to change.

    The steps are those of a run that leaves nothing behind; the folder gets a trace of each rank.
    """
    recipe = load_trusted(path, overrides, trusts=trust_code)
    from lockstep.tools.profile import profiling

    profiling.profile(recipe, steps=steps, traced=traced, to=to, console=console)
