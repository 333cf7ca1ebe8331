"""`lockstep compare`."""

from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli._common import console, honest


@honest
def command(
    run_a: Annotated[Path, typer.Argument(help="A run's folder, or a checkpoint's.", metavar="RUN_A")],
    run_b: Annotated[Path, typer.Argument(help="Another one.", metavar="RUN_B")],
) -> int:
    """Say whether two runs, or two checkpoints, are equal bit for bit; if not, where they diverge.

    Compared are loss, gradient norm, learning rate and the chain over them, step by step as far as both have logged
    them, the digests of the weights, the values of evaluations, whether and when a run was stopped early, and all
    tensors of a checkpoint that both still have. Of two runs that are not equally long the common part counts: one that
    is the beginning of the other is "equal so far".

    Ends with 0 when they are equal, 1 when they differ, 2 when they cannot be compared.
    """
    from lockstep.tools.compare import comparison

    found = comparison.compare(run_a, run_b)
    for line in found.lines:
        console.print(line, soft_wrap=True)
    return 0 if found.is_equal else 1
