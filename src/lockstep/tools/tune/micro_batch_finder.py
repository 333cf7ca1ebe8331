"""Finds the largest micro-batch that fits in memory, by steps of real training.

G = global batch, m = micro-batch, V = ceil(G/m) shards of a step, W = processes.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from rich.console import Console

from lockstep.base.errors import ConfigError
from lockstep.core.host.memory_meter import GB, available_bytes
from lockstep.run.recipe import Recipe
from lockstep.tools.tune import trial_process
from lockstep.tools.tune.micro_batch_table import TrialRow, Verdict, counted, recommendations, shards_of, table
from lockstep.tools.tune.size_search import candidates, largest
from lockstep.tools.tune.trial_request import TrialRequest

PART = 0.8
"""Of the memory that is available, so much may be used: the rest is for page cache and for what grows later."""
SHARDS = 16
"""Micro-batches in a step of a trial, at most; what more of them would hold is added as ballast."""

WARNING = """The micro-batch is part of the numeric recipe: another one gives other weights, and a run is not resumed \
with it.
Choose it once, before the first run."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    processes: int
    """W, of the run on this machine."""
    on_gpu: bool
    bytes: int | None
    """None: as much as the GPU has."""
    told: str
    """Where the number comes from."""


@dataclass(kw_only=True)
class Finder:
    """Tries micro-batches, each once, and remembers what came of them."""

    recipe: Recipe
    budget: Budget
    say: Callable[[str], None]
    rows: dict[int, TrialRow] = field(default_factory=dict)

    def fits(self, m: int) -> bool:
        """Whether steps with this micro-batch stay within the budget.

        Raises ConfigError where there is no room even for the model, TrialFailed where the model or the data fails
        for a reason of its own; not for m = 1, which BatchNorm refuses.
        """
        if m not in self.rows:
            self.say(f"trying train.micro_batch={m} ...")
            self.rows[m] = self._tried(m)
        return self.rows[m].verdict == "fits"

    def _tried(self, m: int) -> TrialRow:
        done = trial_process.run(self._task(m), budget_bytes=None if self.budget.on_gpu else self.budget.bytes)
        is_single = m == 1 < self.recipe.train.global_batch
        if done.has_failed and not (is_single and done.answer.began):
            raise done.failure(f"the trial of train.micro_batch={m}")
        row = TrialRow(
            m=m,
            verdict=self._verdict(done),
            peak_bytes=done.answer.peak_bytes if self.budget.on_gpu else done.peak_bytes,
            samples_per_second=done.answer.samples_per_second,
            why=_why(done),
        )
        if row.verdict != "fits" and not done.answer.began:
            raise ConfigError(f"there is no room even for the model: {self.remedy(row)}")
        return row

    def _verdict(self, done: trial_process.Trial) -> Verdict:
        if done.is_over:
            return "over the budget"
        if done.killed_by:
            return "killed"
        if done.has_failed:
            return "fails"
        if done.answer.out_of_memory:
            return "out of memory"
        is_within = self.budget.bytes is None or done.answer.peak_bytes <= self.budget.bytes
        return "fits" if is_within else "over the budget"

    def _task(self, m: int) -> TrialRequest:
        """A step of as many micro-batches as one of W processes has, or of SHARDS; and what that leaves out.

        A process that has done n micro-batches holds up to floor(log2(n)) + 1 partial sums of gradients.
        """
        batch, exact = self.recipe.train.global_batch, self.recipe.run.reproducibility == "exact"
        share = -(-shards_of(batch, m) // self.budget.processes)
        tried = min(share, SHARDS)
        sums = (share.bit_length() - tried.bit_length()) * exact
        buckets = int(self.budget.processes > 1)
        settings = {"micro_batch": m, "global_batch": min(batch, m * tried), "steps": 10**6}
        return TrialRequest(
            recipe=trial_process.alone(self.recipe, data={"workers": 0}, train=settings),
            processes=self.budget.processes,
            copies=sums + buckets,
            device_bytes=self.budget.bytes if self.budget.on_gpu else None,
        )

    def remedy(self, row: TrialRow) -> str:
        """What happened to a micro-batch that did not fit, and what to do."""
        budget = self.budget
        there = f"{budget.bytes / GB:.2f} GB, {budget.told}" if budget.bytes is not None else budget.told
        fewer = "fewer processes (launch.processes), " if budget.processes > 1 else ""
        words = f"\n  {row.why}" if row.why else ""
        return (
            f"{row.verdict}, with more than {row.peak_bytes / GB:.2f} GB ({there}){words}\n"
            f"  Allow more with --memory, or take {fewer}a smaller model or shorter samples."
        )


def _why(done: trial_process.Trial) -> str:
    if done.has_failed:
        return done.last_words.splitlines()[-1] if done.last_words else f"it ended with exit code {done.code}"
    return f"It was ended by {done.killed_by}, as the system does when memory runs out." if done.killed_by else ""


def budget_of(recipe: Recipe, memory_gb: float | None, *, on_gpu: bool) -> Budget:
    """What one process may use: as asked, else the whole GPU, or its share of PART of what the machine has left."""
    processes = recipe.launch.processes_here(recipe.run.threads, recipe.train.global_batch)
    if memory_gb is not None:
        return Budget(processes=processes, on_gpu=on_gpu, bytes=int(memory_gb * GB), told="--memory")
    if on_gpu:
        return Budget(processes=processes, on_gpu=True, bytes=None, told="all of the GPU")
    there = available_bytes()
    told = f"{PART:.0%} of the {there / GB:.1f} GB that are available, for {counted(processes)}"
    return Budget(processes=processes, on_gpu=False, bytes=int(PART * there / processes), told=told)


def chosen(finder: Finder, known: list[int]) -> int:
    """The largest that fits; one that divides G evenly if that is at least half as large. Raises ConfigError."""
    best = largest(known, finder.fits)
    if best is None:
        row = next(row for row in finder.rows.values() if row.verdict != "fails")
        raise ConfigError(f"not even train.micro_batch={row.m} fits: {finder.remedy(row)}")
    batch = finder.recipe.train.global_batch
    even = max(m for m in known if m <= best and batch % m == 0)
    return even if 2 * even >= best and finder.fits(even) else best


def find(recipe: Recipe, budget: Budget, *, samples: int, console: Console) -> int:
    """Try micro-batches, print what came of them, and return the one for the config.

    Raises ConfigError when nothing fits, TrialFailed when a trial fails for another reason than memory.
    """
    batch = recipe.train.global_batch
    each = " for each process" if budget.processes > 1 else ""
    limit = f"{budget.bytes / GB:.2f} GB{each}" if budget.bytes is not None else "the memory of the GPU"
    console.print(f"micro-batches of train.global_batch={batch} within {limit} ({budget.told})", soft_wrap=True)
    with console.status("") as status:
        finder = Finder(recipe=recipe, budget=budget, say=status.update)
        m = chosen(finder, candidates(batch, samples))
    rows = [finder.rows[m] for m in sorted(finder.rows)]
    console.print(table(rows, batch))
    for line in recommendations(rows, m, global_batch=batch, processes=budget.processes):
        console.print(line, soft_wrap=True)
    if recipe.data.workers:
        console.print(f"The memory of data.workers={recipe.data.workers} comes on top of it.", soft_wrap=True)
    console.print(WARNING, soft_wrap=True)
    return m
