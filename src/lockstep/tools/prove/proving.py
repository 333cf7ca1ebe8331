"""Shows on a user's own config and machine that the weights depend neither on the number of processes nor on the
strategy.

W = processes.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
from rich.console import Console

from lockstep.base import devices
from lockstep.base.errors import ConfigError, nearest
from lockstep.base.world import World
from lockstep.core.host.signals import ended_by_sigterm
from lockstep.recipe.components import evaluation_requests, requested_metrics
from lockstep.recipe.recipe import Recipe
from lockstep.recipe.splits import Splits
from lockstep.tools import trials
from lockstep.tools.prove import proof_runs, run_differences
from lockstep.tools.prove.proof_runs import ProofRun, ProofRuns, processes_of
from lockstep.tools.prove.proof_table import NotShown, ProofRow, print_proof
from lockstep.tools.prove.run_differences import (
    EQUAL_MEASURES,
    RunDifference,
    cause_by_kill,
    cause_by_processes,
    cause_by_strategy,
)
from lockstep.tools.trials import prepared, temporary_folder, timed_lines

PARTS = ("repeat", "worlds", "strategies", "kill", "evaluate")
"""Choices of --only; `repeat` checks single micro-batches, alone and beside each other."""
SHORT_DIGEST = 16
MOST_PROCESSES = 4


@dataclass(kw_only=True)
class Proof:
    """The runs of a proof and the rows they give."""

    runs: ProofRuns
    data: Splits
    equal: dict[str, ProofRun] = field(default_factory=dict)
    """Runs with the weights of W = 1, by label: their metrics are compared at the end."""
    unequal: list[str] = field(default_factory=list)
    differing: int | None = None
    """The first W whose weights differ: claims that rest on equal weights are then not tried."""

    def rows(self, parts: tuple[str, ...]) -> list[ProofRow]:
        """Return the rows of every chosen part, in the order of PARTS."""
        rows: list[ProofRow] = []
        if "repeat" in parts:
            rows += self.single_batches()
        if "worlds" in parts:
            rows += [self.processes(number) for number in (2, MOST_PROCESSES)]
        if "strategies" in parts:
            rows += [self.strategy(kind) for kind in proof_runs.compared(self.runs.recipe)]
        if "kill" in parts:
            rows.append(self.killed())
        if "evaluate" in parts:
            rows.append(self.evaluated())
        if self.equal or self.unequal:
            rows.append(self.measured())
        return rows

    def single_batches(self) -> list[ProofRow]:
        """Check that a micro-batch gives the same bits again, and that a step can be split into micro-batches."""
        request = self.runs.request.model_copy(update={"inspect": True})
        run = self.runs.run("single-batches", 1, request=request)
        rows = [ProofRow(**row) for row in run.read("rows.json")]
        self.runs.repeat_cause = rows[0].cause
        return rows

    def processes(self, number: int) -> ProofRow:
        """Compare the weights and steps of W processes with those of one."""
        label = f"W = {number}"
        what = f"{label}: weights and steps of W = 1"
        self.runs.on(1)
        if obstacle := self.obstacle(number):
            return ProofRow(what=what, result="not shown", cause=obstacle)
        cause = partial(cause_by_processes, self.runs, number)
        row = self.compared(what, self.how, label=label, run=self.runs.on(number), cause=cause)
        if label in self.unequal:
            self.differing = number
        return row

    def strategy(self, kind: str) -> ProofRow:
        """Compare the weights and steps of another strategy with those of the first run."""
        processes = processes_of(kind)
        what = f"parallel.kind={kind}, W = {processes}: weights and steps of {self.runs.recipe.parallel.kind}, W = 1"
        try:
            if obstacle := self.runs.shortage(processes):
                raise NotShown(obstacle)
            run = self.runs.with_strategy(kind, processes)
        except NotShown as reason:
            return ProofRow(what=what, result="not shown", cause=str(reason))
        cause = partial(cause_by_strategy, self.runs, kind, run)
        return self.compared(what, self.how, label=kind, run=run, cause=cause)

    def killed(self) -> ProofRow:
        """Compare a run that is killed and resumed on another number of processes with the undisturbed one."""
        resumed_on = 3 if self.obstacle(3) is None else 1
        what = f"killed on W = 2, resumed on W = {resumed_on}: weights and steps of W = 1"
        if obstacle := self.obstacle(2):
            return ProofRow(what=what, result="not shown", cause=obstacle)
        epoch = self.runs.on(1).read("started.json")["steps_per_epoch"]
        every = half_time(self.runs.steps, epoch)
        process, checkpoint = self.runs.kill("killed", 2, every=every)
        middle = "in mid-epoch" if checkpoint % epoch and (every + 1) % epoch else "at the end of an epoch"
        run = self.runs.run("killed", resumed_on)
        resumed = run.read("started.json")["resumed_step"]
        how = (
            f"rank 1 (process {process}) ended by SIGKILL in step {every + 2} of {self.runs.steps}, {middle}; "
            f"resumed after step {resumed}{self.device_note}"
        )
        if resumed != checkpoint:
            cause = f"it was resumed after step {resumed} instead of {checkpoint}: please report it"
            return ProofRow(what=what, how=how, result="DIFFERS", cause=cause)
        cause_of = partial(cause_by_kill, self.runs, resumed_on, run)
        return self.compared(what, how, label=f"killed, W = {resumed_on}", run=run, cause=cause_of)

    def evaluated(self) -> ProofRow:
        """Check that the ranks together evaluate each test sample once."""
        what, samples = "evaluation counts each test sample once", self.runs.request.test_samples
        if self.differing is not None:
            cause = f"the weights of W = {self.differing} differ, and so what is measured of them"
            return ProofRow(what=what, result="not shown", cause=cause)
        numbers = [1, *(number for number in (2, MOST_PROCESSES) if self.obstacle(number) is None)]
        for number in numbers[1:]:
            self.difference(f"W = {number}", self.runs.on(number))
        how = f"W = {', '.join(map(str, numbers))}: the plan over all {len(self.data.test):,}; measured on {samples:,}"
        if wrong := [number for number in numbers if not self.is_partition(number)]:
            cause = f"on W = {wrong[0]} the plan leaves out samples or repeats them: please report it with your config"
            return ProofRow(what=what, how=how, result="DIFFERS", cause=cause)
        lines = [line for number in numbers for line in self.runs.on(number).metrics]
        counted = sorted({line["samples"] for line in lines if line["kind"] == "evaluation"})
        if counted != [samples]:
            cause = f"counted {counted} samples: please report it with your config"
            return ProofRow(what=what, how=how, result="DIFFERS", cause=cause)
        return ProofRow(what=what, how=how, result="shown")

    def measured(self) -> ProofRow:
        """Check that all runs with the same weights measured the same."""
        if not self.equal:
            cause = f"the weights of {', '.join(self.unequal)} differ, and so what is measured of them"
            return ProofRow(what=EQUAL_MEASURES, result="not shown", cause=cause)
        measures = requested_metrics(self.runs.recipe, self.data.test.spec)
        repeat = partial(self.runs.run, "again-1", 1)
        return run_differences.metric_row(
            self.runs.recipe, self.runs.on(1), self.equal, measures=measures, repeat=repeat
        )

    def compared(self, what: str, how: str, *, label: str, run: ProofRun, cause: Callable[..., str]) -> ProofRow:
        """Return the row of a run that is compared with the first; `cause` is called where they differ."""
        difference = self.difference(label, run)
        digest = self.runs.on(1).digest[:SHORT_DIGEST]
        if difference is not None:
            if difference.in_weights:
                digest = f"{digest} {run.digest[:SHORT_DIGEST]}"
            place = "after the last step" if difference.step is None else f"from step {difference.step} on"
            digest = f"{digest}, {place}"
            return ProofRow(what=what, how=how, result="DIFFERS", digest=digest, cause=cause(difference=difference))
        if run.finding:
            why = f"equal in these steps, but the run has noticed: {run.finding}"
            return ProofRow(what=what, how=how, result="not shown", digest=digest, cause=why)
        return ProofRow(what=what, how=how, result="shown", digest=digest)

    def difference(self, label: str, run: ProofRun) -> RunDifference | None:
        """Return how a run differs from the first one in what it trains; keep the run to compare its metrics later."""
        difference = run_differences.run_difference(self.runs.on(1), run)
        if difference is None or not difference.in_weights:
            self.equal[label] = run
        elif label not in self.unequal:
            self.unequal.append(label)
        return difference

    def obstacle(self, processes: int) -> str | None:
        """Return why this many processes are not tried, if so: fewer differ already, or the machine cannot run them."""
        return f"W = {self.differing} differs already" if self.differing else self.runs.shortage(processes)

    def is_partition(self, processes: int) -> bool:
        """Return whether the ranks' micro-batches, without ghosts, hold each test sample exactly once."""
        seen = np.zeros(len(self.data.test), dtype=np.int64)
        for rank in range(processes):
            for request in evaluation_requests(self.runs.recipe, self.data.test, World(rank=rank, size=processes)):
                np.add.at(seen, list(request.indices), not request.ghost)
        return bool((seen == 1).all())

    @property
    def device_note(self) -> str:
        return ", in which processes share GPUs" if 0 < devices.count_gpus() < MOST_PROCESSES else ""

    @property
    def how(self) -> str:
        epochs, samples = self.runs.on(1).summary["epochs"], self.runs.request.train_samples
        return f"{self.runs.steps} steps each, {epochs:.1f} epochs of {samples} samples{self.device_note}"


def half_time(steps: int, epoch: int) -> int:
    """Find the step nearest the middle of a run that neither ends an epoch nor comes just before its end, if any."""
    within = [step for step in range(1, steps - 1) if step % epoch and (step + 1) % epoch]
    return min(within or range(1, steps - 1), key=lambda step: abs(step - steps // 2))


def prove(recipe: Recipe, *, steps: int, parts: Sequence[str], keep: Path | None, console: Console) -> int:
    """Run the chosen parts of the proof and print the results; returns 0, or 1 when anything differs. Raises
    ConfigError for an unknown part, TrialFailed when a run ends with an error of its own."""
    for part in parts:
        if part not in PARTS:
            there_is = f"{nearest(part, [*PARTS])} (there is: {', '.join(PARTS)})"
            raise ConfigError(f"--only: there is no part {part!r}{there_is}")
    with trials.forking(recipe, "prove"), ended_by_sigterm():
        data, report = prepared(recipe), timed_lines(console)
        with folder_for(keep) as folder:
            request = proof_runs.request_for(recipe, data)
            runs = ProofRuns(recipe=recipe, folder=folder, steps=steps, request=request, report=report)
            rows = Proof(runs=runs, data=data).rows(tuple(parts))
            report("done")
    return print_proof(rows, console)


def folder_for(keep: Path | None) -> AbstractContextManager[Path]:
    """Open the folder of the runs: a temporary one, or the new one that the user wants to keep."""
    if keep is None:
        return temporary_folder("lockstep-prove-")
    try:
        keep.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"--keep {keep}: {error.strerror}; name a folder that is not there yet") from None
    return nullcontext(keep.absolute())
