"""The result of a proof: a row for each claim, and the cause where it was not shown."""

from collections import Counter
from dataclasses import dataclass
from typing import Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lockstep.base.escaping_console import wide_console

LOG_WIDTH = 140
"""Characters of a line where there is no terminal."""

Result = Literal["shown", "DIFFERS", "not shown", "declared"]
STYLES: dict[Result, str] = {"shown": "green", "DIFFERS": "bold red", "not shown": "yellow", "declared": "cyan"}


class NotShown(Exception):
    """A claim cannot be shown here, for this reason."""


@dataclass(frozen=True, kw_only=True)
class ProofRow:
    what: str
    how: str = ""
    """Number of processes and steps, and what was compared."""
    result: Result
    digest: str = ""
    """The digest or number that was compared."""
    cause: str = ""
    """The first cause of a difference, or why the claim could not be shown."""


def print_proof(rows: list[ProofRow], console: Console) -> int:
    """Print the table, the causes and a summary; returns the exit code, 1 when anything differs."""
    table = Table("what", "how", "result", "digest", show_lines=True, caption="W: number of processes")
    for row in rows:
        table.add_row(row.what, row.how, Text(row.result, STYLES[row.result]), row.digest)
    wide_console(console, LOG_WIDTH).print(table)
    for row in rows:
        if row.cause:
            console.print(f"{row.result}: {row.what}\n  {row.cause}", soft_wrap=True)
    counts = Counter(row.result for row in rows)
    shown, differing, missing, declared = (counts[result] for result in STYLES)
    rest = (f"; {missing} could not be shown" if missing else "") + (f"; {declared} declared" if declared else "")
    if differing:
        console.print(f"{differing} of {len(rows)} differ{'s' if differing == 1 else ''}{rest}.", soft_wrap=True)
        return 1
    console.print(f"{shown} of {len(rows)} shown, none differs{rest}.", soft_wrap=True)
    return 0
