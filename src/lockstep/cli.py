"""What you type."""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from lockstep import assembly, cli_trained, config, files, jobs, launching, output, plugins
from lockstep import recipe as recipes
from lockstep.checkpoint import inventory, listing
from lockstep.compare import verdict
from lockstep.errors import ConfigError, printable
from lockstep.estimate import estimation
from lockstep.estimate.machine import Wish
from lockstep.events import Bus
from lockstep.prove import proof
from lockstep.runs import place_of
from lockstep.terminal import ConfigFile, Overrides, RunArgument, TrustCode, console, honest, versions
from lockstep.tune import tuning

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Distributed PyTorch training; the weights are a function of the config and the data, not of the cluster.",
)


def _show_versions(asked: bool) -> None:
    if asked:
        typer.echo(versions())
        raise typer.Exit


@app.callback()
def everywhere(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_versions, is_eager=True, help="Show versions, and end."),
    ] = False,
) -> None:
    """Nothing is done before a command."""


@app.command()
@honest
def train(
    path: ConfigFile,
    overrides: Overrides = None,
    resume: Annotated[str, typer.Option(help="auto, never, or a checkpoint's folder.")] = "auto",
    allow_drift: Annotated[bool, typer.Option(help="Resume although the numeric recipe has changed.")] = False,
    dry_run: Annotated[bool, typer.Option(help="Show what would be run, and run nothing.")] = False,
    rendezvous: Annotated[
        str | None,
        typer.Option(help="Where this and other machines meet: node 0's name or address.", metavar="HOST:PORT"),
    ] = None,
    node_rank: Annotated[
        int | None, typer.Option(help="Which of the machines this is; default: 0 where HOST is this one.", min=0)
    ] = None,
    trust_code: TrustCode = False,
) -> int:
    """Train as the config says, and resume where an earlier run of the same name stopped.

    On several machines: set launch.nodes, and give the same command on each, with --rendezvous and --node-rank.
    """
    recipe = recipes.load(path, overrides or [])
    passed_on = recipes.passed_on(recipe) if dry_run else recipes.settle(recipe, path, trusts=trust_code)
    arguments = ("--resume", resume, *(["--allow-drift"] if allow_drift else []), *passed_on)
    place = launching.place_of(rendezvous, node_rank)
    if place is not None and not dry_run:
        return launching.take_part(recipe, path, arguments, place=place)
    recipe = recipes.named(recipe, path)
    if dry_run:
        return launching.show(recipe, arguments, console, place=place)
    return launching.launch(recipe, arguments)


def _settled(path: Path, overrides: list[str] | None, *, trusts: bool) -> recipes.Recipe:
    """A config whose code may be executed."""
    recipe = recipes.load(path, overrides or [])
    recipes.settle(recipe, path, trusts=trusts)
    return recipe


for command in cli_trained.COMMANDS:
    app.command()(command)


@app.command()
@honest
def status(run: RunArgument) -> None:
    """Tell where a run is: its job and the time that is left to it, its step, its newest checkpoint."""
    for line in jobs.status(run.absolute()):
        console.print(line, soft_wrap=True)


@app.command()
@honest
def logs(
    run: RunArgument,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="And go on as it is written, until Ctrl-C.")] = False,
    rank: Annotated[int | None, typer.Option(help="That of one process.", min=0)] = None,
) -> None:
    """Show what a run has written."""
    for line in jobs.lines(run.absolute(), rank, follows=follow):
        typer.echo(printable(line.replace("\r", "\n")), nl=False)
        if not output.is_read():
            return


@app.command()
@honest
def cancel(run: RunArgument) -> None:
    """Have a run save after its step and end; `lockstep train` goes on with it."""
    console.print(jobs.cancel(run.absolute()), soft_wrap=True)


@app.command()
@honest
def checkpoints(
    run: Annotated[
        Path, typer.Argument(help="A run's folder, its checkpoints folder, or one of these.", metavar="RUN")
    ],
    verify: Annotated[bool, typer.Option("--verify", help="Read every byte that was saved.")] = False,
) -> int:
    """List a run's checkpoints, newest first: how old and how good each is, what it is kept for, whether it is whole.

    Without --verify only the manifests and the sizes of the files are checked, which takes no time.

    Ends with 0, or with 1 when one of those that are listed is damaged.
    """
    recipe, root, checkpoint = place_of(run, None)
    with console.status("") as status:
        found = inventory.look(
            root,
            recipe.checkpoint,
            every_byte=verify,
            only=checkpoint,
            reading=lambda folder: status.update(f"reading {folder.name}"),
        )
    if not found.entries:
        gone = f"{run} is no longer there: the run has deleted it"
        console.print(gone if checkpoint else f"{run} has no checkpoint yet", soft_wrap=True)
    listing.show(found, recipe.checkpoint, console)
    return 1 if any(entry.problem for entry in found.entries) else 0


@app.command()
@honest
def compare(
    run_a: Annotated[Path, typer.Argument(help="A run's folder, or a checkpoint's.", metavar="RUN_A")],
    run_b: Annotated[Path, typer.Argument(help="Another one.", metavar="RUN_B")],
) -> int:
    """Say whether two runs, or two checkpoints, are equal bit for bit; if not, where they part.

    Compared are loss, gradient norm, learning rate and the chain over them, step by step as far as both have logged
    them, the digests of the weights, the values of evaluations, whether and when a run was stopped early, and all
    tensors of a checkpoint that both still have. Of two runs that are not equally long the common part counts: one that
    is the beginning of the other is "equal so far".

    Ends with 0 when they are equal, 1 when they differ, 2 when they cannot be compared.
    """
    found = verdict.compare(run_a, run_b)
    for line in found.lines:
        console.print(line, soft_wrap=True)
    return 0 if found.is_equal else 1


@app.command()
@honest
def data(path: ConfigFile, overrides: Overrides = None, trust_code: TrustCode = False) -> None:
    """Fetch and prepare data, tokens and the pretrained model, without training; goes on where it was stopped."""
    recipe = _settled(path, overrides, trusts=trust_code)
    bus = Bus()
    bus.subscribe(plugins.find("observe.sinks", "progress").terminal())
    try:
        found = assembly.prepare(recipe, bus.publish)
        model = assembly.build_model(recipe, found.train.spec)
    finally:
        bus.close()
    parameters = sum(p.numel() for p in model.parameters())
    console.print(
        f"ready: {len(found.train):,} training and {len(found.test):,} test samples, "
        f"{len(found.train.spec.labels)} labels; model {recipe.model.kind} with {parameters:,} parameters"
    )


@app.command()
@honest
def prove(
    path: ConfigFile,
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option(help="Optimizer steps of each run.", min=4)] = 8,
    only: Annotated[list[str] | None, typer.Option(help=f"Parts: {', '.join(proof.PARTS)}; may be repeated.")] = None,
    keep: Annotated[Path | None, typer.Option(help="Leave the runs in this new folder, to look into.")] = None,
    trust_code: TrustCode = False,
) -> int:
    """Show, on this config and machine, that the weights do not depend on the number of processes."""
    recipe = _settled(path, overrides, trusts=trust_code)
    return proof.prove(recipe, steps=steps, parts=only or proof.PARTS, keep=keep, console=console)


@app.command()
@honest
def tune(
    path: ConfigFile,
    overrides: Overrides = None,
    micro_batch: Annotated[bool, typer.Option("--micro-batch", help="Find the largest that fits in memory.")] = False,
    lr: Annotated[bool, typer.Option("--lr", help="Find a learning rate by a range test, and draw the curve.")] = False,
    memory: Annotated[
        float | None,
        typer.Option(help="GB (of 10^9 bytes) for each process; default: its part of what is free.", metavar="GB"),
    ] = None,
    start: Annotated[float, typer.Option("--from", help="First learning rate of the sweep.")] = 1e-7,
    stop: Annotated[float, typer.Option("--to", help="Last one.")] = 10.0,
    steps: Annotated[int, typer.Option(help="Steps of the sweep.")] = 100,
    out: Annotated[Path | None, typer.Option(help="SVG file of the curve; default: CONFIG-lr.svg, here.")] = None,
    trust_code: TrustCode = False,
) -> int:
    """Find the largest micro-batch that fits, or a good learning rate, to be put into the config.

    Nothing is trained for good and nothing is changed: a run uses what its config says.

    Ends with 0, or with 1 when no learning rate can be suggested.
    """
    wishes = tuning.Wishes(
        micro_batch=micro_batch,
        rate=lr,
        memory_gb=memory,
        start=start,
        stop=stop,
        steps=steps,
        picture=out or Path(f"{path.stem}-lr.svg"),
    )
    return tuning.tune(_settled(path, overrides, trusts=trust_code), wishes, console=console)


@app.command()
@honest
def estimate(
    path: ConfigFile,
    overrides: Overrides = None,
    world: Annotated[str, typer.Option(help="Numbers of processes.")] = "1,2,4,8",
    memory: Annotated[
        float | None, typer.Option(help="GB of a device; default: this machine's share, the GPU's.")
    ] = None,
    bandwidth: Annotated[float | None, typer.Option(help="GB/s of the network; default: measured on loopback.")] = None,
    per_machine: Annotated[int | None, typer.Option(help="Processes of a machine; default: all on this one.")] = None,
    json: Annotated[Path | None, typer.Option("--json", help="Write all figures to this file as well.")] = None,
    trust_code: TrustCode = False,
) -> None:
    """Tell memory, traffic and time of each strategy before the run, from a few steps measured on this machine."""
    wish = Wish(
        worlds=estimation.worlds_of(world),
        per_machine=per_machine,
        memory_bytes=None if memory is None else round(memory * 1e9),
        bandwidth=None if bandwidth is None else bandwidth * 1e9,
    )
    estimation.estimate(_settled(path, overrides, trusts=trust_code), wish, console=console, to=json)


@app.command()
@honest
def init(
    task: Annotated[str, typer.Argument(help="What to train; one of --list.")] = "digits",
    to: Annotated[Path | None, typer.Option(help="File to write; default: TASK.yaml.")] = None,
    lists: Annotated[bool, typer.Option("--list", help="Show what there is to start from, and write nothing.")] = False,
) -> None:
    """Write a commented config to start from; for `user` also a Python file with data and a model, beside it."""
    if lists:
        _show_tasks()
        return
    target = to or Path(f"{task}.yaml")
    code = target.with_suffix(".py")
    template = recipes.template(task)
    text = config.explain(recipes.starter(task, code))
    written = {target: f"# {_try(target)}\n\n{text}"}
    if template is not None:
        if code == target:
            raise ConfigError(f"{target} would be the Python file as well: name a YAML file with --to")
        written = {code: template.read_text(encoding="utf-8"), **written}
    _refuse_to_overwrite(target.parent, written)
    for file, content in written.items():
        try:
            files.write(file, content)
        except OSError as error:
            raise ConfigError(f"cannot write {file}: {error.strerror}; name another file with --to") from None
    names = " and ".join(str(file) for file in reversed(written))
    console.print(f"wrote {names}; next: {_try(target)}", soft_wrap=True)


def _refuse_to_overwrite(folder: Path, wanted: Iterable[Path]) -> None:
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}: make it, or name another file with --to")
    for file in wanted:
        if file.exists() or file.is_symlink():
            raise ConfigError(f"{file} exists and is not overwritten; name another file with --to")


def _show_tasks() -> None:
    table = Table("task", "what it is", "model")
    for name in plugins.names("data.sources"):
        section = recipes.starter(name)
        table.add_row(name, (type(section.data).__doc__ or "").splitlines()[0], section.model.kind)
    console.print(table)


def _try(target: Path) -> str:
    return f"lockstep train {target}"


@app.command("plugins")
@honest
def list_plugins() -> None:
    """List models, sources, strategies and launchers."""
    for title, family in plugins.FAMILIES.items():
        table = Table("name", "what it is", title=title, title_justify="left", title_style="bold")
        for name in plugins.names(family):
            described = plugins.find(family, name).Config.__doc__ or ""
            table.add_row(name, described.splitlines()[0])
        console.print(table)


def main() -> None:
    """The command `lockstep`."""
    sys.exit(app())


if __name__ == "__main__":
    main()
