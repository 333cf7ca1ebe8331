"""metrics.csv: a row per logged step and per evaluation, for a spreadsheet or pandas."""

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path

from lockstep.base import storage
from lockstep.base.events import Evaluated, Observer, RunStarted, StepDone
from lockstep.observe.run_lines import MOST_BYTES

FIRST_COLUMNS = ("kind", "step", "epoch")


class Csv(Observer):
    """Appends rows, and writes the file anew when a column is added; on resume, rows of repeated steps are dropped."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "metrics.csv"
        self.columns = list(FIRST_COLUMNS)

    def notice(self, event: object) -> None:
        if isinstance(event, RunStarted):
            self._drop_after(event.resumed_step)
        elif isinstance(event, StepDone) and event.values:
            self._write({"kind": "step", "step": event.step, "epoch": event.epoch, **event.values})
        elif isinstance(event, Evaluated):
            facts = {"kind": "evaluation", "step": event.step, "epoch": event.epoch}
            self._write(facts | {f"test_{name}": value for name, value in event.values.items()})

    def _write(self, row: Mapping[str, object]) -> None:
        """Append a row. Raises OSError, after which the bus leaves this sink out."""
        added = [name for name in row if name not in self.columns]
        if added or not self.path.exists():
            self.columns += added
            self._rewrite(self._rows())
        with storage.append(self.path) as file:
            file.write(self._line([row.get(name, "") for name in self.columns]))

    def _drop_after(self, step: int) -> None:
        """Keep the rows up to a step."""
        if not self.path.exists():
            return
        rows = [row for row in self._rows() if row.get("step", "").isdecimal() and int(row["step"]) <= step]
        self.columns = list(dict.fromkeys([*FIRST_COLUMNS, *(name for row in rows for name in row if name)]))
        self._rewrite(rows)

    def _rows(self) -> list[dict[str, str]]:
        if not self.path.exists():
            return []
        text = storage.read_regular(self.path, MOST_BYTES).decode("utf-8", errors="replace")
        text = text[: text.rfind("\n") + 1]  # a kill may have cut the last row short
        return [row for row in csv.DictReader(io.StringIO(text), restval="") if None not in row]

    def _rewrite(self, rows: list[dict[str, str]]) -> None:
        lines = [self._line(self.columns), *(self._line([row.get(name, "") for name in self.columns]) for row in rows)]
        storage.write(self.path, "".join(lines))

    @staticmethod
    def _line(values: Sequence[object]) -> str:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerow(values)
        return text.getvalue()


build = Csv
