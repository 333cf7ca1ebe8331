"""How a run's checkpoints are listed for people: a table that fits the terminal, and what is to be said below it."""

import time
from collections.abc import Iterator
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from lockstep.base.escaping import wide_console
from lockstep.checkpoint.inventory import Entry, Inventory, weight
from lockstep.checkpoint.layout import CheckpointSection

UNITS = (("s", 1, 60), ("min", 60, 60), ("h", 3600, 48), ("d", 86400, None))
"""Of an age: name, seconds, and how many of them are told in a larger unit instead."""
UNFOLDED = 10_000
"""Characters of a line that no terminal has: wide enough for every row."""


@dataclass(frozen=True, kw_only=True)
class Form:
    """How a table is laid out."""

    has_reasons: bool
    """Whether what is wrong with a checkpoint stands in its row, not below the table."""
    between: str = ", "
    """What parts several things in a cell."""
    gap: int = 1
    """Spaces between columns, beyond the first."""


FORMS = (Form(has_reasons=True), Form(has_reasons=False), Form(has_reasons=False, between="\n", gap=0))
"""The first that fits is taken; the last has 75 columns where accuracy decides, of the 80 of a terminal."""


def show(found: Inventory, section: CheckpointSection, console: Console) -> None:
    """Print the table, as far as it fits with a line for each row, and below it what else is to be said."""
    console = wide_console(console, UNFOLDED)
    if found.entries:
        for form in FORMS:
            table = _table(found, section, form)
            if console.measure(table, options=console.options.update(width=UNFOLDED)).maximum <= console.width:
                break
        console.print(table)
        for entry in found.entries:
            if entry.problem is not None and not form.has_reasons:
                console.print(Text(f"{entry.folder.name}: {entry.problem}", "red"))
        console.print()
    for line in _lines(found):
        console.print(line)


def _table(found: Inventory, section: CheckpointSection, form: Form) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, form.gap, 0, 0))
    for name in ("step", "epoch", "size", "age", "processes"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("metrics", "kept for", "state"):
        table.add_column(name)
    now = time.time()
    for entry in found.entries:
        metrics, kept_for = form.between.join(_metrics(entry, section.best)), form.between.join(entry.kept_for)
        table.add_row(*_numbers(entry, now), Text(metrics), Text(kept_for), _state(entry, form))
    return table


def _numbers(entry: Entry, now: float) -> list[str]:
    """Step, epoch, size, age and processes; of a manifest that cannot be read, what the folder tells."""
    manifest = entry.manifest
    if manifest is None:
        step = entry.folder.name.rpartition("step-")[2]
        return [str(int(step)) if step.isdecimal() else "?", "?", decimal(weight(entry.folder)), "?", "?"]
    size = decimal(sum(size for size, _ in manifest.files.values()))
    return [str(manifest.step), str(manifest.epoch), size, _age(now - manifest.saved_at), str(manifest.world_size)]


def _age(seconds: float) -> str:
    """As '40 s', '3 min', '2 h' or '5 d', rounded down; another machine's clock may be ahead."""
    fitting = (unit for unit in UNITS if unit[2] is None or seconds < unit[1] * unit[2])
    name, length, _ = next(fitting)
    return f"{max(0, int(seconds // length))} {name}"


def _metrics(entry: Entry, best: str | None) -> list[str]:
    """The metric that decides which one is the best, or all of them where none does."""
    metrics = entry.manifest.metrics if entry.manifest else {}
    return [f"{name} {value:.4f}" for name, value in metrics.items() if best in (None, name)]


def _state(entry: Entry, form: Form) -> Text:
    if entry.problem is not None:
        return Text(f"damaged: {entry.problem}" if form.has_reasons else "damaged", "red")
    return Text("verified", "green") if entry.is_verified else Text("sizes right")


def _lines(found: Inventory) -> Iterator[str]:
    """Where a resume goes on, and what is there beside the checkpoints."""
    if found.resumed is not None:
        how = "" if any(entry.is_verified for entry in found.entries) else " (--verify reads them)"
        doubt = "" if found.is_certain else f", if its bytes are right, too{how}"
        yield f"a resume takes {found.resumed.name}{doubt}"
    elif found.num_finished:
        yield "a resume finds none that is whole; a run can start afresh under another run.name"
    if any("nothing" in entry.kept_for for entry in found.entries):
        yield "what is kept for nothing is deleted after the next save"
    if found.set_aside:
        what = f"{len(found.set_aside)} set aside when the run went back to an older one"
        yield f"{what} ({decimal(sum(found.set_aside))}): kept until you delete set-aside-* by hand"
    if found.unfinished:
        what = f"{len(found.unfinished)} unfinished ({decimal(sum(found.unfinished))})"
        yield f"{what}: being saved now, or leftovers of saves that were killed, which the next save deletes"
