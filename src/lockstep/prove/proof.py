"""Shows on a user's own config and machine that the weights do not depend on the number of processes.

W = processes, V = shards of a step.
"""

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import psutil
import torch
from rich.console import Console

from lockstep import assembly, plugins
from lockstep.assembly import Data
from lockstep.data.sampler import EvaluationRequests
from lockstep.errors import ConfigError, nearest
from lockstep.events import Bus
from lockstep.prove.cause import SPREAD, explained, first_difference, read
from lockstep.prove.runs import Run, Runs
from lockstep.prove.table import Row, tell
from lockstep.prove.task import Task, test_samples, train_samples
from lockstep.recipe import Recipe
from lockstep.runtime.interruption import ended_by_sigterm
from lockstep.runtime.trace import fingerprint
from lockstep.world import cores

PARTS = ("repeat", "worlds", "kill", "evaluate")
"""What can be chosen; `repeat` looks into single micro-batches, alone and beside each other."""
SHORT_DIGEST = 16


@dataclass(kw_only=True)
class Proof:
    """The runs of a proof and the rows they give; each run is made once."""

    recipe: Recipe
    folder: Path
    steps: int
    data: Data
    say: Callable[[str], None]
    done: dict[int, Run] = field(default_factory=dict)
    why: str = ""
    """Why single micro-batches already differ, where they do: the worlds then differ for the same reason."""
    differing: int | None = None
    """The first W whose weights differ: what rests on equal weights is then not tried."""

    def __post_init__(self) -> None:
        task = Task(
            train_samples=train_samples(self.recipe, len(self.data.train)),
            test_samples=test_samples(self.recipe, len(self.data.test)),
        )
        self.runs = Runs(
            recipe=self.recipe,
            folder=self.folder,
            steps=self.steps,
            task=task,
            on_cpu=torch.cuda.device_count() < 2,
            say=self.say,
        )

    def rows(self, parts: tuple[str, ...]) -> list[Row]:
        """Every chosen part's rows, in the order of PARTS."""
        found: list[Row] = []
        if "repeat" in parts:
            run = self.runs.run("single-batches", 1, replace(self.runs.task, inspect=True))
            found += [Row(**row) for row in run.read("rows.json")]
            self.why = found[0].cause
        if "worlds" in parts:
            found += [self.world(processes) for processes in (2, 4)]
        if "kill" in parts:
            found.append(self.killed())
        if "evaluate" in parts:
            found.append(self.evaluated())
        return found

    def on(self, processes: int) -> Run:
        """The undisturbed run on so many processes."""
        if processes not in self.done:
            self.done[processes] = self.runs.run(f"world-{processes}", processes)
        return self.done[processes]

    def obstacle(self, processes: int) -> str | None:
        """Why so many processes are not tried, if so: more than shards, GPUs, half cores, or than fit the memory."""
        if self.differing is not None:
            return f"W = {self.differing} differs already"
        shards, threads = self.recipe.train.shards, self.recipe.run.threads
        needed = processes * self.on(1).peak_bytes
        if processes > 2 and shards < processes:
            return f"a step has {shards} micro-batches only"
        if not self.runs.on_cpu and torch.cuda.device_count() < processes:
            return f"there are {torch.cuda.device_count()} GPUs"
        if self.runs.on_cpu and processes > 2 and processes * threads > 2 * cores():
            return f"{cores()} cores would be shared by {processes} processes of {threads} threads"
        if self.runs.on_cpu and needed > psutil.virtual_memory().available:
            return f"it needs about {needed / 2**30:.1f} GiB of memory"
        return None

    def world(self, processes: int) -> Row:
        """The weights of W processes against those of one."""
        what = f"W = {processes} gives the weights of W = 1"
        one = self.on(1)
        if obstacle := self.obstacle(processes):
            return Row(what=what, how="", result="not shown", cause=obstacle)
        run, epochs = self.on(processes), one.summary["epochs"]
        how = f"{self.steps} steps each, {epochs:.1f} epochs of {self.runs.task.train_samples} samples{self.where}"
        if run.digest == one.digest and run.metrics == one.metrics:
            return Row(what=what, how=how, result="shown", digest=one.digest[:SHORT_DIGEST])
        self.differing = processes
        return Row(what=what, how=how, result="DIFFERS", digest=both(one, run), cause=self.cause(processes))

    def killed(self) -> Row:
        """A run that is killed and resumed on another world against the one that was left alone."""
        one = self.on(1)
        second = 3 if self.obstacle(3) is None else 1
        what = f"killed on W = 2, resumed on W = {second}: the weights of W = 1"
        if obstacle := self.obstacle(2):
            return Row(what=what, how="", result="not shown", cause=obstacle)
        epoch = one.read("started.json")["steps_per_epoch"]
        killed = self.runs.kill("killed", 2, every=half_time(self.steps, epoch))
        middle = "in mid-epoch" if killed.checkpoint % epoch and killed.steps % epoch else "at the end of an epoch"
        run = self.runs.run("killed", second)
        resumed = run.read("started.json")["resumed_step"]
        how = (
            f"rank 1 (process {killed.process}) ended by SIGKILL in step {killed.steps + 1} of {self.steps}, {middle}; "
            f"resumed after step {resumed}{self.where}"
        )
        if resumed != killed.checkpoint:
            cause = f"it was resumed after step {resumed} instead of {killed.checkpoint}: please report it"
            return Row(what=what, how=how, result="DIFFERS", digest=both(one, run), cause=cause)
        if run.digest == one.digest and run.metrics == one.metrics:
            return Row(what=what, how=how, result="shown", digest=run.digest[:SHORT_DIGEST])
        return Row(what=what, how=how, result="DIFFERS", digest=both(one, run), cause=self.after_kill(run, second))

    def evaluated(self) -> Row:
        """Who evaluates which sample, and the same numbers from all worlds."""
        what, there = "evaluation counts each test sample once", len(self.data.test)
        if self.differing is not None:
            cause = f"the weights of W = {self.differing} differ, and so what is measured of them"
            return Row(what=what, how="", result="not shown", cause=cause)
        worlds = [1, *(w for w in (2, 4) if self.obstacle(w) is None)]
        results = [[line for line in self.on(w).metrics if line["kind"] == "evaluation"] for w in worlds]
        counted = {line["samples"] for lines in results for line in lines}
        names = ", ".join(map(str, worlds))
        how = f"W = {names}: the plan over all {there:,}; measured on {self.runs.task.test_samples:,}, same values"
        if wrong := [w for w in worlds if not self.is_partition(w)]:
            cause = f"on W = {wrong[0]} the plan leaves out samples or repeats them: please report it with your config"
            return Row(what=what, how=how, result="DIFFERS", cause=cause)
        if counted != {self.runs.task.test_samples}:
            cause = f"counted {sorted(counted)} samples: please report it with your config"
            return Row(what=what, how=how, result="DIFFERS", cause=cause)
        if any(lines != results[0] for lines in results):
            cause = self.why or "the measured values differ; see the rows above, and your file's metrics"
            return Row(what=what, how=how, result="DIFFERS", cause=cause)
        return Row(what=what, how=how, result="shown", digest=fingerprint(results[0]))

    def is_partition(self, processes: int) -> bool:
        """Whether the ranks' micro-batches, without ghosts, hold each test sample exactly once."""
        seen = np.zeros(len(self.data.test), dtype=np.int64)
        for rank in range(processes):
            requests = EvaluationRequests(
                samples=len(self.data.test),
                lengths=self.data.test.lengths,
                micro_batch=self.recipe.evaluate.micro_batch or self.recipe.train.micro_batch,
                rank=rank,
                world_size=processes,
            )
            for request in requests:
                np.add.at(seen, list(request.indices), not request.ghost)
        return bool((seen == 1).all())

    @property
    def where(self) -> str:
        """A word on the device, where it is not the one that would be expected."""
        return ", on the CPU: two processes need two GPUs" if torch.cuda.is_available() and self.runs.on_cpu else ""

    def cause(self, processes: int) -> str:
        """Why the weights of two worlds differ: run both again, traced and in the exact order of additions."""
        if self.why:
            return f"as above: {self.why}"
        if self.on(processes).digest == self.on(1).digest:
            return f"the weights are equal, but not what was logged: {logged_apart(self.on(1), self.on(processes))}"
        task, exact = replace(self.runs.task, is_traced=True), {"run": {"reproducibility": "exact"}}
        one = self.runs.run("traced-1", 1, task, **exact)
        other = self.runs.run(f"traced-{processes}", processes, task, **exact)
        traces = read(one.folder), read(other.folder)
        if found := first_difference(*traces):
            return explained(found, traces[0], SPREAD)
        if one.digest != other.digest:
            return "all gradients and their sums are equal, but the last step's weights are not: the optimizer differs"
        if self.recipe.run.reproducibility == "fast":
            return (
                "run.reproducibility=fast adds gradients in an order that depends on the number of processes; "
                "with exact, both worlds have just given the same weights"
            )
        return "a second, traced run of both gave the same weights: something differs from run to run, and seldom"

    def after_kill(self, run: Run, second: int) -> str:
        """Why a killed and resumed run differs, as far as the undisturbed ones do not say so already."""
        if self.why:
            return f"as above: {self.why}"
        if run.digest == self.on(1).digest:
            return f"the weights are equal, but not what was logged: {logged_apart(self.on(1), run)}"
        for processes in {2, second} - {1}:
            if self.on(processes).digest != self.on(1).digest:
                return f"W = {processes} gives other weights than W = 1 without a kill, too: {self.cause(processes)}"
        return (
            "undisturbed runs are equal on both worlds: something that changes in training is not in the checkpoint, "
            "such as numbers that a module or an observer keeps outside its parameters and buffers"
        )


def half_time(steps: int, epoch: int) -> int:
    """The step nearest to the middle of a run that neither ends an epoch nor comes just before its end, if any."""
    within = [step for step in range(1, steps - 1) if step % epoch and (step + 1) % epoch]
    return min(within or range(1, steps - 1), key=lambda step: abs(step - steps // 2))


def logged_apart(one: Run, other: Run) -> str:
    """The first value that two runs have logged differently."""
    for a, b in zip(one.metrics, other.metrics, strict=False):
        if name := next((name for name in [*a, *b] if a.get(name) != b.get(name)), None):
            return f"{name} of the {a['kind']} line of step {a['step']} is {a.get(name)!r} and {b.get(name)!r}"
    return f"{len(one.metrics)} and {len(other.metrics)} lines"


def both(one: Run, other: Run) -> str:
    """Two digests that differ."""
    return f"{one.digest[:SHORT_DIGEST]} {other.digest[:SHORT_DIGEST]}"


def prove(recipe: Recipe, *, steps: int, parts: Sequence[str], keep: Path | None, console: Console) -> int:
    """Run the chosen parts of the proof and print what came of them; returns 0, or 1 when anything differs.

    Raises ConfigError for an unknown part, RunFailed when a run ends with an error of its own.
    """
    for part in parts:
        if part not in PARTS:
            raise ConfigError(
                f"--only: there is no part {part!r}{nearest(part, [*PARTS])} (there is: {', '.join(PARTS)})"
            )
    bus = Bus()
    bus.subscribe(plugins.find("observe.sinks", "progress").terminal())
    try:
        data = assembly.prepare(recipe, bus.publish)
    finally:
        bus.close()
    start = time.monotonic()
    with ended_by_sigterm(), folder_for(keep) as folder:

        def say(what: str) -> None:
            console.print(f"[{time.monotonic() - start:5.1f} s] {what}", soft_wrap=True)

        proof = Proof(recipe=recipe, folder=folder, steps=steps, data=data, say=say)
        rows = proof.rows(tuple(parts))
        say("done")
    return tell(rows, console)


@contextmanager
def folder_for(keep: Path | None) -> Iterator[Path]:
    """Where the runs lie: in a folder that goes away with everything in it, or in the one to keep, which is new."""
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="lockstep-prove-", ignore_cleanup_errors=True) as folder:
            yield Path(folder)
        return
    try:
        keep.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"--keep {keep}: {error.strerror}; name a folder that is not there yet") from None
    yield keep.absolute()
