"""Chats from a file of JSON lines, held in memory."""

import json
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.base.errors import DataError, few
from lockstep.data import tables
from lockstep.data.chat import is_learned
from lockstep.data.chat_forms import Chats, Message, chat_of, check_columns, columns_of, tools_of
from lockstep.data.packing import held_out_rows
from lockstep.data.sources.chat import Config


def build(config: Config, split: str) -> Chats:
    """Read the chats of the "train" or "test" split, each as JSON. Raises DataError, which names the line."""
    path = config.train if config.test is None or split == "train" else config.test
    found = _read(path, config)
    if config.test is None:
        return found.part(held_out_rows(len(found), config.test_fraction, split))
    return found


def _read(path: Path, config: Config) -> Chats:
    """Return all chats of a file. Raises DataError."""
    if not path.is_file():
        raise DataError(f"there is no file {path}: correct data.train or data.test")
    chats, lines, faults = list[str](), list[int](), list[str]()
    names, keys = dict[str, bool](), dict[str, None]()
    column = config.messages_column
    with tables.read_errors(path):
        for number, row in tables.json_rows(path, partial(check_columns, column=column)):
            used = {*columns_of([*row], column), "tools"}
            names |= {name: names.get(name, False) or name in used for name in row}
            try:
                messages, tools = _chat(row, config)
            except DataError as error:
                faults.append(f"line {number} of {path}: {error}")
                if not config.skips:
                    raise DataError(faults[0]) from None
                continue
            chat = {"messages": messages, "tools": tools} if tools else messages
            chats.append(json.dumps(chat, ensure_ascii=False))
            lines.append(number)
            keys |= {key: None for message in messages for key in message}
    if not chats:
        raise DataError(f"{path} holds no chat{' that can be used: ' + faults[0] if faults else ''}")
    found = Chats(chats, lines, path=path, keys=[*keys])
    if faults:
        found.remarks = (f"{len(faults):,} of {len(chats) + len(faults):,} chats are left out: {faults[0]}",)
    if unused := [name for name, is_used in names.items() if not is_used]:
        taken = " and ".join(map(repr, dict.fromkeys([*(name for name in names if names[name]), "tools"])))
        found.remarks += (f"of {path.name} nothing but {taken} is used: not {few(unused)}",)
    return found


def _chat(row: dict[str, Any], config: Config) -> tuple[list[Message], Any]:
    """Return the messages of a row, and the schemas of functions. Raises DataError."""
    messages = chat_of(row, config.messages_column)
    learned = [number for number, message in enumerate(messages) if is_learned(message)]
    if not learned:
        roles = few(list(dict.fromkeys(str(message["role"]) for message in messages)))
        raise DataError(f"no message has the role 'assistant', so nothing is learned of it (there is: {roles})")
    if config.turns == "last":
        messages = [_not_learned(each) if number in learned[:-1] else each for number, each in enumerate(messages)]
    return messages, tools_of(row.get("tools"))


def _not_learned(message: Message) -> Message:
    return {**message, "train": False}
