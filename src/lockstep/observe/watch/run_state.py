"""What a run is doing, from the files in its folder, read again and again while they grow."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from lockstep.base import storage
from lockstep.base.errors import ConfigError, absence
from lockstep.observe import run_history
from lockstep.observe.report.goodput import Start, starts
from lockstep.observe.report.run_files import METRICS, RECIPE, HistoryLine
from lockstep.observe.report.timeline import Happening, timeline

LAUNCH = "launch.yaml"
"""There before the processes of a run have started."""
MOST_LINE_BYTES = 1 << 20
TAIL_BYTES = 1 << 16
FREQUENT = ("steps", "ranks")


@dataclass(frozen=True, kw_only=True)
class RunState:
    """How far a run is, by its newest lines."""

    name: str
    start: Start | None
    """The newest start; None before the first."""
    steps: HistoryLine | None
    """The newest line about steps of this start."""
    ranks: HistoryLine | None
    saved: HistoryLine | None
    metrics: dict[str, Any]
    """The newest logged step's."""
    evaluation: dict[str, Any]
    """The newest one's."""
    happenings: list[Happening]

    @property
    def step(self) -> int:
        return max((line.step for line in self.start.lines), default=0) if self.start else 0


class RunReader:
    """Follows a run's files. Raises ConfigError for a folder that is no run's."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.offset, self.rest = 0, b""
        self.lines: list[HistoryLine] = []
        """All but those of FREQUENT kinds, of which only the last of a start are kept."""
        self.newest: dict[str, HistoryLine] = {}
        """Of FREQUENT kinds, of the newest start."""

    def state(self) -> RunState:
        """What the files say now."""
        if not any((self.folder / name).is_file() for name in (RECIPE, LAUNCH)):
            what = absence(self.folder, f"there is no {RECIPE} in it")
            raise ConfigError(f"{self.folder} is no run: {what} (runs are folders such as runs/NAME)")
        self._read_history()
        found = starts([*self.lines, *self._newest()])
        newest = {line.kind: line for line in found[-1].lines} if found else {}
        logged = last_lines(self.folder / METRICS)
        return RunState(
            name=self.folder.name,
            start=found[-1] if found else None,
            steps=self.newest.get("steps"),
            ranks=self.newest.get("ranks"),
            saved=newest.get("saved"),
            metrics=next((line for line in reversed(logged) if line.get("kind") == "step"), {}),
            evaluation=next((line for line in reversed(logged) if line.get("kind") == "evaluation"), {}),
            happenings=timeline(found, is_running=True),
        )

    def _read_history(self) -> None:
        """Read what was appended since the last time; from the start where the file was replaced."""
        path = self.folder / run_history.FILE
        try:
            with storage.regular(path) as file:
                if os.fstat(file.fileno()).st_size < self.offset:
                    self.offset, self.rest = 0, b""
                    self.lines.clear()
                    self.newest.clear()
                file.seek(self.offset)
                while chunk := file.read(MOST_LINE_BYTES):
                    self.offset += len(chunk)
                    *lines, self.rest = (self.rest + chunk).split(b"\n")
                    for line in lines:
                        self._add(line)
        except FileNotFoundError:
            return
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}") from None

    def _add(self, text: bytes) -> None:
        try:
            line = HistoryLine.model_validate_json(text)
        except ValidationError:
            return
        if line.kind in FREQUENT:
            self.newest[line.kind] = line
            return
        if line.kind == "started":  # where the start before was killed, they are the last that is known of it
            self.lines += self._newest()
            self.newest.clear()
        self.lines.append(line)

    def _newest(self) -> list[HistoryLine]:
        return sorted(self.newest.values(), key=lambda line: line.time)


def last_lines(path: Path) -> list[dict[str, Any]]:
    """The last lines of a JSON Lines file that are whole; none where there is no file."""
    try:
        with storage.regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - TAIL_BYTES))
            lines = file.read(TAIL_BYTES).split(b"\n")[size > TAIL_BYTES : -1]
    except OSError:
        return []
    found = []
    for line in lines:
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            found.append(value)
    return found
