"""Forecasts memory, traffic and time of every strategy and world size before the run."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from lockstep.base import plugins, storage
from lockstep.base.errors import ConfigError, LockstepError
from lockstep.base.escaping_console import wide_console
from lockstep.core.host.matmul_speed import faster_precision
from lockstep.parallel.forecast import Cluster, Forecast, Setting
from lockstep.recipe.recipe import Recipe
from lockstep.tools import trials
from lockstep.tools.estimate.machine_measurement import EstimateOptions, MachineMeasurements, measure, per_machine
from lockstep.tools.estimate.process_measurement import shortened
from lockstep.tools.trials import check_writable, prepared, processes_text, strategy_of, timed_lines

MIB = 2**20
LOG_WIDTH = 150
"""Characters of a line where there is no terminal."""
HEADINGS = {
    "fixed": "process",
    "parameters": "weights",
    "gradients": "grads",
    "optimizer": "optim",
    "average": "average",
    "activations": "activ.",
    "communication": "exchange",
    "checkpoint": "saving",
}
"""Kind of memory -> heading."""
TOTALS = ("strategy", "PEAK", "STEP", "verdict")
"""Columns of the narrowest table."""
MOST_WIDTH = 1000


@dataclass(frozen=True, kw_only=True)
class ForecastRow:
    """One strategy on one number of processes."""

    world_size: int
    strategy: str
    device_bytes: int
    forecast: Forecast | None = None
    is_best: bool = False
    why: str = ""
    """Why it is the best, or why it cannot run."""

    @property
    def peak_bytes(self) -> int:
        return self.forecast.memory.peak if self.forecast else 0

    @property
    def seconds(self) -> float:
        return self.forecast.times.total if self.forecast else 0.0

    @property
    def fits(self) -> bool:
        """Whether a device has the memory."""
        return self.forecast is not None and self.peak_bytes <= self.device_bytes

    @property
    def verdict(self) -> str:
        if self.forecast is None:
            return self.why
        if not self.fits:
            missing = (self.peak_bytes - self.device_bytes) / MIB
            return f"needs {missing:.0f} MiB more than {self.device_bytes / MIB:.0f}"
        return self.why if self.is_best else "fits"

    def plain(self) -> dict[str, Any]:
        """Return the values for scripts, in bytes and seconds."""
        forecast = asdict(self.forecast) if self.forecast else None
        if self.forecast and forecast:
            forecast["memory"] |= {"step": self.forecast.memory.step, "peak": self.forecast.memory.peak}
            forecast["times"] |= {"total": self.forecast.times.total}
        return {
            "world": self.world_size,
            "strategy": self.strategy,
            "memory_of_device_bytes": self.device_bytes,
            "fits": self.fits,
            "is_best": self.is_best,
            "verdict": self.verdict,
            "forecast": forecast,
        }


def print_forecasts(rows: list[ForecastRow], console: Console) -> None:
    """Print a table for each world size, and below it what is best and what cannot run."""
    wide = wide_console(console, LOG_WIDTH)
    for world_size in dict.fromkeys(row.world_size for row in rows):
        group = [row for row in rows if row.world_size == world_size]
        if known := [row for row in group if row.forecast]:
            wide.print(fitting_table(known, wide))
        for row in group:
            if notes := [*([row.why] if row.why else ()), *(row.forecast.notes if row.forecast else ())]:
                console.print(f"{row.strategy}: {'; '.join(notes)}", soft_wrap=True)
        if not any(row.fits for row in group):
            console.print(f"none fits {group[0].device_bytes / MIB:.0f} MiB: try train.recompute=true", soft_wrap=True)
        console.print()


def fitting_table(rows: list[ForecastRow], console: Console) -> Table:
    """Return a table of one world size's forecasts: with the kinds of memory, without, or of totals, as it fits."""
    texts, kinds = [cells(row) for row in rows], HEADINGS.values()
    title = processes_text(rows[0].world_size)
    title += f", each with {rows[0].device_bytes / MIB:.0f} MiB: memory in MiB, traffic per step in MiB, a step in ms"
    every = [each for each in texts[0] if each not in kinds or any(text[each] != "0.0" for text in texts)]
    for columns in (every, [each for each in every if each not in kinds], TOTALS):
        made = Table(title=title, title_justify="left")
        if columns is not every:
            made.caption, made.caption_justify = "a wider terminal shows more, --json all", "left"
        for column in columns:
            has_words = column in ("strategy", "verdict")
            made.add_column("" if has_words else column, justify="left" if has_words else "right", no_wrap=True)
        for row, text in zip(rows, texts, strict=True):
            made.add_row(*(text[column] for column in columns), style="bold" if row.is_best else "")
        if Measurement.get(console, console.options.update(max_width=MOST_WIDTH), made).maximum <= console.width:
            break
    return made


def cells(row: ForecastRow) -> dict[str, str | Text]:
    assert row.forecast is not None
    memory, times = row.forecast.memory, row.forecast.times
    verdict = Text("fits") if row.fits else Text("too much", "red")
    return {
        "strategy": row.strategy,
        **{heading: f"{getattr(memory, kind) / MIB:.1f}" for kind, heading in HEADINGS.items()},
        "PEAK": f"{memory.peak / MIB:.0f}{'' if memory.peak == memory.step else ' at start'}",
        "sent": f"{row.forecast.sent_bytes / MIB:.1f}",
        "STEP": f"{1e3 * times.total:.1f}",
        "waiting": f"{1e3 * (times.exchange + times.idle):.1f}",
        "rest": f"{1e3 * times.rest:.1f}",
        "bubble": f"{row.forecast.bubble:.0%}" if row.forecast.bubble else "",
        "verdict": Text("best", "green") if row.is_best else verdict,
    }


def estimate(recipe: Recipe, options: EstimateOptions, *, console: Console, to: Path | None) -> list[ForecastRow]:
    """Measure, compute and print; write JSON to `to`. Raises ConfigError, TrialFailed."""
    given = {"memory": options.memory_bytes, "bandwidth": options.bandwidth, "per-machine": options.per_machine}
    for option, value in given.items():
        if value is not None and value <= 0:
            raise ConfigError(f"--{option}: {value:g} is not more than 0")
    check_writable("--json", to)
    with trials.forking(recipe, "estimate"):
        prepared(recipe)
        measured = measure(recipe, options, report=timed_lines(console))
    return report(recipe, options, measured, console=console, to=to)


def report(
    recipe: Recipe, options: EstimateOptions, measured: MachineMeasurements, *, console: Console, to: Path | None
) -> list[ForecastRow]:
    """Compute from measurements and print; write JSON to `to`."""
    rows = [row for size in options.world_sizes for row in forecasts_for(recipe, options, measured, world_size=size)]
    print_forecasts(rows, console)
    console.print(*explanation(recipe, options, measured), sep="\n", soft_wrap=True)
    if to is not None:
        storage.write(to, json.dumps(document(rows, recipe, options, measured=measured), indent=1))
    return rows


def forecasts_for(
    recipe: Recipe, options: EstimateOptions, measured: MachineMeasurements, *, world_size: int
) -> list[ForecastRow]:
    """Return a row for each strategy, the fastest that fits marked."""
    local = min(per_machine(world_size, options, measured.slots), world_size)
    whole = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None
    memory = options.memory_bytes or int(whole or psutil.virtual_memory().total // local)
    cluster = measured.cluster(world_size, per_machine=local, bandwidth=options.bandwidth)
    rows = []
    for name in plugins.names("parallel.strategies"):
        row = ForecastRow(world_size=world_size, strategy=name, device_bytes=memory)
        try:
            rows.append(replace(row, forecast=forecast_of(name, recipe, measured, cluster=cluster)))
        except LockstepError as error:
            rows.append(replace(row, why=str(error).splitlines()[0]))
    return judged(rows, configured=recipe.parallel.kind)


def forecast_of(name: str, recipe: Recipe, measured: MachineMeasurements, *, cluster: Cluster) -> Forecast:
    """Return the strategy's own forecast, plus the time that its trial took beyond it. Raises ConfigError where it has
    none, LaunchError or ModelError where it cannot run."""
    computed = predicted(name, recipe, measured, cluster=cluster)
    size = measured.nearest_trial(cluster)
    if name not in measured.trials.get(size, {}):
        return computed
    here, times = measured.cluster(size, per_machine=size), computed.times
    trial = predicted(name, shortened(recipe), measured, cluster=here)
    beyond = measured.trials[size][name] - trial.times.total
    rest = beyond / trial.turns / here.slowdown * computed.turns * cluster.slowdown
    return replace(computed, times=replace(times, rest=max(rest, -times.total / 2)))


def predicted(name: str, recipe: Recipe, measured: MachineMeasurements, *, cluster: Cluster) -> Forecast:
    setting = Setting(
        section=strategy_of(recipe, name),
        shards=recipe.train.shards,
        is_exact=recipe.run.reproducibility == "exact",
        has_average=bool(recipe.train.ema),
        facts=measured.alone,
        seconds=measured.seconds(min(cluster.per_machine, cluster.slots)),
        cluster=cluster,
    )
    forecast: Forecast = plugins.implementation("parallel.strategies", name, "forecast").forecast(setting)
    return forecast


def judged(rows: Sequence[ForecastRow], *, configured: str) -> list[ForecastRow]:
    """Mark the best row: the fastest that fits; within 2 % of it the config's own, then that of least memory."""
    fitting = [row for row in rows if row.fits]
    if not fitting:
        return list(rows)
    fastest = min(row.seconds for row in fitting)
    equal = [row for row in fitting if row.seconds <= 1.02 * fastest]
    best = min(equal, key=lambda row: (row.strategy != configured, row.peak_bytes))
    why = "the only one that fits" if len(fitting) == 1 else "the fastest that fits"
    if len(equal) > 1:
        reason = "and the config's own" if best.strategy == configured else "least memory"
        why = f"as fast as any that fits, {reason}"
    return [replace(row, is_best=True, why=why) if row is best else row for row in rows]


def explanation(recipe: Recipe, options: EstimateOptions, measured: MachineMeasurements) -> list[str]:
    """Describe, in sentences, what was measured and what was computed from it."""
    facts, links = measured.alone, measured.crowded.links if measured.crowded else None
    times = facts.seconds
    saved = sum(block.saved_bytes for block in facts.blocks)
    less = sum(block.handed_bytes for block in facts.blocks) + max(block.saved_bytes for block in facts.blocks)
    lines = [
        f"Measured here: a process without a model {facts.fixed_bytes / MIB:.0f} MiB; the largest micro-batch of "
        f"{recipe.train.micro_batch} keeps {saved / MIB:.1f} MiB for its backward pass, beside "
        f"{facts.working_bytes / MIB:.0f} MiB of working memory; a micro-batch {1e3 * times.passes:.1f} ms, the update "
        f"{1e3 * times.update:.1f} ms, alone.",
    ]
    if measured.crowded is not None:
        lines.append(
            f"With {measured.together} processes at once: a micro-batch {1e3 * measured.crowded.seconds.passes:.1f} ms."
        )
    parameters = sum(each.bytes for each in facts.weights) // 4
    if faster := faster_precision(recipe.train.precision, torch.device(facts.device), parameters=parameters):
        lines.append(f"{faster[0].upper()}{faster[1:]}.")
    if sizes := ", ".join(str(size) for size, times in measured.trials.items() if times):
        lines.append(f"Every strategy took some steps on {sizes} processes: rest is what it needed beyond its parts.")
    if links is not None:
        network = (
            f"gather {links.gather / 1e9:.2f}, all-to-all {links.scatter / 1e9:.2f}, pairs {links.pair / 1e9:.2f} GB/s"
            ", measured over the loopback between them"
        )
        if options.bandwidth is not None:
            network = f"{options.bandwidth / 1e9:g} GB/s, stated with --bandwidth"
        lines.append(f"Bandwidth: {network}; gradients in shared memory {links.exchange / 1e9:.2f} GB/s, measured.")
    if max(per_machine(size, options, measured.slots) for size in options.world_sizes) > measured.slots:
        lines.append(
            f"More than {measured.slots} processes share this machine's cores and memory in turns; with --per-machine "
            "they are spread over machines like this one."
        )
    if not recipe.train.recompute:
        lines.append(f"train.recompute=true would keep about {less / MIB:.1f} MiB instead of {saved / MIB:.1f}.")
    where = "the resident set of a process" if facts.device == "cpu" else "what a process holds on its GPU"
    lines.append(
        f"Computed: everything else. Memory is {where} at its highest, of the process that needs most; time is "
        "that of a steady step, without evaluations and saves."
    )
    return lines


def document(
    rows: Sequence[ForecastRow], recipe: Recipe, options: EstimateOptions, *, measured: MachineMeasurements
) -> dict[str, Any]:
    """Return all values for scripts, in bytes and seconds."""
    return {
        "rows": [row.plain() for row in rows],
        "measured": {
            "alone": asdict(measured.alone),
            "crowded": asdict(measured.crowded) if measured.crowded else None,
            "trials_seconds": measured.trials,
            "processes_at_once": measured.together,
            "slots": measured.slots,
        },
        "bandwidth": {"bytes_per_second": options.bandwidth, "source": "stated" if options.bandwidth else "measured"},
        "train": {"global_batch": recipe.train.global_batch, "micro_batch": recipe.train.micro_batch},
    }
