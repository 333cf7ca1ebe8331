"""Show text from untrusted sources on a terminal or in a log without sending its control characters."""

from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.segment import Segment

from lockstep.base.errors import printable


def escape_name(text: object) -> str:
    """A name (of a file, a label, a metric) on one line, its control characters escaped."""
    return printable(str(text)).replace("\n", "\\n").replace("\t", "\\t")


class EscapingConsole(Console):
    """A rich console that escapes the control characters in everything it prints."""

    def render(self, renderable: Any, options: Any = None) -> Iterator[Segment]:
        """Render as rich does, with text escaped."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)
