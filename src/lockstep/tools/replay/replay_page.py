"""An opened step as tables on the terminal, and as an HTML page without external resources."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic_core import to_json
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lockstep.base import storage
from lockstep.base.errors import printable
from lockstep.base.escaping_console import escape_name, wide_console
from lockstep.base.templates import render
from lockstep.tools.prove.proof_table import LOG_WIDTH
from lockstep.tools.replay.opened_step import MOST_SHOWN, Row

STATISTICS = ("largest", "rms", "zeros", "non_finite", "saturated")
COLUMNS = {
    "samples": ("sample", "shard", "loss", "gradient_norm", "share", "stands_out", "by", "label", "origin", "text"),
    "shards": ("shard", "loss", "gradient_norm", "count", "samples"),
    "modules": ("module", *(f"{kind} {each}" for kind in ("outputs", "gradients") for each in STATISTICS)),
    "weights": ("parameter", "rms", "update", "ratio", "learning_rate"),
}
TEXTS = ("by", "label", "origin", "text", "samples", "parameter")
TITLES = {
    "samples": "samples, those first that stand out most from the others",
    "shards": "shards",
    "modules": "modules: outputs, and gradients with respect to them, over the opened shards",
    "weights": "updates of the weights, root mean squares, the largest ratio first",
}


def cells(row: Row, columns: Sequence[str]) -> list[str]:
    parts = [(kind, row.get(kind) or {}) for kind in ("outputs", "gradients")]
    flat = row | {f"{kind} {name}": value for kind, values in parts for name, value in values.items()}
    return [_text(flat.get(column)) for column in columns]


def _text(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value))
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def present(step: Row, notes: Sequence[str], out: Path, *, name: str, console: Console) -> None:
    """Print an opened step, and write its page and JSON."""
    tables = {key: [cells(row, COLUMNS[key]) for row in step.get(key, ())] for key in TITLES}
    for key in [key for key in ("samples", "shards", "weights") if tables[key]]:
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, title=TITLES[key], title_justify="left")
        for column in COLUMNS[key]:
            side: Literal["left", "right"] = "left" if column in TEXTS else "right"
            table.add_column(column.replace("_", " "), justify=side, overflow="ellipsis", no_wrap=True)
        for row in tables[key][:MOST_SHOWN]:
            table.add_row(*(Text(escape_name(cell)) for cell in row))
        wide_console(console, LOG_WIDTH).print(table)
    notes = [*notes, *striking(step)]
    page, facts = (out / f"replay-{step['step']}{suffix}" for suffix in (".html", ".json"))
    values = {"step": step, "notes": notes, "tables": tables, "titles": TITLES, "columns": COLUMNS, "run": name}
    storage.write(page, printable(render("tools/replay/replay.html", **values, shown=step["samples"][:MOST_SHOWN])))
    storage.write(facts, to_json({**step, "notes": notes}, inf_nan_mode="strings", indent=1))
    console.print(*notes, f"written to {page} and {facts.name}", sep="\n", soft_wrap=True)


def striking(step: Row) -> list[str]:
    """Return sentences on the first module whose outputs are not finite, and on the most saturated one."""
    wrong = [row for row in step["modules"] if row["outputs"]["non_finite"]][:1]
    most = max(step["modules"], key=lambda row: row["outputs"]["saturated"])
    found = [(row, "non_finite", "not finite") for row in wrong]
    found += [(most, "saturated", "saturated")] * (most["outputs"]["saturated"] > 0.5)
    return [f"{row['outputs'][key]:.1%} of the outputs of {row['module']} are {what}" for row, key, what in found]
