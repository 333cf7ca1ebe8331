"""Figures as SVG by matplotlib: the same bytes for the same data, whatever the user's matplotlib settings are."""

import logging
import warnings
from collections.abc import Callable, Mapping
from io import StringIO
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes as Axes
    from matplotlib.figure import Figure as Figure
else:
    Axes = Figure = Any  # the import takes long

SETTINGS = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "lockstep",  # the same ids each time
    "text.parse_math": False,  # names may contain dollar signs
}
CHART = {
    **{"axes.spines.top": False, "axes.spines.right": False},
    **{"axes.grid": True, "axes.axisbelow": True, "grid.color": "#e4e4e4"},
    **{"axes.titleweight": "bold", "figure.titleweight": "bold", "legend.frameon": False},
    "figure.constrained_layout.use": True,
}
"""Settings of the charts that commands draw."""
METADATA = ("Creator", "Date", "Format", "Type")


def draw_svg(
    draw: Callable[[Figure], None],
    *,
    settings: Mapping[str, Any] | None = None,
    metadata: Mapping[str, str] | None = None,
    **options: Any,
) -> str:
    """Draw on a new figure and return its SVG. `settings` are rcParams; `options` go to `Figure.savefig`. A
    matplotlibrc of the user, or in the current folder, is not used: it could change the picture, or run LaTeX."""
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # its first import on a machine builds a font cache
    import matplotlib.figure
    from matplotlib.ticker import LogFormatter, LogFormatterMathtext

    file = StringIO()
    parameters: Any = {**SETTINGS, **(settings or {})}
    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about glyphs that its font lacks: the browser has other fonts
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(parameters)
        figure = matplotlib.figure.Figure()
        draw(figure)
        for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
            if isinstance(axis.get_major_formatter(), LogFormatterMathtext):  # mathematics would be shown as it is
                axis.set_major_formatter(LogFormatter())
                axis.set_minor_formatter(LogFormatter(labelOnlyBase=False))
        figure.savefig(file, format="svg", metadata={**dict.fromkeys(METADATA), **(metadata or {})}, **options)
    return file.getvalue()
