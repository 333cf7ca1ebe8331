"""The trials of micro-batches as a table, and what follows from them in sentences.

G = global batch, m = micro-batch, V = ceil(G/m) shards of a step, W = processes.
"""

from dataclasses import dataclass
from typing import Literal

from rich.table import Table
from rich.text import Text

from lockstep.core.host.memory_meter import GB
from lockstep.tools.trials import processes_text

FASTER = 1.03
"""Smaller differences in speed are noise."""

TrialVerdict = Literal["fits", "over the budget", "out of memory", "killed", "fails"]
STYLES = {"fits": "green", "fails": "yellow"}


@dataclass(frozen=True, kw_only=True)
class TrialRow:
    m: int
    verdict: TrialVerdict
    peak_bytes: int
    samples_per_second: float
    """Of one process."""
    why: str = ""


def shards_of(global_batch: int, m: int) -> int:
    return -(-global_batch // m)


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


def recommendations(rows: list[TrialRow], m: int, *, global_batch: int, processes: int) -> list[str]:
    """What follows from the table; `m` is the recommended micro-batch."""
    fitting = {row.m: row for row in rows if row.verdict == "fits"}
    lines = [f"train.micro_batch={m} is the largest that fits."]
    if max(fitting) > m:
        lines = [f"train.micro_batch={m} fits and divides {global_batch}; {max(fitting)}, the largest, does not."]
    elif global_batch % m:
        left = global_batch % m
        lines.append(f"It does not divide {global_batch}: each step's last micro-batch holds {left} samples only.")
    fastest = max(fitting.values(), key=lambda row: row.samples_per_second)
    factor = fastest.samples_per_second / fitting[m].samples_per_second
    if fastest.m <= m and factor >= FASTER:
        lines.append(f"Fastest is train.micro_batch={fastest.m}, with {factor:.2f} times its samples per second.")
    shards = shards_of(global_batch, m)
    if shards < processes:
        busy = [each for each in fitting if shards_of(global_batch, each) >= processes]
        remedy = f"; train.micro_batch={max(busy)} keeps all of them at work" if busy else ""
        have = "has" if shards == 1 else "have"
        lines.append(f"With it only {shards} of {processes_text(processes)} {have} work in a step{remedy}.")
    return lines + [f"m = {row.m} fails: {row.why}" for row in rows if row.verdict == "fails"]
