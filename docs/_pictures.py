"""Draws the pictures of README.md from real runs: `make pictures`. Needs chromium and chromedriver."""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from browsing import opened_browser
from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).parents[1]
ASSETS = ROOT / "docs" / "assets"
COMMANDS = (
    "lockstep train examples/digits.yaml run.name=one launch.processes=1",
    "lockstep train examples/digits.yaml run.name=two launch.processes=2",
    "lockstep compare runs/one runs/two",
)
WIDTH = 104


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "examples").symlink_to(ROOT / "examples")
        draw_terminal([(command, run(command, folder)) for command in COMMANDS])
        photograph((Path(folder) / "runs" / "two" / "report.html").as_uri())


def run(command: str, folder: str) -> str:
    """What a command prints, in colours."""
    name, *arguments = command.split()
    program = str(Path(sys.executable).with_name(name))
    colours = ["env", "FORCE_COLOR=1", f"COLUMNS={WIDTH}", "TERM=xterm-256color"]
    done = subprocess.run([*colours, program, *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.replace(os.path.realpath(folder), "~")


def draw_terminal(ran: list[tuple[str, str]]) -> None:
    """Commands with the first line of what they printed, and the last ones."""
    console = Console(record=True, width=WIDTH, file=open(os.devnull, "w"), force_terminal=True)  # noqa: SIM115
    for command, printed in ran:
        console.print(f"[bold green]$[/] [bold]{command}[/]", highlight=False)
        lines = printed.rstrip().splitlines()
        shown = lines if len(lines) <= 10 else [lines[0], *lines[-5:]]
        console.print(Text.from_ansi("\n".join(shown)), "", sep="\n")
    picture = console.export_svg(title="lockstep")
    without_foreign_fonts = re.sub(r"@font-face \{.*?\}", "", picture, flags=re.DOTALL)
    (ASSETS / "terminal.svg").write_text(without_foreign_fonts, encoding="utf-8")


def photograph(page: str) -> None:
    """A report in Chromium."""
    with opened_browser() as browser:
        browser.set_window_size(1000, 1000)
        browser.get(page)
        browser.save_screenshot(str(ASSETS / "report.png"))


if __name__ == "__main__":
    main()
