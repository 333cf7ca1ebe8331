"""Chats from a file of JSON lines, held in memory."""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.base.errors import DataError, few
from lockstep.data import tables
from lockstep.data.chat import fault, is_learned
from lockstep.data.in_memory import PlainTexts
from lockstep.data.packing import held_out_rows
from lockstep.data.sources.chat import Config


def build(config: Config, split: str) -> PlainTexts:
    """Read the chats of the "train" or "test" split, each as JSON. Raises DataError, which names the line."""
    path = config.train if config.test is None or split == "train" else config.test
    chats, unused = _read(path, config.messages_column)
    if config.test is None:
        chats = [chats[row] for row in held_out_rows(len(chats), config.test_fraction, split)]
    found = PlainTexts(chats)
    if unused:
        found.remarks = (
            f"of {path.name} nothing but {config.messages_column!r} and 'tools' is used: not {few(unused)}",
        )
    return found


def _read(path: Path, column: str) -> tuple[list[str], list[str]]:
    """Return the chats, and the names of columns that are not used."""
    if not path.is_file():
        raise DataError(f"there is no file {path}: correct data.train or data.test")
    chats, names = [], dict[str, None]()
    with tables.read_errors(path):
        for number, row in tables.json_rows(path, partial(_check_column, column)):
            if reason := fault(row[column]):
                raise DataError(f"line {number} of {path}: {reason}")
            if not any(map(is_learned, row[column])):
                raise DataError(f"line {number} of {path}: no message is of the assistant, so nothing is learned of it")
            tools = _tools(row.get("tools"), f"line {number} of {path}")
            chat = {"messages": row[column], "tools": tools} if tools else row[column]
            chats.append(json.dumps(chat, ensure_ascii=False))
            names |= dict.fromkeys(row)
    if not chats:
        raise DataError(f"{path} holds no chat")
    return chats, [name for name in names if name not in (column, "tools")]


def _tools(given: Any, where: str) -> Any:
    """Return the schemas of functions, which some files hold as JSON in a text. Raises DataError."""
    try:
        tools = json.loads(given) if isinstance(given, str) and given else given
    except ValueError:
        tools = given
    if tools and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise DataError(f"{where}: 'tools' is no list of the schemas of functions")
    return tools


def _check_column(column: str, names: Sequence[str], where: Any) -> None:
    if column not in names:
        raise DataError(
            f"{where} has no {column!r}: name the list of messages with data.messages_column (there is: "
            f"{', '.join(names) or 'nothing'})"
        )
