"""`lockstep profile`: where the time of a step goes, measured on the real processes."""

import json
import statistics
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel
from rich import box
from rich.console import Console
from rich.table import Table

from lockstep.base import storage
from lockstep.base.errors import ConfigError
from lockstep.base.escaping_console import escape_name
from lockstep.core.host.phases import BUSY, OF_STEPS, Phase
from lockstep.observe.profile.operators import Operator
from lockstep.observe.profile.step_trace import trace_file
from lockstep.recipe.recipe import Recipe
from lockstep.tools import trials
from lockstep.tools.trials import prepared, processes_text, timed_lines

WARM_UP = 4
"""Steps that are not measured: buckets, caches and allocators are set up in them."""
COUNTED = 2
"""Steps in which operations and kept tensors are counted."""
LAST = 1
"""Number of steps after the traced ones: the last step saves."""
FACTS = "profile.json"
MIB = 2**20
SLOW = 1.2
"""Factor over the median of the others' time per micro-batch from which a rank is slow."""
DELAYED = 0.5
"""Share of the wait for a rank from which other processes on its core are reported as its cause."""
MUCH = 0.2
"""Share of a step that is worth a change."""
LITTLE_COMPUTING = 0.3
"""Share of the peak under which micro-batches are too small, or operators too slow."""
WAITS = 0.05
"""Share of a step from which a rank that the others wait for is reported."""
KINDS = ("weights", "gradients", "optimizer", "activations")
ADVICE: dict[Phase, str] = {
    "data": "waiting for data: raise data.workers, or make reading cheaper",
    "exchange": "the exchange between ranks, and all of them wait for it: a larger train.global_batch, fewer processes "
    "or a faster network give it a smaller share",
    "optimizer": "the optimizer: a larger train.global_batch gives it a smaller share",
    "other": "bookkeeping: raise observe.log_every, and look at your observers",
}
"""Phase -> why it takes long, and what to change."""
UNITS = {"data": "data", "forward": "forward", "backward": "backward", "exchange": "exchange (exposed)"}
UNITS |= {"optimizer": "optimizer", "other": "bookkeeping"}


class ProfileRequest(BaseModel):
    traces: Path
    warm_up: int
    steps: int
    """Number of steps measured by phase."""
    traced: int
    """Number of steps under the profiler."""


class RankProfile(BaseModel):
    """Measurements of one rank, per step."""

    rank: int
    step_seconds: float
    phases: dict[str, float]
    hidden_seconds: float
    """Time of the exchange of gradients that overlaps the backward pass."""
    delayed_seconds: float
    """Time for which other processes had the training thread's core."""
    micro_batches: int
    peak_bytes: int
    flops: float
    peak_flops: float
    """Operations per second, in a matrix product at the same time as the other ranks."""
    faster_precision: str = ""
    """Sentence on a much faster precision of this processor; empty without one."""
    memory: dict[str, int]
    operators: list[Operator]

    @property
    def busy(self) -> float:
        """Seconds of a step in which the rank does not wait for others."""
        return sum(self.phases[name] for name in BUSY)

    @property
    def utilization(self) -> float:
        """Operations of a step per second, as a share of the peak (MFU)."""
        return self.flops / self.step_seconds / self.peak_flops if self.peak_flops else 0.0


def print_profile(ranks: Sequence[RankProfile], console: Console, *, traced: int) -> None:
    """Print tables, the memory of the rank that needs most, and the most expensive operators with their lines."""
    console.print(time_table(ranks))
    console.print()
    console.print(rank_table(ranks))
    rank = max(ranks, key=lambda rank: rank.peak_bytes)
    kinds = ", ".join(f"{kind} {rank.memory[kind] / MIB:.1f}" for kind in KINDS)
    memory = f"memory of rank {rank.rank}: {rank.peak_bytes / MIB:.0f} MiB at its peak; of that {kinds}"
    console.print(f"\n{memory}", soft_wrap=True)
    for number, each in enumerate(ranks[0].operators, start=1):
        cost = f"{1000 * each.seconds / traced:.2f} ms in {each.calls / traced:.0f} calls a step"
        called_in = f", {escape_name(each.line)}" if each.line else ""
        console.print(f"{number}. {each.name}: {cost}{called_in}", soft_wrap=True)


def time_table(ranks: Sequence[RankProfile]) -> Table:
    """Return a table of the milliseconds of each phase: mean over ranks, its share, least and most of a rank."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, title="a step", title_justify="left")
    table.add_column("")
    for name in ("ms", "share", *(() if len(ranks) == 1 else ("least", "most", "rank"))):
        table.add_column(name, justify="right", no_wrap=True)
    whole = statistics.mean(rank.step_seconds for rank in ranks)

    def add(label: str, seconds: Sequence[float], *, has_share: bool = True) -> None:
        mean, most = statistics.mean(seconds), max(range(len(seconds)), key=seconds.__getitem__)
        cells = [f"{1000 * mean:.2f}", f"{mean / whole:.0%}" if has_share else ""]
        if len(ranks) > 1:
            cells += [f"{1000 * min(seconds):.2f}", f"{1000 * max(seconds):.2f}", str(ranks[most].rank)]
        table.add_row(label, *cells)

    for name in OF_STEPS:
        add(UNITS[name], [rank.phases[name] for rank in ranks])
    table.add_section()
    add("step", [rank.step_seconds for rank in ranks])
    if len(ranks) > 1:
        add("exchange (hidden)", [rank.hidden_seconds for rank in ranks], has_share=False)
    return table


def rank_table(ranks: Sequence[RankProfile]) -> Table:
    """Return a table of each rank's own and waiting time in a step, and its share of the peak in matrix products."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for name in ("rank", "own ms", "waits ms", "GFLOP", "of peak", "peak MiB"):
        table.add_column(name, justify="right", no_wrap=True)
    for rank in ranks:
        table.add_row(
            str(rank.rank),
            f"{1000 * rank.busy:.2f}",
            f"{1000 * rank.phases['exchange']:.2f}",
            f"{rank.flops / 1e9:.2f}",
            f"{rank.utilization:.0%}",
            f"{rank.peak_bytes / MIB:.0f}",
        )
    return table


def advice(ranks: Sequence[RankProfile], *, is_equal: bool) -> str:
    """Return a sentence on what takes most time, and what to change. `is_equal`: all ranks have the same work."""
    whole = statistics.mean(rank.step_seconds for rank in ranks)
    share = {name: statistics.mean(rank.phases[name] for rank in ranks) / whole for name in OF_STEPS}
    share["exchange"] = min(rank.phases["exchange"] for rank in ranks) / whole  # more is waiting for a slow rank
    if min(rank.phases["data"] for rank in ranks) > MUCH * whole:  # on every rank, on some perhaps longer
        return f"{share['data']:.0%} of a step is {ADVICE['data']}."
    computing = statistics.mean(rank.utilization for rank in ranks) / max(share["forward"] + share["backward"], 1e-9)
    if (rank := _slow_rank(ranks)) is not None:
        return _slow_rank_advice(rank, ranks, is_equal=is_equal)
    if (most := max(ADVICE, key=share.__getitem__)) and share[most] > MUCH:
        return f"{share[most]:.0%} of a step is {ADVICE[most]}."
    if computing < LITTLE_COMPUTING:
        return (
            f"The passes reach {computing:.0%} of what matrix products can: larger micro-batches (train.micro_batch), "
            "train.compile, or cheaper operators than those above."
        )
    faster = ranks[0].faster_precision
    return f"The time is in the model's own products: {f'{faster}; or ' if faster else ''}more processes."


def _slow_rank(ranks: Sequence[RankProfile]) -> RankProfile | None:
    """Find the rank that is slower per micro-batch than the others and keeps them waiting, if one does."""
    if len(ranks) < 2 or not all(rank.micro_batches for rank in ranks):
        return None
    each = [rank.busy / rank.micro_batches for rank in ranks]
    place = max(range(len(ranks)), key=each.__getitem__)
    usual = statistics.median(each[:place] + each[place + 1 :])
    is_slow = each[place] > SLOW * usual and _wait_seconds(ranks[place], ranks) > WAITS * ranks[place].step_seconds
    return ranks[place] if is_slow else None


def _wait_seconds(rank: RankProfile, ranks: Sequence[RankProfile]) -> float:
    """Return the seconds of a step for which the others wait longer than this rank."""
    return statistics.median(each.phases["exchange"] for each in ranks if each is not rank) - rank.phases["exchange"]


def _slow_rank_advice(rank: RankProfile, ranks: Sequence[RankProfile], *, is_equal: bool) -> str:
    others = [other for other in ranks if other is not rank]
    more = {name: rank.phases[name] - statistics.median(other.phases[name] for other in others) for name in BUSY}
    where = max(more, key=more.__getitem__)
    text = f"Rank {rank.rank} keeps the others waiting, {1000 * _wait_seconds(rank, ranks):.1f} ms in each step: "
    if where == "data":
        return f"{text}it waits for its data; raise data.workers, or look at its disk."
    if is_equal and rank.delayed_seconds > DELAYED * _wait_seconds(rank, ranks):
        return f"{text}other processes have its core for {1000 * rank.delayed_seconds:.1f} ms of a step."
    change = "look at its processor, heat and memory" if is_equal else "parallel.cut can move blocks to other stages"
    return f"{text}it takes {1000 * more[where]:.1f} ms longer in {UNITS[where]}; {change}."


def profile(recipe: Recipe, *, steps: int, traced: int, to: Path, console: Console) -> list[RankProfile]:
    """Measure `steps` steps and trace `traced` further ones, print tables and advice, and write the traces and figures
    to a folder. Raises ConfigError, TrialFailed."""
    processes = recipe.launch.processes_here(recipe.run.threads, recipe.train.shards)
    try:
        to.mkdir(parents=True, exist_ok=True)
        for file in [*to.glob("trace-rank-*.json.gz"), to / FACTS]:  # of an earlier profile
            file.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"--to {to}: cannot be written ({error.strerror}); name another folder") from None
    prepared(recipe)
    report = timed_lines(console)
    report(f"starting {processes_text(processes)} ...")
    request = ProfileRequest(traces=to.absolute(), warm_up=WARM_UP, steps=steps, traced=traced)
    with trials.temporary_folder("lockstep-profile-") as folder:
        of_all = WARM_UP + steps + COUNTED + traced + LAST
        sections = trials.without_interruptions(recipe, folder / "run", steps=of_all)
        sections["observe"] = {"sinks": (), "file": None, "desync_every": None}
        varied = trials.varied(recipe, sections, parallel=recipe.parallel.fitted(processes))
        trials.run(varied, folder, task="profile", request=request, processes=processes, report=report).checked()
        ranks = trials.results(folder, RankProfile)
    sentence = advice(ranks, is_equal=recipe.parallel.HAS_EQUAL_WORK)
    facts = {"advice": sentence, "traced_steps": traced, "ranks": [each.model_dump() for each in ranks]}
    storage.write(to / FACTS, json.dumps(facts, indent=1))
    print_profile(ranks, console, traced=traced)
    text = f"traces, for https://ui.perfetto.dev or TensorBoard: {trace_file(to, 0)}"
    console.print(f"\n{sentence}\n\n{text}{' and so on' if processes > 1 else ''}", soft_wrap=True)
    return ranks
