"""`lockstep bisect`."""

from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli._common import TrustCode, console, recorded, reports_errors
from lockstep.protocol import environment


@reports_errors
def command(
    run_a: Annotated[Path, typer.Argument(help="A run's folder.", metavar="A", callback=recorded)],
    run_b: Annotated[Path, typer.Argument(help="Another one's.", metavar="B", callback=recorded)],
    trust_code: TrustCode = False,
) -> int:
    """Find the first step at which two runs differ, and in it the first module, gradient or sum.

    Reads the chains of both logs, runs both again from their newest checkpoints before that step, on one process, and
    compares hashes. Exits with 0 if the runs are equal, 1 if they differ, 2 if they cannot be compared.
    """
    environment.set_threads(1)
    from lockstep.tools.replay import bisecting
    from lockstep.tools.replay.replaying import LoggedRun

    return bisecting.bisect([LoggedRun.at(run, trusts=trust_code) for run in (run_a, run_b)], console)
