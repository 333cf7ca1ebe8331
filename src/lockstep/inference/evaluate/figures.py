"""The figures of an evaluation as SVG: for light and dark pages, and without external resources."""

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from lockstep.base.escaping_console import escape_name
from lockstep.observe.svg_figure import Figure, draw_svg

CELL_INCHES = ((12, 0.58), (30, 0.31), (100, 0.15))
"""(maximum number of classes, side of a cell)."""
MAX_NUMBERED = 30
"""Maximum number of classes for counts in cells; with more, the counts are tooltips only."""
LONGEST_NAME = 18
CORRECT, WRONG, BAR, GREY, INK = "#1a7f4e", "#c8401f", "#2f6fb3", "#7b8592", "#1c2026"
TOOLTIP = "title:"
"""Prefix of the ids of groups that become tooltips."""
SETTINGS = dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK)
STYLE = """<style>svg{color:#1c2026;background:#ffffff}
@media (prefers-color-scheme:dark){svg{color:#e8eaee;background:#14171c}}</style>"""


def confusion(matrix: Sequence[Sequence[int]], names: Sequence[str]) -> str:
    """Draw a confusion matrix [true][predicted]; opacity is the share of the true class, mistakes are red."""
    names = [escape_name(name) for name in names]  # control characters are not XML
    return _svg("confusion matrix", partial(_draw_confusion, matrix=matrix, names=names))


def reliability(bins: Sequence[dict[str, Any]]) -> str:
    """Draw accuracy (bars) over confidence, and the diagonal of perfect calibration; below, the samples of each bin."""
    return _svg("reliability", partial(_draw_reliability, bins=bins))


def _draw_confusion(figure: Figure, matrix: Sequence[Sequence[int]], names: Sequence[str]) -> None:
    from matplotlib.patches import Rectangle

    count = len(names)
    cell_inches = next(size for most, size in CELL_INCHES if count <= most)
    figure.set_size_inches(count * cell_inches, count * cell_inches)
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, count), ylim=(count, 0), xlabel="predicted", ylabel="true")
    axes.xaxis.set_label_position("top")
    axes.tick_params(length=0, labelsize=9, labeltop=True, labelbottom=False)
    short = [name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 1]}…" for name in names]
    middles = [index + 0.5 for index in range(count)]
    axes.set_xticks(middles, short, rotation=0 if max(map(len, short)) <= 3 else 90)
    axes.set_yticks(middles, short)
    cells = [(i, j, number, sum(row)) for i, row in enumerate(matrix) for j, number in enumerate(row) if number]
    for i, j, number, total in cells:
        share, colour = number / total, CORRECT if i == j else WRONG
        cell = Rectangle((j, i), 1, 1, color=colour, alpha=0.12 + 0.88 * share, linewidth=0)
        cell.set_gid(f"{TOOLTIP}{names[i]} → {names[j]}: {number:,}")
        cell.set_in_layout(False)  # noqa: FBT003 (a property)
        axes.add_artist(cell)  # with add_patch, and in the layout, 100 classes would take ten times as long
        if count <= MAX_NUMBERED:
            size, ink = min(10.0, 100 * cell_inches / len(str(number))), "white" if share > 0.65 else INK
            axes.text(j + 0.5, i + 0.5, str(number), color=ink, size=size, ha="center", va="center")


def _draw_reliability(figure: Figure, bins: Sequence[dict[str, Any]]) -> None:
    figure.set_size_inches(4, 5)
    upper, lower = figure.subplots(2, sharex=True, height_ratios=(5, 1))
    upper.set(xlim=(0, 1), ylim=(0, 1), ylabel="accuracy")
    lower.set(xlabel="confidence", ylabel="samples")
    for each in bins:
        tooltip = (
            f"{TOOLTIP}{each['samples']:,} samples between {each['from']:.2f} and {each['to']:.2f}: confidence "
            f"{each['confidence']:.3f}, accuracy {each['accuracy']:.3f}"
        )
        middle, width = (each["from"] + each["to"]) / 2, each["to"] - each["from"] - 0.006
        for axes, height, colour in ((upper, each["accuracy"], BAR), (lower, each["samples"], GREY)):
            (bar,) = axes.bar(middle, height, width, color=colour)
            bar.set_gid(tooltip)
    upper.plot((0, 1), (0, 1), "--", color=INK)


def _svg(title: str, draw: Callable[[Figure], None]) -> str:
    """Return a figure as SVG, with tooltips, and with text in the colour of the page."""
    text = draw_svg(draw, settings=SETTINGS, transparent=True, bbox_inches="tight")
    text = text[text.index("<svg") :].replace(f": {INK}", ": currentColor")
    text = re.sub(rf"<g id=(['\"]){TOOLTIP}(.*?)\1>", r"<g><title>\2</title>", text)
    head, _, body = text.partition(">")
    return f"{head}>\n<title>{title}</title>\n{STYLE}{body}"
