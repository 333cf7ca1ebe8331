"""Starts the processes of a recipe: on this machine, as one node of several, or through a scheduler."""

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from filelock import FileLock, Timeout
from rich.console import Console

from lockstep.base import config, devices, plugins, storage
from lockstep.base.contracts import Launcher, Plan, Request
from lockstep.base.errors import ConfigError, Interrupted, LaunchError, PeerLost
from lockstep.base.world import environment
from lockstep.launch.elastic import fork_server, leader_failover
from lockstep.launch.elastic.join_checks import Rejection
from lockstep.launch.elastic.membership import Membership
from lockstep.launch.elastic.node import Node, worker_plan
from lockstep.launch.launch_config import LaunchSection
from lockstep.launch.recovery import with_recovery
from lockstep.protocol.rendezvous import Endpoint, answers
from lockstep.recipe import recipe as recipes
from lockstep.recipe import run_paths
from lockstep.recipe.recipe import Recipe

REJOIN_SECONDS, ANSWER_SECONDS = 0.5, 1.0
"""Pause between two searches for a leader; time that it may take to answer."""
JOB = "job.json"
"""File in the run's folder with the kind of launcher, and its note on the job."""


@dataclass(frozen=True, kw_only=True)
class NodeAddress:
    """This machine as a node of a run on several."""

    endpoint: Endpoint
    node_rank: int | None
    """Rank of this node; None: it is node 0 if the endpoint points to this machine."""

    @property
    def is_leader(self) -> bool:
        return self.node_rank == 0 if self.node_rank is not None else self.endpoint.is_local()


def node_address(recipe: Recipe, rendezvous: str | None, node_rank: int | None) -> NodeAddress | None:
    """Parse the options of `lockstep train`; None without --rendezvous. Raises LaunchError."""
    nodes = recipe.launch.max_nodes
    joins = recipe.launch.recovers_live  # a machine that takes the place of a lost one has a number of its own
    if node_rank is not None and node_rank >= nodes and not joins:
        raise LaunchError(f"--node-rank {node_rank} is not below launch.nodes={nodes}: the ranks are 0 to {nodes - 1}")
    if rendezvous is None:
        if node_rank is not None:
            raise LaunchError("--node-rank needs --rendezvous HOST:PORT: where node 0 is, such as node1:29400")
        return None
    return NodeAddress(endpoint=Endpoint.parse(rendezvous), node_rank=node_rank)


def build_launcher(recipe: Recipe) -> Launcher:
    launcher: Launcher = plugins.implementation("launch.launchers", recipe.launch.kind).build(
        recipe.launch, threads=recipe.run.threads, shards=recipe.train.shards
    )
    return launcher


def build_request(recipe: Recipe, arguments: tuple[str, ...], name: str = "launch") -> Request:
    """Build the launcher's input; a `name` other than "launch" is for processes that do not train (an evaluation)."""
    file = recipe.folder / f"{name}.yaml"  # recipe.yaml is written by the worker, once the run is known to be resumable
    return Request(recipe=file, text=config.dump(recipe), arguments=arguments)


@contextmanager
def using_devices(recipe: Recipe) -> Iterator[None]:
    """Plan and start processes on the recipe's devices inside. Raises LaunchError for run.device=cuda without GPUs."""
    with environment(devices.variables(recipe.run.device, shares_gpus=recipe.launch.share_gpus)):
        if not recipe.launch.SUBMITS:
            devices.check(recipe.run.device)
        yield


def on_this_machine(recipe: Recipe, kind: str = "local") -> Recipe:
    """Return the recipe with a launcher for this machine without restarts, whatever its own launcher is."""
    settings = {name: getattr(recipe.launch, name) for name in LaunchSection.model_fields}
    local = plugins.find("launch.launchers", kind).Config(**{**settings, "kind": kind, "nodes": 1, "max_restarts": 0})
    return recipe.model_copy(update={"launch": local})


def warnings(recipe: Recipe, plan: Plan) -> list[str]:
    """Return warnings about a plan that can be started: the launcher's, and one for processes without work."""
    launch, shards, found = recipe.launch, recipe.train.shards, list(plan.warnings)
    here = launch.model_dump().get("gpus") or plan.processes if launch.processes == "auto" else launch.processes
    if (processes := here * launch.max_nodes) > shards and not recipe.parallel.SHARES_SHARDS:
        found.append(
            f"{processes - shards} of {processes} processes will be idle: a step has {shards} micro-batches "
            "(train.global_batch / train.micro_batch); start fewer processes, or lower train.micro_batch"
        )
    return [f"warning: {each}\n" for each in found]


def show_plan(
    recipe: Recipe, arguments: tuple[str, ...], console: Console, *, node: NodeAddress | None, shows_recipe: bool
) -> int:
    """Print what would be run (--dry-run). Raises LaunchError if it cannot be run."""
    request = build_request(recipe, arguments)
    with using_devices(recipe):
        plan = _plan(recipe, request, node)
    for variable, value in plan.environment.items():
        console.print(f"{variable}={value}", soft_wrap=True)
    times = f"{plan.processes} x " if not plan.files else ""
    console.print(f"{times}{' '.join(plan.argv)}", soft_wrap=True)
    hint = "(the config with all settings: --verbose prints it)"
    for file, text in (plan.files | {request.recipe: request.text if shows_recipe else hint}).items():
        console.print(f"\n# {file}\n{text}", soft_wrap=True)
    sys.stderr.writelines(warnings(recipe, plan))
    return 0


def launch(recipe: Recipe, arguments: tuple[str, ...], *, name: str = "launch") -> int:
    """Start the processes of a run, or submit it to a scheduler -> exit code. Raises UserError."""
    is_training = name == "launch"
    request = build_request(recipe, arguments, name)  # in which recovery=auto stays, for other machines
    with using_devices(recipe):
        recipe = with_recovery(recipe) if is_training else recipe
        launcher = build_launcher(recipe)
        plan = write_plan(recipe, request, launcher, is_training=is_training)
        logs = request.folder / "logs" / ("" if is_training else name)
        if recipe.launch.SUBMITS:
            sys.stderr.writelines(warnings(recipe, plan))
        if not is_training:
            return launcher.run(plan, logs)
        code = _with_resume_hint(recipe, lambda: launcher.run(plan, logs))
        if recipe.launch.SUBMITS:
            _write_note(recipe, launcher)
        return code


def write_plan(recipe: Recipe, request: Request, launcher: Launcher, *, is_training: bool = True) -> Plan:
    """Write recipe, plan files and the launcher's note into the run's folder -> the plan. Raises UserError."""
    plan = replace(
        launcher.plan(request),
        modules=worker_modules(recipe, request.arguments),
        state_copies=recipe.parallel.state_copies,
        process_multiple=recipe.parallel.process_multiple,
    )
    _write(recipe, request, plan, training=launcher if is_training else None)
    return plan


def worker_modules(recipe: Recipe, arguments: Sequence[str]) -> tuple[str, ...]:
    """List the modules that every worker with these arguments imports."""
    train = "train_live" if recipe.launch.recovers_live else "train"
    task = arguments[arguments.index("--task") + 1] if "--task" in arguments else train
    kinds = {"data.sources": recipe.data, "models": recipe.model, "parallel.strategies": recipe.parallel}
    plugin = (plugins.implementation_name(family, section.kind) for family, section in kinds.items())
    # Each would import it when it first saves; one or two may, since their first step comes half a second sooner.
    saves = () if recipe.launch.processes in (1, 2) else ("torch.distributed.checkpoint",)
    compiler = ("torch._dynamo.eval_frame",) if recipe.train.compile or recipe.train.recompute else ()
    return ("lockstep.run.worker", f"lockstep.run.tasks.{task}", *plugin, *compiler, *recipe.model.LIBRARIES, *saves)


def launch_node(
    recipe: Recipe, path: Path, arguments: tuple[str, ...], *, node: NodeAddress, name: str = "launch"
) -> int:
    """Start the processes of one node of several, under the run name that all agree on -> exit code.

    Raises UserError, PeerLost.
    """
    with (
        using_devices(recipe),
        fork_server.serving(worker_modules(recipe, arguments), recipe.launch, threads=recipe.run.threads) as server,
    ):
        named = recipes.begun(recipe, path)
        folder = named.folder
        """Folder of the run, unless node 0 gives it another name."""

        def take_part(*, again: bool = False) -> int:
            nonlocal folder
            other = leader_failover.other_leader(folder, recipe.launch, waits=node.is_leader and not again)
            if again and other is None and (node.is_leader or not answers(node.endpoint, seconds=ANSWER_SECONDS)):
                raise LaunchError("no leader of this run answers")
            endpoint, follows = other or node.endpoint, other is not None
            with Membership(endpoint, node.node_rank, recipe.launch, follows=follows) as membership:
                assert named.run.name is not None
                run = named.run.model_copy(update={"name": membership.agree_on_name(named.run.name)})
                agreed = named.model_copy(update={"run": run})
                folder = agreed.folder
                request = build_request(agreed, arguments, name)
                plan = replace(_plan(agreed, request, node), state_copies=agreed.parallel.state_copies)
                if membership.is_leader:
                    _write(agreed, request, plan, training=build_launcher(agreed) if name == "launch" else None)
                membership.join(agreed.folder)
                hook = plugins.hook("launch.launchers", recipe.launch.kind, "replace_node")
                replaced = partial(hook, folder) if hook else None
                start = Node(membership, plan, agreed.folder / "logs", fork_server=server, replace=replaced)
                return _with_resume_hint(agreed, start.run)

        try:
            return take_part()
        except PeerLost as error:
            if recipe.launch.recovers_live:
                return _rejoin(take_part, error, seconds=recipe.launch.join_timeout_seconds)
            if node.is_leader or recipe.launch.REJOINS:
                raise
            sys.stderr.write(f"{error}\n")
            return 0  # the scheduler takes the worst exit code of all nodes: node 0 decides whether the job is requeued


def _rejoin(take_part: Callable[..., int], loss: PeerLost, *, seconds: float) -> int:
    """Let a node that was cut off join again when it reaches the leader (live recovery). Raises PeerLost, and Rejection
    where its installation or its folder is not that of the others any more."""
    while True:
        sys.stderr.write(f"{loss}; its processes were ended, and it tries to join again for {seconds:.0f} s\n")
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                return take_part(again=True)
            except PeerLost as error:
                loss = error
                break
            except Rejection:
                raise
            except LaunchError:  # no leader can be reached
                time.sleep(REJOIN_SECONDS)
        else:
            raise loss


def _plan(recipe: Recipe, request: Request, node: NodeAddress | None) -> Plan:
    if node is None:
        return build_launcher(recipe).plan(request)
    return worker_plan(
        recipe.launch,
        request,
        threads=recipe.run.threads,
        shards=recipe.train.shards,
        endpoint=node.endpoint,
    )


def _with_resume_hint(recipe: Recipe, run: Callable[[], int]) -> int:
    """Run, and after an interruption print the command that resumes."""
    try:
        code = run()
    except Interrupted as error:
        sys.stderr.write(f"{error}\n")
        code = error.exit_code
    if code == Interrupted.exit_code and (recipe.folder / "recipe.yaml").exists():
        sys.stderr.write(f"go on with: lockstep train {recipe.folder / 'recipe.yaml'}\n")
    return code


def _write(recipe: Recipe, request: Request, plan: Plan, *, training: Launcher | None) -> None:
    folder = request.folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if training is not None:
            run_paths.check_folder(folder)
            with locked(folder, f"{folder} is being trained by another process; choose another run.name"):
                pass  # a second process would overwrite its logs
            _write_note(recipe, training)
        for file, text in (plan.files | {request.recipe: request.text}).items():
            file.parent.mkdir(exist_ok=True)
            storage.write(file, text)
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error.strerror}; choose another folder with run.dir") from None


def _write_note(recipe: Recipe, launcher: Launcher) -> None:
    """Write job.json: again after the launch, since a scheduler assigns the job's id on submission."""
    if note := launcher.note():
        facts = {"kind": recipe.launch.kind, "recovers_live": recipe.launch.recovers_live}
        storage.write(recipe.folder / JOB, json.dumps({**facts, **note}))


@contextmanager
def locked(folder: Path, message: str, *, seconds: float = 0.0) -> Iterator[None]:
    """Hold the lock of a run or a sweep. Raises LaunchError with the message where another process keeps it."""
    try:
        with FileLock(folder / ".lock", timeout=seconds):
            yield
    except Timeout:
        raise LaunchError(message) from None
