"""Text files rendered from Jinja2 templates that lie beside the code, and text within Markdown."""

import re
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape

ROOT = Path(__file__).parents[1]


ENVIRONMENT = Environment(
    loader=FileSystemLoader(ROOT),
    autoescape=select_autoescape(("html", "html.j2"), default=False),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)


def render(name: str, **values: Any) -> str:
    """Render the template at a path below src/lockstep, such as "launch/launchers/slurm.sh.j2"; escapes HTML only."""
    return ENVIRONMENT.get_template(name).render(**values)


def as_markdown(text: str) -> str:
    """Put a text on one line, with Markdown and HTML escaped."""
    return re.sub(r"([\\`*_\[\]<>|&#])", r"\\\1", " ".join(text.split()))
