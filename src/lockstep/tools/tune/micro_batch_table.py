"""The trials of micro-batches as a table, and what follows from them in sentences.

G = global batch, m = micro-batch, V = ceil(G/m) shards of a step, W = processes.
"""

from dataclasses import dataclass
from typing import Literal

from rich.table import Table
from rich.text import Text

from lockstep.core.host.memory_meter import GB
from lockstep.tools.trials import processes_text

FASTER = 1.05
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


def recommended(rows: list[TrialRow], *, global_batch: int, processes: int) -> int:
    """The fastest that fits; of about equally fast ones the largest that divides G.

    A step has to have work for every process, if any size allows that.
    """
    fitting = [row for row in rows if row.verdict == "fits"]
    busy = [row for row in fitting if shards_of(global_batch, row.m) >= processes]
    usable = busy or [row for row in fitting if row.m == min(each.m for each in fitting)]
    enough = max(row.samples_per_second for row in usable) / FASTER
    fast = [row.m for row in usable if row.samples_per_second >= enough]
    return max([m for m in fast if global_batch % m == 0] or fast)


def reasons(rows: list[TrialRow], m: int, *, global_batch: int, processes: int) -> list[str]:
    """Why `m` is recommended, and what else follows from the table."""
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
