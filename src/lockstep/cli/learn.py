"""`lockstep learn`."""

import ast
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.syntax import Syntax
from rich.table import Table

from lockstep.base.errors import ConfigError
from lockstep.cli._common import console, shipped_folder


def command(
    number: Annotated[int | None, typer.Argument(help="The lesson to run; without it they are listed.")] = None,
    show: Annotated[bool, typer.Option("--show", help="Print the lesson's code, and do not run it.")] = False,
) -> int:
    """Lessons on distributed training: short programs in plain PyTorch that run on a CPU and print what they show.

    Ends with the exit code of the lesson.
    """
    lessons = {int(file.name[:2]): file for file in sorted(shipped_folder("lessons").glob("[0-9][0-9]_*.py"))}
    if number is None:
        _print_lessons(lessons)
        return 0
    if number not in lessons:
        raise ConfigError(f"there is no lesson {number}: there are {', '.join(map(str, lessons))}")
    file = lessons[number]
    if show:
        code = file.read_text(encoding="utf-8")
        if console.is_terminal:
            console.print(Syntax(code, "python", word_wrap=True))
        else:
            typer.echo(code, nl=False)
        return 0
    console.print(f"python {file}", soft_wrap=True)
    return subprocess.run([sys.executable, file], check=False).returncode


def _print_lessons(lessons: dict[int, Path]) -> None:
    table = Table("lesson", "what it shows", "file")
    for number, file in lessons.items():
        about = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
        title = about.partition("\n")[0].partition(": ")[2].partition(" Run: ")[0]  # Lesson 2: TITLE. Run: python FILE
        table.add_row(str(number), title.rstrip("."), file.name)
    console.print(table)
    console.print("lockstep learn NUMBER runs one, lockstep learn NUMBER --show prints its code")
