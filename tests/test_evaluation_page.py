"""The page and the figures of an evaluation: whole, and with names and texts of strangers escaped."""

from xml.etree import ElementTree

import numpy as np
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lockstep.data.in_memory import Texts
from lockstep.inference.evaluate import evaluation_page, evaluation_report, evaluation_tensorboard
from lockstep.inference.evaluate import figures as drawing
from lockstep.training.evaluation import Predictions

EVIL = "<script>alert('x')</script> & \ud83d"


def test_names_and_texts_are_escaped():
    predictions = Predictions(2, 2)
    predictions.logits[:] = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    names = ["<b>&\"cat'", "dog</title>"]
    wrong = evaluation_report.worst(
        predictions, Texts([EVIL, "fine"], np.array([0, 0]), names), names, count=2, temperature=1.0
    )
    found = {"data": "<i>d", "checkpoint": "<u>c", "step": 1, "digest": "0", "samples": 2, "metrics": {"<s>": 0.5}}
    html = evaluation_page.html(found | {"classes": evaluation_report.by_class(predictions, names)}, wrong, matrix="")
    assert not [evil for evil in ("<b>&", "<i>d", "<u>c", "<s>", "<script", "dog</title>") if evil in html]
    assert "alert(&#39;x&#39;)" in html
    html.encode()  # half a pair would not


def test_texts_in_tensorboard_are_one_line_each_and_escaped(tmp_path):
    predictions = Predictions(1, 2)
    predictions.logits[:] = torch.tensor([[0.0, 2.0]])
    texts = Texts([f"two\nlines | {EVIL}"], np.array([0]), ["<b>", "b_c"])
    wrong = evaluation_report.worst(predictions, texts, ["<b>", "b_c"], count=1, temperature=1.0)
    evaluation_tensorboard.write(wrong, tmp_path, step=3, data="a|b")
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
