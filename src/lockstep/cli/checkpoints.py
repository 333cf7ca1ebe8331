"""`lockstep checkpoints`."""

from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli._common import console


def command(
    run: Annotated[
        Path, typer.Argument(help="A run's folder, its checkpoints folder, or one of these.", metavar="RUN")
    ],
    verify: Annotated[bool, typer.Option("--verify", help="Read and check every byte.")] = False,
) -> int:
    """List a run's checkpoints, newest first: age, metrics, why each is kept, whether it is intact.

    Without --verify only manifests and file sizes are checked, which is fast.

    Exits with 1 if a listed checkpoint is damaged, else with 0.
    """
    from lockstep.checkpoint import inventory
    from lockstep.recipe.run_paths import checkpoints_of

    settings, root, checkpoint = checkpoints_of(run)
    with console.status("") as status:
        listed = inventory.take_inventory(
            root,
            settings,
            every_byte=verify,
            only=checkpoint,
            on_check=lambda folder: status.update(f"reading {folder.name}"),
        )
    if not listed.entries:
        gone = f"{run} is no longer there: the run has deleted it"
        console.print(gone if checkpoint else f"{run} has no checkpoint yet", soft_wrap=True)
    inventory.show(listed, settings, console)
    return 1 if any(entry.problem for entry in listed.entries) else 0
