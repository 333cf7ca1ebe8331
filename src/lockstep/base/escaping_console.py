"""Show text from untrusted sources on a terminal or in a log without sending its control characters."""

from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.segment import Segment

from lockstep.base import loading
from lockstep.base.errors import printable


def escape_name(text: object) -> str:
    """Escape line breaks and control characters in a name (of a file, a label, a metric)."""
    return printable(str(text)).replace("\n", "\\n").replace("\t", "\\t")


class EscapingConsole(Console):
    """A console that prints text as it is (a path may hold [x] or :100:), control characters as escapes."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, **options)

    def print(self, *objects: Any, **options: Any) -> None:
        """Print as rich does, and end what `loading` began."""
        loading.end()
        super().print(*objects, **options)

    def render(self, renderable: Any, options: Any = None) -> Iterator[Segment]:
        """Render as rich does, but escape the text."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)


def wide_console(console: Console, width: int) -> Console:
    """Return the console if it is a terminal, else one of a fixed width: in a log, tables are not folded to 80."""
    return console if console.is_terminal else EscapingConsole(file=console.file, width=width, quiet=console.quiet)
