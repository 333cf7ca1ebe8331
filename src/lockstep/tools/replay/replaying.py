"""`lockstep replay`: a step of a run again, on any number of processes, and opened."""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel
from rich.console import Console

from lockstep.base import storage, trust
from lockstep.base.config import MANY
from lockstep.base.errors import CheckpointError, ConfigError, NonFiniteLoss
from lockstep.checkpoint import layout
from lockstep.observe.run_folder import RunFolder
from lockstep.recipe import recipe as recipes
from lockstep.recipe import recipe_trust, run_paths
from lockstep.recipe.recipe import Recipe
from lockstep.tools import trials
from lockstep.tools.compare.run_evidence import Evidence, evidence
from lockstep.tools.replay import replay_bundle
from lockstep.tools.replay.replay_page import present
from lockstep.tools.trials import TrialEnd, processes_text
from lockstep.training import resume, steering

OPENED, SAME_HASHES = "opened-{:09}.json", "hashes.json"
"""Files of a replay: an opened step by its number, and whether the hashes are those of a bundle."""
Here = Callable[[list[str]], int]
"""Runs a worker in this process, with these arguments -> exit code."""
Facts = Mapping[int, Mapping[str, Any]]
"""Step -> quantity -> value, as in Evidence."""


class ReplayRequest(BaseModel):
    first: int = 1
    """Numbers of the first step to open, of the last, and of the last to run."""
    last: int = 1
    until: int = 1
    shard: int | None = None
    """The only shard to open."""
    checkpoint: Path | None = None
    """Checkpoint to start from; None: from the beginning."""
    numeric: dict[str, Any] = {}
    """The numeric recipe of the run, as far as known."""
    processes: int = 1
    parallel: str | None = None
    """Strategy of several processes."""
    opens: bool = True
    saves: bool = False
    """Whether to save a checkpoint after the last step."""
    verifies: bool = False
    """Whether to go on only with the recipe, data and machine of `numeric`; what differs is written down."""
    traced_from: int | None = None
    """Number of the first step to trace."""
    is_golden: bool = False
    """Whether to trace only what a golden file holds."""
    save: Path | None = None
    bundle: Path | None = None
    """Bundle to open instead of a run."""
    debugs: bool = False
    allow_drift: bool = False

    @property
    def start(self) -> int:
        """Number of steps that are done at the checkpoint."""
        return layout.step_of(self.checkpoint) if self.checkpoint else 0

    def recipe(self, recipe: Recipe, folder: Path) -> Recipe:
        """Return a recipe with the same steps, since a schedule may depend on their number, in another folder."""
        own = recipe.parallel.kind if recipe.parallel.MOST_PROCESSES is None else "ddp"
        kind = self.parallel or ("single" if self.processes == 1 else own)
        every = self.until if self.saves else None
        sections: dict[str, dict[str, Any]] = {
            "run": {"dir": folder.parent, "name": folder.name},
            "train": {"stop_metric": None, "max_minutes": None},
            "checkpoint": {"every_steps": every, "every_minutes": None, "keep": 1, "best": None, "mirror": None},
            "observe": {"sinks": ("jsonl",), "log_every": 1, "file": None, "profile_steps": None},
        }
        if self.debugs:
            sections["observe"]["hang_seconds"] = float(MANY)
        return trials.varied(recipe, sections, parallel=trials.strategy_of(recipe, kind).fitted(self.processes))

    def run(self, recipe: Recipe, folder: Path, report: Callable[[str], None], *, here: Here | None = None) -> TrialEnd:
        """Do it in processes of its own, or in this one."""
        recipe = self.recipe(recipe, folder)
        if here is None:
            return trials.run(recipe, folder, task="replay", request=self, processes=self.processes, report=report)
        recipe_file, request_file = trials.written(recipe, folder, self, processes=1)
        code = here([recipe_file, "--task", "replay", "--request", request_file, *trust.arguments()])
        return TrialEnd(code=code, output="", peak_bytes=0)


def begin(folder: Path, run: Path) -> None:
    """Make a folder in which steps of a run are run again, with what observers asked for in the run."""
    folder.mkdir()
    if (decided := run / steering.FILE).is_file():
        storage.write(folder / steering.FILE, storage.read_regular(decided, storage.MOST_JSON_BYTES))


@dataclass(frozen=True, kw_only=True)
class LoggedRun:
    """A run that is replayed; nothing is written to its folder."""

    recipe: Recipe
    folder: Path
    log: Evidence
    trusts: bool
    placed: Callable[[], AbstractContextManager[None]] | None = None
    """Context in which its processes are started with code of another revision; None for the code of this process."""

    @classmethod
    def at(cls, path: Path, overrides: Sequence[str] = (), *, trusts: bool) -> Self:
        """Find a run, and get the user's permission to execute its code. Raises ConfigError, UntrustedCode."""
        recipe, root, _ = run_paths.locate(path, overrides)
        run = cls(recipe=recipe, folder=root.parent, log=evidence(root.parent), trusts=trusts)
        run.authorize()
        return run

    def authorize(self) -> None:
        recipe_trust.authorize(self.recipe, self.folder / "recipe.yaml", trusts=self.trusts)

    def started(self, request: ReplayRequest) -> ReplayRequest:
        """Return the request with the newest whole checkpoint before its first step, for a fork perhaps that of its
        parent, and the next step whose chain is known after its last one. Raises CheckpointError."""
        earlier = (each for each in layout.listed(self.folder / "checkpoints") if layout.step_of(each) < request.first)
        checkpoint = next((each for each in earlier if resume.problem(each) is None), None)
        numeric = dict(layout.read_manifest(checkpoint).numeric if checkpoint else self.log.numeric)
        if checkpoint is None and (parent := self.recipe.run.parent) is not None:
            problem = resume.problem(parent) if layout.step_of(parent) < request.first else "replay it there"
            if problem:
                raise CheckpointError(f"step {request.first}: {self.folder} was forked at {parent}: {problem}")
            checkpoint = parent
        known = [step for step, facts in self.log.facts.items() if step >= request.last and "chain" in facts]
        changes = {"checkpoint": checkpoint, "numeric": numeric, "until": min(known, default=request.last)}
        return request.model_copy(update=changes)

    def again(
        self, request: ReplayRequest, folder: Path, report: Callable[[str], None], *, here: Here | None = None
    ) -> TrialEnd:
        """Train again in a new folder, with what observers asked for."""
        begin(folder, self.folder)
        self.authorize()  # another run may have been since
        with (self.placed or nullcontext)():
            return request.run(self.recipe, folder, report, here=here)

    def plan(self, request: ReplayRequest) -> str:
        """Say what has to be run again, and for about how long."""
        steps, train = request.until - request.start, self.recipe.train
        place = f"the checkpoint of step {request.start}" if request.checkpoint else "the start"
        what = (
            f"step {request.first} of {self.folder}: {steps} steps again, from {place} on, and a pass for each sample"
        )
        lines = RunFolder(self.folder).metric_lines()
        speeds = [speed for line in lines if (speed := line.values.get("samples_per_second"))]
        if not speeds:
            return f"{what}; the run has not measured its speed"
        seconds = train.global_batch / statistics.median(speeds) * (RunFolder(self.folder).summary().world_size or 1)
        share = (1 + train.micro_batch) * (1.0 if request.shard is None else 1 / train.shards)
        passes = (request.last - request.first + 1) * share
        return f"{what}: about {seconds * (steps + passes):.0f} s at the run's speed"


def replay(run: LoggedRun, request: ReplayRequest, out: Path, *, here: Here | None, console: Console) -> int:
    """Run again up to the last of the steps, compare the chains, and write what the opened steps are. Raises
    ConfigError, TrialFailed."""
    trials.check_writable("--save", request.save, suffix=replay_bundle.SUFFIX)
    trials.check_writable("--out", out / "replay.html")
    request = run.started(request)
    console.print(run.plan(request), soft_wrap=True)
    report, facts = trials.timed_lines(console), dict[int, Mapping[str, Any]]()
    forking = nullcontext() if here else trials.forking(run.recipe, "replay")
    with forking, trials.temporary_folder("lockstep-replay-") as folder:
        trials.prepared(run.recipe)
        start, way, opening = request.start, folder / "way", folder / "opened"
        if request.processes > 1 and start < request.first - 1:
            changes = {"until": request.first - 1, "opens": False, "saves": True, "save": None}
            report(f"steps {start + 1} to {changes['until']} on {processes_text(request.processes)} ...")
            run.again(request.model_copy(update=changes), way, report).checked()
            facts |= evidence(way).facts
            request = request.model_copy(update={"checkpoint": layout.listed(way / "checkpoints")[0]})
        request = request.model_copy(update={"processes": 1, "parallel": None})
        end = run.again(request, opening, report, here=here)
        steps = opened_steps(opening)
        if end.code and not (end.code == NonFiniteLoss.exit_code and steps):  # such a step is opened to see why
            return end.code if here else end.checked().code  # a worker in this process has printed the reason
        facts |= evidence(opening).facts
    if not steps:
        raise ConfigError(f"{run.folder} has no step {request.first}: it ends before")
    again = {step: found for step, found in facts.items() if step > start}
    for step in steps:
        notes = [chain_text(run.log.facts, again), *sum_text(step, again)]
        present(step, notes, out, name=run.folder.name, console=console)
    return 0


def opened_steps(folder: Path) -> list[Any]:
    return [storage.read_json(file) for file in sorted(folder.glob("opened-*.json"))]


def chain_text(logged: Facts, again: Facts) -> str:
    """Say whether the digest chain is that of the log; if not, from which step on, and by how much numbers differ."""
    common = [step for step in sorted(again) if "chain" in again[step] and "chain" in logged.get(step, {})]
    wrong = [step for step in common if again[step]["chain"] != logged[step]["chain"]]
    if not common:
        return "the run has logged none of these steps: there is no chain to compare"
    if not wrong:
        return f"the chain is that of the log at each step that was logged, up to step {common[-1]}"
    gaps = []
    for name in ("loss", "gradient_norm"):
        pairs = [(logged[step].get(name), again[step].get(name)) for step in wrong]
        known = [abs(a - b) / max(abs(a), 1e-30) for a, b in pairs if a is not None and b is not None]
        gaps.append(f"{name.replace('_', ' ')} by at most {max(known, default=0.0):.2g}")
    return f"the chain differs from that of the log from step {wrong[0]} on; {', '.join(gaps)} of it"


def sum_text(step: Mapping[str, Any], again: Facts) -> Iterator[str]:
    """Say whether the losses of the shards add up to that of the step."""
    loss = again.get(step["step"], {}).get("loss")
    if step["loss"] is not None and loss is not None:
        equals = "is" if loss == step["loss"] else f"is {step['loss']!r}, not"
        yield f"the loss of the shards, added in the tree's order, {equals} that of the step, {loss!r}"


def open_bundle(
    file: Path,
    request: ReplayRequest,
    out: Path,
    *,
    overrides: Sequence[str],
    trusts: bool,
    here: Here | None,
    console: Console,
) -> int:
    """Run the shards of a bundle, and say whether every hash is the same; return 0, or 1 where one is not. Raises
    ConfigError, DataError, UntrustedCode, TrialFailed."""
    trials.check_writable("--out", out / "replay.html")
    facts = replay_bundle.facts_of(file)
    with trials.temporary_folder("lockstep-replay-") as outer:
        (folder := outer / "bundle").mkdir()
        recipe = recipes.parse(facts.recipe, file=str(file), overrides=overrides)
        trust.authorize(recipe_trust.code_of_files(recipe), trusts=trusts, folder=file.absolute().parent)
        request = request.model_copy(update={"bundle": file.absolute()})
        if (end := request.run(recipe, folder, trials.timed_lines(console), here=here)).code:
            return end.code if here else end.checked().code
        found, [step] = storage.read_json(folder / SAME_HASHES), opened_steps(folder)
    now = recipes.numeric_recipe(recipe, {})
    files = {name: then for name, then in facts.numeric.items() if name in now and now[name] != then}
    notes = [layout.described(name, then, now[name]) for name, then in files.items()]
    same = f"all {found['hashes']} hashes of modules' outputs and of gradients are those of the bundle"
    present(step, [*notes, found["difference"] or same], out, name=file.name, console=console)
    return 1 if found["difference"] else 0
