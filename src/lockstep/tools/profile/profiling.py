"""`lockstep profile`: where the time of a step goes, measured on the real processes."""

import json
import statistics
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from lockstep.base import storage
from lockstep.base.errors import ConfigError
from lockstep.base.escaping_console import escape_name
from lockstep.core.host.phases import BUSY, OF_STEPS, Phase
from lockstep.core.host.signals import ended_by_sigterm
from lockstep.observe.profile.step_trace import trace_file
from lockstep.recipe.recipe import Recipe
from lockstep.tools import trials
from lockstep.tools.profile.rank_profile import STAGE, ProfileRequest, RankProfile
from lockstep.tools.trials import TrialFailed, prepared, processes_text, timed_lines

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


def print_profile(ranks: Sequence[RankProfile], console: Console, *, traced: int) -> None:
    """Print tables, the memory of the rank that needs most, and the most expensive operators with their lines."""
    console.print(time_table(ranks))
    console.print()
    console.print(rank_table(ranks))
    rank = max(ranks, key=lambda rank: rank.peak_bytes)
    kinds = ", ".join(f"{kind} {rank.memory[kind] / MIB:.1f}" for kind in KINDS)
    memory = f"memory of rank {rank.rank}: {rank.peak_bytes / MIB:.0f} MiB at its peak; of that {kinds}"
    console.print(f"\n{memory}", soft_wrap=True)
    for number, each in enumerate(ranks[0].top(), start=1):
        cost = f"{1000 * each.seconds / traced:.2f} ms in {each.calls / traced:.0f} calls a step"
        called_in = f", {escape_name(each.line)}" if each.line else ""
        console.print(f"{number}. {each.name}: {cost}{called_in}", soft_wrap=True)


def time_table(ranks: Sequence[RankProfile]) -> Table:
    """Return a table of the milliseconds of each phase: mean over ranks, its share, least and most of a rank."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, title="a step", title_justify="left")
    table.add_column("")
    names = ("ms", "share", *(() if len(ranks) == 1 else ("least", "most", "rank")))
    for name in names:
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
            f"{1000 * busy(rank):.2f}",
            f"{1000 * rank.phases['exchange']:.2f}",
            f"{rank.flops / 1e9:.2f}",
            f"{utilization(rank):.0%}",
            f"{rank.peak_bytes / MIB:.0f}",
        )
    return table


def busy(rank: RankProfile) -> float:
    """Return the seconds of a step in which a rank does not wait for others."""
    return sum(rank.phases[name] for name in BUSY)


def utilization(rank: RankProfile) -> float:
    """Return the operations of a step per second, as a share of the peak (MFU)."""
    return rank.flops / rank.step_seconds / rank.peak_flops if rank.peak_flops else 0.0


def advice(ranks: Sequence[RankProfile], *, is_equal: bool) -> str:
    """Return a sentence on what takes most time, and what to change. `is_equal`: all ranks have the same work."""
    whole = statistics.mean(rank.step_seconds for rank in ranks)
    share = {name: statistics.mean(rank.phases[name] for rank in ranks) / whole for name in OF_STEPS}
    share["exchange"] = min(rank.phases["exchange"] for rank in ranks) / whole  # more is waiting for a slow rank
    if min(rank.phases["data"] for rank in ranks) > MUCH * whole:  # on every rank, on some perhaps longer
        return f"{share['data']:.0%} of a step is {ADVICE['data']}."
    computing = statistics.mean(map(utilization, ranks)) / max(share["forward"] + share["backward"], 1e-9)
    if (rank := _slow_rank(ranks)) is not None:
        return _slow_rank_advice(rank, ranks, is_equal=is_equal)
    if (most := max(ADVICE, key=share.__getitem__)) and share[most] > MUCH:
        return f"{share[most]:.0%} of a step is {ADVICE[most]}."
    if computing < LITTLE_COMPUTING:
        return (
            f"The passes reach {computing:.0%} of what matrix products can: larger micro-batches (train.micro_batch), "
            "train.compile, or cheaper operators than those above."
        )
    return "The time is in the model's own products: bf16 where the processor has it, or more processes."


def _slow_rank(ranks: Sequence[RankProfile]) -> RankProfile | None:
    """Find the rank that is slower per micro-batch than the others and keeps them waiting, if one does."""
    if len(ranks) < 2 or not all(rank.micro_batches for rank in ranks):
        return None
    each = [busy(rank) / rank.micro_batches for rank in ranks]
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


@dataclass(frozen=True, kw_only=True)
class ProfileOptions:
    steps: int
    traced: int
    to: Path
    """Folder for the traces and the figures."""


def profile(recipe: Recipe, options: ProfileOptions, *, console: Console) -> list[RankProfile]:
    """Measure, print tables and advice, write the traces and figures. Raises ConfigError, TrialFailed."""
    processes = recipe.launch.processes_here(recipe.run.threads, recipe.train.shards)
    try:
        options.to.mkdir(parents=True, exist_ok=True)
        for file in [*options.to.glob("trace-rank-*.json.gz"), options.to / FACTS]:  # of an earlier profile
            file.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"--to {options.to}: cannot be written ({error.strerror}); name another folder") from None
    prepared(recipe)
    report = timed_lines(console)
    report(f"starting {processes_text(processes)} ...")
    ranks = _run_steps(recipe, options, processes=processes, report=report)
    sentence = advice(ranks, is_equal=recipe.parallel.HAS_EQUAL_WORK)
    facts = {"advice": sentence, "traced_steps": options.traced, "ranks": [each.model_dump() for each in ranks]}
    storage.write(options.to / FACTS, json.dumps(facts, indent=1))
    print_profile(ranks, console, traced=options.traced)
    text = f"traces, for https://ui.perfetto.dev or TensorBoard: {trace_file(options.to, 0)}"
    console.print(f"\n{sentence}\n\n{text}{' and so on' if processes > 1 else ''}", soft_wrap=True)
    return ranks


def _run_steps(
    recipe: Recipe, options: ProfileOptions, *, processes: int, report: Callable[[str], None]
) -> list[RankProfile]:
    """Run the steps in a temporary folder, and report their stages. Raises TrialFailed."""
    steps = WARM_UP + options.steps + COUNTED + options.traced + LAST
    temporary = tempfile.TemporaryDirectory(prefix="lockstep-profile-", ignore_cleanup_errors=True)
    with ended_by_sigterm(), temporary as made:
        sections = trials.without_interruptions(recipe, Path(made) / "run", steps=steps)
        sections["observe"] = {"sinks": (), "file": None, "desync_every": None}
        varied = trials.varied(recipe, sections, parallel=recipe.parallel.fitted(processes))
        request = ProfileRequest(
            facts=Path(made), traces=options.to.absolute(), warm_up=WARM_UP, steps=options.steps, traced=options.traced
        )
        stages = _stage_poll(Path(made) / STAGE, report)
        trial = trials.run(varied, Path(made), task="profile", request=request, processes=processes, poll=stages)
        if trial.code:
            raise TrialFailed(trial.output, trial.code)
        files = [Path(made) / f"rank-{rank}.json" for rank in range(processes)]
        return [RankProfile.model_validate_json(file.read_bytes()) for file in files]


def _stage_poll(file: Path, report: Callable[[str], None]) -> Callable[[], None]:
    """Return a function that reports the file's line where it has changed since the last call."""
    before = ""

    def look() -> None:
        nonlocal before
        with suppress(FileNotFoundError):
            if (text := file.read_text(encoding="utf-8")) != before:
                before = text
                report(f"{text} ...")

    return look
