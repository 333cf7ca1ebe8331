"""Texts from a column of a data set of the Hugging Face hub, or of a local folder in its place."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.base.contracts import Columns, DataSpec
from lockstep.data.columns import Place, texts_of
from lockstep.data.packing import END, UNREADABLE


class TextRows:
    """Some rows of a table that is mapped into memory, each a text of its own."""

    lengths: np.ndarray | None = None
    spec = DataSpec(modality="tokens")

    def __init__(self, table: Any, column: str, rows: np.ndarray, *, place: Place, repairs: bool = False) -> None:
        """`table` is a `datasets.Dataset`; `repairs` leaves out rows without a text, which are an error else."""
        self.table, self.column, self.rows = table.select_columns([column]), column, rows
        self.place, self.repairs = place, repairs
        digest = hashlib.sha256(f"{column} {len(table)} {table._fingerprint}".encode())
        digest.update(rows.tobytes())
        for file in table.cache_files:
            found = Path(file["filename"]).stat()
            digest.update(f"{found.st_size} {found.st_mtime_ns}\n".encode())
        self.fingerprint = digest.hexdigest()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitems__(self, indices: Sequence[int]) -> Columns:
        """{"text": m strings}. Raises DataError for a row without a text."""
        rows = self.rows[np.asarray(indices, dtype=np.int64)]
        cells = self.table[rows][self.column]
        if not self.repairs:
            texts_of(cells, lambda number: self.place(int(rows[number])))
        return {"text": [each.replace(END, UNREADABLE) + END if isinstance(each, str) else "" for each in cells]}
