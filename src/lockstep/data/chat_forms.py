"""Column and message formats of chats in files and requests, read as messages with a role and a text."""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.base.errors import DataError, few
from lockstep.data.columns import check_named
from lockstep.data.in_memory import PlainTexts

Message = dict[str, Any]
ROLES = {"human": "user", "gpt": "assistant", "observation": "tool", "function_response": "tool"}
"""Role in ShareGPT's format -> role in chat templates."""
KNOWN_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
LEARNED = {"train": (True, False), "weight": (1, 0)}
"""Keys that say whether a message is learned -> their values, if it is and if not."""
FORMS = (("conversations",), ("prompt", "completion"), ("instruction", "output", "input", "system"))
"""Columns of other formats: ShareGPT, prompt and completion, Alpaca. The first two of each are required."""


def messages_of(given: Any) -> list[Message]:
    """Return messages as templates take them: parts joined to one text, null values dropped except the content beside
    tool calls. Raises DataError."""
    if not isinstance(given, Sequence) or isinstance(given, str) or not given:
        what = "an empty list" if given == [] else "no list of messages"
        raise DataError(f'the chat is {what}: write messages such as {{"role": "user", "content": "..."}}')
    return [_message(each, f"message {number}") for number, each in enumerate(given, 1)]


def _message(given: Any, name: str) -> Message:
    message = {key: value for key, value in given.items() if value is not None} if isinstance(given, Mapping) else {}
    if "role" not in message and isinstance(role := message.pop("from", None), str):
        message = {"role": ROLES.get(role, role), "content": message.pop("value", None), **message}
    if isinstance(message.get("content"), list):
        message["content"] = "".join(_part(part, name) for part in message["content"])
    if message.get("tool_calls"):
        message.setdefault("content", None)
    for key in (key for key in LEARNED if key in message):
        message[key] = _learned(message[key], f"{name}: {key!r}", LEARNED[key])
    for key in ("role", "content"):
        has_calls = key == "content" and key in message and message.get("tool_calls")
        if not isinstance(message.get(key), str) and not has_calls:
            raise DataError(f"{name} has no text {key!r}")
    return message


def _learned(given: Any, name: str, values: tuple[Any, Any]) -> Any:
    """Return the value, of the two for learned and not learned, that a file's value means. Raises DataError."""
    for value in values:
        if given == value or str(given).strip().lower() in (str(value).lower(), str(float(value)), str(int(value))):
            return value
    raise DataError(f"{name} is {given!r}: write {json.dumps(values[0])} or {json.dumps(values[1])}")


def _part(part: Any, name: str) -> str:
    text = part.get("text") if isinstance(part, Mapping) and part.get("type", "text") == "text" else part
    if not isinstance(text, str):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        raise DataError(f"{name} has a part of the type {kind!r}: only parts that are texts are read")
    return text


def with_objects(value: Any) -> Any:
    """Return a message whose tool calls have their arguments as objects; OpenAI's clients send them as JSON texts."""
    if isinstance(value, list):
        return [*map(with_objects, value)]
    if not isinstance(value, dict):
        return value
    return {key: _object(each) if key == "arguments" else with_objects(each) for key, each in value.items()}


def _object(given: Any) -> Any:
    try:
        found = json.loads(given)
    except (TypeError, ValueError):
        return given
    return found if isinstance(found, dict) else given


def tools_of(given: Any) -> Any:
    """Return tool schemas, which some files hold as JSON in a text. Raises DataError."""
    try:
        tools = json.loads(given) if isinstance(given, str) and given else given
    except ValueError:
        tools = given
    if tools and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise DataError("'tools' is no list of the schemas of functions")
    return tools


def columns_of(names: Sequence[str], column: str) -> tuple[str, ...]:
    """Return the columns that hold the chat, none where there is no known format."""
    if column in names:
        return (column,)
    return next((form for form in FORMS if {*form[:2]} <= {*names}), ())


def chat_of(row: Mapping[str, Any], column: str) -> list[Message]:
    """Return the messages of a row. Raises DataError."""
    first, *others = columns_of([*row], column)
    if not others:
        return messages_of(row[first])
    asked, answered = (row[name] for name in (first, others[0]))
    if row.get("input") and "input" in others:
        asked = f"{asked}\n\n{row['input']}"
    system = [{"role": "system", "content": row["system"]}] if row.get("system") and "system" in others else []
    return messages_of([*system, *_as_messages("user", asked, first), *_as_messages("assistant", answered, others[0])])


def _as_messages(role: str, given: Any, column: str) -> list[Any]:
    """Return the messages of a column: a text, or a list of them already."""
    if not isinstance(given, str | list):
        raise DataError(f"{column!r} is neither a text nor a list of messages")
    return given if isinstance(given, list) else [{"role": role, "content": given}]


def check_columns(names: Sequence[str], where: object, *, column: str) -> None:
    """Raise DataError where there is no chat among the columns."""
    if not columns_of(names, column):
        others = "; ".join(" and ".join(form[:2]) for form in FORMS)
        raise DataError(
            f"{where} has no {column!r}: name the list of messages with data.messages_column, or give {others} (there "
            f"is: {few([*names]) or 'nothing'})"
        )


class Chats(PlainTexts):
    """Chats of a file, each as JSON, with the line that each stands in, and all keys of their messages."""

    def __init__(self, texts: Sequence[str], lines: Sequence[int], *, path: Path, keys: Sequence[str]) -> None:
        super().__init__(texts)
        self.lines, self.path, self.keys = lines, path, keys

    def place(self, index: int) -> str:
        return f"line {self.lines[index]} of {self.path}"

    def cells(self, names: Sequence[str]) -> list[list[Any]]:
        """Return the values of keys of the chats' lines, as `columns.Cells`. Raises DataError."""
        from lockstep.data import tables  # noqa: PLC0415 (imports pyarrow, which a server does without)

        with tables.read_errors(self.path):
            rows = dict(tables.json_rows(self.path, partial(check_named, names)))
        return [[rows[line][name] for line in self.lines] for name in names]

    def part(self, rows: np.ndarray) -> "Chats":
        """Return a selection of the chats, int64 [n] row numbers."""
        texts, lines = [self.texts[row] for row in rows], [self.lines[row] for row in rows]
        part = Chats(texts, lines, path=self.path, keys=self.keys)
        part.remarks = self.remarks
        return part
