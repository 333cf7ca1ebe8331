"""Draws a sweep as SVG: the metric of its trials over each key that it varies."""

import math
from typing import TYPE_CHECKING, Any

from lockstep.observe.svg_figure import draw_svg
from lockstep.tools.sweep.search_space import LOG_FACTOR, SweptKey, shown
from lockstep.tools.sweep.sweep_state import Sweep, SweepTrial

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FINISHED, PRUNED, BEST = "#1f5f99", "#9db4c8", "#c0392b"
STYLE = {"axes.spines.top": False, "axes.spines.right": False}
MOST_COLUMNS = 3
LONGEST_LABEL = 24
MOST_TICKS = 8


def svg(sweep: Sweep, title: str) -> str:
    """A panel for each key."""
    columns = min(len(sweep.keys), MOST_COLUMNS)
    rows = math.ceil(len(sweep.keys) / columns)

    def draw(figure: "Figure") -> None:
        figure.set_size_inches(max(5.0 * columns, 7.5), 4.2 * rows + 0.6)
        figure.set_layout_engine("constrained")
        figure.suptitle(title, weight="bold")
        all_axes = [
            figure.add_subplot(rows, columns, index + 1, xlabel=key.key, ylabel=sweep.metric)
            for index, key in enumerate(sweep.keys)
        ]
        for axes, key in zip(all_axes, sweep.keys, strict=True):
            _panel(axes, key, sweep)
        figure.legend(*all_axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)

    return draw_svg(draw, settings=STYLE, metadata={"Title": title})


def _panel(axes: "Axes", key: SweptKey, sweep: Sweep) -> None:
    axes.grid(color="#e4e4e4")
    axes.set_axisbelow(True)
    places = _places(key, axes)
    best = [trial for trial in sweep.trials if trial.name == sweep.best]
    groups: list[tuple[str, list[SweepTrial], dict[str, Any]]] = [
        ("pruned, when it was ended", _of(sweep, "pruned"), {"color": PRUNED, "marker": "x"}),
        ("finished", _of(sweep, "finished"), {"color": FINISHED, "marker": "o"}),
        ("best", best, {"color": BEST, "marker": "*", "s": 160, "zorder": 3}),
    ]
    for label, trials, look in groups:
        if trials:
            across = [places(trial.settings[key.key]) for trial in trials]
            axes.scatter(across, [trial.value for trial in trials if trial.value is not None], label=label, **look)


def _of(sweep: Sweep, state: str) -> list[SweepTrial]:
    return [trial for trial in sweep.trials if trial.state == state and trial.value is not None]


def _places(key: SweptKey, axes: "Axes") -> Any:
    """Value -> place on the x axis, which is set up for it."""
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
