"""Text that somebody else has written, on a terminal or in a log: shown, never obeyed."""

from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.segment import Segment

from lockstep.base.errors import printable


def named(text: object) -> str:
    """A name that somebody else has given (of a file, a label, a metric), in one line."""
    return printable(str(text)).replace("\n", "\\n").replace("\t", "\\t")


class EscapingConsole(Console):
    """A console that shows control characters instead of sending them to the terminal, whoever wrote them."""

    def render(self, renderable: Any, options: Any = None) -> Iterator[Segment]:
        """As rich does it, but for the text."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)
