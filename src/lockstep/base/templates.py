"""Fills in the Jinja2 templates that lie beside the code."""

from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape


@cache
def _environment() -> Environment:
    return Environment(
        loader=FileSystemLoader(Path(__file__).parents[1]),
        autoescape=select_autoescape(("html", "html.j2"), default=False),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def render(name: str, **values: Any) -> str:
    """The template `name`, a path below src/lockstep, with these values; only HTML is escaped."""
    return _environment().get_template(name).render(values)
