"""`lockstep bisect`."""

from pathlib import Path
from typing import Annotated

import typer

from lockstep.base.errors import ConfigError
from lockstep.cli._common import TrustCode, console, recorded
from lockstep.protocol import environment


def command(
    run_a: Annotated[Path, typer.Argument(help="A run's folder; with --revisions, a config.", metavar="A|CONFIG")],
    run_b: Annotated[Path | None, typer.Argument(help="Another run's.", metavar="B")] = None,
    revisions: Annotated[
        tuple[str, str] | None,
        typer.Option(help="Train the config at two git revisions, each with its code.", metavar="OLD NEW"),
    ] = None,
    steps: Annotated[int, typer.Option(help="Number of steps to train with --revisions.", min=1)] = 20,
    trust_code: TrustCode = False,
) -> int:
    """Find the first step at which two runs differ, and in it the first module, gradient or sum.

    Reads the chains of both logs, runs both again from their newest checkpoints before that step, on one process, and
    compares hashes; or trains the first steps of one config at two git revisions. Exits with 0 if the runs are equal, 1
    if they differ, 2 if they cannot be compared.
    """
    if (run_b is None) == (revisions is None):
        raise ConfigError("name two runs, or a config and --revisions OLD NEW")
    if run_b is not None:
        recorded([run_a, run_b])
    environment.set_threads(1)
    if revisions is not None:
        from lockstep.tools.replay import revisions as git

        return git.compare(run_a, revisions, steps=steps, trusts=trust_code, console=console)
    from lockstep.tools.replay import bisecting
    from lockstep.tools.replay.replaying import LoggedRun

    runs = [LoggedRun.at(run, trusts=trust_code) for run in (run_a, run_b) if run is not None]
    return bisecting.bisect(runs, console)
