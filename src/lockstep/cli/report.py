"""`lockstep report`."""

from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli._common import console, recorded


def command(
    runs: Annotated[list[Path], typer.Argument(help="Runs' folders.", metavar="RUN [RUN ...]", callback=recorded)],
    out: Annotated[
        Path | None,
        typer.Option(help="HTML file; default: report.html in the run's folder, or, of several runs, here."),
    ] = None,
) -> None:
    """Write a page about one run, or several side by side: curves, timeline, where the time went, settings.

    The page needs no other file and no network. A training writes its own at its end; this command also while it runs.
    """
    from lockstep.base import storage
    from lockstep.base.errors import ConfigError
    from lockstep.observe.report import report_page, run_files

    folders = [run.absolute() for run in runs]
    found = [*map(run_files.read, folders)] if len(folders) > 1 else run_files.with_parent(folders[0])
    target = out or (folders[0] / report_page.FILE if len(folders) == 1 else Path(report_page.FILE))
    try:
        storage.write(target, report_page.html(found))
    except OSError as error:
        raise ConfigError(f"cannot write {target}: {error.strerror}; name another file with --out") from None
    console.print(f"written to {target}", soft_wrap=True)
