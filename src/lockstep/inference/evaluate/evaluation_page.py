"""The page of an evaluation: one file without anything from outside, for a screen of any size, light or dark."""

import base64
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from PIL import Image

from lockstep.base.errors import printable
from lockstep.inference.evaluate import evaluation_table, figures
from lockstep.inference.evaluate.evaluation_report import Misclassified

TEMPLATE = Path(__file__).with_name("page.html")
MOST_PAIRS = 10


def html(found: Mapping[str, Any], wrong: Sequence[Misclassified], *, matrix: str) -> str:
    """The page as text; `matrix` is the picture of the confusion matrix, where there is one."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    bins = found.get("reliability")
    calibration = found.get("calibration")
    page = environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        found=found,
        figures=evaluation_table.rows(found),
        classes=found.get("classes", []),
        matrix=Markup(matrix),  # the drawing has escaped what is in it
        diagram=Markup(figures.reliability(bins, "reliability")) if bins else "",
        calibration=evaluation_table.words(calibration) if calibration else "",
        wrong=[(one, picture(one.columns)) for one in wrong],
    )
    return printable(page)


def picture(columns: Mapping[str, Any]) -> str:
    """An image uint8 [C, H, W] as a data URI; empty where a sample is none, or none that a browser shows."""
    image = columns.get("image")
    if not isinstance(image, np.ndarray) or image.ndim != 3 or len(image) not in (1, 3) or image.dtype != np.uint8:
        return ""
    file = BytesIO()
    Image.fromarray(image[0] if len(image) == 1 else image.transpose(1, 2, 0)).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
