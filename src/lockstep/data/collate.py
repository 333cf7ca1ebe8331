"""Columns to tensors: rows of different length are padded to a multiple of 8."""

import numpy as np
import torch

from lockstep.contracts import Batch, Columns

MULTIPLE = 8
"""Lengths are rounded up to this, so that kernels meet few shapes (and tensor cores whole tiles)."""


def collate(columns: Columns, pad_id: int = 0, *, multiple: int = MULTIPLE) -> Batch:
    """Array [m, ...] -> tensor [m, ...]; list of m arrays [T_i] -> int64 [m, T] padded on the right, to a multiple.

    A padded "input_ids" comes with "attention_mask", int64 [m, T]: 1 where there is a token.
    """
    batch: Batch = {}
    for name, column in columns.items():
        if isinstance(column, list):
            batch[name], mask = _pad(column, pad_id if name == "input_ids" else 0, multiple)
            if name == "input_ids":
                batch["attention_mask"] = mask
        else:
            batch[name] = torch.as_tensor(column)
    return batch


def _pad(rows: list[np.ndarray], fill: int, multiple: int) -> tuple[torch.Tensor, torch.Tensor]:
    width = -(-max(len(row) for row in rows) // multiple) * multiple
    padded = np.full((len(rows), width), fill, dtype=np.int64)
    mask = np.zeros((len(rows), width), dtype=np.int64)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = row
        mask[i, : len(row)] = 1
    return torch.from_numpy(padded), torch.from_numpy(mask)
