"""`lockstep plugins`."""

import inspect

from rich.table import Table

from lockstep.base import plugins
from lockstep.cli._common import console


def command() -> None:
    """List models, sources, strategies and launchers."""
    for title, family in plugins.FAMILIES.items():
        table = Table("name", "what it is", title=title, title_justify="left", title_style="bold")
        for name in plugins.names(family):
            described = inspect.getdoc(plugins.find(family, name).Config) or ""
            table.add_row(name, " ".join(described.split("\n\n")[0].split()))
        console.print(table)
