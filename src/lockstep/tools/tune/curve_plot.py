"""Draws a range test as SVG: one file without anything from outside, made by hand since it is one picture."""

import math
from collections.abc import Iterable
from xml.sax.saxutils import escape

import numpy as np

from lockstep.tools.tune.loss_curve import Curve

WIDTH, HEIGHT = 800, 480
LEFT, RIGHT, TOP, BOTTOM = 84, 780, 84, 420
"""The frame's sides, in pixels from the left and from the top."""
RAW, SMOOTH, MARK, LOW, INK, GRID = "#9db4c8", "#1f5f99", "#c0392b", "#2e7d32", "#333333", "#e4e4e4"
LEAST_SPAN = 0.05
"""The axis of losses covers at least this part of the loss: less is rounding."""
TICKS = 6
"""About so many numbers on the axis of losses."""


def svg(curve: Curve, title: str, *, rate: str = "learning rate") -> str:
    """The picture as text: raw and smoothed loss over the rate (logarithmic), a mark at the suggestion; `rate` says
    what the rate is."""
    frame = PlotFrame(curve)
    place = curve.steepest
    parts = [
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        text(LEFT, 28, title, size=17, weight="bold"),
        *legend(curve),
        *frame.axes(rate),
        '<g clip-path="url(#frame)">',
        line(frame.points(curve.losses), RAW, 1.2),
        line(frame.points(curve.smoothed), SMOOTH, 2.4),
        "</g>",
        *(marks(frame, curve, place) if place is not None else []),
    ]
    body = "\n".join(parts)
    clip = f'<rect x="{LEFT}" y="{TOP}" width="{RIGHT - LEFT}" height="{BOTTOM - TOP}"/>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'font-family="Helvetica, Arial, sans-serif" role="img">\n<title>{escape(title)}</title>\n'
        f'<defs><clipPath id="frame">{clip}</clipPath></defs>\n{body}\n</svg>\n'
    )


class PlotFrame:
    """From rates and losses to pixels."""

    def __init__(self, curve: Curve) -> None:
        self.first, self.last = (math.log10(rate) for rate in (curve.rates[0], curve.rates[-1]))
        self.low, self.high = span(curve)

    def x(self, rate: float) -> float:
        """Pixels from the left."""
        return LEFT + (RIGHT - LEFT) * (math.log10(rate) - self.first) / (self.last - self.first)

    def y(self, loss: float) -> float:
        """Pixels from the top."""
        return BOTTOM - (BOTTOM - TOP) * (loss - self.low) / (self.high - self.low)

    def points(self, losses: np.ndarray) -> str:
        """A curve over the rates of the sweep; what is far above the frame is cut, as some readers overflow."""
        xs = np.linspace(LEFT, RIGHT, len(losses))
        highest = self.high + 2 * (self.high - self.low)
        return " ".join(f"{x:.1f},{self.y(min(loss, highest)):.1f}" for x, loss in zip(xs, losses, strict=True))

    def axes(self, name: str) -> Iterable[str]:
        """Grid, numbers and names of both axes."""
        for loss in ticks(self.low, self.high):
            y = self.y(loss)
            yield f'<path d="M{LEFT} {y:.1f}H{RIGHT}" stroke="{GRID}"/>'
            yield text(LEFT - 8, y + 4, f"{loss:g}", anchor="end")
        for rate in decades(self.first, self.last):
            x = self.x(rate)
            yield f'<path d="M{x:.1f} {TOP}V{BOTTOM}" stroke="{GRID}"/>'
            yield text(x, BOTTOM + 20, short(rate))
        yield f'<path d="M{LEFT} {TOP}V{BOTTOM}H{RIGHT}" fill="none" stroke="{INK}"/>'
        yield text((LEFT + RIGHT) / 2, BOTTOM + 46, f"{name}, log scale", size=14)
        middle = (TOP + BOTTOM) / 2
        yield text(18, middle, "training loss", size=14, more=f'transform="rotate(-90 18 {middle})"')


def short(rate: float) -> str:
    """1e-7 rather than 1e-07."""
    power = math.log10(rate)
    return f"1e{round(power)}" if abs(power - round(power)) < 1e-9 else f"{rate:.2g}"


def span(curve: Curve) -> tuple[float, float]:
    """The losses that the frame shows: what lies before the lowest point; what then explodes leaves it at the top."""
    end = curve.lowest + 1 if curve.is_readable else len(curve.losses)
    seen = np.concatenate([curve.losses[:end], curve.smoothed[:end]])
    low, high = float(seen.min()), float(seen.max())
    room = max(high - low, LEAST_SPAN * abs(high)) or 1.0
    return low - 0.08 * room, high + 0.25 * room


def ticks(low: float, high: float) -> list[float]:
    """Round numbers between two losses, 1, 2 or 5 times a power of ten apart."""
    rough = (high - low) / TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(step for step in (power, 2 * power, 5 * power, 10 * power) if step >= rough)
    first = math.ceil(low / step)
    return [float(f"{number * step:.10g}") for number in range(first, math.floor(high / step) + 1)]


def decades(first: float, last: float) -> list[float]:
    """Powers of ten between two exponents, of a short range also 2 and 5 times these; else the two ends."""
    factors = (1.0, 2.0, 5.0) if last - first < 2 else (1.0,)
    whole = range(math.floor(first), math.ceil(last) + 1)
    found = [factor * 10.0**exponent for exponent in whole for factor in factors]
    found = [rate for rate in found if first - 1e-9 <= math.log10(rate) <= last + 1e-9]
    return found[:: max(1, -(-len(found) // 12))] if len(found) > 1 else [10.0**first, 10.0**last]


def legend(curve: Curve) -> Iterable[str]:
    """What the lines mean, in a row under the title, with the rates in numbers."""
    entries = [(RAW, "loss of each step"), (SMOOTH, "smoothed")]
    if (place := curve.steepest) is not None:
        entries.append((MARK, f"suggestion {curve.rates[place]:.2g}: falls fastest"))
        entries.append((LOW, f"lowest at {curve.rates[curve.lowest]:.2g}"))
    x = float(LEFT)
    for color, words in entries:
        yield f'<path d="M{x:.0f} 55H{x + 22:.0f}" stroke="{color}" stroke-width="4"/>'
        yield text(x + 28, 60, words, anchor="start")
        x += 28 + 7.2 * len(words) + 22


def text(x: float, y: float, words: str, *, size: int = 13, anchor: str = "", weight: str = "", more: str = "") -> str:
    """One line of text; a title begins at its place, other words stand around it unless told otherwise."""
    anchor = anchor or ("start" if weight else "middle")
    bold = f' font-weight="{weight}"' if weight else ""
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {place} font-size="{size}" fill="{INK}"{bold} {more}>{escape(words)}</text>'


def line(points: str, color: str, width: float) -> str:
    return f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="{width}" stroke-linejoin="round"/>'


def marks(frame: PlotFrame, curve: Curve, place: int) -> Iterable[str]:
    """A dashed line at the suggestion, and a dot there and at the lowest point."""
    x = frame.x(curve.rates[place])
    yield f'<path d="M{x:.1f} {TOP}V{BOTTOM}" stroke="{MARK}" stroke-width="1.5" stroke-dasharray="6 4"/>'
    for step, color in ((curve.lowest, LOW), (place, MARK)):
        x, y = frame.x(curve.rates[step]), frame.y(curve.smoothed[step])
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{color}" stroke="white" stroke-width="1.5"/>'
