"""The pictures of an evaluation as SVG: for light and dark, and without anything from outside."""

from collections.abc import Iterable, Sequence
from typing import Any
from xml.sax.saxutils import escape

from lockstep.base.escaping import escape_name

CELL_SIZES = ((12, 56), (30, 30), (100, 14))
"""(classes at most, pixels of a cell): the more there are, the smaller."""
NUMBERED = 30
"""In smaller cells there is no room for a number."""
LONGEST_NAME = 18
UPRIGHT = 3
"""Names of at most so many letters stand above their columns as they are."""
LETTER = 6.6
"""Pixels, of 12-pixel letters on average."""
STYLE = """<style>
.pic-paper{fill:#ffffff}.pic-ink{fill:#1c2026}.pic-soft{fill:#5c6570}.pic-line{stroke:#c9ced6;fill:none}.pic-guide{stroke:#5c6570}
.pic-right{fill:#1a7f4e}.pic-wrong{fill:#c8401f}.pic-bar{fill:#2f6fb3}
@media (prefers-color-scheme:dark){.pic-paper{fill:#14171c}.pic-ink{fill:#e8eaee}.pic-soft{fill:#9aa3af}
.pic-line{stroke:#3a414b}.pic-guide{stroke:#e8eaee}.pic-right{fill:#35b37a}.pic-wrong{fill:#ee6a45}.pic-bar{fill:#5b9be0}}
</style>"""
SIDE, LEFT, TOP, COUNTS = 300, 52, 14, 60
"""Of a reliability diagram: its square, the margins, and the height of the counts below."""


def confusion(matrix: Sequence[Sequence[int]], names: Sequence[str]) -> str:
    """A confusion matrix [true][predicted]: each row's colours are shares of its class; what is wrong is red."""
    cell = next(size for most, size in CELL_SIZES if len(names) <= most)
    names = [escape_name(name) for name in names]  # control characters are not XML
    short = [name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 1]}…" for name in names]
    margin = max(40.0, 20 + max(map(len, short)) * LETTER)
    left, top, side = margin + 22, margin + 22, cell * len(names)
    parts = [
        _text(left + side / 2, 16, "predicted", kind="pic-soft"),
        _text(14, top + side / 2, "true", kind="pic-soft", turned=-90),
    ]
    for place, (name, whole) in enumerate(zip(short, names, strict=True)):
        middle = cell * (place + 0.5)
        beside = _text(left - 8, top + middle + 4, name, anchor="end")
        above = _text(left + middle + 4, top - 8, name, anchor="start", turned=-90)
        if max(map(len, short)) <= UPRIGHT:
            above = _text(left + middle, top - 8, name)
        parts.append(f"<g><title>{escape(whole)}</title>{beside}{above}</g>")
    for i, row in enumerate(matrix):
        for j, count in enumerate(row):
            corner, title = (left + cell * j, top + cell * i), f"{names[i]} → {names[j]}: {count:,}"
            parts.append(_cell(corner, cell, count=count, total=sum(row), title=title, is_right=i == j))
    parts.append(_rect("pic-line", (left, top, side, side)))
    return _picture(parts, left + side + 12, top + side + 12, title="confusion matrix")


def _cell(corner: tuple[float, float], side: float, *, count: int, total: int, title: str, is_right: bool) -> str:
    if count == 0:
        return ""
    share, (x, y) = count / total, corner
    drawn = _rect("pic-right" if is_right else "pic-wrong", (x, y, side, side), opacity=0.12 + 0.88 * share)
    if side >= NUMBERED:
        size = min(14.0, 1.5 * side / len(f"{count}"))
        ink = "pic-paper" if share > 0.5 else "pic-ink"
        drawn += _text(x + side / 2, y + side / 2 + size / 3, f"{count}", kind=ink, size=size)
    return f"<g><title>{escape(title)}</title>{drawn}</g>"


def reliability(bins: Sequence[dict[str, Any]], title: str) -> str:
    """How often right (bars) over how confident, against what it should be (the diagonal); how many, below."""
    bottom = TOP + SIDE
    parts = list(_axes())
    most = max(one["samples"] for one in bins)
    for one in bins:
        x, width = LEFT + SIDE * one["from"] + 1, SIDE * (one["to"] - one["from"]) - 2
        told = (
            f"{one['samples']:,} samples between {one['from']:.2f} and {one['to']:.2f}: confidence "
            f"{one['confidence']:.3f}, accuracy {one['accuracy']:.3f}"
        )
        high, many = SIDE * one["accuracy"], (COUNTS - 10) * one["samples"] / most
        bars = _rect("pic-bar", (x, bottom - high, width, high))
        bars += _rect("pic-soft", (x, bottom + 34 + COUNTS - many, width, many))
        parts.append(f"<g><title>{escape(told)}</title>{bars}</g>")
    dashed = 'fill="none" stroke-dasharray="5 4" stroke-width="2"'
    parts.append(f'<path class="pic-guide" {dashed} d="M{LEFT} {bottom}l{SIDE} -{SIDE}"/>')
    below = f"samples (highest bar: {most:,})"
    parts.append(_text(LEFT, bottom + 34 + COUNTS + 16, below, kind="pic-soft", anchor="start"))
    return _picture(parts, LEFT + SIDE + 14, bottom + COUNTS + 58, title=title)


def _axes() -> Iterable[str]:
    bottom = TOP + SIDE
    yield _rect("pic-line", (LEFT, TOP, SIDE, SIDE))
    for tick in (0, 0.25, 0.5, 0.75, 1):
        yield _text(LEFT + SIDE * tick, bottom + 16, f"{tick:g}", kind="pic-soft")
        yield _text(LEFT - 6, bottom - SIDE * tick + 4, f"{tick:g}", kind="pic-soft", anchor="end")
    yield _text(LEFT + SIDE / 2, bottom + 30, "confidence", kind="pic-soft")
    yield _text(12, TOP + SIDE / 2, "accuracy", kind="pic-soft", turned=-90)


def _rect(kind: str, box: tuple[float, float, float, float], *, opacity: float = 1.0) -> str:
    """A box (x, y, width, height)."""
    x, y, width, height = box
    seen = f' fill-opacity="{opacity:.3f}"' if opacity < 1 else ""
    return f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"{seen}/>'


def _text(
    x: float,
    y: float,
    words: str,
    *,
    kind: str = "pic-ink",
    size: float = 12,
    anchor: str = "middle",
    turned: int = 0,
) -> str:
    """One line of text, turned around its place."""
    turn = f' transform="rotate({turned} {x:.1f} {y:.1f})"' if turned else ""
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size:.1f}"'
    return f'<text class="{kind}" {place}{turn}>{escape(words)}</text>'


def _picture(parts: Sequence[str], width: float, height: float, *, title: str) -> str:
    body = "\n".join(part for part in parts if part)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'height="{height:.0f}" font-family="Helvetica, Arial, sans-serif" role="img">\n'
        f"<title>{escape(title)}</title>\n{STYLE}\n"
        f'<rect class="pic-paper" width="{width:.0f}" height="{height:.0f}"/>\n{body}\n</svg>\n'
    )
