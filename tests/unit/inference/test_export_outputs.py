"""Models that return several tensors, and models in double precision: exported, read back, predicted with."""

import exporting
import pytest
import torch
import torch._dynamo  # transformers imports it, which sets a variable: better here than inside a test
from members import further

from lockstep.base.contracts import DataSpec
from lockstep.base.errors import ModelError
from lockstep.core.modules.outputs import are_equal, logits_of, tensors
from lockstep.inference.export import export_facts
from lockstep.inference.export.export_reader import forward_of
from lockstep.inference.predictor import predictor

CODE = """
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn


@dataclass
class Found:
    size: Tensor
    logits: Tensor


class Pair(NamedTuple):
    size: Tensor
    logits: Tensor


class Several(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.head, self.size = nn.Linear(64, classes), nn.Linear(64, 1)

    def forward(self, batch):
        x = batch["image"].flatten(1).to(self.head.weight.dtype) / 255
        return FORM


def build(options, spec):
    return Several(len(spec.labels))DOUBLE
"""
FORMS = {
    "dict": '{"size": self.size(x), "logits": self.head(x)}',
    "dataclass": "Found(self.size(x), self.head(x))",
    "named tuple": "Pair(self.size(x), self.head(x))",
    "tuple": "(self.head(x), self.size(x))",
}


def several(folder, form, double=""):
    folder.mkdir()
    code = CODE.replace("FORM", FORMS.get(form, form)).replace("DOUBLE", double)
    return exporting.user_case(folder, code, name=f"{folder.name}.py")


@pytest.mark.parametrize("kind", ["pretrained", "state_dict", "torch_export", "onnx"])
@pytest.mark.parametrize("form", ["dict", *(pytest.param(f, marks=pytest.mark.matrix) for f in FORMS if f != "dict")])
def test_outputs_of_any_form_are_exported(tmp_path, form, kind):
    """A graph holds a dict; of other trees it is said that their weights can be exported."""
    case, batch = several(tmp_path / "code", form), exporting.images(6, seed=9)
    if kind in ("onnx", "torch_export") and form != "dict":
        with pytest.raises(
            ModelError, match=r"a tensor, or a dict of tensors, can be written as a graph; export\.kind"
        ):
            case.export(tmp_path / "export", kind)
        return
    case.export(tmp_path / "export", kind)
    with torch.no_grad():
        expected, found = case.logits(batch), forward_of(tmp_path / "export")(batch)
    if kind == "onnx":
        assert list(found) == list(expected) == ["size", "logits"]
        assert all(torch.allclose(found[name], expected[name], atol=1e-5) for name in found)
    else:
        assert len(tensors(found)) == 2 and are_equal(tensors(found), tensors(expected))


@pytest.mark.parametrize("form", FORMS)
def test_what_is_called_logits_is_predicted(tmp_path, form):
    case, batch = several(tmp_path / "code", form), exporting.images(6, seed=9)
    case.export(tmp_path / "export")
    folder = tmp_path / "export"
    if form == "tuple":
        with pytest.raises(ModelError, match="return them as one tensor, or as `logits` among several"):
            predictor(export_facts.read(folder), forward_of(folder), None, device=torch.device("cpu"))
    else:
        found = predictor(export_facts.read(folder), forward_of(folder), None, device=torch.device("cpu"))
        assert torch.equal(found.outputs([*batch["image"].numpy()]), logits_of(case.logits(batch)))


@pytest.mark.parametrize("kind", ["pretrained", "onnx", *further("safetensors", "state_dict", "torch_export")])
def test_weights_in_double_precision_are_kept(tmp_path, kind):
    """fp32 is what is not reduced: a model that is built in float64 is read back bit for bit."""
    case, batch = several(tmp_path / "code", "self.head(x)", double=".double()"), exporting.images(6, seed=9)
    facts = case.export(tmp_path / "export", kind)
    assert case.model.network.head.weight.dtype == torch.float64
    with torch.no_grad():
        found = forward_of(tmp_path / "export")(batch)
    assert found.dtype == torch.float64 and torch.allclose(found, case.logits(batch), atol=1e-12)
    assert facts.agreement.same_weights is (kind not in ("torch_export", "onnx"))


def test_a_forward_pass_that_draws_numbers_is_exported(tmp_path):
    """Read back under the same seed it gives the same; a graph draws others, and is refused."""
    case = several(tmp_path / "code", "self.head(x) + torch.randn(len(x), 1)")
    facts = case.export(tmp_path / "export")
    assert facts.agreement.same_weights and facts.agreement.largest_difference == 0
    with pytest.raises(ModelError, match="draws random numbers can be exported as weights"):
        case.export(tmp_path / "graph", "onnx")


def test_an_output_with_the_name_of_a_column_is_no_graph(tmp_path):
    case = several(tmp_path / "code", '{"image": x, "logits": self.head(x)}')
    case.export(tmp_path / "export")
    with pytest.raises(
        ModelError, match=r"the outputs \['image'\] have the names of columns of the data, which an ONNX"
    ):
        case.export(tmp_path / "graph", "onnx")


RECURRENT = """
from torch import nn


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.GRU(4, 8, batch_first=True), nn.Linear(8, 1)

    def forward(self, batch):
        return self.head(self.layer(batch["steps"])[0].mean(1))


def build(options, spec):
    return Recurrent()
"""


def walks(size, seed=0, length=None):
    return {"steps": torch.randn(size, (length or 5) - seed, 4, generator=torch.Generator().manual_seed(seed))}


@pytest.mark.parametrize("kind", ["onnx", *further("torch_export")])
def test_a_graph_of_one_length_says_what_takes_any(tmp_path, kind):
    case = exporting.user_case(tmp_path, RECURRENT, spec=DataSpec(modality="walks"), batch=walks)
    case.export(tmp_path / "export")
    with pytest.raises(
        ModelError, match=r"A graph may hold samples of one length alone: export\.kind=pretrained takes"
    ):
        case.export(tmp_path / "graph", kind)
