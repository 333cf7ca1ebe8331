"""The HTML page of an evaluation: one file without external resources, for light and dark screens of any size."""

import base64
from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any

import numpy as np
from markupsafe import Markup
from PIL import Image

from lockstep.base.errors import printable
from lockstep.base.templates import render
from lockstep.inference.evaluate import evaluation_table, figures
from lockstep.inference.evaluate.evaluation_report import HighLossSample


def html(results: Mapping[str, Any], worst: Sequence[HighLossSample], *, matrix: str) -> str:
    """Return the page; `matrix` is the SVG of the confusion matrix, or empty."""
    bins = results.get("reliability")
    calibration = results.get("calibration")
    page = render(
        "inference/evaluate/page.html",
        results=results,
        metrics=evaluation_table.rows(results),
        classes=results.get("classes", []),
        matrix=Markup(matrix),  # escaped by the figure
        diagram=Markup(figures.reliability(bins)) if bins else "",
        calibration=evaluation_table.describe_calibration(calibration) if calibration else "",
        worst=[(sample, data_uri(sample.columns)) for sample in worst],
    )
    return printable(page)


def has_picture(columns: Mapping[str, Any]) -> bool:
    """Return whether a sample has an image uint8 [C, H, W] that can be shown."""
    image = columns.get("image")
    return isinstance(image, np.ndarray) and image.ndim == 3 and len(image) in (1, 3) and image.dtype == np.uint8


def data_uri(columns: Mapping[str, Any]) -> str:
    """Return the image uint8 [C, H, W] of a sample as a data: URI; empty for other samples."""
    if not has_picture(columns):
        return ""
    image = columns["image"]
    file = BytesIO()
    Image.fromarray(image[0] if len(image) == 1 else image.transpose(1, 2, 0)).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
