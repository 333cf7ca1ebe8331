"""An evaluation on the terminal."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lockstep.base.escaping import escape_name

MOST_ROWS = 40
"""Of more classes than this the terminal shows none: they are in the page."""


def show(found: Mapping[str, Any], console: Console) -> None:
    """Figures, then a line for each class, then what a temperature does."""
    figures = Table(
        "metric",
        "value",
        title=Text(f"{found['samples']:,} samples: {escape_name(found['data'])}", "table.title"),
        title_justify="left",
    )
    figures.columns[1].justify = "right"
    for name, value in rows(found):
        figures.add_row(Text(escape_name(name)), value)
    console.print(figures)
    classes = found.get("classes", [])
    if 0 < len(classes) <= MOST_ROWS:
        console.print(_by_class(classes))
    if calibration := found.get("calibration"):
        console.print(words(calibration), soft_wrap=True)


def rows(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(metric, value) of all that is one number."""
    shown = {**found["metrics"], **({"ece": found["ece"]} if "ece" in found else {})}
    return [(NAMES.get(name, name), f"{value:.4f}") for name, value in shown.items()]


NAMES = {"f1": "F1 (macro)", "ece": "calibration error (ECE)"}


def words(calibration: Mapping[str, Any]) -> str:
    change = f"ECE {calibration['ece_before']:.4f} -> {calibration['ece_after']:.4f} on the other half of the samples"
    fitted = f"temperature {calibration['temperature']:.3f}, fitted on {calibration['samples']:,} samples: {change}"
    return fitted if calibration["is_kept"] else f"{fitted}; no better, so it is not kept"


def _by_class(classes: list[dict[str, Any]]) -> Table:
    shown = Table("class", "precision", "recall", "F1", "samples")
    for column in shown.columns[1:]:
        column.justify = "right"
    for one in classes:
        shares = (f"{one[name]:.4f}" for name in ("precision", "recall", "f1"))
        shown.add_row(Text(escape_name(one["label"])), *shares, f"{one['support']:,}")
    return shown
