"""A sweep as a table and as a picture, and its best trial as lines for the config."""

import math
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lockstep.base.escaping_console import wide_console
from lockstep.base.yaml_text import YamlDumper
from lockstep.observe.report.charts import number
from lockstep.observe.svg_figure import CHART, Axes, Figure, draw_svg
from lockstep.tools.sweep.search_space import LOG_FACTOR, SweptKey, shown
from lockstep.tools.sweep.sweep_plan import settings_text
from lockstep.tools.sweep.sweep_state import Sweep, SweepTrial

STYLES = {"best": "bold green", "finished": "green", "pruned": "yellow"}
WIDTH = 160
"""Characters of a line where there is no terminal."""
LOOKS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("pruned", "pruned, when it was ended", {"color": "#9db4c8", "marker": "x"}),
    ("finished", "finished", {"color": "#1f5f99", "marker": "o"}),
    ("best", "best", {"color": "#c0392b", "marker": "*", "s": 160, "zorder": 3}),
)
"""State of a trial, its label, and how it is drawn."""
MOST_COLUMNS = 3
LONGEST_LABEL = 24
MOST_TICKS = 8


def line(sweep: Sweep, trial: SweepTrial) -> str:
    """Describe the result of a trial in one line."""
    if trial.state in ("failed", "pruned"):
        return f"{trial.name} · {settings_text(trial.settings)} · {trial.state}: {trial.note}"
    values = [f"{sweep.metric} {number(trial.value)}"]
    if sweep.metric != "loss":
        values.append(f"loss {number(trial.loss)}")
    return " · ".join([trial.name, settings_text(trial.settings), *values, f"{trial.seconds:,.1f} s"])


def print_sweep(sweep: Sweep, folder: Path, console: Console) -> None:
    """Print the table, the best trial first, and that trial's lines for the config."""
    wide_console(console, WIDTH).print(table(sweep))
    best = next((trial for trial in sweep.trials if trial.name == sweep.best), None)
    if best is None:
        return
    text = f"The best by {sweep.metric} is {folder / best.name}, with {number(best.value)}."
    console.print(f"{text}\n\nLines for the config:\n", soft_wrap=True)
    console.print(config_lines(best.settings), end="", soft_wrap=True)


def table(sweep: Sweep) -> Table:
    losses = [] if sweep.metric == "loss" else ["loss"]
    made = Table("trial", *(key.key for key in sweep.keys), sweep.metric, *losses, "seconds", "verdict")
    for column in made.columns[1:-1]:
        column.justify = "right"
    for trial in sweep.ranked():
        verdict = "best" if trial.name == sweep.best else trial.state
        made.add_row(
            trial.name,
            *(Text(shown(trial.settings[key.key])) for key in sweep.keys),
            number(trial.value),
            *(number(trial.loss) for _ in losses),
            f"{trial.seconds:,.1f}",
            Text(": ".join(filter(None, [verdict, trial.note])), STYLES.get(verdict, "red")),
        )
    return made


def config_lines(settings: dict[str, Any]) -> str:
    sections: dict[str, Any] = {}
    for key, value in settings.items():
        *above, name = key.split(".")
        place = sections
        for part in above:
            place = place.setdefault(part, {})
        place[name] = value
    return yaml.dump(sections, Dumper=YamlDumper, sort_keys=False, allow_unicode=True)


def svg(sweep: Sweep, title: str) -> str:
    """Draw the metric of all trials, with a panel for each key."""
    columns = min(len(sweep.keys), MOST_COLUMNS)
    rows = math.ceil(len(sweep.keys) / columns)

    def draw(figure: Figure) -> None:
        figure.set_size_inches(max(5.0 * columns, 7.5), 4.2 * rows + 0.6)
        figure.suptitle(title)
        for index, key in enumerate(sweep.keys, start=1):
            _panel(figure.add_subplot(rows, columns, index, xlabel=key.key, ylabel=sweep.metric), key, sweep)
        figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)

    return draw_svg(draw, settings=CHART, metadata={"Title": title})


def _panel(axes: Axes, key: SweptKey, sweep: Sweep) -> None:
    places = _places(key, axes)
    for state, label, look in LOOKS:
        shown_here = [t for t in sweep.trials if state in (t.state, "best" if t.name == sweep.best else "")]
        points = [(places(t.settings[key.key]), t.value) for t in shown_here if t.value is not None]
        if points:
            axes.scatter(*zip(*points, strict=True), label=label, **look)


def _places(key: SweptKey, axes: Axes) -> Any:
    """Set up the x axis for the values of a key -> a function from value to place on it."""
    numbers = [each for each in key.values if isinstance(each, int | float) and not isinstance(each, bool)]
    if key.ends is None and len(numbers) < len(key.values):
        labels = [shown(value) for value in key.values]
        axes.set_xticks(range(len(labels)), [label[:LONGEST_LABEL] for label in labels])
        axes.set_xlim(-0.5, len(labels) - 0.5)
        return lambda value: labels.index(shown(value))
    low, high = key.ends or (min(numbers), max(numbers))
    if 0 < LOG_FACTOR * low < high:
        axes.set_xscale("log")
        axes.set_xlabel(f"{key.key}, log scale")
    if 0 < len(numbers) <= MOST_TICKS:
        axes.set_xticks(numbers, map(shown, numbers))
        axes.minorticks_off()
    return float
