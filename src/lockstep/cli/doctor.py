"""`lockstep doctor`."""

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.cli._common import NodeRank, Overrides, Rendezvous, TrustCode, console, load_trusted

if TYPE_CHECKING:
    from lockstep.recipe.recipe import Recipe


def command(
    path: Annotated[
        Path | None, typer.Argument(help="A YAML file; without it, only the machine.", metavar="[CONFIG]")
    ] = None,
    overrides: Overrides = None,
    quick: Annotated[bool, typer.Option("--quick", help="Start no processes.")] = False,
    json: Annotated[Path | None, typer.Option("--json", help="Write the findings to this file.")] = None,
    rendezvous: Rendezvous = None,
    node_rank: NodeRank = None,
    trust_code: TrustCode = False,
) -> int:
    """Look for what would make a run fail or slow, before it starts: config, data, disk, machines, network.

    Each finding has a code, a cause and a repair: docs/troubleshooting.md lists all. The exit code is 1 where a run
    would fail. For several machines: give the same command on each, with --rendezvous and --node-rank, as for `train`;
    with launch.kind=slurm or ray one command starts it on all.
    """
    from lockstep.launch.launch_run import node_address
    from lockstep.recipe import recipe as recipes
    from lockstep.tools.trials import check_writable

    if json is not None:
        check_writable("--json", json)
    recipe = recipes.starter("digits") if path is None else load_trusted(path, overrides, trusts=trust_code)
    node = node_address(recipe, rendezvous, node_rank)
    if node is None and not quick and (elsewhere := _scheduler_command(recipe)):
        console.print("waiting for the scheduler to run it on the machines of a run ...", style="dim")
        return subprocess.run(elsewhere, check=False).returncode
    from lockstep.tools.doctor import examination
    from lockstep.tools.doctor.doctor_context import DoctorContext

    context = DoctorContext(recipe=recipe, config=path, node=node)
    found = examination.examine(context, console, is_quick=quick)
    if context.is_leading or found:
        examination.show(found, context, console)
    if json is not None and context.is_leading:
        examination.write(found, context, json)
    return int(any(finding.severity == "error" for finding in found))


def _scheduler_command(recipe: "Recipe") -> tuple[str, ...]:
    """Return the command that starts this one on each machine, where the launcher can do that."""
    from lockstep.base import plugins

    on_nodes = plugins.hook("launch.launchers", recipe.launch.kind, "on_nodes")
    return tuple(on_nodes(recipe.launch, recipe.run.threads, sys.argv[1:])) if on_nodes else ()
