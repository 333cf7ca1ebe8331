"""`lockstep export`."""

from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli._common import Overrides, RunArgument, TrustCode, console, reports_errors


@reports_errors
def command(
    run: RunArgument,
    overrides: Overrides = None,
    to: Annotated[
        Path | None, typer.Option(help="Folder to write; default: export, or export-KIND, in the run's folder.")
    ] = None,
    space: Annotated[
        bool, typer.Option("--space", help="Write a Hugging Face Space with it; default folder: space.")
    ] = False,
    trust_code: TrustCode = False,
) -> None:
    """Write a run's model for others to load, read it back and compare: export.kind says in which form."""
    from lockstep.inference import trained_model

    trained_model.authorize(run, overrides, trusts=trust_code)
    with console.status("exporting"):
        facts, target = (trained_model.export_space if space else trained_model.export)(run, overrides, to)
    assert facts.agreement is not None
    console.print(f"exported step {facts.step} to {target}; {facts.agreement.summary(facts.dtype)}", soft_wrap=True)
