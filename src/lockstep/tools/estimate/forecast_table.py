"""Forecasts as a table, and as plain values for scripts."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from lockstep.base.escaping_console import wide_console
from lockstep.parallel.forecast import Forecast
from lockstep.tools.trials import processes_text

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
Detail = Literal["all", "no kinds", "totals"]
DETAIL: tuple[Detail, ...] = ("all", "no kinds", "totals")
"""Of tables, for ever narrower terminals."""
TOTALS = ("", "PEAK", "STEP")
MOST_WIDTH = 1000


@dataclass(frozen=True, kw_only=True)
class ForecastRow:
    """One strategy on one number of processes."""

    world_size: int
    strategy: str
    device_bytes: int
    """Memory of a device."""
    forecast: Forecast | None = None
    is_best: bool = False
    why: str = ""
    """Why it is the best, or why it cannot run."""

    @property
    def peak_bytes(self) -> int:
        """The most that a process holds."""
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
            return (
                f"needs {(self.peak_bytes - self.device_bytes) / MIB:.0f} MiB more than {self.device_bytes / MIB:.0f}"
            )
        return self.why if self.is_best else "fits"

    def plain(self) -> dict[str, Any]:
        """For scripts: bytes and seconds."""
        values: dict[str, Any] = {
            "world": self.world_size,
            "strategy": self.strategy,
            "memory_of_device_bytes": self.device_bytes,
            "fits": self.fits,
            "is_best": self.is_best,
            "verdict": self.verdict,
        }
        if self.forecast is None:
            return {**values, "forecast": None}
        forecast = asdict(self.forecast)
        forecast["memory"] |= {"step": self.forecast.memory.step, "peak": self.forecast.memory.peak}
        forecast["times"] |= {"total": self.forecast.times.total}
        return {**values, "forecast": forecast}


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
    """The forecasts with as many columns as the console has room for."""
    made = table(rows, DETAIL[0])
    for detail in DETAIL[1:]:
        if Measurement.get(console, console.options.update(max_width=MOST_WIDTH), made).maximum <= console.width:
            break
        made = table(rows, detail)
        made.caption, made.caption_justify = "a wider terminal shows more, --json all", "left"
    return made


def table(rows: list[ForecastRow], detail: Detail = "all") -> Table:
    """The forecasts for one world size."""
    world_size, device = rows[0].world_size, rows[0].device_bytes
    kinds = [kind for kind in HEADINGS if any(getattr(row.forecast.memory, kind) for row in rows if row.forecast)]
    if detail != "all":
        kinds = []
    made = Table(title_justify="left")
    made.title = (
        f"{processes_text(world_size)}, each with {device / MIB:.0f} MiB: memory in MiB, "
        "traffic per step in MiB, a step in ms"
    )
    headings = ["", *(HEADINGS[kind] for kind in kinds), "PEAK", "sent", "STEP", "waiting", "rest", "bubble", ""]
    shown = [place for place, heading in enumerate(headings) if detail != "totals" or heading in TOTALS]
    for place in shown:
        made.add_column(headings[place], justify="right" if headings[place] else "left", no_wrap=True)
    for row in rows:
        texts = cells(row, kinds)
        made.add_row(*(texts[place] for place in shown), style="bold" if row.is_best else "")
    return made


def cells(row: ForecastRow, kinds: list[str]) -> list[str | Text]:
    assert row.forecast is not None
    memory, times = row.forecast.memory, row.forecast.times
    verdict = Text("fits") if row.fits else Text("too much", "red")
    return [
        row.strategy,
        *(f"{getattr(memory, kind) / MIB:.1f}" for kind in kinds),
        f"{memory.peak / MIB:.0f}{'' if memory.peak == memory.step else ' at start'}",
        f"{row.forecast.sent_bytes / MIB:.1f}",
        f"{1e3 * times.total:.1f}",
        f"{1e3 * (times.exchange + times.idle):.1f}",
        f"{1e3 * times.rest:.1f}",
        f"{row.forecast.bubble:.0%}" if row.forecast.bubble else "",
        Text("best", "green") if row.is_best else verdict,
    ]
