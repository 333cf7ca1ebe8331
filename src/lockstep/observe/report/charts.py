"""The curves of a report, prepared for the chart library in the page."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.observe.report.run_files import TEST, LoggedCurve, RunFiles, shortened

MOST_POINTS = 8000
"""Limit of the points of a curve in the page."""
TITLES = {
    "learning_rate": "learning rate",
    "gradient_norm": "gradient norm",
    "samples_per_second": "samples/s",
    "tokens_per_second": "tokens/s",
    "mfu": "MFU, share of the peak of matrix products",
    "memory": "peak memory of rank 0, GB",
}
"""Titles of the last charts, in their order; the others are called as their quantity."""
MEMORY = "memory"
TABLE_ROWS = 12
"""Number of evenly spread rows below a chart."""


@dataclass(frozen=True, kw_only=True)
class Series:
    """A curve in a chart."""

    run: int
    """Number of its run in the report."""
    is_test: bool
    curve: LoggedCurve


@dataclass(frozen=True, kw_only=True)
class Chart:
    title: str
    series: tuple[Series, ...]

    def plain(self) -> dict[str, Any]:
        """Convert to types of JSON."""
        series = [
            {"run": each.run, "test": each.is_test, "x": short.steps, "y": short.values}
            for each in self.series
            for short in [shortened(each.curve, MOST_POINTS)]
        ]
        return {"title": self.title, "series": series}


def charts(runs: Sequence[RunFiles]) -> list[Chart]:
    """Create one chart for each quantity, with its values in training and on the test split, of all runs."""
    curves = [{**run.curves, **memory(run)} for run in runs]
    names = dict.fromkeys(name.removeprefix(f"{TEST} ") for each in curves for name in each)
    order = [*TITLES]
    ordered = sorted(names, key=lambda name: (name != "loss", order.index(name) if name in TITLES else -1))
    return [Chart(title=TITLES.get(name, name), series=tuple(_series(name, curves))) for name in ordered]


def _series(name: str, runs: Sequence[dict[str, LoggedCurve]]) -> Iterable[Series]:
    for number, curves in enumerate(runs):
        for is_test in (False, True):
            curve = curves.get(f"{TEST} {name}" if is_test else name)
            if curve is not None:
                yield Series(run=number, is_test=is_test, curve=curve)


def memory(run: RunFiles) -> dict[str, LoggedCurve]:
    """Return the peak memory in GB (10^9 bytes) by step; of repeated steps the last value."""
    found = {line.step: line.memory_bytes / 1e9 for line in run.history if line.kind == "steps"}
    steps = sorted(found)
    return {MEMORY: LoggedCurve(steps=steps, values=[found[step] for step in steps])} if steps else {}


def table(chart: Chart, names: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Return headings and rows of a chart's values at evenly spread steps, for readers without the picture."""
    headings = ["step"]
    for each in chart.series:
        several = f"{names[each.run]}, " if len(names) > 1 else ""
        headings.append(f"{several}{'test' if each.is_test else 'training'}")
    steps = sorted({step for each in chart.series for step in each.curve.steps})
    spread = {steps[round(i * (len(steps) - 1) / (TABLE_ROWS - 1))] for i in range(TABLE_ROWS)}
    spread |= {step for each in chart.series if each.is_test for step in each.curve.steps[-TABLE_ROWS:]}
    values = [dict(zip(each.curve.steps, each.curve.values, strict=True)) for each in chart.series]
    rows = [[f"{step:,}", *(number(value.get(step)) for value in values)] for step in sorted(spread)]
    return headings, rows


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
