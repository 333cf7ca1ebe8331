"""The forecasts as a table for people, and as plain values for scripts."""

from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lockstep.base.escaping import wide_console
from lockstep.parallel.forecast import Forecast

MIB = 2**20
LOG_WIDTH = 150
"""Characters of a line where there is no terminal to ask."""
PARTS = ("fixed", "parameters", "gradients", "optimizer", "average", "activations", "communication", "checkpoint")
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


@dataclass(frozen=True, kw_only=True)
class ForecastRow:
    """One strategy on one number of processes."""

    world: int
    strategy: str
    room_bytes: int
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
        return self.forecast is not None and self.peak_bytes <= self.room_bytes

    @property
    def verdict(self) -> str:
        if self.forecast is None:
            return self.why
        if not self.fits:
            return f"needs {(self.peak_bytes - self.room_bytes) / MIB:.0f} MiB more than {self.room_bytes / MIB:.0f}"
        return self.why if self.is_best else "fits"

    def plain(self) -> dict[str, Any]:
        """For scripts: bytes and seconds."""
        found: dict[str, Any] = {
            "world": self.world,
            "strategy": self.strategy,
            "memory_of_device_bytes": self.room_bytes,
            "fits": self.fits,
            "is_best": self.is_best,
            "verdict": self.verdict,
        }
        if self.forecast is None:
            return {**found, "forecast": None}
        own = asdict(self.forecast)
        own["memory"] |= {"step": self.forecast.memory.step, "peak": self.forecast.memory.peak}
        own["times"] |= {"total": self.forecast.times.total}
        return {**found, "forecast": own}


def print_forecasts(rows: list[ForecastRow], console: Console) -> None:
    """Print a table for each number of processes, and under it what is best and what cannot run."""
    wide = wide_console(console, LOG_WIDTH)
    for world in dict.fromkeys(row.world for row in rows):
        some = [row for row in rows if row.world == world]
        if known := [row for row in some if row.forecast]:
            wide.print(table(known))
        for row in some:
            said = [row.why] if row.why else []
            said += row.forecast.notes if row.forecast else ()
            if said:
                console.print(f"{row.strategy}: {'; '.join(said)}", soft_wrap=True)
        if not any(row.fits for row in some):
            console.print(f"none fits {some[0].room_bytes / MIB:.0f} MiB: try train.recompute=true", soft_wrap=True)
        console.print()


def table(rows: list[ForecastRow]) -> Table:
    """The forecasts for one number of processes."""
    world, room = rows[0].world, rows[0].room_bytes
    parts = [part for part in PARTS if any(getattr(row.forecast.memory, part) for row in rows if row.forecast)]
    made = Table(title_justify="left")
    made.title = (
        f"{world} process{'es' if world > 1 else ''}, each with {room / MIB:.0f} MiB: memory in MiB, traffic per step "
        "in MiB, a step in ms"
    )
    made.add_column("", no_wrap=True)
    for heading in (*(HEADINGS[part] for part in parts), "PEAK", "sent", "STEP", "waiting", "rest", "bubble"):
        made.add_column(heading, justify="right", no_wrap=True)
    made.add_column("", no_wrap=True)
    for row in rows:
        made.add_row(*cells(row, parts), style="bold" if row.is_best else "")
    return made


def cells(row: ForecastRow, parts: list[str]) -> list[str | Text]:
    assert row.forecast is not None
    memory, times = row.forecast.memory, row.forecast.times
    verdict = (
        Text("best", "green") if row.is_best else Text("fits" if row.fits else "too much", "" if row.fits else "red")
    )
    return [
        row.strategy,
        *(f"{getattr(memory, part) / MIB:.1f}" for part in parts),
        f"{memory.peak / MIB:.0f}{'' if memory.peak == memory.step else ' at start'}",
        f"{row.forecast.sent_bytes / MIB:.1f}",
        f"{1e3 * times.total:.1f}",
        f"{1e3 * (times.exchange + times.idle):.1f}",
        f"{1e3 * times.rest:.1f}",
        f"{row.forecast.bubble:.0%}" if row.forecast.bubble else "",
        verdict,
    ]
