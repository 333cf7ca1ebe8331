"""How throughput scales: as a table, and as a picture."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table

from lockstep.core.host.memory_meter import GB
from lockstep.observe.svg_figure import draw_svg

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MEASURED, IDEAL = "#1f5f99", "#9db4c8"
STYLE = {"axes.spines.top": False, "axes.spines.right": False}


@dataclass(frozen=True, kw_only=True)
class ScaleRow:
    """One number of processes."""

    processes: int
    global_batch: int
    rates: tuple[float, ...]
    """Samples per second of each round."""
    base_rates: tuple[float, ...]
    """Those of the smallest number of processes, in the same rounds."""
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
        """Speed-up as a fraction of that of the number of processes."""
        return self.speed_up * self.base_processes / self.processes


def print_scaling(rows: Sequence[ScaleRow], console: Console, *, notes: Sequence[str]) -> None:
    made = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in ("processes", "batch", "samples/s", "lowest", "highest", "speed-up", "efficiency", "memory"):
        made.add_column(heading, justify="right")
    for row in rows:
        made.add_row(
            str(row.processes),
            str(row.global_batch),
            f"{row.rate:,.1f}",
            f"{min(row.rates):,.1f}",
            f"{max(row.rates):,.1f}",
            f"{row.speed_up:.2f}",
            f"{row.efficiency:.0%}",
            f"{row.peak_bytes / GB:.2f} GB",
        )
    console.print(made)
    for note in notes:
        console.print(note, soft_wrap=True)


def picture(rows: Sequence[ScaleRow], *, is_weak: bool) -> str:
    """Throughput over the number of processes, beside proportional growth, as SVG."""

    def draw(figure: "Figure") -> None:
        figure.set_size_inches(8, 5)
        figure.set_layout_engine("constrained")
        axes = figure.add_subplot(xlabel="processes", ylabel="samples per second")
        axes.set_title(f"{'Weak' if is_weak else 'Strong'} scaling", weight="bold")
        axes.grid(color="#e4e4e4")
        sizes, base = [row.processes for row in rows], rows[0]
        ideal = [base.rate * size / base.processes for size in sizes]
        axes.plot(sizes, ideal, color=IDEAL, linestyle="--", label="proportional")
        spread = [
            [row.rate - min(row.rates) for row in rows],
            [max(row.rates) - row.rate for row in rows],
        ]
        rates = [row.rate for row in rows]
        axes.errorbar(sizes, rates, yerr=spread, color=MEASURED, marker="o", capsize=4, label="measured")
        for row in rows:
            axes.annotate(
                f"{row.efficiency:.0%}", (row.processes, row.rate), textcoords="offset points", xytext=(6, -14)
            )
        axes.set_xticks(sizes)
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False)

    return draw_svg(draw, settings=STYLE, metadata={"Title": "Throughput by number of processes"})
