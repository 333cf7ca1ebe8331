"""Views of an evaluation: an HTML page, one file without external resources, for light and dark screens of any size;
and the samples with the highest loss in TensorBoard, pictures under Images, and a table of all of them under Text."""

import base64
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup
from PIL import Image

from lockstep.base.errors import printable
from lockstep.base.escaping_console import escape_name
from lockstep.base.templates import as_markdown, render
from lockstep.inference.evaluate import evaluation_table, figures
from lockstep.inference.evaluate.evaluation_report import HighLossSample
from lockstep.observe import event_files

COLUMNS = ("sample", "label", "predicted", "confidence", "loss", "from", "text")


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


def write_tensorboard(samples: Sequence[HighLossSample], folder: Path, *, step: int, data: str) -> None:
    """Write samples to a run's TensorBoard folder, in place of an earlier evaluation of the step. Raises OSError."""
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.data_compat import migrate_value  # to the form that has a title
    from torch.utils.tensorboard.summary import image

    with event_files.replacing(folder, f"evaluation-{step}") as writer:
        for number, sample in enumerate(samples, 1):
            if has_picture(sample.columns):
                [value] = image(f"worst/{number:02}", sample.columns["image"], dataformats="CHW").value
                facts = f"{sample.label}, predicted {sample.predicted}, loss {sample.loss:.3g}"
                value.metadata.display_name = f"worst/{number:02}: {escape_name(facts)}"
                value.metadata.summary_description = as_markdown(sample.origin)
                writer.file_writer.add_summary(Summary(value=[migrate_value(value)]), step)
        if samples:
            writer.add_text("worst", _markdown(samples, data), step)


def _markdown(samples: Sequence[HighLossSample], data: str) -> str:
    rows: list[Sequence[str]] = [COLUMNS, ["---"] * len(COLUMNS)]
    for number, sample in enumerate(samples, 1):
        confidence = "" if sample.confidence is None else f"{sample.confidence:.2f}"
        given = (sample.label, sample.predicted, confidence, f"{sample.loss:.3g}", sample.origin, sample.text)
        rows.append((f"{number:02}", *given))
    lines = [f"| {' | '.join(map(as_markdown, cells))} |" for cells in rows]
    return "\n".join([f"The samples with the highest loss in {as_markdown(data)}:", "", *lines])
