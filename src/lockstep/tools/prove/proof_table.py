"""What a proof says: a row for each thing that was shown, and why where it was not."""

from dataclasses import dataclass
from typing import Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lockstep.base.escaping import wide_console

LOG_WIDTH = 140
"""Characters of a line where there is no terminal to ask."""

Result = Literal["shown", "DIFFERS", "not shown", "declared"]
STYLES: dict[Result, str] = {"shown": "green", "DIFFERS": "bold red", "not shown": "yellow", "declared": "cyan"}


@dataclass(frozen=True, kw_only=True)
class ProofRow:
    """One thing that a proof sets out to show."""

    what: str
    how: str
    """On how many processes, how many steps, by which comparison."""
    result: Result
    digest: str = ""
    """The number or the digest that it comes down to."""
    cause: str = ""
    """The first cause of a difference that could be found, or why it could not be shown."""


def table(rows: list[ProofRow]) -> Table:
    made = Table("what", "how", "result", "digest", show_lines=True, caption="W: number of processes")
    for row in rows:
        made.add_row(row.what, row.how, Text(row.result, STYLES[row.result]), row.digest)
    return made


def print_proof(rows: list[ProofRow], console: Console) -> int:
    """Print the table, the causes and a last sentence; returns the exit code, 1 when anything differs."""
    wide_console(console, LOG_WIDTH).print(table(rows))
    for row in rows:
        if row.cause:
            console.print(f"{row.result}: {row.what}\n  {row.cause}", soft_wrap=True)
    differing = sum(row.result == "DIFFERS" for row in rows)
    missing = sum(row.result == "not shown" for row in rows)
    declared = sum(row.result == "declared" for row in rows)
    rest = (f"; {missing} could not be shown" if missing else "") + (f"; {declared} declared" if declared else "")
    if differing:
        console.print(f"{differing} of {len(rows)} differ{'s' if differing == 1 else ''}{rest}.", soft_wrap=True)
        return 1
    console.print(f"{len(rows) - missing - declared} of {len(rows)} shown, none differs{rest}.", soft_wrap=True)
    return 0
