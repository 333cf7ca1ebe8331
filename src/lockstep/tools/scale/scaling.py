"""Measures how throughput grows with the number of processes, by training some steps on each."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from rich import box
from rich.console import Console
from rich.table import Table

from lockstep.base import storage
from lockstep.base.errors import ConfigError
from lockstep.base.world import World, cores
from lockstep.core.distributed.process_group import device_of
from lockstep.core.host.memory_meter import GB
from lockstep.observe.svg_figure import CHART, Figure, draw_svg
from lockstep.recipe.recipe import Recipe
from lockstep.tools import trials
from lockstep.tools.trials import check_writable, prepared, processes_text, timed_lines

WARM_UP = 4
"""Steps that are not measured: buckets, caches and allocators are set up in them."""
MEASURED, IDEAL = "#1f5f99", "#9db4c8"


@dataclass(frozen=True, kw_only=True)
class ScaleRow:
    processes: int
    global_batch: int
    rates: tuple[float, ...]
    """Samples per second of each round."""
    base_rates: tuple[float, ...]
    """Samples per second of the smallest number of processes, in the same rounds."""
    base_processes: int
    peak_bytes: int
    """Peak memory of all processes together."""

    @property
    def rate(self) -> float:
        return median(self.rates)

    @property
    def speed_up(self) -> float:
        """Median of the ratios within a round."""
        return median(own / base for own, base in zip(self.rates, self.base_rates, strict=True))

    @property
    def efficiency(self) -> float:
        """Speed-up as a fraction of the proportional one."""
        return self.speed_up * self.base_processes / self.processes


def print_scaling(rows: Sequence[ScaleRow], console: Console, *, notes: Sequence[str]) -> None:
    headings = ("processes", "batch", "samples/s", "lowest", "highest", "speed-up", "efficiency", "memory")
    made = Table(*headings, box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for column in made.columns:
        column.justify = "right"
    for row in rows:
        rates = (f"{rate:,.1f}" for rate in (row.rate, min(row.rates), max(row.rates)))
        growth = f"{row.speed_up:.2f}", f"{row.efficiency:.0%}"
        made.add_row(str(row.processes), str(row.global_batch), *rates, *growth, f"{row.peak_bytes / GB:.2f} GB")
    console.print(made)
    console.print(*notes, sep="\n", soft_wrap=True)


def picture(rows: Sequence[ScaleRow], *, is_weak: bool) -> str:
    """Draw throughput over the number of processes, beside proportional growth, as SVG."""

    def draw(figure: Figure) -> None:
        figure.set_size_inches(8, 5)
        axes = figure.add_subplot(xlabel="processes", ylabel="samples per second")
        axes.set_title(f"{'Weak' if is_weak else 'Strong'} scaling")
        sizes, base = [row.processes for row in rows], rows[0]
        ideal = [base.rate * size / base.processes for size in sizes]
        axes.plot(sizes, ideal, color=IDEAL, linestyle="--", label="proportional")
        spread = [[row.rate - min(row.rates) for row in rows], [max(row.rates) - row.rate for row in rows]]
        rates = [row.rate for row in rows]
        axes.errorbar(sizes, rates, yerr=spread, color=MEASURED, marker="o", capsize=4, label="measured")
        for row in rows:
            text, place = f"{row.efficiency:.0%}", (row.processes, row.rate)
            axes.annotate(text, place, textcoords="offset points", xytext=(6, -14))
        axes.set_xticks(sizes)
        axes.set_ylim(bottom=0)
        axes.legend()

    return draw_svg(draw, settings=CHART, metadata={"Title": "Throughput by number of processes"})


@dataclass(frozen=True, kw_only=True)
class ScaleOptions:
    world_sizes: tuple[int, ...]
    steps: int
    """Measured steps of each run."""
    rounds: int
    """Number of times that each number of processes is measured, in turns."""
    is_weak: bool
    """Whether the global batch grows with the processes, so that each does the same work at any number."""
    picture: Path | None
    json: Path | None


def scale(recipe: Recipe, options: ScaleOptions, *, console: Console) -> list[ScaleRow]:
    """Measure, print a table, write the picture and JSON. Raises ConfigError, TrialFailed."""
    check(recipe, options)
    rates, peaks = ({size: list[float]() for size in options.world_sizes} for _ in range(2))
    with trials.forking(recipe, "scale"), trials.temporary_folder("lockstep-scale-") as folder:
        prepared(recipe)
        report = timed_lines(console)
        for number in range(options.rounds):
            for size in options.world_sizes if number % 2 == 0 else reversed(options.world_sizes):
                report(f"round {number + 1}: {processes_text(size)} ...")
                rate, peak = _measure(recipe, options, size=size, folder=folder / f"{number}-{size}")
                rates[size].append(rate)
                peaks[size].append(peak)
    smallest = min(rates)
    rows = [
        ScaleRow(
            processes=size,
            global_batch=_global_batch(recipe, options, size),
            rates=tuple(rates[size]),
            base_rates=tuple(rates[smallest]),
            base_processes=smallest,
            peak_bytes=int(max(peaks[size])),
        )
        for size in sorted(rates)
    ]
    print_scaling(rows, console, notes=_notes(recipe, options))
    if options.json is not None:
        storage.write(options.json, json.dumps([asdict(row) for row in rows], indent=1))
    if options.picture is not None:
        storage.write(options.picture, picture(rows, is_weak=options.is_weak))
    return rows


def check(recipe: Recipe, options: ScaleOptions) -> None:
    """Raise ConfigError for options that cannot be met."""
    check_writable("--json", options.json)
    check_writable("--picture", options.picture, suffix=".svg")
    most, shards, limit = max(options.world_sizes), recipe.train.shards, recipe.parallel.MOST_PROCESSES
    if not options.is_weak and most > shards:
        what = f"--world {most}: a step has only {shards} micro-batches to share out; give at most {shards}"
        raise ConfigError(f"{what}, a smaller train.micro_batch, or --weak, with which the global batch grows")
    if limit is not None and most > limit:
        what = f"--world {most}: parallel.kind={recipe.parallel.kind} runs on {processes_text(limit)} at most"
        raise ConfigError(f"{what}; set another, such as parallel.kind=ddp")


def _global_batch(recipe: Recipe, options: ScaleOptions, size: int) -> int:
    """Return the global batch; with `--weak`, the config's belongs to the smallest number of processes."""
    of_smallest = recipe.train.global_batch
    return of_smallest * size // min(options.world_sizes) if options.is_weak else of_smallest


def _measure(recipe: Recipe, options: ScaleOptions, *, size: int, folder: Path) -> tuple[float, int]:
    """Train on some processes; save and evaluate at the end only -> samples per second, and the peak memory of all."""
    folder.mkdir()
    sections = trials.without_interruptions(recipe, folder / "run", steps=WARM_UP + options.steps)
    sections["train"]["global_batch"] = _global_batch(recipe, options, size)
    sections["observe"] = {"sinks": (), "log_every": WARM_UP, "file": None}
    varied = trials.varied(recipe, sections, parallel=recipe.parallel.fitted(size))
    trial = trials.run(varied, folder, task="scale", request=None, processes=size).checked()
    return storage.read_json(folder / "run" / "summary.json")["train_samples_per_second"], trial.peak_bytes


def _notes(recipe: Recipe, options: ScaleOptions) -> Sequence[str]:
    strong = "Strong scaling: the global batch stays the same, as in a real run; each process does a part of it."
    weak = "Weak scaling: the global batch grows with the processes; each does the same work at any number."
    notes = [weak if options.is_weak else strong]
    shared = [size for size in options.world_sizes if size * recipe.run.threads > cores()]
    if shared and device_of(World()).type == "cpu":
        what = f"{cores()} cores are shared by {processes_text(min(shared))} and more"
        notes.append(f"{what}: expect no speed-up from there on.")
    return notes
