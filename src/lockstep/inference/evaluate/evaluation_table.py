"""The results of an evaluation on the terminal."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lockstep.base.escaping_console import escape_name

MAX_CLASSES = 40
"""Maximum number of classes on the terminal; of more it shows none, but the page does."""
TITLES = {"f1": "F1 (macro)", "entity_f1": "F1 (entities)", "ece": "calibration error (ECE)"}


def show(results: Mapping[str, Any], console: Console) -> None:
    """Print the metrics, a line for each class, and the effect of calibration."""
    metrics = Table(
        "metric",
        "value",
        title=Text(f"{results['samples']:,} samples: {escape_name(results['data'])}", "table.title"),
        title_justify="left",
    )
    metrics.columns[1].justify = "right"
    for name, value in rows(results):
        metrics.add_row(Text(escape_name(name)), value)
    console.print(metrics)
    classes = results.get("classes", [])
    if 0 < len(classes) <= MAX_CLASSES:
        console.print(_by_class(classes))
    if calibration := results.get("calibration"):
        console.print(describe_calibration(calibration), soft_wrap=True)


def rows(results: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return (metric, value) of each scalar."""
    shown = {**results["metrics"], **({"ece": results["ece"]} if "ece" in results else {})}
    return [(TITLES.get(name, name), f"{value:.4f}") for name, value in shown.items()]


def describe_calibration(calibration: Mapping[str, Any]) -> str:
    change = f"ECE {calibration['ece_before']:.4f} -> {calibration['ece_after']:.4f} on the other half of the samples"
    fitted = f"temperature {calibration['temperature']:.3f}, fitted on {calibration['samples']:,} samples: {change}"
    return fitted if calibration["is_kept"] else f"{fitted}; no better, so it is not kept"


def _by_class(classes: list[dict[str, Any]]) -> Table:
    table = Table("class", "precision", "recall", "F1", "samples")
    for column in table.columns[1:]:
        column.justify = "right"
    for each in classes:
        values = (f"{each[name]:.4f}" for name in ("precision", "recall", "f1"))
        table.add_row(Text(escape_name(each["label"])), *values, f"{each['support']:,}")
    return table
