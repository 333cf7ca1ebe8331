"""`lockstep compare`."""

from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli._common import console, recorded


def command(
    run_a: Annotated[
        Path, typer.Argument(help="A run's folder, or a checkpoint's.", metavar="RUN_A", callback=recorded)
    ],
    run_b: Annotated[Path, typer.Argument(help="Another one.", metavar="RUN_B", callback=recorded)],
) -> int:
    """Say whether two runs, or two checkpoints, are equal bit for bit; if not, where they diverge.

    Compares loss, gradient norm, learning rate and the chain over them at every step that both have logged, the digests
    of the weights, evaluations, early stopping, and all tensors of a checkpoint that both still have. If one run is
    longer, the common steps count: "equal so far".

    Exits with 0 if they are equal, 1 if they differ, 2 if they cannot be compared.
    """
    from lockstep.tools.compare import comparison

    result = comparison.compare(run_a, run_b)
    for line in result.lines:
        console.print(line, soft_wrap=True)
    return 0 if result.is_equal else 1
