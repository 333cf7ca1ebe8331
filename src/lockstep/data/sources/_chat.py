"""Chats from a file of JSON lines, held in memory."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.base.errors import DataError, few
from lockstep.data import tables
from lockstep.data.chat import ASSISTANT, is_learned
from lockstep.data.chat_forms import KNOWN_ROLES, Chats, Message, chat_of, check_columns, columns_of, tools_of
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
    if not path.is_file():
        raise DataError(f"there is no file {path}: correct data.train or data.test")
    chats, lines, faults = list[str](), list[int](), list[str]()
    names, keys, unusual = dict[str, bool](), dict[str, None](), list[tuple[str, int]]()
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
                    raise DataError(f"{faults[0]}; data.on_bad_sample=skip leaves such chats out") from None
                continue
            chat = {"messages": messages, "tools": tools} if tools else messages
            chats.append(json.dumps(chat, ensure_ascii=False))
            lines.append(number)
            keys |= {key: None for message in messages for key in message}
            unusual += [(text, number) for text in _unusual(messages)]
    if not chats:
        raise DataError(f"{path} holds no chat{' that can be used: ' + faults[0] if faults else ''}")
    found = Chats(chats, lines, path=path, keys=[*keys])
    left_out = [f"{len(faults):,} of {len(chats) + len(faults):,} chats are left out: {faults[0]}"] if faults else []
    found.remarks = (*left_out, *_unusual_chats(path.name, unusual), *_unused_columns(path.name, names))
    return found


def _unusual_chats(file: str, unusual: Sequence[tuple[str, int]]) -> Iterator[str]:
    lines = dict(unusual[::-1])
    for text, count in Counter(text for text, _ in unusual).items():
        yield f"line {lines[text]} of {file}{f' and {count - 1:,} more' if count > 1 else ''}: {text}"


def _unused_columns(file: str, names: Mapping[str, bool]) -> Iterator[str]:
    if unused := [name for name, is_used in names.items() if not is_used]:
        taken = " and ".join(map(repr, dict.fromkeys([*(name for name in names if names[name]), "tools"])))
        yield f"of {file} nothing but {taken} is used: not {few(unused)}"


def _chat(row: dict[str, Any], config: Config) -> tuple[list[Message], Any]:
    """Return the messages of a row, and the schemas of functions. Raises DataError."""
    messages = chat_of(row, config.messages_column)
    learned = [number for number, message in enumerate(messages) if is_learned(message)]
    if not learned:
        roles = few(list(dict.fromkeys(str(message["role"]) for message in messages)))
        if any(message["role"] == ASSISTANT for message in messages):
            raise DataError("each answer is left out by 'train' or 'weight', so nothing is learned of it")
        raise DataError(f"no message has the role 'assistant', so nothing is learned of it (there is: {roles})")
    if config.turns == "last":
        for number in learned[:-1]:
            messages[number] = {**messages[number], "train": False}
    return messages, tools_of(row.get("tools"))


def _unusual(messages: list[Message]) -> set[str]:
    """Return what a chat has that is learned, but may be a mistake."""
    roles = {each["role"] for each in messages} - {*KNOWN_ROLES}
    found = {f"the role {role!r}, where usual ones are {', '.join(KNOWN_ROLES)}" for role in roles}
    answers = [each for each in messages if is_learned(each)]
    if not all(any(value for key, value in each.items() if key not in ("role", "train", "weight")) for each in answers):
        found.add("an empty answer, which is learned")
    for role in {each["role"] for each in messages if each.get("train") and each["role"] != ASSISTANT}:
        found.add(f"'train' in a message of the role {role!r}: only what the assistant says is learned")
    return found
