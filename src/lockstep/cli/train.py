"""`lockstep train`."""

from typing import Annotated

import typer

from lockstep.cli._common import ConfigFile, NodeRank, Overrides, Rendezvous, TrustCode, console, show_log


def command(
    path: ConfigFile,
    overrides: Overrides = None,
    resume: Annotated[str, typer.Option(help="auto, never, or a checkpoint's folder.")] = "auto",
    allow_drift: Annotated[bool, typer.Option(help="Resume although the numeric recipe has changed.")] = False,
    dry_run: Annotated[bool, typer.Option(help="Show what would be run, and run nothing.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="With --dry-run: also all settings.")] = False,
    follow: Annotated[bool, typer.Option("--follow", help="Show the log of a submitted job, until its end.")] = False,
    rendezvous: Rendezvous = None,
    node_rank: NodeRank = None,
    trust_code: TrustCode = False,
    known_code: Annotated[str, typer.Option(hidden=True)] = "",
) -> int:
    """Train as the config says, and resume where an earlier run of the same name stopped.

    Under torchrun, each process is one of the run's. On several machines: set launch.nodes, and give the same command
    on each, with --rendezvous and --node-rank.
    """
    from lockstep.protocol import environment
    from lockstep.recipe import recipe as recipes
    from lockstep.recipe import recipe_trust

    how = ("--resume", resume, *(["--allow-drift"] if allow_drift else []))
    if environment.is_under_torchrun() and not dry_run:
        from lockstep.run import worker

        worker.run([str(path), *(overrides or []), *how, *(["--trust-code"] if trust_code else [])])
    recipe = recipes.load(path, overrides or [])
    trust = recipe_trust.authorize(recipe, path, trusts=trust_code, asks=not dry_run, known=known_code)
    from lockstep.launch import recovery

    environment.set_threads(recipe.run.threads)
    recovery.quieten_torch(recipe)
    from lockstep.launch import launch_run

    arguments = (*how, *trust)
    node = launch_run.node_address(recipe, rendezvous, node_rank)
    if node is not None and not dry_run:
        return launch_run.launch_node(recipe, path, arguments, node=node)
    recipe = recipes.begun(recipe, path)
    if dry_run:
        return launch_run.show_plan(recipe, arguments, console, node=node, shows_recipe=verbose)
    code = launch_run.launch(recipe, arguments)
    if code or not (follow and recipe.launch.SUBMITS):
        return code
    from lockstep.launch import run_control

    show_log(run_control.log_lines(recipe.folder, None, follow=True, has_ended=run_control.end_of(recipe.folder)))
    return 0 if run_control.has_finished(recipe.folder) else 1
