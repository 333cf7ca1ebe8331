"""Shows on a user's own config and machine that the weights depend neither on the number of processes nor on the
strategy.

W = processes, V = shards of a step.
"""

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import torch
from rich.console import Console

from lockstep.base.errors import ConfigError, nearest
from lockstep.base.world import cores
from lockstep.core.host.signals import ended_by_sigterm
from lockstep.data.sampler import EvaluationRequests
from lockstep.parallel.strategy_config import StrategySection
from lockstep.run.components import requested_measures
from lockstep.run.recipe import Recipe
from lockstep.run.splits import Splits
from lockstep.tools.prove import metric_differences, strategy_choice
from lockstep.tools.prove.proof_request import ProofRequest, test_samples, train_samples
from lockstep.tools.prove.proof_runs import ProofRun, ProofRuns
from lockstep.tools.prove.proof_table import ProofRow, print_proof
from lockstep.tools.prove.run_differences import Apart, apart
from lockstep.tools.prove.trace_diff import SPREAD, explained, first_difference, read
from lockstep.tools.trials import prepared

PARTS = ("repeat", "worlds", "strategies", "kill", "evaluate")
"""What can be chosen; `repeat` looks into single micro-batches, alone and beside each other."""
SHORT_DIGEST = 16


@dataclass(kw_only=True)
class Proof:
    """The runs of a proof and the rows they give; each run is made once."""

    recipe: Recipe
    folder: Path
    steps: int
    data: Splits
    say: Callable[[str], None]
    done: dict[int, ProofRun] = field(default_factory=dict)
    equal: dict[str, ProofRun] = field(default_factory=dict)
    """Runs with the weights of W = 1, by what they are called: what they have measured is compared in the end."""
    unequal: list[str] = field(default_factory=list)
    why: str = ""
    """Why single micro-batches already differ, where they do: the worlds then differ for the same reason."""
    differing: int | None = None
    """The first W whose weights differ: what rests on equal weights is then not tried."""

    def __post_init__(self) -> None:
        task = ProofRequest(
            train_samples=train_samples(self.recipe, len(self.data.train)),
            test_samples=test_samples(self.recipe, len(self.data.test)),
        )
        self.runs = ProofRuns(
            recipe=self.recipe,
            folder=self.folder,
            steps=self.steps,
            task=task,
            on_cpu=torch.cuda.device_count() < 2,
            say=self.say,
        )

    def rows(self, parts: tuple[str, ...]) -> list[ProofRow]:
        """Every chosen part's rows, in the order of PARTS."""
        found: list[ProofRow] = []
        if "repeat" in parts:
            run = self.runs.run("single-batches", 1, replace(self.runs.task, inspect=True))
            found += [ProofRow(**row) for row in run.read("rows.json")]
            self.why = found[0].cause
        if "worlds" in parts:
            found += [self.world(processes) for processes in (2, 4)]
        if "strategies" in parts:
            found += [self.strategy(kind) for kind in strategy_choice.compared(self.recipe)]
        if "kill" in parts:
            found.append(self.killed())
        if "evaluate" in parts:
            found.append(self.evaluated())
        if self.equal or self.unequal:
            found.append(self.measured())
        return found

    def on(self, processes: int) -> ProofRun:
        """The undisturbed run on so many processes."""
        if processes not in self.done:
            self.done[processes] = self.runs.run(f"world-{processes}", processes)
        return self.done[processes]

    def compare(self, label: str, run: ProofRun) -> Apart | None:
        """How a run differs from the first one in what it trains; what it has measured is kept for later."""
        found = apart(self.on(1), run)
        if found is None or not found.has_other_weights:
            self.equal[label] = run
        elif label not in self.unequal:
            self.unequal.append(label)
        return found

    def row(self, what: str, how: str, *, label: str, run: ProofRun, cause: Callable[[Apart], str]) -> ProofRow:
        """The row of a run that is compared with the first; `cause` is asked where they differ."""
        one, found = self.on(1), self.compare(label, run)
        digest = one.digest[:SHORT_DIGEST]
        if found is not None:
            if found.has_other_weights:
                digest = f"{digest} {run.digest[:SHORT_DIGEST]}"
            return ProofRow(what=what, how=how, result="DIFFERS", digest=f"{digest}, {found.place}", cause=cause(found))
        if noticed := run.noticed:
            why = f"equal in these steps, but the run has noticed: {noticed}"
            return ProofRow(what=what, how=how, result="not shown", digest=digest, cause=why)
        return ProofRow(what=what, how=how, result="shown", digest=digest)

    def obstacle(self, processes: int) -> str | None:
        """Why so many processes are not tried, if so: others differ already, or the machine does not carry them."""
        return f"W = {self.differing} differs already" if self.differing is not None else self.shortage(processes)

    def shortage(self, processes: int) -> str | None:
        """Why so many processes are too many, if so: more than shards, GPUs, half cores, or than fit the memory."""
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

    def world(self, processes: int) -> ProofRow:
        """The weights and steps of W processes against those of one."""
        what = f"W = {processes}: weights and steps of W = 1"
        self.on(1)
        if obstacle := self.obstacle(processes):
            return ProofRow(what=what, how="", result="not shown", cause=obstacle)
        label, run = f"W = {processes}", self.on(processes)
        row = self.row(what, self.how, label=label, run=run, cause=partial(self.cause, processes))
        if label in self.unequal:
            self.differing = processes
        return row

    def strategy(self, kind: str) -> ProofRow:
        """The weights and steps of another strategy against those of the first run."""
        processes = strategy_choice.processes_of(kind)
        what = f"parallel.kind={kind}, W = {processes}: weights and steps of {self.recipe.parallel.kind}, W = 1"
        section = strategy_choice.section(self.recipe, kind)
        obstacle = section if isinstance(section, str) else strategy_choice.own_bits(self.recipe)
        if isinstance(section, str) or (obstacle := obstacle or self.shortage(processes)):
            return ProofRow(what=what, how="", result="not shown", cause=str(obstacle))
        run = self.spread(kind, processes, section)
        if isinstance(run, str):
            return ProofRow(what=what, how="", result="not shown", cause=f"{kind} refuses this run: {run}")
        return self.row(what, self.how, label=kind, run=run, cause=partial(self.cause_with, kind, run))

    def spread(self, kind: str, processes: int, section: StrategySection) -> ProofRun | str:
        """The run with another strategy, or why it refuses."""
        stand_in = "ddp" if self.recipe.parallel.MOST_PROCESSES == 1 else self.recipe.parallel.kind  # see proof_runs
        is_own = kind in (self.recipe.parallel.kind, stand_in)
        if is_own and processes in self.done:
            return self.done[processes]
        return self.runs.spread(f"{kind}-{processes}", processes, section)

    def killed(self) -> ProofRow:
        """A run that is killed and resumed on another world against the one that was left alone."""
        one = self.on(1)
        second = 3 if self.obstacle(3) is None else 1
        what = f"killed on W = 2, resumed on W = {second}: weights and steps of W = 1"
        if obstacle := self.obstacle(2):
            return ProofRow(what=what, how="", result="not shown", cause=obstacle)
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
            return ProofRow(what=what, how=how, result="DIFFERS", cause=cause)
        after = partial(self.after_kill, run, second)
        return self.row(what, how, label=f"killed, W = {second}", run=run, cause=after)

    def evaluated(self) -> ProofRow:
        """Who evaluates which sample, and how many were counted."""
        what, there = "evaluation counts each test sample once", len(self.data.test)
        if self.differing is not None:
            cause = f"the weights of W = {self.differing} differ, and so what is measured of them"
            return ProofRow(what=what, how="", result="not shown", cause=cause)
        worlds = [1, *(w for w in (2, 4) if self.obstacle(w) is None)]
        for world in worlds[1:]:
            self.compare(f"W = {world}", self.on(world))
        results = [line for w in worlds for line in self.on(w).metrics if line["kind"] == "evaluation"]
        counted = sorted({line["samples"] for line in results})
        names = ", ".join(map(str, worlds))
        how = f"W = {names}: the plan over all {there:,}; measured on {self.runs.task.test_samples:,}"
        if wrong := [w for w in worlds if not self.is_partition(w)]:
            cause = f"on W = {wrong[0]} the plan leaves out samples or repeats them: please report it with your config"
            return ProofRow(what=what, how=how, result="DIFFERS", cause=cause)
        if counted != [self.runs.task.test_samples]:
            cause = f"counted {counted} samples: please report it with your config"
            return ProofRow(what=what, how=how, result="DIFFERS", cause=cause)
        return ProofRow(what=what, how=how, result="shown")

    def measured(self) -> ProofRow:
        """Whether all runs with the same weights have measured the same."""
        if not self.equal:
            cause = f"the weights of {', '.join(self.unequal)} differ, and so what is measured of them"
            return ProofRow(what=metric_differences.WHAT, how="", result="not shown", cause=cause)
        measures = requested_measures(self.recipe, self.data.test.spec)
        again = partial(self.runs.run, "again-1", 1)
        return metric_differences.measured(self.recipe, self.on(1), self.equal, measures=measures, again=again)

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

    @property
    def how(self) -> str:
        epochs = self.on(1).summary["epochs"]
        return f"{self.steps} steps each, {epochs:.1f} epochs of {self.runs.task.train_samples} samples{self.where}"

    def cause(self, processes: int, found: Apart) -> str:
        """Why two worlds differ: what was known before, else run both again, traced and in the exact order."""
        run = self.on(processes)
        if known := self.known(run, found):
            return known
        task, exact = replace(self.runs.task, is_traced=True), {"run": {"reproducibility": "exact"}}
        one = self.runs.run("traced-1", 1, task, **exact)
        other = self.runs.run(f"traced-{processes}", processes, task, **exact)
        traces = read(one.folder), read(other.folder)
        if difference := first_difference(*traces):
            return explained(difference, traces[0], SPREAD)
        if one.digest != other.digest:
            return "all gradients and their sums are equal, but the last step's weights are not: the optimizer differs"
        if self.recipe.run.reproducibility == "fast":
            return (
                "run.reproducibility=fast adds gradients in an order that depends on the number of processes; "
                "with exact, both worlds have just given the same weights"
            )
        return "a second, traced run of both gave the same weights: something differs from run to run, and seldom"

    def known(self, run: ProofRun, found: Apart) -> str | None:
        """Why a run differs, as far as that can be said without another run."""
        if self.why:
            return f"as above: {self.why}"
        if noticed := run.noticed or self.on(1).noticed:
            return f"the run has noticed: {noticed}"
        if not found.has_other_weights:
            return (
                f"the weights are equal, but {found.figures}: the loss adds something that is no function of the "
                "samples and weights, such as the rank or the time"
            )
        return None

    def cause_with(self, kind: str, run: ProofRun, found: Apart) -> str:
        """Why a run with another strategy differs."""
        if known := self.known(run, found):
            return known
        if strategy_choice.processes_of(kind) > 1 and (plain := apart(self.on(1), self.on(2))) is not None:
            return f"W = 2 differs with parallel.kind={self.recipe.parallel.kind}, too: {self.cause(2, plain)}"
        return f"nothing in the model's code is known that would do it, and {kind} alone differs: please report it"

    def after_kill(self, run: ProofRun, second: int, found: Apart) -> str:
        """Why a killed and resumed run differs, as far as the undisturbed ones do not say so already."""
        if known := self.known(run, found):
            return known
        for processes in sorted({2, second} - {1}):
            if (plain := apart(self.on(1), self.on(processes))) is not None:
                return f"W = {processes} differs from W = 1 without a kill, too: {self.cause(processes, plain)}"
        return (
            "undisturbed runs are equal on both worlds: something that changes in training is not in the checkpoint, "
            "such as numbers that a module or an observer keeps outside its parameters and buffers"
        )


def half_time(steps: int, epoch: int) -> int:
    """The step nearest to the middle of a run that neither ends an epoch nor comes just before its end, if any."""
    within = [step for step in range(1, steps - 1) if step % epoch and (step + 1) % epoch]
    return min(within or range(1, steps - 1), key=lambda step: abs(step - steps // 2))


def prove(recipe: Recipe, *, steps: int, parts: Sequence[str], keep: Path | None, console: Console) -> int:
    """Run the chosen parts of the proof and print what came of them; returns 0, or 1 when anything differs.

    Raises ConfigError for an unknown part, TrialFailed when a run ends with an error of its own.
    """
    for part in parts:
        if part not in PARTS:
            raise ConfigError(
                f"--only: there is no part {part!r}{nearest(part, [*PARTS])} (there is: {', '.join(PARTS)})"
            )
    data = prepared(recipe)
    start = time.monotonic()
    with ended_by_sigterm(), folder_for(keep) as folder:

        def say(what: str) -> None:
            console.print(f"[{time.monotonic() - start:5.1f} s] {what}", soft_wrap=True)

        proof = Proof(recipe=recipe, folder=folder, steps=steps, data=data, say=say)
        rows = proof.rows(tuple(parts))
        say("done")
    return print_proof(rows, console)


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
