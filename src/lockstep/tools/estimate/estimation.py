"""Tells memory, traffic and time of every strategy and number of processes before the run.

W = processes.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console

from lockstep.base import plugins, storage
from lockstep.base.errors import ConfigError, LockstepError
from lockstep.parallel.forecast import Cluster, Forecast, Setting
from lockstep.run.recipe import Recipe
from lockstep.tools.estimate.forecast_table import ForecastRow, print_forecasts
from lockstep.tools.estimate.machine_measurement import (
    EstimateOptions,
    MachineMeasurements,
    measure,
    per_machine,
)
from lockstep.tools.estimate.strategy_timing import section_of, shortened
from lockstep.tools.trials import prepared


def worlds_of(text: str) -> tuple[int, ...]:
    """ "1,2,4" -> (1, 2, 4). Raises ConfigError."""
    try:
        found = tuple(int(each) for each in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise ConfigError(f"--world {text}: give numbers of processes, such as 1,2,4,8")
    return tuple(dict.fromkeys(found))


def checked(wish: EstimateOptions) -> EstimateOptions:
    """As it is; raises ConfigError for what cannot be."""
    for option, value in (
        ("memory", wish.memory_bytes),
        ("bandwidth", wish.bandwidth),
        ("per-machine", wish.per_machine),
    ):
        if value is not None and value <= 0:
            raise ConfigError(f"--{option}: {value:g} is not more than 0")
    return wish


def estimate(recipe: Recipe, wish: EstimateOptions, *, console: Console, to: Path | None) -> list[ForecastRow]:
    """Measure, compute, print; write JSON if asked. Raises ConfigError, MeasurementFailed."""
    wish = checked(wish)
    if to is not None and not to.parent.is_dir():
        raise ConfigError(f"--json {to}: there is no folder {to.parent}")
    prepared(recipe)
    measured = measure(recipe, wish, say=lambda text: console.print(text, soft_wrap=True))
    return report(recipe, wish, measured, console=console, to=to)


def report(
    recipe: Recipe, wish: EstimateOptions, measured: MachineMeasurements, *, console: Console, to: Path | None
) -> list[ForecastRow]:
    """Compute from what was measured, print, write JSON if asked."""
    rows = [row for world in wish.worlds for row in forecasts_for(recipe, wish, measured, world=world)]
    print_forecasts(rows, console)
    for line in wording(recipe, wish, measured):
        console.print(line, soft_wrap=True)
    if to is not None:
        storage.write(to, json.dumps(document(rows, recipe, wish, measured=measured), indent=1))
    return rows


def forecasts_for(
    recipe: Recipe, wish: EstimateOptions, measured: MachineMeasurements, *, world: int
) -> list[ForecastRow]:
    """A row for each strategy, the fastest that fits marked."""
    local = min(per_machine(world, wish, measured.slots), world)
    room = wish.memory_bytes or device_bytes(local)
    cluster = measured.cluster(world, per_machine=local, bandwidth=wish.bandwidth)
    rows = []
    for name in plugins.names("parallel.strategies"):
        try:
            forecast = forecast_of(name, recipe, measured, cluster=cluster)
        except LockstepError as error:
            rows.append(ForecastRow(world=world, strategy=name, room_bytes=room, why=str(error).splitlines()[0]))
        else:
            rows.append(ForecastRow(world=world, strategy=name, room_bytes=room, forecast=forecast))
    return judged(rows, configured=recipe.parallel.kind)


def forecast_of(name: str, recipe: Recipe, measured: MachineMeasurements, *, cluster: Cluster) -> Forecast:
    """What the strategy's file computes, and what its trial took beyond that.

    Raises ConfigError where there is no such file, LaunchError, ModelError where it cannot run.
    """
    computed = computation(name, recipe, measured, cluster=cluster)
    world = measured.tried(cluster)
    if name not in measured.trials.get(world, {}):
        return computed
    here, times = measured.cluster(world, per_machine=world), computed.times
    trial = computation(name, shortened(recipe), measured, cluster=here)
    rest = (
        (measured.trials[world][name] - trial.times.total)
        / trial.turns
        / here.slowdown
        * computed.turns
        * cluster.slowdown
    )
    return replace(computed, times=replace(times, rest=max(rest, -times.total / 2)))


def computation(name: str, recipe: Recipe, measured: MachineMeasurements, *, cluster: Cluster) -> Forecast:
    setting = Setting(
        section=section_of(recipe, name),
        shards=recipe.train.shards,
        is_exact=recipe.run.reproducibility == "exact",
        has_average=bool(recipe.train.ema),
        facts=measured.alone,
        seconds=measured.seconds(min(cluster.per_machine, cluster.slots)),
        cluster=cluster,
    )
    forecast: Forecast = plugins.implementation("parallel.strategies", name, "forecast").forecast(setting)
    return forecast


def device_bytes(processes: int) -> int:
    """Memory for each of so many processes of this machine."""
    if torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(0).total_memory)
    return int(psutil.virtual_memory().total // processes)


def judged(rows: Sequence[ForecastRow], *, configured: str) -> list[ForecastRow]:
    """Each with a verdict; the best is the fastest that fits, of equally fast ones (within 2 %) that of the config,
    then the one that needs least memory."""
    fitting = [row for row in rows if row.fits]
    if not fitting:
        return list(rows)
    quickest = min(row.seconds for row in fitting)
    equal = [row for row in fitting if row.seconds <= 1.02 * quickest]
    best = min(equal, key=lambda row: (row.strategy != configured, row.peak_bytes))
    why = "the only one that fits" if len(fitting) == 1 else "the fastest that fits"
    if len(equal) > 1:
        why = "as fast as any that fits" + (
            ", and the config's own" if best.strategy == configured else ", least memory"
        )
    return [replace(row, is_best=True, why=why) if row is best else row for row in rows]


def wording(recipe: Recipe, wish: EstimateOptions, measured: MachineMeasurements) -> list[str]:
    """What was measured, and what was computed from it."""
    facts, links = measured.alone, measured.crowded.links if measured.crowded else None
    mib, times = 2**20, facts.seconds
    saved = sum(block.saved_bytes for block in facts.blocks)
    less = sum(block.handed_bytes for block in facts.blocks) + max(block.saved_bytes for block in facts.blocks)
    lines = [
        f"Measured here: a process without a model {facts.fixed_bytes / mib:.0f} MiB; the largest micro-batch of "
        f"{recipe.train.micro_batch} keeps {saved / mib:.1f} MiB for its backward pass, beside "
        f"{facts.working_bytes / mib:.0f} MiB of working memory; a micro-batch {1e3 * times.passes:.1f} ms, the update "
        f"{1e3 * times.update:.1f} ms, alone.",
    ]
    if measured.crowded is not None:
        lines.append(
            f"With {measured.together} processes at once: a micro-batch {1e3 * measured.crowded.seconds.passes:.1f} ms."
        )
    if tried := ", ".join(str(processes) for processes, seen in measured.trials.items() if seen):
        lines.append(f"Every strategy took some steps on {tried} processes: rest is what it needed beyond its parts.")
    if links is not None:
        source = "measured over the loopback between them"
        gigabytes = (
            f"gather {links.gather / 1e9:.2f}, all-to-all {links.scatter / 1e9:.2f}, pairs {links.pair / 1e9:.2f} GB/s"
        )
        if wish.bandwidth is not None:
            gigabytes, source = f"{wish.bandwidth / 1e9:g} GB/s", "stated with --bandwidth"
        lines.append(
            f"Bandwidth: {gigabytes}, {source}; gradients in shared memory {links.exchange / 1e9:.2f} GB/s, measured."
        )
    if max(per_machine(world, wish, measured.slots) for world in wish.worlds) > measured.slots:
        lines.append(
            f"More than {measured.slots} processes share this machine's cores and memory in turns; with --per-machine "
            "they are spread over machines like this one."
        )
    if not recipe.train.recompute:
        lines.append(f"train.recompute=true would keep about {less / mib:.1f} MiB instead of {saved / mib:.1f}.")
    where = "the resident set of a process" if facts.device == "cpu" else "what a process holds on its GPU"
    lines.append(
        f"Computed: everything else. Memory is {where} at its highest, of the process that needs most; time is "
        "that of a steady step, without evaluations and saves."
    )
    return lines


def document(
    rows: Sequence[ForecastRow], recipe: Recipe, wish: EstimateOptions, *, measured: MachineMeasurements
) -> dict[str, Any]:
    """Everything, for scripts: bytes and seconds."""
    return {
        "rows": [row.plain() for row in rows],
        "measured": {
            "alone": asdict(measured.alone),
            "crowded": asdict(measured.crowded) if measured.crowded else None,
            "trials_seconds": measured.trials,
            "processes_at_once": measured.together,
            "slots": measured.slots,
        },
        "bandwidth": {"bytes_per_second": wish.bandwidth, "source": "stated" if wish.bandwidth else "measured"},
        "train": {"global_batch": recipe.train.global_batch, "micro_batch": recipe.train.micro_batch},
    }
