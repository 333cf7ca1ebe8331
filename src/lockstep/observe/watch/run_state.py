"""State of a run, from the files in its folder, read repeatedly while they grow."""

import os
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from lockstep.base.errors import ConfigError
from lockstep.observe.report.goodput import Start, starts
from lockstep.observe.report.timeline import TimelineEvent, timeline
from lockstep.observe.run_folder import RunFolder
from lockstep.observe.run_lines import MOST_LINES, HistoryLine, MetricLine, opened, short_lines

LAUNCH = "launch.yaml"
"""File that is in a run's folder before its processes have started."""
MOST_KEPT = 10_000
"""Lines of the history: those of the present start, and some before."""
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
    metrics: MetricLine | None
    """The newest line about a step."""
    evaluation: MetricLine | None
    """The newest line about an evaluation."""
    timeline_events: list[TimelineEvent]
    notes: list[str]
    """Sentences on what was left out."""

    @property
    def step(self) -> int:
        return max((line.step for line in self.start.lines), default=0) if self.start else 0


class RunReader:
    """Follows a run's files. Raises ConfigError for a folder that is no run's."""

    def __init__(self, folder: Path) -> None:
        self.run = RunFolder(folder)
        self.offset, self.read = 0, self.run.history_lines()
        self.lines: list[HistoryLine] = []
        """The last lines; of FREQUENT kinds only the last of a start."""
        self.newest: dict[str, HistoryLine] = {}
        """The newest line of each of the FREQUENT kinds, in the newest start."""

    def state(self) -> RunState:
        """Read the files again and return the present state."""
        if not (self.run.path / LAUNCH).is_file():
            self.run.settings_file()
        self._read_history()
        found = starts([*self.lines, *self._newest()])
        newest = {line.kind: line for line in found[-1].lines} if found else {}
        logged = list(self.run.last_metric_lines())
        return RunState(
            name=self.run.path.name,
            start=found[-1] if found else None,
            steps=self.newest.get("steps"),
            ranks=self.newest.get("ranks"),
            saved=newest.get("saved"),
            metrics=next((line for line in logged if line.kind == "step"), None),
            evaluation=next((line for line in logged if line.kind == "evaluation"), None),
            timeline_events=timeline(found, is_running=True),
            notes=self.read.left_out,
        )

    def _read_history(self) -> None:
        """Read what was appended since the last time; from the start where the file was replaced."""
        path = self.read.path
        try:
            with opened(path) as file:
                if os.fstat(file.fileno()).st_size < self.offset:
                    self.offset, self.read = 0, self.run.history_lines()
                    self.lines.clear()
                    self.newest.clear()
                file.seek(self.offset)
                for text in islice(short_lines(file), MOST_LINES):
                    if not text.endswith(b"\n"):  # is being written
                        return
                    self.offset = file.tell()
                    if (line := self.read.parsed(text)) is not None:
                        self._add(line)
        except FileNotFoundError:
            return
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}") from None

    def _add(self, line: HistoryLine) -> None:
        if line.kind in FREQUENT:
            self.newest[line.kind] = line
            return
        if line.kind == "started":  # where the start before was killed, they are the last that is known of it
            self.lines += self._newest()
            self.newest.clear()
        self.lines.append(line)
        if len(self.lines) > 2 * MOST_KEPT:
            start_lines = [each for each in self.lines[:-MOST_KEPT] if each.kind == "started"]
            self.lines = start_lines[-1:] + self.lines[-MOST_KEPT:]

    def _newest(self) -> list[HistoryLine]:
        return sorted(self.newest.values(), key=lambda line: line.time)
