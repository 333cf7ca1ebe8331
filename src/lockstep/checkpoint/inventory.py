"""The checkpoints of a run: size, age, metrics, why each is kept, and whether it is intact."""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import dropwhile
from pathlib import Path

from rich import box
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from lockstep.base.errors import CheckpointError
from lockstep.base.escaping_console import wide_console
from lockstep.checkpoint import retention, verify
from lockstep.checkpoint.layout import MANIFEST, CheckpointSection, Manifest, listed, read_manifest

UNITS = (("s", 1, 60), ("min", 60, 60), ("h", 3600, 48), ("d", 86400, None))
"""Units of age: name, seconds, and the number from which a larger unit is used."""
UNFOLDED = 10_000
"""Characters per line; wide enough for every row."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    folder: Path
    manifest: Manifest | None
    """None when it cannot be read; see `problem`."""
    kept_for: Sequence[str]
    problem: str | None
    """Description of what is wrong with it, in a few words; None when nothing is."""
    is_verified: bool
    """Whether every byte was read, not only the manifest and the files' sizes."""


@dataclass(frozen=True, kw_only=True)
class Inventory:
    entries: Sequence[Entry]
    """The requested checkpoints, newest first."""
    resumed: Path | None
    """Checkpoint that `--resume auto` would load."""
    is_certain: bool
    """Whether every byte of `resumed` was read."""
    num_finished: int
    """Number of checkpoints that a run could resume from if they are intact."""
    set_aside: Sequence[int] = ()
    """Bytes of each checkpoint that was set aside when the run resumed from an older one."""
    unfinished: Sequence[int] = ()
    """Bytes of each temporary folder: of killed saves, or of one in progress."""


def take_inventory(
    root: Path,
    section: CheckpointSection,
    *,
    every_byte: bool = False,
    only: Path | None = None,
    on_check: Callable[[Path], None] = lambda _: None,
) -> Inventory:
    """Check a run's folder of checkpoints, or `only` one in it; `on_check` is called with each before it is checked.

    The run may go on meanwhile: what it deletes is left out. Raises CheckpointError when the folder cannot be read.
    """
    try:
        with suppress(FileNotFoundError):
            os.listdir(root)  # glob() ignores that a folder cannot be read
        folders, problems = listed(root), {}
        for folder in dict.fromkeys([*folders, *([only] if only else [])]):
            on_check(folder)
            problems[folder] = verify.problem(folder, every_byte=every_byte and only in (None, folder))
        manifests = retention.manifests(root)
        existing = {folder: problem for folder, problem in problems.items() if (folder / MANIFEST).is_file()}
        set_aside, unfinished = ([folder_bytes(f) for f in root.glob(each)] for each in ("set-aside-*", "step-*.tmp-*"))
    except OSError as error:
        raise CheckpointError(f"cannot look at the checkpoints in {root}: {error.strerror}") from None
    finished = {folder: existing[folder] for folder in folders if folder in existing}
    reasons = _reasons(finished, manifests, section)
    resumed = next(dropwhile(finished.get, finished), None)
    return Inventory(
        entries=[
            Entry(
                folder=folder,
                manifest=manifests.get(folder) or _manifest(folder),
                kept_for=reasons.get(folder, ["set aside" if folder.name.startswith("set-aside-") else "nothing"]),
                problem=problem,
                is_verified=every_byte,
            )
            for folder, problem in existing.items()
            if only in (None, folder)
        ],
        resumed=resumed,
        is_certain=resumed is None or (every_byte and only in (None, resumed)),
        num_finished=len(finished),
        set_aside=set_aside if only is None else (),
        unfinished=unfinished if only is None else (),
    )


def _reasons(
    finished: Mapping[Path, str | None], manifests: Mapping[Path, Manifest], section: CheckpointSection
) -> dict[Path, list[str]]:
    """Return checkpoint -> why `retention.tidy` keeps it; `finished`: checkpoint -> its problem, newest first."""
    known = {folder: manifests[folder] for folder in finished if folder in manifests}
    intact = list(dropwhile(finished.get, finished))
    reasons = retention.reasons(intact, known, section)
    return {folder: reasons.get(folder) or ["nothing" if intact else "lack of a whole one"] for folder in finished}


def _manifest(folder: Path) -> Manifest | None:
    with suppress(OSError, ValueError):
        return read_manifest(folder)
    return None


def folder_bytes(folder: Path) -> int:
    """Count the bytes of all files in a folder; files that are deleted meanwhile count 0."""
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += os.stat(os.path.join(path, name)).st_size
    return total


@dataclass(frozen=True, kw_only=True)
class TableLayout:
    has_reasons: bool
    """Whether problems are shown in the row, not below the table."""
    separator: str = ", "
    """Separator of several values in a cell."""
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
    """Return step, epoch, size, age and processes; without a manifest, what the folder shows."""
    manifest = entry.manifest
    if manifest is None:
        step = entry.folder.name.rpartition("step-")[2]
        return [str(int(step)) if step.isdecimal() else "?", "?", decimal(folder_bytes(entry.folder)), "?", "?"]
    size = decimal(sum(size for size, _ in manifest.files.values()))
    return [str(manifest.step), str(manifest.epoch), size, _age(now - manifest.saved_at), str(manifest.world_size)]


def _age(seconds: float) -> str:
    """Format an age as '40 s', '3 min', '2 h' or '5 d', rounded down; another machine's clock may be ahead."""
    fitting = (unit for unit in UNITS if unit[2] is None or seconds < unit[1] * unit[2])
    name, length, _ = next(fitting)
    return f"{max(0, int(seconds // length))} {name}"


def _metrics(entry: Entry, best: str | None) -> list[str]:
    """Format the metric of checkpoint.best, or all metrics if it is not set."""
    metrics = entry.manifest.metrics if entry.manifest else {}
    return [f"{name} {value:.4f}" for name, value in metrics.items() if best in (None, name)]


def _state(entry: Entry, layout: TableLayout) -> Text:
    if entry.problem is not None:
        return Text(f"damaged: {entry.problem}" if layout.has_reasons else "damaged", "red")
    return Text("verified", "green") if entry.is_verified else Text("sizes right")


def _notes(inventory: Inventory) -> Iterator[str]:
    """Yield where a resume continues, and what else is in the folder."""
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
