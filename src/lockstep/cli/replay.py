"""`lockstep replay`."""

from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli._common import Overrides, TrustCode, console
from lockstep.protocol import environment


def command(
    run: Annotated[Path, typer.Argument(help="A run's folder, or a bundle that --save wrote.", metavar="RUN|FILE")],
    overrides: Overrides = None,
    step: Annotated[int | None, typer.Option(help="Number of the step to open, as in the log.", min=1)] = None,
    until: Annotated[int | None, typer.Option(help="Open all steps up to this one.", min=1)] = None,
    shard: Annotated[int | None, typer.Option(help="Open only this shard of the step.", min=0)] = None,
    processes: Annotated[int, typer.Option(help="Processes that run the steps before it again.", min=1)] = 1,
    parallel: Annotated[str | None, typer.Option(help="Strategy of these processes; default: the run's.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for replay-N.html and replay-N.json.")] = Path(),
    save: Annotated[Path | None, typer.Option(help="Write a bundle, NAME.replay, that opens without data.")] = None,
    pdb: Annotated[bool, typer.Option("--pdb", help="Stop in the forward pass, in Python's debugger.")] = False,
    allow_drift: Annotated[bool, typer.Option("--allow-drift", help="Go on although settings have changed.")] = False,
    trust_code: TrustCode = False,
) -> int:
    """Run a step of a run again, from the newest checkpoint before it, and open it: samples, gradients, modules.

    Compares the chain of the log on the way. The run is not changed; another number of processes, another strategy or
    another machine may run it again.
    """
    from lockstep.base.errors import ConfigError

    if not run.is_file() and step is None:
        raise ConfigError("which step? Give --step N, the number of a step as in the log")
    from lockstep.recipe import run_paths

    environment.set_threads(1 if run.is_file() else run_paths.locate(run, overrides)[0].run.threads)
    from lockstep.run import worker
    from lockstep.tools.replay import replaying

    numbers = {"first": step or 1, "last": max(until or 1, step or 1), "shard": shard, "processes": processes}
    request = replaying.ReplayRequest(
        **numbers, parallel=parallel, save=save and save.absolute(), debugs=pdb, allow_drift=allow_drift
    )
    here = worker.main if pdb else None
    if run.is_file():
        return replaying.open_bundle(
            run, request, out, overrides=overrides or [], trusts=trust_code, here=here, console=console
        )
    found = replaying.LoggedRun.at(run, overrides or [], trusts=trust_code)
    return replaying.replay(found, request, out, here=here, console=console)
