"""The page and the figures of an evaluation: whole, and with names and texts of strangers escaped."""

from xml.etree import ElementTree

import numpy as np
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lockstep.data.in_memory import Texts
from lockstep.inference.evaluate import evaluation_page, evaluation_report
from lockstep.inference.evaluate import figures as drawing
from lockstep.models.objectives._choice import objective_of
from lockstep.training.evaluation import Predictions

EVIL = "<script>alert('x')</script> & \ud83d"


def high_losses(texts, logits):
    """The class and the worst samples of texts whose class is 0."""
    predictions = Predictions(len(logits), rows=lambda *_: None)
    predictions.add(tuple(range(len(logits))), (torch.tensor(logits), torch.zeros(len(logits), dtype=torch.int64)))
    objective = objective_of(texts.spec)
    worst = evaluation_report.worst(
        predictions, texts, texts.spec, objective=objective, count=len(logits), temperature=1.0
    )
    classes = evaluation_report.by_class(objective.fits(predictions.outputs), predictions.targets, texts.spec.labels)
    return classes, worst


def test_names_and_texts_are_escaped():
    names = ["<b>&\"cat'", "dog</title>"]
    classes, wrong = high_losses(Texts([EVIL, "fine"], np.array([0, 0]), names), [[1.0, 0.0], [0.0, 2.0]])
    found = {"data": "<i>d", "checkpoint": "<u>c", "step": 1, "digest": "0", "samples": 2, "metrics": {"<s>": 0.5}}
    html = evaluation_page.html(found | {"classes": classes}, wrong, matrix="")
    assert not [evil for evil in ("<b>&", "<i>d", "<u>c", "<s>", "<script", "dog</title>") if evil in html]
    assert "alert(&#39;x&#39;)" in html
    html.encode()  # half a pair would not


def test_texts_in_tensorboard_are_one_line_each_and_escaped(tmp_path):
    _, wrong = high_losses(Texts([f"two\nlines | {EVIL}"], np.array([0]), ["<b>", "b_c"]), [[0.0, 2.0]])
    evaluation_page.write_tensorboard(wrong, tmp_path, step=3, data="a|b")
    accumulator = EventAccumulator(str(tmp_path))
    accumulator.Reload()
    [event] = accumulator.Tensors("worst/text_summary")
    title, _, _, _, row = event.tensor_proto.string_val[0].decode().split("\n")
    assert event.step == 3 and title == r"The samples with the highest loss in a\|b:"
    start = r"| 01 | \<b\> | b\_c | 0.88 | 2.13 | sample 0 | two lines \| \<script\>alert('x')\</script\> \& "
    assert row.startswith(start), row


def test_pictures_are_whole_and_escaped():
    names = [f'<&"{n}' for n in range(100)]
    matrix = np.random.default_rng(0).integers(0, 9, (100, 100)).tolist()
    assert len(ElementTree.fromstring(drawing.confusion(matrix, names)).findall(".//{*}g/{*}title")) > 5000
    drawn = ElementTree.fromstring(drawing.confusion([[3, 1], [0, 0]], ["a", "b"]))
    assert [text.text for text in drawn.findall(".//{*}g/{*}text") if text.text.isdigit()] == ["3", "1"]
    assert [title.text for title in drawn.findall(".//{*}g/{*}title")] == ["a → a: 3", "a → b: 1"]
    plain = drawing.confusion([[1]], ["$x$ <b>"])
    assert "$x$ &lt;b&gt;" in plain and plain == drawing.confusion([[1]], ["$x$ <b>"])
