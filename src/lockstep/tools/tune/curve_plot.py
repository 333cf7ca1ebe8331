"""Draws a learning-rate range test as SVG."""

from typing import TYPE_CHECKING

import numpy as np

from lockstep.observe.svg_figure import draw_svg
from lockstep.tools.tune.loss_curve import Curve

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RAW, SMOOTH, SUGGESTED, LOWEST = "#9db4c8", "#1f5f99", "#c0392b", "#2e7d32"
LEAST_SPAN = 0.05
"""The y axis covers at least this fraction of the loss: less is rounding."""
STYLE = {"axes.spines.top": False, "axes.spines.right": False}


def svg(curve: Curve, title: str, *, rate: str = "learning rate") -> str:
    """Raw and smoothed loss over the learning rate (log scale), with the suggested and the lowest point marked.

    `rate` labels the x axis.
    """

    def draw(figure: "Figure") -> None:
        figure.set_size_inches(9, 5.4)
        figure.set_layout_engine("constrained")
        axes = figure.add_subplot(xscale="log", xlabel=f"{rate}, log scale", ylabel="training loss", ylim=limits(curve))
        axes.set_title(title, weight="bold")
        axes.grid(color="#e4e4e4")
        axes.plot(curve.rates, curve.losses, color=RAW, linewidth=1.2, label="loss of each step")
        axes.plot(curve.rates, curve.smoothed, color=SMOOTH, linewidth=2.4, label="smoothed")
        if (best := curve.steepest) is not None:
            suggested, lowest = curve.rates[best], curve.rates[curve.lowest]
            axes.axvline(suggested, color=SUGGESTED, linestyle="--")
            for step, color, label in (
                (curve.lowest, LOWEST, f"lowest at {lowest:.2g}"),
                (best, SUGGESTED, f"suggestion {suggested:.2g}: falls fastest"),
            ):
                axes.plot(
                    curve.rates[step], curve.smoothed[step], "o", color=color, markeredgecolor="white", label=label
                )
        figure.legend(loc="outside lower center", ncols=4, frameon=False)

    return draw_svg(draw, settings=STYLE, metadata={"Title": title})


def limits(curve: Curve) -> tuple[float, float]:
    """The losses to show: those up to the lowest point. What then diverges leaves the frame at the top."""
    end = curve.lowest + 1 if curve.is_readable else len(curve.losses)
    shown = np.concatenate([curve.losses[:end], curve.smoothed[:end]])
    low, high = float(shown.min()), float(shown.max())
    span = max(high - low, LEAST_SPAN * abs(high)) or 1.0
    return low - 0.08 * span, high + 0.25 * span
