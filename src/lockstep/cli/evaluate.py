"""`lockstep evaluate`."""

from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli._common import Base, Overrides, Trained, TrustCode, console


def command(
    target: Trained,
    overrides: Overrides = None,
    split: Annotated[str, typer.Option(help="test or train.")] = "test",
    file: Annotated[
        Path | None, typer.Option(help="Measure on this table, or folder of images or sounds, in place of a split.")
    ] = None,
    worst: Annotated[int, typer.Option(help="How many of the worst samples to show.", min=0)] = 20,
    calibrate: Annotated[bool, typer.Option("--calibrate", help="Fit a temperature, and store it.")] = False,
    to: Annotated[Path | None, typer.Option(help="Folder for the results; default: the run's or export's.")] = None,
    base: Base = None,
    trust_code: TrustCode = False,
) -> int:
    """Measure a run's best or newest checkpoint, or an export: every sample once, on any number of processes.

    Writes evaluation.json and evaluation.html: metrics, also per class, the confusion matrix, the calibration of
    confidences, and the worst samples.
    """
    from lockstep.protocol import environment

    environment.set_threads(1)  # as most recipes have it, which are yet to be read
    from lockstep.inference.evaluate import evaluate_model

    options = evaluate_model.EvaluateOptions(
        split=split, file=file, worst=worst, calibrates=calibrate, to=to, base=base, trusts=trust_code
    )
    return evaluate_model.evaluate(target, overrides or [], options, console=console)
