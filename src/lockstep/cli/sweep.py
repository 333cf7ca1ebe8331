"""`lockstep sweep`."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from lockstep.cli._common import TrustCode, console, setting_names


def command(
    path: Annotated[
        Path, typer.Argument(help="A YAML file; or the folder of a sweep, to go on with it.", metavar="CONFIG")
    ],
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            help="Values to try: optim.lr=1e-4,3e-4, or a range to search: optim.lr=1e-5..1e-2 (by its logarithm where "
            "the ends are above 0 and a factor of more than 10 apart). With one value: a setting of all trials.",
            metavar="section.key=V1,V2",
            autocompletion=setting_names,
        ),
    ] = None,
    search: Annotated[
        Literal["grid", "random", "optuna"] | None,
        typer.Option(help="grid (the default): every combination; random; optuna: what looks best after the others."),
    ] = None,
    trials: Annotated[
        int | None, typer.Option(help="Number of trials of random and optuna; default: 20.", min=1)
    ] = None,
    metric: Annotated[
        str | None, typer.Option(help="What to compare by; default: checkpoint.best, train.stop_metric, or loss.")
    ] = None,
    prune: Annotated[
        Literal["median", "none"] | None,
        typer.Option(
            help="median: end a trial at an evaluation worse than the median of earlier trials there; "
            "default: none, with optuna median."
        ),
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(help="With a scheduler: number of jobs at a time; default: 8.", min=1)
    ] = None,
    name: Annotated[str | None, typer.Option(help="Of the sweep's folder; default: CONFIG-sweep.")] = None,
    trust_code: TrustCode = False,
) -> int:
    """Train once for each combination of settings, compare, and say which is the best.

    Each trial is a run in the sweep's folder, runs/NAME/trial-001: one after the other on this machine or, with
    launch.kind=slurm, ray or kubernetes, some at a time, each as its own job. The same command again goes on where an
    earlier one was interrupted.
    """
    from lockstep.tools.sweep import sweep_plan

    options = sweep_plan.SweepOptions(
        search=search, trials=trials, metric=metric, prune=prune, name=name, jobs=jobs, trusts_code=trust_code
    )
    plan = sweep_plan.planned(path, settings or [], options)
    from lockstep.protocol import environment

    environment.set_threads(plan.base.run.threads)
    from lockstep.tools.sweep import sweeping

    return sweeping.run(plan, console)
