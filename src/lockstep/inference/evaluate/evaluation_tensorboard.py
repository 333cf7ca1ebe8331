"""The samples with the highest loss in TensorBoard: pictures under Images, and a table of all of them under Text."""

from collections.abc import Sequence
from pathlib import Path

from lockstep.base.escaping_console import escape_name
from lockstep.base.templates import as_markdown
from lockstep.inference.evaluate.evaluation_page import has_picture
from lockstep.inference.evaluate.evaluation_report import HighLossSample
from lockstep.observe import event_files

COLUMNS = ("sample", "label", "predicted", "confidence", "loss", "from", "text")


def write(samples: Sequence[HighLossSample], folder: Path, *, step: int, data: str) -> None:
    """Write samples to a run's TensorBoard folder, in place of those of an earlier evaluation of the step.

    Raises OSError.
    """
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.data_compat import migrate_value  # to the form that has a title
    from torch.utils.tensorboard.summary import image

    with event_files.replacing(folder, f"evaluation-{step}") as writer:
        for number, sample in enumerate(samples, 1):
            if has_picture(sample.columns):
                [value] = image(f"worst/{number:02}", sample.columns["image"], dataformats="CHW").value
                value.metadata.display_name = f"worst/{number:02}: {escape_name(_facts(sample))}"
                value.metadata.summary_description = as_markdown(sample.origin)
                writer.file_writer.add_summary(Summary(value=[migrate_value(value)]), step)
        if samples:
            writer.add_text("worst", _table(samples, data), step)


def _facts(sample: HighLossSample) -> str:
    return f"{sample.label}, predicted {sample.predicted}, loss {sample.loss:.3g}"


def _table(samples: Sequence[HighLossSample], data: str) -> str:
    rows = [
        (f"{number:02}", sample.label, sample.predicted, _confidence(sample), f"{sample.loss:.3g}")
        + (sample.origin, sample.text)
        for number, sample in enumerate(samples, 1)
    ]
    lines = [f"The samples with the highest loss in {as_markdown(data)}:", ""]
    return "\n".join([*lines, _row(COLUMNS), _row(["---"] * len(COLUMNS)), *map(_row, rows)])


def _confidence(sample: HighLossSample) -> str:
    return "" if sample.confidence is None else f"{sample.confidence:.2f}"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(as_markdown(cell) for cell in cells)} |"
