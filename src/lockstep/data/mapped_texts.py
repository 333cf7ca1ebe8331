"""A column of texts that is mapped into memory, of which each is read when it is asked for."""

from collections.abc import Sequence
from typing import Any

import numpy as np


class MappedTexts(Sequence[str]):
    """Some rows of an Arrow column."""

    def __init__(self, column: Any, rows: np.ndarray | None = None) -> None:
        """`column` holds strings, or bytes of UTF-8 in which there may be lone surrogates; by default all rows."""
        self.column, self.chunks = column, column.chunks
        self.starts = np.cumsum([0, *map(len, self.chunks)])
        self.rows = np.arange(len(column)) if rows is None else rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        """The text with this number, or some texts."""
        row = self.rows[index]
        if isinstance(row, np.ndarray):
            return MappedTexts(self.column, row)
        chunk = int(np.searchsorted(self.starts, row, side="right")) - 1
        text = self.chunks[chunk][int(row - self.starts[chunk])].as_py()
        return text.decode("utf-8", "surrogatepass") if isinstance(text, bytes) else text
