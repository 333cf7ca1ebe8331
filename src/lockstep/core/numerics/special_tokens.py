"""Names of special tokens in texts: letters where users write them, tokens where a chat template does."""

import json
import re
import secrets
from collections.abc import Callable
from functools import partial
from typing import Any

from tokenizers import Tokenizer

from lockstep.base.errors import DataError

OPEN, CLOSE = "\ufdd0", "\ufdd1"
"""Delimiters of the number of an escaped character."""
MARKS = f"[\uffff{OPEN}{CLOSE}]"
"""Noncharacters that mark texts here and in data.packing; they are replaced in what users write."""


class SpecialTokens:
    """The special tokens of a tokenizer, for texts in which their names are letters."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Give special tokens random aliases: even with split_special_tokens, unigram and word models find their names,
        which are in the vocabulary."""
        state = json.loads(tokenizer.to_str())
        names = [each["content"] for each in state["added_tokens"] if each["special"]]
        self.aliases = {name: secrets.token_hex(16) for name in names}
        for each in state["added_tokens"]:
            each["content"] = self.aliases.get(each["content"], each["content"])
        model = state["model"]
        if isinstance(vocabulary := model["vocab"], dict):
            model["vocab"] = {self.aliases.get(token, token): id for token, id in vocabulary.items()}
        else:
            model["vocab"] = [[self.aliases.get(token, token), score] for token, score in vocabulary]
        if model.get("unk_token") in self.aliases:
            model["unk_token"] = self.aliases[model["unk_token"]]
        self.tokenizer: Tokenizer = Tokenizer.from_str(json.dumps(state))
        """Tokenizer of texts in which aliases stand for special tokens, and names for their letters."""
        longest_first = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True)) or "(?!)"
        self._names = re.compile(longest_first)
        ends = "".join(re.escape(end) for end in sorted({end for name in names for end in (name[0], name[-1])}))
        self._escapes = [re.compile(f"[{ends}]" if ends else "(?!)"), re.compile(f"(?=({longest_first})).", re.DOTALL)]
        """Patterns of the characters to escape in a chat: all that begin or end a name or, for a template that reads
        such characters (</think>), only those at which a whole name begins."""

    def escaped(self, chat: Any, render: Callable[[Any], str]) -> Any:
        """Return a chat in whose rendered text every name of a special token is the template's own. Raises DataError
        where the template looks for such names in messages."""
        for pattern in self._escapes:
            found = in_strings(chat, partial(pattern.sub, lambda each: f"{OPEN}{ord(each[0]):x}{CLOSE}"))
            if found == chat:
                return chat
            plain = render(chat)  # each time: it may tell the time
            try:
                if _unescaped(render(found)) == plain:
                    return found
            except DataError:  # it lacks what the template looks for
                continue
        what = "the chat template reads names of special tokens in what messages say, so they cannot be text there"
        raise DataError(f"{what}: leave them out, or set data.special_tokens_in_text=as_tokens")

    def aliased(self, rendered: str) -> str:
        """Return the rendered text of an escaped chat, or a part of it, as `tokenizer` takes it."""
        return _unescaped(self._names.sub(lambda match: self.aliases[match[0]], rendered))


def without_marks(value: Any) -> Any:
    """Return a value of JSON that users wrote, with U+FFFD in place of marks."""
    return in_strings(value, lambda text: re.sub(MARKS, "\ufffd", text))


def in_strings(value: Any, change: Callable[[str], str]) -> Any:
    """Return a value of JSON with all its texts and keys changed, except roles."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list | tuple):
        return [in_strings(each, change) for each in value]
    if isinstance(value, dict):
        return {change(key): each if key == "role" else in_strings(each, change) for key, each in value.items()}
    return value


def _unescaped(text: str) -> str:
    return re.sub(f"{OPEN}([0-9a-f]+){CLOSE}", lambda match: chr(int(match[1], 16)), text)
