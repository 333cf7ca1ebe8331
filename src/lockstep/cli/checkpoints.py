"""`lockstep checkpoints`."""

from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli._common import console, honest


@honest
def command(
    run: Annotated[
        Path, typer.Argument(help="A run's folder, its checkpoints folder, or one of these.", metavar="RUN")
    ],
    verify: Annotated[bool, typer.Option("--verify", help="Read every byte that was saved.")] = False,
) -> int:
    """List a run's checkpoints, newest first: how old and how good each is, what it is kept for, whether it is whole.

    Without --verify only the manifests and the sizes of the files are checked, which takes no time.

    Ends with 0, or with 1 when one of those that are listed is damaged.
    """
    from lockstep.checkpoint import inventory, listing
    from lockstep.launch.run_folder import locate

    recipe, root, checkpoint = locate(run, None)
    with console.status("") as status:
        found = inventory.take_inventory(
            root,
            recipe.checkpoint,
            every_byte=verify,
            only=checkpoint,
            on_check=lambda folder: status.update(f"reading {folder.name}"),
        )
    if not found.entries:
        gone = f"{run} is no longer there: the run has deleted it"
        console.print(gone if checkpoint else f"{run} has no checkpoint yet", soft_wrap=True)
    listing.show(found, recipe.checkpoint, console)
    return 1 if any(entry.problem for entry in found.entries) else 0
