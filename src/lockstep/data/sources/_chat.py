"""Chats from a file of JSON lines, held in memory."""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.base.errors import DataError
from lockstep.data import tables
from lockstep.data.chat import ASSISTANT, fault
from lockstep.data.in_memory import PlainTexts
from lockstep.data.packing import held_out_rows
from lockstep.data.sources.chat import Config


def build(config: Config, split: str) -> PlainTexts:
    """Read the chats of the "train" or "test" split, each as JSON. Raises DataError, which names the line."""
    path = config.train if config.test is None or split == "train" else config.test
    chats = _read(path, config.messages_column)
    if config.test is None:
        chats = [chats[row] for row in held_out_rows(len(chats), config.test_fraction, split)]
    return PlainTexts(chats)


def _read(path: Path, column: str) -> list[str]:
    if not path.is_file():
        raise DataError(f"there is no file {path}: correct data.train or data.test")
    chats = []
    with tables.read_errors(path):
        for number, row in tables.json_rows(path, partial(_check_column, column)):
            if reason := fault(row[column]):
                raise DataError(f"line {number} of {path}: {reason}")
            if not any(message["role"] == ASSISTANT for message in row[column]):
                raise DataError(f"line {number} of {path}: no message is of the assistant, so nothing is learned of it")
            chats.append(json.dumps(row[column], ensure_ascii=False))
    if not chats:
        raise DataError(f"{path} holds no chat")
    return chats


def _check_column(column: str, names: Sequence[str], where: Any) -> None:
    if column not in names:
        raise DataError(
            f"{where} has no {column!r}: name the list of messages with data.messages_column (there is: "
            f"{', '.join(names) or 'nothing'})"
        )
