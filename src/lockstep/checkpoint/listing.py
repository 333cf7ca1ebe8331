"""Prints a run's checkpoints: a table that fits the terminal, and notes below it."""

import time
from collections.abc import Iterator
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from lockstep.base.escaping_console import wide_console
from lockstep.checkpoint.inventory import Entry, Inventory, folder_bytes
from lockstep.checkpoint.layout import CheckpointSection

UNITS = (("s", 1, 60), ("min", 60, 60), ("h", 3600, 48), ("d", 86400, None))
"""Units of age: name, seconds, and the number from which a larger unit is used."""
UNFOLDED = 10_000
"""Characters per line; wide enough for every row."""


@dataclass(frozen=True, kw_only=True)
class TableLayout:
    has_reasons: bool
    """Whether problems are shown in the row, not below the table."""
    separator: str = ", "
    """Between several values in a cell."""
    gap: int = 1
    """Spaces between columns, beyond the first."""


LAYOUTS = (
    TableLayout(has_reasons=True),
    TableLayout(has_reasons=False),
    TableLayout(has_reasons=False, separator="\n", gap=0),
)
"""The first that fits is used; the last is 75 characters wide with checkpoint.best=accuracy."""


def show(inventory: Inventory, section: CheckpointSection, console: Console) -> None:
    """Print the table in the first layout that fits without folding lines, and notes below it."""
    console = wide_console(console, UNFOLDED)
    if inventory.entries:
        for layout in LAYOUTS:
            table = _table(inventory, section, layout)
            if console.measure(table, options=console.options.update(width=UNFOLDED)).maximum <= console.width:
                break
        console.print(table)
        for entry in inventory.entries:
            if entry.problem is not None and not layout.has_reasons:
                console.print(Text(f"{entry.folder.name}: {entry.problem}", "red"))
        console.print()
    for line in _notes(inventory):
        console.print(line)


def _table(inventory: Inventory, section: CheckpointSection, layout: TableLayout) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, layout.gap, 0, 0))
    for name in ("step", "epoch", "size", "age", "processes"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("metrics", "kept for", "state"):
        table.add_column(name)
    now = time.time()
    for entry in inventory.entries:
        metrics, kept_for = layout.separator.join(_metrics(entry, section.best)), layout.separator.join(entry.kept_for)
        table.add_row(*_numbers(entry, now), Text(metrics), Text(kept_for), _state(entry, layout))
    return table


def _numbers(entry: Entry, now: float) -> list[str]:
    """Step, epoch, size, age and processes; without a manifest, what the folder shows."""
    manifest = entry.manifest
    if manifest is None:
        step = entry.folder.name.rpartition("step-")[2]
        return [str(int(step)) if step.isdecimal() else "?", "?", decimal(folder_bytes(entry.folder)), "?", "?"]
    size = decimal(sum(size for size, _ in manifest.files.values()))
    return [str(manifest.step), str(manifest.epoch), size, _age(now - manifest.saved_at), str(manifest.world_size)]


def _age(seconds: float) -> str:
    """As '40 s', '3 min', '2 h' or '5 d', rounded down; another machine's clock may be ahead."""
    fitting = (unit for unit in UNITS if unit[2] is None or seconds < unit[1] * unit[2])
    name, length, _ = next(fitting)
    return f"{max(0, int(seconds // length))} {name}"


def _metrics(entry: Entry, best: str | None) -> list[str]:
    """The metric of checkpoint.best, or all metrics if it is not set."""
    metrics = entry.manifest.metrics if entry.manifest else {}
    return [f"{name} {value:.4f}" for name, value in metrics.items() if best in (None, name)]


def _state(entry: Entry, layout: TableLayout) -> Text:
    if entry.problem is not None:
        return Text(f"damaged: {entry.problem}" if layout.has_reasons else "damaged", "red")
    return Text("verified", "green") if entry.is_verified else Text("sizes right")


def _notes(inventory: Inventory) -> Iterator[str]:
    """Where a resume continues, and what else is in the folder."""
    if inventory.resumed is not None:
        how = "" if any(entry.is_verified for entry in inventory.entries) else " (--verify reads them)"
        doubt = "" if inventory.is_certain else f", if its bytes are right, too{how}"
        yield f"a resume takes {inventory.resumed.name}{doubt}"
    elif inventory.num_finished:
        yield "a resume finds none that is whole; a run can start afresh under another run.name"
    if any("nothing" in entry.kept_for for entry in inventory.entries):
        yield "what is kept for nothing is deleted after the next save"
    if inventory.set_aside:
        what = f"{len(inventory.set_aside)} set aside when the run went back to an older one"
        yield f"{what} ({decimal(sum(inventory.set_aside))}): kept until you delete set-aside-* by hand"
    if inventory.unfinished:
        what = f"{len(inventory.unfinished)} unfinished ({decimal(sum(inventory.unfinished))})"
        yield f"{what}: being saved now, or leftovers of saves that were killed, which the next save deletes"
