"""Chat templates of tokenizers, as they are given messages in training and in use."""

import random
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import date, datetime, time
from functools import cached_property
from types import SimpleNamespace
from typing import Any

from jinja2 import TemplateSyntaxError

from lockstep.base.errors import DataError, ModelError
from lockstep.data.chat_forms import Message, with_objects

OBJECTS = re.compile(r"\b(arguments|function|call|tool_call)\b['\"\]]*\s*\|\s*(tojson|items)")
"""Pattern of a template that serialises the arguments of tool calls, or iterates over them."""
SHOWN = "Zebra"
"""Content of a probe message."""


@dataclass(frozen=True)
class Template:
    """The chat template of a tokenizer of transformers."""

    tokenizer: Any

    @property
    def text(self) -> str:
        return str(self.tokenizer.chat_template)

    @property
    def asks_for_date(self) -> bool:
        return "strftime_now" in self.text

    @property
    def takes_tools(self) -> bool:
        """Whether the template writes tool schemas."""
        return "tools" in self.text

    @property
    def takes_objects(self) -> bool:
        """Whether the template needs the arguments of tool calls as objects: it would serialise a JSON text twice."""
        return "arguments is string" not in self.text and OBJECTS.search(self.text) is not None

    def render(
        self, messages: Sequence[Message], *, is_prompt: bool = False, on: date | None = None, tools: Any = None
    ) -> str:
        """Return the text of messages; `is_prompt`: up to where the assistant answers; `on`: the date that the template
        is given, by default the current one; `tools`: tool schemas. Raises DataError for messages that the template
        refuses, such as an unknown role."""
        given = [with_objects(each) if "tool_calls" in each and self.takes_objects else each for each in messages]
        if self.takes_parts:
            given = [{**each, "content": _parts(each.get("content"))} for each in given]
        return self._applied(given, is_prompt=is_prompt, on=on, tools=tools)

    @cached_property
    def takes_parts(self) -> bool:
        """Whether the template writes only contents that are lists of parts, as some of vision models do."""
        for content in (SHOWN, _parts(SHOWN)):
            with suppress(DataError):
                if SHOWN in self._applied([{"role": "user", "content": content}], is_prompt=False, on=None, tools=None):
                    return content is not SHOWN
        return False

    def _applied(self, messages: list[Message], *, is_prompt: bool, on: date | None, tools: Any) -> str:
        try:
            with _fixed_environment(on):
                rendered = self.tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=is_prompt, tools=tools
                )
        except MemoryError:
            raise
        except TemplateSyntaxError as error:
            raise ModelError(
                f"line {error.lineno} of the chat template of {self.tokenizer.name_or_path} is not Jinja "
                f"({error.message}): correct its chat_template.jinja, or chat_template in tokenizer_config.json"
            ) from error
        except Exception as error:  # of Jinja, and of transformers
            raise DataError(f"the chat template does not take this chat: {error}") from error
        return str(rendered)


def _parts(content: str | None) -> list[dict[str, str]]:
    return [{"type": "text", "text": content}] if content else []


@contextmanager
def _fixed_environment(day: date | None) -> Iterator[None]:
    """Give templates this date, if there is one, and the same random choices each time. transformers passes no function
    on to a template, so its clock is set."""
    from transformers.utils import chat_template_utils

    theirs: Any = chat_template_utils
    clock, state = theirs.datetime, random.getstate()
    if day is not None:
        theirs.datetime = SimpleNamespace(now=lambda: datetime.combine(day, time()))
    random.seed(0)
    try:
        yield
    finally:
        theirs.datetime = clock
        random.setstate(state)
