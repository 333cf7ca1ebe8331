"""Values of JSON: dicts, lists, texts and numbers inside each other."""

from collections.abc import Callable
from typing import Any


def with_texts(value: Any, changed: Callable[[str], str]) -> Any:
    """Return a value with every text in it changed, except the keys."""
    if isinstance(value, dict):
        return {key: with_texts(each, changed) for key, each in value.items()}
    if isinstance(value, list):
        return [with_texts(each, changed) for each in value]
    return changed(value) if isinstance(value, str) else value
