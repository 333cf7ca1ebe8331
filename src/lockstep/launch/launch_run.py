"""From a recipe to running processes: on this machine, as one node of several, or through a scheduler."""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout
from rich.console import Console

from lockstep.base import config, plugins, storage
from lockstep.base.contracts import Launcher, Plan, Request
from lockstep.base.errors import ConfigError, Interrupted, LaunchError, PeerLost
from lockstep.launch import run_folder
from lockstep.launch.elastic.membership import Membership
from lockstep.launch.elastic.node import Node, plan_of
from lockstep.launch.elastic.rendezvous import Endpoint
from lockstep.launch.launch_config import LaunchSection
from lockstep.run import recipe as recipes
from lockstep.run.recipe import Recipe

JOB = "job.json"
"""In the run's folder: which launcher trains it, and what identifies the job there."""


@dataclass(frozen=True, kw_only=True)
class NodePlace:
    """This machine as one of several that train a run together."""

    endpoint: Endpoint
    node_rank: int | None
    """None: node 0 is the machine that the endpoint points to."""


def node_place(rendezvous: str | None, node_rank: int | None) -> NodePlace | None:
    """Of what was typed; raises LaunchError."""
    if rendezvous is None:
        if node_rank is not None:
            raise LaunchError("--node-rank needs --rendezvous HOST:PORT: where node 0 is, such as node1:29400")
        return None
    return NodePlace(endpoint=Endpoint.parse(rendezvous), node_rank=node_rank)


def launcher_of(recipe: Recipe) -> Launcher:
    """The one that the recipe names."""
    found: Launcher = plugins.implementation("launch.launchers", recipe.launch.kind).build(
        recipe.launch, threads=recipe.run.threads, shards=recipe.train.shards
    )
    return found


def request_for(recipe: Recipe, arguments: tuple[str, ...], name: str = "launch") -> Request:
    """What a launcher needs to know; `name` keeps what is started beside a training apart from it."""
    written = recipe.folder / f"{name}.yaml"  # recipe.yaml is the worker's, once it knows that the run can go on
    return Request(recipe=written, text=config.dump(recipe), arguments=arguments)


def on_this_machine(recipe: Recipe, kind: str = "local") -> Recipe:
    """The same, to be started once on this machine, whatever it is that trains it."""
    known = {name: getattr(recipe.launch, name) for name in LaunchSection.model_fields}
    local = plugins.find("launch.launchers", kind).Config(**{**known, "kind": kind, "nodes": 1, "max_restarts": 0})
    return recipe.model_copy(update={"launch": local})


def show(recipe: Recipe, arguments: tuple[str, ...], console: Console, *, place: NodePlace | None) -> int:
    """Tell what would be run, and run nothing. Raises LaunchError where it could not be."""
    request = request_for(recipe, arguments)
    plan = _plan(recipe, request, place)
    for variable, value in plan.environment.items():
        console.print(f"{variable}={value}", soft_wrap=True)
    times = f"{plan.processes} x " if not plan.files else ""
    console.print(f"{times}{' '.join(plan.argv)}", soft_wrap=True)
    for file, text in (plan.files | {request.recipe: request.text}).items():
        console.print(f"\n# {file}\n{text}", soft_wrap=True)
    return 0


def launch(recipe: Recipe, arguments: tuple[str, ...], *, name: str = "launch") -> int:
    """Start the processes of a run, or hand it to a scheduler -> exit code. Raises UserError."""
    request, launcher = request_for(recipe, arguments, name), launcher_of(recipe)
    is_training = name == "launch"
    plan = written_plan(recipe, request, launcher, is_training=is_training)
    logs = request.folder / "logs" / ("" if is_training else name)
    if not is_training:
        return launcher.run(plan, logs)
    code = _resumable(recipe, lambda: launcher.run(plan, logs))
    _note(recipe, launcher)
    return code


def written_plan(recipe: Recipe, request: Request, launcher: Launcher, *, is_training: bool = True) -> Plan:
    """Write what is to be launched, and by whom, into the run's folder -> what to run. Raises UserError."""
    plan = launcher.plan(request)
    _write(recipe, request, plan, training=launcher if is_training else None)
    return plan


def take_part(recipe: Recipe, path: Path, arguments: tuple[str, ...], *, place: NodePlace) -> int:
    """Train a run together with other machines, under the name that all agree on -> exit code.

    Raises UserError, PeerLost.
    """
    with Membership(place.endpoint, place.node_rank, recipe.launch) as meeting:
        named = recipes.with_run_name(recipe, path)
        assert named.run.name is not None
        run = named.run.model_copy(update={"name": meeting.agreed(named.run.name)})
        recipe = named.model_copy(update={"run": run})
        request = request_for(recipe, arguments)
        plan = _plan(recipe, request, place)
        if meeting.is_leader:
            _write(recipe, request, plan, training=launcher_of(recipe))
        meeting.settle(recipe.folder)
        node = Node(meeting, plan, recipe.folder / "logs")
        try:
            return _resumable(recipe, node.run)
        except PeerLost as error:
            if meeting.is_leader or recipe.launch.REJOINS:
                raise
            sys.stderr.write(f"{error}\n")
            return 0  # a scheduler that counts the worst code of all machines would undo what node 0 has saved


def _plan(recipe: Recipe, request: Request, place: NodePlace | None) -> Plan:
    if place is None:
        return launcher_of(recipe).plan(request)
    return plan_of(
        recipe.launch,
        request,
        threads=recipe.run.threads,
        shards=recipe.train.shards,
        endpoint=place.endpoint,
    )


def _resumable(recipe: Recipe, run: Callable[[], int]) -> int:
    """Run it; where it is interrupted, say how it goes on."""
    try:
        code = run()
    except Interrupted as error:
        sys.stderr.write(f"{error}\n")
        code = error.exit_code
    if code == Interrupted.exit_code and (recipe.folder / "recipe.yaml").exists():
        sys.stderr.write(f"go on with: lockstep train {recipe.folder / 'recipe.yaml'}\n")
    return code


def _write(recipe: Recipe, request: Request, plan: Plan, *, training: Launcher | None) -> None:
    """Write what is to be launched into the run's folder, and who trains it."""
    folder = request.folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if training is not None:
            run_folder.check_folder(folder)
            _refuse_second(folder)
            _note(recipe, training)
        for file, text in (plan.files | {request.recipe: request.text}).items():
            storage.write(file, text)
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error.strerror}; choose another folder with run.dir") from None


def _note(recipe: Recipe, launcher: Launcher) -> None:
    """What a scheduler calls the job is known once it has been handed in."""
    if note := launcher.note():
        storage.write(recipe.folder / JOB, json.dumps({"kind": recipe.launch.kind, **note}))


def _refuse_second(folder: Path) -> None:
    """A second training of a run must not even begin: it would write over the first one's logs. Raises LaunchError."""
    try:
        with FileLock(folder / ".lock", timeout=0):
            return
    except Timeout:
        raise LaunchError(f"{folder} is being trained by another process; choose another run.name") from None
