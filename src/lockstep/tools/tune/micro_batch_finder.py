"""Finds the fastest micro-batch that fits in memory, by steps of real training, in few trials.

G = global batch, m = micro-batch, V = ceil(G/m) shards of a step, W = processes.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lockstep.base.errors import ConfigError
from lockstep.core.host.memory_meter import GB, available_bytes
from lockstep.recipe.recipe import Recipe
from lockstep.tools.trials import processes_text, timed_lines
from lockstep.tools.tune import trial_process
from lockstep.tools.tune.trial_process import MEMORY_SIGNALS, TrialRequest, TrialVerdict

USABLE = 0.8
"""Fraction of the available memory that may be used: the rest is for page cache and for what grows later."""
MOST_SHARDS = 16
"""Micro-batches in a step of a trial, at most; the memory of further ones is added as ballast."""

WARNING = """The micro-batch is part of the numeric recipe: another one gives other weights, and a run is not resumed \
with it.
Choose it once, before the first run."""
FASTER = 1.05
"""Ratio of speeds that counts as a difference: smaller ones are noise."""

STYLES = {"fits": "green", "fails": "yellow"}


@dataclass(frozen=True, kw_only=True)
class TrialRow:
    m: int
    verdict: TrialVerdict
    peak_bytes: int
    samples_per_second: float
    """Speed of one process."""
    why: str = ""


def shards_of(global_batch: int, m: int) -> int:
    return -(-global_batch // m)


def recommended(rows: list[TrialRow], *, global_batch: int, processes: int) -> int:
    """Return the fastest that fits; of about equally fast ones the largest that divides G. A step has to have work for
    every process, if any size allows that."""
    fitting = [row for row in rows if row.verdict == "fits"]
    busy = [row for row in fitting if shards_of(global_batch, row.m) >= processes]
    usable = busy or [row for row in fitting if row.m == min(each.m for each in fitting)]
    enough = max(row.samples_per_second for row in usable) / FASTER
    fast = [row.m for row in usable if row.samples_per_second >= enough]
    return max([m for m in fast if global_batch % m == 0] or fast)


def reasons(rows: list[TrialRow], m: int, *, global_batch: int, processes: int) -> list[str]:
    """Explain why `m` is recommended, and what else follows from the table."""
    fitting = {row.m: row for row in rows if row.verdict == "fits"}
    biggest, shards = max(fitting), shards_of(global_batch, m)
    factor = fitting[m].samples_per_second / fitting[biggest].samples_per_second
    lines = [f"train.micro_batch={m} is the largest that fits."]
    if shards_of(global_batch, biggest) < processes <= shards:
        lines = [f"train.micro_batch={m} is the fastest with which each of {processes_text(processes)} has work."]
    elif biggest > m and factor >= FASTER:
        faster = f"{factor:.2f} times the samples per second of {biggest}, the largest that fits"
        lines = [f"train.micro_batch={m} is the fastest, with {faster}."]
    elif biggest > m and global_batch % biggest:
        lines = [f"train.micro_batch={m} fits and divides {global_batch}; {biggest}, the largest, does not."]
    elif biggest > m:
        lines = [f"train.micro_batch={m} is about as fast as any that fits."]
    if global_batch % m:
        left = global_batch % m
        lines.append(f"It does not divide {global_batch}: each step's last micro-batch holds {left} samples only.")
    if shards < processes:
        lines.append(f"With it only {shards} of {processes_text(processes)} {'has' if shards == 1 else 'have'} work.")
    return lines + [f"m = {row.m} fails: {row.why}" for row in rows if row.verdict == "fails"]


@dataclass(frozen=True, kw_only=True)
class Budget:
    processes: int
    """W of the run on this machine."""
    on_gpu: bool
    bytes: int | None
    """Limit of memory; None: as much as the GPU has."""
    origin: str
    """Source of the limit, as text."""


@dataclass(kw_only=True)
class Finder:
    """Tries micro-batches, each once, and keeps the results."""

    recipe: Recipe
    budget: Budget
    report: Callable[[str], None]
    rows: dict[int, TrialRow] = field(default_factory=dict)
    faster_precision: str = ""
    """Sentence on a much faster precision of this processor; empty without one."""

    def fits(self, m: int) -> bool:
        """Return whether steps with this micro-batch stay within the budget.

        Raises ConfigError where not even the model fits, TrialFailed where the model or the data fails for another
        reason; not for m = 1, which BatchNorm refuses.
        """
        if m not in self.rows:
            self.report(f"trying train.micro_batch={m} ...")
            self.rows[m] = self._try(m)
        return self.rows[m].verdict == "fits"

    def _try(self, m: int) -> TrialRow:
        budget = self.budget.bytes
        trial = trial_process.run(self._request(m), budget_bytes=None if self.budget.on_gpu else budget)
        verdict, why = trial.verdict, ""
        self.faster_precision = trial.faster_precision or self.faster_precision
        is_single = m == 1 < self.recipe.train.global_batch
        if verdict == "fails":
            if not (is_single and trial.began):
                raise trial.failure(f"the trial of train.micro_batch={m}")
            why = (trial.output.rstrip().splitlines() or [f"it ended with exit code {trial.code}"])[-1]
        elif verdict == "killed":
            why = f"It was ended by {MEMORY_SIGNALS[trial.code]}, as the system does when memory runs out."
        elif verdict == "fits" and budget is not None and trial.device_bytes > budget:
            verdict = "over the budget"
        peak = trial.device_bytes if self.budget.on_gpu else max(trial.resident_bytes, trial.device_bytes)
        row = TrialRow(m=m, verdict=verdict, peak_bytes=peak, samples_per_second=trial.samples_per_second, why=why)
        if verdict != "fits" and not trial.began:
            raise ConfigError(f"not even the model fits in memory: {self.remedy(row)}")
        return row

    def _request(self, m: int) -> TrialRequest:
        """Request a step of the micro-batches of one of W processes, at most MOST_SHARDS, and ballast for further ones.
        A process that has done n micro-batches holds up to floor(log2(n)) + 1 partial sums of gradients."""
        batch, exact = self.recipe.train.global_batch, self.recipe.run.reproducibility == "exact"
        share = -(-shards_of(batch, m) // self.budget.processes)
        tried = min(share, MOST_SHARDS)
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
        """Explain why a micro-batch did not fit, and what to do."""
        budget = self.budget
        limit = f"{budget.bytes / GB:.2f} GB, {budget.origin}" if budget.bytes is not None else budget.origin
        fewer = "fewer processes (launch.processes), " if budget.processes > 1 else ""
        why = f"\n  {row.why}" if row.why else ""
        return (
            f"{row.verdict}, with more than {row.peak_bytes / GB:.2f} GB ({limit}){why}\n"
            f"  Allow more with --memory, or take {fewer}a smaller model or shorter samples."
        )


def budget_of(recipe: Recipe, memory_gb: float | None, *, on_gpu: bool) -> Budget:
    """Return the memory for one process: as requested, else the whole GPU, or its share of what is usable here."""
    processes = recipe.launch.processes_here(recipe.run.threads, recipe.train.global_batch)
    if memory_gb is not None:
        return Budget(processes=processes, on_gpu=on_gpu, bytes=int(memory_gb * GB), origin="--memory")
    if on_gpu:
        return Budget(processes=processes, on_gpu=True, bytes=None, origin="all of the GPU")
    available = available_bytes()
    origin = f"{USABLE:.0%} of the {available / GB:.1f} GB that are available, for {processes_text(processes)}"
    return Budget(processes=processes, on_gpu=False, bytes=int(USABLE * available / processes), origin=origin)


def find(recipe: Recipe, budget: Budget, *, samples: int, console: Console) -> int:
    """Try sizes to find the largest that fits, and the largest that also divides G; print the results, and return the
    micro-batch for the config.

    Raises ConfigError when nothing fits, TrialFailed when a trial fails for another reason than memory.
    """
    batch, sizes = recipe.train.global_batch, candidates(recipe.train.global_batch, samples)
    each = " for each process" if budget.processes > 1 else ""
    limit = f"{budget.bytes / GB:.2f} GB{each}" if budget.bytes is not None else "the memory of the GPU"
    console.print(f"micro-batches of train.global_batch={batch} within {limit} ({budget.origin})", soft_wrap=True)
    finder = Finder(recipe=recipe, budget=budget, report=timed_lines(console))
    if (best := largest(sizes, finder.fits)) is None:
        row = next(row for row in finder.rows.values() if row.verdict != "fails")
        raise ConfigError(f"not even train.micro_batch={row.m} fits: {finder.remedy(row)}")
    finder.fits(max(m for m in sizes if m <= best and batch % m == 0))
    rows = [finder.rows[m] for m in sorted(finder.rows)]
    m = recommended(rows, global_batch=batch, processes=budget.processes)
    console.print(table(rows, batch))
    lines = reasons(rows, m, global_batch=batch, processes=budget.processes)
    if recipe.data.workers:
        lines.append(f"The memory of data.workers={recipe.data.workers} comes on top of it.")
    if faster := finder.faster_precision:
        lines.append(f"{faster[0].upper()}{faster[1:]}.")
    console.print(*lines, WARNING, sep="\n", soft_wrap=True)
    return m


def table(rows: list[TrialRow], global_batch: int) -> Table:
    made = Table("m", "micro-batches a step", "peak memory", "samples/s", "verdict")
    for column in made.columns[:4]:
        column.justify = "right"
    for row in rows:
        over = "" if row.verdict == "fits" else "> "
        made.add_row(
            str(row.m),
            f"{shards_of(global_batch, row.m)}{'' if global_batch % row.m == 0 else ' (uneven)'}",
            f"{over}{row.peak_bytes / GB:.2f} GB" if row.peak_bytes else "",
            f"{row.samples_per_second:,.0f}" if row.samples_per_second else "",
            Text(row.verdict, STYLES.get(row.verdict, "red")),
        )
    return made


def candidates(global_batch: int, samples: int) -> list[int]:
    """Return divisors of G and powers of two, ascending, up to the number of samples that a step can have."""
    limit = min(global_batch, samples)
    powers = {1 << bit for bit in range(limit.bit_length())}
    return sorted(powers | {m for m in range(1, limit + 1) if global_batch % m == 0})


def largest(sizes: list[int], fits: Callable[[int], bool]) -> int | None:
    """Find the largest size that fits, by doubling up to the first that does not, then bisection; None if none fits.

    As long as none fits, larger ones are still tried: they keep fewer partial sums of gradients, and BatchNorm refuses
    single samples.
    """
    best, above = None, None
    for m in [m for m in sizes if m.bit_count() == 1 or m == sizes[-1]]:
        if fits(m):
            best = m
        elif best is not None:
            above = m
            break
    if best is None:
        return None
    between = [m for m in sizes if best < m < above] if above is not None else []
    too_large = bisect_left(between, 1, key=lambda m: int(not fits(m)))
    return between[too_large - 1] if too_large else best
