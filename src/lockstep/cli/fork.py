"""`lockstep fork`."""

from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli._common import Overrides, RunArgument, TrustCode, console


def command(
    run: RunArgument,
    overrides: Overrides = None,
    at: Annotated[int | None, typer.Option(help="Go on after this step; default: the newest.", min=1)] = None,
    without: Annotated[
        Path | None, typer.Option(help="Leave out the samples that this file names, as data.exclude does.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Of the new run.")] = None,
    from_start: Annotated[bool, typer.Option("--from-start", help="Train anew, not from a checkpoint.")] = False,
    trust_code: TrustCode = False,
) -> int:
    """Train a run on from one of its checkpoints with other settings, as a new run.

    --without alone goes on before the first step that had one of these samples: the weights are bit for bit those of a
    training that never saw them, and certificate.json says why.
    """
    from lockstep.tools import fork

    settings = [*(overrides or []), *([f"run.name={name}"] if name else [])]
    recipe, trust, what = fork.planned(run, settings, at=at, without=without, from_start=from_start, trusts=trust_code)
    from lockstep.launch import launch_run, recovery
    from lockstep.protocol import environment

    console.print(what, soft_wrap=True)
    environment.set_threads(recipe.run.threads)
    recovery.quieten_torch(recipe)
    return launch_run.launch(recipe, ("--resume", "auto", *trust))
